"""A restored allocator and the one it came from do the same ever after."""

from __future__ import annotations

from collections import Counter

import pytest
from trust.walk import CONFIGS, Walk, make, visible

import sgalloc

SEEDS, BEFORE, AFTER = 14, 90, 70


@pytest.mark.parametrize("name", CONFIGS)
def test_both_go_on_alike(name: str) -> None:
    """At random points of walks: equal answers, ids, refusals, tables, digests."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        alloc = make(name, ps=(1, 2, 3, 4, 5)[seed % 5])
        walk = Walk(alloc, seed)
        for _ in range(walk.random.randint(10, BEFORE)):
            walk.step()
        walk.finish()
        alloc.settle()
        before = visible(alloc)
        data = alloc.snapshot()
        assert visible(alloc) == before, "taking a snapshot changes nothing"
        restored = sgalloc.KVAllocator.restore(data, "cpu")
        restored.check(device=True)
        assert visible(restored) == before
        assert restored.snapshot() == data, "what was restored is stored alike"
        twin = walk.twin(restored)
        seen["receiving"] += len(alloc._core.pins.by_handle)
        seen["aborted"] += len(alloc._core.pins.aborted())
        seen["cached"] += alloc._core.tree.cached if alloc._core.tree is not None else 0
        for number in range(AFTER):
            said, again = walk.step(), twin.step()
            assert said == again, (seed, number)
            if number % 10 == 0 or number == AFTER - 1:
                assert visible(alloc) == visible(restored), (seed, number, said)
                restored.check(device=True)
            verb = said.partition(":")[0]
            seen["refused" if "Error" in said or "OutOf" in said else verb] += 1
        stats = alloc.stats().groups
        seen["evicted"] += sum(group.evicted for group in stats.values())
    wanted = ["refused", "receiving", "aborted", "extend", "trim", "release"]
    wanted += ["cached", "evicted", "publish"] if "prefix" in name else []
    assert min(seen[what] for what in wanted) >= 3, seen


@pytest.mark.parametrize("name", CONFIGS)
def test_events_are_taken_for_done_when_told_so(name: str) -> None:
    """What waits is refused; told to, it is stored as its events' end would leave it."""
    waited = 0
    for seed in range(8):
        alloc = make(name)
        walk = Walk(alloc, seed)
        for _ in range(60):
            walk.step()
        pending = bool(alloc._core.quarantine.entries)
        pending |= any(pin.event is not None and not pin.event.over for pin in
                       alloc._core.pins.aborted())  # fmt: skip
        before = visible(alloc)
        if pending:
            waited += 1
            with pytest.raises(sgalloc.WrongState, match=r"settle\(\).*assume_done"):
                alloc.snapshot()
        data = alloc.snapshot(assume_done=True)
        refused = {"WrongState": before["refusals"].get("WrongState", 0) + pending}
        before["refusals"] |= refused if pending else {}
        assert visible(alloc) == before
        walk.finish()
        # Done, and not taken in yet: stored as the next verb would find it.
        assert alloc.snapshot() == alloc.snapshot(assume_done=True)
        alloc.settle()
        assert alloc.snapshot() == alloc.snapshot(assume_done=True)
        restored = sgalloc.KVAllocator.restore(data, "cpu")
        restored.check(device=True)
        found = visible(restored) | {"refusals": None}
        assert found == visible(alloc) | {"refusals": None}
    assert waited >= 3
