"""Requests that are aborted and runs that are stopped: everything comes back."""

from __future__ import annotations

import pytest
from replay.engine_support import Watched, engine, proven, req, run

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig

# Aborts


def aborting(at, **options) -> Watched:
    """An engine with two requests, of which the first is aborted at ``at`` tokens of progress."""
    watched = engine(req(10, output=6), req(11, output=6), chunk=12, **options)
    watched._requests.abort_at[0] = at
    return watched


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("at", "committed"),
    [
        pytest.param(0, None, id="queued"),
        pytest.param(1, 4, id="in the first chunk"),
        pytest.param(7, 8, id="in the second chunk"),
        pytest.param(10, 10, id="in the last chunk"),
        pytest.param(11, 10, id="with the first token"),
        pytest.param(12, 11, id="decoding"),
        pytest.param(14, 13, id="decoding, later"),
    ],
)
def test_an_abort_at_any_stage_gives_everything_back(at, committed, prefix_cache):
    watched = engine(req(10, output=6), chunk=4, prefix_cache=prefix_cache)
    watched._requests.abort_at[0] = at
    totals = proven(watched.run()).totals
    assert (totals.aborted, totals.finished) == (1, 0)
    # Nothing of an aborted request is left to the cache but what it had published.
    assert [(one.committed, one.known) for one in watched.releases] == (
        [] if committed is None else [(committed, None)]
    )
    assert totals.decoded == (0 if at <= 10 else at - 10)


def test_an_abort_leaves_the_others_alone():
    for at in (0, 3, 10, 12):
        watched = aborting(at)
        totals = proven(watched.run()).totals
        assert (totals.aborted, totals.finished) == (1, 1)
        assert watched.releases[-1].committed == 16


@pytest.mark.parametrize("spec", ["none", "dflash"])
def test_a_share_is_aborted_at_random_points_and_all_comes_back(spec):
    config = SpecConfig() if spec == "none" else SpecConfig("dflash", draft_tokens=8)
    workload = generate("code", 400, seed=3)
    options = Options(
        num_pages=2_000,
        page_size=16,
        device="cpu",
        speed=20.0,
        abort_rate=0.4,
        check_every=20,
        chunk=2_048,
        admit="chunk",
        headroom=0,
        seed=11,
        spec=config,
        acceptance=Acceptance(7, mean=3.0),
    )
    totals = proven(Engine(workload, options).run()).totals
    assert 110 < totals.aborted < 210
    assert totals.aborted + totals.finished == 400
    assert 0 < totals.decoded < sum(request.output_len for request in workload.requests)
    assert totals.retractions > 0


def test_no_share_is_no_abort_and_all_is_everyone():
    requests = [req(9, output=20) for _ in range(30)]
    assert run(*requests, abort_rate=0.0).totals.aborted == 0
    totals = run(*requests, abort_rate=1.0).totals
    assert (totals.aborted, totals.finished) == (30, 0)
    assert 0 < totals.decoded < 30 * 19


# Stopping


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_stop_ends_after_the_step_and_gives_everything_back(after):
    watched = engine(
        req(40, output=20), req(6, output=20), req(8, arrival=50.0), chunk=12, num_pages=30
    )
    recording = watched.run(lambda totals: watched.stop() if totals.steps == after else None)
    assert recording.interrupted and recording.violation is None
    assert (recording.leaked_pages, recording.leaked_rows) == (0, 0)
    assert recording.totals.steps == after
    assert (recording.totals.finished, recording.totals.requests) == (0, 3)
    assert recording.totals.virtual_seconds == after
    stats = watched.alloc.stats()
    assert stats.groups["full"].free == 30 and stats.rows.free == stats.rows.total


def test_stop_before_the_start_does_nothing():
    watched = engine(req(4))
    watched.stop()
    recording = watched.run()
    assert recording.interrupted and recording.sound
    assert recording.totals.steps == 0 and recording.totals.virtual_seconds == 0.0


def test_stop_with_a_waiting_request_leaves_nothing():
    watched = engine(req(12, output=12), req(12, output=12), num_pages=6, headroom=0)
    recording = watched.run(lambda totals: watched.stop() if totals.retractions else None)
    assert recording.interrupted and recording.sound
    assert recording.totals.retractions == 1 and recording.totals.finished == 0


def test_progress_is_shown_after_every_step():
    steps: list[int] = []
    watched = engine(req(6, output=4))
    watched.run(lambda totals: steps.append(totals.steps))
    assert steps == [1, 2, 3, 4]
