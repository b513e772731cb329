"""Checks on what callers hand in: host integers, one for all or one per request."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

_BOOLS = frozenset((bool, np.bool_))
# No length comes near this; bounding each operand keeps every sum inside int64.
LIMIT = 1 << 60


def whole_number(value: Any, name: str, minimum: int = 0, maximum: int = LIMIT) -> int:
    """``value`` as a Python int within ``[minimum, maximum]``.

    Raises:
        TypeError: not an integer (bools and floats are not).
        ValueError: out of range.
    """
    # A time difference counts as an integer to NumPy.
    odd = isinstance(value, (bool, np.bool_, np.timedelta64))
    if odd or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def int64_array(value: Any, name: str) -> Int64:
    """``value`` (int, sequence, NumPy array, torch CPU tensor) as a flat int64 array.

    Raises:
        TypeError: not integers, or an array that lives on a device.
        ValueError: more than one dimension, or a number outside int64.
    """
    if type(value) is np.ndarray and value.dtype == np.int64 and value.ndim == 1:
        return value
    if hasattr(type(value), "__cuda_array_interface__") and on_device(value):
        raise TypeError(
            f"{name} must be numbers on the host, got a device array "
            f"({type(value).__module__}.{type(value).__name__}): pass the host copy you keep"
        )
    if isinstance(value, (list, tuple)) and not _BOOLS.isdisjoint(map(type, value)):
        raise TypeError(f"{name} must be integers, got {_shown(value)}")
    try:
        array = np.asarray(value)
    except OverflowError:
        raise ValueError(f"{name} holds a number outside int64: {_shown(value)}") from None
    except Exception:
        # Whatever the caller's object says when it is asked for its numbers.
        raise TypeError(f"{name} must be integers, got {_shown(value)}") from None
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim > 1:
        raise ValueError(f"{name} must be flat, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        if array.dtype == object and all(type(v) is int for v in array.ravel()):
            raise ValueError(f"{name} holds a number outside int64: {_shown(value)}")
        raise TypeError(f"{name} must be integers, got {_shown(value)} ({array.dtype})")
    array = array.reshape(-1)
    if array.dtype == np.uint64 and int(array.max()) > LIMIT:
        raise ValueError(f"{name} holds a number outside int64: {int(array.max())}")
    return array.astype(np.int64)


def counts(value: Any, n: int, name: str) -> int | Int64:
    """``value`` as one int for all, or an int64 array of ``n``; none negative.

    Raises:
        TypeError: not integers, or an array that lives on a device.
        ValueError: negative, beyond what any length can be, or not ``n`` of them.
    """
    if type(value) is int:
        if 0 <= value <= LIMIT:
            return value
        return whole_number(value, name)
    if isinstance(value, (bool, np.bool_, np.integer)):
        return whole_number(value, name)
    array = int64_array(value, name)
    if np.ndim(value) == 0:
        return whole_number(array[0], name)
    if array.size != n:
        raise ValueError(f"{name} has {array.size} numbers for {n} requests: pass one, or {n}")
    if n:
        # As uint64 a negative number is the largest: one pass finds both kinds of bad value.
        worst = int(array[array.view(np.uint64).argmax()])
        if not 0 <= worst <= LIMIT:
            whole_number(worst, f"{name}[{int(array.view(np.uint64).argmax())}]")
    return array


def token_sequences(tokens: Any, n: int, single: bool) -> list[Int64 | None]:
    """``tokens`` as one int64 array a request; None where a request's are not known.

    Args:
        tokens: one sequence of ids a request; for a ``single`` request also a flat one.
        n: requests.
        single: whether the caller named one handle, not a sequence of handles.

    Raises:
        TypeError: not sequences of integers.
        ValueError: not ``n`` of them.
    """
    if not _in_order(tokens):
        raise TypeError(
            f"tokens must be one sequence of ids per request, got a {type(tokens).__name__}: "
            f"{_shown(tokens)}"
        )
    if single and (not len(tokens) or not (tokens[0] is None or _in_order(tokens[0]))):
        tokens = [tokens]
    if len(tokens) != n:
        raise ValueError(
            f"tokens has {len(tokens)} sequences for {n} requests: pass one per request"
        )
    for ids in tokens:
        if ids is not None and not _in_order(ids):
            raise TypeError(
                f"tokens must be one sequence of ids per request, got {_shown(ids)} for one"
            )
    return [None if ids is None else int64_array(ids, "tokens") for ids in tokens]


def _in_order(value: Any) -> bool:
    """Whether ``value`` is a sequence, array or tensor with at least one dimension."""
    if isinstance(value, (str, bytes, Mapping, Set)):
        return False
    return getattr(value, "ndim", 1) > 0 and hasattr(value, "__len__")


def on_device(value: Any) -> bool:
    """Whether an array lives in the memory of a GPU."""
    try:
        return getattr(value, "__cuda_array_interface__", None) is not None
    except Exception:
        # torch refuses to describe a tensor on a GPU that wants a gradient.
        return True


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
