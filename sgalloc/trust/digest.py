"""One number for all that decides what an allocator will do, to compare with another's."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.core import Core
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.ledger import spread
from sgalloc.nodes import Node
from sgalloc.pages import Int32, PagePool
from sgalloc.pins import Pin
from sgalloc.quarantine import Returning
from sgalloc.trust.cached import Cached, named
from sgalloc.trust.following import follow_ledger, follow_pool, follow_side, follow_tree
from sgalloc.trust.sums import Holders, Lists, Rows, Stack, Table, hashes, salt, word

_BYTES = 16
_ROWS = (
    "handle",
    "shared",
    "committed",
    "allocated",
    "decode_steps",
    "receiving",
    "_generation",
)
_SHARING = 2  # of these; where they change, what a row holds of the cache may, too
_SIDES: dict[type, tuple[str, ...]] = {
    Window: ("first", "stop", "due"),
    DevicePages: ("count", "first", "stop", "sparse", "is_long", "has_scratch"),
}
_SIDE, _SCRATCH = salt("side.pages"), salt("side.scratch")


def digest(core: Core) -> str:
    """Hash ids, lengths, rows and the cache: 32 hexadecimal digits.

    Counters (high water, refusals, evicted pages, the clock of the cache) are left out: of the
    cache's uses their order counts. So are events; what waits behind one is told apart from what
    is free.
    """
    return Tally(core, keeps=False).value()


class Tally:
    """The digest of one allocator, as sums over what it holds.

    Each sum is modulo 2**64, over a hash of every entry with its place, so that what changed can be
    taken out and put in again. Small arrays are looked at whole.

    Args:
        core: the allocator's parts.
        keeps: whether to follow it from now on, so that a later `value` costs what changed since.
            Its parts then tell of what they change; what is written past them is not seen.
    """

    def __init__(self, core: Core, keeps: bool) -> None:
        self._core = core
        ledger, side = core.ledger, core.side
        rows = ledger.max_requests + 1
        pools = [core.pool] if side is None else [core.pool, side.pool]
        self._keeps = keeps
        self._lists = Lists("row.pages", ledger.pages_flat, rows, ledger.per_row, keeps)
        self._names, self._holds = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        names = _SIDES.get(type(side), ())
        self._columns = [getattr(ledger, name) for name in _ROWS]
        self._columns += [getattr(side, name) for name in names]
        self._table, self._named = Table("rows", keeps), Table("names", keeps)
        self._pools = [_Pool(pool, keeps) for pool in pools]
        self._side, self._scratch = Rows(rows), Rows(rows)
        self._side_rows = np.zeros(rows, np.bool_)
        self._side_rows[ledger.live()] = True
        self._cached = None if core.tree is None else Cached(core.tree, ledger.page_size)
        self._pins: dict[int, tuple[Any, int]] = {}
        self._waiting: dict[int, tuple[Returning, int]] = {}
        if keeps:
            self._follow()

    def value(self) -> str:
        """The digest now, 32 hexadecimal digits."""
        core, ledger = self._core, self._core.ledger
        if self._cached is not None:
            self._cached.refresh()
        self._refresh_rows()
        for pool in self._pools:
            pool.refresh()
        self._refresh_side()
        parts: list[Any] = [("rows", self._lists.sum, self._table.sum, self._named.sum)]
        parts += [(pool.pool.group, pool.said()) for pool in self._pools]
        parts += [("side", self._side.sum, self._scratch.sum)]
        parts += [("pins", self._of_pins()), ("waits", self._of_waits())]
        shape = (ledger.max_requests, ledger.row_width, ledger.page_size, ledger.group)
        parts += [("ledger", shape, ledger.free_rows, ledger.waiting_rows, ledger.receiving_rows)]
        if core.tree is not None and self._cached is not None:
            tree = core.tree
            counts = (tree.cached, tree.evictable, tree.side_cached, tree.side_evictable)
            parts += [("tree", self._cached.sum, counts)]
        side = core.side
        if isinstance(side, Window):
            settings = (side.tokens, side.lag, side.mapped)
            parts += [("window", settings, sorted(side.cut_rows))]
        elif isinstance(side, DevicePages):
            parts += [("device", side.buffer, side.scratch)]
        return hashlib.blake2b(repr(parts).encode(), digest_size=_BYTES).hexdigest()

    def _follow(self) -> None:
        core = self._core
        follow_ledger(core.ledger, self._lists.low)
        for pool in self._pools:
            follow_pool(pool.pool, pool)
        if core.side is not None:
            follow_side(core.side, self._side_rows)
        if core.tree is not None and self._cached is not None:
            follow_tree(core.tree, self._cached.note)

    # -- what is kept up ---------------------------------------------------------------------

    def _refresh_rows(self) -> None:
        core, ledger = self._core, self._core.ledger
        rows = self._names.size
        free = np.zeros(rows, np.int64)
        free[: ledger.free_rows] = ledger.free_row_ids()
        changed = self._table.refresh(np.concatenate((*self._columns, free), dtype=np.int64))
        # A request keeps its namespace, and what it holds follows from the pages it shares.
        changed = changed[changed < _SHARING * rows] % rows
        cut = self._lists.refresh(ledger.allocated // ledger.per_page)
        names = ledger.namespace or self._names.any()
        if names or core.prefix is not None:
            holds = {} if core.prefix is None else core.prefix.holds
            for row in set(changed.tolist()).union(cut.tolist()):
                self._names[row] = _signed(named(ledger.namespace.get(row)))
                node = holds.get(row)
                self._holds[row] = 0 if node is None else _signed(self._path(node) | 1)
            self._named.refresh(np.concatenate((self._names, self._holds)))

    def _refresh_side(self) -> None:
        side, per_row = self._core.side, self._core.ledger.per_row
        rows = self._side_rows.nonzero()[0]
        if side is None or not rows.size:
            return
        self._side_rows[:] = False
        if isinstance(side, Window):
            first, stop = side.first.take(rows), side.stop.take(rows)
            count = np.maximum(stop - first, 0)
            where = spread(rows * per_row + first, count)
            self._side.put(rows, count, hashes(_SIDE, where, side.pages_flat.take(where)))
        elif isinstance(side, DevicePages):
            count = side.count.take(rows)
            where = spread(rows * per_row, count)
            self._side.put(rows, count, hashes(_SIDE, where, side.pages_flat.take(where)))
            count = side.has_scratch.take(rows) * side.scratch
            where = spread(rows * side.scratch, count)
            ids = side.scratch_pages.reshape(-1).take(where)
            self._scratch.put(rows, count, hashes(_SCRATCH, where, ids))

    def _of_pins(self) -> int:
        """Who is received, in order."""
        found: dict[int, tuple[Any, int]] = {}
        for pin in self._core.pins.by_handle.values():
            now = (pin, len(pin.acked), pin.aborted, len(pin.nodes))
            known = self._pins.get(pin.handle)
            fresh = known is None or not self._keeps or known[0] != now
            found[pin.handle] = (now, self._pin(pin)) if fresh or known is None else known
        self._pins = found
        return word(repr([hashed for _, hashed in found.values()]).encode())

    def _pin(self, pin: Pin) -> int:
        parts = (pin.handle, pin.row, pin.length, pin.prefix, pin.writers, named(pin.deadline))
        more = (sorted(pin.acked), pin.aborted, [self._path(node) for node in pin.nodes])
        return _word((parts, more), pin.pages, pin.sides)

    def _of_waits(self) -> int:
        """What waits behind events, in order of release."""
        found: dict[int, tuple[Returning, int]] = {}
        for entry in self._core.quarantine.entries:
            known = self._waiting.get(id(entry.what))
            found[id(entry.what)] = known or (entry.what, self._wait(entry.what))
        self._waiting = found
        return word(repr([hashed for _, hashed in found.values()]).encode())

    def _wait(self, what: Returning) -> int:
        paths = [self._path(node) for node in what.nodes]
        return _word(paths, what.ids, what.rows, what.side_ids, what.unmapped)

    def _path(self, node: Node) -> int:
        assert self._cached is not None
        return self._cached.path(node)


def _word(parts: Any, *arrays: NDArray[Any]) -> int:
    """A hash of ``parts``, as they are written, and of whole numbers."""
    found = [repr((parts, [array.size for array in arrays])).encode()]
    found += [np.ascontiguousarray(array, "<i8").tobytes() for array in arrays]
    return word(b"".join(found))


def _signed(number: int) -> int:
    """64 bits as int64 has them."""
    return number - (number >> 63 << 64)


class _Pool:
    """The sums of one pool: the stack of free ids, and who holds each page."""

    def __init__(self, pool: PagePool, keeps: bool) -> None:
        self.pool = pool
        self._stack = Stack(f"{pool.group} free", pool._stack, keeps)
        self._holders = Holders(f"{pool.group} holders", pool.holder, keeps)
        # Ids that changed hands since the last refresh; None for all of them.
        self._moved: list[Int64] | None = None
        self._count = 0

    def taken(self, ids: Int32) -> None:
        """See `Moves`."""
        self._stack.low = min(self._stack.low, self.pool.free)
        self.moved(ids)

    def moved(self, ids: Int32) -> None:
        """See `Moves`."""
        if self._moved is None:
            return
        self._moved.append(ids.astype(np.int64))  # a copy: it may be part of a list that changes
        self._count += ids.size
        if self._count > self.pool.num_pages:
            self._moved = None

    def refresh(self) -> None:
        """Take in what changed."""
        self._stack.refresh(self.pool.free)
        if self._moved is None:
            self._holders.refresh(None)
        elif self._moved:
            self._holders.refresh(np.concatenate(self._moved))
        self._moved, self._count = [], 0

    def said(self) -> tuple[int, ...]:
        """All that is compared of it."""
        pool = self.pool
        counts = (pool.num_pages, pool.free, pool.waiting, pool.pinned)
        return (self._stack.sum, self._holders.sum, *counts)
