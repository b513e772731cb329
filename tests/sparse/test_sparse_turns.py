"""What follows after a request was thinned out: drafts, dense again, cut, recycled, released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import Query
from sparse.support import (
    SIZES,
    assert_drained,
    assert_whole,
    make,
    mapped,
    opened,
    rooms,
    untouched,
)

import sgalloc

each_size = pytest.mark.parametrize("ps", SIZES)


class TestSpeculation:
    @each_size
    def test_a_reserve_takes_logical_pages_and_the_map_follows_what_is_committed(
        self, ps: int
    ) -> None:
        alloc = make(ps, scratch=2 * ps)
        h = opened(alloc, 5 * ps)
        alloc.to_sparse(h)
        newest = mapped(alloc, h)[4]
        assert alloc.reserve(h, 2 * ps).need == {"logical": 2, "device": 0}
        assert mapped(alloc, h) == {4: newest}, "drafts are not mapped"
        alloc.commit(h, ps)
        assert mapped(alloc, h) == {4: newest}, "a commit writes nothing"
        assert_whole(alloc)
        plan = alloc.reserve(h, ps)
        assert plan.need == {"logical": 0, "device": 0}
        assert mapped(alloc, h) == {5: newest}, "the next growing verb catches up"
        alloc.commit(h, 1)
        alloc.reserve(h, 0)
        assert mapped(alloc, h) == {6: newest}
        assert_whole(alloc)

    @each_size
    def test_a_short_request_takes_pages_for_what_was_accepted(self, ps: int) -> None:
        alloc = make(ps, scratch=2 * ps)
        h = opened(alloc, ps)
        alloc.to_sparse(h)
        room = alloc.available("device")
        for step, (accepted, held) in enumerate([(0, 1), (ps, 2), (ps, 3), (ps, 4), (2 * ps, 4)]):
            assert alloc.reserve(h, 2 * ps).need["device"] == 0, step
            assert alloc.reserve(h, 2 * ps).need == {"logical": 0, "device": 0}
            alloc.commit(h, accepted)
            plan = alloc.reserve(h, 0)
            assert room - alloc.available("device") == held - 1
            assert plan.need["device"] == (held - 1 - [0, 0, 1, 2, 3][step])
        assert set(mapped(alloc, h)) == {5}
        assert_whole(alloc)

    @each_size
    def test_decode_after_a_reserve_finds_its_logical_pages(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, ps)
        alloc.to_sparse(h)
        alloc.reserve(h, 4 * ps)
        assert alloc.decode(h, 2 * ps).need == {"logical": 0, "device": 2}
        assert set(mapped(alloc, h)) == {0, 1, 2}
        assert_whole(alloc)

    def test_a_plan_made_before_the_map_moved_is_stale(self) -> None:
        alloc = make(4)
        h = opened(alloc, 20)
        alloc.to_sparse(h)
        alloc.reserve(h, 8)
        alloc.commit(h, 4)
        first, second = alloc.plan(reserve=(h, 4)), alloc.plan(reserve=(h, 4))
        alloc.apply(first)
        with pytest.raises(sgalloc.StalePlan):
            alloc.apply(second)

    def test_a_plan_made_before_to_sparse_is_stale(self) -> None:
        alloc = make(4)
        h = opened(alloc, 8)
        plan = alloc.plan(decode=(h, 1))
        alloc.to_sparse([])
        assert alloc.fits(plan), "nothing changed"
        alloc.to_sparse(h)
        for use in (alloc.fits, alloc.apply):
            with untouched(alloc), pytest.raises(sgalloc.StalePlan):
                use(plan)


class TestReceiving:
    """A plan that commits nothing, for pages that a remote writer fills."""

    @each_size
    def test_logical_pages_alone_without_committing(self, ps: int) -> None:
        alloc = make(ps)
        (h,) = alloc.open().tolist()
        rows = alloc._ledger.rows_of(h)
        zero = np.zeros(1, np.int64)
        plan = sgalloc.Plan(alloc._ledger, rows, zero, zero.copy(), np.array([5 * ps]))
        alloc._beside(plan, main_only=True)
        assert plan.need == {"logical": 5, "device": 0}
        alloc.apply(plan)
        assert rooms(alloc) == (75, 20) and mapped(alloc, h) == {}
        assert (alloc.committed(h)[0], alloc.allocated(h)[0]) == (0, 5 * ps)
        alloc.commit(h, 5 * ps)
        alloc.to_sparse(h)
        assert set(mapped(alloc, h)) == {4}
        assert_whole(alloc)

    def test_a_plan_without_what_is_extended_heeds_it_not(self) -> None:
        alloc = make(4)
        h = opened(alloc, 8)
        for extend in (None, ([], [])):
            plan = alloc.plan(extend=extend, reserve=(h, 9), logical_only=True)
            assert plan.need == {"logical": 3, "device": 3}


class TestTurningBack:
    @each_size
    @pytest.mark.parametrize("more", [0, 1, 3])
    def test_extend_brings_all_of_it_onto_the_device(self, ps: int, more: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 8 * ps)
        alloc.to_sparse(h)
        kept = {*alloc.buffer_pages(h).tolist(), *mapped(alloc, h).values()}
        plan = alloc.extend(h, (8 + more) * ps)
        assert plan.need == {"logical": more, "device": 8 + more - 4}
        assert set(mapped(alloc, h)) == set(range(8 + more))
        assert kept < set(mapped(alloc, h).values()) and alloc.buffer_pages(h).size == 0
        assert_whole(alloc)
        assert alloc.decode(h).need["device"] == 1, "it is dense again"
        alloc.to_sparse(h)
        assert alloc.available("device") == 16

    @each_size
    def test_extend_brings_logical_pages_onto_the_device(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 4 * ps, logical_only=True)
        assert alloc.extend(h, 5 * ps).need == {"logical": 1, "device": 5}
        assert set(mapped(alloc, h)) == set(range(5))
        assert_whole(alloc)

    @each_size
    def test_extend_of_a_sparse_row_with_logical_pages_alone_is_like_decode(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 5 * ps)
        alloc.to_sparse(h)
        assert alloc.extend(h, 9 * ps, logical_only=True).need == {"logical": 4, "device": 0}
        assert set(mapped(alloc, h)) == {8} and alloc.buffer_pages(h).size == 3
        assert_whole(alloc)

    @each_size
    def test_a_row_that_lacks_device_pages_does_not_decode(self, ps: int) -> None:
        alloc = make(ps)
        h, other = opened(alloc, 4 * ps, logical_only=True), opened(alloc, ps)
        for call in (
            lambda: alloc.decode(h),
            lambda: alloc.reserve([other, h], 1),
            lambda: alloc.plan(decode=([h], 1)),
        ):
            with untouched(alloc), pytest.raises(sgalloc.WrongState, match="to_sparse it first"):
                call()
        alloc.trim(h, 0)
        assert alloc.decode(h).need == {"logical": 1, "device": 1}


class TestTrim:
    @each_size
    @pytest.mark.parametrize(("keep", "held"), [(9, 4), (6, 4), (4, 4), (3, 3), (2, 2), (0, 0)])
    def test_a_long_request_is_cut(self, ps: int, keep: int, held: int) -> None:
        """At least four pages of the device stay while it has more pages than its buffer."""
        alloc = make(ps)
        h = opened(alloc, 9 * ps)
        alloc.to_sparse(h)
        before = mapped(alloc, h)
        alloc.trim(h, keep * ps)
        assert rooms(alloc) == (80 - keep, 20 - held)
        assert mapped(alloc, h) == (before if keep == 9 else {})
        assert alloc.buffer_pages(h).size == min(held, 3)
        assert_whole(alloc)
        plan = alloc.decode(h)
        assert plan.need == {"logical": 1, "device": int(keep <= 3)}
        now = keep + 1
        assert set(mapped(alloc, h)) == ({now - 1} if now > 3 else set(range(now)))
        assert_whole(alloc)
        alloc.release(h)
        assert_drained(alloc)

    @each_size
    def test_reserved_pages_alone_are_cut_and_the_newest_stays_mapped(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 2 * ps)
        alloc.reserve(h, 6 * ps)
        alloc.to_sparse(h)
        before = mapped(alloc, h)
        alloc.trim(h, 2 * ps)
        assert mapped(alloc, h) == before and set(before) == {1}
        assert rooms(alloc) == (78, 18)
        assert_whole(alloc)
        alloc.decode(h, 0)
        assert mapped(alloc, h)[1] == before[1] and set(mapped(alloc, h)) == {0, 1}
        assert_whole(alloc)

    @each_size
    @pytest.mark.parametrize("sparse", [False, True])
    def test_what_is_trimmed_behind_an_event(self, ps: int, sparse: bool) -> None:
        alloc = make(ps)
        h = opened(alloc, 9 * ps)
        if sparse:
            alloc.to_sparse(h)
        event = Query()
        alloc.trim(h, ps, after=event)
        alloc.decode(h)
        assert_whole(alloc)
        groups = alloc.stats().groups
        assert (groups["logical"].quarantined, groups["device"].quarantined) == (
            8,
            3 if sparse else 8,
        )
        event.over = True
        alloc.settle()
        assert rooms(alloc) == (78, 18)
        assert_whole(alloc)


class TestNeighbours:
    @each_size
    def test_a_row_before_that_is_full_keeps_its_last_entry(self, ps: int) -> None:
        """Nothing of the cut request is mapped, and what stands before its pages is not its own."""
        settings = sgalloc.Sparse(3, 3 * ps)
        alloc = sgalloc.KVAllocator(20, ps, 4, 8 * ps, device="cpu", sparse=settings)
        first, second, third = alloc.open(3).tolist()
        alloc.extend([first, second], 8 * ps)
        alloc.to_sparse(second)
        alloc.extend(third, 8 * ps)
        alloc.trim(second, 5 * ps)
        full = [mapped(alloc, h) for h in (first, third)]
        assert mapped(alloc, second) == {}
        alloc.decode(second)
        assert set(mapped(alloc, second)) == {5}
        assert [mapped(alloc, h) for h in (first, third)] == full
        assert_whole(alloc)

    @each_size
    def test_the_same_where_nothing_was_committed(self, ps: int) -> None:
        settings = sgalloc.Sparse(3, 3 * ps)
        alloc = sgalloc.KVAllocator(20, ps, 4, 8 * ps, device="cpu", sparse=settings)
        first, second = alloc.open(2).tolist()
        alloc.extend(first, 8 * ps)
        alloc.reserve(second, 8 * ps)
        full = mapped(alloc, first)
        alloc.to_sparse(second)
        assert mapped(alloc, first) == full and mapped(alloc, second) == {}
        assert_whole(alloc)
        alloc.decode(second)
        assert mapped(alloc, first) == full
        assert_whole(alloc)

    @each_size
    def test_a_release_writes_no_more_than_what_is_mapped(
        self, ps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alloc = make(ps)
        long, short = opened(alloc, 9 * ps), opened(alloc, 2 * ps)
        alloc.to_sparse([long, short])
        device, sizes = alloc._core.device, []
        write = device.write

        def counting(*args: Any) -> Any:
            sizes.append(args[-1].ids.size)
            return write(*args)

        monkeypatch.setattr(device, "write", counting)
        alloc.trim(long, 8 * ps)
        alloc.decode(long)
        alloc.release([long, short])
        assert sizes == [1, 1, 1 + 2]
        assert_drained(alloc)


class TestRecycling:
    @each_size
    @pytest.mark.parametrize("sparse", [False, True])
    @pytest.mark.parametrize("way", ["release", "trim", "behind an event"])
    def test_recycled_pages_leave_no_entry(self, ps: int, sparse: bool, way: str) -> None:
        alloc = make(ps, ratio=1)
        h = opened(alloc, 20 * ps)
        if sparse:
            alloc.to_sparse(h)
        event = Query() if way == "behind an event" else None
        if way == "trim":
            alloc.trim(h, 0)
        else:
            alloc.release(h, after=event)
        if event is not None:
            event.over = True
            alloc.settle()
        assert not np.asarray(alloc.logical_to_device).any()
        again = opened(alloc, 20 * ps, logical_only=True)
        assert mapped(alloc, again) == {}, "its pages are those of the first"
        assert_whole(alloc)

    @each_size
    def test_a_later_request_sees_what_a_first_one_would(self, ps: int) -> None:
        """Fresh owner equals first owner, up to the names of pages."""

        def life(alloc: sgalloc.KVAllocator) -> list[Any]:
            h = opened(alloc, 6 * ps)
            seen: list[Any] = [set(mapped(alloc, h))]
            alloc.to_sparse(h)
            for _ in range(ps + 1):
                seen.append((alloc.decode(h).need, sorted(mapped(alloc, h)), rooms(alloc)))
            seen.append((alloc.buffer_pages(h).size, alloc.scratch_pages(h).size))
            alloc.release(h)
            return seen

        alloc = make(ps, scratch=1, rows=1)
        first = life(alloc)
        other = opened(alloc, 3 * ps)
        alloc.to_sparse(other)
        alloc.decode(other, 5 * ps)
        alloc.release(other)
        assert life(alloc) == first
        assert_drained(alloc)

    @each_size
    @pytest.mark.parametrize(
        "state",
        ["new", "prefilled", "logical", "short", "long", "reserved", "trimmed", "dense again"],
    )
    def test_release_from_every_state_gives_everything_back(self, ps: int, state: str) -> None:
        for after in (None, Query()):
            alloc = make(ps, scratch=ps)
            (h,) = alloc.open().tolist()
            if state != "new":
                alloc.extend(
                    h, (2 if state == "short" else 6) * ps, logical_only=state == "logical"
                )
            if state not in ("new", "prefilled", "logical"):
                alloc.to_sparse(h)
            if state == "reserved":
                alloc.reserve(h, 3 * ps)
                alloc.commit(h, 2 * ps)
            elif state == "trimmed":
                alloc.trim(h, 5 * ps)
            elif state == "dense again":
                alloc.extend(h, 7 * ps)
            alloc.release(h, after=after)
            assert_whole(alloc)
            if after is not None:
                after.over = True
                alloc.settle()
            assert_drained(alloc)
            with untouched(alloc), pytest.raises(sgalloc.StaleHandle):
                alloc.release(h)
