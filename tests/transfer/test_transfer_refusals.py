"""Bad input to the verbs of disaggregated serving: one clear line, and nothing changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, Query, fingerprint, make, prompt
from test_refusals import BAD_NUMBERS, SAYS_WHAT_TO_PASS
from transfer.transfer_support import PS, World, world

import sgalloc


def assert_refused(
    call: Callable[[World], Any],
    error: type[Exception] | tuple[type[Exception], ...],
    naming: str,
    remedy: str = r"\b(must|takes)\b|: \w",
) -> None:
    w = world()
    plan = w.alloc.plan(decode=(w.live, 1))
    before = fingerprint(w.alloc)
    with pytest.raises(error) as refused:
        call(w)
    message = str(refused.value)
    assert message and "\n" not in message
    assert naming in message, message
    assert re.search(remedy, message), f"no remedy in {message!r}"
    assert fingerprint(w.alloc) == before
    w.alloc.apply(plan)  # made before, and as good as it was
    w.alloc.check(device=True)


def test_signatures() -> None:
    expected = {
        "preallocate": "lengths, writers=1, prefix=None, deadline=None, "
        "window_tail=None, logical_only=False",
        "acknowledge": "handle, writer",
        "abort": "x, force=False, after=None",
        "reclaim": "now",
        "receiving": "handle",
    }
    for verb, wanted in expected.items():
        parameters = list(inspect.signature(getattr(sgalloc.KVAllocator, verb)).parameters.values())
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters[1:]]
        assert str(inspect.Signature(plain)) == f"({wanted})", verb


# -- numbers -------------------------------------------------------------------------------------

ANY_LENGTH = [kind for kind in BAD_NUMBERS if kind not in ("too few", "too many", "none")]


@pytest.mark.parametrize("kind", ANY_LENGTH)
def test_bad_lengths(kind: str) -> None:
    value, error, naming = BAD_NUMBERS[kind]
    assert_refused(lambda w: w.alloc.preallocate(value), error, naming, SAYS_WHAT_TO_PASS)


@pytest.mark.parametrize("kind", BAD_NUMBERS)
def test_bad_writers(kind: str) -> None:
    value, error, naming = BAD_NUMBERS[kind]
    assert_refused(lambda w: w.alloc.preallocate([5, 6], value), error, naming, SAYS_WHAT_TO_PASS)


@pytest.mark.parametrize("writers", [0, [1, 0]])
def test_a_request_without_writers_would_never_be_live(writers: Any) -> None:
    assert_refused(lambda w: w.alloc.preallocate([5, 6], writers), ValueError, "got 0")


NOT_ONE: dict[str, tuple[Any, type[Exception], str]] = {
    "float": (1.0, TypeError, "1.0"),
    "nan": (float("nan"), TypeError, "nan"),
    "bool": (True, TypeError, "True"),
    "None": (None, TypeError, "None"),
    "str": ("1", TypeError, "1"),
    "list": ([1], TypeError, "[1]"),
    "two": (np.array([1, 2]), TypeError, ""),
    "time": (np.timedelta64(1, "s"), TypeError, "1"),
    "beyond int64": (1 << 63, ValueError, str(1 << 63)),
    "device array": (OnDevice(), TypeError, "on a device"),
}


@pytest.mark.parametrize("kind", NOT_ONE)
def test_bad_acknowledgements(kind: str) -> None:
    value, error, naming = NOT_ONE[kind]
    assert_refused(lambda w: w.alloc.acknowledge(w.bare, value), error, naming)
    assert_refused(lambda w: w.alloc.acknowledge(value, 0), error, naming)
    assert_refused(lambda w: w.alloc.receiving(value), error, naming)


NO_INSTANT: dict[str, tuple[Any, type[Exception], str]] = {
    "nan": (float("nan"), ValueError, "nan"),
    "numpy nan": (np.float32("nan"), ValueError, "nan"),
    "bool": (True, TypeError, "True"),
    "numpy bool": (np.True_, TypeError, "True"),
    "str": ("5", TypeError, "5"),
    "complex": (1j, TypeError, "1j"),
    "time": (np.timedelta64(5, "s"), TypeError, "5"),
    "dict": ({}, TypeError, "{}"),
    "device array": (OnDevice(), TypeError, "OnDevice"),
}


@pytest.mark.parametrize("kind", NO_INSTANT)
def test_bad_points_in_time(kind: str) -> None:
    value, error, naming = NO_INSTANT[kind]
    assert_refused(lambda w: w.alloc.reclaim(value), error, naming)
    assert_refused(lambda w: w.alloc.preallocate([5, 6], deadline=value), error, naming)
    assert_refused(lambda w: w.alloc.preallocate([5, 6], deadline=[1, value]), error, "deadline[1]")


@pytest.mark.parametrize(
    "deadlines",
    [
        np.array([1, 5], "m8[s]"),
        np.array([1, 5], "m8"),
        np.array([1, 5], "M8[ns]"),
        np.array(5, "m8[s]"),
        np.array([True, False]),
        np.array([[1, 5], [2, 6]]),
        np.array(["1", "5"]),
    ],
    ids=lambda deadlines: f"{deadlines.dtype}{list(deadlines.shape)}",
)
def test_arrays_of_what_is_no_point_in_time(deadlines: np.ndarray) -> None:
    assert_refused(lambda w: w.alloc.preallocate([5, 6], deadline=deadlines), TypeError, "deadline")


@pytest.mark.parametrize("kind", ["i1", "u8", "f4", "f8", "O"])
def test_deadlines_may_be_an_array(kind: str) -> None:
    w = world()
    handles = w.alloc.preallocate([1, 1], deadline=np.array([3, 7], kind)).tolist()
    assert [w.alloc.receiving(h).deadline for h in handles] == [3, 7]
    (one,) = w.alloc.preallocate(1, deadline=np.array(3, kind))
    assert w.alloc.receiving(one).deadline == 3


def test_a_call_to_reclaim_needs_the_time() -> None:
    assert_refused(lambda w: w.alloc.reclaim(None), TypeError, "None")
    assert_refused(lambda w: w.alloc.reclaim([50]), TypeError, "[50]")


# -- handles, matches and events -----------------------------------------------------------------

BAD_HANDLES: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "float": (lambda w: 1.5, TypeError, "1.5"),
    "bool": (lambda w: True, TypeError, "True"),
    "None": (lambda w: None, TypeError, ""),
    "str": (lambda w: str(w.bare), TypeError, "handles"),
    "good and None": (lambda w: [w.bare, None], TypeError, "None"),
    "good and a float": (lambda w: [w.live, 1.5], TypeError, "1.5"),
    "set": (lambda w: {w.bare}, TypeError, "{"),
    "nested": (lambda w: [[w.bare, w.live]], ValueError, "(1, 2)"),
    "beyond int64": (lambda w: [w.bare, 2**200], ValueError, str(2**200)[:20]),
    "device array": (lambda w: OnDevice(), TypeError, "on a device"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", BAD_HANDLES)
def test_bad_handles_to_abort(kind: str, force: bool) -> None:
    value, error, naming = BAD_HANDLES[kind]
    assert_refused(lambda w: w.alloc.abort(value(w), force), error, naming)


IMPOSSIBLE: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "more rows than free": (lambda w: w.alloc.preallocate([1] * 4), sgalloc.OutOfRows, "4"),
    "past the row": (lambda w: w.alloc.preallocate([4, 41]), sgalloc.RowTooNarrow, "44"),
    "2**60 tokens": (lambda w: w.alloc.preallocate(1 << 60), sgalloc.RowTooNarrow, "41"),
    "more pages than there are": (
        lambda w: w.alloc.preallocate([40, 40]), sgalloc.OutOfPages, "20 pages"
    ),
    "shorter than its match": (
        lambda w: w.alloc.preallocate([40, 11], prefix=[None, w.match]), ValueError, "lengths[1]=11"
    ),
    "a match of another": (
        lambda w: w.alloc.preallocate(20, prefix=world().match), ValueError, "another"
    ),
    "a match too few": (
        lambda w: w.alloc.preallocate([20, 20], prefix=[w.match]), ValueError, "1 matches"
    ),
    "a match too many": (
        lambda w: w.alloc.preallocate(20, prefix=[None, w.match]), ValueError, "2 matches"
    ),
    "matches of none": (lambda w: w.alloc.preallocate([], prefix=[None]), ValueError, "1 matches"),
    "tokens for a match": (
        lambda w: w.alloc.preallocate(20, prefix=prompt(2, PS)), TypeError, "prefix"
    ),
    "a list of tokens": (lambda w: w.alloc.preallocate(20, prefix=[8]), TypeError, "8"),
    "a number for a match": (lambda w: w.alloc.preallocate(20, prefix=8), TypeError, "8"),
    "a str for a match": (lambda w: w.alloc.preallocate(20, prefix="x"), TypeError, "'x'"),
    "a deadline too few": (
        lambda w: w.alloc.preallocate([5, 6], deadline=[1]), ValueError, "1 numbers"
    ),
    "abort after a number": (lambda w: w.alloc.abort(w.bare, after=5), TypeError, "5"),
    "abort after an object": (
        lambda w: w.alloc.abort(w.aborted, True, object()), TypeError, "object"
    ),
    "force by a number": (lambda w: w.alloc.abort(w.bare, 1), TypeError, "1"),
    "force by an event": (lambda w: w.alloc.abort(w.bare, Query()), TypeError, "Query"),
}  # fmt: skip


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_impossible(kind: str) -> None:
    call, error, naming = IMPOSSIBLE[kind]
    assert_refused(call, error, naming)


def test_a_match_where_there_is_no_cache() -> None:
    alloc = make(10, PS)
    before = fingerprint(alloc)
    with pytest.raises(ValueError, match="prefix_cache=True"):
        alloc.preallocate(20, prefix=world().match)
    assert fingerprint(alloc) == before


def test_refusals_are_counted() -> None:
    w = world()
    for _ in range(2):
        with pytest.raises(sgalloc.OutOfRows):
            w.alloc.preallocate([1] * 4)
    with pytest.raises(sgalloc.WrongState):
        w.alloc.decode(w.bare)
    assert dict(w.alloc.stats().refusals) == {"OutOfRows": 2, "WrongState": 1}
