"""Grants of a tail alone: which pages, on which rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import each_page_size, unchanged
from window.support import (
    assert_drained,
    assert_window_laws,
    both,
    extended,
    frontier,
    make,
    mapped,
    shown,
)

import sgalloc


@pytest.mark.parametrize(("tail", "left"), [(4, 3), (0, 4)])
def test_d8_a_recycled_page_with_a_tail_only_grant(tail: int, left: int) -> None:
    alloc = make(4, 4, 4)
    alloc.release(extended(alloc, 8))
    handle = extended(alloc, 16, window_tail=tail)
    assert both(alloc) == (0, left)
    slots = alloc.slots(handle, 0, 16)
    unmapped = [at for at in range(16) if not alloc.full_to_window[slots[at]]]
    assert unmapped == list(range(16 - tail))
    row = alloc.window_table[alloc.rows(handle)[0], :16]
    assert [at for at in range(16) if not row[at]] == unmapped
    assert_window_laws(alloc)
    alloc.release(handle)
    assert both(alloc) == (4, 4)
    assert_drained(alloc)


@each_page_size
@pytest.mark.parametrize("pages", [0, 1, 3, 5])
def test_window_pages_are_those_of_the_tail_alone(ps: int, pages: int) -> None:
    alloc = make(5, ps, 2 * ps)
    length = 5 * ps - (ps - 1)
    tail = max(0, pages * ps - (ps - 1))
    if not pages:
        length = 5 * ps
    handle = extended(alloc, length, window_tail=tail)
    begin = length - tail
    assert frontier(alloc, handle) == begin
    assert both(alloc) == (0, 5 - pages)
    assert [bool(page) for page in shown(alloc, handle)] == [False] * (5 - pages) + [True] * pages
    assert_window_laws(alloc)
    alloc.release(handle)
    assert_drained(alloc)


def test_the_plan_counts_the_tail_and_not_the_rest() -> None:
    alloc = make(10, 4, 8, 3)
    (handle,) = alloc.open()
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
        alloc.extend(handle, 32)
    assert (refused.value.group, refused.value.need, refused.value.free) == ("window", 8, 3)
    plan = alloc.extend(handle, 32, window_tail=12)
    assert plan.need == {"full": 8, "window": 3}
    assert both(alloc) == (2, 0)
    assert_window_laws(alloc)


def test_a_batch_takes_one_tail_for_all_or_one_each() -> None:
    alloc = make(20, 4, 8)
    handles = alloc.open(3)
    alloc.extend(handles, [16, 10, 8], window_tail=np.array([4, 2, 8]))
    assert alloc.frontier(handles).tolist() == [12, 8, 0]
    assert both(alloc)[1] == 20 - 1 - 1 - 2
    more = alloc.open(2)
    alloc.extend(more, [8, 12], window_tail=4)
    assert alloc.frontier(more).tolist() == [4, 8]
    assert_window_laws(alloc)


def test_a_request_whose_window_is_gone_may_take_a_tail_again() -> None:
    alloc = make(20, 4, 1)
    handle = extended(alloc, 16)
    alloc.evict_window(handle, upto=16)
    alloc.extend(handle, 40, window_tail=8)
    assert frontier(alloc, handle) == 32
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 8 + [True] * 2
    assert_window_laws(alloc)
    # Behind a cut page, too: it is below the tail, and stays without one.
    alloc.evict_window(handle, upto=40)
    alloc.trim(handle, 18)
    alloc.extend(handle, 32, window_tail=4)
    assert both(alloc)[1] == 19
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 7 + [True]
    assert_window_laws(alloc)


def test_no_new_token_takes_a_tail_of_none() -> None:
    alloc = make(8, 4, 1)
    (handle,) = alloc.open()
    alloc.extend(handle, 0, window_tail=0)
    alloc.extend([], [], window_tail=3)
    assert (frontier(alloc, handle), both(alloc)) == (0, (8, 8))
    assert_window_laws(alloc)


def test_the_next_tokens_go_on_from_a_tail() -> None:
    alloc = make(16, 4, 4)
    handle = extended(alloc, 16, window_tail=0)
    alloc.decode(handle, 3)
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 4 + [True]
    alloc.decode(handle, 9)
    assert alloc.evict_window(handle).tolist() == [24]
    assert_window_laws(alloc)


@pytest.mark.parametrize(
    ("lengths", "tail", "error", "naming"),
    [
        ([16, 20], [4, 8], sgalloc.WrongState, "holds 2"),
        ([16, 8], 4, sgalloc.WrongState, "row 2"),
        ([16], 17, ValueError, "window_tail=17"),
        ([16], 3, ValueError, "13 tokens before it"),
        ([17], 4, ValueError, "13 tokens before it"),
        ([17], 0, ValueError, "17 tokens before it"),
        ([16], -1, ValueError, "-1"),
        ([16], 1.5, (TypeError, ValueError), "1.5"),
        ([16], [4, 4], ValueError, "window_tail"),
        ([16], True, (TypeError, ValueError), "True"),
    ],
)
def test_other_tails_are_refused_and_nothing_changes(
    lengths: list[int], tail: Any, error: Any, naming: str
) -> None:
    alloc = make(16, 4, 4)
    handles = alloc.open(2)
    alloc.extend(handles[1], 8)
    with unchanged(alloc), pytest.raises(error) as refused:
        alloc.extend(handles[: len(lengths)], lengths, window_tail=tail)
    assert naming in str(refused.value) and "\n" not in str(refused.value)
    assert ": " in str(refused.value) or "must" in str(refused.value)
    assert_window_laws(alloc)


def test_a_tail_is_longer_than_the_new_tokens_only_by_what_is_committed() -> None:
    alloc = make(16, 4, 4)
    handle = extended(alloc, 8, window_tail=0)
    with unchanged(alloc), pytest.raises(ValueError, match="longer than the 4 new tokens"):
        alloc.extend(handle, 12, window_tail=8)
    alloc.extend(handle, 12, window_tail=4)
    assert_window_laws(alloc)


def test_without_a_window_a_tail_is_refused() -> None:
    alloc = sgalloc.KVAllocator(8, 4, 2, 32, device="cpu")
    (handle,) = alloc.open()
    with unchanged(alloc), pytest.raises(ValueError, match="window=") as refused:
        alloc.extend(handle, 8, window_tail=4)
    assert "window_tail" in str(refused.value)


def test_a_too_narrow_row_is_told_before_pages_and_tails() -> None:
    alloc = make(4, 4, 4, row_width=16)
    (handle,) = alloc.open()
    with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow):
        alloc.extend(handle, 17, window_tail=3)


def test_a_recycled_page_of_the_full_group_leaves_no_entry_behind_below_a_tail() -> None:
    """Every main page is handed out again under another grant; the map shows that one alone."""
    alloc = make(6, 2, 2)
    for round_ in range(6):
        tail = 2 * (round_ % 4)
        handle = extended(alloc, 12, window_tail=tail)
        pages = alloc.pages(handle, 0, 12).tolist()
        assert sorted(mapped(alloc)) == sorted(pages[6 - tail // 2 :])
        assert_window_laws(alloc)
        alloc.release(handle)
        assert_drained(alloc)
