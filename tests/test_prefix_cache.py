"""The prefix cache, sentence by sentence: match, open, release into it, publish, namespaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import (
    assert_laws,
    cache_pages,
    cached,
    each_page_size,
    make,
    places,
    prompt,
    unchanged,
)

import sgalloc

PS = 4
NAMESPACES = [None, 0, 1, -1, "", "0", "tenant", b"", b"tenant"]


def caching(num_pages: int = 40, ps: int = PS) -> sgalloc.KVAllocator:
    return make(num_pages, ps, prefix_cache=True)


class TestMatch:
    @each_page_size
    def test_the_longest_cached_prefix_in_whole_pages(self, ps: int) -> None:
        alloc = caching(20, ps)
        ids = prompt(5, ps)
        pages = cached(alloc, ids[: 3 * ps])
        found = alloc.prefix.match(ids)
        assert isinstance(found, sgalloc.Match)
        assert (found.length, found.pages.tolist()) == (3 * ps, pages.tolist())
        assert found.pages.dtype == np.int32
        for tokens, length in ((2 * ps, 2 * ps), (3 * ps - 1, (3 * ps - 1) // ps * ps), (0, 0)):
            found = alloc.prefix.match(ids[:tokens])
            assert found.length == length
            assert found.pages.tolist() == pages[: length // ps].tolist()
        for at in {0, ps - 1, ps, 2 * ps + ps // 2}:
            other = ids.copy()
            other[at] = -1
            assert alloc.prefix.match(other).length == at // ps * ps

    def test_along_branches(self) -> None:
        alloc = caching()
        trunk, left, right = prompt(2, PS), prompt(2, PS, seed=1), prompt(1, PS, seed=2)
        a = cached(alloc, [*trunk, *left])
        b = cached(alloc, [*trunk, *right])
        assert a[:2].tolist() == b[:2].tolist(), "the trunk is cached once"
        assert alloc.prefix.match([*trunk, *left, 1]).pages.tolist() == a.tolist()
        assert alloc.prefix.match([*trunk, *right, *left]).pages.tolist() == b.tolist()
        assert alloc.prefix.match([*trunk, *prompt(1, PS, seed=9)]).length == 2 * PS
        assert alloc.stats().groups["full"].cached == 5

    @pytest.mark.parametrize("form", ["list", "tuple", "int32", "uint16", "range", "torch"])
    def test_tokens_in_every_form(self, form: str) -> None:
        alloc = caching()
        cached(alloc, range(12))
        tokens: Any = {"list": list, "tuple": tuple, "range": lambda r: r}.get(form, np.array)(
            range(12)
        )
        if form in ("int32", "uint16"):
            tokens = tokens.astype(form)
        if form == "torch":
            tokens = pytest.importorskip("torch").from_numpy(tokens)
        assert alloc.prefix.match(tokens).length == 12
        (h,) = alloc.open()
        alloc.extend(h, 12)
        alloc.release(h, tokens=tokens)
        assert alloc.stats().groups["full"].cached == 3

    def test_changes_no_page_and_ages_no_plan(self) -> None:
        alloc = caching()
        ids = prompt(4, PS)
        cached(alloc, ids)
        (h,) = alloc.open()
        plan = alloc.plan(extend=(h, 9))
        before = places(alloc)
        for tokens in (ids, ids[:5], ids[:9], [], prompt(1, PS, seed=3)):
            alloc.prefix.match(tokens)
        assert places(alloc) == before
        alloc.apply(plan)
        assert_laws(alloc)


class TestOpenWithPrefix:
    def test_the_first_pages_are_the_shared_ones(self) -> None:
        alloc = caching()
        ids = prompt(4, PS)
        pages = cached(alloc, ids)
        alone, both = alloc.prefix.match(ids), alloc.prefix.match(ids[:9])
        handles = alloc.open_with_prefix([alone, both, alloc.prefix.match([])])
        assert handles.dtype == np.int64 and handles.shape == (3,)
        assert alloc.committed(handles).tolist() == alloc.allocated(handles).tolist() == [16, 8, 0]
        assert alloc.pages(handles[0]).tolist() == pages.tolist()
        assert alloc.pages(handles[1]).tolist() == pages[:2].tolist()
        assert alloc.open_with_prefix(alone).shape == (1,), "one match as it is"
        assert_laws(alloc)

    def test_available_falls_by_the_cached_pages_it_locks(self) -> None:
        alloc = caching(10)
        ids = prompt(4, PS)
        cached(alloc, ids)
        assert (alloc.available(), alloc.available(counting_cache=True)) == (6, 10)
        steps = ((ids[:8], 8, 2), (ids[:12], 7, 3), (ids[:4], 7, 3), (ids, 6, 4), ([], 6, 4))
        handles = []
        for tokens, available, locked in steps:
            handles.append(alloc.open_with_prefix(alloc.prefix.match(tokens))[0])
            assert (alloc.available(), alloc.available(counting_cache=True)) == (6, available)
            assert alloc.stats().groups["full"].locked == locked
        for handle, available in zip(handles, (6, 6, 6, 10, 10), strict=True):
            alloc.release(handle)
            assert alloc.available(counting_cache=True) == available
        assert alloc.stats().groups["full"].cached == 4, "unlocked, not freed"

    def test_shared_pages_are_never_written(self) -> None:
        alloc = caching()
        ids = prompt(3, PS)
        pages = set(cached(alloc, ids).tolist())
        h = alloc.open_with_prefix([alloc.prefix.match(ids), alloc.prefix.match(ids[:8])])
        out = np.empty(2 * 6, np.int32)
        alloc.decode(h, 6, out=out)
        assert not set((out // PS).tolist()) & pages
        alloc.reserve(h, 9, out=np.empty(18, np.int32))
        alloc.trim(h, [12, 4])  # to edges inside what is shared
        assert alloc.committed(h).tolist() == alloc.allocated(h).tolist() == [12, 4]
        out = np.empty(4, np.int32)
        alloc.decode(h, 2, out=out)
        assert not set((out // PS).tolist()) & pages, "the next token takes a page of its own"
        assert_laws(alloc)

    def test_a_match_evicted_meanwhile_is_refused(self) -> None:
        alloc = caching(9)
        ids = prompt(4, PS)
        cached(alloc, ids)
        whole, half = alloc.prefix.match(ids), alloc.prefix.match(ids[:8])
        (h,) = alloc.open()
        alloc.extend(h, 6 * PS)  # five pages were free, one is evicted
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan, match="match again"):
            alloc.open_with_prefix([half, whole])
        alloc.release(h)
        cached(alloc, ids)  # the same tokens again, the last on another page perhaps
        with pytest.raises(sgalloc.StalePlan):
            alloc.open_with_prefix(whole)
        assert alloc.open_with_prefix([half, alloc.prefix.match(ids)]).size == 2
        assert_laws(alloc)

    def test_a_match_outlives_branches_and_longer_neighbours(self) -> None:
        alloc = caching()
        ids = prompt(4, PS)
        pages = cached(alloc, ids)
        whole, some = alloc.prefix.match(ids), alloc.prefix.match(ids[:12])
        cached(alloc, [*ids[:8], *prompt(2, PS, seed=1)])
        cached(alloc, [*ids, *prompt(1, PS, seed=2)])
        alloc.prefix.match(ids[:4])
        h = alloc.open_with_prefix([whole, some])
        assert alloc.pages(h[0]).tolist() == pages.tolist()
        assert alloc.pages(h[1]).tolist() == pages[:3].tolist()
        assert_laws(alloc)

    def test_rows_run_out_before_anything_is_locked(self) -> None:
        alloc = make(10, PS, max_requests=2, prefix_cache=True)
        cached(alloc, prompt(2, PS))
        match = alloc.prefix.match(prompt(2, PS))
        with unchanged(alloc), pytest.raises(sgalloc.OutOfRows):
            alloc.open_with_prefix([match] * 3)


class TestReleaseIntoTheCache:
    @pytest.mark.parametrize(
        ("committed", "known", "pages"),
        [(12, 12, 3), (11, 12, 2), (12, 11, 2), (13, 99, 3), (3, 99, 0), (12, 0, 0), (12, 4, 1)],
    )
    def test_whole_pages_within_what_is_settled_and_known(
        self, committed: int, known: int, pages: int
    ) -> None:
        alloc = caching()
        (h,) = alloc.open()
        alloc.extend(h, committed)
        alloc.reserve(h, 9)  # not settled
        held = alloc.pages(h).tolist()
        ids = np.arange(known)
        alloc.release(h, tokens=ids)
        found = alloc.prefix.match(np.arange(99))
        assert found.pages.tolist() == held[:pages]
        assert alloc.available() == 40 - pages
        assert alloc.available(counting_cache=True) == 40
        assert_laws(alloc)

    def test_one_sequence_per_request_and_none_where_unknown(self) -> None:
        alloc = caching()
        h = alloc.open(3)
        alloc.extend(h, [8, 8, 5])
        alloc.release(h, tokens=[prompt(2, PS), None, prompt(1, PS, seed=1).tolist()])
        assert alloc.stats().groups["full"].cached == 3
        for seed, length in ((0, 8), (1, 4)):
            assert alloc.prefix.match(prompt(2, PS, seed=seed)).length == length

    def test_a_duplicate_is_freed_and_not_stored_twice(self) -> None:
        alloc = caching()
        first = cached(alloc, prompt(3, PS))
        h = alloc.open(2)
        alloc.extend(h, [12, 20])
        longer = [*prompt(3, PS), *prompt(2, PS, seed=1)]
        own = alloc.pages(h[1]).tolist()
        alloc.release(h, tokens=[prompt(3, PS), longer])
        assert alloc.stats().groups["full"].cached == 5
        assert alloc.available() == 35
        assert alloc.prefix.match(longer).pages.tolist() == [*first, *own[3:]]
        assert_laws(alloc)

    def test_the_same_prompt_twice_in_one_release(self) -> None:
        alloc = caching()
        h = alloc.open(3)
        alloc.extend(h, 12)
        ids = prompt(3, PS)
        alloc.release(h, tokens=[ids[:8], ids, ids[:4]])
        assert alloc.stats().groups["full"].cached == 3
        assert alloc.available() == 37
        assert_laws(alloc)

    def test_beyond_a_shared_prefix(self) -> None:
        alloc = caching()
        ids = prompt(5, PS)
        first = cached(alloc, ids[:8])
        h = alloc.open_with_prefix([alloc.prefix.match(ids)] * 2)
        alloc.extend(h, [20, 10])
        own = alloc.pages(h[0]).tolist()[2:]
        alloc.release(h, tokens=[ids, ids])
        assert alloc.prefix.match(ids).pages.tolist() == [*first, *own]
        assert alloc.stats().groups["full"].locked == 0
        assert_laws(alloc)

    @pytest.mark.parametrize("known", [0, 3, 4, 7])
    def test_fewer_tokens_than_are_shared(self, known: int) -> None:
        alloc = caching()
        ids = prompt(3, PS)
        cached(alloc, ids)
        (h,) = alloc.open_with_prefix(alloc.prefix.match(ids))
        alloc.decode(h)
        alloc.release(h, tokens=ids[:known])
        assert alloc.stats().groups["full"].locked == 0
        assert alloc.prefix.match(ids).length == 12 and alloc.available() == 37
        assert_laws(alloc)


class TestNamespaces:
    def test_never_share(self) -> None:
        alloc = caching()
        ids = prompt(1, PS)
        pages = {}
        for count, name in enumerate(NAMESPACES):
            assert alloc.prefix.match(ids, namespace=name).length == 0
            pages[name] = cached(alloc, ids, namespace=name).tolist()
            assert alloc.stats().groups["full"].cached == count + 1
        for name in NAMESPACES:
            assert alloc.prefix.match(ids, namespace=name).pages.tolist() == pages[name]
        assert alloc.prefix.match(ids, namespace=np.int64(1)).pages.tolist() == pages[1]

    def test_a_request_keeps_that_of_its_match(self) -> None:
        alloc = caching()
        ids = prompt(3, PS)
        cached(alloc, ids[:4], namespace="tenant")
        h = alloc.open_with_prefix([alloc.prefix.match(ids, "tenant"), alloc.prefix.match([], 7)])
        alloc.extend(h, 12)
        alloc.prefix.publish(h[1], ids)
        alloc.release(h[0], tokens=ids)
        for name, length in (("tenant", 12), (7, 12), (None, 0)):
            assert alloc.prefix.match(ids, name).length == length

    def test_a_namespace_whose_pages_all_went_begins_anew(self) -> None:
        alloc = caching()
        cached(alloc, prompt(2, PS), namespace="tenant")
        alloc.prefix.clear()
        assert alloc.prefix.match(prompt(2, PS), "tenant").length == 0
        cached(alloc, prompt(1, PS), namespace="tenant")
        assert alloc.prefix.match(prompt(2, PS), "tenant").length == PS
        assert_laws(alloc)


class TestClear:
    def test_evicts_what_nobody_holds(self) -> None:
        alloc = caching()
        ids = prompt(4, PS)
        cached(alloc, ids)
        cached(alloc, prompt(3, PS, seed=1), namespace=7)
        (h,) = alloc.open_with_prefix(alloc.prefix.match(ids[:8]))
        assert alloc.prefix.clear() == 5
        assert alloc.prefix.match(ids).length == 8
        assert alloc.available() == 38
        assert alloc.prefix.clear() == 0
        alloc.release(h)
        assert alloc.prefix.clear() == 2
        assert cache_pages(alloc) == {} and alloc.available() == 40
        assert_laws(alloc)
