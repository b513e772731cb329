"""`sizing.peak_window_pages` against the allocator itself, and against numbers by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from window.support import make

import sgalloc
from sgalloc.sizing import peak_window_pages


def real_peak(
    prompt: int,
    steps: int,
    window: int,
    ps: int,
    chunk: int | None = None,
    reserve: int = 1,
    evict_every: int = 1,
    prefix_cache: bool = False,
    accepted: Callable[[], int] = lambda: 1,
) -> int:
    """Most window pages of a real request that is run through."""
    width = (-(-(prompt + steps + reserve) // ps) + 1) * ps
    alloc = make(
        width // ps,
        ps,
        window,
        max_requests=1,
        row_width=width,
        prefix_cache=prefix_cache,
        slot_map=False,
        evict_every=evict_every,
    )
    (handle,) = alloc.open()
    done = peak = 0
    while done < prompt:
        done = min(prompt, done + (chunk or prompt))
        alloc.apply(alloc.plan(extend=(handle, done), evict_window=True))
        peak = max(peak, alloc.stats().groups["window"].owned)
    while steps > 0:
        alloc.apply(alloc.plan(reserve=(handle, reserve), evict_window=True))
        taken = min(steps, accepted())
        alloc.commit(handle, taken)
        steps -= taken
        peak = max(peak, alloc.stats().groups["window"].owned)
    return peak


# prompt, steps, window, page size, chunk, reserve, evict_every, prefix cache: the peak in pages
BY_HAND = [
    (0, 0, 8, 4, None, 1, 1, False, 0),
    (1, 0, 8, 4, None, 1, 1, False, 1),
    (13, 0, 8, 4, None, 1, 1, False, 4),
    # All at once: the whole prompt, whatever the window.
    (100, 50, 8, 4, None, 1, 1, False, 25),
    # By chunks of 8: the window's 2 pages beside the 2 of the chunk.
    (100, 0, 8, 4, 8, 1, 1, False, 4),
    # Decode: from the frontier at 12 on up to token 23, of a window of 8: pages 3, 4, 5.
    (1, 200, 8, 4, None, 1, 1, False, 3),
    (1, 200, 1, 4, None, 1, 1, False, 2),
    (1, 200, 1, 1, None, 1, 1, False, 2),
    (1, 200, 5, 1, None, 1, 1, False, 6),
    # Window 9 is 3 pages with a prefix cache: C - 12, and the page that is being written.
    (1, 200, 9, 4, None, 1, 1, True, 4),
    (1, 200, 9, 4, None, 1, 1, False, 4),
    (1, 200, 1, 4, None, 1, 1, True, 2),
    # A reserve of 8 more than 1: two pages more.
    (1, 200, 8, 4, None, 9, 1, False, 5),
    # A cadence of 16 tokens is 4 pages, 3 more than one.
    (1, 200, 8, 4, None, 1, 16, False, 6),
    (1, 200, 8, 4, None, 1, 4, False, 3),
    (1, 200, 8, 4, None, 1, 5, False, 4),
    # Too short for the frontier to move at all.
    (5, 6, 8, 4, None, 1, 1, False, 3),
    (5, 20, 8, 4, None, 1, 100, False, 7),
]


@pytest.mark.parametrize("row", BY_HAND, ids=str)
def test_the_peak_by_hand(row: tuple[Any, ...]) -> None:
    prompt, steps, window, ps, chunk, reserve, every, cached, peak = row
    how: dict[str, Any] = {
        "chunk": chunk,
        "reserve": reserve,
        "evict_every": every,
        "prefix_cache": cached,
    }
    assert peak_window_pages(prompt, steps, window, ps, **how).tolist() == [peak]
    assert real_peak(prompt, steps, window, ps, **how) == peak


@pytest.mark.parametrize("ps", [1, 3, 4, 16])
@pytest.mark.parametrize("cached", [False, True])
def test_it_is_what_the_allocator_then_holds(ps: int, cached: bool) -> None:
    """Neither below nor above: equal, over windows, chunks, reserves and cadences."""
    rng = np.random.default_rng([ps, cached])
    lengths = [(0, 40), (1, 0), (ps, 3), (3 * ps + 1, 2), (11 * ps + ps // 2, 70), (60, 17)]
    for window, every in itertools.product(
        sorted({1, max(1, ps - 1), ps, ps + 1, 3 * ps, 50}), (1, ps, 3 * ps + 1, 10 * ps)
    ):
        for chunk in (None, ps, 3 * ps, 7, 1):
            reserve = int(rng.choice([1, 2, ps + 1, 2 * ps]))
            how: dict[str, Any] = {
                "chunk": chunk,
                "reserve": reserve,
                "evict_every": every,
                "prefix_cache": cached,
            }
            some = [lengths[at] for at in rng.permutation(len(lengths))[:2].tolist()]
            told = peak_window_pages(*zip(*some, strict=True), window, ps, **how)  # type: ignore[misc]
            real = [real_peak(prompt, steps, window, ps, **how) for prompt, steps in some]
            assert told.tolist() == real, (some, window, how)


def test_long_prefills_by_whole_pages_are_counted_without_a_walk() -> None:
    """The moves of a frontier repeat from the second on; so does the peak."""
    rng = np.random.default_rng(9)
    for _ in range(60):
        ps = int(rng.choice([1, 2, 4, 16]))
        chunk = ps * int(rng.integers(1, 6))
        window, every = int(rng.integers(1, 8 * ps)), int(rng.integers(1, 20 * ps))
        prompt, steps = int(rng.integers(1, 90 * ps)), int(rng.integers(0, 5))
        how: dict[str, Any] = {"chunk": chunk, "evict_every": every}
        real = real_peak(prompt, steps, window, ps, **how)
        assert peak_window_pages(prompt, steps, window, ps, **how).tolist() == [real]


@pytest.mark.parametrize("ps", [1, 3, 16])
def test_whatever_is_accepted_it_is_a_bound(ps: int) -> None:
    """Steps that commit several tokens reach it by some lengths, and pass it by none."""
    rng = np.random.default_rng(ps)
    for window, every, reserve in ((1, 1, 6), (ps + 1, 1, 8), (2 * ps, 3 * ps, 5), (20, 7, 4)):
        how: dict[str, Any] = {"reserve": reserve, "evict_every": every, "chunk": 2 * ps}
        told = int(peak_window_pages(9, 120, window, ps, **how)[0])
        drawn = iter(rng.integers(0, reserve // 2 + 1, 100_000).tolist())
        reached = [real_peak(9, 120, window, ps, **how, accepted=drawn.__next__) for _ in range(12)]
        assert max(reached) <= told
        assert real_peak(9, 120, window, ps, **how) == told


def test_an_allocator_of_just_that_many_pages_never_refuses_and_one_less_does() -> None:
    for ps, window, every in ((4, 9, 1), (16, 16, 40), (3, 7, 5)):
        peak = int(peak_window_pages(50, 100, window, ps, chunk=2 * ps, evict_every=every)[0])
        for pages in (peak, peak - 1):
            alloc = make(200 // ps + 2, ps, window, pages, 1, evict_every=every)
            (handle,) = alloc.open()

            def run(alloc: sgalloc.KVAllocator = alloc, handle: Any = handle, ps: int = ps) -> None:
                for done in [*range(2 * ps, 50, 2 * ps), *range(50, 151)]:
                    alloc.apply(alloc.plan(extend=(handle, done), evict_window=True))

            if pages == peak:
                run()
            else:
                with pytest.raises(sgalloc.OutOfPages, match="window"):
                    run()


def test_a_million_requests_and_the_largest_numbers() -> None:
    prompts = np.arange(1_000_000)
    found = peak_window_pages(prompts, 100, 4096, 64, chunk=8192)
    assert found.shape == (1_000_000,) and found.dtype == np.int64
    assert found.max() == (4096 + 8192) // 64
    some = [0, 1, 8191, 8192, 12_345, 999_999]
    alone = [int(peak_window_pages(n, 100, 4096, 64, chunk=8192)[0]) for n in some]
    assert found[some].tolist() == alone
    assert peak_window_pages(2**60, 2**60, 2**60, 1).tolist() == [2**60 + 1]
    assert peak_window_pages(2**59, 0, 1, 16, chunk=2**20, evict_every=2**22).tolist()[0] < 2**19
    assert peak_window_pages([], [], 8, 4).tolist() == []
    assert peak_window_pages([1, 2], 3, 8, 4).shape == (2,)


@pytest.mark.parametrize("name", ["window", "page_size", "chunk", "reserve", "evict_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), True, "3", [4], 2**60 + 1])
def test_one_number_out_of_order_is_refused_by_name(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"window": 8, "page_size": 4, name: value}
    with pytest.raises((TypeError, ValueError), match=name) as refused:
        peak_window_pages([5], [5], **numbers)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["prompt", "new_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, None, "3", [1.0], [[1]], 2**61])
def test_lengths_out_of_order_are_refused_by_name(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"prompt": 5, "new_tokens": 5, name: value}
    with pytest.raises((TypeError, ValueError), match=name):
        peak_window_pages(**numbers, window=8, page_size=4)


def test_a_flag_and_lengths_that_do_not_match() -> None:
    with pytest.raises(TypeError, match="prefix_cache"):
        peak_window_pages(5, 5, 8, 4, prefix_cache=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="new_tokens"):
        peak_window_pages([5, 6], [5, 6, 7], 8, 4)
