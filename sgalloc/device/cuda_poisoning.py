"""Poison on a GPU: in the tables, in stream order, and in staging memory before it is filled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from sgalloc.device.failing import FAILURES
from sgalloc.device.kernels import DEBUGGING, THREADS, kernel
from sgalloc.device.layout import SMALL_PAGES, SMALL_SIDE
from sgalloc.device.poisoning import POISON, Table, blocks, tables_of
from sgalloc.device.staging import HEADER_BYTES
from sgalloc.device.streams import Handle, current_device, new_event
from sgalloc.inputs import Int64

_HOST_TO_DEVICE = 1


class CudaPoisoner:
    """Poison in the tables of a CUDA device, on the stream and behind the readers of a step.

    From when it is made on, staging memory holds poison, too, whenever it is filled anew: by
    then the event behind its last reader is done. Headers stay as they are; a replay may look
    at one.
    """

    def __init__(self, device: Any, page_size: int) -> None:
        self._device = device
        self._tables = tables_of(device, page_size)
        with current_device(device.index):
            self._event = new_event()
        for name in ("_fill_pages", "_fill_both", "_fill_small", "_fill", "_lay_out"):
            setattr(device, name, self._onto_poison(getattr(device, name), HEADER_BYTES))
        device._fill_lengths = self._onto_poison(device._fill_lengths, 0)
        device.captured = self._with_poisoned_steps(device.captured)

    @property
    def at_once(self) -> bool:
        """Whether the stream of the readers was named. See `Poisoner.at_once`."""
        return self._device._order._reader is not None

    def write(self, rows: Int64, start: Int64, stop: Int64, after: Any = None) -> bool:
        """See `Poisoner.write`."""
        device = self._device
        if device.lost is not None:
            return False
        try:
            return self._write(rows, start, stop, after)
        except FAILURES as error:
            raise device._failed(error, f"poisoning {rows.size} rows") from error

    def _write(self, rows: Int64, start: Int64, stop: Int64, after: Any) -> bool:
        device = self._device
        with current_device(device.index):
            if device._order.capturing():
                return False
            stream, _, _ = device._order.enter(after)
            poison = kernel("poison_rows", device.index, DEBUGGING)
            for entries, (begin, end), (low, high) in blocks(self._tables, rows, start, stop):
                # All is in the arguments: nothing is staged.
                size = (end - begin) * (high - low)
                poison(
                    (min(-(-size // THREADS), 8 * device.geometry.sms),),
                    (THREADS,),
                    (
                        entries.data.ptr,
                        np.int64(entries.shape[1]),
                        np.int64(begin),
                        np.int64(end - begin),
                        np.int64(low),
                        np.int64(high),
                        np.int32(POISON),
                    ),
                    0,
                    Handle(stream),
                )
            runtime.eventRecord(self._event, stream)
            device._order.leave(stream, self._event)
        return True

    def wait(self) -> None:
        """See `Poisoner.wait`."""
        with current_device(self._device.index):
            runtime.deviceSynchronize()

    def read(self, rows: Int64) -> list[Table]:
        """See `Poisoner.read`."""
        with cupy.cuda.Device(self._device.index):
            runtime.deviceSynchronize()
            at = cupy.asarray(rows)
            return [
                table._replace(entries=cupy.asnumpy(table.entries[at])) for table in self._tables
            ]

    def _onto_poison(self, fill: Callable[..., Any], header: int) -> Callable[..., Any]:
        """``fill``, for a block that holds poison behind its header."""

        @wraps(fill)
        def filling(block: Any, *args: Any, **kwargs: Any) -> Any:
            block.ints[header // 4 :] = POISON
            # What a step leaves out of a small slot is made -1 up to here.
            block.filled, block.beside = SMALL_PAGES, SMALL_SIDE
            target = getattr(block, "target", block.ptr)
            if target != block.ptr:
                # What is laid out is copied behind this, on the same stream.
                runtime.memcpyAsync(
                    target + header,
                    block.ptr + header,
                    block.size - header,
                    _HOST_TO_DEVICE,
                    self._device._order.copying,
                )
            return fill(block, *args, **kwargs)

        return filling

    def _with_poisoned_steps(self, captured: Callable[..., Any]) -> Callable[..., Any]:
        """`captured`, whose updates hold poison where a step is staged."""

        @wraps(captured)
        def making(apply: Any, max_pages: int) -> Any:
            update = captured(apply, max_pages)
            update._fill = self._onto_poison(update._fill, HEADER_BYTES)
            return update

        return making
