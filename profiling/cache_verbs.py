"""The verbs of the prefix cache, over batch and page size. The plain loop has no such thing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sgalloc
from sgalloc.bench.harness import SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of

GROUP = 16  # requests that share one prefix
VOCABULARY = 1 << 17


class Prompts(NamedTuple):
    """Requests whose prompts share their beginning in groups.

    Attributes:
        shared: tokens that the requests of a group have in common.
        published: tokens settled when a request is published.
        length: tokens when it is released.
        tokens: of each request, int64 ``(batch, length)``.
    """

    shared: int
    published: int
    length: int
    tokens: NDArray[np.int64]

    @classmethod
    def draw(cls, batch: int, seed: int = 0) -> Prompts:
        """Prompts of 1,024 tokens, of 192 for very many requests, to stay in memory."""
        shared, published, length = (64, 128, 192) if batch > 4096 else (512, 768, 1024)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, VOCABULARY, (batch, length))
        tokens[:, :shared] = tokens[np.arange(batch) // GROUP * GROUP, :shared]
        return cls(shared, published, length, tokens)


def run(batches: Iterable[int], page_sizes: Iterable[int], effort: Effort) -> Bench:
    """All verbs of the cache at each batch and page size."""
    records: list[Record] = []
    # A round of very many requests takes seconds.
    brief = replace(effort, least=min(effort.least, 3), warm_up=1, block=1)
    for batch in batches:
        prompts = Prompts.draw(batch)
        pace = brief if batch > 4096 else effort
        for page_size in page_sizes:
            at = {"batch": batch, "page": page_size}
            alloc, side = cache_side(prompts, page_size)
            records += records_of(alternate([side], pace), at)
            alloc.check()
    return Bench(records)


def cache_side(prompts: Prompts, page_size: int) -> tuple[sgalloc.KVAllocator, Side]:
    """An allocator and the script of one round.

    The pool holds the shared prefixes and one batch's own pages, no page more. So each round
    finds the shared prefixes cached and the rest free; its last growth finds nothing free, and
    evicts exactly what the round has left in the cache beyond the shared prefixes.
    """
    batch, size = prompts.tokens.shape[0], page_size
    own = (prompts.length - prompts.shared) // size
    groups = -(-batch // GROUP)
    alloc = sgalloc.KVAllocator(
        groups * (prompts.shared // size) + batch * own,
        size,
        batch,
        prompts.length,
        device="cpu",
        prefix_cache=True,
    )
    alloc.warm()
    full = list(prompts.tokens)
    part = [tokens[: prompts.published] for tokens in full]
    heads = [tokens[: prompts.shared] for tokens in full[::GROUP]]
    seed = alloc.open(groups)
    alloc.extend(seed, prompts.shared)
    alloc.release(seed, tokens=heads)
    matches: list[sgalloc.Match] = []
    handles: list[NDArray[np.int64]] = [seed]

    def match_all() -> None:
        matches[:] = [alloc.prefix.match(tokens) for tokens in full]

    def open_all() -> None:
        handles[0] = alloc.open_with_prefix(matches)

    def grow(x: Any, lengths: int) -> None:
        alloc.extend(x, lengths)

    def forget_own() -> None:
        # The shared prefixes become the last to go.
        for head in heads:
            alloc.prefix.match(head)
        handles[0] = alloc.open(batch)

    def check_evicted() -> None:
        if alloc.available() or alloc.stats().groups["full"].cached != groups * (
            prompts.shared // size
        ):
            raise RuntimeError("the round did not evict exactly its own pages")
        alloc.release(handles[0])

    return alloc, Side(
        SUBJECT,
        [
            Step("match", match_all),
            Step("open_with_prefix", open_all),
            Step(None, lambda: grow(handles[0], prompts.length)),
            Step("publish", lambda: alloc.prefix.publish(handles[0], part)),
            Step("release with tokens", lambda: alloc.release(handles[0], tokens=full)),
            Step(None, forget_own),
            Step("extend that evicts", lambda: grow(handles[0], own * size)),
            Step(None, check_evicted),
        ],
    )
