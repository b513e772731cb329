"""`publish` of several requests: one write, and nothing done where that fails."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sgalloc

PS = 4


def make(requests: int) -> tuple[sgalloc.KVAllocator, Any]:
    alloc = sgalloc.KVAllocator(60, PS, 8, 64, device="cpu", prefix_cache=True)
    handles = alloc.open(requests)
    alloc.extend(handles, 14)
    return alloc, handles


def watched(alloc: sgalloc.KVAllocator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    device = alloc._core.device
    write: Callable[..., Any] = device.write
    writes: list[int] = []

    def counting(pages: Any, *rest: Any) -> Any:
        writes.append(0 if pages is None else pages.total)
        return write(pages, *rest)

    monkeypatch.setattr(device, "write", counting)
    return writes


def test_twins_of_a_call_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, h = make(4)
    same = np.arange(14)
    other = np.concatenate((np.arange(8), np.arange(50, 56)))
    writes = watched(alloc, monkeypatch)
    alloc.prefix.publish(h, [same, same, other, other])
    assert writes == [3 + 2 + 3], "all of the second, two of the third, all of the fourth"
    first, second, third, fourth = (alloc.pages(int(one), 0, 12).tolist() for one in h)
    assert first == second and third == fourth
    assert third[:2] == first[:2] and third[2] != first[2]
    assert alloc.stats().groups["full"].cached == 4
    alloc.check(device=True)


def test_a_write_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, h = make(3)
    same = np.arange(14)
    alloc.prefix.publish(h[:1], [same])
    plan = alloc.plan(reserve=(h, 9))
    before = (alloc.stats().groups, alloc.owners().tolist(), alloc.req_to_token.copy())

    def failing(*_: Any) -> Any:
        raise sgalloc.WrongState("no staging slot is left: stage it instead")

    with monkeypatch.context() as patch:
        patch.setattr(alloc._core.device, "write", failing)
        with pytest.raises(sgalloc.WrongState):
            alloc.prefix.publish(h[1:], [same, same])
    assert alloc.stats().refusals == {"WrongState": 1}
    assert (alloc.stats().groups, alloc.owners().tolist()) == before[:2]
    assert np.array_equal(alloc.req_to_token, before[2])
    alloc.apply(plan)
    alloc.check(device=True)


def test_an_event_is_kept_and_not_asked_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, h = make(2)
    monkeypatch.setattr(alloc._core.device, "capturing", lambda: True)
    event = SimpleNamespace(done=True)
    alloc.release(h[:1], after=event)
    with pytest.raises(TypeError, match="after="):
        alloc.release(h[1:], after=SimpleNamespace(name="no event"))
    assert alloc.stats().groups["full"].quarantined == 4
    monkeypatch.undo()
    alloc.settle()
    assert alloc.stats().groups["full"].quarantined == 0
    alloc.check(device=True)


def test_a_plan_shows_the_rows_of_a_batch_but_cannot_move_them() -> None:
    alloc, h = make(2)
    batch = alloc.batch(h)
    plan = alloc.reserve(batch, 4)
    for array in (plan.rows, plan.cur, plan.nxt, batch.rows, batch.handles):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = array[::-1].copy()


class Tenant(StrEnum):
    A = "a"


def test_members_of_enums_and_numpy_scalars_are_namespaces() -> None:
    alloc, _ = make(1)
    for name, same in (
        (Tenant.A, "a"),
        (np.str_("b"), "b"),
        (np.int64(3), 3),
        (np.bytes_(b"c"), b"c"),
    ):
        handle = alloc.open(namespace=name)
        alloc.extend(handle, PS)
        alloc.release(handle, tokens=[[7] * PS])
        assert alloc.prefix.match([7] * PS, namespace=same).length == PS
    for name in (True, 1.5, np.bool_(False), ("a",)):
        with pytest.raises(TypeError, match="namespace"):
            alloc.open(namespace=name)


def test_questions_that_are_refused_count() -> None:
    alloc, h = make(1)
    alloc.release(h)
    for ask in (alloc.rows, alloc.batch, alloc.committed, alloc.allocated, alloc.pages):
        with pytest.raises(sgalloc.StaleHandle):
            ask(h)
    assert alloc.stats().refusals == {"StaleHandle": 5}
