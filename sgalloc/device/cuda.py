"""A CUDA device: the table is a CuPy array, and a step is one launch."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from sgalloc.device.batched import Batched, lay_out
from sgalloc.device.captured import CapturedUpdate
from sgalloc.device.cuda_digest import Digests, captured
from sgalloc.device.cuda_poisoning import CudaPoisoner
from sgalloc.device.cuda_tables import Out
from sgalloc.device.exported import SideTables
from sgalloc.device.failing import FAILURES, telling, told
from sgalloc.device.kernels import THREADS, Geometry, kernel
from sgalloc.device.layout import (
    NO_SIDE,
    SMALL_BYTES,
    SMALL_GATHERED,
    SMALL_PAGES,
    SMALL_SIDE,
    SideAddresses,
    fill,
    fill_both,
    fill_lengths,
    fill_pages,
    fill_small,
    lay_out_small,
    uniform_length,
)
from sgalloc.device.order import StreamOrder
from sgalloc.device.ready import DONE, Done
from sgalloc.device.row_digest import Pending, Ranges
from sgalloc.device.scan import Scan
from sgalloc.device.staging import HEADER_BYTES, Ring, Slot, Spare
from sgalloc.device.streams import Handle, Ready, current_device, new_stream
from sgalloc.device.write_log import WriteLog
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64
from sgalloc.ledger import concatenate
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite

# Measured on an H200: below this a kernel reads mapped memory sooner than a copy arrives.
MAPPED_BYTES = 16384
_SMALL_SLOTS, _SMALL_CAP = 16, 256
_SPARE_SLOTS = 8
# Requests from which "auto" rounds on the device: never, since on an H200 the call then returns
# later at every size, though from some thousand requests on the GPU has its table sooner.
ROUNDS_FROM = 1 << 62
# Pages of one step that `warm` provides for, unless told otherwise.
DEFAULT_MAX_PAGES = 1 << 21
_RELAXED = 2
# What a graph of a small slot launches.
_PAGES, _GATHERED, _BESIDE, _BOTH_GATHERED = range(4)
_BOTH = ["assign_both", "assign_both_mapped", "replay_both"]


class CudaDevice(Batched):
    """``req_to_token`` on a GPU, written by one launch a step, never read to decide."""

    def __init__(
        self,
        index: int,
        max_requests: int,
        row_width: int,
        page_size: int,
        stream: Any = None,
        reader: Any = None,
        page_table: bool = False,
        side: SideTables | None = None,
    ) -> None:
        self.name = f"cuda:{index}"
        self.rounds_from = ROUNDS_FROM
        self.ranged = {
            "_fill_pages": "stage",
            "_fill_both": "stage",
            "_fill_small": "stage",
            "_fill": "stage",
            "_graph_launch": "launch",
            "_launch_small": "launch",
            "_launch_step": "launch",
            "write_watermarks": "launch",
            "_wait_for_slot": "wait for a slot",
        }
        self._fill_pages, self._fill_both = fill_pages, fill_both
        self._fill_small, self._fill = fill_small, fill
        self._lay_out, self._fill_lengths = lay_out, fill_lengths
        self._graph_launch = runtime.graphLaunch
        self.index = index
        self._max_requests = max_requests
        self._page_size = page_size
        self._row_width = row_width
        self.row_pages = row_width // page_size
        with cupy.cuda.Device(index) as device:
            self._make_tables(max_requests + 1, page_table, side)
            self._side = SideAddresses(_address(self._side_table), _address(self._side_map))
            pages = self._page_table.data.ptr if self._page_table is not None else 0
            sms = device.attributes["MultiProcessorCount"]
            self.geometry = Geometry(self._table.data.ptr, pages, row_width, page_size, sms)
            self._order = StreamOrder(index, stream, reader)
            runtime.deviceSynchronize()
        self._mapped_bytes = _mapped_bytes(os.environ.get("SGALLOC_MAPPED_BYTES"))
        self._mapped_pages = min(SMALL_PAGES, self._mapped_bytes // 12)
        self._small: Ring | None = None
        self._large: Ring | None = None
        self._spare: Spare | None = None
        self._large_bytes = 0
        self._scan: Scan | None = None
        self._last: Ready | None = None
        self._digests: Digests | None = None
        self.log = WriteLog()
        self.updates: list[weakref.ref[CapturedUpdate]] = []
        self.launches = 0
        self.copies = 0

    # -- digests ---------------------------------------------------------------------------

    @telling("waiting for replays")
    def finish_replays(self) -> None:
        """Wait for the GPU, if a launch was ever put into a graph. See `Device`."""
        if self.updates or (self._spare is not None and self._spare.taken):
            with current_device(self.index):
                runtime.deviceSynchronize()

    @telling("hashing the tables")
    def digest(self, ranges: Ranges) -> Pending:
        """Hash ``ranges`` behind all that was written; the host goes on. See `Device.digest`."""
        if self._digests is None:
            if self.capturing():
                raise captured()
            self.warm()
        assert self._digests is not None
        return self._digests.launch(ranges)

    # -- set-up ----------------------------------------------------------------------------

    def poisoner(self) -> CudaPoisoner:
        """What puts poison into the tables, and from now on into staging memory."""
        return CudaPoisoner(self, self._page_size)

    @telling("warming up")
    def warm(self, max_pages: int | None = None) -> None:
        """Compile, allocate pinned and device memory, and capture the graphs.

        Args:
            max_pages: the most new pages of one step that may allocate nothing;
                `DEFAULT_MAX_PAGES` if None.
        """
        with cupy.cuda.Device(self.index):
            wanted = self._bytes_for(DEFAULT_MAX_PAGES if max_pages is None else max_pages)
            small, spare, scan, digests = self._small, self._spare, self._scan, self._digests
            if small is None:
                small = Ring(self._make_small, _SMALL_SLOTS, _SMALL_CAP, self._waits)
                spare = Spare(self._make_small, _SPARE_SLOTS)
                scan = Scan(self._max_requests)
                digests = Digests(self, self._order, self._mapped_bytes == 0)
                names = ["page_watermarks", "export_pages", "assign_pages", "replay_pages"]
                names.append("row_digest")
                names += _BOTH if self._side != NO_SIDE else []
                for name in names:
                    kernel(name, self.index)
            if wanted > self._large_bytes:
                self._grow_large(wanted)
            # All of it or none: what is there is taken for whole.
            self._small, self._spare, self._scan = small, spare, scan
            self._digests = digests
            runtime.deviceSynchronize()

    def _make_small(self, captured: bool) -> Slot:
        """A slot that the kernel reads in place, with a graph of its own if ``captured``."""
        slot = Slot(SMALL_BYTES, False, self.index)
        lay_out_small(slot, self._side)
        if captured:
            stream, graphs = new_stream(), []
            kinds = [(0, False), (SMALL_GATHERED, False)]
            kinds += [(0, True), (SMALL_GATHERED, True)] if self._side != NO_SIDE else []
            for gathered, both in kinds:
                stream.begin_capture(_RELAXED)
                try:
                    self._launch_small(slot.ptr, SMALL_PAGES, gathered, stream.ptr, both)
                except BaseException:
                    with suppress(*FAILURES):
                        stream.end_capture()
                    raise
                graphs.append(stream.end_capture())
                self.launches -= 1
            slot.graphs = tuple(graphs)
        return slot

    # -- a step ----------------------------------------------------------------------------

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Ready | Done:
        """One launch: pages into the table, then the gather. See `Device.write`."""
        if gather is not None and not gather.size:
            gather = None
        try:
            before = runtime.getDevice()
            if before != self.index:
                runtime.setDevice(self.index)
            try:
                if pages is None and gather is None and side is None:
                    if after is not None:
                        self._order.wait(after)
                    return self._last or DONE
                # What `slots` asks for is read where it is asked, by a caller who gets no event.
                asked_here = gather is not None and gather.growing is None
                stream, capturing, quiet = self._order.enter(after, asked_here)
                if self._small is None:
                    if quiet:
                        self._order.come_back()
                        raise WrongState(
                            "call alloc.warm() before a verb while a stream is captured"
                        )
                    self.warm()
                plain = gather is None and side is None and not quiet
                if plain and pages.total <= self._mapped_pages:  # type: ignore[union-attr]
                    return self._write_small(pages, ids, stream)  # type: ignore[arg-type]
                try:
                    slot = self._stage(pages, ids, gather, stream, quiet, side)
                except WrongState:
                    self._order.come_back()
                    raise
                try:
                    slot.hold(stream)
                except BaseException as error:
                    self._guard(slot, stream, error, True)
                    raise
                # An event of a capture means nothing outside of it.
                if capturing:
                    ready = Ready(slot.event, self.index, True)
                else:
                    ready = self._last = slot.ready
                    self._order.leave(stream, slot.event)
                if asked_here:
                    self._order.rejoin(slot.event, capturing)
                return ready
            finally:
                if before != self.index:
                    runtime.setDevice(before)
        except FAILURES as error:
            raise self._failed(error, told(pages, gather, side)) from error

    def _write_small(self, pages: Segments, ids: Int32, stream: int) -> Ready:
        """The step of a decode loop: pages alone, few enough to be read from mapped memory."""
        slot = self._small.take()  # type: ignore[union-attr]
        self._fill_pages(slot, pages, ids)
        if slot.graphs:
            self._graph_launch(slot.graphs[0].graphExec, stream)
            self.launches += 1
        else:
            self._launch_small(slot.ptr, pages.total, 0, stream)
        try:
            slot.hold(stream)
        except BaseException as error:
            self._guard(slot, stream, error, True)
            raise
        self._last = slot.ready
        self._order.leave(stream, slot.event)
        return slot.ready

    def _stage(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        stream: int,
        quiet: bool,
        side: SideWrite | None,
    ) -> Slot:
        """Lay the step out in a slot and launch it; ``quiet``, with no slot polled for."""
        assert self._small is not None and self._large is not None and self._spare is not None
        total = 0 if pages is None else pages.total
        beside = 0 if side is None else side.ids.size
        asked = slots = uniform = 0
        if gather is not None:
            asked, slots, uniform = gather.rows.size, gather.size, uniform_length(gather)
        if (
            total <= self._mapped_pages
            and 12 * total + 16 * (asked + beside) <= self._mapped_bytes
            and beside <= SMALL_SIDE
            and (gather is None or (uniform and asked <= SMALL_GATHERED))
        ):
            slot = self._spare.take(0) if quiet else self._small.take()
            if gather is not None:
                self._fill_small(slot, pages, ids, gather, uniform, side)
            elif side is not None:
                self._fill_both(slot, pages, ids, side)
            else:
                assert pages is not None and ids is not None
                self._fill_pages(slot, pages, ids)
            if slot.graphs and not quiet:
                kind = (_PAGES if side is None else _BESIDE) + (gather is not None)
                self._graph_launch(slot.graphs[kind].graphExec, stream)
                self.launches += 1
            elif gather is not None:
                work = self._work(slots, beside)
                self._launch_small(slot.ptr, total, work, stream, side is not None)
            else:
                self._launch_small(slot.ptr, max(total, beside), 0, stream, side is not None)
            if quiet:
                self._spare.keep()
            return slot
        runs = 0 if pages is None else pages.rows.size
        tile = self.geometry.tile_for(total)
        size = HEADER_BYTES + 12 * runs + 4 * total + 20 * asked + 16 * beside + 64
        work = self._work(slots, beside)
        if quiet:
            slot = self._spare.take(size)
            self._fill(slot, pages, ids, gather, uniform, self.row_pages, 0, side, self._side)
            self._launch_step(slot.ptr, total, work, stream, side is not None)
            self._spare.keep()
            return slot
        if total > runs:
            size += 4 * (-(-total // tile) + 1)
        if size > self._large_bytes:
            self._grow_large(size)
        slot = self._large.take()
        used = self._fill(slot, pages, ids, gather, uniform, self.row_pages, tile, side, self._side)
        try:
            self._send(slot, 0, used, stream)
            self._launch_step(slot.target, total, work, stream, side is not None)
        except BaseException as error:
            self._guard(slot, self._order.copying, error, False)
            raise
        return slot

    def _work(self, slots: int, beside: int) -> int:
        """Threads that gather ``slots`` and write ``beside`` pages of the second group."""
        return max(slots, beside * max(1, self._page_size // 4))

    def _launch_small(
        self, source: int, pages: int, slots: int, stream: int, both: bool = False
    ) -> None:
        """Launch on a small slot, which is read in place."""
        tile = self.geometry.mapped_tile
        name = "assign_both" if both else "assign_pages"
        arguments: tuple[int, ...] = ()
        if not slots:
            name = "assign_both_mapped" if both else "assign_mapped"
            arguments = self._side if both else ()
        kernel(name, self.index)(
            (self.geometry.blocks(pages, tile, slots),),
            (THREADS,),
            (*self.geometry.arguments, np.int32(tile), source, *arguments),
            0,
            Handle(stream),
        )
        self.launches += 1

    def _launch_step(
        self, source: int, pages: int, slots: int, stream: int, both: bool = False
    ) -> None:
        tile = self.geometry.tile_for(pages)
        kernel("assign_both" if both else "assign_pages", self.index)(
            (self.geometry.blocks(pages, tile, slots),),
            (THREADS,),
            (*self.geometry.arguments, np.int32(tile), source),
            0,
            Handle(stream),
        )
        self.launches += 1

    @telling("making an update for a graph")
    def captured(self, apply: Any, max_pages: int) -> CapturedUpdate:
        """An update to put into a graph of the caller's; ``apply(plan, writer)`` runs a plan."""
        with cupy.cuda.Device(self.index):
            if self._small is None:
                self.warm()
            update = CapturedUpdate(
                self.index,
                self.geometry,
                self.row_pages,
                apply,
                max_pages,
                self._side,
                self._failed,
            )
        self.updates.append(weakref.ref(update, self.updates.remove))
        return update

    def unwritten(self) -> Int64:
        """Places of the pages that staged steps have yet to write. See `Device.unwritten`."""
        live = [update for ref in self.updates if (update := ref()) is not None]
        return np.sort(concatenate([p for update in live for p in update.unwritten()], np.int64))

    # -- gathers -----------------------------------------------------------------------------

    @telling("making room for slots")
    def gather(self, rows: Int64, start: Int64, stop: Int64) -> Any:
        """The slots of positions ``[start, stop)`` of each row, flat, a new int32 CuPy array."""
        size = int((stop - start).sum())
        with cupy.cuda.Device(self.index):
            slots = cupy.empty(size, cupy.int32)
        out = Out(slots.data.ptr, False)
        self.write(None, None, Gather(rows, start, stop, size, out, None), None)
        return slots

    # -- counters --------------------------------------------------------------------------

    @property
    def staging(self) -> tuple[int, int, int]:
        """Slots of the rings, calls that waited for one, and slots added."""
        rings = [ring for ring in (self._small, self._large) if ring is not None]
        return (
            sum(len(ring) for ring in rings),
            sum(ring.waits for ring in rings),
            sum(ring.grows for ring in rings),
        )


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _mapped_bytes(setting: str | None) -> int:
    """Bytes up to which a step is read from mapped memory.

    Raises:
        ValueError: the setting is no number of bytes.
    """
    if setting is None:
        return MAPPED_BYTES
    if not setting.isdecimal():
        raise ValueError(
            f"SGALLOC_MAPPED_BYTES is {setting!r}: give a number of bytes, or 0 to read no "
            "mapped memory"
        )
    return int(setting)
