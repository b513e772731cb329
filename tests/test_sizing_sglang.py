"""Every sizing formula beside SGLang 0.5.23's, written down anew from what it is known to do.

`DIFFERENCES` says where ours differs and why; everywhere else on the grid the two are equal, and
where one is listed they do differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from host_support import EDGES, PAGE_SIZES, committed_at, each_edge, each_page_size, make

from sgalloc import sizing
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash

SPECS = {
    "none": SpecConfig(),
    "chain 3/1/4": SpecConfig("eagle", 3, 1, 4),
    "chain 5/1/3": SpecConfig("eagle", 5, 1, 3),
    "tree 5/4/8": SpecConfig("eagle", 5, 4, 8),
    "tree 5/8/64": SpecConfig("eagle", 5, 8, 64),
    "tree 1/2/64": SpecConfig("eagle", 1, 2, 64),
    "tree 16/2/4": SpecConfig("eagle", 16, 2, 4),
    "ngram 12": SpecConfig("ngram", draft_tokens=12),
    "ngram 4/4/12": SpecConfig("ngram", 4, 4, 12),
    "ngram 0/8/4": SpecConfig("ngram", 0, 8, 4),
    "dflash 16": SpecConfig("dflash", draft_tokens=16),
    "dflash 17": SpecConfig("dflash", draft_tokens=17),
    "dflash 9/9/16": SpecConfig("dflash", 9, 9, 16),
    "uno 8": SpecConfig("uno", draft_tokens=8),
    "uno 3/3/8": SpecConfig("uno", 3, 3, 8),
}
each_spec = pytest.mark.parametrize("name", SPECS)


def rounded(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


# -- what SGLang does ------------------------------------------------------------------------------


class Theirs:
    """SGLang's numbers, in tokens."""

    @staticmethod
    def alloc_len(spec: SpecConfig, page: int) -> int:
        steps, topk, draft = spec.steps or 1, spec.topk, spec.draft_tokens
        if spec.algorithm == "none":
            return 1
        if spec.algorithm == "uno":
            return draft + 1
        if page == 1 or topk == 1 or spec.algorithm == "ngram":
            return max(steps * topk, draft)
        return max(rounded(page - 1 + steps, page) * topk, draft)

    @staticmethod
    def row_extra(spec: SpecConfig, page: int) -> int:
        plain = 4 + spec.draft_tokens
        if spec.algorithm == "none" or (page == 1 and spec.algorithm != "uno"):
            return plain
        return max(plain, 2 * Theirs.alloc_len(spec, page) + page - 1)

    @staticmethod
    def dflash_takes(committed: int, allocated: int, spec: SpecConfig, page: int) -> int:
        mark = max(allocated, rounded(committed + 2 * spec.draft_tokens, page))
        return rounded(mark, page) - rounded(allocated, page)

    @staticmethod
    def estimate(committed: int, allocated: int, reserve: int, page: int) -> int:
        more = max(0, committed + reserve - allocated)
        return rounded(allocated + more, page) - rounded(allocated, page)

    @staticmethod
    def older_estimate(spec: SpecConfig, page: int) -> int:
        steps, draft = spec.steps, spec.draft_tokens
        if page > 1:
            steps = rounded(steps + page, page) if spec.topk > 1 else rounded(steps, page)
            draft = rounded(draft, page)
        return max(steps * spec.topk, draft)

    @staticmethod
    def decode_pages(seq_lens: list[int], page: int) -> int:
        return sum(1 for seq in seq_lens if seq % page == 1)


# -- where ours differs ----------------------------------------------------------------------------


class Difference(NamedTuple):
    """One cause.

    Attributes:
        where: the configurations, by spec and page size.
        why: in words.
    """

    where: Callable[[SpecConfig, int], bool]
    why: str


def unused_depth(spec: SpecConfig, page: int) -> bool:
    """A block of drafts, with steps and branches that it has no use for."""
    return spec.algorithm == "dflash" and (spec.steps, spec.topk) != (0, 1)


def lookup_without_steps(spec: SpecConfig, page: int) -> bool:
    """Drafts by lookup: no steps stand for none, where SGLang takes one."""
    return spec.algorithm == "ngram" and not spec.steps and spec.topk > spec.draft_tokens


def too_narrow(spec: SpecConfig, page: int) -> bool:
    """Page size 1: two steps reach past 4 + draft tokens."""
    if page > 1 or spec.algorithm in ("none", "uno"):
        return False
    return 2 * sizing.alloc_len_per_decode(spec, 1) > 4 + spec.draft_tokens


def plain_on_pages(spec: SpecConfig, page: int) -> bool:
    """Plain decode, too, rounds up to a page at the end of the context."""
    return spec.algorithm == "none" and page > 1


DIFFERENCES = {
    "alloc_len": [
        Difference(unused_depth, "a DFLASH step writes its block, whatever steps and topk say"),
        Difference(lookup_without_steps, "no steps draft nothing; SGLang reads 0 as 1"),
    ],
    "row_extra": [
        Difference(too_narrow, "SGLang's row is short by the reserve: it writes the next row"),
        Difference(plain_on_pages, "the last page of the context must fit, too"),
        Difference(unused_depth, "as alloc_len"),
        Difference(lookup_without_steps, "as alloc_len"),
    ],
}

OURS = {"alloc_len": sizing.alloc_len_per_decode, "row_extra": sizing.extra_context_len}
THEIRS = {"alloc_len": Theirs.alloc_len, "row_extra": Theirs.row_extra}


@each_page_size
@each_spec
@pytest.mark.parametrize("quantity", DIFFERENCES)
def test_equal_but_where_the_table_says(quantity: str, name: str, ps: int) -> None:
    spec = SPECS[name]
    ours, theirs = OURS[quantity](spec, ps), THEIRS[quantity](spec, ps)
    listed = [d for d in DIFFERENCES[quantity] if d.where(spec, ps)]
    wide_block = quantity == "alloc_len" and unused_depth(spec, ps)
    if wide_block:
        assert ours == spec.draft_tokens < theirs
    if not listed:
        assert ours == theirs
    elif quantity == "row_extra" and not (unused_depth(spec, ps) or lookup_without_steps(spec, ps)):
        assert ours > theirs, listed[0].why
    assert ours == theirs or listed


@pytest.mark.parametrize("quantity", DIFFERENCES)
def test_every_difference_of_the_table_shows_on_the_grid(quantity: str) -> None:
    for difference in DIFFERENCES[quantity]:
        found = [
            (spec, ps)
            for spec in SPECS.values()
            for ps in PAGE_SIZES
            if difference.where(spec, ps) and OURS[quantity](spec, ps) != THEIRS[quantity](spec, ps)
        ]
        assert found, difference.why


# spec at page size 1: tokens by which SGLang's row is too narrow
SHORT_AT_ONE = [
    (SpecConfig("eagle", 3, 1, 4), 0),  # 8 - 8
    (SpecConfig("eagle", 5, 4, 8), 28),  # 40 - 12
    (SpecConfig("eagle", 5, 8, 64), 60),  # 128 - 68
    (SpecConfig("ngram", draft_tokens=12), 8),  # 24 - 16
    (SpecConfig("dflash", draft_tokens=16), 12),  # 32 - 20
    (SpecConfig("dflash", draft_tokens=17), 13),  # 34 - 21
    (SpecConfig("uno", draft_tokens=8), 0),  # 18 - max(12, 18): SGLang counts UNO everywhere
]


@pytest.mark.parametrize(("spec", "short"), SHORT_AT_ONE)
def test_the_row_at_page_size_one(spec: SpecConfig, short: int) -> None:
    """Ours holds the worst C, the context length, with the whole reserve; theirs does not."""
    context = 100
    reserve = sizing.alloc_reserve_per_decode(spec, 1)
    (mark,) = sizing.watermarks([context], [context], reserve, 1)[1]
    assert mark - (context + Theirs.row_extra(spec, 1)) == short
    assert sizing.row_width(context, spec, 1) - mark >= 0
    assert sizing.extra_context_len(spec, 1) - Theirs.row_extra(spec, 1) == short


# -- a step: watermarks, pages, estimates ----------------------------------------------------------


@each_edge
@each_spec
def test_a_step_takes_what_theirs_takes(name: str, ps: int, edge: int) -> None:
    """Watermarks and the estimate, from every place in the page, at every lag of A."""
    spec, committed = SPECS[name], committed_at(ps, edge)
    reserve = sizing.alloc_reserve_per_decode(spec, ps)
    for allocated in (rounded(committed, ps), rounded(committed, ps) + ps, committed + 3 * reserve):
        held = rounded(allocated, ps)
        mark = max(held, rounded(committed + reserve, ps))
        cur, nxt, needed = sizing.watermarks([committed], [held], reserve, ps)
        assert (cur.tolist(), nxt.tolist(), needed) == ([held], [mark], mark - held)
        estimate = sizing.new_tokens_required_next_decode([committed], [held], ps, spec)
        if spec.algorithm == "none":
            assert estimate == (ps if committed % ps == 0 else 0)
        else:
            assert estimate == Theirs.estimate(committed, held, reserve, ps) == mark - held
            older = sizing.new_tokens_required_next_decode(
                [committed] * 2, [held] * 2, ps, spec, "conservative"
            )
            assert older == 2 * Theirs.older_estimate(spec, ps)


def test_the_older_estimate_is_neither_the_need_nor_a_bound_on_it() -> None:
    below = above = False
    for spec in SPECS.values():
        if spec.algorithm == "none":
            continue
        for ps, edge in EDGES:
            committed = committed_at(ps, edge)
            held = rounded(committed, ps)
            tight, older = (
                sizing.new_tokens_required_next_decode([committed], [held], ps, spec, estimate)
                for estimate in ("tight", "conservative")
            )
            below |= older < tight
            above |= older > tight
    assert below and above


@each_edge
def test_pages_of_a_plain_step(ps: int, edge: int) -> None:
    """SGLang's count of a decode step asks ``seq % page == 1``: none at page size 1."""
    seq = committed_at(ps, edge) + 1
    ours = sizing.num_new_pages([seq - 1], [seq], ps)
    theirs = Theirs.decode_pages([seq], ps)
    assert ours == (1 if edge == 0 else 0)
    assert (ours, theirs) == (1, 0) if ps == 1 else ours == theirs


@each_edge
def test_the_estimate_of_dflash_is_what_its_step_takes(ps: int, edge: int) -> None:
    """A block that adapts: SGLang estimates with the largest and takes with the current one."""
    largest, now = (SpecConfig("dflash", draft_tokens=n) for n in (48, 16))
    committed = committed_at(ps, edge)
    alloc = make(400, ps, max_requests=1, row_width=rounded(committed + 200, ps))
    handle = alloc.open()
    alloc.extend(handle, committed)
    held = int(alloc.allocated(handle)[0])
    theirs = Theirs.estimate(committed, held, sizing.alloc_reserve_per_decode(largest, ps), ps)
    assert theirs >= Theirs.dflash_takes(committed, held, now, ps)
    if ps <= 64:
        assert theirs > Theirs.dflash_takes(committed, held, now, ps)
    ours = sizing.new_tokens_required_next_decode([committed], [held], ps, now)
    free = alloc.available()
    step = dflash.prepare_for_decode(alloc, handle, now)
    assert ours == step.needed == (free - alloc.available()) * ps
    assert ours == Theirs.dflash_takes(committed, held, now, ps)


def test_what_theirs_does_not_check() -> None:
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 3 is below prefix_lens"):
        sizing.num_new_pages(np.array([4]), np.array([3]), 1)
