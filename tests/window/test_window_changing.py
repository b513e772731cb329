"""Steps look at the requests alone whose window pages change, and miss none of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import sgalloc

CASES = list(itertools.product((1, 2, 3, 16), (1, 2, 5, 16, 40), (1, 2, 7, 16, 33)))


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "prefix cache"])
@pytest.mark.parametrize(("size", "tokens", "every"), CASES)
def test_a_frontier_moves_in_a_plan_when_it_is_due(
    size: int, tokens: int, every: int, cached: bool
) -> None:
    keep = -(-max(tokens, size) // size) * size if cached else tokens
    window = sgalloc.SlidingWindow(tokens, 500, evict_every=every)
    alloc = sgalloc.KVAllocator(
        500, size, 6, 160 // size * size, "cpu", window, prefix_cache=cached
    )
    handles = alloc.open(6)
    alloc.extend(handles, np.arange(1, 7))
    frontier = np.zeros(6, np.int64)  # pages
    rng = np.random.default_rng(size * tokens * every)
    for _ in range(40):
        committed = alloc.committed(handles)
        due = np.maximum(committed - keep, 0) // size
        moves = (due > frontier) & ((due - frontier) * size >= every)
        wanted = np.where(moves, due, frontier)
        # Some requests want pages, some nothing at all.
        more = rng.integers(0, 4, 6) * (rng.random(6) < 0.5)
        held = alloc.allocated(handles) // size
        plan = alloc.plan(reserve=(handles, more), evict_window=True)
        assert plan.gain["window"] == int((wanted - frontier).sum())
        grows = np.maximum(-(-(committed + more) // size), held) - held
        assert plan.need == {"full": int(grows.sum()), "window": int(grows.sum())}
        leaving = alloc.rows(handles[:2])
        assert plan.need_without(leaving) == {
            "full": int(grows[2:].sum()),
            "window": int((grows - wanted + frontier)[2:].sum()),
        }
        alloc.apply(plan)
        frontier = wanted
        assert alloc.frontier(handles).tolist() == (frontier * size).tolist()
        alloc.commit(handles, more)
        alloc.check(device=True)


def test_a_step_in_which_nothing_changes_ages_no_plan_and_writes_nothing() -> None:
    alloc = sgalloc.KVAllocator(60, 16, 4, 160, "cpu", sgalloc.SlidingWindow(16, 60, slot_map=True))
    handles = alloc.open(3)
    alloc.extend(handles, [5, 17, 31])
    table, side = alloc.req_to_token.copy(), alloc.window_table.copy()
    plan = alloc.plan(decode=(handles, 1))
    for _ in range(2):
        idle = alloc.reserve(handles, 1)
        assert (idle.num_new_pages, idle.need, idle.gain) == (
            0,
            {"full": 0, "window": 0},
            {"full": 0, "window": 0},
        )
    np.testing.assert_array_equal(alloc.req_to_token, table)
    np.testing.assert_array_equal(alloc.window_table, side)
    assert alloc.apply(plan).num_new_pages == 0
    assert alloc.committed(handles).tolist() == [6, 18, 32]
    alloc.check(device=True)
