"""`full_to_window`, and window pages that wait behind events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from host_support import DoneMethod, DoneValue, Query, each_page_size, prompt, unchanged
from window.support import assert_drained, assert_window_laws, both, extended, make, mapped, shown

import sgalloc

each_event = pytest.mark.parametrize("event", [Query, DoneValue, DoneMethod])


def links(alloc: sgalloc.KVAllocator, handle: int) -> dict[int, int]:
    """The pages of one request and the window pages beside them."""
    pages = alloc.pages(handle, 0, int(alloc.allocated(handle)[0])).tolist()
    return {page: side for page, side in zip(pages, shown(alloc, handle), strict=True) if side}


@each_page_size
def test_the_map_has_an_entry_for_every_slot_and_0_where_nothing_is_mapped(ps: int) -> None:
    alloc = make(7, ps, 1, 9)
    assert alloc.full_to_window.shape == (8 * ps,)
    assert str(alloc.full_to_window.dtype) == "int32" and not alloc.full_to_window.any()
    first, second = extended(alloc, 3 * ps), extended(alloc, 2 * ps)
    assert mapped(alloc) == {**links(alloc, first), **links(alloc, second)}
    slots, beside = alloc.slots(first, 0, 3 * ps), alloc.window_table[alloc.rows(first)[0]]
    assert (alloc.full_to_window[slots] == beside[: 3 * ps]).all()
    assert not alloc.full_to_window[:ps].any(), "the padding page is never mapped"
    alloc.evict_window(first, upto=2 * ps)
    assert mapped(alloc) == {**links(alloc, first), **links(alloc, second)}
    assert len(mapped(alloc)) == 3
    alloc.trim(second, ps)
    assert len(mapped(alloc)) == 2
    alloc.release([first, second])
    assert_drained(alloc)


@each_page_size
def test_recycled_pages_never_leave_a_stale_entry(ps: int) -> None:
    """Pages of both groups come back in every order and in every way, and meet others."""
    alloc = make(9, ps, ps, 8)
    for turn in range(12):
        a, b = extended(alloc, 3 * ps), extended(alloc, 2 * ps + 1 if ps > 1 else 2)
        alloc.evict_window(a, upto=(turn % 4) * ps)
        alloc.trim(a, (3 - turn % 3) * ps)
        c = extended(alloc, 2 * ps, window_tail=(turn % 3) * ps)
        assert mapped(alloc) == {**links(alloc, a), **links(alloc, b), **links(alloc, c)}
        assert_window_laws(alloc)
        alloc.release([b, a, c] if turn % 2 else [c, a, b])
        assert_drained(alloc)


@each_event
def test_what_left_the_window_is_cleared_at_once_and_its_page_waits(
    event: Callable[[], Any],
) -> None:
    alloc, waits = make(9, 4, 1, 8), event()
    handle = extended(alloc, 32)
    left = shown(alloc, handle)[:6]
    alloc.evict_window(handle, upto=24, after=waits)
    assert len(mapped(alloc)) == 2
    window = alloc.stats().groups["window"]
    assert (window.free, window.quarantined, window.owned) == (0, 6, 2)
    assert_window_laws(alloc)
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages, match="window"):
        alloc.decode(handle, 1)
    waits.over = True
    alloc.settle()
    assert both(alloc) == (1, 6)
    assert sorted(alloc._core.side.pool.free_ids().tolist()) == sorted(left)
    assert_window_laws(alloc)


@each_event
@pytest.mark.parametrize("verb", ["trim", "release"])
def test_quarantined_pages_keep_their_place_in_the_map_until_their_event_is_done(
    verb: str, event: Callable[[], Any]
) -> None:
    alloc, waits = make(8, 4, 1), event()
    handle = extended(alloc, 16)
    entries = mapped(alloc)
    if verb == "trim":
        alloc.trim(handle, 4, after=waits)
    else:
        alloc.release(handle, after=waits)
    assert mapped(alloc) == entries, "whoever still reads these slots finds them"
    waiting = alloc.stats().groups["window"].quarantined
    assert waiting == (3 if verb == "trim" else 4)
    assert_window_laws(alloc)
    other = extended(alloc, 8)
    assert not set(links(alloc, other).values()) & set(entries.values())
    assert_window_laws(alloc)
    waits.over = True
    alloc.settle()
    assert len(mapped(alloc)) == (3 if verb == "trim" else 2)
    assert_window_laws(alloc)


def test_several_events_come_back_each_by_itself() -> None:
    alloc, first, second = make(12, 4, 1), Query(), Query()
    a, b = extended(alloc, 16), extended(alloc, 16)
    alloc.release(a, after=first)
    alloc.evict_window(b, upto=8, after=second)
    alloc.trim(b, 12, after=first)
    assert alloc.stats().groups["window"].quarantined == 4 + 2 + 1
    second.over = True
    alloc.settle()
    assert alloc.stats().groups["window"].quarantined == 4 + 1
    assert_window_laws(alloc)
    first.over = True
    alloc.settle()
    assert alloc.stats().groups["window"].quarantined == 0
    assert both(alloc) == (12 - 3, 12 - 1)
    assert_window_laws(alloc)


def test_an_event_that_is_done_waits_for_nothing() -> None:
    alloc = make(8, 4, 1)
    handle = extended(alloc, 16)
    alloc.evict_window(handle, upto=8, after=Query(over=True))
    assert both(alloc)[1] == 6
    assert alloc.stats().groups["window"].quarantined == 0


def test_what_waits_can_be_neither_evicted_nor_granted() -> None:
    alloc, waits = make(8, 4, 4, 4), Query()
    handle = extended(alloc, 16)
    alloc.evict_window(handle, after=waits)
    plan = alloc.plan(decode=(handle, 1))
    assert not plan.fits
    waits.over = True
    assert not alloc.fits(plan), "nobody polled yet"
    alloc.decode(handle, 1)
    assert_window_laws(alloc)


def test_an_event_that_cannot_be_polled_is_refused_before_anything_moves() -> None:
    alloc = make(8, 4, 1)
    handle = extended(alloc, 16)
    with unchanged(alloc), pytest.raises(TypeError):
        alloc.evict_window(handle, after="later")


def test_without_a_map_there_is_none_and_all_else_is_the_same() -> None:
    alloc = make(8, 4, 4, slot_map=False)
    handle = extended(alloc, 20)
    assert alloc.evict_window(handle).tolist() == [16]
    with pytest.raises(ValueError, match="slot_map=True"):
        _ = alloc.full_to_window
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 4 + [True]
    alloc.check(device=True)
    alloc.release(handle)
    assert both(alloc) == (8, 8)


def test_without_a_window_there_is_no_table_and_no_eviction() -> None:
    alloc = sgalloc.KVAllocator(8, 4, 2, 32, device="cpu")
    (handle,) = alloc.open()
    alloc.extend(handle, 8)
    calls: list[Callable[[], Any]] = [
        lambda: alloc.window_table,
        lambda: alloc.full_to_window,
        lambda: alloc.frontier(handle),
        lambda: alloc.evict_window(handle),
        lambda: alloc.plan(decode=(handle, 1), evict_window=True),
    ]
    for call in calls:
        with unchanged(alloc), pytest.raises(ValueError, match="window="):
            call()


@pytest.mark.parametrize("after", [False, True])
def test_cached_pages_keep_their_entries_until_they_are_evicted(after: bool) -> None:
    alloc, waits = make(8, 4, 4, prefix_cache=True), Query()
    handle = extended(alloc, 16)
    entries = mapped(alloc)
    alloc.release(handle, tokens=[prompt(3, 4)], after=waits if after else None)
    kept = dict(list(entries.items())[:3])
    assert mapped(alloc) == (entries if after else kept)
    waits.over = True
    alloc.settle()
    assert mapped(alloc) == kept
    assert_window_laws(alloc)
    assert alloc.prefix.clear() == 3
    assert_drained(alloc)


def test_a_cached_page_evicted_for_the_full_group_takes_its_entry_along() -> None:
    alloc = make(8, 4, 4, 20, prefix_cache=True)
    handle = extended(alloc, 16)
    alloc.release(handle, tokens=[prompt(4, 4)])
    # Six pages of eight, two of which leave the cache and come back as pages of the tail or
    # of the part before it, which is mapped nowhere.
    handle = extended(alloc, 24, window_tail=4)
    assert len(mapped(alloc)) == 2 + 1
    assert_window_laws(alloc)
