"""Dense, sparse and logical only: every state, every way between them, in numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import Query, count_launches
from sparse.support import (
    SIZES,
    assert_drained,
    assert_whole,
    logical,
    make,
    mapped,
    rooms,
    untouched,
)

import sgalloc

each_size = pytest.mark.parametrize("ps", SIZES)


def opened(alloc: sgalloc.KVAllocator, length: int, **how: Any) -> int:
    """One request of so many tokens."""
    (handle,) = alloc.open().tolist()
    alloc.extend(handle, length, **how)
    return handle


class TestDense:
    @each_size
    def test_a_prefill_takes_as_many_pages_of_both_groups(self, ps: int) -> None:
        alloc = make(ps)
        assert rooms(alloc) == (80, 20)
        h = opened(alloc, 5 * ps)
        assert rooms(alloc) == (75, 15)
        assert set(mapped(alloc, h)) == {0, 1, 2, 3, 4}
        assert alloc.device_pages(h).tolist() == list(mapped(alloc, h).values())
        assert alloc.buffer_pages(h).size == alloc.scratch_pages(h).size == 0
        plan = alloc.decode(h)
        assert plan.need == {"logical": 1, "device": 1} and plan.num_new_pages == 2
        plan = alloc.reserve(h, 2 * ps)
        assert plan.need == {"logical": 2, "device": 2}
        assert set(mapped(alloc, h)) == set(range(8))
        assert_whole(alloc)

    @each_size
    def test_slots_translate_one_by_one(self, ps: int) -> None:
        alloc = make(ps)
        opened(alloc, ps)
        h = opened(alloc, 3 * ps)
        slots = alloc.slots(h, 0, 3 * ps)
        beside = np.asarray(alloc.logical_to_device)[slots]
        own = alloc.device_pages(h)
        assert beside.tolist() == [own[j // ps] * ps + j % ps for j in range(3 * ps)]
        assert alloc.logical_to_device.shape == (81 * ps,)
        assert alloc.logical_to_device.dtype == np.int32
        assert not np.asarray(alloc.logical_to_device)[:ps].any(), "padding maps to padding"


class TestToSparse:
    @each_size
    @pytest.mark.parametrize(("held", "kept"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (11, 4)])
    def test_the_buffer_and_the_newest_page_stay(self, ps: int, held: int, kept: int) -> None:
        """Buffer of three: beyond three pages, three and the newest are kept."""
        alloc = make(ps)
        h = opened(alloc, held * ps)
        before = mapped(alloc, h)
        alloc.to_sparse(h)
        assert rooms(alloc) == (80 - held, 20 - kept)
        if held <= 3:
            assert mapped(alloc, h) == before, "a shorter one keeps all it has, mapped"
            assert alloc.buffer_pages(h).tolist() == list(before.values())
        else:
            assert mapped(alloc, h) == {held - 1: before[held - 1]}
            assert alloc.buffer_pages(h).tolist() == [before[0], before[1], before[2]]
        assert_whole(alloc)
        alloc.release(h)
        assert_drained(alloc)

    @each_size
    @pytest.mark.parametrize("edge", [0, 1, -1])
    def test_the_buffer_is_rounded_up_to_whole_pages(self, ps: int, edge: int) -> None:
        tokens = 2 * ps + edge
        pages = 2 + (tokens > 2 * ps) if tokens > ps else 1
        alloc = make(ps, buffer=tokens)
        h = opened(alloc, 9 * ps)
        alloc.to_sparse(h)
        assert alloc.buffer_pages(h).size == pages
        assert alloc.available("device") == 20 - pages - 1

    @each_size
    def test_the_page_of_the_newest_token_is_not_always_the_last(self, ps: int) -> None:
        """Reserved pages lie behind it, and page 1 holds the newest of 2 * ps tokens."""
        alloc = make(ps)
        h = opened(alloc, 2 * ps)
        alloc.reserve(h, 6 * ps)
        before = mapped(alloc, h)
        alloc.to_sparse(h)
        assert mapped(alloc, h) == {1: before[1]}
        buffer = alloc.buffer_pages(h).tolist()
        assert sorted(buffer) == sorted({before[0], before[2], before[3]})
        assert rooms(alloc) == (72, 16)
        assert_whole(alloc)

    @each_size
    def test_nothing_committed_maps_nothing(self, ps: int) -> None:
        alloc = make(ps)
        (h,) = alloc.open().tolist()
        alloc.reserve(h, 5 * ps)
        alloc.to_sparse(h)
        assert mapped(alloc, h) == {} and alloc.buffer_pages(h).size == 3
        assert rooms(alloc) == (75, 16)
        alloc.decode(h)
        assert set(mapped(alloc, h)) == {0} and rooms(alloc) == (75, 16)
        assert_whole(alloc)

    @each_size
    def test_scratch_is_taken_once(self, ps: int) -> None:
        """SGLang's request_slot_reserve asks for scratch where the request has none yet."""
        alloc = make(ps, scratch=ps + 1)
        pages = 2
        h = opened(alloc, 6 * ps)
        alloc.to_sparse(h)
        scratch = alloc.scratch_pages(h).tolist()
        assert len(scratch) == pages
        assert rooms(alloc) == (74, 20 - 4 - pages)
        alloc.extend(h, 6 * ps)
        assert rooms(alloc) == (74, 20 - 6 - pages)
        alloc.to_sparse(h)
        assert alloc.scratch_pages(h).tolist() == scratch
        assert rooms(alloc) == (74, 20 - 4 - pages)
        assert_whole(alloc)
        alloc.trim(h, 0)
        assert rooms(alloc) == (80, 20 - pages), "a parked request keeps its scratch"
        alloc.release(h)
        assert_drained(alloc)

    @each_size
    @pytest.mark.parametrize(("held", "take"), [(1, 1), (3, 3), (4, 4), (9, 4)])
    def test_logical_pages_alone_take_what_the_buffer_needs(
        self, ps: int, held: int, take: int
    ) -> None:
        alloc = make(ps, scratch=1)
        h = opened(alloc, held * ps, logical_only=True)
        assert rooms(alloc) == (80 - held, 20) and mapped(alloc, h) == {}
        assert alloc.device_pages(h).tolist() == [0] * held
        alloc.to_sparse(h)
        assert rooms(alloc) == (80 - held, 20 - take - 1)
        assert set(mapped(alloc, h)) == ({held - 1} if held > 3 else set(range(held)))
        assert alloc.buffer_pages(h).size == min(held, 3)
        assert_whole(alloc)

    @each_size
    @pytest.mark.parametrize(("dense", "more", "taken"), [(2, 1, 3), (2, 3, 4), (7, 2, 4)])
    def test_partly_logical_keeps_what_it_has_first(
        self, ps: int, dense: int, more: int, taken: int
    ) -> None:
        alloc = make(ps)
        h = opened(alloc, dense * ps)
        before = mapped(alloc, h)
        alloc.extend(h, (dense + more) * ps, logical_only=True)
        assert mapped(alloc, h) == before and rooms(alloc) == (80 - dense - more, 20 - dense)
        alloc.to_sparse(h)
        assert alloc.available("device") == 20 - taken
        held = {*alloc.buffer_pages(h).tolist(), *mapped(alloc, h).values()}
        kept = set(before.values()) & held
        assert len(held) == taken and len(kept) == min(dense, taken)
        assert_whole(alloc)

    @each_size
    def test_what_goes_back_waits_for_its_event_and_leaves_the_map_at_once(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 9 * ps)
        event = Query()
        alloc.to_sparse(h, after=event)
        assert set(mapped(alloc, h)) == {8}
        assert rooms(alloc) == (71, 11) and alloc.stats().groups["device"].quarantined == 5
        assert_whole(alloc)
        alloc.settle()
        assert alloc.available("device") == 11
        event.over = True
        alloc.settle()
        assert alloc.available("device") == 16
        assert_whole(alloc)

    def test_one_launch_and_none_where_nothing_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alloc = make(4)
        long, short = opened(alloc, 30), opened(alloc, 9)
        calls = count_launches(alloc, monkeypatch)
        alloc.to_sparse([long, short])
        assert calls["write"] == 1
        (empty,) = alloc.open().tolist()
        alloc.to_sparse(empty)
        alloc.to_sparse([])
        assert calls["write"] == 1
        grew = [sum(alloc.decode([long, short]).need.values()) for _ in range(8)]
        # 30 tokens pass 32 and 36, 9 tokens pass 12 and 16; the short one fills its buffer.
        assert grew == [0, 0, 1, 2, 0, 0, 1, 1]
        assert calls["write"] == 1 + 4
        alloc.decode([long, short], 0)
        assert calls["write"] == 5


class TestDecode:
    @each_size
    def test_a_short_request_fills_its_buffer_and_then_grows_logically(self, ps: int) -> None:
        """From one page on: pages 1, 2, 3 of the device, a fourth for the newest, no more."""
        alloc = make(ps)
        h = opened(alloc, 1)
        alloc.to_sparse(h)
        taken = []
        for position in range(1, 7 * ps):
            plan = alloc.decode(h)
            new = int(position % ps == 0)
            page = position // ps
            assert plan.need == {"logical": new, "device": int(new and page <= 3)}
            taken.append(plan.need["device"])
            assert set(mapped(alloc, h)) == (set(range(page + 1)) if page < 3 else {page})
            if page >= 3:
                assert alloc.buffer_pages(h).size == 3
        assert sum(taken) == 3 and rooms(alloc) == (73, 16)
        assert_whole(alloc)

    @each_size
    def test_the_first_pages_become_the_buffer_and_one_page_moves_on(self, ps: int) -> None:
        alloc = make(ps)
        h = opened(alloc, 3 * ps)
        alloc.to_sparse(h)
        first = list(mapped(alloc, h).values())
        alloc.decode(h)
        assert alloc.buffer_pages(h).tolist() == first
        ((number, newest),) = mapped(alloc, h).items()
        assert number == 3 and newest not in first
        for _ in range(4 * ps):
            alloc.decode(h)
            assert alloc.buffer_pages(h).tolist() == first
            assert list(mapped(alloc, h).values()) == [newest]
        assert mapped(alloc, h) == {7: newest}
        assert_whole(alloc)

    @each_size
    @pytest.mark.parametrize("tokens", [1, 2, 5])
    def test_a_jump_of_pages_takes_what_single_steps_would(self, ps: int, tokens: int) -> None:
        alloc, twin = make(ps), make(ps)
        for a in (alloc, twin):
            a.to_sparse(opened(a, 1))
        (h,) = alloc._ledger.handle[1:2].tolist()
        plan = alloc.decode(h, tokens * ps)
        needs = [twin.decode(h).need for _ in range(tokens * ps)]
        for group in ("logical", "device"):
            assert plan.need[group] == sum(need[group] for need in needs)
        assert mapped(alloc, h).keys() == mapped(twin, h).keys()
        assert_whole(alloc)

    @each_size
    def test_out_receives_logical_slots(self, ps: int) -> None:
        alloc = make(ps)
        opened(alloc, 2 * ps)
        h = opened(alloc, 5 * ps)
        alloc.to_sparse(h)
        out = np.zeros(1, np.int64)
        alloc.decode(h, out=out)
        assert out.tolist() == [logical(alloc, h)[5] * ps]
        newest = mapped(alloc, h)[5]
        assert np.asarray(alloc.logical_to_device)[out].tolist() == [newest * ps]

    @each_size
    def test_a_batch_is_the_same_as_handles(self, ps: int) -> None:
        alloc, twin = make(ps), make(ps)
        for a in (alloc, twin):
            h = a.open(3)
            a.extend(h, [1, 2 * ps, 5 * ps])
            a.to_sparse(a.batch(h) if a is alloc else h)
        batch = alloc.batch(h)
        for _ in range(3 * ps + 1):
            assert alloc.decode(batch).need == twin.decode(h).need
        for handle in h.tolist():
            assert mapped(alloc, handle) == mapped(twin, handle)
        assert_whole(alloc)

    def test_dense_sparse_and_logical_rows_in_one_step(self) -> None:
        alloc = make(4, scratch=4)
        h = alloc.open(4).tolist()
        alloc.extend(h[:3], [8, 20, 12])
        alloc.to_sparse(h[1:3])
        plan = alloc.plan(
            extend=(h[3:], 6), decode=(h[:2], 1), reserve=(h[2:3], 9), logical_only=True
        )
        assert plan.need == {"logical": 2 + 2 + 3, "device": 1} and plan.fits
        alloc.apply(plan)
        assert [set(mapped(alloc, x)) for x in h] == [{0, 1, 2}, {5}, {0, 1, 2}, set()]
        assert_whole(alloc)


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
