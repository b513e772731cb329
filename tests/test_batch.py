"""Batches: taken like handles, looked up once, and never behind what the ledger says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import assert_laws, fingerprint, make, prompt, unchanged

import sgalloc


def running() -> tuple[sgalloc.KVAllocator, np.ndarray]:
    alloc = make(30, 16, row_width=10 * 16)
    h = alloc.open(4)
    alloc.extend(h, [20, 16, 5, 0])
    return alloc, h


def test_is_taken_like_handles_and_keeps_its_own_copy() -> None:
    alloc, h = running()
    names = h.copy()
    batch = alloc.batch(names)
    names[:] = 0
    assert isinstance(batch, sgalloc.Batch) and len(batch) == 4
    assert batch.handles.tolist() == h.tolist()
    assert alloc.rows(batch).tolist() == alloc.rows(h).tolist()
    assert alloc.batch(batch).handles.tolist() == h.tolist()


def test_stays_good_while_its_requests_grow_and_others_come_and_go() -> None:
    alloc, h = running()
    batch = alloc.batch(h[:2])
    alloc.open()
    alloc.decode(batch)
    alloc.release(h[2])
    alloc.decode(batch)
    alloc.trim(batch, 5)
    assert alloc.committed(batch).tolist() == [5, 5]


@pytest.mark.parametrize("reused", [False, True], ids=["row free", "row taken again"])
def test_is_refused_once_one_of_its_requests_went_away(reused: bool) -> None:
    alloc, h = running()
    batch = alloc.batch(h)
    alloc.decode(batch)
    alloc.release(h[1])
    if reused:
        alloc.open(5)  # the free row is among them
    for verb in (alloc.decode, alloc.committed, alloc.release, alloc.batch):
        for _ in range(2):
            with unchanged(alloc), pytest.raises(sgalloc.StaleHandle):
                verb(batch)


def test_is_looked_up_again_only_after_some_request_went_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alloc, h = running()
    batch, other = alloc.batch(h[:3]), int(h[3])
    looked: list[int] = []
    ledger = type(alloc._ledger)
    original = ledger.rows_of

    def counted(self: Any, handles: Any) -> Any:
        if not isinstance(handles, sgalloc.Batch):
            looked.append(np.size(handles))
        return original(self, handles)

    monkeypatch.setattr(ledger, "rows_of", counted)
    for _ in range(3):
        alloc.decode(batch)
        alloc.reserve(batch, 4)
    assert looked == []
    alloc.release(other)
    looked.clear()
    alloc.decode(batch)
    alloc.decode(batch)
    assert looked == [3]


@pytest.mark.parametrize("verb", ["decode", "rows", "release", "batch"])
def test_belongs_to_its_allocator(verb: str) -> None:
    alloc, h = running()
    twin, _ = running()
    batch = alloc.batch(h)
    with unchanged(twin), pytest.raises(ValueError, match="another allocator"):
        getattr(twin, verb)(batch)


def test_what_is_read_through_a_batch_is_the_callers_own() -> None:
    alloc, h = running()
    batch = alloc.batch(h)
    alloc.decode(batch)
    with unchanged(alloc):
        for read in (alloc.rows, alloc.committed, alloc.allocated, alloc.decode_index):
            read(batch)[:] = 77
    alloc.decode(batch)
    assert alloc.committed(h).tolist() == [22, 18, 7, 2]


def test_lengths_given_with_a_batch_are_not_kept() -> None:
    alloc, h = running()
    batch = alloc.batch(h)
    for verb in (alloc.extend, alloc.decode, alloc.reserve, alloc.commit, alloc.trim):
        lengths = np.array([33, 34, 35, 36])
        verb(batch, lengths if verb == alloc.extend else (given := lengths - 32))
        lengths[:] = 0
        if verb != alloc.extend:
            given[:] = 99
        assert alloc.committed(batch).tolist() == alloc.committed(h).tolist()
    assert_laws(alloc)


def test_a_refused_call_leaves_the_batch_where_it_was() -> None:
    alloc, h = running()
    batch = alloc.batch(h)
    alloc.decode(batch)
    for refused in (
        lambda: alloc.decode(batch, 999),
        lambda: alloc.reserve(batch, [1, 1, 1, 999]),
        lambda: alloc.commit(batch, [0, 0, 99, 0]),
        lambda: alloc.extend(batch, 0),
        lambda: alloc.decode(batch, out=np.zeros(1, np.int32)),
    ):
        with unchanged(alloc), pytest.raises((sgalloc.AllocError, ValueError)):
            refused()
        assert alloc.committed(batch).tolist() == [21, 17, 6, 1]
    alloc.decode(batch)
    assert alloc.committed(h).tolist() == [22, 18, 7, 2]


@pytest.mark.parametrize("ps", [1, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_batches_and_handles_in_any_order_do_what_handles_alone_do(ps: int, seed: int) -> None:
    """Two batches that overlap and plain handles take turns; a twin is told plain handles."""
    rng = np.random.default_rng(seed)
    both = [make(60, ps, max_requests=8, row_width=30 * ps, prefix_cache=True) for _ in range(2)]
    alloc, twin = both
    h = alloc.open(6)
    assert twin.open(6).tolist() == h.tolist()
    first, second = alloc.batch(h[:4]), alloc.batch(h[[5, 3, 2]])
    forms: list[tuple[Any, np.ndarray]] = [
        (first, h[:4]), (second, h[[5, 3, 2]]), (h[[1, 3, 4]], h[[1, 3, 4]]), (int(h[2]), h[[2]])
    ]  # fmt: skip
    verbs = ("extend", "decode", "decode", "reserve", "reserve", "commit", "commit", "trim",
             "apply", "publish", "other")  # fmt: skip
    done = 0
    for _ in range(120):
        x, plain = forms[int(rng.integers(len(forms)))]
        verb = verbs[int(rng.integers(len(verbs)))]
        n = rng.integers(0, 2 * ps + 1, plain.size)
        lengths = twin.committed(plain) + n
        results = []
        for side, named in ((alloc, x), (twin, plain)):
            try:
                if verb == "extend":
                    side.extend(named, lengths)
                elif verb == "trim":
                    side.trim(named, np.maximum(lengths - 3 * ps, 0) // ps * ps)
                elif verb == "apply":
                    side.apply(side.plan(decode=(named, n)))
                elif verb == "publish":
                    side.prefix.publish(named, [prompt(30, ps, seed=int(v)) for v in plain])
                elif verb == "other":
                    (extra,) = side.open()
                    side.extend(extra, ps)
                    side.release(extra)
                else:
                    getattr(side, verb)(named, n)
                results.append("done")
                done += side is alloc
            except sgalloc.AllocError as refused:
                results.append(str(refused))
        assert results[0] == results[1]
        assert fingerprint(alloc) == fingerprint(twin)
        for named, same in forms:
            assert alloc.committed(named).tolist() == twin.committed(same).tolist()
            assert alloc.allocated(named).tolist() == twin.allocated(same).tolist()
    assert done > 60
    assert_laws(alloc)


@pytest.mark.parametrize("kind", ["extend", "decode", "reserve"])
def test_a_plan_of_a_batch_is_that_of_its_handles_whoever_changed_the_ledger(kind: str) -> None:
    alloc, h = running()
    batch, amount = alloc.batch(h[:3]), {"extend": 60}.get(kind, 5)
    for change in (
        lambda: None,
        lambda: alloc.decode(batch),
        lambda: alloc.decode(h, 3),
        lambda: alloc.trim(int(h[1]), 2),
        lambda: alloc.reserve([int(h[0]), int(h[3])], 40),
        lambda: alloc.commit(int(h[0]), 30),
        lambda: alloc.release(int(h[3])),
    ):
        change()
        mine, wanted = (alloc.plan(**{kind: (x, amount)}) for x in (batch, h[:3]))
        for name in ("rows", "start", "stop", "cur", "nxt"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(wanted, name))
        assert mine.start.tolist() == alloc.committed(h[:3]).tolist()
        assert mine.cur.tolist() == alloc.allocated(h[:3]).tolist()
        assert mine.need == wanted.need
    alloc.apply(mine)
    assert_laws(alloc)


def test_a_plan_of_one_kind_looks_nothing_up_that_its_batch_knows() -> None:
    alloc, h = running()
    batch = alloc.batch(h)
    known = alloc.reserve(batch, 4)
    plan = alloc.plan(reserve=(batch, 4))
    assert plan.start is known.start and plan.cur is known.nxt
    mixed = alloc.plan(reserve=(h[:2], 4), decode=(alloc.batch(h[2:]), 1))
    assert mixed.rows.tolist() == [*plan.rows[2:].tolist(), *plan.rows[:2].tolist()]
    assert mixed.cur.tolist() == [*plan.cur[2:].tolist(), *plan.cur[:2].tolist()]
    assert alloc.plan(extend=(h[:0], 4)).rows.dtype == np.int64
