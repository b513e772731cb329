"""D11: tables of more than 2**31 entries, and slots up to 2**31 - 1.

Whole tables are never read back: rows are compared one by one, and the device compares the rest.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.naive import exported, gathered, row_entries
from gpu.twins import host

import sgalloc

ROWS, WIDTH = 4100, 524_320  # 2,149,712,000 entries, 8.0 GiB
LAST = ROWS - 1
SPARE_BYTES = 4 << 30


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def make(num_pages: int, ps: int, **how: Any) -> sgalloc.KVAllocator:
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    pages = WIDTH // ps if how.get("page_table") else 0
    needed = 4 * ROWS * (WIDTH + pages) + SPARE_BYTES
    free, _ = runtime.memGetInfo()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    return sgalloc.KVAllocator(num_pages, ps, LAST, WIDTH, device="cuda", **how)


def open_rows(alloc: sgalloc.KVAllocator, rows: list[int]) -> list[int]:
    """Requests on exactly these rows; all other rows stay free."""
    handles = alloc.open(LAST)
    found = dict(zip(alloc.rows(handles).tolist(), handles.tolist(), strict=True))
    kept = [found[row] for row in rows]
    alloc.release([handle for row, handle in found.items() if row not in rows])
    return kept


def assert_row(alloc: sgalloc.KVAllocator, handle: int) -> None:
    """The row of ``handle`` is law up to A, and zero behind it."""
    row, held = int(alloc.rows(handle)[0]), int(alloc.allocated(handle)[0])
    entries = host(alloc.req_to_token[row])
    expected = row_entries(alloc.pages(handle, 0, held), alloc.page_size, 0, held)
    wrong = (entries[:held] != expected).nonzero()[0]
    assert not wrong.size, f"row {row} is wrong from column {wrong[0]} on"
    assert not entries[held:].any(), f"row {row} was written behind A={held}"


def assert_rest_is_zero(alloc: sgalloc.KVAllocator, rows: list[int]) -> None:
    """No other row was written; compared on the device, a block of rows at a time."""
    table = alloc.req_to_token
    edges = sorted({0, *rows, *(row + 1 for row in rows), ROWS})
    for first, stop in pairwise(edges):
        if first in rows:
            continue
        for at in range(first, stop, 512):
            assert not bool(table[at : min(at + 512, stop)].any()), f"rows {at} and on"


@pytest.mark.parametrize("ps", [1, 16])
def test_d11_a_table_of_more_entries_than_int32_counts(ps: int) -> None:
    rows = [1, 2, LAST - 1, LAST]
    pages = WIDTH // ps
    alloc = make(4 * pages + 8, ps, page_table=ps == 16)
    first, second, before, last = open_rows(alloc, rows)
    # Neighbours first: they must stay as they are.
    alloc.extend([first, before], [3 * ps, WIDTH])
    out = cupy.full(WIDTH - 100, -1, cupy.int64)
    alloc.extend(last, WIDTH - 100, out=out)
    assert host(out).tolist() == gathered(alloc, [last], 0, WIDTH - 100).tolist()
    for handle in (first, second, before, last):
        assert_row(alloc, handle)
    # The last columns of the last row, by every way to write them.
    tail = cupy.full(50, -1, cupy.int32)
    alloc.decode(last, 50, out=tail)
    assert host(tail).tolist() == gathered(alloc, [last], WIDTH - 100, WIDTH - 50).tolist()
    alloc.reserve([second, last], [5 * ps, 34], rounding="device")
    alloc.reserve(last, 50)
    assert alloc.allocated(last).tolist() == [WIDTH]
    with pytest.raises(sgalloc.RowTooNarrow):
        alloc.reserve(last, 51)
    for handle in (first, second, before, last):
        assert_row(alloc, handle)
    assert_rest_is_zero(alloc, rows)
    # Reading it: a gather, and the exports.
    assert host(alloc.slots([before, last], WIDTH - 40, WIDTH)).tolist() == (
        gathered(alloc, [before, last], WIDTH - 40, WIDTH).tolist()
    )
    tables = alloc.page_tables(4, pages)
    lengths = [3 * ps, WIDTH, WIDTH - ps + 1]
    tables.update([first, before, last], lengths)
    expected = exported(alloc, [first, before, last], lengths, pages)
    for name, part in expected._asdict().items():
        assert np.array_equal(host(getattr(tables, name))[: len(part)], part), name
    if ps == 16:
        for handle, row in ((before, LAST - 1), (last, LAST)):
            held = alloc.pages(handle, 0, WIDTH)
            assert np.array_equal(host(alloc.page_table[row]), held)
    # A long row is shortened and written over with other pages.
    alloc.trim(last, ps)
    alloc.extend(second, 40 * ps)
    alloc.extend(last, WIDTH)
    for handle in (first, second, before, last):
        assert_row(alloc, handle)
    alloc.check(device=True)


def test_d11_slots_up_to_the_largest_int32() -> None:
    """Every page of a pool whose last slot is 2**31 - 1, in rows that fill the table."""
    ps = 128
    most = (1 << 31) // ps - 1
    held = WIDTH // ps * ps  # the row ends in a piece of a page
    alloc = make(most, ps)
    handles = alloc.open(LAST)
    # All rows together have room for a little more than the pool: some in between stay short.
    lengths = np.full(ROWS, held)
    excess = held * LAST - most * ps
    lengths[10:-10] -= np.clip(excess - held * np.arange(ROWS - 20), 0, held)
    lengths = lengths[alloc.rows(handles)]
    for part in np.array_split(np.arange(LAST), 4):
        alloc.extend(handles[part], lengths[part])
    assert alloc.available() == 0
    rows = {int(row): int(handle) for row, handle in zip(alloc.rows(handles), handles, strict=True)}
    table = alloc.req_to_token
    largest = 0
    for row in (1, 2, LAST // 2, LAST - 1, LAST):
        extent = int(alloc.allocated(rows[row])[0])
        found = host(table[row])
        expected = row_entries(alloc.pages(rows[row], 0, extent), ps, 0, extent)
        assert np.array_equal(found[:extent], expected)
        assert not found[extent:].any()
    # On the device, every row: offsets within pages, and each page of the pool exactly once.
    offsets = cupy.arange(held, dtype=cupy.int32) % ps
    seen = cupy.zeros(most + 1, cupy.int32)
    for first in range(1, ROWS, 256):
        block = table[first : first + 256, :held]
        full = block[:, ::ps] > 0
        ids = block[:, ::ps] // ps
        assert bool((((block - offsets) % ps == 0) | (block == 0)).all())
        pages = ids[full]
        seen += cupy.bincount(pages, minlength=most + 1).astype(cupy.int32)
        largest = max(largest, int(block.max()))
    assert largest == (1 << 31) - 1
    assert bool((seen[1:] == 1).all()) and int(seen[0]) == 0
    assert not bool(table[0].any()) and not bool(table[:, held:].any())
    last = int(alloc.pages(rows[LAST], 0, held).max())
    assert host(alloc.slots(rows[LAST], held - 5, held)).max() <= last * ps + ps - 1
    alloc.check()
