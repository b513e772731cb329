"""`compact`: what it takes, what it refuses, and what it gives back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, Query, assert_laws, count_launches, make, prompt, unchanged

import sgalloc


def speculating(
    prefix_cache: bool = True, debug: bool | None = None
) -> tuple[sgalloc.KVAllocator, np.ndarray]:
    """C = 9 and 8, the second over two shared pages; A = 24 and 20; pages of 4."""
    alloc = make(40, 4, max_requests=5, row_width=41, prefix_cache=prefix_cache, debug=debug)
    (one,) = alloc.open()
    if prefix_cache:
        (seed,) = alloc.open()
        alloc.extend(seed, 8)
        alloc.release(seed, tokens=prompt(2, 4))
        (two,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, 4)))
    else:
        (two,) = alloc.open()
        alloc.extend(two, 8)
    alloc.extend(one, 9)
    h = np.array([one, two])
    alloc.reserve(h, [15, 12])
    return alloc, h


def slots(alloc: sgalloc.KVAllocator, handle: int, positions: list[int]) -> list[int]:
    (row,) = alloc.rows(handle)
    return alloc.req_to_token[row, positions].tolist()


@pytest.mark.parametrize(
    "accepted",
    [
        [[10, 12, 20], [8, 11]],
        [(10, 12, 20), (8, 11)],
        ([10, 12, 20], np.array([8, 11])),
        [np.array([10, 12, 20], np.int32), np.array([8, 11], np.uint8)],
        [range(10, 12), []],
    ],
    ids=["lists", "tuples", "mixed", "arrays", "range"],
)
@pytest.mark.parametrize("as_batch", [False, True])
def test_the_forms_of_accepted(accepted: Any, as_batch: bool) -> None:
    alloc, h = speculating()
    named = alloc.batch(h) if as_batch else h
    lists = [list(map(int, one)) for one in accepted]
    source, target = [], []
    for handle, c, positions in zip(h.tolist(), [9, 8], lists, strict=True):
        for at, position in enumerate(positions):
            if position != c + at:
                source += slots(alloc, handle, [position])
                target += slots(alloc, handle, [c + at])
    src, dst = alloc.compact(named, accepted)
    assert (src.tolist(), dst.tolist()) == (source, target)
    assert (src.dtype, dst.dtype) == (np.int32, np.int32)
    assert alloc.committed(named).tolist() == [9 + len(lists[0]), 8 + len(lists[1])]
    assert alloc.allocated(named).tolist() == [12, 12 if lists[1] else 8]
    assert alloc.decode_index(named).tolist() == [0, 0]
    assert_laws(alloc)


def test_a_two_dimensional_array_and_a_single_handle() -> None:
    alloc, h = speculating()
    src, dst = alloc.compact(h, np.array([[9, 12], [9, 10]]))
    expected = slots(alloc, h[0], [10]) + slots(alloc, h[1], [8, 9])
    assert dst.tolist() == expected and src.size == 3
    for flat in ([11], np.array([11]), [[11]]):
        alloc, h = speculating()
        (source,) = slots(alloc, h[0], [11])
        src, dst = alloc.compact(h[0], flat)
        assert src.tolist() == [source] and dst.tolist() == slots(alloc, h[0], [9])
        assert alloc.committed(h).tolist() == [10, 8]
    alloc, h = speculating()
    for none in ([], [[]]):
        assert alloc.compact(h[0], none)[0].size == 0
    assert alloc.allocated(h).tolist() == [12, 20], "what was reserved went back"


def test_an_array_padded_with_minus_one_is_its_rows() -> None:
    alloc, h = speculating()
    other, _ = speculating()
    found = alloc.compact(h, np.array([[10, 12, 20], [8, 11, -1]]))
    wanted = other.compact(h, [[10, 12, 20], [8, 11]])
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    assert alloc.committed(h).tolist() == [12, 10]
    alloc.compact(h, np.full((2, 3), -1))
    assert alloc.committed(h).tolist() == [12, 10]
    assert_laws(alloc)


def test_torch_tensors_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    alloc, h = speculating()
    src, _ = alloc.compact(h, [torch.tensor([10, 12]), torch.tensor([], dtype=torch.int64)])
    assert src.size == 2 and alloc.committed(h).tolist() == [11, 8]


def test_nobody_and_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, h = speculating()
    with unchanged(alloc):
        src, dst = alloc.compact([], [])
    assert src.size == dst.size == 0 and src.dtype == dst.dtype == np.int32
    alloc.trim(h, [9, 8])
    calls = count_launches(alloc, monkeypatch)
    with unchanged(alloc):
        alloc.compact(h, [[], []])
    assert not calls.total()


def test_no_device_work_and_no_readback(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, h = speculating(debug=False)
    calls = count_launches(alloc, monkeypatch)
    expected = slots(alloc, h[0], [12, 20])
    alloc.req_to_token[:] = -1  # a table that is read would show it
    src, _ = alloc.compact(h, [[9, 12, 20], []])
    assert src.tolist() == expected and not calls.total()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_wait_behind_the_moves(prefix_cache: bool) -> None:
    """With after= what was given back is in quarantine until the engine has moved."""
    alloc, h = speculating(prefix_cache)
    moved = Query()
    free = alloc.available()
    alloc.compact(h, [[13, 14], [19]], after=moved)
    assert alloc.committed(h).tolist() == [11, 9] and alloc.allocated(h).tolist() == [12, 12]
    assert alloc.available() == free and alloc.stats().groups["full"].quarantined == 5
    assert_laws(alloc)
    moved.over = True
    alloc.settle()
    assert alloc.available() == free + 5
    again, g = speculating(prefix_cache)
    again.compact(g, [[13, 14], [19]], after=moved)
    assert again.available() == free + 5, "an event that is done waits for nothing"


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("below C", [[8], [8]], ValueError, r"position 8 of row 1 is below its 9 committed"),
    ("below C, the second", [[9], [7, 8]], ValueError, r"position 7 of row 2 is below its 8"),
    ("negative", [[-1], []], ValueError, r"position -1 of row 1"),
    ("at A", [[9, 24], []], sgalloc.CommitPastExtent, r"position 24 of row 1 .*24 tokens"),
    ("past A", [[], [20]], sgalloc.CommitPastExtent, r"position 20 of row 2 .*20 tokens"),
    ("far past A", [[], [1 << 40]], sgalloc.CommitPastExtent, r"reserve before the step"),
    ("falling", [[9, 11, 10], []], ValueError, r"row 1 must ascend, but 10 follows 11"),
    ("twice", [[9], [8, 8]], ValueError, r"row 2 must ascend, but 8 follows 8"),
    ("too few", [[9]], ValueError, r"1 sequences for 2 requests"),
    ("too many", [[9], [8], []], ValueError, r"3 sequences for 2 requests"),
    ("none", [], ValueError, r"0 sequences for 2 requests"),
    ("flat", [9, 8], TypeError, r"accepted\[0\] must be a sequence"),
    ("floats", [[9.0], [8]], TypeError, r"accepted"),
    ("bools", [[9, True], [8]], TypeError, r"accepted"),
    ("float arrays", [np.array([9.5]), [8]], TypeError, r"accepted"),
    ("text", ["9", "8"], TypeError, r"accepted\[0\]"),
    ("None", None, TypeError, r"accepted must be one sequence"),
    ("a number", 3, TypeError, r"accepted must be one sequence"),
    ("a set", [{9}, {8}], TypeError, r"accepted\[0\]"),
    ("too deep", [[[9]], [[8]]], ValueError, r"accepted"),
    ("a device array", OnDevice(2, 1), TypeError, r"on the host"),
    ("device arrays", [OnDevice(1), OnDevice(1)], TypeError, r"accepted lives on a device"),
]


@pytest.mark.parametrize(
    ("accepted", "error", "naming"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused_with_nothing_changed(accepted: Any, error: type[Exception], naming: str) -> None:
    alloc, h = speculating()
    with unchanged(alloc), pytest.raises(error, match=naming):
        alloc.compact(h, accepted)
    with unchanged(alloc), pytest.raises(error):
        alloc.compact(alloc.batch(h), accepted, after=Query())
    counted = {"CommitPastExtent": 2} if error is sgalloc.CommitPastExtent else {}
    assert alloc.stats().refusals == counted
    alloc.compact(h, [[9], [8]])


def test_padding_stands_at_the_end_of_a_row_alone() -> None:
    alloc, h = speculating()
    for wrong in ([[10, 12], [-1, 8]], [[10, -1, 12], [8, 9, 10]], [[10, 12], [8, -2]]):
        with unchanged(alloc), pytest.raises(ValueError, match=r"-1|below"):
            alloc.compact(h, np.array(wrong))


def test_other_refusals() -> None:
    alloc, h = speculating()
    gone = alloc.open()
    alloc.release(gone)
    for named, error in (
        ([h[0], gone[0]], sgalloc.StaleHandle),
        ([h[0], h[0]], ValueError),
        ([0, 1], sgalloc.StaleHandle),
    ):
        with unchanged(alloc), pytest.raises(error):
            alloc.compact(named, [[9], [8]])
    with unchanged(alloc), pytest.raises(TypeError, match="after="):
        alloc.compact(h, [[12], [8]], after="soon")


def test_many_requests_at_once_are_as_each_alone() -> None:
    rng = np.random.default_rng(1)
    n = 300
    one, two = (make(n * 12, 4, max_requests=n, row_width=48) for _ in range(2))
    start = rng.integers(0, 20, n)
    accepted = []
    for c in start.tolist():
        some = np.flatnonzero(rng.integers(0, 2, 16))
        accepted.append((c + some).tolist())
    handles = []
    for alloc in (one, two):
        handles.append(alloc.open(n))
        alloc.extend(handles[-1], start)
        alloc.reserve(handles[-1], 16)
    src, dst = one.compact(handles[0], accepted)
    parts = [two.compact(h, a) for h, a in zip(handles[1].tolist(), accepted, strict=True)]
    assert src.tolist() == np.concatenate([p[0] for p in parts]).tolist()
    assert dst.tolist() == np.concatenate([p[1] for p in parts]).tolist()
    assert one.committed(handles[0]).tolist() == two.committed(handles[1]).tolist()
    assert one.owners().tolist() == two.owners().tolist()
