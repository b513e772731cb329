"""An update that lives in a graph of the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from sgalloc.device.failing import FAILURES
from sgalloc.device.kernels import THREADS, Geometry, kernel
from sgalloc.device.layout import NO_SIDE, SideAddresses, fill
from sgalloc.device.ready import DONE, Done
from sgalloc.device.staging import HEADER_BYTES, SERIAL, Block, pinned
from sgalloc.device.streams import Handle, current_stream, stream_pointer
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS
from sgalloc.ownership import Unpicklable, check_process
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Plan, Segments, SideWrite

# Steps that may be staged before they are replayed.
RING = 8


class CapturedUpdate(Unpicklable):
    """A launch for one's own graph: `stage` says what the next replay writes.

    Each replay applies the oldest step that was staged and not yet replayed; with none it
    changes nothing. Up to `RING` steps may wait for their replays.
    """

    def __init__(
        self,
        device: int,
        geometry: Geometry,
        row_pages: int,
        apply: Any,
        max_pages: int,
        side: SideAddresses = NO_SIDE,
        failed: Callable[[Exception, str], Exception] | None = None,
    ) -> None:
        self._failed = failed
        self._side = side
        self._fill = fill
        # A step may clear as many pages of the second group as it takes.
        self._max_beside = 2 * max_pages if side != NO_SIDE else 0
        self._device = device
        self._geometry = geometry
        self._row_pages = row_pages
        self._apply = apply
        self._max_pages = max_pages
        size = HEADER_BYTES + 16 * (max_pages + self._max_beside) + 8
        size = -(-size // 128) * 128
        with cupy.cuda.Device(device):
            self._stride = size
            self._keep, ring = pinned(size * RING)
            self._blocks = [
                Block(ring[n * size : (n + 1) * size], self._keep.ptr + n * size)
                for n in range(RING)
            ]
            self._keep_applied, applied = pinned(4)
            self._applied = applied.view(np.uint32)
            self._applied[0] = 0
            self._counters = cupy.zeros(3, cupy.uint32)
            runtime.deviceSynchronize()
        self._staged = 0
        self._process = os.getpid()
        self._places = [NO_ROWS] * RING

    def launch(self, stream: Any = None) -> None:
        """Put the launch on ``stream`` (the current one if None), which is being captured.

        Outside of a capture it applies one staged step at once.

        Raises:
            DeviceFailed: CUDA refuses it.
        """
        check_process(self._process)
        try:
            self._launch(stream)
        except FAILURES as error:
            if self._failed is None:
                raise
            raise self._failed(error, "launching an update for a graph") from error

    def _launch(self, stream: Any) -> None:
        pointer = current_stream(self._device) if stream is None else stream_pointer(stream)
        geometry = self._geometry
        tile = geometry.tile_for(self._max_pages)
        kernel("replay_pages" if self._side == NO_SIDE else "replay_both", self._device)(
            (geometry.blocks(self._max_pages, tile),),
            (THREADS,),
            (
                *geometry.arguments,
                np.int32(tile),
                self._keep.ptr,
                np.int64(self._stride),
                np.uint32(RING),
                self._counters.data.ptr,
                self._keep_applied.ptr,
            ),
            0,
            Handle(pointer),
        )

    def stage(self, plan: Plan) -> None:
        """Apply ``plan`` on the host, and leave its write to the next replay.

        Raises:
            ValueError: the plan needs more pages than ``max_pages``.
            WrongState: the ring is full: replay first.
            StalePlan, OutOfPages: as `KVAllocator.apply`.
        """
        if plan.num_new_pages > self._max_pages:
            raise ValueError(
                f"the plan needs {plan.num_new_pages} pages, but this update was made for "
                f"{self._max_pages}: make one with a larger max_pages"
            )
        self._apply(plan, self)

    def lose(self, refuse: Any) -> None:
        """The device is lost: ``refuse`` what would be launched or staged."""
        for name in ("launch", "write"):
            setattr(self, name, refuse)

    def unwritten(self) -> list[Int64]:
        """Places in the page lists that staged steps write and no replay has written, by step."""
        staged = self._staged
        return [self._places[(staged - n) % RING] for n in range(self._waiting(), 0, -1)]

    def _waiting(self) -> int:
        """Steps that wait for their replay, by the word that the kernel counts up."""
        return (self._staged - int(self._applied[0])) % (1 << 32)

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Done:
        """Lay the step out in the ring, if there is room.

        Raises:
            WrongState, ValueError: as `stage`.
        """
        if side is not None and side.ids.size > self._max_beside:
            raise ValueError(
                f"the plan writes or clears {side.ids.size} pages of the second group, but this "
                f"update was made for {self._max_beside}: make one with a larger max_pages"
            )
        if pages is not None or side is not None:
            waiting = self._waiting()
            if waiting >= RING:
                raise WrongState(
                    f"{waiting} staged steps wait for their replay, the most there can be: "
                    "replay the graph, and let a replay finish, before the next stage()"
                )
            block = self._blocks[self._staged % RING]
            self._places[self._staged % RING] = _places(pages, side)
            self._fill(block, pages, ids, None, 0, self._row_pages, 0, side, self._side)
            self._staged = (self._staged + 1) % (1 << 32)
            # Written last: it tells the kernel that the step is whole.
            block.words[SERIAL] = np.uint32(self._staged).view(np.int32)
        return DONE


def _places(pages: Segments | None, side: SideWrite | None) -> Int64:
    """Places in the page lists that a step writes, int64."""
    main = NO_ROWS if pages is None else pages.where
    return main if side is None else np.concatenate((main, side.places[side.places >= 0]))
