"""The CPU as the device: the table is a NumPy array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.device.exported import Exported, SideTables
from sgalloc.device.poisoning import CpuPoisoner
from sgalloc.device.ready import DONE, Done
from sgalloc.device.row_digest import Known, Ranges, digest
from sgalloc.device.write_log import WriteLog
from sgalloc.errors import WrongState
from sgalloc.events import is_done
from sgalloc.inputs import Int64, shown
from sgalloc.ledger import NO_ROWS, spread, touch
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite


class CpuDevice:
    """A NumPy table that is written at once; the twin that every other device is held against."""

    name = "cpu"

    staging = (0, 0, 0)
    rounds_from = 1 << 62
    updates: tuple[Any, ...] = ()

    def __init__(
        self,
        max_requests: int,
        row_width: int,
        page_size: int,
        page_table: bool = False,
        side: SideTables | None = None,
    ) -> None:
        self.ranged: dict[str, str] = {}
        self.log = WriteLog()
        rows = max_requests + 1
        self._row_width = row_width
        self._row_pages = row_width // page_size
        self._page_size = page_size
        self._per_page: Int32 = np.array(page_size, np.int32)
        self._table: Int32 = np.zeros((rows, row_width), np.int32)
        self._page_table: Int32 | None = None
        if page_table:
            self._page_table = np.zeros((rows, self._row_pages), np.int32)
        self._offsets: Int32 = np.arange(page_size, dtype=np.int32)
        self._whole_rows = row_width % page_size == 0
        self._by_page = self._pages_of(self._table)
        self._side_table: Int32 | None = None
        self._side_map: Int32 | None = None
        if side is not None and side.table:
            self._side_table = np.zeros((rows, row_width), np.int32)
            self._side_by_page = self._pages_of(self._side_table)
        if side is not None and side.mapped:
            self._side_map = np.zeros(side.mapped, np.int32)

    def _pages_of(self, table: Int32) -> Int32:
        """A table by pages: (rows * row_pages, page_size), or (rows, row_pages, page_size) where
        a row ends in a piece smaller than a page.
        """
        if self._whole_rows:
            return table.reshape(-1, self._page_size)
        whole = table[:, : self._row_pages * self._page_size]
        strides = (whole.strides[0], 4 * self._page_size, 4)
        shape = (table.shape[0], self._row_pages, self._page_size)
        return np.lib.stride_tricks.as_strided(whole, shape, strides)

    @property
    def table(self) -> Int32:
        """``req_to_token``, int32 ``(max_requests + 1, row_width)``."""
        return self._table

    @property
    def page_table(self) -> Int32 | None:
        """Page ids of each row, int32 ``(max_requests + 1, row_pages)``; None unless wanted."""
        return self._page_table

    @property
    def side_table(self) -> Int32 | None:
        """Slots of the second group, int32, of the shape of `table`; None where it has none."""
        return self._side_table

    @property
    def side_map(self) -> Int32 | None:
        """From slots of the main group to those of the second, int32; None unless wanted."""
        return self._side_map

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Done:
        """Write the slots of ``ids`` where ``pages`` says, then gather; done on return.

        Raises:
            WrongState: there is something to write, ``after`` is not done, and a CPU has no
                stream that could wait.
            TypeError: ``after`` cannot be polled.
        """
        if gather is not None and not gather.size:
            gather = None
        late = after is not None and not is_done(after)
        if late and not (pages is None and side is None and gather is None):
            refusal = WrongState(
                f"after={shown(after)} is not done, and the CPU has no stream that could wait for "
                "it: call again when it is"
            )
            refusal.of_device = True
            raise refusal
        if pages is not None and ids is not None:
            slots = self._slots(ids)
            if self._page_size == 1:
                self._table.reshape(-1)[pages.where] = slots
            elif self._whole_rows:
                self._by_page[pages.where] = slots
            else:
                row, number = np.divmod(pages.where, self._row_pages)
                self._by_page[row, number] = slots
            if self._page_table is not None:
                self._page_table.reshape(-1)[pages.where] = ids
        if side is not None:
            self._write_side(side)
        if gather is not None:
            gather.out[:] = self._gathered(gather.rows, gather.start, gather.stop)
        return DONE

    def _write_side(self, side: SideWrite) -> None:
        slots = side.ids.reshape(-1, 1) * self._per_page + self._offsets
        slots[side.ids == 0] = 0
        shown = side.places >= 0
        if self._side_table is not None and shown.any():
            places = side.places[shown]
            if self._whole_rows:
                self._side_by_page[places] = slots[shown]
            else:
                row, number = np.divmod(places, self._row_pages)
                self._side_by_page[row, number] = slots[shown]
        mapped = side.mains != 0
        if self._side_map is not None and mapped.any():
            self._side_map.reshape(-1, self._page_size)[side.mains[mapped]] = slots[mapped]

    def write_here(
        self, pages: Segments | None, ids: Int32 | None, after: Any, side: SideWrite | None
    ) -> None:
        """As `write`."""
        self.write(pages, ids, None, after, side)

    def unmap(self, side: SideWrite) -> None:
        """As `write`, of entries of the map."""
        self.write(None, None, None, None, side)

    def done(self, event: Any) -> bool:
        """Whether an event is done."""
        return is_done(event)

    def waitable(self, after: Any) -> None:
        """A CPU has no stream that could wait."""

    def event(self, after: Any) -> Any:
        """``after`` itself: a CPU has no events of its own kind."""
        return after

    def rejoin(self, ready: Done) -> None:
        """Nothing to wait for."""

    def capturing(self) -> bool:
        """Never: a CPU captures nothing."""
        return False

    def write_watermarks(self, *_: Any) -> None:
        """A CPU has nobody to round for it."""

    def warm(self, max_pages: int | None = None) -> None:
        """Touch the table, so that no later step waits for the memory behind it."""
        touch(self._table.reshape(-1))

    def poisoner(self) -> CpuPoisoner:
        """What puts poison into the tables."""
        return CpuPoisoner(self, self._page_size)

    def checked_out(self, out: Any, size: int) -> NDArray[Any]:
        """``out`` as a NumPy array that shares its memory.

        Raises:
            TypeError: not a writable int32 or int64 array in host memory.
            ValueError: not flat, contiguous and of exactly ``size`` entries.
        """
        array = out if isinstance(out, np.ndarray) else _as_numpy(out)
        if array is None:
            raise TypeError(
                f"out must be an int32 or int64 array on the CPU, got {type(out).__name__}: "
                "this allocator's table lives on the CPU"
            )
        if array.dtype not in (np.int32, np.int64):
            raise TypeError(f"out must be int32 or int64, got {array.dtype}")
        if array.shape != (size,):
            raise ValueError(f"out must have shape ({size},), got {array.shape}")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError("out must be contiguous and writable: pass a fresh array")
        return array

    def gather(self, rows: Int64, start: Int64, stop: Int64) -> Int32:
        """The slots of positions ``[start, stop)`` of each row, flat, int32."""
        return self._gathered(rows, start, stop)

    def _gathered(self, rows: Int64, start: Int64, stop: Int64) -> Int32:
        where = spread(rows * self._row_width + start, stop - start)
        return self._table.reshape(-1).take(where)

    def empty(self, *shape: int) -> Int32:
        """A new int32 array of zeros."""
        return np.zeros(shape, np.int32)

    def export(self, rows: Int64, indptr: Int64, lengths: Int64, into: Exported) -> Done:
        """Write the page ids of ``rows`` into ``into``; done on return."""
        n, total = rows.size, int(indptr[-1])
        count = np.diff(indptr)
        number = spread(np.zeros_like(rows), count)
        at = rows.repeat(count) * self._row_width + number * self._page_size
        ids = self._table.reshape(-1).take(at) // self._page_size
        into.page_table[:n] = 0
        into.page_table[np.arange(n).repeat(count), number] = ids
        into.indices[:total] = ids
        into.indptr[: n + 1] = indptr
        into.last_page_len[:n] = np.where(count > 0, lengths - (count - 1) * self._page_size, 0)
        return DONE

    def captured(self, apply: Any, max_pages: int) -> Any:
        """Graphs are for a GPU.

        Raises:
            ValueError: always.
        """
        raise ValueError("captured() puts an update into a CUDA graph, and the CPU has none")

    def unwritten(self) -> Int64:
        """None: whatever is applied is written."""
        return NO_ROWS

    def finish_replays(self) -> None:
        """A CPU has no graphs."""

    def digest(self, ranges: Ranges) -> Known:
        """Hash ``ranges`` of the tables; done on return."""
        tables = (self._table, self._side_table, self._side_map, self._page_table)
        flat = [None if table is None else table.reshape(-1) for table in tables]
        found = np.zeros(ranges.array.size, np.uint64)
        columns = (column.tolist() for column in ranges)
        for at, (array, start, length) in enumerate(zip(*columns, strict=True)):
            entries = flat[array]
            assert entries is not None
            found[at] = digest(entries[start : start + length])
        return Known(found, DONE)

    def read_rows(self, rows: Int64) -> Int32:
        """A copy of whole rows."""
        return self._table[rows]

    def read_side_rows(self, rows: Int64) -> Int32:
        """A copy of whole rows of the second group's table."""
        assert self._side_table is not None
        return self._side_table[rows]

    def read_page_ids(self, rows: Int64) -> Int32:
        """A copy of whole rows of page ids."""
        assert self._page_table is not None
        return self._page_table[rows]

    def read_map(self) -> Int32:
        """A copy of the map."""
        assert self._side_map is not None
        return self._side_map.copy()

    def _slots(self, ids: Int32) -> Int32:
        if self._page_size == 1:
            return ids
        slots: Int32 = ids.reshape(-1, 1) * self._per_page + self._offsets
        return slots


def _as_numpy(out: Any) -> NDArray[Any] | None:
    """The memory of an array of another library; None if it cannot be shared."""
    if not hasattr(out, "__array__"):
        return None
    try:
        return np.asarray(out)
    except Exception:
        # Whatever the caller's object says, such as that its memory is a GPU's.
        return None
