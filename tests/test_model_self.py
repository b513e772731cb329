"""The judge is judged: known answers for the reference, and planted faults that a walk reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from model.moves import NAMESPACES
from model.pair import Config, Disagreement
from model.reference import Node, Reference, Refused, Waiting
from model.walk import walk

import sgalloc


class Gate:
    def __init__(self) -> None:
        self.is_open = False

    def query(self) -> bool:
        return self.is_open


def extended(ref: Reference, length: int, namespace: Any = None) -> int:
    [name] = ref.open(1, namespace)
    ref.grow(extend=([name], [length]))
    return name


def cached(ref: Reference, tokens: Sequence[int], namespace: Any = None) -> None:
    ref.release([extended(ref, len(tokens), namespace)], [tokens])


def refused(call: Callable[[], Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def test_reserve_and_commit_strand_no_tail() -> None:
    ref = Reference(10, 16, 2, 256)
    name = extended(ref, 30)
    assert (ref.allocated(name), ref.available()) == (32, 8)
    states = []
    for accepted in (1, 4, 2, 3, 1):
        ref.grow(reserve=([name], [8]))
        ref.commit([name], [accepted])
        states.append((ref.requests[name].committed, ref.allocated(name), ref.available()))
    assert states == [(31, 48, 7), (35, 48, 7), (37, 48, 7), (40, 48, 7), (41, 48, 7)]
    ref.grow(reserve=([name], [8]))
    assert (ref.allocated(name), ref.available()) == (64, 6)
    ref.release([name])
    assert ref.available() == 10
    ref.check()


def test_a_row_too_narrow_is_refused_exactly_at_its_width() -> None:
    ref = Reference(200, 1, 1, 85)
    name = extended(ref, 51)
    ref.grow(reserve=([name], [34]))
    assert ref.available() == 200 - 85
    ref.commit([name], [1])
    error = refused(lambda: ref.grow(reserve=([name], [34])))
    assert (error.kind, error.numbers) == ("narrow", {"need": 86, "width": 85})
    assert ref.available() == 200 - 85


def test_second_release_and_duplicates_are_refused_as_a_whole() -> None:
    ref = Reference(8, 16, 3, 128)
    first, second = extended(ref, 20), extended(ref, 20)
    ref.release([first])
    assert refused(lambda: ref.release([second, first])).kind == "stale"
    assert refused(lambda: ref.release([second, second])).kind == "value"
    assert ref.available() == 6


def test_admission_counts_pages_per_request() -> None:
    ref = Reference(1, 128, 4, 512)
    assert [ref.fits([2, 2]), ref.fits([2]), ref.fits([128]), ref.fits([129])] == [0, 1, 1, 0]
    assert not Reference(9, 16, 2, 64).fits([0, 0, 0])
    assert not Reference(9, 16, 2, 64).fits([65])


def test_a_refused_batch_changes_nothing_and_an_exact_fit_goes_through() -> None:
    ref = Reference(3, 16, 4, 64)
    first, second = extended(ref, 16), extended(ref, 16)
    third, fourth = ref.open(2)
    error = refused(lambda: ref.grow(extend=([third, fourth], [10, 17])))
    assert (error.kind, error.numbers) == ("pages", {"need": 3, "free": 1, "cached": 0})
    assert ref.allocated(third) == ref.allocated(fourth) == 0
    ref.grow(decode=([first], [1]))
    assert refused(lambda: ref.grow(decode=([second], [1]))).kind == "pages"
    ref.grow(decode=([first], [15]))
    assert ref.available() == 0


def test_eviction_is_oldest_leaf_first_by_need_and_ties_go_by_insertion() -> None:
    ref = Reference(5, 1, 3, 8, prefix_cache=True)
    cached(ref, [1, 2])
    cached(ref, [3, 4])
    ref.match([1])  # uses [1] alone: [1, 2]'s leaf stays the oldest
    extended(ref, 2)
    assert ref.evicted == 1
    assert len(ref.match([1, 2]).nodes) == 1
    ref.check()
    ref.match([3, 4])
    ref.match([1])
    extended(ref, 1)  # of those used longest ago only [3, 4] is a leaf
    assert [len(ref.match(tokens).nodes) for tokens in ([3, 4], [1])] == [1, 1]


def test_eviction_breaks_ties_by_insertion() -> None:
    ref = Reference(2, 1, 3, 8, prefix_cache=True)
    ref.release([extended(ref, 1), extended(ref, 1)], [[5], [4]])
    extended(ref, 1)
    assert [len(ref.match(tokens).nodes) for tokens in ([5], [4])] == [0, 1]


def test_what_is_locked_or_unsettled_neither_goes_nor_counts() -> None:
    ref = Reference(4, 2, 3, 8, prefix_cache=True)
    gate = Gate()
    name = extended(ref, 4)
    ref.release([name], [[1, 1, 1, 1]], gate)
    assert (ref.available(), ref.available(True)) == (2, 2)
    match = ref.match([1, 1, 1, 1])
    assert len(match.nodes) == 2
    assert len(ref.free_rows) == 2
    gate.is_open = True
    assert ref.available(True) == 2  # nobody polled yet
    ref.settle()
    assert (ref.available(True), len(ref.free_rows)) == (4, 3)
    [name] = ref.open_with_prefix([match])
    assert ref.available(True) == 2
    assert ref.fits([8], after_releasing=[name])
    assert not ref.fits([8], after_releasing=[name], counting_cache=False)
    assert refused(lambda: extended(ref, 6)).numbers == {"need": 3, "free": 2, "cached": 0}


def test_an_ancestor_of_what_must_stay_does_not_count() -> None:
    ref = Reference(4, 1, 3, 8, prefix_cache=True)
    gate = Gate()
    cached(ref, [1, 2, 3])
    [name] = ref.open_with_prefix([ref.match([1, 2, 3])])
    ref.trim([name], [1], gate)
    ref.release([name])
    assert ref.available(True) == 1
    gate.is_open = True
    ref.settle()
    assert ref.available(True) == 4


def test_a_duplicate_is_freed_and_a_published_prompt_is_shared() -> None:
    ref = Reference(6, 2, 3, 8, prefix_cache=True)
    first, second = extended(ref, 4), extended(ref, 5)
    ref.publish([first], [[1, 1, 2, 2]])
    assert ref.counts()["locked"] == 2
    ref.publish([second], [[1, 1, 2, 2, 3]])
    assert ref.requests[first].pages == ref.requests[second].pages[:2]
    assert ref.available() == 3
    assert refused(lambda: ref.trim([second], [3])).numbers == {"edge": 2}
    ref.release([first])
    assert refused(lambda: ref.release([second], [[2, 2]])).kind == "value"
    ref.release([second])
    assert (ref.available(), ref.available(True)) == (4, 6)
    ref.check()


def test_a_match_that_was_evicted_is_refused() -> None:
    ref = Reference(2, 1, 3, 8, prefix_cache=True)
    cached(ref, [1, 1])
    match = ref.match([1, 1])
    ref.release([extended(ref, 1)])
    assert refused(lambda: ref.open_with_prefix([match])).kind == "plan"
    assert len(ref.free_rows) == 3


def test_namespaces_never_share() -> None:
    ref = Reference(6, 1, 3, 8, prefix_cache=True)
    for namespace in NAMESPACES:
        assert ref.match([1], namespace).nodes == []
        cached(ref, [1], namespace)
    assert ref.counts()["cached"] == len(NAMESPACES)


def test_a_plan_ages_with_every_change_and_with_nothing_else() -> None:
    ref = Reference(4, 1, 3, 8, prefix_cache=True)
    name = extended(ref, 1)
    gate = Gate()
    ref.release([extended(ref, 1)], None, gate)
    plan = ref.plan(reserve=([name], [1]))
    ref.match([1])
    gate.is_open = True
    ref.settle()
    refused(lambda: ref.commit([name], [9]))
    ref.apply(plan)
    assert refused(lambda: ref.apply(plan)).kind == "plan"


def test_the_reference_proves_its_own_laws() -> None:
    ref = Reference(3, 1, 2, 8)
    name = extended(ref, 2)
    ref.requests[name].pages[0] = ref.requests[name].pages[1]
    with pytest.raises(AssertionError, match="partition"):
        ref.check()
    ref = Reference(3, 1, 2, 8, prefix_cache=True)
    cached(ref, [1])
    ref.nodes()[0].locks = 1
    with pytest.raises(AssertionError, match="locks"):
        ref.check()


# Planted faults: in the allocator where a wrapper around a public verb can plant one, in the
# reference (its own laws switched off) where it takes a hand inside. A comparison has no sides.

CONFIG = Config(num_pages=8, page_size=2, max_requests=4, row_width=12, prefix_cache=True)
SEEDS, STEPS = range(10), 250
GIVE_BACK, MAKE_ROOM, EVICT_ONE = Reference.give_back, Reference.make_room, Reference.evict_one
ENTER, PART_WITH, ROOT = Reference.enter, Reference.part_with, Reference.root
Honest = Callable[..., Any]


def around(verb: str, fault: Callable[..., Any]) -> Any:
    """Replace a verb of the allocator by `fault(honest, self, *args, **kwargs)`."""
    honest = getattr(sgalloc.KVAllocator, verb)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fault(honest, self, *args, **kwargs)

    return mock.patch.object(sgalloc.KVAllocator, verb, faulty)


def inside(**faults: Any) -> Any:
    """Replace methods of the reference, and its own laws by nothing."""
    return mock.patch.multiple(Reference, check=lambda self: None, **faults)


def fits_off_by_one(honest: Honest, self: Any, what: Any, **how: Any) -> bool:
    if not isinstance(what, sgalloc.Plan) or "after_releasing" in how:
        return bool(honest(self, what, **how))
    counting = how.get("counting_cache", True)
    return bool(what.need["full"] <= self.available("full", counting_cache=counting) + 1)


def trim_keeps_a_page(honest: Honest, self: Any, x: Any, lengths: Any, **how: Any) -> None:
    held = self.allocated(x)
    honest(self, x, lengths, **how)
    if held.size == 1 and held[0] > self.allocated(x)[0]:
        self.reserve(x, int(self.allocated(x)[0] - self.committed(x)[0]) + 1)


def refusal_keeps_a_row(honest: Honest, self: Any, *args: Any, **how: Any) -> Any:
    try:
        return honest(self, *args, **how)
    except sgalloc.OutOfPages:
        self.open(min(1, self.stats().rows.free))
        raise


def refusal_moves_the_extent(honest: Honest, self: Any, x: Any, *args: Any, **how: Any) -> Any:
    try:
        return honest(self, x, *args, **how)
    except sgalloc.OutOfPages:
        self.trim(x, self.committed(x))
        raise


def stale_plan_goes_through(honest: Honest, self: Any, plan: Any, **how: Any) -> Any:
    try:
        return honest(self, plan, **how)
    except sgalloc.StalePlan:
        return plan


def table_entry_is_off(honest: Honest, self: Any, x: Any, *args: Any, **how: Any) -> Any:
    plan = honest(self, x, *args, **how)
    for row, extent in zip(self.rows(x), self.allocated(x), strict=True):
        self.req_to_token[row, max(extent - 1, 0)] += 1
    return plan


def out_is_shifted(honest: Honest, self: Any, *args: Any, **how: Any) -> Any:
    plan = honest(self, *args, **how)
    if how.get("out") is not None:
        how["out"] += 1
    return plan


def nothing_waits(honest: Honest, self: Any, *args: Any, **how: Any) -> Any:
    return honest(self, *args, **{**how, "after": None})


def last_page_is_not_cached(honest: Honest, self: Any, x: Any, **how: Any) -> None:
    if how.get("tokens") is not None:
        how["tokens"] = [one[: -self.page_size] for one in how["tokens"]]
    honest(self, x, **how)


def namespaces_by_their_text(honest: Honest, self: Any, count: int, namespace: Any = None) -> Any:
    return honest(self, count, None if namespace is None else str(namespace))


def gives_back_twice(self: Reference, waiting: Waiting) -> None:
    GIVE_BACK(self, waiting)
    self.free += waiting.pages[:1]


def keeps_a_lock(self: Reference, waiting: Waiting) -> None:
    waiting.unlock = waiting.unlock[:-1]
    GIVE_BACK(self, waiting)


def evicts_one_too_many(self: Reference, need: int) -> None:
    before = self.evicted
    MAKE_ROOM(self, need)
    if self.evicted > before and self.evictable():
        self.evict_one()


def evicts_before_it_refuses(self: Reference, need: int) -> None:
    while need > len(self.free) and self.evictable():
        self.evict_one()
    MAKE_ROOM(self, need)


def forgets_who_was_used_last(self: Reference) -> None:
    for node in self.nodes():
        node.last_use = 0
    EVICT_ONE(self)


def shared_pages_are_not_locked(self: Reference, node: Node, unlocked: Sequence[Node] = ()) -> bool:
    return not node.unsettled


def children_hold_no_parents(self: Reference, node: Node, unlocked: Sequence[Node] = ()) -> bool:
    return not node.unsettled and node.locks == sum(other is node for other in unlocked)


def duplicates_are_kept(self: Reference, *args: Any) -> Any:
    path, _, fresh = ENTER(self, *args)
    return path, [], fresh


def new_nodes_do_not_wait(self: Reference, waiting: Waiting) -> None:
    waiting.settle = []
    PART_WITH(self, waiting)


FAULTS = {
    "fits_off_by_one": around("fits", fits_off_by_one),
    "trim_keeps_a_page": around("trim", trim_keeps_a_page),
    "refusal_keeps_a_row": around("extend", refusal_keeps_a_row),
    "refusal_moves_the_extent": around("reserve", refusal_moves_the_extent),
    "stale_plan_goes_through": around("apply", stale_plan_goes_through),
    "table_entry_is_off": around("reserve", table_entry_is_off),
    "out_is_shifted": around("apply", out_is_shifted),
    "released_pages_do_not_wait": around("release", nothing_waits),
    "trimmed_pages_do_not_wait": around("trim", nothing_waits),
    "last_page_is_not_cached": around("release", last_page_is_not_cached),
    "namespaces_by_their_text": around("open", namespaces_by_their_text),
    "namespaces_all_the_same": inside(root=lambda self, namespace: ROOT(self, None)),
    "gives_back_twice": inside(give_back=gives_back_twice),
    "keeps_a_lock": inside(give_back=keeps_a_lock),
    "evicts_one_too_many": inside(make_room=evicts_one_too_many),
    "evicts_before_it_refuses": inside(make_room=evicts_before_it_refuses),
    "forgets_who_was_used_last": inside(evict_one=forgets_who_was_used_last),
    "shared_pages_are_not_locked": inside(can_go=shared_pages_are_not_locked),
    "children_hold_no_parents": inside(can_go=children_hold_no_parents),
    "duplicates_are_kept": inside(enter=duplicates_are_kept),
    "new_nodes_do_not_wait": inside(part_with=new_nodes_do_not_wait),
}


def difference(seed: int) -> str:
    try:
        walk(seed, STEPS, CONFIG)
    except Disagreement as reported:
        return str(reported)
    return ""


def test_without_a_fault_the_same_walks_agree() -> None:
    assert [difference(seed) for seed in SEEDS] == [""] * len(SEEDS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(name: str) -> None:
    with FAULTS[name]:
        assert any(difference(seed) for seed in SEEDS)
