"""The arithmetic of KV sizing: tokens in, tokens out.

Pure functions over host numbers. Every token count is an integer from 0 to 2**60, so that no sum
of two leaves int64. One number per request may be a list, a tuple, a NumPy array of any integer
dtype, or what NumPy reads as one (a torch CPU tensor, a ``range``); a single integer stands for
every request, and single integers alone for one request.

``page_size`` is any integer >= 1. Under decode context parallelism the page is
``page_size * dcp_size``: the caller passes that product. ``spec`` None means no speculation.

Errors, for every function: TypeError for what is not an integer on the host (floats, NaN, bools,
strings, None, device arrays); ValueError for an integer out of range and for lengths that do not
match. The message names the argument and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt


class _HostArray(Protocol):
    """What NumPy can read as an array; a torch CPU tensor is one."""

    def __array__(self, dtype: Any = ..., /) -> npt.NDArray[Any]: ...
    def __len__(self) -> int: ...


_Int64: TypeAlias = npt.NDArray[np.int64]
_Array: TypeAlias = Sequence[int] | npt.NDArray[Any] | _HostArray
_Scalar: TypeAlias = int | np.integer[Any]
_PerRequest: TypeAlias = _Scalar | _Array

_LIMIT = 1 << 60
_NOT_COUNTS = (bool, np.timedelta64)  # though subclasses of int and np.integer
_ALGORITHMS = ("none", "eagle", "dflash", "ngram", "uno")
_ROW_SLACK = 4  # slots past the context length that every row keeps, reserve or not


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """What a speculative decoder writes in one step.

    algorithm: ``"none"``, ``"eagle"`` (a chain or a tree of drafts), ``"dflash"`` (a block of
    drafts), ``"ngram"`` (drafts by lookup: no branch pages), ``"uno"`` (one clean root position
    beside the drafts).
    steps: draft depth; at least 1 for eagle.
    topk: branches per step; at least 1.
    draft_tokens: tokens verified per step, for dflash its block; at least 1 with speculation.

    Where an adaptive engine changes these numbers while it runs, size rows with the largest and
    reserve with those of the current step. A number that the algorithm has no use for is
    validated and otherwise ignored. NumPy integers are stored as Python ints.

    Raises ValueError for an unknown algorithm or a number that is too small, and TypeError for a
    number that is not an integer, each naming the field.

    >>> SpecConfig("dflash")
    Traceback (most recent call last):
    ValueError: draft_tokens must be from 1 to 2**60, got 0: pass the tokens dflash verifies a step
    """

    algorithm: str = "none"
    steps: int = 0
    topk: int = 1
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        """Validate every field."""
        name = self.algorithm
        if not isinstance(name, str):
            raise TypeError(f"algorithm must be a str, got {_show(name)}: use one of {_ALGORITHMS}")
        if name not in _ALGORITHMS:
            raise ValueError(f"algorithm {_show(name)} is unknown: use one of {_ALGORITHMS}")
        for field, low, meaning in (
            ("steps", int(name == "eagle"), f"the draft depth of {name}"),
            ("topk", 1, "the branches per step, 1 for a chain"),
            ("draft_tokens", int(name != "none"), f"the tokens {name} verifies a step"),
        ):
            object.__setattr__(self, field, _single(field, getattr(self, field), low, meaning))


def alloc_len_per_decode(spec: SpecConfig | None, page_size: int) -> int:
    """Tokens that one decode step of a request may write: 1 without speculation.

    With a tree of drafts on pages every branch has pages of its own, which begin with a copy of
    the request's last page; at worst that page lacks one token.

    >>> eagle = SpecConfig("eagle", steps=5, topk=4, draft_tokens=8)
    >>> alloc_len_per_decode(eagle, 1), alloc_len_per_decode(eagle, 16)
    (20, 128)
    """
    page = _page_size(page_size)
    draft = _drafting(spec)
    if draft is None:
        return 1
    if draft.algorithm == "dflash":
        return draft.draft_tokens
    if draft.algorithm == "uno":
        return draft.draft_tokens + 1
    if draft.algorithm == "ngram" or page == 1 or draft.topk == 1:
        return max(draft.steps * draft.topk, draft.draft_tokens)
    return max(_ceil(page - 1 + draft.steps, page) * draft.topk, draft.draft_tokens)


def alloc_reserve_per_decode(spec: SpecConfig | None, page_size: int) -> int:
    """Tokens past C that a decode step holds: twice `alloc_len_per_decode`.

    The second half absorbs the lag of one step with which an overlapped engine learns C.

    >>> alloc_reserve_per_decode(SpecConfig("dflash", draft_tokens=17), 1)
    34
    """
    return 2 * alloc_len_per_decode(spec, page_size)


def extra_context_len(spec: SpecConfig | None, page_size: int) -> int:
    """Tokens of headroom that a row needs past the context length.

    Enough, at every page size, for any C up to the context length, the reserve on top of it, and
    the rounding up to a page.

    >>> extra_context_len(SpecConfig("dflash", draft_tokens=17), 1), extra_context_len(None, 16)
    (34, 19)
    """
    page = _page_size(page_size)
    draft = _drafting(spec)
    if draft is None:
        return _ROW_SLACK + page - 1
    return max(_ROW_SLACK + draft.draft_tokens, alloc_reserve_per_decode(draft, page) + page - 1)


def row_width(context_len: int, spec: SpecConfig | None, page_size: int) -> int:
    """Slots in a row: ``context_len`` (tokens, >= 1) plus the headroom, in whole pages.

    >>> row_width(64, SpecConfig("dflash", draft_tokens=17), 1)
    98
    """
    page = _page_size(page_size)
    context = _single("context_len", context_len, 1, "the model's context length in tokens")
    return _ceil(context + extra_context_len(spec, page), page)


@overload
def ceil_align(x: _Scalar, m: int) -> int: ...
@overload
def ceil_align(x: _Array, m: int) -> _Int64: ...
def ceil_align(x: _PerRequest, m: int) -> int | _Int64:
    """``x`` rounded up to a multiple of ``m`` (>= 1): an int, or a new int64 array of x's shape.

    >>> ceil_align(17, 16), ceil_align([0, 1, 16, 17], 16)
    (32, array([ 0, 16, 16, 32]))
    """
    step = _single("m", m, 1, "the unit to align to")
    value, _ = _read("x", x)
    return _ceil(value, step) if isinstance(value, int) else _round_up(value.copy(), step)


@overload
def floor_align(x: _Scalar, m: int) -> int: ...
@overload
def floor_align(x: _Array, m: int) -> _Int64: ...
def floor_align(x: _PerRequest, m: int) -> int | _Int64:
    """``x`` rounded down to a multiple of ``m`` (>= 1): an int, or a new int64 array of x's shape.

    >>> floor_align(17, 16)
    16
    """
    step = _single("m", m, 1, "the unit to align to")
    value, _ = _read("x", x)
    return value // step * step


@overload
def num_pages_for(tokens: _Scalar, page_size: int) -> int: ...
@overload
def num_pages_for(tokens: _Array, page_size: int) -> _Int64: ...
def num_pages_for(tokens: _PerRequest, page_size: int) -> int | _Int64:
    """Pages that hold ``tokens`` tokens: an int, or a new int64 array of the same shape.

    >>> num_pages_for([0, 1, 64, 65], 64)
    array([0, 1, 1, 2])
    """
    page = _page_size(page_size)
    value, _ = _read("tokens", tokens)
    return -(-value // page)


def num_new_pages(prefix_lens: _PerRequest, seq_lens: _PerRequest, page_size: int) -> int:
    """Pages that requests take when they grow from ``prefix_lens`` to ``seq_lens`` tokens.

    Counted per request, ``sum(ceil(seq / page_size) - ceil(prefix / page_size))``: two requests
    never share the rest of a page. A length below its prefix is a ValueError.

    >>> num_new_pages([0, 31, 32], [2, 32, 33], 32)
    2
    """
    page = _page_size(page_size)
    (prefix, seq), (_, top) = _read_columns(prefix_lens=prefix_lens, seq_lens=seq_lens)
    if (seq < prefix).any():
        i = int((seq < prefix).argmax())
        raise ValueError(
            f"seq_lens[{i}] = {seq[i]} is below prefix_lens[{i}] = {prefix[i]}: "
            "pass lengths that include the prefix"
        )
    return _total(-(-seq // page) + (-prefix // page), top)


def watermarks(
    committed: _PerRequest, allocated: _PerRequest, reserve: _PerRequest, page_size: int
) -> tuple[_Int64, _Int64, int]:
    """How far each request's extent must reach for its next decode step.

    committed, allocated, reserve: tokens, shape (n,) each, or an integer for every request.
    Returns ``(cur, nxt, needed)``: ``cur`` is ``allocated`` and
    ``nxt = max(allocated, ceil_align(committed + reserve, page_size))``, both new int64 arrays of
    shape (n,) that share no memory with the input; ``needed`` is ``sum(nxt - cur)``, tokens.

    ``nxt`` never falls below ``cur``, so a reserve that shrinks needs nothing. ``allocated`` may
    end inside a page: ``needed`` then counts the rest of that page too, which the request already
    owns, and where ``cur`` lies past the rounded reserve ``nxt`` keeps it unrounded. ``allocated``
    below ``committed`` is no error here: growth is counted from ``allocated``.

    >>> watermarks([31, 40], [32, 64], 8, 16)
    (array([32, 64]), array([48, 64]), 16)
    """
    page = _page_size(page_size)
    columns, tops = _read_columns(committed=committed, allocated=allocated, reserve=reserve)
    return _watermarks(columns, tops, page)


def page_aligned_decode_alloc_lens(
    reqs: Iterable[Any], *, reserve: _PerRequest, page_size: int
) -> tuple[list[int], list[int], int]:
    """`watermarks` over an engine's request objects, as lists of Python ints.

    Reads ``r.kv.kv_allocated_len`` of each request, and ``r.kv.kv_committed_len`` or, where ``kv``
    has no such attribute, ``r.kv_committed_len``. Changes no request. Returns
    ``(cur, nxt, num_needed_tokens)`` in the order of ``reqs``; ``([], [], 0)`` for no requests.
    A request without these attributes is a TypeError.

    >>> from types import SimpleNamespace as Obj
    >>> kv = Obj(kv_committed_len=30, kv_allocated_len=30)
    >>> page_aligned_decode_alloc_lens([Obj(kv=kv)], reserve=8, page_size=16)
    ([30], [48], 18)
    """
    page = _page_size(page_size)
    if not isinstance(reqs, Iterable):
        raise TypeError(f"reqs must be a list of requests, got {_show(reqs)}: pass [request]")
    batch = list(reqs)
    try:
        committed = [r.kv.kv_committed_len for r in batch]
        allocated = [r.kv.kv_allocated_len for r in batch]
    except AttributeError:
        lens = [_kv_lens(i, r) for i, r in enumerate(batch)]
        committed, allocated = [c for c, _ in lens], [a for _, a in lens]
    columns, tops = _read_columns(
        kv_committed_len=committed, kv_allocated_len=allocated, reserve=reserve
    )
    cur, nxt, needed = _watermarks(columns, tops, page)
    return cur.tolist(), nxt.tolist(), needed


def new_tokens_required_next_decode(
    committed: _PerRequest,
    allocated: _PerRequest,
    page_size: int,
    spec: SpecConfig | None = None,
    estimate: str = "tight",
) -> int:
    """Tokens, in whole pages, that the next decode step of these requests asks of the pool.

    Without speculation, whatever the estimate: ``page_size`` for each request with
    ``committed % page_size == 0``. Exact while ``allocated`` is ``committed`` rounded up.

    With speculation, ``reserve`` being `alloc_reserve_per_decode`:
    ``"tight"`` is what the plan takes, ``sum(ceil_align(max(allocated, committed + reserve),
    page_size) - ceil_align(allocated, page_size))``.
    ``"conservative"`` is an older form, kept for comparison: neither equal to the plan's need nor
    a bound on it. Per request ``max(S * topk, N)``: at page size 1 ``S = steps`` and
    ``N = draft_tokens``; on larger pages both are rounded up to a page, and with topk > 1 a page
    is added to ``steps`` first.

    >>> new_tokens_required_next_decode([31, 32, 33], [32, 32, 64], 32)
    32
    >>> eagle = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
    >>> new_tokens_required_next_decode([31, 40], [32, 64], 16, eagle)
    16
    >>> new_tokens_required_next_decode([31, 40], [32, 64], 16, eagle, "conservative")
    32
    """
    page = _page_size(page_size)
    draft = _drafting(spec)
    if estimate not in ("tight", "conservative"):
        raise ValueError(f"estimate {_show(estimate)} is unknown: use 'tight' or 'conservative'")
    reserve = alloc_reserve_per_decode(draft, page)
    (done, held, ahead), tops = _read_columns(
        committed=committed, allocated=allocated, reserve=reserve
    )
    if draft is None:
        return page * int(np.count_nonzero(done % page == 0))
    if estimate == "conservative":
        return done.size * _conservative_len(draft, page)
    _, _, needed = _watermarks((done, _round_up(held.copy(), page), ahead), tops, page)
    return needed


def _watermarks(
    columns: Sequence[_Int64], tops: Sequence[int], page: int
) -> tuple[_Int64, _Int64, int]:
    """`watermarks` of what `_read_columns` made of committed, allocated and reserve."""
    committed, allocated, reserve = columns
    cur = allocated.copy()
    nxt = _round_up(committed + reserve, page)
    np.maximum(nxt, cur, out=nxt)
    return cur, nxt, _total(nxt - cur, tops[0] + tops[2] + page)


def _round_up(numbers: _Int64, step: int) -> _Int64:
    """Round up in place."""
    if step == 1:
        return numbers
    numbers += step - 1
    if step & (step - 1) == 0:
        numbers &= -step
    else:
        numbers //= step
        numbers *= step
    return numbers


def _ceil(number: int, step: int) -> int:
    return -(-number // step) * step


def _total(numbers: _Int64, top: int) -> int:
    """The exact sum of numbers none of which is above ``top``."""
    if numbers.size * top < 1 << 63:
        return int(np.add.reduce(numbers))
    return sum(numbers.tolist())


def _conservative_len(spec: SpecConfig, page: int) -> int:
    steps, drafts = spec.steps, spec.draft_tokens
    if page > 1:
        steps = _ceil(steps + page if spec.topk > 1 else steps, page)
        drafts = _ceil(drafts, page)
    return max(steps * spec.topk, drafts)


def _drafting(spec: object) -> SpecConfig | None:
    """The config of a decoder that speculates, else None."""
    if spec is None:
        return None
    if not isinstance(spec, SpecConfig):
        raise TypeError(f"spec must be a SpecConfig or None, got {_show(spec)}: build a SpecConfig")
    return None if spec.algorithm == "none" else spec


def _kv_lens(index: int, request: Any) -> tuple[Any, Any]:
    try:
        kv = request.kv
        owner = kv if hasattr(kv, "kv_committed_len") else request
        return owner.kv_committed_len, kv.kv_allocated_len
    except AttributeError as error:
        raise TypeError(
            f"reqs[{index}] cannot be sized, {error}: a request needs kv.kv_allocated_len, and "
            "kv.kv_committed_len or kv_committed_len"
        ) from None


def _read_columns(**columns: Any) -> tuple[list[_Int64], list[int]]:
    """Each argument as int64 of shape (n,), maybe the caller's own array, and its upper bound."""
    read = {name: _read(name, value) for name, value in columns.items()}
    shapes = {name: v.shape for name, (v, _) in read.items() if not isinstance(v, int)}
    for name, shape in shapes.items():
        if len(shape) != 1:
            raise ValueError(f"{name} has shape {shape}: pass one number per request, shape (n,)")
    if len(set(shapes.values())) > 1:
        counts = ", ".join(f"{name} has {shape[0]}" for name, shape in shapes.items())
        raise ValueError(f"lengths do not match, {counts}: pass one number per request, or an int")
    shape = next(iter(shapes.values()), (1,))
    arrays = [np.full(shape, v, np.int64) if isinstance(v, int) else v for v, _ in read.values()]
    return arrays, [top for _, top in read.values()]


def _read(name: str, value: Any) -> tuple[int | _Int64, int]:
    """An int or an int64 array (maybe the caller's own: never written), and an upper bound.

    The bitwise or of numbers that are not negative is at least each of them and below twice the
    largest, and one negative number makes it negative: one pass serves both checks.
    """
    if type(value) is int:
        return _in_range(name, value), value
    array = value if type(value) is np.ndarray else _host_array(name, value)
    if array.dtype.kind not in "iu":
        if array.ndim and not array.size:
            return np.zeros(array.shape, np.int64), 0
        raise _not_integers(name, array if array.ndim else value)
    if array.ndim == 0:
        number = _in_range(name, int(array))
        return number, number
    bits = int(np.bitwise_or.reduce(array, axis=None))
    if not 0 <= bits <= _LIMIT:
        flat = array.ravel()
        i = int(flat.argmin() if bits < 0 else flat.argmax())
        _in_range(f"{name}[{i}]", int(flat[i]))
    return array.astype(np.int64, copy=False), bits


def _host_array(name: str, value: Any) -> npt.NDArray[Any]:
    """What NumPy reads; a list item by item, since among ints NumPy takes a bool for one."""
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) != {int}:
            for i, item in enumerate(value):
                if isinstance(item, _NOT_COUNTS) or not isinstance(item, (int, np.integer)):
                    raise _not_integers(f"{name}[{i}]", item)
            value = [int(item) for item in value]
        try:
            return np.array(value, dtype=np.int64)
        except OverflowError:
            i = next(i for i, item in enumerate(value) if not 0 <= item <= _LIMIT)
            _in_range(f"{name}[{i}]", value[i])
    problem = "lives on a device"
    with suppress(Exception):  # torch refuses even to answer for a device tensor with a gradient
        if not hasattr(value, "__cuda_array_interface__"):
            problem = "cannot be read by NumPy"
            return np.asarray(value)
    raise TypeError(
        f"{name} {problem} ({type(value).__name__}): host numbers are needed, "
        "pass a list, a NumPy array or a CPU tensor"
    )


def _single(name: str, value: Any, low: int, meaning: str) -> int:
    number = value if type(value) is int else _read(name, value)[0]
    if not isinstance(number, int):
        raise TypeError(f"{name} must be one integer, got {_show(value)}: pass {meaning}")
    return _in_range(name, number, low, meaning)


def _page_size(value: Any) -> int:
    return _single("page_size", value, 1, "the number of tokens per page")


def _in_range(name: str, number: int, low: int = 0, meaning: str = "a token count") -> int:
    if low <= number <= _LIMIT:
        return number
    raise ValueError(f"{name} must be from {low} to 2**60, got {number}: pass {meaning}")


def _not_integers(name: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be integer, got {_show(value)}: pass integers on the host")


def _show(value: Any) -> str:
    """Value and type in one line; the type alone where a repr might read a device."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray) and value.dtype != object:
        kind = f"{value.dtype} array"
    elif not isinstance(value, (str, bytes, int, float, complex, np.generic, type(None))):
        return f"a {kind}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"
