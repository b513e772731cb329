"""sgalloc and the plain Python loop with the same requests, and whether they agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sgalloc
from sgalloc.bench.python_loop import PythonLoop, Request

Int64 = NDArray[np.int64]

_CHUNK = 1024


class Shape(NamedTuple):
    """How large a measurement is.

    Attributes:
        batch: requests.
        page_size: slots in a page.
        history: tokens that a request has when it is measured, up to 64 fewer if staggered.
        row_width: slots in a row, a multiple of the page size.
    """

    batch: int
    page_size: int
    history: int
    row_width: int

    @property
    def num_pages(self) -> int:
        """Pages enough for every row to be full."""
        return self.batch * (self.row_width // self.page_size)


def shape_for(batch: int, page_size: int) -> Shape:
    """The shape measured at ``batch``: short rows for very many requests, to stay in memory."""
    if batch > 4096:
        return Shape(batch, page_size, history=128, row_width=320)
    return Shape(batch, page_size, history=1000, row_width=1536)


class Twins:
    """One allocator and one Python loop, told the same things.

    Attributes:
        alloc: the subject.
        loop: the baseline.
        requests: the loop's requests, int64 handles of the same ones in ``handles``.
        base: tokens of each request after `fill`, int64 ``(batch,)``.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.alloc = sgalloc.KVAllocator(
            shape.num_pages, shape.page_size, shape.batch, shape.row_width, device="cpu"
        )
        self.loop = PythonLoop(shape.num_pages, shape.page_size, shape.batch, shape.row_width)
        self.alloc.warm()
        self.loop.warm()
        self.requests = [Request() for _ in range(shape.batch)]
        self.handles: Int64 = np.empty(0, np.int64)
        self.base: Int64 = np.empty(0, np.int64)

    def fill(self, staggered: bool = True) -> None:
        """Open all requests and give them their history, each at another place in its page."""
        shape = self.shape
        below: Any = self.rng.integers(0, min(64, shape.history), shape.batch) if staggered else 0
        self.base = np.full(shape.batch, shape.history, np.int64) - below
        self.handles = self.alloc.open(shape.batch)
        self.alloc.extend(self.handles, self.base)
        self.loop.open(self.requests)
        self.loop.extend(self.requests, self.base.tolist())

    def reset(self) -> None:
        """Cut all requests back to their first length."""
        self.alloc.trim(self.handles, self.base)
        self.loop.trim(self.requests, self.base.tolist())

    def difference(self) -> str | None:
        """In what the two differ, or None.

        Compared are C, A and the free pages, and the tables up to the names of pages: on both
        sides every page obeys the row law and stands once. The loop does not round A to pages
        after a prefill or a plain decode, so its A is rounded here.
        """
        alloc, loop, size = self.alloc, self.loop, self.shape.page_size
        free = len(loop.free_pages)
        if alloc.available() != free:
            return f"{alloc.available()} pages are free in sgalloc, {free} in the loop"
        if not self.handles.size:
            return None
        committed = np.array([r.kv.kv_committed_len for r in self.requests])
        wrong = (alloc.committed(self.handles) != committed).nonzero()[0]
        if wrong.size:
            return f"C of request {wrong[0]} differs: {committed[wrong[0]]} in the loop"
        held = np.array([r.kv.kv_allocated_len for r in self.requests])
        extent = alloc.allocated(self.handles)
        wrong = (extent != -(-held // size) * size).nonzero()[0]
        if wrong.size:
            return f"A of request {wrong[0]} differs: {held[wrong[0]]} in the loop"
        loop_rows = np.array([r.kv.row for r in self.requests])
        for name, table, rows, upto in (
            ("sgalloc", alloc.req_to_token, alloc.rows(self.handles), extent),
            ("the loop", loop.table, loop_rows, held),
        ):
            fault = _row_law(table, rows, upto, size, self.shape.num_pages)
            if fault is not None:
                return f"the table of {name}: {fault}"
        return None


def _row_law(
    table: NDArray[np.int32], rows: NDArray[Any], upto: Int64, size: int, num_pages: int
) -> str | None:
    """What is wrong with the first ``upto`` entries of ``rows``, or None."""
    seen = np.zeros(num_pages + 1, np.bool_)
    seen[0] = True
    total = 0
    for start in range(0, rows.size, _CHUNK):
        lengths = upto[start : start + _CHUNK]
        width = -(-int(lengths.max(initial=0)) // size) * size
        part = table[rows[start : start + _CHUNK], :width].astype(np.int64)
        valid = np.arange(width) < lengths[:, None]
        page, offset = np.divmod(part, size)
        if ((offset != np.arange(width) % size) & valid).any():
            return "a slot has another offset in its page than its position"
        first = page[:, ::size]
        if ((page != first.repeat(size, axis=1)) & valid).any():
            return "the slots of one page do not belong together"
        ids = first[valid[:, ::size]]
        if ids.size and (ids.min() < 1 or ids.max() > num_pages):
            return "a page does not exist"
        seen[ids] = True
        total += ids.size
    # Page 0 counts as seen from the start.
    return "a page stands twice" if np.count_nonzero(seen) != total + 1 else None
