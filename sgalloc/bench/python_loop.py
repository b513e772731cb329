"""The plain way: request objects, lists of free ids, and a Python loop for each thing done.

This is the work that SGLang 0.5.23 does on the host in each step, on classes with slots and
without its logging: an estimate of what the step needs, watermarks, page count, write-back. Free
ids are lists, so nothing is copied that a stack would not copy. Where SGLang launches a kernel
to write the table, this writes with NumPy, as an engine on a CPU would: one row slice a request
after a prefill or a reserve, one indexed assignment for a plain decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class OutOfMemory(RuntimeError):
    """The free list is too short."""


class KvInfo:
    """What one request holds.

    Attributes:
        row: its row in the table.
        kv_committed_len: C, tokens.
        kv_allocated_len: A, tokens; not rounded to pages after a prefill or a plain decode.
    """

    __slots__ = ("kv_allocated_len", "kv_committed_len", "row")

    def __init__(self) -> None:
        self.row = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0


class Request:
    """A request of the engine."""

    __slots__ = ("decode_batch_idx", "kv")

    def __init__(self) -> None:
        self.kv = KvInfo()
        self.decode_batch_idx = 0


class PythonLoop:
    """Pages, rows and a table, all handled request by request.

    Attributes:
        table: int32 ``(max_requests + 1, row_width)``.
        free_pages: ids, the next to go out last.
        free_rows: rows, the next to go out last.
    """

    def __init__(self, num_pages: int, page_size: int, max_requests: int, row_width: int) -> None:
        self.page_size = page_size
        self.table: Int32 = np.zeros((max_requests + 1, row_width), np.int32)
        self.free_pages = list(range(num_pages, 0, -1))
        self.free_rows = list(range(max_requests, 0, -1))
        self._generation = [0] * (max_requests + 1)
        self._offsets: Int32 = np.arange(page_size, dtype=np.int32)

    def warm(self) -> None:
        """Touch the table."""
        self.table.reshape(-1)[::1024] = 0

    # -- rows ------------------------------------------------------------------------------

    def open(self, requests: Sequence[Request]) -> None:
        """Give each of ``requests`` a row."""
        count = len(requests)
        if not count:
            return
        if count > len(self.free_rows):
            raise OutOfMemory(f"{count} rows wanted, {len(self.free_rows)} free")
        rows = self.free_rows[-count:]
        del self.free_rows[-count:]
        rows.reverse()
        generation = self._generation
        for request, row in zip(requests, rows, strict=True):
            request.kv.row = row
            generation[row] += 1

    def release(self, requests: Sequence[Request]) -> None:
        """Free all pages of each request, read from its row, and the row."""
        size, free_pages, free_rows = self.page_size, self.free_pages, self.free_rows
        for request in requests:
            kv = request.kv
            row = self.table[kv.row]
            owned, held = kv.kv_committed_len, kv.kv_allocated_len
            free_pages.extend((row[:owned:size] // size).tolist())
            start = (owned + size - 1) // size * size
            if start < held:
                free_pages.extend((row[start:held:size] // size).tolist())
            free_rows.append(kv.row)
            kv.row = kv.kv_committed_len = kv.kv_allocated_len = 0

    def trim(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """Cut each request to ``lengths`` tokens, and free the pages wholly past that."""
        size, free_pages = self.page_size, self.free_pages
        for request, length in zip(requests, lengths, strict=True):
            kv = request.kv
            keep = min(kv.kv_committed_len, length)
            edge = (keep + size - 1) // size * size
            held = kv.kv_allocated_len
            if edge < held:
                free_pages.extend((self.table[kv.row, edge:held:size] // size).tolist())
            kv.kv_committed_len = kv.kv_allocated_len = keep

    # -- steps -----------------------------------------------------------------------------

    def extend(self, requests: Sequence[Request], lengths: Sequence[int]) -> int:
        """Prefill up to ``lengths``; the pages that this took."""
        cur = [request.kv.kv_allocated_len for request in requests]
        pages = self._allocate(requests, cur, lengths)
        for request, length in zip(requests, lengths, strict=True):
            request.kv.kv_allocated_len = request.kv.kv_committed_len = length
        return pages

    def decode(self, requests: Sequence[Request], rows: Int64, seq_lens: Int64) -> int:
        """One token for each: estimate, allocate, count the step; the pages that this took.

        Args:
            requests: the batch.
            rows: their rows, which the batch keeps as an array.
            seq_lens: their lengths, which it keeps, too; grown by one here.
        """
        self._demand(self.estimate_decode(requests))
        size, table = self.page_size, self.table
        if int(seq_lens.max(initial=0)) >= table.shape[1]:
            raise OutOfMemory(f"a row of {table.shape[1]} slots is too narrow")
        if size == 1:
            pages = seq_lens.size
            table[rows, seq_lens] = self._take(pages)
        else:
            opens_page = seq_lens % size == 0
            pages = int(np.count_nonzero(opens_page))
            slots = table[rows, seq_lens - 1] + 1
            slots[opens_page] = self._take(pages) * size
            table[rows, seq_lens] = slots
        seq_lens += 1
        for request in requests:
            request.kv.kv_allocated_len += 1
        for request in requests:
            request.kv.kv_committed_len += 1
        self.count_steps(requests)
        return pages

    def reserve(self, requests: Sequence[Request], reserve: int) -> int:
        """Room for ``reserve`` tokens past C: estimate, watermarks, allocate, write back."""
        self._demand(self.estimate_reserve(requests, reserve))
        cur, nxt, needed = self.watermarks(requests, reserve)
        pages = self._allocate(requests, cur, nxt) if needed else 0
        self.write_back(requests, nxt)
        return pages

    def commit(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """C += ``accepted`` of each."""
        for request, tokens in zip(requests, accepted, strict=True):
            request.kv.kv_committed_len += tokens

    # -- the parts of a step ---------------------------------------------------------------

    def estimate_decode(self, requests: Sequence[Request]) -> int:
        """Tokens, in whole pages, that the next plain step needs."""
        size = self.page_size
        return size * sum(1 for request in requests if request.kv.kv_committed_len % size == 0)

    def estimate_reserve(self, requests: Sequence[Request], reserve: int) -> int:
        """Tokens, in whole pages, that the next speculative step needs."""
        size = self.page_size
        total = 0
        for request in requests:
            cur = request.kv.kv_allocated_len
            more = max(0, request.kv.kv_committed_len + reserve - cur)
            total += (cur + more + size - 1) // size * size - (cur + size - 1) // size * size
        return total

    def watermarks(
        self, requests: Sequence[Request], reserve: int
    ) -> tuple[list[int], list[int], int]:
        """A before and after of each request, and the tokens between them."""
        size = self.page_size
        cur, nxt, needed = [], [], 0
        for request in requests:
            held = request.kv.kv_allocated_len
            mark = (request.kv.kv_committed_len + reserve + size - 1) // size * size
            mark = max(held, mark)
            cur.append(held)
            nxt.append(mark)
            needed += mark - held
        return cur, nxt, needed

    def write_back(self, requests: Sequence[Request], nxt: Sequence[int]) -> None:
        """A of each request."""
        for request, mark in zip(requests, nxt, strict=True):
            request.kv.kv_allocated_len = max(request.kv.kv_allocated_len, mark)

    def count_steps(self, requests: Sequence[Request]) -> None:
        """One more decode step for each."""
        for request in requests:
            request.decode_batch_idx += 1

    # -- asking ----------------------------------------------------------------------------

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether new requests of ``lengths`` tokens would fit."""
        size, width = self.page_size, self.table.shape[1]
        pages = 0
        for length in lengths:
            if length > width:
                return False
            pages += (length + size - 1) // size
        return len(lengths) <= len(self.free_rows) and pages <= len(self.free_pages)

    def fits_reserve(self, requests: Sequence[Request], reserve: int) -> bool:
        """Whether the next speculative step fits."""
        need = self.estimate_reserve(requests, reserve)
        return need <= len(self.free_pages) * self.page_size

    def slots(self, requests: Sequence[Request], start: int, stop: int) -> Int32:
        """Slots of positions ``[start, stop)`` of each request, flat."""
        return np.concatenate([self.table[request.kv.row, start:stop] for request in requests])

    def pages(self, request: Request) -> Int32:
        """Page ids of the committed tokens."""
        size = self.page_size
        return self.table[request.kv.row, : request.kv.kv_committed_len : size] // size

    # -- inside ----------------------------------------------------------------------------

    def _demand(self, tokens: int) -> None:
        if tokens > len(self.free_pages) * self.page_size:
            raise OutOfMemory(
                f"{tokens} tokens wanted, {len(self.free_pages)} pages of {self.page_size} free"
            )

    def _allocate(self, requests: Sequence[Request], cur: Sequence[int], nxt: Sequence[int]) -> int:
        """Take pages for positions ``[cur, nxt)`` of each request and write its row."""
        size, table = self.page_size, self.table
        before, after = np.array(cur, np.int64), np.array(nxt, np.int64)
        if int(after.max(initial=0)) > table.shape[1]:
            raise OutOfMemory(f"a row of {table.shape[1]} slots is too narrow")
        pages = int(((after + size - 1) // size - (before + size - 1) // size).sum())
        self._demand(pages * size)
        fresh = self._take(pages)
        if size > 1:
            fresh = (fresh[:, None] * size + self._offsets).reshape(-1)
        at = 0
        for request, first, last in zip(requests, cur, nxt, strict=True):
            if last <= first:
                continue
            row = table[request.kv.row]
            edge = min((first + size - 1) // size * size, last)
            if first < edge:
                slot = int(row[first - 1]) + 1
                row[first:edge] = np.arange(slot, slot + edge - first, dtype=np.int32)
            if edge < last:
                row[edge:last] = fresh[at : at + last - edge]
                at += (last - edge + size - 1) // size * size
        return pages

    def _take(self, count: int) -> Int32:
        ids = self.free_pages[len(self.free_pages) - count :]
        del self.free_pages[len(self.free_pages) - count :]
        ids.reverse()
        return np.array(ids, np.int32)
