"""The steps that the project set itself a limit for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sgalloc.bench.course import GROWS, NO_NEED, RESERVE, agree, courses, growth
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Key, Side, Step, alternate, summarize
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.python_loop import Request
from sgalloc.bench.twins import Shape, Twins

BATCH = 256
RELEASED = 64
RELEASED_TOKENS = 1000
# How the sides take turns: in long blocks, in which the caches settle, or one step each.
BLOCKS, STEPWISE = "in blocks of 100 steps", "step by step"
TURNS = {BLOCKS: 100, STEPWISE: 1}
FIRST = "first step of a block"


def run(page_sizes: Iterable[int], effort: Effort, batch: int = BATCH) -> Bench:
    """Speculative steps and releases, with both ways of taking turns."""
    records: list[Record] = []
    compared = 0
    for page_size in page_sizes:
        for turns, block in TURNS.items():
            pace = replace(effort, block=block)
            at: dict[str, int | str] = {"batch": batch, "page": page_size, "turns": turns}
            twins = Twins(Shape(batch, page_size, history=1000, row_width=1536))
            twins.fill()
            times = alternate(step_sides(twins), pace)
            records += records_of(times, at)
            if turns == BLOCKS:
                records += first_steps(times, at, block)
            agree(twins)
            at = {"batch": RELEASED, "page": page_size, "turns": turns}
            twins = Twins(Shape(RELEASED, page_size, RELEASED_TOKENS, row_width=1536))
            times = alternate(release_sides(twins), pace)
            records += records_of(times, at, per=RELEASED)
            agree(twins)
            compared += 2
    return Bench(records, compared)


def first_steps(
    times: Mapping[Key, Sequence[int]], at: Mapping[str, int | str], block: int
) -> list[Record]:
    """The first `reserve` of each block; none if some step needs nothing and is not in line."""
    return [
        Record("reserve", side, at, summarize(series[::block]), FIRST)
        for (side, name, label), series in times.items()
        if (name, label) == ("reserve", GROWS) and Key(side, name, NO_NEED) not in times
    ]


def step_sides(twins: Twins) -> list[Side]:
    """Reserve, the same again (which needs nothing), commit: for ever, cut back when full."""
    alloc, loop, requests = twins.alloc, twins.loop, twins.requests
    batch = alloc.batch(twins.handles)
    mine, theirs, cut_mine, cut_theirs = courses(twins, batch)

    return [
        Side(
            SUBJECT,
            [
                Step("reserve", lambda: alloc.reserve(batch, RESERVE), growth),
                Step("reserve again", lambda: alloc.reserve(batch, RESERVE)),
                Step("commit", lambda: alloc.commit(batch, mine.arrays[mine.at])),
                Step(None, cut_mine),
            ],
        ),
        Side(
            LOOP,
            [
                Step("reserve", lambda: loop.reserve(requests, RESERVE), growth),
                Step("reserve again", lambda: loop.reserve(requests, RESERVE)),
                Step("commit", lambda: loop.commit(requests, theirs.lists[theirs.at])),
                Step(None, cut_theirs),
            ],
        ),
    ]


def release_sides(twins: Twins) -> list[Side]:
    """Release a batch whose requests hold `RELEASED_TOKENS` each."""
    alloc, loop, shape = twins.alloc, twins.loop, twins.shape
    requests = [Request() for _ in range(shape.batch)]
    lengths = [shape.history] * shape.batch
    handles = [np.empty(0, np.int64)]

    def fill_mine() -> None:
        handles[0] = alloc.open(shape.batch)
        alloc.extend(handles[0], shape.history)

    def fill_theirs() -> None:
        loop.open(requests)
        loop.extend(requests, lengths)

    return [
        Side(
            SUBJECT,
            [Step(None, fill_mine), Step("release", lambda: alloc.release(handles[0]))],
        ),
        Side(
            LOOP,
            [Step(None, fill_theirs), Step("release", lambda: loop.release(requests))],
        ),
    ]
