"""Launches of the kernels on the CPU, each held against NumPy written from the row law alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer, Emulator, Stats
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Rng = np.random.Generator

NEVER = 2**31 - 1  # `first_new` of a request that this launch gives no page
STEP = struct.Struct("<6iQ8iI15i")  # struct Step of assign_pages.cu
assert STEP.size == 128


def distinct(count: int) -> Int32:
    """Poison: negative, and no two alike, so that a wrong copy shows as well as a wrong write."""
    return -1 - np.arange(count, dtype=np.int32)


def quad_shift(page_size: int, row_width: int, lead: int) -> int:
    """What the host passes: log2 of the 16-byte stores of a page, -1 no power, -2 not aligned."""
    if page_size % 4 or row_width % 4 or lead % 16:
        return -2
    quads = page_size // 4
    return quads.bit_length() - 1 if quads & (quads - 1) == 0 else -1


class Table:
    """A device table and its page table on the CPU, beside what they should hold."""

    def __init__(
        self, rows: int, row_width: int, page_size: int, *, with_pages: bool = True, lead: int = 0
    ) -> None:
        self.row_width, self.page_size = row_width, page_size
        self.row_pages = row_width // page_size
        self.slots = Buffer(distinct(rows * row_width).reshape(rows, row_width), True, lead)
        self.pages = Buffer(distinct(rows * self.row_pages).reshape(rows, -1), True)
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
        size = self.page_size
        self.want_slots[row, number * size : (number + 1) * size] = page_id * size + np.arange(size)
        if self.with_pages:
            self.want_pages[row, number] = page_id

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


class Growth(NamedTuple):
    """A request that grows, or only reads: it holds `old` pages, gets `new` ones, and asks for
    the slots of `asked` positions from `start` on."""

    row: int
    old: int
    new: int
    start: int = 0
    asked: int = 0


def step_of(
    table: Table,
    growths: Sequence[Growth],
    ids: Int32,
    *,
    runs: bool = False,
    wide: bool = False,
    serial: int = 0,
    rng: Rng,
) -> tuple[Buffer, Buffer]:
    """The step that tells the kernel of `growths`, and the array for the slots asked for.

    Around each array lies a hole that nobody may touch, and an array that the kernel has no use
    for is a hole altogether. Arrays start at odd multiples of their entries' size at times.
    """
    new = np.array([g.new for g in growths], np.int64)
    firsts = np.cumsum(new) - new
    growing = [i for i, g in enumerate(growths) if g.new]
    starts = [growths[i].row * table.row_pages + growths[i].old for i in growing]
    asking = [i for i, g in enumerate(growths) if g.asked]
    asked = np.array([growths[i].asked for i in asking], np.int64)
    if runs:
        places = np.array([s - firsts[i] for s, i in zip(starts, growing, strict=True)], np.int64)
    else:
        places = np.concatenate(
            [np.arange(s, s + new[i]) for s, i in zip(starts, growing, strict=True)] or [[]]
        ).astype(np.int64)
    uniform = int(asked[0]) if len(set(asked.tolist())) == 1 else 0
    arrays: list[NDArray[Any]] = [
        places,
        ids,
        firsts[growing].astype(np.int32) if runs else np.empty(0, np.int32),
        np.array([growths[i].row for i in asking], np.int32),
        np.array([growths[i].start for i in asking], np.int32),
        np.empty(0, np.int32) if uniform else (np.cumsum(asked) - asked).astype(np.int32),
        np.array([growths[i].old if growths[i].new else NEVER for i in asking], np.int32),
        np.array([firsts[i] for i in asking], np.int32),
    ]
    offsets, holes, end = [], [], STEP.size
    for array in arrays:
        size = array.dtype.itemsize
        start = -(-(end + 32) // size) * size + size * int(rng.integers(4))
        holes.append((end, start))
        offsets.append(start)
        end = start + array.nbytes
    data = np.zeros(end, np.uint8)
    for start, array in zip(offsets, arrays, strict=True):
        data[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    total = int(asked.sum())
    head = (len(ids), len(growing) if runs else 0, len(asking), total, uniform, int(wide), 0)
    data[: STEP.size] = np.frombuffer(STEP.pack(*head, *offsets, serial, *[0] * 15), np.uint8)
    out = Buffer(distinct(total).astype(np.int64 if wide else np.int32), True)
    return Buffer(data, holes=holes, links={24: out}), out


def expect_growth(table: Table, growths: Sequence[Growth], ids: Int32) -> Int32:
    """Put into `table` what should be there after the step; the slots that `out` should hold."""
    left = iter(ids.tolist())
    for growth in growths:
        for number in range(growth.old, growth.old + growth.new):
            table.law(growth.row, number, next(left))
    return np.concatenate(
        [table.want_slots[g.row, g.start : g.start + g.asked] for g in growths]
        or [np.empty(0, np.int32)]
    )


def own_old_pages(table: Table, growths: Sequence[Growth], rng: Rng) -> None:
    """Give the rows the pages that they already hold, with ids below 10,000."""
    for growth in growths:
        for number in range(growth.old):
            table.law(growth.row, number, int(rng.integers(1, 10_000)))
    table.slots.data[...] = table.want_slots
    table.pages.data[...] = table.want_pages


def assign(
    emulator: Emulator,
    table: Table,
    growths: Sequence[Growth],
    rng: Rng,
    *,
    grid: int = 3,
    threads: int = 64,
    tile: int = 1024,
    runs: bool = False,
    wide: bool = False,
    **how: Any,
) -> Stats:
    """Launch assign_pages for `growths`, and hold the table and `out` against the row law."""
    own_old_pages(table, growths, rng)
    ids = fresh_ids(rng, sum(g.new for g in growths), table.page_size)
    step, out = step_of(table, growths, ids, runs=runs, wide=wide, rng=rng)
    slots = expect_growth(table, growths, ids)
    stats = emulator.launch(
        "assign_pages", grid, threads, [*table.arguments, np.int32(tile), step], **how
    )
    table.check()
    np.testing.assert_array_equal(out.data, slots)
    return stats


def fresh_ids(rng: Rng, count: int, page_size: int) -> Int32:
    """Page ids in no order, from 10,000 to the largest whose slots are 32 bits."""
    last = (2**31 - 1) // page_size - 1
    if not count:
        return np.empty(0, np.int32)
    stride = max(1, (last - 10_000) // count)
    ids = last - stride * rng.permutation(count)
    return ids.astype(np.int32)


class Scan:
    """What page_watermarks keeps from launch to launch: the tiles' words and the ticket."""

    def __init__(self, tiles: int, epoch: int = 1, tickets: int = 0) -> None:
        self.words = Buffer(np.zeros(tiles, np.uint64), True)
        self.ticket = Buffer(np.array([tickets % 2**32], np.uint32), True)
        self.epoch, self.tickets = epoch, tickets


def watermarks(
    emulator: Emulator,
    table: Table,
    rows: Int32,
    committed: Int32,
    allocated: Int32,
    reserve: Int32 | int,
    rng: Rng,
    scan: Scan | None = None,
    *,
    tile_pages: int = 1024,
    **how: Any,
) -> Stats:
    """Launch page_watermarks, and hold the table against the row law; the next epoch follows."""
    size = table.page_size
    tiles = -(-len(rows) // 1024)
    scan = scan or Scan(tiles)
    marks = committed.astype(np.int64) + reserve
    after = np.maximum(allocated, -(-marks // size) * size)
    assert after.max(initial=0) <= table.row_pages * size
    ids = fresh_ids(rng, int((after - allocated).sum()) // size, size)
    left = iter(ids.tolist())
    table.expect()
    for row, held, extent in zip(rows, allocated // size, after // size, strict=True):
        for number in range(held, extent):
            table.law(int(row), number, next(left))
    one = isinstance(reserve, int)
    stats = emulator.launch(
        "page_watermarks",
        tiles,
        256,
        [
            *table.arguments,
            np.int32(tile_pages),
            np.int32(len(rows)),
            Buffer(rows),
            Buffer(committed),
            Buffer(allocated),
            None if one else Buffer(np.asarray(reserve, np.int32)),
            np.int32(reserve if one else -1),
            Buffer(ids),
            scan.words,
            scan.ticket,
            np.uint32(scan.tickets % 2**32),
            np.uint32(scan.epoch),
        ],
        **how,
    )
    table.check()
    scan.epoch += 1
    scan.tickets += tiles
    assert scan.ticket.data[0] == scan.tickets % 2**32
    return stats
