"""What goes back behind events ends, in any order of these, where it would be without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from host_support import Query, open_handles
from states.world import CONFIGS, ids_of, make

import sgalloc

Free = Callable[[sgalloc.KVAllocator, list[int], Any], Any]
LENGTHS = (22, 13, 9, 19, 17)


def prepared(name: str) -> tuple[sgalloc.KVAllocator, list[int]]:
    """Five running requests and two that are received, with all that goes with the config."""
    config = CONFIGS[name]
    # Without scratch, for which `to_sparse` takes pages that are then others.
    alloc = make(replace(config, rows=9, scratch=0))
    if config.cache:
        (seed,) = alloc.open()
        alloc.extend(seed, 12)
        alloc.release(seed, tokens=ids_of(1)[:12])
        opened = [int(alloc.open_with_prefix(alloc.prefix.match(ids_of(1)))[0]) for _ in LENGTHS]
    else:
        opened = alloc.open(len(LENGTHS)).tolist()
    alloc.extend(opened, list(LENGTHS) if not config.cache else [n + 12 for n in LENGTHS])
    alloc.reserve(opened, 7)
    received = alloc.preallocate([14, 6], deadline=[None, 5]).tolist()
    return alloc, opened + received


def frees_of(name: str) -> dict[str, Free]:
    config = CONFIGS[name]
    found: dict[str, Free] = {
        "trim": lambda a, h, e: a.trim(h[:2], a.committed(h[:2]) - 6, e),
        "compact": lambda a, h, e: a.compact(
            h[2:3], [[int(a.committed(h[2])[0]) + at for at in (1, 3)]], e
        ),
        "abort": lambda a, h, e: (a.abort(h[5], after=e), a.acknowledge(h[5], 0)),
        "reclaim": lambda a, h, e: (a.abort(h[6], after=e), a.reclaim(5)),
    }
    if config.cache:
        found["release"] = lambda a, h, e: a.release(h[3], tokens=ids_of(1, 3, 12), after=e)
    else:
        found["release"] = lambda a, h, e: a.release(h[3], after=e)
    if config.window:
        found["evict"] = lambda a, h, e: a.evict_window(h[:3], after=e)
    if config.cache:
        found["publish"] = lambda a, h, e: a.prefix.publish(h[4], ids_of(1, 2, 12), e)
    if config.ratio:
        found["to sparse"] = lambda a, h, e: a.to_sparse([h[0], h[4]], e)
    return found


def where_all_is(alloc: sgalloc.KVAllocator) -> dict[str, Any]:
    """Who has which page and entry, whatever the order in which they were freed."""
    core: Any = alloc._core
    handles = open_handles(alloc)
    found: dict[str, Any] = {
        "owners": alloc.owners().tolist(),
        "free": sorted(core.pool.free_ids().tolist()),
        "rows": [handles, sorted(alloc._ledger.free_row_ids().tolist())],
        "lengths": [alloc.committed(handles).tolist(), alloc.allocated(handles).tolist()],
        "pages": [alloc.pages(h, 0, int(alloc.allocated(h)[0])).tolist() for h in handles],
        "table": [alloc.req_to_token[row].tolist()[:n] for row, n in zip(
            alloc.rows(handles), alloc.allocated(handles), strict=True
        )],
        "rooms": [alloc.available(g, c) for g in alloc.stats().groups for c in (False, True)],
    }  # fmt: skip
    if core.side is not None:
        found["beside"] = [core.side.pool.holder.tolist(), sorted(core.side.pool.free_ids())]
        found["map"] = np.asarray(core.device.side_map).tolist() if core.side.mapped else []
    if core.tree is not None:
        found["cache"] = sorted(
            (page, node.locks) for node in core.tree.nodes() for page in node.pages.tolist()
        )
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_events_may_end_in_any_order(name: str) -> None:
    frees = frees_of(name)
    alloc, handles = prepared(name)
    for free in frees.values():
        free(alloc, handles, None)
        alloc.check(device=True)
    expected = where_all_is(alloc)
    waited = 0
    orders = list(permutations(range(len(frees))))
    for order in orders[:: max(1, len(orders) // 60)]:
        alloc, handles = prepared(name)
        events = [Query() for _ in frees]
        for free, event in zip(frees.values(), events, strict=True):
            free(alloc, handles, event)
            alloc.check(device=True)
        waiting = sum(group.quarantined for group in alloc.stats().groups.values())
        for at in order:
            events[at].over = True
            alloc.settle()
            alloc.check(device=True)
            left = sum(group.quarantined for group in alloc.stats().groups.values())
            waited += left < waiting
            waiting = left
        assert not waiting
        assert where_all_is(alloc) == expected, order
    assert waited > 60


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_comes_back_before_its_own_event(name: str) -> None:
    """Each alone: what waits is out of reach, and all of it is there once the event is over."""
    for verb, free in frees_of(name).items():
        alloc, handles = prepared(name)
        groups = alloc.stats().groups
        before = {group: alloc.available(group) for group in groups}
        event = Query()
        free(alloc, handles, event)
        assert {group: alloc.available(group) for group in groups} == before, verb
        held = {group: found.quarantined for group, found in alloc.stats().groups.items()}
        rows = alloc.stats().rows
        assert sum(held.values()) or verb == "publish", verb
        event.over = True
        alloc.settle()
        alloc.check(device=True)
        after = {group: alloc.available(group) - count for group, count in before.items()}
        assert after == held, verb
        assert alloc.stats().rows.free == rows.free + rows.quarantined
