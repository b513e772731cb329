"""Calls that give back several requests of different states at once: all of them, or none.

With a map every page that goes back is a write, so a call of this kind has something to fail at
for each of its requests, were they not written together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faults.injector import Injector, interrupt, no_memory, plain_failure
from faults.walking import look
from host_support import Query, prompt

import sgalloc

PS = 4
IDS = prompt(5, PS)
KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": sgalloc.SlidingWindow(6, 60, slot_map=True)},
    "window, prefix": {
        "window": sgalloc.SlidingWindow(6, 60, slot_map=True),
        "prefix_cache": True,
    },
    "sparse": {"sparse": sgalloc.Sparse(3, 8, 3)},
    "prefix cache": {"prefix_cache": True},
}


class Scene:
    """Three that run, two to be received, two that were aborted and wait, one behind an event."""

    def __init__(self, kind: str) -> None:
        self.alloc = alloc = sgalloc.KVAllocator(
            90, PS, 12, 96, device="cpu", page_table=True, **KINDS[kind]
        )
        self.event = Query()
        cached = alloc._core.prefix is not None
        self.match = None
        if cached:
            (first,) = alloc.open()
            alloc.extend(first, 20)
            alloc.release(first, tokens=[IDS])
            (second,) = alloc.open()
            alloc.extend(second, 12)
            alloc.release(second, tokens=[prompt(3, PS, seed=1)])
            self.match = alloc.prefix.match(IDS)
        self.running = alloc.open(3)
        alloc.extend(self.running, [20, 10, 7])
        alloc.reserve(self.running[1:], 14)
        (gone,) = alloc.open()
        alloc.extend(gone, 6)
        alloc.release(gone, after=self.event)
        if cached and alloc.has_window:
            # Cached pages whose window pages are gone, and one who has them still.
            (old, self.fresh) = alloc.open(2)
            for one in (old, self.fresh):
                alloc.extend(one, 30)
            alloc.evict_window(old)
            alloc.release(old, tokens=[prompt(7, PS, seed=7)])
        self.received = alloc.preallocate([20, 30], 2, self.match, deadline=[5, 20])
        self.aborted = alloc.preallocate([9, 22], 2, deadline=[5, 6])
        alloc.acknowledge(int(self.aborted[0]), 0)
        alloc.acknowledge(int(self.received[0]), 0)
        alloc.abort(self.aborted)
        self.behind = alloc.preallocate([6], 1, deadline=[7])
        alloc.abort(self.behind, after=self.event)
        if cached:
            # A use between the match and what is opened with it.
            alloc.prefix.match(prompt(3, PS, seed=1))


CALLS: dict[str, Callable[[Scene], Any]] = {
    "reclaim": lambda s: s.alloc.reclaim(6).tolist(),
    "reclaim all": lambda s: s.alloc.reclaim(100).tolist(),
    "force": lambda s: s.alloc.abort([*s.running, *s.received, *s.aborted, *s.behind], force=True),
    "force those gone": lambda s: s.alloc.abort([*s.aborted, *s.behind], force=True),
    "force behind": lambda s: s.alloc.abort([*s.running, *s.aborted], True, after=Query()),
    "abort": lambda s: s.alloc.abort([*s.running, *s.received]),
    "release": lambda s: s.alloc.release([*s.running, *s.received]),
    "release with tokens": lambda s: s.alloc.release(
        [*s.running, *s.received], tokens=[IDS, *[prompt(9, PS, seed=3)] * 2, IDS, IDS]
    ),
    "acknowledge": lambda s: s.alloc.acknowledge(int(s.aborted[0]), 1),
    "the last writer": lambda s: [s.alloc.acknowledge(int(s.received[0]), 1)],
    "preallocate": lambda s: s.alloc.preallocate([24, 21], 1, s.match).tolist(),
    "trim all": lambda s: s.alloc.trim(s.running, 0),
    "compact": lambda s: [part.tolist() for part in s.alloc.compact(s.running[1:], [[11], [7]])],
}
OF_BOTH: dict[str, Callable[[Scene], Any]] = {
    "release what takes over": lambda s: s.alloc.release(s.fresh, tokens=[prompt(7, PS, seed=7)]),
    "publish what takes over": lambda s: s.alloc.prefix.publish(s.fresh, [prompt(7, PS, seed=7)]),
}
OF_CACHE: dict[str, Callable[[Scene], Any]] = {
    "open": lambda s: s.alloc.open_with_prefix([s.match, s.match]).tolist(),
    "publish": lambda s: s.alloc.prefix.publish(s.running[:2], [IDS, prompt(9, PS, seed=4)]),
    "clear": lambda s: s.alloc.prefix.clear(),
}


def calls_of(kind: str) -> list[str]:
    both = OF_BOTH if kind == "window, prefix" else ()
    return [*CALLS, *(OF_CACHE if "prefix" in kind else ()), *both]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in calls_of(kind)]
)
def test_all_of_them_or_none(kind: str, name: str) -> None:
    call = {**CALLS, **OF_CACHE, **OF_BOTH}[name]
    ours, twin = Scene(kind), Scene(kind)
    injector = Injector()
    injector.watch_allocator(ours.alloc)
    said: Any = None
    for k in range(1, 200):
        for make in (plain_failure, no_memory, interrupt):
            before = look(ours.alloc)
            with injector.at(k, make):
                try:
                    said = call(ours)
                except (RuntimeError, MemoryError, KeyboardInterrupt):
                    assert injector.fired is not None
            if injector.fired is None:
                break
            assert look(ours.alloc) == before, f"{injector.fired}, call {k} of {injector.names}"
            ours.alloc.check(device=True)
        if injector.fired is None:
            break
    assert injector.fired is None and k > 1
    assert said == call(twin)
    assert look(ours.alloc) == look(twin.alloc)
    ours.alloc.check(device=True)
    table, other = (np.asarray(a.req_to_token) for a in (ours.alloc, twin.alloc))
    assert table.shape == other.shape
