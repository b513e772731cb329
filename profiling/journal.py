"""What a journal costs a step: `python -m profiling.journal`."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import numpy as np

import sgalloc
from sgalloc.bench.harness import Effort, Key, Side, Step, Summary, alternate, summarize

PAGE, RESERVE, PROMPT, WIDTH = 64, 16, 1000, 1 << 15
PLAIN, NOTED = "without", "with a journal"


class Cost(NamedTuple):
    """What one kind of step costs.

    Attributes:
        name: of the step.
        plain, noted: microseconds without and with a journal.
        size: bytes that the journal grows by, a step.
    """

    name: str
    plain: Summary
    noted: Summary
    size: float


class Loop:
    """Requests that decode, with or without a journal; a long one is trimmed back untimed."""

    def __init__(
        self, batch: int, path: Path | None, debug: bool | None = None, width: int = WIDTH
    ) -> None:
        self.alloc = sgalloc.KVAllocator(
            batch * width // PAGE, PAGE, batch, width, device="cpu", journal=path, debug=debug
        )
        self.alloc.warm()
        handles = self.alloc.open(batch)
        self.prompts = np.arange(batch, dtype=np.int64) % PAGE + PROMPT
        self.alloc.extend(handles, self.prompts)
        self.batch = self.alloc.batch(handles)
        drawn = np.random.default_rng(7)
        self.accepted = [drawn.integers(1, 6, batch) for _ in range(64)]
        self.turn = 0

    def speculate(self) -> None:
        """Reserve for a step, and commit what was accepted of the one before."""
        self.turn += 1
        self.alloc.reserve(self.batch, RESERVE)
        self.alloc.commit(self.batch, self.accepted[self.turn % 64])

    def decode(self) -> None:
        """One token a request."""
        self.alloc.decode(self.batch)

    def back(self) -> None:
        """Begin again before a row is full."""
        self.turn += 1
        if not self.turn % 4096:
            self.alloc.trim(self.batch, self.prompts)


def measure(batch: int, seconds: float, folder: Path) -> list[Cost]:
    """Each kind of step at one size of batch, both ways in turn."""
    found = []
    for name in ("speculate", "decode"):
        path = folder / f"{name}-{batch}.journal"
        loops = {PLAIN: Loop(batch, None), NOTED: Loop(batch, path)}
        sides = [
            Side(side, [Step(name, getattr(loop, name)), Step(None, loop.back)])
            for side, loop in loops.items()
        ]
        times = alternate(sides, Effort(seconds, 200, most=3000, warm_up=64, block=100))
        loops[NOTED].alloc.close_journal()
        for alloc in (loop.alloc for loop in loops.values()):
            alloc.check()
        steps = len(times[Key(NOTED, name, "")]) + 64
        sizes = [summarize(times[Key(side, name, "")]) for side in (PLAIN, NOTED)]
        found.append(Cost(name, *sizes, os.path.getsize(path) / steps))
    return found


@click.command()
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 256, 4096))
@click.option("--seconds", type=click.FloatRange(0.01), default=2.0, help="Of each measurement.")
def main(batches: tuple[int, ...], seconds: float) -> None:
    """Measure steps with and without a journal, on the CPU."""
    with TemporaryDirectory() as folder:
        for batch in batches:
            for cost in measure(batch, seconds, Path(folder)):
                more = cost.noted.median - cost.plain.median
                click.echo(
                    f"{cost.name} of {batch}: {cost.plain.median:.1f} µs without, "
                    f"{cost.noted.median:.1f} µs with a journal, {more:+.1f} µs; "
                    f"{cost.size:.0f} bytes a step"
                )


if __name__ == "__main__":
    main()
