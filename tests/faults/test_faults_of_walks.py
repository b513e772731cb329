"""A device that fails at each point of each call of a random walk: nothing is left half done.

Each call is made again and again, and fails one point later each time, until it goes through. A
failed call leaves all as it was; the one that goes through does the same as on a twin that never
failed. The pools are short, so that cached pages are evicted for growth, and calls are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults.injector import Injector, cuda_failure, interrupt, no_memory, plain_failure
from faults.walking import FaultyWalk, look
from stand_in_cuda import stand_in
from trust.walk import CONFIGS, Walk, make

import sgalloc

STEPS, SEEDS = 60, (1, 2)


def stuffed(alloc: Any) -> Any:
    """With a cache that leaves few pages free: what the walk will ask for, and what it will not."""
    if alloc._core.tree is not None:
        ps = alloc.page_size
        for start, pages in ((0, 5), (1000, 6), (5000, 7), (6000, 6)):
            ids = list(range(start, start + pages * ps))
            (handle,) = alloc.open(1)
            alloc.extend(handle, len(ids))
            alloc.release(handle, tokens=[ids])
    return alloc


def walked(
    name: str, seed: int, device: str, injector: Injector, kinds: Any, watch: Callable[[Any], None]
) -> Counter[tuple[str, str]]:
    alloc, other = stuffed(make(name, device=device)), stuffed(make(name, device=device))
    watch(alloc)
    if device == "cuda":
        alloc.warm(64)  # or staging slots would come with the first step
    walk, twin = FaultyWalk(alloc, seed, injector), Walk(other, seed)
    for number in range(STEPS):
        expected = twin.step()
        try:
            assert walk.step_with_faults(kinds) == expected
            ours, theirs = look(alloc), look(other)
            del ours["staging"], theirs["staging"]
            assert ours == theirs
            alloc.check(device=True)
        except (AssertionError, sgalloc.LawViolation) as wrong:
            raise AssertionError(f"seed {seed}, step {number}: {expected}") from wrong
    walk.seen["evicted", ""] += sum(group.evicted for group in alloc.stats().groups.values())
    return walk.seen


@pytest.mark.parametrize("name", CONFIGS)
def test_every_call_into_the_device_fails_once(name: str) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        injector = Injector()
        kinds = (plain_failure, no_memory, interrupt)
        seen += walked(name, seed, "cpu", injector, kinds, injector.watch_allocator)
    points = {point for _, point in seen}
    assert {"write", "event", "done", "query", "capturing"} <= points, points
    if "prefix" in name:
        assert seen["evicted", ""] > 0, "cached pages were evicted for growth"


@pytest.fixture
def cuda() -> Iterator[Injector]:
    injector = Injector(spare_launched=True)
    with stand_in():
        injector.watch_cuda()
        yield injector


@pytest.mark.parametrize("name", CONFIGS)
def test_every_call_into_cuda_fails_once(name: str, cuda: Injector) -> None:
    """Behind a launch it cannot fail and leave all as it was: that is the next file's."""
    kinds = (cuda_failure(), interrupt)
    seen = walked(name, 3, "cuda", cuda, kinds, lambda a: None)
    points = {point for _, point in seen}
    needed = {"getDevice", "streamIsCapturing", "cupy.empty", "graphLaunch", "query"}
    assert needed <= points, points


def test_a_state_that_was_left_half_done_is_noticed() -> None:
    """The walk itself: a write that comes behind a change of the host is found."""
    injector = Injector()

    def broken(alloc: Any) -> None:
        injector.watch_allocator(alloc)
        ledger, real = alloc._ledger, alloc._core.device.write

        def write(*args: Any, **kwargs: Any) -> Any:
            ledger.decode_steps[1] += 1
            result = real(*args, **kwargs)
            ledger.decode_steps[1] -= 1
            return result

        alloc._core.device.write = write

    with pytest.raises(AssertionError, match="seed 1, step"):
        walked("plain", 1, "cpu", injector, (plain_failure,), broken)
