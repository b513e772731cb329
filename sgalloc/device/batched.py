"""Steps that are copied to the device: large ones, rounding in one launch, and exports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from sgalloc.device.cuda_tables import CudaTables
from sgalloc.device.exported import Exported
from sgalloc.device.failing import telling
from sgalloc.device.kernels import THREADS, Geometry, kernel
from sgalloc.device.ready import Done
from sgalloc.device.scan import Scan
from sgalloc.device.staging import HEADER_BYTES, Ring, Slot
from sgalloc.device.streams import Handle, Ready, current_device
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64
from sgalloc.pages import Int32

_HOST_TO_DEVICE = 1
_LARGE_SLOTS, _LARGE_CAP = 2, 8


class Batched(CudaTables):
    """What a CUDA device does through slots that are copied to it before a kernel reads them."""

    geometry: Geometry
    launches: int
    copies: int
    _max_requests: int
    _page_size: int
    _scan: Scan | None
    _last: Ready | None
    _small: Ring | None
    _large: Ring | None
    _large_bytes: int
    _lay_out: Callable[[Slot, list[Any]], tuple[list[int], int]]

    @abstractmethod
    def warm(self, max_pages: int | None = None) -> None:
        """Compile, allocate pinned and device memory, and capture the graphs."""

    # -- slots -----------------------------------------------------------------------------

    def _bytes_for(self, pages: int) -> int:
        runs = 4 * (self.geometry.most_tiles(pages) + 1)
        return HEADER_BYTES + 4 * pages + 32 * self._max_requests + runs + 64

    def _grow_large(self, size: int) -> None:
        old, before = self._large, self._large_bytes
        self._large_bytes = 1 << (size - 1).bit_length()
        try:
            self._large = Ring(self._make_large, _LARGE_SLOTS, _LARGE_CAP, self._waits)
        except BaseException:
            self._large_bytes = before
            raise
        if old is not None:
            # Work may still read the smaller slots, so they live as long as the ring does.
            self._large.retired = old
            self._large.grows, self._large.waits = old.grows + 1, old.waits

    def _wait_for_slot(self, event: int) -> None:
        runtime.eventSynchronize(event)

    def _waits(self, event: int) -> None:
        # Looked up at the call, since a profiler may have put a range around it.
        self._wait_for_slot(event)

    def _make_large(self, _first: bool) -> Slot:
        # Memory of the pool is free to use at once only on the stream that it is asked for on.
        with self._order.copies:
            return Slot(self._large_bytes, True, self.index)

    def _send(self, slot: Slot, first: int, stop: int, stream: int) -> None:
        """Copy bytes ``[first, stop)`` of a slot to the device; ``stream`` waits for them.

        On a stream of the caller's a copy would hold up the kernels that stand behind it, so
        it goes to a stream for copies alone, at once. It needs to wait for nobody: the ring
        hands a slot out only when the event behind the kernel that last read its buffer is
        done, and its own earlier copy was done before that kernel began.
        """
        copying = self._order.copying
        runtime.memcpyAsync(
            slot.target + first, slot.ptr + first, stop - first, _HOST_TO_DEVICE, copying
        )
        self.copies += 1
        if copying != stream:
            runtime.eventRecord(slot.copied, copying)
            runtime.streamWaitEvent(stream, slot.copied)

    # -- rounding --------------------------------------------------------------------------

    @telling("rounding reserves on the device")
    def write_watermarks(
        self,
        rows: Int64,
        committed: Int64,
        allocated: Int64,
        reserve: Int64,
        ids: Int32,
        after: Any,
    ) -> Ready | None:
        """Round, count, pick and write in one launch, before the host has counted.

        Args:
            rows, committed, allocated: int64 ``(n,)``.
            reserve: tokens past C, int64, one for all or ``(n,)``.
            ids: the head of the free ids, int32; at least as many as the step can need.
            after: a CUDA event that the write waits for, or None.

        Returns:
            As `write`; None where the staging memory is too small for it, or under capture.
        """
        n = rows.size
        each = reserve.ndim > 0
        size = HEADER_BYTES + 4 * (n * (4 if each else 3) + ids.size) + 64
        with current_device(self.index):
            if self._scan is None:
                self.warm()
            if size > self._large_bytes:
                return None
            stream, _, quiet = self._order.enter(after)
            if quiet:
                return None
            assert self._large is not None and self._scan is not None
            slot = self._large.take()
            columns: list[Any] = [rows, committed, allocated, *([reserve] if each else []), ids]
            places, stop = self._lay_out(slot, columns)
            tile = self.geometry.tile_requests(n, -(-ids.size // n))
            tiles = -(-n // tile)
            launched = False
            try:
                self._send(slot, HEADER_BYTES, stop, stream)
                words, ticket, taken, epoch = self._scan.begin(stream)
                kernel("page_watermarks", self.index)(
                    (tiles,),
                    (THREADS,),
                    (
                        *self.geometry.arguments,
                        np.int32(self.geometry.marking_tile),
                        np.int32(tile),
                        np.int32(n),
                        places[0],
                        places[1],
                        places[2],
                        places[3] if each else 0,
                        np.int32(0 if each else int(reserve)),
                        places[-1],
                        words,
                        ticket,
                        np.uint32(taken),
                        np.uint32(epoch),
                    ),
                    0,
                    Handle(stream),
                )
                self._scan.launched(tiles)
                self.launches += 1
                launched = True
                slot.hold(stream)
            except BaseException as error:
                self._guard(slot, stream if launched else self._order.copying, error, launched)
                raise
            self._last = slot.ready
            self._order.leave(stream, slot.event)
            return slot.ready

    # -- exports ---------------------------------------------------------------------------

    @telling("making arrays for page tables")
    def empty(self, *shape: int) -> Any:
        """A new int32 CuPy array of zeros."""
        with cupy.cuda.Device(self.index):
            return cupy.zeros(shape, cupy.int32)

    @telling("exporting page tables")
    def export(self, rows: Int64, indptr: Int64, lengths: Int64, into: Exported) -> Ready | Done:
        """Write the page ids of ``rows`` from the table into ``into``. See `Device.export`."""
        n = rows.size
        size = HEADER_BYTES + 4 * (3 * n + 1) + 64
        with current_device(self.index):
            if self._small is None:
                self.warm()
            stream, _, quiet = self._order.enter(None)
            if quiet:
                self._order.come_back()
                raise WrongState("update exports before the capture; their addresses stay")
            if size > self._large_bytes:
                self._grow_large(size)
            assert self._large is not None
            slot = self._large.take()
            places, stop = self._lay_out(slot, [rows, indptr, lengths])
            launched = False
            try:
                self._send(slot, HEADER_BYTES, stop, stream)
                width = into.page_table.shape[1]
                kernel("export_pages", self.index)(
                    (min(max(1, -(-max(n * width, n + 1) // THREADS)), 8 * self.geometry.sms),),
                    (THREADS,),
                    (
                        self._table.data.ptr,
                        np.int64(self._row_width),
                        np.int32(self._page_size),
                        np.int32(n),
                        places[0],
                        places[1],
                        places[2],
                        into.page_table.data.ptr,
                        np.int32(width),
                        into.indices.data.ptr,
                        into.indptr.data.ptr,
                        into.last_page_len.data.ptr,
                    ),
                    0,
                    Handle(stream),
                )
                self.launches += 1
                launched = True
                slot.hold(stream)
            except BaseException as error:
                self._guard(slot, stream if launched else self._order.copying, error, launched)
                raise
            self._order.leave(stream, slot.event)
            return slot.ready


def lay_out(slot: Slot, columns: list[Any]) -> tuple[list[int], int]:
    """Put int32 columns behind the header; their addresses on the device, and where they end."""
    places, cursor = [], HEADER_BYTES
    for column in columns:
        places.append(slot.target + cursor)
        slot.ints[cursor // 4 : cursor // 4 + column.size] = column
        cursor += 4 * column.size
    return places, cursor
