"""The speculative part of a step: what it reserves, what it keeps, and the path through a tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.allocator import KVAllocator
from sgalloc.errors import LawViolation
from sgalloc.plan import Plan
from sgalloc.replay.options import Options
from sgalloc.replay.requests import IntArray
from sgalloc.sizing import new_tokens_required_next_decode
from sgalloc.speculative import dflash, eagle


class Speculation:
    """Speculative decoding of the running requests.

    Attributes:
        reserve: tokens past C that a step holds.
        tree: whether accepted tokens are scattered over a tree, and have to be moved.
    """

    def __init__(self, options: Options) -> None:
        assert options.acceptance is not None
        self._spec = options.spec
        self._acceptance = options.acceptance
        self.reserve = options.reserve
        self.tree = options.tree
        self._levels = _levels(options.spec.draft_tokens, options.acceptance.draft_tokens)

    def prepare(self, alloc: KVAllocator, batch: Any) -> Plan:
        """What an engine calls for a step without prefill; the plan is applied.

        Raises:
            OutOfPages: it does not fit; nothing was evicted and no step counted.
        """
        if self._spec.algorithm == "dflash":
            return dflash.prepare_for_decode(alloc, batch, self._spec).plan
        return eagle.prepare_for_decode(alloc, batch, self._spec).plan

    def check_estimate(self, alloc: KVAllocator, batch: Any) -> None:
        """What the next step is estimated to ask for is what its plan would take.

        Raises:
            LawViolation: they differ.
        """
        ledger, size = alloc._ledger, alloc.page_size
        rows, committed, allocated = ledger.holding(batch)
        told = new_tokens_required_next_decode(committed, allocated, size, self._spec)
        plan = Plan(ledger, rows, committed, allocated, committed + self.reserve)
        if told != size * plan.num_new_pages:
            raise LawViolation(
                f"the next step of {rows.size} requests is estimated to need {told} tokens, but "
                f"its plan takes {size * plan.num_new_pages}"
            )

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Tokens that the target model keeps of each of ``n`` requests, int64 ``(n,)``."""
        return self._acceptance.draw(rng, n)

    def paths(
        self, rng: np.random.Generator, committed: IntArray, kept: IntArray
    ) -> list[list[int]]:
        """Row positions of the kept tokens: the root, then one node a level, at random.

        A tree of N tokens is verified at C..C + N - 1, level by level, so a path ascends.

        Args:
            rng: one number is drawn for each request and level.
            committed: C, tokens, int64 ``(n,)``.
            kept: tokens kept, int64 ``(n,)``, at most one more than there are levels.
        """
        first, width = self._levels[:-1], np.diff(self._levels)
        nodes = first + (rng.random((kept.size, first.size)) * width).astype(np.int64)
        nodes += committed[:, None]
        return [
            [root, *path[: keep - 1]] if keep else []
            for root, path, keep in zip(
                committed.tolist(), nodes.tolist(), kept.tolist(), strict=True
            )
        ]


def _levels(tokens: int, depth: int) -> IntArray:
    """Where each level of a tree of ``tokens`` begins, the root left out; the last is its end."""
    return 1 + np.arange(depth + 1, dtype=np.int64) * (tokens - 1) // depth
