"""The parts that the verbs work on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgalloc.caching import PrefixCache
from sgalloc.device import Device
from sgalloc.errors import AllocError
from sgalloc.ledger import Ledger
from sgalloc.pages import CACHED, Int32, PagePool
from sgalloc.pins import Pins
from sgalloc.prefix import RadixTree, Victim
from sgalloc.quarantine import Quarantine


class Core(NamedTuple):
    """One allocator's state: what is held, what is free, what is cached, where it is written."""

    ledger: Ledger
    pool: PagePool
    quarantine: Quarantine
    device: Device
    tree: RadixTree | None
    prefix: PrefixCache | None
    pins: Pins

    @classmethod
    def build(
        cls,
        ledger: Ledger,
        pool: PagePool,
        device: Device,
        prefix_cache: bool,
        count: Callable[[AllocError], None],
    ) -> Core:
        """The parts, wired up; ``count`` is told of refusals by the prefix cache."""
        tree = RadixTree(ledger.page_size) if prefix_cache else None
        quarantine = Quarantine(pool, ledger, tree, device)
        prefix = None
        if tree is not None:
            prefix = PrefixCache(tree, ledger, pool, device, quarantine, count)
        return cls(ledger, pool, quarantine, device, tree, prefix, Pins())

    @property
    def evictable(self) -> int:
        """Cached pages that no request holds."""
        return self.tree.evictable if self.tree is not None else 0

    def settle(self) -> None:
        """Take in what waits behind events that are done."""
        if self.quarantine.entries:
            self.quarantine.settle()

    def evict(self, victims: list[Victim], pages: Int32) -> None:
        """Let ``victims``, whose ids are ``pages``, leave the prefix cache."""
        assert self.tree is not None
        self.tree.evict(victims)
        self.pool.give(pages, CACHED)
