"""page_watermarks on the CPU: its scan in every order of the blocks, and over many launches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda_on_cpu.emulator import Emulator, kernels
from cuda_on_cpu.launches import Scan, watermarks
from cuda_on_cpu.tables import PAGE_SIZES, Table, some_launch, some_requests, some_width


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
