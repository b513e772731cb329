"""Who has to go so that the next step fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.inputs import Int64, int64_array
from sgalloc.plan import Plan

if TYPE_CHECKING:
    from sgalloc.allocator import KVAllocator


class Retraction(NamedTuple):
    """The outcome of `choose_victims`.

    Attributes:
        victims: handles to release, int64, the first to go first.
        fits: whether the step of those that stay fits then. False only where a single request
            is left and even that does not fit: the caller has to end it.
    """

    victims: Int64
    fits: bool


def keep_order(output_lens: Any, prompt_lens: Any) -> Int64:
    """Positions, those to be kept longest first: most output, then the shortest prompt.

    Args:
        output_lens: tokens that each request has put out, ``(n,)``.
        prompt_lens: tokens of each prompt, ``(n,)``.

    Returns:
        int64 ``(n,)``; equal ones stay in the order given.
    """
    output = int64_array(output_lens, "output_lens")
    prompt = int64_array(prompt_lens, "prompt_lens")
    if output.size != prompt.size:
        raise ValueError(
            f"{output.size} output_lens and {prompt.size} prompt_lens: pass one of each a request"
        )
    return np.lexsort((prompt, -output))


def choose_victims(
    alloc: KVAllocator,
    handles: Any,
    plan: Plan,
    order: Any = None,
    *,
    output_lens: Any = None,
    prompt_lens: Any = None,
    counting_cache: bool = True,
) -> Retraction:
    """The fewest requests, in an order of preference, after whose release ``plan`` fits.

    At least one request stays. Nothing changes: release the victims, then plan again.

    Args:
        alloc: the allocator.
        handles: the running requests, ``(n,)``.
        plan: the next step of all of them.
        order: positions into ``handles``, those to be kept longest first; by default
            `keep_order` of ``output_lens`` and ``prompt_lens``.
        output_lens: tokens that each request has put out, ``(n,)``.
        prompt_lens: tokens of each prompt, ``(n,)``.
        counting_cache: whether cached pages may be evicted for the step.

    Raises:
        StalePlan: the ledger changed since the plan was made.
        ValueError: the order does not name each request once.
    """
    running = int64_array(getattr(handles, "handles", handles), "handles")
    alloc.rows(running)  # all of them open, each named once
    if order is None:
        if output_lens is None or prompt_lens is None:
            raise ValueError("choose_victims needs an order, or output_lens and prompt_lens")
        order = keep_order(output_lens, prompt_lens)
    places = int64_array(order, "order")
    if not np.array_equal(np.sort(places), np.arange(running.size)):
        raise ValueError(f"order must name each of the {running.size} requests once")
    leaving = running[places][::-1]

    def fits_without(count: int) -> bool:
        return alloc.fits(plan, after_releasing=leaving[:count], counting_cache=counting_cache)

    # Releasing one more never takes room away, so the least number can be halved down to.
    low, high = 0, max(leaving.size - 1, 0)
    if not fits_without(high):
        return Retraction(leaving[:high].copy(), False)
    while low < high:
        middle = (low + high) // 2
        if fits_without(middle):
            high = middle
        else:
            low = middle + 1
    return Retraction(leaving[:low].copy(), True)
