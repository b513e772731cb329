"""check() finds damage to what is pinned, and names the page or the row."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transfer.transfer_support import World, private, world

import sgalloc
from sgalloc.pages import PINNED, PagePool


def pin(w: World, handle: int) -> Any:
    return w.alloc._core.pins.by_handle[handle]


def set_holder(w: World, page: int, to: int) -> None:
    w.alloc._core.pool.holder[page] = to


def set_mark(w: World, handle: int, to: bool) -> None:
    w.alloc._ledger.receiving[w.alloc.rows(handle)[0]] = to


def add(target: Any, name: str, number: int) -> None:
    setattr(target, name, getattr(target, name) + number)


def lose_pin(w: World, handle: int) -> None:
    del w.alloc._core.pins.by_handle[handle]


# The damage, and what the message has to name.
DAMAGE: dict[str, tuple[Callable[[World], Any], Callable[[World], str]]] = {
    "a pinned page recorded as the row's": (
        lambda w: set_holder(w, private(w.alloc, w.bare)[0], int(w.alloc.rows(w.bare)[0])),
        lambda w: f"page {private(w.alloc, w.bare)[0]} of group 'full' is with a remote writer",
    ),
    "an owned page recorded as pinned": (
        lambda w: set_holder(w, private(w.alloc, w.live)[1], PINNED),
        lambda w: f"page {private(w.alloc, w.live)[1]} of group 'full' is with row",
    ),
    "a pinned page recorded as free": (
        lambda w: set_holder(w, pin(w, w.aborted).pages[0], 0),
        lambda w: f"page {pin(w, w.aborted).pages[0]} .*remote writer.*nobody",
    ),
    "too many pinned counted": (
        lambda w: add(w.alloc._core.pool, "pinned", 1), lambda w: "counts 8 pinned pages, but 7"
    ),
    "too few pinned counted": (
        lambda w: add(w.alloc._core.pool, "pinned", -1), lambda w: "counts 6 pinned pages, but 7"
    ),
    "the pins of an aborted request lost": (
        lambda w: lose_pin(w, w.aborted), lambda w: "is lost: nobody has it"
    ),
    "the pins of a receiving request lost": (
        lambda w: lose_pin(w, w.shared),
        lambda w: f"row {w.alloc.rows(w.shared)[0]} is marked as being received, but has no",
    ),
    "a mark lost": (
        lambda w: set_mark(w, w.bare, False), lambda w: f"row {w.alloc.rows(w.bare)[0]}"
    ),
    "a mark too many": (
        lambda w: set_mark(w, w.live, True), lambda w: "remote writer, but recorded with row"
    ),
    "rows counted wrongly": (
        lambda w: add(w.alloc._ledger, "receiving_rows", 1), lambda w: "3 rows .* but 2 are marked"
    ),
    "a page twice among the pins": (
        lambda w: setattr(pin(w, w.aborted), "pages", np.repeat(pin(w, w.aborted).pages[:1], 2)),
        lambda w: f"page {pin(w, w.aborted).pages[0]} .*by a remote writer and by a remote writer",
    ),
    "the pins name another page": (
        lambda w: setattr(pin(w, w.bare), "pages", pin(w, w.bare).pages[::-1]),
        lambda w: f"row {w.alloc.rows(w.bare)[0]} is received into pages",
    ),
    "the pins name another handle": (
        lambda w: w.alloc._core.pins.by_handle.update({7: pin(w, w.bare)}),
        lambda w: f"row {w.alloc.rows(w.bare)[0]} is pinned for handle 7",
    ),
    "an aborted row that is free, too": (
        lambda w: w.alloc._ledger.return_rows(np.array([pin(w, w.aborted).row])),
        lambda w: "rows are counted as waiting",
    ),
    "an aborted row named twice": (
        lambda w: setattr(pin(w, w.aborted), "row", int(w.alloc.rows(w.live)[0])),
        lambda w: "row .* stands",
    ),
    "a lock that nobody gives back": (
        lambda w: pin(w, w.aborted).nodes.append(w.alloc._core.tree.nodes()[0]),
        lambda w: "cached page .* is locked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(kind: str) -> None:
    w = world()
    w.alloc.check(device=True)
    damage, naming = DAMAGE[kind]
    damage(w)
    with pytest.raises(sgalloc.LawViolation) as found:
        w.alloc.check()
    assert re.search(naming(w), str(found.value)), str(found.value)
    assert "\n" not in str(found.value)


def test_only_a_holder_can_pin_and_only_pinned_pages_are_unpinned() -> None:
    pool = PagePool(6)
    pool.take(pool.peek(4), 1)
    ids = np.array([1, 2], np.int32)
    pool.pin(ids, 1)
    for call in (
        lambda: pool.pin(ids, 1),
        lambda: pool.give(ids, 1),
        lambda: pool.unpin(np.array([3], np.int32), 1),
        lambda: pool.unpin(np.array([2, 3], np.int32), 1),
        lambda: pool.unpin(np.array([2, 2], np.int32), 1),
        lambda: pool.unpin(np.array([7], np.int32), 1),
    ):
        with pytest.raises(sgalloc.LawViolation):
            call()
        assert (pool.pinned, pool.free) == (2, 2)
    pool.unpin(ids[:1], 3)
    assert (pool.pinned, pool.free, pool.holder[1], pool.holder[2]) == (1, 2, 3, PINNED)
