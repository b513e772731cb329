"""Apply a plan: evict, allocate, write the table, and tell the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.core import Core
from sgalloc.errors import OutOfPages
from sgalloc.plan import Gather, Plan
from sgalloc.prefix import Victim


def apply(core: Core, plan: Plan, out: Any, after: Any) -> None:
    """Do what ``plan`` says. Whatever can fail comes before the first change of host state.

    Raises:
        OutOfPages: it does not fit, and nothing was evicted.
    """
    device, ledger, pool = core.device, core.ledger, core.pool
    gather = None
    if out is not None:
        size = int((plan.stop - plan.start).sum())
        target = device.checked_out(out, size)
        gather = Gather(plan.rows, plan.start, plan.stop, size, target)
    growth = plan.growth
    if growth is None:
        plan.ready = device.write(None, None, gather, after)
    else:
        victims, leaving = [], None
        if growth.total > pool.free:
            victims = _victims(core, growth.total)
            leaving = np.concatenate([victim.pages for victim in victims])
        ids = pool.peek(growth.total, leaving)
        plan.ready = device.write(growth, ids, gather, after)
        if leaving is not None:
            core.evict(victims, leaving)
        pool.take(ids, growth.page_rows())
        ledger.grow(growth.rows, growth.where, ids, plan.extents)
    if plan.settling is not None:
        ledger.settle_at(plan.settling, plan.stop[: plan.settling.size])
    if plan.decoding is not None:
        ledger.step(plan.decoding)
    plan.fits = True


def _victims(core: Core, need: int) -> list[Victim]:
    """Who leaves the prefix cache so that ``need`` pages are free."""
    short = need - core.pool.free
    if core.tree is None or short > core.tree.evictable:
        raise OutOfPages(core.pool.group, need, core.pool.free, core.evictable)
    return core.tree.victims(short)
