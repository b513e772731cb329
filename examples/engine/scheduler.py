"""Who runs: admission, prefill in chunks, retraction, and what the host knows of each request.

What is known stands in NumPy arrays by row of the table, so that a decode step makes no Python call
per request. Nothing here knows a model or a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import sgalloc
from sgalloc.retraction import retract_until_fits

Array = np.ndarray[Any, Any]


@dataclass
class Request:
    """A prompt, and how many tokens may follow.

    Attributes:
        name: the caller's own, to find it again.
        prompt: token ids, int64.
        most: tokens that are put out at most, at least 1.
        namespace: whose cached prefixes it shares.
        tokens: the prompt and what was put out, as far as known when it last left a row.
        state: ``"waiting"``, ``"running"``, ``"done"``, ``"aborted"`` or ``"failed"``.
        shares: whether it takes cached prefixes.
    """

    name: int
    prompt: Array
    most: int
    namespace: Any = None
    tokens: Array = field(default_factory=lambda: np.empty(0, np.int64))
    state: str = "waiting"
    shares: bool = True

    @property
    def output(self) -> list[int]:
        """What was put out."""
        found: list[int] = self.tokens[self.prompt.size :].tolist()
        return found


@dataclass(frozen=True)
class Limits:
    """What a scheduler keeps to.

    Attributes:
        running: requests in rows at once.
        chunk: tokens prefilled in a step.
        reserve: how far past C a decode step may write.
        stop: the token that ends a request.
    """

    running: int
    chunk: int
    reserve: int = 1
    stop: int = -1


class Scheduler:
    """Keeps the allocator, the queue, and the arrays by row.

    Attributes:
        tokens: prompt and output by row, int64 ``(rows, row_width)``.
        prompt, known: how many of them are prompt, and how many the host knows.
        goal: how many there are at most.
        handle: who is in the row; 0 for nobody.
        running: the rows that decode, in order.
        prefilling: the rows whose prompt is not complete, in order.
        batch: the handles of ``running``, as the allocator keeps them.
        counts: retractions, cached tokens and the like, for who looks at them.
    """

    def __init__(self, alloc: Any, limits: Limits, prefix_cache: bool) -> None:
        self.alloc, self.limits, self.prefix_cache = alloc, limits, prefix_cache
        rows = alloc.max_requests + 1
        self.tokens = np.zeros((rows, alloc.row_width), np.int64)
        self.prompt, self.known, self.goal, self.upto, self.handle = np.zeros((5, rows), np.int64)
        self.request: list[Request | None] = [None] * rows
        self.queue: deque[Request] = deque()
        self.running: Array = np.empty(0, np.int64)
        self.prefilling: list[int] = []
        self.batch = alloc.batch([])
        self.counts = dict.fromkeys(
            ("tokens", "retracted", "matched", "finished", "aborted", "failed"), 0
        )

    # -- coming ----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; one that fits no row is a ValueError."""
        longest = request.prompt.size + request.most + self.limits.reserve
        if not request.prompt.size or request.most < 1 or longest > self.alloc.row_width:
            raise ValueError(f"request {request.name}: {longest} tokens do not fit a row")
        request.tokens = request.prompt.copy()
        self.queue.append(request)

    # guide: step 3
    def admit(self) -> None:
        """Open rows for the first in the queue, as long as there is room for what they begin."""
        alloc, limits = self.alloc, self.limits
        while self.queue and self.running.size + len(self.prefilling) < limits.running:
            request = self.queue[0]
            match = None
            if self.prefix_cache and request.shares:
                # The last token is computed in any case: its logits are the next output.
                match = alloc.prefix.match(request.tokens[:-1], request.namespace)
            first = min(request.tokens.size, (match.length if match else 0) + limits.chunk)
            if not self._has_room(first, match):
                return
            (handle,) = (
                alloc.open_with_prefix(match)
                if match and match.length
                else alloc.open(namespace=request.namespace)
            )
            self.counts["matched"] += match.length if match else 0
            self.prefilling.append(self._enter(self.queue.popleft(), int(handle)))

    def _has_room(self, first: int, match: Any) -> bool:
        """Whether one more can begin, and those that run still have a step each."""
        active = self.running.size + len(self.prefilling)
        if not active:
            return True
        owed = self._behind_chunks()
        ahead = self.limits.reserve
        return bool(
            sgalloc.admission.admit(
                self.alloc,
                [(first, match if match is not None else 0)],
                active,
                ahead,
                owed,
                step_tokens=max(ahead, self.limits.chunk),
            )
        )

    def _behind_chunks(self) -> list[int]:
        """Tokens that prompts under way have yet to take pages for."""
        rows = np.array(self.prefilling, np.int64)
        return (self.known[rows] - self.alloc.committed(self.handle[rows])).tolist()

    def _enter(self, request: Request, handle: int) -> int:
        (row,) = self.alloc.rows(handle).tolist()
        size = request.tokens.size
        self.tokens[row, :size] = request.tokens
        self.known[row], self.handle[row], self.request[row] = size, handle, request
        self.prompt[row] = request.prompt.size
        self.goal[row] = request.prompt.size + request.most
        request.state = "running"
        return row

    # -- prefill ---------------------------------------------------------------------------

    def chunks(self) -> Array:
        """The rows that are prefilled in this step; `upto` says how far."""
        left, rows = self.limits.chunk, []
        for row in self.prefilling:
            if not left:
                break
            (have,) = self.alloc.committed(self.handle[row]).tolist()
            self.upto[row] = min(self.known[row], have + left)
            left -= int(self.upto[row]) - have
            rows.append(row)
        return np.array(rows, np.int64)

    def prefilled(self, rows: Array, after: Any) -> None:
        """Let those decode whose prompts are complete."""
        complete = rows[self.upto[rows] == self.known[rows]]
        if complete.size:
            self.prefilling = [row for row in self.prefilling if row not in complete]
            self.join(complete, after)

    def join(self, rows: Array, after: Any) -> None:
        """Share the prompts of these, whose KV is there, and let them decode from now on."""
        if self.prefix_cache:
            tokens = [self.tokens[row, : self.known[row]] for row in rows]
            self.alloc.prefix.publish(self.handle[rows], tokens, after=after)
        self._run(np.append(self.running, rows))

    # -- a step that fits ------------------------------------------------------------------

    # guide: step 7
    def fitted(
        self,
        rows: Array,
        x: Any,
        make_plan: Callable[[Any], Any],
        drain: Callable[[], None],
    ) -> tuple[Array, Any]:
        """The plan of a step that fits, and who takes part; others go back to the queue for it.

        Args:
            rows: who should take part.
            x: their handles, or their batch.
            make_plan: the step of some handles.
            drain: lets the steps in flight end: they may give back what is lacking.
        """
        plan = make_plan(x)
        if plan.fits:
            return rows, plan
        handles = self.handle[rows]
        drain()
        self.alloc.settle()
        rows = rows[self.handle[rows] == handles]
        handles = self.handle[rows]
        active = np.append(self.running, np.array(self.prefilling, np.int64))
        everyone = self.handle[active]
        found = retract_until_fits(
            self.alloc,
            everyone,
            lambda some: make_plan(some[np.isin(some, handles)]),
            output_lens=self.known[active] - self.prompt[active],
            prompt_lens=self.prompt[active],
        )
        self._retract(active[np.isin(everyone, found.victims)])
        if found.error is not None:
            self._alone(int(active[everyone == found.ending][0]))
        rows = rows[self.handle[rows] != 0]
        return rows, make_plan(self.handle[rows])

    def _retract(self, rows: Array) -> None:
        self.counts["retracted"] += rows.size
        for request in self._leave(rows, None, True):
            request.state = "waiting"
            self.queue.appendleft(request)

    def _alone(self, row: int) -> None:
        """The last one does not fit beside its own cached prefix: it starts afresh without."""
        (request,) = self._leave(np.array([row]), None, True)
        if request.shares and self.prefix_cache:
            request.shares, request.state = False, "waiting"
            self.queue.appendleft(request)
        else:
            request.state = "failed"
            self.counts["failed"] += 1

    # -- what a step put out ---------------------------------------------------------------

    def keep(self, rows: Array, tokens: Array, counts: Array) -> Array:
        """Take in tokens, up to each request's goal or the stop token; how many are kept.

        Args:
            rows: ``(n,)``.
            tokens: ``(n, most)``.
            counts: how many of them the model put out, ``(n,)``.
        """
        kept = np.minimum(counts, self.goal[rows] - self.known[rows])
        place = np.arange(tokens.shape[1])
        stops = (tokens == self.limits.stop) & (place < kept[:, None])
        kept = np.where(stops.any(1), stops.argmax(1) + 1, kept)
        which, at = (place < kept[:, None]).nonzero()
        self.tokens[rows[which], self.known[rows[which]] + at] = tokens[which, at]
        self.known[rows] += kept
        self.counts["tokens"] += int(kept.sum())
        return kept

    def finish(self, rows: Array, after: Any) -> None:
        """Let those go that have reached their goal, or put out the stop token."""
        last = self.tokens[rows, self.known[rows] - 1]
        done = rows[(self.known[rows] == self.goal[rows]) | (last == self.limits.stop)]
        if done.size:
            self.counts["finished"] += done.size
            for request in self._leave(done, after, True):
                request.state = "done"

    def abort(self, name: int, after: Any) -> None:
        """End a request wherever it is; nothing of it is kept."""
        for request in [one for one in self.queue if one.name == name]:
            self.queue.remove(request)
            request.state = "aborted"
        rows = [row for row, one in enumerate(self.request) if one is not None and one.name == name]
        for request in self._leave(np.array(rows, np.int64), after, False):
            request.state = "aborted"
            self.counts["aborted"] += 1

    # guide: step 8
    def _leave(self, rows: Array, after: Any, cached: bool) -> list[Request]:
        """Give rows back, behind ``after``; their requests, with all that is known of them."""
        found = []
        for row in rows.tolist():
            request = self.request[row]
            assert request is not None
            request.tokens = self.tokens[row, : self.known[row]].copy()
            found.append(request)
            self.request[row] = None
        if found:
            tokens = [one.tokens for one in found] if cached and self.prefix_cache else None
            self.alloc.release(self.handle[rows], tokens=tokens, after=after)
            self.handle[rows] = 0
            self.prefilling = [row for row in self.prefilling if self.handle[row]]
            self._run(self.running[self.handle[self.running] != 0])
        return found

    def _run(self, rows: Array) -> None:
        self.running = rows
        self.batch = self.alloc.batch(self.handle[rows])
