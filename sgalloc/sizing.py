"""The arithmetic of KV sizing: tokens in, tokens out.

Pure functions over host numbers. Every token count is an integer from 0 to 2**60, so that no sum
of two leaves int64. One number per request may be a list, a tuple, a NumPy array of any integer
dtype, or what NumPy reads as one (a torch CPU tensor, a ``range``); a single integer stands for
every request, and single integers alone for one request.

``page_size`` is any integer >= 1. Under decode context parallelism the page is
``page_size * dcp_size``: the caller passes that product. ``spec`` None means no speculation.

Errors, throughout: TypeError for what is not an integer on the host (floats, NaN, bools, strings,
None, device arrays); ValueError for an integer out of range, for more than one number per request
and for lengths that do not match. The message names the argument and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from sgalloc.inputs import (
    Array,
    Int64,
    PerRequest,
    Scalar,
    columns,
    request_lens,
    shown,
    token_counts,
    whole_number,
)

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
            raise TypeError(f"algorithm must be a str, got {shown(name)}: use one of {_ALGORITHMS}")
        if name not in _ALGORITHMS:
            raise ValueError(f"algorithm {shown(name)} is unknown: use one of {_ALGORITHMS}")
        for field, low, meaning in (
            ("steps", int(name == "eagle"), f"the draft depth of {name}"),
            ("topk", 1, "the branches per step, 1 for a chain"),
            ("draft_tokens", int(name != "none"), f"the tokens {name} verifies a step"),
        ):
            number = whole_number(getattr(self, field), field, low, meaning=meaning)
            object.__setattr__(self, field, number)


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
    context = whole_number(context_len, "context_len", 1, meaning="the model's context in tokens")
    return _ceil(context + extra_context_len(spec, page), page)


@overload
def ceil_align(x: Scalar, m: int) -> int: ...
@overload
def ceil_align(x: Array, m: int) -> Int64: ...
def ceil_align(x: PerRequest, m: int) -> int | Int64:
    """``x`` rounded up to a multiple of ``m`` (>= 1): an int, or a new int64 array of x's shape.

    >>> ceil_align(17, 16), ceil_align([0, 1, 16, 17], 16)
    (32, array([ 0, 16, 16, 32]))
    """
    step = whole_number(m, "m", 1, meaning="the unit to align to")
    value = token_counts(x, "x")
    return _ceil(value, step) if isinstance(value, int) else _round_up(value.copy(), step)


@overload
def floor_align(x: Scalar, m: int) -> int: ...
@overload
def floor_align(x: Array, m: int) -> Int64: ...
def floor_align(x: PerRequest, m: int) -> int | Int64:
    """``x`` rounded down to a multiple of ``m`` (>= 1): an int, or a new int64 array of x's shape.

    >>> floor_align(17, 16)
    16
    """
    step = whole_number(m, "m", 1, meaning="the unit to align to")
    return token_counts(x, "x") // step * step


@overload
def num_pages_for(tokens: Scalar, page_size: int) -> int: ...
@overload
def num_pages_for(tokens: Array, page_size: int) -> Int64: ...
def num_pages_for(tokens: PerRequest, page_size: int) -> int | Int64:
    """Pages that hold ``tokens`` tokens: an int, or a new int64 array of the same shape.

    >>> num_pages_for([0, 1, 64, 65], 64)
    array([0, 1, 1, 2])
    """
    page = _page_size(page_size)
    return -(-token_counts(tokens, "tokens") // page)


def num_new_pages(prefix_lens: PerRequest, seq_lens: PerRequest, page_size: int) -> int:
    """Pages that requests take when they grow from ``prefix_lens`` to ``seq_lens`` tokens.

    Counted per request, ``sum(ceil(seq / page_size) - ceil(prefix / page_size))``: two requests
    never share the rest of a page. A length below its prefix is a ValueError.

    >>> num_new_pages([0, 31, 32], [2, 32, 33], 32)
    2
    """
    page = _page_size(page_size)
    prefix, seq = columns(prefix_lens=prefix_lens, seq_lens=seq_lens)
    if (seq < prefix).any():
        i = int((seq < prefix).argmax())
        raise ValueError(
            f"seq_lens[{i}] = {seq[i]} is below prefix_lens[{i}] = {prefix[i]}: "
            "pass lengths that include the prefix"
        )
    return _total(-(-seq // page) + (-prefix // page))


def watermarks(
    committed: PerRequest, allocated: PerRequest, reserve: PerRequest, page_size: int
) -> tuple[Int64, Int64, int]:
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
    return _watermarks(page, *columns(committed=committed, allocated=allocated, reserve=reserve))


def page_aligned_decode_alloc_lens(
    reqs: Iterable[Any], *, reserve: PerRequest, page_size: int
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
    cur, nxt, needed = _watermarks(page, *columns(**request_lens(reqs), reserve=reserve))
    return cur.tolist(), nxt.tolist(), needed


def new_tokens_required_next_decode(
    committed: PerRequest,
    allocated: PerRequest,
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
        raise ValueError(f"estimate {shown(estimate)} is unknown: use 'tight' or 'conservative'")
    reserve = alloc_reserve_per_decode(draft, page)
    done, held, ahead = columns(committed=committed, allocated=allocated, reserve=reserve)
    if draft is None:
        return page * int(np.count_nonzero(done % page == 0))
    if estimate == "conservative":
        return done.size * _conservative_len(draft, page)
    return _watermarks(page, done, _round_up(held.copy(), page), ahead)[2]


@overload
def window_tail(seq: Scalar, window: int, page_size: int, prefix_cache: bool = False) -> int: ...
@overload
def window_tail(seq: Array, window: int, page_size: int, prefix_cache: bool = False) -> Int64: ...
def window_tail(
    seq: PerRequest, window: int, page_size: int, prefix_cache: bool = False
) -> int | Int64:
    """Last tokens of a received request of ``seq`` tokens that need window pages.

    What lies before, ``seq - tail``, is whole pages: the page floor of ``seq - window``, or, where
    the receiver has a prefix cache, of ``seq - 1 - max(window, page_size)``.

    >>> window_tail(20, 8, 4), window_tail(20, 8, 4, prefix_cache=True)
    (8, 12)
    """
    page = _page_size(page_size)
    size = whole_number(window, "window", 1, meaning="the tokens of the sliding window")
    if not isinstance(prefix_cache, bool):
        raise TypeError(f"prefix_cache must be a bool, got {shown(prefix_cache)}: pass True, False")
    live = 1 + max(size, page) if prefix_cache else size
    length = token_counts(seq, "seq")
    if isinstance(length, int):
        return length - max(length - live, 0) // page * page
    evicted: Int64 = np.maximum(length - live, 0) // page * page
    return length - evicted


def tail_start(seq: int, tail: int, page_size: int) -> int:
    """Where a window tail of ``tail`` of ``seq`` tokens begins, always on a page edge.

    A tail longer than the request, or one that leaves part of a page before it, is a ValueError.

    >>> tail_start(21, 9, 4)
    12
    """
    page = _page_size(page_size)
    length = whole_number(seq, "seq", meaning="the tokens of the request")
    start = length - whole_number(tail, "tail", 0, length, "at most the tokens of the request")
    if start % page:
        raise ValueError(
            f"a tail of {tail} leaves {start} of {length} tokens, not whole pages of {page}: "
            f"pass {length - start // page * page}, or what window_tail says"
        )
    return start


def peak_window_pages(
    prompt: PerRequest,
    new_tokens: PerRequest,
    window: int,
    page_size: int,
    *,
    chunk: int | None = None,
    reserve: int = 1,
    evict_every: int = 1,
    prefix_cache: bool = False,
) -> Int64:
    """Most window pages that each request holds at once: an estimate for admission.

    For a loop that lets what left the window go before each step (``plan(...,
    evict_window=True)``): prefill by chunks, then one decode step a token. The result is exact
    there, neither below nor above what the allocator then holds. Where decode steps commit more
    than one token, it is a bound that some sequence of accepted lengths reaches.

    Let ``keep`` be ``window``, with a prefix cache ``ceil_align(max(window, page_size),
    page_size)``, and ``s = ceil(evict_every / page_size)`` the pages by which a frontier moves.
    A step that begins at C and covers E tokens holds ``ceil(E / page_size)`` pages less the
    frontier, which moves to ``floor((C - keep) / page_size)`` once that is s pages further. Between
    two moves the holding grows, so its peaks lie before a move or at the end. In a long decode
    that is ``s + ceil((keep - 1 + reserve) / page_size)``.

    Args:
        prompt: tokens to prefill, one number or one per request.
        new_tokens: decode steps, likewise.
        window, page_size, evict_every, prefix_cache: as the allocator has them.
        chunk: tokens of a prefill step; None for the whole prompt in one. Where it is no
            multiple of ``page_size``, the time grows with the moves of the frontier in prefill.
        reserve: tokens past C that a decode step covers.

    Returns:
        Pages, int64 ``(n,)``. What a request shares with the prefix cache is counted, too.

    >>> peak_window_pages([100, 100_000], 1000, 1024, 16, chunk=2048)
    array([ 65, 192])
    """
    page = _page_size(page_size)
    keep = whole_number(window, "window", 1, meaning="the positions that a token attends to")
    ahead = whole_number(reserve, "reserve", 1, meaning="the tokens that a decode step covers")
    every = whole_number(evict_every, "evict_every", 1, meaning="the tokens between evictions")
    if not isinstance(prefix_cache, bool):
        raise TypeError(f"prefix_cache must be True or False, got {shown(prefix_cache)}")
    tokens, steps = columns(prompt=prompt, new_tokens=new_tokens)
    each = np.maximum(tokens, 1)
    if chunk is not None:
        size = whole_number(chunk, "chunk", 1, meaning="the tokens of a prefill step")
        each = np.minimum(each, size)
    if prefix_cache:
        keep = _ceil(max(keep, page), page)
    move = -(-every // page)
    first, peak = _prefilled(tokens, each, keep, page, move)
    # The first decode step may find the frontier several pages behind.
    wanted = np.maximum(tokens - keep, 0) // page
    first = np.where(wanted - first >= move, wanted, first)
    last = tokens + steps - 1
    grown = -(-(last + ahead) // page) - first
    moves = last >= (first + move) * page + keep
    decoding = np.where(moves, move + -(-(keep - 1 + ahead) // page), grown)
    return np.where(steps > 0, np.maximum(peak, decoding), peak)


def _prefilled(tokens: Int64, each: Int64, keep: int, page: int, move: int) -> tuple[Int64, Int64]:
    """Frontiers (pages) after chunks of ``each`` tokens, and the most window pages till then."""
    chunks = -(-tokens // each)
    first, peak = np.zeros_like(tokens), np.zeros_like(tokens)
    # Where chunks are whole pages, all moves from the first on are alike.
    alike = (each % page == 0) & (chunks > 1)
    moved = 0
    while True:
        # The chunk before which the frontier moves next.
        at = -(-((first + move) * page + keep) // each)
        some = at < chunks
        if not some.any():
            break
        peak = np.where(some, np.maximum(peak, -(-at * each // page) - first), peak)
        first = np.where(some, (at * each - keep) // page, first)
        moved += 1
        if moved == 2:
            rest = at * each - keep - first * page
            stride = np.maximum(-(-(move * page - rest) // each), 1)
            times = np.where(some & alike, np.maximum(chunks - 1 - at, 0) // stride, 0)
            first = first + times * stride * each // page
    return first, np.maximum(peak, -(-tokens // page) - first)


def _watermarks(
    page: int, committed: Int64, allocated: Int64, reserve: Int64
) -> tuple[Int64, Int64, int]:
    cur = allocated.copy()
    nxt = _round_up(committed + reserve, page)
    np.maximum(nxt, cur, out=nxt)
    return cur, nxt, _total(nxt - cur)


def _round_up(numbers: Int64, step: int) -> Int64:
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


def _total(numbers: Int64) -> int:
    """The exact sum of numbers none of which is negative."""
    if numbers.size * int(numbers.max(initial=0)) < 1 << 63:
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
        raise TypeError(f"spec must be a SpecConfig or None, got {shown(spec)}: build a SpecConfig")
    return None if spec.algorithm == "none" else spec


def _page_size(value: object) -> int:
    return whole_number(value, "page_size", 1, meaning="the number of tokens per page")
