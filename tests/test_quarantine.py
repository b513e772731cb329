"""after=: pages, rows and locks wait until their event is done; an undone one holds nobody back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    DoneMethod,
    DoneValue,
    Query,
    assert_drained,
    assert_laws,
    make,
    places,
    prompt,
    unchanged,
    waiting,
)

import sgalloc

PS = 4


class TorchLike(Query):
    """As torch.cuda.Event: ``query()`` beside much else, and a ``cuda_event`` number."""

    cuda_event = 12345

    def wait(self, stream: Any = None) -> None:
        raise AssertionError("the host never waits")

    def synchronize(self) -> None:
        raise AssertionError("the host never waits")


KINDS: dict[str, Callable[[], Any]] = {
    "query()": Query,
    "done": DoneValue,
    "done()": DoneMethod,
    "torch": TorchLike,
}
each_kind = pytest.mark.parametrize("event", [pytest.param(k, id=n) for n, k in KINDS.items()])


def world() -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """Requests with 3, 2 and 4 of 20 pages, a row each, one row to spare."""
    alloc = make(20, PS, max_requests=4, prefix_cache=True)
    h = alloc.open(3)
    alloc.extend(h, [9, 6, 16])
    return alloc, h


@each_kind
def test_pages_and_rows_wait_until_the_event_is_done(event: Callable[[], Any]) -> None:
    alloc, h = world()
    e = event()
    held = alloc.pages(h[0]).tolist()
    alloc.release(h[0], after=e)
    assert waiting(alloc) == (3, 1)
    assert alloc.available() == alloc.available(counting_cache=True) == 11
    assert sorted(places(alloc)["waiting"]) == sorted(held)
    assert not set(alloc.pages(alloc.open())) & set(held)
    with pytest.raises(sgalloc.OutOfRows) as refused:
        alloc.open()
    assert refused.value.free == 0, "its row waits, too"
    with pytest.raises(sgalloc.StaleHandle):
        alloc.committed(h[0])
    assert_laws(alloc)
    alloc.settle()
    assert waiting(alloc) == (3, 1)
    e.over = True
    alloc.settle()
    assert waiting(alloc) == (0, 0)
    assert alloc.available() == 14 and alloc.open().size == 1
    assert_laws(alloc)


@each_kind
def test_an_event_that_is_done_already_waits_for_nothing(event: Callable[[], Any]) -> None:
    alloc, h = world()
    e = event()
    e.over = True
    alloc.release(h[0], after=e)
    alloc.trim(h[1], 0, after=e)
    alloc.prefix.publish(h[2], prompt(4, PS), after=e)
    assert waiting(alloc) == (0, 0)
    assert alloc.available() == 16
    alloc.release(h[2])
    assert alloc.available(counting_cache=True) == 20
    e.over = False  # nobody looks at it any more
    alloc.settle()
    assert_laws(alloc)


@each_kind
def test_trimmed_pages_wait_and_the_row_goes_on(event: Callable[[], Any]) -> None:
    alloc, h = world()
    e = event()
    held = alloc.pages(h[2]).tolist()
    alloc.trim(h[2], 5, after=e)
    assert alloc.committed(h[2]).tolist() == [5] and alloc.allocated(h[2]).tolist() == [8]
    assert sorted(places(alloc)["waiting"]) == sorted(held[2:])
    assert waiting(alloc) == (2, 0)
    alloc.extend(h[2], 16)
    assert not set(alloc.pages(h[2]).tolist()[2:]) & set(held[2:]), "not the pages that wait"
    assert_laws(alloc)
    e.over = True
    alloc.settle()
    assert waiting(alloc) == (0, 0) and alloc.available() == 11
    assert_laws(alloc)


GROWING: dict[str, Callable[[sgalloc.KVAllocator, int], Any]] = {
    "open": lambda a, h: a.open(),
    "open_with_prefix": lambda a, h: a.open_with_prefix(a.prefix.match([])),
    "extend": lambda a, h: a.extend(h, 17),
    "decode": lambda a, h: a.decode(h),
    "reserve": lambda a, h: a.reserve(h, 1),
    "commit": lambda a, h: a.commit(h, 0),
    "trim": lambda a, h: a.trim(h, 1),
    "release": lambda a, h: a.release(h),
    "publish": lambda a, h: a.prefix.publish(h, prompt(1, PS)),
    "clear": lambda a, h: a.prefix.clear(),
    "settle": lambda a, h: a.settle(),
}
ASKING: dict[str, Callable[[sgalloc.KVAllocator, int], Any]] = {
    "available": lambda a, h: a.available(),
    "stats": lambda a, h: a.stats(),
    "check": lambda a, h: a.check(device=True),
    "fits": lambda a, h: a.fits([80]),
    "plan": lambda a, h: a.plan(decode=(h, 1)),
    "pages": lambda a, h: a.pages(h),
    "slots": lambda a, h: a.slots(h, 0, 3),
    "match": lambda a, h: a.prefix.match(prompt(1, PS)),
    "batch": lambda a, h: a.batch([h]),
    "owners": lambda a, h: (a.owners(), a.runs()),
}


@pytest.mark.parametrize("verb", GROWING)
def test_a_verb_that_changes_the_ledger_takes_in_what_is_done(verb: str) -> None:
    alloc, h = world()
    event = Query()
    alloc.release(h[0], after=event)
    event.over = True
    GROWING[verb](alloc, int(h[2]))
    assert waiting(alloc) == (0, 0)


@pytest.mark.parametrize("verb", ASKING)
def test_a_question_polls_nothing_and_takes_nothing_in(verb: str) -> None:
    alloc, h = world()
    event = Query()
    alloc.release(h[0], after=event)
    event.over = True
    polls = event.polls
    with unchanged(alloc):
        ASKING[verb](alloc, int(h[2]))
    assert event.polls == polls
    assert waiting(alloc) == (3, 1)


def test_what_just_came_back_serves_the_same_call() -> None:
    alloc, h = world()
    event = Query()
    alloc.release(h[0], after=event)
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
        alloc.extend(h[2], 4 * (4 + 12))
    event.over = True
    alloc.extend(h[2], 4 * (4 + 14))
    assert alloc.available() == 0
    assert_laws(alloc)


class TestOrder:
    def released(self) -> tuple[sgalloc.KVAllocator, list[Query], list[list[int]], list[int]]:
        alloc, h = world()
        events = [Query(), Query(), Query()]
        pages = [alloc.pages(x).tolist() for x in h]
        rows = alloc.rows(h).tolist()
        for x, event in zip(h, events, strict=True):
            alloc.release(x, after=event)
        assert waiting(alloc) == (9, 3)
        return alloc, events, pages, rows

    def test_an_undone_one_holds_nobody_back(self) -> None:
        alloc, events, pages, _ = self.released()
        events[1].over = True
        alloc.settle()
        assert sorted(places(alloc)["waiting"]) == sorted(pages[0] + pages[2])
        assert waiting(alloc) == (7, 2)
        events[2].over = True
        alloc.settle()
        assert sorted(places(alloc)["waiting"]) == sorted(pages[0])
        events[0].over = True
        alloc.settle()
        assert_drained(alloc)

    def test_in_release_order_whatever_the_order_of_the_events(self) -> None:
        """Those found done at once come back in the order of their releases, as if never apart."""
        expected = None
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            alloc, events, _, _ = self.released()
            for at in order:
                events[at].over = True
            alloc.settle()
            found = (alloc._core.pool.free_ids().tolist(), alloc._ledger.free_row_ids().tolist())
            expected = expected or found
            assert found == expected

    def test_as_if_released_without_an_event(self) -> None:
        alloc, events, _, _ = self.released()
        for event in events:
            event.over = True
        alloc.settle()
        twin, h = world()
        for x in h:
            twin.release(x)
        assert alloc.open(4).tolist() == twin.open(4).tolist(), "rows go out in the same order"
        assert alloc._core.pool.free_ids().tolist() == twin._core.pool.free_ids().tolist()

    def test_a_batch_waits_for_one_event(self) -> None:
        alloc, h = world()
        event = Query()
        alloc.release(h, after=event)
        assert waiting(alloc) == (9, 3)
        event.over = True
        assert alloc.open(4).size == 4
        assert alloc.available() == 20

    def test_one_event_for_several_calls(self) -> None:
        alloc, h = world()
        event = Query()
        alloc.trim(h[2], 0, after=event)
        alloc.release(h, after=event)
        assert waiting(alloc) == (9, 3)
        event.over = True
        alloc.settle()
        assert_drained(alloc)


class TestPlans:
    def test_settling_ages_no_plan(self) -> None:
        alloc, h = world()
        event = Query()
        alloc.release(h[0], after=event)
        plan = alloc.plan(extend=(h[2], 4 * (4 + 11)))
        assert plan.fits
        event.over = True
        alloc.settle()
        assert alloc.fits(plan)
        alloc.apply(plan)
        assert_laws(alloc)

    def test_a_plan_that_did_not_fit_does_once_the_event_is_done(self) -> None:
        alloc, h = world()
        event = Query()
        alloc.release(h[0], after=event)
        plan = alloc.plan(extend=(h[2], 4 * (4 + 14)))
        assert not plan.fits
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
            alloc.apply(plan)
        event.over = True
        assert not alloc.fits(plan), "a question takes nothing in"
        alloc.apply(plan)
        assert alloc.available() == 0 and plan.fits

    def test_what_waits_is_not_counted_by_fits(self) -> None:
        alloc, h = world()
        event = Query()
        alloc.release(h[0], after=event)
        assert alloc.fits([44]) and not alloc.fits([45])
        assert alloc.fits([1]) and not alloc.fits([1, 1]), "rows count, too"
        event.over = True
        alloc.settle()
        assert alloc.fits([56]) and alloc.fits([1, 1])


class Broken:
    """An event whose device is gone."""

    def __init__(self, works: bool = False) -> None:
        self.works = works

    def query(self) -> bool:
        if not self.works:
            raise RuntimeError("device lost")
        return False


class TestEventsThatRaise:
    @pytest.mark.parametrize("verb", ["release", "release into the cache", "trim", "publish"])
    def test_at_the_call(self, verb: str) -> None:
        alloc, h = world()
        calls: dict[str, Callable[[], Any]] = {
            "release": lambda: alloc.release(h, after=Broken()),
            "release into the cache": lambda: alloc.release(
                h[2], tokens=prompt(4, PS), after=Broken()
            ),
            "trim": lambda: alloc.trim(h, 1, after=Broken()),
            "publish": lambda: alloc.prefix.publish(h[2], prompt(4, PS), after=Broken()),
        }
        plan = alloc.plan(decode=(h, 1))
        with unchanged(alloc), pytest.raises(RuntimeError, match="device lost"):
            calls[verb]()
        alloc.apply(plan)

    @pytest.mark.parametrize("verb", GROWING)
    def test_later(self, verb: str) -> None:
        alloc, h = world()
        done, broken = Query(), Broken(works=True)
        alloc.release(h[0], after=done)
        alloc.release(h[1], after=broken)
        done.over, broken.works = True, False
        with unchanged(alloc), pytest.raises(RuntimeError, match="device lost"):
            GROWING[verb](alloc, int(h[2]))
        broken.works = True
        GROWING[verb](alloc, int(h[2]))
        assert waiting(alloc) == (2, 1), "the other came back"


def test_without_undone_events_nothing_is_polled() -> None:
    alloc, h = world()
    event = Query()
    alloc.release(h[0], after=event)
    event.over = True
    alloc.settle()
    polls = event.polls
    alloc.decode(h[1:])
    alloc.settle()
    assert event.polls == polls


def test_real_events() -> None:
    torch = pytest.importorskip("torch")
    alloc, h = world()
    flag, future = threading.Event(), torch.futures.Future()

    class Flag:
        done = staticmethod(flag.is_set)

    alloc.release(h[0], after=future)  # its done() is a method
    alloc.release(h[1], after=Flag())
    assert waiting(alloc) == (5, 2)
    future.set_result(None)
    flag.set()
    alloc.settle()
    assert waiting(alloc) == (0, 0)
    assert_laws(alloc)
