"""Page tables as attention kernels read them, exported from the one table."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.core import Core
from sgalloc.device import Exported
from sgalloc.inputs import counts
from sgalloc.ownership import Unpicklable


class PageTables(Unpicklable):
    """A padded page table and a CSR page list at fixed addresses, for captured graphs to read.

    Attributes:
        page_table: int32 ``(most, width)`` on the device, padded with 0.
        indptr: int32 ``(most + 1,)``.
        indices: int32 ``(most * width,)``.
        last_page_len: int32 ``(most,)``: tokens on the last page of each request.
    """

    def __init__(self, core: Core, most: int, width: int) -> None:
        self._core = core
        self._most = most
        self._width = width
        device = core.device
        self._into = Exported(
            device.empty(most, width),
            device.empty(most + 1),
            device.empty(most * width),
            device.empty(most),
        )
        self.page_table, self.indptr, self.indices, self.last_page_len = self._into

    def update(self, x: Any, lengths: Any = None) -> Any:
        """Write the pages of ``x``, in its order; one copy and one launch.

        Args:
            x: a batch, handles or a handle; at most ``most`` of them.
            lengths: tokens of each that count, at most A; C if None.

        Returns:
            An event that is done when the arrays are written.

        Raises:
            ValueError: more requests or pages than the arrays have room for.
        """
        self._core.owner.check()
        ledger = self._core.ledger
        rows = ledger.rows_of(x)
        if rows.size > self._most:
            raise ValueError(
                f"{rows.size} requests do not fit page tables for {self._most}: make larger ones"
            )
        if lengths is None:
            tokens = ledger.committed.take(rows)
        else:
            tokens = np.broadcast_to(counts(lengths, rows.size, "lengths"), rows.shape)
        past = (tokens > ledger.allocated.take(rows)).nonzero()[0]
        if past.size:
            row = int(rows[past[0]])
            raise ValueError(
                f"lengths[{past[0]}]={tokens[past[0]]} is past the {ledger.allocated[row]} tokens "
                f"that row {row} holds"
            )
        pages = -(-tokens // ledger.page_size)
        if pages.size and int(pages.max()) > self._width:
            raise ValueError(
                f"a request of {int(pages.max())} pages does not fit page tables that are "
                f"{self._width} wide: make wider ones"
            )
        indptr = np.concatenate(([0], pages.cumsum()))
        return self._core.device.export(rows, indptr, tokens, self._into)
