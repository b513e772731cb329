"""Preallocate for remote writers, hear of them, and take back what they leave unfinished."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from sgalloc import growing, returning
from sgalloc.caching import Prepared
from sgalloc.core import Core
from sgalloc.device import Device
from sgalloc.errors import OutOfPages, RowTooNarrow, StaleHandle, StalePlan, WrongState
from sgalloc.groups import NO_PAGES
from sgalloc.inputs import Int64, int64_array
from sgalloc.ledger import Batch, concatenate
from sgalloc.nodes import Node
from sgalloc.pages import Int32
from sgalloc.pins import Pin
from sgalloc.plan import Plan
from sgalloc.prefix import Match
from sgalloc.quarantine import Returning


class _Both:
    """An event that is done once two others are."""

    def __init__(self, device: Device, first: Any, second: Any) -> None:
        self._device, self._first, self._second = device, first, second

    def query(self) -> bool:
        """Whether both are done."""
        return self._device.done(self._first) and self._device.done(self._second)


def preallocate(
    core: Core,
    lengths: Int64,
    writers: Int64,
    prefix: Sequence[Match | None],
    deadlines: Sequence[int | float | None],
    tail: int | Int64 | None = None,
    main_only: bool = False,
) -> Int64:
    """Rows and pinned pages for requests that remote writers fill; their handles, int64.

    Args:
        core: the allocator's parts.
        lengths: tokens of each, its prefix match included, int64 ``(n,)``.
        writers: how many have to acknowledge each, int64 ``(n,)``.
        prefix: the match that each begins with, or None.
        deadlines: when each may be taken back, or None.
        tail: the last tokens alone that get pages of the second group; None for all.
        main_only: whether the main group alone grows.

    Raises:
        ValueError: a length below its match, or a match of another allocator.
        StalePlan: a page of a match was evicted.
        RowTooNarrow, OutOfRows, OutOfPages: they do not all fit.
        WrongState: a stream is being captured.
    """
    ledger, pool, size = core.ledger, core.pool, core.ledger.page_size
    nodes = _match_nodes(core, prefix, lengths)
    if core.device.capturing():
        raise WrongState(
            "a stream is being captured, and a remote writer cannot wait for a graph that is "
            "replayed later: preallocate outside of the capture"
        )
    core.settle()
    _check_evicted(prefix)
    pages = -(-lengths // size)
    widest = int(pages.argmax())
    if pages[widest] > ledger.row_pages:
        raise RowTooNarrow(0, int(pages[widest]) * size, ledger.row_width)
    ledger.next_rows(lengths.size)
    matched = np.array([0 if match is None else match.pages.size for match in prefix], np.int64)
    need = int((pages - matched).sum())
    locked, beside = unlocked_pages(nodes)
    if need > pool.free + core.evictable - locked:
        raise OutOfPages(pool.group, need, pool.free, core.evictable - locked)
    side = core.side
    if side is not None:
        side_need = side.need_for(lengths, matched, tail, main_only)
        cached = core.side_evictable - beside
        if side_need > side.pool.free + cached:
            raise OutOfPages(side.pool.group, side_need, side.pool.free, cached)
    version, uses = ledger.version, None
    if any(match is not None for match in prefix):
        assert core.tree is not None and core.prefix is not None
        uses = core.tree.uses(nodes)
        none = Match(core.tree, None, 0, NO_PAGES, None)
        handles = core.prefix.open_with([none if match is None else match for match in prefix])
    else:
        handles = ledger.open(lengths.size)
    rows, start, cur = ledger.holding(handles)
    plan = Plan(ledger, rows, start, cur, lengths)
    try:
        if side is not None:
            plan.attach(side.receiving(plan, tail, main_only))
        growing.apply(core, plan, None, None)
    except BaseException:
        # It fits, so the device has failed; nothing was evicted or taken yet.
        if uses is not None and core.prefix is not None:
            core.prefix.unopen(rows, uses)
        if side is not None:
            side.close(rows)
        ledger.unopen(rows, version)
        raise
    _pin(core, handles, plan, writers, deadlines)
    return handles


def acknowledge(core: Core, handle: int, writer: int) -> bool:
    """Count that ``writer`` will not write to ``handle`` any more; whether it counted."""
    pin = core.pins.by_handle.get(handle)
    if pin is None or not 0 <= writer < pin.writers or writer in pin.acked:
        return False
    if len(pin.acked) + 1 < pin.writers:
        pin.acked.add(writer)
        return True
    # What polls events, which may raise, comes before any change.
    core.settle()
    event = core.quarantine.pending(pin.event)
    if pin.aborted:
        core.quarantine.unmap(_leaving(core, [pin], [event]))
    pin.acked.add(writer)
    if pin.aborted:
        _take_back(core, pin, event)
    else:
        del core.pins.by_handle[handle]
        core.pool.unpin(pin.pages, pin.row)
        if core.side is not None:
            core.side.pool.unpin(pin.sides, pin.row)
        core.ledger.received(pin.row, pin.length)
    return True


def abort(core: Core, x: Any, force: bool, after: Any) -> None:
    """End requests in any state; those that are unknown or gone are left alone.

    Args:
        core: the allocator's parts.
        x: a batch, handles or a handle.
        force: whether to take back what is pinned at once.
        after: an event that all of it waits for besides, or None.
    """
    if isinstance(x, Batch):
        with suppress(StaleHandle):  # an abort may meet what went away
            x.rows_in(core.ledger)
        x = x.handles
    named = list(dict.fromkeys(int64_array(x, "handles").tolist()))
    event = core.quarantine.pending(after)
    ledger, pins = core.ledger, core.pins.by_handle
    live = [ledger.row_of(h) for h in named if ledger.is_open(h)]
    gone = [pins[h] for h in named if h in pins and pins[h].aborted] if force else []
    if not live and not gone:
        return
    events = [_joined(core, core.quarantine.pending(pin.event), event) for pin in gone]
    leaving = _leaving(core, gone, events)
    release(core, np.array(live, np.int64), [], event, force, leaving)
    for pin, waits_for in zip(gone, events, strict=True):
        _take_back(core, pin, waits_for)


def release(
    core: Core,
    rows: Int64,
    prepared: list[Prepared],
    after: Any,
    force: bool = False,
    unmapped: Int32 = NO_PAGES,
) -> None:
    """`returning.release`; those of ``rows`` that are still being received are aborted."""
    ledger = core.ledger
    if not ledger.receiving_rows:
        returning.release(core, rows, prepared, after, unmapped)
        return
    receiving = ledger.receiving.take(rows)
    aborted = rows[receiving].tolist()
    keep = [one for one in prepared if not ledger.receiving[one.row]]
    event = core.quarantine.pending(after)
    pins = [core.pins.by_handle[int(ledger.handle[row])] for row in aborted]
    if force:
        leaving = _leaving(core, pins, [event] * len(pins))
        unmapped = np.concatenate((unmapped, leaving))
    returning.release(core, rows[~receiving], keep, event, unmapped)
    _abort(core, pins, force, event)


def reclaim(core: Core, now: int | float) -> Int64:
    """Take back every request whose deadline has passed; their handles, int64."""
    due = [pin for pin in core.pins.by_handle.values() if pin.due(now)]
    if due:
        core.settle()
        events = [core.quarantine.pending(pin.event) for pin in due]
        core.quarantine.unmap(_leaving(core, due, events))
        _abort(core, [pin for pin in due if not pin.aborted], False, None)
        for pin, event in zip(due, events, strict=True):
            _take_back(core, pin, event)
    return np.array([pin.handle for pin in due], np.int64)


def unlocked_pages(nodes: Sequence[Node], seen: set[Node] | None = None) -> tuple[int, int]:
    """Cached pages on the paths to ``nodes`` that nobody holds: locking these takes them away.

    Args:
        nodes: where the paths end.
        seen: nodes that are counted already; those counted now join them.

    Returns:
        Those of the main group, and of the second one.
    """
    counted = set() if seen is None else seen
    pages = sides = 0
    for node in nodes:
        step = node
        while step.parent is not None and step not in counted:
            counted.add(step)
            if not step.locks:
                pages += step.pages.size
                sides += step.live
            step = step.parent
    return pages, sides


# -- inside --------------------------------------------------------------------------------


def _match_nodes(core: Core, prefix: Sequence[Match | None], lengths: Int64) -> list[Node]:
    """The nodes in which the matches end, if all of them can be what the lengths begin with."""
    nodes = []
    for at, match in enumerate(prefix):
        if match is None:
            continue
        if core.tree is None:
            raise ValueError(
                "this allocator has no prefix cache, so no match is its own: make it with "
                "prefix_cache=True"
            )
        node = match.node_in(core.tree)
        if lengths[at] < match.length:
            raise ValueError(
                f"lengths[{at}]={lengths[at]} is below the {match.length} tokens of its prefix "
                "match: pass the length of the whole request"
            )
        if node is not None:
            nodes.append(node)
    return nodes


def _check_evicted(prefix: Sequence[Match | None]) -> None:
    for match in prefix:
        if match is not None and match.evicted:
            raise StalePlan(
                f"a page of this match of {match.length} tokens was evicted since: match again"
            )


def _pin(
    core: Core,
    handles: Int64,
    plan: Plan,
    writers: Int64,
    deadlines: Sequence[int | float | None],
) -> None:
    ledger, rows = core.ledger, plan.rows
    owners, ids = ledger.owned_pages(rows)
    core.pool.pin(ids, owners)
    ledger.receive(rows)
    ends = (ledger.page_counts(rows) - ledger.shared.take(rows)).cumsum()
    pages = np.split(ids, ends[:-1])
    sides = [NO_PAGES] * rows.size
    if core.side is not None:
        beside, side_ids = core.side.held(rows)
        core.side.pool.pin(side_ids, beside)
        sides = [side_ids[beside == row] for row in rows.tolist()]
    for at, handle in enumerate(handles.tolist()):
        core.pins.by_handle[handle] = Pin(
            handle,
            int(rows[at]),
            int(plan.stop[at]),
            int(plan.start[at]),
            int(writers[at]),
            deadlines[at],
            pages[at],
            sides[at],
            plan.ready,
        )


def _abort(core: Core, pins: list[Pin], force: bool, event: Any) -> None:
    """Close the rows of ``pins``; what is pinned stays so until its writers are done."""
    if not pins:
        return
    for pin in pins:
        row = np.array([pin.row], np.int64)
        pin.nodes = core.prefix.drop(row) if core.prefix is not None else []
        pin.aborted = True
        pin.event = event
    rows = np.array([pin.row for pin in pins], np.int64)
    if core.side is not None:
        core.side.close(rows)
    core.ledger.close(rows, waiting=True)
    if force:
        for pin in pins:
            _take_back(core, pin, event)


def _leaving(core: Core, pins: Sequence[Pin], events: Sequence[Any]) -> Int32:
    """The pages of ``pins`` that leave the map now, since they wait for nothing, int32."""
    if core.side is None or not core.side.mapped:
        return NO_PAGES
    pages = [pin.pages for pin, event in zip(pins, events, strict=True) if event is None]
    return concatenate(pages, np.int32)


def _joined(core: Core, first: Any, second: Any) -> Any:
    """An event that is done once both are; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    return _Both(core.device, first, second)


def _take_back(core: Core, pin: Pin, event: Any) -> None:
    """Free pages, row and locks of an aborted request, or let them wait behind ``event``.

    The caller has taken them out of the map, if they wait for nothing: that can fail.
    """
    row = np.array([pin.row], np.int64)
    side = core.side
    unmapped = pin.pages if side is not None and side.mapped else NO_PAGES
    del core.pins.by_handle[pin.handle]
    core.ledger.changed()
    core.pool.unpin(pin.pages, pin.row)
    if side is not None:
        side.pool.unpin(pin.sides, pin.row)
    what = Returning(
        pin.pages,
        np.full(pin.pages.size, pin.row, np.int64),
        row,
        pin.nodes,
        pin.sides,
        np.full(pin.sides.size, pin.row, np.int64),
        unmapped,
    )
    core.quarantine.give_back(what, event)
    if event is None:
        core.ledger.return_rows(row)
