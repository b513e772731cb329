"""Fill a fresh allocator with what a snapshot says, and write its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.core import Core
from sgalloc.device.ready import DONE
from sgalloc.device.write_log import note_call
from sgalloc.errors import SnapshotError
from sgalloc.groups import NO_PAGES
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.ledger import spread
from sgalloc.nodes import Node
from sgalloc.pages import CACHED, PINNED, Int32
from sgalloc.pins import Pin
from sgalloc.plan import Segments, SideWrite
from sgalloc.trust.checked import Checked
from sgalloc.trust.sections import LONG_FLAG, SCRATCH_FLAG, SPARSE_FLAG, nodes_of

# Pages of one write; a GPU stages each in pinned memory.
_PAGES_AT_ONCE = 1 << 17


def fill(core: Core, what: Checked) -> None:
    """Let the fresh ``core`` hold what a snapshot says; no table is written.

    Raises:
        SnapshotError: two runs of cached tokens begin alike.
    """
    s, ledger = what.sections, core.ledger
    rows = s["row.open"].astype(np.int64)
    ledger.restore(
        rows,
        s["row.free"].astype(np.int64),
        s["row.generation"].astype(np.int64),
        committed=s["row.committed"],
        allocated=s["row.allocated"],
        decode_steps=s["row.decode_steps"],
        shared=s["row.shared"],
        receiving=s["row.receiving"].astype(np.bool_),
    )
    for row, number in zip(rows.tolist(), s["row.namespace"].tolist(), strict=True):
        if number >= 0:
            ledger.namespace[row] = what.values[number]
    pages = ledger.page_counts(rows)
    ledger.note(spread(rows * ledger.per_row, pages), s["row.pages"])
    core.pool.restore(s["page.free"], what.high_water[0])
    _fill_side(core, rows, what)
    nodes = _fill_tree(core, rows, what)
    _fill_pins(core, what, nodes)
    _fill_holders(core, rows)


def _fill_tree(core: Core, rows: Int64, what: Checked) -> list[Node]:
    tree, prefix, s = core.tree, core.prefix, what.sections
    if tree is None or prefix is None:
        return []
    tree._clock, tree._seq = what.tree["clock"], what.tree["seq"]
    tree.evicted, tree.side_evicted = what.tree["evicted"], what.tree["side_evicted"]
    count = s["tree.count"]
    ends = count.cumsum(dtype=np.int64)
    pages, tokens = (
        _split(s["tree.pages"], ends),
        _split(s["tree.tokens"], ends * what.config.page_size),
    )
    sides = _split(s["tree.sides"], ends) if "tree.sides" in s else [None] * count.size
    nodes: list[Node] = []
    for at, (parent, name, last_use, seq) in enumerate(
        zip(
            *(s[f"tree.{key}"].tolist() for key in ("parent", "namespace", "last_use", "seq")),
            strict=True,
        )
    ):
        above = nodes[parent] if parent >= 0 else None
        if above is None:
            space = what.values[name] if name >= 0 else None
            above = tree._roots.get(space)
            if above is None:
                above = tree._roots[space] = Node(None, tokens[at][:0], pages[at][:0], None, 0, 0)
                above.name = space
        node = Node(above, tokens[at], pages[at], sides[at], last_use, seq)
        key = tree._key(node)
        if key in above.children:
            raise SnapshotError(f"cached page {node.pages[0]} begins as one beside it does")
        above.children[key] = node
        nodes.append(node)
        tree.cached += node.pages.size
        tree.side_cached += node.live
    tree.evictable, tree.side_evictable = tree.cached, tree.side_cached
    for row, at in zip(rows.tolist(), s["row.hold"].tolist(), strict=True):
        if at >= 0:
            prefix.holds[row] = nodes[at]
            tree.lock(nodes[at])
    for at in s["pin.hold"].tolist():
        if at >= 0:
            tree.lock(nodes[at])
    for node in nodes:
        tree._enqueue(node)
    return nodes


def _split(flat: NDArray[Any], ends: Int64) -> list[NDArray[Any]]:
    """Runs of ``flat`` up to each of ``ends``, copies."""
    parts, at = [], 0
    for end in ends.tolist():
        parts.append(flat[at:end].copy())
        at = end
    return parts


def _fill_pins(core: Core, what: Checked, nodes: list[Node]) -> None:
    s, ledger, side = what.sections, core.ledger, core.side
    n = s["pin.handle"].size
    acks = _split(s["pin.acks"], s["pin.ack_count"].cumsum())
    pages = _split(s["pin.pages"], s["pin.page_count"].cumsum())
    sides = [NO_PAGES] * n
    if side is not None:
        sides = _split(s["pin.sides"], s["pin.side_count"].cumsum())
    holds = s["pin.hold"].tolist() if "pin.hold" in s else [-1] * n
    names = ("handle", "length", "prefix", "writers", "deadline", "aborted")
    columns = (s[f"pin.{name}"].tolist() for name in names)
    for at, (handle, length, prefix, writers, deadline, aborted) in enumerate(
        zip(*columns, strict=True)
    ):
        row = ledger.row_of(handle)
        if not aborted:
            own = np.array([row], np.int64)
            pages[at] = ledger.owned_pages(own)[1]
            sides[at] = NO_PAGES if side is None else side.held(own)[1]
        core.pins.by_handle[handle] = Pin(
            handle,
            row,
            length,
            prefix,
            writers,
            what.values[deadline] if deadline >= 0 else None,
            pages[at],
            sides[at],
            DONE,
            set(acks[at].tolist()),
            bool(aborted),
            [nodes[holds[at]]] if holds[at] >= 0 else [],
        )


def _fill_side(core: Core, rows: Int64, what: Checked) -> None:
    s, side, ledger = what.sections, core.side, core.ledger
    if side is None:
        return
    side.pool.restore(s["side.free"], what.high_water[1])
    base = rows * ledger.per_row
    if isinstance(side, Window):
        first, stop = s["window.first"], s["window.stop"]
        side.restore(rows, first, stop)
        side.pages_flat[spread(base + first, stop - first)] = s["window.pages"]
    elif isinstance(side, DevicePages):
        flags = s["device.flags"]
        side.count[rows] = s["device.count"]
        side.first[rows] = s["device.first"]
        side.stop[rows] = s["device.stop"]
        for column, flag in (
            (side.sparse, SPARSE_FLAG),
            (side.is_long, LONG_FLAG),
            (side.has_scratch, SCRATCH_FLAG),
        ):
            column[rows] = (flags & flag) != 0
        side.pages_flat[spread(base, s["device.count"])] = s["device.pages"]
        having = rows[side.has_scratch.take(rows)]
        side.scratch_pages[having] = s["device.scratch"].reshape(having.size, side.scratch)


def _fill_holders(core: Core, rows: Int64) -> None:
    """Who has each page, from who holds it."""
    owners, ids = core.ledger.owned_pages(rows)
    groups: list[tuple[Any, Int64, Int32, Int32]] = [(core.pool, owners, ids, core.pins.page_ids())]
    if core.side is not None:
        groups.append((core.side.pool, *core.side.held(rows), core.pins.side_ids()))
    for pool, holders, held, pinned in groups:
        pool.holder[held] = np.where(core.ledger.receiving.take(holders), PINNED, holders)
        pool.holder[pinned] = PINNED
    for node in nodes_of(core.tree) if core.tree is not None else []:
        core.pool.holder[node.pages] = CACHED
        if core.side is not None and node.sides is not None:
            core.side.pool.holder[node.sides[node.sides != 0]] = CACHED
    for pool, *_ in groups:
        pool.pinned = int(np.count_nonzero(pool.holder == PINNED))


# -- tables ----------------------------------------------------------------------------------------


def write_tables(core: Core) -> Any:
    """Let the device write all that open rows and the cache hold into its fresh tables.

    Returns:
        An event that is done when all is written.
    """
    ledger, ready = core.ledger, DONE
    rows = ledger.live()
    for some in _chunks(rows, ledger.page_counts(rows)):
        counts = ledger.page_counts(some)
        none = np.zeros_like(some)
        runs = Segments(some, none, counts, int(counts.sum()), ledger.per_row)
        ids = ledger.page_range(some, none, counts)[1]
        side = _beside(core, some)
        ready = core.device.write(runs, ids, None, None, side)
        note_call(core.log, ledger.version, "restore", some.size, runs, ids, side)
    for write in _cached_beside(core):
        ready = core.device.write(None, None, None, None, write)
        note_call(core.log, ledger.version, "restore", 0, None, None, write)
    return ready


def _chunks(rows: Int64, counts: Int64) -> list[Int64]:
    """Those of ``rows`` that hold pages, in runs of so many pages, or of one row."""
    rows, counts = rows[counts > 0], counts[counts > 0]
    if not rows.size:
        return []
    number = (counts.cumsum() - 1) // _PAGES_AT_ONCE
    return np.split(rows, np.diff(number).nonzero()[0] + 1)


def _beside(core: Core, rows: Int64) -> SideWrite | None:
    """What ``rows`` show of the second group, and what they alone have in the map."""
    side, ledger = core.side, core.ledger
    if isinstance(side, Window):
        first, stop = side.first.take(rows), side.stop.take(rows)
        count = stop - first
        base = rows * ledger.per_row
        places = spread(base + first, count)
        mains = np.zeros(places.size, np.int32)
        if side.mapped:
            own = places - base.repeat(count) >= ledger.shared.take(rows).repeat(count)
            mains[own] = ledger.pages_flat.take(places[own])
        write = SideWrite(places, side.pages_flat.take(places), mains)
    elif isinstance(side, DevicePages):
        base = rows * ledger.per_row
        first, count = side.first.take(rows), side.stop.take(rows) - side.first.take(rows)
        places = spread(base + first, count)
        begin = np.where(side.is_long.take(rows), side.buffer, first)
        ids = side.pages_flat.take(spread(base + begin, count))
        write = SideWrite(places, ids, ledger.pages_flat.take(places))
    else:
        return None
    return write if write.ids.size else None


def _cached_beside(core: Core) -> list[SideWrite]:
    """What the map says of cached pages."""
    if core.tree is None or not isinstance(core.side, Window) or not core.side.mapped:
        return []
    writes = []
    for node in nodes_of(core.tree):
        if node.sides is not None and node.live:
            some = node.sides != 0
            writes.append((node.sides[some], node.pages[some]))
    if not writes:
        return []
    ids = np.concatenate([pair[0] for pair in writes])
    mains = np.concatenate([pair[1] for pair in writes])
    found = []
    for at in range(0, ids.size, _PAGES_AT_ONCE):
        some = slice(at, at + _PAGES_AT_ONCE)
        nowhere = np.full(ids[some].size, -1, np.int64)
        found.append(SideWrite(nowhere, ids[some], mains[some]))
    return found
