"""What is refused: settings, wrong states, pages that are short by one; and nothing changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, Query, count_launches
from sparse.support import SIZES, assert_drained, assert_whole, make, rooms, untouched

import sgalloc
from sgalloc import Sparse
from sgalloc.pages import PagePool

each_size = pytest.mark.parametrize("ps", SIZES)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "naming"),
        [
            ({"ratio": 0}, "sparse.ratio"),
            ({"ratio": 0.99}, "sparse.ratio"),
            ({"ratio": -2}, "sparse.ratio"),
            ({"ratio": math.nan}, "sparse.ratio"),
            ({"ratio": math.inf}, "sparse.ratio"),
            ({"ratio": 1e308}, "sparse.ratio"),
            ({"ratio": np.float32(0.5)}, "sparse.ratio"),
            ({"device_buffer": 0}, "sparse.device_buffer"),
            ({"device_buffer": -1}, "sparse.device_buffer"),
            ({"device_buffer": 1 << 31}, "sparse.device_buffer"),
            ({"draft_scratch": -1}, "sparse.draft_scratch"),
        ],
    )
    def test_numbers_out_of_range(self, settings: dict[str, Any], naming: str) -> None:
        with pytest.raises(ValueError, match=naming):
            Sparse(**{"ratio": 2, "device_buffer": 16, **settings})

    @pytest.mark.parametrize(
        "settings",
        [
            {"ratio": True},
            {"ratio": "2"},
            {"ratio": None},
            {"ratio": OnDevice()},
            {"ratio": np.timedelta64(2)},
            {"ratio": np.timedelta64(2, "s")},
            {"device_buffer": 1.5},
            {"device_buffer": True},
            {"draft_scratch": None},
        ],
    )
    def test_what_is_no_number(self, settings: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match=f"sparse.{next(iter(settings))} "):
            Sparse(**{"ratio": 2, "device_buffer": 16, **settings})

    @pytest.mark.parametrize(
        ("ratio", "pages"),
        [
            (1, 10),
            (1.55, 15),
            (2, 20),
            (Fraction(7, 2), 35),
            (np.float32(2.5), 25),
            (np.int64(3), 30),
        ],
    )
    def test_logical_pages(self, ratio: Any, pages: int) -> None:
        alloc = make(4, 10, ratio=ratio)
        assert rooms(alloc) == (pages, 10)
        groups = alloc.stats().groups
        assert {name: group.total for name, group in groups.items()} == {
            "logical": pages,
            "device": 10,
        }
        assert alloc.num_pages == 10 and str(pages) in repr(alloc)

    def test_a_ratio_of_numpy_counts_as_exactly(self) -> None:
        assert Sparse(np.float32(2.5), 1).logical_pages(20_000_001) == 50_000_002
        assert Sparse(np.int8(100), 1).logical_pages(1000) == 100_000

    def test_settings_are_frozen_and_equal_by_value(self) -> None:
        assert Sparse(2, 16) == Sparse(2, 16, 0)
        with pytest.raises(AttributeError):
            Sparse(2, 16).ratio = 3  # type: ignore[misc]

    def test_both_slot_spaces_are_int32(self) -> None:
        for ratio, pages, naming in (
            (4, 1 << 28, "sparse.ratio * num_pages=1073741824"),
            (1, 1 << 30, "num_pages=1073741824"),
        ):
            with pytest.raises(ValueError, match="^" + re.escape(naming)):
                sgalloc.KVAllocator(pages, 2, 1, 64, device="cpu", sparse=Sparse(ratio, 1))

    @pytest.mark.parametrize(
        ("more", "naming"),
        [
            ({"window": sgalloc.SlidingWindow(8, 8)}, "window= does not go with sparse="),
            ({"prefix_cache": True}, "prefix_cache=True does not go with sparse="),
        ],
    )
    def test_what_does_not_go_together(self, more: dict[str, Any], naming: str) -> None:
        with pytest.raises(ValueError, match=naming):
            make(4, **more)

    def test_what_is_no_sparse(self) -> None:
        with pytest.raises(TypeError, match="sparse must be a Sparse"):
            sgalloc.KVAllocator(4, 4, 1, 16, device="cpu", sparse=2)  # type: ignore[arg-type]

    def test_it_stands_behind_window(self) -> None:
        alloc = sgalloc.KVAllocator(4, 4, 1, 16, "cpu", None, Sparse(2, 8))
        assert alloc.available("logical") == 8


class TestWithout:
    """An allocator without these groups says so, and one with them has no others."""

    @pytest.mark.parametrize(
        "ask",
        [
            lambda a, h: a.to_sparse(h),
            lambda a, h: a.buffer_pages(h),
            lambda a, h: a.scratch_pages(h),
            lambda a, h: a.device_pages(h),
            lambda a, h: a.logical_to_device,
            lambda a, h: a.extend(h, 4, logical_only=True),
            lambda a, h: a.plan(extend=(h, 4), logical_only=True),
        ],
    )
    @pytest.mark.parametrize("window", [None, sgalloc.SlidingWindow(8, 8)])
    def test_verbs(self, ask: Callable[[Any, Any], Any], window: Any) -> None:
        alloc = sgalloc.KVAllocator(8, 4, 2, 32, device="cpu", window=window)
        h = alloc.open()
        with pytest.raises(ValueError, match="sparse="):
            ask(alloc, h)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda a, h: a.available(),
            lambda a, h: a.available("full"),
            lambda a, h: a.available("window"),
            lambda a, h: a.window_table,
            lambda a, h: a.full_to_window,
            lambda a, h: a.frontier(h),
            lambda a, h: a.evict_window(h),
            lambda a, h: a.plan(decode=(h, 1), evict_window=True),
            lambda a, h: a.extend(h, 8, window_tail=4),
            lambda a, h: a.prefix,
        ],
    )
    def test_other_groups(self, ask: Callable[[Any, Any], Any]) -> None:
        alloc = make(4)
        h = alloc.open()
        with untouched(alloc), pytest.raises(ValueError, match=r": (make|this|leave)|window"):
            ask(alloc, h)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.bool_(True)])
def test_logical_only_is_a_bool(value: Any) -> None:
    alloc = make(4)
    h = alloc.open()
    with untouched(alloc), pytest.raises(TypeError, match="logical_only must be True or False"):
        alloc.extend(h, 4, logical_only=value)


class TestStates:
    def world(self) -> tuple[sgalloc.KVAllocator, list[int], Query]:
        """A long, a short, a dense and a logical request, one gone, and one that waits."""
        alloc = make(4, 24, scratch=4)
        h = alloc.open(6).tolist()
        alloc.extend(h[:3], [26, 7, 9])
        alloc.extend(h[3], 14, logical_only=True)
        alloc.extend(h[4:], 8)
        alloc.to_sparse(h[:2])
        alloc.release(h[4])
        event = Query()
        alloc.release(h[5], after=event)
        return alloc, h, event

    @pytest.mark.parametrize(
        ("call", "error", "naming"),
        [
            (lambda a, h: a.to_sparse(h[0]), sgalloc.WrongState, "sparse already"),
            (lambda a, h: a.to_sparse([h[2], h[1]]), sgalloc.WrongState, "sparse already"),
            (lambda a, h: a.to_sparse([h[2], h[2]]), ValueError, "twice"),
            (lambda a, h: a.to_sparse([h[2], h[4]]), sgalloc.StaleHandle, "no open request"),
            (lambda a, h: a.to_sparse([h[2], 3]), sgalloc.StaleHandle, "handle 3 "),
            (lambda a, h: a.to_sparse(h[2], after=object()), TypeError, "query"),
            (lambda a, h: a.to_sparse(1.5), TypeError, "integers"),
            (lambda a, h: a.to_sparse(OnDevice(1)), TypeError, "device"),
            (lambda a, h: a.decode([h[0], h[3]]), sgalloc.WrongState, "4 logical pages and 0 of"),
            (lambda a, h: a.reserve(h[3], 1), sgalloc.WrongState, "to_sparse it first"),
            (lambda a, h: a.decode(h[0], 1000), sgalloc.RowTooNarrow, "row"),
            (lambda a, h: a.extend(h[0], 3), ValueError, "trim"),
            (lambda a, h: a.buffer_pages(h[:2]), ValueError, "buffer_pages() takes one handle"),
            (lambda a, h: a.scratch_pages([]), ValueError, "scratch_pages() takes one handle"),
            (lambda a, h: a.device_pages(h[4]), sgalloc.StaleHandle, "no open request"),
            (lambda a, h: a.decode(h[0], out=np.zeros(2, np.int32)), ValueError, "shape (1,)"),
            (lambda a, h: a.decode(h[0], 4, after=Query()), sgalloc.WrongState, "not done"),
        ],
    )
    def test_refused_in_one_line_and_nothing_changes(
        self, call: Callable[[Any, Any], Any], error: type[Exception], naming: str
    ) -> None:
        alloc, h, event = self.world()
        plan = alloc.plan(decode=(h[:3], 4))
        with untouched(alloc), pytest.raises(error, match=re.escape(naming)) as refused:
            call(alloc, h)
        assert "\n" not in str(refused.value) and re.search(r"must|: \w", str(refused.value))
        assert alloc.fits(plan)
        alloc.apply(plan)
        assert_whole(alloc)
        event.over = True
        alloc.release(h[:4])
        assert_drained(alloc)

    def test_refusals_are_counted(self) -> None:
        alloc, h, _ = self.world()
        for call in (lambda: alloc.to_sparse(h[0]), lambda: alloc.decode(h[3])):
            with pytest.raises(sgalloc.WrongState):
                call()
        assert alloc.stats().refusals["WrongState"] == 2


def filled(
    ps: int, logical: int, device: int, buffer: int = 3, scratch: int = 0
) -> tuple[sgalloc.KVAllocator, int]:
    """An allocator with so many free pages of both groups, and the request that has the rest."""
    alloc = make(ps, 20, buffer * ps, scratch * ps, ratio=2)
    (rest,) = alloc.open().tolist()
    alloc.extend(rest, (20 - device) * ps)
    if 20 + device > logical:
        alloc.extend(rest, (40 - logical) * ps, logical_only=True)
    assert rooms(alloc) == (logical, device)
    return alloc, rest


class TestExactFit:
    """One page too few in either group: refused, by name and number; exactly enough: done."""

    @each_size
    @pytest.mark.parametrize("spare", [-1, 0, 1])
    @pytest.mark.parametrize("group", ["logical", "device"])
    def test_extend(self, ps: int, spare: int, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
        have = {"logical": 12, "device": 9}
        have[group] = 6 + spare
        alloc, _ = filled(ps, **have)
        h = alloc.open(2).tolist()
        self.attempt(alloc, lambda: alloc.extend(h, [4 * ps, 2 * ps]), spare, group, 6, monkeypatch)
        plan_room = rooms(alloc)
        assert spare < 0 or plan_room == (have["logical"] - 6, have["device"] - 6)

    @each_size
    @pytest.mark.parametrize("spare", [-1, 0, 1])
    def test_decode_is_short_of_logical_pages(
        self, ps: int, spare: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alloc, _ = filled(ps, 20, 12)
        h = alloc.open(2).tolist()
        alloc.extend(h, 5 * ps)
        alloc.to_sparse(h)
        (filler,) = alloc.open().tolist()
        alloc.extend(filler, (8 - spare) * ps, logical_only=True)
        assert alloc.available("logical") == 2 + spare
        self.attempt(alloc, lambda: alloc.decode(h), spare, "logical", 2, monkeypatch)

    @each_size
    @pytest.mark.parametrize("spare", [-1, 0, 1])
    def test_decode_is_short_of_pages_for_a_buffer(
        self, ps: int, spare: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alloc, _ = filled(ps, 20, 4 + 2 + spare)
        h = alloc.open(3).tolist()
        alloc.extend(h[:2], 2 * ps)
        alloc.to_sparse(h[:2])
        self.attempt(alloc, lambda: alloc.decode(h[:2]), spare, "device", 2, monkeypatch)

    @each_size
    @pytest.mark.parametrize("spare", [-1, 0, 1])
    @pytest.mark.parametrize("kind", ["logical", "scratch", "dense again"])
    def test_to_sparse_and_back(
        self, ps: int, spare: int, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alloc, _ = filled(ps, 20, 16, scratch=0 if kind == "dense again" else 2)
        h = alloc.open(2).tolist()
        if kind == "logical":
            # Four for the buffer and the newest, and two of scratch; the other gives back one.
            alloc.extend(h[0], 6 * ps, logical_only=True)
            alloc.extend(h[1], 5 * ps)
            need = 4 + 2 + 2 - 1
        elif kind == "scratch":
            alloc.extend(h, [2 * ps, 6 * ps])
            need = 2 + 2 - 2
        else:
            alloc.extend(h, 6 * ps)
            alloc.to_sparse(h)
            need = 4

        def call() -> Any:
            return alloc.extend(h, 6 * ps) if kind == "dense again" else alloc.to_sparse(h)

        room = alloc.available("device")
        (filler,) = alloc.open().tolist()
        if room - need - spare > 0:
            alloc.extend(filler, (room - need - spare) * ps)
        assert alloc.available("device") == need + spare
        self.attempt(alloc, call, spare, "device", need, monkeypatch)
        assert spare < 0 or alloc.available("device") == spare

    def test_pages_behind_an_event_count_for_nothing(self) -> None:
        alloc, _ = filled(4, 20, 6, scratch=2)
        (h,) = alloc.open().tolist()
        alloc.extend(h, 24)
        with untouched(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.to_sparse(h, after=Query())
        assert (refused.value.group, refused.value.need, refused.value.free) == ("device", 2, 0)
        alloc.to_sparse(h, after=Query(over=True))
        assert alloc.available("device") == 0
        assert_whole(alloc)

    def attempt(
        self,
        alloc: sgalloc.KVAllocator,
        call: Callable[[], Any],
        spare: int,
        group: str,
        need: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        calls = count_launches(alloc, monkeypatch)
        if spare < 0:
            with untouched(alloc), pytest.raises(sgalloc.OutOfPages, match=f"'{group}'") as said:
                call()
            assert (said.value.group, said.value.need, said.value.free) == (group, need, need - 1)
            assert not calls, "a refused call launches nothing"
        else:
            before = alloc.available(group)
            call()
            assert before - alloc.available(group) == need
            assert calls["write"] == 1
        assert_whole(alloc)


class TestAdmission:
    @each_size
    def test_new_requests_need_both_groups(self, ps: int) -> None:
        """SGLang's available_size is the lesser of the two groups."""
        alloc, _ = filled(ps, 12, 4)
        for lengths, fits in (
            ([4 * ps], True),
            ([4 * ps + 1], False),
            ([2 * ps, 2 * ps], True),
            ([2 * ps, 2 * ps, 1], False),
        ):
            assert alloc.fits(lengths) == fits
            h = alloc.open(len(lengths))
            if fits:
                alloc.extend(h, lengths)
            else:
                with pytest.raises(sgalloc.OutOfPages, match="'device'"):
                    alloc.extend(h, lengths)
            alloc.release(h)

    @each_size
    def test_releasing_gives_back_buffer_newest_and_scratch(self, ps: int) -> None:
        alloc, _ = filled(ps, 20, 10, scratch=1)
        h = alloc.open(2).tolist()
        alloc.extend(h, 5 * ps)
        alloc.to_sparse(h)
        assert rooms(alloc) == (10, 0)
        for lengths, fits in (([5 * ps], True), ([5 * ps + 1], False)):
            assert alloc.fits(lengths, after_releasing=h[0]) == fits
        assert alloc.fits(10 * ps, after_releasing=h)
        assert not alloc.fits(10 * ps + 1, after_releasing=h)
        alloc.release(h)
        assert rooms(alloc) == (20, 10)

    @each_size
    def test_plans_count_each_group(self, ps: int) -> None:
        alloc, _ = filled(ps, 20, 6)
        h = alloc.open(2).tolist()
        alloc.extend(h[0], 4 * ps, logical_only=True)
        dense = alloc.plan(extend=(h, [7 * ps, ps]))
        assert dense.need == {"logical": 4, "device": 8} and not dense.fits
        assert alloc.fits(dense, after_releasing=h[0])
        only = alloc.plan(extend=(h, [7 * ps, ps]), logical_only=True)
        assert only.need == {"logical": 4, "device": 0} and only.fits
        assert only.need_without(alloc.rows(h[:1]).astype(np.int64)) == {"logical": 1, "device": 0}

    def test_retraction_goes_by_the_group_that_is_short(self) -> None:
        alloc, rest = filled(4, 20, 8)
        h = alloc.open(4).tolist()
        alloc.extend(h, 8)
        alloc.to_sparse(h)
        alloc.release(rest)
        (filler,) = alloc.open().tolist()
        alloc.extend(filler, 12 * 4)
        assert alloc.available("device") == 0
        plan = alloc.plan(decode=(h, 1))
        assert plan.need == {"logical": 4, "device": 4} and not plan.fits
        gone = sgalloc.retraction.choose_victims(alloc, h, plan, [0, 1, 2, 3])
        # One leaves its two pages, and the other three need three; two leave four for two.
        assert gone.victims.tolist() == [h[3], h[2]] and gone.fits
        alloc.release(gone.victims)
        assert alloc.decode(h[:2]).need["device"] == 2
        assert_whole(alloc)


class TestDoubleOwnership:
    @each_size
    def test_two_requests_never_share_a_page(self, ps: int) -> None:
        """D3: release, release again, then take all: every id stands once."""
        alloc = make(ps, 12, scratch=ps, ratio=2)
        h = alloc.open(2).tolist()
        alloc.extend(h, 6 * ps)
        alloc.to_sparse(h)
        alloc.release(h[0])
        for again in (h[0], [h[1], h[1]], [h[1], h[0]]):
            with untouched(alloc), pytest.raises((sgalloc.StaleHandle, ValueError)):
                alloc.release(again)
        more = alloc.open(2).tolist()
        alloc.extend(more, [6 * ps, ps])
        held = [p for x in (h[1], *more) for p in alloc._core.side.held(alloc.rows(x) + 0)[1]]
        assert sorted(held) == list(range(1, 13))
        assert_whole(alloc)

    def test_the_pool_refuses_what_is_not_held(self) -> None:
        alloc = make(4)
        h = alloc.open()
        alloc.extend(h, 20)
        pool: PagePool = alloc._core.side.pool
        for ids in ([0], [-1], [21], [5, 5], [6]):
            with untouched(alloc), pytest.raises(sgalloc.AllocError):
                pool.give(np.array(ids, np.int32), 1)
