"""Steps as the host lays them out for struct Step of assign_pages.cu to read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda_on_cpu.emulator import Buffer
from cuda_on_cpu.sides import Side, SidePage
from cuda_on_cpu.tables import Growth, Int32, Rng, Table, distinct
from numpy.typing import NDArray

NEVER = 2**31 - 1  # `first_new` of a request that this launch gives no page
STEP = struct.Struct("<6iQ8iIi14i")
SERIAL_AT = 64
assert STEP.size == 128
# A step in mapped memory: so many pages, so many requests of the gather, and so many pages of a
# second group, at fixed places.
FIXED_PAGES = 1024
FIXED_BYTES = STEP.size + (8 + 4 + 4 * 4 + 16) * FIXED_PAGES


class Told(NamedTuple):
    """What a step says in its header, beside the arrays in the order of its fields."""

    head: tuple[int, int, int, int, int, int]
    arrays: list[NDArray[Any]]

    def tile_runs(self, tile: int) -> Int32:
        """The run of the first page of each tile, and the last run."""
        run_of = np.repeat(np.arange(self.head[1]), np.diff([*self.arrays[2], self.head[0]]))
        return np.array([*run_of[::tile], self.head[1] - 1], np.int32)

    @property
    def total(self) -> int:
        """Slots asked for."""
        return self.head[3]


def tell(
    table: Table, growths: Sequence[Growth], ids: Int32, runs: bool, wide: bool, idle: bool
) -> Told:
    """A step of `growths`. Where `idle`, its gather names requests that ask for no slot too."""
    new = np.array([g.new for g in growths], np.int64)
    firsts = np.cumsum(new) - new
    growing = [i for i, g in enumerate(growths) if g.new]
    starts = [
        (table.first_row + growths[i].row) * table.row_pages + growths[i].old for i in growing
    ]
    asking = [i for i, g in enumerate(growths) if idle or g.asked]
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
    segments = len(growing) if runs else 0
    head = (len(ids), segments, len(asking), int(asked.sum()), uniform, int(wide))
    return Told(head, arrays)


def out_of(told: Told, wide: bool) -> Buffer:
    """The array for the slots that a step asks for."""
    return Buffer(distinct(told.total).astype(np.int64 if wide else np.int32), True)


def step_of(
    table: Table,
    growths: Sequence[Growth],
    ids: Int32,
    *,
    runs: bool = False,
    wide: bool = False,
    idle: bool = False,
    serial: int = 0,
    tile: int = 0,
    side: tuple[Side, Sequence[SidePage]] | None = None,
    rng: Rng,
) -> tuple[Buffer, Buffer]:
    """The step that tells the kernel of `growths`, and the array for the slots asked for.

    With `tile`, the pages of a tile, it says which run the first page of each tile is of.
    Around each array lies a hole that nobody may touch, and an array that the kernel has no use
    for is a hole altogether. Arrays start at odd multiples of their entries' size at times.
    """
    told = tell(table, growths, ids, runs, wide, idle)
    tiled = bool(tile and told.head[1])
    arrays = [*told.arrays, *([told.tile_runs(tile)] if tiled else [])]
    beside = side[0].arrays(side[1]) if side is not None else []
    arrays += beside
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
    tail = _side_words(beside, offsets[-3:])
    head = STEP.pack(*told.head, 0, *offsets[:8], serial, offsets[8] if tiled else 0, *tail)
    data[: STEP.size] = np.frombuffer(head, np.uint8)
    out = out_of(told, wide)
    links = {24: out} if side is None else {24: out, **side[0].links}
    return Buffer(data, holes=holes, links=links), out


def _side_words(arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> list[int]:
    """The words of the header behind the tile runs; the addresses are links."""
    if not arrays:
        return [0] * 14
    return [0, 0, 0, 0, arrays[0].size, *offsets, *[0] * 6]


# Where in a small slot the places, the ids, and the arrays of the gather are.
_PLACES_AT = STEP.size
_IDS_AT = _PLACES_AT + 8 * FIXED_PAGES
_GATHER_AT = [_IDS_AT + 4 * FIXED_PAGES * n for n in range(1, 5)]
_SIDE_AT = [_GATHER_AT[-1] + 4 * FIXED_PAGES * n for n in (1, 3, 4)]


def mapped_step_of(
    table: Table,
    growths: Sequence[Growth],
    ids: Int32,
    read: int,
    side: tuple[Side, Sequence[SidePage]] | None = None,
) -> Buffer:
    """A step of pages alone at their fixed places, with -1 behind the last of them.

    The first `read` entries of each array may be read; the header and all else is a hole.
    """
    told = tell(table, growths, ids, runs=False, wide=False, idle=False)
    arrays: list[tuple[int, NDArray[Any], int | None]] = [
        (_PLACES_AT, told.arrays[0], -1),
        (_IDS_AT, ids, None),
    ]
    if side is not None:
        places, numbers, mains = side[0].arrays(side[1])
        arrays += zip(_SIDE_AT, (places, numbers, mains), (None, -1, None), strict=True)
    data = np.zeros(FIXED_BYTES, np.uint8)
    holes, end = [], 0
    for begin, array, behind in arrays:
        width = array.dtype.itemsize
        entries = data[begin : begin + width * FIXED_PAGES].view(array.dtype)
        # What an earlier step left may stand behind the entries of this one.
        entries[:] = distinct(FIXED_PAGES) if behind is None else behind
        entries[: len(array)] = array
        holes.append((end, begin))
        end = begin + width * read
    holes.append((end, FIXED_BYTES))
    return Buffer(data, holes=[hole for hole in holes if hole[0] < hole[1]])


def small_step_of(
    table: Table,
    growths: Sequence[Growth],
    ids: Int32,
    *,
    wide: bool,
    side: tuple[Side, Sequence[SidePage]] | None = None,
) -> tuple[Buffer, Buffer]:
    """A step at fixed places, with a gather of as many slots of each request."""
    told = tell(table, growths, ids, runs=False, wide=wide, idle=False)
    places, _, _, row, start, offset, first_new, new_at = told.arrays
    assert not offset.size, "a small step gathers as many slots of each request"
    data = np.zeros(FIXED_BYTES, np.uint8)
    offsets = [_PLACES_AT, _IDS_AT, 0, *_GATHER_AT[:2], 0, *_GATHER_AT[2:]]
    beside = side[0].arrays(side[1]) if side is not None else [np.empty(0, np.int32)] * 3
    arrays = (places, ids, row, start, first_new, new_at, *beside)
    starts = [_PLACES_AT, _IDS_AT, *_GATHER_AT, *_SIDE_AT, FIXED_BYTES]
    holes = []
    for array, begin, end in zip(arrays, starts, starts[1:], strict=False):
        data[begin : begin + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        if begin + array.nbytes < end:
            holes.append((begin + array.nbytes, end))
    head = STEP.pack(*told.head, 0, *offsets, 0, 0, *_side_words(beside, _SIDE_AT))
    data[: STEP.size] = np.frombuffer(head, np.uint8)
    out = out_of(told, wide)
    links = {24: out} if side is None else {24: out, **side[0].links}
    return Buffer(data, holes=holes, links=links), out
