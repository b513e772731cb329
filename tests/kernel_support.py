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
    """A device table and its page table on the CPU, beside what they should hold.

    Rows below `first_row` are not there, though the kernel addresses the others behind them.
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
    ) -> None:
        self.row_width, self.page_size, self.first_row = row_width, page_size, first_row
        self.row_pages = row_width // page_size
        self.slots = Buffer(
            distinct(rows * row_width).reshape(rows, row_width),
            writable=True,
            lead=lead,
            bias=4 * first_row * row_width,
        )
        self.pages = Buffer(
            distinct(rows * self.row_pages).reshape(rows, -1),
            writable=True,
            bias=4 * first_row * self.row_pages,
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
    starts = [
        (table.first_row + growths[i].row) * table.row_pages + growths[i].old for i in growing
    ]
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
        np.array([table.first_row + growths[i].row for i in asking], np.int32),
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
            Buffer(rows + np.int32(table.first_row)),
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


class Export(NamedTuple):
    """Which outputs of export_pages are asked for; the others are null."""

    page_table: bool = True
    indices: bool = True
    indptr: bool = True
    last_page_len: bool = True


def export(
    emulator: Emulator,
    table: Table,
    rows: Int32,
    lengths: Int32,
    width: int,
    rng: Rng,
    asked: Export = Export(),
    *,
    grid: int = 3,
    threads: int = 64,
    **how: Any,
) -> None:
    """Launch export_pages for rows of `lengths` tokens, and hold every output against NumPy."""
    size, n = table.page_size, len(rows)
    pages = -(-lengths // size)
    own_old_pages(table, [Growth(r, p, 0) for r, p in zip(rows.tolist(), pages, strict=True)], rng)
    held = [
        table.want_slots[row, : count * size : size] // size
        for row, count in zip(rows, pages, strict=True)
    ]
    padded = np.zeros((n, width), np.int32)
    for line, ids in zip(padded, held, strict=True):
        line[: len(ids)] = ids[:width]
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    wanted = {
        "page_table": padded,
        "indices": np.concatenate([*held, np.empty(0, np.int32)]).astype(np.int32),
        "indptr": indptr,
        "last_page_len": np.where(pages > 0, lengths - (pages - 1) * size, 0).astype(np.int32),
    }
    outputs = {
        name: Buffer(distinct(want.size).reshape(want.shape), writable=True)
        for name, want in wanted.items()
    }
    given = {name: outputs[name] if getattr(asked, name) else None for name in outputs}
    emulator.launch(
        "export_pages",
        grid,
        threads,
        [
            Buffer(table.slots.data, bias=table.slots.bias),
            np.int64(table.row_width),
            np.int32(size),
            np.int32(n),
            Buffer(rows + np.int32(table.first_row)),
            Buffer(indptr),
            Buffer(lengths),
            given["page_table"],
            np.int32(width),
            given["indices"],
            given["indptr"],
            given["last_page_len"],
        ],
        **how,
    )
    for name, buffer in outputs.items():
        if getattr(asked, name):
            np.testing.assert_array_equal(buffer.data, wanted[name], err_msg=name)


class Replays:
    """Steps that wait in a ring for the replays of a graph, as replay_pages reads them."""

    def __init__(self, table: Table, ring: int, stride: int, before: int = 0) -> None:
        self.table, self.ring, self.stride = table, ring, stride
        self.steps = Buffer(np.zeros(ring * stride, np.uint8), holes=())
        self.counters = Buffer(np.array([before, 0], np.uint32), writable=True)
        self.applied = Buffer(np.array([before], np.uint32), writable=True)
        self.staged = before

    def stage(self, growths: Sequence[Growth], rng: Rng, *, runs: bool = False) -> Int32:
        """Leave a step to the next replay; its page ids."""
        ids = fresh_ids(rng, sum(g.new for g in growths), self.table.page_size)
        at = self.staged % self.ring * self.stride
        self.staged += 1
        step, _ = step_of(self.table, growths, ids, runs=runs, serial=self.staged, rng=rng)
        assert step.data.size <= self.stride
        self.steps.data[at : at + step.data.size] = step.data
        return ids

    def replay(self, emulator: Emulator, *, grid: int, threads: int, tile: int, **how: Any) -> None:
        """One launch of the graph's kernel."""
        emulator.launch(
            "replay_pages",
            grid,
            threads,
            [
                *self.table.arguments,
                np.int32(tile),
                self.steps,
                np.int64(self.stride),
                np.uint32(self.ring),
                self.counters,
                self.applied,
            ],
            **how,
        )

    def check(self, applied: int) -> None:
        """So many steps were applied, and the table holds what they said."""
        assert self.counters.data.tolist() == [applied % 2**32, 0]
        assert self.applied.data.tolist() == [applied % 2**32]
        self.table.check()
