"""Sizing of one request: rounding, pages, what a decode step reserves, how wide a row is.

Expected numbers are worked out by hand in the tables. What SGLang 0.5.23 gives for the same
configuration stands beside ours where the two differ, with the reason.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import doctest
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgalloc import inputs, sizing
from sgalloc.sizing import (
    SpecConfig,
    alloc_len_per_decode,
    alloc_reserve_per_decode,
    ceil_align,
    extra_context_len,
    floor_align,
    num_new_pages,
    num_pages_for,
    row_width,
    watermarks,
)

PAGE_SIZES = [1, 2, 3, 16, 64, 128]

EAGLE_3_1_4 = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
EAGLE_5_4_8 = SpecConfig("eagle", steps=5, topk=4, draft_tokens=8)
EAGLE_5_8_64 = SpecConfig("eagle", steps=5, topk=8, draft_tokens=64)
NGRAM_12 = SpecConfig("ngram", draft_tokens=12)
DFLASH_16 = SpecConfig("dflash", draft_tokens=16)
DFLASH_17 = SpecConfig("dflash", draft_tokens=17)
UNO_8 = SpecConfig("uno", draft_tokens=8)

specs = st.builds(
    SpecConfig,
    st.sampled_from(["none", "eagle", "dflash", "ngram", "uno"]),
    steps=st.integers(1, 12),
    topk=st.integers(1, 8),
    draft_tokens=st.integers(1, 70),
)
page_sizes = st.sampled_from(PAGE_SIZES) | st.integers(1, 200)


# x, m: rounded up, rounded down, pages of m that hold x
ROUNDING = [
    (0, 1, 0, 0, 0),
    (7, 1, 7, 7, 7),
    (0, 16, 0, 0, 0),
    (1, 2, 2, 0, 1),
    (2, 2, 2, 2, 1),
    (4, 3, 6, 3, 2),
    (5, 3, 6, 3, 2),
    (6, 3, 6, 6, 2),
    (15, 16, 16, 0, 1),
    (16, 16, 16, 16, 1),
    (17, 16, 32, 16, 2),
    (63, 64, 64, 0, 1),
    (65, 64, 128, 64, 2),
    (127, 128, 128, 0, 1),
    (129, 128, 256, 128, 2),
    (2**31 - 1, 64, 2147483648, 2147483584, 33554432),  # 2**31 = 64 * 33554432
    (2**31, 3, 2147483649, 2147483646, 715827883),  # 2147483649 = 3 * 715827883
    (2**60, 7, 2**60 + 6, 2**60 - 1, 164703072086692426),  # 2**60 % 7 == 1
]


@pytest.mark.parametrize(("x", "m", "up", "down", "pages"), ROUNDING)
def test_rounding_of_a_scalar_is_the_worked_number_and_a_python_int(
    x: int, m: int, up: int, down: int, pages: int
) -> None:
    for scalar in (x, np.int64(x), np.uint64(x), np.array(x)):
        for function, expected in (
            (ceil_align, up),
            (floor_align, down),
            (num_pages_for, pages),
        ):
            result = function(scalar, m)
            assert result == expected
            assert type(result) is int
    assert ceil_align(x, np.int32(m)) == up


@pytest.mark.parametrize("m", sorted({m for _, m, *_ in ROUNDING}))
def test_rounding_of_an_array_is_that_of_its_numbers(m: int) -> None:
    rows = [row for row in ROUNDING if row[1] == m]
    xs = [row[0] for row in rows]
    for given_as in (xs, tuple(xs), np.array(xs), np.array(xs, np.uint64), np.array([xs])):
        for function, column in ((ceil_align, 2), (floor_align, 3), (num_pages_for, 4)):
            result = function(given_as, m)
            assert isinstance(result, np.ndarray)
            assert result.dtype == np.int64
            assert result.shape == np.shape(given_as)
            assert result.ravel().tolist() == [row[column] for row in rows]


@given(st.lists(st.integers(0, 2**60)), page_sizes | st.integers(1, 2**60))
def test_rounding_laws(xs: list[int], m: int) -> None:
    up, down, pages = (f(xs, m).tolist() for f in (ceil_align, floor_align, num_pages_for))
    for x, high, low, count in zip(xs, up, down, pages, strict=True):
        assert high % m == low % m == 0
        assert low <= x <= high
        assert high - low == (m if x % m else 0)
        assert count * m == high
        assert (ceil_align(x, m), floor_align(x, m), num_pages_for(x, m)) == (high, low, count)


def test_rounding_leaves_its_input_alone_and_shares_no_memory() -> None:
    xs = np.array([1, 5, 16])
    for function in (ceil_align, floor_align, num_pages_for):
        for m in (1, 2, 3, 16):
            result = function(xs, m)
            assert not np.shares_memory(result, xs)
            assert xs.tolist() == [1, 5, 16]


# prefix lengths, lengths, page size: new pages
NEW_PAGES = [
    ([0, 0], [2, 2], 128, 2),  # each request takes a page of its own, though both fit into one
    ([0], [2], 128, 1),
    ([0], [128], 128, 1),
    ([0], [129], 128, 2),
    ([31], [32], 32, 0),
    ([32], [33], 32, 1),
    ([33], [34], 32, 0),
    ([16, 5], [17, 6], 16, 1),
    ([0, 7], [10, 7], 1, 10),
    ([1, 2], [2, 3], 2, 1),  # 1 - 1, 2 - 1
    ([2, 3, 4], [3, 4, 5], 3, 1),  # 1 - 1, 2 - 1, 2 - 2
    ([100], [1000], 64, 14),  # 16 - 2
    ([2**31 - 1], [2**31 + 1], 64, 1),  # 33554433 - 33554432
    ([], [], 16, 0),
    (0, 17, 16, 2),  # one request
    (0, [17, 1], 16, 3),  # one prefix for all
    ([16, 32], 33, 16, 3),  # one length for all: 3 - 1, 3 - 2
]


@pytest.mark.parametrize(("prefix", "seq", "page_size", "pages"), NEW_PAGES)
def test_new_pages(prefix: int | list[int], seq: int | list[int], page_size: int, pages: int):
    result = num_new_pages(prefix, seq, page_size)
    assert result == pages
    assert type(result) is int
    as_arrays = (np.array(v, np.int64) for v in (prefix, seq))
    assert num_new_pages(*as_arrays, page_size) == pages


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300))), page_sizes)
def test_new_pages_are_the_pages_touched_first_by_the_new_tokens(
    pairs: list[tuple[int, int]], page_size: int
) -> None:
    prefix = [a for a, _ in pairs]
    seq = [a + grown for a, grown in pairs]
    touched = 0
    for a, b in zip(prefix, seq, strict=True):
        before = {j // page_size for j in range(a)}
        touched += len({j // page_size for j in range(b)} - before)
    assert num_new_pages(prefix, seq, page_size) == touched
    assert sum(num_new_pages(a, b, page_size) for a, b in zip(prefix, seq, strict=True)) == touched


# spec, page size: tokens a step may write
ALLOC_LEN = [
    (EAGLE_3_1_4, 1, 4),  # max(3 * 1, 4)
    (EAGLE_3_1_4, 16, 4),  # a chain needs no branch pages
    (SpecConfig("eagle", 5, 1, 4), 64, 5),  # max(5 * 1, 4)
    (EAGLE_5_4_8, 1, 20),  # max(5 * 4, 8)
    (EAGLE_5_4_8, 2, 24),  # 1 + 5 = 6, 3 pages: 6 * 4
    (EAGLE_5_4_8, 3, 36),  # 2 + 5 = 7, 3 pages: 9 * 4
    (EAGLE_5_4_8, 16, 128),  # 15 + 5 = 20, 2 pages: 32 * 4
    (EAGLE_5_4_8, 64, 512),  # 63 + 5 = 68, 2 pages: 128 * 4
    (EAGLE_5_4_8, 128, 1024),  # 127 + 5 = 132, 2 pages: 256 * 4
    (SpecConfig("eagle", 1, 2, 8), 16, 32),  # 15 + 1 = 16, 1 page: 16 * 2
    (SpecConfig("eagle", 1, 2, 64), 2, 64),  # max(1 + 1 = 2, 1 page: 2 * 2, 64)
    (EAGLE_5_8_64, 1, 64),  # max(5 * 8, 64)
    (EAGLE_5_8_64, 16, 256),  # 32 * 8
    (NGRAM_12, 1, 12),
    (NGRAM_12, 128, 12),
    (SpecConfig("ngram", 4, 4, 12), 16, 16),  # max(4 * 4, 12): no branch pages
    (DFLASH_16, 1, 16),
    (DFLASH_17, 64, 17),
    (SpecConfig("dflash", 9, 9, 16), 16, 16),  # steps and topk have no part in it
    (UNO_8, 1, 9),  # 8 + 1
    (UNO_8, 128, 9),
    *[(none, ps, 1) for ps in PAGE_SIZES for none in (None, SpecConfig())],
    (SpecConfig("none", 5, 4, 8), 16, 1),
]


@pytest.mark.parametrize(("spec", "page_size", "tokens"), ALLOC_LEN)
def test_alloc_len_and_reserve(spec: SpecConfig | None, page_size: int, tokens: int) -> None:
    assert alloc_len_per_decode(spec, page_size) == tokens
    assert alloc_reserve_per_decode(spec, page_size) == 2 * tokens
    assert type(alloc_reserve_per_decode(spec, np.int64(page_size))) is int


@given(st.integers(1, 12), st.integers(2, 8), st.integers(1, 70), st.integers(2, 40))
def test_tree_on_pages_covers_the_branch_pages_at_every_committed_length(
    steps: int, topk: int, draft_tokens: int, page_size: int
) -> None:
    spec = SpecConfig("eagle", steps, topk, draft_tokens)
    branches = 0
    for in_last_page in range(page_size):  # what each branch copies of the request's last page
        pages = len({j // page_size for j in range(in_last_page + steps)})
        branches = max(branches, pages * page_size * topk)
    assert alloc_len_per_decode(spec, page_size) == max(branches, draft_tokens)


# At page size 1 SGLang 0.5.23 keeps 4 + draft_tokens for all but UNO and so writes past the row;
# the last column is by how much. We keep max(4 + draft_tokens, reserve) there.
# spec: reserve, SGLang's headroom, ours, SGLang's shortage
PAGE_SIZE_ONE = [
    (EAGLE_3_1_4, 8, 8, 8, 0),
    (EAGLE_5_4_8, 40, 12, 40, 28),
    (EAGLE_5_8_64, 128, 68, 128, 60),
    (NGRAM_12, 24, 16, 24, 8),
    (DFLASH_16, 32, 20, 32, 12),
    (DFLASH_17, 34, 21, 34, 13),
    (UNO_8, 18, 18, 18, 0),
]


def sglang_row_extra(spec: SpecConfig, page_size: int) -> int:
    """SGLang 0.5.23's headroom: the rounding counts on larger pages (and for UNO) only."""
    plain = 4 + (0 if spec.algorithm == "none" else spec.draft_tokens)
    if spec.algorithm == "none" or (page_size == 1 and spec.algorithm != "uno"):
        return plain
    return max(plain, alloc_reserve_per_decode(spec, page_size) + page_size - 1)


@pytest.mark.parametrize(("spec", "reserve", "theirs", "ours", "short"), PAGE_SIZE_ONE)
def test_headroom_at_page_size_one_beside_sglang(
    spec: SpecConfig, reserve: int, theirs: int, ours: int, short: int
) -> None:
    assert alloc_reserve_per_decode(spec, 1) == reserve
    assert sglang_row_extra(spec, 1) == theirs
    assert extra_context_len(spec, 1) == ours
    assert ours - theirs == short
    assert row_width(1000, spec, 1) == 1000 + ours
    # The request that shows it: C at the context length and the whole reserve beyond.
    _, nxt, _ = watermarks([1000], [0], reserve, 1)
    assert nxt.tolist() == [1000 + theirs + short]


@given(specs, st.integers(2, 200))
def test_headroom_on_larger_pages_is_sglangs(spec: SpecConfig, page_size: int) -> None:
    if spec.algorithm == "none":
        # Theirs is 4 there; a plain decode step may also end just past a page edge.
        assert extra_context_len(spec, page_size) == 4 + page_size - 1
    else:
        assert extra_context_len(spec, page_size) == sglang_row_extra(spec, page_size)


# spec, context, page size: headroom, row width
ROW_WIDTH = [
    (None, 64, 1, 4, 68),
    (None, 64, 16, 19, 96),  # 83, 6 pages
    (SpecConfig(), 100, 3, 6, 108),  # 106, 36 pages
    (DFLASH_17, 64, 1, 34, 98),  # max(21, 34)
    (DFLASH_17, 64, 16, 49, 128),  # max(21, 34 + 15); 113, 8 pages
    (DFLASH_17, 64, 64, 97, 192),  # max(21, 34 + 63); 161, 3 pages
    (EAGLE_3_1_4, 64, 1, 8, 72),  # max(8, 8)
    (EAGLE_3_1_4, 64, 2, 9, 74),  # max(8, 8 + 1); 73, 37 pages
    (SpecConfig("dflash", draft_tokens=1), 64, 1, 5, 69),  # max(5, 2): the slack decides
    (EAGLE_5_4_8, 4096, 16, 271, 4368),  # 2 * 128 + 15; 4367, 273 pages
]


@pytest.mark.parametrize(("spec", "context", "page_size", "extra", "width"), ROW_WIDTH)
def test_row_width(
    spec: SpecConfig | None, context: int, page_size: int, extra: int, width: int
) -> None:
    assert extra_context_len(spec, page_size) == extra
    assert row_width(context, spec, page_size) == width
    assert row_width(np.int64(context), spec, page_size) == width


def test_row_too_narrow_case_of_a_block_of_17() -> None:
    assert row_width(64, DFLASH_17, 1) >= 98
    assert row_width(64, DFLASH_17, 16) >= 112
    reserve = alloc_reserve_per_decode(DFLASH_17, 1)
    # In a row of 85, SGLang's width, C = 51 just fits and C = 52 does not.
    assert watermarks([51, 52], [51, 51], reserve, 1)[1].tolist() == [85, 86]


@given(specs | st.none(), page_sizes, st.integers(1, 400), st.integers(0, 400))
def test_a_row_holds_every_reachable_reserve(
    spec: SpecConfig | None, page_size: int, context: int, below: int
) -> None:
    width = row_width(context, spec, page_size)
    reserve = alloc_reserve_per_decode(spec, page_size)
    committed = [context, context - 1, max(0, context - below)]
    _, nxt, _ = watermarks(committed, 0, reserve, page_size)
    assert nxt.max() <= width
    assert width % page_size == 0
    assert 0 <= width - (context + extra_context_len(spec, page_size)) < page_size


def test_spec_config_is_a_frozen_value() -> None:
    spec = SpecConfig("eagle", np.int64(5), np.uint8(4), np.int32(8))
    assert spec == EAGLE_5_4_8
    assert hash(spec) == hash(EAGLE_5_4_8)
    assert all(type(n) is int for n in (spec.steps, spec.topk, spec.draft_tokens))
    assert SpecConfig() == SpecConfig(algorithm="none", steps=0, topk=1, draft_tokens=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.steps = 6  # type: ignore[misc]
    assert dataclasses.replace(spec, topk=1).topk == 1
    with pytest.raises(ValueError, match="topk"):
        dataclasses.replace(spec, topk=0)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


def test_docstring_examples() -> None:
    result = doctest.testmod(sizing)
    assert result.failed == 0
    assert result.attempted >= 10


def modules_named_in(source: str) -> set[str]:
    """The modules that a file imports, wherever the import stands."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            named.add(str(node.module))
    return named


def test_sizing_needs_numpy_alone() -> None:
    of_sizing, of_inputs = (
        modules_named_in(Path(module.__file__).read_text(encoding="utf-8"))
        for module in (sizing, inputs)
    )
    assert {name for name in of_sizing if name.startswith("sgalloc")} == {"sgalloc.inputs"}
    roots = {name.split(".")[0] for name in (of_sizing - {"sgalloc.inputs"}) | of_inputs}
    third_party = roots - {"__future__", "collections", "contextlib", "dataclasses", "typing"}
    assert third_party == {"numpy"}
