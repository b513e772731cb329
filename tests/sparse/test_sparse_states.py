"""Dense, sparse and logical only: every state, every way between them, in numbers by hand."""

from __future__ import annotations

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
    opened,
    rooms,
)

each_size = pytest.mark.parametrize("ps", SIZES)


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


@each_size
@pytest.mark.parametrize("pages", range(7))
@pytest.mark.parametrize("edge", ["full", "one short"])
def test_a_request_takes_what_sglang_reserves_and_one_page_more(
    ps: int, pages: int, edge: str
) -> None:
    """SGLang's reserve of a request is ``max(buffer - ceil(prefill), 0)``, and the scratch.

    It takes all of that when the request thins out; here the buffer fills as the request grows.
    The one page more is that of the newest token.
    """
    alloc = make(ps, scratch=2 * ps)
    prefill = pages * ps - (edge == "one short" and pages > 0 and ps > 1)
    h = opened(alloc, prefill)
    before = alloc.available("device")
    alloc.to_sparse(h)
    given = max(pages - 4, 0)
    assert before - alloc.available("device") == 2 - given
    alloc.decode(h, 8 * ps - prefill)
    reserve = max(3 * ps - pages * ps, 0) + 2 * ps
    newest = ps if pages <= 3 else 0
    assert (before + given - alloc.available("device")) * ps == reserve + newest
