"""What each verb that opens, grows, commits or gives back does, sentence by sentence."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from host_support import assert_laws, count_launches, make, unchanged

import sgalloc


def test_signatures() -> None:
    expected = {
        "open": "count=1, namespace=None",
        "rows": "x",
        "committed": "x",
        "allocated": "x",
        "decode_index": "x",
        "batch": "x",
        "extend": "x, lengths, out=None, after=None, window_tail=None, logical_only=False",
        "decode": "x, tokens=1, out=None, after=None",
        "reserve": "x, reserve, out=None, after=None, rounding='auto'",
        "commit": "x, accepted",
        "trim": "x, lengths, after=None",
        "compact": "x, accepted, after=None",
        "evict_window": "x, upto=None, after=None",
        "to_sparse": "x, after=None",
        "release": "x, *, tokens=None, after=None",
        "slots": "x, start, stop, out=None",
        "pages": "handle, start=0, stop=None",
        "plan": "extend=None, decode=None, reserve=None, evict_window=False, logical_only=False",
        "frontier": "x",
        "apply": "plan, out=None, after=None",
        "fits": "plan_or_lengths, after_releasing=(), counting_cache=True",
        "available": "group='full', counting_cache=False",
        "settle": "",
        "stats": "",
        "check": "device=False",
        "warm": "max_pages=None",
        "open_with_prefix": "matches",
    }
    for verb, wanted in expected.items():
        parameters = list(inspect.signature(getattr(sgalloc.KVAllocator, verb)).parameters.values())
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters[1:]]
        assert str(inspect.Signature(plain)) == f"({wanted})", verb
    options = inspect.signature(sgalloc.KVAllocator).parameters
    assert list(options)[:4] == ["num_pages", "page_size", "max_requests", "row_width"]
    assert all(options[name].default is inspect.Parameter.empty for name in list(options)[:4])
    defaults = {name: option.default for name, option in list(options.items())[4:]}
    assert defaults["device"] == "auto" and defaults["prefix_cache"] is False
    assert all(value in (None, False, "auto") for value in defaults.values())
    alloc = make(4, 16, prefix_cache=True)
    assert list(inspect.signature(alloc.prefix.match).parameters) == ["tokens", "namespace"]
    assert list(inspect.signature(alloc.prefix.publish).parameters) == ["x", "tokens", "after"]


class TestOpen:
    def test_handles_are_generation_and_row(self) -> None:
        alloc = make(4, 16, max_requests=3)
        assert alloc.open().size == 1
        more = alloc.open(2)
        assert more.dtype == np.int64 and more.shape == (2,)
        rows = alloc.rows(more)
        assert ((more & 0xFFFFFFFF) == rows).all()
        assert (more >> 32 == 1).all(), "generations count from 1"
        assert alloc.committed(more).tolist() == alloc.allocated(more).tolist() == [0, 0]

    def test_every_row_but_the_padding_row_can_be_taken_and_no_more(self) -> None:
        alloc = make(4, 16, max_requests=3)
        h = alloc.open(3)
        assert sorted(alloc.rows(h).tolist()) == [1, 2, 3]
        with unchanged(alloc), pytest.raises(sgalloc.OutOfRows) as refused:
            alloc.open(2)
        assert (refused.value.need, refused.value.free) == (2, 0)
        alloc.release(h[:1])
        with unchanged(alloc), pytest.raises(sgalloc.OutOfRows) as refused:
            alloc.open(2)
        assert (refused.value.need, refused.value.free) == (2, 1)
        (again,) = alloc.open()
        assert again & 0xFFFFFFFF == h[0] & 0xFFFFFFFF
        assert again >> 32 == 2, "the row is the same, its generation is another"

    def test_a_bare_row_number_is_never_a_handle(self) -> None:
        alloc = make(4, 16, max_requests=3)
        alloc.open(2)
        for bare in (0, 1, 2, 3, 4, -1):
            with unchanged(alloc), pytest.raises(sgalloc.StaleHandle):
                alloc.committed(bare)

    def test_none_at_all(self) -> None:
        alloc = make(4, 16)
        none = alloc.open(0)
        assert none.dtype == np.int64 and none.shape == (0,)
        assert alloc.stats().rows.open == 0

    @pytest.mark.parametrize("namespace", [None, 0, 7, np.int64(7), "tenant", b"salt", ""])
    def test_namespaces(self, namespace: Any) -> None:
        for cache in (False, True):
            alloc = make(4, 16, prefix_cache=cache)
            assert alloc.open(2, namespace=namespace).size == 2


def test_a_step_without_need_succeeds_and_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alloc = make(2, 16)
    h = alloc.open(2)
    alloc.extend(h, 10)
    assert alloc.available() == 0
    launched = count_launches(alloc, monkeypatch)
    assert alloc.decode(h).num_new_pages == 0
    assert alloc.reserve(h, 5).num_new_pages == 0
    assert alloc.extend(h, 16).num_new_pages == 0
    alloc.commit(h, 0)
    assert sum(launched.values()) == 0
    alloc.reserve(h, 0, out=np.empty(0, np.int32))
    alloc.trim(h, 12)
    out = np.empty(4, np.int32)
    alloc.extend(h, 14, out=out)
    assert sum(launched.values()) <= 2, "the gathers that out asks for"
    assert out.tolist() == alloc.slots(h, 12, 14).tolist()


class TestExtend:
    def test_grows_until_the_extent_covers_the_lengths(self) -> None:
        alloc = make(16, 16)
        h = alloc.open(2)
        plan = alloc.extend(h, [20, 16])
        assert isinstance(plan, sgalloc.Plan)
        assert plan.cur.tolist() == [0, 0] and plan.nxt.tolist() == [32, 16]
        assert alloc.committed(h).tolist() == [20, 16]
        assert alloc.allocated(h).tolist() == [32, 16]
        assert alloc.decode_index(h).tolist() == [0, 0], "prefill is no decode step"
        first = alloc.pages(h[0], 0, 32).tolist()
        plan = alloc.extend(h, [33, 16])
        assert plan.cur.tolist() == [32, 16] and plan.nxt.tolist() == [48, 16]
        assert plan.num_new_pages == 1
        assert alloc.pages(h[0]).tolist()[:2] == first, "what is held stays"
        assert_laws(alloc)

    def test_uses_what_was_reserved_first(self) -> None:
        alloc = make(4, 16)
        h = alloc.open()
        alloc.extend(h, 3)
        alloc.reserve(h, 40)
        assert alloc.extend(h, 48).num_new_pages == 0
        assert (alloc.committed(h).tolist(), alloc.allocated(h).tolist()) == ([48], [48])

    def test_below_c_is_a_value_error_that_names_trim(self) -> None:
        alloc = make(16, 16)
        h = alloc.open(2)
        alloc.extend(h, 20)
        with unchanged(alloc), pytest.raises(ValueError, match=r"19.*20.*trim"):
            alloc.extend(h, [21, 19])

    def test_the_array_of_lengths_is_neither_kept_nor_changed(self) -> None:
        alloc = make(16, 16)
        h = alloc.open(2)
        lengths = np.array([20, 3])
        plan = alloc.plan(extend=(h, lengths))
        alloc.extend(alloc.batch(h), lengths)
        assert lengths.tolist() == [20, 3]
        plan = alloc.plan(extend=(h, lengths))
        lengths[:] = 1
        alloc.apply(plan)
        assert alloc.committed(h).tolist() == [20, 3]


class TestDecode:
    def test_one_token_is_the_default(self) -> None:
        alloc = make(16, 16)
        h = alloc.open(2)
        alloc.extend(h, [16, 5])
        plan = alloc.decode(h)
        assert plan.num_new_pages == 1
        assert alloc.committed(h).tolist() == [17, 6]
        assert alloc.allocated(h).tolist() == [32, 16]
        alloc.decode(h, [20, 0])
        assert alloc.committed(h).tolist() == [37, 6]
        assert alloc.decode_index(h).tolist() == [2, 2]
        assert_laws(alloc)


class TestReserve:
    def test_covers_c_and_the_reserve_in_whole_pages_and_c_stays(self) -> None:
        alloc = make(16, 16)
        h = alloc.open(3)
        alloc.extend(h, [30, 1, 16])
        plan = alloc.reserve(h, [2, 32, 0])
        assert plan.nxt.tolist() == [32, 48, 16]
        assert plan.num_new_pages == 2
        assert alloc.committed(h).tolist() == [30, 1, 16]
        assert alloc.decode_index(h).tolist() == [0, 0, 0], "reserve alone is no decode step"
        assert_laws(alloc)

    def test_a_shrinking_reserve_never_gives_back_and_a_growing_one_asks_for_the_difference(
        self,
    ) -> None:
        alloc = make(20, 4)
        h = alloc.open()
        alloc.extend(h, 4)
        for reserve, new in ((9, 3), (2, 0), (0, 0), (12, 0), (13, 1), (21, 2)):
            assert alloc.reserve(h, reserve).num_new_pages == new
        assert alloc.allocated(h).tolist() == [28]

    @pytest.mark.parametrize("rounding", ["auto", "host", "device"])
    def test_rounding_is_the_same_anywhere(self, rounding: str) -> None:
        alloc = make(20, 3)
        h = alloc.open(2)
        alloc.extend(h, [2, 3])
        plan = alloc.reserve(h, [3, 4], rounding=rounding)
        assert plan.nxt.tolist() == [6, 9]


class TestCommit:
    def test_adds_and_zero_is_allowed(self) -> None:
        alloc = make(8, 16)
        h = alloc.open(2)
        alloc.extend(h, [10, 16])
        alloc.reserve(h, 8)
        assert alloc.commit(h, [0, 8]) is None
        assert alloc.committed(h).tolist() == [10, 24]
        alloc.commit(h, [22, 8])  # exactly up to A
        assert alloc.committed(h).tolist() == alloc.allocated(h).tolist() == [32, 32]
        assert alloc.decode_index(h).tolist() == [0, 0]

    def test_past_the_extent_is_refused_as_a_whole(self) -> None:
        alloc = make(8, 16)
        h = alloc.open(2)
        alloc.extend(h, [10, 16])
        with unchanged(alloc), pytest.raises(sgalloc.CommitPastExtent, match=r"17.*16"):
            alloc.commit(h, [6, 1])


class TestTrim:
    @pytest.mark.parametrize(
        ("to", "committed", "allocated"),
        [(0, 0, 0), (1, 1, 16), (16, 16, 16), (17, 17, 32), (40, 40, 48), (99, 40, 48)],
    )
    def test_pages_wholly_past_c_go_back(self, to: int, committed: int, allocated: int) -> None:
        alloc = make(8, 16)
        h = alloc.open()
        alloc.extend(h, 40)
        alloc.reserve(h, 40)
        held = alloc.pages(h, 0, 80).tolist()
        assert alloc.trim(h, to) is None
        assert alloc.committed(h).tolist() == [committed]
        assert alloc.allocated(h).tolist() == [allocated]
        assert alloc.available() == 8 - allocated // 16
        assert alloc.pages(h, 0, allocated).tolist() == held[: allocated // 16]
        assert_laws(alloc)

    def test_a_parked_request_resumes(self) -> None:
        alloc = make(8, 16)
        h = alloc.open()
        alloc.extend(h, 40)
        alloc.trim(h, 0)
        assert alloc.available() == 8
        alloc.extend(h, 20)
        assert alloc.committed(h).tolist() == [20]
        assert_laws(alloc)


class TestRelease:
    def test_everything_goes_back_in_any_state(self) -> None:
        alloc = make(16, 16, max_requests=4)
        h = alloc.open(4)
        alloc.extend(h[1:], [20, 16, 3])
        alloc.reserve(h[2:3], 99)
        alloc.trim(h[3:], 0)
        assert alloc.release(h) is None
        stats = alloc.stats()
        assert alloc.available() == 16 and stats.rows.free == 4 and stats.allocated == 0
        for stale in h:
            for read in (alloc.rows, alloc.committed, alloc.allocated, alloc.pages, alloc.batch):
                with pytest.raises(sgalloc.StaleHandle):
                    read(stale)

    def test_without_a_cache_tokens_change_nothing(self) -> None:
        alloc = make(8, 16)
        h = alloc.open(2)
        alloc.extend(h, 20)
        alloc.release(h, tokens=[range(20), None])
        assert alloc.available() == 8
