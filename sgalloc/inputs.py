"""Reading what callers hand in: host integers, one for all or one per request.

One integer is an int, a NumPy integer, or an array of no dimensions. Several are a list or tuple
of these, a NumPy array of any integer dtype, or what NumPy reads as one (a torch CPU tensor, a
``range``). All else is refused in one line that names the argument, the value and the remedy: a
TypeError for what is no integer on the host (bools, floats, NaN, strings, None; arrays on a
device, which are never copied off it), a ValueError for integers out of range, for a wrong number
of them, and for more than one dimension.

An array that is returned may be the caller's own memory: it is never written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class HostArray(Protocol):
    """What NumPy can read as an array; a torch CPU tensor is one."""

    def __array__(self, dtype: Any = ..., /) -> NDArray[Any]: ...
    def __len__(self) -> int: ...


Int64: TypeAlias = NDArray[np.int64]
Array: TypeAlias = Sequence[int] | NDArray[Any] | HostArray
Scalar: TypeAlias = int | np.integer[Any]
PerRequest: TypeAlias = Scalar | Array

# No length comes near this; bounding each operand keeps every sum inside int64.
LIMIT = 1 << 60
_INT64 = (-(1 << 63), (1 << 63) - 1)
_NAMED = {LIMIT: "2**60", _INT64[0]: "-2**63", _INT64[1]: "2**63 - 1"}
_EXACT = frozenset((int, np.int32, np.int64))  # what NumPy makes an int64 of, or says it cannot
_NOT_COUNTS = (bool, np.timedelta64)  # though subclasses of int and np.integer


def whole_number(
    value: Any, name: str, minimum: int = 0, maximum: int = LIMIT, meaning: str = ""
) -> int:
    """``value``, one integer, as a Python int within ``[minimum, maximum]``.

    ``meaning`` is what a refusal says to pass.
    """
    number = value if type(value) is int else _one(value, name, meaning or "an int")
    if minimum <= number <= maximum:
        return number
    raise _out_of_range(number, name, minimum, maximum, meaning)


def flag(value: Any, name: str) -> bool:
    """``value``, a bool or NumPy's, as a bool; what is merely true or false is a TypeError."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}: pass one of them")


def int64_array(value: Any, name: str) -> Int64:
    """``value`` as an int64 array ``(n,)``; one integer as ``(1,)``."""
    if type(value) is np.ndarray and value.dtype == np.int64 and value.ndim == 1:
        return value
    array = _flat(_integers(value, name, *_INT64), name)
    if array.dtype == np.uint64 and array.size:
        at = int(array.argmax())
        if array.item(at) > _INT64[1]:
            raise _out_of_range(array.item(at), f"{name}[{at}]", *_INT64)
    return array.astype(np.int64, copy=False)


def counts(value: Any, n: int, name: str) -> int | Int64:
    """``value`` as one int for all, or an int64 array ``(n,)``; from 0 to 2**60."""
    if type(value) is int and 0 <= value <= LIMIT:
        return value
    read = token_counts(value, name)
    if isinstance(read, int):
        return read
    if read.ndim > 1:
        read = _flat(read, name)
    if read.size != n:
        raise ValueError(f"{name} has {read.size} numbers for {n} requests: pass one, or {n}")
    return read


def token_counts(value: Any, name: str) -> int | Int64:
    """``value`` as an int, or as an int64 array of its shape; from 0 to 2**60."""
    if isinstance(value, (int, np.integer)):
        return whole_number(value, name, meaning="a token count")
    known = type(value) is np.ndarray and value.dtype.kind in "iu"
    array = value if known else _integers(value, name, 0, LIMIT)
    if not array.ndim:
        return token_counts(int(array), name)
    numbers = array.astype(np.int64, copy=False)
    if not numbers.size:
        return numbers
    # As uint64 a negative number is the largest: one pass finds both kinds of bad value. One past
    # int64 has become negative too, so the value is looked up where it came from.
    at = int(numbers.view(np.uint64).argmax())
    if not 0 <= array.item(at) <= LIMIT:
        raise _out_of_range(array.item(at), f"{name}[{at}]", 0, LIMIT, "a token count")
    return numbers


def columns(**values: Any) -> list[Int64]:
    """`token_counts` of each argument, as arrays ``(n,)``.

    One integer stands for every request; without arrays ``n`` is 1.
    """
    read = {name: token_counts(value, name) for name, value in values.items()}
    shapes = {name: v.shape for name, v in read.items() if not isinstance(v, int)}
    for name, shape in shapes.items():
        if len(shape) != 1:
            raise _not_flat(shape, name)
    if len(set(shapes.values())) > 1:
        lengths = ", ".join(f"{name} has {shape[0]}" for name, shape in shapes.items())
        raise ValueError(f"lengths do not match, {lengths}: pass one number per request, or an int")
    shape = next(iter(shapes.values()), (1,))
    return [np.full(shape, v, np.int64) if isinstance(v, int) else v for v in read.values()]


def request_lens(reqs: Iterable[Any]) -> dict[str, list[Any]]:
    """C and A of each of an engine's requests, as the lists that `columns` reads.

    They are ``kv.kv_committed_len``, or else ``kv_committed_len``, and ``kv.kv_allocated_len``.
    """
    if not isinstance(reqs, Iterable):
        raise TypeError(f"reqs must be a list of requests, got {shown(reqs)}: pass [request]")
    batch = list(reqs)
    try:
        committed = [r.kv.kv_committed_len for r in batch]
        allocated = [r.kv.kv_allocated_len for r in batch]
    except AttributeError:
        lens = [_lens_of(i, r) for i, r in enumerate(batch)]
        committed, allocated = [c for c, _ in lens], [a for _, a in lens]
    return {"kv_committed_len": committed, "kv_allocated_len": allocated}


def _lens_of(index: int, request: Any) -> tuple[Any, Any]:
    try:
        kv = request.kv
        owner = kv if hasattr(kv, "kv_committed_len") else request
        return owner.kv_committed_len, kv.kv_allocated_len
    except AttributeError as error:
        raise TypeError(
            f"reqs[{index}] cannot be sized, {error}: a request needs kv.kv_allocated_len, and "
            "kv.kv_committed_len or kv_committed_len"
        ) from None


def token_sequences(tokens: Any, n: int, single: bool) -> list[Int64 | None]:
    """``tokens`` as one int64 array a request; None where a request's are not known.

    Args:
        tokens: one sequence of ids a request; for a ``single`` request also a flat one.
        n: requests.
        single: whether the caller named one handle, not a sequence of handles.
    """
    if not _in_order(tokens):
        raise TypeError(
            f"tokens must be one sequence of ids per request, got {shown(tokens)}: pass a list"
        )
    if single and (not len(tokens) or not (tokens[0] is None or _in_order(tokens[0]))):
        tokens = [tokens]
    if len(tokens) != n:
        raise ValueError(
            f"tokens has {len(tokens)} sequences for {n} requests: pass one per request"
        )
    for at, ids in enumerate(tokens):
        if ids is not None and not _in_order(ids):
            raise TypeError(
                f"tokens[{at}] must be a sequence of ids, got {shown(ids)}: pass one per request"
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


def shown(value: Any) -> str:
    """Value and type in one line; the type alone where a repr might read a device."""
    if not _plain(value):
        return f"a {type(value).__name__}"
    kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _plain(value: Any) -> bool:
    """Whether it is a number, a text or a NumPy array, or made of these alone."""
    if isinstance(value, np.ndarray):
        return value.dtype != object or _plain(value.tolist())
    if isinstance(value, dict):
        return _plain([*value, *value.values()])
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_plain, value))
    return isinstance(value, (str, bytes, int, float, complex, np.generic, type(None)))


# -- through NumPy -------------------------------------------------------------------------------


def _one(value: Any, name: str, meaning: str) -> int:
    if _is_integer(type(value)):
        return int(value)
    if not isinstance(value, (list, tuple)):
        array = _as_numpy(value, name)
        if array.ndim == 0 and array.dtype.kind in "iu":
            return int(array)
    raise TypeError(f"{name} must be one integer, got {shown(value)}: pass {meaning}")


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, _NOT_COUNTS)


def _integers(value: Any, name: str, low: int, high: int) -> NDArray[Any]:
    """``value`` as an array of an integer dtype; the bounds are named for what none can hold."""
    if type(value) is int:
        if low <= value <= high:
            return np.array(value, np.int64)
        raise _out_of_range(value, name, low, high)
    if isinstance(value, (list, tuple)):
        return _from_list(value, name, low, high)
    array = _as_numpy(value, name)
    if array.dtype.kind in "iu":
        return array
    if array.ndim and not array.size:
        return np.empty(array.shape, np.int64)
    raise _not_integers(array if array.ndim else value, name)


def _from_list(value: Sequence[Any], name: str, low: int, high: int) -> NDArray[Any]:
    """Item by item where they are not all ints: NumPy takes a bool among ints for one."""
    kinds = set(map(type, value))
    if not kinds <= _EXACT:
        if all(map(_is_integer, kinds)):
            value = list(map(int, value))
        elif any(map(_has_dimensions, value)):
            return _nested(value, name)
        else:
            value = [_one(item, f"{name}[{i}]", "an int") for i, item in enumerate(value)]
    try:
        return np.array(value, np.int64)
    except OverflowError:
        i = next(i for i, number in enumerate(value) if not low <= number <= high)
        raise _out_of_range(value[i], f"{name}[{i}]", low, high) from None


def _has_dimensions(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return True
    return not on_device(item) and getattr(item, "ndim", 0) > 0


def _nested(value: Sequence[Any], name: str) -> Int64:
    """Refuses a list of sequences, unless they are empty."""
    shape = _shape(value)
    if shape is None:
        raise _not_integers(value, name)
    if 0 not in shape:
        raise _not_flat(shape, name)
    return np.empty(shape, np.int64)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of nested sequences, whose numbers are not read; None where lengths differ."""
    if not isinstance(value, (list, tuple)):
        return tuple(getattr(value, "shape", ()))
    shapes = set(map(_shape, value))
    inner = shapes.pop() if shapes else ()
    return None if shapes or inner is None else (len(value), *inner)


def _as_numpy(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    problem = "lives on a device"
    if not on_device(value):
        problem = "cannot be read by NumPy"
        with suppress(Exception):  # whatever the object says when asked for its numbers
            return np.asarray(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{name} {problem} ({kind}): host numbers are needed, pass a list, a NumPy array or a "
        "CPU tensor"
    )


def _flat(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.ndim > 1 and array.size:
        raise _not_flat(array.shape, name)
    return array.reshape(-1)


# -- refusals ------------------------------------------------------------------------------------


def _out_of_range(number: int, name: str, low: int, high: int, meaning: str = "") -> ValueError:
    between = f"from {_NAMED.get(low, low)} to {_NAMED.get(high, high)}"
    remedy = meaning or "a number in that range"
    return ValueError(f"{name} must be {between}, got {number}: pass {remedy}")


def _not_integers(value: Any, name: str) -> TypeError:
    return TypeError(f"{name} must be integers, got {shown(value)}: pass integers on the host")


def _not_flat(shape: tuple[int, ...], name: str) -> ValueError:
    return ValueError(f"{name} has shape {shape}: pass one number per request, shape (n,)")
