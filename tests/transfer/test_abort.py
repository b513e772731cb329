"""abort, release and reclaim: what is pinned comes back from every state, once, and in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    Query,
    assert_drained,
    assert_laws,
    cached,
    fingerprint,
    make,
    prompt,
    unchanged,
    waiting,
)
from transfer.transfer_support import PS, World, pinned, private, world

import sgalloc

# -- abort ---------------------------------------------------------------------------------------


def test_an_abort_waits_for_every_writer() -> None:
    alloc = make(10, PS, max_requests=1)
    (h,) = alloc.preallocate(10, writers=3)
    alloc.acknowledge(h, 2)
    alloc.abort(h)
    assert alloc.receiving(h).aborted and alloc.receiving(h).acks == (2,)
    assert (pinned(alloc), alloc.available()) == (3, 7)
    with pytest.raises(sgalloc.StaleHandle):
        alloc.rows(h)
    with pytest.raises(sgalloc.OutOfRows):
        alloc.open()
    assert_laws(alloc)
    assert alloc.acknowledge(h, 0) and not alloc.acknowledge(h, 0)
    assert pinned(alloc) == 3
    assert alloc.acknowledge(h, 1)
    assert alloc.receiving(h) is None
    assert_drained(alloc)
    assert not alloc.acknowledge(h, 1)


def test_an_abort_of_a_live_request_is_a_release() -> None:
    w = world()
    alloc = w.alloc
    alloc.acknowledge(w.shared, 0)
    before = alloc.available(counting_cache=True)
    alloc.abort([w.live, w.shared])
    assert alloc.available(counting_cache=True) - before == 3 + 2 + 2, "and two are unlocked"
    assert_laws(alloc)
    event = Query()
    (h,) = alloc.open()
    alloc.extend(h, 9)
    held = waiting(alloc)
    alloc.abort(h, after=event)
    assert waiting(alloc) == (held[0] + 3, held[1] + 1)
    event.over = True
    alloc.settle()
    assert waiting(alloc) == held
    assert_laws(alloc)


def test_second_aborts_stale_and_unknown_handles_change_nothing() -> None:
    w = world()
    with unchanged(w.alloc):
        w.alloc.abort(w.aborted)
        w.alloc.abort([w.gone, w.aborted, w.gone, 0, -1, 7, w.live + (1 << 32), 1 << 62])
        w.alloc.abort(w.gone, force=True)
        w.alloc.abort(w.aborted, after=Query())
        w.alloc.abort([])
    w.alloc.abort([w.bare, w.bare])
    with unchanged(w.alloc):
        w.alloc.abort(w.bare)
    assert_laws(w.alloc)


def test_force_gives_everything_back_at_once() -> None:
    w = world()
    alloc = w.alloc
    locked = alloc.stats().groups["full"].locked
    alloc.abort([w.bare, w.shared, w.aborted], force=True)
    assert pinned(alloc) == 0 and alloc.stats().rows.open == 1
    assert alloc.stats().groups["full"].locked == locked - 2
    assert waiting(alloc) == (2, 1), "what waits behind an event still waits"
    assert not any(alloc.acknowledge(h, 0) for h in (w.bare, w.shared, w.aborted))
    assert_laws(alloc)


def test_a_batch_of_every_state_is_aborted_whole() -> None:
    w = world()
    batch = w.alloc.batch([w.live, w.bare, w.shared])
    w.alloc.abort(w.live)
    w.alloc.abort(batch)
    assert w.alloc.stats().rows.open == 0
    with unchanged(w.alloc):
        w.alloc.abort(batch)
    assert pinned(w.alloc) == 3 + 2 + 2
    assert w.alloc.acknowledge(w.bare, 1) and w.alloc.acknowledge(w.shared, 0)
    assert pinned(w.alloc) == 2
    assert_laws(w.alloc)
    other = make(4, PS)
    with unchanged(w.alloc), pytest.raises(ValueError, match="another allocator"):
        w.alloc.abort(other.batch(other.open()))


def test_a_batch_notices_that_a_request_was_aborted_or_reclaimed() -> None:
    for end in (lambda a, h: a.abort(h[1]), lambda a, h: a.reclaim(9)):
        alloc = make(20, PS)
        h = np.append(alloc.open(), alloc.preallocate(5, deadline=9))
        batch = alloc.batch(h)
        end(alloc, h)
        with pytest.raises(sgalloc.StaleHandle):
            alloc.committed(batch)


def test_the_lock_on_the_prefix_goes_with_the_pages() -> None:
    alloc = make(10, PS, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    (h,) = alloc.preallocate(12, prefix=alloc.prefix.match(prompt(2, PS)))
    alloc.abort(h)
    assert alloc.available(counting_cache=True) == 7
    assert alloc.prefix.clear() == 0
    alloc.acknowledge(h, 0)
    assert alloc.available(counting_cache=True) == 10
    assert alloc.prefix.clear() == 2
    assert_drained(alloc)


END: dict[str, Callable[[sgalloc.KVAllocator, int], Any]] = {
    "the last acknowledgement": lambda a, h: a.acknowledge(h, 0),
    "the deadline": lambda a, h: a.reclaim(5),
    "force": lambda a, h: a.abort(h, force=True),
}


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("done_before", [False, True])
def test_an_abort_behind_an_event_waits_for_both(end: str, done_before: bool) -> None:
    alloc = make(10, PS, max_requests=1, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    (h,) = alloc.preallocate(17, prefix=alloc.prefix.match(prompt(2, PS)), deadline=5)
    event = Query()
    held = private(alloc, h).tolist()
    alloc.abort(h, after=event)
    event.over = done_before
    alloc.settle()
    assert pinned(alloc) == 3
    assert_laws(alloc)
    END[end](alloc, h)
    assert pinned(alloc) == 0
    if not done_before:
        assert waiting(alloc) == (3, 1)
        assert (alloc.owners()[held] == -2).all()
        assert alloc.stats().groups["full"].locked == 2
        assert_laws(alloc)
        event.over = True
        alloc.settle()
    assert waiting(alloc) == (0, 0)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_a_forced_second_abort_waits_for_the_events_of_both() -> None:
    alloc = make(10, PS, max_requests=1)
    (h,) = alloc.preallocate(10)
    first, second = Query(), Query()
    alloc.abort(h, after=first)
    alloc.abort(h, force=True, after=second)
    assert (pinned(alloc), waiting(alloc)) == (0, (3, 1))
    for event in (second, first):
        alloc.settle()
        assert waiting(alloc) == (3, 1)
        event.over = True
    alloc.settle()
    assert_drained(alloc)


def test_an_event_that_is_done_at_the_abort_is_not_asked_again() -> None:
    alloc = make(10, PS)
    (h,) = alloc.preallocate(10)
    event = Query(over=True)
    alloc.abort(h, force=True, after=event)
    event.over = False
    assert_drained(alloc)


class Breaking(Query):
    """An event that cannot be asked the n-th time."""

    def __init__(self, polls_left: int) -> None:
        super().__init__()
        self.left = polls_left

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the event is lost")
        return super().query()


BREAKABLE: dict[str, Callable[[World, Any], Any]] = {
    "abort": lambda w, e: w.alloc.abort([w.live, w.bare, w.shared], after=e),
    "abort by force": lambda w, e: w.alloc.abort([w.live, w.bare, w.aborted], True, e),
    "abort again by force": lambda w, e: w.alloc.abort([w.live, w.aborted], True),
    "release": lambda w, e: w.alloc.release([w.live, w.bare, w.shared], after=e),
    "release into the cache": lambda w, e: w.alloc.release(
        [w.live, w.shared], tokens=[prompt(2, PS, seed=4), None], after=e
    ),
    "the last acknowledgement": lambda w, e: w.alloc.acknowledge(w.aborted, 0),
    "reclaim": lambda w, e: w.alloc.reclaim(100),
}


@pytest.mark.parametrize("polls", range(1, 6))
@pytest.mark.parametrize("kind", BREAKABLE)
def test_an_event_that_raises_changes_nothing(kind: str, polls: int) -> None:
    w, event = world(), Breaking(0)
    if kind in ("abort again by force", "the last acknowledgement", "reclaim"):
        w.alloc.abort([w.bare, w.shared], after=event)
        w.alloc.acknowledge(w.aborted, 0)
        w = w._replace(aborted=w.shared)
    event.left = polls
    before = fingerprint(w.alloc)
    try:
        BREAKABLE[kind](w, event)
    except RuntimeError:
        assert event.left == 0 and fingerprint(w.alloc) == before
    else:
        assert 0 < event.left < polls, "asked, but fewer times than that"
        assert fingerprint(w.alloc) != before
    w.alloc.check(device=True)


# -- release -------------------------------------------------------------------------------------


def test_a_release_of_what_is_received_is_an_abort() -> None:
    w = world()
    ids = [np.arange(9) + 9_000, prompt(4, PS)]
    before = w.alloc.stats().groups["full"]
    w.alloc.release([w.live, w.shared], tokens=ids)
    after = w.alloc.stats().groups["full"]
    assert after.cached - before.cached == 2, "of the live one alone"
    assert after.pinned == before.pinned and after.locked == before.locked
    assert w.alloc.prefix.match(prompt(4, PS)).length == 2 * PS
    assert w.alloc.receiving(w.shared).aborted
    assert_laws(w.alloc)
    with unchanged(w.alloc), pytest.raises(sgalloc.StaleHandle):
        w.alloc.release(w.shared)
    w.alloc.acknowledge(w.shared, 0)
    assert w.alloc.stats().groups["full"].locked == before.locked - 2
    assert_laws(w.alloc)


def test_a_refused_release_aborts_nobody() -> None:
    w = world()
    for call in (
        lambda: w.alloc.release([w.bare, w.gone]),
        lambda: w.alloc.release([w.bare, w.live], after=5),
        lambda: w.alloc.release([w.shared], tokens=[prompt(4, PS, seed=9)]),
        lambda: w.alloc.abort([w.bare, w.live], after=5),
    ):
        with unchanged(w.alloc), pytest.raises((sgalloc.AllocError, TypeError, ValueError)):
            call()


def test_releasing_what_is_received_gives_no_room_in_a_what_if_world() -> None:
    alloc = make(6, PS, max_requests=3)
    live, other = alloc.open(2)
    alloc.extend(live, 8)
    (h,) = alloc.preallocate(12)
    plan = alloc.plan(extend=(other, 9))
    assert not alloc.fits(plan)
    assert not alloc.fits(plan, after_releasing=h)
    assert alloc.fits(plan, after_releasing=[h, live])
    assert not alloc.fits([4], after_releasing=h), "nor a row"
    assert alloc.fits([4], after_releasing=other)
    assert not alloc.fits([13], after_releasing=[h, live])
    alloc.release([h, live])
    assert alloc.fits([12]) and not alloc.fits([13]) and not alloc.fits([4, 4])


# -- reclaim -------------------------------------------------------------------------------------


def test_reclaim_takes_back_what_is_due_and_nothing_else() -> None:
    alloc = make(30, PS, prefix_cache=True)
    never, late, due, gone = alloc.preallocate(
        [5, 6, 7, 8], deadline=[None, 10.5, 10, 3], writers=2
    )
    (behind,) = alloc.preallocate(9, deadline=np.float32(9.5))
    alloc.abort([gone, behind])
    with unchanged(alloc):
        assert alloc.reclaim(2.99).tolist() == []
    assert alloc.reclaim(np.int64(3)).tolist() == [gone]
    assert alloc.reclaim(10).tolist() == [due, behind], "in order of preallocation"
    assert pinned(alloc) == 2 + 2
    assert_laws(alloc)
    assert not alloc.acknowledge(due, 0)
    with unchanged(alloc):
        assert alloc.reclaim(10).tolist() == []
    assert alloc.reclaim(float("inf")).tolist() == [late]
    assert alloc.receiving(never) is not None
    alloc.abort(never)
    assert alloc.reclaim(float("inf")).size == 0, "without a deadline it waits for its writers"
    alloc.acknowledge(never, 1)
    alloc.acknowledge(never, 0)
    assert_drained(alloc)


def test_a_request_that_is_live_is_not_reclaimed() -> None:
    alloc = make(10, PS)
    (h,) = alloc.preallocate(9, deadline=1)
    alloc.acknowledge(h, 0)
    with unchanged(alloc):
        assert alloc.reclaim(2).dtype == np.int64
    assert alloc.committed(h).tolist() == [9]


def test_one_deadline_stands_for_all() -> None:
    alloc = make(10, PS)
    h = alloc.preallocate([5, 6], deadline=-1)
    assert alloc.reclaim(-1.0).tolist() == h.tolist()
    assert_drained(alloc)


def test_plans_made_before_something_came_back_are_stale() -> None:
    ways: list[Callable[[World], Any]] = [
        lambda w: w.alloc.abort(w.bare),
        lambda w: w.alloc.abort(w.aborted, force=True),
        lambda w: w.alloc.acknowledge(w.aborted, 0),
        lambda w: w.alloc.reclaim(50),
        lambda w: w.alloc.preallocate(1),
    ]
    for way in ways:
        w = world()
        plan = w.alloc.plan(decode=(w.live, 1))
        way(w)
        with pytest.raises(sgalloc.StalePlan):
            w.alloc.apply(plan)


# -- the prefill side ----------------------------------------------------------------------------


def test_a_sender_keeps_pages_until_it_is_done() -> None:
    alloc = make(6, PS, max_requests=2)
    (h,) = alloc.open()
    alloc.extend(h, 14)
    sent, sender = alloc.pages(h).tolist(), Query()
    alloc.release(h, after=sender)
    (other,) = alloc.open()
    with pytest.raises(sgalloc.OutOfPages):
        alloc.extend(other, 9)
    alloc.extend(other, 8)
    assert not set(alloc.pages(other).tolist()) & set(sent)
    assert (alloc.owners()[sent] == -2).all()
    sender.over = True
    alloc.extend(other, 24)
    assert set(sent) < set(alloc.pages(other).tolist())


def test_what_a_sender_leaves_in_the_cache_is_found_but_not_evicted_before_it_is_done() -> None:
    alloc = make(6, PS, max_requests=3, prefix_cache=True)
    (h,) = alloc.open()
    alloc.extend(h, 14)
    sent, sender = alloc.pages(h), Query()
    alloc.release(h, tokens=[prompt(4, PS)[:14]], after=sender)
    assert alloc.prefix.match(prompt(4, PS)).pages.tolist() == sent[:3].tolist()
    assert alloc.available(counting_cache=True) == 2
    (other,) = alloc.open()
    with pytest.raises(sgalloc.OutOfPages):
        alloc.extend(other, 9)
    sender.over = True
    alloc.extend(other, 24)
    assert set(sent.tolist()) < set(alloc.pages(other).tolist())
    assert_laws(alloc)
