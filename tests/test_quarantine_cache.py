"""after= and the prefix cache: new nodes, shared pages and duplicates wait for the event."""

from __future__ import annotations

import numpy as np
import pytest
from host_support import Query, assert_laws, cached, make, prompt, unchanged, waiting

import sgalloc

PS = 4


def world() -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """Requests with 3, 2 and 4 of 20 pages, a row each, one row to spare."""
    alloc = make(20, PS, max_requests=4, prefix_cache=True)
    h = alloc.open(3)
    alloc.extend(h, [9, 6, 16])
    return alloc, h


def test_new_nodes_match_but_neither_go_nor_count_until_the_event_is_done() -> None:
    alloc, h = world()
    event = Query()
    held = alloc.pages(h[2]).tolist()
    alloc.release(h[2], tokens=prompt(3, PS), after=event)
    assert alloc.prefix.match(prompt(4, PS)).pages.tolist() == held[:3]
    assert waiting(alloc) == (1, 1), "the page that is not known waits, and the row"
    group = alloc.stats().groups["full"]
    assert (group.cached, group.locked) == (3, 3)
    assert alloc.available(counting_cache=True) == 11
    assert alloc.prefix.clear() == 0
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
        alloc.extend(h[0], 4 * 15)
    assert (refused.value.need, refused.value.free, refused.value.cached) == (12, 11, 0)
    assert_laws(alloc)
    (other,) = alloc.open_with_prefix(alloc.prefix.match(prompt(3, PS)))
    event.over = True
    alloc.settle()
    assert alloc.available(counting_cache=True) == 12, "the other holds them now"
    alloc.release(other)
    assert alloc.available(counting_cache=True) == 15
    assert_laws(alloc)


def test_shared_pages_are_unlocked_when_the_event_is_done() -> None:
    alloc, _ = world()
    cached(alloc, prompt(2, PS, seed=1))
    (h,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, PS, seed=1)))
    event = Query()
    alloc.release(h, after=event)
    assert alloc.stats().groups["full"].locked == 2
    assert alloc.prefix.clear() == 0
    event.over = True
    alloc.settle()
    assert alloc.prefix.clear() == 2


def test_pages_trimmed_off_a_shared_prefix_stay_locked_until_then() -> None:
    alloc, _ = world()
    cached(alloc, prompt(3, PS, seed=1))
    (h,) = alloc.open_with_prefix(alloc.prefix.match(prompt(3, PS, seed=1)))
    event = Query()
    alloc.trim(h, 4, after=event)
    assert alloc.allocated(h).tolist() == [4]
    assert alloc.stats().groups["full"].locked == 3
    event.over = True
    alloc.settle()
    assert alloc.stats().groups["full"].locked == 1
    assert alloc.prefix.clear() == 2
    assert_laws(alloc)


def test_a_duplicate_waits() -> None:
    alloc, h = world()
    cached(alloc, prompt(4, PS))
    event = Query()
    alloc.release(h[2], tokens=prompt(4, PS), after=event)
    assert waiting(alloc) == (4, 1)
    assert alloc.stats().groups["full"].cached == 4
    assert_laws(alloc)
    event.over = True
    alloc.settle()
    assert waiting(alloc) == (0, 0)
    assert_laws(alloc)
