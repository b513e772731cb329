"""What sizing refuses: each with one line that names the argument and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgalloc.sizing import (
    SpecConfig,
    alloc_len_per_decode,
    alloc_reserve_per_decode,
    ceil_align,
    extra_context_len,
    floor_align,
    new_tokens_required_next_decode,
    num_new_pages,
    num_pages_for,
    page_aligned_decode_alloc_lens,
    row_width,
    watermarks,
)

EAGLE = SpecConfig("eagle", steps=3, topk=2, draft_tokens=4)


def engine_lens(reqs: Any = (), reserve: Any = 1, page_size: Any = 16) -> Any:
    return page_aligned_decode_alloc_lens(reqs, reserve=reserve, page_size=page_size)


def request(committed: Any, allocated: Any) -> Any:
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated)
    return SimpleNamespace(kv=kv)


class DeviceArray:
    """Says that it lives on a device, and fails the test when it is copied off it."""

    shape = (2,)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "<i8", "data": (4096, False), "version": 3}

    def _copied(self, *args: Any, **kwargs: Any) -> Any:
        pytest.fail("a device array was copied to the host")

    __array__ = __iter__ = __len__ = __getitem__ = __index__ = __int__ = __repr__ = _copied


class ShyDeviceArray(DeviceArray):
    """Will not even describe itself, as torch for a device tensor with a gradient."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("Can't get __cuda_array_interface__ on a tensor that requires grad")


class Unreadable:
    """An array by name alone."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("no storage")


# name of the argument, a call that takes its value; the other arguments are good
ONE_NUMBER: list[tuple[str, Callable[[Any], Any]]] = [
    ("page_size", lambda v: alloc_len_per_decode(None, v)),
    ("page_size", lambda v: alloc_len_per_decode(EAGLE, v)),
    ("page_size", lambda v: alloc_reserve_per_decode(EAGLE, v)),
    ("page_size", lambda v: extra_context_len(None, v)),
    ("page_size", lambda v: row_width(64, EAGLE, v)),
    ("page_size", lambda v: num_pages_for(5, v)),
    ("page_size", lambda v: num_new_pages([0], [1], v)),
    ("page_size", lambda v: watermarks([1], [1], 1, v)),
    ("page_size", lambda v: engine_lens(page_size=v)),
    ("page_size", lambda v: new_tokens_required_next_decode([], [], v)),
    ("m", lambda v: ceil_align(5, v)),
    ("m", lambda v: floor_align([5], v)),
    ("context_len", lambda v: row_width(v, EAGLE, 16)),
    ("steps", lambda v: SpecConfig("eagle", v, 1, 4)),
    ("topk", lambda v: SpecConfig("eagle", 3, v, 4)),
    ("draft_tokens", lambda v: SpecConfig("eagle", 3, 1, v)),
    ("draft_tokens", lambda v: SpecConfig("dflash", draft_tokens=v)),
    ("draft_tokens", lambda v: SpecConfig("ngram", draft_tokens=v)),
    ("draft_tokens", lambda v: SpecConfig("uno", draft_tokens=v)),
    ("topk", lambda v: SpecConfig("dflash", topk=v, draft_tokens=4)),
    ("topk", lambda v: SpecConfig("none", topk=v)),
]

PER_REQUEST: list[tuple[str, Callable[[Any], Any]]] = [
    ("x", lambda v: ceil_align(v, 16)),
    ("x", lambda v: floor_align(v, 16)),
    ("tokens", lambda v: num_pages_for(v, 16)),
    ("prefix_lens", lambda v: num_new_pages(v, [9, 9], 16)),
    ("seq_lens", lambda v: num_new_pages([0, 0], v, 16)),
    ("committed", lambda v: watermarks(v, [16, 16], 1, 16)),
    ("allocated", lambda v: watermarks([1, 1], v, 1, 16)),
    ("reserve", lambda v: watermarks([1, 1], [16, 16], v, 16)),
    ("reserve", lambda v: engine_lens([request(1, 1), request(2, 2)], v)),
    ("committed", lambda v: new_tokens_required_next_decode(v, [16, 16], 16)),
    ("allocated", lambda v: new_tokens_required_next_decode([1, 1], v, 16)),
    ("allocated", lambda v: new_tokens_required_next_decode([1, 1], v, 16, EAGLE)),
    ("committed", lambda v: new_tokens_required_next_decode(v, [1, 1], 16, EAGLE, "conservative")),
]

NOT_INTEGERS = [True, np.True_, 1.0, 16.5, float("nan"), np.float64(2), None, "16", 1j, b"1",
                Fraction(3), np.timedelta64(3), object(), {3}]  # fmt: skip

NOT_INTEGER_ARRAYS = [
    [1, 2.0],
    [1, float("nan")],
    [1, True],
    [np.False_, 1],
    [1, None],
    [1, "2"],
    [[1], [1, 2]],
    [np.timedelta64(1), 1],
    np.array([1.0, 2.0]),
    np.array([1.0, np.nan], np.float32),
    np.array([True, False]),
    np.array([1, 2], object),
    np.array([1, 2], "m8[s]"),
    np.array(["1", "2"]),
    np.array([1 + 0j, 2]),
]


def refused(
    kind: type[Exception], name: str, call: Callable[[Any], Any], value: Any, *words: str
) -> None:
    with pytest.raises(kind) as caught:
        call(value)
    message = str(caught.value)
    assert re.match(rf"{name}(\[\d+\])? ", message), message
    assert "\n" not in message
    assert len(message) < 250
    assert re.search(r"\b(pass|use|needs|build)\b", message), message
    for word in words:
        assert word in message


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize(("name", "call"), ONE_NUMBER + PER_REQUEST)
def test_what_is_no_integer(name: str, call: Callable[[Any], Any], value: Any) -> None:
    refused(TypeError, name, call, value)


@pytest.mark.parametrize("value", NOT_INTEGER_ARRAYS, ids=repr)
@pytest.mark.parametrize(("name", "call"), PER_REQUEST)
def test_arrays_of_other_than_integers(name: str, call: Callable[[Any], Any], value: Any) -> None:
    refused(TypeError, name, call, value)


@pytest.mark.parametrize(("name", "call"), ONE_NUMBER)
def test_one_number_has_to_be_one(name: str, call: Callable[[Any], Any]) -> None:
    for value in ([16], (16, 16), np.array([16])):
        refused(TypeError, name, call, value, "one integer")


@pytest.mark.parametrize("value", [0, -1, np.int64(0), 2**60 + 1, 2**64])
@pytest.mark.parametrize(("name", "call"), ONE_NUMBER)
def test_one_number_out_of_range(name: str, call: Callable[[Any], Any], value: Any) -> None:
    refused(ValueError, name, call, value, str(value), "from 1 to 2**60")


@pytest.mark.parametrize("field", ["steps", "draft_tokens"])
def test_without_speculation_fields_may_be_zero_but_not_negative(field: str) -> None:
    refused(ValueError, field, lambda v: SpecConfig("none", **{field: v}), -1, "from 0 to 2**60")
    refused(TypeError, field, lambda v: SpecConfig("none", **{field: v}), 0.0)
    assert getattr(SpecConfig("none", **{field: 0}), field) == 0


@pytest.mark.parametrize(
    ("value", "place", "number"),
    [
        (-1, "", "-1"),
        (np.int32(-1), "", "-1"),
        (2**60 + 1, "", str(2**60 + 1)),
        (2**63, "", str(2**63)),
        (np.uint64(2**63), "", str(2**63)),
        ([3, -7], "[1]", "-7"),
        ([2**63, 3], "[0]", str(2**63)),
        ([3, -(2**63)], "[1]", str(-(2**63))),
        ([3, -(2**70)], "[1]", str(-(2**70))),
        ([2**60 + 1, 1], "[0]", str(2**60 + 1)),
        ([np.uint64(2**63), 3], "[0]", str(2**63)),
        (np.array([-(2**31), 5], np.int32), "[0]", str(-(2**31))),
        (np.array([3, 2**63 - 1]), "[1]", str(2**63 - 1)),
        (np.array([3, 2**64 - 1], np.uint64), "[1]", str(2**64 - 1)),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("name", "call"), PER_REQUEST)
def test_numbers_out_of_range(
    name: str, call: Callable[[Any], Any], value: Any, place: str, number: str
) -> None:
    refused(ValueError, name, call, value, f"{name}{place} must", number, "from 0 to 2**60")


def test_the_largest_numbers_pass() -> None:
    """Alone and beside small ones, at the first place and at a later one."""
    assert ceil_align([2**60, 1], 2).tolist() == [2**60, 2]
    assert ceil_align([1, 2**60], 2).tolist() == [2, 2**60]
    assert watermarks([2**60, 3], [2**60, 1], 2**60, 2**60)[1].tolist() == [2**61, 2**61]


@pytest.mark.parametrize(("name", "call"), ONE_NUMBER + PER_REQUEST)
def test_device_arrays_are_never_copied(name: str, call: Callable[[Any], Any]) -> None:
    refused(TypeError, name, call, DeviceArray(), "lives on a device", "host numbers are needed")
    refused(TypeError, name, call, ShyDeviceArray(), "lives on a device")
    refused(TypeError, name, call, Unreadable(), "cannot be read", "host numbers are needed")


def test_device_numbers_inside_lists_and_requests_are_never_copied() -> None:
    objects = np.empty(1, object)
    objects[0] = DeviceArray()
    for value in ([DeviceArray(), 1], [1, ShyDeviceArray()], [[DeviceArray(), 1]], objects):
        refused(TypeError, "committed", lambda v: watermarks(v, [1, 1], 1, 16), value)
    refused(TypeError, "kv_allocated_len", engine_lens, [request(1, DeviceArray())])


def test_torch_tensors_that_are_no_host_integers() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([True, False]),
        torch.empty(2, dtype=torch.int64, device="meta"),
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor(1.0),
        torch.tensor(True),
        [1, torch.tensor(True)],
    ):
        refused(TypeError, "committed", lambda v: watermarks(v, [1, 1], 1, 16), tensor)
    refused(ValueError, "committed", lambda v: watermarks(v, 1, 1, 16), torch.tensor([1, -1]))


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        (lambda: watermarks([1, 2], [16], 1, 16), ("committed has 2", "allocated has 1")),
        (lambda: watermarks([1, 2], [16, 16], [1], 16), ("committed has 2", "reserve has 1")),
        (lambda: watermarks([1], [16], [], 16), ("allocated has 1", "reserve has 0")),
        (lambda: watermarks(5, [16, 16], [1, 2, 3], 16), ("allocated has 2", "reserve has 3")),
        (lambda: num_new_pages([0], [1, 2], 16), ("prefix_lens has 1", "seq_lens has 2")),
        (
            lambda: new_tokens_required_next_decode([1], [16, 16], 16),
            ("committed has 1", "allocated has 2"),
        ),
        (lambda: engine_lens([request(1, 1)], [1, 2]), ("kv_allocated_len has 1", "reserve has 2")),
    ],
)
def test_lengths_that_do_not_match(call: Callable[[], Any], counts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"lengths do not match.*pass one number per") as caught:
        call()
    assert all(count in str(caught.value) for count in counts)


@pytest.mark.parametrize("value", [[[1, 2]], np.ones((2, 1), int), np.zeros((0, 2))], ids=repr)
@pytest.mark.parametrize(("name", "call"), PER_REQUEST[3:])
def test_more_than_one_dimension(name: str, call: Callable[[Any], Any], value: Any) -> None:
    refused(ValueError, name, call, value, f"shape {np.shape(value)}")
    if isinstance(value, list):  # rounding takes arrays of any shape, but no list of lists
        refused(ValueError, "x", lambda v: ceil_align(v, 16), value, "shape (1, 2)")


def test_a_length_below_its_prefix() -> None:
    with pytest.raises(ValueError, match=r"seq_lens\[2\] = 5 is below prefix_lens\[2\] = 8: pass"):
        num_new_pages([0, 4, 8, 9], [1, 4, 5, 2], 16)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 1 is below prefix_lens\[0\] = 2"):
        num_new_pages(2, 1, 64)  # in one page either way


@pytest.mark.parametrize("algorithm", ["EAGLE", "", "medusa", "eagle "])
def test_unknown_algorithm(algorithm: str) -> None:
    refused(ValueError, "algorithm", SpecConfig, algorithm, "'none', 'eagle', 'dflash'")


@pytest.mark.parametrize("algorithm", [None, 3, True, b"eagle", ["eagle"]])
def test_algorithm_of_another_type(algorithm: Any) -> None:
    refused(TypeError, "algorithm", SpecConfig, algorithm)


@pytest.mark.parametrize("spec", ["eagle", 4, {"algorithm": "eagle"}, SpecConfig])
def test_spec_of_another_type(spec: Any) -> None:
    for call in (
        lambda v: alloc_len_per_decode(v, 16),
        lambda v: alloc_reserve_per_decode(v, 16),
        lambda v: extra_context_len(v, 16),
        lambda v: row_width(64, v, 16),
        lambda v: new_tokens_required_next_decode([1], [16], 16, v),
    ):
        refused(TypeError, "spec", call, spec)


@pytest.mark.parametrize("estimate", ["loose", "", None, "TIGHT"])
@pytest.mark.parametrize("spec", [None, EAGLE])
def test_unknown_estimate(estimate: Any, spec: SpecConfig | None) -> None:
    refused(
        ValueError,
        "estimate",
        lambda v: new_tokens_required_next_decode([1], [16], 16, spec, v),
        estimate,
        "'tight' or 'conservative'",
    )


def test_a_reserve_of_the_spec_that_is_past_every_count() -> None:
    spec = SpecConfig("eagle", steps=2**40, topk=2**40, draft_tokens=1)
    with pytest.raises(ValueError, match="reserve must be from 0"):
        new_tokens_required_next_decode([1], [16], 16, spec)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(kv=None),
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=1)),
        SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=1)),
        SimpleNamespace(kv=None, kv_committed_len=1),
    ],
    ids=repr,
)
def test_a_request_without_lengths(broken: Any) -> None:
    refused(TypeError, "reqs", engine_lens, [request(1, 1), broken], "reqs[1]", "kv_allocated_len")


def test_requests_that_are_no_list() -> None:
    refused(TypeError, "reqs", engine_lens, request(1, 1), "got a SimpleNamespace")


@pytest.mark.parametrize(
    ("kind", "committed", "allocated", "words"),
    [
        (ValueError, -1, 1, "kv_committed_len[1]"),
        (ValueError, 1, -1, "kv_allocated_len[1]"),
        (TypeError, None, 1, "kv_committed_len[1]"),
        (TypeError, 1, 2.0, "kv_allocated_len[1]"),
        (TypeError, True, 1, "kv_committed_len[1]"),
    ],
)
def test_requests_with_bad_lengths(
    kind: type[Exception], committed: Any, allocated: Any, words: str
) -> None:
    name = words.split("[")[0]
    refused(kind, name, engine_lens, [request(1, 1), request(committed, allocated)], words)
