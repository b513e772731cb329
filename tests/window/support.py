"""What the tests of the window group share: making one, and reading it from its tables alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from host_support import open_handles

import sgalloc


def make(
    num_pages: int,
    page_size: int,
    tokens: int,
    window_pages: int | None = None,
    max_requests: int = 8,
    row_width: int | None = None,
    prefix_cache: bool = False,
    slot_map: bool = True,
    evict_every: int = 1,
) -> sgalloc.KVAllocator:
    """An allocator on the CPU with a window; both groups alike unless told otherwise."""
    pages = num_pages if window_pages is None else window_pages
    width = num_pages * page_size if row_width is None else row_width
    return sgalloc.KVAllocator(
        num_pages,
        page_size,
        max_requests,
        width,
        device="cpu",
        window=sgalloc.SlidingWindow(tokens, pages, slot_map, evict_every),
        prefix_cache=prefix_cache,
    )


def extended(alloc: sgalloc.KVAllocator, length: int, **how: Any) -> int:
    (handle,) = alloc.open()
    alloc.extend(handle, length, **how)
    return int(handle)


def both(alloc: sgalloc.KVAllocator, counting_cache: bool = False) -> tuple[int, int]:
    """Pages that could be had in the full and in the window group."""
    return (
        alloc.available("full", counting_cache=counting_cache),
        alloc.available("window", counting_cache=counting_cache),
    )


def frontier(alloc: sgalloc.KVAllocator, handle: int) -> int:
    return int(alloc.frontier(handle)[0])


def shown(alloc: sgalloc.KVAllocator, handle: int) -> list[int]:
    """The window page of each page of a request, as its row of the table shows it, 0 for none."""
    (row,), (held,) = alloc.rows(handle), alloc.allocated(handle)
    return pages_in(alloc.window_table[row, :held], alloc.page_size)


def mapped(alloc: sgalloc.KVAllocator) -> dict[int, int]:
    """Pages of the full group and the window page that the map sends each to, where it does."""
    beside = pages_in(alloc.full_to_window, alloc.page_size)
    return {page: side for page, side in enumerate(beside) if side}


def pages_in(entries: np.ndarray, size: int) -> list[int]:
    """Page ids of whole pages of slots; every page has to be all zeros or in order."""
    found = []
    for run in entries.reshape(-1, size).tolist():
        page = run[0] // size
        assert run in ([page * size + offset for offset in range(size)], [0] * size), run
        found.append(page if run[0] or size > 1 else run[0])
    return found


def assert_window_laws(alloc: sgalloc.KVAllocator) -> None:
    """Table, map and pool agree, worked out from what the tables show; then the own check."""
    owned = []
    for handle in open_handles(alloc):
        pages, beside = (
            alloc.pages(handle, 0, int(alloc.allocated(handle)[0])),
            shown(alloc, handle),
        )
        first = frontier(alloc, handle) // alloc.page_size
        assert not any(beside[:first])
        links = mapped(alloc)
        shared = int(alloc._ledger.shared[alloc.rows(handle)[0]])
        for number in range(first, len(beside)):
            if beside[number]:
                assert links[int(pages[number])] == beside[number]
            if number >= shared and beside[number]:
                owned.append(beside[number])
    stats = alloc.stats().groups["window"]
    assert len(owned) == len(set(owned)) == stats.owned
    parts = (stats.free, stats.quarantined, stats.cached, stats.pinned, stats.owned)
    assert sum(parts) == stats.total
    alloc.check(device=True)


def assert_drained(alloc: sgalloc.KVAllocator) -> None:
    """Nothing is held in either group, and nothing is mapped."""
    for group in alloc.stats().groups.values():
        assert group.free == group.total
    assert alloc.stats().rows.open == 0
    assert not mapped(alloc)
    alloc.check(device=True)
