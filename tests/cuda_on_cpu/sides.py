"""A second group's table and map on the CPU, and the pages of it that a step writes or clears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer
from cuda_on_cpu.tables import Int32, Rng, Table, distinct
from numpy.typing import NDArray

# The kernels that write side pages, launched and replayed.
ASSIGN, REPLAY = "assign_both", "replay_both"
# Where the header names the two arrays, in bytes: see struct Step of assign_pages.cu.
SLOTS_AT, MAP_AT = 72, 80


class SidePage(NamedTuple):
    """One page of the second group.

    Attributes:
        row: where the table shows it, None for nowhere.
        number: its number in the row.
        id: its id, 0 where entries are cleared.
        main: the page of the main group whose slots the map sends to it, 0 for none.
    """

    row: int | None
    number: int
    id: int
    main: int


class Side:
    """What a second group keeps on the device, beside a table, and what it should hold.

    Pages of the main group below `first_main` have no entries in memory, though the kernel
    addresses those behind them.
    """

    def __init__(
        self,
        table: Table,
        mains: int,
        *,
        shown: bool = True,
        mapped: bool = True,
        lead: int = 0,
        first_main: int = 0,
    ) -> None:
        self.table, self.first_main = table, first_main
        size = table.page_size
        self.slots = Buffer(
            distinct(table.slots.data.size).reshape(table.slots.data.shape),
            writable=True,
            lead=lead,
            bias=table.slots.bias,
        )
        self.map = Buffer(
            distinct((mains + 1) * size), writable=True, lead=lead, bias=4 * first_main * size
        )
        self.shown, self.mapped = shown, mapped
        self.want_slots, self.want_map = self.slots.data.copy(), self.map.data.copy()

    @property
    def links(self) -> dict[int, Buffer]:
        """Where a step names the arrays that are kept; what is not kept stays null."""
        given = {SLOTS_AT: (self.slots, self.shown), MAP_AT: (self.map, self.mapped)}
        return {at: buffer for at, (buffer, kept) in given.items() if kept}

    @property
    def arguments(self) -> list[Buffer | None]:
        """The arrays as a kernel takes them, None for one that is not kept."""
        return [self.slots if self.shown else None, self.map if self.mapped else None]

    def arrays(self, pages: Sequence[SidePage]) -> list[NDArray[Any]]:
        """The places, ids and pages of the main group, as the kernel reads them."""
        first, per_row = self.table.first_row, self.table.row_pages
        places = [-1 if p.row is None else (first + p.row) * per_row + p.number for p in pages]
        return [
            np.array(places, np.int64),
            np.array([p.id for p in pages], np.int32),
            np.array([p.main for p in pages], np.int32),
        ]

    def expect(self, pages: Sequence[SidePage]) -> None:
        """Put down what should be there after a step of `pages`."""
        size = self.table.page_size
        for page in pages:
            slots: Int32 = np.zeros(size, np.int32)
            if page.id:
                slots = (page.id * size + np.arange(size)).astype(np.int32)
            if self.shown and page.row is not None:
                number = page.number - self.table.first_page
                self.want_slots[page.row, number * size : (number + 1) * size] = slots
            if self.mapped and page.main:
                at = (page.main - self.first_main) * size
                self.want_map[at : at + size] = slots

    def check(self) -> None:
        """Every entry that should have been written was, and no other."""
        np.testing.assert_array_equal(self.slots.data, self.want_slots)
        np.testing.assert_array_equal(self.map.data, self.want_map)


def some_side(rng: Rng, table: Table, mains: int = 40) -> Side:
    """A second group beside `table`, with or without a table of its own, and a map."""
    # The host aligns both alike: where the table's stores are of 16 bytes, so are these.
    lead = int(rng.choice([0, 16] if table.lead % 16 == 0 else [0, 4, 16]))
    shown = bool(rng.integers(5))
    return Side(table, mains, shown=shown, mapped=not shown or bool(rng.integers(3)), lead=lead)


def some_pages(rng: Rng, side: Side, most: int = 60) -> list[SidePage]:
    """Pages that are set and cleared, in rows or nowhere, in the map or not; each entry once."""
    table = side.table
    rows, per_row = table.slots.data.shape[0], table.row_pages - table.first_page
    mains = side.want_map.size // table.page_size - 1
    count = min(int(rng.integers(1, most)), rows * per_row, mains)
    last = (2**31 - 1) // table.page_size - 1
    places = rng.permutation(rows * per_row)[:count].tolist()
    numbers = (side.first_main + 1 + rng.permutation(mains)[:count]).tolist()
    pages = []
    for place, main in zip(places, numbers, strict=True):
        row: int | None = place // per_row
        if rng.random() < 0.2:
            row = None
        pages.append(
            SidePage(
                row,
                table.first_page + place % per_row,
                0 if rng.random() < 0.4 else int(rng.integers(1, last)),
                0 if rng.random() < 0.3 else main,
            )
        )
    return pages
