"""Lengths of a step on a GPU: pinned buffers, each guarded by an event, and three copies."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from sgalloc.device.failing import FAILURES
from sgalloc.device.staging import Ring, Slot
from sgalloc.device.streams import Ready, current_device
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64

_HOST_TO_DEVICE = 1
_FIRST = 32  # requests that the first buffers have room for
_BYTES = 16  # of one request: C as int64, A before and afterwards as int32
_BUFFERS, _CAP = 4, 64


class CudaLengths:
    """Device arrays that the lengths of each step are copied to.

    Buffers are used in turn. One that a pending copy reads is left alone: another is added, up
    to a cap, from which on a step waits. Where a step has more requests than fit, all buffers
    are replaced by larger ones, twice as large at least; the old ones are kept, since freeing
    pinned memory waits for the GPU.
    """

    can_fail = True

    def __init__(self, device: Any, most: int) -> None:
        self._device = device
        self._order = device._order
        self._index: int = device.index
        self._most = most
        self._grows = self._waits = 0
        if device.lost is not None:
            raise device.lost.again()
        try:
            with current_device(self._index):
                self.cur: Any = cupy.zeros(most, cupy.int32)
                self.nxt: Any = cupy.zeros(most, cupy.int32)
                self.seq_lens: Any = cupy.zeros(most, cupy.int64)
                self._room = min(_FIRST, most)
                self._ring = self._make_ring(self._room)
                # What was queued for other streams must not come after the first copy.
                runtime.deviceSynchronize()
        except FAILURES as error:
            raise device._failed(error, f"making arrays for {most} lengths") from error
        self._slot: Slot | None = None

    @property
    def staging(self) -> tuple[int, int, int]:
        """Pinned buffers in use, steps that waited for one, and times that memory was added."""
        ring = self._ring
        return len(ring), self._waits + ring.waits, self._grows + ring.grows

    def take(self, n: int) -> None:
        """Have a buffer that nobody reads.

        Raises:
            WrongState: a stream is being captured: a replay would read what is overwritten.
        """
        if self._device.lost is not None:
            raise self._device.lost.again()
        try:
            self._take(n)
        except FAILURES as error:
            raise self._device._failed(error, f"making room for {n} lengths") from error

    def _take(self, n: int) -> None:
        with current_device(self._index):
            if self._order.capturing():
                raise WrongState("prepare lengths before the capture; their addresses stay")
            if n > self._room:
                room = self._room
                while room < n:
                    room = min(2 * room, self._most)
                old, self._ring = self._ring, self._make_ring(room)
                self._room = room
                # Copies may still read the smaller buffers, so these live as long as the rest.
                self._ring.retired = old
                self._grows += old.grows + 1
                self._waits += old.waits
            self._slot = self._ring.take()

    def write(self, cur: Int64, nxt: Int64, committed: Int64, after: Any) -> Ready:
        """Three copies on the stream of a step, behind the last readers."""
        slot, n = self._slot, cur.size
        assert slot is not None
        room = self._room
        self._device._fill_lengths(slot, room, cur, nxt, committed)
        try:
            with current_device(self._index):
                stream, _, _ = self._order.enter(after)
                try:
                    for array, at, size in (
                        (self.seq_lens, 0, 8 * n),
                        (self.cur, 8 * room, 4 * n),
                        (self.nxt, 12 * room, 4 * n),
                    ):
                        if n:
                            to, source = array.data.ptr, slot.ptr + at
                            runtime.memcpyAsync(to, source, size, _HOST_TO_DEVICE, stream)
                    slot.hold(stream)
                except BaseException as error:
                    self._device._guard(slot, stream, error, False)
                    raise
                self._order.leave(stream, slot.event)
        except FAILURES as error:
            raise self._device._failed(error, f"copying the lengths of {n} requests") from error
        self._slot = None
        # A step that writes nothing is ready when its lengths are.
        self._device._last = slot.ready
        return slot.ready

    def _make_ring(self, room: int) -> Ring:
        size = _BYTES * room
        return Ring(lambda _: Slot(size, False, self._index), _BUFFERS, _CAP)
