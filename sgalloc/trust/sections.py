"""The state of an allocator as flat, named arrays: what snapshots store and digests hash."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.core import Core
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.ledger import concatenate, spread
from sgalloc.nodes import Node
from sgalloc.pins import Pin
from sgalloc.prefix import RadixTree

Sections = dict[str, NDArray[Any]]

NONE, INT, STR, BYTES, FLOAT = range(5)
SPARSE_FLAG, LONG_FLAG, SCRATCH_FLAG = 1, 2, 4
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


def layout(prefix_cache: bool, window: bool, sparse: bool) -> dict[str, str]:
    """The sections of a snapshot of such an allocator, in order, and their NumPy dtypes."""
    found = {
        "value.kind": "|u1",
        "value.size": "<i8",
        "value.bytes": "|u1",
        "row.generation": "<i4",
        "row.free": "<i4",
        "row.open": "<i4",
        "row.committed": "<i8",
        "row.allocated": "<i8",
        "row.decode_steps": "<i8",
        "row.shared": "<i8",
        "row.receiving": "|u1",
        "row.namespace": "<i4",
        "row.pages": "<i4",
        "page.free": "<i4",
        "pin.handle": "<i8",
        "pin.length": "<i8",
        "pin.prefix": "<i8",
        "pin.writers": "<i8",
        "pin.deadline": "<i4",
        "pin.aborted": "|u1",
        "pin.ack_count": "<i8",
        "pin.acks": "<i8",
        "pin.page_count": "<i8",
        "pin.pages": "<i4",
    }
    if prefix_cache:
        found |= {
            "tree.parent": "<i4",
            "tree.namespace": "<i4",
            "tree.count": "<i4",
            "tree.last_use": "<i8",
            "tree.seq": "<i8",
            "tree.pages": "<i4",
            "tree.tokens": "<i8",
            "row.hold": "<i4",
            "pin.hold": "<i4",
        }
        if window:
            found["tree.sides"] = "<i4"
    if window or sparse:
        found |= {"side.free": "<i4", "pin.side_count": "<i8", "pin.sides": "<i4"}
    if window:
        found |= {"window.first": "<i8", "window.stop": "<i8", "window.pages": "<i4"}
    if sparse:
        found |= {
            "device.count": "<i8",
            "device.first": "<i8",
            "device.stop": "<i8",
            "device.flags": "|u1",
            "device.pages": "<i4",
            "device.scratch": "<i4",
        }
    return found


class Values:
    """Namespaces and deadlines, each stored once and named by a number; -1 is None."""

    def __init__(self) -> None:
        self._number: dict[tuple[type, Any], int] = {}
        self._kinds: list[int] = []
        self._parts: list[bytes] = []

    def number(self, value: Any) -> int:
        """The number of ``value``: None, an int, a str, bytes or a float."""
        if value is None:
            return -1
        key = (type(value), value)
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self._kinds)
            kind, part = _encoded(value)
            self._kinds.append(kind)
            self._parts.append(part)
        return found

    def sections(self) -> Sections:
        """The three arrays that hold them."""
        return {
            "value.kind": np.array(self._kinds, np.uint8),
            "value.size": np.array([len(part) for part in self._parts], np.int64),
            "value.bytes": np.frombuffer(b"".join(self._parts), np.uint8),
        }


def _encoded(value: Any) -> tuple[int, bytes]:
    if isinstance(value, int):
        return INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, str):
        return STR, value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return BYTES, value
    return FLOAT, struct.pack("<d", value)


def decoded(kind: int, part: bytes) -> Any:
    """The value that `Values` stored so.

    Raises:
        ValueError: it stores no value so.
    """
    if kind == INT and part:
        return int.from_bytes(part, "little", signed=True)
    if kind == STR:
        return part.decode("utf-8", "surrogatepass")
    if kind == BYTES:
        return part
    if kind == FLOAT and len(part) == 8:
        number = float(struct.unpack("<d", part)[0])
        if number == number:
            return number
    raise ValueError(f"kind {kind} of {len(part)} bytes is no value")


def gather(core: Core, settled: bool) -> Sections:
    """The state of ``core`` as arrays; nothing changes.

    Args:
        core: the allocator's parts.
        settled: whether what waits in quarantine counts as come back, in order of release.
    """
    values = Values()
    rows = core.ledger.live()
    nodes = nodes_of(core.tree) if core.tree is not None else []
    index = {node: at for at, node in enumerate(nodes)}
    found = _rows(core, rows, values, settled)
    found |= _pins(list(core.pins.by_handle.values()), values)
    if core.tree is not None and core.prefix is not None:
        found |= _tree(nodes, index, values)
        holds = core.prefix.holds
        held = [index[holds[row]] if row in holds else -1 for row in rows.tolist()]
        found["row.hold"] = np.array(held, np.int32)
        # A row holds one path, so an abort hands over one lock at most.
        held = [index[pin.nodes[0]] if pin.nodes else -1 for pin in core.pins.by_handle.values()]
        found["pin.hold"] = np.array(held, np.int32)
    side = core.side
    if side is not None:
        waiting = [entry.what.side_ids for entry in core.quarantine.entries] if settled else []
        found["side.free"] = _pushed(side.pool.free_ids(), waiting)
        sides = [pin.sides if pin.aborted else _NO_IDS for pin in core.pins.by_handle.values()]
        found["pin.side_count"] = _sizes(sides)
        found["pin.sides"] = concatenate(sides, np.int32)
    if isinstance(side, Window):
        if nodes:
            found["tree.sides"] = concatenate(
                [node.sides for node in nodes if node.sides is not None], np.int32
            )
        elif core.tree is not None:
            found["tree.sides"] = _NO_IDS
        first, stop = side.first.take(rows), side.stop.take(rows)
        where = spread(rows * core.ledger.per_row + first, stop - first)
        found |= {
            "window.first": first,
            "window.stop": stop,
            "window.pages": side.pages_flat.take(where),
        }
    elif isinstance(side, DevicePages):
        found |= _device_pages(side, rows, core.ledger.per_row)
    return found | values.sections()


def nodes_of(tree: RadixTree) -> list[Node]:
    """Every node but the roots, level by level, siblings in order of insertion."""
    found = [child for root in tree._roots.values() for child in root.children.values()]
    for node in found:  # which grows on the way
        found.extend(node.children.values())
    return found


def _rows(core: Core, rows: Int64, values: Values, settled: bool) -> Sections:
    ledger, entries = core.ledger, core.quarantine.entries if settled else []
    _, pages = ledger.page_range(rows, np.zeros_like(rows), ledger.page_counts(rows))
    names = [values.number(ledger.namespace.get(row)) for row in rows.tolist()]
    return {
        "row.generation": ledger.generations(),
        "row.free": _pushed(ledger.free_row_ids(), [entry.what.rows for entry in entries]),
        "row.open": rows,
        "row.committed": ledger.committed.take(rows),
        "row.allocated": ledger.allocated.take(rows),
        "row.decode_steps": ledger.decode_steps.take(rows),
        "row.shared": ledger.shared.take(rows),
        "row.receiving": ledger.receiving.take(rows),
        "row.namespace": np.array(names, np.int32),
        "row.pages": pages,
        "page.free": _pushed(core.pool.free_ids(), [entry.what.ids for entry in entries]),
    }


def _pushed(stack: NDArray[Any], coming: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """A stack of ids once each of ``coming`` was given back."""
    return np.concatenate([stack, *(ids[::-1] for ids in coming)]) if coming else stack


def _pins(pins: list[Pin], values: Values) -> Sections:
    acks = [sorted(pin.acked) for pin in pins]
    # The pages of the others stand in the ledger.
    pages = [pin.pages if pin.aborted else _NO_IDS for pin in pins]
    return {
        "pin.handle": np.array([pin.handle for pin in pins], np.int64),
        "pin.length": np.array([pin.length for pin in pins], np.int64),
        "pin.prefix": np.array([pin.prefix for pin in pins], np.int64),
        "pin.writers": np.array([pin.writers for pin in pins], np.int64),
        "pin.deadline": np.array([values.number(pin.deadline) for pin in pins], np.int32),
        "pin.aborted": np.array([pin.aborted for pin in pins], np.uint8),
        "pin.ack_count": np.array([len(some) for some in acks], np.int64),
        "pin.acks": np.array([writer for some in acks for writer in some], np.int64),
        "pin.page_count": _sizes(pages),
        "pin.pages": concatenate(pages, np.int32),
    }


def _tree(nodes: list[Node], index: dict[Node, int], values: Values) -> Sections:
    parents, names = [], []
    for node in nodes:
        assert node.parent is not None
        at = index.get(node.parent, -1)
        parents.append(at)
        names.append(values.number(node.parent.name) if at < 0 else -1)
    return {
        "tree.parent": np.array(parents, np.int32),
        "tree.namespace": np.array(names, np.int32),
        "tree.count": np.array([node.pages.size for node in nodes], np.int32),
        "tree.last_use": np.array([node.last_use for node in nodes], np.int64),
        "tree.seq": np.array([node.seq for node in nodes], np.int64),
        "tree.pages": concatenate([node.pages for node in nodes], np.int32),
        "tree.tokens": concatenate([node.tokens for node in nodes], np.int64),
    }


def _device_pages(group: DevicePages, rows: Int64, per_row: Int64) -> Sections:
    count, scratch = group.count.take(rows), group.has_scratch.take(rows)
    flags = group.sparse.take(rows) * SPARSE_FLAG + group.is_long.take(rows) * LONG_FLAG
    return {
        "device.count": count,
        "device.first": group.first.take(rows),
        "device.stop": group.stop.take(rows),
        "device.flags": flags + scratch * SCRATCH_FLAG,
        "device.pages": group.pages_flat.take(spread(rows * per_row, count)),
        "device.scratch": group.scratch_pages.take(rows[scratch], axis=0).reshape(-1),
    }


def _sizes(parts: Sequence[NDArray[Any]]) -> Int64:
    return np.array([part.size for part in parts], np.int64)
