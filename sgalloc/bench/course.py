"""The course of a speculative run, the same for all who are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgalloc.bench.twins import Int64, Shape, Twins
from sgalloc.ledger import Batch

RESERVE = 16
MAX_ACCEPT = 5  # uniform over 1..5: 3 on average
GROWS = "steps that grow"
NO_NEED = "steps without need"


class Measured(Protocol):
    """Requests that are measured.

    Attributes:
        shape: how many, and how large.
        rng: where the accepted tokens come from.
        base: tokens of each at the beginning, int64 ``(batch,)``.
    """

    shape: Shape
    rng: np.random.Generator
    base: Int64


class Course:
    """The accepted tokens of a run, step by step, the same for both sides.

    Attributes:
        at: number of the present step.
    """

    def __init__(self, measured: Measured, steps: int = 64) -> None:
        shape = measured.shape
        if shape.batch > 4096:
            steps = 8
        drawn = measured.rng.integers(1, MAX_ACCEPT + 1, (steps, shape.batch))
        self.arrays = list(drawn)
        self.lists: list[list[int]] = drawn.tolist()
        self.at = 0
        room = shape.row_width - int(measured.base.max()) - RESERVE - shape.page_size
        self._full = room // MAX_ACCEPT
        self._since = 0

    def advance(self) -> bool:
        """Go to the next step; whether the rows are full, and have to be cut back."""
        self.at = (self.at + 1) % len(self.arrays)
        self._since += 1
        if self._since < self._full:
            return False
        self._since = 0
        return True


class Courses(NamedTuple):
    """Both sides of a run: the same accepted tokens, cut back when the rows are full.

    Attributes:
        mine, theirs: of the subject and of the loop.
        cut_mine, cut_theirs: end a step of each.
    """

    mine: Course
    theirs: Course
    cut_mine: Callable[[], None]
    cut_theirs: Callable[[], None]


def courses(twins: Twins, batch: Batch) -> Courses:
    """The run of both sides over all requests of ``twins``, which ``batch`` holds."""
    alloc, loop, requests, base = twins.alloc, twins.loop, twins.requests, twins.base
    lengths = base.tolist()
    mine, theirs = Course(twins), Course(twins)
    theirs.arrays, theirs.lists = mine.arrays, mine.lists

    def cut_mine() -> None:
        if mine.advance():
            alloc.trim(batch, base)

    def cut_theirs() -> None:
        if theirs.advance():
            loop.trim(requests, lengths)

    return Courses(mine, theirs, cut_mine, cut_theirs)


def agree(twins: Twins) -> None:
    """Stop where the subject and the baseline did different work."""
    difference = twins.difference()
    if difference is not None:
        raise RuntimeError(f"after {twins.shape} the two sides differ: {difference}")
    twins.alloc.check()


def growth(result: Any) -> str:
    """Whether a step moved pages, from a plan or from the loop's count."""
    pages = result if isinstance(result, int) else result.num_new_pages
    return GROWS if pages else NO_NEED
