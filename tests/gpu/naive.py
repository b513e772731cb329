"""The row law written out naively, in NumPy, from what anybody may ask: handles and pages.

It shares no code with the package, and knows nothing of plans: both devices are held against
it, since they share the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
POISON = -559038737  # 0xDEADBEEF, which debug mode leaves where nobody owns an entry


def row_entries(pages: Int32, page_size: int, start: int, stop: int) -> Int64:
    """``pages[j // page_size] * page_size + j % page_size`` for j in [start, stop)."""
    j = np.arange(start, stop)
    return pages[j // page_size].astype(np.int64) * page_size + j % page_size


def equal(found: Int32, expected: Int32) -> bool:
    """Whether two tables are equal, but for poison, which may come sooner on one side."""
    poisoned = (found == POISON) | (expected == POISON)
    return bool(((found == expected) | poisoned).all())


class NaiveTables:
    """Both tables as they must be after every call so far, stale entries past A included.

    Entries from A on are never law; what stays there is whatever was written last, so a whole
    table that equals this one was also written nowhere else.
    """

    def __init__(self, max_requests: int, row_width: int, page_size: int) -> None:
        self.page_size = page_size
        self.table: Int32 = np.zeros((max_requests + 1, row_width), np.int32)
        self.page_table: Int32 = np.zeros((max_requests + 1, row_width // page_size), np.int32)

    def write(self, alloc: Any, handles: Sequence[int]) -> None:
        """Write what each open request holds now: ``[0, A)`` of its row."""
        if not len(handles):
            return
        rows, held = alloc.rows(handles).tolist(), alloc.allocated(handles).tolist()
        for handle, row, extent in zip(handles, rows, held, strict=True):
            pages = alloc.pages(handle, 0, extent)
            assert extent == pages.size * self.page_size
            self.table[row, :extent] = row_entries(pages, self.page_size, 0, extent)
            self.page_table[row, : pages.size] = pages


def gathered(alloc: Any, handles: Sequence[int], start: Any, stop: Any) -> Int64:
    """The slots of positions ``[start, stop)`` of each request, flat, in order."""
    count = len(handles)
    starts = np.broadcast_to(np.asarray(start), count).tolist()
    stops = np.broadcast_to(np.asarray(stop), count).tolist()
    parts = [np.empty(0, np.int64)]
    for handle, first, last in zip(handles, starts, stops, strict=True):
        held = int(alloc.allocated(handle)[0])
        pages = alloc.pages(handle, 0, held)
        parts.append(row_entries(pages, alloc.page_size, first, last))
    return np.concatenate(parts)


class NaiveExport(NamedTuple):
    """What `page_tables` writes for n requests."""

    page_table: Int32
    indptr: Int32
    indices: Int32
    last_page_len: Int32


def exported(alloc: Any, handles: Sequence[int], lengths: Sequence[int], width: int) -> NaiveExport:
    """Padded page table and CSR list of the pages that cover ``lengths`` tokens each."""
    size = alloc.page_size
    padded = np.zeros((len(handles), width), np.int32)
    indptr, indices, last = [0], [], []
    for at, (handle, length) in enumerate(zip(handles, lengths, strict=True)):
        count = (length + size - 1) // size
        pages = alloc.pages(handle, 0, count * size)
        padded[at, :count] = pages
        indices += pages.tolist()
        indptr.append(len(indices))
        last.append(length - (count - 1) * size if count else 0)
    return NaiveExport(padded, *(np.array(part, np.int32) for part in (indptr, indices, last)))
