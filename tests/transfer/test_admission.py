"""The decode node's budget and the window tails, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import cached, make, prompt, unchanged

import sgalloc
from sgalloc.admission import admit, decode_budget
from sgalloc.sizing import tail_start, window_tail

# -- window tails --------------------------------------------------------------------------------

# seq, window, page size: tail without a prefix cache, tail with one.
TAILS = [
    # 0 tokens: nothing to keep.
    (0, 8, 4, 0, 0),
    # Shorter than the window: all of it. 5 - 8 < 0.
    (5, 8, 4, 5, 5),
    # 20 - 8 = 12 is a page edge; 20 - 1 - 8 = 11 lies in the page from 8.
    (20, 8, 4, 8, 12),
    # 21 - 8 = 13 and 21 - 1 - 8 = 12 lie in the page from 12.
    (21, 8, 4, 9, 9),
    # 23 - 8 = 15, 23 - 9 = 14: the page from 12.
    (23, 8, 4, 11, 11),
    # 24 - 8 = 16; 24 - 9 = 15: the page from 12.
    (24, 8, 4, 8, 12),
    # Page larger than the window: without a cache 40 - 3 = 37, from 32; with one the page counts
    # as the window, 40 - 1 - 16 = 23, from 16.
    (40, 3, 16, 8, 24),
    # Window 1: the last token; with a cache 33 - 1 - 16 = 16.
    (33, 1, 16, 1, 17),
    (32, 1, 16, 16, 32),  # 31 lies in the page from 16; 32 - 17 = 15 in the first
    # Page 1: exactly the window, and with a cache one more.
    (10, 4, 1, 4, 5),
    (4, 4, 1, 4, 4),
    (5, 4, 1, 4, 5),
    # Page 3: 20 - 7 = 13, from 12; 20 - 8 = 12.
    (20, 7, 3, 8, 8),
    # Page 64: 1000 - 128 = 872, from 832; 1000 - 129 = 871, from 832.
    (1000, 128, 64, 168, 168),
    # 1024 - 128 = 896 = 14 pages; 1024 - 129 = 895, from 832.
    (1024, 128, 64, 128, 192),
    # Page 128: 513 - 128 = 385, from 384; 513 - 129 = 384.
    (513, 128, 128, 129, 129),
]


@pytest.mark.parametrize(("seq", "window", "ps", "plain", "shared"), TAILS)
def test_window_tails(seq: int, window: int, ps: int, plain: int, shared: int) -> None:
    assert window_tail(seq, window, ps) == plain
    assert window_tail(seq, window, ps, prefix_cache=True) == shared
    assert type(window_tail(np.int32(seq), window, ps)) is int
    for tail in (plain, shared):
        assert tail_start(seq, tail, ps) == seq - tail


def test_every_tail_leaves_whole_pages_and_keeps_the_window() -> None:
    seq = np.arange(400)
    for ps in (1, 2, 3, 16, 64, 128):
        for window in (1, 2, 5, 16, 63, 64, 65, 300):
            plain = window_tail(seq, window, ps)
            shared = window_tail(seq, window, ps, prefix_cache=True)
            assert plain.dtype == np.int64 and plain.shape == seq.shape
            for tail in (plain, shared):
                assert ((seq - tail) % ps == 0).all()
                assert (tail >= np.minimum(seq, window)).all() and (tail <= seq).all()
            assert (plain - window < ps).all(), "no page more than that"
            assert (shared >= plain).all()


def test_a_tail_that_leaves_part_of_a_page_is_refused() -> None:
    assert tail_start(21, 9, 4) == 12 and tail_start(21, 21, 4) == 0 and tail_start(20, 0, 4) == 20
    with pytest.raises(ValueError, match=r"leaves 13 of 21 tokens.* of 4: pass 9,"):
        tail_start(21, 8, 4)
    with pytest.raises(ValueError, match="22"):
        tail_start(21, 22, 4)


@pytest.mark.parametrize(
    ("call", "error", "naming"),
    [
        (lambda: window_tail(5, 0, 4), ValueError, "window"),
        (lambda: window_tail(5, 8, 0), ValueError, "page_size"),
        (lambda: window_tail(-1, 8, 4), ValueError, "seq"),
        (lambda: window_tail([5, 1.5], 8, 4), TypeError, "seq"),
        (lambda: window_tail(5, 8, 4, 1), TypeError, "prefix_cache"),
        (lambda: tail_start(-1, 0, 4), ValueError, "seq"),
        (lambda: tail_start(5, -1, 4), ValueError, "tail"),
        (lambda: tail_start(5, 1.0, 4), TypeError, "tail"),
    ],
)
def test_bad_tails(call: Any, error: type[Exception], naming: str) -> None:
    with pytest.raises(error, match=naming):
        call()


# -- the budget ----------------------------------------------------------------------------------

# 100 pages of 16; active, reserved, retracted, largest: pages left.
BUDGETS = [
    (0, 0, (), 0, 100),
    # 5 requests of up to 32 tokens more: 5 * 2.
    (5, 32, (), 0, 90),
    # Tokens are rounded up for each request: 10 * 1 and not ceil(10 / 16).
    (10, 1, (), 0, 90),
    (3, 17, (), 0, 94),
    # One that may need 400 tokens alone outweighs 5 * 2 = 10 pages: 25.
    (5, 32, (), 400, 75),
    (5, 32, (), 160, 90),
    (5, 32, (), 161, 89),
    # Retracted: ceil((100 + 32) / 16) = 9 and ceil((16 + 32) / 16) = 3.
    (5, 32, (100, 16), 0, 78),
    (0, 0, (0, 1, 16, 17), 0, 96),  # 0 + 1 + 1 + 2
    # Overcommitted.
    (60, 32, (), 0, -20),
]


@pytest.mark.parametrize(("active", "reserved", "retracted", "largest", "left"), BUDGETS)
def test_budgets(active: int, reserved: int, retracted: Any, largest: int, left: int) -> None:
    alloc = make(100, 16)
    assert decode_budget(alloc, active, reserved, retracted, largest) == left
    assert decode_budget(alloc, active, reserved, np.array(retracted, int), largest) == left


def tokens_left(active: int, reserved: int, retracted: Any, largest: int, free: int) -> int:
    """The budget as SGLang 0.5.23 counts it: in tokens, pages or not."""
    coming_back = sum(length + reserved for length in retracted)
    return free - max(active * reserved, largest) - coming_back


def test_the_budget_is_the_one_counted_in_tokens_where_no_page_is_cut() -> None:
    random = np.random.default_rng(2)
    below = 0
    for _ in range(300):
        ps, exact = int(random.integers(1, 20)), bool(random.integers(2))
        unit = ps if exact else 1
        alloc = make(500, ps)
        active, reserved = int(random.integers(6)), unit * int(random.integers(4))
        largest = unit * int(random.integers(20))
        retracted = (unit * random.integers(0, 9, size=random.integers(3))).tolist()
        ours = decode_budget(alloc, active, reserved, retracted, largest)
        theirs = tokens_left(active, reserved, retracted, largest, 500 * ps) // ps
        assert ours == theirs if exact else ours <= theirs
        below += ours < theirs
    assert below > 20


def test_a_budget_in_tokens_leaves_running_requests_short_of_pages() -> None:
    """Ten requests at a page edge need ten pages for one token each, not the one of ten tokens."""
    for count in (tokens_left, None):
        alloc = make(100, 16, max_requests=20)
        running = alloc.open(10)
        alloc.extend(running, 48)
        if count is None:
            budget = decode_budget(alloc, 10, 1)
        else:
            budget = count(10, 1, (), 0, 16 * alloc.available()) // 16
        assert budget == (60 if count is None else 69)
        alloc.preallocate([16 * 10] * (budget // 10) + [16 * (budget % 10)])
        if count is None:
            alloc.decode(running)
            continue
        with pytest.raises(sgalloc.OutOfPages):
            alloc.decode(running)


def test_the_budget_counts_what_could_be_evicted_and_nothing_that_is_held() -> None:
    alloc = make(20, PS := 4, prefix_cache=True)
    cached(alloc, prompt(4, PS))
    assert (alloc.available(), decode_budget(alloc, 2, 4)) == (16, 20 - 2)
    (h,) = alloc.preallocate(20, prefix=alloc.prefix.match(prompt(2, PS)), deadline=1)
    assert decode_budget(alloc, 2, 4) == 20 - 2 - 3 - 2
    alloc.abort(h)
    assert decode_budget(alloc, 2, 4) == 20 - 2 - 3 - 2, "what waits for writers is not there"
    alloc.reclaim(1)
    assert decode_budget(alloc, 2, 4) == 20 - 2


# 100 pages of 16; queue, active, reserved, retracted, largest: admitted.
QUEUES: list[tuple[list[tuple[int, int]], int, int, Any, int, int]] = [
    ([], 0, 0, (), 0, 0),
    # ceil(500 / 16) = 32 pages each: three of them.
    ([(500, 0)] * 4, 0, 0, (), 0, 3),
    # With 32 tokens past it ceil(532 / 16) = 34: 2 after 5 * 2 are kept back.
    ([(500, 0)] * 4, 5, 32, (), 0, 2),
    # A prefix of 160 tokens that is locked already saves 10 pages: 22 each.
    ([(500, 160)] * 5, 0, 0, (), 0, 4),
    # In order: a small one does not pass a large one that does not fit.
    ([(800, 0), (816, 0), (16, 0)], 0, 0, (), 0, 1),
    ([(800, 0), (800, 0), (0, 0)], 0, 0, (), 0, 3),
    ([(800, 0), (800, 0), (1, 0)], 0, 0, (), 0, 2),
    # A retracted request of 1600 tokens takes all.
    ([(1, 0)], 0, 0, (1600,), 0, 0),
    ([(0, 0)], 0, 0, (1600,), 0, 1),
    # 4 rows wide enough for 1600 tokens.
    ([(1, 0)] * 9, 0, 0, (), 0, 4),
    ([(1, 0)] * 9, 0, 0, (1, 1, 1), 0, 1),
    ([(1601, 0)], 0, 0, (), 0, 0),
    # A single need of 1590 tokens takes 100 pages.
    ([(1, 0)], 3, 1, (), 1590, 0),
    ([(1, 0)], 3, 1, (), 1584, 1),
]


@pytest.mark.parametrize(
    ("queue", "active", "reserved", "retracted", "largest", "expected"), QUEUES
)
def test_queues(
    queue: list[tuple[int, int]],
    active: int,
    reserved: int,
    retracted: Any,
    largest: int,
    expected: int,
) -> None:
    alloc = make(100, 16, max_requests=4)
    assert admit(alloc, queue, active, reserved, retracted, largest) == expected


def test_what_is_admitted_is_what_can_be_preallocated() -> None:
    random = np.random.default_rng(11)
    whole = stopped = evicted = 0
    for _ in range(200):
        alloc = make(24, 4, max_requests=6, row_width=60, prefix_cache=True)
        for seed in range(3):
            cached(alloc, prompt(int(random.integers(1, 6)), 4, seed))
        held = alloc.open_with_prefix(alloc.prefix.match(prompt(3, 4, int(random.integers(3)))))
        alloc.extend(held, 20)
        lengths, matches = [], []
        for _ in range(int(random.integers(1, 7))):
            match = None
            if random.integers(3):
                match = alloc.prefix.match(prompt(int(random.integers(6)), 4, random.integers(3)))
            matches.append(match)
            lengths.append((match.length if match else 0) + int(random.integers(0, 24)))
        queue = [(n, 0 if m is None else m) for n, m in zip(lengths, matches, strict=True)]
        with unchanged(alloc):
            count = admit(alloc, queue, 0, 0)
        if count < len(queue):
            stopped += 1
            with unchanged(alloc), pytest.raises(sgalloc.AllocError):
                alloc.preallocate(lengths[: count + 1], prefix=matches[: count + 1])
        else:
            whole += 1
        alloc.preallocate(lengths[:count], prefix=matches[:count])
        evicted += alloc.stats().groups["full"].evicted > 0
        alloc.check()
    assert min(whole, stopped, evicted) >= 20, (whole, stopped, evicted)


def test_one_that_is_wider_than_a_row_ends_the_count() -> None:
    alloc = make(100, 16, row_width=170)
    assert admit(alloc, [(160, 0), (161, 0), (1, 0)], 0, 0) == 1
    assert admit(alloc, [(160, 0), (160, 0)], 0, 400) == 2, "the reserve is not the row's"


def test_an_evicted_match_is_stale() -> None:
    alloc = make(8, 4, prefix_cache=True)
    cached(alloc, prompt(3, 4))
    match = alloc.prefix.match(prompt(3, 4))
    alloc.prefix.clear()
    with pytest.raises(sgalloc.StalePlan):
        admit(alloc, [(1, 0), (16, match)], 0, 0)


@pytest.mark.parametrize(
    ("call", "error", "naming"),
    [
        (lambda a: decode_budget(a, -1, 0), ValueError, "active"),
        (lambda a: decode_budget(a, 1.0, 0), TypeError, "active"),
        (lambda a: decode_budget(a, 1, -1), ValueError, "reserved_tokens"),
        (lambda a: decode_budget(a, 1, 1, [-1]), ValueError, "retracted_lengths"),
        (lambda a: decode_budget(a, 1, 1, [1.5]), TypeError, "retracted_lengths"),
        (lambda a: decode_budget(a, 1, 1, (), None), TypeError, "largest"),
        (lambda a: admit(a, [5], 0, 0), TypeError, "queue[0]"),
        (lambda a: admit(a, [(5, 0), (5,)], 0, 0), TypeError, "queue[1]"),
        (lambda a: admit(a, [(5, 0), (-5, 0)], 0, 0), ValueError, "queue[1][0]"),
        (lambda a: admit(a, [(5, None)], 0, 0), TypeError, "queue[0][1]"),
        (lambda a: admit(a, [(5, 3)], 0, 0), ValueError, "prefix of 3"),
        (lambda a: admit(a, [(3, 4)], 0, 0), ValueError, "prefix of 4"),
    ],
)
def test_bad_numbers(call: Any, error: type[Exception], naming: str) -> None:
    alloc = make(10, 4)
    with unchanged(alloc), pytest.raises(error) as refused:
        call(alloc)
    message = str(refused.value)
    assert naming in message and "\n" not in message
