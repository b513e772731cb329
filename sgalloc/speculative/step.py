"""The part of a step that all speculative decoders share: one plan, asked and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sgalloc.allocator import KVAllocator
from sgalloc.device import Writer
from sgalloc.inputs import shown
from sgalloc.plan import Plan
from sgalloc.sizing import SpecConfig, alloc_reserve_per_decode


def asked(alloc: KVAllocator, spec: SpecConfig, algorithms: Sequence[str], reserve: Any) -> Any:
    """The reserve of a step: ``reserve``, or what ``spec`` asks for if None.

    Args:
        alloc: the allocator.
        spec: what the decoder writes in one step.
        algorithms: those that the calling module serves.
        reserve: tokens past C, an int or one per request, or None.

    Raises:
        TypeError: no allocator, or no SpecConfig.
        ValueError: an algorithm of another module.
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
    return alloc_reserve_per_decode(spec, alloc.page_size) if reserve is None else reserve


def prepared(
    alloc: KVAllocator,
    batch: Any,
    reserve: Any,
    out: Any,
    after: Any,
    through: Callable[[Plan, Writer], Writer] | None = None,
) -> Plan:
    """The applied plan of a decode step: one plan, which also lets go what left the window.

    ``through`` makes, of the plan and the device, who writes in its place.

    Raises:
        RowTooNarrow, OutOfPages: it does not fit; nothing was evicted and no step counted.
    """
    evict = alloc.has_window
    return alloc._reserve(
        batch, reserve, out, after, evict=evict, counts_step=True, through=through
    )


def tokens_between(plan: Plan) -> int:
    """``sum(nxt - cur)``, tokens."""
    # Both are whole pages.
    return plan.growth.total * plan.ledger.page_size if plan.growth is not None else 0


def longest(plan: Plan) -> int:
    """The most tokens that a request may have once the step ran, ``max(C + reserve)``."""
    stop = plan.stop
    return int(stop[stop.argmax()]) if stop.size else 0


_HOME = {
    **dict.fromkeys(("eagle", "uno", "ngram"), "use speculative.eagle.prepare_for_decode"),
    "dflash": "use speculative.dflash.prepare_for_decode",
}
