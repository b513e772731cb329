"""The ledger: what every request holds. The only writer of C and A."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import CommitPastExtent, OutOfRows, StaleHandle, WrongState
from sgalloc.inputs import Int64, int64_array
from sgalloc.ownership import Unpicklable
from sgalloc.pages import Int32

NO_ROWS: Int64 = np.empty(0, np.int64)
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_MAX_GENERATION = (1 << 31) - 1


class Ledger:
    """Rows 1..``max_requests`` as a struct of arrays.

    Attributes:
        committed: C, tokens, int64 ``(max_requests + 1,)``.
        allocated: A, tokens, int64, always whole pages.
        decode_steps: decode steps taken, int64.
        shared: leading pages of the row that belong to the prefix cache, int64.
        receiving: whether remote writers still fill the row's pages, bool.
        receiving_rows: how many such rows there are.
        handle: the handle of the row's request, int64; 0 where none is open.
        pages: page ids of each row, int32 ``(max_requests + 1, row_pages)``; entries from
            A on are stale.
        group: name of the group that the table's slots belong to.
        namespace: namespace of each open row that has one.
        per_page, per_page_less_one, per_row: page_size, page_size - 1 and row_pages, as
            operands of arithmetic on columns.
        version: grows with every change; a plan made at another version is stale.
        epoch: grows when a request goes away; a batch checked at this epoch needs no check.
    """

    __slots__ = (
        "_generation",
        "_mark",
        "_row_stack",
        "allocated",
        "committed",
        "decode_steps",
        "epoch",
        "free_rows",
        "group",
        "handle",
        "max_requests",
        "namespace",
        "page_size",
        "pages",
        "pages_flat",
        "per_page",
        "per_page_less_one",
        "per_row",
        "receiving",
        "receiving_rows",
        "row_pages",
        "row_width",
        "shared",
        "version",
        "waiting_rows",
    )

    def __init__(
        self, max_requests: int, row_width: int, page_size: int, group: str = "full"
    ) -> None:
        rows = max_requests + 1
        self.group = group
        self.max_requests = max_requests
        self.row_width = row_width
        self.row_pages = row_width // page_size
        self.page_size = page_size
        # NumPy takes a zero-dimensional array in half the time of a Python int.
        self.per_page: Int64 = np.array(page_size)
        self.per_page_less_one: Int64 = np.array(page_size - 1)
        self.per_row: Int64 = np.array(self.row_pages)
        self.committed: Int64 = np.zeros(rows, np.int64)
        self.allocated: Int64 = np.zeros(rows, np.int64)
        self.decode_steps: Int64 = np.zeros(rows, np.int64)
        self.shared: Int64 = np.zeros(rows, np.int64)
        self.receiving: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.receiving_rows = 0
        self.handle: Int64 = np.zeros(rows, np.int64)
        self.handle[0] = -1  # so that no number names the padding row
        self.pages: Int32 = np.zeros((rows, self.row_pages), np.int32)
        self.pages_flat: Int32 = self.pages.reshape(-1)
        self.namespace: dict[int, Any] = {}
        self._generation: Int64 = np.ones(rows, np.int64)
        self._row_stack: Int64 = np.arange(max_requests, 0, -1, dtype=np.int64)
        self._mark: Int64 = np.zeros(rows, np.int64)
        self.free_rows = max_requests
        self.waiting_rows = 0
        self.version = 0
        self.epoch = 0

    # -- reading ---------------------------------------------------------------------------

    @property
    def open_rows(self) -> int:
        """Rows with an open request."""
        return self.max_requests - self.free_rows - self.waiting_rows

    def live(self) -> Int64:
        """The open rows, ascending."""
        return self.handle[1:].nonzero()[0] + 1

    def rows_of(self, handles: Any) -> Int64:
        """The rows that ``handles`` (a batch, handles or one handle) name, int64 ``(n,)``.

        Raises:
            StaleHandle: one names no open request.
            ValueError: one stands twice, or the batch belongs to another allocator.
        """
        if isinstance(handles, Batch):
            return handles.rows_in(self)
        named = int64_array(handles, "handles")
        rows = named & _ROW_MASK
        if not rows.size:
            return rows
        stale = (self.handle.take(rows, mode="clip") != named).nonzero()[0]
        if stale.size:
            bad = int(named[stale[0]])
            raise StaleHandle(
                f"handle {bad} names no open request (row {bad & _ROW_MASK}, generation "
                f"{bad >> _ROW_BITS}), it was released or never came from this allocator: "
                "drop it, and open a request anew"
            )
        twice = self.repeated(rows)
        if twice is not None:
            raise ValueError(
                f"handle {int(named[twice])} stands twice in one batch: name each request once"
            )
        return rows

    def is_open(self, handle: int) -> bool:
        """Whether ``handle`` names an open request."""
        row = handle & _ROW_MASK
        return 0 < row <= self.max_requests and int(self.handle[row]) == handle

    def row_of(self, handle: int) -> int:
        """The row in ``handle``, open or not."""
        return handle & _ROW_MASK

    def repeated(self, rows: Int64) -> int | None:
        """A position whose row stands again later; None where all differ."""
        order = np.arange(rows.size)
        self._mark[rows] = order
        twice = (self._mark.take(rows) != order).nonzero()[0]
        return int(twice[0]) if twice.size else None

    def next_rows(self, count: int) -> Int64:
        """The rows that `open` would take now, int64 ``(count,)``; nothing changes.

        Raises:
            OutOfRows: fewer are free.
        """
        if count > self.free_rows:
            raise OutOfRows(count, self.free_rows)
        return self._row_stack[self.free_rows - count : self.free_rows][::-1].copy()

    def holding(self, x: Any) -> tuple[Int64, Int64, Int64]:
        """Rows, C and A of what ``x`` names, to change them, int64 ``(n,)`` each.

        Raises:
            StaleHandle, ValueError: as `rows_of`.
            WrongState: as `check_received`.
        """
        if type(x) is Batch:
            return x.holding(self)
        rows = self.rows_of(x)
        if self.receiving_rows:
            self.check_received(rows)
        return rows, self.committed.take(rows), self.allocated.take(rows)

    def check_received(self, rows: Int64) -> None:
        """Refuse rows that remote writers still fill.

        Raises:
            WrongState: naming the first of them.
        """
        if not self.receiving_rows:
            return
        at = self.receiving.take(rows).nonzero()[0]
        if at.size:
            raise WrongState(
                f"row {rows[at[0]]} is still being received: wait until each of its writers has "
                "acknowledged, or abort it"
            )

    def page_list(self, row: int) -> Int32:
        """The page ids that ``row`` holds, in order; a view, int32."""
        return self.pages[row, : self.allocated[row] // self.page_size]

    def owned_pages(self, rows: Int64) -> tuple[Int64, Int32]:
        """Rows (repeated) and ids of the pages that ``rows`` own, shared ones left out."""
        return self.page_range(rows, self.shared.take(rows), self.page_counts(rows))

    def page_counts(self, rows: Int64) -> Int64:
        """Pages that each of ``rows`` holds, shared ones included."""
        return self.allocated.take(rows) // self.per_page

    def page_range(self, rows: Int64, first: Int64, stop: Int64) -> tuple[Int64, Int32]:
        """Rows (repeated) and ids of pages ``[first, stop)`` of each row, flat, in order."""
        count = stop - first
        where = spread(rows * self.per_row + first, count)
        return rows.repeat(count), self.pages_flat.take(where)

    def warm(self) -> None:
        """Touch the page lists, so that no later step waits for the memory behind them."""
        touch(self.pages_flat)

    # -- writing ---------------------------------------------------------------------------

    def open(self, count: int, namespace: Any = None) -> Int64:
        """Take ``count`` rows with C = A = 0; their handles, int64.

        Raises:
            OutOfRows: fewer are free.
        """
        rows = self.next_rows(count)
        self.free_rows -= count
        handles = (self._generation.take(rows) << _ROW_BITS) | rows
        self.handle[rows] = handles
        if namespace is not None:
            self.namespace.update(dict.fromkeys(rows.tolist(), namespace))
        self.version += 1
        return handles

    def unopen(self, rows: Int64, version: int) -> None:
        """Undo an `open` of ``rows``, and what they adopted: as if it had never been.

        Args:
            rows: those that it took, in order, int64.
            version: that before it.
        """
        for column in (self.committed, self.allocated, self.shared, self.handle):
            column[rows] = 0
        for row in rows.tolist():
            self.namespace.pop(row, None)
        self.free_rows += rows.size  # the stack still has them
        self.version = version

    def adopt(self, row: int, pages: Int32, namespace: Any) -> None:
        """Let a fresh row of ``namespace`` begin with cached ``pages``: C = A = their tokens."""
        if namespace is not None:
            self.namespace[row] = namespace
        count = pages.size
        self.pages[row, :count] = pages
        self.shared[row] = count
        self.committed[row] = self.allocated[row] = count * self.page_size
        self.version += 1

    def changed(self) -> None:
        """Age the plans made before."""
        self.version += 1

    def receive(self, rows: Int64) -> None:
        """From now on remote writers fill the pages of ``rows``; C stays until they have."""
        self.receiving[rows] = True
        self.receiving_rows += rows.size
        self.version += 1

    def received(self, row: int, length: int) -> None:
        """The pages of ``row`` are filled: C = ``length`` (tokens)."""
        self.receiving[row] = False
        self.receiving_rows -= 1
        self.committed[row] = length
        self.version += 1

    def share(self, row: int, count: int, first: int, twins: Int32) -> None:
        """From now on the first ``count`` pages of ``row`` belong to the prefix cache.

        Args:
            row: the row.
            count: pages.
            first: number of the page from which ``twins`` take the place of the row's own.
            twins: page ids, int32.
        """
        self.pages[row, first : first + twins.size] = twins
        self.shared[row] = count
        self.version += 1

    def grow(self, rows: Int64, where: Int64, ids: Int32, allocated: Int64) -> None:
        """Append pages: ``ids`` at flat places ``where`` of the page lists, A = ``allocated``."""
        self.pages_flat[where] = ids
        self.allocated[rows] = allocated
        self.version += 1

    def note(self, where: Int64, ids: Int32) -> None:
        """Enter the ids of a step before it is done, behind A, where the lists are stale."""
        self.pages_flat[where] = ids

    def commit_to(self, rows: Int64, lengths: Int64) -> None:
        """C = ``lengths`` (tokens), which A covers already."""
        self.committed[rows] = lengths
        self.version += rows.size > 0

    def commit(self, x: Any, accepted: Int64) -> None:
        """C += ``accepted`` (one for all, or one each) for the requests that ``x`` names.

        Raises:
            CommitPastExtent: it would pass A.
        """
        rows, committed, allocated = self.holding(x)
        after = committed + accepted
        over = (after > allocated).nonzero()[0]
        if over.size:
            at = int(over[0])
            raise CommitPastExtent(
                f"row {rows[at]} would be committed to {after[at]} tokens, but "
                f"{allocated[at]} are allocated: reserve or extend first"
            )
        self.commit_to(rows, after)
        if type(x) is Batch:
            x.moved(after, allocated)

    def step(self, rows: Int64) -> None:
        """Count one decode step for each of ``rows``."""
        self.decode_steps[rows] = self.decode_steps.take(rows) + 1
        self.version += rows.size > 0

    def cut(self, rows: Int64, committed: Int64, pages: Int64) -> None:
        """C = ``committed`` and A = ``pages`` pages, which cover it, at most what they were."""
        self.committed[rows] = committed
        self.allocated[rows] = pages * self.page_size
        self.shared[rows] = np.minimum(self.shared.take(rows), pages)
        self.version += 1

    def close(self, rows: Int64, waiting: bool) -> None:
        """Close the requests of ``rows``; ``waiting`` keeps the rows out until `return_rows`."""
        self.committed[rows] = 0
        self.allocated[rows] = 0
        self.decode_steps[rows] = 0
        self.shared[rows] = 0
        if self.receiving_rows:
            self.receiving_rows -= int(np.count_nonzero(self.receiving.take(rows)))
            self.receiving[rows] = False
        self.handle[rows] = 0
        generation = self._generation.take(rows) + 1
        generation[generation > _MAX_GENERATION] = 1
        self._generation[rows] = generation
        if self.namespace:
            for row in rows.tolist():
                self.namespace.pop(row, None)
        if waiting:
            self.waiting_rows += rows.size
        else:
            self._push_rows(rows)
        self.version += 1
        self.epoch += 1

    def return_rows(self, rows: Int64) -> None:
        """Free rows that waited."""
        self.waiting_rows -= rows.size
        self._push_rows(rows)

    def free_row_ids(self) -> Int64:
        """The free rows, those handed out last first."""
        return self._row_stack[: self.free_rows].copy()

    def generations(self) -> Int64:
        """The generation that each row's next request has, or its present one; a copy."""
        return self._generation.copy()

    def restore(self, rows: Int64, free: Int64, generations: Int64, **columns: Int64) -> None:
        """Let a fresh ledger be as a snapshot says.

        Args:
            rows: the open rows, int64 ``(n,)``.
            free: the free rows, those handed out last first, int64.
            generations: int64 ``(max_requests + 1,)``.
            **columns: of the open rows, by name, ``(n,)`` each.
        """
        self._generation[:] = generations
        self.handle[rows] = (self._generation.take(rows) << _ROW_BITS) | rows
        for name, column in columns.items():
            getattr(self, name)[rows] = column
        self.receiving_rows = int(np.count_nonzero(self.receiving))
        self.free_rows = free.size
        self._row_stack[: free.size] = free
        self.waiting_rows = self.max_requests - rows.size - free.size

    def _push_rows(self, rows: Int64) -> None:
        self._row_stack[self.free_rows : self.free_rows + rows.size] = rows[::-1]
        self.free_rows += rows.size


class Batch(Unpicklable):
    """Requests that are named again and again: rows are looked up once.

    Checked again only after some request went away. Verbs take a batch or plain handles; with
    a batch they find C and A of its requests side by side, as long as nobody else changes the
    ledger in between.

    Attributes:
        handles: int64 ``(n,)``.
        rows: int64 ``(n,)``.
    """

    __slots__ = ("_allocated", "_committed", "_epoch", "_ledger", "_version", "handles", "rows")

    def __init__(self, ledger: Ledger, handles: Any) -> None:
        self.handles: Int64 = int64_array(handles, "handles").copy()
        self.rows: Int64 = ledger.rows_of(self.handles)
        # Plans show the rows, too.
        self.handles.flags.writeable = self.rows.flags.writeable = False
        self._ledger = ledger
        self._epoch = ledger.epoch
        self._version = -1
        self._committed = self._allocated = self.rows

    def __len__(self) -> int:
        return self.rows.size

    def __repr__(self) -> str:
        return f"Batch({self.rows.size} requests)"

    def rows_in(self, ledger: Ledger) -> Int64:
        """The rows, checked again if a request of ``ledger`` went away since the last check.

        Raises:
            StaleHandle: one of the requests went away.
            ValueError: the batch belongs to another allocator.
        """
        if self._ledger is not ledger:
            raise ValueError("this batch belongs to another allocator: make one with its batch()")
        if self._epoch != ledger.epoch:
            ledger.rows_of(self.handles)
            self._epoch = ledger.epoch
        return self.rows

    def holding(self, ledger: Ledger) -> tuple[Int64, Int64, Int64]:
        """Rows, C and A, int64 ``(n,)`` each, to be read alone. Raises as `Ledger.holding`."""
        if self._version != ledger.version or self._ledger is not ledger:
            rows = self.rows_in(ledger)
            if ledger.receiving_rows:
                ledger.check_received(rows)
            self.moved(ledger.committed.take(rows), ledger.allocated.take(rows))
        return self.rows, self._committed, self._allocated

    def moved(self, committed: Int64, allocated: Int64) -> None:
        """C and A after a change of this batch alone, which the ledger has just recorded."""
        # Plans show these arrays, too.
        committed.setflags(write=False)
        allocated.setflags(write=False)
        self._committed = committed
        self._allocated = allocated
        self._version = self._ledger.version


def names_one(x: Any) -> bool:
    """Whether ``x`` is one handle, and not a batch or a sequence of handles."""
    return not isinstance(x, Batch) and np.ndim(x) == 0


def touch(column: Int32) -> None:
    """Write one entry of each 4 KiB of a contiguous array as it is."""
    column[::1024] |= 0


def spread(starts: Int64, count: Int64) -> Int64:
    """``[starts[i], starts[i] + count[i])`` of every i, one after the other, int64."""
    ends = count.cumsum()
    total = int(ends[-1]) if ends.size else 0
    if total == starts.size and count.all():
        return starts
    where: Int64 = (starts - ends + count).repeat(count)
    where += np.arange(total)
    return where


def concatenate(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """``parts`` one after the other; an empty array of ``dtype`` for none."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
