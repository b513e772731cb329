"""Writes whose event no caller gets: the current stream is behind them, captured or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, captured_by_cupy, captured_by_torch, make
from gpu.currents import CURRENTS, STREAMS, cuda_torch, event_behind
from gpu.latch import Latches, copy_entries
from gpu.naive import gathered
from gpu.spy import Spy
from gpu.twins import host
from gpu.verbs import SIZE, VERBS, World

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")

OWN = ["plan", "raw", "cupy"]
WITHOUT_EVENT = [
    "slots with out", "open with a prefix", "publish what is cached", "publish what is new",
]  # fmt: skip


def owned(stream: str, keep: list[Any], **how: Any) -> World:
    return World(stream=STREAMS[stream](keep), **how)


class Seen:
    """What a reader on the current stream sees of an array of int32 or int64."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._copy = cupy.zeros_like(array)
        self.read_on(0)  # the kernel is loaded at its first launch, which no capture takes
        self._copy.fill(-1)
        runtime.deviceSynchronize()

    def read_on(self, stream: int) -> None:
        count = self._array.size * self._array.dtype.itemsize // 4
        copy_entries(self._array.data.ptr, self._copy.data.ptr, count, stream)

    def now(self) -> list[int]:
        return list(host(self._copy).tolist())


# -- under capture -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", OWN)
@pytest.mark.parametrize("verb", WITHOUT_EVENT)
def test_torch_captures_a_write_without_event(verb: str, stream: str, spy: Spy) -> None:
    torch = cuda_torch()
    world = owned(stream, keep := [])
    table, out = Seen(world.alloc.req_to_token), Seen(world.outs[12].gpu)
    with captured_by_torch() as graph:
        current = world.stream = int(torch.cuda.current_stream().cuda_stream)
        spy.calls.clear()
        VERBS[verb].call(world)
        table.read_on(current)
        out.read_on(current)
        assert spy.polls == 0 and spy.calls["graphLaunch"] == 0
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        world.verify()
        assert np.array_equal(table.now(), world.naive.table)
        for slots in world.expected.values():
            assert out.now() == slots.tolist()
    before = spy.calls["graphLaunch"]
    world.alloc.reserve(world.inside, 16)
    assert spy.calls["graphLaunch"] == before + 1, "the stream is free again"
    world.verify()
    del keep


@pytest.mark.parametrize("mode", ["relaxed", "global"])
@pytest.mark.parametrize("stream", OWN)
@pytest.mark.parametrize("verb", WITHOUT_EVENT)
def test_cupy_captures_a_write_without_event(verb: str, stream: str, mode: str) -> None:
    world = owned(stream, keep := [])
    table, out = Seen(world.alloc.req_to_token), Seen(world.outs[12].gpu)
    replay: list[Callable[[], None]] = []
    number = {"relaxed": runtime.streamCaptureModeRelaxed, "global": 0}[mode]
    with captured_by_cupy(number, replay) as current:
        world.stream = current
        VERBS[verb].call(world)
        table.read_on(current)
        out.read_on(current)
    replay[0]()
    runtime.deviceSynchronize()
    world.verify()
    assert np.array_equal(table.now(), world.naive.table)
    for slots in world.expected.values():
        assert out.now() == slots.tolist()
    del keep


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("stream", OWN)
def test_slots_in_a_new_array_are_captured(stream: str, library: str) -> None:
    """The array is made during the capture, and filled by each replay."""
    world = owned(stream, keep := [])
    expected = gathered(world.alloc, world.edge.tolist(), 0, 3).tolist()
    seen = cupy.zeros(12, cupy.int32)
    Seen(seen)
    world.alloc.slots(world.edge, 0, 3)  # so that CuPy's pool has the memory for another
    runtime.deviceSynchronize()
    replay: list[Callable[[], None]] = []

    def call(current: int) -> Any:
        found = world.alloc.slots(world.edge, 0, 3)
        copy_entries(found.data.ptr, seen.data.ptr, 12, current)
        return found

    if library == "torch":
        torch = cuda_torch()
        with captured_by_torch() as graph:
            found = call(int(torch.cuda.current_stream().cuda_stream))
        replay.append(graph.replay)
    else:
        with captured_by_cupy(runtime.streamCaptureModeRelaxed, replay) as current:
            found = call(current)
    for _ in range(2):
        found.fill(-1)
        runtime.deviceSynchronize()
        replay[0]()
        runtime.deviceSynchronize()
        assert host(found).tolist() == expected == host(seen).tolist()
    world.verify()
    del keep


@pytest.mark.parametrize("stream", ["plan", "raw"])
def test_slots_are_captured_where_a_reader_was_named(stream: str) -> None:
    torch = cuda_torch()
    reader = cupy.cuda.Stream(non_blocking=True)
    world = owned(stream, keep := [reader], reader=reader)
    out = Seen(world.outs[12].gpu)
    with captured_by_torch() as graph:
        VERBS["slots with out"].call(world)
        out.read_on(int(torch.cuda.current_stream().cuda_stream))
    world.out(12).fill(-1)  # each replay fills it anew
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    world.verify()
    assert out.now() == world.expected[12].tolist()
    del keep


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
@pytest.mark.parametrize("stream", OWN)
def test_a_step_without_need_leaves_a_capture_whose_event_it_got(stream: str, kind: str) -> None:
    torch = cuda_torch()
    world = owned(stream, keep := [])
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        seen.fill_(7)
        event, owner = event_behind(int(torch.cuda.current_stream().cuda_stream), kind)
        keep.append(owner)
        assert world.alloc.decode(world.inside, after=event).num_new_pages == 0
    graph.replay()
    torch.cuda.synchronize()
    assert seen.tolist() == [7] * 4
    world.verify()


@pytest.mark.parametrize("stream", OWN)
def test_a_refusal_leaves_the_capture_that_it_was_drawn_into(stream: str) -> None:
    torch = cuda_torch()
    world = owned(stream, keep := [])
    cold = sgalloc.KVAllocator(100, PS, 4, 40, device="cuda", stream=STREAMS[stream](keep))
    handle = cold.open()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        seen.fill_(7)
        with pytest.raises(sgalloc.WrongState, match="before the capture"):
            world.tables.update(world.edge)
        with pytest.raises(sgalloc.WrongState, match="warm"):
            cold.extend(handle, 5)
        for _ in range(8):
            world.alloc.slots(world.edge, 0, 3, out=world.out(12))
        with pytest.raises(sgalloc.WrongState, match=r"captured\(max_pages\)"):
            world.alloc.slots(world.edge, 0, 3, out=world.out(12))
        with pytest.raises(sgalloc.WrongState, match=r"captured\(max_pages\)"):
            world.alloc.decode(world.edge)
    graph.replay()
    torch.cuda.synchronize()
    assert seen.tolist() == [7] * 4
    world.verify()
    cold.extend(handle, 5)
    cold.check(device=True)


def test_steps_beside_a_capture_with_a_named_reader_use_up_their_slots() -> None:
    """The error after the last one names what has no such bound; nothing else changes."""
    torch = cuda_torch()
    reader = cupy.cuda.Stream(non_blocking=True)
    alloc = make(stream="plan", reader=reader)
    (h,) = alloc.open().tolist()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch():
        seen.fill_(1)
        for _ in range(8):
            alloc.decode(h, PS)
        with pytest.raises(sgalloc.WrongState, match=r"all 8 are taken: .*captured\(max_pages\)"):
            alloc.decode(h, PS)
        assert alloc.committed(h).tolist() == [8 * PS]
    alloc.check(device=True)
    with captured_by_torch():
        seen.fill_(1)
        with pytest.raises(sgalloc.WrongState, match="all 8 are taken"):
            alloc.decode(h, PS)
    alloc.decode(h, PS)
    alloc.check(device=True)


# -- outside of a capture ------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [True, False], ids=["out", "a new array"])
@pytest.mark.parametrize("named", [False, True], ids=["", "reader named"])
@pytest.mark.parametrize("stream", ["plan", "raw"])
@pytest.mark.parametrize("current", CURRENTS)
def test_a_reader_on_the_current_stream_sees_slots(
    current: str, stream: str, named: bool, with_out: bool, latches: Latches
) -> None:
    """The stream on which they are gathered is held; who reads them waits for it."""
    keep: list[Any] = []
    with CURRENTS[current]() as here:
        reader = cupy.cuda.Stream(non_blocking=True) if named else None
        world = owned(stream, keep, reader=reader)
        out = world.outs[12].gpu
        expected = gathered(world.alloc, world.edge.tolist(), 0, 3)
        own = world.alloc._core.device._order._fixed
        table = Seen(out)
        latch = latches.hold(own)
        if with_out:
            world.alloc.slots(world.edge, 0, 3, out=out)
            table.read_on(here)
        else:
            found = world.alloc.slots(world.edge, 0, 3)
            copy_entries(found.data.ptr, table._copy.data.ptr, 12, here)
        event, owner = event_behind(here, "cupy")
        latches.let_the_rest_run()
        assert latch.held, "slots() waited for the GPU"
        assert not event.done, "the reader did not wait for the slots"
        latch.open()
        runtime.deviceSynchronize()
        seen = host(table._copy) if with_out else host(table._copy).view(np.int32)[:12]
        assert seen.tolist() == expected.tolist()
        del owner


def test_slots_are_not_written_while_the_current_stream_uses_their_array(
    latches: Latches,
) -> None:
    """A named reader is one of the table, and says nothing of ``out``."""
    with CURRENTS["torch side"]() as current:
        reader = cupy.cuda.Stream(non_blocking=True)
        world = World(stream="plan", reader=reader)
        out = Seen(world.outs[12].gpu)
        before = out._array.get().tolist()
        latch = latches.hold(current)
        out.read_on(current)
        VERBS["slots with out"].call(world)
        latches.let_the_rest_run()
        assert latch.held
        latch.open()
        world.verify()
        assert out.now() == before


def test_a_reader_on_cupys_stream_beside_torch_sees_slots(latches: Latches) -> None:
    """A new array is CuPy's, and is likely to be read on CuPy's stream."""
    with CURRENTS["torch side"]() as held:
        world = World()
        expected = gathered(world.alloc, world.edge.tolist(), 0, 3)
        side = cupy.cuda.Stream(non_blocking=True)
        copy = cupy.zeros(12, cupy.int32)
        runtime.deviceSynchronize()
        with side:
            latch = latches.hold(held)
            found = world.alloc.slots(world.edge, 0, 3)
            copy_entries(found.data.ptr, copy.data.ptr, 12, int(side.ptr))
            event, owner = event_behind(int(side.ptr), "cupy")
            latches.let_the_rest_run()
            assert latch.held and not event.done
            latch.open()
        assert host(copy).tolist() == expected.tolist()
        del owner


def test_another_write_does_not_hold_the_current_stream_up(latches: Latches) -> None:
    """A step that has ``plan.ready`` is waited for by those alone who ask for it."""
    with CURRENTS["torch side"]() as current:
        world = World(stream="plan")
        latch = latches.hold(world.alloc._core.device._order._fixed)
        world.alloc.decode(world.edge)
        world.alloc.open_with_prefix([world.match])
        event, owner = event_behind(current, "cupy")
        while not event.done:
            assert latch.held, "the current stream waited for a step with an event of its own"
        assert latch.held
        latch.open()
        runtime.deviceSynchronize()
        world.verify()
        assert world.alloc.allocated(world.edge).tolist() == [4 * SIZE] * 4
        del owner
