"""What comes back of a victim, foretold and found: it depends on where its pages go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from window.support import extended, make

import sgalloc
from sgalloc.retraction import choose_victims

TEXT = np.arange(32)


def world() -> tuple[sgalloc.KVAllocator, int, int, int]:
    """A cached text whose first window pages are gone, and three requests.

    The first shares it, the second repeats its beginning on pages of its own, the third is
    another text of one page.
    """
    alloc = make(60, 4, 8, window_pages=16, row_width=64, prefix_cache=True)
    before = extended(alloc, 32)
    alloc.evict_window(before)
    alloc.release(before, tokens=[TEXT])
    (sharing,) = alloc.open_with_prefix(alloc.prefix.match(TEXT))
    return alloc, int(sharing), extended(alloc, 16), extended(alloc, 4)


@pytest.mark.parametrize(("tokens", "back"), [(None, 4), ([TEXT[:16]], 0), ([TEXT[:4]], 3)])
def test_a_release_with_tokens_gives_window_pages_to_a_text_that_lacks_them(
    tokens: Any, back: int
) -> None:
    alloc, _, repeating, third = world()
    room = alloc.available("window", counting_cache=True)
    plan = alloc.plan(extend=(third, 4 * (1 + room + 4)))
    assert not plan.fits and alloc.fits(plan, after_releasing=repeating)
    alloc.release(repeating, tokens=tokens)
    assert alloc.available("window", counting_cache=True) == room + back
    assert alloc.plan(extend=(third, 4 * (1 + room + 4))).fits == (back == 4)
    alloc.check(device=True)


@pytest.mark.parametrize(("with_tokens", "rounds"), [(False, 1), (True, 2)])
def test_choosing_until_the_step_fits_ends(with_tokens: bool, rounds: int) -> None:
    alloc, *running = world()
    texts = dict(zip(running, (TEXT, TEXT[:16], TEXT[:4] + 100), strict=True))
    lengths = dict(zip(running, (32, 20, 4 * (1 + 9 + 3)), strict=True))
    taken = 0
    while not (plan := alloc.plan(extend=(running, [lengths[one] for one in running]))).fits:
        # The third stays longest, then the first.
        keep = [len(running) - 1, *range(len(running) - 1)]
        found = choose_victims(alloc, running, plan, keep)
        assert found.fits and found.victims.size == 1
        victims = found.victims.tolist()
        tokens = [texts[one] for one in victims] if with_tokens else None
        alloc.release(victims, tokens=tokens)
        running = [one for one in running if one not in victims]
        taken += 1
    assert taken == rounds and running
    alloc.apply(plan)
    alloc.check(device=True)
