"""What a prepared step returns, counts and keeps; and that a refused one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    Query,
    assert_laws,
    cached,
    count_launches,
    each_page_size,
    fingerprint,
    make,
    prompt,
    unchanged,
)

import sgalloc
from sgalloc import sizing
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle

CHAIN = SpecConfig("eagle", 3, 1, 4)
TREE = SpecConfig("eagle", 3, 2, 6)
BLOCK = SpecConfig("dflash", draft_tokens=4)
MODULES = {"eagle": (eagle.prepare_for_decode, CHAIN), "dflash": (dflash.prepare_for_decode, BLOCK)}
each_module = pytest.mark.parametrize("name", MODULES)


def running(ps: int = 16, pages: int = 40) -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """Three requests with C at a page edge, one past it and one before it."""
    alloc = make(pages, ps, max_requests=6, row_width=pages * ps)
    h = alloc.open(3)
    alloc.extend(h, [2 * ps, 2 * ps + 1, 3 * ps - 1])
    return alloc, h


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [CHAIN, TREE, SpecConfig("ngram", draft_tokens=5), SpecConfig("uno", draft_tokens=4)],
    ids=str,
)
@each_page_size
def test_eagle_returns_the_numbers_of_its_plan(spec: SpecConfig, ps: int) -> None:
    alloc, h = running(ps, 600 // ps + 40)
    committed, held = alloc.committed(h), alloc.allocated(h)
    reserve = sizing.alloc_reserve_per_decode(spec, ps)
    cur, nxt, needed = sizing.watermarks(committed, held, reserve, ps)
    free = alloc.available()
    step = eagle.prepare_for_decode(alloc, h, spec)
    assert step.cur.tolist() == cur.tolist() and step.nxt.tolist() == nxt.tolist()
    assert step.cur.dtype == step.nxt.dtype == np.int64
    assert step.needed == needed == (free - alloc.available()) * ps and type(step.needed) is int
    assert step.max_seq_len == committed.max() + reserve and type(step.max_seq_len) is int
    assert step.ready is step.plan.ready and step.ready.query()
    assert alloc.allocated(h).tolist() == nxt.tolist()
    assert alloc.committed(h).tolist() == committed.tolist(), "C stays"
    assert alloc.decode_index(h).tolist() == [1, 1, 1]
    assert_laws(alloc)


def test_the_root_slot_of_uno_is_reserved_twice() -> None:
    alloc, h = running(1)
    step = eagle.prepare_for_decode(alloc, h, SpecConfig("uno", draft_tokens=4))
    assert (step.nxt - alloc.committed(h)).tolist() == [10, 10, 10]


@each_page_size
def test_dflash_returns_the_sums_and_reserves_two_blocks(ps: int) -> None:
    alloc, h = running(ps)
    committed = alloc.committed(h)
    step = dflash.prepare_for_decode(alloc, h, BLOCK)
    assert step.nxt.tolist() == sizing.ceil_align(committed + 8, ps).tolist()
    assert step.committed.tolist() == committed.tolist() and step.committed.dtype == np.int64
    assert step.committed_sum == committed.sum() and step.nxt_sum == step.nxt.sum()
    assert step.needed == step.nxt_sum - step.cur.sum()
    assert all(type(n) is int for n in (step.committed_sum, step.nxt_sum, step.max_seq_len))
    assert (step.max_top_k, step.uniform_top_k) == (None, None)
    assert step.max_seq_len == committed.max() + 8
    assert alloc.decode_index(h).tolist() == [1, 1, 1]
    assert_laws(alloc)


@pytest.mark.parametrize(
    ("top_k", "widest", "uniform"),
    [
        (None, None, None),
        (20, 20, 20),
        (np.int32(1), 1, 1),
        ([5, 5, 5], 5, 5),
        ([5, 20, 1], 20, None),
        (np.array([1, 1, 2], np.uint8), 2, None),
        (1 << 30, 1 << 30, 1 << 30),
    ],
)
def test_the_summary_of_top_k(top_k: Any, widest: int | None, uniform: int | None) -> None:
    alloc, h = running()
    step = dflash.prepare_for_decode(alloc, h, BLOCK, top_k)
    assert (step.max_top_k, step.uniform_top_k) == (widest, uniform)
    assert type(step.max_top_k) in (int, type(None))


@pytest.mark.parametrize(
    ("top_k", "error"),
    [
        (0, ValueError),
        ([1, 0, 2], ValueError),
        (-1, ValueError),
        ([1, 2], ValueError),
        (1.5, TypeError),
        ([1, True, 2], TypeError),
        ("3", TypeError),
    ],
)
def test_a_bad_top_k_is_refused_before_anything_changes(top_k: Any, error: type[Exception]) -> None:
    alloc, h = running()
    with unchanged(alloc), pytest.raises(error, match="top_k"):
        dflash.prepare_for_decode(alloc, h, BLOCK, top_k)


@each_module
def test_no_requests(name: str) -> None:
    prepare, spec = MODULES[name]
    alloc, _ = running()
    for empty in ([], alloc.batch([])):
        with unchanged(alloc):
            step = prepare(alloc, empty, spec)
        assert (step.needed, step.max_seq_len, step.cur.size, step.nxt.size) == (0, 0, 0, 0)
    step = dflash.prepare_for_decode(alloc, [], BLOCK, 7)
    assert (step.committed_sum, step.nxt_sum, step.max_top_k, step.uniform_top_k) == (
        0, 0, None, None,
    )  # fmt: skip
    assert dflash.prepare_for_decode(alloc, [], BLOCK, []).max_top_k is None


@each_module
def test_out_receives_the_slots_of_the_reserve(name: str) -> None:
    prepare, spec = MODULES[name]
    alloc, h = running()
    out = np.zeros(24, np.int64)
    prepare(alloc, h, spec, out=out)
    c = alloc.committed(h)
    assert out.tolist() == alloc.slots(h, c, c + 8).tolist()


@each_module
def test_a_batch_keeps_its_columns_and_stays_right(name: str) -> None:
    """Its columns are those of a lookup, and no lookup is made for the next verb."""
    prepare, spec = MODULES[name]
    alloc, h = running()
    batch = alloc.batch(h)
    for accepted in ([1, 4, 2], [3, 0, 4], [2, 2, 2]):
        prepare(alloc, batch, spec)
        assert batch._version == alloc._ledger.version, "nothing has to be looked up again"
        seen = batch.holding(alloc._ledger)
        assert seen[1].tolist() == alloc.committed(h).tolist()
        assert seen[2].tolist() == alloc.allocated(h).tolist()
        alloc.commit(batch, accepted)
    alloc.trim(h, alloc.committed(h))
    assert (
        prepare(alloc, batch, spec).cur.tolist()
        == sizing.ceil_align(alloc.committed(h), 16).tolist()
    )
    assert_laws(alloc)


@each_module
def test_a_counted_step_ages_the_plans_made_before_and_its_own(name: str) -> None:
    """Also one for which nothing had to be taken: else applying it again would count it twice."""
    prepare, spec = MODULES[name]
    alloc, h = running()
    prepare(alloc, h, spec)
    earlier = alloc.plan(decode=(h, 1))
    step = prepare(alloc, h, spec)
    assert step.needed == 0
    for plan in (earlier, step.plan):
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan, match="plan again"):
            alloc.apply(plan)
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan, match="plan again"):
            alloc.fits(plan)
    assert alloc.decode_index(h).tolist() == [2, 2, 2]
    kept = alloc.plan(decode=(h, 1))
    prepare(alloc, [], spec)  # a step of none changes nothing
    alloc.apply(kept)


@each_module
def test_the_two_forms_of_naming_requests_agree(name: str) -> None:
    prepare, spec = MODULES[name]
    (one, h1), (two, h2) = running(), running()
    batch = two.batch(h2)
    for accepted in ([1, 4, 2], [3, 0, 4]):
        first, second = prepare(one, h1.tolist(), spec), prepare(two, batch, spec)
        assert first.nxt.tolist() == second.nxt.tolist()
        one.commit(h1, accepted)
        two.commit(batch, accepted)
        assert fingerprint(one) == fingerprint(two)


def test_lengths_on_the_cpu_are_written_in_place() -> None:
    alloc, h = running()
    lengths = dflash.Lengths(alloc)
    assert lengths.max_requests == 6 and lengths.staging == (0, 0, 0)
    arrays = (lengths.cur, lengths.nxt, lengths.committed)
    assert [a.dtype for a in arrays] == [np.int32, np.int32, np.int64]
    for who in (h, h[:2], h[::-1]):
        step = dflash.prepare_for_decode(alloc, who, BLOCK, lengths=lengths)
        n = who.size
        assert lengths.cur[:n].tolist() == step.cur.tolist()
        assert lengths.nxt[:n].tolist() == step.nxt.tolist()
        assert lengths.committed[:n].tolist() == step.committed.tolist()
        assert (lengths.cur, lengths.nxt, lengths.committed)[0] is arrays[0]
        assert step.ready.query()
        alloc.commit(who, 3)


def test_lengths_that_do_not_fit_are_refused() -> None:
    alloc, h = running()
    other, _ = running()
    for lengths, naming in (
        (dflash.Lengths(alloc, 2), "3 requests does not fit lengths for 2"),
        (dflash.Lengths(other), "another allocator"),
    ):
        with unchanged(alloc), pytest.raises(ValueError, match=naming):
            dflash.prepare_for_decode(alloc, h, BLOCK, lengths=lengths)
    with unchanged(alloc), pytest.raises(TypeError, match="lengths"):
        dflash.prepare_for_decode(alloc, h, BLOCK, lengths=np.zeros(3))  # type: ignore[arg-type]
    for bad in (0, 7, -1, 2.0):
        with pytest.raises((ValueError, TypeError), match="max_requests"):
            dflash.Lengths(alloc, bad)  # type: ignore[arg-type]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "spec", "naming"),
    [
        (eagle.prepare_for_decode, BLOCK, "'dflash'.*speculative.dflash"),
        (eagle.prepare_for_decode, SpecConfig(), "'none'.*alloc.decode"),
        (dflash.prepare_for_decode, CHAIN, "'eagle'.*speculative.eagle"),
        (dflash.prepare_for_decode, SpecConfig("uno", draft_tokens=1), "'uno'.*speculative.eagle"),
        (dflash.prepare_for_decode, SpecConfig("ngram", draft_tokens=1), "'ngram'"),
        (dflash.prepare_for_decode, SpecConfig(), "'none'"),
    ],
)
def test_an_algorithm_of_another_module_is_named(
    prepare: Callable[..., Any], spec: SpecConfig, naming: str
) -> None:
    alloc, h = running()
    with unchanged(alloc), pytest.raises(ValueError, match=naming):
        prepare(alloc, h, spec)


@each_module
def test_other_bad_arguments(name: str) -> None:
    prepare, spec = MODULES[name]
    alloc, h = running()
    for bad in (None, "eagle", 8):
        with unchanged(alloc), pytest.raises(TypeError, match="spec must be a SpecConfig"):
            prepare(alloc, h, bad)
    with pytest.raises(TypeError, match="alloc must be a KVAllocator"):
        prepare(h, alloc, spec)
    for bad, error in ((-1, ValueError), ([1, 2], ValueError), (2.0, TypeError)):
        with unchanged(alloc), pytest.raises(error, match="reserve"):
            prepare(alloc, h, spec, reserve=bad)
    with unchanged(alloc), pytest.raises(ValueError, match="twice"):
        prepare(alloc, [h[0], h[0]], spec)
    with unchanged(alloc), pytest.raises(ValueError, match="shape"):
        prepare(alloc, h, spec, out=np.zeros(23, np.int32))
    with unchanged(alloc), pytest.raises(sgalloc.WrongState, match="not done"):
        prepare(alloc, h, spec, after=Query())
    assert alloc.decode_index(h).tolist() == [0, 0, 0]


@each_module
@each_page_size
def test_refused_for_pages_with_a_cache_that_would_not_suffice(
    name: str, ps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page short, with all that could be evicted: nothing is, and it succeeds with one more."""
    prepare, spec = MODULES[name]
    for short in (1, 0):
        alloc = make(200, ps, max_requests=8, row_width=200 * ps, prefix_cache=True)
        h = alloc.open(3)
        alloc.extend(h, 2 * ps)
        need = int(alloc.plan(reserve=(h, 8)).need["full"])
        cached(alloc, prompt(2, ps, seed=1))
        (locking,) = alloc.open_with_prefix(alloc.prefix.match(prompt(1, ps, seed=1)))
        (filler,) = alloc.open()
        alloc.extend(filler, (alloc.available() - need + 1 + short) * ps)
        batch = alloc.batch(h)
        alloc.decode(batch, 0)
        assert alloc.available(counting_cache=True) == need - short
        assert alloc.available() < need, "something would have to be evicted"
        calls = count_launches(alloc, monkeypatch)
        if short:
            before = fingerprint(alloc)
            for seen in (1, 2):
                with pytest.raises(sgalloc.OutOfPages) as refused:
                    prepare(alloc, batch, spec)
                assert refused.value.need == need
                assert refused.value.free + refused.value.cached == need - 1
                assert alloc.stats().refusals == {"OutOfPages": seen}
            assert fingerprint(alloc) == before
            assert alloc.decode_index(h).tolist() == [1, 1, 1]
            assert not calls.total()
            alloc.release(locking)
        prepare(alloc, batch, spec)
        assert alloc.decode_index(h).tolist() == [2, 2, 2]
        assert_laws(alloc)


@each_module
def test_refused_for_a_row_before_pages_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, spec = MODULES[name]
    alloc = make(7, 16, max_requests=4, row_width=64)
    h = alloc.open(3)
    alloc.extend(h, [16, 57, 16])
    lengths = dflash.Lengths(alloc)
    calls = count_launches(alloc, monkeypatch)
    before = fingerprint(alloc)
    with pytest.raises(sgalloc.RowTooNarrow) as refused:
        prepare(alloc, h, spec, **({"lengths": lengths} if name == "dflash" else {}))
    assert (refused.value.row, refused.value.need, refused.value.width) == (2, 80, 64)
    assert alloc.stats().refusals == {"RowTooNarrow": 1}
    assert fingerprint(alloc) == before and not calls.total()
    assert not lengths.committed.any()
    prepare(alloc, h[:1], spec)
    assert alloc.decode_index(h).tolist() == [1, 0, 0]


# -- the cases of bug reports ----------------------------------------------------------------------


@each_module
@pytest.mark.parametrize("ps", [1, 16, 64])
def test_d1_no_tail_is_stranded(name: str, ps: int) -> None:
    prepare, spec = MODULES[name]
    pages = 10 if ps == 16 else 160 // ps + 4
    alloc = make(pages, ps, max_requests=2, row_width=pages * ps)
    (h,) = alloc.open()
    alloc.extend(h, 30)
    states = []
    for accepted in (1, 4, 2, 3, 1):
        prepare(alloc, h, spec)
        alloc.commit(h, accepted)
        a = int(alloc.allocated(h)[0])
        assert a % ps == 0 and alloc.pages(h, 0, a).size == a // ps
        states.append((int(alloc.committed(h)[0]), a, alloc.available()))
    step = prepare(alloc, h, spec)
    if ps == 16:
        assert states == [(31, 48, 7), (35, 48, 7), (37, 48, 7), (40, 48, 7), (41, 48, 7)]
        assert step.nxt.tolist() == [64] and alloc.available() == 6
    elif ps == 1:
        assert [s[:2] for s in states] == [(31, 38), (35, 39), (37, 43), (40, 45), (41, 48)]
        assert step.nxt.tolist() == [49]
    else:
        assert {s[1] for s in states} == {64} and step.needed == 0
    alloc.release(h)
    assert alloc.available() == pages


@pytest.mark.parametrize("name", MODULES)
def test_d2_a_row_too_narrow(name: str) -> None:
    """Page 1, blocks of 17, rows forced to 85: C = 51 fits exactly, 52 is refused."""
    prepare = MODULES[name][0]
    spec = SpecConfig("dflash", draft_tokens=17)
    if name == "eagle":
        spec = SpecConfig("eagle", 16, 1, 17)
    alloc = make(400, 1, max_requests=3, row_width=85)
    h = alloc.open(3)
    alloc.extend(h, [40, 51, 40])
    free = alloc.available()
    prepare(alloc, h[1], spec)
    assert alloc.available() == free - 34 and alloc.allocated(h[1])[0] == 85
    alloc.trim(h[1], 51)
    alloc.extend(h[1], 52)
    table = alloc.req_to_token.copy()
    with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow, match=r"86 slots.*85 wide"):
        prepare(alloc, h[1], spec)
    assert np.array_equal(alloc.req_to_token, table)
    for ps, least in ((1, 98), (16, 112)):
        width = sizing.row_width(64, spec, ps)
        assert width >= least
        wide = make(400 // ps, ps, max_requests=1, row_width=width)
        (one,) = wide.open()
        wide.extend(one, 64)
        assert prepare(wide, one, spec).nxt[0] <= width


@each_module
def test_d5_a_refused_batch_changes_nothing_and_a_smaller_one_succeeds(name: str) -> None:
    prepare, spec = MODULES[name]
    alloc = make(5, 16, max_requests=4, row_width=80)
    h = alloc.open(4)
    alloc.extend(h, 16)
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
        prepare(alloc, h, spec)
    assert alloc.decode_index(h).tolist() == [0] * 4
    prepare(alloc, h[2], spec)
    assert alloc.available() == 0 and alloc.decode_index(h).tolist() == [0, 0, 1, 0]


@each_module
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_d6_an_exact_fit(name: str, order: list[int]) -> None:
    prepare, spec = MODULES[name]
    alloc = make(3, 16, max_requests=2, row_width=48)
    h = alloc.open(2)
    alloc.extend(h, [16, 5])
    assert alloc.available() == 1
    prepare(alloc, h[order], spec)
    assert alloc.available() == 0
    assert alloc.slots(h[0], 16, 17)[0] % 16 == 0
    assert alloc.slots(h[1], 5, 6)[0] % 16 == 5
    assert prepare(alloc, h[order], spec).needed == 0
    assert alloc.decode_index(h).tolist() == [2, 2]
    assert_laws(alloc)
