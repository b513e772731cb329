"""preallocate with a window: which pages of it, by hand, and when they come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import Query, cached, count_launches, make, prompt, unchanged
from transfer.group_support import (
    Alloc,
    assert_nothing_held,
    granted,
    links,
    numbers,
    windowed,
)

import sgalloc
from sgalloc.sizing import window_tail

PS, WINDOW = 4, 8

# Pages of 4, a window of 8. Prefix cache, tokens, matched pages: the tail; pages taken in the full
# and in the window group; the frontier afterwards.
GRANTS = [
    # Without a cache the tail begins at the page floor of L - 8: 12, 12, and 0.
    (False, 20, 0, 8, 5, 2, 12),
    (False, 21, 0, 9, 6, 3, 12),
    (False, 5, 0, 5, 2, 2, 0),
    (False, 0, 0, 0, 0, 0, 0),
    # With one at the page floor of L - 9: 8 for 20 tokens, 12 for 21 to 24.
    (True, 20, 0, 12, 5, 3, 8),
    (True, 21, 0, 9, 6, 3, 12),
    # A match that ends below the tail: page 1 is in neither, and has no window page.
    (True, 20, 1, 12, 4, 3, 8),
    # At the edge of the match.
    (True, 20, 2, 12, 3, 3, 8),
    # Inside the match: page 2 is shared with its window page.
    (True, 20, 3, 12, 2, 2, 8),
    (True, 20, 4, 12, 1, 1, 8),
    # Wholly matched: nothing is taken.
    (True, 20, 5, 12, 0, 0, 8),
    (True, 24, 5, 12, 1, 1, 12),
]
each_grant = pytest.mark.parametrize(
    ("cache", "length", "matched", "tail", "full", "beside", "first"), GRANTS
)


def prepared(
    cache: bool, matched: int, full: int, beside: int, ps: int = PS
) -> tuple[Alloc, sgalloc.Match | None]:
    """Room for exactly so many pages behind a match of ``matched`` pages, all else locked."""
    alloc = Alloc(
        max(full + matched, 1),
        ps,
        4,
        8 * ps,
        device="cpu",
        window=sgalloc.SlidingWindow(WINDOW, max(beside + matched, 1), slot_map=True),
        prefix_cache=cache,
    )
    if not matched:
        return alloc, None
    cached(alloc, prompt(matched, ps))
    return alloc, alloc.prefix.match(prompt(matched, ps))


@each_grant
def test_grants_by_hand(
    cache: bool, length: int, matched: int, tail: int, full: int, beside: int, first: int
) -> None:
    assert window_tail(length, WINDOW, PS, cache) == tail
    alloc, match = prepared(cache, matched, full + 3, beside + 3)
    (h,) = alloc.preallocate(length, prefix=match, window_tail=tail, deadline=1)
    alloc.check(device=True)
    assert numbers(alloc, "pinned") == {"full": full, "window": beside}
    assert numbers(alloc, "owned") == {"full": 0, "window": 0}
    assert numbers(alloc, "free") == {"full": 3, "window": 3}
    assert alloc.frontier(h).tolist() == [first]
    sides, count = alloc.window_pages(h).tolist(), -(-length // PS)
    assert [bool(page) for page in sides] == [at * PS >= first for at in range(count)]
    row = alloc.window_table[alloc.rows(h)[0]].reshape(-1, PS)
    assert (row[:, -1] // PS).tolist()[:count] == sides, "the table says what the ledger says"
    shared = {} if match is None else dict(zip(match.pages.tolist(), sides, strict=False))
    for page, side in granted(alloc, h).items():
        assert links(alloc)[page] == side
    assert set(links(alloc)) == {*granted(alloc, h), *shared}, "the cache keeps its own"
    # Its pages of both sides pair up with what a prefill node sends of the same tokens.
    assert alloc.pages(h, start=matched * PS, stop=length).size == full
    for end in ("acknowledge", "reclaim"):
        if end == "acknowledge":
            alloc.acknowledge(h, 0)
            assert numbers(alloc, "owned") == {"full": full, "window": beside}
            alloc.check(device=True)
            alloc.decode(h)
            alloc.evict_window(h)
            alloc.check(device=True)
            alloc.release(h)
        else:
            (h,) = alloc.preallocate(length, prefix=match, window_tail=tail, deadline=1)
            assert alloc.reclaim(1).tolist() == [h]
        alloc.check(device=True)
        assert numbers(alloc, "pinned") == {"full": 0, "window": 0}
    if cache:
        alloc.prefix.clear()
    assert_nothing_held(alloc)


@each_grant
@pytest.mark.parametrize("group", ["full", "window"])
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_the_need_is_exact_in_each_group(
    cache: bool,
    length: int,
    matched: int,
    tail: int,
    full: int,
    beside: int,
    first: int,
    group: str,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need = {"full": full, "window": beside}
    if need[group] + spare < 0:
        pytest.skip("there is no pool of fewer than no pages")
    room = {name: count + (spare if name == group else 5) for name, count in need.items()}
    if not matched and not room[group]:
        pytest.skip("a pool has at least a page")
    alloc, match = prepared(cache, matched, room["full"], room["window"])
    assert numbers(alloc, "free") == room
    if spare < 0:
        launches = count_launches(alloc, monkeypatch)
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.preallocate(length, prefix=match, window_tail=tail)
        found = refused.value
        # What is matched would be locked, so none of the cache could go.
        assert (found.group, found.need, found.free, found.cached) == (
            group, need[group], room[group], 0,
        )  # fmt: skip
        assert f"group '{group}'" in str(found) or f"'{group}'" in str(found)
        assert not launches["write"]
        return
    alloc.preallocate(length, prefix=match, window_tail=tail)
    assert numbers(alloc, "free")[group] == spare
    alloc.check(device=True)


@pytest.mark.parametrize("ps", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_the_pages_are_those_of_the_tail_less_the_match(ps: int, window: int) -> None:
    for cache in (False, True):
        alloc = windowed(60, ps, window, 60, rows=40, cache=cache)
        matches: list[Any] = [None]
        if cache:
            cached(alloc, prompt(6, ps))
            matches += [alloc.prefix.match(prompt(pages, ps)) for pages in (1, 3, 6)]
        for match in matches:
            start = 0 if match is None else match.length
            for length in sorted({start, start + 1, start + ps, start + 3 * ps + 1}):
                tail = window_tail(length, window, ps, cache)
                before = numbers(alloc, "free")
                (h,) = alloc.preallocate(length, prefix=match, window_tail=tail)
                # Page by page: who is new, and who of these is in the tail.
                new = range(start // ps, -(-length // ps))
                inside = [page for page in new if page * ps >= length - tail]
                taken = {name: before[name] - left for name, left in numbers(alloc, "free").items()}
                assert taken == {"full": len(new), "window": len(inside)}
                assert alloc.frontier(h)[0] == length - tail
                alloc.check(device=True)
                alloc.abort(h, force=True)
                alloc.check(device=True)
        if cache:
            alloc.prefix.clear()
        assert_nothing_held(alloc)


@pytest.mark.parametrize(("length", "tail", "frontier"), [(24, 12, 16), (24, 24, 16), (25, 9, 16)])
def test_a_tail_reaches_no_further_than_what_the_cache_still_has(
    length: int, tail: int, frontier: int
) -> None:
    """The cached prefix lost its window pages below 16, and its main pages are not received."""
    alloc = windowed(30, PS, WINDOW, 30, cache=True)
    (h,) = alloc.open()
    alloc.extend(h, 24)
    alloc.evict_window(h, 16)
    alloc.release(h, tokens=prompt(6, PS))
    match = alloc.prefix.match(prompt(6, PS))
    assert match.length == 24 and numbers(alloc, "cached") == {"full": 6, "window": 2}
    (h,) = alloc.preallocate(length, prefix=match, window_tail=tail)
    alloc.check(device=True)
    assert alloc.frontier(h).tolist() == [frontier]
    new = length > 24
    assert numbers(alloc, "pinned") == {"full": new, "window": new}
    assert [bool(page) for page in alloc.window_pages(h)] == [False] * 4 + [True] * (2 + new)
    alloc.acknowledge(h, 0)
    alloc.decode(h)
    alloc.release(h)
    alloc.prefix.clear()
    assert_nothing_held(alloc)


def test_several_at_once_with_tails_of_their_own() -> None:
    alloc = windowed(30, PS, WINDOW, 30, cache=True)
    cached(alloc, prompt(3, PS))
    match = alloc.prefix.match(prompt(3, PS))
    h = alloc.preallocate(
        [20, 20, 9, 0], prefix=[match, None, None, None], window_tail=[12, 4, 9, 0]
    )
    assert numbers(alloc, "pinned") == {"full": 2 + 5 + 3, "window": 2 + 1 + 3}
    assert alloc.frontier(h).tolist() == [8, 16, 0, 0]
    # Without a tail every page has its own; one number is for all.
    (whole,) = alloc.preallocate(16)
    alloc.preallocate([16, 20], window_tail=4)
    assert numbers(alloc, "pinned") == {"full": 10 + 4 + 9, "window": 6 + 4 + 2}
    assert alloc.frontier(whole).tolist() == [0]
    alloc.check(device=True)


def test_a_tail_of_nothing_leaves_a_request_without_window_pages() -> None:
    alloc = windowed(8, PS, WINDOW, 2)
    (h,) = alloc.preallocate(16, window_tail=0)
    assert numbers(alloc, "pinned") == {"full": 4, "window": 0}
    assert alloc.frontier(h).tolist() == [16] and not links(alloc)
    alloc.acknowledge(h, 0)
    alloc.decode(h)
    assert links(alloc) == granted(alloc, h) != {}
    alloc.check(device=True)


# -- refused -------------------------------------------------------------------------------------

# tokens, matched pages, tail: what the message names.
BAD_TAILS = [
    (20, 0, 7, "leaves 13 tokens"),
    (20, 0, 9, "leaves 11 tokens"),
    (20, 0, 21, "longer than the 20 new tokens"),
    (0, 0, 1, "longer than the 0 new tokens"),
    (20, 2, 7, "leaves 13 tokens"),
    # Inside the match, and with all of it matched.
    (20, 4, 11, "leaves 9 tokens"),
    (20, 5, 3, "leaves 17 tokens"),
    (12, 3, 5, "leaves 7 tokens"),
    (20, 2, 24, "longer than the 20 tokens of the request"),
    (12, 3, 16, "longer than the 12 tokens of the request"),
]


@pytest.mark.parametrize(("length", "matched", "tail", "naming"), BAD_TAILS)
def test_a_tail_that_leaves_part_of_a_page_is_refused(
    length: int, matched: int, tail: int, naming: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alloc, match = prepared(True, matched, 12, 12)
    launches = count_launches(alloc, monkeypatch)
    for lengths, tails, matches in (
        ([length], [tail], [match]),
        ([8, length], [8, tail], [None, match]),
    ):
        with unchanged(alloc), pytest.raises(ValueError, match=naming) as refused:
            alloc.preallocate(lengths, prefix=matches, window_tail=tails)
        message = str(refused.value)
        at = len(lengths) - 1
        assert message.startswith(f"window_tail={tail} of lengths[{at}]={length} ")
        assert "page_size=4" in message and "\n" not in message
    assert not launches["write"]
    # The nearest tail that is allowed goes through.
    alloc.preallocate(length, prefix=match, window_tail=window_tail(length, WINDOW, PS, True))
    alloc.check(device=True)


@pytest.mark.parametrize("tail", [-4, 1.0, "8", [8, 8], [None], True, 1 << 70])
def test_what_is_no_tail(tail: Any) -> None:
    alloc = windowed(8, PS, WINDOW, 8)
    with unchanged(alloc), pytest.raises((TypeError, ValueError)) as refused:
        alloc.preallocate([16], window_tail=tail)
    assert "window_tail" in str(refused.value) and "\n" not in str(refused.value)


def plain() -> Alloc:
    return make(8, PS)


def with_window() -> Alloc:
    return windowed(8, PS, WINDOW, 8)


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a tail without a window": (plain, {"window_tail": 4}, ValueError, "window_tail= .*window="),
    "logical alone": (plain, {"logical_only": True}, ValueError, "logical_only= .*sparse="),
    "both without either": (
        plain, {"window_tail": 4, "logical_only": True}, ValueError, "logical_only= .*sparse="
    ),
    "logical with a window": (
        with_window, {"logical_only": True}, ValueError, "logical_only= is for sparse="
    ),
    "both with a window": (
        with_window, {"window_tail": 4, "logical_only": True}, ValueError, "logical_only="
    ),
    "a number for a bool": (with_window, {"logical_only": 1}, TypeError, "logical_only"),
    "None for a bool": (plain, {"logical_only": None}, TypeError, "logical_only"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_combinations(kind: str) -> None:
    maker, how, error, naming = WRONG[kind]
    alloc = maker()
    with unchanged(alloc), pytest.raises(error, match=naming) as refused:
        alloc.preallocate([8, 16], **how)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    assert alloc.preallocate([8, 16]).size == 2


def test_the_window_of_what_is_received_does_not_move() -> None:
    alloc = windowed(20, PS, WINDOW, 20)
    (h,) = alloc.preallocate(20)
    for call in (
        lambda: alloc.evict_window(h),
        lambda: alloc.evict_window(h, 0),
        lambda: alloc.plan(reserve=(h, 1), evict_window=True),
    ):
        with unchanged(alloc), pytest.raises(sgalloc.WrongState, match="still being received"):
            call()
    alloc.acknowledge(h, 0)
    assert alloc.evict_window(h).tolist() == [12]
    alloc.check(device=True)


# -- the map, and pages that come back -----------------------------------------------------------


@pytest.mark.parametrize("end", ["acknowledge", "reclaim", "force", "behind an event"])
def test_entries_of_an_aborted_request_leave_the_map_when_its_pages_come_back(end: str) -> None:
    alloc = windowed(10, PS, WINDOW, 10)
    (h,) = alloc.preallocate(20, window_tail=8, deadline=5)
    mine = granted(alloc, h)
    assert links(alloc) == mine and len(mine) == 2
    event = Query()
    alloc.abort(h, after=event if end == "behind an event" else None)
    alloc.check(device=True)
    assert links(alloc) == mine, "the writer may still write, through the map if it likes"
    assert numbers(alloc, "pinned") == {"full": 5, "window": 2}
    if end == "force":
        alloc.abort(h, force=True)
    elif end == "reclaim":
        alloc.reclaim(5)
    else:
        alloc.acknowledge(h, 0)
    alloc.check(device=True)
    if end == "behind an event":
        assert numbers(alloc, "quarantined") == {"full": 5, "window": 2}
        assert links(alloc) == mine
        event.over = True
        alloc.settle()
    assert_nothing_held(alloc)


def test_a_recycled_page_leaves_no_stale_entry() -> None:
    """A page that had a window page before goes to where a tail has none, and back again."""
    alloc = windowed(5, PS, WINDOW, 5)
    for turn in range(6):
        (h,) = alloc.preallocate(20, window_tail=(20, 8, 4, 0, 12, 16)[turn], deadline=turn)
        assert links(alloc) == granted(alloc, h)
        assert len(links(alloc)) == (5, 2, 1, 0, 3, 4)[turn]
        alloc.check(device=True)
        if turn % 2:
            alloc.acknowledge(h, 0)
            alloc.release(h)
        else:
            alloc.reclaim(turn)
        assert_nothing_held(alloc)


def test_pages_evicted_for_a_preallocation_lose_their_entries() -> None:
    alloc = windowed(6, PS, WINDOW, 6, cache=True)
    cached(alloc, prompt(5, PS))
    assert len(links(alloc)) == 5
    (h,) = alloc.preallocate(20, window_tail=4)
    assert numbers(alloc, "evicted") == {"full": 4, "window": 4}
    left = alloc.prefix.match(prompt(5, PS)).pages.tolist()
    assert len(left) == 1
    assert links(alloc).keys() == {*granted(alloc, h), *left}
    alloc.check(device=True)


def test_the_window_alone_can_make_the_cache_give_way() -> None:
    alloc = windowed(20, PS, WINDOW, 5, cache=True)
    cached(alloc, prompt(5, PS))
    assert numbers(alloc, "free") == {"full": 15, "window": 0}
    alloc.preallocate(20, window_tail=8)
    assert numbers(alloc, "evicted") == {"full": 2, "window": 2}
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
        alloc.preallocate(20, window_tail=16)
    assert (refused.value.group, refused.value.need, refused.value.cached) == ("window", 4, 3)
    alloc.check(device=True)


def test_what_was_received_is_shared_from_then_on() -> None:
    """The tail lies inside the match, and what follows publishes and evicts as ever."""
    alloc = windowed(40, PS, WINDOW, 40, cache=True)
    cached(alloc, prompt(4, PS))
    ids = np.concatenate((prompt(4, PS), np.arange(20) + 5000))
    (h,) = alloc.preallocate(
        22, prefix=alloc.prefix.match(ids), window_tail=window_tail(22, WINDOW, PS, True)
    )
    assert alloc.frontier(h).tolist() == [12] and numbers(alloc, "pinned")["window"] == 2
    alloc.acknowledge(h, 0)
    for _ in range(9):
        alloc.evict_window(h)
        alloc.decode(h)
        alloc.check(device=True)
    alloc.release(h, tokens=ids[:31])
    # 7 whole pages; page 3 was shared, and what lies from 12 on was live or evicted since.
    alloc.check(device=True)
    assert alloc.prefix.match(ids).length == 28
    alloc.prefix.clear()
    assert_nothing_held(alloc)
