"""Which cached pages go, and in what order: examples worked out by hand. Pages of four tokens."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from host_support import assert_laws, cached, make, places, prompt, unchanged

import sgalloc

PS = 4


class Cache:
    """An allocator whose cached pages have names, such as A0 and A1 for the two pages of A."""

    def __init__(self, num_pages: int = 30) -> None:
        self.alloc = make(num_pages, PS, row_width=2 * num_pages * PS, prefix_cache=True)
        self.names: dict[int, str] = {}

    def ids(self, path: str) -> np.ndarray:
        """Token ids of a path such as "A3" (three pages of A) or "A2 x1" (two, then one of x)."""
        parts = [prompt(int(part[1:]), PS, seed=ord(part[0])) for part in path.split()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def add(self, path: str) -> None:
        """A request comes, runs over ``path`` and leaves it in the cache."""
        self.learn(path, cached(self.alloc, self.ids(path)))

    def learn(self, path: str, pages: np.ndarray) -> None:
        names = [f"{p[0]}{i}" for p in path.split() for i in range(int(p[1:]))]
        for name, page in zip(names, pages.tolist(), strict=True):
            assert self.names.setdefault(page, name) == name

    def match(self, path: str) -> sgalloc.Match:
        found = self.alloc.prefix.match(self.ids(path))
        assert found.length == self.ids(path).size
        return found

    def left(self) -> set[str]:
        return {self.names[page] for page in places(self.alloc)["cached"]}

    def evicted_by(self, pages: int) -> set[str]:
        """What goes when a new request takes so many pages."""
        before = self.left()
        (h,) = self.alloc.open()
        self.alloc.extend(h, pages * PS)
        assert_laws(self.alloc)
        gone = before - self.left()
        self.names = {page: name for page, name in self.names.items() if name not in gone}
        return gone

    def order(self) -> str:
        """All that can go, one page at a time."""
        gone = []
        (h,) = self.alloc.open()
        self.alloc.extend(h, self.alloc.available() * PS)
        while self.alloc.available(counting_cache=True):
            before = self.left()
            self.alloc.reserve(h, 1)
            self.alloc.commit(h, int((self.alloc.allocated(h) - self.alloc.committed(h))[0]))
            (name,) = before - self.left()
            gone.append(name)
        with unchanged(self.alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            self.alloc.decode(h)
        assert (refused.value.need, refused.value.free, refused.value.cached) == (1, 0, 0)
        assert_laws(self.alloc)
        return " ".join(gone)


class TestLeastRecentlyUsed:
    def test_oldest_first_and_page_by_page_from_the_end(self) -> None:
        c = Cache()
        c.add("A3")
        c.add("B2")
        c.add("C1")
        assert c.order() == "A2 A1 A0 B1 B0 C0"

    def test_a_match_is_a_use(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        c.match("A2")
        assert c.order() == "B1 B0 A1 A0"

    def test_a_match_of_a_part_uses_that_part(self) -> None:
        c = Cache()
        c.add("A3")
        c.add("B2")
        c.match("A1")
        assert c.order() == "A2 A1 B1 B0 A0"

    def test_a_match_that_diverges_uses_what_is_common(self) -> None:
        c = Cache()
        c.add("A3")
        c.add("B2")
        c.alloc.prefix.match(c.ids("A2 z9"))
        assert c.order() == "A2 B1 B0 A1 A0"

    def test_an_opening_is_a_use(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        a, b = c.match("A2"), c.match("B2")
        assert b.length
        (h,) = c.alloc.open_with_prefix(a)
        c.alloc.release(h)
        assert c.order() == "B1 B0 A1 A0"

    def test_a_release_with_tokens_is_a_use_of_the_whole_path(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        c.add("A2 x1")  # a duplicate of A, and one page more
        assert c.order() == "B1 B0 x0 A1 A0"

    def test_a_release_with_tokens_known_already_is_a_use(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        c.add("A1")
        assert c.order() == "A1 B1 B0 A0"

    def test_a_release_without_tokens_is_none(self) -> None:
        c = Cache()
        c.add("A2")
        (h,) = c.alloc.open_with_prefix(c.match("A2"))
        c.add("B2")
        c.alloc.release(h)
        assert c.order() == "A1 A0 B1 B0"

    def test_publishing_is_a_use(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        (h,) = c.alloc.open()
        c.alloc.extend(h, 8)
        c.alloc.prefix.publish(h, c.ids("A2"))
        c.alloc.release(h)
        assert c.order() == "B1 B0 A1 A0"

    def test_publishing_what_is_shared_already_is_a_use(self) -> None:
        c = Cache()
        c.add("A2")
        (h,) = c.alloc.open_with_prefix(c.match("A2"))
        c.add("B2")
        c.alloc.prefix.publish(h, c.ids("A1"))
        c.alloc.release(h)
        assert c.order() == "A1 B1 B0 A0"

    def test_running_on_a_prefix_is_none(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        (h,) = c.alloc.open_with_prefix(c.match("A2"))
        c.match("B2")
        c.alloc.decode(h, 9)
        c.alloc.trim(h, 8)
        c.alloc.release(h)
        assert c.order() == "A1 A0 B1 B0"


class TestLeavesFirst:
    def test_a_trunk_goes_after_its_branches(self) -> None:
        c = Cache()
        c.add("P2 x1")
        c.add("P2 y2")
        c.add("Q1")
        # x is oldest; then y; P was used with y, and is a leaf only now; then Q.
        assert c.order() == "x0 y1 y0 P1 P0 Q0"

    def test_a_branch_used_late_keeps_its_trunk(self) -> None:
        c = Cache()
        c.add("P2 x1")
        c.add("P2 y1")
        c.add("Q1")
        c.match("P2 x1")
        assert c.order() == "y0 Q0 x0 P1 P0"

    def test_branches_from_the_middle_of_a_run(self) -> None:
        c = Cache()
        c.add("P4")
        c.add("P2 y1")  # cuts P in two
        c.add("P1 z1")
        # P3 and P2 were used first, then P1 with y, then P0 with z.
        assert c.order() == "P3 P2 y0 P1 z0 P0"

    def test_a_run_that_grew(self) -> None:
        c = Cache()
        c.add("P1")
        c.add("Q1")
        c.add("P1 x2")
        c.match("Q1")
        assert c.order() == "x1 x0 P0 Q0"

    def test_deep_branches(self) -> None:
        c = Cache()
        c.add("P1 a1 b1")
        c.add("P1 a1 c1")
        c.add("P1 d1")
        c.match("P1 a1 b1")
        # c, then d, then the path that was matched last.
        assert c.order() == "c0 d0 b0 a0 P0"


class TestTies:
    def test_by_insertion_within_one_release(self) -> None:
        c = Cache()
        h = c.alloc.open(3)
        c.alloc.extend(h, 8)
        pages = [c.alloc.pages(x) for x in h]
        paths = ["A2", "B2", "C2"]
        order = [2, 0, 1]
        c.alloc.release(h[order], tokens=[c.ids(paths[i]) for i in order])
        for path, held in zip(paths, pages, strict=True):
            c.learn(path, held)
        # C was inserted first. Each has a leaf, C1, A1, B1; C0 was inserted before A1.
        assert c.order() == "C1 C0 A1 A0 B1 B0"

    def test_by_insertion_within_one_opening(self) -> None:
        c = Cache()
        c.add("B1")
        c.add("A1")
        matches = [c.match("A1"), c.match("B1")]
        c.alloc.release(c.alloc.open_with_prefix(matches))  # both used in one call
        assert c.order() == "B0 A0"

    def test_a_trunk_and_a_branch_of_one_release(self) -> None:
        c = Cache()
        c.add("P1")
        h = c.alloc.open(2)
        c.alloc.extend(h, [4, 8])
        pages = [c.alloc.pages(x) for x in h]
        c.alloc.release(h, tokens=[c.ids("Q1"), c.ids("P1 x1")])
        c.learn("Q1", pages[0])
        c.names[int(pages[1][1])] = "x0"
        # All used at once. Q0 was inserted after P0, before x0; P0 is no leaf while x0 stands.
        assert c.order() == "Q0 x0 P0"

    def test_insertion_numbers_live_on_in_runs_that_were_cut(self) -> None:
        c = Cache()
        h = c.alloc.open(2)
        c.alloc.extend(h, [12, 4])
        pages = [c.alloc.pages(x) for x in h]
        c.alloc.release(h, tokens=[c.ids("A3"), c.ids("B1")])
        c.learn("A3", pages[0])
        c.learn("B1", pages[1])
        (x,) = c.alloc.open_with_prefix(c.match("A1"))
        c.alloc.release(x)
        assert c.order() == "A2 A1 B0 A0"


class TestLocks:
    def test_what_is_locked_never_goes(self) -> None:
        c = Cache()
        c.add("A4")
        c.add("B1")
        (h,) = c.alloc.open_with_prefix(c.match("A2"))
        c.match("B1")
        assert c.order() == "A3 A2 B0"
        assert c.left() == {"A0", "A1"}
        assert c.alloc.pages(h).size == 2

    def test_it_goes_in_its_turn_once_unlocked(self) -> None:
        c = Cache()
        c.add("A2")
        c.add("B2")
        h = c.alloc.open_with_prefix([c.match("A2"), c.match("A1")])
        c.match("B2")
        c.alloc.release(h[0])
        assert c.evicted_by(30 - 4 + 1) == {"A1"}
        c.alloc.release(h[1])
        assert c.order() == "A0 B1 B0"

    def test_two_holders_of_one_page(self) -> None:
        c = Cache()
        c.add("A2")
        h = c.alloc.open_with_prefix([c.match("A2")] * 2)
        c.alloc.release(h[0])
        assert c.alloc.available(counting_cache=True) == 28
        c.alloc.trim(h[1], 4)
        assert c.alloc.available(counting_cache=True) == 29
        assert c.order() == "A1"


class TestExactByNeed:
    def filled(self) -> Cache:
        c = Cache(10)
        c.add("A3")
        c.add("B3")
        assert c.alloc.available() == 4
        return c

    @pytest.mark.parametrize(
        ("pages", "gone"),
        [(4, ""), (5, "A2"), (6, "A2 A1"), (8, "A2 A1 A0 B2"), (10, "A2 A1 A0 B2 B1 B0")],
    )
    def test_until_the_shortfall_is_met_and_no_further(self, pages: int, gone: str) -> None:
        c = self.filled()
        assert c.evicted_by(pages) == set(gone.split())
        group = c.alloc.stats().groups["full"]
        assert group.evicted == len(gone.split())
        assert group.free == max(4 - pages, 0)

    def test_a_growth_that_would_not_fit_even_then_evicts_nothing(self) -> None:
        c = self.filled()
        (h,) = c.alloc.open_with_prefix(c.match("A1"))
        for grow in (
            lambda: c.alloc.extend(h, 4 * 11),
            lambda: c.alloc.reserve(h, 4 * 9 + 1),
            lambda: c.alloc.decode(h, 4 * 10),
        ):
            with unchanged(c.alloc), pytest.raises(sgalloc.OutOfPages) as refused:
                grow()
            error = refused.value
            assert (error.need, error.free, error.cached) == (10, 4, 5)
        c.alloc.reserve(h, 4 * 9)
        assert c.left() == {"A0"}

    def test_what_a_step_opens_itself_is_not_evicted_for_it(self) -> None:
        c = self.filled()
        h = c.alloc.open_with_prefix([c.match("A3"), c.match("B2")])
        c.alloc.extend(h, [4 * 6, 4 * 4])  # three and two; four are free, and B2 can go
        assert c.left() == {"A0", "A1", "A2", "B0", "B1"}
        assert_laws(c.alloc)


def test_an_emptied_cache_lets_go_of_its_prompts() -> None:
    """Whatever empties it: token ids of nobody's prompts do not stay in memory."""
    for empty in (
        lambda alloc: alloc.prefix.clear(),
        lambda alloc: alloc.extend(alloc.open(), alloc.num_pages * PS),
    ):
        cache = Cache()
        for path in ("A3", "A2 x1", "B2"):
            cache.add(path)
        prompts = [weakref.ref(node.tokens) for node in cache.alloc._core.tree.nodes()]
        assert len(prompts) >= 3
        empty(cache.alloc)
        assert cache.alloc.stats().groups["full"].cached == 0
        gc.collect()
        assert [one() for one in prompts] == [None] * len(prompts)
