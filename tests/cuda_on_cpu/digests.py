"""Launches of row_digest on the CPU, held against the promise of its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer, Emulator, Stats
from row_digests import entries_digest

RANGE = np.dtype([("start", "<i8"), ("length", "<i4"), ("array", "<i4")])


class Piece(NamedTuple):
    """Entries to be hashed: so many of that array, from ``start`` on."""

    array: int
    start: int
    length: int


def hash_pieces(
    emulator: Emulator,
    arrays: Sequence[Buffer | None],
    pieces: Sequence[Piece],
    *,
    grid: int = 3,
    threads: int = 64,
    **how: Any,
) -> Stats:
    """Launch row_digest over ``pieces`` of up to four arrays, and compare every digest."""
    wanted = []
    for array, start, length in pieces:
        buffer = arrays[array]
        assert buffer is not None
        first = start - buffer.bias // 4
        wanted.append(entries_digest(buffer.data.reshape(-1)[first : first + length]))
    ranges = np.array([(p.start, p.length, p.array) for p in pieces], RANGE)
    digests = Buffer(np.full(len(pieces) + 1, 7, np.uint64), writable=True)
    count = np.int32(len(pieces))
    stats = emulator.launch(
        "row_digest", grid, threads, [*arrays, Buffer(ranges), count, digests], **how
    )
    assert digests.data.tolist() == [*wanted, 7]
    return stats
