"""Make requests sparse: keep a buffer of their device pages, and give back the rest."""

from __future__ import annotations

from typing import Any

from sgalloc.core import Core
from sgalloc.device.unwritten import refuse_unwritten
from sgalloc.device.write_log import write_and_note
from sgalloc.errors import OutOfPages
from sgalloc.groups import NO_PAGES
from sgalloc.groups.sparse import DevicePages
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS
from sgalloc.quarantine import Returning


def to_sparse(core: Core, group: DevicePages, rows: Int64, after: Any) -> None:
    """Make ``rows`` sparse; what goes back waits for ``after``, and leaves the map at once.

    Raises:
        WrongState: one is sparse already, or has a staged step that no replay has applied.
        OutOfPages: the device group has too few pages for scratch, or for rows that have none.
    """
    event = core.quarantine.pending(after)
    if core.device.updates:
        width = core.ledger.row_pages
        refuse_unwritten(core.device, rows, 0, width, width, "")
    core.settle()
    if not rows.size:
        return
    thin, pool = group.thinning(rows), group.pool
    returning = thin.ids if event is None else NO_PAGES
    if thin.need - returning.size > pool.free:
        raise OutOfPages(pool.group, thin.need - returning.size, pool.free)
    ids = pool.peek(thin.need, returning)
    write = group.thin_write(thin, ids)
    if write is not None:
        # An event that no stream can wait for holds back the pages alone: the row's own reads
        # of what leaves the map are over once its KV is copied out.
        behind = None if event is None else core.device.waitable(after)
        write_and_note(
            core.device, core.ledger.version, "to_sparse", rows.size, None, None, behind, write
        )
    what = Returning(NO_PAGES, NO_ROWS, NO_ROWS, [], thin.ids, thin.owners)
    core.quarantine.give_back(what, event)
    pool.take(ids, group.thinners(thin))
    group.thinned(thin, ids)
    core.ledger.changed()
