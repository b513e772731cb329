"""Runs of pages: known answers, and what any list gives back when it is spelled out again."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, make
from hypothesis import given
from hypothesis import strategies as st

from sgalloc.extents import extents, pair_extents

# Page ids, and (first, count) of their runs.
RUNS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([], []),
    ([7], [(7, 1)]),
    ([1, 2, 3], [(1, 3)]),
    ([3, 2, 1], [(3, 1), (2, 1), (1, 1)]),
    ([5, 6, 9, 10, 11, 2], [(5, 2), (9, 3), (2, 1)]),
    ([4, 4], [(4, 1), (4, 1)]),
    ([1, 3, 5], [(1, 1), (3, 1), (5, 1)]),
]
# Page ids of both sides, and (source, destination, count).
PAIRS: list[tuple[list[int], list[int], list[tuple[int, int, int]]]] = [
    ([], [], []),
    ([1, 2, 3, 4], [11, 12, 13, 14], [(1, 11, 4)]),
    ([1, 2, 3, 4], [11, 12, 3, 4], [(1, 11, 2), (3, 3, 2)]),
    ([1, 2, 7, 8], [11, 12, 13, 14], [(1, 11, 2), (7, 13, 2)]),
    ([1, 2, 7, 8, 9], [5, 6, 7, 2, 3], [(1, 5, 2), (7, 7, 1), (8, 2, 2)]),
    ([3, 2], [2, 3], [(3, 2, 1), (2, 3, 1)]),
]
ids = st.lists(st.integers(1, 6) | st.integers(1, 2**31 - 1), max_size=40)


@pytest.mark.parametrize(("pages", "expected"), RUNS)
def test_runs(pages: list[int], expected: list[tuple[int, int]]) -> None:
    for given_as in (pages, np.array(pages, np.int32), np.array(pages, np.int64)):
        first, count = extents(given_as)
        assert first.dtype == count.dtype == np.int64
        assert list(zip(first.tolist(), count.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("src", "dst", "expected"), PAIRS)
def test_pairs(src: list[int], dst: list[int], expected: list[tuple[int, int, int]]) -> None:
    found = pair_extents(np.array(src, np.int32), dst)
    assert all(part.dtype == np.int64 for part in found)
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected


def spelled(first: np.ndarray, count: np.ndarray) -> list[int]:
    runs = zip(first.tolist(), count.tolist(), strict=True)
    return [page for start, pages in runs for page in range(start, start + pages)]


@given(ids)
def test_runs_spell_the_list_and_are_as_long_as_can_be(pages: list[int]) -> None:
    first, count = extents(pages)
    assert spelled(first, count) == pages
    assert (count >= 1).all()
    assert (first[1:] != (first + count)[:-1]).all(), "two runs that are one"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=40))
def test_pairs_spell_both_lists_and_are_as_long_as_can_be(pages: list[tuple[int, int]]) -> None:
    a, b = [p for p, _ in pages], [p for _, p in pages]
    src, dst, count = pair_extents(a, b)
    assert spelled(src, count) == a and spelled(dst, count) == b
    joined = (src[1:] == (src + count)[:-1]) & (dst[1:] == (dst + count)[:-1])
    assert not joined.any()


def test_a_fresh_pool_is_one_extent() -> None:
    alloc = make(64, 16)
    (h,) = alloc.open()
    alloc.extend(h, 640)
    assert [part.tolist() for part in extents(alloc.pages(h))] == [[1], [40]]


def test_a_million_pages_cost_a_few_arrays() -> None:
    pages = np.random.default_rng(0).permutation(1_000_000) + 1
    tracemalloc.start()
    try:
        first, count = extents(pages)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count.sum() == 1_000_000 and first[0] == pages[0]
    assert peak < 10 * 8 * pages.size, "no Python object a page"


@pytest.mark.parametrize(
    ("value", "error", "naming"),
    [
        ([0, 1], ValueError, "[0]=0"),
        ([3, -2], ValueError, "[1]=-2"),
        ([1.0], TypeError, "1.0"),
        ([True], TypeError, "True"),
        (None, TypeError, "None"),
        ("1", TypeError, "'1'"),
        ([[1, 2]], ValueError, "(1, 2)"),
        (OnDevice(), TypeError, "on a device"),
    ],
)
def test_bad_page_lists(value: Any, error: type[Exception], naming: str) -> None:
    for call, name in (
        (lambda: extents(value), "page_ids"),
        (lambda: pair_extents(value, [1, 2]), "src_ids"),
        (lambda: pair_extents([1, 2], value), "dst_ids"),
    ):
        with pytest.raises(error) as refused:
            call()
        message = str(refused.value)
        assert name in message and naming in message and "\n" not in message


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pages cannot be sent into 2"):
        pair_extents([1, 2, 3], [4, 5])
