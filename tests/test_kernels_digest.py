"""row_digest on the CPU, under sanitizers, and its twin in NumPy, which are byte-equal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from cuda_on_cpu.digests import Piece, hash_pieces
from cuda_on_cpu.emulator import CUDA, Buffer, Emulator, kernels
from cuda_on_cpu.tables import PAGE_SIZES, distinct, some_launch
from row_digests import entries_digest, weight

from sgalloc.device import row_digest
from sgalloc.device.kernels import THREADS
from sgalloc.device.row_digest import MAP_ENTRIES, PageWeights, digest, digests_of_pages, weights

each_page_size = pytest.mark.parametrize("size", PAGE_SIZES)
# The threads of a block take 16 entries each before they turn round.
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 31, 127, 128, 129, 511, 512, 513, 517, 1024, 2100]
FAR = 5_000_001 * 1008


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


def entries(rng: np.random.Generator, count: int) -> np.ndarray:
    """Entries of all 32 bits, 0 among them."""
    found = rng.integers(-(2**31), 2**31, count).astype(np.int32)
    found[rng.random(count) < 0.1] = 0
    return found


# -- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_range_of_any_length_begins_anywhere(cpu: Emulator, length: int) -> None:
    rng = np.random.default_rng(length)
    for lead in (0, 4, 8, 12):
        table = Buffer(entries(rng, length + 9), lead=lead)
        pieces = [Piece(0, start, length) for start in range(9)]
        for threads in (32, 64, 256):
            how = some_launch(rng)
            hash_pieces(cpu, [table, None, None, None], pieces, **{**how, "threads": threads})


@each_page_size
def test_rows_of_tables(cpu: Emulator, size: int) -> None:
    """Whole pages of rows, from none to all of them, in rows that end in a piece of a page."""
    rng = np.random.default_rng(size)
    row_pages = 9 if size > 100 else 40
    for rest in {0, size // 2, size - 1}:
        width = row_pages * size + rest
        table = Buffer(entries(rng, 6 * width).reshape(6, width))
        pieces = [
            Piece(0, row * width, extent * size)
            for row, extent in enumerate([0, 1, row_pages, *rng.integers(0, row_pages, 3).tolist()])
        ]
        pieces.append(Piece(0, 2 * width, width))
        order = rng.permutation(len(pieces)).tolist()
        hash_pieces(
            cpu, [table, None, None, None], [pieces[at] for at in order], **some_launch(rng)
        )


def test_all_four_arrays_in_one_launch(cpu: Emulator) -> None:
    rng = np.random.default_rng(1)
    arrays = [Buffer(entries(rng, 700 + 4 * n), lead=4 * n) for n in range(4)]
    pieces = [Piece(array, 3 * array, 680) for array in (3, 1, 0, 2)]
    for seed in range(4):
        hash_pieces(cpu, arrays, pieces, grid=2, threads=32, resident=2, seed=seed)
    # An array that no range names need not be there.
    for array in range(4):
        alone = [buffer if n == array else None for n, buffer in enumerate(arrays)]
        hash_pieces(cpu, alone, [Piece(array, 1, 690)], grid=1)


def test_very_many_short_ranges(cpu: Emulator) -> None:
    rng = np.random.default_rng(2)
    table = Buffer(entries(rng, 4000))
    pieces = [Piece(0, 4 * row, int(rng.integers(5))) for row in range(999)]
    for grid in (1, 7, 40):
        how = {"grid": grid, "threads": 32, "seed": grid, "resident": min(grid, 3)}
        hash_pieces(cpu, [table, None, None, None], pieces, **how)


def test_entries_behind_two_to_the_32(cpu: Emulator) -> None:
    rng = np.random.default_rng(3)
    assert FAR > 2**32
    table = Buffer(entries(rng, 3000), bias=4 * FAR)
    pieces = [Piece(0, FAR, 1008), Piece(0, FAR + 1008, 1007), Piece(0, FAR + 2018, 900)]
    hash_pieces(cpu, [table, None, None, None], pieces)
    hash_pieces(cpu, [None, None, table, None], [piece._replace(array=2) for piece in pieces])


def test_no_range_at_all(cpu: Emulator) -> None:
    hash_pieces(cpu, [Buffer(distinct(4)), None, None, None], [])


def test_blocks_share_the_ranges_in_any_order(cpu: Emulator) -> None:
    rng = np.random.default_rng(4)
    table = Buffer(entries(rng, 3000))
    pieces = [Piece(0, int(rng.integers(1000)), int(rng.integers(1500))) for _ in range(20)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        for resident in (1, 4):
            how = {"grid": 4, "threads": 96, "order": order, "resident": resident, "seed": 2}
            hash_pieces(cpu, [table, None, None, None], pieces, **how)


def test_a_block_of_the_host_fits_the_kernel() -> None:
    source = (CUDA / "row_digest.cu").read_text(encoding="utf-8")
    assert re.findall(r"kDigestThreads = (\d+);", source) == [str(THREADS)]
    assert row_digest.RANGE.itemsize == 16


# -- the twin ------------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_kernel_and_odd() -> None:
    for first, stop in ((0, 0), (0, 700), (65_530, 65_545), (2**31 - 3, 2**31)):
        found = weights(first, stop)
        assert found.tolist() == [weight(place) for place in range(first, stop)]
    many = weights(0, 1 << 20)
    assert (many % np.uint64(2) == 1).all()
    assert np.unique(many).size == many.size


@pytest.mark.parametrize("count", [0, 1, 5, 65_535, 65_536, 65_537, 200_000])
def test_the_digest_is_that_of_the_kernel(count: int) -> None:
    held = entries(np.random.default_rng(count), count)
    assert digest(held) == entries_digest(held)
    sparse = np.zeros_like(held)
    sparse[-1:] = -1
    assert digest(sparse) == entries_digest(sparse)


@each_page_size
def test_pages_are_summed_up_as_their_slots_are(size: int) -> None:
    """By their ids alone; rows of all lengths, and with nothing below a frontier."""
    rng = np.random.default_rng(size)
    row_pages = 40 if size < 1000 else 7
    last = (2**31 - 1) // size - 1
    pages = rng.integers(1, last, (61, row_pages)).astype(np.int32)
    rows = rng.permutation(np.arange(1, 61))
    stop = rng.integers(0, row_pages + 1, 60)
    for first in (None, rng.integers(0, stop + 1), stop.copy()):
        found = digests_of_pages(pages, rows, first, stop, size)
        for at, row in enumerate(rows.tolist()):
            slots = pages[row, : stop[at], None].astype(np.int64) * size + np.arange(size)
            if first is not None:
                slots[: first[at]] = 0
            assert digest(slots.reshape(-1).astype(np.int32)) == found[at]


def test_rows_of_one_length_and_no_rows() -> None:
    pages = np.arange(40, dtype=np.int32).reshape(4, 10)
    none = np.empty(0, np.int64)
    assert digests_of_pages(pages, none, None, none, 4).size == 0
    found = digests_of_pages(pages, np.array([3, 1]), None, np.array([10, 10]), 1)
    assert found.tolist() == [digest(pages[3]), digest(pages[1])]
    empty = digests_of_pages(pages, np.array([3, 1]), None, np.array([0, 0]), 16)
    assert empty.tolist() == [0, 0]


@pytest.mark.parametrize("size", [1, 3, 64, MAP_ENTRIES - 1, MAP_ENTRIES + 1, 3 * MAP_ENTRIES + 7])
def test_what_is_known_of_pages_grows_and_stays(size: int) -> None:
    """Pages larger than a block of weights, too."""
    whole, grown = PageWeights(size), PageWeights(size)
    whole.upto(5)
    for pages in (1, 2, 1, 4, 5):
        grown.upto(pages)
    word = weights(0, 5 * size).reshape(5, size)
    assert whole.sums[:5].tolist() == word.sum(1).tolist() == grown.sums[:5].tolist()
    offsets = (word * np.arange(size, dtype=np.uint64)).sum(1)
    behind = [0, *offsets.cumsum().tolist()]
    assert whole.behind[:6].tolist() == behind == grown.behind[:6].tolist()


# -- what a digest tells apart -------------------------------------------------------------------


def test_any_one_wrong_entry_changes_the_digest() -> None:
    """Whatever the place and the difference: weights are odd, and nothing wraps to 0."""
    rng = np.random.default_rng(5)
    held = entries(rng, 3000)
    right = digest(held)
    changes = [1, -1, 2**16, 2**30, -(2**31)]
    for place in [0, 1, 2, 3, 2999, *rng.integers(0, 3000, 200).tolist()]:
        for change in changes:
            wrong = held.copy()
            wrong[place : place + 1] += np.int32(change)
            assert digest(wrong) != right


def test_errors_that_cancel_in_a_plain_sum() -> None:
    """Pages exchanged, slots exchanged, one more here and one less there, a row moved on by one."""
    rng = np.random.default_rng(6)
    for size in (1, 3, 16, 64):
        slots = (rng.permutation(np.arange(1, 101))[:, None] * size + np.arange(size)).reshape(-1)
        held = slots.astype(np.int32)
        right = digest(held)
        for _ in range(300):
            a, b = rng.choice(100, 2, replace=False)
            wrong = held.reshape(100, size).copy()
            wrong[[a, b]] = wrong[[b, a]]
            assert digest(wrong.reshape(-1)) != right
            wrong = held.copy()
            c, d = rng.choice(held.size, 2, replace=False)
            wrong[c] += 1
            wrong[d] -= 1
            assert digest(wrong) != right
        assert digest(np.roll(held, 1)) != right
        assert digest(held[::-1].copy()) != right
        for power in range(1, 31):
            wrong = held.copy()
            wrong[0] ^= np.int32(1 << power)
            wrong[1] ^= np.int32(1 << power)
            assert digest(wrong) != right
