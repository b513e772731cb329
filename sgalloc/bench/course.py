"""The course of a speculative run, the same for all who are measured."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sgalloc.bench.twins import Int64, Shape, Twins

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
