"""Digests of the tables on a GPU: one launch into pinned memory, looked at when it is done."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from sgalloc.device.failing import FAILURES
from sgalloc.device.kernels import THREADS, kernel
from sgalloc.device.order import StreamOrder
from sgalloc.device.ready import DONE
from sgalloc.device.row_digest import MAP_ENTRIES, RANGE, Known, Pending, Ranges, UInt64
from sgalloc.device.staging import pinned
from sgalloc.device.streams import Handle, Ready, current_device, event_done, new_event
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64

_SLOTS, _CAP = 2, 16
_MOST_BLOCKS = 1 << 20
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
# Ranges beyond what whole tables need: pages that wait behind events cut the map into more.
_SLACK = 64


class DigestSlot:
    """Pinned memory of one launch: its ranges, and behind them their digests.

    Attributes:
        ready: the event behind the last launch, as callers see it.
        asked: who has yet to look at the digests, weakly held; None for nobody.
    """

    __slots__ = ("_copy", "_keep", "_used", "asked", "digests", "ptr", "ranges", "ready", "room")

    def __init__(self, room: int, copied: bool, device: int) -> None:
        size = RANGE.itemsize * room
        self._keep, memory = pinned(size + 8 * room)
        self._copy = cupy.empty(size + 8 * room, cupy.uint8) if copied else None
        self.ptr: int = self._keep.ptr
        self.room = room
        self.ranges = memory[:size].view(RANGE)
        self.digests: UInt64 = memory[size:].view(np.uint64)
        self.ready = Ready(new_event(), device)
        self.asked: weakref.ref[Asked] | None = None
        self._used = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits for what it holds, and no launch reads or writes it."""
        if self.asked is not None and self.asked() is not None:
            return False
        return not self._used or event_done(self.ready.ptr)

    def launch(self, arrays: tuple[int, ...], count: int, stream: int, device: int) -> None:
        """Hash the first ``count`` ranges, behind what is on ``stream``."""
        try:
            self._queue(arrays, count, stream, device)
        except BaseException:
            # What was queued may still read it.
            with suppress(*FAILURES):
                runtime.eventRecord(self.ready.ptr, stream)
                self._used = True
            raise

    def _queue(self, arrays: tuple[int, ...], count: int, stream: int, device: int) -> None:
        size = RANGE.itemsize * self.room
        target = self.ptr if self._copy is None else int(self._copy.data.ptr)
        if self._copy is not None:
            length = RANGE.itemsize * count
            runtime.memcpyAsync(target, self.ptr, length, _HOST_TO_DEVICE, stream)
        kernel("row_digest", device)(
            (min(count, _MOST_BLOCKS),),
            (THREADS,),
            (*arrays, target, np.int32(count), target + size),
            0,
            Handle(stream),
        )
        if self._copy is not None:
            to, source = self.ptr + size, target + size
            runtime.memcpyAsync(to, source, 8 * count, _DEVICE_TO_HOST, stream)
        runtime.eventRecord(self.ready.ptr, stream)
        self._used = True


class Asked:
    """Digests that a launch writes. See `Pending`."""

    def __init__(self, slot: DigestSlot, count: int, order: StreamOrder, device: Any) -> None:
        self._slot: DigestSlot | None = slot
        self._found: UInt64 = np.empty(0, np.uint64)
        self._count = count
        self._order = order
        self._failed = device._failed
        self._device: int = device.index
        self.ready: Any = slot.ready

    @property
    def done(self) -> bool:
        """Whether they are there; waits for nothing, and asks nothing during a capture."""
        if self._slot is None:
            return True
        try:
            with current_device(self._device):
                return not self._order.capturing() and event_done(self._slot.ready.ptr)
        except FAILURES as error:
            raise self._failed(error, "looking for digests") from error

    def wait(self) -> UInt64:
        """The digests, uint64 ``(n,)``.

        Raises:
            WrongState: a stream is being captured, in which no event may be waited for.
        """
        slot = self._slot
        if slot is not None:
            try:
                with current_device(self._device):
                    if self._order.capturing():
                        raise WrongState(
                            "a stream is being captured, in which the host cannot wait: ask for "
                            "the result outside of the capture"
                        )
                    runtime.eventSynchronize(slot.ready.ptr)
            except FAILURES as error:
                raise self._failed(error, "waiting for digests") from error
            self._found = slot.digests[: self._count].copy()
            slot.asked, self._slot = None, None
        return self._found


class Digests:
    """Launches row_digest for one device, in slots of memory that are made at once.

    Args:
        device: whose tables.
        order: where to launch, and behind whom.
        copied: whether memory is copied, where a kernel cannot read the host's.
    """

    def __init__(self, device: Any, order: StreamOrder, copied: bool) -> None:
        self._device = device
        self._order = order
        self._copied = copied
        self._index: int = device.index
        tables = (device.table, device.side_table, device.side_map, device.page_table)
        self._arrays = tuple(0 if table is None else int(table.data.ptr) for table in tables)
        rows = device.table.shape[0]
        whole = rows * sum(table is not None for table in (tables[0], tables[1], tables[3]))
        pieces = 0 if tables[2] is None else -(-tables[2].size // MAP_ENTRIES)
        self._room = whole + 2 * pieces + _SLACK
        self._slots = [self._made() for _ in range(_SLOTS)]
        self._retired: list[DigestSlot] = []

    def launch(self, ranges: Ranges) -> Pending:
        """Hash ``ranges`` behind all that was written. See `Device.digest`."""
        count = ranges.array.size
        if not count:
            return Known(np.empty(0, np.uint64), DONE)
        with current_device(self._index):
            if self._order.capturing():
                raise captured()
            slot = self._take(count)
            stream, _, quiet = self._order.enter(None)
            if quiet:
                self._order.come_back()
                raise captured()
            for name in ("start", "length", "array"):
                column: Int64 = getattr(ranges, name)
                slot.ranges[name][:count] = column
            slot.launch(self._arrays, count, stream, self._index)
            self._device.launches += 1
            self._device.copies += 2 * self._copied
            # Whoever writes next, on whatever stream, comes behind this reader.
            self._order.leave(stream, slot.ready.ptr)
            asked = Asked(slot, count, self._order, self._device)
            slot.asked = weakref.ref(asked)
            return asked

    def _take(self, count: int) -> DigestSlot:
        if count > self._room:
            self._room = max(count, 2 * self._room)
            # Launches may still write to the smaller ones, and freeing pinned memory waits.
            self._retired += self._slots
            self._slots = []
        for slot in self._slots:
            if slot.idle:
                return slot
        if len(self._slots) >= _CAP:
            raise WrongState(
                f"{_CAP} probes are under way, or were not looked at: ask result() of them, or let "
                "go of them, before the next"
            )
        self._slots.append(self._made())
        return self._slots[-1]

    def _made(self) -> DigestSlot:
        # Memory of the pool is free to use at once only on the stream that it is asked for on.
        with self._order.copies:
            return DigestSlot(self._room, self._copied, self._index)


def captured() -> WrongState:
    """What refuses to hash anything during a capture."""
    return WrongState(
        "a stream is being captured, and the host could not hear of the digests: probe, or check, "
        "outside of the capture"
    )
