"""Lengths of a step on the device, at fixed addresses; the twin on the CPU, and who opens them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgalloc.device import Device, Writer
from sgalloc.device.ready import DONE, Done
from sgalloc.inputs import Int64
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite


class LengthArrays(Protocol):
    """Where the lengths of a step are put for the device's kernels to read."""

    cur: Any
    """A before, int32 ``(max_requests,)``."""
    nxt: Any
    """A afterwards, int32 ``(max_requests,)``."""
    seq_lens: Any
    """C, int64 ``(max_requests,)``."""
    can_fail: bool
    """Whether a write can fail; then it comes before that of the table."""

    @property
    def staging(self) -> tuple[int, int, int]:
        """Pinned buffers, steps that waited for one, and times that memory was added."""

    def take(self, n: int) -> None:
        """Have a buffer ready for the lengths of ``n`` requests; whatever can fail fails here."""

    def write(self, cur: Int64, nxt: Int64, committed: Int64, after: Any) -> Any:
        """Write the lengths of the step that a buffer was taken for.

        Args:
            cur, nxt, committed: tokens, int64 ``(n,)`` each.
            after: an event behind the last reader, or None.

        Returns:
            An event that is done when they, and all that the allocator wrote before, are written.
        """


class HostLengths:
    """NumPy arrays that are written at once."""

    staging = (0, 0, 0)
    can_fail = False

    def __init__(self, most: int) -> None:
        self.cur: NDArray[np.int32] = np.zeros(most, np.int32)
        self.nxt: NDArray[np.int32] = np.zeros(most, np.int32)
        self.seq_lens: Int64 = np.zeros(most, np.int64)

    def take(self, n: int) -> None:
        """Nothing to be had."""

    def write(self, cur: Int64, nxt: Int64, committed: Int64, after: Any) -> Done:
        """Write them; done on return."""
        n = cur.size
        self.cur[:n] = cur
        self.nxt[:n] = nxt
        self.seq_lens[:n] = committed
        return DONE


class Together:
    """Writes lengths and the table, so that a call that fails has changed nothing on the host.

    Args:
        device: who writes the table.
        arrays: that a buffer was taken of.
        cur, nxt, committed, after: as `LengthArrays.write`.
    """

    def __init__(
        self,
        device: Writer,
        arrays: LengthArrays,
        cur: Int64,
        nxt: Int64,
        committed: Int64,
        after: Any,
    ) -> None:
        self._device = device
        self._arrays = arrays
        self._lengths = (cur, nxt, committed, after)

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Any:
        """See `Writer.write`; the event is behind the lengths, too."""
        arrays = self._arrays
        if arrays.can_fail:
            arrays.write(*self._lengths)
        ready = self._device.write(pages, ids, gather, after, side)
        if not arrays.can_fail:
            arrays.write(*self._lengths)
        return ready


def open_lengths(device: Device, most: int) -> LengthArrays:
    """Arrays for the lengths of up to ``most`` requests, where ``device`` has its table."""
    if device.name == "cpu":
        return HostLengths(most)
    from sgalloc.device.cuda_lengths import CudaLengths

    return CudaLengths(device, most)
