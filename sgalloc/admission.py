"""How many waiting requests a decode node can take, with room kept for those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sgalloc.errors import StalePlan
from sgalloc.inputs import Int64, counts, int64_array, shown, whole_number
from sgalloc.prefix import Match, Node
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
    """Pages that may go to requests which a decode node has yet to receive.

    What is available, cached pages included, less the larger of the headroom of all active
    requests and ``largest``, less what the retracted requests need to come back. Tokens are
    rounded up to pages for each request, since two requests never share a page.

    Args:
        alloc: the decode node's allocator.
        active: requests that run, or are being received.
        reserved_tokens: tokens that each request may yet grow by before others are retracted.
        retracted_lengths: tokens of each retracted request that waits to come back.
        largest: tokens that a single active request may need at most.

    Returns:
        Pages; negative where the node is overcommitted already.
    """
    size = alloc.page_size
    running = whole_number(active, "active", meaning="the number of active requests")
    reserved = _tokens(reserved_tokens, "reserved_tokens")
    single = _tokens(largest, "largest")
    coming_back = _lengths(retracted_lengths)
    headroom = max(running * -(-reserved // size), -(-single // size))
    retracted = int((-(-(coming_back + reserved) // size)).sum())
    return alloc.available(counting_cache=True) - headroom - retracted


def admit(
    alloc: KVAllocator,
    queue: Sequence[tuple[int, int | Match]],
    active: int,
    reserved_tokens: int,
    retracted_lengths: Any = (),
    largest: int = 0,
) -> int:
    """How many of ``queue``, in order, `KVAllocator.preallocate` can take within the budget.

    Each takes the pages of its length and of ``reserved_tokens`` past it, less its prefix. A
    match counts the cached pages that nobody holds yet, once for the whole queue: to lock them
    is to take them out of what is available. One row is kept for each retracted request.

    Args:
        alloc: the decode node's allocator.
        queue: for each request its tokens, and its prefix: a match, or the tokens (whole
            pages) of one that is locked already.
        active, reserved_tokens, retracted_lengths, largest: as `decode_budget`.

    Returns:
        The first that does not fit, or is wider than a row, ends the count.

    Raises:
        StalePlan: a page of a match was evicted since.
        ValueError: a prefix longer than its request, or not whole pages.
    """
    budget = decode_budget(alloc, active, reserved_tokens, retracted_lengths, largest)
    wanted = [_request(alloc, at, entry) for at, entry in enumerate(queue)]
    reserved, size = int(reserved_tokens), alloc.page_size
    rows = alloc.stats().rows.free - _lengths(retracted_lengths).size
    seen: set[Node] = set()
    for at, (length, prefix, nodes) in enumerate(wanted):
        budget -= -(-(length + reserved) // size) - prefix // size
        budget -= unlocked_pages(nodes, seen)[0]
        if budget < 0 or at >= rows or -(-length // size) * size > alloc.row_width:
            return at
    return len(wanted)


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
