"""EAGLE's step, and that of UNO and NGRAM: chains and trees of drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgalloc.allocator import KVAllocator
from sgalloc.inputs import Int64
from sgalloc.plan import Plan
from sgalloc.sizing import SpecConfig
from sgalloc.speculative.step import asked, longest, prepared, tokens_between

_ALGORITHMS = ("eagle", "uno", "ngram")


class EagleStep(NamedTuple):
    """What was prepared. The arrays are the plan's, to be read alone.

    Attributes:
        cur: A before, tokens, int64 ``(n,)``.
        nxt: A now, tokens, int64 ``(n,)``.
        needed: ``sum(nxt - cur)``, tokens.
        max_seq_len: ``max(C + reserve)``, tokens; 0 for no requests.
        ready: the event behind which the table is written: let the forward wait for it.
        plan: the applied plan.
    """

    cur: Int64
    nxt: Int64
    needed: int
    max_seq_len: int
    ready: Any
    plan: Plan


def prepare_for_decode(
    alloc: KVAllocator,
    batch: Any,
    spec: SpecConfig,
    *,
    reserve: Any = None,
    out: Any = None,
    after: Any = None,
) -> EagleStep:
    """Make room for the next step of every request of ``batch``, and count the step.

    Call it once a step, before the draft. ``commit`` the accepted tokens when the host hears of
    them: with the reserve of ``spec``, which is twice what a step writes, the next step may be
    prepared before that.

    Args:
        alloc: the allocator.
        batch: a batch, handles or a handle.
        spec: of ``"eagle"``, ``"uno"`` (its root slot is counted) or ``"ngram"``.
        reserve: tokens past C in place of what ``spec`` asks for, an int or one per request.
            Adaptive drafting may change it every step, down and up.
        out: int32 or int64 array on the device that receives the slots of ``[C, C + reserve)``.
        after: a CUDA event behind the last reader of the table.

    Returns:
        What was prepared.

    Raises:
        ValueError: an algorithm of another module.
        RowTooNarrow, OutOfPages: it does not fit; nothing was evicted and no step counted.
    """
    tokens = asked(alloc, spec, _ALGORITHMS, reserve)
    plan = prepared(alloc, batch, tokens, out, after)
    return EagleStep(plan.cur, plan.nxt, tokens_between(plan), longest(plan), plan.ready, plan)
