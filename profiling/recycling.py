"""Page lists of requests that come and go in a pool for long, in one order or another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import sgalloc
from sgalloc.replay.workload import generate

Int64 = NDArray[np.int64]

# In which order free pages go out: as the pool has them, lowest first, or in none.
STACK, SORTED, SHUFFLED = "as sgalloc", "sorted", "shuffled"
ORDERS = (STACK, SORTED, SHUFFLED)
WORKLOADS = ("random", "code", "chat")
RUNNING = 64
# How often the running requests are looked at; each time nearly all of them are others.
LOOKS = 10


class Lengths(NamedTuple):
    """Requests one after the other.

    Attributes:
        prompts: tokens, int64 ``(requests,)``.
        outputs: tokens, int64 ``(requests,)``.
    """

    prompts: Int64
    outputs: Int64


class Seen(NamedTuple):
    """Page lists at some moments of a run.

    Attributes:
        whole: all pages of each request, one list each.
        prompts: those of its prompt alone.
    """

    whole: list[Int64]
    prompts: list[Int64]


def lengths_of(workload: str, count: int, seed: int) -> Lengths:
    """Requests of one of `WORKLOADS`: uniform lengths, or those of a profile of the replay."""
    if workload == "random":
        rng = np.random.default_rng(seed)
        return Lengths(rng.integers(200, 2000, count), rng.integers(1, 400, count))
    made = generate(workload, count, seed=seed).requests
    drawn = np.array([(one.prompt_len, one.output_len) for one in made], np.int64)
    return Lengths(drawn[:, 0], drawn[:, 1])


class Recycling:
    """Requests that come, decode a token a step, and go, in a pool that they nearly fill.

    Attributes:
        alloc: where they are; rows and pages are given back as each request ends.
    """

    def __init__(self, lengths: Lengths, page: int, order: str, seed: int = 0) -> None:
        self._lengths, self._order = lengths, order
        self._rng = np.random.default_rng(seed)
        totals = lengths.prompts + lengths.outputs
        self._needs = -(-totals // page)
        width = int(self._needs.max()) * page
        pages = max(int(self._needs.mean() * RUNNING), int(self._needs.max()))
        self.alloc = sgalloc.KVAllocator(pages, page, 2 * RUNNING, width, device="cpu")
        self._handles = np.empty(0, np.int64)
        self._which = np.empty(0, np.int64)
        self._left = np.empty(0, np.int64)
        self._next = 0
        self._promised = 0
        self._arrange()

    def run(self, until: int) -> None:
        """Go on until so many requests have been admitted."""
        while self._next < until:
            if self._handles.size:
                steps = int(self._left.min())
                batch = self.alloc.batch(self._handles)
                for _ in range(steps):
                    self.alloc.decode(batch)
                self._left -= steps
                self._finish()
            self._admit(until)

    def seen(self) -> Seen:
        """The page lists of those who run now."""
        alloc, prompts = self.alloc, self._lengths.prompts
        pairs = list(zip(self._handles.tolist(), prompts[self._which].tolist(), strict=True))
        return Seen(
            [alloc.pages(handle).astype(np.int64) for handle, _ in pairs],
            [alloc.pages(handle, 0, tokens).astype(np.int64) for handle, tokens in pairs],
        )

    def _finish(self) -> None:
        over = self._left == 0
        self.alloc.release(self._handles[over])
        self._promised -= int(self._needs[self._which[over]].sum())
        self._handles, self._which = self._handles[~over], self._which[~over]
        self._left = self._left[~over]
        self._arrange()

    def _admit(self, until: int) -> None:
        first = self._next
        while self._next < until and self._handles.size + self._next - first < 2 * RUNNING:
            need = int(self._needs[self._next])
            if self._promised + need > self.alloc.num_pages:
                break
            self._promised += need
            self._next += 1
        came = np.arange(first, self._next)
        if came.size:
            handles = self.alloc.open(came.size)
            self.alloc.extend(handles, self._lengths.prompts[came])
            self._handles = np.concatenate((self._handles, handles))
            self._which = np.concatenate((self._which, came))
            self._left = np.concatenate((self._left, self._lengths.outputs[came]))

    def _arrange(self) -> None:
        """Put the free pages into the order that is measured; the last goes out first."""
        if self._order == STACK:
            return
        pool = self.alloc._core.pool
        free = pool._stack[: pool.free]
        if self._order == SORTED:
            free[::-1].sort()
        else:
            self._rng.shuffle(free)


def recycled(workload: str, page: int, order: str, requests: int, seed: int = 0) -> list[Seen]:
    """Page lists at `LOOKS` moments of the second half of a run."""
    run = Recycling(lengths_of(workload, requests, seed), page, order, seed)
    looks = []
    for until in np.linspace(requests / 2, requests, LOOKS).astype(int):
        run.run(int(until))
        looks.append(run.seen())
        run.alloc.check()
    return looks
