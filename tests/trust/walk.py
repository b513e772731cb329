"""Random calls that can be made on two allocators alike, and everything that they answer."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import numpy as np
from host_support import Query, words_of

import sgalloc

REFUSALS = (sgalloc.AllocError, ValueError)
NAMESPACES = (None, "tenant", b"salt", 7, -(1 << 90), "\ud800é")
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"num_pages": 30},
    "prefix cache": {"num_pages": 30, "prefix_cache": True},
    "window": {"num_pages": 40, "window": (9, 18, False)},
    "window, map": {"num_pages": 40, "window": (5, 18, True, 3)},
    "window, map, prefix": {"num_pages": 40, "window": (6, 22, True), "prefix_cache": True},
    "sparse": {"num_pages": 22, "sparse": (2.5, 7, 3)},
    "sparse, no scratch": {"num_pages": 18, "sparse": (3, 1)},
}
"""What pages are short in, so that calls are refused and cached pages leave."""


def make(name: str, ps: int = 4, device: str = "cpu", roomy: bool = False) -> Any:
    """An allocator, short in pages and rows unless it is ``roomy``."""
    config = dict(CONFIGS[name])
    if "window" in config:
        tokens, pages, *rest = config["window"]
        config["window"] = sgalloc.SlidingWindow(tokens, pages * (5 if roomy else 1), *rest)
    if "sparse" in config:
        config["sparse"] = sgalloc.Sparse(*config["sparse"])
    config["num_pages"] *= 5 if roomy else 1
    return sgalloc.KVAllocator(
        **config,
        page_size=ps,
        max_requests=16 if roomy else 7,
        row_width=20 * ps + ps // 2,
        device=device,
        page_table=True,
    )


class Walk:
    """Calls drawn from a seed and from what public calls answer, on one allocator."""

    def __init__(self, alloc: Any, seed: int, events: bool = True) -> None:
        self.alloc = alloc
        self.random = random.Random(seed)
        self.text: dict[int, list[int]] = {}
        """Token ids of each open request, in order of opening."""
        self.ever = [0, -4]
        self.pinned: list[int] = []
        self.events: list[Query] = []
        self.with_events = events
        self.names: tuple[Any, ...] = NAMESPACES
        self.now = 0
        self.ps = alloc.page_size
        self.cache = alloc._core.prefix is not None
        self.sparse = not self.cache and "logical" in alloc.stats().groups

    def twin(self, alloc: Any) -> Walk:
        """The same walk, to be continued on another allocator; every event has to be over."""
        assert all(event.over for event in self.events)
        other = Walk(alloc, 0, self.with_events)
        other.random.setstate(self.random.getstate())
        other.text, other.ever = deepcopy(self.text), list(self.ever)
        other.pinned, other.now = list(self.pinned), self.now
        return other

    def finish(self) -> None:
        """Let all events be over."""
        for event in self.events:
            event.over = True

    def step(self) -> str:
        """One call; what it said, or how it was refused."""
        names = ["open", "extend", "extend", "decode", "reserve", "commit", "trim", "release",
                 "preallocate", "acknowledge", "acknowledge", "abort", "reclaim", "plan", "event",
                 "compact"]  # fmt: skip
        names += ["match", "match", "publish", "release_into", "clear"] if self.cache else []
        names += ["evict", "evict"] if self.alloc.has_window else []
        names += ["to_sparse", "to_sparse"] if self.sparse else []
        name = self.random.choice(names)
        try:
            return f"{name}: {getattr(self, name)()!r}"
        except REFUSALS as refusal:
            return f"{name}: {type(refusal).__name__}: {words_of(refusal)}"

    # -- the calls -------------------------------------------------------------------------

    def open(self) -> Any:
        new = self.alloc.open(self.random.randint(1, 2), self.name(self.names))
        return self.enter(new, [])

    def match(self) -> Any:
        ids = self.ids()
        match = self.alloc.prefix.match(ids, self.name(self.names[:3]))
        if self.random.random() < 0.3:
            return match.pages.tolist()
        return match.pages.tolist(), self.enter(self.alloc.open_with_prefix(match), ids)

    def preallocate(self) -> Any:
        rng, match, ids, how = self.random, None, self.ids(), {}
        if self.cache and rng.random() < 0.6:
            match = self.alloc.prefix.match(ids, self.name(self.names[:3]))
        length = (0 if match is None else match.length) + rng.randint(0, 5 * self.ps)
        if self.alloc.has_window and rng.random() < 0.6:
            length = length // self.ps * self.ps
            how["window_tail"] = min(length, rng.choice((2, 3)) * self.ps)
        if self.sparse and rng.random() < 0.5:
            how["logical_only"] = True
        deadline = rng.choice((None, self.now + 5, self.now + 9.5, 1 << 80, float("inf")))
        new = self.alloc.preallocate([length], rng.randint(1, 3), match, deadline, **how)
        self.pinned += new.tolist()
        return self.enter(new, ids)

    def acknowledge(self) -> Any:
        handle = self.random.choice(self.pinned or self.ever)
        return self.alloc.acknowledge(handle, self.random.randint(0, 2))

    def abort(self) -> Any:
        x = [self.random.choice(self.ever) for _ in range(2)]
        self.alloc.abort(x, self.random.random() < 0.2, self.event_after())
        return [self.text.pop(handle, None) and None for handle in dict.fromkeys(x)]

    def reclaim(self) -> Any:
        self.now += self.random.randint(0, 4)
        back = self.alloc.reclaim(self.now).tolist()
        for handle in back:
            self.text.pop(handle, None)
        return back

    def extend(self) -> Any:
        x, rng, how = self.some(), self.random, {}
        c = self.alloc.committed(x)
        more = [rng.randint(0, 2 * self.ps) for _ in x]
        if self.sparse and rng.random() < 0.4:
            how["logical_only"] = True
        out = self.empty(sum(more))
        plan = self.alloc.extend(x, c + np.array(more, np.int64), out=out, **how)
        return listed(out), plan.need, plan.gain

    def decode(self) -> Any:
        return self.alloc.decode(self.some(), 1).nxt.tolist()

    def reserve(self) -> Any:
        return self.alloc.reserve(self.some(), self.random.randint(0, 2 * self.ps)).nxt.tolist()

    def commit(self) -> Any:
        x = self.some()
        room = self.alloc.allocated(x) - self.alloc.committed(x)
        return self.alloc.commit(x, [self.random.randint(0, int(n) + 1) for n in room])

    def compact(self) -> Any:
        x = self.some()[:1]
        if not x:
            return None
        c, a = int(self.alloc.committed(x)[0]), int(self.alloc.allocated(x)[0])
        taken = sorted(self.random.sample(range(c, a), min(2, a - c)))
        return [listed(part) for part in self.alloc.compact(x, [taken], self.event_after())]

    def plan(self) -> Any:
        x = self.some()
        evict = self.alloc.has_window and self.random.random() < 0.7
        plan = self.alloc.plan(decode=(x[::2], 1), reserve=(x[1::2], self.ps), evict_window=evict)
        said = plan.need, plan.gain, plan.fits, self.alloc.fits(plan, x[:1])
        return said, self.alloc.apply(plan).nxt.tolist()

    def trim(self) -> Any:
        x = self.some()
        c = self.alloc.committed(x)
        upto = [int(n) - self.random.choice((0, 1, self.ps)) for n in c]
        return self.alloc.trim(x, [max(n, 0) for n in upto], self.event_after())

    def evict(self) -> Any:
        return self.alloc.evict_window(self.some(), after=self.event_after()).tolist()

    def to_sparse(self) -> Any:
        return self.alloc.to_sparse(self.some(), self.event_after())

    def publish(self) -> Any:
        x = self.some()
        return self.alloc.prefix.publish(x, [self.text[h] for h in x], self.event_after())

    def release(self) -> Any:
        x = self.some()
        self.alloc.release(x, after=self.event_after())
        return [self.text.pop(handle) and None for handle in x]

    def release_into(self) -> Any:
        x = self.some()
        self.alloc.release(x, tokens=[self.text[h] for h in x], after=self.event_after())
        return [self.text.pop(handle) and None for handle in x]

    def clear(self) -> Any:
        return self.alloc.prefix.clear() if self.random.random() < 0.2 else None

    def event(self) -> Any:
        pending = [event for event in self.events if not event.over]
        if pending:
            self.random.choice(pending).over = True
        return self.alloc.settle()

    # -- inside ----------------------------------------------------------------------------

    def event_after(self) -> Query | None:
        # Drawn in any case, so that a walk without events makes the same calls otherwise.
        if self.random.random() < 0.6 or not self.with_events:
            return None
        self.events.append(Query())
        return self.events[-1]

    def empty(self, size: int) -> Any:
        """Where slots go, on the allocator's device."""
        if self.alloc.device == "cpu":
            return np.empty(size, np.int64)
        import cupy

        return cupy.empty(size, cupy.int64)

    def enter(self, new: Any, ids: list[int]) -> Any:
        for handle in new.tolist():
            own = ids or self.ids()
            self.text[handle] = own
            self.ever.append(handle)
        return new.tolist()

    def ids(self) -> list[int]:
        """Twenty pages and more of one of two families, which branch on page edges and inside."""
        start, branch = self.random.randint(0, 1) * 1000, self.random.randint(0, 2)
        at = self.random.choice((2 * self.ps, 3 * self.ps, 5 * self.ps + 1))
        return [start + n + (n >= at) * 100_000 * branch for n in range(21 * self.ps)]

    def name(self, among: tuple[Any, ...]) -> Any:
        """The namespace of the next call that takes one."""
        return self.random.choice(among)

    def some(self) -> list[int]:
        known = list(self.text)
        return self.random.sample(known, self.random.randint(0, min(3, len(known))))


def listed(array: Any) -> list[int]:
    """An array of either device as a list."""
    if not isinstance(array, np.ndarray):
        import cupy

        array = cupy.asnumpy(array)
    return array.tolist()


def visible(alloc: Any) -> dict[str, Any]:
    """All that public calls tell, and every table entry that the laws are about."""
    found: dict[str, Any] = {
        "digest": alloc.digest(),
        "owners": alloc.owners().tolist(),
        "refusals": dict(alloc.stats().refusals),
        "stats": {name: group for name, group in alloc.stats().groups.items()},
        "rows": alloc.stats().rows,
    }
    rows = alloc._ledger.live()
    table, pages = np.asarray(alloc.req_to_token), np.asarray(alloc.page_table)
    for handle in alloc._ledger.handle.take(rows).tolist():
        row, held = int(alloc.rows(handle)[0]), int(alloc.allocated(handle)[0])
        shown = [table[row, :held].tolist(), pages[row, : held // alloc.page_size].tolist()]
        shown += [alloc.committed(handle).tolist(), alloc.decode_index(handle).tolist()]
        seen = alloc.receiving(handle)
        shown += [] if seen is None else [seen.acks, seen.deadline, seen.length, seen.writers]
        if alloc.has_window:
            shown.append(np.asarray(alloc.window_table)[row, :held].tolist())
            shown.append(alloc.frontier(handle).tolist())
        if "logical" in alloc.stats().groups:
            shown.append(alloc.buffer_pages(handle).tolist())
            shown.append(alloc.device_pages(handle).tolist())
        found[str(handle)] = shown
    return found
