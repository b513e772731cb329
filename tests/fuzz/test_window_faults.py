"""Faults of the window group, which the reference has to see where the laws are switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import sgalloc
from sgalloc import growing
from sgalloc.caching import PrefixCache
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.reference import WindowSettings
from sgalloc.fuzz.walk import run_world
from sgalloc.groups import Cut
from sgalloc.groups.window import Window, WindowPart
from sgalloc.plan import SideWrite
from sgalloc.quarantine import Quarantine

WORLDS, CALLS = range(80), 300
CONFIGS = (
    Config(9, 2, 4, 12, True, WindowSettings(3, 7)),
    Config(12, 1, 4, 8, True, WindowSettings(1, 12)),
    Config(12, 4, 3, 32, False, WindowSettings(1, 12, evict_every=8)),
)
MOVING, PART, WRITE, CUTTING = Window.moving, Window.part, Window.write, Window.cutting
USABLE, UNMAP, INIT = Window.usable, Quarantine.unmap, WindowPart.__init__
EVICT = sgalloc.KVAllocator.evict_window


def frontier_of_the_tokens_alone(self: Window, rows: Any, committed: Any, first: Any) -> Any:
    pages = (committed - self.tokens) // self._ledger.page_size
    return np.where(self.behind(rows, committed), pages, first)


def frontier_behind_the_cadence(self: Window, rows: Any, committed: Any) -> Any:
    size = self._ledger.page_size
    return committed >= (self.first.take(rows) + 1) * size + self._keep


def frontier_rounded_up(self: Window, rows: Any, committed: Any, upto: Any) -> Any:
    if upto is not None:
        size = self._ledger.page_size
        upto = np.minimum(-(-upto // size) * size, committed)
    return MOVING(self, rows, committed, upto)


def frontier_that_falls(self: Window, rows: Any, committed: Any, upto: Any) -> Any:
    if upto is not None:
        pages = upto // self._ledger.page_size
        self._move(rows, np.minimum(self.first.take(rows), pages))
    return MOVING(self, rows, committed, upto)


def cut_pages_are_forgotten(self: Window, *args: Any) -> WindowPart:
    self.cut_rows.clear()
    return PART(self, *args)


def a_page_for_each_row(self: Window, part: WindowPart) -> Any:
    even = part.need == part.rows.size
    return part.rows if even else part.rows.repeat(part.end - part.begin)


def gain_is_not_counted(self: Window, *args: Any) -> WindowPart:
    part = PART(self, *args)
    part.gain = 0
    return part


def shared_pages_are_gained(
    self: WindowPart, rows: Any, first: Any, stop: Any, leave: Any, end: Any, shared: Any, per: Any
) -> None:
    INIT(self, rows, first, stop, leave, end, np.zeros_like(shared), per)


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
        Window, "leaving", frontier_of_the_tokens_alone
    ),
    "frontier_behind_the_cadence": lambda: mock.patch.object(
        Window, "behind", frontier_behind_the_cadence
    ),
    "frontier_rounded_up": lambda: mock.patch.object(Window, "moving", frontier_rounded_up),
    "frontier_that_falls": lambda: mock.patch.object(Window, "moving", frontier_that_falls),
    "cut_pages_are_forgotten": lambda: mock.patch.object(Window, "part", cut_pages_are_forgotten),
    "a_page_for_each_row": lambda: mock.patch.object(Window, "takers", a_page_for_each_row),
    "gain_is_not_counted": lambda: mock.patch.object(Window, "part", gain_is_not_counted),
    "shared_pages_are_gained": lambda: mock.patch.object(
        WindowPart, "__init__", shared_pages_are_gained
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


def difference(number: int) -> str:
    config = CONFIGS[number % len(CONFIGS)]
    # The allocator's own laws are switched off: it is the reference that has to see it.
    with mock.patch.object(sgalloc.KVAllocator, "check", lambda self, device=False: None):
        _, failure = run_world(0, number, config=config, calls=CALLS)
    return "" if failure is None else failure.message


def test_without_a_fault_the_same_walks_agree() -> None:
    assert [difference(number) for number in WORLDS] == [""] * len(WORLDS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(name: str) -> None:
    with FAULTS[name]():
        assert any(difference(number) for number in WORLDS)
