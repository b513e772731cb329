"""page_watermarks on the CPU: its scan in every order of the blocks, and over many launches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda_on_cpu.emulator import Emulator, build, kernels, mutated, require_compiler
from cuda_on_cpu.launches import Scan, watermarks
from cuda_on_cpu.tables import PAGE_SIZES, Table, some_launch, some_requests, some_width

NARROW = 32


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


@pytest.mark.parametrize("size", PAGE_SIZES)
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
        tile = 1024 if n > 100 else int(rng.choice([32, 256, 1024]))
        how = some_launch(rng, grid=-(-n // tile))
        watermarks(
            cpu,
            table,
            rows,
            committed,
            allocated,
            int(rng.integers(size + 1)) if equal else reserves,
            rng,
            tile_pages=int(rng.choice([1, 3, 256, 1000, 1024])) if n < 100 else 1024,
            tile_requests=tile,
            **{name: how[name] for name in ("order", "resident", "seed")},
        )


@pytest.mark.parametrize(
    "tile", [32, 33, 64, 96, 128, 255, 256, 257, 500, 511, 512, 513, 768, 1000, 1023, 1024]
)
def test_a_tile_has_any_number_of_requests(cpu: Emulator, tile: int) -> None:
    rng = np.random.default_rng(tile)
    for n in (1, tile - 1, tile, tile + 1, 3 * tile, 5 * tile - 3, 5 * tile + 3):
        size, row_pages = int(rng.choice([1, 3, 4, 16])), int(rng.integers(1, 6))
        rows, committed, allocated, reserves = some_requests(rng, n, size, row_pages, 3 * size)
        table = Table(n + 3, some_width(rng, size, row_pages), size, with_pages=n % 2 == 0)
        how = some_launch(rng, grid=-(-n // tile))
        watermarks(
            cpu,
            table,
            rows,
            committed,
            allocated,
            reserves,
            rng,
            tile_pages=int(rng.choice([100, 1024])),
            tile_requests=tile,
            **{name: how[name] for name in ("order", "resident", "seed")},
        )


@pytest.mark.parametrize("order", ["up", "down", "drawn"])
@pytest.mark.parametrize("resident", [1, 3, 9])
@pytest.mark.parametrize("tile", [96, 1024])
def test_page_watermarks_in_every_order_of_its_blocks(
    cpu: Emulator, order: str, resident: int, tile: int
) -> None:
    rng = np.random.default_rng(resident)
    n, size = 9 * tile - 50, 4
    for seed in range(2):
        blocks = {"up": np.arange(9), "down": np.arange(9)[::-1], "drawn": rng.permutation(9)}
        rows, committed, allocated, reserves = some_requests(rng, n, size, 4, 3 * size)
        how = {"order": blocks[order].tolist(), "resident": resident, "seed": seed + 1}
        table = Table(n + 3, 16, size)
        how["tile_requests"] = tile
        watermarks(cpu, table, rows, committed, allocated, reserves, rng, **how)


@pytest.mark.parametrize("tile", [32, 1024])
def test_a_tile_waits_for_many_that_know_only_their_own_sum(cpu: Emulator, tile: int) -> None:
    """The first block is held up, so that others hear 32 aggregates and have to look further."""
    rng = np.random.default_rng(5)
    n = 40 * tile - 7
    rows, committed, allocated, reserves = some_requests(rng, n, 2, 3, 4)
    table = Table(n + 3, 6, 2)
    how = {"resident": 40, "stall": True, "seed": 2, "tile_requests": tile}
    stats = watermarks(cpu, table, rows, committed, allocated, reserves, rng, **how)
    assert stats.spins > 0
    assert stats.empty_ballots > 0


WINDOWS = (0, 1, 30, 31, 32, 33, 254, 255, 256, 257, 511, 512, 513, 800, 1050)


@pytest.mark.parametrize("away", WINDOWS)
def test_the_nearest_sum_may_be_any_number_of_tiles_away(cpu: Emulator, away: int) -> None:
    """Other blocks have taken the tiles before, and told of them what they know by now."""
    rng = np.random.default_rng([away, 9])
    tile, late = 32, 3
    for others in sorted({away + 1, away + 40, 1100}):
        n = (others + late) * tile - 5
        rows, committed, allocated, reserves = some_requests(rng, n, 2, 3, 4)
        nearest = others - 1 - away
        # The first tile knows the sum as soon as it is counted; those before the nearest may.
        summed = [
            t == 0 or t == nearest or (t < nearest and rng.random() < 0.3) for t in range(others)
        ]
        scan = Scan(others + late, epoch=7, tickets=2**32 - 20)
        scan.words.data[:] = rng.integers(0, 7 << 34, others + late)  # of earlier launches
        how = {"order": rng.permutation(late).tolist(), "resident": int(rng.integers(1, 4))}
        how |= {"seed": int(rng.integers(100)), "tile_requests": tile, "summed": summed}
        table = Table(n + 3, 6, 2)
        watermarks(cpu, table, rows, committed, allocated, reserves, rng, scan, **how)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """The same kernel with blocks of 32 threads, of which hundreds run at a time here."""
    require_compiler()
    folder = tmp_path_factory.mktemp("narrow") / "cuda"
    cuda = mutated(folder, "page_watermarks.cu", "kThreads = 256", f"kThreads = {NARROW}")
    program = build().program("narrow", [cuda / "page_watermarks.cu"], cuda)
    with Emulator(program) as emulator:
        yield emulator


@pytest.mark.parametrize("order", ["up", "down", "drawn"])
@pytest.mark.parametrize("stall", [False, True], ids=["free", "stalled"])
def test_hundreds_of_tiles_wait_at_a_time_in_every_order(
    narrow: Emulator, order: str, stall: bool
) -> None:
    """More windows than on a GPU: each block listens to 32 tiles at a time, of 300."""
    rng = np.random.default_rng(14)
    tiles, tile = 300, 32
    n = tiles * tile - 9
    blocks = {"up": np.arange(tiles), "down": np.arange(tiles)[::-1]}
    for seed, resident in ((2, tiles), (3, 270), (6, 17)):
        rows, committed, allocated, reserves = some_requests(rng, n, 1, 3, 2)
        how = {"order": blocks.get(order, rng.permutation(tiles)).tolist(), "resident": resident}
        how |= {"threads": NARROW, "stall": stall, "seed": seed, "tile_requests": tile}
        table = Table(n + 3, 3, 1)
        stats = watermarks(narrow, table, rows, committed, allocated, reserves, rng, **how)
        assert stats.empty_ballots > tiles or not stall or resident < tiles


@pytest.mark.parametrize("resident", [1, 6])
def test_more_tiles_than_a_window_in_one_launch(cpu: Emulator, resident: int) -> None:
    rng = np.random.default_rng(resident)
    tiles = 300
    n = tiles * 32 - 1
    rows, committed, allocated, reserves = some_requests(rng, n, 4, 3, 9)
    how = {"order": rng.permutation(tiles).tolist(), "resident": resident, "seed": 5}
    table = Table(n + 3, 12, 4)
    watermarks(cpu, table, rows, committed, allocated, reserves, rng, tile_requests=32, **how)


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


@pytest.mark.parametrize(
    ("epoch", "tickets"), [(1, 0), (2**30 - 7, 2**32 - 9)], ids=["first", "last"]
)
def test_launches_in_a_row_share_words_and_ticket(cpu: Emulator, epoch: int, tickets: int) -> None:
    """What earlier launches left in the words, of more tiles or fewer, is not taken for new."""
    rng = np.random.default_rng(8)
    scan = Scan(16, epoch, tickets)
    for n, tile in (
        (5000, 1024),
        (900, 1024),
        (4000, 256),
        (5000, 1024),
        (2100, 150),
        (500, 32),
        (5000, 512),
    ):
        rows, committed, allocated, reserves = some_requests(rng, n, 3, 4, 9)
        how = {"resident": 4, "seed": int(rng.integers(100)), "stall": bool(rng.integers(2))}
        words = scan.words.data.copy()
        tiles = -(-n // tile)
        table = Table(n + 3, 13, 3)
        how["tile_requests"] = tile
        watermarks(cpu, table, rows, committed, allocated, reserves, rng, scan, **how)
        assert (scan.words.data[tiles:] == words[tiles:]).all()
        assert (scan.words.data[:tiles] >> np.uint64(34) == scan.epoch - 1).all()
