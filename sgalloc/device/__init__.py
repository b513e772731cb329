"""Devices: where the table lives. They know plans, not requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sgalloc.device.cpu import CpuDevice
from sgalloc.device.exported import Exported, SideTables
from sgalloc.device.poisoning import Poisoner
from sgalloc.device.row_digest import Pending, Ranges
from sgalloc.device.write_log import WriteLog
from sgalloc.inputs import Int64, shown
from sgalloc.ownership import was_forked
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite

__all__ = ["CpuDevice", "Device", "Exported", "SideTables", "Writer", "open_device"]

_NOT_INITIALIZED = 3  # cudaErrorInitializationError


class Writer(Protocol):
    """Who writes a step into the table."""

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Any:
        """One launch: the slots of pages ``ids`` go where ``pages`` says, then ``gather``.

        Args:
            pages: runs of pages, or None for none.
            ids: page ids, int32 ``(pages.total,)``.
            gather: slots to be gathered after the write, or None.
            after: a CUDA event that the write waits for, or None.
            side: pages of the second group to be written or cleared, or None.

        Returns:
            An event that is done when the table is written.
        """


class Device(Writer, Protocol):
    """What the allocator asks of a device. Tables are written, and never read to decide."""

    name: str
    ranged: dict[str, str]
    """Methods that a profiler sees, with the names of their ranges."""
    rounds_from: int
    """Requests from which the device rounds watermarks sooner than the host."""
    log: WriteLog
    """The last writes, noted by whoever asked for them."""

    @property
    def updates(self) -> Sequence[Any]:
        """Updates of `captured` that live, weakly held; without one no page is `unwritten`."""

    @property
    def page_table(self) -> Any:
        """Page ids of each row, int32 ``(max_requests + 1, row_pages)``; None unless wanted."""

    @property
    def side_table(self) -> Any:
        """Slots of the second group, of the shape of `table`; None where it has none."""

    @property
    def side_map(self) -> Any:
        """From slots of the main group to those of the second, int32; None unless wanted."""

    @property
    def staging(self) -> tuple[int, int, int]:
        """Staging slots, calls that waited for one, and slots added."""

    @property
    def table(self) -> Any:
        """``req_to_token``, int32 ``(max_requests + 1, row_width)``, at one address for life."""

    def warm(self, max_pages: int | None = None) -> None:
        """Compile, allocate and touch all that a step of ``max_pages`` new pages needs."""

    def poisoner(self) -> Poisoner:
        """What puts poison into the tables, in debug mode alone."""

    def write_watermarks(
        self,
        rows: Int64,
        committed: Int64,
        allocated: Int64,
        reserve: Int64,
        ids: Int32,
        after: Any,
    ) -> Any:
        """Round, count, pick and write in one launch; None where the device would not."""

    def empty(self, *shape: int) -> Any:
        """A new int32 array of zeros on the device."""

    def export(self, rows: Int64, indptr: Int64, lengths: Int64, into: Exported) -> Any:
        """Write the page ids of ``rows`` from the table into arrays of the caller's.

        Args:
            rows: int64 ``(n,)``.
            indptr: int64 ``(n + 1,)``, from 0, pages of each row.
            lengths: tokens of each, int64 ``(n,)``.
            into: where to.

        Returns:
            An event that is done when they are written.
        """

    def write_here(
        self, pages: Segments | None, ids: Int32 | None, after: Any, side: SideWrite | None
    ) -> None:
        """`write` a step whose event no caller gets, and `rejoin` it."""

    def unmap(self, side: SideWrite) -> None:
        """`write_here` entries of the map alone, for what goes back.

        A device that is lost has nothing to do: its tables are dead, and the host goes on.
        """

    def done(self, event: Any) -> bool:
        """Whether an event is done; whatever polls one asks here.

        Raises:
            TypeError: it cannot be polled.
        """

    def waitable(self, after: Any) -> Any:
        """``after``, if the stream of a write can wait for it; None where it cannot."""

    def event(self, after: Any) -> Any:
        """``after`` as something that can be polled, if it is an event of this device's kind."""

    def rejoin(self, ready: Any) -> None:
        """Let the current stream wait for a write whose event no caller gets, if it is captured.

        A capture that drew the allocator's own stream in cannot end before that came back.
        """

    def capturing(self) -> bool:
        """Whether a stream is being captured, so that no event may be polled."""

    def captured(self, apply: Any, max_pages: int) -> Any:
        """An update to put into a graph of the caller's."""

    def unwritten(self) -> Int64:
        """Pages that staged steps have yet to write, int64, in ascending order.

        Each as its place in the page lists, ``row * row_pages + number``.
        """

    def checked_out(self, out: Any, size: int) -> Any:
        """``out`` as this device's array, if it has exactly ``size`` entries of int32 or int64."""

    def gather(self, rows: Int64, start: Int64, stop: Int64) -> Any:
        """The slots of positions ``[start, stop)`` of each row, flat, as a new int32 array.

        The current stream waits for it, whichever stream it was made on.
        """

    def finish_replays(self) -> None:
        """Wait for graphs of a caller's that may write the tables, on streams nobody named."""

    def digest(self, ranges: Ranges) -> Pending:
        """Hash ``ranges`` of the tables behind all that was written; the host goes on.

        Raises:
            WrongState: a stream is being captured, or too many digests were not looked at.
        """

    def read_rows(self, rows: Int64) -> Int32:
        """A host copy of whole rows, for checks alone."""

    def read_side_rows(self, rows: Int64) -> Int32:
        """The same of the second group's table."""

    def read_page_ids(self, rows: Int64) -> Int32:
        """The same of `page_table`."""

    def read_map(self) -> Int32:
        """A host copy of the map, for checks alone."""


def open_device(
    name: str,
    max_requests: int,
    row_width: int,
    page_size: int,
    stream: Any = None,
    reader: Any = None,
    page_table: bool = False,
    side: SideTables | None = None,
) -> Device:
    """The device called ``name``: "cpu", "cuda", "cuda:N", or "auto" for a GPU where there is one.

    Raises:
        TypeError: not a string.
        ValueError: no such device here; the message says what is missing.
    """
    if not isinstance(name, str):
        raise TypeError(f"device must be a string such as 'cpu' or 'cuda:0', got {shown(name)}")
    kind, colon, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and (kind != "cuda" or not number.isdigit())):
        raise ValueError(f"device {name!r} is unknown: use 'cpu', 'cuda', 'cuda:N' or 'auto'")
    missing = None if kind == "cpu" else cuda_missing()
    if kind == "cpu" or (kind == "auto" and missing is not None):
        if stream is not None or reader is not None:
            raise ValueError("stream= and reader= are for a GPU: the CPU has no streams")
        return CpuDevice(max_requests, row_width, page_size, page_table, side)
    if missing is not None:
        raise ValueError(f"device {name!r} cannot be used: {missing}; or use device='cpu'")
    from cupy.cuda import runtime

    from sgalloc.device.cuda import CudaDevice

    try:
        index = int(number) if number else int(runtime.getDevice())
        if index >= runtime.getDeviceCount():
            raise ValueError(
                f"device {name!r} is not here: this machine has {runtime.getDeviceCount()} GPUs, "
                "counted from 0"
            )
        return CudaDevice(
            index, max_requests, row_width, page_size, stream, reader, page_table, side
        )
    except runtime.CUDARuntimeError as error:
        # Which call is the first to fail in a fork depends on the version of CUDA.
        _refuse_fork(error)
        raise


def cuda_missing() -> str | None:
    """What keeps a GPU from being used; None where one can be.

    Raises:
        ValueError: the fork that made this process does, so that a CPU is not what was asked for.
    """
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"CuPy is not installed ({error}): pip install 'sgalloc[cuda13]'"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        _refuse_fork(error)
        return f"CUDA does not work here ({error}): look at the driver with nvidia-smi"
    return None if count else "there is no GPU"


def _refuse_fork(error: Any) -> None:
    """Say so, if it is the fork that made this process which keeps CUDA from working.

    Raises:
        ValueError: it is, and so "auto" must not take a CPU for it.
    """
    if was_forked() and getattr(error, "status", 0) == _NOT_INITIALIZED:
        raise ValueError(
            "this process was forked from one that had used CUDA, and has no CUDA of its own: "
            "start it with spawn, or fork before the first use of CUDA; or use device='cpu'"
        ) from None
