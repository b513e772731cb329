"""What page_watermarks keeps on the device from one launch to the next."""

from __future__ import annotations

import cupy
from cupy.cuda import runtime

from sgalloc.device.kernels import LEAST_REQUESTS


class Scan:
    """State of the single-pass scan; never cleared, since every launch has an epoch."""

    def __init__(self, max_requests: int) -> None:
        # Every tile may have the least requests, where each may need many pages.
        self._words = cupy.zeros(-(-max_requests // LEAST_REQUESTS), cupy.uint64)
        self._ticket = cupy.zeros(1, cupy.uint32)
        self._taken = 0
        self._epoch = 0

    def begin(self, stream: int) -> tuple[int, int, int, int]:
        """Words, ticket, tickets taken before, and the epoch of a launch on ``stream``."""
        self._epoch += 1
        if self._epoch >= 1 << 30:
            runtime.memsetAsync(self._words.data.ptr, 0, self._words.nbytes, stream)
            self._epoch = 1
        return self._words.data.ptr, self._ticket.data.ptr, self._taken, self._epoch

    def launched(self, tiles: int) -> None:
        """Note that ``tiles`` blocks take a ticket each; a launch that failed takes none."""
        self._taken = (self._taken + tiles) % (1 << 32)
