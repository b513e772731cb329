"""The prefix cache beside a window: matches, take-overs and evictions keep what it still needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import Query, each_page_size, prompt, unchanged
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


def leave(alloc: sgalloc.KVAllocator, tokens: np.ndarray, dead: int = 0, **how: Any) -> None:
    """Run a request over ``tokens`` and leave it in the cache, its first ``dead`` pages without
    window pages."""
    handle = extended(alloc, tokens.size)
    alloc.evict_window(handle, upto=dead * alloc.page_size)
    alloc.release(handle, tokens=[tokens], **how)


# page size, window, pages of the prompt, of them dead at the start: the match, in pages.
MATCHES = [
    (1, 1, 5, 0, 5),
    (1, 1, 5, 4, 5),
    (1, 2, 5, 4, 0),
    (1, 3, 8, 4, 8),
    (2, 1, 5, 4, 5),
    (2, 2, 5, 4, 5),
    (2, 3, 5, 4, 0),
    (2, 3, 5, 3, 5),
    (3, 7, 6, 3, 6),
    (3, 7, 6, 4, 0),
    (16, 16, 4, 3, 4),
    (16, 17, 4, 3, 0),
    (16, 17, 4, 2, 4),
    (16, 1000, 4, 0, 4),
    (16, 1000, 4, 1, 0),
    (64, 64, 3, 2, 3),
    (64, 1, 3, 2, 3),
    (128, 129, 3, 1, 3),
    (128, 129, 3, 2, 0),
]


@pytest.mark.parametrize(("ps", "window", "pages", "dead", "match"), MATCHES)
def test_a_match_needs_the_last_window_of_it_alive(
    ps: int, window: int, pages: int, dead: int, match: int
) -> None:
    alloc = make(pages, ps, window, prefix_cache=True)
    leave(alloc, prompt(pages, ps), dead)
    assert both(alloc, counting_cache=True) == (pages, pages)
    assert both(alloc) == (0, dead)
    found = alloc.prefix.match(prompt(pages, ps))
    assert (found.length, found.pages.size) == (match * ps, match)
    assert_window_laws(alloc)


def test_a_match_falls_back_to_a_shorter_prefix_whose_window_is_alive() -> None:
    """Pages 0 and 1 from one request, 4 and 5 from another: 2 and 3 are dead."""
    alloc = make(12, 4, 8, prefix_cache=True)
    tokens = prompt(6, 4)
    leave(alloc, tokens[:8])
    leave(alloc, tokens, dead=4)
    lengths = [alloc.prefix.match(tokens[: 4 * n]).length // 4 for n in range(7)]
    assert lengths == [0, 1, 2, 2, 2, 2, 6]
    assert_window_laws(alloc)


@pytest.mark.parametrize("dead", range(5))
def test_opened_with_a_match_the_frontier_is_behind_its_last_dead_page(dead: int) -> None:
    alloc = make(12, 4, 4, prefix_cache=True)
    leave(alloc, prompt(5, 4), dead)
    (handle,) = alloc.open_with_prefix(alloc.prefix.match(prompt(5, 4)))
    handle = int(handle)
    assert frontier(alloc, handle) == 4 * dead
    assert [bool(page) for page in shown(alloc, handle)] == [False] * dead + [True] * (5 - dead)
    assert both(alloc, counting_cache=True) == (7, 7 + dead), "what it locks is not to be had"
    assert_window_laws(alloc)
    alloc.decode(handle, 9)
    assert alloc.evict_window(handle).tolist() == [max(4 * dead, 24)]
    assert_window_laws(alloc)
    alloc.release(handle)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_an_eviction_below_shared_pages_gives_back_none_of_them() -> None:
    alloc = make(12, 4, 4, prefix_cache=True)
    leave(alloc, prompt(4, 4))
    first, second = alloc.open_with_prefix([alloc.prefix.match(prompt(4, 4))] * 2).tolist()
    entries = mapped(alloc)
    alloc.extend([first, second], [32, 16])
    alloc.evict_window(first)
    assert frontier(alloc, first) == 28
    # Of 28 tokens the first 16 are shared: theirs stay in the cache, and the other reads on.
    assert both(alloc)[1] == 12 - 4 - 1
    assert all(shown(alloc, second)) and not any(shown(alloc, first)[:7])
    assert {page: mapped(alloc)[page] for page in entries} == entries
    assert_window_laws(alloc)
    assert alloc.prefix.match(prompt(4, 4)).length == 16


def test_who_publishes_keeps_a_window_below_its_prefix_for_others() -> None:
    """With a prefix cache the frontier keeps a whole-paged window below C."""
    for ps, window in ((4, 1), (4, 4), (4, 5), (16, 3), (1, 3)):
        alloc = make(12, ps, window, prefix_cache=True)
        tokens = prompt(8, ps)
        handle = extended(alloc, 8 * ps)
        alloc.evict_window(handle)
        alloc.prefix.publish(handle, tokens)
        assert alloc.prefix.match(tokens).length == 8 * ps
        assert_window_laws(alloc)


@pytest.mark.parametrize("verb", ["release", "publish"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dead", [1, 3, 4])
def test_a_cached_twin_that_lost_its_window_page_takes_over_the_new_one(
    verb: str, after: bool, dead: int
) -> None:
    alloc, waits = make(20, 4, 16, prefix_cache=True), Query()
    tokens = prompt(4, 4)
    leave(alloc, tokens, dead)
    assert alloc.prefix.match(tokens).length == 0
    held = dict(mapped(alloc))
    second = extended(alloc, 16)
    mine = shown(alloc, second)
    event = waits if after else None
    if verb == "release":
        alloc.release(second, tokens=[tokens], after=event)
    else:
        alloc.prefix.publish(second, [tokens], after=event)
        assert shown(alloc, second)[:dead] == mine[:dead]
    found = alloc.prefix.match(tokens)
    assert found.length == 16, "the twins are whole again, and can be matched at once"
    window = alloc.stats().groups["window"]
    assert (window.cached, window.quarantined) == (4, (4 - dead) if after else 0)
    entries = mapped(alloc)
    sides = [entries[int(page)] for page in found.pages]
    assert sides == mine[:dead] + list(held.values())
    assert_window_laws(alloc)
    if after:
        assert window.locked == 4, "what waits is neither evictable nor counted"
        assert alloc.available("window", counting_cache=True) == 20 - 4 - (4 - dead)
        waits.over = True
        alloc.settle()
    assert alloc.stats().groups["window"].locked == (4 if verb == "publish" else 0)
    assert_window_laws(alloc)
    if verb == "publish":
        alloc.release(second)
    alloc.prefix.clear()
    assert_drained(alloc)


@pytest.mark.parametrize("verb", ["release", "publish"])
def test_twins_of_one_call_take_over_from_each_other(verb: str) -> None:
    """Three requests of one prompt, each alive in another part: together they are whole."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        alloc = make(30, 4, 24, prefix_cache=True)
        tokens = prompt(6, 4)
        handles = alloc.open(3)
        alloc.extend(handles[0], 24)
        alloc.extend(handles[1], 24)
        alloc.extend(handles[2], 24)
        alloc.evict_window(handles, upto=[16, 8, 0])
        called = handles[order]
        if verb == "release":
            alloc.release(called, tokens=[tokens] * 3)
            assert both(alloc) == (24, 24)
        else:
            alloc.prefix.publish(called, [tokens] * 3)
            assert [shown(alloc, int(h)).count(0) for h in handles] == [4, 2, 0]
            assert len({tuple(alloc.pages(h).tolist()) for h in handles}) == 1
        assert_window_laws(alloc)
        assert alloc.prefix.match(tokens).length == 24
        if verb == "publish":
            alloc.release(handles)
        alloc.prefix.clear()
        assert_drained(alloc)


def test_a_request_without_window_pages_there_takes_none_from_a_twin() -> None:
    alloc = make(20, 4, 4, prefix_cache=True)
    leave(alloc, prompt(4, 4))
    second = extended(alloc, 16)
    alloc.evict_window(second, upto=12)
    alloc.prefix.publish(second, [prompt(4, 4)])
    assert frontier(alloc, second) == 12
    assert [bool(page) for page in shown(alloc, second)] == [False, False, False, True]
    assert both(alloc) == (16, 16)
    assert_window_laws(alloc)


# -- eviction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("short", range(0, 7))
def test_for_the_window_pages_go_one_at_a_time_and_no_further(short: int) -> None:
    """Three cached prompts of two pages, the oldest first; the window group alone is short."""
    alloc = make(40, 4, 4, 10, prefix_cache=True)
    for seed in range(3):
        leave(alloc, prompt(2, 4, seed=seed))
    assert both(alloc) == (34, 4)
    extended(alloc, 4 * (4 + short))
    assert alloc.stats().groups["window"].evicted == short
    assert alloc.stats().groups["full"].evicted == short
    assert both(alloc)[1] == 0
    left = [alloc.prefix.match(prompt(2, 4, seed=seed)).length // 4 for seed in range(3)]
    assert left == [max(0, 2 - short), max(0, min(2, 4 - short)), min(2, 6 - short)]
    assert_window_laws(alloc)


def test_pages_without_a_window_page_go_along_on_the_way_to_those_with_one() -> None:
    alloc = make(40, 4, 4, 6, prefix_cache=True)
    leave(alloc, prompt(2, 4, seed=1))
    # Of the next prompt the last pages were never given a window page: they are leaves.
    (handle,) = alloc.open()
    alloc.extend(handle, 8)
    alloc.prefix.publish(handle, [prompt(2, 4, seed=2)])
    alloc.evict_window(handle, upto=8)
    alloc.extend(handle, 24, window_tail=0)
    tokens = np.concatenate([prompt(2, 4, seed=2), prompt(4, 4, seed=3)])
    alloc.release(handle, tokens=[tokens])
    # Older: 2 pages with window pages. Younger: 2 with, and below them 4 without.
    stats = alloc.stats().groups
    assert (stats["full"].cached, stats["window"].cached) == (8, 4)
    alloc.prefix.match(prompt(2, 4, seed=1))
    extended(alloc, 12)  # 3 window pages; 2 are free, and the oldest leaf is one without
    stats = alloc.stats().groups
    assert stats["window"].evicted == 1
    assert stats["full"].evicted == 5, "four leaves without one, then the page that has one"
    assert_window_laws(alloc)


@pytest.mark.parametrize(("full", "window"), [(3, 0), (0, 3), (2, 3), (3, 2), (3, 3)])
def test_eviction_ends_where_every_shortfall_is_met(full: int, window: int) -> None:
    alloc = make(10 + 5 - full, 4, 4, 10 + 5 - window, max_requests=4, row_width=80,
                 prefix_cache=True)  # fmt: skip
    leave(alloc, prompt(10, 4))
    assert both(alloc) == (5 - full, 5 - window)
    plan = alloc.plan(extend=(alloc.open(), 20))
    assert plan.need == {"full": 5, "window": 5} and plan.fits
    counted = both(alloc, counting_cache=True)
    alloc.apply(plan)
    gone = max(full, window)
    assert [group.evicted for group in alloc.stats().groups.values()] == [gone, gone]
    fall = tuple(np.subtract(counted, both(alloc, counting_cache=True)))
    assert fall == (5, 5)
    assert alloc.prefix.match(prompt(10, 4)).length == 4 * (10 - gone)
    assert_window_laws(alloc)


@pytest.mark.parametrize("more", [0, 1])
def test_a_growth_that_would_not_fit_even_then_evicts_nothing(more: int) -> None:
    alloc = make(40, 4, 4, 8, prefix_cache=True)
    leave(alloc, prompt(4, 4))
    (handle,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, 4)))
    # Free 4; of the four cached ones two are locked.
    assert both(alloc, counting_cache=True) == (38, 6)
    length = 8 + 4 * (6 + more)
    if more:
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.extend(handle, length)
        error = refused.value
        assert (error.group, error.need, error.free, error.cached) == ("window", 7, 4, 2)
    else:
        alloc.extend(handle, length)
        assert both(alloc, counting_cache=True)[1] == 0
    assert_window_laws(alloc)


def test_what_leaves_the_window_counts_before_the_cache_is_asked() -> None:
    alloc = make(40, 4, 4, 12, prefix_cache=True)
    leave(alloc, prompt(4, 4))
    handle = extended(alloc, 32)
    assert both(alloc) == (28, 0)
    plan = alloc.plan(decode=(handle, 24), evict_window=True)
    assert (plan.need["window"], plan.gain["window"]) == (6, 7)
    alloc.apply(plan)
    assert alloc.stats().groups["window"].evicted == 0
    handle = extended(alloc, 12)
    assert alloc.stats().groups["window"].evicted == 2
    assert_window_laws(alloc)


def test_a_match_of_which_a_page_went_for_the_window_is_stale() -> None:
    alloc = make(40, 4, 4, 6, prefix_cache=True)
    leave(alloc, prompt(4, 4))
    match = alloc.prefix.match(prompt(4, 4))
    extended(alloc, 12)
    with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
        alloc.open_with_prefix(match)
    assert alloc.prefix.match(prompt(4, 4)).length == 12


def test_a_take_over_makes_no_older_match_stale() -> None:
    alloc = make(40, 4, 8, prefix_cache=True)
    leave(alloc, prompt(4, 4), dead=2)
    match = alloc.prefix.match(prompt(4, 4))
    leave(alloc, prompt(4, 4))
    (handle,) = alloc.open_with_prefix(match)
    assert frontier(alloc, int(handle)) == 0, "what the twins took over is read, too"
    assert_window_laws(alloc)


@each_page_size
def test_trimmed_into_shared_pages_and_below_the_frontier(ps: int) -> None:
    alloc = make(20, ps, ps, prefix_cache=True)
    leave(alloc, prompt(4, ps))
    (handle,) = alloc.open_with_prefix(alloc.prefix.match(prompt(4, ps)))
    handle = int(handle)
    alloc.extend(handle, 8 * ps)
    alloc.evict_window(handle, upto=7 * ps)
    if ps > 1:
        with unchanged(alloc), pytest.raises(sgalloc.AllocError, match="page edge"):
            alloc.trim(handle, 3 * ps + 1)
    alloc.trim(handle, 3 * ps)
    assert frontier(alloc, handle) == 3 * ps
    assert both(alloc) == (16, 16)
    assert_window_laws(alloc)
    alloc.decode(handle, ps + 1)
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 3 + [True] * 2
    assert_window_laws(alloc)
    alloc.release(handle)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_a_tail_behind_a_prefix_with_window_pages_is_refused() -> None:
    alloc = make(20, 4, 4, prefix_cache=True)
    leave(alloc, prompt(3, 4))
    (handle,) = alloc.open_with_prefix(alloc.prefix.match(prompt(3, 4)))
    with unchanged(alloc), pytest.raises(sgalloc.WrongState, match="holds 3"):
        alloc.extend(handle, 24, window_tail=4)
    alloc.evict_window(handle, upto=12)
    alloc.extend(handle, 24, window_tail=4)
    assert both(alloc) == (14, 20 - 3 - 1)
    assert_window_laws(alloc)


def test_two_namespaces_never_take_over_from_each_other() -> None:
    alloc = make(20, 4, 16, prefix_cache=True)
    leave(alloc, prompt(4, 4), dead=3)
    (handle,) = alloc.open(namespace="other")
    alloc.extend(handle, 16)
    alloc.release(handle, tokens=[prompt(4, 4)])
    assert alloc.prefix.match(prompt(4, 4)).length == 0
    assert alloc.prefix.match(prompt(4, 4), "other").length == 16
    assert_window_laws(alloc)
