"""Staging slots without their guard, behind a held stream: the check of the table finds it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from gpu.currents import CURRENTS
from gpu.latch import Latches

import sgalloc
from sgalloc.trust.old_behaviour import switched_on


@pytest.mark.parametrize("pages", [3, 1500], ids=["read in place", "copied"])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_unguarded_staging_is_found_behind_a_latch(
    guarded: bool, pages: int, latches: Latches
) -> None:
    """D10: more steps than the ring has slots are queued before the first of them runs."""
    with CURRENTS["torch side"]() as held:
        alloc = sgalloc.KVAllocator(64 * pages, 4, 64, 4 * pages, device="cuda")
        alloc.warm(2048)
        handles = alloc.open(64 if pages < 100 else 7).tolist()
        latch = latches.hold(held)
        with nullcontext() if guarded else switched_on("unguarded-staging"):
            for handle in handles:
                alloc.extend(handle, 4 * pages)
            assert latch.held, "a step waited for the GPU"
        latch.open()
        if guarded:
            alloc.check(device=True)
        else:
            with pytest.raises(sgalloc.LawViolation, match=r"req_to_token\[\d+, "):
                alloc.check(device=True)
