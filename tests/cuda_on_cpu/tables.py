"""Tables for the kernels on the CPU, and what they should hold by the row law alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer
from numpy.typing import NDArray

PAGE_SIZES = (1, 2, 3, 4, 5, 16, 64, 128, 1000)

Int32 = NDArray[np.int32]
Rng = np.random.Generator


def distinct(count: int) -> Int32:
    """Poison: negative, and no two alike, so that a wrong copy shows as well as a wrong write."""
    return -1 - np.arange(count, dtype=np.int32)


def quad_shift(page_size: int, row_width: int, lead: int) -> int:
    """What the host passes: log2 of the 16-byte stores of a page, -1 no power, -2 not aligned."""
    if page_size % 4 or row_width % 4 or lead % 16:
        return -2
    quads = page_size // 4
    return quads.bit_length() - 1 if quads & (quads - 1) == 0 else -1


class Growth(NamedTuple):
    """A request that grows, or only reads: it holds `old` pages, gets `new` ones, and asks for
    the slots of `asked` positions from `start` on."""

    row: int
    old: int
    new: int
    start: int = 0
    asked: int = 0


class Table:
    """A device table and its page table on the CPU, beside what they should hold.

    Rows below `first_row`, and pages of the row below `first_page`, are not there, though the
    kernel addresses the others behind them.
    """

    def __init__(
        self,
        rows: int,
        row_width: int,
        page_size: int,
        *,
        with_pages: bool = True,
        lead: int = 0,
        first_row: int = 0,
        first_page: int = 0,
    ) -> None:
        assert rows == 1 or not first_page
        self.row_width, self.page_size = row_width, page_size
        self.first_row, self.first_page = first_row, first_page
        self.row_pages = row_width // page_size
        width = row_width - first_page * page_size
        pages = self.row_pages - first_page
        self.slots = Buffer(
            distinct(rows * width).reshape(rows, width),
            writable=True,
            lead=lead,
            bias=4 * (first_row * row_width + first_page * page_size),
        )
        self.pages = Buffer(
            distinct(rows * pages).reshape(rows, pages),
            writable=True,
            bias=4 * (first_row * self.row_pages + first_page),
        )
        self.with_pages = with_pages
        self.lead = lead
        self.want_slots: Int32
        self.want_pages: Int32
        self.expect()

    def expect(self) -> None:
        """What is there now is what should stay."""
        self.want_slots, self.want_pages = self.slots.data.copy(), self.pages.data.copy()

    def law(self, row: int, number: int, page_id: int) -> None:
        """The row law for one page: it should be in the row, under its number."""
        size, number = self.page_size, number - self.first_page
        self.want_slots[row, number * size : (number + 1) * size] = page_id * size + np.arange(size)
        if self.with_pages:
            self.want_pages[row, number] = page_id

    def wanted(self, growth: Growth) -> Int32:
        """The slots that `growth` asks for, as they should be."""
        start = growth.start - self.first_page * self.page_size
        return self.want_slots[growth.row, start : start + growth.asked]

    @property
    def arguments(self) -> list[Any]:
        """The leading arguments of every kernel that writes the table."""
        return [
            self.slots,
            self.pages if self.with_pages else None,
            np.int64(self.row_width),
            np.int32(self.row_pages),
            np.int32(self.page_size),
            np.int32(quad_shift(self.page_size, self.row_width, self.lead)),
        ]

    def check(self) -> None:
        """Every entry that should have been written was, and no other."""
        np.testing.assert_array_equal(self.slots.data, self.want_slots)
        np.testing.assert_array_equal(self.pages.data, self.want_pages)


def fresh_ids(rng: Rng, count: int, page_size: int) -> Int32:
    """Page ids in no order, from 10,000 to the largest whose slots are 32 bits."""
    last = (2**31 - 1) // page_size - 1
    if not count:
        return np.empty(0, np.int32)
    stride = max(1, (last - 10_000) // count)
    ids = last - stride * rng.permutation(count)
    return ids.astype(np.int32)


def expect_growth(table: Table, growths: Sequence[Growth], ids: Int32) -> Int32:
    """Put into `table` what should be there after the step; the slots that `out` should hold."""
    left = iter(ids.tolist())
    for growth in growths:
        for number in range(growth.old, growth.old + growth.new):
            table.law(growth.row, number, next(left))
    return np.concatenate([table.wanted(g) for g in growths] or [np.empty(0, np.int32)])


def own_old_pages(table: Table, growths: Sequence[Growth], rng: Rng) -> None:
    """Give the rows the pages that they already hold, with ids below 10,000."""
    for growth in growths:
        for number in range(table.first_page, growth.old):
            table.law(growth.row, number, int(rng.integers(1, 10_000)))
    table.slots.data[...] = table.want_slots
    table.pages.data[...] = table.want_pages


def some_launch(rng: Rng, grid: int | None = None) -> dict[str, Any]:
    """A grid, a block size, an order of the blocks, how many run at a time, and a seed."""
    grid = int(rng.choice([1, 2, 3, 7, 40])) if grid is None else grid
    return {
        "grid": grid,
        "threads": int(rng.choice([32, 64, 96, 256])),
        "order": rng.permutation(grid).tolist(),
        "resident": int(rng.integers(1, min(grid, 5) + 1)),
        "seed": int(rng.integers(1000)),
    }


def some_width(rng: Rng, size: int, row_pages: int) -> int:
    """A row of so many pages, that ends in a piece of a page as often as not."""
    return row_pages * size + int(rng.choice([0, 0, rng.integers(size)]))


def some_growths(rng: Rng, rows: int, row_pages: int, size: int, even: bool) -> list[Growth]:
    """Requests that grow, or only ask for slots, or do neither."""
    growths = []
    each = int(rng.integers(1, 2 * size + 1))
    for row in rng.permutation(rows)[: rng.integers(rows + 1)].tolist():
        old = int(rng.integers(row_pages + 1))
        new = int(rng.integers(row_pages - old + 1)) if rng.random() < 0.8 else 0
        extent = (old + new) * size
        asked = 0
        if even:
            asked = each if each <= extent else 0
        elif rng.random() < 0.7:
            asked = int(rng.integers(min(extent, 3 * size) + 1))
        start = int(rng.integers(extent - asked + 1))
        growths.append(Growth(row, old, new, start, asked))
    return growths


def some_requests(
    rng: Rng, n: int, size: int, row_pages: int, most: int
) -> tuple[np.ndarray[Any, Any], ...]:
    """Rows, committed and allocated lengths, and reserves of up to `most` that fit."""
    extent = row_pages * size
    committed = rng.integers(0, extent + 1, n)
    room = extent // size - -(-committed // size)
    ahead = rng.integers(0, room + 1) * (rng.random(n) < 0.3)
    allocated = (-(-committed // size) + ahead) * size
    reserves = np.minimum(rng.integers(0, most + 1, n), extent - committed)
    rows = rng.permutation(n + 3)[:n]
    return tuple(a.astype(np.int32) for a in (rows, committed, allocated, reserves))
