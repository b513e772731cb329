"""K5, K6, K7, K9: kinds of fault that other allocators were reported for, at every page size.

C stands on a page edge, one past it and one before it: ``edge`` is C modulo the page size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import (
    assert_drained,
    assert_laws,
    ceil_pages,
    committed_at,
    each_edge,
    each_page_size,
    make,
    prompt,
    unchanged,
)

import sgalloc

GUARD = -7


# -- K5: stale metadata on recycle -----------------------------------------------------------


def view(alloc: sgalloc.KVAllocator, h: Any) -> tuple[Any, ...]:
    """What can be seen of one request, its page ids named by the order of their appearance."""
    (a,), (row,) = alloc.allocated(h), alloc.rows(h)
    pages = alloc.pages(h, 0, int(a))
    names = {page: at for at, page in enumerate(pages.tolist())}
    size = alloc.page_size
    table = [(names[slot // size], slot % size) for slot in alloc.req_to_token[row, :a].tolist()]
    return (
        alloc.committed(h).tolist(),
        int(a),
        alloc.decode_index(h).tolist(),
        table,
        [names[slot // size] for slot in alloc.slots(h, 0, int(a)).tolist()],
        alloc.available(),
        alloc.available(counting_cache=True),
        alloc.stats().rows,
    )


@each_edge
def test_k5_a_fresh_owner_sees_what_a_first_owner_would(ps: int, edge: int) -> None:
    c = committed_at(ps, edge)

    def use(alloc: sgalloc.KVAllocator) -> list[Any]:
        (h,) = alloc.open(1, namespace="theirs")
        seen = [view(alloc, h)]
        alloc.extend(h, c)
        seen.append(view(alloc, h))
        alloc.decode(h)
        alloc.reserve(h, ps + 1)
        seen.append(view(alloc, h))
        alloc.trim(h, 1)
        seen.append(view(alloc, h))
        alloc.release(h, tokens=prompt(1, ps))
        seen.append(alloc.prefix.match(prompt(1, ps), "theirs").length)
        seen.append(alloc.prefix.match(prompt(1, ps)).length)
        alloc.prefix.clear()
        return seen

    fresh = make(8, ps, max_requests=1, prefix_cache=True)
    used = make(8, ps, max_requests=1, prefix_cache=True)
    (h,) = used.open(1, namespace="ours")
    used.extend(h, 8 * ps)
    used.decode(h, 0)
    used.prefix.publish(h, prompt(8, ps, seed=1))
    used.release(h, tokens=prompt(8, ps, seed=1))
    used.prefix.clear()
    expected = use(fresh)
    assert expected[-2:] == [ps if ps == 1 else 0, 0]  # only whole pages of the one token left
    for _ in range(2):
        assert use(used) == expected
    assert_drained(used)


@each_page_size
def test_k5_a_recycled_row_knows_no_namespace_and_no_prefix(ps: int) -> None:
    alloc = make(8, ps, max_requests=1, prefix_cache=True)
    (h,) = alloc.open(1, namespace="theirs")
    alloc.extend(h, 2 * ps)
    alloc.release(h, tokens=prompt(2, ps))
    (h,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, ps), "theirs"))
    alloc.release(h)
    (h,) = alloc.open()
    alloc.extend(h, 3 * ps)
    assert not set(alloc.pages(h)) & set(alloc.prefix.match(prompt(2, ps), "theirs").pages)
    alloc.trim(h, 1)  # inside a page that a former owner of the row had shared
    alloc.extend(h, 3 * ps)
    alloc.release(h, tokens=prompt(3, ps, seed=1))
    assert alloc.prefix.match(prompt(3, ps, seed=1)).length == 3 * ps
    assert alloc.prefix.match(prompt(3, ps, seed=1), "theirs").length == 0


# -- K6: wrong granularity or index space ----------------------------------------------------


@each_edge
def test_k6_every_entry_names_its_slot(ps: int, edge: int) -> None:
    c = committed_at(ps, edge)
    alloc = make(40, ps, max_requests=4, row_width=12 * ps, prefix_cache=True)
    h = alloc.open(3)
    out = np.empty(2 * c + 1, np.int64)
    alloc.extend(h, [c, 1, c], out=out)
    assert_laws(alloc)
    assert out.tolist() == alloc.slots(h, 0, [c, 1, c]).tolist()
    alloc.decode(h)
    assert_laws(alloc)
    alloc.reserve(h, [0, ps, 2 * ps + 1])
    assert_laws(alloc)
    alloc.commit(h, [0, ps, 2 * ps + 1])
    alloc.trim(h, [c, 1, 2 * ps])
    assert_laws(alloc)
    alloc.extend(h, [c + ps, 2 * ps, 3 * ps + edge])
    assert_laws(alloc)
    alloc.prefix.publish(h, [prompt(5, ps), prompt(1, ps), prompt(3, ps)])
    assert_laws(alloc)
    (row,) = alloc.rows(h[0])
    pages = alloc.pages(h[0]).astype(np.int64)
    assert pages.size == ceil_pages(c + ps, ps)
    for position in {0, ps - 1, ps, c, c + ps - 1}:
        assert alloc.req_to_token[row, position] == pages[position // ps] * ps + position % ps


# -- K7: overflow of row, index or count -----------------------------------------------------


@each_edge
@pytest.mark.parametrize("tail", [0, 1], ids=["whole pages", "a piece more"])
def test_k7_no_write_outside_the_row(ps: int, edge: int, tail: int) -> None:
    tail = tail * (ps - 1)
    c = committed_at(ps, edge)
    alloc = make(30, ps, max_requests=3, row_width=4 * ps + tail, debug=False)
    alloc.req_to_token[1:] = GUARD
    h = alloc.open(3)
    alloc.extend(h[1], c)
    (row,) = alloc.rows(h[1])

    def guarded(held: int) -> None:
        table = alloc.req_to_token
        assert (table[row, :held] > 0).all()
        assert (table[row, held:] == GUARD).all()
        others = [r for r in range(1, 4) if r != row]
        assert (table[others] == GUARD).all()
        assert not table[0].any()

    guarded(ceil_pages(c, ps) * ps)
    for past in (
        lambda: alloc.extend(h[1], 4 * ps + 1),
        lambda: alloc.decode(h[1], 4 * ps - c + 1),
        lambda: alloc.reserve(h[1], 4 * ps - c + 1),
        lambda: alloc.plan(reserve=(h[1], 4 * ps - c + 1)),
        lambda: alloc.extend(h, [1, 2**40, 1]),
        lambda: alloc.reserve(h, 2**60),
    ):
        with unchanged(alloc), pytest.raises(sgalloc.RowTooNarrow):
            past()
    guarded(ceil_pages(c, ps) * ps)
    alloc.reserve(h[1], 4 * ps - c)
    guarded(4 * ps)
    for bad in (-1, -(2**31), -(2**62), [1, -1, 1]):
        for call in (alloc.extend, alloc.decode, alloc.reserve, alloc.commit, alloc.trim):
            with unchanged(alloc), pytest.raises(ValueError):
                call(h, bad)
    with unchanged(alloc), pytest.raises(sgalloc.CommitPastExtent):
        alloc.commit(h[1], 4 * ps - c + 1)
    guarded(4 * ps)


def test_k7_the_last_slot_that_int32_holds() -> None:
    size = 1 << 20
    with pytest.raises(ValueError, match="num_pages"):
        make(2048, size, max_requests=1, row_width=size)
    alloc = make(2047, size, max_requests=1, row_width=size, debug=False)
    pool = alloc._core.pool
    pool.take(pool.peek(2047), 2)
    pool.give(np.array([2047], np.int32), 2)
    (h,) = alloc.open()
    out = np.empty(1, np.int64)
    alloc.extend(h, size - 1)
    alloc.decode(h, out=out)
    assert alloc.pages(h).tolist() == [2047]
    assert out.tolist() == [2**31 - 1] == alloc.slots(h, size - 1, size).tolist()
    assert alloc.req_to_token[1, 0] == 2047 * size
    assert (np.diff(alloc.req_to_token[1]) == 1).all()


# -- K9: out of memory -----------------------------------------------------------------------


@each_edge
def test_k9_a_refusal_changes_nothing_and_room_makes_it_go_through(ps: int, edge: int) -> None:
    c = committed_at(ps, edge)
    each = ceil_pages(c, ps)
    alloc = make(4 * each + 1, ps, row_width=(4 * each + 2) * ps, prefix_cache=True)
    (seed,) = alloc.open()
    alloc.extend(seed, each * ps)
    alloc.release(seed, tokens=prompt(each, ps))
    (locker,) = alloc.open_with_prefix(alloc.prefix.match(prompt(each, ps)))
    h = alloc.open(3)
    alloc.extend(h, c)
    assert alloc.available(counting_cache=True) == 1
    more = [each * ps + 1, c, each * ps + ps]
    for call in (
        lambda: alloc.extend(h, more),
        lambda: alloc.reserve(h, [ps + 1, 0, ps + 1]),
        lambda: alloc.extend(locker, (each + 2) * ps),
        lambda: alloc.apply(alloc.plan(extend=(h[:2], more[:2]), reserve=(h[2:], 2 * ps + 1))),
    ):
        with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            call()
        assert (refused.value.free, refused.value.cached) == (1, 0)
    alloc.extend(h[0], each * ps + 1)  # exactly the last page
    assert alloc.available() == 0
    alloc.release(h[1])
    alloc.extend(h[[0, 2]], [more[0], more[2]])
    alloc.release(locker)  # what was pinned can go now
    need = alloc.available(counting_cache=True)
    assert need >= each
    alloc.reserve(h[0], (need + 1) * ps - 1)
    assert alloc.available(counting_cache=True) == 0
    assert_laws(alloc)
    alloc.release(h[[0, 2]])
    assert_drained(alloc)
