"""Generated workloads, fitted to two published traces; what replay feeds on by default.

The ``chat`` profile follows the conversation trace of Mooncake (kvcache-ai/Mooncake, FAST'25
release, Apache-2.0), ``code`` the coding trace of Azure LLM inference 2023 (AzurePublicDataset,
CC-BY-4.0; Patel et al., "Splitwise", ISCA 2024). Only statistics of the traces are kept here:

* lengths: quantiles, interpolated so that the logarithm of the length is linear in between.
  They are stratified: of n lengths exactly one falls in each n-th of the distribution, so that
  two seeds differ in order and pairing but not in their mix. Prompt and output are independent
  (the correlation of their logarithms in the chat trace is 0.05);
* chat: Poisson arrivals, 3.4 a second, and prefixes: one of four system prompts of one block,
  then conversations, in which a turn's prompt begins with the whole blocks of the turn before and
  has room for that turn's output. How many requests lie between two turns (median 422) and how
  much of a prompt is old (70 % on average) follow the trace, so that an LRU cache behaves alike
  (36 % of the blocks hit without bound; as in the trace fewer in the first thousand requests);
* code: bursts with silence in between, 2.57 a second on average, nothing shared.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sgalloc.replay.requests import (
    BLOCK_TOKENS,
    MAX_REQUESTS,
    IntArray,
    TraceRequest,
    Workload,
    real_number,
    whole_number,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]

LEVELS = (0.0, 0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
"""The probabilities that the quantile tables below are given at."""

DEFAULT_SHARE = 0.5
"""Chance that a chat request asks to go on with a conversation (not all find one that fits)."""


class Profile(NamedTuple):
    """Quantiles of the lengths at LEVELS, in tokens, and the mean rate in requests a second."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    rate: float


PROFILES: dict[str, Profile] = {
    "chat": Profile(
        prompt=(891, 901, 2_307, 6_909, 15_366, 27_367, 39_549, 85_401, 126_195),
        output=(1, 10, 157, 350, 472, 597, 698, 1_120, 2_000),
        rate=3.4,
    ),
    "code": Profile(
        prompt=(3, 75, 578, 1_469, 2_745, 5_186, 7_302, 7_436, 7_437),
        output=(6, 6, 9, 13, 24, 55, 90, 252, 1_899),
        rate=2.57,
    ),
}
"""The profiles by name."""

# Shares of the system prompts among the conversations, summed up.
_SYSTEM_PROMPTS = (0.7, 0.85, 0.95, 1.0)
# Requests from a turn to the next of its conversation, at LEVELS: those of the chat trace (5 %:
# 100, 25 %: 229, 50 %: 422, 75 %: 901, 95 %: 2,129) less about half the time a turn stands ready.
_PAUSE = (30, 80, 200, 390, 860, 1_610, 2_080, 5_050, 10_460)
_READY = 100

# Of its 3,436 s the code trace is silent for 2,377, in 45 gaps of 10 s to 217 s, and serves 8.3
# requests a second in the rest. Spells of uneven pace make its peaks (327 requests in 10 s);
# with these numbers the long-run mean is the trace's rate.
_SPELL_SECONDS = 3.5
_SPELL_RATE = 8.25
_SILENCE_ODDS = 0.15
_SILENCE_LEAST = 10.0
_SILENCE_MORE = 43.0


def generate(
    profile: str,
    count: int,
    *,
    seed: int,
    rate: float | None = None,
    share: float | None = None,
) -> Workload:
    """Return ``count`` requests of a profile, the same for the same arguments in any process.

    ``rate`` (requests a second, on average over bursts and silence; None: the trace's own)
    stretches or squeezes the time axis and changes nothing else. ``share`` (0 to 1; chat only) is
    the chance that a request asks to go on with an earlier conversation.

    Raises ValueError, naming the argument, for an unknown profile, a count or seed that is no
    whole number, a rate outside 1e-6 to 1e9 or a share outside 0 to 1.
    """
    shape = PROFILES.get(profile) if isinstance(profile, str) else None
    if shape is None:
        raise ValueError(f"profile {profile!r} is unknown: give one of {', '.join(PROFILES)}")
    count = whole_number("count", count, 1, MAX_REQUESTS)
    seed = whole_number("seed", seed, 0, 2**63 - 1)
    pace = shape.rate if rate is None else real_number("rate", rate, 1e-6, 1e9)
    wanted = DEFAULT_SHARE if share is None else real_number("share", share, 0.0, 1.0)
    if profile == "code" and share:
        raise ValueError(f"share is {share!r}: the code profile shares nothing; leave it out")
    rng = np.random.default_rng(seed)
    prompts = _stratified(rng, shape.prompt, count)
    outputs = _stratified(rng, shape.output, count)
    blocks: list[IntArray] | list[None]
    if profile == "chat":
        times = np.cumsum(_exponential(rng, count)) / shape.rate
        blocks = _conversations(rng, prompts, outputs, wanted)
    else:
        times = _bursts(rng, count)
        blocks = [None] * count
    arrivals = (times - times[0]) * (shape.rate / pace)
    requests = [
        TraceRequest(arrival, prompt, output, ids, BLOCK_TOKENS)
        for arrival, prompt, output, ids in zip(
            arrivals.tolist(), prompts.tolist(), outputs.tolist(), blocks, strict=True
        )
    ]
    return Workload(f"{profile} x {count}, seed {seed}", requests, 0, [])


def _quantile(table: tuple[int, ...], at: FloatArray) -> IntArray:
    """The inverse CDF of a table given at LEVELS: log-linear in between, rounded."""
    lengths = np.exp(np.interp(at, LEVELS, np.log(table)))
    return np.rint(lengths).astype(np.int64)


def _stratified(rng: np.random.Generator, table: tuple[int, ...], count: int) -> IntArray:
    order = np.argsort(rng.random(count), kind="stable")
    return _quantile(table, (order + rng.random(count)) / count)


def _exponential(rng: np.random.Generator, count: int) -> FloatArray:
    draws: FloatArray = -np.log1p(-rng.random(count))
    return draws


class _Turn(NamedTuple):
    """A turn to go on from: its prompt and output in tokens, its request, its whole blocks."""

    context: int
    number: int
    blocks: IntArray


def _by_context(turn: _Turn) -> tuple[int, int]:
    return turn.context, turn.number


def _conversations(
    rng: np.random.Generator, prompts: IntArray, outputs: IntArray, share: float
) -> list[IntArray]:
    """Block ids for every prompt: each goes on from an earlier turn or starts afresh.

    A turn pauses for a draw of _PAUSE requests, then stands ready for _READY more. A later turn
    takes, of those ready, the longest that fills no more than a drawn part of its own prompt.
    """
    count = len(prompts)
    goes_on = (rng.random(count) < share).tolist()
    room = (prompts * (1.0 - 0.5 * rng.random(count) ** 2)).astype(np.int64).tolist()
    pause = _quantile(_PAUSE, rng.random(count)).tolist()
    system = np.searchsorted(_SYSTEM_PROMPTS, rng.random(count), side="right")
    fresh = len(_SYSTEM_PROMPTS)
    pausing: list[tuple[int, int, _Turn]] = []
    leaving: deque[tuple[int, _Turn]] = deque()
    ready: list[_Turn] = []
    result: list[IntArray] = []
    for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        while pausing and pausing[0][0] <= number:
            turn = heapq.heappop(pausing)[2]
            insort(ready, turn, key=_by_context)
            leaving.append((number + _READY, turn))
        while leaving and leaving[0][0] <= number:
            turn = leaving.popleft()[1]
            at = bisect_left(ready, _by_context(turn), key=_by_context)
            if at < len(ready) and ready[at] is turn:
                del ready[at]
        at = bisect_left(ready, (room[number], -1), key=_by_context) if goes_on[number] else 0
        old = ready.pop(at - 1).blocks if at else system[number : number + 1]
        new = -(-prompt // BLOCK_TOKENS) - len(old)
        blocks = np.concatenate((old, np.arange(fresh, fresh + new))).astype(np.int64, copy=False)
        fresh += new
        result.append(blocks)
        turn = _Turn(prompt + output, number, blocks[: prompt // BLOCK_TOKENS])
        heapq.heappush(pausing, (number + pause[number], number, turn))
    return result


def _bursts(rng: np.random.Generator, count: int) -> FloatArray:
    """Arrival times in seconds: spells of a steady rate each, with silence after some."""
    spells: list[FloatArray] = []
    made, now = 0, 0.0
    while made < count:
        last, pace, silence = _exponential(rng, 3).tolist()
        last *= _SPELL_SECONDS
        size = 1 + int(last * pace * _SPELL_RATE)
        spells.append(now + np.sort(rng.random(size)) * last)
        made += size
        now += last
        if rng.random() < _SILENCE_ODDS:
            now += _SILENCE_LEAST + silence * _SILENCE_MORE
    return np.concatenate(spells)[:count]
