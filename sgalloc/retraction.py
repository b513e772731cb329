"""Who has to go so that the next step fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.errors import AllocError, OutOfPages, RowTooNarrow
from sgalloc.inputs import Int64, int64_array
from sgalloc.ledger import NO_ROWS
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


class Fitted(NamedTuple):
    """The outcome of `retract_until_fits`.

    Attributes:
        victims: handles to release, int64, the first to go first.
        staying: handles of the others, int64, in the order given.
        error: None where the step of ``staying`` fits once the victims are released; else what
            it would be refused with.
        ending: where there is an error, the handle of the request that has to end, since no
            retraction helps it.
    """

    victims: Int64
    staying: Int64
    error: AllocError | None = None
    ending: int | None = None


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

    At least one request stays. Nothing changes: release the victims, then plan again. Where
    there is a window group and victims are released with ``tokens``, choose again as long as
    that plan does not fit: a cached prefix that others hold may have taken over window pages.

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


def retract_until_fits(
    alloc: KVAllocator,
    handles: Any,
    make_plan: Callable[[Int64], Plan],
    order: Any = None,
    *,
    output_lens: Any = None,
    prompt_lens: Any = None,
    counting_cache: bool = True,
) -> Fitted:
    """Estimate the next step; where it does not fit, who is retracted until it does.

    Nothing changes: release the victims (their requests go back to the queue), end the request
    that is named beside an error, and go on with those that stay. Released with ``after=``, the
    victims' pages come back when the event is done, and the step fits from then on.

    Args:
        alloc: the allocator.
        handles: the running requests, ``(n,)``.
        make_plan: the next step of some of them, such as
            ``lambda h: alloc.plan(reserve=(h, reserve))``.
        order, output_lens, prompt_lens, counting_cache: as `choose_victims`.

    Returns:
        Whom to release, who stays, and what ends the loop without a step that fits. That is
        RowTooNarrow, with nobody retracted, where a request has filled its row; OutOfPages
        where one request is left and even its step does not fit. It carries the numbers of
        that one step, and the pages that are free before the victims are released.

    Raises:
        ValueError: the order does not name each request once.
    """
    running = int64_array(getattr(handles, "handles", handles), "handles")
    rows = alloc.rows(running)
    try:
        plan = make_plan(running)
    except RowTooNarrow as error:
        full = running[rows == error.row]
        if not full.size:
            raise
        return Fitted(NO_ROWS.copy(), running.copy(), error, int(full[0]))
    found = choose_victims(
        alloc,
        running,
        plan,
        order,
        output_lens=output_lens,
        prompt_lens=prompt_lens,
        counting_cache=counting_cache,
    )
    staying = running[~np.isin(running, found.victims)]
    if found.fits:
        return Fitted(found.victims, staying)
    last = make_plan(staying)
    group, need = _short_group(alloc, last, counting_cache)
    free = alloc.available(group)
    cached = alloc.available(group, counting_cache=True) - free if counting_cache else 0
    return Fitted(found.victims, staying, OutOfPages(group, need, free, cached), int(staying[0]))


def _short_group(alloc: KVAllocator, plan: Plan, counting_cache: bool) -> tuple[str, int]:
    """The group that lacks the most pages for ``plan``, and its need less its gain."""
    need = {group: pages - plan.gain[group] for group, pages in plan.need.items()}
    group = max(need, key=lambda name: need[name] - alloc.available(name, counting_cache))
    return group, need[group]
