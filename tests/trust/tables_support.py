"""Allocators of every kind, on a CPU and on the stand-in for CUDA, with tables to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from stand_in_cuda import stand_in

import sgalloc

DEVICES = ("cpu", "cuda")


@contextmanager
def opened(device: str) -> Iterator[Any]:
    """Let ``device`` be there; what is yielded is the state of the stand-in, or None."""
    with stand_in() if device == "cuda" else nullcontext() as state:
        yield state


class World(NamedTuple):
    """An allocator with some requests, none of which has all that a row can hold.

    Attributes:
        alloc: the allocator.
        handles: its open requests.
    """

    alloc: sgalloc.KVAllocator
    handles: list[int]

    @property
    def tables(self) -> dict[str, Any]:
        """What it keeps on the device, by the name that messages have for it."""
        device = self.alloc._core.device
        sparse = isinstance(self.alloc._core.side, sgalloc.groups.sparse.DevicePages)
        found = {
            "req_to_token": device.table,
            "window_table": device.side_table,
            "page_table": device.page_table,
            "logical_to_device" if sparse else "full_to_window": device.side_map,
        }
        return {name: table for name, table in found.items() if table is not None}


def plain(device: str, ps: int = 4) -> World:
    """Requests of several lengths, and rows that end in a piece of a page."""
    alloc = sgalloc.KVAllocator(60, ps, 6, 9 * ps + ps // 2, device=device, page_table=True)
    handles = alloc.open(4).tolist()
    alloc.extend(handles[:3], [5 * ps, 1, 3 * ps - 1])
    alloc.reserve(handles[1:3], 2 * ps)
    alloc.release(alloc.open())
    return World(alloc, handles)


def windowed(device: str, ps: int = 4) -> World:
    """Frontiers that moved, a shared prefix, and a map."""
    alloc = sgalloc.KVAllocator(
        60, ps, 6, 12 * ps + 1, device=device, prefix_cache=True, page_table=True,
        window=sgalloc.SlidingWindow(2 * ps, 50, slot_map=True),
    )  # fmt: skip
    ids = np.arange(6 * ps)
    first, gone = alloc.open(2).tolist()
    alloc.extend(gone, 6 * ps)
    alloc.release(gone, tokens=[ids])
    (shares,) = alloc.open_with_prefix(alloc.prefix.match(ids)).tolist()
    alloc.extend([first, shares], [9 * ps, 7 * ps + 1])
    alloc.evict_window([first, shares])
    return World(alloc, [first, shares])


def sparse(device: str, ps: int = 4) -> World:
    """A dense request, one with a buffer that is full, and one whose buffer is not."""
    alloc = sgalloc.KVAllocator(
        40, ps, 6, 12 * ps, device=device, sparse=sgalloc.Sparse(2, 3 * ps, ps)
    )
    handles = alloc.open(3).tolist()
    alloc.extend(handles, [5 * ps, 8 * ps, ps + 1])
    alloc.to_sparse(handles[1:])
    alloc.decode(handles[1:])
    return World(alloc, handles)


WORLDS: dict[str, Callable[..., World]] = {"plain": plain, "windowed": windowed, "sparse": sparse}


def entries_under_law(world: World) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each entry of each table that the ledger says something of: its table, and its place."""
    alloc, core = world.alloc, world.alloc._core
    size, ledger = alloc.page_size, alloc._ledger
    for name, table in world.tables.items():
        if table.ndim == 1:
            away = {*core.quarantine.page_ids().tolist(), *core.pins.page_ids().tolist()}
            yield from ((name, (at,)) for at in range(table.size) if at // size not in away)
            continue
        yield from ((name, (0, at)) for at in range(table.shape[1]))
        for row, held in zip(ledger.live().tolist(), alloc.allocated(world.handles), strict=True):
            assert ledger.handle[row] in world.handles
            extent = int(held)
            if name == "page_table":
                extent //= size
            elif name == "window_table":
                extent = int(core.side.stop[row]) * size  # type: ignore[union-attr]
            yield from ((name, (row, at)) for at in range(extent))
