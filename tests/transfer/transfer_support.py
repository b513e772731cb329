"""What the tests of disaggregated serving share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from host_support import Query, cached, make, prompt

import sgalloc

PS = 4


class World(NamedTuple):
    """An allocator with a request in each state, and what a refused call could disturb."""

    alloc: sgalloc.KVAllocator
    live: int
    """Owns three pages, C = 9."""
    bare: int
    """Being received by two writers into three pages, the first of which has acknowledged."""
    shared: int
    """Being received behind a match of two pages into two more; reclaimed at 50."""
    aborted: int
    """Two pages that wait for a writer, or for 70."""
    gone: int
    """Aborted, and all of it came back."""
    match: sgalloc.Match
    """Three cached pages that nobody holds."""


def world() -> World:
    alloc = make(30, PS, max_requests=8, row_width=41, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    cached(alloc, prompt(3, PS, seed=1))
    (live,) = alloc.open()
    alloc.extend(live, 9)
    (bare,) = alloc.preallocate(10, writers=2)
    (shared,) = alloc.preallocate(15, prefix=alloc.prefix.match(prompt(2, PS)), deadline=50)
    (aborted,) = alloc.preallocate([7], deadline=70.0)
    (gone, waiting) = alloc.preallocate([3, 6])
    alloc.acknowledge(bare, 0)
    alloc.acknowledge(waiting, 0)
    alloc.release(waiting, after=Query())
    alloc.abort([aborted, gone])
    alloc.acknowledge(gone, 0)
    match = alloc.prefix.match(prompt(3, PS, seed=1))
    return World(alloc, *map(int, (live, bare, shared, aborted, gone)), match)


def pinned(alloc: sgalloc.KVAllocator) -> int:
    return alloc.stats().groups["full"].pinned


def private(alloc: sgalloc.KVAllocator, handle: int) -> np.ndarray:
    """The pages of a request that nobody shares, by id."""
    (row,) = alloc.rows(handle)
    (held,) = alloc.allocated(handle)
    return alloc.pages(handle, 0, int(held))[int(alloc._ledger.shared[row]) :]
