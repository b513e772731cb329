"""The laws of the device group: what rows hold of it, and the map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sgalloc.errors import LawViolation
from sgalloc.groups.sparse import DevicePages
from sgalloc.laws import compare_entries
from sgalloc.ledger import Ledger
from sgalloc.pages import Int32

if TYPE_CHECKING:
    from sgalloc.device import Device


def check_sparse(ledger: Ledger, group: DevicePages) -> None:
    """What each row holds of the device group, and which of it is mapped, agrees with its state.

    Raises:
        LawViolation: naming the row.
    """
    rows = ledger.live()
    held, sparse, long = group.count.take(rows), group.sparse.take(rows), group.is_long.take(rows)
    first, stop = group.first.take(rows), group.stop.take(rows)
    pages, covered = ledger.page_counts(rows), -(-ledger.committed.take(rows) // ledger.page_size)
    for broken, law in (
        ((held < 0) | (held > pages), "device pages lie below A"),
        (sparse & (held > group.buffer + 1), "a sparse row has a buffer and one page at most"),
        (long != (sparse & (held > group.buffer)), "a long row is sparse and has a buffer and one"),
        ((first < 0) | (first > stop), "0 <= first <= end of what is mapped"),
        (~sparse & ((first != 0) | (stop != held)), "a dense row's device pages are all mapped"),
        (~long & (stop > held), "what is mapped is held"),
        # commit and trim leave the map behind; the next growing verb moves it on.
        (long & (stop > np.minimum(covered, first + 1)), "one page is mapped, of committed tokens"),
        (
            sparse & ~group.has_scratch.take(rows) & (group.scratch > 0),
            "a sparse row has its scratch pages",
        ),
    ):
        at = broken.nonzero()[0]
        if at.size:
            i = at[0]
            raise LawViolation(
                f"row {rows[i]} breaks '{law}': {held[i]} device pages, [{first[i]}, {stop[i]}) "
                f"of {pages[i]} pages mapped, buffer of {group.buffer}, C={covered[i]} pages, "
                f"{'sparse' if sparse[i] else 'dense'}"
            )


def check_sparse_map(ledger: Ledger, group: DevicePages, waiting: Int32, device: Device) -> None:
    """The map, as the device has it: 0 but for what the ledger says is resident.

    Pages in ``waiting``, of closed rows, keep their place until they come back.

    Raises:
        LawViolation: naming the entry and both values.
    """
    size = ledger.page_size
    found = device.read_map()
    beside = np.zeros(found.size // size, np.int32)
    for row in ledger.live().tolist():
        beside[ledger.page_list(row)] = group.mapped_pages(row)
    offsets = np.arange(size, dtype=np.int32)
    expected = np.where(beside[:, None] != 0, beside[:, None] * size + offsets, 0)
    expected[waiting] = found.reshape(-1, size)[waiting]
    compare_entries("logical_to_device[", found, expected.reshape(-1))
