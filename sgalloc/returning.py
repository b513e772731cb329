"""Give back: trim a request, release it, with or without leaving its pages in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.caching import PrefixCache, Prepared
from sgalloc.core import Core
from sgalloc.device.unwritten import refuse_unwritten
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS
from sgalloc.pages import WAITING, Int32
from sgalloc.prefix import Node

_OR_WAIT = ", or pass after= an event recorded behind the replay"


def trim(core: Core, rows: Int64, lengths: int | Int64, after: Any) -> None:
    """C = min(C, lengths); pages wholly past it go back.

    Raises:
        InsideSharedPage: it would end inside a page shared with the prefix cache.
        WrongState: a staged step has yet to write a page that would go back at once.
    """
    ledger = core.ledger
    before = ledger.committed.take(rows)
    committed = np.minimum(before, lengths)
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
    nodes = []
    if core.prefix is not None:
        for at in (keep < shared).nonzero()[0].tolist():
            nodes.append(core.prefix.shorten(int(rows[at]), int(keep[at])))
    owners, ids = ledger.page_range(rows, np.maximum(keep, shared), held)
    ledger.cut(rows, committed, keep)
    _give_back(core, ids, owners, NO_ROWS, nodes, event)


def release(core: Core, rows: Int64, prepared: list[Prepared], after: Any) -> None:
    """Close the requests of ``rows``; the pages of those ``prepared`` enter the prefix cache.

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
        return
    shared, held = ledger.shared.take(rows), ledger.page_counts(rows)
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
    ledger.close(rows, waiting=event is not None)
    _give_back(core, ids, owners, rows, nodes, event)


def _enter(
    prefix: PrefixCache, rows: Int64, prepared: list[Prepared], shared: Int64, held: Int64
) -> tuple[Int64, Int64, list[Node]]:
    """Put pages into the tree; what is between the two returned marks of a row stays there.

    Returns:
        Marks in pages, int64 ``(n,)`` each: a request's own pages below the first are
        duplicates of cached ones, those from the second on are not settled or not known;
        and the nodes that are new.
    """
    upto, resume = held.copy(), held.copy()
    place = {row: at for at, row in enumerate(rows.tolist())}
    entered = []
    prefix.tree.tick()
    for one in prepared:
        node, known = prefix.enter(one)
        at = place[one.row]
        upto[at] = max(known, shared[at])
        resume[at] = max(one.pages, shared[at])
        if node is not None and known < one.pages:
            entered.append(node)
    return upto, resume, entered


def _give_back(
    core: Core, ids: Int32, owners: Int64, rows: Int64, nodes: list[Node], event: Any
) -> None:
    if event is not None:
        if ids.size or rows.size or nodes:
            core.pool.hand_over(ids, owners, WAITING)
            core.quarantine.add(event, ids, rows, nodes)
        return
    core.pool.give(ids, owners)
    for node in nodes:
        assert core.tree is not None
        core.tree.unlock(node)
