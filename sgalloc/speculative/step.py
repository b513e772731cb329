"""The part of a step that all speculative decoders share: one plan, asked and applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgalloc.allocator import KVAllocator
from sgalloc.inputs import shown
from sgalloc.ledger import Batch
from sgalloc.plan import Plan
from sgalloc.sizing import SpecConfig, alloc_reserve_per_decode


def planned(
    alloc: KVAllocator, batch: Any, spec: SpecConfig, algorithms: Sequence[str], reserve: Any
) -> Plan:
    """The plan of a step, which counts a decode step of each request once it is applied.

    Args:
        alloc: the allocator.
        batch: a batch, handles or a handle.
        spec: what the decoder writes in one step.
        algorithms: those that the calling module serves.
        reserve: tokens past C, an int or one per request; None for what ``spec`` asks for.

    Raises:
        TypeError: no allocator, or no SpecConfig.
        ValueError: an algorithm of another module.
        RowTooNarrow: a row cannot hold what it would have to.
    """
    if not isinstance(alloc, KVAllocator):
        raise TypeError(f"alloc must be a KVAllocator, got {shown(alloc)}: pass the allocator")
    if not isinstance(spec, SpecConfig):
        raise TypeError(f"spec must be a SpecConfig, got {shown(spec)}: build a SpecConfig")
    if spec.algorithm not in algorithms:
        raise ValueError(
            f"algorithm {spec.algorithm!r} is not served here, but {', '.join(algorithms)}: "
            f"{_HOME.get(spec.algorithm, 'use alloc.decode, which speculates nothing')}"
        )
    if reserve is None:
        reserve = alloc_reserve_per_decode(spec, alloc.page_size)
    plan = _plan(alloc, batch, reserve)
    plan.count_step()
    return plan


def applied(alloc: KVAllocator, batch: Any, plan: Plan, out: Any, after: Any) -> None:
    """Apply a plan of `planned`, and let ``batch`` keep the columns it has just seen.

    Raises:
        OutOfPages: it does not fit; nothing was evicted and no step counted.
    """
    alloc.apply(plan, out, after)
    if type(batch) is Batch:
        batch.moved(plan.start, plan.nxt)


def tokens_between(plan: Plan) -> int:
    """``sum(nxt - cur)``, tokens."""
    return int(np.add.reduce(plan.nxt - plan.cur)) if plan.nxt is not plan.cur else 0


def longest(plan: Plan) -> int:
    """The most tokens that a request may have once the step ran, ``max(C + reserve)``."""
    stop = plan.stop
    return int(stop[stop.argmax()]) if stop.size else 0


def _plan(alloc: KVAllocator, batch: Any, reserve: Any) -> Plan:
    """The one place where a step is planned."""
    return alloc.plan(reserve=(batch, reserve), evict_window=alloc.has_window)


_HOME = {
    **dict.fromkeys(("eagle", "uno", "ngram"), "use speculative.eagle.prepare_for_decode"),
    "dflash": "use speculative.dflash.prepare_for_decode",
}
