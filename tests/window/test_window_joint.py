"""Both groups at once or neither: need, gain and fits against what then happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import count_launches, each_page_size, unchanged
from window.support import assert_window_laws, both, extended, make

import sgalloc

GRIDS = [(full, window) for full in (-1, 0, 1) for window in (-1, 0, 1)]


@each_page_size
@pytest.mark.parametrize(("more_full", "more_window"), GRIDS)
@pytest.mark.parametrize("cached", [False, True])
def test_short_exact_and_spare_in_either_group(
    ps: int, more_full: int, more_window: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes 3 pages in each group; 4 more could leave the window first."""
    alloc = make(8 + 3 + more_full, ps, ps, 8 + 1 + more_window, 4, 12 * ps, prefix_cache=cached)
    first, second = alloc.open(2)
    alloc.extend([first, second], [5 * ps, 3 * ps])
    alloc.evict_window(first, upto=2 * ps)
    assert both(alloc) == (3 + more_full, 3 + more_window)
    grown: dict[str, Any] = {"decode": ([first, second], [ps + 1, 1])}
    plan = alloc.plan(**grown, evict_window=True)
    assert plan.need == {"full": 3, "window": 3} and plan.gain == {"full": 0, "window": 4}
    assert plan.num_new_pages == 6
    assert plan.fits is alloc.fits(plan) is (more_full >= 0)
    without = alloc.plan(**grown)
    assert without.gain == {"full": 0, "window": 0}
    assert without.fits is (more_full >= 0 and more_window >= 0)
    calls = count_launches(alloc, monkeypatch)
    before = both(alloc)
    if without.fits:
        alloc.apply(without)
        assert tuple(np.subtract(before, both(alloc))) == (3, 3)
        assert calls["write"] == 1
    else:
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.apply(without)
        group = "full" if more_full < 0 else "window"
        free = 3 + (more_full if group == "full" else more_window)
        error = refused.value
        assert (error.group, error.need, error.free, error.cached) == (group, 3, free, 0)
        assert group in str(error)
        assert calls["write"] == 0
    assert_window_laws(alloc)


@each_page_size
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_what_leaves_the_window_pays_for_what_comes(ps: int, spare: int) -> None:
    """Eight pages come and six leave: net 2, at one page less, just as many, and one more."""
    alloc = make(40, ps, 1, 8 + 2 + spare, 4, 20 * ps)
    pair = alloc.open(2)
    alloc.extend(pair, 4 * ps)
    # C = 4 pages, window 1: the frontier stays below the page of the last token.
    grown: dict[str, Any] = {"reserve": (pair, [4 * ps, 4 * ps])}
    plan = alloc.plan(**grown, evict_window=True)
    assert (plan.need["window"], plan.gain["window"]) == (8, 6)
    net = plan.need["window"] - plan.gain["window"]
    before = both(alloc)
    assert plan.fits is (net <= before[1]) is (spare >= 0)
    if plan.fits:
        alloc.apply(plan)
        assert before[1] - both(alloc)[1] == net
        assert both(alloc)[1] == spare
        assert alloc.frontier(pair).tolist() == [3 * ps, 3 * ps]
    else:
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.apply(plan)
        assert (refused.value.group, refused.value.need, refused.value.free) == ("window", 2, 1)
    assert_window_laws(alloc)


def test_a_step_may_end_with_more_window_pages_free_than_before() -> None:
    alloc = make(32, 4, 4, 8)
    handle = extended(alloc, 32)
    assert both(alloc)[1] == 0
    plan = alloc.plan(decode=(handle, 1), evict_window=True)
    assert (plan.need["window"], plan.gain["window"], plan.fits) == (1, 7, True)
    alloc.apply(plan)
    assert both(alloc)[1] == 6
    assert_window_laws(alloc)


def test_a_frontier_that_moves_over_shared_pages_alone_ages_plans() -> None:
    alloc = make(20, 2, 2, prefix_cache=True)
    handle = extended(alloc, 8)
    alloc.prefix.publish(handle, list(range(8)))
    older = alloc.plan(reserve=(handle, 0))
    moving = alloc.plan(reserve=(handle, 0), evict_window=True)
    assert moving.gain == {"full": 0, "window": 0}
    alloc.apply(moving)
    assert alloc.frontier(handle).tolist() == [6]
    for plan in (older, moving):
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
            alloc.apply(plan)
    assert_window_laws(alloc)


def test_a_plan_that_moves_nothing_ages_none() -> None:
    alloc = make(20, 2, 2)
    handle = extended(alloc, 8)
    plans = [alloc.plan(reserve=(handle, 0)) for _ in range(2)]
    for plan in plans:
        alloc.apply(plan)


def test_new_requests_fit_by_the_tighter_group_and_what_if_counts_both() -> None:
    alloc = make(10, 4, 4, 6)
    holder = extended(alloc, 12)  # 3 and 3: 7 and 3 are left
    assert alloc.fits([12]) and not alloc.fits([13]) and not alloc.fits([8, 5])
    assert alloc.fits([24], after_releasing=[holder])
    assert not alloc.fits([25], after_releasing=[holder])
    alloc.evict_window(holder)
    assert alloc.fits([20]) and not alloc.fits([21])
    for length in (20, 21):
        (handle,) = alloc.open()
        if length == 21:
            with unchanged(alloc), pytest.raises(sgalloc.OutOfPages, match="window"):
                alloc.extend(handle, length)
        else:
            alloc.extend(handle, length)
        alloc.release(handle)


def test_a_plan_in_a_world_without_some_requests() -> None:
    alloc = make(20, 4, 4, 8)
    staying, going = alloc.open(2)
    alloc.extend([staying, going], [16, 16])
    plan = alloc.plan(decode=([staying, going], [9, 1]))
    assert plan.need == {"full": 4, "window": 4} and not plan.fits
    assert alloc.fits(plan, after_releasing=[going])
    alloc.release(going)
    assert alloc.decode(staying, 9).need == {"full": 3, "window": 3}
    assert both(alloc) == (13, 1)


def test_every_growing_verb_is_refused_as_a_whole_where_the_window_is_short() -> None:
    alloc = make(40, 4, 4, 4)
    first, second = alloc.open(2)
    alloc.extend([first, second], [8, 8])
    calls: list[Any] = [
        lambda: alloc.extend([first, second], [9, 8]),
        lambda: alloc.decode([first, second], 1),
        lambda: alloc.reserve([first, second], [0, 1]),
        lambda: alloc.apply(alloc.plan(reserve=(first, 1))),
    ]
    for call in calls:
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            call()
        assert refused.value.group == "window"
    assert alloc.stats().refusals["OutOfPages"] == len(calls)
    alloc.evict_window(first, upto=4)
    alloc.decode(first, 1)
    assert both(alloc)[1] == 0
    assert_window_laws(alloc)


def test_a_steady_step_is_one_launch_in_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = make(64, 4, 4)
    batch = alloc.batch(alloc.open(4))
    alloc.extend(batch, [4, 8, 11, 15])
    out = np.zeros(4, np.int32)
    calls = count_launches(alloc, monkeypatch)
    for step in range(1, 20):
        alloc.apply(alloc.plan(decode=(batch, 1), evict_window=True), out=out)
        assert calls["write"] == step and not calls["gather"]
        assert_window_laws(alloc)
    assert alloc.stats().groups["window"].owned <= 4 * 3


def test_stats_tell_each_group_by_itself() -> None:
    alloc = make(16, 4, 4, 12)
    handle = extended(alloc, 30)
    alloc.evict_window(handle)
    full, window = alloc.stats().groups["full"], alloc.stats().groups["window"]
    assert (full.total, full.free, full.owned, full.high_water) == (16, 8, 8, 8)
    assert (window.total, window.free, window.owned, window.high_water) == (12, 10, 2, 8)
    alloc.release(handle)
    window = alloc.stats().groups["window"]
    assert (window.free, window.owned, window.high_water) == (12, 0, 8)


def test_a_group_that_is_not_there_is_named() -> None:
    alloc = make(8, 4, 4)
    with pytest.raises(ValueError, match=r"'device'.*'full' and 'window'"):
        alloc.available("device")
    plain = sgalloc.KVAllocator(8, 4, 2, 32, device="cpu")
    with pytest.raises(ValueError, match="window"):
        plain.available("window")
