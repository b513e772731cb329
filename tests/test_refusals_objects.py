"""Bad outputs, token ids, namespaces, matches and configurations are refused, changing nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import OnDevice, Query, fingerprint, make, prompt, unchanged
from refusal_world import PS, World, assert_refused, world

import sgalloc

# -- out ---------------------------------------------------------------------------------------

# Each of these writes five slots; the first four without taking a page, the last one with two.
OUT_VERBS: dict[str, Callable[[World, Any], Any]] = {
    "decode": lambda w, out: w.alloc.decode(w.h, [3, 2], out=out),
    "reserve": lambda w, out: w.alloc.reserve(w.h, [3, 2], out=out),
    "slots": lambda w, out: w.alloc.slots(w.h, 0, [3, 2], out=out),
    "apply": lambda w, out: w.alloc.apply(w.alloc.plan(decode=(w.h, [3, 2])), out=out),
    "extend by a page": lambda w, out: w.alloc.extend(w.h, [9, 15], out=out),
}


def locked(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


BAD_OUT: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too small": (lambda: np.zeros(4, np.int32), ValueError, "4"),
    "too large": (lambda: np.zeros(6, np.int64), ValueError, "6"),
    "empty": (lambda: np.zeros(0, np.int32), ValueError, "0"),
    "two dimensions": (lambda: np.zeros((5, 1), np.int32), ValueError, "(5, 1)"),
    "no dimension": (lambda: np.array(5), ValueError, "()"),
    "float": (lambda: np.zeros(5), TypeError, "float64"),
    "int16": (lambda: np.zeros(5, np.int16), TypeError, "int16"),
    "uint32": (lambda: np.zeros(5, np.uint32), TypeError, "uint32"),
    "uint64": (lambda: np.zeros(5, np.uint64), TypeError, "uint64"),
    "bool": (lambda: np.zeros(5, bool), TypeError, "bool"),
    "foreign byte order": (lambda: np.zeros(5, ">i4"), TypeError, ">i4"),
    "strided": (lambda: np.zeros(10, np.int32)[::2], ValueError, "contiguous"),
    "backwards": (lambda: np.zeros(5, np.int32)[::-1], ValueError, "contiguous"),
    "read-only": (lambda: locked(np.zeros(5, np.int32)), ValueError, "writable"),
    "list": (lambda: [0] * 5, TypeError, "list"),
    "number": (lambda: 5, TypeError, "int"),
    "str": (lambda: "out", TypeError, "str"),
    "device array": (OnDevice, TypeError, "OnDevice"),
}


@pytest.mark.parametrize("verb", OUT_VERBS)
@pytest.mark.parametrize("kind", BAD_OUT)
def test_bad_out(verb: str, kind: str) -> None:
    build, error, naming = BAD_OUT[kind]
    out = build()
    before = out.tobytes() if isinstance(out, np.ndarray) else repr(out)
    assert_refused(lambda w: OUT_VERBS[verb](w, out), error, naming)
    assert before == (out.tobytes() if isinstance(out, np.ndarray) else repr(out))


@pytest.mark.parametrize("verb", OUT_VERBS)
@pytest.mark.parametrize("kind", ["float", "too small", "strided", "gradient"])
def test_bad_torch_out(verb: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    build, error = {
        "float": (lambda: torch.zeros(5), TypeError),
        "too small": (lambda: torch.zeros(4, dtype=torch.int32), ValueError),
        "strided": (lambda: torch.zeros(10, dtype=torch.int64)[::2], ValueError),
        "gradient": (lambda: torch.zeros(5, requires_grad=True), TypeError),
    }[kind]
    assert_refused(lambda w: OUT_VERBS[verb](w, build()), error, None)


def test_a_refused_step_leaves_out_as_it_was() -> None:
    w = world()
    out = np.full(84, -1, np.int32)
    with unchanged(w.alloc), pytest.raises(sgalloc.RowTooNarrow):
        w.alloc.reserve(w.h, 42, out=out)
    assert (out == -1).all()


# -- token ids ---------------------------------------------------------------------------------


class NoTokens:
    """Neither a sequence nor anything else."""


TOKEN_VERBS: dict[str, Callable[[World, Any], Any]] = {
    "release": lambda w, t: w.alloc.release(w.h, tokens=t),
    "release a batch": lambda w, t: w.alloc.release(w.alloc.batch(w.h), tokens=t),
    "publish": lambda w, t: w.alloc.prefix.publish(w.h, t),
    "publish a batch": lambda w, t: w.alloc.prefix.publish(w.alloc.batch(w.h), t),
}
GOOD = prompt(2, PS)  # what both requests may have begun with
BAD_TOKENS: dict[str, tuple[Any, type[Exception] | tuple[type[Exception], ...], str]] = {
    "number": (5, TypeError, "5"),
    "str": ("ab", TypeError, "ab"),
    "object": (NoTokens(), TypeError, "NoTokens"),
    "one sequence for two": ([GOOD], ValueError, "1 sequences for 2"),
    "three sequences for two": ([GOOD] * 3, ValueError, "3 sequences for 2"),
    "none for two": ([], ValueError, "0 sequences for 2"),
    "two ids, not two sequences": ([5, 6], TypeError, "5"),
    "ids of one for two": (GOOD, (TypeError, ValueError), ""),
    "dict": ({0: GOOD, 1: GOOD}, TypeError, "dict"),
    "set": ({5, 6}, TypeError, "5"),
    "floats": ([GOOD, [1.5, 2.5]], TypeError, "1.5"),
    "nan": ([GOOD, [1, float("nan")]], TypeError, "nan"),
    "bools": ([GOOD, np.array([True, False])], TypeError, "bool"),
    "str for one": ([GOOD, "abcdefgh"], TypeError, "abcdefgh"),
    "nested for one": ([GOOD, [[1, 2], [3, 4]]], ValueError, "(2, 2)"),
    "beyond int64": ([GOOD, [2**63] * 8], ValueError, str(2**63)),
    "device array for one": ([GOOD, OnDevice()], TypeError, "on a device (host_support.OnDevice)"),
    "device array": (OnDevice(), TypeError, "OnDevice"),
    "device matrix": (OnDevice(2, 8), TypeError, "on a device (host_support.OnDevice)"),
    "another first page": ([GOOD, GOOD + 1], ValueError, "positions 0..3"),
    "another second page": ([GOOD, [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]], ValueError, "positions 4..7"),
    "another page after one with": ([GOOD, [*GOOD[:4], 9, 9, 9, 9]], ValueError, "positions 4..7"),
}


@pytest.mark.parametrize("verb", TOKEN_VERBS)
@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_bad_tokens(verb: str, kind: str) -> None:
    tokens, error, naming = BAD_TOKENS[kind]
    assert_refused(lambda w: TOKEN_VERBS[verb](w, tokens), error, naming)


@pytest.mark.parametrize(
    "tokens",
    [5, 1.5, [1.5], [True], "abcd", None, [[1, 2]], [2**63], OnDevice(), {1: 2}],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("verb", ["match", "release one", "publish one"])
def test_bad_tokens_of_one(verb: str, tokens: Any) -> None:
    if (verb, tokens) == ("release one", None) or (verb, tokens) == ("match", 5):
        return  # the default, and a prompt of one token
    if verb != "match" and tokens == [[1, 2]]:
        tokens = [[[1, 2]]]  # one sequence for one request would be right
    calls: dict[str, Callable[[World], Any]] = {
        "match": lambda w: w.alloc.prefix.match(tokens),
        "release one": lambda w: w.alloc.release(int(w.h[0]), tokens=tokens),
        "publish one": lambda w: w.alloc.prefix.publish(int(w.h[0]), tokens),
    }
    assert_refused(calls[verb], (TypeError, ValueError), None)


def test_a_contradiction_names_the_row_and_refuses_all() -> None:
    w = world()
    (_, row) = w.alloc.rows(w.h)
    for after in (None, Query()):
        with unchanged(w.alloc), pytest.raises(ValueError, match=f"row {row} "):
            w.alloc.release(w.h, tokens=[GOOD, GOOD[::-1]], after=after)
    assert w.alloc.committed(w.h).tolist() == [9, 10]


# -- namespaces and matches --------------------------------------------------------------------


@pytest.mark.parametrize("name", [1.5, float("nan"), True, [1], (), {}, object(), np.float64(1)])
def test_bad_namespace(name: Any) -> None:
    naming = "object" if type(name) is object else repr(name)[:8]
    assert_refused(lambda w: w.alloc.open(1, namespace=name), TypeError, naming)
    assert_refused(lambda w: w.alloc.open(0, namespace=name), TypeError, naming)
    assert_refused(lambda w: w.alloc.prefix.match(GOOD, namespace=name), TypeError, naming)


BAD_MATCHES: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "number": (lambda w: 5, TypeError, "5"),
    "None": (lambda w: None, TypeError, "None"),
    "str": (lambda w: "match", TypeError, "match"),
    "a list of numbers": (lambda w: [w.match, 5], TypeError, "5"),
    "pages": (lambda w: w.match.pages, TypeError, ""),
    "an array of no dimensions": (lambda w: np.array(5), TypeError, "5"),
    "of another allocator": (lambda w: [w.match, world().match], ValueError, "another"),
    "more than rows": (lambda w: [w.match] * 6, sgalloc.OutOfRows, "6"),
}


@pytest.mark.parametrize("kind", BAD_MATCHES)
def test_bad_matches(kind: str) -> None:
    build, error, naming = BAD_MATCHES[kind]
    w = world()
    matches = build(w)
    assert_refused(lambda w: w.alloc.open_with_prefix(matches), error, naming, w)


TABLE = np.zeros((2, 2), np.int32)
TAKES_OBJECTS: dict[str, Callable[[World], Any]] = {
    "matches": lambda w: w.alloc.open_with_prefix(TABLE),
    "a match": lambda w: w.alloc.open_with_prefix([TABLE]),
    "prefixes": lambda w: w.alloc.preallocate([8], prefix=TABLE),
    "a prefix": lambda w: w.alloc.preallocate([8], prefix=[TABLE]),
    "a namespace": lambda w: w.alloc.open(1, TABLE),
    "a namespace to match": lambda w: w.alloc.prefix.match([1], TABLE),
    "an event to release": lambda w: w.alloc.release(w.h[0], after=TABLE),
    "an event to trim": lambda w: w.alloc.trim(w.h[0], 1, after=TABLE),
    "an event to publish": lambda w: w.alloc.prefix.publish(w.h[0], GOOD, after=TABLE),
    "an event to abort": lambda w: w.alloc.abort(w.h[0], after=TABLE),
    "an event to decode": lambda w: w.alloc.decode(w.h[0], after=TABLE),
    "a plan": lambda w: w.alloc.apply(TABLE),
    "a part of a plan": lambda w: w.alloc.plan(decode=TABLE),
    "prefix_cache": lambda w: sgalloc.KVAllocator(**FIELDS, prefix_cache=TABLE),
    "window": lambda w: sgalloc.KVAllocator(**FIELDS, window=TABLE),
    "sparse": lambda w: sgalloc.KVAllocator(**FIELDS, sparse=TABLE),
    "device": lambda w: sgalloc.KVAllocator(**FIELDS, device=TABLE),
    "slot_map": lambda w: sgalloc.SlidingWindow(4, 4, slot_map=TABLE),
}


@pytest.mark.parametrize("kind", TAKES_OBJECTS)
def test_an_array_of_many_lines_is_refused_in_one(kind: str) -> None:
    w = world()
    with unchanged(w.alloc), pytest.raises(TypeError) as refused:
        TAKES_OBJECTS[kind](w)
    assert "int32 array" in str(refused.value) and "\n" not in str(refused.value)


def test_a_match_evicted_meanwhile_refuses_all() -> None:
    w = world()
    other = w.alloc.prefix.match(prompt(2, PS))
    w.alloc.prefix.clear()  # leaves the two pages that a request shares
    with unchanged(w.alloc), pytest.raises(sgalloc.StalePlan, match="again"):
        w.alloc.open_with_prefix([other, w.match])
    assert w.alloc.open_with_prefix(other).size == 1


def test_without_a_prefix_cache_there_is_nothing_to_match() -> None:
    alloc = make(4, 16)
    match = world().match
    for use in (lambda: alloc.prefix, lambda: alloc.open_with_prefix(match)):
        with unchanged(alloc), pytest.raises(ValueError, match="prefix_cache=True"):
            use()


# -- configurations ----------------------------------------------------------------------------

FIELDS = {"num_pages": 8, "page_size": 4, "max_requests": 3, "row_width": 16}
BAD_FIELD: dict[str, tuple[Any, type[Exception]]] = {
    "zero": (0, ValueError),
    "negative": (-1, ValueError),
    "beyond int32": (1 << 31, ValueError),
    "beyond int64": (1 << 63, ValueError),
    "float": (4.0, TypeError),
    "nan": (float("nan"), TypeError),
    "bool": (True, TypeError),
    "None": (None, TypeError),
    "str": ("4", TypeError),
    "list": ([4], TypeError),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", BAD_FIELD)
def test_a_bad_configuration_names_its_field(field: str, kind: str) -> None:
    value, error = BAD_FIELD[kind]
    with pytest.raises(error) as refused:
        sgalloc.KVAllocator(**{**FIELDS, field: value}, device="cpu")
    message = str(refused.value)
    assert field in message and str(value) in message and "\n" not in message


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"row_width": 3}, ["row_width", "3", "4"]),  # not even one page
        ({"num_pages": 1 << 29}, ["num_pages", str(1 << 29)]),  # the last slot is 2**31 + 3
        ({"page_size": 1 << 29, "row_width": 1 << 29}, ["num_pages", str(1 << 29)]),
        ({"max_requests": 2**31 - 3, "row_width": 2**31 - 1}, ["max_requests"]),
    ],
)
def test_what_cannot_be_addressed_is_refused(fields: dict[str, int], naming: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        sgalloc.KVAllocator(**{**FIELDS, **fields}, device="cpu")
    message = str(refused.value)
    assert all(part in message for part in naming) and "\n" not in message


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("device", "tpu", ValueError),
        ("device", "", ValueError),
        ("device", 0, TypeError),
        ("device", None, TypeError),
        ("prefix_cache", 1, TypeError),
        ("prefix_cache", None, TypeError),
        ("prefix_cache", "yes", TypeError),
    ],
)
def test_a_bad_option_names_its_field(option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        sgalloc.KVAllocator(**FIELDS, **{option: value})
    assert option in str(refused.value) and repr(value) in str(refused.value)


def test_numpy_integers_configure_as_well() -> None:
    for kind in (np.int32, np.uint64, np.array):
        alloc = sgalloc.KVAllocator(*(kind(n) for n in FIELDS.values()), device="auto")
        assert alloc.req_to_token.shape == (4, 16)
        assert all(type(getattr(alloc, field)) is int for field in FIELDS)


# -- all of it at once ---------------------------------------------------------------------------


def test_the_fingerprint_sees_every_kind_of_change() -> None:
    """The tests above prove nothing if the comparison is blind; so each change must show."""
    changes: list[Callable[[World], Any]] = [
        lambda w: w.alloc.open(),
        lambda w: w.alloc.decode(w.h[0], 0),
        lambda w: w.alloc.commit(w.h[0], 1),
        lambda w: w.alloc.reserve(w.h[0], 8),
        lambda w: w.alloc.trim(w.h[0], 9),
        lambda w: w.alloc.release(w.h[0]),
        lambda w: w.alloc.prefix.publish(w.h[0], GOOD),
        lambda w: w.alloc.prefix.match(prompt(5, PS, seed=1)),
        lambda w: w.alloc.prefix.clear(),
        lambda w: w.alloc.open_with_prefix(w.match),
        lambda w: w.alloc.req_to_token.__setitem__((7, 40), 1),
        lambda w: w.alloc._core.pool._stack[:2].sort(),
        lambda w: w.alloc._ledger._row_stack[:2].sort(),
        lambda w: w.alloc._ledger.namespace.update({1: "x"}),
    ]
    for change in changes:
        w = world()
        before = fingerprint(w.alloc)
        assert fingerprint(w.alloc) == before
        change(w)
        assert fingerprint(w.alloc) != before
