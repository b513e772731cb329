"""How a step is laid out in a staging slot, for `struct Step` of assign_pages.cu to read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sgalloc.device.staging import (
    FIRST_NEW_AT,
    HEADER_BYTES,
    IDS_AT,
    NEW_AT_AT,
    OFFSET_AT,
    OFFSETS_AT,
    OUT_LOW,
    PAGES,
    PLACES_AT,
    REQUESTS,
    ROW_AT,
    RUNS,
    SIDE_IDS_AT,
    SIDE_MAINS_AT,
    SIDE_MAP_LOW,
    SIDE_PAGES,
    SIDE_PLACES_AT,
    SIDE_SLOTS_LOW,
    START_AT,
    TILE_RUNS_AT,
    TOTAL,
    UNIFORM,
    WIDE,
    Block,
)
from sgalloc.inputs import Int64
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite


class SideAddresses(NamedTuple):
    """Where a device keeps its second group; 0 for what it does not keep."""

    slots: int
    map: int


NO_SIDE = SideAddresses(0, 0)
_NEVER = np.int32(2**31 - 1)
# A slot that the kernel reads in place has its arrays at fixed places, for so many entries.
SMALL_PAGES = 1024
SMALL_GATHERED = 1024
SMALL_SIDE = 1024
SMALL_BYTES = HEADER_BYTES + 12 * SMALL_PAGES + 16 * SMALL_GATHERED + 16 * SMALL_SIDE
_SMALL_PLACES = HEADER_BYTES // 8
_SMALL_IDS = HEADER_BYTES // 4 + 2 * SMALL_PAGES
_SMALL_GATHER = HEADER_BYTES // 4 + 3 * SMALL_PAGES
_SMALL_SIDE_PLACES = _SMALL_GATHER // 2 + 2 * SMALL_GATHERED
_SMALL_SIDE_IDS = 2 * _SMALL_SIDE_PLACES + 2 * SMALL_SIDE


def lay_out_small(slot: Block, side: SideAddresses = NO_SIDE) -> None:
    """Note the fixed places of the arrays in the header."""
    words = slot.words
    words[PLACES_AT] = 8 * _SMALL_PLACES
    words[IDS_AT] = 4 * _SMALL_IDS
    for n, place in enumerate((ROW_AT, START_AT, FIRST_NEW_AT, NEW_AT_AT)):
        words[place] = 4 * (_SMALL_GATHER + n * SMALL_GATHERED)
    words[SIDE_PLACES_AT] = 8 * _SMALL_SIDE_PLACES
    words[SIDE_IDS_AT] = 4 * _SMALL_SIDE_IDS
    words[SIDE_MAINS_AT] = 4 * (_SMALL_SIDE_IDS + SMALL_SIDE)
    _address(slot, side)
    slot.longs[_SMALL_PLACES : _SMALL_PLACES + SMALL_PAGES] = -1
    slot.ints[_SMALL_SIDE_IDS : _SMALL_SIDE_IDS + SMALL_SIDE] = -1


def fill_pages(slot: Block, pages: Segments, ids: Int32) -> None:
    """Lay out a step of pages alone, in a small slot; places behind the last page are -1."""
    total = pages.total
    slot.longs[_SMALL_PLACES : _SMALL_PLACES + total] = pages.where
    slot.ints[_SMALL_IDS : _SMALL_IDS + total] = ids
    if total < slot.filled:
        slot.longs[_SMALL_PLACES + total : _SMALL_PLACES + slot.filled] = -1
    slot.filled = total


def fill_both(slot: Block, pages: Segments | None, ids: Int32 | None, side: SideWrite) -> None:
    """Lay out a step without a gather, in a small slot: no header, both parts with their ends."""
    if pages is not None and ids is not None:
        fill_pages(slot, pages, ids)
    elif slot.filled:
        slot.longs[_SMALL_PLACES : _SMALL_PLACES + slot.filled] = -1
        slot.filled = 0
    n = _fill_side(slot, side)
    if n < slot.beside:
        slot.ints[_SMALL_SIDE_IDS + n : _SMALL_SIDE_IDS + slot.beside] = -1
    slot.beside = n


def _fill_side(slot: Block, side: SideWrite) -> int:
    """Lay out the pages of the second group at their fixed places; how many these are."""
    n = int(side.ids.size)
    slot.longs[_SMALL_SIDE_PLACES : _SMALL_SIDE_PLACES + n] = side.places
    slot.ints[_SMALL_SIDE_IDS : _SMALL_SIDE_IDS + n] = side.ids
    mains = _SMALL_SIDE_IDS + SMALL_SIDE
    slot.ints[mains : mains + n] = side.mains
    return n


def fill_small(
    slot: Block,
    pages: Segments | None,
    ids: Int32 | None,
    gather: Gather | None,
    uniform: int,
    side: SideWrite | None = None,
) -> None:
    """Lay out any step in a small slot; a gather has ``uniform`` slots a request."""
    words = slot.words
    words[PAGES] = words[TOTAL] = words[SIDE_PAGES] = 0
    if pages is not None and ids is not None:
        fill_pages(slot, pages, ids)
        words[PAGES] = pages.total
    if gather is not None:
        _describe(slot, gather, uniform)
        n, first, step = gather.rows.size, _SMALL_GATHER, SMALL_GATHERED
        slot.ints[first : first + n] = gather.rows
        slot.ints[first + step : first + step + n] = gather.start
        fresh = slot.ints[first + 2 * step : first + 2 * step + n]
        place = slot.ints[first + 3 * step : first + 3 * step + n]
        _new_pages(gather, pages, fresh, place)
    if side is not None:
        words[SIDE_PAGES] = n = _fill_side(slot, side)
        slot.beside = max(slot.beside, n)


def fill(
    slot: Block,
    pages: Segments | None,
    ids: Int32 | None,
    gather: Gather | None,
    uniform: int,
    row_pages: int,
    tile: int = 0,
    side: SideWrite | None = None,
    addresses: SideAddresses = NO_SIDE,
) -> int:
    """Lay a step out without gaps; the bytes used.

    With ``tile``, the pages of a tile of its launch, runs come with the first run of each tile.
    """
    words = slot.words
    cursor = HEADER_BYTES
    words[:16] = words[TILE_RUNS_AT] = words[SIDE_PAGES] = 0
    if pages is not None and ids is not None:
        words[PAGES] = pages.total
        words[PLACES_AT] = cursor
        n = pages.rows.size
        if pages.total == n:
            slot.longs[cursor // 8 : cursor // 8 + n] = pages.where
            cursor += 8 * n
        else:
            offsets = pages.count.cumsum() - pages.count
            slot.longs[cursor // 8 : cursor // 8 + n] = (
                pages.rows * row_pages + pages.first - offsets
            )
            cursor += 8 * n
            words[RUNS] = n
            cursor = _put(slot, OFFSETS_AT, cursor, offsets)
            if tile:
                cursor = _put(slot, TILE_RUNS_AT, cursor, _tile_runs(offsets, pages.total, tile))
        cursor = _put(slot, IDS_AT, cursor, ids)
    if gather is not None:
        _describe(slot, gather, uniform)
        n = gather.rows.size
        cursor = _put(slot, ROW_AT, cursor, gather.rows)
        cursor = _put(slot, START_AT, cursor, gather.start)
        if not uniform:
            lengths = gather.stop - gather.start
            cursor = _put(slot, OFFSET_AT, cursor, lengths.cumsum() - lengths)
        words[FIRST_NEW_AT], words[NEW_AT_AT] = cursor, cursor + 4 * n
        fresh = slot.ints[cursor // 4 : cursor // 4 + n]
        place = slot.ints[cursor // 4 + n : cursor // 4 + 2 * n]
        _new_pages(gather, pages, fresh, place)
        cursor += 8 * n
    if side is not None:
        n = words[SIDE_PAGES] = side.ids.size
        _address(slot, addresses)
        cursor = -(-cursor // 8) * 8
        words[SIDE_PLACES_AT] = cursor
        slot.longs[cursor // 8 : cursor // 8 + n] = side.places
        cursor = _put(slot, SIDE_IDS_AT, cursor + 8 * n, side.ids)
        cursor = _put(slot, SIDE_MAINS_AT, cursor, side.mains)
    return cursor


def fill_lengths(slot: Block, room: int, cur: Int64, nxt: Int64, committed: Int64) -> None:
    """Lay out the lengths of a step, in a buffer without a header that has room for so many."""
    n = cur.size
    slot.longs[:n] = committed
    slot.ints[2 * room : 2 * room + n] = cur
    slot.ints[3 * room : 3 * room + n] = nxt


def _address(slot: Block, side: SideAddresses) -> None:
    slot.longs[SIDE_SLOTS_LOW // 2] = side.slots
    slot.longs[SIDE_MAP_LOW // 2] = side.map


def _tile_runs(offsets: Int64, total: int, tile: int) -> Int64:
    """The run of the first page of each tile, and the last run, int64 ``(tiles + 1,)``."""
    firsts = np.arange(0, total + tile, tile)
    return offsets.searchsorted(firsts, "right") - 1


def uniform_length(gather: Gather) -> int:
    """Slots of each request where all ask for as many, else 0."""
    lengths = gather.stop - gather.start
    each = int(lengths[0])
    return each if each * lengths.size == gather.size and (lengths == each).all() else 0


def _describe(slot: Block, gather: Gather, uniform: int) -> None:
    words = slot.words
    words[REQUESTS] = gather.rows.size
    words[TOTAL] = gather.size
    words[UNIFORM] = uniform
    words[WIDE] = gather.out.wide
    slot.longs[OUT_LOW // 2] = gather.out.ptr


def _put(slot: Block, word: int, cursor: int, column: Any) -> int:
    """Append an int32 column, note its place in the header, and return where the next begins."""
    slot.words[word] = cursor
    slot.ints[cursor // 4 : cursor // 4 + column.size] = column
    return cursor + 4 * int(column.size)


def _new_pages(gather: Gather, pages: Segments | None, fresh: Int32, place: Int32) -> None:
    """For each request of the gather, its first page of this launch and where its id stands."""
    fresh[:] = _NEVER
    if pages is not None and gather.growing is not None:
        fresh[gather.growing] = pages.first
        place[gather.growing] = pages.count.cumsum() - pages.count
