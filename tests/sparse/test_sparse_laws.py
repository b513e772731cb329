"""check() finds what was damaged in the device group, and says what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from host_support import Query
from sparse.support import assert_whole, logical, make, untouched

import sgalloc

PS = 4


class Sound(NamedTuple):
    """A long, a short, a dense and a logical request, rows 1 to 4, and one that waits."""

    alloc: sgalloc.KVAllocator
    h: list[int]

    @property
    def group(self) -> Any:
        return self.alloc._core.side

    def entry(self, handle: int, number: int) -> Any:
        """The map's entries of a page, to be written to."""
        page = logical(self.alloc, handle)[number]
        return self.alloc.logical_to_device[page * PS : page * PS + PS]


def sound() -> Sound:
    alloc = make(PS, 40, scratch=PS)
    h = alloc.open(5).tolist()
    assert alloc.rows(h).tolist() == [1, 2, 3, 4, 5]
    alloc.extend([h[0], h[1], h[2], h[4]], [26, 7, 9, 8])
    alloc.extend(h[3], 14, logical_only=True)
    alloc.to_sparse(h[:2])
    alloc.release(h[4], after=Query())
    assert_whole(alloc)
    return Sound(alloc, h)


def store(name: str, at: Any, value: Any) -> Callable[[Sound], None]:
    def damage(s: Sound) -> None:
        getattr(s.group, name)[at] = value

    return damage


def copy_page(into: tuple[int, int], out_of: tuple[int, int]) -> Callable[[Sound], None]:
    def damage(s: Sound) -> None:
        s.group.pages[into] = s.group.pages[out_of]

    return damage


def take_free(s: Sound) -> None:
    s.group.pages[1, 0] = s.group.pool.free_ids()[0]


def take_waiting(s: Sound) -> None:
    s.group.pages[2, 0] = s.alloc._core.quarantine.side_ids()[0]


def same_scratch(s: Sound) -> None:
    s.group.scratch_pages[2] = s.group.scratch_pages[1]


def lose_waiting(s: Sound) -> None:
    entry = s.alloc._core.quarantine.entries[0]
    what = entry.what._replace(side_ids=entry.what.side_ids[:1])
    s.alloc._core.quarantine.entries[0] = entry._replace(what=what)


def wrong_holder(s: Sound) -> None:
    s.group.pool.holder[s.group.pages[3, 1]] = 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (store("count", 2, 3), "row 2 breaks 'device pages lie below A'"),
        (store("count", 3, -1), "row 3 breaks 'device pages lie below A'"),
        (store("count", 1, 5), "row 1 breaks 'a sparse row has a buffer and one page at most'"),
        (store("count", 2, 1), "row 2 breaks 'what is mapped is held'"),
        (store("first", 3, 1), "row 3 breaks 'a dense row's device pages are all mapped'"),
        (store("stop", 3, 2), "row 3 breaks 'a dense row's device pages are all mapped'"),
        (store("first", 2, 3), "row 2 breaks '0 <= first <= end of what is mapped'"),
        (store("first", 2, -1), "row 2 breaks '0 <= first <= end of what is mapped'"),
        (store("first", 1, 5), "row 1 breaks 'one page is mapped, of committed tokens'"),
        (store("stop", 1, 8), "row 1 breaks 'one page is mapped, of committed tokens'"),
        (store("has_scratch", 1, False), "row 1 breaks 'a sparse row has its scratch pages'"),
        (store("has_scratch", 3, True), "page 0 does not exist"),
        (store("sparse", 1, False), "row 1 breaks 'a long row is sparse and has a buffer and one'"),
        (
            store("is_long", 1, False),
            "row 1 breaks 'a long row is sparse and has a buffer and one'",
        ),
        (store("is_long", 2, True), "row 2 breaks 'a long row is sparse and has a buffer and one'"),
        (store("sparse", 3, True), "row 3 breaks 'a sparse row has its scratch pages'"),
        (copy_page((1, 0), (1, 1)), "of group 'device' is held by row 1 and by row 1"),
        (copy_page((2, 0), (1, 3)), "of group 'device' is held by row 1 and by row 2"),
        (store("pages", (3, 0), 41), "page 41 does not exist (1..40)"),
        (take_free, "of group 'device' is held by nobody (it is free) and by row 1"),
        (take_waiting, "of group 'device' is held by the quarantine and by row 2"),
        (same_scratch, "of group 'device' is held by row 1 and by row 2"),
        (lose_waiting, "of group 'device' is lost"),
        (wrong_holder, "of group 'device' is with row 3, but recorded with row 1"),
    ],
)
def test_damage_on_the_host(damage: Callable[[Sound], None], says: str) -> None:
    s = sound()
    damage(s)
    with pytest.raises(sgalloc.LawViolation, match=re.escape(says)):
        s.alloc.check()


@pytest.mark.parametrize(
    ("request_", "number", "value"),
    [
        (0, 6, 0),  # the newest page of the long one is not resident
        (0, 6, 9),  # or somewhere else
        (0, 0, 9),  # a page of its buffer is still mapped
        (1, 1, 0),  # a page of the short one is not resident
        (2, 2, 5),  # the dense one reads a page of another
        (3, 0, 7),  # a logical page is mapped
    ],
)
def test_damage_in_the_map(request_: int, number: int, value: int) -> None:
    s = sound()
    s.entry(s.h[request_], number)[1] = value
    at = logical(s.alloc, s.h[request_])[number] * PS + 1
    s.alloc.check()
    with pytest.raises(sgalloc.LawViolation, match=rf"logical_to_device\[{at}\] is {value} on"):
        s.alloc.check(device=True)


def test_an_entry_of_a_free_page_or_of_padding() -> None:
    for page in ("free", 0):
        s = sound()
        free = int(s.alloc._core.pool.free_ids()[0]) if page == "free" else 0
        s.alloc.logical_to_device[free * PS + 3] = 8
        with pytest.raises(sgalloc.LawViolation, match=r"logical_to_device\["):
            s.alloc.check(device=True)


def test_pages_in_quarantine_keep_their_entries_and_then_lose_them() -> None:
    s = sound()
    waiting = s.alloc._core.quarantine.page_ids()
    table = np.asarray(s.alloc.logical_to_device).reshape(-1, PS)
    assert waiting.size == 2 and table[waiting].all()
    s.alloc._core.quarantine.entries[0].event.over = True
    s.alloc.settle()
    assert not table[waiting].any()
    assert_whole(s.alloc)


FAULTS = {
    "no entry is cleared": lambda side, write: write._replace(
        mains=np.where(write.ids == 0, 0, write.mains)
    ),
    "no entry is set": lambda side, write: write._replace(
        mains=np.where(write.ids == 0, write.mains, 0)
    ),
    "entries name the page before": lambda side, write: write._replace(
        ids=np.maximum(write.ids - 1, 0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_map_that_is_kept_wrongly_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = make(PS)
    group: Any = alloc._core.side
    sound_mapping = group._mapping

    def faulty(*args: Any) -> Any:
        write = sound_mapping(*args)
        return None if write is None else FAULTS[fault](group, write)

    monkeypatch.setattr(group, "_mapping", faulty)
    h = alloc.open()
    with pytest.raises(sgalloc.LawViolation, match="logical_to_device"):
        alloc.extend(h, 20)
        alloc.check(device=True)
        alloc.to_sparse(h)
        alloc.check(device=True)


@pytest.mark.parametrize("verb", ["to_sparse", "decode"])
def test_a_failed_write_changes_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can fail comes before the first change of host state."""
    alloc = make(PS, scratch=PS)
    h = alloc.open(2)
    alloc.extend(h, [20, 8])
    if verb == "decode":
        alloc.to_sparse(h)

    def failing(*args: Any) -> None:
        raise MemoryError("no staging memory")

    with monkeypatch.context() as patch:
        patch.setattr(alloc._core.device, "write", failing)
        with untouched(alloc), pytest.raises(MemoryError):
            getattr(alloc, verb)(h)
    getattr(alloc, verb)(h)
    assert_whole(alloc)
