"""Trim with a window: above the frontier, at it, and below it, where a page is cut."""

from __future__ import annotations

import pytest
from host_support import DoneValue, count_launches, each_page_size, unchanged
from window.support import assert_drained, assert_window_laws, both, extended, frontier, make, shown

import sgalloc


@each_page_size
def test_above_the_frontier_whole_pages_past_c_go_back_in_both_groups(ps: int) -> None:
    alloc = make(10, ps, 1)
    handle = extended(alloc, 8 * ps)
    alloc.evict_window(handle, upto=3 * ps)
    kept = shown(alloc, handle)
    alloc.trim(handle, 5 * ps)
    assert (frontier(alloc, handle), both(alloc)) == (3 * ps, (5, 8))
    assert shown(alloc, handle) == kept[:5]
    assert_window_laws(alloc)
    alloc.trim(handle, 3 * ps)
    assert (frontier(alloc, handle), both(alloc)) == (3 * ps, (7, 10))
    alloc.extend(handle, 4 * ps)
    assert both(alloc) == (6, 9)
    assert_window_laws(alloc)


@pytest.mark.parametrize(
    ("ps", "length", "edge"),
    [(2, 5, 4), (3, 1, 0), (3, 8, 6), (16, 17, 16), (16, 31, 16), (64, 1, 0), (128, 255, 128)],
)
def test_below_the_frontier_the_cut_page_is_taken_afresh_by_the_next_token(
    ps: int, length: int, edge: int
) -> None:
    alloc = make(8, ps, 1)
    handle = extended(alloc, 7 * ps)
    alloc.evict_window(handle, upto=6 * ps)
    alloc.trim(handle, length)
    pages = edge // ps + 1
    assert frontier(alloc, handle) == edge
    assert both(alloc) == (8 - pages, 8), "no window page is left: all below was evicted"
    assert not any(shown(alloc, handle))
    assert_window_laws(alloc)
    # Nothing is taken as long as no token comes.
    assert alloc.plan(reserve=(handle, 0)).need == {"full": 0, "window": 0}
    alloc.reserve(handle, 0)
    alloc.commit(handle, 0)
    alloc.extend(handle, length)
    alloc.decode(handle, 0)
    assert both(alloc) == (8 - pages, 8)
    # The next token takes it, and the plan counts it; the full group needs nothing.
    for plan in (alloc.plan(reserve=(handle, 1)), alloc.plan(decode=(handle, 1))):
        assert (plan.need, plan.num_new_pages) == ({"full": 0, "window": 1}, 1)
    alloc.decode(handle, 1)
    assert both(alloc) == (8 - pages, 7)
    assert [bool(page) for page in shown(alloc, handle)] == [False] * (pages - 1) + [True]
    assert_window_laws(alloc)
    alloc.release(handle)
    assert_drained(alloc)


@pytest.mark.parametrize("verb", ["extend", "decode", "reserve", "plan"])
def test_every_growing_verb_takes_the_cut_page_and_its_own(verb: str) -> None:
    alloc = make(8, 4, 1)
    handle = extended(alloc, 24)
    alloc.evict_window(handle, upto=24)
    alloc.trim(handle, 6)
    if verb == "extend":
        plan = alloc.extend(handle, 13)
    elif verb == "plan":
        plan = alloc.apply(alloc.plan(reserve=(handle, 7), evict_window=True))
    else:
        plan = getattr(alloc, verb)(handle, 7)
    assert plan.need == {"full": 2, "window": 3}
    assert [bool(page) for page in shown(alloc, handle)] == [False, True, True, True]
    assert_window_laws(alloc)


@pytest.mark.parametrize("free", [0, 1])
def test_the_cut_page_is_refused_where_the_window_pool_is_empty(free: int) -> None:
    alloc = make(16, 4, 1, 6)
    handle = extended(alloc, 24)
    alloc.evict_window(handle, upto=24)
    extended(alloc, 24 - 4 * free)
    alloc.trim(handle, 6)
    plan = alloc.plan(decode=(handle, 1))
    assert plan.fits is bool(free)
    if free:
        alloc.apply(plan)
        assert both(alloc)[1] == 0
    else:
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.apply(plan)
        assert (refused.value.group, refused.value.need) == ("window", 1)
    assert_window_laws(alloc)


@each_page_size
def test_at_a_page_edge_below_the_frontier_no_page_is_cut(ps: int) -> None:
    alloc = make(8, ps, 1)
    handle = extended(alloc, 7 * ps)
    alloc.evict_window(handle, upto=6 * ps)
    alloc.trim(handle, 2 * ps)
    assert (frontier(alloc, handle), both(alloc)) == (2 * ps, (6, 8))
    assert alloc.plan(decode=(handle, 1)).need == {"full": 1, "window": 1}
    alloc.decode(handle, ps + 1)
    assert both(alloc) == (4, 6)
    assert_window_laws(alloc)


def test_trimmed_to_nothing_it_begins_again_from_nothing() -> None:
    alloc = make(8, 4, 4)
    handle = extended(alloc, 30)
    alloc.evict_window(handle)
    alloc.trim(handle, 0)
    assert (frontier(alloc, handle), both(alloc)) == (0, (8, 8))
    alloc.extend(handle, 9)
    assert both(alloc) == (5, 5) and all(shown(alloc, handle))
    assert_window_laws(alloc)


def test_a_cut_page_that_was_never_taken_leaves_with_the_rest() -> None:
    alloc = make(8, 4, 1)
    handle = extended(alloc, 24)
    alloc.evict_window(handle, upto=24)
    alloc.trim(handle, 7)
    alloc.trim(handle, 5)
    assert_window_laws(alloc)
    assert frontier(alloc, handle) == 4
    alloc.trim(handle, 3)
    assert (frontier(alloc, handle), both(alloc)) == (0, (7, 8))
    assert_window_laws(alloc)
    alloc.release(handle)
    assert_drained(alloc)


def test_the_frontier_moves_on_over_a_cut_page() -> None:
    alloc = make(8, 4, 1)
    handle = extended(alloc, 24)
    alloc.evict_window(handle, upto=24)
    alloc.trim(handle, 6)
    assert alloc.evict_window(handle).tolist() == [4]
    alloc.decode(handle, 4)
    assert alloc.evict_window(handle).tolist() == [8]
    assert both(alloc) == (5, 7)
    assert_window_laws(alloc)


def test_behind_an_event_the_old_pages_wait_while_the_cut_page_is_taken_from_others() -> None:
    alloc = make(8, 4, 1, 8)
    handle = extended(alloc, 32)
    alloc.evict_window(handle, upto=24)
    old = shown(alloc, handle)[6:]
    event = DoneValue()
    alloc.trim(handle, 6, after=event)
    assert both(alloc) == (0, 6)
    assert alloc.stats().groups["window"].quarantined == 2
    alloc.decode(handle, 1)
    assert shown(alloc, handle)[1] not in old
    assert_window_laws(alloc)
    event.over = True
    alloc.settle()
    assert both(alloc) == (6, 7)
    assert_window_laws(alloc)


def test_a_trim_that_cuts_launches_only_where_a_map_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for slot_map in (False, True):
        alloc = make(8, 4, 1, slot_map=slot_map)
        handle = extended(alloc, 24)
        calls = count_launches(alloc, monkeypatch)
        alloc.trim(handle, 20)
        assert calls["write"] == slot_map
        alloc.check(device=True)
