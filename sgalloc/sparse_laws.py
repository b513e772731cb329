"""The laws of the device group: what rows hold of it, and the map."""

from __future__ import annotations

import numpy as np

from sgalloc.errors import LawViolation
from sgalloc.groups.sparse import DevicePages
from sgalloc.ledger import Ledger, spread
from sgalloc.pages import Int32


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


def device_pages_of(ledger: Ledger, group: DevicePages, main_pages: int) -> Int32:
    """What the map should say: the device page of each logical page, 0 where none is mapped.

    Returns:
        int32 ``(main_pages + 1,)``.
    """
    beside = np.zeros(main_pages + 1, np.int32)
    rows = ledger.live()
    first, stop = group.first.take(rows), group.stop.take(rows)
    base, count = rows * ledger.per_row, stop - first
    # Of a long row only the page behind the buffer is mapped, whatever the number.
    begin = np.where(group.is_long.take(rows), group.buffer, first)
    ids = group.pages_flat.take(spread(base + begin, count))
    beside[ledger.pages_flat.take(spread(base + first, count))] = ids
    return beside
