"""An engine whose steps take a second each, and which notes what every request gave back."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from sgalloc.replay.clock import StepTime
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.requests import TraceRequest, Workload

PAGE = 4
SECOND = StepTime(base=1.0, per_prefill_token=0.0, per_request=0.0)
"""Every step takes one virtual second."""

MOST_STEPS = 20_000
"""Steps (and idle turns) after which a small workload has got stuck."""


class Release(NamedTuple):
    """What one request held when it was released."""

    committed: int
    allocated: int
    known: int | None  # token ids given to the prefix cache


class Watched(Engine):
    """An engine that notes every release, and fails where it makes no progress."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.releases: list[Release] = []
        self.turns = 0
        release = self.alloc.release

        def noted(x, *, tokens=None, after=None):
            committed = self.alloc.committed(x).tolist()
            allocated = self.alloc.allocated(x).tolist()
            known = [None] * len(committed) if tokens is None else [len(ids) for ids in tokens]
            release(x, tokens=tokens, after=after)
            self.releases += map(Release, committed, allocated, known)

        self.alloc.release = noted

    def _step(self) -> bool:
        self.turns += 1
        if self.turns > MOST_STEPS:
            pytest.fail(f"no end after {MOST_STEPS:,} turns: {self.recording.totals}")
        return super()._step()


def req(prompt, output=1, arrival=0.0, blocks=None) -> TraceRequest:
    """A request; its blocks have one page each."""
    ids = None if blocks is None else np.array(blocks, np.int64)
    return TraceRequest(arrival, prompt, output, ids, PAGE)


def engine(*requests, **options) -> Watched:
    usual = {"num_pages": 50, "page_size": PAGE, "device": "cpu"}
    chosen = usual | {"step_time": SECOND, "check_every": 1} | options
    return Watched(Workload("small", list(requests), 0, []), Options(**chosen))


def run(*requests, **options) -> Recording:
    return proven(engine(*requests, **options).run())


def proven(recording: Recording) -> Recording:
    """The recording of a run that has to be sound."""
    assert recording.violation is None
    assert (recording.leaked_pages, recording.leaked_rows) == (0, 0)
    totals = recording.totals
    assert not recording.interrupted
    assert totals.finished + totals.aborted + totals.refused == totals.requests
    return recording


def plain(recording: Recording) -> dict[str, object]:
    """All of a recording but the times that were measured."""
    totals = dataclasses.asdict(recording.totals)
    del totals["wall_seconds"]
    return {
        "totals": totals,
        "samples": {name: list(values) for name, values in recording.samples.items()},
        "pools": {
            name: {column: list(values) for column, values in pool.samples.items()}
            for name, pool in recording.pools.items()
        },
        "map": [frame.tolist() for frame in recording.map_frames],
        "map_times": recording.map_times,
        "calls": {verb: len(calls) for verb, calls in recording.verbs.items()},
        "steps": len(recording.step_ns),
        "rest": (recording.violation, recording.leaked_pages, recording.leaked_rows),
    }


def column(recording: Recording, name: str) -> list[float]:
    return list(recording.samples[name])
