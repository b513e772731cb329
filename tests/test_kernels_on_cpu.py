"""The kernels' own source, run on the CPU under ASan and UBSan, against the row law in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import CUDA, HERE, Buffer, Emulator, build, require_compiler
from kernel_support import (
    Export,
    Growth,
    Replays,
    Rng,
    Scan,
    Table,
    assign,
    expect_growth,
    export,
    quad_shift,
    watermarks,
)

from sgalloc.device.kernels import Geometry

PAGE_SIZES = (1, 2, 3, 4, 5, 16, 64, 128, 1000)
each_page_size = pytest.mark.parametrize("size", PAGE_SIZES)
# The first row whose entries lie past 2**31, and a table of whole rows, or rows that end in a piece.
FAR_ROW = 3_000_001


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    require_compiler()
    program = build().program("kernels", [*sorted(CUDA.glob("*.cu")), HERE / "probes.cu"])
    with Emulator(program) as emulator:
        yield emulator


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


@each_page_size
@pytest.mark.parametrize("runs", [False, True], ids=["places", "runs"])
def test_assign_pages_writes_the_row_law_and_nothing_else(
    cpu: Emulator, size: int, runs: bool
) -> None:
    rng = np.random.default_rng([size, runs])
    for _ in range(12):
        rows, row_pages = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        table = Table(
            rows,
            some_width(rng, size, row_pages),
            size,
            with_pages=bool(rng.integers(2)),
            lead=int(rng.choice([0, 0, 16, 4])),
        )
        assign(
            cpu,
            table,
            some_growths(rng, rows, table.row_pages, size, even=bool(rng.integers(2))),
            rng,
            runs=runs,
            wide=bool(rng.integers(2)),
            tile=int(rng.choice([1, 2, 7, 64, 1000, 1024])),
            **some_launch(rng),
        )


@pytest.mark.parametrize("tile", [1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024])
def test_a_step_may_fill_its_last_tile_or_not(cpu: Emulator, tile: int) -> None:
    rng = np.random.default_rng(tile)
    for pages in {tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 1}:
        for size, runs in ((1, True), (4, False)):
            table = Table(2, pages * size + size, size)
            growths = [Growth(1, 1, pages, size - 1, pages)]
            assign(cpu, table, growths, rng, runs=runs, tile=tile, **some_launch(rng))


@pytest.mark.parametrize("runs", [False, True], ids=["places", "runs"])
@pytest.mark.parametrize("size", [1, 12, 16])
def test_one_request_with_very_many_pages(cpu: Emulator, size: int, runs: bool) -> None:
    rng = np.random.default_rng(size)
    table = Table(1, 5003 * size, size)
    growth = Growth(0, 2, 5000, 2 * size - 1, 4900 * size)
    assign(cpu, table, [growth], rng, runs=runs, tile=256, **some_launch(rng, grid=7))


@pytest.mark.parametrize("runs", [False, True], ids=["places", "runs"])
@pytest.mark.parametrize("size", [1, 12, 16])
def test_very_many_requests_with_one_page(cpu: Emulator, size: int, runs: bool) -> None:
    rng = np.random.default_rng(size)
    table = Table(3000, 2 * size, size)
    growths = [Growth(row, 1, 1, size, 1) for row in rng.permutation(3000).tolist()]
    assign(cpu, table, growths, rng, runs=runs, tile=64, **some_launch(rng, grid=40))


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
def test_a_gather_needs_no_new_page(cpu: Emulator, wide: bool, even: bool) -> None:
    rng = np.random.default_rng([wide, even])
    for size in (1, 3, 16):
        table = Table(50, 6 * size, size)
        growths = [
            Growth(
                row, 6, 0, int(rng.integers(size)), size if even else int(rng.integers(5 * size))
            )
            for row in range(50)
        ]
        assign(cpu, table, growths, rng, wide=wide, **some_launch(rng))


def test_nothing_to_do_changes_nothing(cpu: Emulator) -> None:
    rng = np.random.default_rng(0)
    for runs in (False, True):
        assign(cpu, Table(3, 20, 4), [], rng, runs=runs)
        assign(cpu, Table(3, 20, 4), [Growth(1, 2, 0)], rng, runs=runs)


@pytest.mark.parametrize("size", [1, 3, 4, 24])
@pytest.mark.parametrize("whole", [True, False], ids=["whole-rows", "cut-rows"])
def test_rows_behind_two_to_the_31_entries(cpu: Emulator, size: int, whole: bool) -> None:
    """All three kernels, on the last rows of a table whose others are not there."""
    rng = np.random.default_rng([size, whole])
    width = 1008 + (0 if whole else 4 if size == 24 else 1 - size % 2)
    if size == 1:
        width = 1008
    far = {"first_row": FAR_ROW}
    table = Table(5, width, size, **far)
    assert FAR_ROW * width > 2**31
    growths = [Growth(4, 3, 5, 2 * size, 4 * size), Growth(0, 0, 2, 1, size)]
    for runs in (False, True):
        assign(cpu, table, growths, rng, runs=runs)
    table = Table(5, width, size, **far)
    committed = np.array([0, 3 * size, 7], np.int32)
    allocated = -(-committed // size) * size
    rows = np.array([4, 0, 2], np.int32)
    watermarks(cpu, table, rows, committed, allocated.astype(np.int32), 3 * size, rng)
    export(cpu, Table(5, width, size, **far), rows, committed, 9, rng)


def test_entries_are_computed_in_64_bits(cpu: Emulator) -> None:
    rng = np.random.default_rng(3)
    for size, row_pages, rest in ((1, 10**6, 0), (16, 2**17, 0), (16, 2**17, 5), (1000, 3, 999)):
        width = row_pages * size + rest
        places = [0, 1, row_pages - 1, row_pages, 2**31 - 1, 2**31, 2**32 + 1, 2**40 + 12345]
        places += rng.integers(2**31, 2**42, 200).tolist()
        entries = Buffer(np.full(len(places), -1, np.int64), writable=True)
        cpu.launch(
            "probe_entry_of",
            2,
            32,
            [
                np.int64(width),
                np.int32(row_pages),
                np.int32(size),
                np.int32(len(places)),
                Buffer(np.array(places, np.int64)),
                entries,
            ],
        )
        wanted = [place // row_pages * width + place % row_pages * size for place in places]
        assert entries.data.tolist() == wanted


def test_insertion_is_behind_equals(cpu: Emulator) -> None:
    rng = np.random.default_rng(4)
    for count in (0, 1, 2, 3, 100):
        offsets = np.sort(rng.integers(-5, 40, count)).astype(np.int32)
        values = np.arange(-7, 44, dtype=np.int32)
        for first, last in {(0, count), (count // 3, count), (0, count // 2)}:
            found = Buffer(np.full(len(values), -1, np.int32), writable=True)
            arguments = [Buffer(offsets), np.int32(first), np.int32(last), np.int32(len(values))]
            cpu.launch("probe_insertion", 1, 64, [*arguments, Buffer(values), found])
            wanted = first + np.searchsorted(offsets[first:last], values, side="right")
            assert found.data.tolist() == wanted.tolist()


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


@each_page_size
def test_page_watermarks_rounds_counts_picks_and_writes(cpu: Emulator, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (1, 2, 31, 1023, 1024, 1025, 2500):
        row_pages = int(rng.integers(1, 6))
        rows, committed, allocated, reserves = some_requests(rng, n, size, row_pages, 3 * size)
        equal = bool(rng.integers(2))
        if equal:
            committed = np.minimum(committed, row_pages * size - size)
        table = Table(
            n + 3,
            some_width(rng, size, row_pages),
            size,
            with_pages=bool(rng.integers(2)),
            lead=int(rng.choice([0, 0, 16, 4])),
        )
        how = some_launch(rng, grid=-(-n // 1024))
        watermarks(
            cpu,
            table,
            rows,
            committed,
            allocated,
            int(rng.integers(size + 1)) if equal else reserves,
            rng,
            tile_pages=int(rng.choice([1, 3, 256, 1000, 1024])) if n < 100 else 1024,
            **{name: how[name] for name in ("order", "resident", "seed")},
        )


@pytest.mark.parametrize("order", ["up", "down", "drawn"])
@pytest.mark.parametrize("resident", [1, 3, 9])
def test_page_watermarks_in_every_order_of_its_blocks(
    cpu: Emulator, order: str, resident: int
) -> None:
    rng = np.random.default_rng(resident)
    n, size = 9000, 4
    for seed in range(2):
        blocks = {"up": range(9), "down": range(8, -1, -1), "drawn": rng.permutation(9)}[order]
        rows, committed, allocated, reserves = some_requests(rng, n, size, 4, 3 * size)
        how = {"order": list(blocks), "resident": resident, "seed": seed + 1}
        watermarks(cpu, Table(n + 3, 16, size), rows, committed, allocated, reserves, rng, **how)


def test_a_tile_waits_for_many_that_know_only_their_own_sum(cpu: Emulator) -> None:
    """The first block is held up, so that others hear 32 aggregates and have to look further."""
    rng = np.random.default_rng(5)
    n = 40 * 1024 - 7
    rows, committed, allocated, reserves = some_requests(rng, n, 2, 3, 4)
    table = Table(n + 3, 6, 2)
    how = {"resident": 40, "stall": True, "seed": 2}
    stats = watermarks(cpu, table, rows, committed, allocated, reserves, rng, **how)
    assert stats.spins > 0
    assert stats.empty_ballots > 0


def test_page_watermarks_with_no_need_and_with_a_huge_one(cpu: Emulator) -> None:
    rng = np.random.default_rng(6)
    n, size, row_pages = 3000, 16, 4000
    rows = np.arange(1, n + 1, dtype=np.int32) % 5
    # Only one request of a row may grow; all the others hold what they want.
    for greedy in (None, 0, 1023, 1024, n - 1):
        committed = np.full(n, 30, np.int32)
        allocated = np.full(n, 48, np.int32)
        reserves = rng.integers(0, 19, n).astype(np.int32)
        if greedy is not None:
            reserves[greedy] = row_pages * size - 30
        table = Table(5, row_pages * size, size)
        how = {"resident": 3, "seed": 3}
        watermarks(cpu, table, rows, committed, allocated, reserves, rng, **how)


def test_page_watermarks_up_to_the_last_slot_of_32_bits(cpu: Emulator) -> None:
    """Extents near 2**31 are rounded without running over; nothing is left to be written."""
    rng = np.random.default_rng(7)
    size = 1000
    extent = (2**31 - 1) // size * size
    table = Table(2, 2000, size)
    table.row_pages = extent // size
    committed = np.array([extent, extent - 5, extent - 999], np.int32)
    rows, allocated = np.zeros(3, np.int32), np.full(3, extent, np.int32)
    watermarks(cpu, table, rows, committed, allocated, np.array([0, 5, 999], np.int32), rng)


@pytest.mark.parametrize(
    ("epoch", "tickets"), [(1, 0), (2**30 - 7, 2**32 - 9)], ids=["first", "last"]
)
def test_launches_in_a_row_share_words_and_ticket(cpu: Emulator, epoch: int, tickets: int) -> None:
    """What earlier launches left in the words, of more tiles or fewer, is not taken for new."""
    rng = np.random.default_rng(8)
    scan = Scan(5, epoch, tickets)
    for n in (5000, 900, 4000, 5000, 2100, 5000):
        rows, committed, allocated, reserves = some_requests(rng, n, 3, 4, 9)
        how = {"resident": 4, "seed": int(rng.integers(100)), "stall": bool(rng.integers(2))}
        words = scan.words.data.copy()
        tiles = -(-n // 1024)
        watermarks(cpu, Table(n + 3, 13, 3), rows, committed, allocated, reserves, rng, scan, **how)
        assert (scan.words.data[tiles:] == words[tiles:]).all()
        assert (scan.words.data[:tiles] >> np.uint64(34) == scan.epoch - 1).all()


@each_page_size
def test_export_pages(cpu: Emulator, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (0, 1, 5, 40):
        for width in (0, 1, 4, 9):
            table = Table(n + 1, some_width(rng, size, 6), size)
            lengths = rng.integers(0, 6 * size + 1, n) * (rng.random(n) < 0.8)
            asked = Export(*(bool(rng.integers(3)) for _ in range(4)))
            rows = rng.permutation(n + 1)[:n].astype(np.int32)
            export(
                cpu, table, rows, lengths.astype(np.int32), width, rng, asked, **some_launch(rng)
            )


@pytest.mark.parametrize("missing", Export._fields)
def test_export_pages_without_one_output_or_with_it_alone(cpu: Emulator, missing: str) -> None:
    rng = np.random.default_rng(9)
    rows, lengths = np.array([2, 0, 3], np.int32), np.array([7, 0, 13], np.int32)
    for asked in (
        Export()._replace(**{missing: False}),
        Export(False, False, False, False)._replace(**{missing: True}),
    ):
        export(cpu, Table(4, 20, 4), rows, lengths, 5, rng, asked)


def test_replays_apply_one_staged_step_each(cpu: Emulator) -> None:
    rng = np.random.default_rng(10)
    for size in (1, 4, 6):
        table = Table(4, 40 * size, size)
        replays = Replays(table, ring=3, stride=1024)
        applied, held = 0, [0] * 4
        waiting: list[tuple[list[Growth], Any]] = []
        for turn in range(14):
            while len(waiting) < 3 and rng.random() < 0.5:
                rows = rng.permutation(4)[: rng.integers(1, 4)].tolist()
                growths = [Growth(row, held[row], 1 + turn % 2) for row in rows]
                for growth in growths:
                    held[growth.row] += growth.new
                ids = replays.stage(growths, rng, runs=bool(rng.integers(2)))
                waiting.append((growths, ids))
            if waiting:
                growths, ids = waiting.pop(0)
                expect_growth(table, growths, ids)
                applied += 1
            replays.replay(cpu, tile=2, **some_launch(rng))
            replays.check(applied)


def test_replays_count_on_past_32_bits(cpu: Emulator) -> None:
    rng = np.random.default_rng(11)
    table = Table(1, 40, 4)
    replays = Replays(table, ring=4, stride=512, before=2**32 - 2)
    for turn in range(4):
        growths = [Growth(0, turn, 1)]
        expect_growth(table, growths, replays.stage(growths, rng))
        replays.replay(cpu, grid=2, threads=32, tile=1)
        replays.check(2**32 - 1 + turn)


@pytest.mark.parametrize("address", [1 << 20, (1 << 20) + 4])
def test_the_host_tells_the_kernels_which_stores_are_aligned(address: int) -> None:
    for size in (*PAGE_SIZES, 8, 12, 20, 32):
        for width in (size, 7 * size, 7 * size + 1, 8 * size + 4):
            geometry = Geometry(address, 0, width, size, sms=132)
            assert geometry.arguments[-1] == quad_shift(size, width, address)
            assert 1 <= geometry.tile <= 1024
