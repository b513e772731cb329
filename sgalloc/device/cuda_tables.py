"""The tables of a CUDA device, and arrays of callers beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
from cupy.cuda import runtime

from sgalloc.device.exported import SideTables
from sgalloc.device.failing import Failing, telling
from sgalloc.inputs import Int64
from sgalloc.pages import Int32


class Out(NamedTuple):
    """An array of the caller's that receives slots."""

    ptr: int
    wide: bool


class CudaTables(Failing):
    """The tables, which callers see, and which checks read back."""

    row_pages: int
    _row_width: int
    _table: Any
    _page_table: Any
    _side_table: Any
    _side_map: Any

    def _make_tables(self, rows: int, page_table: bool, side: SideTables | None) -> None:
        """Allocate them, of zeros, on the current device; the widths are known."""
        self._table = cupy.zeros((rows, self._row_width), cupy.int32)
        self._page_table = cupy.zeros((rows, self.row_pages), cupy.int32) if page_table else None
        self._side_table = self._side_map = None
        if side is not None and side.table:
            self._side_table = cupy.zeros((rows, self._row_width), cupy.int32)
        if side is not None and side.mapped:
            self._side_map = cupy.zeros(side.mapped, cupy.int32)

    @property
    def table(self) -> Any:
        """``req_to_token``, a CuPy array, int32 ``(max_requests + 1, row_width)``."""
        return self._table

    @property
    def page_table(self) -> Any:
        """Page ids of each row, a CuPy array, int32 ``(max_requests + 1, row_pages)``, or None."""
        return self._page_table

    @property
    def side_table(self) -> Any:
        """Slots of the second group, a CuPy array of the shape of `table`, or None."""
        return self._side_table

    @property
    def side_map(self) -> Any:
        """From slots of the main group to those of the second, a CuPy array, int32, or None."""
        return self._side_map

    def read_rows(self, rows: Int64) -> Int32:
        """A host copy of whole rows, behind everything written so far; for checks alone."""
        return self._read(self._table, rows)

    def read_side_rows(self, rows: Int64) -> Int32:
        """As `read_rows`, of the second group's table."""
        return self._read(self._side_table, rows)

    def read_page_ids(self, rows: Int64) -> Int32:
        """As `read_rows`, of `page_table`."""
        return self._read(self._page_table, rows)

    def read_map(self) -> Int32:
        """A host copy of the map, behind everything written so far; for checks alone."""
        return self._read(self._side_map, None)

    @telling("reading a table back")
    def _read(self, array: Any, rows: Int64 | None) -> Int32:
        with cupy.cuda.Device(self.index):
            runtime.deviceSynchronize()
            copy: Int32 = cupy.asnumpy(array if rows is None else array[cupy.asarray(rows)])
            return copy

    @telling("looking at out=")
    def checked_out(self, out: Any, size: int) -> Out:
        """The caller's array, if it is a flat int32 or int64 array on this GPU of ``size``.

        Raises:
            TypeError: not an array on a GPU, or of another type.
            ValueError: another size, not contiguous, or on another GPU.
        """
        interface = getattr(out, "__cuda_array_interface__", None)
        if interface is None:
            raise TypeError(
                f"out must be an int32 or int64 array on {self.name}, got {type(out).__name__}: "
                "make it with cupy.empty, or torch.empty(device='cuda')"
            )
        kind = interface["typestr"]
        if kind not in ("<i4", "<i8"):
            raise TypeError(f"out must be int32 or int64, got {kind}")
        if tuple(interface["shape"]) != (size,):
            raise ValueError(f"out must have shape ({size},), got {tuple(interface['shape'])}")
        strides = interface.get("strides")
        pointer, read_only = interface["data"]
        if read_only or (strides is not None and size > 1 and strides[0] != int(kind[2])):
            raise ValueError("out must be contiguous and writable: pass a fresh array")
        if size and runtime.pointerGetAttributes(pointer).device != self.index:
            raise ValueError(f"out lies on another GPU than {self.name}: allocate it there")
        return Out(pointer, kind == "<i8")
