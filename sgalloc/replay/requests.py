"""What replay feeds on: requests, workloads, and the token ids that stand for their text.

Traces carry no text, only lengths and, at best, hashes of prompt blocks. The ids made here keep
what matters to a prefix cache: two prompts agree exactly as far as their leading blocks agree.

Layout of the int64 ids (never negative, so that they pass as any tokenizer's):

* ``[0, 2**62)``: tokens of a block, ``block * block_tokens + offset``;
* ``[2**62, 2**62 + 2**61)``: tokens of one prompt that nothing shares,
  ``2**62 + index * 2**31 + position``;
* ``[2**62 + 2**61, 2**63)``: tokens a request generates, ``2**62 + 2**61 + index * 2**31 + step``.

``index`` is the request's number in its workload, below 2**30; positions and steps are below 2**31.
The blocks of one workload all have the same ``block_tokens``.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

BLOCK_TOKENS = 512
"""Tokens that one block id stands for in a Mooncake trace, and in generated workloads."""

MAX_TOKENS = 2**31 - 1
"""Longest prompt or output, in tokens."""

MAX_REQUESTS = 2**30
"""Requests that one workload can tell apart."""

MAX_BLOCK_TOKENS = 2**20
_UNIQUE = 2**62
_OUTPUT = 2**62 + 2**61
_STRIDE = 2**31
_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.int64)


class TraceRequest(NamedTuple):
    """One request of a workload.

    ``arrival`` is in seconds from the workload's start; ``prompt_len`` and ``output_len`` (both at
    least 1) are in tokens. ``blocks`` holds one int64 id for every ``block_tokens`` tokens of the
    prompt, the last one standing for a partial block unless the prompt ends on a block edge; equal
    ids mean equal text up to and including the block. None: nothing is known about the prompt.
    """

    arrival: float
    prompt_len: int
    output_len: int
    blocks: IntArray | None
    block_tokens: int


class Workload(NamedTuple):
    """Requests in order of arrival, and what reading them met.

    ``skipped`` counts the lines that were left out; ``problems`` says why, each with its line
    number, for the first 20 of them. ``numbers`` holds the number of each request by which text
    that nothing shares is told apart; None: its place in ``requests``.
    """

    name: str
    requests: list[TraceRequest]
    skipped: int
    problems: list[str]
    numbers: IntArray | None = None


def whole_number(name: str, value: SupportsIndex, least: int, most: int) -> int:
    """Return ``value`` as an int within [least, most], or raise a ValueError that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool | np.bool_) or not least <= number <= most:
        raise ValueError(f"{name} is {value!r}: give a whole number from {least} to {most}")
    return number


def real_number(name: str, value: float, least: float, most: float) -> float:
    """Return ``value`` as a float within [least, most], or raise a ValueError that names it."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (real and least <= value <= most):
        raise ValueError(f"{name} is {value!r}: give a number from {least:g} to {most:g}")
    return float(value)


def max_block_id(block_tokens: int) -> int:
    """Return the largest block id whose tokens stay below the ids kept for unshared text."""
    return _UNIQUE // block_tokens - 1


def prompt_ids(request: TraceRequest, index: int, *, share_partial: bool = False) -> IntArray:
    """Return the token ids of a prompt, int64 of shape ``(prompt_len,)``.

    Tokens of whole blocks depend on the block's id and the offset in it alone, so they are equal
    wherever the block is. What is left (a partial last block; all of a prompt without blocks) is
    unique to ``index``, the request's number in its workload; with ``share_partial`` a partial
    block counts as a block like any other. To count hits block by block with partial blocks
    included, fill the prompt up first: ``filled(request)``.

    Raises ValueError for an index, a length or block ids outside the layout of this module, and
    for blocks that do not cover the prompt.
    """
    index = whole_number("index", index, 0, MAX_REQUESTS - 1)
    length = whole_number("prompt_len", request.prompt_len, 0, MAX_TOKENS)
    unique = _UNIQUE + index * _STRIDE
    if request.blocks is None:
        return np.arange(unique, unique + length, dtype=np.int64)
    size = whole_number("block_tokens", request.block_tokens, 1, MAX_BLOCK_TOKENS)
    blocks = request.blocks
    _check_blocks(blocks, length, size)
    offsets = _OFFSETS if size == BLOCK_TOKENS else np.arange(size, dtype=np.int64)
    ids: IntArray = (blocks[:, None] * size + offsets).reshape(-1)[:length]
    edge = length - length % size
    if edge < length and not share_partial:
        ids[edge:] = np.arange(unique + edge, unique + length)
    return ids


def output_ids(index: int, start: int, stop: int) -> IntArray:
    """Return the ids of the generated tokens [start, stop) of request ``index``, int64.

    They equal no prompt's ids and no other request's. Raises ValueError outside the layout.
    """
    index = whole_number("index", index, 0, MAX_REQUESTS - 1)
    start = whole_number("start", start, 0, MAX_TOKENS)
    stop = whole_number("stop", stop, start, MAX_TOKENS)
    first = _OUTPUT + index * _STRIDE
    return np.arange(first + start, first + stop, dtype=np.int64)


def filled(request: TraceRequest) -> TraceRequest:
    """Return the request with its prompt lengthened to fill its last block.

    With ``prompt_ids(..., share_partial=True)`` every block, the last one included, is then a
    whole page of a prefix cache whose page is one block.
    """
    if request.blocks is None:
        return request
    return request._replace(prompt_len=len(request.blocks) * request.block_tokens)


def _check_blocks(blocks: IntArray, length: int, size: int) -> None:
    if not isinstance(blocks, np.ndarray) or blocks.dtype != np.int64 or blocks.ndim != 1:
        raise ValueError(f"blocks is {blocks!r}: give a one-dimensional int64 array, or None")
    if len(blocks) != -(-length // size):
        raise ValueError(
            f"blocks has {len(blocks)} ids for {length} tokens in blocks of {size}: "
            f"give {-(-length // size)}"
        )
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) <= max_block_id(size):
        raise ValueError(
            f"block ids run from {blocks.min()} to {blocks.max()}: "
            f"keep them from 0 to {max_block_id(size)}"
        )
