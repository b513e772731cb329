"""All that decides what an allocator will do, taken down to be compared with what it is later."""

from __future__ import annotations

import numpy as np

from sgalloc.core import Core
from sgalloc.groups.window import Window
from sgalloc.ledger import concatenate
from sgalloc.trust.sections import Sections, gather, nodes_of


def frozen(core: Core) -> dict[str, bytes]:
    """What a refused call has to leave as it is, by name: what `digest` hashes, bytes for bytes."""
    found = gather(core, settled=False)
    if core.tree is not None:
        # Pages leave by last use, then by number of insertion: the order is all that decides.
        order = np.lexsort((found.pop("tree.seq"), found.pop("tree.last_use")))
        found["tree.order"] = order
        found["tree.locks"] = np.array([node.locks for node in nodes_of(core.tree)], np.int64)
    found |= _waiting(core) | _derived(core)
    return {name: array.tobytes() for name, array in found.items()}


def _waiting(core: Core) -> Sections:
    """What waits behind events, in order of release."""
    parts = [entry.what for entry in core.quarantine.entries]
    index = {}
    if parts and core.tree is not None:
        index = {node: at for at, node in enumerate(nodes_of(core.tree))}
    found: Sections = {}
    for name in ("ids", "rows", "side_ids", "unmapped"):
        columns = [getattr(what, name) for what in parts]
        found[f"wait.{name}"] = concatenate(columns, np.int64)
        found[f"wait.{name}.count"] = np.array([column.size for column in columns], np.int64)
    found["wait.nodes"] = np.array([index[n] for what in parts for n in what.nodes], np.int64)
    found["wait.nodes.count"] = np.array([len(what.nodes) for what in parts], np.int64)
    return found


def _derived(core: Core) -> Sections:
    """What follows from the rest as long as the laws hold, and decides besides."""
    ledger, tree, side = core.ledger, core.tree, core.side
    rows = ledger.live()
    pools = [core.pool] + ([side.pool] if side is not None else [])
    numbers = [ledger.waiting_rows, ledger.receiving_rows]
    for pool in pools:
        numbers += [pool.waiting, pool.pinned]
    if tree is not None:
        numbers += [tree.cached, tree.evictable, tree.side_cached, tree.side_evictable]
    found: Sections = {f"holder.{pool.group}": pool.holder for pool in pools}
    found["row.handle"] = ledger.handle.take(rows)
    if isinstance(side, Window):
        found["window.due"] = side.due.take(rows)
        found["window.cut"] = np.array(sorted(side.cut_rows), np.int64)
    pins = core.pins.by_handle.values()
    found["pin.row"] = np.array([pin.row for pin in pins], np.int64)
    live = [pin for pin in pins if not pin.aborted]
    found["pin.own"] = concatenate([pin.pages for pin in live], np.int32)
    found["pin.own_sides"] = concatenate([pin.sides for pin in live], np.int32)
    found["numbers"] = np.array(numbers, np.int64)
    return found
