"""Journals of the walks that other tests make, and the state that a run again must reach."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from host_support import Query, fingerprint, prompt

import sgalloc

TESTS = Path(__file__).resolve().parents[1]
CODE = """
import sys
from trust.journal_support import state
from sgalloc.trust.rerun import Rerun
for line in sys.stdin.read().splitlines():
    path, until = line.split("|")
    run = Rerun(path)
    run.run(int(until))
    half = state(run.alloc)
    run.run(check_every=50)
    print(half, state(run.alloc), run.records, run.digests, int(run.closed), run.torn)
"""


def state(alloc: sgalloc.KVAllocator) -> str:
    """A digest of all that `fingerprint` sees, but for which objects the events are."""
    seen = list(fingerprint(alloc))
    waiting = [[*entry][1:] for entry in seen[13]]
    assert len(waiting) == len(alloc._core.quarantine.entries)
    pins = []
    for snapshot, row, pages, nodes, _ in seen[14]:
        known = (snapshot.length, snapshot.prefix, snapshot.writers, snapshot.acks)
        pins.append((known, snapshot.deadline, snapshot.aborted, row, pages, nodes))
    assert len(pins) == len(alloc._core.pins.by_handle)
    seen[13], seen[14] = waiting, pins
    return hashlib.sha256(repr(seen).encode()).hexdigest()


class Half(NamedTuple):
    """A state on the way: the number of the next record, and the digest."""

    number: int
    state: str


def half_of(alloc: sgalloc.KVAllocator) -> Half:
    return Half(alloc._journal.log.number, state(alloc))  # type: ignore[union-attr]


class Journals:
    """Every allocator that is made from now on writes a journal into ``folder``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.made: list[tuple[sgalloc.KVAllocator, Path]] = []
        real = sgalloc.KVAllocator

        def make(*args: Any, **kwargs: Any) -> sgalloc.KVAllocator:
            path = folder / f"{len(self.made)}.journal"
            self.made.append((real(*args, **kwargs, journal=path), path))
            return self.made[-1][0]

        monkeypatch.setattr(sgalloc, "KVAllocator", make)

    def run_again(self, halves: list[Half]) -> list[tuple[str, str]]:
        """Close them, run each in one fresh process; the states here and there, both times."""
        expected, lines = [], []
        for (alloc, path), half in zip(self.made, halves, strict=True):
            alloc.close_journal()
            records = alloc._journal.log.number  # type: ignore[union-attr]
            expected.append((half.state, state(alloc), records))
            lines.append(f"{path}|{half.number}")
        answers = in_fresh_process(CODE, "\n".join(lines)).splitlines()
        assert len(answers) == len(expected) > 0
        pairs = []
        for (middle, end, records), answer in zip(expected, answers, strict=True):
            there = answer.split()
            assert int(there[2]) == records, "all records were run"
            assert int(there[3]) >= 1, "a digest was compared"
            assert there[4:] == ["1", "0"], "the journal was closed and is whole"
            pairs += [(middle, there[0]), (end, there[1])]
        return pairs


def in_fresh_process(code: str, given: str = "") -> str:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def busy(path: Path, close: bool = True) -> sgalloc.KVAllocator:
    """An allocator with a prefix cache that has done a bit of everything, and its journal."""
    alloc = sgalloc.KVAllocator(40, 4, 6, 48, device="cpu", prefix_cache=True, journal=path)
    event = Query()
    first = alloc.open(2, "tenant")
    alloc.extend(first, [21, 9])
    alloc.prefix.publish(first, [prompt(5, 4), prompt(2, 4, 1)])
    alloc.release(first[:1], tokens=[prompt(5, 4)], after=event)
    match = alloc.prefix.match(prompt(6, 4), "tenant")
    (second,) = alloc.open_with_prefix(match).tolist()
    batch = alloc.batch([second, int(first[1])])
    for step in range(4):
        alloc.reserve(batch, 5)
        alloc.commit(batch, [step % 2, 3])
    for refused in (lambda: alloc.extend(second, 49), lambda: alloc.release(int(first[0]))):
        with suppress(sgalloc.AllocError):
            refused()
    event.over = True
    alloc.trim(second, 20)
    alloc.apply(alloc.plan(decode=(batch, 2)))
    received = alloc.preallocate([10, 4], writers=2, deadline=[7.5, None])
    alloc.acknowledge(int(received[1]), 0)
    alloc.reclaim(8)
    if close:
        alloc.close_journal()
    return alloc


def positions(data: bytes) -> list[tuple[int, int]]:
    """Where each record of a journal begins and ends."""
    found, at = [], 17
    while at < len(data):
        end = at + 11 + int(np.frombuffer(data[at : at + 4], "<u4")[0])
        found.append((at, end))
        at = end
    assert at == len(data)
    return found


Step = Callable[[], None]
