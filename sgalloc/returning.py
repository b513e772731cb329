"""Give back: trim a request, release it, with or without leaving its pages in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.caching import PrefixCache, Prepared
from sgalloc.core import Core
from sgalloc.device.unwritten import refuse_unwritten
from sgalloc.device.write_log import write_and_note
from sgalloc.groups import NO_PAGES
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS
from sgalloc.nodes import Node
from sgalloc.pages import Int32
from sgalloc.quarantine import Returning

_OR_WAIT = ", or pass after= an event recorded behind the replay"


def trim(
    core: Core, rows: Int64, lengths: int | Int64, after: Any, committing: bool = False
) -> None:
    """C = min(C, lengths), or ``committing`` to lengths; pages wholly past it go back.

    Raises:
        InsideSharedPage: it would end inside a page shared with the prefix cache.
        WrongState: a staged step has yet to write a page that would go back at once.
    """
    ledger = core.ledger
    before = ledger.committed.take(rows)
    committed = np.asarray(lengths) if committing else np.minimum(before, lengths)
    keep = -(-committed // ledger.page_size)
    if core.prefix is not None:
        core.prefix.check_trim(rows, committed)
    event = core.quarantine.pending(after)
    if core.device.updates and event is None:
        upto = ledger.page_counts(rows)
        refuse_unwritten(core.device, rows, keep, upto, ledger.row_pages, _OR_WAIT)
    core.settle()
    held, shared = ledger.page_counts(rows), ledger.shared.take(rows)
    if not np.count_nonzero((committed != before) | (keep != held)):
        return
    owners, ids = ledger.page_range(rows, np.maximum(keep, shared), held)
    what = Returning(ids, owners, NO_ROWS, [])
    side, cut = core.side, None
    if side is not None:
        cut = side.cutting(rows, committed, keep)
        unmapped = _mapped(core, rows, np.maximum(keep, shared), held, ids)
        what = what._replace(side_ids=cut.ids, side_owners=cut.owners, unmapped=unmapped)
        core.quarantine.unmap(unmapped, event)
    nodes = []
    if core.prefix is not None:
        for at in (keep < shared).nonzero()[0].tolist():
            nodes.append(core.prefix.shorten(int(rows[at]), int(keep[at])))
    ledger.cut(rows, committed, keep)
    if side is not None and cut is not None:
        side.cut(rows, cut)
    core.quarantine.give_back(what._replace(nodes=nodes), event)


def release(
    core: Core, rows: Int64, prepared: list[Prepared], after: Any, unmapped: Int32 = NO_PAGES
) -> None:
    """Close the requests of ``rows``; the pages of those ``prepared`` enter the prefix cache.

    Args:
        core: the allocator's parts.
        rows: int64 ``(n,)``.
        prepared: of `PrefixCache.prepare`.
        after: an event that all of it waits for, or None.
        unmapped: pages that leave the map with it, since the caller gives them back then, int32.

    Raises:
        WrongState: a staged step has yet to write a page of a row that would go back at once.
    """
    ledger = core.ledger
    event = core.quarantine.pending(after)
    if core.device.updates and event is None:
        width = ledger.row_pages
        refuse_unwritten(core.device, rows, 0, width, width, _OR_WAIT)
    core.settle()
    if not rows.size:
        core.quarantine.unmap(unmapped)
        return
    side = core.side
    shared, held = ledger.shared.take(rows), ledger.page_counts(rows)
    if side is not None and side.mapped:
        leaving = _mapped(core, rows, shared, held, ledger.page_range(rows, shared, held)[1])
        shown = None
        if prepared:
            assert core.prefix is not None
            shown, entering = core.prefix.entering(prepared)
            leaving = leaving[~np.isin(leaving, entering)]
        gone = unmapped if event is not None else np.concatenate((unmapped, leaving))
        core.quarantine.unmap(gone, None, shown)
    nodes = core.prefix.drop(rows) if core.prefix is not None else []
    if prepared:
        assert core.prefix is not None
        upto, resume, entered = _enter(core.prefix, rows, prepared, shared, held)
        owners, ids = ledger.page_range(rows, shared, upto)
        more_owners, more_ids = ledger.page_range(rows, resume, held)
        owners = np.concatenate((owners, more_owners))
        ids = np.concatenate((ids, more_ids))
        if event is not None:
            for node in entered:
                core.prefix.tree.lock(node)
            nodes += entered
    else:
        owners, ids = ledger.page_range(rows, shared, held)
    what = Returning(ids, owners, rows, nodes)
    if side is not None:
        beside, side_ids = side.held(rows)
        # What entered the prefix cache is no longer the row's.
        still = side.pool.holder.take(side_ids) == beside
        what = what._replace(
            side_ids=side_ids[still],
            side_owners=beside[still],
            unmapped=_mapped(core, rows, shared, held, ids),
        )
        side.close(rows)
    ledger.close(rows, waiting=event is not None)
    core.quarantine.give_back(what, event)


def evict_window(
    core: Core,
    window: Window,
    rows: Int64,
    committed: Int64,
    upto: Int64 | None,
    after: Any,
) -> None:
    """Move the frontiers of ``rows``, and give back what is below them."""
    event = core.quarantine.pending(after)
    part = window.moving(rows, committed, upto)
    if core.device.updates and not part.idle:
        width = core.ledger.row_pages
        refuse_unwritten(core.device, part.rows, part.first, part.leave, width, "")
    core.settle()
    if part.idle:
        return
    owners, ids = window.gained(part)
    # What has left the window is not read, so an event that no stream can wait for holds back
    # the pages alone.
    behind = None if event is None else core.device.waitable(after)
    write = window.write(part, NO_PAGES)
    write_and_note(
        core.device, core.ledger.version, "evict_window", part.rows.size, None, None, behind, write
    )
    window.applied(part, NO_PAGES)
    core.ledger.changed()
    what = Returning(NO_PAGES, NO_ROWS, NO_ROWS, [], ids, owners)
    core.quarantine.give_back(what, event)


def _mapped(core: Core, rows: Int64, first: Int64, stop: Int64, ids: Int32) -> Int32:
    """Those of ``ids``, the pages ``[first, stop)`` of ``rows``, that the map may name."""
    side = core.side
    if isinstance(side, DevicePages):
        low = np.maximum(first, side.first.take(rows))
        high = np.minimum(stop, side.stop.take(rows))
        return core.ledger.page_range(rows, low, np.maximum(low, high))[1]
    return ids if side is not None and side.mapped else NO_PAGES


def _enter(
    prefix: PrefixCache, rows: Int64, prepared: list[Prepared], shared: Int64, held: Int64
) -> tuple[Int64, Int64, list[Node]]:
    """Put pages into the tree; what is between the two returned marks of a row stays there.

    Returns:
        Marks in pages, int64 ``(n,)`` each: a request's own pages below the first are
        duplicates of cached ones, those from the second on are not settled or not known;
        and the nodes that are new, or took over a page of the second group.
    """
    upto, resume = held.copy(), held.copy()
    place = {row: at for at, row in enumerate(rows.tolist())}
    entered = []
    prefix.tree.tick()
    for one in prepared:
        node, known, took = prefix.enter(one)
        at = place[one.row]
        upto[at] = max(known, shared[at])
        resume[at] = max(one.pages, shared[at])
        if node is not None and (known < one.pages or took):
            entered.append(node)
    return upto, resume, entered
