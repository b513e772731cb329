"""The window group against the naive model: known answers for the model, walks, planted faults."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from model.pair import Config, Disagreement, Pair, WindowConfig
from model.reference import Refused
from model.walk import walk
from model.windowed import WindowReference

import sgalloc
from sgalloc import growing
from sgalloc.caching import PrefixCache
from sgalloc.groups import Cut
from sgalloc.groups.window import Window, WindowPart
from sgalloc.plan import SideWrite
from sgalloc.quarantine import Quarantine


def reference(
    num_pages: int,
    page_size: int,
    tokens: int,
    window_pages: int,
    prefix_cache: bool = False,
    evict_every: int = 1,
) -> WindowReference:
    return WindowReference(
        tokens,
        window_pages,
        True,
        evict_every,
        num_pages=num_pages,
        page_size=page_size,
        max_requests=4,
        row_width=num_pages * page_size,
        prefix_cache=prefix_cache,
    )


def extended(ref: WindowReference, length: int, tail: int | None = None) -> int:
    [name] = ref.open()
    ref.grow(extend=([name], [length]), tails=None if tail is None else [tail])  # type: ignore[arg-type]
    return name


# -- known answers -----------------------------------------------------------------------------


def test_eviction_inside_a_page_gives_whole_pages_back() -> None:
    ref = reference(8, 4, 4, 8)
    name = extended(ref, 13)
    seen = [len(ref.side_free)]
    for upto in (6, 8, 6):
        ref.evict_window([name], [upto])
        seen.append(len(ref.side_free))
    assert seen == [4, 5, 6, 6]
    assert sorted(ref.requests[name].window) == [2, 3]
    ref.release([name])
    assert (ref.available(), len(ref.side_free), ref.map) == (8, 8, {})


@pytest.mark.parametrize(("tail", "left"), [(4, 3), (0, 4)])
def test_a_tail_takes_window_pages_for_itself_alone(tail: int, left: int) -> None:
    ref = reference(4, 4, 4, 4)
    ref.release([extended(ref, 8)])
    name = extended(ref, 16, tail)
    assert (len(ref.side_free), ref.requests[name].frontier) == (left, (16 - tail) // 4)
    ref.release([name])
    assert len(ref.side_free) == 4
    ref.check()


@pytest.mark.parametrize(
    ("page_size", "window", "committed", "plain", "cached"),
    [(2, 1, 5, 2, 1), (3, 4, 10, 2, 1), (16, 17, 49, 2, 1), (16, 64, 50, 0, 0), (1, 2, 5, 3, 3)],
)
def test_the_frontier_by_hand(
    page_size: int, window: int, committed: int, plain: int, cached: int
) -> None:
    for prefix_cache, expected in ((False, plain), (True, cached)):
        ref = reference(10, page_size, window, 10, prefix_cache)
        assert ref.evict_window([extended(ref, committed)], None) == [expected * page_size]


def test_a_cut_page_is_taken_by_the_next_token_and_not_before() -> None:
    ref = reference(8, 4, 1, 8)
    name = extended(ref, 24)
    ref.evict_window([name], [24])
    ref.trim([name], [6])
    assert (ref.requests[name].frontier, len(ref.side_free)) == (1, 8)
    assert ref.needs(ref.plan(reserve=([name], [0]))) == {"full": 0, "window": 0}
    assert ref.needs(ref.plan(reserve=([name], [1]))) == {"full": 0, "window": 1}
    ref.check()


def test_a_cadence_waits_until_it_is_far_enough_behind() -> None:
    ref = reference(20, 4, 4, 20, evict_every=9)
    [name] = ref.open()
    moved = []
    for committed in range(1, 33):
        ref.grow(extend=([name], [committed]))
        moved.append(ref.evict_window([name], None)[0])
    assert sorted(set(moved)) == [0, 12, 24] and moved.index(12) == 15


def test_a_match_needs_a_whole_window_and_a_twin_takes_a_page_over() -> None:
    ref = reference(12, 1, 2, 12, prefix_cache=True)
    name = extended(ref, 4)
    ref.evict_window([name], [3])
    ref.release([name], [[1, 2, 3, 4]])
    assert ref.match([1, 2, 3, 4]).nodes == []
    ref.release([extended(ref, 4)], [[1, 2, 3, 4]])
    assert len(ref.match([1, 2, 3, 4]).nodes) == 4
    assert (ref.available(), len(ref.side_free)) == (8, 8)
    ref.check()


def test_a_refusal_names_the_group_and_the_net_need() -> None:
    ref = reference(20, 4, 4, 5)
    name = extended(ref, 16)
    with pytest.raises(Refused) as refused:
        ref.apply(ref.plan(decode=([name], [32]), evict=True))
    assert (refused.value.group, refused.value.numbers) == (
        "window",
        {"need": 5, "free": 1, "cached": 0},
    )
    assert ref.requests[name].frontier == 0


def test_the_model_proves_its_own_laws_of_the_window() -> None:
    for fault, message in (
        (lambda ref, name: ref.side_free.append(1), "window pages is broken"),
        (lambda ref, name: ref.requests[name].window.pop(0), "window pages is broken"),
        (lambda ref, name: setattr(ref.requests[name], "frontier", 1), "outside the extent"),
    ):
        ref = reference(4, 4, 4, 4)
        name = extended(ref, 16)
        fault(ref, name)
        with pytest.raises(AssertionError, match=message):
            ref.check()


# -- walks -------------------------------------------------------------------------------------

# Every page size meets windows below, of and above a page, with and without a cache.
CONFIGS = [
    Config(9, 1, 4, 9, False, WindowConfig(1, 7)),
    Config(12, 1, 4, 10, True, WindowConfig(3, 9)),
    Config(8, 2, 4, 13, False, WindowConfig(1, 6)),
    Config(9, 2, 4, 12, True, WindowConfig(2, 7)),
    Config(10, 2, 5, 16, True, WindowConfig(5, 6, evict_every=4)),
    Config(9, 3, 4, 22, True, WindowConfig(2, 8)),
    Config(9, 3, 3, 24, False, WindowConfig(4, 5, evict_every=6)),
    Config(8, 16, 4, 100, True, WindowConfig(17, 6)),
    Config(8, 16, 4, 96, True, WindowConfig(15, 12, slot_map=False)),
    Config(7, 64, 4, 400, True, WindowConfig(64, 9)),
]
STEPS = 400


@functools.cache
def walked(at: int) -> Pair:
    return walk(1000 + at, STEPS, CONFIGS[at])


@pytest.mark.parametrize("at", range(len(CONFIGS)))
def test_walk(at: int) -> None:
    pair = walked(at)
    assert pair.ref.opened > 10 and not pair.handles
    assert pair.ref.available_in("window", True) == CONFIGS[at].pages_of("window")


def test_walks_met_everything() -> None:
    pairs = [walked(at) for at in range(len(CONFIGS))]
    seen = sum((pair.seen for pair in pairs), Counter())
    assert sum(pair.ref.side_evicted for pair in pairs) > 40
    wanted = ("evict_window", "extend refused: state", "evict_window refused: value",
              "extend refused: value", "apply refused: plan", "apply refused: pages",
              "open_with_prefix", "publish", "release", "trim")  # fmt: skip
    assert [name for name in wanted if seen[name] < 5] == []


# -- planted faults ----------------------------------------------------------------------------

SEEDS, FAULT_STEPS = range(16), 200
FAULT_CONFIGS = (
    Config(9, 2, 4, 12, True, WindowConfig(3, 7)),
    Config(12, 1, 4, 8, True, WindowConfig(1, 12)),
)
FRONTIER, PART, WRITE, CUTTING = Window.frontier, Window.part, Window.write, Window.cutting
GAINED, USABLE, UNMAP, HELD = Window.gained, Window.usable, Quarantine.unmap, Window.held
EVICT = sgalloc.KVAllocator.evict_window


def frontier_of_the_tokens_alone(self: Window, rows: Any, committed: Any, upto: Any = None) -> Any:
    if upto is not None:
        return FRONTIER(self, rows, committed, upto)
    pages = np.maximum(committed - self.tokens, 0) // self._ledger.page_size
    return np.maximum(self.first.take(rows), pages)


def frontier_rounded_up(self: Window, rows: Any, committed: Any, upto: Any = None) -> Any:
    if upto is None:
        return FRONTIER(self, rows, committed)
    size = self._ledger.page_size
    return np.maximum(self.first.take(rows), np.minimum(-(-upto // size), committed // size))


def frontier_that_falls(self: Window, rows: Any, committed: Any, upto: Any = None) -> Any:
    if upto is None:
        return FRONTIER(self, rows, committed)
    return upto // self._ledger.page_size


def cut_page_is_not_taken(self: Window, plan: Any, *args: Any) -> WindowPart:
    part = PART(self, plan, *args)
    held = self._ledger.allocated.take(part.rows) // self._ledger.page_size
    part.begin = np.maximum(part.begin, np.minimum(held, part.end))
    part.need = int((part.end - part.begin).sum())
    return part


def gain_is_not_counted(self: Window, *args: Any) -> WindowPart:
    part = PART(self, *args)
    part.gain = 0
    return part


def shared_pages_are_gained(self: WindowPart) -> Any:
    return np.maximum(np.minimum(self.leave, self.stop) - self.first, 0)


def map_is_not_cleared(self: Window, part: WindowPart, ids: Any) -> SideWrite | None:
    write = WRITE(self, part, ids)
    return None if write is None else write._replace(mains=np.where(write.ids == 0, 0, write.mains))


def table_is_not_cleared(self: Window, part: WindowPart, ids: Any) -> SideWrite | None:
    write = WRITE(self, part, ids)
    return None if write is None else write._replace(places=np.where(write.ids, write.places, -1))


def map_of_the_cache_is_cleared(self: Window, part: WindowPart, ids: Any) -> SideWrite | None:
    write = WRITE(self, part, ids)
    if write is None:
        return None
    return write._replace(mains=self._ledger.pages_flat.take(write.places))


def a_trim_keeps_the_frontier(self: Window, rows: Any, committed: Any, keep: Any) -> Cut:
    cut = CUTTING(self, rows, committed, keep)
    first = np.minimum(self.first.take(rows), keep)
    return cut._replace(marks=(first, np.maximum(cut.marks[1], first)))


def events_are_ignored(self: Any, x: Any, upto: Any = None, after: Any = None) -> Any:
    return EVICT(self, x, upto=upto)


def nothing_is_taken_over(self: Any, node: Any, matched: int, shared: int, sides: Any) -> Any:
    return np.zeros(matched, np.int32)


FAULTS: dict[str, Callable[[], Any]] = {
    "frontier_of_the_tokens_alone": lambda: mock.patch.object(
        Window, "frontier", frontier_of_the_tokens_alone
    ),
    "frontier_rounded_up": lambda: mock.patch.object(Window, "frontier", frontier_rounded_up),
    "frontier_that_falls": lambda: mock.patch.object(Window, "frontier", frontier_that_falls),
    "cut_page_is_not_taken": lambda: mock.patch.object(Window, "part", cut_page_is_not_taken),
    "gain_is_not_counted": lambda: mock.patch.object(Window, "part", gain_is_not_counted),
    "shared_pages_are_gained": lambda: mock.patch.object(
        WindowPart, "back", shared_pages_are_gained
    ),
    "map_is_not_cleared": lambda: mock.patch.object(Window, "write", map_is_not_cleared),
    "table_is_not_cleared": lambda: mock.patch.object(Window, "write", table_is_not_cleared),
    "map_of_the_cache_is_cleared": lambda: mock.patch.object(
        Window, "write", map_of_the_cache_is_cleared
    ),
    "a_trim_keeps_the_frontier": lambda: mock.patch.object(
        Window, "cutting", a_trim_keeps_the_frontier
    ),
    "nothing_is_unmapped": lambda: mock.patch.object(
        Quarantine, "unmap", lambda self, pages, event: None
    ),
    "unmapped_before_its_event": lambda: mock.patch.object(
        Quarantine, "unmap", lambda self, pages, event: UNMAP(self, pages, None)
    ),
    "victims_stay_in_the_map": lambda: mock.patch.object(
        growing, "joined", lambda first, second: first
    ),
    "matches_ignore_the_window": lambda: mock.patch.object(
        Window, "usable", lambda self, sides: sides.size
    ),
    "a_match_needs_all_of_it": lambda: mock.patch.object(
        Window, "usable", lambda self, sides: USABLE(self, sides) if sides.all() else 0
    ),
    "nothing_is_taken_over": lambda: mock.patch.object(PrefixCache, "given", nothing_is_taken_over),
    "dead_pages_are_shown": lambda: mock.patch.object(
        Window, "readable", lambda self, sides: sides
    ),
    "events_are_ignored": lambda: mock.patch.object(
        sgalloc.KVAllocator, "evict_window", events_are_ignored
    ),
}


def difference(seed: int) -> str:
    config = FAULT_CONFIGS[seed % len(FAULT_CONFIGS)]
    # The allocator's own laws are switched off: it is the model that has to see it.
    with mock.patch.object(sgalloc.KVAllocator, "check", lambda self, device=False: None):
        try:
            walk(seed, FAULT_STEPS, config)
        except Disagreement as reported:
            return str(reported)
    return ""


def test_without_a_fault_the_same_walks_agree() -> None:
    assert [difference(seed) for seed in SEEDS] == [""] * len(SEEDS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(name: str) -> None:
    with FAULTS[name]():
        assert any(difference(seed) for seed in SEEDS)
