"""The same calls give the same ids in any process: pages, rows, handles and evictions."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_support import PAGE_SIZES, Query, assert_laws, make, places, words_of

import sgalloc

TESTS = Path(__file__).resolve().parent
NAMESPACES = (None, "tenant", b"salt", 7)
REFUSALS = (sgalloc.AllocError, ValueError)


class Walk:
    """Random calls from a seed; everything that can be seen of them goes into a log."""

    def __init__(self, seed: int, ps: int, disturbed: bool = False) -> None:
        self.rng = random.Random(seed)
        self.ps = ps
        self.disturbed = disturbed
        self.alloc = make(24, ps, max_requests=6, row_width=12 * ps, prefix_cache=True)
        self.open: list[int] = []
        self.text: dict[int, list[int]] = {}
        self.events: list[Query] = []
        self.log: list[str] = []
        self.kinds: set[str] = set()

    def tokens(self, handle: int) -> list[int]:
        """The ids of a request: what it was opened with, then its own."""
        known = self.text.setdefault(handle, [])
        while len(known) < 12 * self.ps:
            known.append(self.rng.randrange(3) if len(known) % self.ps == 0 else len(known))
        return known

    def step(self) -> Any:
        rng, alloc, ps = self.rng, self.alloc, self.ps
        kind = rng.choice(
            ("open", "match", "extend", "extend", "decode", "reserve", "plan", "trim", "publish",
             "release", "release", "park", "clear")
        )  # fmt: skip
        x = rng.sample(self.open, rng.randint(0, len(self.open)))
        c = alloc.committed(x)
        event = Query() if rng.random() < 0.4 else None
        if event is not None:
            self.events.append(event)
        self.kinds.add(kind)
        if kind == "open":
            new = alloc.open(rng.randint(0, 2), rng.choice(NAMESPACES)).tolist()
            self.open += new
            return new
        if kind == "match":
            ids = [
                v for n in range(12) for v in (rng.randrange(3), *range(n * ps + 1, (n + 1) * ps))
            ]
            match = alloc.prefix.match(ids, rng.choice(NAMESPACES))
            new = alloc.open_with_prefix([match]).tolist()
            self.open += new
            self.text[new[0]] = ids[: match.length]
            return match.pages.tolist(), new
        if kind == "extend":
            out = np.empty(sum(n := [rng.randint(0, 3 * ps) for _ in x]), np.int64)
            alloc.extend(x, c + n if x else [], out=out)
            return out.tolist()
        if kind == "decode":
            return alloc.decode(x, rng.randint(0, 2)).nxt.tolist()
        if kind == "reserve":
            alloc.reserve(x, rng.randint(0, 3 * ps))
            return alloc.commit(x, [rng.randint(0, int(n)) for n in alloc.allocated(x) - c])
        if kind == "plan":
            return alloc.apply(alloc.plan(decode=(x[::2], 1), reserve=(x[1::2], ps))).nxt.tolist()
        if kind == "trim":
            return alloc.trim(x, [rng.randint(0, int(n)) // ps * ps for n in c], after=event)
        if kind == "park":
            return alloc.trim(x[:1], 0)
        if kind == "publish":
            return alloc.prefix.publish(x[:1], [self.tokens(h) for h in x[:1]], after=event)
        if kind == "clear":
            return alloc.prefix.clear() if rng.random() < 0.1 else None
        x = x[:2]
        known = [self.tokens(h) if rng.random() < 0.8 else None for h in x]
        alloc.release(x, tokens=known, after=event)
        self.open = [h for h in self.open if h not in x]
        return x

    def disturb(self) -> None:
        """Questions and refused calls, which leave no trace."""
        alloc = self.alloc
        for call in (
            lambda: alloc.open(99),
            lambda: alloc.extend(self.open, 10**6),
            lambda: alloc.commit(self.open, 10**6),
            lambda: alloc.release([1]),
            lambda: alloc.release(self.open + self.open[:1]),
            lambda: alloc.reserve(self.open, 24 * self.ps),
            lambda: alloc.open_with_prefix([alloc.prefix.match([])] * 9),
        ):
            try:
                call()
            except REFUSALS:
                continue
            if self.open:
                pytest.fail("a call that cannot be done was done")
        alloc.fits([1], after_releasing=self.open)
        alloc.plan(decode=(self.open, 0))
        alloc.stats(), alloc.check(), alloc.runs(), alloc.owners()

    def run(self, steps: int) -> str:
        """A digest of the log."""
        for at in range(steps):
            self.alloc.settle()  # a refused call may take in what is done, so all do that first
            if self.disturbed:
                self.disturb()
            evicted = self.alloc.stats().groups["full"].evicted
            try:
                seen = self.step()
            except REFUSALS as refusal:
                seen = (type(refusal).__name__, words_of(refusal))
                self.kinds.add(type(refusal).__name__)
            if self.alloc.stats().groups["full"].evicted > evicted:
                self.kinds.add("eviction")
            where = {name: sorted(ids) for name, ids in places(self.alloc).items()}
            self.log.append(f"{at} {seen} {where} {self.alloc.rows(self.open).tolist()}")
            if self.events and self.rng.random() < 0.5:
                self.rng.choice(self.events).over = True
        assert_laws(self.alloc)
        self.log.append(hashlib.sha256(self.alloc.req_to_token.tobytes()).hexdigest())
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()


def digests() -> list[str]:
    return [Walk(seed, ps).run(250) for seed, ps in enumerate(PAGE_SIZES)]


def in_a_fresh_process(hash_seed: str) -> list[str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_two_fresh_processes_and_this_one_agree() -> None:
    here = digests()
    assert len(here) == len(PAGE_SIZES) == len(set(here))
    for hash_seed in ("0", "4242"):
        assert in_a_fresh_process(hash_seed) == here


@pytest.mark.parametrize("ps", [1, 3, 16])
def test_refused_calls_and_questions_leave_no_trace(ps: int) -> None:
    plain, disturbed = Walk(99, ps), Walk(99, ps, disturbed=True)
    plain.run(250)
    disturbed.run(250)
    for expected, found in zip(plain.log, disturbed.log, strict=True):
        assert found == expected


def test_the_walks_reach_what_they_are_to_compare() -> None:
    kinds = set()
    for seed, ps in enumerate(PAGE_SIZES):
        walk = Walk(seed, ps)
        walk.run(250)
        kinds |= walk.kinds
    assert {"eviction", "OutOfPages", "OutOfRows"} <= kinds
    assert {"match", "publish", "release", "trim", "plan", "reserve", "clear"} <= kinds


if __name__ == "__main__":
    print(*digests())
