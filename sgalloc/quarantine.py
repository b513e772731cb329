"""What waits behind an event before it can be handed out again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.device.write_log import unmap_and_note
from sgalloc.events import pollable
from sgalloc.groups import NO_PAGES, Side, clearing, joined
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS, Ledger, concatenate
from sgalloc.nodes import Node
from sgalloc.pages import WAITING, Int32, PagePool
from sgalloc.plan import SideWrite
from sgalloc.prefix import RadixTree

if TYPE_CHECKING:
    from sgalloc.device import Device


class Returning(NamedTuple):
    """What goes back together.

    Attributes:
        ids: pages of the main group, int32.
        owners: who holds each, int64.
        rows: closed rows, int64.
        nodes: locked nodes of the prefix cache, to be unlocked.
        side_ids, side_owners: as the first two, in the second group.
        unmapped: pages of the main group whose slots leave the map, int32.
    """

    ids: Int32
    owners: Int64
    rows: Int64
    nodes: list[Node]
    side_ids: Int32 = NO_PAGES
    side_owners: Int64 = NO_ROWS
    unmapped: Int32 = NO_PAGES

    @property
    def empty(self) -> bool:
        """Whether nothing goes back."""
        return not (self.ids.size or self.rows.size or self.nodes or self.side_ids.size)


class _Waiting(NamedTuple):
    event: Any
    what: Returning


class Quarantine:
    """Pages, rows and locks that come back once their event is done, in order of release.

    An event is anything with ``query()`` or ``done`` (a value or a method), polled and never
    waited for.
    """

    def __init__(
        self,
        pool: PagePool,
        ledger: Ledger,
        tree: RadixTree | None,
        device: Device,
        side: Side | None = None,
    ) -> None:
        self._side = side
        self._device = device
        self._pool = pool
        self._ledger = ledger
        self._tree = tree
        self.entries: list[_Waiting] = []

    def pending(self, after: Any) -> Any:
        """``after``, or None where there is nothing to wait for.

        Raises:
            TypeError: it cannot be polled.
        """
        if after is None:
            return None
        after = self._device.event(after)
        if self._device.capturing():
            return pollable(after)
        return None if self._device.done(after) else after

    def unmap(self, pages: Int32, event: Any = None, beside: SideWrite | None = None) -> None:
        """Clear the map for ``pages`` that go back at once, before anything else is changed.

        Args:
            pages: ids of the main group, int32.
            event: what they wait for; then they keep their entries until it is done.
            beside: entries that are written with the same launch, so that both are or neither.
        """
        write = beside
        if event is None and pages.size:
            write = joined(beside, clearing(pages))
        if write is not None:
            unmap_and_note(self._device, self._ledger.version, "giving back", write)

    def give_back(self, what: Returning, event: Any) -> None:
        """Free ``what``, which `unmap` was told of, now, or once ``event`` is done."""
        if what.empty:
            return
        if event is None:
            self._pool.give(what.ids, what.owners)
            if self._side is not None:
                self._side.pool.give(what.side_ids, what.side_owners)
            self._unlock(what.nodes)
            return
        self._pool.hand_over(what.ids, what.owners, WAITING)
        if self._side is not None:
            self._side.pool.hand_over(what.side_ids, what.side_owners, WAITING)
        self.entries.append(_Waiting(event, what))

    def settle(self) -> None:
        """Take in all whose event is done; one that is not done holds nobody back.

        While a stream is captured nothing comes back, since polling would break the capture.
        """
        if self._device.capturing():
            return
        done = [self._device.done(entry.event) for entry in self.entries]
        if not any(done):
            return
        coming = [entry.what for entry, ready in zip(self.entries, done, strict=True) if ready]
        unmapped = [what.unmapped for what in coming if what.unmapped.size]
        if unmapped:
            write = clearing(np.concatenate(unmapped))
            unmap_and_note(self._device, self._ledger.version, "settling", write)
        self.entries = [entry for entry, ready in zip(self.entries, done, strict=True) if not ready]
        for what in coming:
            self._pool.return_waiting(what.ids)
            if self._side is not None:
                self._side.pool.return_waiting(what.side_ids)
            self._ledger.return_rows(what.rows)
            self._unlock(what.nodes)

    def page_ids(self) -> Int32:
        """The pages of the main group that wait, int32."""
        return concatenate([entry.what.ids for entry in self.entries], np.int32)

    def side_ids(self) -> Int32:
        """The pages of the second group that wait, int32."""
        return concatenate([entry.what.side_ids for entry in self.entries], np.int32)

    def row_ids(self) -> Int64:
        """The rows that wait, int64."""
        return concatenate([entry.what.rows for entry in self.entries], np.int64)

    def nodes(self) -> list[Node]:
        """The nodes of the prefix cache that wait, locked."""
        return [node for entry in self.entries for node in entry.what.nodes]

    def _unlock(self, nodes: list[Node]) -> None:
        for node in nodes:
            assert self._tree is not None
            self._tree.unlock(node)
