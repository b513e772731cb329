"""What can be asked of an allocator: rows, lengths, pages, slots, runs, owners, stats, table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import Query, assert_row_law, each_page_size, make, prompt, unchanged

import sgalloc


def busy(ps: int = 16, cache: bool = False) -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """Three requests with C = 2 ps + 1, ps, 0 in 20 pages; the first holds a page more."""
    alloc = make(20, ps, max_requests=6, row_width=8 * ps, prefix_cache=cache)
    h = alloc.open(3)
    alloc.extend(h, [2 * ps + 1, ps, 0])
    alloc.reserve(h[0], ps)
    return alloc, h


class TestArrays:
    def test_dtypes_shapes_and_order(self) -> None:
        alloc, h = busy()
        backwards = h[::-1]
        assert alloc.rows(backwards).dtype == np.int32
        assert alloc.rows(backwards).tolist() == [int(x) & 0xFFFFFFFF for x in backwards]
        for read, expected in (
            (alloc.committed, [0, 16, 33]),
            (alloc.allocated, [0, 16, 64]),
            (alloc.decode_index, [0, 0, 0]),
        ):
            got = read(backwards)
            assert got.dtype == np.int64 and got.shape == (3,)
            assert got.tolist() == expected
            assert read(int(h[0])).shape == (1,), "one handle gives one number in an array"

    def test_decode_index_counts_decode_steps_alone(self) -> None:
        alloc, h = busy()
        alloc.decode(h[:2], [3, 0])
        alloc.apply(alloc.plan(extend=(h[2], 1), decode=(h[0], 1), reserve=(h[1], 9)))
        alloc.commit(h[1], 2)
        alloc.trim(h[0], 1)
        assert alloc.decode_index(h).tolist() == [2, 1, 0]
        alloc.release(h[0])
        assert alloc.decode_index(alloc.open()).tolist() == [0], "a new request starts anew"

    def test_what_is_returned_is_the_callers_own(self) -> None:
        alloc, h = busy(cache=True)
        alloc.prefix.publish(h[0], prompt(2, 16))
        match = alloc.prefix.match(prompt(2, 16))
        with unchanged(alloc):
            for array in (
                alloc.rows(h),
                alloc.committed(h),
                alloc.allocated(h),
                alloc.decode_index(h),
                alloc.pages(h[0]),
                alloc.slots(h[0], 0, 33),
                alloc.owners(),
                alloc.runs().pages,
                match.pages,
            ):
                array[...] = 77
        alloc.check(device=True)


class TestPages:
    @each_page_size
    def test_of_a_token_range(self, ps: int) -> None:
        alloc, h = busy(ps)
        (row,) = alloc.rows(h[0])
        held = [
            int(alloc.req_to_token[row, k * ps]) // ps
            for k in range(int(alloc.allocated(h[0])[0]) // ps)
        ]
        pages = alloc.pages(h[0])
        assert pages.dtype == np.int32
        assert pages.tolist() == held[:3], "stop defaults to C, whose last page counts"
        assert alloc.pages(h[0], ps).tolist() == held[1:3]
        assert alloc.pages(h[0], 0, ps).tolist() == held[:1]
        assert alloc.pages(h[0], ps, ps + 1).tolist() == held[1:2]
        assert alloc.pages(h[0], 0, len(held) * ps).tolist() == held
        assert alloc.pages(h[0], 2 * ps, 2 * ps).tolist() == []
        assert alloc.pages(h[2]).tolist() == alloc.pages(h[2], 0, 0).tolist() == []
        assert alloc.pages(alloc.batch(h[:1])).tolist() == held[:3]

    def test_off_a_page_edge_or_outside_the_extent_is_refused(self) -> None:
        alloc, h = busy()
        for start, stop in ((1, 16), (15, None), (0, 65), (48, 33), (48, None), (80, 80), (-16, 0)):
            with unchanged(alloc), pytest.raises(ValueError) as refused:
                alloc.pages(h[0], start, stop)
            assert str(start) in str(refused.value)
        for several in (h, h[:2], []):
            with pytest.raises(ValueError, match="one handle"):
                alloc.pages(several)

    def test_read_from_the_ledger_and_not_from_the_table(self) -> None:
        alloc, h = busy()
        before = alloc.pages(h[0]).tolist()
        alloc.req_to_token[1:] = -1
        assert alloc.pages(h[0]).tolist() == before


class TestSlots:
    @each_page_size
    def test_flat_and_in_order(self, ps: int) -> None:
        alloc, h = busy(ps)
        rows, table = alloc.rows(h), alloc.req_to_token
        slots = alloc.slots(h, [1, 0, 0], [2 * ps + 1, ps, 0])
        assert slots.dtype == np.int32
        assert slots.tolist() == [*table[rows[0], 1 : 2 * ps + 1], *table[rows[1], :ps]]
        slots = alloc.slots(h[[1, 0]], 0, ps)
        assert slots.tolist() == [*table[rows[1], :ps], *table[rows[0], :ps]]
        extent = int(alloc.allocated(h[0])[0])
        assert alloc.slots(h[0], 0, extent).tolist() == table[rows[0], :extent].tolist()
        assert alloc.slots(h, 0, 0).size == 0

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_into_out(self, dtype: Any) -> None:
        alloc, h = busy()
        expected = alloc.slots(h[:2], [3, 0], [20, 16]).tolist()
        out = np.full(40, -1, dtype)
        part = out[3:36]
        assert alloc.slots(h[:2], [3, 0], [20, 16], out=part) is part
        assert out.tolist() == [-1] * 3 + expected + [-1] * 4

    def test_past_the_extent_or_backwards_is_refused(self) -> None:
        alloc, h = busy()
        for start, stop in ((0, 65), ([0, 0, 0], [64, 17, 0]), (5, 4), ([0, 0, 1], [1, 1, 0])):
            with unchanged(alloc), pytest.raises(ValueError, match="extent"):
                alloc.slots(h, start, stop)


class TestTable:
    def test_shape_padding_row_and_one_address_for_life(self) -> None:
        alloc = make(20, 16, max_requests=5, row_width=70, debug=False)
        table = alloc.req_to_token
        assert table.dtype == np.int32 and table.shape == (6, 70)
        assert not table.any()
        address = table.__array_interface__["data"]
        h = alloc.open(5)
        for _ in range(3):
            alloc.extend(h, 40)
            alloc.reserve(h, 20)
            alloc.trim(h, 0)
        alloc.warm()
        assert alloc.req_to_token.__array_interface__["data"] == address
        assert table.flags.c_contiguous
        assert not table[0].any(), "row 0 is all zeros"
        with pytest.raises(AttributeError):
            alloc.req_to_token = table.copy()  # type: ignore[misc]

    @pytest.mark.parametrize(("ps", "width"), [(16, 70), (3, 10), (128, 255), (64, 64), (2, 5)])
    def test_rows_that_are_not_a_multiple_of_the_page_size(self, ps: int, width: int) -> None:
        alloc = make(20, ps, max_requests=4, row_width=width, debug=False)
        whole = width // ps * ps
        alloc.req_to_token[1:, whole:] = -9
        h = alloc.open(3)
        assert alloc.fits([whole]) and not alloc.fits([whole + 1])
        alloc.extend(h, [1, whole, 1])
        alloc.reserve(h[2], whole - 1)
        with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow) as refused:
            alloc.decode(h[1])
        assert (refused.value.need, refused.value.width) == (whole + ps, width)
        assert_row_law(alloc, h)
        assert (alloc.req_to_token[1:, whole:] == -9).all(), "the piece after the last page"
        alloc.check(device=True)

    def test_torch_shares_its_memory(self) -> None:
        torch = pytest.importorskip("torch")
        alloc, h = busy()
        for shared in (torch.from_numpy(alloc.req_to_token), torch.from_dlpack(alloc.req_to_token)):
            assert shared.data_ptr() == alloc.req_to_token.ctypes.data
            (row,) = alloc.rows(h[1])
            alloc.decode(h[1], 1)
            c = int(alloc.committed(h[1])[0])
            assert shared[row, c - 1].item() == alloc.slots(h[1], c - 1, c)[0] != 0


class TestRuns:
    def test_runs_of_consecutive_ids(self) -> None:
        alloc, h = busy()
        held = [alloc.pages(x, 0, int(a)) for x, a in zip(h, alloc.allocated(h), strict=True)]
        lengths: list[int] = []
        for pages in held:
            cuts = np.flatnonzero(np.diff(pages) != 1) + 1
            lengths += [part.size for part in np.split(pages, cuts) if part.size]
        runs = alloc.runs(h)
        assert runs.pages.tolist() == [4, 1, 0]
        assert runs.per_request.tolist() == [
            int((np.diff(p) != 1).sum()) + 1 if p.size else 0 for p in held
        ]
        assert runs.mean == pytest.approx(5 / len(lengths))
        found = dict(zip(runs.lengths.tolist(), runs.counts.tolist(), strict=True))
        assert found == {n: lengths.count(n) for n in lengths}
        assert runs.lengths.tolist() == sorted(runs.lengths.tolist())

    def test_a_run_ends_with_its_request(self) -> None:
        alloc = make(6, 4)
        h = alloc.open(3)
        alloc.extend(h, 8)  # whatever the ids, no run crosses from one request to the next
        runs = alloc.runs(h)
        assert runs.pages.tolist() == [2, 2, 2]
        assert runs.per_request.min() >= 1
        assert int((runs.lengths * runs.counts).sum()) == 6
        assert runs.lengths.max() <= 2

    def test_runs_are_preferred_where_that_costs_nothing(self) -> None:
        alloc = make(24, 4)
        h = alloc.open(3)
        alloc.extend(h, [16, 40, 40])
        for _ in range(3):
            assert alloc.runs(h).per_request.tolist() == [1, 1, 1]
            alloc.release(h[1])  # what comes back as a run goes out as one
            h[1] = alloc.open()[0]
            alloc.extend(h[1], 40)

    def test_of_all_open_requests_and_of_none(self) -> None:
        alloc, h = busy()
        everyone, named = alloc.runs(), alloc.runs(np.sort(h))
        assert everyone.pages.tolist() == named.pages.tolist()
        assert (everyone.mean, everyone.counts.tolist()) == (named.mean, named.counts.tolist())
        for none in (alloc.runs([]), make(4, 4).runs(), alloc.runs(h[2])):
            assert none.mean == 0.0 and none.lengths.size == none.counts.size == 0


class TestOwners:
    def test_who_has_each_page(self) -> None:
        alloc, h = busy(cache=True)
        alloc.prefix.publish(h[1], prompt(1, 16))  # held by its request
        (old,) = alloc.open()
        alloc.extend(old, 32)
        left = alloc.pages(old).tolist()
        alloc.release(old, tokens=prompt(2, 16, seed=1))  # held by nobody
        alloc.trim(h[0], 16, after=Query())
        owners = alloc.owners()
        assert owners.dtype == np.int64 and owners.shape == (21,)
        assert owners[0] == 0
        (row,) = alloc.rows(h[0])
        assert np.flatnonzero(owners == row).tolist() == sorted(alloc.pages(h[0]).tolist())
        assert np.flatnonzero(owners == -1).tolist() == sorted(left)
        assert (owners == -2).sum() == 3
        assert np.flatnonzero(owners == -3).tolist() == alloc.pages(h[1]).tolist()
        assert (owners[1:] == 0).sum() == alloc.available() == 20 - 7


class TestStats:
    def test_a_snapshot_that_sums_up(self) -> None:
        alloc, h = busy(cache=True)
        alloc.prefix.publish(h[1], prompt(1, 16))  # 1 cached, locked
        (old,) = alloc.open()
        alloc.extend(old, 32)
        alloc.release(old, tokens=prompt(2, 16, seed=1))  # 2 cached
        (gone,) = alloc.open()
        alloc.extend(gone, 48)
        alloc.release(gone, after=Query())  # 3 in quarantine
        group = alloc.stats().groups["full"]
        assert dataclasses.asdict(group) == {
            "total": 20, "free": 10, "quarantined": 3, "cached": 3, "locked": 1,
            "pinned": 0, "owned": 4, "high_water": 10, "evicted": 0,
        }  # fmt: skip
        assert group.total == group.free + group.quarantined + group.cached + group.owned
        rows = alloc.stats().rows
        assert (rows.total, rows.open, rows.free, rows.quarantined) == (6, 3, 2, 1)
        assert (alloc.stats().committed, alloc.stats().allocated) == (33 + 16, 64 + 16)
        assert list(alloc.stats().groups) == ["full"]

    def test_high_water_counts_every_page(self) -> None:
        alloc = make(6, 16)
        (h,) = alloc.open()
        for pages in (1, 2, 3, 5):
            alloc.extend(h, pages * 16)
            assert alloc.stats().groups["full"].high_water == pages
        alloc.trim(h, 16)
        alloc.extend(h, 64)
        assert alloc.stats().groups["full"].high_water == 5

    def test_high_water_and_evicted_never_fall(self) -> None:
        alloc = make(6, 16, prefix_cache=True)
        (h,) = alloc.open()
        alloc.extend(h, 64)
        alloc.release(h, tokens=prompt(4, 16))
        (h,) = alloc.open()
        alloc.extend(h, 64)  # two free, two evicted
        group = alloc.stats().groups["full"]
        assert (group.evicted, group.high_water) == (2, 6)
        alloc.release(h)
        alloc.prefix.clear()
        group = alloc.stats().groups["full"]
        assert (group.evicted, group.high_water, group.free) == (4, 6, 6)

    def test_frozen_and_detached(self) -> None:
        alloc, h = busy()
        before = alloc.stats()
        kept = repr(before)
        for record in (before, before.rows, before.groups["full"], before.staging):
            name = dataclasses.fields(record)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, name, 0)
        with pytest.raises(sgalloc.CommitPastExtent):
            alloc.commit(h[2], 1)
        alloc.release(h)
        assert repr(before) == kept, "an earlier snapshot stays as it was"
        assert alloc.stats().refusals == {"CommitPastExtent": 1}

    def test_its_mappings_are_frozen_too(self) -> None:
        alloc, _ = busy()
        for mapping in (alloc.stats().groups, alloc.stats().refusals):
            with pytest.raises(TypeError):
                mapping["full"] = None  # type: ignore[index]

    def test_refusals_by_reason(self) -> None:
        alloc, h = busy(cache=True)
        match = alloc.prefix.match([])
        reasons: dict[str, list[Callable[[], Any]]] = {
            "OutOfRows": [lambda: alloc.open(9), lambda: alloc.open_with_prefix([match] * 9)],
            "OutOfPages": [lambda: alloc.extend(h, 8 * 16)],
            "RowTooNarrow": [lambda: alloc.reserve(h, 999), lambda: alloc.plan(reserve=(h, 999))],
            "CommitPastExtent": [lambda: alloc.commit(h, 999)],
            "StaleHandle": [
                lambda: alloc.decode(1), lambda: alloc.trim(1, 0), lambda: alloc.release(1),
            ],
        }  # fmt: skip
        for name, calls in reasons.items():
            for call in calls:
                with pytest.raises(getattr(sgalloc, name)):
                    call()
        assert alloc.stats().refusals == {name: len(calls) for name, calls in reasons.items()}

    def test_refusals_of_publish_count_too(self) -> None:
        alloc, _ = busy(cache=True)
        with pytest.raises(sgalloc.StaleHandle):
            alloc.prefix.publish(1, [])
        assert alloc.stats().refusals == {"StaleHandle": 1}

    def test_staging_of_a_cpu_is_empty(self) -> None:
        staging = make(4, 4).stats().staging
        assert (staging.slots, staging.waits, staging.grows) == (0, 0, 0)


def test_warm_changes_nothing() -> None:
    alloc, _ = busy(cache=True)
    with unchanged(alloc):
        alloc.warm()
        alloc.warm(max_pages=4096)
        assert alloc.settle() is None
        assert not alloc.check().size and not alloc.check(device=True).size, "no row left out"
    with pytest.raises(ValueError, match="max_pages"):
        alloc.warm(0)


@pytest.mark.parametrize("counting_cache", [False, True])
def test_available_counts_pages(counting_cache: bool) -> None:
    alloc, _ = busy(cache=True)
    assert alloc.available("full", counting_cache=counting_cache) == 15
    assert alloc.available(group="full") == 15
    (h,) = alloc.open()
    alloc.extend(h, 48)
    alloc.release(h, tokens=prompt(3, 16))
    assert alloc.available(counting_cache=counting_cache) == (15 if counting_cache else 12)
    alloc.open_with_prefix(alloc.prefix.match(prompt(2, 16)))
    assert alloc.available(counting_cache=counting_cache) == (13 if counting_cache else 12)
    with pytest.raises(ValueError, match=r"window.*full"):
        alloc.available("window")
