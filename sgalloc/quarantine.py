"""What waits behind an event before it can be handed out again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.events import is_done, pollable
from sgalloc.inputs import Int64
from sgalloc.ledger import Ledger
from sgalloc.pages import Int32, PagePool
from sgalloc.prefix import Node, RadixTree

if TYPE_CHECKING:
    from sgalloc.device import Device


class _Waiting(NamedTuple):
    event: Any
    pages: Int32
    rows: Int64
    nodes: list[Node]


class Quarantine:
    """Pages, rows and locks that come back once their event is done, in order of release.

    An event is anything with ``query()`` or ``done`` (a value or a method), polled and never
    waited for.
    """

    def __init__(
        self, pool: PagePool, ledger: Ledger, tree: RadixTree | None, device: Device
    ) -> None:
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
        return None if is_done(after) else after

    def add(self, event: Any, pages: Int32, rows: Int64, nodes: list[Node]) -> None:
        """Hold ``pages`` (in the pool's quarantine already), ``rows`` and locks at ``nodes``."""
        self.entries.append(_Waiting(event, pages, rows, nodes))

    def settle(self) -> None:
        """Take in all whose event is done; one that is not done holds nobody back.

        While a stream is captured nothing comes back, since polling would break the capture.
        """
        if self._device.capturing():
            return
        done = [is_done(entry.event) for entry in self.entries]
        if not any(done):
            return
        entries, self.entries = self.entries, []
        for entry, ready in zip(entries, done, strict=True):
            if not ready:
                self.entries.append(entry)
                continue
            self._pool.return_waiting(entry.pages)
            self._ledger.return_rows(entry.rows)
            for node in entry.nodes:
                assert self._tree is not None
                self._tree.unlock(node)

    def page_ids(self) -> Int32:
        """The pages that wait, int32."""
        parts = [entry.pages for entry in self.entries]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def row_ids(self) -> Int64:
        """The rows that wait, int64."""
        parts = [entry.rows for entry in self.entries]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
