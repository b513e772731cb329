"""How anything here is timed: sides in turn, the clock read around each call, medians."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

SUBJECT = "sgalloc"
LOOP = "python loop"
# Until when a call is timed: until it comes back, or until the GPU is done with it.
RETURN, DONE = "return", "done"


class Step(NamedTuple):
    """One call of a script.

    Attributes:
        name: what it is reported as; None for a call that is made and not timed.
        call: the call.
        label: tells from its result which kind of call it was, such as one that grows.
    """

    name: str | None
    call: Callable[[], Any]
    label: Callable[[Any], str] | None = None


class Side(NamedTuple):
    """Who is measured, and the calls it makes in one round, in order."""

    name: str
    steps: list[Step]


class Summary(NamedTuple):
    """Microseconds a call: how many calls, their median, and the 10th and 90th percentile."""

    n: int
    median: float
    p10: float
    p90: float


class Key(NamedTuple):
    """What a series of timings belongs to; ``label`` is empty where calls are of one kind."""

    side: str
    step: str
    label: str


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one measurement may go on.

    Attributes:
        seconds: rounds stop once this has passed ...
        least: ... but not before so many rounds are timed,
        most: and never later than after so many.
        warm_up: rounds that are run first and not timed.
        block: rounds that one side makes before the other has its turn.
    """

    seconds: float
    least: int = 5
    most: int = 1000
    warm_up: int = 2
    block: int = 5


def alternate(
    sides: Sequence[Side], effort: Effort, clock: Callable[[], int] = perf_counter_ns
) -> dict[Key, list[int]]:
    """Run the scripts of ``sides`` in turn and time their calls; nanoseconds by key.

    The sides take turns within one run, so that whatever else the machine does hits all of
    them. The cyclic garbage collector is off meanwhile, as `collector_off` says.

    Args:
        sides: who is measured.
        effort: how long.
        clock: nanoseconds. Where a long call is held against a short one on a busy machine it
            has to be `time.thread_time_ns`: the long one is interrupted far more often.
    """
    times: dict[Key, list[int]] = {}
    unlabelled = {
        (side.name, step.name): times.setdefault(Key(side.name, step.name, ""), [])
        for side in sides
        for step in side.steps
        if step.name is not None
    }
    with collector_off():
        for _ in range(effort.warm_up):
            for side in sides:
                for step in side.steps:
                    step.call()
        end = perf_counter() + effort.seconds
        rounds = 0
        while rounds < effort.most and (rounds < effort.least or perf_counter() < end):
            for side in sides:
                for _ in range(effort.block):
                    for name, call, label in side.steps:
                        begin = clock()
                        result = call()
                        took = clock() - begin
                        if name is None:
                            continue
                        if label is None:
                            unlabelled[side.name, name].append(took)
                        else:
                            key = Key(side.name, name, label(result))
                            times.setdefault(key, []).append(took)
            rounds += effort.block
    return {key: series for key, series in times.items() if series}


def in_turns(
    sides: Sequence[Side], effort: Effort, wait: Callable[[], None]
) -> tuple[dict[Key, list[int]], dict[Key, list[int]]]:
    """As `alternate`, but every timed call begins and ends on an idle GPU.

    Returns:
        Nanoseconds by key: until the call came back, and until ``wait`` after it did.
    """
    host: dict[Key, list[int]] = {}
    total: dict[Key, list[int]] = {}
    clock = perf_counter_ns
    with collector_off():
        rounds = -effort.warm_up
        end = math.inf
        while rounds < effort.most and (rounds < effort.least or perf_counter() < end):
            for side in sides:
                for _ in range(effort.block if rounds >= 0 else 1):
                    for name, call, label in side.steps:
                        wait()
                        begin = clock()
                        result = call()
                        back = clock()
                        wait()
                        done = clock()
                        if name is not None and rounds >= 0:
                            key = Key(side.name, name, label(result) if label else "")
                            host.setdefault(key, []).append(back - begin)
                            total.setdefault(key, []).append(done - begin)
            rounds += effort.block if rounds >= 0 else 1
            if rounds == 0:
                end = perf_counter() + effort.seconds
    return host, total


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the cyclic garbage collector from running, and from looking at what is there now."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def summarize(series: Sequence[int], per: int = 1) -> Summary:
    """Median and spread of ``series`` (nanoseconds), in microseconds for one of ``per``."""
    if not series:
        raise ValueError("there are no timings to summarize: run at least one round")
    ordered = sorted(series)
    unit = 1000.0 * per
    return Summary(
        len(ordered),
        _quantile(ordered, 0.5) / unit,
        _quantile(ordered, 0.1) / unit,
        _quantile(ordered, 0.9) / unit,
    )


def empty_call(clock: Callable[[], int] = perf_counter_ns) -> Summary:
    """What the timing itself costs: an empty function between two readings of the clock."""
    step = Step("empty", lambda: None)
    effort = Effort(seconds=0.05, least=1000, most=5000)
    times = alternate([Side(SUBJECT, [step])], effort, clock)
    return summarize(times[Key(SUBJECT, "empty", "")])


def _quantile(ordered: Sequence[int], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
