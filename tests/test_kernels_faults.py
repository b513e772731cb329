"""Faults planted into the kernels: the launches that the tests make find every one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.digests import Piece, hash_pieces
from cuda_on_cpu.emulator import (
    CUDA,
    Buffer,
    Emulator,
    HostWrite,
    LaunchFailed,
    build,
    kernels,
    mutated,
    require_compiler,
    require_tsan,
)
from cuda_on_cpu.faults import FAULTS, RACES, Fault
from cuda_on_cpu.launches import Replays, Scan, assign, assign_mapped, export, watermarks
from cuda_on_cpu.sides import Side, SidePage, some_pages, some_side
from cuda_on_cpu.tables import Growth, Table, expect_growth, some_requests

FAR_ROW = 5_000_001
Battery = Callable[[Emulator], None]


def assign_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(1)
    for seed in range(4):
        how: dict[str, Any] = {"grid": 2, "threads": 32, "seed": seed, "tile": 7}
        for size, runs in ((4, True), (3, True), (16, False), (12, False), (1, True)):
            for even in (False, True):
                # The blocks run one after the other, the last one first. It gathers slots of
                # the second request, whose page the other one writes.
                growths = [
                    Growth(0, 1, 34, 0, 2 if even else 35),
                    Growth(1, 3, 1, 4 * size - 2, 2),
                    Growth(4, 5, 30, 6, 2 if even else 9),
                    Growth(3, 2, 7),
                    Growth(2, 3, 0, 1, 2),
                ]
                table = Table(5, 35 * size, size, with_pages=even)
                told = {"runs": runs, "tiled": runs and seed % 2 == 0, "wide": size == 16}
                assign(emulator, table, growths, rng, **told, order=[1, 0], **how)
        # More slots are asked for than there are threads.
        for asked in (70, 69):
            growths = [Growth(1, 2, 22, 3, 70), Growth(0, 22, 2, 5, asked)]
            assign(emulator, Table(2, 96, 4), growths, rng, grid=1, threads=32, seed=seed)
        for size, width in ((3, 1008), (3, 1009)):
            table = Table(3, width, size, first_row=FAR_ROW)
            growths = [Growth(1, 3, 2, 2, 3 * size)]
            assign(emulator, table, growths, rng, **how)


def scan_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(2)
    full = np.full(3, (2**31 - 1) // 5 * 5, np.int32)
    table = Table(1, int(full[0]) + 2, 5, first_page=int(full[0]) // 5 - 2)
    watermarks(emulator, table, full * 0, full - 4, full, 4, rng)
    # The first tile keeps 39 others waiting, which hear more than 32 aggregates.
    rows, committed, allocated, reserves = some_requests(rng, 1270, 1, 2, 2)
    how: dict[str, Any] = {"resident": 40, "seed": 2, "stall": True, "tile_requests": 32}
    watermarks(emulator, Table(1273, 2, 1), rows, committed, allocated, reserves, rng, **how)
    # Two tiles come late: the nearest that has told the sum is one, two or three windows away.
    rows, committed, allocated, reserves = some_requests(rng, 602 * 32, 1, 2, 2)
    for nearest in (0, 255, 256, 257, 300, 340, 512, 598, 599):
        summed = [tile <= nearest and tile % 64 == nearest % 64 for tile in range(600)]
        how = {"tile_requests": 32, "seed": nearest, "resident": 2, "summed": summed}
        table = Table(602 * 32 + 3, 2, 1)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, **how)
    scan = Scan(4)
    for seed in range(6):
        rows, committed, allocated, reserves = some_requests(rng, 3500, 8, 8, 24)
        how = {"resident": 4, "seed": seed, "stall": seed % 2 == 1}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
        how = {"order": [3, 2, 1, 0], "seed": seed, "tile_pages": 100}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
    for seed, (n, tile) in enumerate(((1000, 96), (1500, 600), (900, 32)), start=1):
        rows, committed, allocated, reserves = some_requests(rng, n, 4, 6, 12)
        how = {"resident": 3, "seed": seed, "tile_requests": tile, "tile_pages": 150}
        table = Table(n + 3, 24, 4)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, **how)


def export_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(3)
    lengths = np.array([0, 7, 12, 20, 0, 1, 16, 0], np.int32)
    rows = np.array([2, 0, 3, 7, 1, 4, 6, 5], np.int32)
    for width in (3, 5, 8):
        export(emulator, Table(8, 21, 4), rows, lengths, width, rng, seed=2)
    export(emulator, Table(8, 1001, 4, first_row=FAR_ROW), rows, lengths, 5, rng)


def replay_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(4)
    table = Table(2, 80, 4)
    replays = Replays(table, ring=2, stride=1024)
    for turn in range(6):
        if turn % 3 < 2:
            growths = [Growth(turn % 2, turn, 3)]
            expect_growth(table, growths, replays.stage(growths, rng))
        replays.replay(emulator, grid=3, threads=32, tile=1, seed=turn)
        replays.check(turn + 1 - (turn + 1) // 3)


def staging_battery(emulator: Emulator) -> None:
    """The host stages a step while its replay runs: both blocks take it, or none does."""
    rng = np.random.default_rng(6)
    growths = [Growth(0, 0, 4)]
    for at in range(0, 100, 4):
        table = Table(1, 40, 4)
        replays = Replays(table, ring=4, stride=1024)
        ids = replays.stage(growths, rng)
        offset, serial = replays.serial_of(1)
        replays.steps.data[offset : offset + 4] = 0
        write = HostWrite(at, replays.steps, offset, serial)
        how: dict[str, Any] = {"grid": 2, "threads": 32, "tile": 1, "seed": 2}
        replays.replay(emulator, **how, resident=2, stall=True, host_write=write)
        applied = int(replays.applied.data[0])
        if applied:
            expect_growth(table, growths, ids)
        replays.check(applied)


def mapped_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(7)
    for seed, size in enumerate((1, 4, 3, 12)):
        for tile, threads, captured in ((7, 32, False), (96, 256, True), (40, 64, False)):
            # The first page of all tables has the place 0.
            growths = [Growth(3, 1, 40), Growth(0, 0, 9), Growth(1, 30, 12)]
            table = Table(4, 43 * size + seed, size, with_pages=tile == 7)
            how: dict[str, Any] = {"tile": tile, "threads": threads, "captured": captured}
            assign_mapped(emulator, table, growths, rng, seed=seed, **how)
    full = [Growth(1, 0, 500), Growth(0, 1, 524)]
    for captured in (False, True):
        how = {"tile": 96, "threads": 96, "captured": captured}
        assign_mapped(emulator, Table(2, 525, 1), full, rng, **how)


def beside_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(9)
    for seed, (size, lead) in enumerate(((4, 0), (3, 0), (1, 0), (16, 4), (12, 0))):
        table = Table(12, 9 * size + seed % 2, size, lead=lead)
        side = Side(table, 60, lead=lead)
        pages = [
            SidePage(0, 0, 5, 6),
            SidePage(3, 8, (2**31 - 1) // size - 1, 1),
            SidePage(2, 3, 0, 2),
            SidePage(None, 0, 7, 3),
            SidePage(1, 4, 8, 0),
            SidePage(None, 0, 0, 4),
        ]
        many = [SidePage(4 + n // 9, n % 9, 900 + n, n + 10) for n in range(45)]
        growths = [Growth(1, 2, 3), Growth(5, 0, 9)]
        for tile, threads, captured in ((7, 32, False), (96, 256, True), (40, 64, False)):
            how: dict[str, Any] = {"tile": tile, "threads": threads, "captured": captured}
            for told in (pages, pages[::-1] + many, []):
                for grown in (growths, []):
                    assign_mapped(emulator, table, grown, rng, side=(side, told), seed=seed, **how)
        for shown, mapped in ((True, False), (False, True)):
            side = Side(table, 6, shown=shown, mapped=mapped, lead=lead)
            assign_mapped(emulator, table, growths, rng, side=(side, pages), **how)
    for size in (3, 4):
        last = (2**31 - 1) // size - 1
        table = Table(3, 1008, size, first_row=FAR_ROW)
        side = Side(table, 40, first_main=last - 40)
        pages = [SidePage(2, 5, 9, last), SidePage(1, 3, 8, last - 39)]
        assign_mapped(emulator, table, [], rng, tile=64, captured=False, side=(side, pages))
    table = Table(40, 32, 1)
    side = Side(table, 1100)
    full = [SidePage(n // 32, n % 32, 1 + n, 1 + n) for n in range(1024)]
    assign_mapped(emulator, table, [], rng, tile=96, captured=True, side=(side, full))


def side_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(8)
    for size, lead in ((4, 0), (3, 0), (1, 0), (16, 4), (12, 0)):
        table = Table(4, 9 * size, size, lead=lead)
        last = (2**31 - 1) // size - 1
        side = Side(table, 6, lead=lead)
        pages = [
            SidePage(0, 0, last, 6),
            SidePage(3, 8, 5, 1),
            SidePage(2, 3, 0, 2),
            SidePage(None, 0, 7, 3),
            SidePage(1, 4, 8, 0),
            SidePage(None, 0, 0, 4),
        ]
        growths = [Growth(1, 2, 3, size, size)]
        assign(emulator, table, [], rng, side=(side, pages), grid=1, threads=32)
        assign(emulator, table, growths, rng, side=(side, pages[::-1]), grid=2, threads=32, tile=2)
        assign(emulator, table, growths, rng, side=(side, pages), small=True, grid=2, threads=32)
        for shown, mapped in ((True, False), (False, True)):
            side = Side(table, 6, shown=shown, mapped=mapped, lead=lead)
            assign(emulator, table, [], rng, side=(side, pages), grid=1, threads=32)
        table = Table(2, 40 * size, size)
        side = Side(table, 90)
        replays = Replays(table, ring=2, stride=4096)
        for turn in range(3):
            beside = some_pages(rng, side)
            growths = [Growth(turn % 2, turn, 2)]
            expect_growth(table, growths, replays.stage(growths, rng, side=(side, beside)))
            side.expect(beside)
            replays.replay(emulator, grid=3, threads=32, tile=1, seed=turn)
            replays.check(turn + 1)
            side.check()
    for size in (3, 4):
        table = Table(3, 1008, size, first_row=FAR_ROW)
        side = some_side(rng, table)
        assign(emulator, table, [], rng, side=(side, [SidePage(2, 5, 9, 3)]), grid=1, threads=32)


def digest_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(9)
    for seed, lead in enumerate((0, 4, 8, 12)):
        arrays = [
            Buffer(rng.integers(-(2**31), 2**31, 1500 + 4 * n).astype(np.int32), lead=lead)
            for n in range(4)
        ]
        pieces = [
            Piece(array, start, length)
            for array, start, length in (
                (0, 0, 1500), (3, 1, 1400), (1, 5, 600), (2, 2, 6), (0, 7, 1), (1, 3, 2), (2, 0, 0),
                (3, 40, 129),
            )
        ]  # fmt: skip
        hash_pieces(emulator, arrays, pieces, grid=3, threads=64, seed=seed)
        hash_pieces(emulator, arrays, pieces[::-1], grid=1, threads=32, seed=seed + 4)
    far = 5_000_001 * 1008
    table = Buffer(rng.integers(1, 2**31, 1100).astype(np.int32), bias=4 * far)
    hash_pieces(emulator, [table, None, None, None], [Piece(0, far + 3, 1050)], threads=32)


BATTERIES: dict[str, tuple[str, Battery]] = {
    "assign": ("assign_pages.cu", assign_battery),
    "mapped": ("assign_pages.cu", mapped_battery),
    "replay": ("assign_pages.cu", replay_battery),
    "staging": ("assign_pages.cu", staging_battery),
    "side": ("assign_pages.cu", side_battery),
    "beside": ("assign_pages.cu", beside_battery),
    "scan": ("page_watermarks.cu", scan_battery),
    "export": ("export_pages.cu", export_battery),
    "digest": ("row_digest.cu", digest_battery),
}


def racing_battery(emulator: Emulator) -> None:
    """A few launches whose blocks all run at a time."""
    rng = np.random.default_rng(5)
    for runs in (False, True):
        # The first block writes the first new page of the last request, the second one reads it.
        growths = [Growth(0, 1, 18, 3, 12), Growth(2, 0, 1), Growth(1, 3, 6, 2, 30)]
        how: dict[str, Any] = {"grid": 3, "resident": 3, "threads": 32, "seed": 2}
        told = {"runs": runs, "tile": 3}
        assign(emulator, Table(5, 168, 8), growths, rng, **told, tiled=runs, **how)
        assign(emulator, Table(5, 168, 8), growths, rng, **told, **how)
    for size in (8, 3):
        table = Table(5, 21 * size, size)
        side = Side(table, 100)
        told = {"side": (side, some_pages(rng, side)), "tile": 3}
        how = {"grid": 3, "resident": 3, "threads": 32, "seed": 2}
        assign(emulator, table, [Growth(0, 1, 18, 3, 12), Growth(1, 3, 6)], rng, **told, **how)
    how = {"tile": 7, "captured": False, "resident": 3, "threads": 32, "seed": 2}
    growths = [Growth(0, 1, 18), Growth(1, 0, 6)]
    assign_mapped(emulator, Table(2, 168, 8), growths, rng, **how)
    for size in (8, 3):
        table = Table(5, 21 * size, size)
        side = Side(table, 100)
        beside = (side, some_pages(rng, side))
        assign_mapped(emulator, table, growths, rng, side=beside, **how)
    rows, committed, allocated, reserves = some_requests(rng, 3500, 8, 8, 24)
    scan = Scan(4)
    for seed in (2, 3):
        how = {"resident": 4, "seed": seed, "tile_pages": 200}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
    rows, committed, allocated, reserves = some_requests(rng, 602 * 32, 1, 2, 2)
    summed = [tile == 3 for tile in range(600)]
    how = {"resident": 2, "seed": 2, "tile_requests": 32, "summed": summed}
    watermarks(
        emulator, Table(602 * 32 + 3, 2, 1), rows, committed, allocated, reserves, rng, **how
    )
    lengths = np.array([0, 7, 12, 20, 0, 1, 16, 0], np.int32)
    rows = np.array([2, 0, 3, 7, 1, 4, 6, 5], np.int32)
    export(emulator, Table(8, 21, 4), rows, lengths, 5, rng, grid=3, resident=3, seed=2)
    held = Buffer(np.arange(900, dtype=np.int32))
    pieces = [Piece(0, at, 400) for at in range(0, 500, 70)]
    how = {"grid": 3, "resident": 3, "threads": 64, "seed": 2}
    hash_pieces(emulator, [held, None, None, None], pieces, **how)
    replays = Replays(Table(2, 80, 4), ring=2, stride=1024)
    for turn in range(2):
        growths = [Growth(turn, 0, 5)]
        expect_growth(replays.table, growths, replays.stage(growths, rng))
        replays.replay(emulator, grid=3, threads=32, tile=1, resident=3, seed=2)
        replays.check(turn + 1)


@pytest.mark.parametrize("battery", BATTERIES)
def test_the_sources_as_they_are_pass_every_battery(battery: str) -> None:
    with Emulator(kernels()) as emulator:
        BATTERIES[battery][1](emulator)


class Ahead:
    """Programs with a fault each, of which the next few are built while one is tried."""

    def __init__(self, faults: dict[str, Fault], tsan: bool, folder: Path) -> None:
        self._faults, self._names = faults, list(faults)
        self._build = build(tsan)
        self._folder = folder
        self._cores = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._cores)
        self._programs: dict[str, Future[Path]] = {}

    def _make(self, number: int) -> Path:
        battery, *where = self._faults[self._names[number]]
        name = f"{self._folder.name}-{number}"
        cuda = mutated(self._folder / str(number), *where)
        sources = sorted(cuda.glob("*.cu" if self._build.tsan else BATTERIES[battery][0]))
        return self._build.program(name, sources, cuda)

    def __getitem__(self, fault: str) -> Path:
        at = self._names.index(fault)
        for number in range(at, min(at + 1 + self._cores, len(self._names))):
            name = self._names[number]
            if name not in self._programs:
                self._programs[name] = self._pool.submit(self._make, number)
        return self._programs[fault].result()

    def close(self) -> None:
        """Build no more."""
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    require_compiler()
    ahead = Ahead(FAULTS, False, tmp_path_factory.mktemp("faulty"))
    yield ahead
    ahead.close()


@pytest.fixture(scope="module")
def racing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    require_tsan()
    ahead = Ahead(RACES, True, tmp_path_factory.mktemp("racing"))
    yield ahead
    ahead.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, faulty: Ahead) -> None:
    program = faulty[fault]
    with Emulator(program, timeout_s=10) as emulator, pytest.raises(AssertionError):
        BATTERIES[FAULTS[fault].battery][1](emulator)


def test_the_kernels_have_no_race_within_blocks_or_between_them() -> None:
    require_tsan()
    program = build(tsan=True).program("sound", sorted(CUDA.glob("*.cu")))
    with Emulator(program) as emulator:
        racing_battery(emulator)


@pytest.mark.parametrize("fault", RACES)
def test_a_planted_race_is_found(fault: str, racing: Ahead) -> None:
    program = racing[fault]
    with Emulator(program) as emulator, pytest.raises(LaunchFailed, match="data race"):
        racing_battery(emulator)
