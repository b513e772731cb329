"""Pages that a step of `captured` has staged, and that no replay has written yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sgalloc.errors import WrongState
from sgalloc.inputs import Int64

if TYPE_CHECKING:
    from sgalloc.device import Device


def refuse_unwritten(
    device: Device, rows: Int64, first: Int64 | int, stop: Int64 | int, row_pages: int, remedy: str
) -> None:
    """Refuse to let pages go that a staged step would later write into the table.

    Args:
        device: whose steps.
        rows: int64 ``(n,)``.
        first, stop: the pages ``[first, stop)`` of each row, by their numbers in it.
        row_pages: pages of a row.
        remedy: what the caller may do besides a replay.

    Raises:
        WrongState: naming the first such row.
    """
    places = device.unwritten()
    at = rows * row_pages
    found = places.searchsorted(at + first) < places.searchsorted(at + stop)
    hit = found.nonzero()[0]
    if hit.size:
        raise WrongState(
            f"row {rows[hit[0]]} has a staged step that no replay has applied, and these pages "
            f"would be written then: replay the graph and let it finish{remedy}"
        )


def unwritten_of(places: Int64, row: int, row_pages: int) -> Int64:
    """Numbers of the pages of ``row`` among ``places`` of `Device.unwritten`, int64."""
    low, high = places.searchsorted((row * row_pages, (row + 1) * row_pages))
    return np.unique(places[low:high]) - row * row_pages
