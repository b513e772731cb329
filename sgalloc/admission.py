"""How many waiting requests a decode node can take, with room kept for those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.errors import StalePlan
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64, counts, int64_array, shown, whole_number
from sgalloc.nodes import Node
from sgalloc.prefix import Match
from sgalloc.sizing import window_tail
from sgalloc.transfer import unlocked_pages

if TYPE_CHECKING:
    from sgalloc.allocator import KVAllocator


def decode_budget(
    alloc: KVAllocator,
    active: int,
    reserved_tokens: int,
    retracted_lengths: Any = (),
    largest: int = 0,
) -> int:
    """Pages of the main group that may go to requests which a decode node has yet to receive.

    What is available, cached pages included, less the larger of the headroom of all active
    requests and ``largest``, less what the retracted requests need to come back. Tokens are
    rounded up to pages for each request, since two requests never share a page. `decode_budgets`
    tells the same of every group.

    Args:
        alloc: the decode node's allocator.
        active: requests that run, or are being received.
        reserved_tokens: tokens that each request may yet grow by before others are retracted.
        retracted_lengths: tokens of each retracted request that waits to come back.
        largest: tokens that a single active request may need at most.

    Returns:
        Pages; negative where the node is overcommitted already.
    """
    core = alloc._core
    needs = _Needs.read(alloc, active, reserved_tokens, retracted_lengths, largest)
    return core.rooms(True)[core.pool.group] - needs.main()


def decode_budgets(
    alloc: KVAllocator,
    active: int,
    reserved_tokens: int,
    retracted_lengths: Any = (),
    largest: int = 0,
    step_tokens: int = 1,
    logical_only: bool = False,
) -> dict[str, int]:
    """`decode_budget` of each group that a request takes pages of when it is received.

    In the group ``window`` a request grows by no more than it lacks of what it may hold there
    at most (`Window.most_pages`), so `KVAllocator.evict_window` has to follow it; a retracted
    one comes back with its window tail alone. In the group ``device`` a sparse request grows by
    no more than it lacks of its buffer, one page and its scratch; a dense one grows as in the
    main group, and by its scratch, which it takes when it is made sparse.

    Args:
        alloc, active, reserved_tokens, retracted_lengths, largest: as `decode_budget`.
        step_tokens: tokens that one step may take ahead of C, 1 without speculation.
        logical_only: leave out the group ``device``, of which such a request takes nothing
            before `KVAllocator.to_sparse`.

    Returns:
        Pages by the name of the group; negative where one is overcommitted already.

    Raises:
        ValueError: ``logical_only`` for an allocator that is not sparse.
    """
    core, rooms = alloc._core, alloc._core.rooms(True)
    main_only = _main_only(alloc, logical_only)
    needs = _Needs.read(alloc, active, reserved_tokens, retracted_lengths, largest)
    beside = _Beside.of(alloc, step_tokens)
    budgets = {core.pool.group: rooms[core.pool.group] - needs.main()}
    if beside is not None and not main_only:
        budgets[beside.group] = rooms[beside.group] - beside.needs(needs)
    return budgets


def admit(
    alloc: KVAllocator,
    queue: Sequence[tuple[int, int | Match]],
    active: int,
    reserved_tokens: int,
    retracted_lengths: Any = (),
    largest: int = 0,
    step_tokens: int = 1,
    logical_only: bool = False,
) -> int:
    """How many of ``queue``, in order, `KVAllocator.preallocate` can take within the budgets.

    Each takes the pages of its length and of ``reserved_tokens`` past it, less its prefix; with
    a window group also those of its window tail (`sizing.window_tail`: to be preallocated so)
    and of its growth, up to what it may hold at most; with a sparse allocator as many of the
    device as logical ones, or none. A match counts the cached pages that nobody holds yet, once
    for the whole queue: to lock them is to take them out of what is available. One row is kept
    for each retracted request.

    Args:
        alloc: the decode node's allocator.
        queue: for each request its tokens, and its prefix: a match, or the tokens (whole
            pages) of one that is locked already.
        active, reserved_tokens, retracted_lengths, largest: as `decode_budget`.
        step_tokens, logical_only: as `decode_budgets`.

    Returns:
        The first that does not fit in every group, or is wider than a row, ends the count.

    Raises:
        StalePlan: a page of a match was evicted since.
        ValueError: a prefix longer than its request, or not whole pages; ``logical_only`` for
            an allocator that is not sparse.
    """
    left = decode_budgets(
        alloc, active, reserved_tokens, retracted_lengths, largest, step_tokens, logical_only
    )
    beside = None if logical_only else _Beside.of(alloc, step_tokens)
    wanted = [_request(alloc, at, entry) for at, entry in enumerate(queue)]
    reserved, size, group = int(reserved_tokens), alloc.page_size, alloc._core.pool.group
    rows = alloc.stats().rows.free - _lengths(retracted_lengths).size
    seen: set[Node] = set()
    for at, (length, prefix, nodes) in enumerate(wanted):
        locked, beside_locked = unlocked_pages(nodes, seen)
        left[group] -= -(-(length + reserved) // size) - prefix // size + locked
        if beside is not None:
            one = np.array([length], np.int64), np.array([prefix // size], np.int64)
            left[beside.group] -= int(beside.to_receive(*one, reserved)[0]) + beside_locked
        wide = -(-length // size) * size > alloc.row_width
        if min(left.values()) < 0 or at >= rows or wide:
            return at
    return len(wanted)


# -- inside --------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """What is spoken for before anything new is received.

    Attributes:
        size: slots in a page.
        active: requests that run, or are being received.
        reserved: tokens that each may yet grow by.
        single: pages that one of them may need at most.
        coming_back: tokens of each retracted request, int64.
    """

    size: int
    active: int
    reserved: int
    single: int
    coming_back: Int64

    @classmethod
    def read(
        cls, alloc: KVAllocator, active: Any, reserved: Any, retracted: Any, largest: Any
    ) -> _Needs:
        running = whole_number(active, "active", meaning="the number of active requests")
        tokens, single = _tokens(reserved, "reserved_tokens"), _tokens(largest, "largest")
        size = alloc.page_size
        return cls(size, running, tokens, -(-single // size), _lengths(retracted))

    @property
    def step(self) -> int:
        """Pages that each active request may yet grow by."""
        return -(-self.reserved // self.size)

    def main(self) -> int:
        """Pages of the main group."""
        retracted = int((-(-(self.coming_back + self.reserved) // self.size)).sum())
        return max(self.active * self.step, self.single) + retracted


class _Beside(NamedTuple):
    """The second group, as far as requests will grow in it.

    Attributes:
        alloc: the allocator.
        side: the group.
        most: pages that a request holds there at most, in a window or once it is sparse.
    """

    alloc: KVAllocator
    side: Window | DevicePages
    most: int

    @classmethod
    def of(cls, alloc: KVAllocator, step_tokens: Any) -> _Beside | None:
        step = whole_number(step_tokens, "step_tokens", 1, meaning="the tokens of a step")
        side = alloc._core.side
        if isinstance(side, Window):
            return cls(alloc, side, side.most_pages(step))
        if isinstance(side, DevicePages):
            return cls(alloc, side, side.buffer + 1 + side.scratch)
        return None

    @property
    def group(self) -> str:
        return self.side.pool.group

    def needs(self, needs: _Needs) -> int:
        """Pages that are spoken for."""
        side, ledger = self.side, self.alloc._core.ledger
        rows = ledger.live()
        own = np.bincount(side.held(rows)[0], minlength=ledger.max_requests + 1).take(rows)
        lacks = np.minimum(np.maximum(self.most - own, 0), needs.step)
        fresh, single = min(needs.step, self.most), min(needs.single, self.most)
        if isinstance(side, DevicePages):
            owing = np.where(side.has_scratch.take(rows), 0, side.scratch)
            lacks = np.where(side.sparse.take(rows), lacks, needs.step + owing)
            fresh, single = needs.step + side.scratch, needs.single
        # Who of the open requests are the active ones is not known: those that lack most.
        lacking = np.sort(lacks)[::-1][: needs.active]
        headroom = int(lacking.sum()) + (needs.active - lacking.size) * fresh
        back = self.to_receive(needs.coming_back, np.zeros_like(needs.coming_back), needs.reserved)
        return max(headroom, single) + int(back.sum())

    def to_receive(self, lengths: Int64, matched: Int64, reserved: int) -> Int64:
        """Pages that new requests take, and may grow by, int64 ``(n,)``.

        Args:
            lengths: tokens of each, int64 ``(n,)``.
            matched: pages that each shares, int64 ``(n,)``.
            reserved: tokens that each may yet grow by.
        """
        size, side = self.alloc.page_size, self.side
        grown = -(-(lengths + reserved) // size)
        if isinstance(side, DevicePages):
            return grown - matched
        cached = self.alloc._core.tree is not None
        tail = window_tail(lengths, side.tokens, size, prefix_cache=cached)
        begin = np.maximum((lengths - tail) // size, matched)
        now: Int64 = -(-lengths // size) - begin
        pages: Int64 = np.maximum(now, np.minimum(grown - begin, self.most))
        return pages


def _main_only(alloc: KVAllocator, logical_only: Any) -> bool:
    if not isinstance(logical_only, bool):
        raise TypeError(f"logical_only must be True or False, got {shown(logical_only)}")
    if logical_only and not isinstance(alloc._core.side, DevicePages):
        raise ValueError(
            "logical_only= is for an allocator with sparse=, and this one has no logical group: "
            "leave it out"
        )
    return logical_only


def _request(alloc: KVAllocator, at: int, entry: Any) -> tuple[int, int, list[Node]]:
    """Length, prefix (tokens), and the node to be locked for it, if any."""
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise TypeError(
            f"queue[{at}] must be a length and a prefix, got {shown(entry)}: pass a pair"
        )
    length, prefix = _tokens(entry[0], f"queue[{at}][0]"), entry[1]
    nodes = []
    if isinstance(prefix, Match):
        node = prefix.node_in(alloc.prefix.tree)
        if prefix.evicted:
            raise StalePlan(
                f"a page of this match of {prefix.length} tokens was evicted since: match again"
            )
        nodes = [] if node is None else [node]
        prefix = prefix.length
    held = _tokens(prefix, f"queue[{at}][1]")
    if held > length or held % alloc.page_size:
        raise ValueError(
            f"queue[{at}] has a prefix of {held} of its {length} tokens: pass whole pages of "
            f"{alloc.page_size}, at most the length"
        )
    return length, held, nodes


def _tokens(value: Any, name: str) -> int:
    return whole_number(value, name, meaning="a token count")


def _lengths(value: Any) -> Int64:
    lengths = int64_array(value, "retracted_lengths")
    counts(lengths, lengths.size, "retracted_lengths")
    return np.asarray(lengths)
