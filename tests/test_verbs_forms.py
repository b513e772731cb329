"""Verbs take handles, lengths and out in every form that is allowed, and none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import assert_laws, ceil_pages, count_launches, make, unchanged


def torch_tensor(values: Any) -> Any:
    return pytest.importorskip("torch").tensor(values)


HANDLE_FORMS: dict[str, Callable[[Any, list[int]], Any]] = {
    "list": lambda alloc, h: h,
    "tuple": lambda alloc, h: tuple(h),
    "int64": lambda alloc, h: np.array(h),
    "uint64": lambda alloc, h: np.array(h, np.uint64),
    "strided": lambda alloc, h: np.array([h, h]).T.reshape(-1)[::2],
    "read-only": lambda alloc, h: frozen(h),
    "batch": lambda alloc, h: alloc.batch(h),
    "torch": lambda alloc, h: torch_tensor(h),
}
ONE_HANDLE: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda alloc, h: h,
    "numpy int": lambda alloc, h: np.int64(h),
    "array": lambda alloc, h: np.array(h),
    "torch": lambda alloc, h: torch_tensor(h),
    "batch": lambda alloc, h: alloc.batch(h),
}
LENGTH_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda n: n,
    "tuple": tuple,
    "int64": np.array,
    "int32": lambda n: np.array(n, np.int32),
    "uint8": lambda n: np.array(n, np.uint8),
    "uint64": lambda n: np.array(n, np.uint64),
    "read-only": lambda n: frozen(n),
    "torch": torch_tensor,
    "torch int32": lambda n: torch_tensor(n).int(),
}
SAME_FOR_ALL: dict[str, Callable[[int], Any]] = {
    "int": int,
    "numpy int": np.int32,
    "array": np.array,
    "torch": torch_tensor,
}


def frozen(values: list[int]) -> np.ndarray:
    array = np.array(values)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("form", ONE_HANDLE)
def test_one_handle_in_every_form(form: str) -> None:
    alloc = make(16, 4)
    (h,) = alloc.open().tolist()

    def x() -> Any:
        return ONE_HANDLE[form](alloc, h)

    assert alloc.rows(x()).tolist() == [h & 0xFFFFFFFF]
    alloc.extend(x(), 5)
    alloc.decode(x())
    alloc.reserve(x(), 3)
    alloc.commit(x(), 2)
    assert (alloc.committed(x()).tolist(), alloc.allocated(x()).tolist()) == ([8], [12])
    assert alloc.pages(x()).size == 2
    assert alloc.slots(x(), 0, 8).size == 8
    assert alloc.plan(decode=(x(), 1)).rows.size == 1
    assert alloc.fits([4 * 16], after_releasing=x())
    alloc.trim(x(), 3)
    alloc.release(x())
    assert alloc.available() == 16


@pytest.mark.parametrize("form", HANDLE_FORMS)
def test_handles_in_every_form(form: str) -> None:
    alloc = make(16, 4)
    names = alloc.open(2).tolist()

    def x() -> Any:
        return HANDLE_FORMS[form](alloc, names[::-1])

    alloc.extend(x(), [5, 1])
    assert alloc.committed(names).tolist() == [1, 5]
    assert alloc.rows(x()).tolist() == alloc.rows(names)[::-1].tolist()
    alloc.decode(x(), [1, 2])
    alloc.reserve(x(), [7, 0])
    alloc.commit(x(), [7, 1])
    assert alloc.committed(x()).tolist() == [13, 4]
    assert alloc.allocated(x()).tolist() == [16, 4]
    assert alloc.decode_index(x()).tolist() == [1, 1]
    alloc.apply(alloc.plan(extend=(x(), [13, 5])))
    alloc.trim(x(), [4, 5])
    assert alloc.allocated(names).tolist() == [8, 4]
    assert alloc.fits([4] * 8, after_releasing=x())
    assert_laws(alloc)
    alloc.release(x())
    assert alloc.available() == 16


@pytest.mark.parametrize("form", LENGTH_FORMS)
def test_lengths_one_per_request(form: str) -> None:
    alloc = make(16, 4)
    h = alloc.open(2)
    n = LENGTH_FORMS[form]
    alloc.extend(h, n([5, 9]))
    alloc.decode(h, n([2, 0]))
    assert alloc.committed(h).tolist() == [7, 9]
    alloc.reserve(h, n([6, 0]))
    assert alloc.allocated(h).tolist() == [16, 12]
    alloc.commit(h, n([6, 1]))
    assert alloc.committed(h).tolist() == [13, 10]
    assert alloc.slots(h, n([12, 9]), n([13, 10])).size == 2
    alloc.trim(h, n([4, 20]))
    assert alloc.committed(h).tolist() == [4, 10]
    assert alloc.plan(extend=(h, n([5, 13]))).nxt.tolist() == [8, 16]
    assert alloc.fits(n([5, 9]))


@pytest.mark.parametrize("form", SAME_FOR_ALL)
def test_lengths_one_for_all(form: str) -> None:
    alloc = make(32, 4)
    h = alloc.open(3)
    n = SAME_FOR_ALL[form]
    alloc.extend(h, n(5))
    alloc.decode(h, n(2))
    alloc.reserve(h, n(6))
    alloc.commit(h, n(1))
    assert alloc.committed(h).tolist() == [8] * 3
    assert alloc.allocated(h).tolist() == [16] * 3
    assert alloc.slots(h, n(6), n(8)).size == 6
    alloc.trim(h, n(4))
    assert alloc.allocated(h).tolist() == [4] * 3
    assert alloc.plan(reserve=(h, n(5))).nxt.tolist() == [12] * 3
    assert alloc.fits(n(5))


@pytest.mark.parametrize("none", [[], (), np.empty(0, np.int64), "batch", "torch"], ids=repr)
def test_empty_input_succeeds_and_launches_nothing(
    none: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alloc = make(4, 16, prefix_cache=True)
    alloc.extend(alloc.open(), 5)
    x = alloc.batch([]) if isinstance(none, str) and none == "batch" else none
    x = torch_tensor([]).long() if isinstance(none, str) and none == "torch" else x
    launched = count_launches(alloc, monkeypatch)
    with unchanged(alloc):
        for lengths in (0, 5, [], np.empty(0, np.int32)):
            for verb in (alloc.extend, alloc.decode, alloc.reserve):
                plan = verb(x, lengths)
                assert plan.num_new_pages == 0 and plan.rows.size == plan.nxt.size == 0
            alloc.commit(x, lengths)
            alloc.trim(x, lengths)
        alloc.release(x)
        alloc.release(x, tokens=[])
        alloc.prefix.publish(x, [])
        plan = alloc.apply(alloc.plan(extend=(x, []), decode=(x, 1), reserve=(x, [])))
        assert plan.need == {"full": 0} and plan.fits
        assert alloc.apply(alloc.plan()).num_new_pages == 0
        assert alloc.fits([]) and alloc.fits(plan)
        assert len(alloc.batch(x)) == 0
        assert alloc.open_with_prefix([]).tolist() == []
        for read in (alloc.committed, alloc.allocated, alloc.decode_index):
            assert read(x).tolist() == [] and read(x).dtype == np.int64
        assert alloc.rows(x).dtype == np.int32 and alloc.rows(x).size == 0
    assert sum(launched.values()) == 0
    assert alloc.slots(x, 0, 0).size == 0


@pytest.mark.parametrize("kind", ["int32", "int64", "torch int32", "torch int64"])
@pytest.mark.parametrize("ps", [1, 3, 16])
def test_out_receives_the_slots_of_the_new_tokens_in_order(kind: str, ps: int) -> None:
    alloc = make(60, ps, max_requests=3)
    h = alloc.open(3)

    def slots_of(start: list[int], stop: list[int]) -> list[int]:
        expected = []
        for handle, first, last in zip(h, start, stop, strict=True):
            held = alloc.pages(handle, 0, ceil_pages(last, ps) * ps).tolist()
            expected += [held[j // ps] * ps + j % ps for j in range(first, last)]
        return expected

    def buffer(size: int) -> Any:
        if "torch" in kind:
            torch = pytest.importorskip("torch")
            return torch.full((size,), -1, dtype=getattr(torch, kind.split()[1]))
        return np.full(size, -1, kind)

    out = buffer(9)
    alloc.extend(h, [4, 0, 5], out=out)
    assert out.tolist() == slots_of([0, 0, 0], [4, 0, 5])
    out = buffer(7)
    alloc.extend(h, [6, 3, 7], out=out)
    assert out.tolist() == slots_of([4, 0, 5], [6, 3, 7])
    out = buffer(3)
    alloc.decode(h[[2, 0, 1]], out=out)
    assert sorted(out.tolist()) == sorted(slots_of([6, 3, 7], [7, 4, 8]))
    assert out.tolist()[0] == slots_of([6, 3, 7], [7, 4, 8])[2]
    out = buffer(6)
    alloc.reserve(h, [5, 0, 1], out=out)
    assert out.tolist() == slots_of([7, 4, 8], [12, 4, 9])
    alloc.reserve(h, [5, 0, 1], out=out)  # again, without need
    assert out.tolist() == slots_of([7, 4, 8], [12, 4, 9])
    out = buffer(4)
    plan = alloc.plan(extend=(h[1], 5), decode=(h[0], 1), reserve=(h[2], 2))
    alloc.apply(plan, out=out)
    assert out.tolist() == [
        *alloc.slots(h[1], 4, 5).tolist(),
        *alloc.slots(h[0], 7, 8).tolist(),
        *alloc.slots(h[2], 8, 10).tolist(),
    ]
    out = buffer(8)
    assert alloc.slots(h, [2, 0, 1], [5, 1, 5], out=out) is out
    assert out.tolist() == slots_of([2, 0, 1], [5, 1, 5])
