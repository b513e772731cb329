"""Digests of ranges of the tables: what `cuda/row_digest.cu` computes, in NumPy.

The digest of entries e[0], e[1], ... is the sum of ``e[j] * weight[j]`` modulo 2**64, an entry
taken as 32 bits without sign. Weights are odd, so one wrong entry always changes it, and mixed, so
that several wrong entries do not make up for each other. Entries that are 0 add nothing: who knows
the other ones knows the digest, and whole pages are summed up by their ids.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgalloc.inputs import Int64
from sgalloc.pages import Int32

UInt64 = NDArray[np.uint64]
# Which array a range is of: the table, the second group's table, the map, the page ids.
SLOTS, SIDE_SLOTS, MAP, PAGES = range(4)
# As `struct Range` of row_digest.cu has it.
RANGE = np.dtype([("start", "<i8"), ("length", "<i4"), ("array", "<i4")])
# Most entries of the map in one range, but for a page that is larger.
MAP_ENTRIES = 1 << 16

_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _ONE = np.uint64(32), np.uint64(1)
_WORD = (1 << 64) - 1
_BLOCK = 1 << 16


class Pending(Protocol):
    """Digests that were asked for."""

    ready: Any
    """An event behind the last read of the tables."""

    @property
    def done(self) -> bool:
        """Whether they are there; waits for nothing."""

    def wait(self) -> UInt64:
        """The digests, uint64 ``(n,)``, as soon as they are there."""


class Known:
    """Digests that are there already."""

    done = True

    def __init__(self, digests: UInt64, ready: Any) -> None:
        self._digests = digests
        self.ready = ready

    def wait(self) -> UInt64:
        """The digests, uint64 ``(n,)``."""
        return self._digests


class Ranges(NamedTuple):
    """Entries ``[start, start + length)`` of arrays, each to be hashed.

    Attributes:
        array: `SLOTS`, `SIDE_SLOTS`, `MAP` or `PAGES`, int64 ``(n,)``.
        start: entries from the beginning of the array, int64 ``(n,)``.
        length: entries, int64 ``(n,)``, below 2**31.
    """

    array: Int64
    start: Int64
    length: Int64


def weights(first: int, stop: int) -> UInt64:
    """The weights of the places ``[first, stop)`` of a range, uint64."""
    word: UInt64 = np.arange(first + 1, stop + 1, dtype=np.uint64)
    word *= _STEP
    word ^= word >> _HALF
    word *= _MIX
    word ^= word >> _HALF
    word |= _ONE
    return word


def digest(entries: Int32) -> int:
    """The digest of ``entries``, int32 ``(n,)``."""
    total = 0
    for at in range(0, entries.size, _BLOCK):
        block = entries[at : at + _BLOCK].view(np.uint32)
        if at or block.any():
            known = _weights_of_block(at // _BLOCK)[: block.size]
            total += int(np.dot(block.astype(np.uint64), known))
    return total & _WORD


@lru_cache(maxsize=16)
def _weights_of_block(number: int) -> UInt64:
    return weights(number * _BLOCK, (number + 1) * _BLOCK)


class PageWeights:
    """What whole pages add to the digest of a range that begins with the first of them.

    Page i of id p adds ``p * page_size * sums[i]``, and all of ``[first, stop)`` together
    ``behind[stop] - behind[first]`` besides.

    Attributes:
        sums: the sum of the weights of each page, uint64.
        behind: for the offsets within pages, summed up from the first page, uint64, one more.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.sums: UInt64 = np.empty(0, np.uint64)
        self.behind: UInt64 = np.zeros(1, np.uint64)

    def upto(self, pages: int) -> None:
        """Know of so many pages at least."""
        known = self.sums.size
        if pages <= known:
            return
        wanted = max(pages, 2 * known)
        size = self._page_size
        sums, offsets = np.zeros(wanted, np.uint64), np.zeros(wanted, np.uint64)
        sums[:known] = self.sums
        step = max(1, _BLOCK // size)
        for first in range(known, wanted, step):
            some = slice(first, min(first + step, wanted))
            # A page larger than a block is the only one of its turn, and taken in pieces.
            for cut in range(0, size, _BLOCK):
                width = min(size - cut, _BLOCK)
                begin = first * size + cut
                word = weights(begin, begin + (some.stop - first) * width).reshape(-1, width)
                sums[some] += word.sum(1)
                word *= np.arange(cut, cut + width, dtype=np.uint64)
                offsets[some] += word.sum(1)
        behind = np.empty(wanted + 1, np.uint64)
        behind[: known + 1] = self.behind
        behind[known + 1 :] = self.behind[-1:] + offsets[known:].cumsum()
        self.sums, self.behind = sums, behind


@lru_cache(maxsize=8)
def page_weights(page_size: int) -> PageWeights:
    """Those of one page size, shared by all allocators."""
    return PageWeights(page_size)


def digests_of_pages(
    pages: Int32, rows: Int64, first: Int64 | None, stop: Int64, size: int
) -> UInt64:
    """The digests of rows whose pages ``[first, stop)`` have these ids, and that are 0 below.

    Some NumPy calls for many rows of about one length: about 1 ns a page.

    Args:
        pages: page ids, int32 ``(rows, row_pages)``; what is outside of ``[first, stop)`` is stale.
        rows: int64 ``(n,)``.
        first: int64 ``(n,)``; None for 0.
        stop: int64 ``(n,)``.
        size: slots in a page; 1 for the ids themselves.

    Returns:
        uint64 ``(n,)``, of the entries ``[0, stop * size)``.
    """
    known = page_weights(size)
    n = rows.size
    found: UInt64 = np.zeros(n, np.uint64)
    if not n:
        return found
    known.upto(int(stop.max()))
    count = stop if first is None else stop - first
    order = count.argsort()
    ordered = count[order]
    column = np.arange(int(ordered[-1]))
    at = int(ordered.searchsorted(1))
    while at < n:
        # Rows of about one length are a matrix, small enough to stay in the cache.
        low = int(ordered[at])
        limit = low + low // 4 + 8
        alike = int(ordered.searchsorted(limit, "right"))
        end = min(alike, at + max(1, _BLOCK // limit))
        some, wide = order[at:end], int(ordered[end - 1])
        if first is None:
            ids, weight = pages[rows[some], :wide], known.sums[:wide]
        else:
            places = first[some, None] + column[:wide]
            ids = pages.reshape(-1).take(rows[some, None] * pages.shape[1] + places, mode="clip")
            weight = known.sums.take(places, mode="clip")
        ids[:, low:][column[low:wide] >= count[some, None]] = 0
        form = "ij,j->i" if first is None else "ij,ij->i"
        found[some] = np.einsum(form, ids.astype(np.uint64), weight)
        at = end
    found *= np.uint64(size)
    found += known.behind.take(stop)
    if first is not None:
        found -= known.behind.take(first)
    return found
