"""The ring of pinned staging slots, each guarded by an event.

A slot is never rewritten while a copy or a kernel that reads it is pending. This is the fault
that several engines have met: a pinned buffer overwritten before an asynchronous copy read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from sgalloc.device.streams import Ready, event_done, new_event
from sgalloc.errors import WrongState

_PORTABLE_MAPPED = 3
HEADER_BYTES = 128
_ASKED_TOGETHER = 7
# Places of the header's int32 words, as `struct Step` in assign_pages.cu has them.
PAGES, RUNS, REQUESTS, TOTAL, UNIFORM, WIDE = range(6)
OUT_LOW = 6
PLACES_AT, IDS_AT, OFFSETS_AT, ROW_AT, START_AT, OFFSET_AT, FIRST_NEW_AT, NEW_AT_AT = range(8, 16)
SERIAL, TILE_RUNS_AT = 16, 17
# Addresses, of 64 bits.
SIDE_SLOTS_LOW, SIDE_MAP_LOW = 18, 20
SIDE_PAGES, SIDE_PLACES_AT, SIDE_IDS_AT, SIDE_MAINS_AT = range(22, 26)


def pinned(size: int) -> tuple[Any, NDArray[np.uint8]]:
    """Pinned, mapped memory of ``size`` bytes: its owner, and a view of it."""
    memory = cupy.cuda.PinnedMemory(size, _PORTABLE_MAPPED)
    buffer = (ctypes.c_uint8 * size).from_address(memory.ptr)
    return memory, np.ctypeslib.as_array(buffer)


class Block:
    """Pinned memory that holds one step.

    Attributes:
        ptr: address, on the host and on the device alike.
        size: bytes.
        ints, longs: the memory as int32 and as int64.
        words: the header as int32.
        filled: pages of the last step that was laid out in a small slot.
        beside: the same of the second group.
    """

    __slots__ = ("beside", "filled", "ints", "longs", "ptr", "size", "words")

    def __init__(self, memory: NDArray[np.uint8], ptr: int) -> None:
        memory[:] = 0
        self.ptr = ptr
        self.size = memory.size
        self.ints: NDArray[np.int32] = memory.view(np.int32)
        self.longs: NDArray[np.int64] = memory.view(np.int64)
        self.words = self.ints[: HEADER_BYTES // 4]
        self.filled = self.beside = 0


class Slot(Block):
    """A block of the ring.

    Attributes:
        event: recorded behind the last use.
        copied: recorded behind the last copy, where that went to a stream of its own.
        used: whether the event was ever recorded.
        stream: where the last use was.
        ready: the event, as callers see it.
        graphs: what launches a step on this slot, without and with a gather (none: a plain
            launch does).
        target: address that the kernel reads: a device buffer that the slot is copied to, or
            the slot itself.
    """

    __slots__ = (
        "_copy",
        "_keep",
        "copied",
        "event",
        "graphs",
        "ready",
        "stream",
        "target",
        "used",
    )

    def __init__(self, size: int, copied: bool, device: int) -> None:
        self._keep, memory = pinned(size)
        super().__init__(memory, self._keep.ptr)
        self._copy = cupy.empty(size, cupy.uint8) if copied else None
        self.target: int = self.ptr if self._copy is None else self._copy.data.ptr
        self.event = new_event()
        self.copied = new_event() if copied else 0
        self.ready = Ready(self.event, device)
        self.used = False
        self.stream = -1
        self.graphs: tuple[Any, ...] = ()

    def busy(self) -> bool:
        """Whether a use of it is pending."""
        return self.used and not event_done(self.event)

    def hold(self, stream: int) -> None:
        """Guard the use that was just put on ``stream``."""
        runtime.eventRecord(self.event, stream)
        self.used = True
        self.stream = stream


class Ring:
    """Slots of one size, used in turn; grows when all are busy, up to a cap, and then waits.

    Args:
        make: a new slot.
        count: slots to begin with.
        cap: most slots.
        wait: waits for an event, by its handle; CUDA's own function if None.

    Attributes:
        grows: slots added because all were busy.
        waits: calls that waited because the cap was reached.
        retired: a ring of smaller slots that this one took the place of.
    """

    def __init__(
        self,
        make: Callable[[bool], Slot],
        count: int,
        cap: int,
        wait: Callable[[int], None] | None = None,
    ) -> None:
        self._make = make
        self._wait = wait or (lambda event: runtime.eventSynchronize(event))
        self._slots = [make(True) for _ in range(count)]
        self._cap = cap
        self._next = 0
        self._idle = 0
        self.retired: Ring | None = None
        self.grows = 0
        self.waits = 0

    def __len__(self) -> int:
        return len(self._slots)

    def take(self) -> Slot:
        """A slot that nobody reads."""
        at = self._next
        slot = self._slots[at]
        if self._idle:
            self._idle -= 1
        elif slot.busy():
            # The oldest is busy, so all are, unless they went to other streams.
            if len(self._slots) < self._cap:
                # Memory is added and never given back: freeing pinned memory waits for the GPU.
                slot = self._make(False)
                self._slots.insert(at, slot)
                self.grows += 1
            else:
                self.waits += 1
                self._wait(slot.event)
        else:
            self._idle = self._idle_behind(at)
        self._next = (at + 1) % len(self._slots)
        return slot

    def _idle_behind(self, at: int) -> int:
        """How many slots behind ``at`` are idle, too: one question for several slots.

        On one stream a slot that is done says the same of all that were used before it.
        """
        ahead = self._slots[at + 1 : at + 1 + _ASKED_TOGETHER]
        if not ahead or ahead[-1].busy():
            return 0
        stream = ahead[-1].stream
        return len(ahead) if all(slot.stream == stream or not slot.used for slot in ahead) else 0


class Spare:
    """Slots set aside for launches under capture, which are never reused.

    A captured launch reads its slot at every replay, and under capture nothing may be
    allocated or polled. One whose launch failed is as good as it was: it is `keep` that uses it up.
    """

    def __init__(self, make: Callable[[bool], Slot], count: int) -> None:
        self._slots = [make(False) for _ in range(count)]
        self._kept: list[Slot] = []

    @property
    def taken(self) -> int:
        """Slots that launches under capture keep."""
        return len(self._kept)

    def take(self, size: int) -> Slot:
        """The next slot, which is the caller's for good once it says `keep`.

        Raises:
            WrongState: none is left, or the step needs more than ``size`` bytes.
        """
        reason = None
        if not self._slots:
            reason = (
                f"each call during a capture keeps a staging slot for good, and all "
                f"{len(self._kept)} are taken"
            )
        elif self._slots[-1].size < size:
            reason = (
                f"a step of {size} bytes does not fit the staging slots of "
                f"{self._slots[-1].size} bytes for calls during a capture"
            )
        if reason is not None:
            raise WrongState(
                f"{reason}: put alloc.captured(max_pages) into the graph instead, "
                "and stage() plans for it"
            )
        return self._slots[-1]

    def keep(self) -> None:
        """The slot just taken was launched on."""
        self._kept.append(self._slots.pop())
