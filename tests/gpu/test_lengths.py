"""The lengths of a DFLASH step on the device: right, in order, and never overwritten too soon.

A latch holds the stream that reads them while more steps are prepared than there are pinned
buffers; a kernel behind each step's event copies what a forward of that step would read.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import captured_by_cupy
from gpu.currents import CURRENTS, MODES, STREAMS, Raw, event_behind
from gpu.latch import Latches, copy_entries
from gpu.spy import Spy, device_allocations
from gpu.twins import host, verify_rows

import sgalloc
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash

BLOCK = SpecConfig("dflash", draft_tokens=4)


class Seen(NamedTuple):
    """What a forward read, and what it should have."""

    arrays: Any
    step: dflash.DflashStep


class Engine:
    """A decode loop whose forwards read the lengths on ``forward``, behind each step's event."""

    def __init__(
        self, forward: int, requests: int, most: int | None = None, ps: int = 4, **how: Any
    ) -> None:
        self.forward = forward
        self.alloc = sgalloc.KVAllocator(
            120 * requests, ps, requests, 120 * ps, device="cuda", **how
        )
        self.alloc.warm(1024)
        self.rng = np.random.default_rng(requests)
        self.handles = self.alloc.open(requests)
        self.alloc.extend(self.handles, self.rng.integers(1, 40, requests))
        self.lengths = dflash.Lengths(self.alloc, most)
        self.seen: list[Seen] = []
        # Device memory is had before a stream is held.
        self.places = [cupy.full((4, requests), -1, cupy.int32) for _ in range(96)]
        runtime.deviceSynchronize()

    def step(self, count: int | None = None, after: Any = None, reserve: Any = None) -> Any:
        """Prepare, queue the forward that reads, and commit."""
        named = self.handles[:count]
        step = dflash.prepare_for_decode(
            self.alloc, named, BLOCK, reserve=reserve, lengths=self.lengths, after=after
        )
        step.ready.wait(Raw(self.forward))
        self.read(step)
        accepted = self.rng.integers(0, 5, named.size)
        self.alloc.commit(named, accepted.clip(max=step.nxt - step.committed))
        return step

    def read(self, step: dflash.DflashStep) -> None:
        """A kernel on the forward's stream copies the lengths."""
        place, n = self.places.pop(), step.cur.size
        width = 4 * place.shape[1]
        for array, row, entries in (
            (self.lengths.cur, 0, n),
            (self.lengths.nxt, 1, n),
            (self.lengths.committed, 2, 2 * n),
        ):
            copy_entries(array.data.ptr, place.data.ptr + row * width, entries, self.forward)
        self.seen.append(Seen(place, step))

    def verify(self) -> None:
        """Every forward read the lengths of its own step."""
        runtime.deviceSynchronize()
        for arrays, step in self.seen:
            found, n = host(arrays), step.cur.size
            assert found[0, :n].tolist() == step.cur.tolist()
            assert found[1, :n].tolist() == step.nxt.tolist()
            assert found[2:].reshape(-1).view(np.int64)[:n].tolist() == step.committed.tolist()
        verify_rows(self.alloc)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requests", [1, 5, 33])
def test_more_steps_than_buffers_behind_a_held_stream(
    requests: int, mode: str, latches: Latches
) -> None:
    current, stream = MODES[mode]
    with CURRENTS[current]() as held:
        engine = Engine(held, requests, stream=STREAMS[stream]([]))
        buffers = engine.lengths.staging[0]
        for _ in range(3):
            latch = latches.hold(held)
            for _ in range(24):
                engine.step()
            assert latch.held, "a step waited for the GPU"
            latches.let_the_rest_run()
            latch.open()
            engine.verify()
        slots, waits, grows = engine.lengths.staging
        assert slots >= 24 > buffers and grows >= slots - buffers and waits == 0
        assert engine.alloc.decode_index(engine.handles).tolist() == [72] * requests


def test_both_devices_return_the_same_values() -> None:
    gpu, cpu = (
        sgalloc.KVAllocator(4000, 4, 70, 400, device=name) for name in ("cuda", "cpu")
    )  # fmt: skip
    rng = np.random.default_rng(5)
    named = [alloc.open(70) for alloc in (gpu, cpu)]
    arrays = [dflash.Lengths(alloc) for alloc in (gpu, cpu)]
    addresses = [array.data.ptr for array in (arrays[0].cur, arrays[0].nxt, arrays[0].committed)]
    for count in (1, 20, 32, 33, 70, 3, 0, 64):
        reserve = rng.integers(0, 30, count)
        steps = [
            dflash.prepare_for_decode(
                alloc, handles[:count], BLOCK, 7, reserve=reserve, lengths=lengths
            )
            for alloc, handles, lengths in zip((gpu, cpu), named, arrays, strict=True)
        ]
        for one, two in zip(steps[0][:4], steps[1][:4], strict=True):
            assert np.array_equal(one, two)
        assert np.array_equal(steps[0].committed, steps[1].committed)
        assert steps[0][7:] == steps[1][7:]
        steps[0].ready.synchronize()
        for name in ("cur", "nxt", "committed"):
            mine, theirs = (getattr(lengths, name) for lengths in arrays)
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape == (70,)
            assert np.array_equal(host(mine), theirs), f"{name} of {count} requests"
        accepted = rng.integers(0, 5, count).clip(max=steps[1].nxt - steps[1].committed)
        gpu.commit(named[0][:count], accepted)
        cpu.commit(named[1][:count], accepted)
    assert addresses == [
        array.data.ptr for array in (arrays[0].cur, arrays[0].nxt, arrays[0].committed)
    ]


@pytest.mark.parametrize("mode", ["one stream, torch's side", "plan stream"])
def test_buffers_grow_by_doubling_while_the_smaller_ones_are_read(
    mode: str, latches: Latches
) -> None:
    current, stream = MODES[mode]
    with CURRENTS[current]() as held:
        engine = Engine(held, 200, stream=STREAMS[stream]([]))
        arrays = engine.lengths._arrays
        latch = latches.hold(held)
        rooms = []
        for count in (1, 32, 33, 40, 64, 65, 128, 129, 200, 10):
            engine.step(count)
            rooms.append(arrays._room)
        assert latch.held
        assert rooms == [32, 32, 64, 64, 64, 128, 128, 200, 200, 200]
        assert engine.lengths.staging[2] == 3
        latch.open()
        engine.verify()


FORWARDS = {
    "one stream": ("torch side", "current", None),
    "plan stream": ("torch side", "plan", None),
    "plan stream, CuPy's": ("cupy side", "plan", None),
    "plan stream, event": ("torch side", "plan", "cupy"),
    "fixed stream, raw event": ("cupy side", "raw", "raw"),
    "fixed stream, reader": ("cupy side", "raw", "reader"),
}


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("forward", FORWARDS)
def test_lengths_are_ordered_both_ways_against_the_forward(
    forward: str, grows: bool, latches: Latches
) -> None:
    """A forward that is held still reads its own lengths; the next waits for the next ones.

    Where the step needs no page, no table write orders the copies.
    """
    current, stream, named = FORWARDS[forward]
    keep: list[Any] = []
    with CURRENTS[current]() as held:
        reader = Raw(held) if named == "reader" else None
        engine = Engine(held, 6, stream=STREAMS[stream](keep), reader=reader)
        first = engine.step()
        runtime.deviceSynchronize()
        latch = latches.hold(held)
        engine.read(first)  # a forward that has yet to read
        after = None
        if named in ("cupy", "raw"):
            after, owner = event_behind(held, named)
            keep.append(owner)
        elsewhere = "cupy null" if "cupy" in current else "torch default"
        with CURRENTS[elsewhere]() if named else nullcontext():
            step = engine.step(after=after, reserve=None if grows else 0)
        assert bool(step.needed) is grows
        latches.let_the_rest_run()
        assert latch.held and not step.ready.query(), "it is behind the held forward"
        latch.open()
        engine.verify()


def test_a_forward_waits_for_lengths_that_are_held_up(latches: Latches) -> None:
    """The other way: the plan stream is held, and the caller's stream waits for ``ready``."""
    with CURRENTS["cupy side"]() as forward:
        own = cupy.cuda.Stream(non_blocking=True)
        engine = Engine(forward, 6, stream=own)
        latch = latches.hold(int(own.ptr))
        engine.step()
        latches.let_the_rest_run()
        assert latch.held
        latch.open()
        engine.verify()


def test_at_the_cap_a_step_waits_and_counts_it(latches: Latches) -> None:
    with CURRENTS["torch side"]() as held:
        engine = Engine(held, 3)
        ring = engine.lengths._arrays._ring
        ring._cap = len(ring)
        latch = latches.hold(held)
        for _ in range(len(ring)):
            engine.step()
        assert latch.held and ring.waits == 0
        seen: list[bool] = []

        def let_go() -> None:
            guard = time.monotonic() + 20
            while not ring.waits and time.monotonic() < guard:
                time.sleep(0.001)
            seen.append(latch.held)
            latch.open()

        opener = threading.Thread(target=let_go)
        opener.start()
        engine.step()
        opener.join()
        assert seen == [True], "it waited while the stream was held"
        assert engine.lengths.staging == (len(ring), 1, 0)
        engine.verify()


def test_a_steady_step_costs_three_copies_more_and_waits_for_nothing(spy: Spy) -> None:
    with CURRENTS["torch side"]() as current:
        engine = Engine(current, 8)
        alloc, batch = engine.alloc, engine.alloc.batch(engine.handles)
        for _ in range(8):
            dflash.prepare_for_decode(alloc, batch, BLOCK, lengths=engine.lengths)
        runtime.deviceSynchronize()
        spy.calls.clear()
        with device_allocations() as sizes:
            for copies, lengths in ((0, None), (3, engine.lengths)):
                alloc.trim(batch, alloc.committed(batch))
                spy.calls.clear()
                step = dflash.prepare_for_decode(alloc, batch, BLOCK, lengths=lengths)
                assert step.needed and spy.launches == 1 and spy.copies == copies
                assert not spy.waits and not spy.never
                spy.calls.clear()
                step = dflash.prepare_for_decode(alloc, batch, BLOCK, lengths=lengths)
                assert not step.needed and spy.launches == 0 and spy.copies == copies
                assert not spy.waits and not spy.never
        assert not sizes


@pytest.mark.parametrize("refused", ["pages", "row", "lengths"])
def test_a_refusal_copies_nothing(refused: str, latches: Latches) -> None:
    with CURRENTS["torch side"]() as held:
        alloc = sgalloc.KVAllocator(9, 4, 4, 32, device="cuda")
        alloc.warm(64)
        h = alloc.open(4)
        alloc.extend(h, [4, 4, 4, 4])
        lengths = dflash.Lengths(alloc, 3 if refused == "lengths" else None)
        runtime.deviceSynchronize()
        before = (alloc.decode_index(h).tolist(), alloc.allocated(h).tolist())
        device = alloc._core.device
        counts = (device.launches, device.copies)
        latch = latches.hold(held)
        reserve = {"pages": 8, "row": 29, "lengths": 0}[refused]
        with pytest.raises((sgalloc.OutOfPages, sgalloc.RowTooNarrow, ValueError)):
            dflash.prepare_for_decode(alloc, h, BLOCK, reserve=reserve, lengths=lengths)
        assert latch.held and counts == (device.launches, device.copies)
        latch.open()
        assert before == (alloc.decode_index(h).tolist(), alloc.allocated(h).tolist())
        runtime.deviceSynchronize()
        assert not host(lengths.nxt).any() and not host(lengths.committed).any()


@pytest.mark.usefixtures("no_collection")
def test_under_capture_lengths_are_refused_and_nothing_changes() -> None:
    alloc = sgalloc.KVAllocator(100, 4, 4, 64, device="cuda")
    alloc.warm(64)
    h = alloc.open(3)
    alloc.extend(h, 4)
    lengths = dflash.Lengths(alloc)
    replay: list[Any] = []
    with captured_by_cupy(runtime.streamCaptureModeGlobal, replay):
        with pytest.raises(sgalloc.WrongState, match="before the capture"):
            dflash.prepare_for_decode(alloc, h, BLOCK, lengths=lengths)
        assert alloc.stats().refusals == {"WrongState": 1}
        assert alloc.decode_index(h).tolist() == [0, 0, 0]
        assert alloc.allocated(h).tolist() == [4, 4, 4]
    assert dflash.prepare_for_decode(alloc, h, BLOCK, lengths=lengths).needed == 24
    verify_rows(alloc)
