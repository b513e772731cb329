"""The allocator against the naive one: seeded worlds, a state machine, and what they met."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sgalloc.fuzz.calls import Call
from sgalloc.fuzz.config import Chooser, any_config
from sgalloc.fuzz.doing import Doing
from sgalloc.fuzz.drawing import Drawing, Move
from sgalloc.fuzz.running import Setting, batches
from sgalloc.fuzz.walk import (
    CACHE_MOVES,
    MOVES,
    SPARSE_MOVES,
    WINDOW_MOVES,
    Tally,
    moves_of,
    run_world,
)

WORLDS = 150


@functools.cache
def walked() -> Tally:
    tally = Tally()
    for batch in batches(Setting(seed=1), WORLDS, 1, lambda: True):
        assert not batch.failures, batch.failures[0].message
        tally.add(batch.tally)
    return tally


def test_seeded_worlds_agree() -> None:
    assert walked().worlds == WORLDS and walked().calls >= 500 * WORLDS


def test_the_worlds_met_everything() -> None:
    """They prove something only where they were under pressure and met every refusal."""
    tally = walked()
    assert tally.evicted > 500
    refusals = (
        "apply: pages", "apply: plan", "batch: stale", "commit: extent",
        "commit: stale", "commit: state", "compact: extent", "compact: value", "decode: narrow",
        "decode: pages", "decode: state", "evict_window: value", "extend: narrow",
        "extend: pages", "extend: state", "extend: value", "open: rows", "open_with_prefix: plan",
        "open_with_prefix: rows", "plan: narrow", "plan: stale", "plan: state", "plan: value",
        "preallocate: narrow", "preallocate: pages", "preallocate: rows", "preallocate: value",
        "prepare_for_decode: narrow", "prepare_for_decode: pages", "publish: value",
        "release: stale", "release: value", "reserve: pages", "snapshot: state",
        "to_sparse: pages", "to_sparse: state", "trim: edge", "trim: state", "wrong",
    )  # fmt: skip
    done = (
        "abort", "acknowledge", "apply", "batch", "clear", "commit", "compact", "decode",
        "evict_window", "extend", "fits", "match", "open", "open_with_prefix", "pages", "plan",
        "preallocate", "prepare_for_decode", "publish", "reclaim", "release", "reserve", "restore",
        "settle", "slots", "snapshot", "to_sparse", "trim",
    )  # fmt: skip
    assert [name for name in refusals if tally.refused[name] < 5] == []
    assert [name for name in done if tally.seen[name] < 50] == []


CODE = """
import hashlib
from sgalloc.fuzz import walk
calls = hashlib.sha256()
class Doing(walk.Doing):
    def run(self, call):
        calls.update(str(call).encode())
        super().run(call)
        calls.update(self.subjects[0].alloc.digest().encode())
walk.Doing = Doing
for number in (0, 3, 7, 9):
    assert walk.run_world(5, number)[1] is None
print(calls.hexdigest())
"""


def test_the_same_worlds_make_the_same_calls_and_ids_in_any_process() -> None:
    answers = set()
    root = Path(__file__).resolve().parents[2]
    for hash_seed in ("0", "1"):
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        ran = subprocess.run(
            [sys.executable, "-c", CODE],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(ran.stdout.strip())
    assert len(answers) == 1 and len(answers.pop()) == len(hashlib.sha256().hexdigest())


def test_any_number_of_processes_walks_the_same_worlds() -> None:
    tallies = []
    for workers in (1, 2):
        tally = Tally()
        for batch in batches(Setting(seed=2), 6, workers, lambda: True):
            assert not batch.failures
            tally.add(batch.tally)
        tallies.append(tally)
    assert tallies[0] == tallies[1] and tallies[0].worlds == 6


# -- Hypothesis chooses --------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses the configuration, the calls and their arguments."""

    world: Doing
    drawing: Drawing

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        choose = draws(data)
        self.world = Doing(any_config(choose))
        self.drawing = Drawing(self.world, choose)

    def make(self, move: Move, data: st.DataObject) -> None:
        if move not in moves_of(self.world.config):
            return
        self.drawing.choose = draws(data)
        call = move(self.drawing)
        calls = [] if call is None else [call]
        calls += self.drawing.pending
        self.drawing.pending = []
        for one in calls:
            self.world.run(one)
            self.drawing.ran(one)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(Call("finish"))


def draws(data: st.DataObject) -> Chooser:
    return Chooser(lambda low, high: data.draw(st.integers(low, high)))


def as_rule(move: Move) -> Any:
    @rule(data=st.data())
    def run(self: Machine, data: st.DataObject) -> None:
        self.make(move, data)

    return run


for _move in {**MOVES, **CACHE_MOVES, **WINDOW_MOVES, **SPARSE_MOVES}:
    setattr(Machine, _move.__name__, as_rule(_move))

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_world_may_have_a_configuration_of_ones_own() -> None:
    config = any_config(Chooser(lambda low, high: high))
    tally, failure = run_world(0, 0, config=config, calls=100)
    assert failure is None and tally.calls >= 100
