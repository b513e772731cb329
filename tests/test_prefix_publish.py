"""publish(): requests in flight share a prompt; the table is rewritten where twins are given up."""

from __future__ import annotations

import numpy as np
import pytest
from host_support import (
    Query,
    assert_drained,
    assert_laws,
    cached,
    each_page_size,
    make,
    prompt,
    unchanged,
)

import sgalloc

PS = 4


def running(tokens: int, count: int = 1) -> tuple[sgalloc.KVAllocator, np.ndarray]:
    alloc = make(40, PS, prefix_cache=True)
    h = alloc.open(count)
    alloc.extend(h, tokens)
    return alloc, h


@each_page_size
def test_whole_settled_pages_enter_and_the_request_goes_on(ps: int) -> None:
    alloc = make(20, ps, prefix_cache=True)
    (h,) = alloc.open()
    alloc.extend(h, 2 * ps + ps // 2)
    alloc.reserve(h, ps)
    held = alloc.pages(h, 0, int(alloc.allocated(h)[0])).tolist()
    before = (alloc.committed(h).tolist(), alloc.allocated(h).tolist(), alloc.available())
    assert alloc.prefix.publish(h, prompt(9, ps)) is None
    whole = (2 * ps + ps // 2) // ps
    assert alloc.prefix.match(prompt(9, ps)).pages.tolist() == held[:whole]
    assert alloc.pages(h, 0, len(held) * ps).tolist() == held, "nothing was given up"
    assert before == (alloc.committed(h).tolist(), alloc.allocated(h).tolist(), alloc.available())
    group = alloc.stats().groups["full"]
    assert (group.cached, group.locked) == (whole, whole)
    assert_laws(alloc)
    alloc.decode(h, ps)
    assert_laws(alloc)
    alloc.release(h)
    assert alloc.stats().groups["full"].locked == 0
    assert alloc.prefix.match(prompt(9, ps)).length == whole * ps


def test_known_ids_bound_what_enters() -> None:
    for known, pages in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 2)):
        alloc, h = running(11)
        alloc.prefix.publish(h[0], np.arange(known))
        assert alloc.prefix.match(np.arange(99)).pages.size == pages
        assert_laws(alloc)


def test_a_duplicate_is_given_up_and_the_row_rewritten() -> None:
    alloc, h = running(14, count=2)
    ids = prompt(3, PS)
    twins = cached(alloc, ids[:8]).tolist()
    held = alloc.pages(h[0]).tolist()
    (row,) = alloc.rows(h[0])
    free = alloc.available()
    alloc.prefix.publish(h[0], ids)
    now = alloc.pages(h[0]).tolist()
    assert now == [*twins, *held[2:]]
    expected = [page * PS + offset for page in now for offset in range(PS)]
    assert alloc.req_to_token[row, : 4 * PS].tolist() == expected
    assert alloc.slots(h[0], 0, 14).tolist() == expected[:14]
    assert alloc.available() == free + 2, "the request's own twins are free"
    assert alloc.prefix.match(ids).pages.tolist() == [*twins, held[2]]
    alloc.prefix.publish(h[1], ids)
    assert alloc.pages(h[1]).tolist()[:3] == now[:3]
    assert alloc.available() == free + 5
    assert_laws(alloc)
    alloc.release(h)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_several_requests_of_one_prompt_in_one_call() -> None:
    alloc, h = running(13, count=3)
    ids = prompt(3, PS)
    first = alloc.pages(h[0]).tolist()
    own = [int(alloc.pages(x)[3]) for x in h]
    alloc.prefix.publish(alloc.batch(h), [ids, ids[:8], ids])
    assert alloc.pages(h[0]).tolist() == first
    assert alloc.pages(h[1]).tolist()[:2] == first[:2]
    assert alloc.pages(h[2]).tolist()[:3] == first[:3]
    assert [int(alloc.pages(x)[3]) for x in h] == own, "the last page is still being filled"
    assert alloc.available() == 40 - 12 + 2 + 3
    assert_laws(alloc)


def test_others_open_with_what_was_published_while_it_runs() -> None:
    alloc, h = running(13)
    ids = prompt(3, PS)
    alloc.prefix.publish(h[0], ids)
    (other,) = alloc.open_with_prefix(alloc.prefix.match(ids))
    assert alloc.pages(other).tolist() == alloc.pages(h[0]).tolist()[:3]
    alloc.decode([other, h[0]], 5)
    assert alloc.pages(other).tolist()[3:] != alloc.pages(h[0]).tolist()[3:]
    alloc.release(h[0])
    assert alloc.stats().groups["full"].locked == 3, "the other holds them still"
    assert_laws(alloc)


def test_published_again_as_it_grows() -> None:
    alloc, h = running(5)
    ids = prompt(6, PS)
    for tokens, pages in ((5, 1), (9, 2), (9, 2), (24, 6)):
        alloc.extend(h, tokens)
        alloc.prefix.publish(h[0], ids)
        assert alloc.prefix.match(ids).pages.tolist() == alloc.pages(h[0]).tolist()[:pages]
        assert alloc.stats().groups["full"].locked == pages
        assert_laws(alloc)
    alloc.release(h, tokens=[ids])
    assert alloc.stats().groups["full"].cached == 6
    assert alloc.available() == 34


def test_after_opening_with_a_prefix() -> None:
    alloc, _ = running(0)
    ids = prompt(5, PS)
    shared = cached(alloc, ids[:8]).tolist()
    h = alloc.open_with_prefix([alloc.prefix.match(ids)] * 2)
    alloc.extend(h, 20)
    own = alloc.pages(h[0]).tolist()[2:]
    alloc.prefix.publish(h, [ids, ids])
    for handle in h:
        assert alloc.pages(handle).tolist() == [*shared, *own]
    assert_laws(alloc)
    alloc.release(h)
    assert alloc.prefix.clear() == 5


def test_a_published_page_is_not_trimmed_into() -> None:
    alloc, h = running(14)
    alloc.prefix.publish(h[0], prompt(3, PS))
    for length in (1, 6, 11):
        with unchanged(alloc), pytest.raises(sgalloc.WrongState, match=f"edge {length // 4 * 4}"):
            alloc.trim(h, length)
    alloc.trim(h, 13)
    alloc.trim(h, 8)
    assert alloc.committed(h).tolist() == alloc.allocated(h).tolist() == [8]
    assert alloc.prefix.match(prompt(3, PS)).length == 12, "what was cut off stays cached"
    assert alloc.stats().groups["full"].locked == 2
    alloc.trim(h, 0)
    assert alloc.stats().groups["full"].locked == 0
    assert_laws(alloc)


def test_ids_that_contradict_what_is_shared_refuse_the_whole_call() -> None:
    alloc, h = running(14, count=2)
    ids = prompt(3, PS)
    alloc.prefix.publish(h[1], ids)
    for at in (0, 3, 4, 7, 8, 11):
        other = ids.copy()
        other[at] = -1
        page = at // PS
        with unchanged(alloc), pytest.raises(ValueError, match=f"page {page} "):
            alloc.prefix.publish(h, [ids, other])
        with unchanged(alloc), pytest.raises(ValueError, match=f"page {page} "):
            alloc.release(h, tokens=[None, other])
    assert_laws(alloc)


def test_a_twin_of_the_prefix_does_not_hide_a_contradiction() -> None:
    alloc, h = running(14, count=2)
    a, b = prompt(3, PS), prompt(3, PS, seed=1)
    alloc.prefix.publish(h, [a, b])
    with unchanged(alloc), pytest.raises(ValueError, match="row"):
        alloc.release(h, tokens=[b, a])
    with unchanged(alloc), pytest.raises(ValueError, match="row"):
        alloc.prefix.publish(h[0], [*a[:4], *b[4:]])


def test_plans_age_only_where_something_was_published() -> None:
    alloc, h = running(14)
    alloc.prefix.publish(h[0], prompt(3, PS))
    plan = alloc.plan(decode=(h, 1))
    alloc.prefix.publish(h[0], prompt(3, PS))  # known already
    alloc.apply(plan)
    alloc.decode(h)
    plan = alloc.plan(decode=(h, 1))
    alloc.prefix.publish(h[0], [*prompt(3, PS), 7, 7, 7, 7])
    with pytest.raises(sgalloc.StalePlan):
        alloc.apply(plan)


def test_twins_given_up_wait_for_the_event() -> None:
    alloc, h = running(12, count=2)
    ids = prompt(3, PS)
    alloc.prefix.publish(h[0], ids)
    event = Query()
    alloc.prefix.publish(h[1], ids, after=event)
    assert alloc.pages(h[1]).tolist() == alloc.pages(h[0]).tolist(), "the row is rewritten at once"
    assert alloc.stats().groups["full"].quarantined == 3
    assert alloc.available() == 40 - 6
    assert_laws(alloc)
    event.over = True
    alloc.settle()
    assert alloc.available() == 40 - 3
    assert_laws(alloc)


def test_new_pages_are_held_until_the_event_is_done() -> None:
    alloc, h = running(12)
    event = Query()
    alloc.prefix.publish(h[0], prompt(3, PS), after=event)
    assert alloc.prefix.match(prompt(3, PS)).length == 12, "they can be matched at once"
    alloc.release(h)
    assert alloc.available(counting_cache=True) == 37, "but do not count, and stay"
    assert alloc.prefix.clear() == 0
    event.over = True
    alloc.settle()
    assert alloc.available(counting_cache=True) == 40
    assert alloc.prefix.clear() == 3
    assert_drained(alloc)
