"""On which stream a step runs, behind whom; and that every call leaves the streams as they were."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from cupy.cuda import stream as cupy_stream
from gpu.currents import CURRENTS, STREAMS, Foreign, cuda_torch, event_behind
from gpu.latch import Latches, copy_entries, spin
from gpu.naive import row_entries
from gpu.twins import Twins, host
from gpu.verbs import VERBS, World
from gpu.walks import Walk

import sgalloc

PS = 16


def make(**how: Any) -> sgalloc.KVAllocator:
    alloc = sgalloc.KVAllocator(200, PS, 8, 20 * PS, device="cuda", **how)
    alloc.warm(256)
    return alloc


def row_of(alloc: sgalloc.KVAllocator, handle: int) -> np.ndarray:
    """What the row of ``handle`` must be, up to A."""
    held = int(alloc.allocated(handle)[0])
    return row_entries(alloc.pages(handle, 0, held), PS, 0, held)


class Reader:
    """Copies of one row, made by a kernel on a stream of the reader's."""

    def __init__(self, alloc: sgalloc.KVAllocator, handle: int, count: int) -> None:
        self.seen = cupy.full(count, -1, cupy.int32)
        row = int(alloc.rows(handle)[0])
        self.source = alloc.req_to_token.data.ptr + 4 * row * alloc.row_width
        runtime.deviceSynchronize()

    def read_on(self, stream: int) -> None:
        copy_entries(self.source, self.seen.data.ptr, self.seen.size, stream)

    def saw(self, entries: np.ndarray) -> bool:
        return bool(np.array_equal(host(self.seen), entries[: self.seen.size]))


# -- behind whom a step runs ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("current", CURRENTS)
def test_a_step_runs_behind_the_streams_current_at_the_call(
    current: str, stream: str, latches: Latches
) -> None:
    if "torch" in stream and "torch" not in current:
        pytest.skip("torch counts as not loaded here")
    keep: list[Any] = []
    with CURRENTS[current]() as held:
        alloc = make(stream=STREAMS[stream](keep))
        (h,) = alloc.open().tolist()
        latch = latches.hold(held)
        ready = alloc.extend(h, 3 * PS).ready
        latches.let_the_rest_run()
        assert not ready.query(), "the step did not wait for the current stream"
        assert latch.held
        latch.open()
        runtime.deviceSynchronize()
        assert ready.query()
        assert np.array_equal(host(alloc.req_to_token)[1, : 3 * PS], row_of(alloc, h))


@pytest.mark.parametrize("stream", STREAMS)
def test_a_step_runs_on_its_stream(stream: str, latches: Latches) -> None:
    """What holds the allocator's own stream holds the step, whoever is current."""
    keep: list[Any] = []
    own = STREAMS[stream](keep)
    alloc = make(stream=own)
    handles = {
        "current": 0,
        "plan": getattr(alloc._core.device._order._own, "ptr", 0),
    }
    if stream in handles:
        held = handles[stream]
    elif isinstance(own, int):
        held = own
    else:
        held = own.__cuda_stream__()[1]
    (h,) = alloc.open().tolist()
    latch = latches.hold(held)
    ready = alloc.extend(h, 3 * PS).ready
    latches.let_the_rest_run()
    assert not ready.query() and latch.held
    latch.open()
    runtime.deviceSynchronize()
    assert ready.query()
    alloc.check(device=True)


@pytest.mark.parametrize("stream", ["current", "plan", "raw"])
def test_a_step_runs_behind_the_named_reader(stream: str, latches: Latches) -> None:
    keep: list[Any] = []
    reader = cupy.cuda.Stream(non_blocking=True)
    alloc = make(stream=STREAMS[stream](keep), reader=reader)
    (h,) = alloc.open().tolist()
    latch = latches.hold(int(reader.ptr))
    ready = alloc.extend(h, PS).ready
    latches.let_the_rest_run()
    assert not ready.query() and latch.held
    latch.open()
    runtime.deviceSynchronize()
    assert ready.query()


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
@pytest.mark.parametrize("stream", ["current", "plan", "raw"])
@pytest.mark.parametrize("grows", [True, False], ids=["a step", "a step without need"])
def test_a_step_waits_for_the_event_it_was_given(
    grows: bool, stream: str, kind: str, latches: Latches
) -> None:
    """Also where there is nothing to write: what comes next on the stream is behind the event."""
    keep: list[Any] = []
    other = cupy.cuda.Stream(non_blocking=True)
    alloc = make(stream=STREAMS[stream](keep))
    h = alloc.open(2).tolist()
    alloc.extend(h[0], PS - 1)
    runtime.deviceSynchronize()
    latch = latches.hold(int(other.ptr))
    event, owner = event_behind(int(other.ptr), kind)
    plan = alloc.decode(h[0], 2 if grows else 1, after=event)
    assert plan.num_new_pages == grows
    later = alloc.extend(h[1], PS).ready
    latches.let_the_rest_run()
    assert not later.query(), "the next step overtook the event"
    assert latch.held
    latch.open()
    runtime.deviceSynchronize()
    assert later.query()
    alloc.check(device=True)
    del owner


@pytest.mark.parametrize("stream", ["current", "plan", "raw", "torch"])
def test_ready_puts_a_reader_behind_the_write(stream: str, latches: Latches) -> None:
    """The write is held back; a reader that waits for ``ready`` sees it all the same."""
    keep: list[Any] = []
    with CURRENTS["torch side"]() as held:
        alloc = make(stream=STREAMS[stream](keep))
        (h,) = alloc.open().tolist()
        reader = Reader(alloc, h, 4 * PS)
        sides = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        torch_side = cuda_torch().cuda.Stream()
        latch = latches.hold(held)
        ready = alloc.extend(h, 4 * PS).ready
        ready.wait(sides[0])
        reader.read_on(int(sides[0].ptr))
        for other in (int(sides[1].ptr), Foreign(sides[2]), torch_side):
            ready.wait(other)
        done = [event_behind(int(s.ptr), "cupy")[0] for s in sides]
        done.append(event_behind(int(torch_side.cuda_stream), "torch")[0])
        torch_events = [getattr(event, "query", None) for event in done]
        latches.let_the_rest_run()
        for event, query in zip(done, torch_events, strict=True):
            assert not (query() if query is not None else event.done), "it did not wait"
        assert latch.held
        latch.open()
        assert reader.saw(row_of(alloc, h))


def test_ready_by_its_handle(latches: Latches) -> None:
    """CuPy's ``wait_event`` takes it as it is; without a stream the current one waits."""
    with CURRENTS["torch side"]() as held:
        alloc = make(stream="plan")
        (h,) = alloc.open().tolist()
        first, second = Reader(alloc, h, PS), Reader(alloc, h, PS)
        side = cupy.cuda.Stream(non_blocking=True)
        latch = latches.hold(held)
        ready = alloc.extend(h, PS).ready
        assert ready.ptr == ready.cuda_event > 0
        side.wait_event(ready)
        first.read_on(int(side.ptr))
        with CURRENTS["cupy side"]() as current:
            ready.wait()
            second.read_on(current)
            latches.let_the_rest_run()
            assert latch.held
            latch.open()
            ready.synchronize()
            assert ready.query() and ready.done
            assert first.saw(row_of(alloc, h)) and second.saw(row_of(alloc, h))


def test_ready_of_a_step_that_wrote_nothing_is_the_last_write(latches: Latches) -> None:
    with CURRENTS["torch side"]() as held:
        alloc = make(stream="plan")
        h = alloc.open(2).tolist()
        assert alloc.decode(h, 0).ready.query(), "nothing was ever written"
        latch = latches.hold(held)
        alloc.extend(h, 5)
        ready = alloc.decode(h).ready
        latches.let_the_rest_run()
        assert not ready.query() and latch.held
        latch.open()
        runtime.deviceSynchronize()
        assert ready.query()


@pytest.mark.parametrize("stream", ["current", "raw"])
def test_steps_from_changing_streams_stay_in_order(stream: str) -> None:
    """One request grows from one current stream after the other, each kept busy for a while."""
    keep: list[Any] = []
    alloc = make(stream=STREAMS[stream](keep))
    h = alloc.open(4).tolist()
    for at in range(40):
        name = ("cupy side", "torch side", "cupy null", "torch default")[at % 4]
        with CURRENTS[name]() as current:
            spin(current, 50_000)
            handle = h[at % 3]
            if at % 10 == 9:
                alloc.release(handle)
                (h[at % 3],) = alloc.open().tolist()
            else:
                alloc.extend(handle, int(alloc.allocated(handle)[0]) + 1)
            if at % 7 == 0:
                alloc.slots(handle, 0, 0)
    runtime.deviceSynchronize()
    alloc.check(device=True)
    del keep


def test_a_gather_sees_the_write_before_it_from_another_stream(latches: Latches) -> None:
    with CURRENTS["torch side"]() as held:
        alloc = make()
        (h,) = alloc.open().tolist()
        out = cupy.zeros(2 * PS, cupy.int32)
        runtime.deviceSynchronize()
        latch = latches.hold(held)
        alloc.extend(h, 2 * PS)
        with CURRENTS["cupy side"]():
            alloc.slots(h, 0, 2 * PS, out=out)
            latches.let_the_rest_run()
            assert latch.held
            latch.open()
        assert np.array_equal(host(out), row_of(alloc, h))


# -- what is left behind -------------------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    """What a caller may have made current."""
    torch = cuda_torch()
    current = torch.cuda.current_stream()
    return (
        runtime.getDevice(),
        torch.cuda.current_device(),
        int(cupy_stream.get_current_stream().ptr),
        int(current.cuda_stream),
        runtime.streamIsCapturing(int(current.cuda_stream)),
        cupy.cuda.get_allocator(),
        torch.cuda.get_sync_debug_mode(),
    )


@pytest.mark.parametrize("stream", ["current", "plan", "torch"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_leaves_everything_current_as_it_was(verb: str, stream: str) -> None:
    torch = cuda_torch()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True):
        world = World(stream=STREAMS[stream]([]))
        before = surroundings()
        VERBS[verb].call(world)
        assert surroundings() == before
        world.verify()
        assert surroundings() == before


@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_refusal_leaves_everything_current_as_it_was(stream: str) -> None:
    torch = cuda_torch()
    with torch.cuda.stream(torch.cuda.Stream()):
        before = surroundings()
        alloc = make(stream=STREAMS[stream]([]))
        (h,) = alloc.open().tolist()
        for refused in (
            lambda: alloc.extend(h, 10_000),
            lambda: alloc.extend(h, 3, out=cupy.empty(2, cupy.int32)),
            lambda: alloc.extend(h, 3, after="no event"),
            lambda: alloc.release(h + 1),
        ):
            with pytest.raises((sgalloc.AllocError, ValueError, TypeError)):
                refused()
            assert surroundings() == before


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["stream", "reader"])
@pytest.mark.parametrize(
    "bad", ["side", 1.5, True, -1, object(), b"plan"], ids=lambda bad: type(bad).__name__
)
def test_what_is_no_stream_is_refused(where: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="stream") as caught:
        make(**{where: bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bad", ["event", 1.5, True, 0, -3, object()], ids=lambda bad: type(bad).__name__
)
def test_what_is_no_event_is_refused(bad: Any) -> None:
    alloc = make()
    (h,) = alloc.open().tolist()
    for call in (
        lambda: alloc.extend(h, PS, after=bad),
        lambda: alloc.reserve(h, PS, after=bad),
        lambda: alloc.reserve(h, PS, after=bad, rounding="device"),
        lambda: alloc.decode(h, 0, after=bad),
    ):
        with pytest.raises(TypeError, match=r"after=.*event"):
            call()
    assert alloc.allocated(h).tolist() == [0] and alloc.available() == 200
    assert alloc._core.device.launches == 0


def test_a_torch_event_that_was_never_recorded_is_refused() -> None:
    alloc = make()
    (h,) = alloc.open().tolist()
    with pytest.raises(TypeError, match="recorded"):
        alloc.extend(h, PS, after=cuda_torch().cuda.Event())
    assert alloc.available() == 200


@pytest.mark.parametrize("bad", ["cuda:99", "cuda:x", "tpu", "cpu:1", "cuda:-1"])
def test_a_device_that_is_not_here_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=bad) as caught:
        sgalloc.KVAllocator(10, 4, 2, 40, device=bad)
    assert "\n" not in str(caught.value)
    if bad == "cuda:99":
        assert str(runtime.getDeviceCount()) in str(caught.value)


def test_auto_is_the_current_gpu() -> None:
    index = runtime.getDevice()
    for device in ("auto", "cuda", f"cuda:{index}"):
        alloc = sgalloc.KVAllocator(10, 4, 2, 40, device=device)
        assert alloc.device == f"cuda:{index}"
        assert isinstance(alloc.req_to_token, cupy.ndarray)
        assert alloc.req_to_token.shape == (3, 40) and alloc.req_to_token.dtype == np.int32


def test_the_caller_may_let_go_of_the_stream_object() -> None:
    """The allocator keeps what it was given, so that the handle stays good."""
    alloc = make(stream=cupy.cuda.Stream(non_blocking=True), reader=Foreign(cupy.cuda.Stream()))
    (h,) = alloc.open().tolist()
    alloc.extend(h, 5)
    runtime.deviceSynchronize()
    alloc.check(device=True)


# -- several GPUs --------------------------------------------------------------------------------

two_gpus = pytest.mark.skipif(runtime.getDeviceCount() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_table_on_a_device_that_is_not_current(stream: str) -> None:
    before = surroundings()
    twins = Twins(150, PS, 12, 24 * PS, prefix_cache=True)
    shared = {"device": "cuda:1", "prefix_cache": True, "page_table": True}
    twins.gpu = sgalloc.KVAllocator(150, PS, 12, 24 * PS, stream=STREAMS[stream]([]), **shared)
    twins.gpu.warm(1024)
    assert twins.gpu.device == "cuda:1" and twins.gpu.req_to_token.device.id == 1
    assert surroundings() == before
    Walk(twins, 9, True, ("cupy int32", "cupy int64")).run(rounds=2)
    assert surroundings() == before


@two_gpus
def test_out_on_another_device_is_refused() -> None:
    alloc = make()
    (h,) = alloc.open().tolist()
    with cupy.cuda.Device(1):
        out = cupy.empty(3, cupy.int32)
        with pytest.raises(ValueError, match="another GPU"):
            alloc.extend(h, 3, out=out)
        alloc.extend(h, 3)
        assert runtime.getDevice() == 1
    runtime.deviceSynchronize()
    alloc.check(device=True)
