"""The engine in miniature, on workloads small enough to work out by hand what must happen."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from replay.engine_support import PAGE, Release, column, engine, proven, req, run

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.engine import Options
from sgalloc.sizing import SpecConfig

# One request


def test_one_request_step_by_step():
    watched = engine(req(10, output=4), num_pages=8)
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.steps, totals.virtual_seconds) == (4, 4.0)
    assert (totals.prompt_tokens, totals.looked_up, totals.hit) == (10, 10, 0)
    assert (totals.prefilled, totals.decoded, totals.finished) == (10, 4, 1)
    assert (totals.peak_running, totals.retractions, totals.evicted) == (1, 0, 0)
    assert (totals.pressed_steps, totals.waiting_pressure) == (0, 1.0)
    # One sample at the start of each step, and one when there was nothing left to do.
    assert column(recording, "time") == [0, 1, 2, 3, 4]
    assert column(recording, "running") == [1, 1, 1, 1, 0]
    assert column(recording, "committed") == [0, 10, 11, 12, 0]
    assert column(recording, "allocated") == [0, 12, 12, 12, 0]
    # Its two whole pages are published once it is prefilled; at the end three stay cached.
    assert column(recording, "locked") == [0, 2, 2, 2, 0]
    assert column(recording, "owned") == [0, 1, 1, 1, 0]
    assert column(recording, "evictable") == [0, 0, 0, 0, 3]
    assert column(recording, "free") == [8, 5, 5, 5, 5]
    # The last token that is put out has no KV: it was never fed back.
    assert watched.releases == [Release(committed=13, allocated=16, known=14)]


def test_a_request_for_one_token_ends_with_its_prefill():
    watched = engine(req(9, output=1))
    totals = proven(watched.run()).totals
    assert (totals.steps, totals.prefilled, totals.decoded) == (1, 9, 1)
    assert watched.releases == [Release(committed=9, allocated=12, known=10)]


@pytest.mark.parametrize("spec", ["none", "eagle"])
def test_no_requests_are_no_work(spec):
    config = SpecConfig() if spec == "none" else SpecConfig("eagle", 3, 1, 4)
    recording = run(spec=config, acceptance=Acceptance(3, p=0.5))
    assert (recording.totals.requests, recording.totals.steps) == (0, 0)
    assert recording.totals.virtual_seconds == 0.0


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 128])
def test_any_page_size_holds_what_it_must(page_size):
    watched = engine(req(100, output=30), req(129, output=3), page_size=page_size, num_pages=300)
    totals = proven(watched.run()).totals
    assert (totals.prefilled, totals.decoded, totals.steps) == (229, 33, 30)
    assert {(one.committed, one.allocated) for one in watched.releases} == {
        (129, -(-129 // page_size) * page_size),
        (131, -(-131 // page_size) * page_size),
    }


# Prefixes


def test_a_later_request_finds_the_prefix_of_one_that_still_runs():
    recording = run(
        req(12, output=8, blocks=[1, 2, 3]), req(10, output=2, arrival=3.0, blocks=[1, 2, 9])
    )
    totals = recording.totals
    assert (totals.looked_up, totals.hit, totals.prefilled) == (12 + 10, 8, 12 + 2)
    assert totals.prompt_tokens == 22
    # At 3 s both are open: three published pages, two of them shared, and one owned by the first.
    assert column(recording, "running")[3] == 2
    assert column(recording, "locked")[3] == 3 and column(recording, "owned")[3] == 1
    assert column(recording, "committed")[3] == 14 + 8


def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache():
    recording = run(
        req(12, blocks=[1, 2, 3]),
        req(12, arrival=5.0, blocks=[1, 2, 3]),
        req(13, arrival=9.0, blocks=[1, 2, 3, 4]),
    )
    # All three blocks are cached; of 12 tokens the last page is computed again, of 13 the last
    # token alone.
    assert (recording.totals.hit, recording.totals.prefilled) == (8 + 12, 12 + 4 + 1)


def test_two_that_arrive_together_compute_twice_and_keep_once():
    recording = run(req(12, output=3, blocks=[1, 2, 3]), req(10, output=3, blocks=[1, 2, 9]))
    assert (recording.totals.hit, recording.totals.prefilled) == (0, 22)
    # Three published pages and the unpublished end of the second prompt: 4 pages, not 6.
    assert (column(recording, "locked")[1], column(recording, "owned")[1]) == (3, 1)
    assert column(recording, "free")[1] == 46


def test_what_was_put_out_is_never_shared():
    recording = run(req(4, output=9, blocks=[1]), req(9, arrival=20.0, blocks=[1, 2, 3]))
    assert recording.totals.hit == 4


def test_without_a_prefix_cache_nothing_is_found_or_kept():
    watched = engine(
        req(12, output=2, blocks=[1, 2, 3]),
        req(13, output=2, arrival=9.0, blocks=[1, 2, 3, 4]),
        prefix_cache=False,
    )
    recording = proven(watched.run())
    assert (recording.totals.hit, recording.totals.prefilled) == (0, 25)
    assert (recording.totals.looked_up, recording.totals.evicted) == (0, 0)
    for name in ("locked", "evictable", "quarantined"):
        assert set(column(recording, name)) == {0}
    assert [one.known for one in watched.releases] == [None, None]
    with pytest.raises(ValueError, match="no prefix cache"):
        _ = watched.alloc.prefix
    assert "match" not in recording.verbs and "publish" not in recording.verbs


# Refusal


def test_a_request_too_large_for_the_pool_is_refused_and_the_others_run():
    recording = run(req(10, output=2), req(33, output=1), req(1, output=40), req(11), num_pages=8)
    totals = recording.totals
    assert (totals.refused, totals.finished) == (2, 2)
    assert (totals.prompt_tokens, totals.decoded) == (21, 3)


def test_a_request_that_fills_the_pool_to_the_last_slot_is_served():
    # 32 slots; the last token that is put out needs none, and the prefill of 32 puts out one.
    for prompt, output in ((32, 1), (25, 8), (1, 32)):
        watched = engine(req(prompt, output), num_pages=8)
        totals = proven(watched.run()).totals
        assert (totals.refused, totals.finished) == (0, 1), (prompt, output)
        assert watched.releases[-1].committed == 32


def test_a_speculative_request_has_to_fit_with_its_reserve():
    spec = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)  # reserves 8
    options = {"spec": spec, "acceptance": Acceptance(3, p=1.0), "num_pages": 8}
    assert run(req(20, output=4), **options).totals.finished == 1
    assert run(req(20, output=20), **options).totals.refused == 1


# Prefill in chunks


def test_a_long_prompt_is_prefilled_in_chunks():
    recording = run(req(10, output=2), chunk=4)
    assert column(recording, "committed") == [0, 4, 8, 10, 0]
    assert (recording.totals.steps, recording.totals.prefilled) == (4, 10)
    assert recording.totals.virtual_seconds == 4.0


def test_a_chunk_is_shared_by_prompts_in_order_of_arrival():
    recording = run(req(6, output=3), req(6, output=3), chunk=8)
    # 6 + 2, then the first decodes beside the other 4, then both decode, then the second alone.
    assert column(recording, "committed") == [0, 8, 7 + 6, 7, 0]
    assert column(recording, "running") == [2, 2, 2, 1, 0]


def test_no_step_prefills_more_than_a_chunk():
    model = StepTime(base=1.0, per_prefill_token=1.0, per_request=0.0)
    requests = [req(prompt, output=2) for prompt in (3, 40, 1, 17, 5, 64, 2)]
    recording = run(*requests, chunk=16, step_time=model)
    took = np.diff(column(recording, "time"))
    assert took.max() == 17.0
    assert recording.totals.prefilled == 132 == took.sum() - recording.totals.steps


def test_a_chunk_of_one_token_still_gets_there():
    recording = run(req(5, output=2), chunk=1)
    assert recording.totals.steps == 6


# The virtual clock


def test_steps_take_what_the_model_says():
    model = StepTime(base=0.5, per_prefill_token=0.125, per_request=0.25)
    recording = run(req(8, output=3), req(8, output=2), step_time=model)
    # 16 tokens prefilled; two decode; one decodes.
    assert column(recording, "time") == [0.0, 2.5, 3.5, 4.25]
    assert recording.totals.virtual_seconds == 4.25


def test_idle_time_is_skipped_to_the_next_arrival():
    recording = run(req(4, output=2), req(4, output=1, arrival=100.0), req(4, arrival=100.5))
    assert column(recording, "time") == [0, 1, 2, 100, 101, 102]
    assert recording.totals.steps == 4
    assert recording.totals.virtual_seconds == 102.0


def test_nobody_starts_before_arriving():
    recording = run(req(4, output=9), req(4, output=9, arrival=2.5), req(4, output=9, arrival=4.0))
    assert column(recording, "running")[:6] == [1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("speed", "second"), [(0.5, 200.0), (1.0, 100.0), (10.0, 10.0)])
def test_speed_scales_arrivals_alone(speed, second):
    recording = run(req(4, output=3), req(4, output=3, arrival=100.0), speed=speed)
    assert recording.totals.virtual_seconds == second + 3
    assert column(recording, "time")[:3] == [0, 1, 2]


# Speculation

SPECS = {
    "eagle chain": (SpecConfig("eagle", steps=3, topk=1, draft_tokens=4), 3, 8),
    "eagle tree": (SpecConfig("eagle", steps=3, topk=2, draft_tokens=6), 3, 32),
    "dflash": (SpecConfig("dflash", draft_tokens=4), 3, 8),
    "ngram": (SpecConfig("ngram", steps=3, topk=1, draft_tokens=4), 3, 8),
    "uno": (SpecConfig("uno", draft_tokens=3), 3, 8),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("p", "steps"), [(1.0, [4, 4, 1]), (0.0, [1] * 9)])
def test_speculation_commits_exactly_the_goal_and_trims(name, p, steps):
    spec, drafted, reserve = SPECS[name]
    watched = engine(req(8, output=10), spec=spec, acceptance=Acceptance(drafted, p=p))
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.decoded, totals.accepted) == (10, 9)
    assert totals.speculative_steps == len(steps)
    assert totals.steps == 1 + len(steps)
    committed = [8 + sum(steps[:done]) for done in range(len(steps))]
    assert column(recording, "committed") == [8 if spec.topk > 1 else 0, *committed, 0]
    wanted = [-(-(tokens + reserve) // PAGE) * PAGE for tokens in committed]
    if spec.topk == 1:
        # Before the first decode step nothing is reserved; after it the extent never falls.
        assert column(recording, "allocated") == [0, 8, *wanted[:-1], 0]
    else:
        # The branches of a tree are there while its step runs, and gone at the next start.
        assert column(recording, "allocated") == [8, *wanted, 0]
    # What was reserved and not committed went back before the release.
    assert watched.releases == [Release(committed=17, allocated=20, known=18)]


def test_speculation_under_pressure_still_commits_exactly_the_goal():
    rng = np.random.default_rng(5)
    pairs = [(int(p), int(o)) for p, o in rng.integers(1, 40, (60, 2))]
    spec = SpecConfig("eagle", steps=3, topk=2, draft_tokens=6)
    watched = engine(
        *(req(p, o) for p, o in pairs),
        num_pages=40,
        headroom=0,
        chunk=64,
        admit="chunk",
        spec=spec,
        acceptance=Acceptance(3, mean=2.2),
    )
    totals = proven(watched.run()).totals
    assert totals.retractions > 20
    assert totals.decoded == sum(o for _, o in pairs)
    assert totals.accepted <= totals.decoded - 60
    ends = sorted(one.known for one in watched.releases if one.known is not None)
    for p, o in pairs:
        ends.remove(p + o)
    assert len(ends) == totals.retractions


def test_the_mean_yield_is_that_of_the_acceptance_model():
    spec = SpecConfig("dflash", draft_tokens=16)
    recording = run(
        *(req(8, output=400) for _ in range(40)),
        spec=spec,
        acceptance=Acceptance(15, mean=4.24),
        num_pages=6_000,
        check_every=0,
    )
    totals = recording.totals
    assert totals.accepted == totals.decoded - 40 == 40 * 399
    assert totals.accepted / totals.speculative_steps == pytest.approx(4.24, rel=0.05)


# Options

BAD = [
    ("running_limit", 0),
    ("running_limit", 2**20 + 1),
    ("running_limit", 2.0),
    ("running_limit", True),
    ("chunk", 0),
    ("chunk", -1),
    ("chunk", math.nan),
    ("headroom", -1),
    ("headroom", 0.5),
    ("check_every", -1),
    ("check_every", None),
    ("seed", -1),
    ("seed", 1.5),
    ("seed", "0"),
    ("abort_rate", -0.1),
    ("abort_rate", 1.1),
    ("abort_rate", math.nan),
    ("abort_rate", True),
    ("speed", 0.0),
    ("speed", -1.0),
    ("speed", math.nan),
    ("speed", math.inf),
    ("speed", "1"),
    ("admit", "row"),
    ("admit", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_bad_options_are_refused_by_name(name, value):
    with pytest.raises(ValueError) as caught:
        Options(num_pages=10, **{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} is {value!r}: give ") and "\n" not in text


@pytest.mark.parametrize("algorithm", ["eagle", "dflash", "ngram", "uno"])
def test_speculation_without_an_acceptance_model_is_refused(algorithm):
    spec = SpecConfig(algorithm, steps=3, topk=1, draft_tokens=4)
    with pytest.raises(ValueError, match=f"{algorithm}.*acceptance"):
        Options(num_pages=10, spec=spec)


def test_a_model_that_accepts_more_than_is_reserved_is_refused():
    spec = SpecConfig("eagle", steps=1, topk=1, draft_tokens=1)  # reserves 2
    with pytest.raises(ValueError, match="acceptance"):
        engine(req(4, output=9), spec=spec, acceptance=Acceptance(15, p=1.0))


@pytest.mark.parametrize("spec", ["none", "eagle"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_pages", 0),
        ("num_pages", -3),
        ("num_pages", 1.5),
        ("num_pages", 2**31),
        ("page_size", 0),
        ("page_size", -1),
        ("page_size", 2.0),
        ("prefix_cache", 1),
        ("device", "abacus"),
        ("device", 0),
    ],
)
def test_a_pool_that_cannot_be_is_refused_when_the_engine_is_made(name, value, spec):
    config = SpecConfig() if spec == "none" else SpecConfig("eagle", 3, 1, 4)
    chosen = {"num_pages": 10, "page_size": PAGE, name: value}
    with pytest.raises((TypeError, ValueError)) as caught:
        engine(req(4), spec=config, acceptance=Acceptance(3, p=0.5), **chosen)
    text = str(caught.value)
    assert name in text and str(value) in text and "\n" not in text


def test_options_do_not_change():
    options = Options(num_pages=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.chunk = 1
