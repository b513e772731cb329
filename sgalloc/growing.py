"""Apply a plan: evict, allocate, write the table, and tell the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.core import Core, pages_of
from sgalloc.device import Writer
from sgalloc.device.write_log import ALONG, LISTED, Along
from sgalloc.errors import DeviceFailed
from sgalloc.groups import NO_PAGES, clearing, joined
from sgalloc.inputs import Int64
from sgalloc.pages import CACHED, Int32
from sgalloc.plan import Gather, Plan, Segments, SideWrite

_LOOKED_AT_FIRST = 64


def apply(core: Core, plan: Plan, out: Any, after: Any, writer: Writer | None = None) -> None:
    """Do what ``plan`` says. Whatever can fail comes before the first change of host state.

    Args:
        core: the allocator's parts.
        plan: what to do.
        out: receives the slots of the new tokens, or None.
        after: an event that the write waits for, or None.
        writer: who writes the table in the device's place.

    Raises:
        OutOfPages: it does not fit, and nothing was evicted.
    """
    ledger, pool = core.ledger, core.pool
    device: Writer = core.device if writer is None else writer
    gather = None
    if out is not None:
        size = int((plan.stop - plan.start).sum())
        target = core.device.checked_out(out, size)
        gather = Gather(plan.rows, plan.start, plan.stop, size, target, plan.growing)
    growth, part = plan.growth, plan.side
    committing, decoding = plan.committing, plan.decoding
    try:
        if part is not None and not (growth is None and part.idle):
            _apply_both(core, plan, gather, after, device)
        elif growth is None:
            plan.ready = device.write(None, None, gather, after)
        else:
            victims, leaving = [], None
            total = growth.total
            if total > pool.free:
                victims = core.victims(total)
                leaving = np.concatenate([victim.pages for victim in victims])
            ids = pool.peek(total, leaving)
            plan.ready = device.write(growth, ids, gather, after)
            core.note((plan.version, plan.rows, committing, decoding, ids, None))
            if total > LISTED:
                core.log.noted_much()
            if leaving is not None:
                core.evict(victims, leaving)
            pool.take(ids, growth.page_rows())
            ledger.grow(growth.rows, growth.where, ids, plan.extents)
    except DeviceFailed as failure:
        failure.of_plan(plan.version)
        raise
    if committing is not None:
        ledger.commit_to(committing, plan.stop[: committing.size])
    if decoding is not None:
        ledger.step(decoding)
    plan.fits = True


def _apply_both(core: Core, plan: Plan, gather: Gather | None, after: Any, device: Writer) -> None:
    """Grow in both groups, or in neither."""
    ledger, pool, side, part = core.ledger, core.pool, core.side, plan.side
    assert side is not None
    growth = plan.growth
    total = 0 if growth is None else growth.total
    victims = core.victims(total, part.need - part.gain)
    owners, returning = side.gained(part)
    leaving = NO_PAGES
    if victims:
        leaving, leaving_sides = pages_of(victims)
        returning = np.concatenate((returning, leaving_sides))
        owners = np.concatenate((owners, np.full(leaving_sides.size, CACHED, np.int64)))
    ids = pool.peek(total, leaving)
    side_ids = side.pool.peek(part.need, returning)
    if growth is not None:
        ledger.note(growth.where, ids)
    write = side.write(part, side_ids)
    if victims and side.mapped:
        # Cached pages that are handed out again at once get their entries in the map anyway.
        gone = leaving[ids.size :] if ids.size < leaving.size else NO_PAGES
        write = joined(write, clearing(gone)) if gone.size else write
    plan.ready = device.write(growth, ids if total else None, gather, after, write)
    if growth is not None or write is not None:
        noted: SideWrite | Along | None = write
        if growth is not None and write is not None and write.places is growth.where:
            noted = ALONG  # which says it all, and holds no arrays
        core.note((plan.version, plan.rows, plan.committing, plan.decoding, ids, noted))
        if total > LISTED or (write is not None and write.ids.size > LISTED):
            core.log.noted_much()
    if victims:
        core.evict(victims, leaving)
    if returning.size:
        side.pool.give(returning, owners)
    if side_ids.size:
        side.pool.take(side_ids, side.takers(part))
    side.applied(part, side_ids)
    if growth is not None:
        pool.take(ids, growth.page_rows())
        ledger.grow(growth.rows, growth.where, ids, plan.extents)
    elif write is not None:
        # A frontier may have moved over shared pages alone: that ages plans, too.
        ledger.changed()


class Written:
    """Stands in for a device that has written a plan already, behind the event ``ready``."""

    def __init__(self, ready: Any) -> None:
        self._ready = ready

    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Any:
        """Nothing is left to write."""
        return self._ready


def round_on_device(
    core: Core, rows: Int64, start: Int64, cur: Int64, reserve: Int64, after: Any
) -> Written | None:
    """Let the device round a reserve before the host counts it, if a bound proves that it fits.

    Args:
        core: the allocator's parts.
        rows: int64 ``(n,)``.
        start: C, int64 ``(n,)``.
        cur: A, int64 ``(n,)``.
        reserve: tokens past C, int64, one for all or ``(n,)``.
        after: an event that the write waits for, or None.

    Returns:
        None where the host has to count first, or nothing is needed.
    """
    device, pool, ledger = core.device, core.pool, core.ledger
    if core.side is not None or not _grows(start, cur, reserve):
        return None
    n = rows.size
    most = int(reserve.max())
    if most > ledger.row_width:
        return None
    # A request holds the pages of C, so it needs no more than a reserve from a page edge would.
    bound = n * -(-most // ledger.page_size)
    reach = -(-(int(start[start.argmax()]) + most) // ledger.page_size)
    if bound > pool.free or reach > ledger.row_pages:
        return None
    ready = device.write_watermarks(rows, start, cur, reserve, pool.head(bound), after)
    return None if ready is None else Written(ready)


def _grows(start: Int64, cur: Int64, reserve: Int64) -> bool:
    """Whether any request needs a page."""
    # In a steady step some request at the front does, so the rest is rarely looked at.
    front = slice(_LOOKED_AT_FIRST)
    ahead = reserve[front] if reserve.ndim else reserve
    if (start[front] + ahead > cur[front]).any():
        return True
    return start.size > _LOOKED_AT_FIRST and bool((start + reserve > cur).any())
