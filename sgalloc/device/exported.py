"""The arrays that hold what attention kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple


class Exported(NamedTuple):
    """Arrays on the device that `Device.export` writes.

    Attributes:
        page_table: int32 ``(most, width)``; the first n rows are written, padded with 0.
        indptr: int32 ``(most + 1,)``.
        indices: int32 ``(most * width,)``.
        last_page_len: int32 ``(most,)``.
    """

    page_table: Any
    indptr: Any
    indices: Any
    last_page_len: Any


class SideTables(NamedTuple):
    """What a device keeps of a second group.

    Attributes:
        table: whether a table of its slots, of the shape of ``req_to_token``.
        mapped: entries of the map from slots of the main group to its own; 0 for no map.
    """

    table: bool
    mapped: int
