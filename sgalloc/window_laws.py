"""The laws of the window group: what rows hold of it, its table, and the map."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sgalloc.errors import LawViolation
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.laws import compare_entries, padding
from sgalloc.ledger import Ledger, spread
from sgalloc.pages import Int32
from sgalloc.prefix import RadixTree

if TYPE_CHECKING:
    from sgalloc.device import Device


def check_window(ledger: Ledger, window: Window, tree: RadixTree | None) -> None:
    """What each row holds of the window group lies within its extent, and is shared as it says.

    Raises:
        LawViolation: naming the row.
    """
    rows = ledger.live()
    first, stop = window.first.take(rows), window.stop.take(rows)
    pages, committed = ledger.page_counts(rows), ledger.committed.take(rows)
    cut = np.isin(rows, list(window.cut_rows))
    due = first * ledger.page_size + window.lag
    for broken, law in (
        ((first < 0) | (first > stop), "0 <= frontier <= end of the window pages"),
        (stop > pages, "window pages lie below A"),
        (first * ledger.page_size > ledger.allocated.take(rows), "frontier <= A"),
        # A page that a trim cut below the frontier is taken afresh by the next growth.
        (stop < pages - cut, "window pages reach to A"),
        (cut & (stop == pages), "a row has a cut page that is said to"),
        (window.due.take(rows) != due, "the next move of the frontier is known"),
    ):
        at = broken.nonzero()[0]
        if at.size:
            i = at[0]
            raise LawViolation(
                f"row {rows[i]} breaks '{law}': window pages [{first[i]}, {stop[i]}) of "
                f"{pages[i]} pages, C={committed[i]}"
            )
    if tree is None:
        return
    beside: dict[int, int] = {}
    for node in tree.nodes():
        if node.sides is not None:
            beside.update(zip(node.pages.tolist(), node.sides.tolist(), strict=True))
    for row, low, high in zip(rows.tolist(), first.tolist(), stop.tolist(), strict=True):
        for number in range(low, min(high, int(ledger.shared[row]))):
            page = int(ledger.pages[row, number])
            if beside.get(page) != int(window.pages[row, number]):
                raise LawViolation(
                    f"row {row} reads window page {window.pages[row, number]} there, but the "
                    f"prefix cache has {beside.get(page)} beside page {page}"
                )


def check_window_table(ledger: Ledger, window: Window, device: Device, rows: Int64) -> None:
    """The window's table, 0 below the frontier of each of ``rows``, as the device has it.

    Raises:
        LawViolation: naming the entry, both values, and who wrote there last.
    """
    size = ledger.page_size
    offsets = np.arange(size, dtype=np.int32)
    for row in rows.tolist():
        held = device.read_side_rows(np.array([row]))[0]
        if row == 0:
            expected = np.zeros_like(held)
        else:
            first, stop = int(window.first[row]), int(window.stop[row])
            ids = window.pages[row, first:stop]
            slots = (ids[:, None] * size + offsets).reshape(-1)
            expected = np.concatenate((np.zeros(first * size, np.int32), slots))
        base = row * ledger.row_pages
        writer = padding if row == 0 else partial(device.log.of_side_entry, base, ledger.pages[row])
        compare_entries(f"window_table[{row}, ", held, expected, size, writer)


def window_pages_of(
    ledger: Ledger, window: Window, tree: RadixTree | None, main_pages: int
) -> Int32:
    """What the map should say: the window page beside each page of the main group, 0 for none.

    Returns:
        int32 ``(main_pages + 1,)``.
    """
    beside = np.zeros(main_pages + 1, np.int32)
    rows = ledger.live()
    own = np.maximum(ledger.shared.take(rows), window.first.take(rows))
    count = np.maximum(window.stop.take(rows) - own, 0)
    places = spread(rows * ledger.per_row + own, count)
    beside[ledger.pages_flat.take(places)] = window.pages_flat.take(places)
    for node in tree.nodes() if tree is not None else []:
        if node.sides is not None:
            beside[node.pages] = node.sides
    return beside
