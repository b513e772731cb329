"""Debug mode of a CUDA device, driven from end to end without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from host_support import Query
from stand_in_cuda import Cuda, stand_in
from trust.poisoned import assert_poison
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc.device.poisoning import POISON
from sgalloc.speculative import dflash
from sgalloc.trust.debugging import DEVICE_EVERY, SWITCH

PS = 4
HEADER, SMALL_PAGES = 32, 1024  # int32 words of a header; pages of a small slot


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    monkeypatch.setenv(SWITCH, "1")
    with stand_in() as found:
        yield found


def made(**how: Any) -> Any:
    return sgalloc.KVAllocator(60, PS, 6, 48, device="cuda", page_table=True, **how)


def tables(alloc: Any) -> list[bytes]:
    device = alloc._core.device
    found = [device.table, device.side_table, device.side_map]
    return [np.array(table).tobytes() for table in found if table is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_are_those_of_the_cpu_poison_included(state: Cuda, name: str) -> None:
    here, there = Walk(make(name, 3), 7), Walk(make(name, 3, "cuda"), 7)
    for _ in range(60):
        assert here.step() == there.step()
        there.alloc.check(device=True)
        assert tables(here.alloc) == tables(there.alloc)
    assert "poison_rows" in state.launches


def test_a_row_that_goes_back_is_poisoned_behind_the_readers_of_the_next_step(
    state: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release without an event says of no reader; the step that may use the row again does."""
    alloc = made(stream="plan")
    alloc.warm()
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], 9)
    row, entered = int(alloc.rows(one)[0]), []
    order = alloc._core.device._order
    enter = order.enter

    def entering(after: Any, asked_here: bool = False) -> Any:
        entered.append(after)
        return enter(after, asked_here)

    monkeypatch.setattr(order, "enter", entering)
    alloc.release(one)
    alloc.trim(other, 3)
    alloc.settle()
    alloc.open()
    assert (alloc.req_to_token[row, :12] != POISON).all() and not entered
    event = state.number()
    alloc.decode(other, after=event)
    assert (alloc.req_to_token[row] == POISON).all()
    assert entered == [event] or entered == [event, event]
    alloc.check(device=True)


def test_where_the_reader_was_named_a_row_is_poisoned_at_once(state: Cuda) -> None:
    alloc = made(stream="plan", reader=7)
    (one,) = alloc.open().tolist()
    alloc.extend(one, 9)
    row = int(alloc.rows(one)[0])
    alloc.release(one)
    assert (alloc.req_to_token[row] == POISON).all()


def test_what_waited_for_an_event_is_poisoned_when_it_comes_back(state: Cuda) -> None:
    alloc = made()
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], 9)
    row, event = int(alloc.rows(one)[0]), Query()
    alloc.release(one, after=event)
    alloc.decode(other, 5)
    assert (alloc.req_to_token[row, :12] != POISON).all(), "the step says nothing of its readers"
    event.over = True
    alloc.settle()
    assert (alloc.req_to_token[row] == POISON).all()


def test_the_device_is_compared_only_when_asked(
    state: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for every, calls in ((None, 9), ("4", 3)):
        if every is not None:
            monkeypatch.setenv(DEVICE_EVERY, every)
        alloc = made()
        alloc.req_to_token[3, 40] = 5
        for _ in range(calls):
            alloc.settle()
        with pytest.raises(sgalloc.LawViolation, match="written past the extent"):
            alloc.check(device=True) if every is None else alloc.settle()


def bodies(ring: Any) -> list[Any]:
    return [slot.ints[HEADER:] for slot in ring._slots]


def test_staging_holds_nothing_of_the_steps_before(state: Cuda) -> None:
    """What a step did not lay out itself is poison, or no place at all."""
    alloc = made(window=sgalloc.SlidingWindow(6, 60, slot_map=True))
    batch = alloc.batch(alloc.open(5))
    alloc.warm()
    device = alloc._core.device
    out = device.empty(5)
    for step in range(2 * len(device._small)):
        alloc.decode(batch, out=out) if step % 3 else alloc.reserve(batch, step % 9)
    ids = slice(HEADER + 2 * SMALL_PAGES, HEADER + 3 * SMALL_PAGES)
    for slot in device._small._slots:
        assert (slot.longs[HEADER // 2 + 12 : HEADER // 2 + SMALL_PAGES] < 0).all()
        assert (slot.ints[ids][12:] == POISON).all()
        assert (slot.ints[HEADER + 3 * SMALL_PAGES :] == POISON).sum() > 7000
    assert not (bodies(device._large)[0] == POISON).any(), "no step was large"


def test_large_steps_hold_nothing_of_those_before_on_the_device_either(state: Cuda) -> None:
    alloc = sgalloc.KVAllocator(9000, 1, 6, 4000, device="cuda", debug=True)
    handles = alloc.open(4).tolist()
    alloc.extend(handles[0], 3500)
    alloc.extend(handles[1], 3000)
    alloc.extend(handles[2], 1500)
    device = alloc._core.device
    used = HEADER + 2 + 1500 + 1500 + 64
    for slot in device._large._slots:
        body = slot.ints[3500 + 64 :]
        assert (body == POISON).all()
        copy = np.array(slot._copy).view(np.int32)
        assert (copy[3500 + 64 :] == POISON).all()
    assert (bodies(device._large)[0][used:] == POISON).all(), "the third step took the first slot"
    assert alloc.reserve(handles, 30, rounding="device").num_new_pages == 120
    alloc.check(device=True)


def test_lengths_hold_nothing_of_the_steps_before(state: Cuda) -> None:
    alloc = made()
    lengths = dflash.Lengths(alloc)
    spec = sgalloc.sizing.SpecConfig("dflash", draft_tokens=2)
    handles = alloc.open(5).tolist()
    for count in (5, 4, 3, 2, 5, 1):
        dflash.prepare_for_decode(alloc, handles[:count], spec, lengths=lengths)
    ring: Any = lengths._arrays
    rests = [(slot.longs[1], slot.ints[2 * ring._room + 1]) for slot in ring._ring._slots]
    assert (np.int64(POISON) << 32 | POISON & 0xFFFFFFFF, POISON) in rests


def test_staged_steps_hold_nothing_of_those_before(state: Cuda) -> None:
    alloc = made()
    update = alloc.captured(8)
    handles = alloc.open(3).tolist()
    for _ in range(2):
        update.stage(alloc.plan(extend=(handles, alloc.committed(handles) + 4)))
        update._applied[0] = update._staged
    assert (update._blocks[1].ints[HEADER + 3 * 3 + 2 :] == POISON).all()


def test_under_a_capture_nothing_is_poisoned(state: Cuda) -> None:
    """What the graph writes at each replay is nobody's fault later on."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    alloc = made(stream=stream)
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], 12)
    alloc.warm()
    row, count = int(alloc.rows(one)[0]), state.launches.count("poison_rows")
    stream.begin_capture(0)
    alloc.extend(one, 16)
    alloc.trim(other, 4)
    graph = stream.end_capture()
    assert state.launches.count("poison_rows") == count
    alloc.settle()
    assert state.launches.count("poison_rows") == count, "both rows belong to the capture"
    alloc.release([one, other])
    state.launch(graph.graphExec, stream.ptr)  # a replay writes the row again
    assert int(alloc.req_to_token[row, 12]) > 0
    alloc.check(device=True)
    third = alloc.open(4)
    alloc.extend(third, 3)
    alloc.trim(third, 0)
    alloc.check(device=True)


def test_what_was_restored_on_a_device_is_poisoned(state: Cuda) -> None:
    walk = Walk(make("window, map, prefix", 3), 3)
    for _ in range(50):
        walk.step()
    walk.finish()
    walk.alloc.settle()
    again = sgalloc.KVAllocator.restore(walk.alloc.snapshot(), "cuda")
    again.check(device=True)
    assert assert_poison(again) > 100
    assert tables(again) == tables(walk.alloc)


def test_without_debug_mode_staging_is_left_as_it_is(
    state: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH)
    alloc = made()
    device = alloc._core.device
    wrapped = [name for name, value in vars(device).items() if hasattr(value, "__wrapped__")]
    assert not wrapped and "captured" not in vars(device)
    alloc.extend(alloc.open(2), 7)
    assert "poison_rows" not in state.launches
    assert not (device._small._slots[0].ints == POISON).any()
