"""The kernel of debug mode's poison, run on the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.emulator import Buffer, Emulator, build, kernels, mutated

from sgalloc.device.poisoning import POISON

# Behind so many rows of a thousand entries, places lie past 2**32.
FAR_ROW = 5_000_001


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


def poisoned(
    emulator: Emulator,
    shape: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    first_row: int = 0,
    grid: int = 2,
    threads: int = 32,
) -> None:
    """Launch it, and hold every entry of the table against NumPy."""
    entries = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    wanted = entries.copy()
    wanted[slice(*rows), slice(*columns)] = POISON
    table = Buffer(entries.copy(), writable=True, bias=4 * first_row * shape[1])
    emulator.launch(
        "poison_rows",
        grid,
        threads,
        [
            table,
            np.int64(shape[1]),
            np.int64(first_row + rows[0]),
            np.int64(rows[1] - rows[0]),
            np.int64(columns[0]),
            np.int64(columns[1]),
            np.int32(POISON),
        ],
    )
    np.testing.assert_array_equal(table.data, wanted)


BLOCKS = [
    ((5, 7), (1, 5), (0, 7)),
    ((5, 7), (2, 3), (3, 7)),
    ((6, 50), (1, 4), (49, 50)),
    ((2, 300), (1, 2), (0, 300)),
    ((40, 3), (3, 39), (1, 2)),
]


@pytest.mark.parametrize(("shape", "rows", "columns"), BLOCKS)
def test_entries_of_the_block_and_no_others(
    cpu: Emulator, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    poisoned(cpu, shape, rows, columns)
    poisoned(cpu, shape, rows, columns, grid=1, threads=7)


def test_entries_past_32_bits(cpu: Emulator) -> None:
    poisoned(cpu, (3, 1000), (1, 3), (990, 1000), FAR_ROW)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(row + down) * width", "row * width"),
        ("at < rows * span", "at < rows * span - 1"),
        ("stop - first", "stop - first + 1"),
        ("first + at - down * span", "at - down * span"),
        ("(row + down) * width", "static_cast<i32>((row + down) * width)"),
    ],
)
def test_a_fault_is_seen(tmp_path: Path, old: str, new: str) -> None:
    cuda = mutated(tmp_path / "cuda", "poison.cu", old, new)
    program = build().program("poison", [cuda / "poison.cu"], cuda)
    with Emulator(program) as emulator, pytest.raises(AssertionError):
        for shape, rows, columns in BLOCKS:
            poisoned(emulator, shape, rows, columns)
        poisoned(emulator, (3, 1000), (1, 3), (990, 1000), FAR_ROW)
