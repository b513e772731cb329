"""Live requests and such as are still being received, released into the cache by one call."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_support import prompt

import sgalloc

PS = 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_live_ones_alone_enter_the_cache(order: tuple[int, ...]) -> None:
    alloc = sgalloc.KVAllocator(20, PS, 4, 5 * PS, device="cpu", prefix_cache=True)
    ids = [prompt(2, PS, seed=seed) for seed in range(4)]
    live = alloc.open(2)
    alloc.extend(live, 2 * PS)
    received = alloc.preallocate([2 * PS] * 2)
    handles = np.concatenate((live, received))[list(order)]
    alloc.release(handles, tokens=[ids[at] for at in order])
    cached = [alloc.prefix.match(tokens).length for tokens in ids]
    assert cached == [2 * PS, 2 * PS, 0, 0]
    group = alloc.stats().groups["full"]
    assert (group.cached, group.pinned, group.owned, group.free) == (4, 4, 0, 12)
    assert [alloc.acknowledge(h, 0) for h in received] == [True, True]
    alloc.prefix.clear()
    assert alloc.available() == 20
    alloc.check(device=True)
