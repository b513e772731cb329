"""Cases D1 to D6: faults that users of other allocators reported, with the numbers they had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import (
    assert_drained,
    assert_laws,
    count_launches,
    make,
    unchanged,
)

import sgalloc
from sgalloc import sizing
from sgalloc.pages import CACHED, FREE, WAITING, PagePool

COMMITS = (1, 4, 2, 3, 1)


class TestD1StrandedTail:
    """Every step reserves past C; what was reserved before is used first, and nothing strands."""

    # page size, pages, (A, available) after the prefill, (C, A, available) after each commit,
    # and (A, available) after the reserve that follows the last.
    NUMBERS = (
        (
            16, 10, (32, 8),
            [(31, 48, 7), (35, 48, 7), (37, 48, 7), (40, 48, 7), (41, 48, 7)], (64, 6),
        ),
        (
            1, 60, (30, 30),
            [(31, 38, 22), (35, 39, 21), (37, 43, 17), (40, 45, 15), (41, 48, 12)], (49, 11),
        ),
        (
            64, 10, (64, 9),
            [(31, 64, 9), (35, 64, 9), (37, 64, 9), (40, 64, 9), (41, 64, 9)], (64, 9),
        ),
    )  # fmt: skip

    @pytest.mark.parametrize(("ps", "num_pages", "prefill", "steps", "last"), NUMBERS)
    def test_extents(
        self, ps: int, num_pages: int, prefill: Any, steps: list[Any], last: Any
    ) -> None:
        alloc = make(num_pages, ps)
        h = alloc.open()

        def seen() -> tuple[int, int, int]:
            (c,), (a,) = alloc.committed(h), alloc.allocated(h)
            assert a % ps == 0
            assert alloc.pages(h, 0, int(a)).size == a // ps
            assert_laws(alloc)
            return int(c), int(a), alloc.available()

        alloc.extend(h, 30)
        assert seen() == (30, *prefill)
        for accepted, expected in zip(COMMITS, steps, strict=True):
            alloc.reserve(h, 8)
            alloc.commit(h, accepted)
            assert seen() == expected
        alloc.reserve(h, 8)
        assert seen() == (41, *last)
        alloc.release(h)
        assert alloc.available() == num_pages
        assert_drained(alloc)


class TestD2RowTooNarrow:
    """A reserve past the end of the row is refused before anything is written."""

    WIDTH = 85

    def middle_of_three(self, committed: int) -> tuple[sgalloc.KVAllocator, np.ndarray]:
        alloc = make(3 * self.WIDTH, 1, max_requests=3, row_width=self.WIDTH)
        handles = alloc.open(3)
        alloc.extend(handles, [40, committed, 40])
        return alloc, handles

    def test_exact_fit_reaches_the_end_of_the_row(self) -> None:
        alloc, handles = self.middle_of_three(51)
        before = alloc.available()
        alloc.reserve(handles[1], 34)
        assert alloc.allocated(handles[1]).tolist() == [85]
        assert alloc.available() == before - 34
        assert_laws(alloc)

    def test_one_token_more_is_refused_and_touches_no_row(self) -> None:
        alloc, handles = self.middle_of_three(52)
        rows = alloc.rows(handles)
        assert sorted(rows.tolist()) == [1, 2, 3]
        before = [alloc.req_to_token[row].tobytes() for row in rows]
        with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow) as refused:
            alloc.reserve(handles[1], 34)
        assert (refused.value.row, refused.value.need, refused.value.width) == (rows[1], 86, 85)
        assert "86" in str(refused.value) and "85" in str(refused.value)
        assert [alloc.req_to_token[row].tobytes() for row in rows] == before
        assert alloc.allocated(handles[1]).tolist() == [52]

    @pytest.mark.parametrize(
        "spec",
        [
            sizing.SpecConfig("dflash", draft_tokens=17),
            sizing.SpecConfig("uno", draft_tokens=16),
            sizing.SpecConfig("eagle", steps=17, topk=1, draft_tokens=17),
        ],
        ids=lambda spec: spec.algorithm,
    )
    def test_the_sizing_helper_would_have_made_it_wide_enough(self, spec: Any) -> None:
        assert sizing.alloc_len_per_decode(spec, 1) == 17
        assert sizing.alloc_len_per_decode(spec, 16) == 17
        assert sizing.row_width(64, spec, 1) >= 98
        assert sizing.row_width(64, spec, 16) >= 112
        for ps in (1, 16):
            alloc = make(40 * 16, ps, row_width=sizing.row_width(64, spec, ps))
            h = alloc.open()
            alloc.extend(h, 64)
            alloc.reserve(h, sizing.alloc_reserve_per_decode(spec, ps))
            assert_laws(alloc)


class TestD3GivingBackTwice:
    """A second release, a duplicate or a foreign id is refused as a whole."""

    def released_once(self) -> tuple[sgalloc.KVAllocator, np.ndarray]:
        alloc = make(8, 16)
        h = alloc.open()
        alloc.extend(h, 20)
        assert alloc.available() == 6
        alloc.release(h)
        assert alloc.available() == 8
        return alloc, h

    def test_second_release(self) -> None:
        alloc, h = self.released_once()
        with unchanged(alloc), pytest.raises(sgalloc.StaleHandle):
            alloc.release(h)
        assert alloc.available() == 8

    def test_the_same_request_twice_in_one_release(self) -> None:
        alloc, _ = self.released_once()
        r2 = alloc.open()
        alloc.extend(r2, 20)
        with unchanged(alloc), pytest.raises(ValueError, match="twice"):
            alloc.release([r2[0], r2[0]])
        assert alloc.available() == 6
        assert alloc.committed(r2).tolist() == [20]

    @pytest.mark.parametrize("stale_at", [0, 1])
    def test_a_stale_handle_among_good_ones_refuses_all(self, stale_at: int) -> None:
        alloc, stale = self.released_once()
        good = alloc.open(2)
        alloc.extend(good, 20)
        mixed = [int(good[0]), int(good[1])]
        mixed.insert(stale_at, int(stale[0]))
        with unchanged(alloc), pytest.raises(sgalloc.StaleHandle):
            alloc.release(mixed)
        assert alloc.committed(good).tolist() == [20, 20]

    def test_then_eight_pages_are_eight_different_pages(self) -> None:
        alloc, h = self.released_once()
        for bad in (h, [h[0], h[0]]):
            with pytest.raises(sgalloc.StaleHandle):
                alloc.release(bad)
        handles = alloc.open(2)
        alloc.extend(handles, 64)
        held = alloc.pages(handles[0]).tolist() + alloc.pages(handles[1]).tolist()
        assert sorted(held) == list(range(1, 9))
        assert alloc.available() == 0


class TestD3PagePool:
    """The pool itself refuses ids that its caller does not hold."""

    def pool_with_five(self) -> tuple[PagePool, np.ndarray]:
        pool = PagePool(8)
        ids = pool.peek(5)
        pool.take(ids, 1)
        return pool, ids

    def state(self, pool: PagePool) -> tuple[Any, ...]:
        return (pool.free, pool.waiting, pool.free_ids().tolist(), pool.holder.tolist())

    @pytest.mark.parametrize("holder", [FREE, CACHED, WAITING, 1])
    @pytest.mark.parametrize("bad", [[0], [-1], [9], [5, 5], [2**31 - 1], [-(2**31)]])
    @pytest.mark.parametrize("with_good", [False, True], ids=["alone", "after good ones"])
    def test_give_refuses_ids_that_do_not_exist_or_stand_twice(
        self, bad: list[int], holder: int, with_good: bool
    ) -> None:
        pool, ids = self.pool_with_five()
        wrong = (ids[:2].tolist() if with_good else []) + bad
        before = self.state(pool)
        for call in (pool.give, lambda i, h: pool.hand_over(i, h, WAITING)):
            with pytest.raises(ValueError) as refused:
                call(np.array(wrong, np.int32), holder)
            assert "\n" not in str(refused.value)
            assert self.state(pool) == before

    def test_give_refuses_what_another_holds(self) -> None:
        pool, ids = self.pool_with_five()
        free = pool.free_ids()[:1]
        before = self.state(pool)
        for wrong, holder in ((ids[:1], 2), (ids[:1], CACHED), (ids[:1], WAITING), (free, 1)):
            with pytest.raises(ValueError, match=f"page {wrong[0]} "):
                pool.give(wrong, holder)
            with pytest.raises(ValueError, match=f"page {wrong[0]} "):
                pool.hand_over(wrong, holder, CACHED)
            assert self.state(pool) == before

    def test_give_refuses_what_nobody_holds(self) -> None:
        pool, _ = self.pool_with_five()
        free = pool.free_ids()[:1]
        before = self.state(pool)
        with pytest.raises(ValueError, match=f"page {free[0]} "):
            pool.give(free, FREE)
        assert self.state(pool) == before

    def test_what_was_given_back_once_cannot_be_given_back_again(self) -> None:
        pool, ids = self.pool_with_five()
        pool.give(ids[:3], 1)
        before = self.state(pool)
        with pytest.raises(ValueError, match=f"page {ids[0]} "):
            pool.give(ids[:1], 1)
        assert self.state(pool) == before
        pool.give(ids[3:], 1)
        assert sorted(pool.peek(8).tolist()) == list(range(1, 9))


class TestD4AdmissionCountsPagesPerRequest:
    """Two requests of two tokens need two pages of 128, not one."""

    @pytest.mark.parametrize(
        ("lengths", "expected"), [([2, 2], False), ([2], True), ([128], True), ([129], False)]
    )
    def test_new_requests(self, lengths: list[int], expected: bool) -> None:
        alloc = make(1, 128, row_width=256)
        assert alloc.fits(lengths) is expected
        handles = alloc.open(len(lengths))
        if expected:
            alloc.extend(handles, lengths)
            assert alloc.available() == 0
        else:
            with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
                alloc.extend(handles, lengths)

    @pytest.mark.parametrize(("committed", "need"), [(31, 0), (32, 1), (33, 0)])
    @pytest.mark.parametrize("spare", [0, 1])
    def test_next_token(self, committed: int, need: int, spare: int) -> None:
        alloc = make(-(-committed // 32) + spare, 32, row_width=128)
        h = alloc.open()
        alloc.extend(h, committed)
        assert alloc.available() == spare
        plan = alloc.plan(decode=(h, 1))
        assert plan.need == {"full": need}
        assert alloc.fits(plan) is plan.fits is (need <= spare)
        if need <= spare:
            alloc.decode(h)
            assert alloc.available() == spare - need
        else:
            with unchanged(alloc), pytest.raises(sgalloc.OutOfPages):
                alloc.decode(h)


class TestD5RefusedBatchChangesNothing:
    """A batch that does not fit takes nothing for those of its requests that would have."""

    def test_refused_then_retried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alloc = make(3, 16)
        alloc.extend(alloc.open(2), 16)
        r3, r4 = alloc.open(2).tolist()
        assert alloc.available() == 1
        table = alloc.req_to_token.tobytes()
        launched = count_launches(alloc, monkeypatch)
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.extend([r3, r4], [10, 17])
        assert (refused.value.group, refused.value.need) == ("full", 3)
        assert (refused.value.free, refused.value.cached) == (1, 0)
        assert alloc.available() == 1
        assert alloc.allocated([r3, r4]).tolist() == [0, 0]
        assert alloc.req_to_token.tobytes() == table
        assert not launched
        alloc.extend(r3, 10)
        assert launched == {"write": 1}
        assert alloc.available() == 0
        assert_laws(alloc)


class TestD6ExactFit:
    """A step that needs exactly what is free goes through, and so does one that needs nothing."""

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["r1 r2", "r2 r1"])
    def test_decode_to_the_last_page(self, order: tuple[int, int]) -> None:
        alloc = make(3, 16)
        r = alloc.open(2)
        alloc.extend(r, [16, 5])
        assert alloc.available() == 1
        batch = [int(r[order[0]]), int(r[order[1]])]
        out = np.empty(2, np.int64)
        alloc.decode(batch, out=out)
        slot = dict(zip(order, out.tolist(), strict=True))
        assert alloc.available() == 0
        assert slot[0] == int(alloc.pages(r[0])[1]) * 16
        assert slot[1] == int(alloc.pages(r[1])[0]) * 16 + 5
        assert alloc.pages(r[0])[1] not in (*alloc.pages(r[1]), alloc.pages(r[0])[0])

        alloc.decode(batch, out=out)
        assert out.tolist() == [slot[order[0]] + 1, slot[order[1]] + 1]
        assert alloc.available() == 0
        assert alloc.committed(r).tolist() == [18, 7]
        assert_laws(alloc)
