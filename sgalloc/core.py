"""The parts that the verbs work on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sgalloc.caching import PrefixCache
from sgalloc.device import Device
from sgalloc.device.write_log import WriteLog
from sgalloc.errors import AllocError, OutOfPages
from sgalloc.groups import Side
from sgalloc.groups.window import Window
from sgalloc.ledger import Ledger, concatenate
from sgalloc.nodes import Victim
from sgalloc.ownership import Owner
from sgalloc.pages import CACHED, Int32, PagePool
from sgalloc.pins import Pins
from sgalloc.plan import Plan
from sgalloc.prefix import RadixTree
from sgalloc.quarantine import Quarantine


class Core(NamedTuple):
    """One allocator's state: what is held, what is free, what is cached, where it is written."""

    ledger: Ledger
    pool: PagePool
    quarantine: Quarantine
    device: Device
    tree: RadixTree | None
    prefix: PrefixCache | None
    side: Side | None
    pins: Pins
    owner: Owner
    log: WriteLog
    note: Callable[[tuple[Any, ...]], None]

    @classmethod
    def build(
        cls,
        ledger: Ledger,
        pool: PagePool,
        device: Device,
        prefix_cache: bool,
        count: Callable[[AllocError], None],
        side: Side | None = None,
    ) -> Core:
        """The parts, wired up; ``count`` is told of refusals by the prefix cache."""
        tree = RadixTree(ledger.page_size) if prefix_cache else None
        quarantine = Quarantine(pool, ledger, tree, device, side)
        owner = Owner(on_gpu=device.name != "cpu")
        prefix = None
        if tree is not None:
            window = side if isinstance(side, Window) else None
            prefix = PrefixCache(tree, ledger, pool, device, quarantine, count, owner, window)
        log, pins = device.log, Pins()
        return cls(ledger, pool, quarantine, device, tree, prefix, side, pins, owner, log, log.note)

    @property
    def evictable(self) -> int:
        """Cached pages that no request holds."""
        return self.tree.evictable if self.tree is not None else 0

    @property
    def side_evictable(self) -> int:
        """Those of them that have a page of the second group."""
        return self.tree.side_evictable if self.tree is not None else 0

    def rooms(self, counting_cache: bool) -> dict[str, int]:
        """Pages that could be handed out now, per group."""
        rooms = {self.pool.group: self.pool.free}
        if self.side is not None:
            rooms[self.side.pool.group] = self.side.pool.free
        if counting_cache:
            rooms[self.pool.group] += self.evictable
            if self.side is not None:
                rooms[self.side.pool.group] += self.side_evictable
        return rooms

    def has_room(self, plan: Plan) -> bool:
        """Whether ``plan`` could be had now, cached pages evicted for it if need be."""
        total = 0 if plan.growth is None else plan.growth.total
        if total > self.pool.free + self.evictable:
            return False
        part, side = plan.side, self.side
        if part is None or side is None:
            return True
        return bool(part.need - part.gain <= side.pool.free + self.side_evictable)

    def settle(self) -> None:
        """Take in what waits behind events that are done."""
        if self.quarantine.entries:
            self.quarantine.settle()

    def victims(self, need: int, side_need: int = 0) -> list[Victim]:
        """Who leaves the prefix cache so that so many pages are free. Nothing changes.

        Args:
            need: pages of the main group.
            side_need: pages of the second group, net of what the step itself gives back.

        Raises:
            OutOfPages: not even the whole cache would be enough.
        """
        short = need - self.pool.free
        if short > self.evictable:
            raise OutOfPages(self.pool.group, need, self.pool.free, self.evictable)
        side_short = 0
        if self.side is not None:
            side_short = side_need - self.side.pool.free
            if side_short > self.side_evictable:
                pool = self.side.pool
                raise OutOfPages(pool.group, side_need, pool.free, self.side_evictable)
        if self.tree is None or (short <= 0 and side_short <= 0):
            return []
        return self.tree.victims(short, side_short)

    def evict(self, victims: list[Victim], pages: Int32) -> None:
        """Let ``victims``, whose ids are ``pages``, leave the prefix cache.

        Their pages of the second group stay with the caller, to be given back.
        """
        assert self.tree is not None
        self.tree.evict(victims)
        self.pool.give(pages, CACHED)


def pages_of(victims: list[Victim]) -> tuple[Int32, Int32]:
    """The page ids of ``victims``, int32, in the main group and in the second one."""
    return (
        concatenate([victim.pages for victim in victims], np.int32),
        concatenate([victim.sides for victim in victims], np.int32),
    )
