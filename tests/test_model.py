"""The allocator against an independent naive model: a state machine and seeded random walks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from model.moves import MOVES, Chooser, any_config
from model.pair import Event, Pair
from model.walk import walk

import sgalloc

BAD_NUMBERS: tuple[Any, ...] = (
    -1, 1.5, float("nan"), float("inf"), True, "3", None, 2**63, -(2**70), [1, 2], [[1]],
    np.array([1.0]), np.array([True]), np.array(["1"]), np.array([2**64 - 1], dtype=np.uint64),
)  # fmt: skip
BAD_HANDLES: tuple[Any, ...] = (
    0, 1, -1, 1 << 32, 1.5, float("nan"), True, "x", None, 2**63, 2**80, [[1]], np.array([1.5]),
)  # fmt: skip


def illegal_calls(pair: Pair, choose: Chooser) -> list[tuple[str, Callable[[], Any]]]:
    """Calls of which every one must be refused and change nothing."""
    real, size = pair.real, pair.config.page_size
    number, nobody = choose.pick(BAD_NUMBERS), choose.pick(BAD_HANDLES)
    if pair.gone and choose.flag(2):
        nobody = choose.pick(pair.gone)
    calls: list[tuple[str, Callable[[], Any]]] = [
        (f"open({number!r})", lambda: real.open(-2 if number is None else number)),
        ("open in no namespace", lambda: real.open(1, namespace=choose.pick((1.5, [1], ())))),
        (f"fits([{number!r}])", lambda: real.fits([number])),
        (f"fits after {nobody!r}", lambda: real.fits([1], after_releasing=[nobody])),
        ("available of no group", lambda: real.available("nobody")),
        (f"release {nobody!r}", lambda: real.release(nobody)),
        (f"commit {nobody!r}", lambda: real.commit(nobody, 1)),
        (f"extend {nobody!r}", lambda: real.extend(nobody, 1)),
        (f"decode {nobody!r}", lambda: real.decode(nobody)),
        (f"reserve {nobody!r}", lambda: real.reserve(nobody, 1)),
        (f"trim {nobody!r}", lambda: real.trim(nobody, 0)),
        (f"pages of {nobody!r}", lambda: real.pages(nobody)),
        (f"slots of {nobody!r}", lambda: real.slots(nobody, 0, 0)),
        (f"committed of {nobody!r}", lambda: real.committed(nobody)),
        (f"batch of {nobody!r}", lambda: real.batch([nobody])),
        ("apply nothing", lambda: real.apply(choose.pick((None, 1, "plan")))),
        ("release tokens of nobody", lambda: real.release([], tokens=[[1]])),
    ]
    if not pair.handles:
        return calls
    handle = choose.pick(list(pair.handles))
    extent = pair.extent(handle)
    committed = pair.ref.requests[pair.handles[handle]].committed
    twice = choose.pick(([handle, handle], np.array([handle, handle])))
    wrong = choose.pick((np.zeros(committed + 1, np.int32), np.zeros(committed, np.float32), "out"))
    waits = Event()
    for verb in ("extend", "decode", "reserve", "commit", "trim"):
        call = getattr(real, verb)
        calls += [
            (f"{verb} {handle} {number!r}", lambda call=call: call([handle], number)),
            (f"{verb} twice", lambda call=call: call(twice, [committed, committed])),
            (
                f"{verb} and nobody",
                lambda call=call: call([handle, nobody], [committed, committed]),
            ),
            (f"{verb} of two lengths", lambda call=call: call([handle], [committed, committed])),
            (f"{verb} of no length", lambda call=call: call([handle], [])),
        ]
    for verb in ("extend", "decode", "reserve"):
        grow = getattr(real, verb)
        calls += [
            (f"{verb} too far", lambda grow=grow: grow([handle], pair.config.row_width + 1)),
            (f"{verb} wrong out", lambda grow=grow: grow(handle, committed, out=wrong)),
            (f"{verb} after", lambda grow=grow: grow(handle, extent + 1, after=waits)),
            (f"plan {verb} {number!r}", lambda verb=verb: real.plan(**{verb: ([handle], number)})),
        ]
    calls += [
        ("commit past A", lambda: real.commit(handle, extent - committed + 1)),
        ("extend below C", lambda: real.extend(handle, committed - 1)),
        ("plan twice", lambda: real.plan(decode=(handle, 1), reserve=(handle, 1))),
        ("release twice", lambda: real.release(twice)),
        ("release and nobody", lambda: real.release([handle, nobody])),
        ("release after nothing", lambda: real.release(handle, after="later")),
        ("batch twice", lambda: real.batch(twice)),
        ("pages past A", lambda: real.pages(handle, 0, extent + 1)),
        ("pages below 0", lambda: real.pages(handle, -size)),
        (f"pages from {number!r}", lambda: real.pages(handle, -1 if number is None else number)),
        ("slots past A", lambda: real.slots(handle, 0, extent + 1)),
        ("slots below 0", lambda: real.slots(handle, -1, 0)),
        ("slots backwards", lambda: real.slots(handle, 1, 0)),
        (f"slots to {number!r}", lambda: real.slots([handle], 0, number)),
        ("fits after twice", lambda: real.fits([1], after_releasing=twice)),
        ("release, tokens of two", lambda: real.release([handle], tokens=[[1], [1]])),
    ]
    if pair.config.window is None:
        calls += [
            ("evict without a window", lambda: real.evict_window(handle)),
            ("plan an eviction without", lambda: real.plan(decode=(handle, 1), evict_window=True)),
            ("a tail without a window", lambda: real.extend(handle, committed, window_tail=0)),
            ("frontier without a window", lambda: real.frontier(handle)),
        ]
    else:
        calls += [
            ("evict above C", lambda: real.evict_window(handle, upto=committed + 1)),
            (f"evict {nobody!r}", lambda: real.evict_window([handle, nobody])),
            (f"evict to {number!r}", lambda: real.evict_window([handle], upto=[number])),
            ("evict twice", lambda: real.evict_window(twice)),
            ("evict of two lengths", lambda: real.evict_window([handle], upto=[0, 0])),
            ("evict after nothing", lambda: real.evict_window(handle, after="later")),
            ("a tail too long", lambda: real.extend(handle, committed, window_tail=1)),
            (
                f"a tail of {number!r}",
                lambda: real.extend([handle], committed, window_tail=[number]),
            ),
            (f"frontier of {nobody!r}", lambda: real.frontier(nobody)),
        ]
    if size > 1:
        calls.append(("pages inside a page", lambda: real.pages(handle, 1, max(extent, 1))))
    if not pair.config.prefix_cache:
        return calls
    tokens = choose.pick(([1.5] * size, [True] * size, "tokens", [None] * size, [[0] * size]))
    return [
        *calls,
        ("release strange tokens", lambda: real.release([handle], tokens=[tokens])),
        ("match strange tokens", lambda: real.prefix.match(tokens)),
        ("publish strange tokens", lambda: real.prefix.publish([handle], [tokens])),
        ("publish tokens of two", lambda: real.prefix.publish([handle], [[1], [1]])),
        ("publish twice", lambda: real.prefix.publish(twice, [[1], [1]])),
        (f"publish {nobody!r}", lambda: real.prefix.publish([nobody], [[1]])),
        ("match in no namespace", lambda: real.prefix.match([1], namespace=1.5)),
        ("open with no match", lambda: real.open_with_prefix([None])),
    ]


def move_illegal(pair: Pair, choose: Chooser) -> None:
    pair.settle()
    for _ in range(3):
        label, call = choose.pick(illegal_calls(pair, choose))
        pair.log.append(label)
        before = pair.fingerprint()
        try:
            call()
        except (sgalloc.AllocError, ValueError, TypeError) as error:
            if not str(error) or "\n" in str(error):
                pair.fail(f"{label}: {error!r} is not one line")
        else:
            pair.fail(f"{label} went through")
        if before != pair.fingerprint():
            pair.fail(f"{label} was refused and changed something")
        pair.seen["illegal"] += 1


def draws(data: st.DataObject) -> Chooser:
    return Chooser(lambda low, high: data.draw(st.integers(low, high)))


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses the configuration, the calls and their arguments."""

    pair: Pair

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.pair = Pair(any_config(draws(data)))

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()


def as_rule(move: Callable[[Pair, Chooser], None]) -> Any:
    @rule(data=st.data())
    def run(self: Machine, data: st.DataObject) -> None:
        move(self.pair, draws(data))

    return run


for _move in (*MOVES, move_illegal):
    setattr(Machine, _move.__name__, as_rule(_move))

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=500,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

SEEDS = range(30)
STEPS = 500


@functools.cache
def walked(seed: int) -> Pair:
    return walk(seed, STEPS, more=(move_illegal, move_illegal))


@pytest.mark.parametrize("seed", SEEDS)
def test_walk(seed: int) -> None:
    pair = walked(seed)
    assert pair.ref.opened > 10
    assert not pair.handles and len(pair.ref.free_rows) == pair.config.max_requests


def test_walks_met_everything() -> None:
    """The walks prove something only where they were under pressure and met every refusal."""
    pairs = [walked(seed) for seed in SEEDS]
    assert {pair.config.page_size for pair in pairs} == {1, 2, 3, 16, 64}
    assert {pair.config.prefix_cache for pair in pairs} == {False, True}
    seen = sum((pair.seen for pair in pairs), Counter())
    assert sum(pair.ref.evicted for pair in pairs) > 300
    refusals = (
        "open refused: rows",
        "extend refused: pages",
        "reserve refused: pages",
        "apply refused: pages",
        "apply refused: plan",
        "plan refused: narrow",
        "plan refused: value",
        "plan refused: stale",
        "commit refused: extent",
        "commit refused: stale",
        "trim refused: edge",
        "open_with_prefix refused: plan",
        "open_with_prefix refused: rows",
        "publish refused: value",
        "release refused: value",
    )
    done = ("open", "extend", "decode", "reserve", "apply", "commit", "trim", "release", "settle",
            "match", "open_with_prefix", "publish", "illegal")  # fmt: skip
    assert [name for name in (*refusals, *done) if seen[name] < 5] == []


def test_the_same_calls_give_the_same_ids_in_any_process() -> None:
    code = "from model.walk import walk; print([walk(seed, 120).trace for seed in (3, 4, 5)])"
    tests = Path(__file__).parent
    answers = set()
    for hash_seed in ("0", "1"):
        paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(ran.stdout.strip())
    assert answers == {str([walk(seed, 120).trace for seed in (3, 4, 5)])}
