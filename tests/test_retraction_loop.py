"""Estimate, retract until it fits: after it the step succeeds, and one fewer would not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import Query, assert_laws, make, prompt, unchanged

import sgalloc
from sgalloc.retraction import Fitted, choose_victims, retract_until_fits
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import eagle

CHAIN = SpecConfig("eagle", 3, 1, 4)


def crowded(seed: int) -> tuple[sgalloc.KVAllocator, np.ndarray, np.ndarray, dict[int, int]]:
    """A pool with little room, requests that share prefixes, an order, and their reserves."""
    rng = np.random.default_rng(seed)
    ps = int(rng.choice([1, 2, 3, 4]))
    alloc = make(
        int(rng.integers(12, 28)), ps, max_requests=8, row_width=24 * ps, prefix_cache=True
    )
    (s,) = alloc.open()
    alloc.extend(s, 5 * ps)
    alloc.release(s, tokens=prompt(5, ps))
    n = int(rng.integers(1, 7))
    matches = [alloc.prefix.match(prompt(int(k), ps)) for k in rng.integers(0, 6, n)]
    h = alloc.open_with_prefix(matches)
    for handle in h:
        want = int(alloc.committed(handle)[0]) + int(rng.integers(0, 4 * ps))
        if alloc.fits(alloc.plan(extend=(handle, want))):
            alloc.extend(handle, want)
    top = int(rng.choice([3, 8, 20])) * ps
    reserves = {int(x): int(r) for x, r in zip(h, rng.integers(0, top, n), strict=True)}
    return alloc, h, rng.permutation(n), reserves


def maker(
    alloc: sgalloc.KVAllocator, reserves: dict[int, int]
) -> Callable[[np.ndarray], sgalloc.Plan]:
    return lambda some: alloc.plan(reserve=(some, [reserves[int(x)] for x in some]))


def outcome(seed: int, gone: int) -> bool:
    """Whether the step really goes through after so many were really released."""
    alloc, h, order, reserves = crowded(seed)
    victims = h[order][::-1][:gone]
    alloc.release(victims)
    left = h[~np.isin(h, victims)]
    try:
        alloc.reserve(left, [reserves[int(x)] for x in left])
    except sgalloc.OutOfPages:
        return False
    assert_laws(alloc)
    return True


def test_over_random_states_it_is_enough_and_one_fewer_is_not() -> None:
    seen: Counter[str] = Counter()
    for seed in range(250):
        alloc, h, order, reserves = crowded(seed)
        plan_of = maker(alloc, reserves)
        with unchanged(alloc):
            found = retract_until_fits(alloc, h, plan_of, order)
        gone = found.victims.size
        if isinstance(found.error, sgalloc.RowTooNarrow):
            with pytest.raises(sgalloc.RowTooNarrow):
                alloc.reserve(found.ending, reserves[int(found.ending)])
            assert gone == 0 and found.staying.tolist() == h.tolist()
            seen["row"] += 1
            continue
        assert found.victims.tolist() == h[order][::-1][:gone].tolist()
        assert sorted([*found.victims, *found.staying]) == sorted(h)
        assert found.staying.tolist() == [x for x in h if x not in found.victims]
        assert found.staying.dtype == found.victims.dtype == np.int64
        if found.error is None:
            assert found.ending is None and outcome(seed, gone)
            assert gone == 0 or not outcome(seed, gone - 1)
            seen["none" if gone == 0 else "some"] += 1
            continue
        assert isinstance(found.error, sgalloc.OutOfPages)
        assert not outcome(seed, gone) and found.staying.tolist() == [found.ending]
        assert found.error.group == "full"
        assert found.error.need == plan_of(found.staying).need["full"]
        assert found.error.need > found.error.free + found.error.cached
        assert found.error.free == alloc.available()
        assert found.error.cached == alloc.available(counting_cache=True) - alloc.available()
        seen["last" if gone else "alone"] += 1
    assert min(seen[kind] for kind in ("row", "none", "some", "last")) >= 5, seen


@pytest.mark.parametrize("counting_cache", [True, False])
def test_it_chooses_as_choose_victims(counting_cache: bool) -> None:
    both = set()
    for seed in range(80):
        alloc, h, _, reserves = crowded(seed)
        lens = {
            "output_lens": [int(x) % 5 for x in h],
            "prompt_lens": alloc.committed(h),
        }
        try:
            plan = maker(alloc, reserves)(h)
        except sgalloc.RowTooNarrow:
            continue
        chosen = choose_victims(alloc, h, plan, **lens, counting_cache=counting_cache)
        found = retract_until_fits(
            alloc, alloc.batch(h), maker(alloc, reserves), **lens, counting_cache=counting_cache
        )
        assert found.victims.tolist() == chosen.victims.tolist()
        assert (found.error is None) is chosen.fits
        if found.error is not None and not counting_cache:
            assert found.error.cached == 0
        both.add(chosen.fits)
    assert both == {True, False}


def test_the_whole_loop_of_a_scheduler() -> None:
    """Speculation until everybody is done: steps always succeed once the loop said so."""
    rng = np.random.default_rng(11)
    retracted = ended = steps = 0
    for ps in (1, 3, 16):
        width = 12 * max(ps, 8)
        alloc = make(8 + 3 * width // ps, ps, max_requests=6, row_width=width // ps * ps)
        queue = [int(n) for n in rng.integers(1, width // 2, 14)]
        running: list[int] = []
        while queue or running:
            while queue and len(running) < 6 and alloc.fits([queue[-1] + 8]):
                (fresh,) = alloc.open()
                alloc.extend(fresh, queue.pop())
                running.append(int(fresh))
            while True:
                held = np.array(running)
                found = retract_until_fits(
                    alloc,
                    held,
                    maker(alloc, dict.fromkeys(running, 8)),
                    output_lens=alloc.decode_index(held),
                    prompt_lens=alloc.committed(held),
                )
                queue += [min(n, width // 2) for n in alloc.committed(found.victims).tolist()]
                alloc.release(found.victims)
                retracted += found.victims.size
                running = found.staying.tolist()
                if found.error is None:
                    break
                alloc.release(found.ending)
                running.remove(found.ending)
                ended += 1
            if running:
                step = eagle.prepare_for_decode(alloc, running, CHAIN)
                steps += 1
                room = step.nxt - alloc.committed(running)
                alloc.commit(running, rng.integers(1, 5, len(running)).clip(max=room))
            assert_laws(alloc)
        assert alloc.available() == alloc.num_pages
    assert steps > 50 and retracted > 5 and ended > 5


def test_victims_released_behind_an_event_make_room_when_it_is_done() -> None:
    alloc = make(4, 4, max_requests=4, row_width=16)
    h = alloc.open(4)
    alloc.extend(h, 4)
    found = retract_until_fits(alloc, h, lambda x: alloc.plan(reserve=(x, 4)), [0, 1, 2, 3])
    assert found.victims.tolist() == h[[3, 2]].tolist()
    read = Query()
    alloc.release(found.victims, after=read)
    with pytest.raises(sgalloc.OutOfPages):
        alloc.reserve(found.staying, 4)
    read.over = True
    alloc.reserve(found.staying, 4)
    assert alloc.available() == 0


def test_nobody_runs() -> None:
    alloc = make(4, 4)
    found = retract_until_fits(alloc, [], lambda x: alloc.plan(reserve=(x, 4)), [])
    assert found == Fitted(found.victims, found.staying, None, None)
    assert found.victims.size == found.staying.size == 0


def test_refusals() -> None:
    alloc = make(4, 4, max_requests=4, row_width=16)
    h = alloc.open(3)
    alloc.extend(h, [4, 4, 16 - 8])

    def plan_of(some: Any) -> sgalloc.Plan:
        return alloc.plan(reserve=(some, 4))

    for order in ([0, 1], [0, 1, 1], [1, 2, 3]):
        with unchanged(alloc), pytest.raises(ValueError, match="order"):
            retract_until_fits(alloc, h, plan_of, order)
    with unchanged(alloc), pytest.raises(ValueError, match="output_lens and prompt_lens"):
        retract_until_fits(alloc, h, plan_of)
    with pytest.raises(ValueError, match="twice"):
        retract_until_fits(alloc, [h[0], h[0]], plan_of, [0, 1])
    (gone,) = alloc.open()
    alloc.release(gone)
    with pytest.raises(sgalloc.StaleHandle):
        retract_until_fits(alloc, [gone], plan_of, [0])
    with pytest.raises(sgalloc.RowTooNarrow):  # of a request that is none of those named
        retract_until_fits(alloc, h[:2], lambda _: alloc.plan(reserve=(h, [0, 0, 9])), [0, 1])
