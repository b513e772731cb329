"""Allocators of two groups for the tests of disaggregated serving, and their maps."""

from __future__ import annotations

from typing import Any

import numpy as np
from host_support import open_handles

import sgalloc

Alloc = sgalloc.KVAllocator


def windowed(
    pages: int, ps: int, tokens: int, beside: int, rows: int = 8, cache: bool = False, **how: Any
) -> Alloc:
    """An allocator on the CPU with a window and its map."""
    window = sgalloc.SlidingWindow(tokens, beside, **{"slot_map": True, **how})
    return Alloc(pages, ps, rows, pages * ps, device="cpu", window=window, prefix_cache=cache)


def sparse(
    pages: int, ps: int, buffer: int, ratio: float = 4, scratch: int = 0, rows: int = 8
) -> Alloc:
    """A sparse allocator on the CPU; ``pages`` of the device."""
    settings = sgalloc.Sparse(ratio, buffer, scratch)
    return Alloc(pages, ps, rows, int(ratio * pages) * ps, device="cpu", sparse=settings)


def side_map(alloc: Alloc) -> Any:
    """The map of slots, whichever it is."""
    return alloc.full_to_window if alloc.has_window else alloc.logical_to_device


def links(alloc: Alloc) -> dict[int, int]:
    """From page to page of the second group, read from the map and nothing else."""
    if alloc._core.side is None or not alloc._core.side.mapped:
        return {}
    size = alloc.page_size
    table = np.asarray(side_map(alloc)).reshape(-1, size)
    found = {}
    for page in table.any(axis=1).nonzero()[0].tolist():
        first = int(table[page, -1]) // size
        assert table[page].tolist() == list(range(first * size, (first + 1) * size))
        found[page] = first
    return found


def granted(alloc: Alloc, handle: int) -> dict[int, int]:
    """The same for the pages of one request, as the ledger has it."""
    mains = alloc.pages(handle, 0, int(alloc.allocated(handle)[0])).tolist()
    ask = alloc.window_pages if alloc.has_window else alloc.device_pages
    return {page: side for page, side in zip(mains, ask(handle).tolist(), strict=True) if side}


def numbers(alloc: Alloc, name: str) -> dict[str, int]:
    """One number of each group's stats, by group."""
    return {group: getattr(found, name) for group, found in alloc.stats().groups.items()}


def assert_nothing_held(alloc: Alloc) -> None:
    """Every page of each group is free, every row is, and no slot is mapped."""
    stats = alloc.stats()
    for name, group in stats.groups.items():
        assert group.free == group.total == alloc.available(name), name
    assert (stats.rows.free, stats.rows.open, stats.rows.quarantined) == (
        alloc.max_requests, 0, 0,
    )  # fmt: skip
    assert not open_handles(alloc)
    if alloc._core.side is not None and alloc._core.side.mapped:
        assert not np.asarray(side_map(alloc)).any()
    alloc.check(device=True)
