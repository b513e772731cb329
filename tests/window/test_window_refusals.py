"""What the window's verbs refuse leaves every part of both groups as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from host_support import OnDevice, Query, fingerprint, prompt
from window.support import assert_window_laws, make

import sgalloc


class World(NamedTuple):
    """Something in every place: free, owned, cached, waiting, cut, behind a tail."""

    alloc: sgalloc.KVAllocator
    plain: int
    shared: int
    tail: int
    cut: int
    gone: int


def world() -> World:
    alloc = make(60, 4, 6, 24, 8, 80, prefix_cache=True)
    seed = alloc.open(1)
    alloc.extend(seed, 16)
    alloc.release(seed, tokens=[prompt(4, 4)])
    plain, tail, cut, gone = (int(handle) for handle in alloc.open(4))
    (shared,) = alloc.open_with_prefix(alloc.prefix.match(prompt(3, 4)))
    alloc.extend([plain, int(shared)], [21, 14])
    alloc.extend(tail, 16, window_tail=4)
    alloc.extend(cut, 20)
    alloc.evict_window(cut, upto=20)
    alloc.trim(cut, 10, after=Query())
    alloc.evict_window(plain, upto=8, after=Query())
    alloc.extend(gone, 8)
    alloc.release(gone)
    alloc.check(device=True)
    return World(alloc, plain, int(shared), tail, cut, gone)


Call = Callable[[World], Any]
REFUSED: dict[str, tuple[Call, type[Exception] | tuple[type[Exception], ...], str]] = {
    "evict a stale handle": (lambda w: w.alloc.evict_window(w.gone), sgalloc.StaleHandle, ""),
    "evict, one is stale": (
        lambda w: w.alloc.evict_window([w.plain, w.gone]),
        sgalloc.StaleHandle,
        "",
    ),
    "evict twice": (lambda w: w.alloc.evict_window([w.plain, w.plain]), ValueError, "twice"),
    "evict a row": (lambda w: w.alloc.evict_window(1), (ValueError, sgalloc.StaleHandle), "1"),
    "evict above C": (lambda w: w.alloc.evict_window(w.plain, upto=22), ValueError, "upto[0]=22"),
    "evict, one above C": (
        lambda w: w.alloc.evict_window([w.plain, w.cut], upto=[21, 11]),
        ValueError,
        "upto[1]=11",
    ),
    "evict below 0": (lambda w: w.alloc.evict_window(w.plain, upto=-1), ValueError, "-1"),
    "evict to a fraction": (
        lambda w: w.alloc.evict_window(w.plain, upto=8.5),
        (TypeError, ValueError),
        "8.5",
    ),
    "evict to nan": (
        lambda w: w.alloc.evict_window(w.plain, upto=float("nan")),
        (TypeError, ValueError),
        "nan",
    ),
    "evict to true": (
        lambda w: w.alloc.evict_window(w.plain, upto=True),
        (TypeError, ValueError),
        "True",
    ),
    "evict to too many": (
        lambda w: w.alloc.evict_window([w.plain], upto=[8, 8]),
        ValueError,
        "upto",
    ),
    "evict to a device array": (
        lambda w: w.alloc.evict_window([w.plain, w.cut], upto=OnDevice()),
        TypeError,
        "upto",
    ),
    "evict behind nothing": (
        lambda w: w.alloc.evict_window(w.plain, after="later"),
        TypeError,
        "later",
    ),
    "tail on window pages": (
        lambda w: w.alloc.extend(w.plain, 32, window_tail=4),
        sgalloc.WrongState,
        "window_tail",
    ),
    "tail, one holds pages": (
        lambda w: w.alloc.extend([w.cut, w.tail], [12, 20], window_tail=0),
        sgalloc.WrongState,
        "holds 1",
    ),
    "tail off the edge": (
        lambda w: w.alloc.extend(w.cut, 19, window_tail=4),
        ValueError,
        "page edge",
    ),
    "tail too long": (lambda w: w.alloc.extend(w.cut, 12, window_tail=3), ValueError, "2 new"),
    "window short": (lambda w: w.alloc.extend(w.plain, 80), sgalloc.OutOfPages, "window"),
    "window short in a batch": (
        lambda w: w.alloc.decode([w.plain, w.cut, w.tail], [27, 20, 20]),
        sgalloc.OutOfPages,
        "window",
    ),
    "window short in a plan": (
        lambda w: w.alloc.apply(
            w.alloc.plan(reserve=([w.plain, w.tail], [59, 60]), evict_window=True)
        ),
        sgalloc.OutOfPages,
        "window",
    ),
    "row too narrow": (lambda w: w.alloc.decode(w.plain, 60), sgalloc.RowTooNarrow, "80"),
    "write behind an event": (
        lambda w: w.alloc.decode([w.plain, w.cut], 4, after=Query()),
        sgalloc.WrongState,
        "not done",
    ),
    "out of the wrong size": (
        lambda w: w.alloc.decode([w.plain, w.cut], 4, out=np.zeros(7, np.int32)),
        ValueError,
        "7",
    ),
    "trim inside a shared page": (
        lambda w: w.alloc.trim([w.plain, w.shared], [3, 9]),
        sgalloc.AllocError,
        "page edge",
    ),
    "publish another prompt": (
        lambda w: w.alloc.prefix.publish([w.plain, w.shared], [prompt(5, 4), prompt(3, 4, 9)]),
        ValueError,
        "differ",
    ),
    "release with another prompt": (
        lambda w: w.alloc.release([w.plain, w.shared], tokens=[prompt(5, 4, 1), prompt(3, 4, 9)]),
        ValueError,
        "differ",
    ),
    "release twice": (lambda w: w.alloc.release([w.cut, w.cut]), ValueError, "twice"),
    "frontier of a stale handle": (
        lambda w: w.alloc.frontier([w.gone]),
        sgalloc.StaleHandle,
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(name: str) -> None:
    call, error, naming = REFUSED[name]
    w = world()
    plan = w.alloc.plan(decode=([w.plain, w.cut], 2), evict_window=True)
    before = fingerprint(w.alloc)
    with pytest.raises(error) as refused:
        call(w)
    message = str(refused.value)
    assert message and "\n" not in message and naming in message, message
    assert fingerprint(w.alloc) == before
    assert w.alloc.fits(plan)
    w.alloc.apply(plan)
    assert_window_laws(w.alloc)


def test_the_same_calls_give_the_same_window_pages() -> None:
    """Ranks that mirror each other stay equal in both groups."""
    first, second = world(), world()
    for w in (first, second):
        w.alloc.decode([w.plain, w.cut, w.tail], [3, 9, 1])
        w.alloc.apply(w.alloc.plan(reserve=(w.plain, 9), evict_window=True))
        w.alloc.release(w.shared, tokens=[prompt(3, 4)])
    assert first.alloc.window_table.tobytes() == second.alloc.window_table.tobytes()
    assert first.alloc.full_to_window.tobytes() == second.alloc.full_to_window.tobytes()
    free = [w.alloc._core.side.pool.free_ids().tolist() for w in (first, second)]
    assert free[0] == free[1]
