"""Plans and fits: what a call would do, asked before it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    Query,
    assert_laws,
    count_launches,
    fingerprint,
    make,
    prompt,
    unchanged,
)

import sgalloc


def running() -> tuple[sgalloc.KVAllocator, np.ndarray]:
    alloc = make(30, 16, row_width=10 * 16)
    h = alloc.open(4)
    alloc.extend(h, [20, 16, 5, 0])
    return alloc, h


class TestPlan:
    def test_any_mix_of_the_three(self) -> None:
        alloc, h = running()
        plan = alloc.plan(
            extend=(h[3:], [40]), decode=(h[[1, 2]], [1, 20]), reserve=(int(h[0]), 40)
        )
        assert isinstance(plan, sgalloc.Plan)
        assert plan.rows.tolist() == alloc.rows(h[[3, 1, 2, 0]]).tolist(), "in the order given"
        assert plan.cur.tolist() == [0, 16, 16, 32] and plan.nxt.tolist() == [48, 32, 32, 64]
        assert plan.cur.dtype == plan.nxt.dtype == np.int64
        assert plan.need == {"full": 7} and plan.gain == {"full": 0}
        assert plan.num_new_pages == 7 and plan.fits is True
        out = np.empty(40 + 1 + 20 + 40, np.int64)
        assert alloc.apply(plan, out=out) is plan
        assert alloc.committed(h).tolist() == [20, 17, 25, 40]
        assert alloc.allocated(h).tolist() == [64, 32, 32, 48]
        assert alloc.decode_index(h).tolist() == [0, 1, 1, 0]
        assert out.tolist() == [
            *alloc.slots(h[3], 0, 40), *alloc.slots(h[1], 16, 17),
            *alloc.slots(h[2], 5, 25), *alloc.slots(h[0], 20, 60),
        ]  # fmt: skip
        assert_laws(alloc)

    def test_each_kind_alone_is_what_its_verb_does(self) -> None:
        for name, amount in (("extend", [33, 16, 6]), ("decode", [1, 1, 30]), ("reserve", 17)):
            planned, h = running()
            direct, g = running()
            first = planned.apply(planned.plan(**{name: (h[:3], amount)}))
            second = getattr(direct, name)(g[:3], amount)
            assert first.nxt.tolist() == second.nxt.tolist()
            assert fingerprint(planned) == fingerprint(direct)

    def test_planning_is_pure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alloc, h = running()
        launched = count_launches(alloc, monkeypatch)
        with unchanged(alloc):
            first = alloc.plan(extend=(h[:2], 99), reserve=(h[2:], 50))
            second = alloc.plan(decode=(h, 1))
            assert first.need == {"full": 5 + 6 + 3 + 4} and second.need == {"full": 2}
            assert alloc.fits(first) and alloc.fits(second, after_releasing=h[:1])
        assert not launched
        alloc.apply(first)  # the plans made after it, and asking, aged it not

    def test_does_not_fit(self) -> None:
        alloc, h = running()
        full = alloc.open()
        alloc.extend(full, 160)
        (more,) = alloc.open()
        alloc.extend(more, 160)
        room = alloc.available()
        assert room == 6
        plan = alloc.plan(extend=(h[:2], [20 + 16 * 5, 16 * 3]))
        assert plan.need == {"full": 7} and plan.fits is False
        assert alloc.fits(plan) is False
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.apply(plan)
        assert (refused.value.need, refused.value.free) == (7, 6)
        alloc.trim(more, 10 * 16)
        with pytest.raises(sgalloc.OutOfPages):
            alloc.apply(plan)  # nothing changed, so it is as good as it was

    def test_too_wide_is_refused_when_planning_before_pages_are_counted(self) -> None:
        alloc = make(2, 16, row_width=4 * 16)
        h = alloc.open(2)
        for parts in ({"extend": (h, [1, 65])}, {"decode": (h, 65)}, {"reserve": (h, [65, 0])}):
            with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow) as refused:
                alloc.plan(**parts)
            assert (refused.value.need, refused.value.width) == (80, 64)
        with pytest.raises(sgalloc.RowTooNarrow):
            alloc.extend(h, 65)

    def test_a_request_in_two_parts_is_refused(self) -> None:
        alloc, h = running()
        for parts in (
            {"extend": (h, 99), "decode": (h[2], 1)},
            {"decode": (h, 1), "reserve": (h[:1], 1)},
            {"extend": (h[1], 99), "reserve": (h, 1)},
        ):
            with unchanged(alloc), pytest.raises(ValueError, match="once"):
                alloc.plan(**parts)

    def test_an_applied_plan_cannot_be_applied_again(self) -> None:
        alloc, h = running()
        plan = alloc.plan(decode=(h, 1))
        alloc.apply(plan)
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
            alloc.apply(plan)
        with pytest.raises(sgalloc.StalePlan):
            alloc.apply(alloc.extend(h, 99))


CHANGES: dict[str, Callable[[sgalloc.KVAllocator, np.ndarray], Any]] = {
    "open": lambda a, h: a.open(),
    "extend": lambda a, h: a.extend(h[0], 21),
    "decode": lambda a, h: a.decode(h[0]),
    "reserve": lambda a, h: a.reserve(h[0], 16),
    "commit": lambda a, h: a.commit(h[0], 1),
    "trim C": lambda a, h: a.trim(h[0], 19),
    "trim pages": lambda a, h: a.trim(h[0], 16),
    "release": lambda a, h: a.release(h[3]),
    "release behind an event": lambda a, h: a.release(h[3], after=Query()),
    "publish": lambda a, h: a.prefix.publish(h[0], prompt(1, 16)),
    "open_with_prefix": lambda a, h: a.open_with_prefix(a.prefix.match([])),
}
HARMLESS: dict[str, Callable[[sgalloc.KVAllocator, np.ndarray], Any]] = {
    "nothing": lambda a, h: None,
    "open none": lambda a, h: a.open(0),
    "grow nobody": lambda a, h: (a.extend([], []), a.decode([]), a.reserve([], 1)),
    "give back nobody": lambda a, h: (a.release([]), a.trim([], 0), a.commit([], 1)),
    "a step of nothing": lambda a, h: (a.reserve(h, 0), a.commit(h, 0), a.trim(h, 99)),
    "questions": lambda a, h: (a.stats(), a.check(), a.fits([1]), a.pages(h[0]), a.runs()),
    "match": lambda a, h: a.prefix.match(prompt(1, 16)),
    "plan and batch": lambda a, h: (a.plan(decode=(h, 1)), a.batch(h)),
    "settle and warm": lambda a, h: (a.settle(), a.warm()),
}


class TestStalePlan:
    def made(self) -> tuple[sgalloc.KVAllocator, np.ndarray, sgalloc.Plan]:
        alloc = make(30, 16, prefix_cache=True)
        h = alloc.open(4)
        alloc.extend(h, [20, 16, 5, 0])
        return alloc, h, alloc.plan(decode=(h[1], 1))

    @pytest.mark.parametrize("change", CHANGES)
    def test_after_any_change_of_the_ledger(self, change: str) -> None:
        alloc, h, plan = self.made()
        CHANGES[change](alloc, h)
        for use in (lambda: alloc.apply(plan), lambda: alloc.fits(plan)):
            with unchanged(alloc), pytest.raises(sgalloc.StalePlan, match="again"):
                use()

    @pytest.mark.parametrize("call", HARMLESS)
    def test_not_after_calls_that_change_nothing(self, call: str) -> None:
        alloc, h, plan = self.made()
        HARMLESS[call](alloc, h)
        assert alloc.fits(plan)
        alloc.apply(plan)
        assert alloc.committed(h[1]).tolist() == [17]

    def test_not_after_a_refusal(self) -> None:
        alloc, h, plan = self.made()
        for refused in (
            lambda: alloc.extend(h, 9999),
            lambda: alloc.commit(h, 99),
            lambda: alloc.open(99),
            lambda: alloc.release([h[0], h[0]]),
            lambda: alloc.trim(h, -1),
        ):
            with pytest.raises((sgalloc.AllocError, ValueError)):
                refused()
        alloc.apply(plan)


class TestFits:
    @pytest.mark.parametrize("delta", [-1, 0, 1])
    def test_exact_at_the_edge(self, delta: int) -> None:
        alloc = make(7 + delta, 16, row_width=160)
        h = alloc.open(2)
        alloc.extend(h, [16, 3])
        plan = alloc.plan(extend=(h[0], 48), reserve=(h[1], 46))  # 2 + 3 pages
        assert plan.need == {"full": 5}
        before = alloc.available("full", counting_cache=True)
        assert before == 5 + delta
        assert alloc.fits(plan) is (delta >= 0)
        if delta < 0:
            with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
                alloc.apply(plan)
        else:
            alloc.apply(plan)
            fall = before - alloc.available("full", counting_cache=True)
            assert fall == plan.need["full"] - plan.gain["full"]

    def test_new_requests_count_rows_width_and_pages(self) -> None:
        alloc = make(8, 16, max_requests=3, row_width=64)
        alloc.extend(alloc.open(), 32)
        assert alloc.fits([48, 48]) and alloc.fits((33, 33)) and alloc.fits(np.array([0, 0]))
        assert not alloc.fits([49, 33]), "seven pages, six are free"
        assert not alloc.fits([0, 0, 0]), "three rows, two are free"
        assert alloc.fits([64]) and not alloc.fits([65]), "a row is 64 wide"
        assert alloc.fits([]) and alloc.fits(0) and alloc.fits(64) and not alloc.fits(65)

    def test_in_the_world_where_some_were_released(self) -> None:
        alloc = make(8, 16, max_requests=3, row_width=10 * 16)
        h = alloc.open(3)
        alloc.extend(h, [64, 32, 16])
        with unchanged(alloc):
            assert not alloc.fits([16])
            assert alloc.fits([5 * 16], after_releasing=h[0]), "its row and its four pages"
            assert not alloc.fits([5 * 16 + 1], after_releasing=h[0])
            assert alloc.fits([16 * 3, 16 * 4], after_releasing=h[:2].tolist())
            assert not alloc.fits([1, 1, 1], after_releasing=alloc.batch(h[:2]))
            plan = alloc.plan(reserve=(h, [1, 2 * 16, 1]))
            assert plan.need == {"full": 4} and not alloc.fits(plan)
            assert alloc.fits(plan, after_releasing=h[1]), "what it needed is off, too"
            assert alloc.fits(plan, after_releasing=h)
            assert not alloc.fits(alloc.plan(reserve=(h, [65, 33, 17])), after_releasing=h[2])

    @pytest.mark.parametrize("counting_cache", [False, True])
    def test_counting_the_cache_or_not(self, counting_cache: bool) -> None:
        alloc = make(8, 16, prefix_cache=True)
        (h,) = alloc.open()
        alloc.extend(h, 64)
        alloc.release(h, tokens=prompt(4, 16))
        sharers = alloc.open_with_prefix([alloc.prefix.match(prompt(2, 16))] * 2)
        alloc.extend(sharers, 33)  # a page of its own each
        cases = ((0, 2, 4), (1, 3, 5), (2, 4, 8))  # released, pages with none, with the cache
        for gone, free, with_cache in cases:
            room = with_cache if counting_cache else free
            for pages in (room, room + 1):
                asked = alloc.fits(
                    [pages * 16], after_releasing=sharers[:gone], counting_cache=counting_cache
                )
                assert asked is (pages == room), (gone, pages)

    def test_the_answer_holds_when_they_are_really_released(self) -> None:
        rng = np.random.default_rng(7)
        for _ in range(60):
            alloc = make(12, 4, max_requests=5, row_width=48, prefix_cache=True)
            (seed,) = alloc.open()
            alloc.extend(seed, 12)
            alloc.release(seed, tokens=prompt(3, 4))
            lengths = [int(n) for n in rng.integers(0, 4, 3)]
            h = alloc.open_with_prefix([alloc.prefix.match(prompt(n, 4)) for n in lengths])
            want = alloc.committed(h) + rng.integers(0, 9, 3)
            try:
                alloc.extend(h, want)
            except sgalloc.OutOfPages:
                continue
            gone = h[rng.random(3) < 0.5]
            stay = h[~np.isin(h, gone)]
            reserve = int(rng.integers(0, 14))
            expected = alloc.fits(alloc.plan(reserve=(h, reserve)), after_releasing=gone)
            new = rng.integers(0, 20, 3)
            expected_new = alloc.fits(new, after_releasing=gone)
            alloc.release(gone)
            assert alloc.fits(new) is expected_new
            if expected:
                alloc.reserve(stay, reserve)
            else:
                with pytest.raises(sgalloc.OutOfPages):
                    alloc.reserve(stay, reserve)


def test_a_plan_belongs_to_its_allocator() -> None:
    alloc, h = running()
    twin, _ = running()
    plan = alloc.plan(decode=(h, 1))
    for use in (lambda: twin.apply(plan), lambda: twin.fits(plan)):
        with unchanged(twin), pytest.raises(ValueError, match="another allocator"):
            use()
