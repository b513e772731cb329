"""Bad handles and bad numbers, verb by verb: the right error, one clear line, nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import DoneValue, OnDevice, Query, prompt
from refusal_world import PS, World, assert_refused, world

import sgalloc
from sgalloc import sizing
from sgalloc.speculative import dflash, eagle

BEYOND = 1 << 63
SAYS_WHAT_TO_PASS = r"[:,] pass \w"


# -- numbers -----------------------------------------------------------------------------------

NUMBER_VERBS: dict[str, Callable[[World, Any], Any]] = {
    "extend": lambda w, n: w.alloc.extend(w.h, n),
    "decode": lambda w, n: w.alloc.decode(w.h, n),
    "reserve": lambda w, n: w.alloc.reserve(w.h, n),
    "commit": lambda w, n: w.alloc.commit(w.h, n),
    "trim": lambda w, n: w.alloc.trim(w.h, n),
    "trim a batch": lambda w, n: w.alloc.trim(w.alloc.batch(w.h), n),
    "slots from": lambda w, n: w.alloc.slots(w.h, n, 5),
    "slots to": lambda w, n: w.alloc.slots(w.h, 0, n),
    "plan extend": lambda w, n: w.alloc.plan(extend=(w.h, n)),
    "plan decode": lambda w, n: w.alloc.plan(decode=(w.h, n)),
    "plan reserve": lambda w, n: w.alloc.plan(reserve=(w.h, n)),
}
# name: value, error, what the message names.
BAD_NUMBERS: dict[str, tuple[Any, type[Exception], str]] = {
    "negative": (-1, ValueError, "-1"),
    "float": (1.5, TypeError, "1.5"),
    "whole float": (12.0, TypeError, "12.0"),
    "nan": (float("nan"), TypeError, "nan"),
    "infinity": (float("inf"), TypeError, "inf"),
    "numpy float": (np.float32(12), TypeError, "12"),
    "bool": (True, TypeError, "True"),
    "numpy bool": (np.True_, TypeError, "True"),
    "None": (None, TypeError, "None"),
    "str": ("12", TypeError, "12"),
    "bytes": (b"12", TypeError, "12"),
    "object": (object(), TypeError, "object"),
    "dict": ({12: 13}, TypeError, "12"),
    "set": ({12, 13}, TypeError, "12"),
    "complex": (1j, TypeError, "1j"),
    "time": (np.timedelta64(12, "s"), TypeError, "12"),
    "beyond int64": (BEYOND, ValueError, str(BEYOND)),
    "far beyond int64": (2**200, ValueError, str(2**200)[:20]),
    "far below int64": (-(2**200), ValueError, str(-(2**200))[:20]),
    "one of two negative": ([12, -3], ValueError, "-3"),
    "one of two nan": ([12, float("nan")], TypeError, "nan"),
    "one of two a float": ([12, 12.5], TypeError, "12.5"),
    "one of two None": ([12, None], TypeError, "None"),
    "one of two a str": ([12, "x"], TypeError, "x"),
    "one of two a bool": ([12, True], TypeError, "True"),
    "one of two beyond int64": ([12, BEYOND], (TypeError, ValueError), str(BEYOND)),
    "one of two far beyond": ([12, 2**200], ValueError, str(2**200)[:20]),
    "too few": ([12], ValueError, "1 "),
    "too many": ([12, 12, 12], ValueError, "3 "),
    "none": ([], ValueError, "0 "),
    "nested": ([[12, 12]], ValueError, "(1, 2)"),
    "ragged": ([[12], [12, 12]], TypeError, "[12, 12]"),
    "float array": (np.array([12.0, 12.0]), TypeError, "float64"),
    "bool array": (np.array([True, False]), TypeError, "bool"),
    "time array": (np.array([12, 12], "m8[s]"), TypeError, "timedelta64"),
    "str array": (np.array(["12", "12"]), TypeError, "12"),
    "object array": (np.array([12, None]), TypeError, "None"),
    "negative array": (np.array([12, -4]), ValueError, "-4"),
    "negative int8": (np.array([12, -4], np.int8), ValueError, "-4"),
    "near the end of int64": (np.array([12, 2**63 - 1]), ValueError, str(2**63 - 1)),
    "huge uint64": (np.array([12, 2**64 - 1], np.uint64), ValueError, str(2**64 - 1)),
    "device array": (OnDevice(), TypeError, "lives on a device (host_support.OnDevice)"),
}


@pytest.mark.parametrize("verb", NUMBER_VERBS)
@pytest.mark.parametrize("kind", BAD_NUMBERS)
def test_bad_number(verb: str, kind: str) -> None:
    value, error, naming = BAD_NUMBERS[kind]
    assert_refused(lambda w: NUMBER_VERBS[verb](w, value), error, naming, remedy=SAYS_WHAT_TO_PASS)


@pytest.mark.parametrize("verb", NUMBER_VERBS)
@pytest.mark.parametrize("kind", ["float", "bool", "gradient"])
def test_bad_torch_numbers(verb: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    value = {
        "float": lambda: torch.tensor([12.0, 12.0]),
        "bool": lambda: torch.tensor([True, True]),
        "gradient": lambda: torch.ones(2, requires_grad=True),
    }[kind]()
    assert_refused(
        lambda w: NUMBER_VERBS[verb](w, value), TypeError, None, remedy=SAYS_WHAT_TO_PASS
    )


class Aloof:
    """Refuses even to say where it lives, as a device tensor with a gradient does."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("detach it first")


@pytest.mark.parametrize("verb", NUMBER_VERBS)
def test_a_device_array_that_does_not_answer(verb: str) -> None:
    naming = f"lives on a device ({__name__}.Aloof)"
    assert_refused(lambda w: NUMBER_VERBS[verb](w, Aloof()), TypeError, naming)


ONE_NUMBER: dict[str, Callable[[World, Any], Any]] = {
    "open": lambda w, n: w.alloc.open(n),
    "pages from": lambda w, n: w.alloc.pages(w.h[0], n),
    "pages to": lambda w, n: w.alloc.pages(w.h[0], 0, n),
    "warm": lambda w, n: w.alloc.warm(n),
}


@pytest.mark.parametrize("verb", ONE_NUMBER)
@pytest.mark.parametrize("kind", BAD_NUMBERS)
def test_bad_single_number(verb: str, kind: str) -> None:
    value, error, naming = BAD_NUMBERS[kind]
    if verb in ("pages to", "warm") and value is None:
        return  # the default
    if isinstance(value, (list, np.ndarray, OnDevice)):
        error, naming = TypeError, ""  # whatever is wrong with its numbers, there is but one
    assert_refused(lambda w: ONE_NUMBER[verb](w, value), error, naming, remedy=SAYS_WHAT_TO_PASS)


ANY_LENGTH = [kind for kind in BAD_NUMBERS if kind not in ("too few", "too many", "none")]


@pytest.mark.parametrize("kind", ANY_LENGTH)
def test_bad_lengths_for_fits(kind: str) -> None:
    value, error, naming = BAD_NUMBERS[kind]
    assert_refused(lambda w: w.alloc.fits(value), error, naming, remedy=SAYS_WHAT_TO_PASS)


# -- handles -----------------------------------------------------------------------------------

HANDLE_VERBS: dict[str, Callable[[World, Any], Any]] = {
    "rows": lambda w, x: w.alloc.rows(x),
    "committed": lambda w, x: w.alloc.committed(x),
    "allocated": lambda w, x: w.alloc.allocated(x),
    "decode_index": lambda w, x: w.alloc.decode_index(x),
    "batch": lambda w, x: w.alloc.batch(x),
    "extend": lambda w, x: w.alloc.extend(x, 12),
    "decode": lambda w, x: w.alloc.decode(x),
    "reserve": lambda w, x: w.alloc.reserve(x, 3),
    "commit": lambda w, x: w.alloc.commit(x, 1),
    "trim": lambda w, x: w.alloc.trim(x, 8),
    "release": lambda w, x: w.alloc.release(x),
    "release behind an event": lambda w, x: w.alloc.release(x, after=Query()),
    "release into the cache": lambda w, x: w.alloc.release(x, tokens=[prompt(2, PS)] * 2),
    "publish": lambda w, x: w.alloc.prefix.publish(x, [prompt(2, PS)] * 2),
    "slots": lambda w, x: w.alloc.slots(x, 0, 3),
    "pages": lambda w, x: w.alloc.pages(x),
    "runs": lambda w, x: w.alloc.runs(x if x is not None else object()),
    "plan extend": lambda w, x: w.alloc.plan(extend=(x, 12)),
    "plan decode": lambda w, x: w.alloc.plan(decode=(x, 1)),
    "plan reserve": lambda w, x: w.alloc.plan(reserve=(x, 1)),
    "fits a plan": lambda w, x: w.alloc.fits(w.plan, after_releasing=x),
    "fits lengths": lambda w, x: w.alloc.fits([1], after_releasing=x),
}
BAD_HANDLES: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "stale": (lambda w: w.gone, sgalloc.StaleHandle, "released"),
    "stale among good": (lambda w: [w.h[0], w.gone], sgalloc.StaleHandle, "released"),
    "never handed out": (lambda w: w.h[0] + (5 << 32), sgalloc.StaleHandle, "generation 7"),
    "bare row": (lambda w: 1, sgalloc.StaleHandle, "1"),
    "padding row": (lambda w: 1 << 32, sgalloc.StaleHandle, str(1 << 32)),
    "row past the last": (lambda w: (1 << 32) + 9, sgalloc.StaleHandle, "row 9"),
    "row far past the last": (lambda w: (1 << 32) + (1 << 31), sgalloc.StaleHandle, str(1 << 31)),
    "zero": (lambda w: 0, sgalloc.StaleHandle, "0"),
    "negative": (lambda w: -1, sgalloc.StaleHandle, "-1"),
    "negative handle": (lambda w: -w.h[0], sgalloc.StaleHandle, "-"),
    "beyond int64": (lambda w: BEYOND, ValueError, str(BEYOND)),
    "far beyond int64": (lambda w: [2**200], ValueError, str(2**200)[:20]),
    "duplicate": (lambda w: [w.h[1], w.h[1]], ValueError, "twice"),
    "duplicate among good": (lambda w: np.append(w.h, w.h[0]), ValueError, "twice"),
    "float": (lambda w: w.h.astype(float), TypeError, "float64"),
    "one float": (lambda w: 1.5, TypeError, "1.5"),
    "nan": (lambda w: float("nan"), TypeError, "nan"),
    "bool": (lambda w: True, TypeError, "True"),
    "None": (lambda w: None, TypeError, ""),
    "str": (lambda w: str(w.h[0]), TypeError, "handles"),
    "good and None": (lambda w: [int(w.h[0]), None], TypeError, "None"),
    "set": (lambda w: set(w.h.tolist()), TypeError, "{"),
    "nested": (lambda w: [w.h.tolist()], ValueError, "(1, 2)"),
    "device array": (lambda w: OnDevice(), TypeError, "on a device (host_support.OnDevice)"),
}  # fmt: skip


@pytest.mark.parametrize("verb", HANDLE_VERBS)
@pytest.mark.parametrize("kind", BAD_HANDLES)
def test_bad_handle(verb: str, kind: str) -> None:
    value, error, naming = BAD_HANDLES[kind]
    w = world()
    x = value(w)
    assert_refused(lambda w: HANDLE_VERBS[verb](w, x), error, naming, w)


# -- what the right numbers cannot do ------------------------------------------------------------

IMPOSSIBLE: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "extend past the row": (lambda w: w.alloc.extend(w.h, 41), sgalloc.RowTooNarrow, "41"),
    "decode past the row": (lambda w: w.alloc.decode(w.h, [32, 1]), sgalloc.RowTooNarrow, "44"),
    "reserve past the row": (lambda w: w.alloc.reserve(w.h, [0, 31]), sgalloc.RowTooNarrow, "44"),
    "reserve 2**60": (lambda w: w.alloc.reserve(w.h, 1 << 60), sgalloc.RowTooNarrow, "41"),
    "extend below C": (lambda w: w.alloc.extend(w.h, [9, 9]), ValueError, "trim"),
    "commit past A": (lambda w: w.alloc.commit(w.h, [0, 3]), sgalloc.CommitPastExtent, "13"),
    "commit 2**60": (lambda w: w.alloc.commit(w.h, 1 << 60), sgalloc.CommitPastExtent, "16"),
    "trim inside a shared page": (
        lambda w: w.alloc.trim(w.h, [9, 5]), sgalloc.WrongState, "edge 4"
    ),
    "trim a token into it": (lambda w: w.alloc.trim(w.h, [1, 1]), sgalloc.WrongState, "edge 0"),
    "more rows than free": (lambda w: w.alloc.open(6), sgalloc.OutOfRows, "6"),
    "2**60 rows": (lambda w: w.alloc.open(1 << 60), sgalloc.OutOfRows, str(1 << 60)),
    "no such group": (lambda w: w.alloc.available("window"), ValueError, "'window'"),
    "no group at all": (lambda w: w.alloc.available(None), ValueError, "None"),
    "a list as group": (lambda w: w.alloc.available(["full"]), ValueError, "['full']"),
    "slots past A": (lambda w: w.alloc.slots(w.h, 0, 13), ValueError, "13"),
    "slots backwards": (lambda w: w.alloc.slots(w.h, 5, 4), ValueError, "5"),
    "pages inside a page": (lambda w: w.alloc.pages(w.h[0], 2), ValueError, "2"),
    "pages past A": (lambda w: w.alloc.pages(w.h[0], 0, 17), ValueError, "17"),
    "pages of two": (lambda w: w.alloc.pages(w.h), ValueError, "2"),
    "pages of none": (lambda w: w.alloc.pages([]), ValueError, "0"),
    "rounding": (lambda w: w.alloc.reserve(w.h, 1, rounding="up"), ValueError, "'up'"),
    "rounding None": (lambda w: w.alloc.reserve(w.h, 1, rounding=None), ValueError, "None"),
    "rounding a list": (lambda w: w.alloc.reserve(w.h, 1, rounding=["host"]), ValueError, "host"),
    "a plan of a number": (lambda w: w.alloc.plan(extend=5), TypeError, "extend"),
    "a plan of handles alone": (
        lambda w: w.alloc.plan(decode=(w.h,)), (TypeError, ValueError), "decode"
    ),
    "a plan of three": (
        lambda w: w.alloc.plan(reserve=(w.h, 1, 2)), (TypeError, ValueError), "reserve"
    ),
    "the same in two parts": (
        lambda w: w.alloc.plan(extend=(w.h, 12), decode=(w.h[:1], 1)), ValueError, "once"
    ),
    "apply nothing": (lambda w: w.alloc.apply(None), TypeError, "None"),
    "apply a number": (lambda w: w.alloc.apply(7), TypeError, "7"),
    "apply another's plan": (lambda w: w.alloc.apply(world().plan), ValueError, "another"),
    "fits another's plan": (lambda w: w.alloc.fits(world().plan), ValueError, "another"),
    "write after a stream event": (
        lambda w: w.alloc.extend(w.h, 12, after=12345), TypeError, "12345"
    ),
    "write after an undone event": (
        lambda w: w.alloc.decode(w.h, 8, after=Query()), sgalloc.WrongState, "after"
    ),
    "slots after an undone event": (
        lambda w: w.alloc.decode(w.h, out=np.zeros(2, np.int32), after=Query()),
        sgalloc.WrongState, "after"
    ),
    "release after a number": (lambda w: w.alloc.release(w.h, after=5), TypeError, "5"),
    "release after a bool": (lambda w: w.alloc.release(w.h, after=True), TypeError, "True"),
    "trim after a str": (lambda w: w.alloc.trim(w.h, 8, after="done"), TypeError, "'done'"),
    "publish after an object": (
        lambda w: w.alloc.prefix.publish(w.h[0], prompt(2, PS), after=object()), TypeError, "object"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_impossible(kind: str) -> None:
    call, error, naming = IMPOSSIBLE[kind]
    assert_refused(call, error, naming)


def test_a_write_after_an_event_that_is_done_waits_for_nothing() -> None:
    w = world()
    for event in (Query(over=True), DoneValue(over=True)):
        w.alloc.decode(w.h, after=event)
    assert w.alloc.decode_index(w.h).tolist() == [3, 3]


# Steps for which every request holds enough pages already, or that name none.
NOTHING_TO_WRITE: dict[str, Callable[[World, Any], Any]] = {
    "extend": lambda w, event: w.alloc.extend(w.h, [16, 12], after=event),
    "decode": lambda w, event: w.alloc.decode(w.h, 2, after=event),
    "reserve": lambda w, event: w.alloc.reserve(w.h, [7, 2], after=event),
    "apply": lambda w, event: w.alloc.apply(w.alloc.plan(reserve=(w.h, 1)), after=event),
    "eagle": lambda w, event: eagle.prepare_for_decode(
        w.alloc, w.h, sizing.SpecConfig("eagle", 1, 1, 1), after=event
    ),
    "dflash": lambda w, event: dflash.prepare_for_decode(
        w.alloc, w.h, sizing.SpecConfig("dflash", draft_tokens=1), after=event
    ),
    "decode of none": lambda w, event: w.alloc.decode([], after=event),
    "decode of none, with slots": lambda w, event: w.alloc.decode(
        [], out=np.zeros(0, np.int32), after=event
    ),
}


FLAGS: dict[str, Callable[[World, Any], Any]] = {
    "evict_window": lambda w, flag: w.alloc.plan(reserve=(w.h, 1), evict_window=flag),
    "logical_only": lambda w, flag: w.alloc.plan(reserve=(w.h, 1), logical_only=flag),
    "counting_cache": lambda w, flag: w.alloc.fits([1], counting_cache=flag),
    "counting_cache ": lambda w, flag: w.alloc.available(counting_cache=flag),
    "device": lambda w, flag: w.alloc.check(device=flag),
    "force": lambda w, flag: w.alloc.abort(w.h, force=flag),
}
NO_FLAGS = {"str": "no", "int": 1, "zero": 0, "None": None, "handles": [1, 2], "array": np.ones(2)}


@pytest.mark.parametrize("verb", FLAGS)
@pytest.mark.parametrize("kind", NO_FLAGS)
def test_bad_flag(verb: str, kind: str) -> None:
    assert_refused(
        lambda w: FLAGS[verb](w, NO_FLAGS[kind]), TypeError, f"{verb.strip()} must be True or False"
    )


@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_may_be_one_of_numpy(flag: bool) -> None:
    w = world()
    wanted = np.bool_(flag)
    assert w.alloc.available(counting_cache=wanted) == (31 if flag else 25)
    # 28 pages: more than the 25 that are free, not more than the 31 with those of the cache.
    assert w.alloc.fits([40, 40, 32], counting_cache=wanted) is flag
    w.alloc.check(device=wanted)
    assert w.alloc.plan(reserve=(w.h, 1), evict_window=np.False_).fits


@pytest.mark.parametrize("verb", NOTHING_TO_WRITE)
def test_a_step_that_writes_nothing_waits_for_no_event(verb: str) -> None:
    call = NOTHING_TO_WRITE[verb]
    w, twin = world(), world()
    table = w.alloc.req_to_token.tobytes()
    call(w, Query())
    call(twin, None)
    assert w.alloc.req_to_token.tobytes() == table
    for ask in (w.alloc.committed, w.alloc.allocated, w.alloc.decode_index):
        assert ask(w.h).tolist() == getattr(twin.alloc, ask.__name__)(twin.h).tolist()
    w.alloc.check(device=True)


@pytest.mark.parametrize("verb", NOTHING_TO_WRITE)
def test_such_a_step_still_refuses_what_is_no_event(verb: str) -> None:
    assert_refused(lambda w: NOTHING_TO_WRITE[verb](w, object()), TypeError, "after=")


@pytest.mark.parametrize("verb", HANDLE_VERBS)
def test_a_stale_handle_says_what_to_do(verb: str) -> None:
    assert_refused(
        lambda w: HANDLE_VERBS[verb](w, w.gone), sgalloc.StaleHandle, "released", remedy=": drop it"
    )
