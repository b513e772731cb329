"""What the tests of sparse allocators share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from host_support import assert_row_law, fingerprint, open_handles

import sgalloc

SIZES = (1, 2, 3, 16, 64)


def make(
    size: int,
    device_pages: int = 20,
    buffer: int | None = None,
    scratch: int = 0,
    ratio: float = 4,
    rows: int = 8,
    **more: Any,
) -> sgalloc.KVAllocator:
    """A sparse allocator on the CPU, by default with a buffer of three pages."""
    buffer = 3 * size if buffer is None else buffer
    width = int(ratio * device_pages) * size
    settings = sgalloc.Sparse(ratio, buffer, scratch)
    return sgalloc.KVAllocator(
        device_pages, size, rows, width, device="cpu", sparse=settings, **more
    )


def opened(alloc: sgalloc.KVAllocator, length: int, **how: Any) -> int:
    """One request of so many tokens."""
    (handle,) = alloc.open().tolist()
    alloc.extend(handle, length, **how)
    return handle


def rooms(alloc: sgalloc.KVAllocator) -> tuple[int, int]:
    """Free logical pages, and free device pages."""
    return alloc.available("logical"), alloc.available("device")


def logical(alloc: sgalloc.KVAllocator, handle: int) -> list[int]:
    """Logical page ids of a request, up to A."""
    return alloc.pages(handle, 0, int(alloc.allocated(handle)[0])).tolist()


def mapped(alloc: sgalloc.KVAllocator, handle: int) -> dict[int, int]:
    """Device page by number of the logical page, read from the device's map and nothing else."""
    size = alloc.page_size
    table = np.asarray(alloc.logical_to_device).reshape(-1, size)
    found = {}
    for number, page in enumerate(logical(alloc, handle)):
        entries = table[page].tolist()
        if any(entries):
            first = entries[0]
            assert first % size == 0 and entries == list(range(first, first + size))
            found[number] = first // size
    return found


def sparse_state(alloc: sgalloc.KVAllocator) -> tuple[Any, ...]:
    """`fingerprint`, and what each request holds of the device."""
    handles = open_handles(alloc)
    group: Any = alloc._core.side
    columns = (group.count, group.first, group.stop, group.sparse, group.has_scratch)
    lists = [
        ask(handle).tolist()
        for handle in handles
        for ask in (alloc.device_pages, alloc.buffer_pages, alloc.scratch_pages)
    ]
    return fingerprint(alloc), lists, [column.tolist() for column in columns]


@contextmanager
def untouched(alloc: sgalloc.KVAllocator) -> Iterator[None]:
    """Whatever happens inside leaves every part of the state alone."""
    before = sparse_state(alloc)
    yield
    assert sparse_state(alloc) == before


def assert_whole(alloc: sgalloc.KVAllocator) -> None:
    """All laws, worked out here from the ids of every place, and by the allocator's own check."""
    handles = open_handles(alloc)
    core: Any = alloc._core
    assert_row_law(alloc, handles)
    pages = Counter(core.pool.free_ids().tolist() + core.quarantine.page_ids().tolist())
    device = Counter(core.side.pool.free_ids().tolist() + core.quarantine.side_ids().tolist())
    table = np.array(alloc.logical_to_device).reshape(-1, alloc.page_size)
    for handle in handles:
        own = logical(alloc, handle)
        pages.update(own)
        shown = mapped(alloc, handle)
        told = alloc.device_pages(handle).tolist()
        assert {number: page for number, page in enumerate(told) if page} == shown
        named = {*shown.values(), *alloc.buffer_pages(handle).tolist()}
        held = core.side.held(alloc.rows(handle).astype(np.int64))[1].tolist()
        scratch = alloc.scratch_pages(handle).tolist()
        device.update(held)
        assert named.isdisjoint(scratch) and {*named, *scratch} <= set(held)
        # The page of a newest token that was trimmed stays, and waits to be mapped again.
        assert len(held) - len(named) - len(scratch) <= (not shown)
        table[own] = 0
    table[core.quarantine.page_ids()] = 0
    assert not table.any(), "an entry of the map names a page that nobody has"
    assert pages == Counter(range(1, core.pool.num_pages + 1))
    assert device == Counter(range(1, core.side.pool.num_pages + 1))
    alloc.check(device=True)


def assert_drained(alloc: sgalloc.KVAllocator) -> None:
    """Both groups are full, every row is free, and the map is zeros."""
    stats = alloc.stats()
    for name, group in stats.groups.items():
        assert group.free == group.total == alloc.available(name)
        assert group.owned == group.quarantined == 0
    assert (stats.rows.free, stats.rows.open) == (alloc.max_requests, 0)
    assert not np.asarray(alloc.logical_to_device).any()
    alloc.check(device=True)
