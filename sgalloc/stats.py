"""What `KVAllocator.stats` returns: absolute numbers, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Pages of one group. ``total == free + quarantined + cached + pinned + owned``.

    Attributes:
        total: pages in the group.
        free: pages that can be handed out.
        quarantined: pages that wait for an event.
        cached: pages in the prefix cache, shared ones included.
        locked: those of the cached that an open request or an event holds.
        pinned: pages that a remote writer may still write.
        owned: pages that one open request owns.
        high_water: most pages that were ever out at once.
        evicted: pages evicted from the prefix cache so far.
    """

    total: int
    free: int
    quarantined: int
    cached: int
    locked: int
    pinned: int
    owned: int
    high_water: int
    evicted: int


@dataclass(frozen=True, slots=True)
class RowStats:
    """Rows. ``total == open + free + quarantined``."""

    total: int
    open: int
    free: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class StagingStats:
    """The ring of staging memory: slots, waits for a busy one, and times it grew."""

    slots: int = 0
    waits: int = 0
    grows: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the allocator.

    Attributes:
        groups: by name.
        rows: rows of the table.
        refusals: how often each error was raised, by the name of its class.
        committed: C of all open requests, tokens.
        allocated: A of all open requests, tokens; what exceeds ``committed`` is tail waste.
        staging: the staging ring; a CPU needs none.
    """

    groups: Mapping[str, GroupStats]
    rows: RowStats
    refusals: Mapping[str, int]
    committed: int
    allocated: int
    staging: StagingStats = field(default_factory=StagingStats)
