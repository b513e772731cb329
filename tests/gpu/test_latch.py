"""No verb waits for the GPU, and nothing is reused before its last reader is done.

A latch holds the stream while the host goes on. What is asserted is that it is still held when
a call returns (a call that waits comes back only after the latch has run into its limit), and
that what was queued behind it came out right in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.currents import CURRENTS, MODES, STREAMS, Raw, event_behind
from gpu.latch import Latches, copy_entries
from gpu.naive import row_entries
from gpu.twins import host, verify_rows
from gpu.verbs import LAUNCHING, VERBS, World

import sgalloc

# -- no verb waits -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_returns_while_the_stream_is_held(verb: str, mode: str, latches: Latches) -> None:
    current, stream = MODES[mode]
    with CURRENTS[current]() as held:
        world = World(stream=STREAMS[stream]([]))
        world.stream = held
        latch = latches.hold(held)
        result = VERBS[verb].call(world)
        assert latch.held, f"{verb} waited for the GPU"
        latches.let_the_rest_run()
        ready = getattr(result, "ready", None)
        if verb in LAUNCHING and ready is not None:
            assert not ready.query(), "what was queued is behind the latch"
        latch.open()
        runtime.deviceSynchronize()
        world.verify()
        world.alloc.settle()
        assert world.alloc.stats().groups["full"].quarantined == 0


@pytest.mark.parametrize("mode", ["one stream, torch's side", "plan stream"])
def test_a_step_larger_than_was_provided_for_returns(mode: str, latches: Latches) -> None:
    """The staging memory grows without giving back what is still read."""
    current, stream = MODES[mode]
    with CURRENTS[current]() as held:
        alloc = sgalloc.KVAllocator(
            60_000, 4, 4, 160_000, device="cuda", stream=STREAMS[stream]([])
        )
        alloc.warm(64)
        h = alloc.open(3).tolist()
        latch = latches.hold(held)
        alloc.extend(h[0], 9_000)
        grown = alloc.stats().staging.grows
        alloc.extend(h[1], 40_000)
        alloc.extend(h[2], 5)
        assert latch.held
        assert alloc.stats().staging.grows > grown
        latch.open()
        verify_rows(alloc)


FIRST_TIME = """
import sys
import numpy as np
from cupy.cuda import runtime
import sgalloc
from gpu.latch import Latches
import cupy

alloc = sgalloc.KVAllocator(40_000, 4, 64, 40_000, device="cuda", page_table=True)
h = alloc.open(8)
tables = alloc.page_tables(8, 64)
outs = [cupy.zeros(8, cupy.int32), cupy.zeros(8, cupy.int64), cupy.zeros(8, cupy.int32)]
runtime.deviceSynchronize()
alloc.warm()
latches = Latches()
latch = latches.hold(0)
for name, step in (
    ("extend", lambda: alloc.extend(h, 4)),
    ("extend by many", lambda: alloc.extend(h[0], 30_000)),
    ("decode", lambda: alloc.decode(h[1:], out=outs[0][:7])),
    ("decode with a wide out", lambda: alloc.decode(h, out=outs[1])),
    ("reserve", lambda: alloc.reserve(h, 16)),
    ("reserve on the device", lambda: alloc.reserve(h[1:], 40, rounding="device")),
    ("slots", lambda: alloc.slots(h, 0, 1, out=outs[2])),
    ("page tables", lambda: tables.update(h[1:])),
    ("release", lambda: alloc.release(h[:1])),
):
    step()
    if not latch.held:
        sys.exit(f"{name} waited for the GPU at its first call after warm()")
latch.open()
alloc.check(device=True)
print("passed")
"""


def test_no_verb_waits_at_its_first_call(tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """In a process of its own: a kernel that is loaded at its first launch waits for the GPU."""
    tests = request.path.parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TIME],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr[-2000:]


# -- D9: a row is handed out again while a forward reads it -------------------------------------


class Forward(NamedTuple):
    """Where the forward runs, where the table is written, and how the two are put in order."""

    current: str
    stream: str
    reader: bool = False  # named once, and then not current at the calls
    after: str | None = None  # an event of this kind, given to the write


FORWARDS = {
    "one stream, torch's default": Forward("torch default", "current"),
    "one stream, torch's side": Forward("torch side", "current"),
    "one stream, CuPy's null": Forward("cupy null", "current"),
    "one stream, CuPy's side": Forward("cupy side", "current"),
    "one stream, per-thread default": Forward("per-thread default", "current"),
    "CuPy's side beside torch": Forward("cupy side beside torch", "current"),
    "plan stream, torch's default": Forward("torch default", "plan"),
    "plan stream, torch's side": Forward("torch side", "plan"),
    "plan stream, CuPy's side": Forward("cupy side", "plan"),
    "plan stream, CuPy's side beside torch": Forward("cupy side beside torch", "plan"),
    "fixed stream, torch's side": Forward("torch side", "cupy"),
    "fixed raw stream, CuPy's side": Forward("cupy side", "raw"),
    "plan stream, reader": Forward("torch side", "plan", reader=True),
    "fixed stream, reader": Forward("cupy side", "raw", reader=True),
    "plan stream, torch's event": Forward("torch side", "plan", after="torch"),
    "plan stream, CuPy's event": Forward("torch side", "plan", after="cupy"),
    "plan stream, raw event": Forward("cupy side", "plan", after="raw"),
    "fixed stream, event": Forward("torch side", "cupy", after="cupy"),
}


class Busy:
    """Row 1 belongs to `r1`; row 2 to `other`, who takes the pages that r1 gives back."""

    def __init__(self, ps: int, **how: Any) -> None:
        self.ps, self.width = ps, 40 * ps
        self.alloc = sgalloc.KVAllocator(100, ps, 2, self.width, device="cuda", **how)
        self.alloc.warm(256)
        self.r1, self.other = self.alloc.open(2).tolist()
        self.alloc.extend(self.r1, 10 * ps)
        self.row = int(self.alloc.rows(self.r1)[0])
        self.old = self.entries(self.r1, 10 * ps)
        self.seen = cupy.full(10 * ps, -1, cupy.int32)
        runtime.deviceSynchronize()

    def entries(self, handle: int, stop: int) -> np.ndarray:
        return row_entries(self.alloc.pages(handle, 0, stop), self.ps, 0, stop)

    def read_on(self, stream: int) -> None:
        """The forward: a kernel that copies r1's row."""
        source = self.alloc.req_to_token.data.ptr + 4 * self.row * self.width
        copy_entries(source, self.seen.data.ptr, 10 * self.ps, stream)

    def recycle(self, after: Any = None) -> int:
        """Let r1 go, and give its row to a new request with other pages."""
        alloc = self.alloc
        alloc.release(self.r1)
        alloc.extend(self.other, 10 * self.ps, after=after)
        (r2,) = alloc.open().tolist()
        assert int(alloc.rows(r2)[0]) == self.row
        alloc.extend(r2, 12 * self.ps, after=after)
        assert (self.entries(r2, 10 * self.ps) != self.old).all(), "the test needs other pages"
        return int(r2)

    def verify(self, r2: int) -> None:
        runtime.deviceSynchronize()
        assert np.array_equal(host(self.seen), self.old), "the forward saw a row that changed"
        found = host(self.alloc.req_to_token)[self.row, : 12 * self.ps]
        assert np.array_equal(found, self.entries(r2, 12 * self.ps))
        self.alloc.check(device=True)


@pytest.mark.parametrize("ps", [1, 16])
@pytest.mark.parametrize("forward", FORWARDS)
def test_d9_a_row_is_reused_behind_its_last_reader(forward: str, ps: int, latches: Latches) -> None:
    where = FORWARDS[forward]
    keep: list[Any] = []
    with CURRENTS[where.current]() as stream:
        reader = Raw(stream) if where.reader else None
        busy = Busy(ps, stream=STREAMS[where.stream](keep), reader=reader)
        latch = latches.hold(stream)
        busy.read_on(stream)
        after = None
        if where.after is not None:
            after, owner = event_behind(stream, where.after)
            keep.append(owner)
        if where.reader or where.after is not None:
            # Nothing but what was named leads to the forward's stream.
            elsewhere = "cupy null" if "cupy" in where.current else "torch default"
            with CURRENTS[elsewhere]():
                r2 = busy.recycle(after)
        else:
            r2 = busy.recycle()
        assert latch.held, "the host waited for the forward"
        latches.let_the_rest_run()
        latch.open()
        busy.verify(r2)


@pytest.mark.parametrize("kind", ["torch", "cupy"])
@pytest.mark.parametrize("stream", ["current", "plan"])
def test_d9_a_quarantined_row_is_not_handed_out(stream: str, kind: str, latches: Latches) -> None:
    """With ``release(after=)`` the answer is a clear "not yet", and comes at once."""
    ps, keep = 16, []
    with CURRENTS["torch side"]() as current:
        busy = Busy(ps, stream=STREAMS[stream](keep))
        alloc = busy.alloc
        free = alloc.available()
        latch = latches.hold(current)
        busy.read_on(current)
        event, owner = event_behind(current, kind)
        keep.append(owner)
        alloc.release(busy.r1, after=event)
        with pytest.raises(sgalloc.OutOfRows, match="1 rows are needed, but 0 are free"):
            alloc.open()
        waiting = alloc.stats()
        assert (waiting.rows.quarantined, waiting.groups["full"].quarantined) == (1, 10)
        assert alloc.available() == free
        alloc.check()
        assert latch.held
        latch.open()
        runtime.deviceSynchronize()
        alloc.settle()
        assert alloc.available() == free + 10
        alloc.extend(busy.other, 10 * ps)
        (r2,) = alloc.open().tolist()
        alloc.extend(r2, 12 * ps)
        busy.verify(r2)


def test_what_waits_for_a_write_of_the_allocator_itself(latches: Latches) -> None:
    """``plan.ready`` is an event like any other: for a release, and for another's write."""
    with CURRENTS["torch side"]() as current:
        busy = Busy(16)
        second = sgalloc.KVAllocator(8, 16, 1, 64, device="cuda", stream="plan")
        second.warm(64)
        latch = latches.hold(current)
        ready = busy.alloc.extend(busy.other, 16).ready
        latches.let_the_rest_run()
        assert not ready.query() and not ready.done
        busy.alloc.release(busy.r1, after=ready)
        assert busy.alloc.stats().groups["full"].quarantined == 10
        with CURRENTS["torch default"]():
            late = second.extend(second.open(), 16, after=ready).ready
        latches.let_the_rest_run()
        assert not late.query(), "it is behind the first allocator's write"
        assert latch.held
        latch.open()
        runtime.deviceSynchronize()
        assert ready.query() and ready.done and late.query()
        busy.alloc.settle()
        assert busy.alloc.stats().groups["full"].quarantined == 0
        second.check(device=True)


def test_an_event_that_is_done_waits_for_nothing() -> None:
    busy = Busy(16)
    event, _ = event_behind(0, "cupy")
    runtime.deviceSynchronize()
    busy.alloc.release(busy.r1, after=event)
    assert busy.alloc.stats().rows.quarantined == 0
    assert busy.alloc.available() == 100


# -- what else is promised while a stream is held ------------------------------------------------


@pytest.mark.parametrize("refused", [
    lambda a, h: a.extend(h, 10_000), lambda a, h: a.decode([h[0], h[0]]),
    lambda a, h: a.decode(h, out=cupy.empty(5, cupy.int32)),
    lambda a, h: a.decode(h, out=np.empty(2, np.int32)), lambda a, h: a.decode(h, after=object()),
], ids=["too long", "twice", "out too long", "out on the host", "no event"])  # fmt: skip
def test_a_refusal_returns_and_queues_nothing(
    refused: Callable[..., Any], latches: Latches
) -> None:
    with CURRENTS["torch side"]() as held:
        alloc = sgalloc.KVAllocator(100, 4, 4, 160, device="cuda")
        alloc.warm(64)
        h = alloc.open(2).tolist()
        alloc.extend(h, 4)
        device = alloc._core.device
        before = (device.launches, device.copies, alloc.stats().staging)
        state = (alloc.committed(h).tolist(), alloc.allocated(h).tolist(), alloc.available())
        latch = latches.hold(held)
        with pytest.raises((sgalloc.AllocError, ValueError, TypeError)):
            refused(alloc, h)
        assert latch.held
        assert (device.launches, device.copies, alloc.stats().staging) == before
        assert state == (
            alloc.committed(h).tolist(),
            alloc.allocated(h).tolist(),
            alloc.available(),
        )
        latch.open()
        verify_rows(alloc)


def test_a_call_that_waits_is_noticed(latches: Latches) -> None:
    """The latch itself: whoever synchronises comes back only when it has run into its limit."""
    with CURRENTS["cupy side"]() as held:
        latch = latches.hold(held)
        assert latch.held and latch.started and not latch.outlasted
        runtime.streamSynchronize(held)
        assert not latch.held and latch.outlasted
