"""Runs that share their allocators: what is kept, what is told apart, and what is parked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replay.engine_support import PAGE, SECOND, engine, proven, req

from sgalloc.groups.window import SlidingWindow
from sgalloc.replay import engine as engine_room
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.endless import Endless, Stage, endless
from sgalloc.replay.engine import Options
from sgalloc.replay.options import Disaggregation
from sgalloc.replay.requests import Workload
from sgalloc.retraction import Retraction
from sgalloc.sizing import SpecConfig

LONGEST = 80
USUAL = {"num_pages": 50, "page_size": PAGE, "device": "cpu", "step_time": SECOND, "headroom": 0}
TREE = SpecConfig("eagle", steps=2, topk=2, draft_tokens=5)


def options(**more: Any) -> Options:
    return Options(**(USUAL | more))


def workload(*requests: Any, numbers: list[int] | None = None) -> Workload:
    told = None if numbers is None else np.array(numbers, np.int64)
    return Workload("small", list(requests), 0, [], told)


def run(
    stage: Stage, work: Workload, given: Options, park: float = 0.0, empty: bool = False
) -> Endless:
    one = endless(work, given, stage, park, empty)
    proven(one.run())
    return one


def test_runs_go_on_with_what_the_one_before_left_in_the_cache() -> None:
    given = options()
    stage = Stage([given], LONGEST)
    work = workload(req(20), numbers=[3])
    assert run(stage, work, given).recording.totals.hit == 0
    assert run(stage, work, given, empty=True).recording.totals.hit == 16
    assert run(stage, work, given).recording.totals.hit == 0
    alloc = stage.allocators[""]
    assert alloc.stats().groups["full"].cached > 0
    alloc.check(device=True)


@pytest.mark.parametrize(("number", "hit"), [(3, 16), (4, 0)])
def test_unshared_text_is_told_apart_by_numbers(number: int, hit: int) -> None:
    given = options()
    stage = Stage([given], LONGEST)
    run(stage, workload(req(20), numbers=[3]), given)
    assert run(stage, workload(req(20), numbers=[number]), given).recording.totals.hit == hit


def test_output_is_told_apart_by_numbers_too() -> None:
    given = options()
    stage = Stage([given], LONGEST)
    alloc = stage.allocators[""]
    for numbers in ([1], [2]):
        run(stage, workload(req(4, output=9, blocks=[7]), numbers=numbers), given)
    # The prompt once, and the output of each.
    assert alloc.stats().groups["full"].cached == 1 + 2 * 2


@pytest.mark.parametrize("nodes", [None, Disaggregation(50)])
@pytest.mark.parametrize(("before", "now"), [(None, "b"), ("b", None), ("b", 7), ("b", b"b")])
def test_namespaces_of_runs_share_nothing(
    before: Any, now: Any, nodes: Disaggregation | None
) -> None:
    given = options(disaggregated=nodes)
    stage = Stage([given], LONGEST)
    work = workload(req(20, output=3), numbers=[3])
    named = {name: options(disaggregated=nodes, namespace=name) for name in (before, now)}
    run(stage, work, named[before])
    other, same = (run(stage, work, named[name]).recording.totals for name in (now, before))
    assert (other.hit, other.matched_tokens) == (0, 0)
    assert same.hit == 16 and (nodes is None or same.matched_tokens == 20)


def test_the_time_of_the_verbs_is_that_of_all_runs() -> None:
    given = options(spec=TREE, acceptance=Acceptance(2, mean=2.0))
    stage = Stage([options(), given], LONGEST)
    steps = 0
    for one in (options(), given, options()):
        done = run(stage, workload(req(9, output=6), req(5, output=8)), one)
        assert not any(done.recording.verbs.values())
        steps += done.recording.totals.steps
    taken = stage.take()
    assert {"step", "plan", "apply", "compact", "release", "prepare"} <= set(taken)
    assert len(taken["step"]) == steps and all(one >= 0 for one in taken["step"])
    assert stage.take() == {}


def test_one_stage_serves_rows_as_wide_as_its_widest_mode_needs() -> None:
    modes = [options(), options(spec=TREE, acceptance=Acceptance(2, mean=2.0))]
    work = workload(req(LONGEST - 20, output=20))
    for order in (modes, modes[::-1]):
        stage = Stage(order, LONGEST)
        for one in order:
            run(stage, work, one)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"admit": "chunk", "chunk": 8},
    "tree": {"spec": TREE, "acceptance": Acceptance(2, mean=2.0)},
    "overlapped": {
        "spec": SpecConfig("eagle", steps=2, topk=1, draft_tokens=3),
        "acceptance": Acceptance(2, mean=2.0),
        "overlap": True,
    },
    "window": {"window": SlidingWindow(8, 30), "chunk": 16},
    "nodes": {"disaggregated": Disaggregation(50)},
}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_parked_requests_end_as_the_others_do(shape: str, empty: bool) -> None:
    given = options(**SHAPES[shape], check_every=1)
    stage = Stage([given], LONGEST)
    requests = [req(7 + 3 * at, output=3 + 5 * at) for at in range(8)]
    plain = run(stage, workload(*requests), given, empty=True).recording.totals
    parked = run(stage, workload(*requests), given, park=1.0, empty=empty)
    assert parked.parked > 8
    assert parked.recording.totals.finished == plain.finished == 8
    if shape != "nodes":  # there, nothing but the reserve goes back
        assert parked.recording.totals.prefilled > plain.prefilled
    for alloc in stage.allocators.values():
        group = alloc.stats().groups["full"]
        assert group.free + group.cached == group.total and not group.locked
        assert (group.cached == 0) == empty


def test_a_retraction_that_frees_too_little_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose, asked = engine_room.choose_victims, []

    def too_few(*given: Any, **named: Any) -> Retraction:
        found = choose(*given, **named)
        asked.append(found.victims.size)
        short = found.victims[: max(1, found.victims.size // 2)]
        return Retraction(short, True) if found.fits else found

    monkeypatch.setattr(engine_room, "choose_victims", too_few)
    many: Callable[[], Any] = engine(
        *[req(4, output=40) for _ in range(8)], num_pages=14, headroom=0, prefix_cache=False
    ).run
    assert proven(many()).totals.finished == 8
    assert len(asked) > 2


def test_a_page_that_is_gone_after_a_run_that_leaves_the_cache_is_counted() -> None:
    given = options()
    stage = Stage([given], LONGEST)
    alloc = stage.allocators[""]
    stray = alloc.open()
    alloc.extend(stray, 6)
    found = endless(workload(req(20)), given, stage, 0.0, False).run()
    assert (found.leaked_pages, found.leaked_rows) == (2, 1)
