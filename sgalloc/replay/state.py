"""What the imagined engine knows of every request, as a struct of arrays."""

from __future__ import annotations

import numpy as np

from sgalloc.replay.requests import IntArray, TraceRequest, Workload, output_ids, prompt_ids

NEVER = np.iinfo(np.int64).max


class Requests:
    """All requests of a workload, by their number in it.

    Attributes:
        arrival: virtual seconds, float64 ``(n,)``.
        prompt: prompt length, tokens, int64 ``(n,)``.
        goal: tokens to put out, int64 ``(n,)``.
        produced: tokens put out so far; the last of them has no KV yet, int64 ``(n,)``.
        handle: the allocator's handle, 0 while queued, int64 ``(n,)``.
        filled: tokens prefilled in the present stay, int64 ``(n,)``.
        admitted: whether the request was ever admitted, bool ``(n,)``.
        unshared: whether the request goes without the prefix cache, bool ``(n,)``.
        abort_at: tokens of progress (prefilled and put out) at which the request is aborted.
    """

    def __init__(
        self, workload: Workload, speed: float, abort_rate: float, rng: np.random.Generator
    ) -> None:
        self._rows: list[TraceRequest] = workload.requests
        n = len(self._rows)
        self._numbers = np.arange(n) if workload.numbers is None else workload.numbers
        self.arrival = np.array([row.arrival for row in self._rows]) / speed
        self.prompt: IntArray = np.array([row.prompt_len for row in self._rows], np.int64)
        self.goal: IntArray = np.array([row.output_len for row in self._rows], np.int64)
        self.produced: IntArray = np.zeros(n, np.int64)
        self.handle: IntArray = np.zeros(n, np.int64)
        self.filled: IntArray = np.zeros(n, np.int64)
        self.admitted = np.zeros(n, np.bool_)
        self.unshared = np.zeros(n, np.bool_)
        self.abort_at: IntArray = np.full(n, NEVER)
        chosen = (rng.random(n) < abort_rate).nonzero()[0]
        span = self.prompt[chosen] + self.goal[chosen]
        self.abort_at[chosen] = (rng.random(chosen.size) * span).astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def fill(self, which: int) -> int:
        """Tokens to prefill: the prompt, and after a retraction what was put out before."""
        return int(self.prompt[which] + self.produced[which])

    def tokens(self, which: int) -> IntArray:
        """Ids of the prompt and of all tokens put out so far, int64."""
        number = int(self._numbers[which])
        prompt = prompt_ids(self._rows[which], number)
        if not self.produced[which]:
            return prompt
        return np.concatenate((prompt, output_ids(number, 0, int(self.produced[which]))))
