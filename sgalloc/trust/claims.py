"""What the ledger says of the device's tables, as digests; and which entry is wrong."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgalloc import laws, sparse_laws, window_laws
from sgalloc.core import Core
from sgalloc.device import Device
from sgalloc.device.row_digest import (
    MAP,
    MAP_ENTRIES,
    PAGES,
    SIDE_SLOTS,
    SLOTS,
    Ranges,
    UInt64,
    digests_of_pages,
    page_weights,
)
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.pages import Int32


class Claims(NamedTuple):
    """Ranges of the tables, and the digests that they should have.

    Attributes:
        ranges: what is to be hashed.
        digests: uint64 ``(n,)``.
        subject: the row of each; the first page of each range of the map, int64 ``(n,)``.
    """

    ranges: Ranges
    digests: UInt64
    subject: Int64


def claims_of(core: Core, rows: Int64, with_map: bool) -> Claims:
    """What the ledger says of the padding row and of ``rows`` in each table, and of the map.

    Pages of the map that wait behind events, or that remote writers still fill, are left out:
    they keep their entries until they come back.

    Args:
        core: the allocator's parts.
        rows: open rows, int64 ``(n,)``.
        with_map: whether the map is looked at, too.
    """
    ledger, size, device = core.ledger, core.ledger.page_size, core.device
    width, per_row = ledger.row_width, ledger.row_pages
    held = ledger.page_counts(rows)
    digests = digests_of_pages(ledger.pages, rows, None, held, size)
    parts = [_rows(SLOTS, rows, width, held * size, digests)]
    if isinstance(core.side, Window):
        first, stop = core.side.first.take(rows), core.side.stop.take(rows)
        digests = digests_of_pages(core.side.pages, rows, first, stop, size)
        parts.append(_rows(SIDE_SLOTS, rows, width, stop * size, digests))
    if device.page_table is not None:
        digests = digests_of_pages(ledger.pages, rows, None, held, 1)
        parts.append(_rows(PAGES, rows, per_row, held, digests))
    if with_map and device.side_map is not None:
        parts.append(_map(_beside(core)[1], _waiting(core), size))
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.ranges for part in parts), strict=True)
    ranges = Ranges(*(np.concatenate(column) for column in columns))
    return Claims(
        ranges,
        np.concatenate([part.digests for part in parts]),
        np.concatenate([part.subject for part in parts]),
    )


def look_closer(core: Core, array: int, subject: int) -> None:
    """Read one row, or the map, back and compare it entry by entry with what the ledger says now.

    Args:
        core: the allocator's parts.
        array: which table, as `Ranges` has it.
        subject: the row; of no matter for the map.

    Raises:
        LawViolation: naming the entry, both values, and who wrote there last.
    """
    ledger, device = core.ledger, core.device
    row = np.array([subject])
    device.finish_replays()
    unwritten = device.unwritten()
    late = late_rows(core, unwritten)
    if array == SLOTS:
        laws.check_table(ledger, device, row, unwritten)
    elif late.size and (array == MAP or subject in late):
        return
    elif array == SIDE_SLOTS and isinstance(core.side, Window):
        window_laws.check_window_table(ledger, core.side, device, row)
    elif array == PAGES:
        laws.check_page_ids(ledger, device, row)
    else:
        name, beside = _beside(core)
        laws.check_map(name, ledger.page_size, beside, _waiting(core), device)


def late_rows(core: Core, unwritten: Int64) -> Int64:
    """The open rows that have pages below A which staged steps have yet to write, int64.

    Args:
        core: the allocator's parts.
        unwritten: places, as `Device.unwritten` has them.
    """
    rows, number = np.divmod(unwritten, core.ledger.per_row)
    return np.unique(rows[number < core.ledger.page_counts(rows)])


def name_of(device: Device, array: int, subject: int) -> str:
    """What a range is called, in a message."""
    if array == MAP:
        return f"the map, from page {subject} on,"
    table = {SLOTS: "req_to_token", SIDE_SLOTS: "window_table", PAGES: "page_table"}[array]
    return f"row {subject} of {table} on {device.name}"


def _rows(array: int, rows: Int64, width: int, count: Int64, digests: UInt64) -> Claims:
    """The first ``count`` entries of each row, behind the padding row, which is 0 throughout."""
    ranges = Ranges(
        np.full(rows.size + 1, array),
        np.concatenate(([0], rows * width)),
        np.concatenate(([width], count)),
    )
    none = np.zeros(1, np.uint64)
    return Claims(ranges, np.concatenate((none, digests)), np.concatenate(([0], rows)))


def _map(beside: Int32, waiting: Int32, size: int) -> Claims:
    """The map in pieces, cut where a page is left out."""
    seen = np.ones(beside.size, np.bool_)
    seen[waiting] = False
    pages = seen.nonzero()[0]
    piece = max(1, MAP_ENTRIES // size)
    begins = np.diff(pages, prepend=-2) != 1
    begins |= pages % piece == 0
    first = begins.nonzero()[0]
    count = np.diff(first, append=pages.size)
    subject = pages[first]
    known = page_weights(size)
    known.upto(min(piece, beside.size))
    ids = beside.take(pages)
    some = ids.nonzero()[0]
    number = pages - subject.repeat(count)
    number = number.take(some)
    added = np.zeros(pages.size, np.uint64)
    added[some] = ids.take(some).astype(np.uint64) * np.uint64(size) * known.sums.take(number)
    added[some] += known.behind.take(number + 1) - known.behind.take(number)
    digests = np.add.reduceat(added, first) if first.size else added
    ranges = Ranges(np.full(first.size, MAP), subject * size, count * size)
    return Claims(ranges, digests, subject)


def _waiting(core: Core) -> Int32:
    return np.concatenate((core.quarantine.page_ids(), core.pins.page_ids()))


def _beside(core: Core) -> tuple[str, Int32]:
    """What the map is called, and the page of the second group beside each of the main one."""
    if isinstance(core.side, Window):
        pages = window_laws.window_pages_of(core.ledger, core.side, core.tree, core.pool.num_pages)
        return "full_to_window", pages
    assert isinstance(core.side, DevicePages)
    pages = sparse_laws.device_pages_of(core.ledger, core.side, core.pool.num_pages)
    return "logical_to_device", pages
