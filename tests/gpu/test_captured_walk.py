"""Random walks of stages, replays, growth, trims and releases, against a twin on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.capturing import REMEDY, Graph
from gpu.twins import host
from host_support import Query

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")


class Walk:
    """Stages, replays, releases and plain growth in random order, against a twin on the CPU.

    The twin makes the calls that are to be taken, at once; which are to be refused follows from
    what was staged and not replayed, as this class keeps it.
    """

    def __init__(self, seed: int, ps: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ps = ps
        shared: dict[str, Any] = {
            "num_pages": 300, "page_size": ps, "max_requests": 10, "row_width": 40 * ps,
        }  # fmt: skip
        self.gpu = sgalloc.KVAllocator(**shared, device="cuda")
        self.cpu = sgalloc.KVAllocator(**shared, device="cpu")
        self.gpu.warm(512)
        self.graphs = [Graph(self.gpu, 128) for _ in range(2)]
        # For each graph the steps that wait, each a set of (row, number of a page).
        self.waiting: list[deque[set[tuple[int, int]]]] = [deque(), deque()]
        self.handles: list[int] = []
        self.quarantined: list[tuple[Query, set[tuple[int, int]]]] = []
        self.refused = self.taken = self.behind = 0

    @property
    def late(self) -> set[tuple[int, int]]:
        return {place for steps in self.waiting for step in steps for place in step}

    def both(self, call: Callable[[sgalloc.KVAllocator], Any]) -> Any:
        ours, theirs = call(self.gpu), call(self.cpu)
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else True
        return ours

    def some(self) -> list[int]:
        count = int(self.rng.integers(1, min(4, len(self.handles)) + 1))
        return list(self.rng.permutation(self.handles)[:count].tolist())

    def lengths(self, h: list[int]) -> np.ndarray:
        more = self.rng.integers(0, 4 * self.ps, len(h))
        return np.minimum(self.cpu.committed(h) + more, 40 * self.ps)

    def pages(self, h: int) -> int:
        return int(self.cpu.allocated(h)[0]) // self.ps

    def stage(self) -> None:
        at, h = int(self.rng.integers(2)), self.some()
        if len(self.waiting[at]) == 8:
            return
        lengths = self.lengths(h)
        before = [self.pages(x) for x in h]
        self.graphs[at].extend(h, lengths)
        self.cpu.extend(h, lengths)
        rows = self.cpu.rows(h).tolist()
        step = {
            (row, number)
            for x, row, first in zip(h, rows, before, strict=True)
            for number in range(first, self.pages(x))
        }
        if step:
            self.waiting[at].append(step)

    def replay(self) -> None:
        at = int(self.rng.integers(2))
        self.graphs[at].replay()
        if self.waiting[at]:
            self.waiting[at].popleft()
        for event, places in self.quarantined:
            event.over |= not places & self.late

    def grow(self) -> None:
        h = self.some()
        lengths = self.lengths(h)
        self.both(lambda a: a.extend(h, lengths) and None)

    def give_back(self, call: Callable[..., None], going: set[tuple[int, int]], late: bool) -> None:
        if late and going & self.late:
            event = Query()
            self.quarantined.append((event, going))
            self.both(lambda a: call(a, after=event))
            self.behind += 1
        elif going & self.late:
            before = (self.gpu.owners().tolist(), self.gpu.stats().rows)
            with pytest.raises(sgalloc.WrongState, match=REMEDY) as caught:
                call(self.gpu)
            row = int(str(caught.value).split()[1])
            assert row in {place[0] for place in going & self.late}
            assert (self.gpu.owners().tolist(), self.gpu.stats().rows) == before
            self.refused += 1
            return
        else:
            self.both(call)
            self.taken += 1

    def release(self) -> None:
        h = self.some()
        going = {(row, n) for row in self.cpu.rows(h).tolist() for n in range(40)}
        refusals = self.refused
        self.give_back(lambda a, **k: a.release(h, **k), going, bool(self.rng.integers(2)))
        if self.refused == refusals:
            self.handles = [x for x in self.handles if x not in h]

    def trim(self) -> None:
        h = self.some()
        lengths = np.array([int(self.rng.integers(0, c + 1)) for c in self.cpu.committed(h)])
        keep = -(-lengths // self.ps)
        going = {
            (row, number)
            for x, row, first in zip(h, self.cpu.rows(h).tolist(), keep.tolist(), strict=True)
            for number in range(first, self.pages(x))
        }
        self.give_back(lambda a, **k: a.trim(h, lengths, **k), going, False)

    def verify(self) -> None:
        gpu, cpu, late = self.gpu, self.cpu, self.late
        assert np.array_equal(gpu.owners(), cpu.owners())
        assert gpu.stats().rows == cpu.stats().rows
        assert gpu.stats().groups == cpu.stats().groups
        rows, table = cpu.rows(self.handles).tolist(), host(gpu.req_to_token)
        for row, h in zip(rows, self.handles, strict=True):
            written = [n for n in range(self.pages(h)) if (row, n) not in late]
            ours, theirs = (t[row].reshape(-1, self.ps)[written] for t in (table, cpu.req_to_token))
            assert np.array_equal(ours, theirs), f"row {row}"
        assert gpu.check(device=True).tolist() == sorted({p[0] for p in late} & set(rows))

    def run(self, steps: int) -> None:
        names = ("stage", "stage", "stage", "replay", "replay", "grow", "trim", "release")
        for _ in range(steps):
            while len(self.handles) < 3 and self.cpu.stats().rows.free:
                self.handles += self.both(lambda a: a.open()).tolist()
            if self.handles:
                getattr(self, str(self.rng.choice(names)))()
            else:
                self.replay()
            self.both(lambda a: a.settle())
            self.verify()
        while self.late:
            self.replay()
        self.both(lambda a: a.settle())
        self.verify()
        self.both(lambda a: a.release(self.handles))
        assert self.gpu.available() == 300


@pytest.mark.parametrize("ps", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_of_stages_replays_and_releases(seed: int, ps: int) -> None:
    walk = Walk(seed, ps)
    walk.run(150)
    assert walk.refused > 5 and walk.taken > 5 and walk.behind > 0
