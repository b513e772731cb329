"""The decode node's budget in every group, by hand, and against what can then be preallocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import cached, make, prompt, unchanged

import sgalloc
from sgalloc.admission import admit, decode_budget, decode_budgets
from sgalloc.sizing import window_tail

Alloc = sgalloc.KVAllocator


def windowed(
    pages: int, ps: int, tokens: int, beside: int, rows: int = 8, cache: bool = False, **how: Any
) -> Alloc:
    window = sgalloc.SlidingWindow(tokens, beside, **how)
    return Alloc(pages, ps, rows, pages * ps, device="cpu", window=window, prefix_cache=cache)


def sparse(
    pages: int, ps: int, buffer: int, ratio: float, scratch: int = 0, rows: int = 8
) -> Alloc:
    settings = sgalloc.Sparse(ratio, buffer, scratch)
    return Alloc(pages, ps, rows, int(ratio * pages) * ps, device="cpu", sparse=settings)


def running(alloc: Alloc, lengths: list[int]) -> np.ndarray:
    handles = alloc.open(len(lengths))
    alloc.extend(handles, lengths)
    return handles


# -- what a request may hold in a window ---------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("ps", [1, 2, 3, 16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("every", [1, 4, 20])
@pytest.mark.parametrize("step", [1, 3])
def test_the_most_pages_are_those_of_the_worst_step(
    cache: bool, ps: int, tokens: int, every: int, step: int
) -> None:
    alloc = windowed(200, ps, tokens, 200, 1, cache, evict_every=every)
    (handle,) = alloc.open()
    held = []
    while int(alloc.committed(handle)[0]) < tokens + 3 * ps + 2 * every:
        alloc.evict_window(handle)
        alloc.reserve(handle, step)
        held.append(alloc.stats().groups["window"].owned)
        alloc.commit(handle, 1)
    assert max(held) == alloc._core.side.most_pages(step)


# -- by hand -------------------------------------------------------------------------------------

# Pages of 4, a window of 8: a request holds at most ceil((3 + 8 + 1) / 4) = 3 window pages.
# active, reserved, retracted, largest: left of 50 window pages, nobody running.
WINDOW_BUDGETS = [
    (0, 0, (), 0, 50),
    # 2 pages each; of 12 tokens 3 pages; of more no more than that.
    (5, 8, (), 0, 50 - 5 * 2),
    (5, 12, (), 0, 50 - 5 * 3),
    (5, 400, (), 0, 50 - 5 * 3),
    # One that may need 100 pages needs 3 window pages.
    (1, 4, (), 400, 50 - 3),
    (5, 4, (), 400, 50 - 5),
    # 20 tokens come back with the pages from 12 on, 2; 21 tokens with 3 (from 12 to 24).
    (0, 0, (20, 21), 0, 50 - 2 - 3),
    # With 4 more tokens 20 tokens need 12..24, 3 pages; 21 tokens need 12..28, but hold 3.
    (0, 4, (20, 21), 0, 50 - 3 - 3),
    (0, 400, (3,), 0, 50 - 3),
    (20, 8, (), 0, 50 - 40),
    (20, 12, (), 0, 50 - 60),
]


@pytest.mark.parametrize(("active", "reserved", "retracted", "largest", "left"), WINDOW_BUDGETS)
def test_the_budget_of_a_window(
    active: int, reserved: int, retracted: Any, largest: int, left: int
) -> None:
    alloc = windowed(200, 4, 8, 50, 30)
    found = decode_budgets(alloc, active, reserved, retracted, largest)
    main = decode_budget(alloc, active, reserved, retracted, largest)
    assert found == {"full": main, "window": left}
    assert main == decode_budget(make(200, 4), active, reserved, retracted, largest)


def test_what_running_requests_hold_of_their_window_is_not_counted_again() -> None:
    alloc = windowed(200, 4, 8, 50)
    full, _, none = running(alloc, [20, 4, 0])
    alloc.evict_window(full)
    # 20 - 8 = 12: the pages from 12 on, 2 of 3. The second holds 1, the third nothing.
    assert alloc.available("window") == 50 - 2 - 1
    # 400 tokens more: 1, 2 and 3 pages are lacking.
    assert decode_budgets(alloc, 3, 400)["window"] == 47 - (1 + 2 + 3)
    # 4 tokens more are a page for each.
    assert decode_budgets(alloc, 3, 4)["window"] == 47 - 3
    # Which two are the active ones is not known: those that lack most; a fourth has no row yet.
    assert decode_budgets(alloc, 2, 400)["window"] == 47 - (2 + 3)
    assert decode_budgets(alloc, 4, 400)["window"] == 47 - (1 + 2 + 3 + 3)
    # One that holds more than a window, since nothing was evicted yet, needs nothing.
    alloc.extend(none, 40)
    assert decode_budgets(alloc, 3, 400)["window"] == 37 - (1 + 2 + 0)
    # A step of 6 tokens may hold ceil((3 + 8 + 6) / 4) = 5 pages.
    assert decode_budgets(alloc, 3, 400, step_tokens=6)["window"] == 37 - (3 + 4 + 0)


def test_a_budget_kept_for_the_window_lets_running_requests_go_on() -> None:
    random = np.random.default_rng(8)
    waste = []
    for _ in range(60):
        ps, tokens = int(random.integers(1, 6)), int(random.integers(1, 14))
        every = int(random.integers(1, 8))
        alloc = windowed(2000, ps, tokens, 80, 90, evict_every=every)
        handles = running(alloc, random.integers(0, 6 * ps, size=3).tolist())
        alloc.evict_window(handles)
        reserved = int(random.integers(1, 40))
        left = decode_budgets(alloc, 3, reserved)["window"]
        alloc.preallocate([ps] * left)  # all that is not kept
        least = alloc.available("window")
        for _ in range(reserved):
            alloc.evict_window(handles)
            alloc.decode(handles)
            least = min(least, alloc.available("window"))
        waste.append(least)
    assert waste.count(0) > 10, "and often the last page of it is taken"


def test_the_worst_case_of_the_headroom_is_reached() -> None:
    for short in (0, 1):
        alloc = windowed(400, 4, 8, 20, 16)
        handles = running(alloc, [4, 4, 4])  # all three at the same place of their pages
        left = decode_budgets(alloc, 3, 40)["window"] + short
        alloc.preallocate(4 * left)
        if short:
            with pytest.raises(sgalloc.OutOfPages) as full:
                for _ in range(40):
                    alloc.evict_window(handles)
                    alloc.decode(handles)
            assert full.value.group == "window"
        else:
            for _ in range(40):
                alloc.evict_window(handles)
                alloc.decode(handles)


def test_the_budget_of_a_window_counts_no_more_than_sglang_does() -> None:
    """active * W - used, and ceil(tail) + reserved for each that waits: theirs, in whole pages."""
    random = np.random.default_rng(4)
    below = 0
    for _ in range(200):
        ps, tokens = int(random.integers(1, 9)), int(random.integers(1, 30))
        alloc = windowed(300, ps, tokens, 300)
        lengths = random.integers(0, 20 * ps, size=4)
        handles = running(alloc, lengths.tolist())
        alloc.evict_window(handles)
        reserved = int(random.integers(0, 6)) * ps
        retracted = random.integers(0, 20 * ps, size=2)
        most = -(-tokens // ps) + 1  # W in whole pages, wherever it begins
        used = 300 - alloc.available("window")
        theirs = min(4 * reserved // ps, 4 * most - used)
        tails = window_tail(retracted, tokens, ps)
        theirs += (
            int((-(-(retracted) // ps) - (retracted - tails) // ps).sum()) + 2 * reserved // ps
        )
        ours = alloc.available("window") - decode_budgets(alloc, 4, reserved, retracted)["window"]
        assert ours <= theirs or used > 4 * most
        below += ours < theirs
    assert below > 20


def test_the_budget_of_the_device_group() -> None:
    # Pages of 4; a buffer of 2 pages, one for the newest token, one of scratch: 4 at most.
    alloc = sparse(60, 4, 8, 4, scratch=3)
    long, short, _ = running(alloc, [40, 4, 40])
    alloc.to_sparse([long, short])
    # 2 + 1 + 1, 1 + 1, 10.
    assert alloc.available("device") == 60 - 4 - 2 - 10
    # 12 more tokens: the full one needs none, the short one 2, the dense one 3 and its scratch.
    assert decode_budgets(alloc, 3, 12) == {"logical": 240 - 21 - 9, "device": 44 - (0 + 2 + 4)}
    assert decode_budget(alloc, 3, 12) == 240 - 21 - 9
    assert decode_budgets(alloc, 3, 4)["device"] == 44 - (0 + 1 + 2)
    # A fourth has no row yet, and is dense at first.
    assert decode_budgets(alloc, 4, 4)["device"] == 44 - (0 + 1 + 2 + 2)
    # A retracted one comes back dense: ceil((10 + 4) / 4) = 4.
    assert decode_budgets(alloc, 0, 4, [10])["device"] == 44 - 4
    assert decode_budgets(alloc, 1, 0, (), 37)["device"] == 44 - 10
    assert decode_budgets(alloc, 3, 12, logical_only=True) == {"logical": 240 - 21 - 9}


# 20 pages of 4, a window of 8 with 7 pages; queue, reserved: admitted.
WINDOW_QUEUES: list[tuple[list[tuple[int, int]], int, int]] = [
    # 16 tokens: 4 pages, and those from 8 on, 2: three times 2 of 7.
    ([(16, 0)] * 5, 0, 3),
    # 17 tokens: from 8 on, 3 pages.
    ([(17, 0)] * 5, 0, 2),
    # 4 more tokens are one more window page each, 3.
    ([(16, 0)] * 5, 4, 2),
    # and never more than 3, though the main group has room for two of 4 + 6 pages alone.
    ([(16, 0)] * 5, 24, 2),
    ([(16, 0)] * 5, 28, 1),
    # The main group ends the first count, the window the second.
    ([(40, 0), (41, 0)], 0, 1),
    ([(36, 0), (32, 0), (8, 0), (12, 0)], 0, 3),
    # A prefix that is locked already, past the begin of the tail: one window page.
    ([(16, 12)] * 8, 0, 7),
    # One that ends below the tail.
    ([(16, 4)] * 8, 0, 3),
]


@pytest.mark.parametrize(("queue", "reserved", "expected"), WINDOW_QUEUES)
def test_queues_before_a_window(queue: list[tuple[int, int]], reserved: int, expected: int) -> None:
    assert admit(windowed(20, 4, 8, 7), queue, 0, reserved) == expected


def test_queues_before_a_sparse_allocator() -> None:
    alloc = sparse(10, 4, 8, 3)
    assert admit(alloc, [(16, 0)] * 8, 0, 0) == 2
    assert admit(alloc, [(16, 0)] * 8, 0, 4) == 2
    assert admit(alloc, [(16, 0)] * 8, 0, 8) == 1
    assert admit(alloc, [(16, 0)] * 8, 0, 0, logical_only=True) == 7
    alloc.preallocate([16] * 7, logical_only=True)
    assert admit(alloc, [(8, 0), (1, 0)], 0, 0, logical_only=True) == 1
    assert alloc.available("device") == 10


# -- against preallocate -------------------------------------------------------------------------


def some_window(random: np.random.Generator) -> tuple[Alloc, dict[str, Any], int]:
    cache, tokens = bool(random.integers(2)), int(random.integers(1, 14))
    alloc = windowed(24, 4, tokens, int(random.integers(6, 22)), 6, cache, slot_map=True)
    return alloc, {}, tokens


def some_sparse(random: np.random.Generator) -> tuple[Alloc, dict[str, Any], int]:
    alloc = sparse(int(random.integers(5, 14)), 4, 6, 2, rows=6)
    return alloc, {"logical_only": bool(random.integers(2))}, 0


def take(
    alloc: Alloc,
    lengths: list[int],
    matches: list[Any],
    upto: int,
    how: dict[str, Any],
    window: int,
) -> None:
    """Preallocate so many, as `admit` has counted them."""
    lengths, matches = lengths[:upto], matches[:upto]
    if window:
        cache = alloc._core.prefix is not None
        how = {"window_tail": window_tail(np.array(lengths, int), window, 4, cache)}
    alloc.preallocate(lengths, 1, matches, **how)


@pytest.mark.parametrize("some", [some_window, some_sparse])
def test_what_is_admitted_is_what_can_be_preallocated(some: Callable[..., Any]) -> None:
    random = np.random.default_rng(12)
    whole, stopped, evicted, groups = 0, 0, 0, set()
    for _ in range(400):
        alloc, how, tokens = some(random)
        cache = tokens and alloc._core.prefix is not None
        if cache:
            for seed in range(2):
                cached(alloc, prompt(int(random.integers(1, 4)), 4, seed))
            held = alloc.open_with_prefix(alloc.prefix.match(prompt(2, 4, int(random.integers(2)))))
        else:
            held = alloc.open()
        alloc.extend(held, 9)
        if tokens:
            alloc.evict_window(held)
        lengths, matches = [], []
        for _ in range(int(random.integers(1, 7))):
            match = None
            if cache and random.integers(3):
                match = alloc.prefix.match(prompt(int(random.integers(4)), 4, random.integers(2)))
            matches.append(match)
            lengths.append((match.length if match else 0) + int(random.integers(0, 24)))
        queue = [(n, 0 if m is None else m) for n, m in zip(lengths, matches, strict=True)]
        with unchanged(alloc):
            count = admit(alloc, queue, 0, 0, **how)
        if count < len(queue):
            stopped += 1
            with unchanged(alloc), pytest.raises(sgalloc.AllocError) as refused:
                take(alloc, lengths, matches, count + 1, how, tokens)
            groups.add(getattr(refused.value, "group", ""))
        else:
            whole += 1
        take(alloc, lengths, matches, count, how, tokens)
        evicted += any(group.evicted for group in alloc.stats().groups.values())
        alloc.check(device=True)
    assert min(whole, stopped) >= 40, (whole, stopped)
    assert groups >= set(alloc.stats().groups), "each group was the one that ended a count"
    assert evicted >= 20 or not tokens


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "naming"),
    [
        (lambda a, b: admit(a, [(1, 0)], 0, 0, logical_only=True), ValueError, "logical_only="),
        (lambda a, b: decode_budgets(a, 0, 0, logical_only=True), ValueError, "logical_only="),
        (lambda a, b: decode_budgets(b, 0, 0, logical_only=1), TypeError, "logical_only"),
        (lambda a, b: decode_budgets(a, 0, 0, step_tokens=0), ValueError, "step_tokens"),
        (lambda a, b: admit(b, [], 0, 0, step_tokens=1.5), TypeError, "step_tokens"),
        (lambda a, b: decode_budgets(a, 0, -1), ValueError, "reserved_tokens"),
        (lambda a, b: decode_budgets(b, 0, 0, [None]), TypeError, "retracted_lengths"),
    ],
)
def test_bad_numbers(call: Any, error: type[Exception], naming: str) -> None:
    a, b = windowed(10, 4, 8, 10), sparse(10, 4, 8, 2)
    with unchanged(a), unchanged(b), pytest.raises(error) as refused:
        call(a, b)
    assert naming in str(refused.value) and "\n" not in str(refused.value)


def test_an_allocator_of_one_group_has_one_budget() -> None:
    alloc = make(100, 16, prefix_cache=True)
    assert decode_budgets(alloc, 5, 32, [100]) == {"full": decode_budget(alloc, 5, 32, [100])}
    with pytest.raises(ValueError, match="logical_only= is for"):
        decode_budgets(alloc, 5, 32, logical_only=True)
