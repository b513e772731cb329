"""Feed only the prefix cache: how much of a workload an LRU cache of some size would find."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgalloc import sizing
from sgalloc.allocator import KVAllocator
from sgalloc.replay.requests import BLOCK_TOKENS, Workload, filled, prompt_ids


class PrefixHits(NamedTuple):
    """Blocks looked up and found.

    Attributes:
        blocks: blocks of the prompts that were fed, partial ones included.
        hits: those that the cache held.
        evicted: pages evicted.
    """

    blocks: int
    hits: int
    evicted: int

    @property
    def rate(self) -> float:
        """Share of all blocks that were found."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay_prefixes(
    workload: Workload,
    num_pages: int,
    *,
    share_partial: bool = False,
    device: str = "auto",
    progress: Callable[[int], bool | None] | None = None,
) -> PrefixHits:
    """Match and enter each prompt in turn, one page a block; nothing decodes.

    Args:
        workload: requests with block ids; others hit nothing.
        num_pages: pages of the cache.
        share_partial: whether the partial last block of a prompt is cached like the others.
        device: of the allocator.
        progress: called with the number of each request; False ends the replay there.

    Raises:
        ValueError: a prompt is longer than the whole cache.
    """
    size = next((r.block_tokens for r in workload.requests if r.blocks is not None), BLOCK_TOKENS)
    blocks = [sizing.num_pages_for(r.prompt_len, size) for r in workload.requests]
    longest = max(blocks, default=1)
    if longest > num_pages:
        raise ValueError(
            f"a prompt of {longest} blocks does not fit a cache of {num_pages} pages: "
            f"use at least {longest}"
        )
    alloc = KVAllocator(num_pages, size, 1, longest * size, device=device, prefix_cache=True)
    hits = looked_up = 0
    for index, request in enumerate(workload.requests):
        if share_partial:
            tokens = prompt_ids(filled(request), index, share_partial=True)
        else:
            tokens = prompt_ids(request, index)
        whole = tokens[: tokens.size // size * size]
        match = alloc.prefix.match(whole)
        hits += match.pages.size
        looked_up += blocks[index]
        handle = alloc.open_with_prefix(match)
        alloc.extend(handle, whole.size)
        alloc.release(handle, tokens=[whole])
        if progress is not None and progress(index) is False:
            break
    alloc.check()
    return PrefixHits(looked_up, hits, alloc.stats().groups["full"].evicted)
