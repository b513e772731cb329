"""check() finds every structure that was damaged from outside, and says what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from host_support import Query, make, prompt

import sgalloc

PS = 4


class Sound(NamedTuple):
    """An allocator with pages and rows in every place, and the names of some of them."""

    alloc: sgalloc.KVAllocator
    a: int
    """Row of a request that owns four pages, C = 9."""
    b: int
    """Row of a request that shares two cached pages and owns one, C = 10."""
    own_a: list[int]
    own_b: int
    shared: list[int]
    cached: list[int]
    """Cached pages that nobody holds."""
    waiting: list[int]
    free: list[int]

    @property
    def ledger(self) -> Any:
        return self.alloc._ledger

    @property
    def pool(self) -> Any:
        return self.alloc._core.pool

    @property
    def tree(self) -> Any:
        return self.alloc._core.tree

    @property
    def entry(self) -> Any:
        return self.alloc._core.quarantine.entries[0]

    def node_of(self, page: int) -> Any:
        return next(node for node in self.tree.nodes() if page in node.pages)

    def set_page(self, row: int, number: int, page: int) -> None:
        self.ledger.pages[row, number] = page


def sound(debug: bool | None = None) -> Sound:
    alloc = make(24, PS, max_requests=6, row_width=41, prefix_cache=True, debug=debug)
    seeds = alloc.open(2)
    alloc.extend(seeds, [8, 12])
    alloc.release(seeds, tokens=[prompt(2, PS), prompt(3, PS, seed=1)])
    (a,) = alloc.open()
    (b,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, PS)))
    (gone,) = alloc.open()
    alloc.extend([a, b, gone], [9, 10, 7])
    alloc.reserve(a, 7)
    waiting = alloc.pages(gone).tolist()
    alloc.release(gone, after=Query())
    row_a, row_b = alloc.rows([a, b]).tolist()
    alloc.check(device=True)
    return Sound(
        alloc, row_a, row_b,
        alloc.pages(a, 0, 16).tolist(), int(alloc.pages(b)[2]),
        alloc.prefix.match(prompt(2, PS)).pages.tolist(),
        alloc.prefix.match(prompt(3, PS, seed=1)).pages.tolist(),
        waiting, alloc._core.pool.free_ids().tolist(),
    )  # fmt: skip


def assert_found(s: Sound, *naming: str, device: bool = False) -> None:
    with pytest.raises(sgalloc.LawViolation) as found:
        s.alloc.check(device=device)
    message = str(found.value)
    assert "\n" not in message
    for part in naming:
        assert re.search(rf"(?<![\w.-]){re.escape(part)}(?!\w)", message), f"{part!r}: {message!r}"


def test_the_sound_one_has_something_everywhere() -> None:
    s = sound()
    assert [len(s.own_a), len(s.shared), len(s.cached), len(s.waiting)] == [4, 2, 3, 2]
    assert len(s.free) == 24 - 4 - 1 - 2 - 3 - 2
    every = [*s.own_a, s.own_b, *s.shared, *s.cached, *s.waiting, *s.free]
    assert sorted(every) == list(range(1, 25))
    assert s.alloc.stats().rows.quarantined == 1


# -- two owners of one page ----------------------------------------------------------------------

CACHE, NOBODY, QUARANTINE = "the prefix cache", "nobody", "the quarantine"
# The damage; the page that is then in two places; and the two places, {a} and {b} for rows.
DOUBLE: dict[str, tuple[Callable[[Sound], Any], Callable[[Sound], int], tuple[str, str]]] = {
    "row and row": (
        lambda s: s.set_page(s.a, 1, s.own_b), lambda s: s.own_b, ("row {a}", "row {b}")
    ),
    "row and itself": (
        lambda s: s.set_page(s.a, 1, s.own_a[2]), lambda s: s.own_a[2], ("row {a}", "row {a}")
    ),
    "row and free": (
        lambda s: s.set_page(s.a, 1, s.free[0]), lambda s: s.free[0], ("row {a}", NOBODY)
    ),
    "row and cache": (
        lambda s: s.set_page(s.a, 1, s.cached[0]), lambda s: s.cached[0], ("row {a}", CACHE)
    ),
    "row and shared": (
        lambda s: s.set_page(s.a, 1, s.shared[0]), lambda s: s.shared[0], ("row {a}", CACHE)
    ),
    "row and quarantine": (
        lambda s: s.set_page(s.a, 1, s.waiting[0]), lambda s: s.waiting[0], ("row {a}", QUARANTINE)
    ),
    "stack and row": (
        lambda s: s.pool._stack.__setitem__(0, s.own_a[0]),
        lambda s: s.own_a[0],
        (NOBODY, "row {a}"),
    ),
    "stack and cache": (
        lambda s: s.pool._stack.__setitem__(0, s.cached[0]), lambda s: s.cached[0], (NOBODY, CACHE)
    ),
    "stack and quarantine": (
        lambda s: s.pool._stack.__setitem__(0, s.waiting[0]),
        lambda s: s.waiting[0],
        (NOBODY, QUARANTINE),
    ),
    "stack twice": (
        lambda s: s.pool._stack.__setitem__(0, s.pool._stack[1]),
        lambda s: int(s.pool._stack[1]),
        (NOBODY, NOBODY),
    ),
    "cache and row": (
        lambda s: s.node_of(s.cached[0]).pages.__setitem__(0, s.own_a[3]),
        lambda s: s.own_a[3],
        (CACHE, "row {a}"),
    ),
    "cache and free": (
        lambda s: s.node_of(s.cached[0]).pages.__setitem__(0, s.free[1]),
        lambda s: s.free[1],
        (CACHE, NOBODY),
    ),
    "quarantine and row": (
        lambda s: s.entry.what.ids.__setitem__(0, s.own_a[0]),
        lambda s: s.own_a[0],
        (QUARANTINE, "row {a}"),
    ),
    "quarantine twice": (
        lambda s: s.entry.what.ids.__setitem__(0, s.waiting[1]),
        lambda s: s.waiting[1],
        (QUARANTINE, QUARANTINE),
    ),
    "a stack that is one page too long": (
        lambda s: s.pool._stack.__setitem__(slice(s.pool.free, s.pool.free + 1), s.own_b)
        or setattr(s.pool, "free", s.pool.free + 1),
        lambda s: s.own_b,
        (NOBODY, "row {b}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DOUBLE)
def test_a_page_with_two_owners(kind: str) -> None:
    damage, page, owners = DOUBLE[kind]
    s = sound()
    named = page(s)
    damage(s)
    assert_found(s, f"page {named}", *(owner.format(a=s.a, b=s.b) for owner in owners))


# -- other damage to the pages -------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Sound], Any], Callable[[Sound], tuple[str, ...]]]] = {
    "a row with the padding page": (
        lambda s: s.set_page(s.a, 1, 0), lambda s: ("page 0", f"row {s.a}")
    ),
    "a row with a negative page": (
        lambda s: s.set_page(s.a, 3, -5), lambda s: ("page -5", f"row {s.a}")
    ),
    "a row with a page past the last": (
        lambda s: s.set_page(s.a, 0, 25), lambda s: ("page 25", f"row {s.a}")
    ),
    "a stack with a page past the last": (
        lambda s: s.pool._stack.__setitem__(0, 99), lambda s: ("page 99", NOBODY)
    ),
    "a cache with a page past the last": (
        lambda s: s.node_of(s.cached[0]).pages.__setitem__(0, 99), lambda s: ("page 99", CACHE)
    ),
    "a page that the stack lost": (
        lambda s: setattr(s.pool, "free", s.pool.free - 1),
        lambda s: (f"page {s.free[-1]}", "lost"),
    ),
    "a page that the quarantine lost": (
        lambda s: s.alloc._core.quarantine.entries.__setitem__(
            0, s.entry._replace(what=s.entry.what._replace(ids=s.entry.what.ids[1:]))
        ),
        lambda s: (f"page {s.waiting[0]}", "lost"),
    ),
    "a request that the ledger lost": (
        lambda s: s.ledger.handle.__setitem__(s.a, 0), lambda s: ()
    ),
    "a shared page exchanged for a free one": (
        lambda s: s.set_page(s.b, 1, s.free[0]), lambda s: (f"row {s.b}", str(s.free[0]))
    ),
    "a shared page exchanged for another cached one": (
        lambda s: s.set_page(s.b, 1, s.cached[0]), lambda s: (f"row {s.b}", str(s.cached[0]))
    ),
    "a shared page past the last": (
        lambda s: s.set_page(s.b, 0, 25), lambda s: (f"row {s.b}", "25")
    ),
    "a negative shared page": (lambda s: s.set_page(s.b, 0, -3), lambda s: (f"row {s.b}", "-3")),
    "two shared pages exchanged": (
        lambda s: s.ledger.pages.__setitem__((s.b, slice(0, 2)), s.shared[::-1]),
        lambda s: (f"row {s.b}",),
    ),
    "owned, but recorded with another row": (
        lambda s: s.pool.holder.__setitem__(s.own_a[1], s.b),
        lambda s: (f"page {s.own_a[1]}", f"row {s.a}", f"row {s.b}"),
    ),
    "owned, but recorded as free": (
        lambda s: s.pool.holder.__setitem__(s.own_b, 0),
        lambda s: (f"page {s.own_b}", f"row {s.b}", NOBODY),
    ),
    "owned, but recorded as cached": (
        lambda s: s.pool.holder.__setitem__(s.own_b, -1),
        lambda s: (f"page {s.own_b}", f"row {s.b}", CACHE),
    ),
    "free, but recorded with a row": (
        lambda s: s.pool.holder.__setitem__(s.free[2], s.a),
        lambda s: (f"page {s.free[2]}", NOBODY, f"row {s.a}"),
    ),
    "cached, but recorded as free": (
        lambda s: s.pool.holder.__setitem__(s.cached[0], 0),
        lambda s: (f"page {s.cached[0]}", CACHE, NOBODY),
    ),
    "waiting, but recorded as free": (
        lambda s: s.pool.holder.__setitem__(s.waiting[0], 0),
        lambda s: (f"page {s.waiting[0]}", QUARANTINE, NOBODY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_page_in_the_wrong_place(kind: str) -> None:
    damage, naming = WRONG[kind]
    s = sound()
    damage(s)
    assert_found(s, *naming(s))


COLUMNS: dict[str, tuple[str, Callable[[int], int], str]] = {
    "C below zero": ("committed", lambda c: -1, "C=-1"),
    "C past A": ("committed", lambda c: 17, "C=17"),
    "A inside a page": ("allocated", lambda a: a + 1, "A=17"),
    "A a page further": ("allocated", lambda a: a + PS, ""),
    "A a page short": ("allocated", lambda a: a - PS, ""),
    "A past the row": ("allocated", lambda a: 44, "A=44"),
    "A negative": ("allocated", lambda a: -PS, "A=-4"),
    "A zero": ("allocated", lambda a: 0, "A=0"),
    "a page shared that is its own": ("shared", lambda n: n + 1, ""),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_damaged_column(kind: str) -> None:
    column, change, naming = COLUMNS[kind]
    s = sound()
    values = getattr(s.ledger, column)
    values[s.a] = change(int(values[s.a]))
    assert_found(s, *((f"row {s.a}", naming) if naming else ()))


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_a_wrong_number_of_shared_pages(shared: int) -> None:
    s = sound()
    s.ledger.shared[s.b] = shared
    assert_found(s, f"row {s.b}")


# -- the prefix cache and the counts -------------------------------------------------------------

COUNTS: dict[str, Callable[[Sound], Any]] = {
    "cached pages, one more": lambda s: setattr(s.tree, "cached", s.tree.cached + 1),
    "cached pages, one less": lambda s: setattr(s.tree, "cached", s.tree.cached - 1),
    "evictable pages, one more": lambda s: setattr(s.tree, "evictable", s.tree.evictable + 1),
    "evictable pages, one less": lambda s: setattr(s.tree, "evictable", s.tree.evictable - 1),
    "a lock nobody holds": lambda s: setattr(s.node_of(s.cached[0]), "locks", 1),
    "a lock gone": lambda s: setattr(s.node_of(s.shared[0]), "locks", 0),
    "a lock too many": lambda s: setattr(s.node_of(s.shared[0]), "locks", 2),
    "a node cut off": lambda s: s.tree._roots.clear(),
    "a hold forgotten": lambda s: s.alloc.prefix.holds.clear(),
    "pages said to wait": lambda s: setattr(s.pool, "waiting", s.pool.waiting + 1),
    "a free row forgotten": lambda s: setattr(s.ledger, "free_rows", s.ledger.free_rows - 1),
    "a free row too many": lambda s: setattr(s.ledger, "free_rows", s.ledger.free_rows + 1),
    "rows said to wait": lambda s: setattr(s.ledger, "waiting_rows", 0),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_wrong_count(kind: str) -> None:
    s = sound()
    COUNTS[kind](s)
    assert_found(s)


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["open", "waiting", "twice"])
def test_a_row_in_two_places(row: str) -> None:
    s = sound()
    stack = s.ledger._row_stack
    stack[0] = {"open": s.a, "waiting": s.entry.what.rows[0], "twice": stack[1]}[row]
    assert_found(s, f"row {stack[0]}")


@pytest.mark.parametrize("row", [0, -1, 7, 99])
def test_a_free_row_that_does_not_exist(row: int) -> None:
    s = sound()
    s.ledger._row_stack[0] = row
    assert_found(s)


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "inside", "last below A", "shared", "padding row"])
def test_a_damaged_table(where: str) -> None:
    s = sound()
    row, column = {
        "first": (s.a, 0),
        "inside": (s.a, 6),
        "last below A": (s.a, 15),
        "shared": (s.b, 7),
        "padding row": (0, 40),
    }[where]
    was = int(s.alloc.req_to_token[row, column])
    s.alloc.req_to_token[row, column] = was + 1
    s.alloc.check()
    assert_found(s, str(row), str(column), str(was), str(was + 1), device=True)


def test_entries_from_a_on_are_outside_the_law() -> None:
    s = sound(debug=False)
    s.alloc.req_to_token[s.a, 16:] = -1
    s.alloc.req_to_token[s.b, 12:] = 999
    s.alloc.req_to_token[3:] = np.arange(41)
    s.alloc.check(device=True)


def test_two_pages_exchanged_show_on_the_device() -> None:
    s = sound()
    s.ledger.pages[s.a, :2] = s.ledger.pages[s.a, 1::-1].copy()
    s.alloc.check()  # each page still has one owner
    assert_found(s, str(s.a), "0", str(s.own_a[0] * PS), str(s.own_a[1] * PS), device=True)
