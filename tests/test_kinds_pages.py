"""K2, K3, K4: kinds of fault that other allocators were reported for, at every page size.

C stands on a page edge, one past it and one before it: ``edge`` is C modulo the page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    Query,
    assert_drained,
    assert_laws,
    assert_partition,
    ceil_pages,
    committed_at,
    each_edge,
    make,
    prompt,
    unchanged,
)

import sgalloc

# -- K2: the planner and the allocator agree -------------------------------------------------


def asks(h: np.ndarray, c: int, ps: int) -> list[tuple[str, dict[str, Any], Callable[[Any], Any]]]:
    """What could be asked for next: a name, the parts of its plan, and the verb that does it."""
    two = [c + ps + 1, c]
    ten = [2 * ps + 1, 1]
    return [
        ("decode", {"decode": (h, 1)}, lambda a: a.decode(h)),
        ("decode by a page and one", {"decode": (h, ps + 1)}, lambda a: a.decode(h, ps + 1)),
        ("reserve nothing", {"reserve": (h, 0)}, lambda a: a.reserve(h, 0)),
        ("reserve unequally", {"reserve": (h, ten)}, lambda a: a.reserve(h, ten)),
        ("extend", {"extend": (h, two)}, lambda a: a.extend(h, two)),
        (
            "extend one, reserve for the other",
            {"extend": (h[:1], c + ps), "reserve": (h[1:], ps)},
            lambda a: a.apply(a.plan(extend=(h[:1], c + ps), reserve=(h[1:], ps))),
        ),
    ]


@each_edge
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "some of it cached"])
def test_k2_planner_and_allocator_agree(ps: int, edge: int, cache: bool) -> None:
    c = committed_at(ps, edge)
    held = 2 * ceil_pages(c, ps)
    for at in range(6):
        probe = make(held + 20, ps)
        h = probe.open(2)
        probe.extend(h, c)
        need = probe.plan(**asks(h, c, ps)[at][1]).need["full"]
        for room in {max(need - 1, 0), need, need + 1}:
            alloc = make(held + room, ps, row_width=(held + 20) * ps, prefix_cache=cache)
            if cache and room:
                (old,) = alloc.open()
                alloc.extend(old, room * ps)
                alloc.release(old, tokens=prompt(room, ps))
            h = alloc.open(2)
            alloc.extend(h, c)
            assert alloc.available(counting_cache=True) == room
            name, parts, do = asks(h, c, ps)[at]
            plan = alloc.plan(**parts)
            assert plan.need == {"full": need} and plan.num_new_pages == need, name
            assert plan.fits is alloc.fits(plan) is (room >= need), name
            if room >= need:
                done = do(alloc)
                assert alloc.available(counting_cache=True) == room - need, name
                assert done.nxt.tolist() == plan.nxt.tolist() == alloc.allocated(h).tolist()
            else:
                with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
                    do(alloc)
                assert refused.value.need == need
                assert refused.value.free + refused.value.cached == room
            assert_laws(alloc)


@each_edge
def test_k2_new_requests_fit_exactly_when_they_go_through(ps: int, edge: int) -> None:
    lengths = [committed_at(ps, edge), 1, ps, 0]
    need = sum(ceil_pages(n, ps) for n in lengths)
    for room, rows in ((need - 1, 4), (need, 4), (need + 1, 4), (need, 3)):
        alloc = make(room, ps, max_requests=rows, row_width=4 * ps)
        expected = room >= need and rows >= 4
        assert alloc.fits(lengths) is expected
        if not expected:
            with unchanged(alloc), pytest.raises((sgalloc.OutOfPages, sgalloc.OutOfRows)):
                h = alloc.open(4)
                try:
                    alloc.extend(h, lengths)
                finally:
                    alloc.release(h)
            continue
        alloc.extend(alloc.open(4), lengths)
        assert alloc.available() == room - need
    wide = make(20, ps, row_width=4 * ps)
    assert wide.fits([4 * ps]) and not wide.fits([4 * ps + 1])
    with unchanged(wide), pytest.raises(sgalloc.RowTooNarrow):
        h = wide.open()
        try:
            wide.extend(h, 4 * ps + 1)
        finally:
            wide.release(h)


# -- K3: double ownership --------------------------------------------------------------------


@each_edge
def test_k3_no_page_has_two_owners(ps: int, edge: int) -> None:
    c = committed_at(ps, edge)
    alloc = make(24, ps, prefix_cache=True)
    shared = prompt(2, ps)
    first = alloc.open(2)
    alloc.extend(first, c)
    assert_partition(alloc)
    alloc.prefix.publish(first, [shared, shared])  # the second gives up its twins
    assert_partition(alloc)
    second = alloc.open_with_prefix([alloc.prefix.match(shared)] * 2)
    alloc.extend(second, c + ps)
    assert_partition(alloc)
    alloc.reserve(first, ps + 1)
    alloc.trim(first, 2 * ps)
    assert_partition(alloc)
    event = Query()
    alloc.release(second[0], tokens=prompt(3, ps), after=event)
    assert_partition(alloc)
    for twice in ([first[0], first[0]], [first[0], second[0]], second[0]):
        with unchanged(alloc), pytest.raises((sgalloc.StaleHandle, ValueError)):
            alloc.release(twice)
    assert_partition(alloc)
    event.over = True
    alloc.release(np.append(first, second[1]))
    assert_partition(alloc)
    alloc.extend(alloc.open(), 24 * ps)  # evicts all that is cached
    assert_laws(alloc)
    assert alloc.available(counting_cache=True) == 0


# -- K4: lost ownership ----------------------------------------------------------------------


def reach(alloc: sgalloc.KVAllocator, state: str, c: int, ps: int) -> Any:
    """Brings one request into ``state``; its handle."""
    if state == "opened with a prefix":
        (seed,) = alloc.open()
        alloc.extend(seed, 2 * ps)
        alloc.release(seed, tokens=prompt(2, ps))
        (h,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, ps)))
        return h
    (h,) = alloc.open()
    if state == "new":
        return h
    alloc.extend(h, c)
    if state == "chunked prefill":
        alloc.extend(h, c + ps)
    elif state == "running":
        alloc.decode(h)
    elif state == "reserved, nothing accepted":
        alloc.reserve(h, 2 * ps + 1)
    elif state == "reserved and committed":
        alloc.reserve(h, 2 * ps + 1)
        alloc.commit(h, 1)
    elif state == "parked":
        alloc.trim(h, 0)
    elif state == "cut short":
        alloc.trim(h, c - 1)
    elif state == "cut short behind an event":
        alloc.trim(h, 1, after=Query(over=False))
        alloc._core.quarantine.entries[0].event.over = True
    elif state == "published":
        alloc.prefix.publish(h, prompt(2, ps))
    else:
        assert state == "prefilled"
    return h


STATES = (
    "new",
    "prefilled",
    "chunked prefill",
    "running",
    "reserved, nothing accepted",
    "reserved and committed",
    "parked",
    "cut short",
    "cut short behind an event",
    "published",
    "opened with a prefix",
)


@each_edge
@pytest.mark.parametrize("state", STATES)
def test_k4_everything_comes_back_from_every_state(ps: int, edge: int, state: str) -> None:
    c = committed_at(ps, edge)
    for ending in ("plain", "into the cache", "behind an event", "into the cache behind an event"):
        alloc = make(12, ps, max_requests=2, prefix_cache=True)
        h = reach(alloc, state, c, ps)
        other = alloc.open()
        alloc.extend(other, 1)
        event = Query()
        alloc.release(
            h,
            tokens=[prompt(4, ps)] if "cache" in ending else None,
            after=event if "event" in ending else None,
        )
        if "event" in ending:
            assert alloc.stats().rows.quarantined == 1
        event.over = True
        alloc.release(other)
        alloc.settle()
        assert_laws(alloc)
        alloc.prefix.clear()
        assert_drained(alloc)
