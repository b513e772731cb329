"""Large steps are copied on a stream for copies alone, which waits for none of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import captured_by_torch
from gpu.currents import CURRENTS, STREAMS, cuda_torch
from gpu.latch import Latch, Latches, copy_entries, spin
from gpu.spy import Spy
from gpu.twins import host, verify_rows
from gpu.verbs import LONG, VERBS, World

import sgalloc
from sgalloc.device.staging import HEADER_BYTES, Slot, pinned
from sgalloc.device.streams import event_done, new_event

# The current stream, and what is passed as stream=: a step runs on a stream of the caller's.
CALLERS = {
    "torch's default": ("torch default", "current"),
    "torch's side": ("torch side", "current"),
    "CuPy's null": ("cupy null", "current"),
    "CuPy's blocking side": ("cupy blocking side", "current"),
    "per-thread default": ("per-thread default", "current"),
    "a fixed stream": ("torch side", "cupy"),
    "a fixed raw handle": ("cupy side", "raw"),
}
PAGES = 2000  # too many to be read from mapped memory


def make(stream: Any, rows: int = 8) -> sgalloc.KVAllocator:
    alloc = sgalloc.KVAllocator(
        (rows + 1) * 2 * PAGES, 2, rows, 4 * PAGES, device="cuda", stream=stream
    )
    alloc.warm(2 * PAGES)
    return alloc


def done_while_held(events: list[int], latch: Latch) -> None:
    """Come back when all events are done; the latch must be held until then."""
    while not all(event_done(event) for event in events):
        assert latch.held, "a copy waited for the caller's stream"
    assert latch.held


def first_entries(slot: Slot, latch: Latch) -> list[int]:
    """What is on the device behind the header of a slot, read while the latch is held."""
    done_while_held([slot.copied], latch)
    side, event = cupy.cuda.Stream(non_blocking=True), new_event()
    address, words = _words()
    copy_entries(slot.target + HEADER_BYTES, address, 4, int(side.ptr))
    runtime.eventRecord(event, int(side.ptr))
    done_while_held([event], latch)
    return list(words.tolist())


@lru_cache(maxsize=1)
def _words() -> tuple[int, np.ndarray]:
    """Memory that host and device both see: a copy to the host might wait for the latch."""
    owner, memory = pinned(16)
    _owners.append(owner)
    return int(owner.ptr), memory.view(np.int32)


_owners: list[Any] = []


def _extend(alloc: sgalloc.KVAllocator, h: list[int], tables: Any) -> Any:
    return alloc.extend(h[0], 2 * PAGES).ready


def _round(alloc: sgalloc.KVAllocator, h: list[int], tables: Any) -> Any:
    return alloc.reserve(h, 2 * PAGES, rounding="device").ready


def _export(alloc: sgalloc.KVAllocator, h: list[int], tables: Any) -> Any:
    return tables.update(h)


COPIED: dict[str, Callable[..., Any]] = {
    "large step": _extend, "rounding": _round, "export": _export
}  # fmt: skip


@pytest.mark.parametrize("what", COPIED)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_copy_is_done_while_the_callers_stream_is_held(
    caller: str, what: str, latches: Latches
) -> None:
    current, stream = CALLERS[caller]
    with CURRENTS[current]() as held:
        keep: list[Any] = []  # a raw handle is no longer than its stream
        alloc = make(STREAMS[stream](keep))
        h = alloc.open(2).tolist()
        alloc.extend(h[1], 5)
        tables = alloc.page_tables(2, 8)
        _words()[1][:] = -1
        runtime.deviceSynchronize()
        slot = alloc._core.device._large._slots[0]
        assert not slot.used
        latch = latches.hold(held)
        ready = COPIED[what](alloc, h, tables)
        assert slot.used, "it went through the first of the large slots"
        assert first_entries(slot, latch) == slot.ints[32:36].tolist() != [0] * 4
        assert not ready.query(), "the launch is behind the caller's stream"
        latch.open()
        verify_rows(alloc)
        if what == "export":
            assert host(tables.indices)[:3].tolist() == alloc.pages(h[1]).tolist()


@pytest.mark.parametrize("caller", CALLERS)
def test_copies_of_several_steps_are_done_while_the_stream_is_held(
    caller: str, latches: Latches
) -> None:
    """Those for slots that the ring had, and those for slots that it grew by."""
    current, stream = CALLERS[caller]
    with CURRENTS[current]() as held:
        keep: list[Any] = []  # a raw handle is no longer than its stream
        alloc = make(STREAMS[stream](keep))
        h = alloc.open(8).tolist()
        large = alloc._core.device._large
        latch = latches.hold(held)
        readies = [alloc.extend(h[at], 2 * (PAGES + at)).ready for at in range(large._cap)]
        assert len(large) == large._cap and large.waits == 0
        done_while_held([slot.copied for slot in large._slots], latch)
        assert not any(ready.query() for ready in readies)
        latch.open()
        verify_rows(alloc)


@pytest.mark.parametrize("caller", ["torch's default", "torch's side", "a fixed stream"])
def test_d10_of_copies_on_their_own_stream(caller: str, latches: Latches) -> None:
    """Many more steps than slots, twenty times: no slot is overwritten on its way or after it."""
    current, stream = CALLERS[caller]
    rng = np.random.default_rng(3)
    with CURRENTS[current]() as held:
        keep: list[Any] = []  # a raw handle is no longer than its stream
        alloc = make(STREAMS[stream](keep))
        device, h = alloc._core.device, []
        for _ in range(20):
            alloc.release(h)
            h = alloc.open(8).tolist()
            latch = latches.hold(held)
            before = device.copies
            for handle in h:
                alloc.extend(handle, 2 * int(rng.integers(1500, PAGES)))
            assert latch.held and device.copies == before + 8
            latch.open()
            for step in range(24):
                if step % 3 == 0:
                    spin(held, 100_000)
                handle = h[int(rng.integers(8))]
                alloc.trim(handle, 0)
                alloc.extend(handle, 2 * int(rng.integers(1500, 2 * PAGES)))
            verify_rows(alloc)
            assert device.copies == before + 32


@pytest.mark.parametrize("what", COPIED)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_launch_waits_for_its_copy(caller: str, what: str, latches: Latches) -> None:
    current, stream = CALLERS[caller]
    with CURRENTS[current]():
        keep: list[Any] = []  # a raw handle is no longer than its stream
        alloc = make(STREAMS[stream](keep))
        h = alloc.open(2).tolist()
        alloc.extend(h[1], 5)
        tables = alloc.page_tables(2, 8)
        runtime.deviceSynchronize()
        latch = latches.hold(alloc._core.device._order.copying)
        ready = COPIED[what](alloc, h, tables)
        latches.let_the_rest_run()
        assert not ready.query(), "the kernel read what was not copied yet"
        assert latch.held
        latch.open()
        verify_rows(alloc)
        if what == "export":
            assert host(tables.indices)[:3].tolist() == alloc.pages(h[1]).tolist()


class Copies:
    """On which streams copies are made from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[int] = []
        real = runtime.memcpyAsync

        def copy(*args: Any) -> None:
            self.streams.append(args[4])
            real(*args)

        monkeypatch.setattr(runtime, "memcpyAsync", copy)


@pytest.mark.parametrize("stream", STREAMS)
def test_on_which_stream_a_copy_runs(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for copies alone; the allocator's own, where it has that."""
    keep: list[Any] = []
    with CURRENTS["torch side"]() as current:
        alloc = make(STREAMS[stream](keep))
        order = alloc._core.device._order
        h = alloc.open(2).tolist()
        tables = alloc.page_tables(2, 2 * PAGES)
        copies = Copies(monkeypatch)
        for copied in COPIED.values():
            copied(alloc, h, tables)
        assert len(copies.streams) == 3 and set(copies.streams) == {order.copying}
        if stream == "plan":
            assert order.copying == order._fixed
        else:
            assert order.copying not in (0, 1, 2, current, order._fixed)
        verify_rows(alloc)


def test_the_memory_behind_a_slot_is_asked_for_where_it_is_written() -> None:
    """The pool may give out at once what work queued on the current stream still reads."""
    for stream in ("current", "plan", "cupy"):
        with CURRENTS["cupy side"](), cupy.cuda.Stream(non_blocking=True):
            alloc = sgalloc.KVAllocator(
                60_000, 4, 4, 160_000, device="cuda", stream=STREAMS[stream]([])
            )
            alloc.warm(64)
            h = alloc.open(2).tolist()
            order = alloc._core.device._order
            asked: list[int] = []
            pool = cupy.get_default_memory_pool()

            def counting(size: int, asked: list[int] = asked, pool: Any = pool) -> Any:
                asked.append(int(cupy.cuda.get_current_stream().ptr))
                return pool.malloc(size)

            with cupy.cuda.using_allocator(counting):
                alloc.extend(h[0], 40_000)
            assert asked and set(asked) == {order.copying}
            verify_rows(alloc)


@pytest.mark.parametrize("stream", ["current", "plan", "raw"])
def test_a_capture_never_includes_the_stream_for_copies(
    stream: str, spy: Spy, no_collection: None
) -> None:
    torch = cuda_torch()
    world = World(stream=STREAMS[stream](keep := []))
    order = world.alloc._core.device._order
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        seen.fill_(1)
        for verb in ("extend by many", "reserve on device"):
            VERBS[verb].call(world).ready.wait()
            if stream != "plan":
                assert not runtime.streamIsCapturing(order.copying)
        with pytest.raises(sgalloc.WrongState, match="before the capture"):
            world.tables.update(world.edge)
        assert spy.copies == 0
    graph.replay()
    torch.cuda.synchronize()
    world.verify()
    before = spy.copies
    world.alloc.extend(world.spare[1:], LONG)
    assert spy.copies == before + 1
    world.verify()
    del keep
