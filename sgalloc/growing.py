"""Apply a plan: evict, allocate, write the table, and tell the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.core import Core
from sgalloc.errors import OutOfPages
from sgalloc.plan import Plan
from sgalloc.prefix import Victim


def apply(core: Core, plan: Plan, out: Any, after: Any) -> None:
    """Do what ``plan`` says. Whatever can fail comes before the first change of host state.

    Raises:
        OutOfPages: it does not fit, and nothing was evicted.
    """
    device, ledger = core.device, core.ledger
    if out is not None:
        out = device.checked_out(out, int((plan.stop - plan.start).sum()))
    growth = plan.growth
    victims: list[Victim] = []
    if growth is not None:
        if growth.total > core.pool.free:
            victims = _victims(core, growth.total)
        leaving = np.concatenate([v.pages for v in victims]) if victims else None
        ids = core.pool.peek(growth.total, leaving)
    if after is not None:
        device.wait_for(after)
    if growth is not None:
        device.assign(growth, ids)
    if out is not None:
        device.gather(plan.rows, plan.start, plan.stop, out)
    if growth is not None:
        if leaving is not None:
            core.evict(victims, leaving)
        core.pool.take(ids, growth.page_rows())
        ledger.grow(growth.rows, growth.where, ids, growth.allocated)
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
