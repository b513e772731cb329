"""Many worlds, in this process or in several; which ones is the same in any case."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import NamedTuple

from sgalloc.fuzz.walk import CALLS, Failure, Tally, run_world

_TOGETHER = 4


class Setting(NamedTuple):
    """What worlds are made with.

    Attributes:
        seed: of all of them.
        device: where the tables live.
        laws_every: calls from one look at everything to the next.
    """

    seed: int = 0
    device: str = "cpu"
    laws_every: int = 16


class Batch(NamedTuple):
    """What came of some worlds that follow one another."""

    tally: Tally
    failures: list[Failure]


def worlds_for(calls: int) -> int:
    """How many worlds make so many calls."""
    return -(-calls // CALLS)


def run_worlds(setting: Setting, first: int, stop: int) -> Batch:
    """The worlds ``[first, stop)``, up to one that fails."""
    tally, failures = Tally(), []
    for number in range(first, stop):
        made, failure = run_world(setting.seed, number, setting.device, setting.laws_every)
        tally.add(made)
        if failure is not None:
            failures.append(failure)
            break
    return Batch(tally, failures)


def batches(
    setting: Setting, worlds: int | None, workers: int, go_on: Callable[[], bool]
) -> Iterator[Batch]:
    """Worlds from number 0 on, a few together.

    Args:
        setting: what they are made with.
        worlds: how many; None for as many as there is time for.
        workers: processes; with one, this process.
        go_on: asked before a batch is begun.
    """
    parts = _parts(worlds)
    if workers == 1:
        for first, stop in parts:
            if not go_on():
                return
            yield run_worlds(setting, first, stop)
        return
    # A forked process must not use a GPU that its parent has used.
    with ProcessPoolExecutor(workers, get_context("spawn"), _ignore_interrupts) as pool:
        running: set[Future[Batch]] = set()
        try:
            while True:
                while len(running) < 2 * workers and go_on():
                    part = next(parts, None)
                    if part is None:
                        break
                    running.add(pool.submit(run_worlds, setting, *part))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in running:
                future.cancel()


def _parts(worlds: int | None) -> Iterator[tuple[int, int]]:
    first = 0
    while worlds is None or first < worlds:
        stop = first + _TOGETHER if worlds is None else min(first + _TOGETHER, worlds)
        yield first, stop
        first = stop


def _ignore_interrupts() -> None:
    """The parent ends the run; a worker ends with its batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
