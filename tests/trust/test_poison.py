"""Poison on the host: where it is, when it comes, and that a writer outside of its row is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import Query, prompt
from trust.poisoned import assert_poison
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc.device.poisoning import POISON, Block, Table, blocks
from sgalloc.trust.debugging import SWITCH

PS = 4


@pytest.fixture(autouse=True)
def _debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


def made(**how: Any) -> sgalloc.KVAllocator:
    window = sgalloc.SlidingWindow(6, 60, slot_map=True)
    return sgalloc.KVAllocator(
        60, PS, 5, 50, device="cpu", page_table=True, window=window, prefix_cache=True, **how
    )


def past(alloc: Any, row: int) -> list[int]:
    """From where on a row holds nothing but poison, in tokens, in each table."""
    found = []
    for table, tokens in ((alloc.req_to_token, 1), (alloc.page_table, PS), (alloc.window_table, 1)):
        other = (table[row] != POISON).nonzero()[0]
        found.append((int(other[-1]) + 1) * tokens if other.size else 0)
    return found


def test_poison_is_no_slot_no_page_and_no_index() -> None:
    assert np.int32(POISON).tobytes() == bytes.fromhex("efbeadde")
    pool = np.zeros(1 << 20)
    with pytest.raises(IndexError, match="-559038737 is out of bounds"):
        pool[[0, POISON]]


def test_new_rows_hold_it_whole_and_the_padding_row_does_not() -> None:
    alloc = made()
    for table in (alloc.req_to_token, alloc.page_table, alloc.window_table):
        assert (table[1:] == POISON).all() and not table[0].any()
    assert not alloc.full_to_window.any(), "the map says 0 where nothing is mapped"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ps", [1, 3, 4])
def test_it_stands_past_every_extent_behind_every_call(name: str, ps: int) -> None:
    seen = 0
    for seed in range(3):
        walk = Walk(make(name, ps), seed)
        for _ in range(60):
            walk.step()
            seen += assert_poison(walk.alloc)
        walk.finish()
        walk.alloc.settle()
        assert assert_poison(walk.alloc) > 0
    assert seen > 1000


def test_a_row_that_shrinks_or_closes_is_poisoned_at_once() -> None:
    alloc = made()
    (one,) = alloc.open().tolist()
    row = int(alloc.rows(one)[0])
    alloc.extend(one, 18)
    assert past(alloc, row) == [20, 20, 20]
    alloc.trim(one, 9)
    assert past(alloc, row) == [12, 12, 12]
    alloc.reserve(one, 9)
    alloc.compact(one, [[10]])
    assert past(alloc, row) == [12, 12, 12]
    alloc.release(one, tokens=prompt(2, PS))
    assert past(alloc, row) == [0, 0, 0]


def test_behind_an_event_it_waits_as_the_row_does() -> None:
    """Whoever the event stands for may still read what was there."""
    alloc, events = made(), [Query(), Query()]
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], [18, 7])
    first, second = alloc.rows([one, other]).tolist()
    held = alloc.req_to_token[first, :20].tolist()
    alloc.trim(one, 5, after=events[0])
    alloc.release(other, after=events[1])
    assert alloc.req_to_token[first, :20].tolist() == held
    assert past(alloc, second) == [8, 8, 8]
    alloc.extend(one, 10)  # it grows again meanwhile
    assert alloc.req_to_token[first, 12:20].tolist() == held[12:]
    events[1].over = True
    alloc.check(device=True)
    assert past(alloc, second) == [8, 8, 8], "nobody has taken it in yet"
    alloc.settle()
    assert past(alloc, second) == [0, 0, 0]
    assert alloc.req_to_token[first, 12:20].tolist() == held[12:]
    events[0].over = True
    alloc.open()
    assert past(alloc, first) == [12, 12, 12]


def test_inside_a_shared_prefix_it_waits_too() -> None:
    """No page goes back then, a lock alone does."""
    alloc, event = made(), Query()
    (one,) = alloc.open().tolist()
    alloc.extend(one, 16)
    alloc.release(one, tokens=prompt(4, PS))
    (one,) = alloc.open_with_prefix(alloc.prefix.match(prompt(4, PS))).tolist()
    row = int(alloc.rows(one)[0])
    alloc.trim(one, 8, after=event)
    assert past(alloc, row) == [16, 16, 16]
    event.over = True
    alloc.settle()
    assert past(alloc, row) == [8, 8, 8]


def test_a_row_that_is_received_and_aborted_keeps_its_entries_until_it_is_back() -> None:
    alloc = made()
    (one,) = alloc.preallocate(10, writers=1).tolist()
    row = int(alloc.rows(one)[0])
    assert past(alloc, row) == [12, 12, 12]
    alloc.abort(one)
    assert past(alloc, row) == [12, 12, 12]
    alloc.acknowledge(one, 0)
    assert past(alloc, row) == [0, 0, 0]


@pytest.mark.parametrize("table", ["req_to_token", "page_table", "window_table"])
@pytest.mark.parametrize("where", ["past A", "the end of the row", "a row that is free"])
def test_a_writer_outside_its_row_is_found(table: str, where: str) -> None:
    alloc = made()
    (one,) = alloc.open().tolist()
    alloc.extend(one, 7)
    row = int(alloc.rows(one)[0])
    entries = getattr(alloc, table)
    column = {"past A": 8 if table != "page_table" else 2}.get(where, entries.shape[1] - 1)
    row = row if where != "a row that is free" else 5
    entries[row, column] = 77
    alloc.check()
    whose = "8 tokens" if row != 5 else "a row that nobody holds"
    words = rf"{table}\[{row}, {column}\] is 77 on the device, written past the extent of {whose}"
    with pytest.raises(sgalloc.LawViolation, match=words):
        alloc.check(device=True)
    with pytest.raises(sgalloc.LawViolation, match=rf"{words}.*found behind call 3, decode"):
        alloc.decode(one)
    entries[row, column] = POISON
    alloc.check(device=True)


def test_where_others_may_still_read_nothing_is_found() -> None:
    alloc = made()
    (one,) = alloc.open().tolist()
    alloc.extend(one, 7)
    row, event = int(alloc.rows(one)[0]), Query()
    alloc.release(one, after=event)
    alloc.req_to_token[row, 30] = 77
    alloc.check(device=True)


def test_large_tables_are_checked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgalloc.trust.poison._ENTRIES_AT_ONCE", 70)
    alloc = made()
    alloc.open(3)
    for row in range(1, 6):
        alloc.window_table[row, 49] = 1
        with pytest.raises(sgalloc.LawViolation, match=rf"window_table\[{row}, 49\] is 1 "):
            alloc.check(device=True)
        alloc.window_table[row, 49] = POISON


def test_behind_a_call_the_rows_of_a_large_table_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sgalloc.trust.poison._ENTRIES_A_CALL", 100)  # two rows of six
    alloc = made()
    (one,) = alloc.open().tolist()
    for row in (3, 4, 5):
        alloc.req_to_token[row, 20] = 5
        with pytest.raises(sgalloc.LawViolation, match=rf"req_to_token\[{row}, 20\]"):
            for _ in range(3):
                alloc.settle()
        alloc.req_to_token[row, 20] = POISON
    alloc.req_to_token[int(alloc.rows(one)[0]), 20] = 5
    with pytest.raises(sgalloc.LawViolation, match="written past"):
        alloc.extend(one, 3)  # rows of the call are looked at in any case


def test_rows_beside_each_other_are_one_block() -> None:
    table = Table("it", np.zeros((9, 10), np.int32), 1)
    pages = Table("pages", np.zeros((9, 3), np.int32), 3)
    rows, start = np.array([1, 2, 3, 5, 6, 7]), np.array([0, 0, 0, 3, 9, 9])
    stop = np.array([10, 10, 10, 6, 9, 10])
    found = [(b.rows, b.columns) for b in blocks([table, pages], rows, start, stop)]
    assert found == [
        ((1, 4), (0, 10)), ((5, 6), (3, 6)), ((7, 8), (9, 10)),
        ((1, 4), (0, 3)), ((5, 6), (1, 2)),
    ]  # fmt: skip
    assert all(isinstance(b, Block) for b in blocks([table], rows, start, stop))
