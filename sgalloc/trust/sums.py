"""Sums of hashes: what a large array says, kept up by what changes in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.inputs import Int64
from sgalloc.ledger import spread

Words = NDArray[np.uint64]

MASK = (1 << 64) - 1
_AT_ONCE = 1 << 15  # entries, so that all that is made of them stays in the cache
# Odd numbers without a pattern: those of splitmix64, and digits of e and of pi.
_PLACE, _VALUE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xB7E151628AED2A6B)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LINK = 0x243F6A8885A308D3


def salt(name: str) -> np.uint64:
    """What tells the entries of one array from those of others."""
    return np.uint64(word(name.encode()))


def word(data: bytes) -> int:
    """A hash of some bytes, 64 bits."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def hashes(named: np.uint64, places: Int64, values: NDArray[Any]) -> Words:
    """One hash for each value at its place, uint64 ``(n,)``.

    Args:
        named: of `salt`.
        places: int64 ``(n,)``.
        values: whole numbers or flags ``(n,)``.
    """
    found = places.view(np.uint64) * _PLACE
    found += named
    found ^= values.astype(np.int64).view(np.uint64) * _VALUE
    found ^= found >> np.uint64(29)
    found *= _FIRST
    found ^= found >> np.uint64(32)
    found *= _SECOND
    found ^= found >> np.uint64(29)
    return found


def total(named: np.uint64, places: Int64, values: NDArray[Any]) -> int:
    """The sum of `hashes`, modulo 2**64: the same in whichever order they come."""
    found = 0
    for at in range(0, places.size, _AT_ONCE):
        some = slice(at, at + _AT_ONCE)
        found += int(hashes(named, places[some], values[some]).sum(dtype=np.uint64))
    return found & MASK


def run(named: np.uint64, values: NDArray[Any], first: int = 0) -> int:
    """`total` of values that stand at places ``first``, ``first + 1``, ..."""
    return total(named, np.arange(first, first + values.size), values)


class Tokens:
    """Sums over token ids at their places in a prompt; longer ones take fewer steps than `run`."""

    def __init__(self, name: str) -> None:
        self._salt = salt(name)
        self._weights = np.zeros(0, np.uint64)

    def __call__(self, tokens: Int64, first: int) -> int:
        """The sum over ``tokens``, of which the first is number ``first`` of its prompt."""
        end = first + tokens.size
        if end > self._weights.size:
            places = np.arange(max(end, 2 * self._weights.size))
            self._weights = hashes(self._salt, places, np.zeros_like(places))
        found = 0
        for at in range(0, tokens.size, _AT_ONCE):
            mixed = tokens[at : at + _AT_ONCE].view(np.uint64) * _VALUE
            mixed ^= mixed >> np.uint64(32)
            mixed *= self._weights[first + at : first + at + mixed.size]
            found += int(mixed.sum(dtype=np.uint64))
        return found & MASK


class Table:
    """The sum over some numbers of every row, all looked at each time; a zero counts nothing.

    Args:
        name: of the table.
        keeps: whether it will be refreshed again.
    """

    def __init__(self, name: str, keeps: bool) -> None:
        self._salt = salt(name)
        self._keeps = keeps
        self._seen: Int64 | None = None
        self.sum = 0

    def refresh(self, now: Int64) -> Int64:
        """Take in what changed.

        Args:
            now: all numbers, int64 ``(n,)``; nobody changes the array any more.

        Returns:
            Where it changed, int64, ascending.
        """
        seen = self._seen
        changed: Int64 = (now if seen is None else now != seen).nonzero()[0]
        if changed.size:
            self.sum += _counted(self._salt, changed, now[changed])
            if seen is not None:
                self.sum -= _counted(self._salt, changed, seen[changed])
            self.sum &= MASK
        if self._keeps:
            self._seen = now
        return changed


class Holders:
    """The sum over who holds each page, of which those that changed hands are told.

    Args:
        name: of the pool.
        of: int64 ``(num_pages + 1,)``, never replaced.
        keeps: whether it will be refreshed again.
    """

    def __init__(self, name: str, of: Int64, keeps: bool) -> None:
        self._salt = salt(name)
        self._of = of
        self._keeps = keeps
        self._seen: Int64 | None = None
        self.sum = 0

    def refresh(self, among: Int64 | None) -> None:
        """Take in what changed: all pages, or some, named perhaps twice."""
        if among is None or self._seen is None:
            self.sum = _counted(self._salt, np.arange(self._of.size), self._of)
            self._seen = self._of.copy() if self._keeps else None
            return
        changed = np.unique(among[self._of[among] != self._seen[among]])
        now, seen = self._of[changed], self._seen[changed]
        self.sum += _counted(self._salt, changed, now) - _counted(self._salt, changed, seen)
        self.sum &= MASK
        self._seen[changed] = now


def _counted(named: np.uint64, places: Int64, values: Int64) -> int:
    some = values.nonzero()[0]
    if some.size < values.size:
        places, values = places[some], values[some]
    return total(named, places, values)


class Stack:
    """The sum over ids that come and go at the end alone, of which a low-water mark is kept.

    Args:
        name: of the stack.
        of: int32 or int64 ``(n,)``, never replaced.
        keeps: whether it will be refreshed again.

    Attributes:
        low: entries that nobody can have changed since the last `refresh`.
    """

    def __init__(self, name: str, of: NDArray[Any], keeps: bool) -> None:
        self._salt = salt(name)
        self._of = of
        self._seen = np.empty_like(of) if keeps else None
        self._size = self.low = 0
        self.sum = 0

    def refresh(self, size: int) -> None:
        """Take in what changed below ``size``, where the stack ends now."""
        low = min(self.low, size)
        if self._seen is not None:
            self.sum -= run(self._salt, self._seen[low : self._size], low)
            self._seen[low:size] = self._of[low:size]
        self.sum += run(self._salt, self._of[low:size], low)
        self.sum &= MASK
        self._size = self.low = size


class Lists:
    """The sum over the page lists of all rows, which grow and are cut at their ends.

    Args:
        name: of the lists.
        of: int32, flat, ``row * width + number``, never replaced.
        rows: how many there are.
        width: pages in a row.
        keeps: whether it will be refreshed again.

    Attributes:
        low: leading pages of each row that nobody can have changed since, int64.
    """

    def __init__(self, name: str, of: NDArray[Any], rows: int, width: Int64, keeps: bool) -> None:
        self._salt = salt(name)
        self._of = of
        self._width = width
        # Memory is taken where pages are, as it is for the lists.
        self._seen = np.zeros_like(of) if keeps else None
        self._size: Int64 = np.zeros(rows, np.int64)
        self.low: Int64 = np.zeros(rows, np.int64)
        self.sum = 0

    def refresh(self, size: Int64) -> Int64:
        """Take in what changed; ``size`` are the pages of each row now.

        Returns:
            The rows that have not only grown, int64.
        """
        low = np.minimum(self.low, size)
        cut = low < self._size
        rows: Int64 = ((low < size) | cut).nonzero()[0]
        if rows.size:
            begin, end = rows * self._width + low[rows], size[rows] - low[rows]
            if self._seen is not None:
                gone = spread(begin, self._size[rows] - low[rows])
                self.sum -= total(self._salt, gone, self._seen.take(gone))
            come = spread(begin, end)
            ids = self._of.take(come)
            if self._seen is not None:
                self._seen[come] = ids
            self.sum += total(self._salt, come, ids)
            self.sum &= MASK
            self._size[rows] = self.low[rows] = size[rows]
        return cut.nonzero()[0]


class Rows:
    """A sum for each row, of which those that are told change."""

    def __init__(self, rows: int) -> None:
        self._of: Words = np.zeros(rows, np.uint64)
        self.sum = 0

    def put(self, rows: Int64, count: Int64, found: Words) -> None:
        """Let each of ``rows`` be the sum of its ``count`` hashes, flat in ``found``."""
        before = np.concatenate((np.zeros(1, np.uint64), found.cumsum(dtype=np.uint64)))
        ends = count.cumsum()
        fresh = before[ends] - before[ends - count]
        self.sum += int(fresh.sum(dtype=np.uint64)) - int(self._of[rows].sum(dtype=np.uint64))
        self.sum &= MASK
        self._of[rows] = fresh


class Uses:
    """The sum over what was used together, in the order of use; the times themselves are not seen.

    Each time of use has a sum of what it used; linked are those that follow each other.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        """From pairs of a time and a hash."""
        self._at: dict[int, list[int]] = {}
        for time, hashed in pairs:
            group = self._at.setdefault(time, [0, 0])
            group[0] += hashed
            group[1] += 1
        self._times = sorted(self._at)
        self.sum = 0
        before = 0
        for time in self._times:
            self.sum += _link(before, self._at[time][0])
            before = self._at[time][0]

    def add(self, time: int, hashed: int, count: int = 1) -> None:
        """Let ``count`` more (or, below 0, fewer) be used at ``time``, of this (negative) hash."""
        group = self._at.get(time)
        at = bisect_left(self._times, time)
        times = self._times
        fresh = group is None
        before = self._at[times[at - 1]][0] if at else 0
        after = at + (not fresh)
        behind = self._at[times[after]][0] if after < len(times) else None
        if group is None:
            group = self._at[time] = [0, 0]
            times.insert(at, time)
            if behind is not None:
                self.sum -= _link(before, behind)
        else:
            self.sum -= _link(before, group[0])
            if behind is not None:
                self.sum -= _link(group[0], behind)
        group[0] += hashed
        group[1] += count
        if group[1]:
            self.sum += _link(before, group[0])
            before = group[0]
        else:
            del self._at[time], times[at]
        if behind is not None:
            self.sum += _link(before, behind)


def _link(before: int, group: int) -> int:
    mixed = ((before & MASK) * _LINK + (group & MASK)) & MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 29
