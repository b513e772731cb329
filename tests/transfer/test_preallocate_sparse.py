"""preallocate with a sparse allocator: dense, or logical pages alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import count_launches
from sparse.support import assert_whole, untouched
from transfer.group_support import Alloc, assert_nothing_held, granted, links, numbers, sparse

import sgalloc

PS, BUFFER = 4, 8  # two pages, and one for the newest token


@pytest.mark.parametrize("logical_only", [False, True])
@pytest.mark.parametrize("ps", [1, 2, 3, 16])
def test_what_is_taken(logical_only: bool, ps: int) -> None:
    alloc = sparse(12, ps, 2 * ps)
    lengths = [3 * ps + 1, ps, 0]
    h = alloc.preallocate(lengths, writers=2, logical_only=logical_only, deadline=3)
    beside = 0 if logical_only else 5
    assert numbers(alloc, "pinned") == {"logical": 5, "device": beside}
    assert numbers(alloc, "free") == {"logical": 48 - 5, "device": 12 - beside}
    assert len(links(alloc)) == beside
    for handle in h.tolist():
        pages = granted(alloc, handle)
        assert {page: links(alloc)[page] for page in pages} == pages
        assert len(alloc.pages(handle, 0, int(alloc.allocated(handle)[0]))) == (
            len(pages) or int(alloc.allocated(handle)[0]) // ps
        )
    alloc.check(device=True)
    alloc.abort(h[1:2])
    alloc.check(device=True)
    assert numbers(alloc, "pinned") == {"logical": 5, "device": beside}
    assert len(links(alloc)) == beside
    for writer in range(2):
        assert alloc.acknowledge(int(h[1]), writer) and alloc.acknowledge(int(h[0]), writer)
        alloc.check(device=True)
    assert numbers(alloc, "pinned") == {"logical": 0, "device": 0}
    assert numbers(alloc, "owned") == {"logical": 4, "device": 0 if logical_only else 4}
    assert alloc.committed(h[:1]).tolist() == [3 * ps + 1]
    assert alloc.reclaim(3).tolist() == [h[2]]
    assert_whole(alloc)
    alloc.release(h[:1])
    assert_nothing_held(alloc)


# logical_only, tokens, ratio: pages taken, by group.
NEEDS = [
    (False, 20, {"logical": 5, "device": 5}),
    (False, 17, {"logical": 5, "device": 5}),
    (True, 20, {"logical": 5, "device": 0}),
    (True, 1, {"logical": 1, "device": 0}),
]


@pytest.mark.parametrize(("logical_only", "length", "need"), NEEDS)
@pytest.mark.parametrize("group", ["logical", "device"])
@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_the_need_is_exact_in_each_group(
    logical_only: bool,
    length: int,
    need: dict[str, int],
    group: str,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if need[group] + spare < 0:
        pytest.skip("there is no pool of fewer than no pages")
    alloc = sparse(10, PS, BUFFER)
    (other,) = alloc.open()
    free = {"logical": 40, "device": 10}
    room = need[group] + spare
    # Another request takes what is not to be had: in both groups, then in the logical one.
    if group == "device":
        alloc.extend(other, (free["device"] - room) * PS)
    else:
        alloc.extend(other, (free["logical"] - room) * PS, logical_only=True)
    assert alloc.available(group) == room
    if spare < 0:
        launches = count_launches(alloc, monkeypatch)
        with untouched(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
            alloc.preallocate(length, logical_only=logical_only)
        found = refused.value
        assert (found.group, found.need, found.free, found.cached) == (
            group, need[group], room, 0,
        )  # fmt: skip
        assert f"'{group}'" in str(found) and not launches["write"]
        return
    before = numbers(alloc, "free")
    alloc.preallocate(length, logical_only=logical_only)
    after = numbers(alloc, "free")
    assert {name: before[name] - after[name] for name in after} == need
    assert after[group] == spare
    alloc.check(device=True)


@pytest.mark.parametrize("scratch", [0, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 12, 21])
def test_logical_pages_alone_then_sparse_then_decode(length: int, scratch: int) -> None:
    alloc = sparse(10, PS, BUFFER, scratch=scratch)
    (h,) = alloc.preallocate(length, logical_only=True)
    with pytest.raises(sgalloc.WrongState, match="still being received"):
        alloc.to_sparse(h)
    alloc.acknowledge(h, 0)
    pages = -(-length // PS)
    assert not links(alloc) and alloc.available("device") == 10
    if pages:
        with untouched(alloc), pytest.raises(sgalloc.WrongState, match="to_sparse it first"):
            alloc.decode(h)
    # Its own pages where it is short, else a buffer and the newest token's.
    alloc.to_sparse(h)
    assert_whole(alloc)
    held = min(pages, 3) + -(-scratch // PS)
    assert alloc.available("device") == 10 - held
    newest = alloc.pages(h).tolist()[-1:]
    expected = alloc.pages(h).tolist() if pages <= 2 else newest
    assert sorted(links(alloc)) == sorted(expected)
    assert links(alloc) == granted(alloc, h)
    for _ in range(4 * PS):
        alloc.decode(h)
        assert_whole(alloc)
    assert alloc.available("device") == 10 - 3 - -(-scratch // PS)
    assert list(links(alloc)) == alloc.pages(h).tolist()[-1:]
    alloc.release(h)
    assert_nothing_held(alloc)


def test_a_dense_one_runs_on_like_any_other() -> None:
    alloc = sparse(10, PS, BUFFER)
    (h,) = alloc.preallocate(21)
    alloc.acknowledge(h, 0)
    alloc.decode(h, 4)
    assert_whole(alloc)
    assert len(links(alloc)) == 7 and alloc.available("device") == 3
    alloc.to_sparse(h)
    assert_whole(alloc)
    assert alloc.available("device") == 7
    alloc.release(h)
    assert_nothing_held(alloc)


def test_buffers_that_do_not_fit_wait_and_give_nothing_back() -> None:
    alloc = sparse(5, PS, BUFFER)
    h = alloc.preallocate([20, 20], logical_only=True)
    for handle in h:
        alloc.acknowledge(handle, 0)
    alloc.to_sparse(h[:1])
    with untouched(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
        alloc.to_sparse(h[1:])
    assert (refused.value.group, refused.value.need, refused.value.free) == ("device", 3, 2)
    alloc.release(h[:1])
    alloc.to_sparse(h[1:])
    assert_whole(alloc)


@pytest.mark.parametrize("logical_only", [False, True])
def test_a_recycled_page_leaves_no_stale_entry(logical_only: bool) -> None:
    alloc = sparse(6, PS, BUFFER, ratio=1)
    (h,) = alloc.open()
    alloc.extend(h, 24)
    assert len(links(alloc)) == 6
    alloc.release(h)
    (h,) = alloc.preallocate(24, logical_only=logical_only, deadline=1)
    assert links(alloc) == granted(alloc, h) and len(links(alloc)) == (0 if logical_only else 6)
    alloc.reclaim(1)
    assert_nothing_held(alloc)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a tail": ({"window_tail": 4}, ValueError, "window_tail= is for a window group"),
    "a tail of nothing": ({"window_tail": 0}, ValueError, "window_tail= is for a window group"),
    "both": ({"window_tail": 4, "logical_only": True}, ValueError, "window_tail="),
    "a number for a bool": ({"logical_only": 1}, TypeError, "logical_only"),
    "an array for a bool": ({"logical_only": np.array([True, False])}, TypeError, "logical_only"),
    "a word for a bool": ({"logical_only": "no"}, TypeError, "logical_only"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_combinations(kind: str) -> None:
    how, error, naming = WRONG[kind]
    alloc = sparse(10, PS, BUFFER)
    with untouched(alloc), pytest.raises(error, match=naming) as refused:
        alloc.preallocate([8, 16], **how)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    assert alloc.preallocate([8, 16]).size == 2


def test_a_prefix_has_no_place_in_a_sparse_allocator() -> None:
    other = Alloc(8, PS, 4, 32, device="cpu", prefix_cache=True)
    alloc = sparse(10, PS, BUFFER)
    with untouched(alloc), pytest.raises(ValueError, match="no prefix cache"):
        alloc.preallocate(16, prefix=other.prefix.match([]))
