"""Launches of the kernels on the CPU, each held against NumPy written from the row law alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer, Emulator, Stats
from cuda_on_cpu.sides import ASSIGN, REPLAY, Side, SidePage
from cuda_on_cpu.steps import FIXED_PAGES, SERIAL_AT, mapped_step_of, small_step_of, step_of
from cuda_on_cpu.tables import (
    Growth,
    Int32,
    Rng,
    Table,
    distinct,
    expect_growth,
    fresh_ids,
    own_old_pages,
    some_launch,
)


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
    tiled: bool = False,
    wide: bool = False,
    idle: bool = False,
    small: bool = False,
    side: tuple[Side, Sequence[SidePage]] | None = None,
    **how: Any,
) -> Stats:
    """Launch assign_pages for `growths`, and hold the table and `out` against the row law.

    Where `tiled`, runs come with the first one of each tile. Where `small`, the step has the
    fixed places of one in mapped memory. `side`: a second group, and pages of it to be written.
    """
    own_old_pages(table, growths, rng)
    ids = fresh_ids(rng, sum(g.new for g in growths), table.page_size)
    if small:
        step, out = small_step_of(table, growths, ids, wide=wide, side=side)
    else:
        how_told: dict[str, Any] = {"wide": wide, "idle": idle, "tile": tile if tiled else 0}
        how_told["side"] = side
        step, out = step_of(table, growths, ids, runs=runs, **how_told, rng=rng)
    slots = expect_growth(table, growths, ids)
    kernel = "assign_pages" if side is None else ASSIGN
    stats = emulator.launch(kernel, grid, threads, [*table.arguments, np.int32(tile), step], **how)
    table.check()
    np.testing.assert_array_equal(out.data, slots)
    if side is not None:
        side[0].expect(side[1])
        side[0].check()
    return stats


def mapped_grid(pages: int, tile: int, captured: bool) -> int:
    """Blocks of assign_mapped, which in a graph is launched for as many pages as there may be."""
    return max(1, -(-(FIXED_PAGES if captured else pages) // tile))


def some_mapped(rng: Rng, pages: int, captured: bool) -> dict[str, Any]:
    """How to launch assign_mapped for so many pages: any tile, threads, and order of blocks."""
    tile = int(rng.choice([4, 5, 31, 32, 96, 100, 255, 256]))
    how = some_launch(rng, mapped_grid(pages, tile, captured))
    return {
        "tile": tile,
        "captured": captured,
        "threads": int(rng.choice([-(-tile // 32) * 32, 256])),
        **{name: how[name] for name in ("order", "resident", "seed")},
    }


def assign_mapped(
    emulator: Emulator,
    table: Table,
    growths: Sequence[Growth],
    rng: Rng,
    *,
    tile: int,
    captured: bool,
    threads: int = 256,
    side: tuple[Side, Sequence[SidePage]] | None = None,
    **how: Any,
) -> Stats:
    """Launch assign_mapped for `growths`, and hold the table against the row law.

    With `side`, a second group and pages of it, assign_both_mapped.
    """
    own_old_pages(table, growths, rng)
    ids = fresh_ids(rng, sum(g.new for g in growths), table.page_size)
    most = max(len(ids), 0 if side is None else len(side[1]))
    grid = mapped_grid(most, tile, captured)
    step = mapped_step_of(table, growths, ids, min(FIXED_PAGES, grid * tile), side)
    expect_growth(table, growths, ids)
    name, arguments = "assign_mapped", [*table.arguments, np.int32(tile), step]
    if side is not None:
        name = "assign_both_mapped"
        arguments += side[0].arguments
    stats = emulator.launch(name, grid, threads, arguments, **how)
    table.check()
    if side is not None:
        side[0].expect(side[1])
        side[0].check()
    return stats


class Scan:
    """What page_watermarks keeps from launch to launch: the tiles' words and the ticket."""

    def __init__(self, tiles: int, epoch: int = 1, tickets: int = 0) -> None:
        self.words = Buffer(np.zeros(tiles, np.uint64), True)
        self.ticket = Buffer(np.array([tickets % 2**32], np.uint32), True)
        self.epoch, self.tickets = epoch, tickets

    def begin(self, pages: Sequence[int], summed: Sequence[bool]) -> None:
        """Let blocks outside of the launch have taken the first tiles, of so many `pages`.

        Where `summed`, a tile has told the sum of all up to it, else its own pages alone.
        """
        values = np.where(summed, np.cumsum(pages), pages).astype(np.uint64)
        states = np.uint64(self.epoch << 2) + np.where(summed, 2, 1).astype(np.uint64)
        self.words.data[: len(pages)] = states << np.uint64(32) | values
        self.ticket.data[0] = (self.tickets + len(pages)) % 2**32


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
    tile_requests: int = 1024,
    threads: int = 256,
    summed: Sequence[bool] = (),
    **how: Any,
) -> Stats:
    """Launch page_watermarks, and hold the table against the row law; the next epoch follows.

    As many tiles as `summed` says something of are left to others: see `Scan.begin`.
    """
    size = table.page_size
    tiles = -(-len(rows) // tile_requests)
    scan = scan or Scan(tiles)
    marks = committed.astype(np.int64) + reserve
    after = np.maximum(allocated, -(-marks // size) * size)
    assert after.max(initial=0) <= table.row_pages * size
    need = (after - allocated) // size
    ids = fresh_ids(rng, int(need.sum()), size)
    others = len(summed) * tile_requests
    if summed:
        scan.begin(need[:others].reshape(-1, tile_requests).sum(1).tolist(), summed)
    left = iter(ids[need[:others].sum() :].tolist())
    table.expect()
    mine = (rows[others:], allocated[others:] // size, after[others:] // size)
    for row, held, extent in zip(*mine, strict=True):
        for number in range(held, extent):
            table.law(int(row), number, next(left))
    one = isinstance(reserve, int)
    stats = emulator.launch(
        "page_watermarks",
        tiles - len(summed),
        threads,
        [
            *table.arguments,
            np.int32(tile_pages),
            np.int32(tile_requests),
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


ALL = Export()


def export(
    emulator: Emulator,
    table: Table,
    rows: Int32,
    lengths: Int32,
    width: int,
    rng: Rng,
    asked: Export = ALL,
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
        self.steps = Buffer(np.zeros(ring * stride, np.uint8))
        self.counters = Buffer(np.array([before, 0, 0], np.uint32), writable=True)
        self.applied = Buffer(np.array([before], np.uint32), writable=True)
        self.staged = before
        self.kernel = "replay_pages"

    def stage(
        self,
        growths: Sequence[Growth],
        rng: Rng,
        *,
        runs: bool = False,
        side: tuple[Side, Sequence[SidePage]] | None = None,
    ) -> Int32:
        """Leave a step to the next replay; its page ids."""
        ids = fresh_ids(rng, sum(g.new for g in growths), self.table.page_size)
        at = self.staged % self.ring * self.stride
        self.staged += 1
        told: dict[str, Any] = {"runs": runs, "serial": self.staged % 2**32, "side": side}
        step, _ = step_of(self.table, growths, ids, **told, rng=rng)
        if side is not None:
            self.kernel = REPLAY
            self.steps.links |= {at + offset: to for offset, to in side[0].links.items()}
        assert step.data.size <= self.stride
        self.steps.data[at : at + step.data.size] = step.data
        return ids

    def replay(
        self, emulator: Emulator, *, grid: int, threads: int, tile: int, **how: Any
    ) -> Stats:
        """One launch of the graph's kernel."""
        return emulator.launch(
            self.kernel,
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

    def serial_of(self, number: int) -> tuple[int, bytes]:
        """Where the step of that number says that it is whole, and by what."""
        at = (number - 1) % self.ring * self.stride + SERIAL_AT
        return at, self.steps.data[at : at + 4].tobytes()

    def check(self, applied: int) -> None:
        """So many steps were applied, and the table holds what they said."""
        assert self.counters.data.tolist() == [applied % 2**32, 0, 0]
        assert self.applied.data.tolist() == [applied % 2**32]
        self.table.check()
