"""How far the frontier goes: numbers worked out by hand, and the laws of its moves."""

from __future__ import annotations

import pytest
from host_support import count_launches, unchanged
from window.support import assert_drained, assert_window_laws, both, extended, frontier, make, shown

import sgalloc

# page size, window, C: the frontier without a prefix cache, and with one.
FRONTIERS = [
    (1, 1, 5, 4, 4),
    (1, 2, 5, 3, 3),
    (1, 7, 5, 0, 0),
    (1, 5, 5, 0, 0),
    (2, 1, 4, 2, 2),
    (2, 1, 5, 4, 2),
    (2, 2, 5, 2, 2),
    (2, 3, 7, 4, 2),
    (2, 9, 7, 0, 0),
    (3, 1, 7, 6, 3),
    (3, 2, 7, 3, 3),
    (3, 3, 6, 3, 3),
    (3, 3, 7, 3, 3),
    (3, 4, 10, 6, 3),
    (3, 100, 10, 0, 0),
    (16, 1, 32, 16, 16),
    (16, 1, 33, 32, 16),
    (16, 15, 47, 32, 16),
    (16, 16, 47, 16, 16),
    (16, 16, 48, 32, 32),
    (16, 17, 49, 32, 16),
    (16, 40, 100, 48, 48),
    (16, 64, 50, 0, 0),
    (64, 1, 65, 64, 0),
    (64, 63, 127, 64, 0),
    (64, 64, 127, 0, 0),
    (64, 64, 128, 64, 64),
    (64, 65, 193, 128, 64),
    (64, 1000, 300, 0, 0),
    (128, 1, 128, 0, 0),
    (128, 1, 129, 128, 0),
    (128, 127, 255, 128, 0),
    (128, 128, 256, 128, 128),
    (128, 129, 257, 128, 0),
    (128, 4096, 5000, 896, 896),
]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("ps", "window", "committed", "plain", "shared"), FRONTIERS)
def test_the_frontier_is_where_the_table_says(
    ps: int, window: int, committed: int, plain: int, shared: int, cached: bool
) -> None:
    pages = -(-committed // ps)
    alloc = make(pages, ps, window, prefix_cache=cached)
    handle = extended(alloc, committed)
    before = shown(alloc, handle)
    expected = shared if cached else plain
    assert alloc.evict_window(handle).tolist() == [expected]
    assert frontier(alloc, handle) == expected
    assert both(alloc) == (0, expected // ps)
    # What is left shows the pages that it showed; what went reads 0 token by token.
    assert shown(alloc, handle) == [0] * (expected // ps) + before[expected // ps :]
    row = alloc.window_table[alloc.rows(handle)[0]]
    assert not row[:expected].any()
    assert row[max(0, committed - window) : committed].all(), "the window itself is readable"
    assert_window_laws(alloc)
    alloc.release(handle)
    assert_drained(alloc)


@pytest.mark.parametrize("ps", [1, 2, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 40])
def test_no_page_stays_that_no_token_reads_and_none_goes_that_one_does(
    ps: int, window: int
) -> None:
    alloc = make(-(-120 // ps), ps, window)
    handle = extended(alloc, 1)
    for committed in range(1, 121):
        alloc.extend(handle, committed)
        edge = int(alloc.evict_window(handle)[0])
        assert edge % ps == 0
        # The token at C reads itself and window - 1 before it; the one at C - 1 may be redone.
        assert edge <= max(0, committed - window)
        assert committed - window - edge < ps
        assert not any(shown(alloc, handle)[: edge // ps])
        held = alloc.stats().groups["window"].owned
        assert held == -(-committed // ps) - edge // ps
    assert_window_laws(alloc)


def test_d7_eviction_inside_a_page_gives_whole_pages_back() -> None:
    alloc = make(8, 4, 4, 8)
    handle = extended(alloc, 13)
    seen = [both(alloc)[1]]
    for upto in (6, 8, 6):
        alloc.evict_window(handle, upto=upto)
        seen.append(both(alloc)[1])
    assert seen == [4, 5, 6, 6]
    row = alloc.window_table[alloc.rows(handle)[0], :16]
    assert [at for at in range(16) if row[at]] == list(range(8, 16))
    slots = alloc.slots(handle, 0, 16)
    assert [at for at in range(16) if alloc.full_to_window[slots[at]]] == list(range(8, 16))
    assert_window_laws(alloc)
    alloc.release(handle)
    assert both(alloc) == (8, 8)
    assert_drained(alloc)


def test_the_frontier_never_falls_by_an_eviction() -> None:
    alloc = make(32, 4, 3)
    handle = extended(alloc, 50)
    alloc.evict_window(handle, upto=50)
    assert frontier(alloc, handle) == 48
    for upto in (None, 0, 3, 47, 48):
        with unchanged(alloc):
            assert alloc.evict_window(handle, upto=upto).tolist() == [48]
    alloc.extend(handle, 60)
    assert alloc.evict_window(handle).tolist() == [56]
    assert_window_laws(alloc)


@pytest.mark.parametrize("ps", [1, 2, 3, 16, 64, 128])
def test_upto_goes_to_c_and_no_further(ps: int) -> None:
    alloc = make(6, ps, 1)
    handle = extended(alloc, 2 * ps + 1)
    alloc.reserve(handle, 2 * ps)
    with unchanged(alloc), pytest.raises(ValueError, match=r"upto\[0\].*committed.*: evict"):
        alloc.evict_window(handle, upto=2 * ps + 2)
    assert alloc.evict_window(handle, upto=2 * ps + 1).tolist() == [(2 * ps + 1) // ps * ps]
    assert_window_laws(alloc)


def test_an_eviction_that_moves_nothing_launches_nothing_and_ages_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alloc = make(8, 4, 6)
    handle = extended(alloc, 12)
    alloc.evict_window(handle)
    plan = alloc.plan(decode=(handle, 1))
    calls = count_launches(alloc, monkeypatch)
    alloc.evict_window(handle)
    alloc.evict_window([])
    assert calls["write"] == 0
    alloc.apply(plan)
    plan = alloc.plan(decode=(handle, 1))
    alloc.evict_window(handle, upto=13)
    with pytest.raises(sgalloc.StalePlan):
        alloc.apply(plan)


def test_a_batch_and_arrays_are_taken_as_by_any_verb() -> None:
    alloc = make(64, 4, 4)
    handles = alloc.open(3)
    batch = alloc.batch(handles)
    alloc.extend(batch, [9, 20, 31])
    assert alloc.evict_window(batch).tolist() == [4, 16, 24]
    assert alloc.frontier(batch).tolist() == [4, 16, 24]
    assert alloc.evict_window(handles, upto=[8, 0, 31]).tolist() == [8, 16, 28]
    alloc.decode(batch, 4)
    assert alloc.evict_window(batch, upto=13).tolist() == [12, 16, 28]
    assert_window_laws(alloc)


@pytest.mark.parametrize("ps", [1, 2, 3, 16])
@pytest.mark.parametrize("every", [1, 2, 7, 16, 33])
def test_a_cadence_moves_by_so_many_tokens_at_a_time_and_costs_what_it_says(
    ps: int, every: int
) -> None:
    window, last = 5, 150
    alloc = make(-(-last // ps), ps, window, evict_every=every)
    handle, moves, peak = extended(alloc, 1), [], 0
    for committed in range(1, last + 1):
        alloc.extend(handle, committed)
        before = frontier(alloc, handle)
        after = int(alloc.evict_window(handle)[0])
        assert after in (before, max(0, committed - window) // ps * ps)
        if after != before:
            moves.append(after - before)
        else:
            # It stays only while it is less than `every` behind.
            assert max(0, committed - window) // ps * ps - after < max(every, 1)
        peak = max(peak, alloc.stats().groups["window"].owned)
    step = -(-every // ps) * ps
    assert set(moves) == {step}, "every move is the least whole pages that the cadence allows"
    assert peak <= (window + step + 2 * (ps - 1)) // ps + 1
    if every > ps:
        eager = make(-(-last // ps), ps, window)
        handle = extended(eager, 1)
        for committed in range(1, last + 1):
            eager.extend(handle, committed)
            eager.evict_window(handle)
        held = eager.stats().groups["window"].high_water
        assert alloc.stats().groups["window"].high_water == held + step // ps - 1


def test_a_plan_counts_what_the_cadence_keeps() -> None:
    """With a cadence the pages that stay are no gain: the plan says so before it is tried."""
    eager, lazy = make(16, 4, 4, 5), make(16, 4, 4, 5, evict_every=16)
    for alloc, gain in ((eager, 3), (lazy, 0)):
        handle = extended(alloc, 16)
        plan = alloc.plan(decode=(handle, 8), evict_window=True)
        assert (plan.need["window"], plan.gain["window"]) == (2, gain)
        assert plan.fits is (gain == 3)
    with unchanged(lazy), pytest.raises(sgalloc.OutOfPages) as refused:
        lazy.apply(plan)
    assert (refused.value.group, refused.value.need, refused.value.free) == ("window", 2, 1)
    # A place that is named is not a matter of the cadence.
    lazy.evict_window(handle, upto=12)
    assert lazy.fits(lazy.plan(decode=(handle, 8)))
