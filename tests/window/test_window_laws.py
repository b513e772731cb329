"""The law checkers find planted faults of the window group, and name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from host_support import Query, fingerprint, prompt
from window.support import make

import sgalloc


class World(NamedTuple):
    alloc: sgalloc.KVAllocator
    side: Any
    first: int
    second: int
    shared: int


def world() -> World:
    """Rows 1 and 2 hold pages, row 3 shares two cached ones; some wait, some are evicted."""
    alloc = make(40, 4, 4, 30, 6, prefix_cache=True)
    first, second = alloc.open(2)
    seed = alloc.open(1)
    alloc.extend(seed, 12)
    alloc.release(seed, tokens=[prompt(3, 4)])
    (shared,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, 4)))
    alloc.extend([first, second, shared], [24, 18, 13])
    alloc.evict_window(first, upto=12)
    alloc.trim(second, 12, after=Query())
    rows = [int(alloc.rows(handle)[0]) for handle in (first, second, shared)]
    alloc.check(device=True)
    return World(alloc, alloc._core.side, *rows)


def two_rows(w: World) -> None:
    w.side.pages[w.second, 0] = w.side.pages[w.first, 4]


def twice_in_a_row(w: World) -> None:
    w.side.pages[w.first, 4] = w.side.pages[w.first, 5]


def owned_and_free(w: World) -> None:
    w.side.pages[w.first, 4] = w.side.pool.free_ids()[0]


def owned_and_cached(w: World) -> None:
    w.side.pages[w.first, 4] = w.side.pages[w.shared, 0]


def lost_by_its_row(w: World) -> None:
    w.side.first[w.first] += 1


def lost_by_the_pool(w: World) -> None:
    w.side.pool.free -= 1


def lost_by_the_quarantine(w: World) -> None:
    (entry,) = w.alloc._core.quarantine.entries
    w.alloc._core.quarantine.entries = [
        entry._replace(what=entry.what._replace(side_ids=entry.what.side_ids[1:]))
    ]


def no_such_page(w: World) -> None:
    w.side.pages[w.first, 4] = 31


def recorded_with_another(w: World) -> None:
    w.side.pool.holder[w.side.pages[w.first, 4]] = w.second


def waiting_miscounted(w: World) -> None:
    w.side.pool.waiting += 1


def frontier_past_the_end(w: World) -> None:
    w.side.first[w.first] = 7


def frontier_below_zero(w: World) -> None:
    w.side.first[w.second] = -1


def past_the_extent(w: World) -> None:
    w.side.stop[w.second] += 1
    w.side.pages[w.second, 3] = w.side.pool.peek(1)[0]
    w.side.pool.take(w.side.pool.peek(1), w.second)


def short_of_the_extent(w: World) -> None:
    w.side.pool.give(w.side.pages[w.first, 4:6].copy(), w.first)
    w.side.stop[w.first] -= 2


def one_short_of_the_extent(w: World) -> None:
    w.side.pool.give(w.side.pages[w.first, 5:6].copy(), w.first)
    w.side.stop[w.first] -= 1


def a_cut_that_is_none(w: World) -> None:
    w.side.cut_rows.add(w.first)


def a_cut_that_is_forgotten(w: World) -> None:
    handle = int(w.alloc._core.ledger.handle[w.first])
    w.alloc.trim(handle, 9)
    w.alloc.check(device=True)
    w.side.cut_rows.clear()


def another_next_move(w: World) -> None:
    w.side.due[w.second] += 1


def reads_another_shared_page(w: World) -> None:
    w.side.pages[w.shared, 1] = w.side.pages[w.shared, 0]


def cache_lost_a_page(w: World) -> None:
    node = next(node for node in w.alloc._core.tree.nodes() if node.live)
    node.sides[0] = 0


def cache_miscounts(w: World) -> None:
    w.alloc._core.tree.side_evictable += 1


def cached_twice(w: World) -> None:
    nodes = [node for node in w.alloc._core.tree.nodes() if node.live]
    nodes[0].sides[-1] = nodes[1].sides[0]


ON_HOST: dict[str, tuple[Callable[[World], None], str]] = {
    "two rows": (two_rows, r"page \d+ of group 'window' is held by row \d and by row \d"),
    "twice in a row": (twice_in_a_row, "group 'window' is held by row 1 and by row 1"),
    "owned and free": (owned_and_free, "group 'window' is held by nobody .* and by row 1"),
    "owned and cached": (owned_and_cached, "group 'window' is held by row 1 and by the prefix"),
    "lost by its row": (lost_by_its_row, "group 'window' is lost"),
    "lost by the pool": (lost_by_the_pool, "group 'window' is lost"),
    "lost by the quarantine": (lost_by_the_quarantine, "group 'window' is lost"),
    "no such page": (no_such_page, r"page 31 does not exist \(1..30\), but row 1"),
    "recorded with another": (recorded_with_another, "is with row 1, but recorded with row 2"),
    "waiting miscounted": (waiting_miscounted, "group 'window' counts 3 waiting"),
    "frontier past the end": (frontier_past_the_end, "group .window. is lost"),
    "frontier below zero": (frontier_below_zero, "row 2 breaks '0 <= frontier"),
    "past the extent": (past_the_extent, "row 2 breaks 'window pages lie below A'"),
    "short of the extent": (short_of_the_extent, "row 1 breaks 'window pages reach to A'"),
    "one short of the extent": (one_short_of_the_extent, "row 1 breaks 'window pages reach to A'"),
    "a cut that is none": (a_cut_that_is_none, "row 1 breaks 'a row has a cut page that is said"),
    "a cut that is forgotten": (a_cut_that_is_forgotten, "row 1 breaks 'window pages reach to A'"),
    "another next move": (another_next_move, "row 2 breaks 'the next move of the frontier"),
    "reads another shared page": (reads_another_shared_page, r"row \d reads window page"),
    "cache lost a page": (cache_lost_a_page, "is lost"),
    "cache miscounts": (cache_miscounts, "prefix cache counts"),
    "cached twice": (cached_twice, "by the prefix cache and by the prefix cache"),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_a_fault_on_the_host_is_found_and_named(name: str) -> None:
    plant, message = ON_HOST[name]
    w = world()
    plant(w)
    before = fingerprint(w.alloc) if "below" not in name and "past the end" not in name else None
    with pytest.raises(sgalloc.LawViolation, match=message):
        w.alloc.check()
    if before is not None:
        assert fingerprint(w.alloc) == before, "looking changes nothing"


def entry_of_a_row(w: World) -> None:
    w.alloc.window_table[w.first, 13] += 1


def entry_below_the_frontier(w: World) -> None:
    w.alloc.window_table[w.first, 3] = 9


def entry_of_the_padding_row(w: World) -> None:
    w.alloc.window_table[0, 5] = 1


def entry_of_a_shared_page(w: World) -> None:
    w.alloc.window_table[w.shared, 0] = 0


def map_of_an_owned_page(w: World) -> None:
    page = w.alloc._core.ledger.pages[w.first, 5]
    w.alloc.full_to_window[page * 4 + 2] += 1


def map_of_an_evicted_page(w: World) -> None:
    page = w.alloc._core.ledger.pages[w.first, 0]
    w.alloc.full_to_window[page * 4] = 4


def map_of_a_free_page(w: World) -> None:
    page = w.alloc._core.pool.free_ids()[0]
    w.alloc.full_to_window[page * 4 + 3] = 7


def map_of_a_cached_page(w: World) -> None:
    page = w.alloc._core.ledger.pages[w.shared, 0]
    w.alloc.full_to_window[page * 4 : page * 4 + 4] = 0


def map_of_the_padding_page(w: World) -> None:
    w.alloc.full_to_window[1] = 1


ON_DEVICE: dict[str, tuple[Callable[[World], None], str]] = {
    "entry of a row": (entry_of_a_row, r"window_table\[1, 13\] is \d+ on the device"),
    "entry below the frontier": (entry_below_the_frontier, r"window_table\[1, 3\] is 9 .* 0"),
    "entry of the padding row": (entry_of_the_padding_row, r"window_table\[0, 5\] is 1 .* 0"),
    "entry of a shared page": (entry_of_a_shared_page, r"window_table\[\d, 0\] is 0"),
    "map of an owned page": (map_of_an_owned_page, r"full_to_window\[\d+\]"),
    "map of an evicted page": (map_of_an_evicted_page, r"full_to_window\[\d+\] is 4 .* 0"),
    "map of a free page": (map_of_a_free_page, r"full_to_window\[\d+\] is 7 .* 0"),
    "map of a cached page": (map_of_a_cached_page, r"full_to_window\[\d+\] is 0"),
    "map of the padding page": (map_of_the_padding_page, r"full_to_window\[1\] is 1 .* 0"),
}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_fault_in_a_table_is_found_and_named(name: str) -> None:
    plant, message = ON_DEVICE[name]
    w = world()
    plant(w)
    w.alloc.check()
    with pytest.raises(sgalloc.LawViolation, match=message):
        w.alloc.check(device=True)
