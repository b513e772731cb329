"""Who is retracted: the order, the fewest that will do, and that the answer comes true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, assert_laws, make, prompt, unchanged

import sgalloc
from sgalloc.retraction import Retraction, choose_victims, keep_order


def full(lengths: list[int], spare: int = 0) -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """Requests at page edges in a pool with so many pages to spare; pages of 4."""
    pages = sum(-(-n // 4) for n in lengths)
    alloc = make(pages + spare, 4, max_requests=len(lengths) + 1, row_width=200)
    h = alloc.open(len(lengths))
    alloc.extend(h, lengths)
    return alloc, h


class TestOrder:
    def test_most_output_is_kept_longest_then_the_shortest_prompt(self) -> None:
        output, prompt_lens = [5, 9, 5, 0, 9, 5], [30, 20, 10, 1, 40, 10]
        # 9 out: prompts 20, 40. 5 out: prompts 10 (twice, as given), 30. None out: last.
        assert keep_order(output, prompt_lens).tolist() == [1, 4, 2, 5, 0, 3]

    def test_the_first_to_go_comes_first(self) -> None:
        alloc, h = full([4] * 6)
        found = choose_victims(
            alloc, h, alloc.plan(decode=(h, 1)),
            output_lens=[5, 9, 5, 0, 9, 5], prompt_lens=[30, 20, 10, 1, 40, 10],
        )  # fmt: skip
        # Six need a page each. Three gone: three pages back, three needed.
        assert isinstance(found, Retraction) and found.fits is True
        assert found.victims.dtype == np.int64
        assert found.victims.tolist() == h[[3, 0, 5]].tolist()

    @pytest.mark.parametrize("form", ["array", "list", "batch"])
    def test_an_order_of_ones_own(self, form: str) -> None:
        alloc, h = full([4] * 4)
        handles: Any = {"array": h, "list": h.tolist(), "batch": alloc.batch(h)}[form]
        found = choose_victims(alloc, handles, alloc.plan(decode=(h, 1)), [2, 0, 3, 1])
        assert found == Retraction(found.victims, True)
        assert found.victims.tolist() == h[[1, 3]].tolist()


class TestFewest:
    def test_nobody_where_it_fits_as_it_is(self) -> None:
        alloc, h = full([4, 4, 4], spare=3)
        found = choose_victims(alloc, h, alloc.plan(decode=(h, 1)), [0, 1, 2])
        assert found.victims.tolist() == [] and found.fits is True

    def test_a_victim_takes_its_own_need_along(self) -> None:
        alloc, h = full([4, 4, 2], spare=1)
        plan = alloc.plan(decode=(h, 1))
        assert plan.need == {"full": 2} and not plan.fits
        found = choose_victims(alloc, h, plan, [1, 2, 0])
        assert found.victims.tolist() == h[[0]].tolist()

    def test_one_stays_even_where_that_does_not_fit(self) -> None:
        alloc, h = full([4, 4, 4])
        plan = alloc.plan(reserve=(h, [4 * 4, 4 * 3, 4 * 3]))
        found = choose_victims(alloc, h, plan, [0, 1, 2])
        assert found.victims.tolist() == h[[2, 1]].tolist() and found.fits is False
        found = choose_victims(alloc, h, plan, [1, 0, 2])
        assert found.victims.tolist() == h[[2, 0]].tolist()
        assert not found.fits, "two came back, three are needed"
        plan = alloc.plan(reserve=(h, [4 * 4, 4 * 2, 4 * 3]))
        found = choose_victims(alloc, h, plan, [1, 0, 2])
        assert found.victims.tolist() == h[[2, 0]].tolist() and found.fits

    @pytest.mark.parametrize("count", [0, 1])
    def test_the_only_one_is_never_a_victim(self, count: int) -> None:
        alloc, h = full([4])
        fits = choose_victims(alloc, h[:count], alloc.plan(decode=(h[:count], 1)), range(count))
        assert fits.victims.tolist() == [] and fits.fits is (count == 0)

    def test_others_of_the_plan_are_left_alone(self) -> None:
        alloc, h = full([4] * 4)
        plan = alloc.plan(decode=(h, 1))
        found = choose_victims(alloc, h[1:3], plan, [0, 1])
        assert found.victims.tolist() == h[[2]].tolist()
        assert not found.fits, "three pages for those that stay, one came back"


class TestSharedPrefixes:
    def sharing(self) -> tuple[sgalloc.KVAllocator, np.ndarray]:
        """Three that share four pages and own one, full to the brim; one cached page besides."""
        alloc = make(8, 4, max_requests=4, row_width=80, prefix_cache=True)
        (seed,) = alloc.open()
        alloc.extend(seed, 16)
        alloc.release(seed, tokens=prompt(4, 4))
        h = alloc.open_with_prefix([alloc.prefix.match(prompt(4, 4))] * 3)
        alloc.extend(h, 20)
        (other,) = alloc.open()
        alloc.extend(other, 4)
        alloc.release(other, tokens=prompt(1, 4, seed=1))
        assert (alloc.available(), alloc.available(counting_cache=True)) == (0, 1)
        return alloc, h

    @pytest.mark.parametrize(
        ("tokens", "counting_cache", "victims", "fits"),
        [
            (1, True, 1, True),  # two need two: one cached, one of the victim
            (1, False, 2, True),  # one needs one: two of the victims
            (9, True, 2, True),  # one needs three: one cached, two of the victims
            (9, False, 2, False),
            (13, True, 2, False),  # the prefix stays, for the one that stays shares it
        ],
    )
    def test_shared_pages_come_back_with_the_last_who_holds_them(
        self, tokens: int, counting_cache: bool, victims: int, fits: bool
    ) -> None:
        alloc, h = self.sharing()
        with unchanged(alloc):
            found = choose_victims(
                alloc, h, alloc.plan(decode=(h, tokens)), [0, 1, 2], counting_cache=counting_cache
            )
        assert found.victims.tolist() == h[::-1][:victims].tolist()
        assert found.fits is fits

    def test_one_that_does_not_share_gets_them_once_all_sharers_left(self) -> None:
        alloc, h = self.sharing()
        alloc.trim(h[0], 0)
        (single,) = alloc.open()
        alloc.extend(single, 4)
        running = np.array([single, h[1], h[2]])
        # Two own pages, four shared and one cached come back; h[0] shares no more.
        plan = alloc.plan(reserve=(running, [28, 0, 0]))
        found = choose_victims(alloc, running, plan, [0, 1, 2])
        assert found.fits and found.victims.size == 2
        plan = alloc.plan(reserve=(running, [12, 0, 0]))
        found = choose_victims(alloc, running, plan, [0, 1, 2])
        assert found.victims.size == 2, "the prefix is held until the second has left, too"
        plan = alloc.plan(reserve=(running, [8, 0, 0]))
        assert choose_victims(alloc, running, plan, [0, 1, 2]).victims.size == 1


def scene(seed: int) -> tuple[sgalloc.KVAllocator, np.ndarray, Any, dict[str, Any]]:
    """A crowded allocator, its running requests, their next step, and an order."""
    rng = np.random.default_rng(seed)
    ps = int(rng.choice([1, 2, 3, 4]))
    alloc = make(
        int(rng.integers(14, 26)), ps, max_requests=8, row_width=40 * ps, prefix_cache=True
    )
    (s,) = alloc.open()
    alloc.extend(s, 5 * ps)
    alloc.release(s, tokens=prompt(5, ps))
    n = int(rng.integers(2, 7))
    shared = [prompt(int(k), ps) for k in rng.integers(0, 6, n)]
    h = alloc.open_with_prefix([alloc.prefix.match(t) for t in shared])
    for handle in h:
        want = int(alloc.committed(handle)[0]) + int(rng.integers(0, 4 * ps))
        if alloc.fits(alloc.plan(extend=(handle, want))):
            alloc.extend(handle, want)
    order = rng.permutation(n)
    step = {
        "decode": (h[: n // 2], int(rng.integers(1, 3 * ps + 2))),
        "reserve": (h[n // 2 :], rng.integers(0, int(rng.choice([5, 16])) * ps, n - n // 2)),
    }
    return alloc, h, order, step


def goes_through(seed: int, gone: int, counting_cache: bool, into_cache: bool) -> bool:
    """Really releases the first so many, then really does the step of those that stay."""
    alloc, h, order, step = scene(seed)
    victims = h[order][::-1][:gone]
    ps, tokens = alloc.page_size, None
    if into_cache:
        rows = alloc.rows(victims).tolist()
        shared = alloc._ledger.shared[rows].tolist()
        tokens = [
            np.append(prompt(n, ps), prompt(40, ps, seed=row))
            for n, row in zip(shared, rows, strict=True)
        ]
    alloc.release(victims, tokens=tokens)
    left: dict[str, Any] = {}
    for name, (handles, amount) in step.items():
        stays = ~np.isin(handles, victims)
        amounts = np.broadcast_to(amount, handles.shape)
        left[name] = (handles[stays], amounts[stays])
    plan = alloc.plan(**left)
    if not counting_cache:
        return plan.num_new_pages <= alloc.available()
    try:
        alloc.apply(plan)
    except sgalloc.OutOfPages:
        return False
    assert_laws(alloc)
    return True


@pytest.mark.parametrize(
    ("counting_cache", "into_cache"),
    [(True, False), (True, True), (False, False)],
    ids=["dropped", "kept in the cache", "dropped, without the cache"],
)
def test_against_brute_force_over_counts(counting_cache: bool, into_cache: bool) -> None:
    sizes = set()
    for seed in range(60):
        alloc, h, order, step = scene(seed)
        plan = alloc.plan(**step)
        with unchanged(alloc):
            found = choose_victims(alloc, h, plan, order, counting_cache=counting_cache)
        expected = next(
            (k for k in range(h.size) if goes_through(seed, k, counting_cache, into_cache)), None
        )
        assert found.fits is (expected is not None), seed
        count = h.size - 1 if expected is None else expected
        assert found.victims.tolist() == h[order][::-1][:count].tolist(), seed
        sizes.add((found.fits, min(count, 3)))
        assert (
            alloc.fits(plan, after_releasing=found.victims, counting_cache=counting_cache)
            is found.fits
        )
    assert {(True, 0), (True, 1), (True, 2)} <= sizes and any(not fits for fits, _ in sizes)


class TestRefusals:
    def test_bad_orders(self) -> None:
        alloc, h = full([4, 4, 4])
        plan = alloc.plan(decode=(h, 1))
        for order in ([0, 1], [0, 1, 1], [0, 1, 3], [1, 2, 3], [0, 1, 2, 3], [], [-1, 0, 1]):
            with unchanged(alloc), pytest.raises(ValueError, match="order"):
                choose_victims(alloc, h, plan, order)
        for order in ([0.0, 1.0, 2.0], "012", OnDevice(3), [None] * 3):
            with unchanged(alloc), pytest.raises(TypeError, match="order"):
                choose_victims(alloc, h, plan, order)

    def test_no_order_and_too_few_lengths(self) -> None:
        alloc, h = full([4, 4, 4])
        plan = alloc.plan(decode=(h, 1))
        for lens in ({}, {"output_lens": [1, 2, 3]}, {"prompt_lens": [1, 2, 3]}):
            with pytest.raises(ValueError, match="output_lens and prompt_lens"):
                choose_victims(alloc, h, plan, **lens)
        for output, prompts in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1], [1, 2, 3])):
            with unchanged(alloc), pytest.raises(ValueError):
                choose_victims(alloc, h, plan, output_lens=output, prompt_lens=prompts)
        with pytest.raises(TypeError, match="output_lens"):
            choose_victims(alloc, h, plan, output_lens=[1.5, 2, 3], prompt_lens=[1, 2, 3])

    def test_stale_plans_and_handles(self) -> None:
        alloc, h = full([4, 4, 4])
        plan = alloc.plan(decode=(h, 1))
        (gone,) = alloc.open()
        alloc.release(gone)
        with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
            choose_victims(alloc, h, plan, [0, 1, 2])
        plan = alloc.plan(decode=(h, 1))
        with unchanged(alloc), pytest.raises(sgalloc.StaleHandle):
            choose_victims(alloc, [*h, gone], plan, [0, 1, 2, 3])

    @pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
    def test_a_handle_twice_or_stale_wherever_it_stands(self, order: list[int]) -> None:
        alloc, h = full([4, 4, 4])
        (gone,) = alloc.open()
        alloc.release(gone)
        plan = alloc.plan(decode=(h, 1))
        for bad in ([h[0], h[0], h[1]], [gone, h[0], h[1]]):
            with unchanged(alloc), pytest.raises((sgalloc.StaleHandle, ValueError)):
                choose_victims(alloc, bad, plan, order)
