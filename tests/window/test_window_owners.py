"""`owners(group)`: who has each page of the second group."""

from __future__ import annotations

import numpy as np
import pytest
from host_support import Query, make, prompt
from window.support import extended, mapped, shown
from window.support import make as with_window

import sgalloc


def test_who_has_each_window_page() -> None:
    alloc = with_window(40, 4, tokens=6, window_pages=30, prefix_cache=True)
    first = extended(alloc, 16)
    alloc.prefix.publish(first, prompt(4, 4))  # all four held by its request
    left = extended(alloc, 12)
    alloc.evict_window(left)
    gone = [page for page in shown(alloc, left) if page]
    alloc.release(left, tokens=prompt(3, 4, seed=1))  # held by nobody; one has no window page
    waiting = extended(alloc, 8)
    behind = shown(alloc, waiting)
    alloc.release(waiting, after=Query())
    own = extended(alloc, 10)

    owners = alloc.owners("window")
    assert owners.dtype == np.int64 and owners.shape == (31,) and owners[0] == 0
    (row,) = alloc.rows(own)
    assert np.flatnonzero(owners == row).tolist() == sorted(shown(alloc, own))
    assert np.flatnonzero(owners == -3).tolist() == sorted(shown(alloc, first))
    assert np.flatnonzero(owners == -1).tolist() == sorted(gone)
    assert np.flatnonzero(owners == -2).tolist() == sorted(behind)
    assert (owners[1:] == 0).sum() == alloc.available("window")
    assert np.array_equal(alloc.owners("full"), alloc.owners())
    assert set(mapped(alloc).values()) >= set(gone), "the cache keeps them beside its pages"


def test_a_locked_path_without_window_pages_locks_no_padding_page() -> None:
    alloc = with_window(40, 4, tokens=4, window_pages=30, prefix_cache=True)
    handle = extended(alloc, 32)
    alloc.evict_window(handle)
    alloc.release(handle, tokens=prompt(8, 4))
    alloc.open_with_prefix(alloc.prefix.match(prompt(8, 4)))
    owners = alloc.owners("window")
    held = alloc.stats().groups["window"].locked
    assert held and (owners == -3).sum() == held and owners[0] == 0


def test_the_group_of_a_sparse_allocator() -> None:
    alloc = sgalloc.KVAllocator(
        20, 4, 4, 80, device="cpu", sparse=sgalloc.Sparse(ratio=2, device_buffer=8)
    )
    (handle,) = alloc.open()
    alloc.extend(handle, 16)
    (row,) = alloc.rows(handle)
    owners = alloc.owners("device")
    assert np.flatnonzero(owners == row).tolist() == sorted(alloc.device_pages(handle).tolist())
    assert owners.shape == (21,) and alloc.owners("logical").shape == (41,)


@pytest.mark.parametrize("group", ["window", "Full", "", 3])
def test_a_group_that_is_not_there(group: str) -> None:
    with pytest.raises(ValueError, match=r"there is no group .*has 'full'"):
        make(4, 4).owners(group)
