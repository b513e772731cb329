"""Devices: where the table lives. They know plans, not requests."""

from __future__ import annotations

from typing import Any, Protocol

from sgalloc.device.cpu import CpuDevice
from sgalloc.inputs import Int64
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments

__all__ = ["CpuDevice", "Device", "open_device"]


class Device(Protocol):
    """What the allocator asks of a device. Tables are written, and never read to decide."""

    name: str

    @property
    def table(self) -> Any:
        """``req_to_token``, int32 ``(max_requests + 1, row_width)``, at one address for life."""

    def warm(self) -> None:
        """Compile, allocate and touch all that a steady step needs."""

    def write(
        self, pages: Segments | None, ids: Int32 | None, gather: Gather | None, after: Any
    ) -> Any:
        """One launch: the slots of pages ``ids`` go where ``pages`` says, then ``gather``.

        Args:
            pages: runs of pages, or None for none.
            ids: page ids, int32 ``(pages.total,)``.
            gather: slots to be gathered after the write, or None.
            after: a CUDA event that the write waits for, or None.

        Returns:
            An event that is done when the table is written.
        """

    def checked_out(self, out: Any, size: int) -> Any:
        """``out`` as this device's array, if it has exactly ``size`` entries of int32 or int64."""

    def gather(self, rows: Int64, start: Int64, stop: Int64) -> Any:
        """The slots of positions ``[start, stop)`` of each row, flat, as a new int32 array."""

    def read_rows(self, rows: Int64) -> Int32:
        """A host copy of whole rows, for checks alone."""


def open_device(name: str, max_requests: int, row_width: int, page_size: int) -> Device:
    """The device called ``name``.

    Raises:
        TypeError: not a string.
        ValueError: no such device here.
    """
    if not isinstance(name, str):
        raise TypeError(f"device must be a string such as 'cpu', got {name!r}")
    if name not in ("auto", "cpu"):
        raise ValueError(
            f"device {name!r} is not served by this version: use 'cpu', or 'auto' to take what "
            "there is"
        )
    return CpuDevice(max_requests, row_width, page_size)
