"""The walk is judged: faults on either side that it has to report. A comparison has no sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

import sgalloc
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.reference import Node, Reference, Waiting
from sgalloc.fuzz.walk import run_world

CONFIG = Config(num_pages=8, page_size=2, max_requests=4, row_width=12, prefix_cache=True)
WORLDS = range(12)
GIVE_BACK, MAKE_ROOM, EVICT_ONE = Reference.give_back, Reference.make_room, Reference.evict_one
ENTER, PART_WITH, ROOT = Reference.enter, Reference.part_with, Reference.root
LOOSE = Reference.loose
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


def fits_off_by_one(honest: Honest, self: Any, what: Any, gone: Any, counting: bool) -> bool:
    if not isinstance(what, sgalloc.Plan) or gone:
        return bool(honest(self, what, gone, counting))
    return bool(what.need["full"] <= self.available("full", counting_cache=counting) + 1)


def trim_keeps_a_page(honest: Honest, self: Any, x: Any, lengths: Any, *how: Any) -> None:
    held = self.allocated(x)
    honest(self, x, lengths, *how)
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


def last_page_is_not_cached(honest: Honest, self: Any, x: Any, **how: Any) -> None:
    if how.get("tokens") is not None:
        how["tokens"] = [one and one[: -self.page_size] for one in how["tokens"]]
    honest(self, x, **how)


def namespaces_by_their_text(honest: Honest, self: Any, count: int, namespace: Any = None) -> Any:
    return honest(self, count, None if namespace is None else str(namespace))


def a_restored_one_forgets_a_deadline(honest: Honest, self: Any, *args: Any, **how: Any) -> Any:
    data = honest(self, *args, **how)
    for pin in self._core.pins.by_handle.values():
        pin.deadline = None
    return data


def gives_back_twice(self: Reference, waiting: Waiting) -> None:
    GIVE_BACK(self, waiting)
    for page in waiting.pages[:1]:
        self.pools["full"].out.discard(page + 1)


def keeps_a_lock(self: Reference, waiting: Waiting) -> None:
    waiting.unlock = waiting.unlock[:-1]
    GIVE_BACK(self, waiting)


def evicts_one_too_many(self: Reference, net: dict[str, int]) -> None:
    before = self.pools["full"].evicted
    MAKE_ROOM(self, net)
    if self.pools["full"].evicted > before and self.loose():
        self.evict_one()


def evicts_before_it_refuses(self: Reference, net: dict[str, int]) -> None:
    while net["full"] > self.pools["full"].free and self.loose():
        self.evict_one()
    MAKE_ROOM(self, net)


def forgets_who_was_used_last(self: Reference) -> None:
    for node in self.nodes():
        node.last_use = 0
    EVICT_ONE(self)


def shared_pages_are_not_locked(self: Reference, *_: Any) -> list[Node]:
    return [node for node in self.nodes() if not node.unsettled]


def children_hold_no_parents(
    self: Reference, unlocked: Sequence[Node] = (), locked: Sequence[Node] = ()
) -> list[Node]:
    return [n for n in self.nodes() if not n.unsettled and n.locks == sum(o is n for o in unlocked)]


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
    "last_page_is_not_cached": around("release", last_page_is_not_cached),
    "namespaces_by_their_text": around("open", namespaces_by_their_text),
    "a_snapshot_changes_something": around("snapshot", a_restored_one_forgets_a_deadline),
    "namespaces_all_the_same": inside(root=lambda self, namespace: ROOT(self, None)),
    "gives_back_twice": inside(give_back=gives_back_twice),
    "keeps_a_lock": inside(give_back=keeps_a_lock),
    "evicts_one_too_many": inside(make_room=evicts_one_too_many),
    "evicts_before_it_refuses": inside(make_room=evicts_before_it_refuses),
    "forgets_who_was_used_last": inside(evict_one=forgets_who_was_used_last),
    "shared_pages_are_not_locked": inside(loose=shared_pages_are_not_locked),
    "children_hold_no_parents": inside(loose=children_hold_no_parents),
    "duplicates_are_kept": inside(enter=duplicates_are_kept),
    "new_nodes_do_not_wait": inside(part_with=new_nodes_do_not_wait),
}


def difference(number: int) -> str:
    _, failure = run_world(0, number, config=CONFIG, calls=400)
    return "" if failure is None else failure.message


def test_without_a_fault_the_same_walks_agree() -> None:
    assert [difference(number) for number in WORLDS] == [""] * len(WORLDS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name: str) -> None:
    with FAULTS[name]:
        assert any(difference(number) for number in WORLDS)
