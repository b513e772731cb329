"""Sizing of a batch: decode watermarks, engine requests, the estimate of the next step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgalloc.sizing import (
    SpecConfig,
    alloc_reserve_per_decode,
    ceil_align,
    new_tokens_required_next_decode,
    num_new_pages,
    page_aligned_decode_alloc_lens,
    watermarks,
)

PAGE_SIZES = [1, 2, 3, 16, 64, 128]
page_sizes = st.sampled_from(PAGE_SIZES)

# (committed, allocated, reserve) of each request; allocated may be anything, as in an engine.
requests = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 80)), max_size=12
)
specs = st.builds(
    SpecConfig,
    st.sampled_from(["eagle", "dflash", "ngram", "uno"]),
    steps=st.integers(1, 6),
    topk=st.integers(1, 4),
    draft_tokens=st.integers(1, 20),
)

# page size: C, A, reserve, nxt, needed; C + reserve and its pages in the comment
WATERMARKS = [
    (1, 0, 0, 1, 1, 1),
    (1, 51, 51, 34, 85, 34),
    (2, 4, 4, 3, 8, 4),  # 7: 4 pages
    (2, 5, 6, 3, 8, 2),  # 8: 4 pages
    (3, 6, 6, 4, 12, 6),  # C % ps == 0; 10: 4 pages
    (3, 7, 9, 4, 12, 3),  # C % ps == 1; 11: 4 pages
    (3, 8, 9, 4, 12, 3),  # C % ps == ps - 1; 12: 4 pages
    (16, 32, 32, 16, 48, 16),  # 48: 3 pages
    (16, 33, 48, 16, 64, 16),  # 49: 4 pages
    (16, 47, 48, 16, 64, 16),  # 63: 4 pages
    (64, 64, 64, 16, 128, 64),  # 80: 2 pages
    (64, 65, 128, 16, 128, 0),  # 81: 2 pages
    (64, 127, 128, 16, 192, 64),  # 143: 3 pages
    (128, 128, 128, 40, 256, 128),  # 168: 2 pages
    (128, 129, 256, 40, 256, 0),  # 169: 2 pages
    (128, 255, 256, 40, 384, 128),  # 295: 3 pages
    (16, 32, 32, 0, 32, 0),  # nothing reserved
    (16, 40, 96, 8, 96, 0),  # 48, but 96 are held: never given back here
    (16, 40, 32, 8, 48, 16),  # A below C: growth counts from A
    (16, 30, 30, 8, 48, 18),  # after a prefill A may end inside a page; its tail is counted too
    (4, 2, 13, 3, 13, 0),  # 8 < 13: cur is kept, unrounded
    (64, 2**31 - 1, 2**31 - 64, 34, 2**31 + 64, 128),  # 2**31 + 33; past int32
    (1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**32 - 2, 2**31 - 1),
    (16, 2**60, 2**60, 2**60, 2**61, 2**60),  # the largest of each
]


@pytest.mark.parametrize(
    ("page_size", "committed", "allocated", "reserve", "expected", "tokens"), WATERMARKS
)
def test_watermark_of_one_request(
    page_size: int, committed: int, allocated: int, reserve: int, expected: int, tokens: int
) -> None:
    cur, nxt, needed = watermarks([committed], [allocated], reserve, page_size)
    assert cur.tolist() == [allocated]
    assert nxt.tolist() == [expected]
    assert needed == tokens
    assert cur.dtype == nxt.dtype == np.int64
    assert cur.shape == nxt.shape == (1,)
    assert type(needed) is int


def test_reserve_and_commit_leaves_no_stranded_tail() -> None:
    """Page 16, extended to 30 tokens, reserve 8, accepted 1, 4, 2, 3, 1 in turn."""
    committed, allocated = 30, 32
    seen = []
    for accepted in (1, 4, 2, 3, 1):
        _, nxt, _ = watermarks([committed], [allocated], 8, 16)
        committed, allocated = committed + accepted, int(nxt[0])
        seen.append((committed, allocated))
    assert seen == [(31, 48), (35, 48), (37, 48), (40, 48), (41, 48)]
    assert watermarks([committed], [allocated], 8, 16)[1].tolist() == [64]  # 41 + 8 = 49


@given(requests, page_sizes)
def test_watermark_laws(batch: list[tuple[int, int, int]], page_size: int) -> None:
    committed, allocated, reserve = ([r[k] for r in batch] for k in range(3))
    cur, nxt, needed = watermarks(committed, allocated, reserve, page_size)
    assert cur.tolist() == allocated
    for (c, a, r), mark in zip(batch, nxt.tolist(), strict=True):
        pages = {j // page_size for j in range(c + r)}
        assert mark == max(a, len(pages) * page_size)
        assert mark >= a
        assert mark % page_size == 0 or mark == a
    assert needed == sum(nxt.tolist()) - sum(allocated) >= 0

    alone = [watermarks([c], [a], r, page_size) for c, a, r in batch]
    assert [int(one[1][0]) for one in alone] == nxt.tolist()
    assert sum(one[2] for one in alone) == needed

    turned = watermarks(committed[::-1], allocated[::-1], reserve[::-1], page_size)
    assert turned[1].tolist() == nxt.tolist()[::-1]


@given(requests, page_sizes, st.integers(0, 90))
def test_one_number_stands_for_every_request(
    batch: list[tuple[int, int, int]], page_size: int, number: int
) -> None:
    committed, allocated, reserve = ([r[k] for r in batch] for k in range(3))
    many = [number] * len(batch)
    for short, full in (
        ((committed, allocated, number), (committed, allocated, many)),
        ((number, allocated, reserve), (many, allocated, reserve)),
        ((committed, number, reserve), (committed, many, reserve)),
        ((committed, number, number), (committed, many, many)),
    ):
        left, right = watermarks(*short, page_size), watermarks(*full, page_size)
        assert [v.tolist() for v in left[:2]] == [v.tolist() for v in right[:2]]
        assert left[2] == right[2]
    cur, nxt, _ = watermarks(number, 0, 0, page_size)
    assert (cur.tolist(), nxt.tolist()) == ([0], [ceil_align(number, page_size)])


@given(requests, page_sizes, st.integers(0, 200), st.integers(0, 200))
def test_a_changing_reserve(
    batch: list[tuple[int, int, int]], page_size: int, first: int, second: int
) -> None:
    committed, allocated = [r[0] for r in batch], [r[1] for r in batch]
    low, high = sorted((first, second))
    _, small, need_small = watermarks(committed, allocated, low, page_size)
    _, large, need_large = watermarks(committed, allocated, high, page_size)
    # Grown in two steps it asks for exactly the difference ...
    assert watermarks(committed, small, high, page_size)[2] == need_large - need_small
    # ... and shrunk it asks for nothing and keeps what it has.
    _, kept, need = watermarks(committed, large, low, page_size)
    assert need == 0
    assert kept.tolist() == large.tolist()


def forms_of(numbers: list[int]) -> dict[str, Any]:
    spaced = np.zeros(2 * len(numbers), np.int64)
    spaced[::2] = numbers
    locked = np.array(numbers)
    locked.flags.writeable = False
    dtypes = ["int16", "int32", "uint8", "uint32", "uint64", ">i4"]
    return {
        **{dtype: np.array(numbers, dtype) for dtype in dtypes},
        "tuple": tuple(numbers),
        "numpy scalars": [np.int32(n) for n in numbers],
        "mixed scalars": [np.uint64(numbers[0]), *numbers[1:]],
        "strided": spaced[::2],
        "read-only": locked,
    }


FORMS = list(forms_of([0]))


@pytest.mark.parametrize("form", FORMS)
def test_every_host_form_gives_the_same(form: str) -> None:
    committed, allocated, reserve = [30, 40, 250], [32, 48, 255], [8, 9, 7]
    given_as = [forms_of(v)[form] for v in (committed, allocated, reserve)]
    cur, nxt, needed = watermarks(*given_as, 16)
    # 38, 49 and 257 tokens: 3, 4 and 17 pages; 257 and 272 are past uint8.
    assert (cur.tolist(), nxt.tolist(), needed) == (allocated, [48, 64, 272], 16 + 16 + 17)
    assert num_new_pages(given_as[0], given_as[1], 8) == 1  # 4 - 4, 6 - 5, 32 - 32
    assert new_tokens_required_next_decode(*given_as[:2], 16) == 0
    assert new_tokens_required_next_decode(given_as[0], given_as[1], 8) == 8  # 40 alone


def test_torch_cpu_tensors_and_ranges() -> None:
    torch = pytest.importorskip("torch")
    committed = torch.tensor([30, 40], dtype=torch.int32)
    allocated = torch.tensor([32, 48])
    cur, nxt, needed = watermarks(committed, allocated, torch.tensor(8), 16)
    assert (cur.tolist(), nxt.tolist(), needed) == ([32, 48], [48, 48], 16)
    nxt[:] = cur[:] = 0
    assert allocated.tolist() == [32, 48]
    assert num_new_pages(range(3), torch.tensor([16, 17, 18]), 16) == 3
    assert ceil_align(torch.tensor([5]), 4).tolist() == [8]
    assert ceil_align(torch.tensor(5), 4) == 8
    assert ceil_align([torch.tensor(5), np.array(3), 9], 4).tolist() == [8, 4, 12]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_results_never_share_memory_with_the_input(page_size: int) -> None:
    committed, allocated, reserve = np.array([3, 5]), np.array([4, 200]), np.array([0, 1])
    before = [v.copy() for v in (committed, allocated, reserve)]
    cur, nxt, _ = watermarks(committed, allocated, reserve, page_size)
    assert not np.shares_memory(cur, nxt)
    cur[:] = nxt[:] = -1
    new_tokens_required_next_decode(committed, allocated, page_size, SpecConfig("uno", 1, 1, 1))
    for array, kept in zip((committed, allocated, reserve), before, strict=True):
        assert array.tolist() == kept.tolist()


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.zeros(0, np.int32), range(0)])
def test_no_requests(empty: Any) -> None:
    cur, nxt, needed = watermarks(empty, empty, empty, 16)
    assert cur.shape == nxt.shape == (0,)
    assert cur.dtype == nxt.dtype == np.int64
    assert needed == 0
    assert num_new_pages(empty, 5, 16) == 0
    for spec in (None, SpecConfig("dflash", draft_tokens=4)):
        for estimate in ("tight", "conservative"):
            assert new_tokens_required_next_decode(empty, empty, 16, spec, estimate) == 0
    assert page_aligned_decode_alloc_lens([], reserve=empty, page_size=16) == ([], [], 0)


# --- engine requests --------------------------------------------------------------------------


@dataclass(slots=True)
class Owned:
    """The record of an engine that keeps both lengths in it."""

    kv_committed_len: int
    kv_allocated_len: int


@dataclass(slots=True)
class Extent:
    """The record of an engine that keeps the committed length on the request."""

    kv_allocated_len: int


@dataclass(slots=True)
class Request:
    """A request; ``kv_committed_len`` counts where ``kv`` has none."""

    kv: Any
    kv_committed_len: int = -1


@given(requests, page_sizes, st.integers(0, 80), st.booleans())
def test_engine_requests_give_what_arrays_give(
    batch: list[tuple[int, int, int]], page_size: int, reserve: int, mixed: bool
) -> None:
    owned = [Request(Owned(c, a)) for c, a, _ in batch]
    older = [Request(Extent(a), c) for c, a, _ in batch]
    both = [(owned, older)[i % 2][i] for i in range(len(batch))]
    committed, allocated = [r[0] for r in batch], [r[1] for r in batch]
    for per_request in (reserve, [r[2] for r in batch]):
        cur, nxt, needed = watermarks(committed, allocated, per_request, page_size)
        for reqs in (owned, older, both, iter(both)):
            result = page_aligned_decode_alloc_lens(reqs, reserve=per_request, page_size=page_size)
            assert result == (cur.tolist(), nxt.tolist(), needed)
            assert all(type(n) is int for n in (*result[0], *result[1], result[2]))
    assert [(r.kv.kv_committed_len, r.kv.kv_allocated_len) for r in owned] == [r[:2] for r in batch]


def test_engine_request_after_a_prefill_may_end_inside_a_page() -> None:
    reqs = [SimpleNamespace(kv=Owned(2, 13)), SimpleNamespace(kv=Owned(13, 13))]
    # 2 + 3 = 5 rounds to 8, below 13; 13 + 3 = 16.
    assert page_aligned_decode_alloc_lens(reqs, reserve=3, page_size=4) == ([13, 13], [13, 16], 3)


# --- the estimate -----------------------------------------------------------------------------


@given(requests, page_sizes, specs)
def test_tight_estimate_is_the_pages_that_the_plan_takes(
    batch: list[tuple[int, int, int]], page_size: int, spec: SpecConfig
) -> None:
    committed, allocated = [r[0] for r in batch], [r[1] for r in batch]
    reserve = alloc_reserve_per_decode(spec, page_size)
    _, nxt, needed = watermarks(committed, allocated, reserve, page_size)
    estimate = new_tokens_required_next_decode(committed, allocated, page_size, spec)
    taken = 0
    for a, mark in zip(allocated, nxt.tolist(), strict=True):
        held = {j // page_size for j in range(a)}
        taken += len({j // page_size for j in range(mark)} - held)
    assert estimate == taken * page_size
    assert estimate == num_new_pages(allocated, nxt, page_size) * page_size
    if all(a % page_size == 0 for a in allocated):
        assert estimate == needed


@given(st.lists(st.integers(0, 300)), page_sizes)
def test_plain_estimate_is_exact_while_allocated_is_committed_rounded_up(
    committed: list[int], page_size: int
) -> None:
    allocated = ceil_align(committed, page_size)
    _, _, needed = watermarks(committed, allocated, 1, page_size)
    for spec in (None, SpecConfig()):
        for estimate in ("tight", "conservative"):
            result = new_tokens_required_next_decode(
                committed, allocated, page_size, spec, estimate
            )
            assert result == needed
            assert type(result) is int


def test_plain_estimate_counts_page_edges_whatever_is_held() -> None:
    assert new_tokens_required_next_decode([31, 32, 33, 0], [32, 32, 64, 0], 32) == 64
    # The second page is there already, so the step itself takes nothing.
    assert new_tokens_required_next_decode([32], [64], 32) == 32
    assert watermarks([32], [64], 1, 32)[2] == 0


# spec, page size, C, A: tight, conservative
ESTIMATES = [
    # reserve 8; S = 16, N = 16: neither a bound below ...
    (SpecConfig("eagle", 3, 1, 4), 16, 31, 32, 16, 16),  # 39: 48
    (SpecConfig("eagle", 3, 1, 4), 16, 40, 48, 0, 16),  # 48: held
    # ... nor above: reserve 40, max(5 * 4, 8) = 20
    (SpecConfig("eagle", 5, 4, 8), 1, 7, 7, 40, 20),
    # reserve 256; S = ceil(5 + 16) = 32, N = 16: 32 * 4
    (SpecConfig("eagle", 5, 4, 8), 16, 32, 32, 256, 128),
    (SpecConfig("eagle", 5, 4, 70), 3, 3, 3, 141, 72),  # reserve 140, 143: 144; N = 72 > 9 * 4
    # reserve 34; S = 0, N = 32
    (SpecConfig("dflash", draft_tokens=17), 16, 16, 16, 48, 32),  # 50: 64
    # reserve 32; S = ceil(4 + 16) = 32: 32 * 4
    (SpecConfig("ngram", 4, 4, 12), 16, 1, 16, 32, 128),  # 33: 48
    # reserve 18; N = 8, unrounded
    (SpecConfig("uno", draft_tokens=8), 1, 5, 5, 18, 8),
    # A ends inside a page: only whole new pages count, 38: 48 less the 32 that 30 take
    (SpecConfig("dflash", draft_tokens=4), 16, 30, 30, 16, 16),
]


@pytest.mark.parametrize(
    ("spec", "page_size", "committed", "allocated", "tight", "conservative"), ESTIMATES
)
def test_estimates(
    spec: SpecConfig, page_size: int, committed: int, allocated: int, tight: int, conservative: int
) -> None:
    for estimate, expected in (("tight", tight), ("conservative", conservative)):
        one = new_tokens_required_next_decode([committed], [allocated], page_size, spec, estimate)
        assert one == expected
        assert type(one) is int
        three = new_tokens_required_next_decode(
            [committed] * 3, [allocated] * 3, page_size, spec, estimate
        )
        assert three == 3 * expected


# --- size -------------------------------------------------------------------------------------


def test_a_million_requests() -> None:
    """C = 0, 1, 2, ... and page 64: of every 64 requests 16 (C % 64 = 0 and 49 to 63) grow."""
    committed = np.arange(1_000_000)
    allocated = ceil_align(committed, 64)
    cur, nxt, needed = watermarks(committed, allocated, 16, 64)
    assert needed == 15_625 * 16 * 64
    assert (nxt - committed >= 16).all()
    assert (nxt - committed < 16 + 64).all()
    assert (cur == allocated).all()
    assert num_new_pages(committed, committed + 16, 64) == 15_625 * 16
    assert new_tokens_required_next_decode(committed, allocated, 64) == 15_625 * 64
    eight = SpecConfig("dflash", draft_tokens=8)
    assert new_tokens_required_next_decode(committed, allocated, 64, eight) == needed
    as_lists = watermarks(committed.tolist(), allocated.tolist(), [16] * 1_000_000, 64)
    assert as_lists[2] == needed
    reqs = [Request(Owned(49, 64))] * 1_000_000
    assert page_aligned_decode_alloc_lens(reqs, reserve=16, page_size=64)[2] == 64_000_000


def test_a_sum_past_int64_stays_exact() -> None:
    assert watermarks([0] * 10, 0, 2**60, 1)[2] == 10 * 2**60
    assert num_new_pages(0, [2**60] * 10, 1) == 10 * 2**60
    assert watermarks([2**60] * 9, [2**60 - 1] * 9, 2**60, 3)[2] == 9 * (2**61 + 1 - 2**60 + 1)
