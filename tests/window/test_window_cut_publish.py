"""A page that a trim cut, committed without a growth, and published: nobody takes it afresh."""

from __future__ import annotations

import itertools

import pytest
from host_support import Query, prompt, unchanged
from window.support import (
    assert_drained,
    assert_window_laws,
    both,
    extended,
    frontier,
    make,
    mapped,
    shown,
)

import sgalloc

PAGES, CUT = 4, 2


def cut(alloc: sgalloc.KVAllocator, offset: int) -> int:
    """A request of three pages, cut ``offset`` tokens into the last of them, which it has no
    window page for; all of the three committed."""
    ps = alloc.page_size
    handle = extended(alloc, PAGES * ps)
    alloc.evict_window(handle, upto=PAGES * ps)
    alloc.trim(handle, CUT * ps + offset)
    assert frontier(alloc, handle) == CUT * ps and not any(shown(alloc, handle))
    alloc.commit(handle, ps - offset)
    return handle


CASES = [(ps, offset) for ps in (2, 3, 16, 64, 128) for offset in sorted({1, ps // 2, ps - 1})]


@pytest.mark.parametrize(("ps", "offset"), CASES)
@pytest.mark.parametrize("twin", ["none", "live", "dead"])
@pytest.mark.parametrize("slot_map", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_the_next_growth_takes_new_pages_alone(
    ps: int, offset: int, twin: str, slot_map: bool, waits: bool
) -> None:
    alloc = make(12, ps, 1, prefix_cache=True, slot_map=slot_map)
    ids = prompt(PAGES, ps)
    if twin != "none":
        other = extended(alloc, PAGES * ps)
        alloc.evict_window(other, upto=PAGES * ps if twin == "dead" else 0)
        alloc.release(other, tokens=[ids])
    handle, event = cut(alloc, offset), Query()
    alloc.prefix.publish(handle, ids, after=event if waits else None)
    assert not any(shown(alloc, handle)), "what it does not hold stays unread"
    assert frontier(alloc, handle) == (CUT + 1) * ps
    event.over = True
    alloc.settle()
    alloc.check(device=True)

    before = both(alloc, counting_cache=True)
    plan = alloc.plan(decode=(handle, 1))
    assert plan.need == {"full": 1, "window": 1}
    alloc.apply(plan)
    after = both(alloc, counting_cache=True)
    assert [old - new for old, new in zip(before, after, strict=True)] == [1, 1]
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 3 + [True]
    alloc.check(device=True)

    alloc.release(handle)
    alloc.prefix.clear()
    assert both(alloc) == (12, 12)
    if slot_map:
        assert_drained(alloc)


def test_a_part_of_it_published_leaves_the_cut_page_to_the_next_growth() -> None:
    alloc = make(12, 4, 1, prefix_cache=True)
    handle = cut(alloc, 3)
    alloc.prefix.publish(handle, prompt(CUT, 4))
    assert frontier(alloc, handle) == CUT * 4
    assert alloc.plan(decode=(handle, 1)).need == {"full": 1, "window": 2}
    alloc.decode(handle)
    assert [bool(page) for page in shown(alloc, handle)] == [False] * 2 + [True] * 2
    assert_window_laws(alloc)


def test_many_cut_and_published_pages_in_one_step() -> None:
    alloc = make(40, 4, 1, prefix_cache=True)
    handles = [cut(alloc, 1) for _ in range(3)]
    alloc.prefix.publish(handles, [prompt(PAGES, 4, seed=seed) for seed in range(3)])
    assert alloc.plan(decode=(handles, 1)).need == {"full": 3, "window": 3}
    with unchanged(alloc), pytest.raises(sgalloc.CommitPastExtent):
        alloc.commit(handles, 1)
    alloc.decode(handles)
    assert_window_laws(alloc)
    for handle in handles:
        alloc.trim(handle, 4 * CUT)
    assert_window_laws(alloc)
    alloc.decode(handles)
    pages = [shown(alloc, handle)[CUT:] for handle in handles]
    assert all(len(set(page)) == len(page) and all(page) for page in pages)
    assert len(set(itertools.chain(*pages))) == 3
    assert set(mapped(alloc).values()) == set(itertools.chain(*pages))
