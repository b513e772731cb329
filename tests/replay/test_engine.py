"""The engine in miniature, on workloads small enough to work out by hand what must happen."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.requests import TraceRequest, Workload
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig

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


def column(recording: Recording, name: str) -> list[float]:
    return list(recording.samples[name])


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


# Retraction


def test_retraction_and_resumption_step_by_step():
    # 4 and 5 tokens, 12 to put out each, in 6 pages without a cache. At the 8th decode step they
    # need 3 + 4 pages: the second, with the longer prompt, goes. It waits while the first needs
    # its 4th page, for three steps, then is prefilled again with the 8 tokens it had put out.
    watched = engine(
        req(4, output=12), req(5, output=12), num_pages=6, headroom=0, prefix_cache=False
    )
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.retractions, totals.finished) == (1, 2)
    assert (totals.decoded, totals.prefilled) == (24, 4 + 5 + 13)
    assert totals.prompt_tokens == 9
    assert totals.steps == 12 + 4
    assert column(recording, "owned")[:12] == [0, 3, 4, 4, 4, 5, 6, 6, 6, 3, 4, 4]
    assert column(recording, "queued") == [0] * 9 + [1] * 3 + [0] * 5
    assert (totals.pressed_steps, totals.waiting_pressure) == (3, 3 / 6)
    assert [one.committed for one in watched.releases if one.allocated] == [12, 15, 16]


def test_a_retracted_request_finds_in_the_cache_what_was_not_evicted():
    # As above, but what was computed stays cached: of the 3 pages of the second the first evicts
    # one, and the second another when it goes on.
    watched = engine(req(4, output=12), req(5, output=12), num_pages=6, headroom=0)
    totals = proven(watched.run()).totals
    assert (totals.retractions, totals.decoded, totals.evicted) == (1, 24, 2)
    assert (totals.looked_up, totals.hit) == (4 + 5 + 13, 8)
    assert totals.prefilled == 4 + 5 + 5
    ends = [one for one in watched.releases if one.known is not None]
    assert ends == [Release(12, 12, 13), Release(15, 16, 16), Release(16, 16, 17)]


def test_a_prompt_counts_once_however_often_its_request_is_sent_back():
    # The second is sent back in the middle of its prefill, having put out nothing.
    totals = run(
        req(12, output=12), req(12, output=2), num_pages=6, headroom=0, chunk=4, admit="chunk"
    ).totals
    assert totals.retractions > 0
    assert totals.looked_up > 24
    assert totals.prompt_tokens == 24


def test_every_request_puts_out_what_it_should_however_often_it_is_sent_back():
    rng = np.random.default_rng(7)
    pairs = [(int(p), int(o)) for p, o in rng.integers(1, 40, (60, 2))]
    for prefix_cache in (True, False):
        watched = engine(
            *(req(p, o) for p, o in pairs),
            num_pages=24,
            headroom=0,
            chunk=32,
            admit="chunk",
            prefix_cache=prefix_cache,
        )
        totals = proven(watched.run()).totals
        assert totals.retractions > 20
        assert totals.decoded == sum(o for _, o in pairs)
        assert totals.finished == 60
        if prefix_cache:
            ends = sorted(one.known for one in watched.releases if one.known is not None)
            wanted = [p + o for p, o in pairs]
            for length in wanted:
                ends.remove(length)
            assert len(ends) == totals.retractions


def test_the_one_that_put_out_least_is_sent_back():
    # When 5 + 3 of 6 pages are needed, the first has put out 8 tokens and the second 5: the
    # second goes, though its prompt is shorter.
    watched = engine(
        req(9, output=12),
        req(4, output=12, arrival=3.0),
        num_pages=6,
        headroom=0,
        prefix_cache=False,
    )
    assert proven(watched.run()).totals.retractions == 1
    assert [one.committed for one in watched.releases if one.allocated] == [8, 20, 15]


def test_those_sent_back_come_before_those_that_never_ran():
    # As in the first case, and a third waits for a page when the second is sent back. It would
    # fit into what the second leaves, but it arrived later, and so has to wait for both.
    recording = run(
        req(4, output=12),
        req(5, output=12),
        req(4, output=2, arrival=7.5),
        num_pages=6,
        headroom=0,
        prefix_cache=False,
    )
    assert recording.totals.retractions == 1
    assert column(recording, "queued")[7:13] == [0, 1, 2, 2, 2, 0]
    assert column(recording, "running")[7:13] == [2, 2, 1, 1, 1, 2]


# Waiting


def test_one_that_waits_alone_for_the_last_to_finish_is_taken_in():
    # Each needs 9 of 10 pages. While the second waits, the first ends within a few steps.
    for prefix_cache in (False, True):
        recording = run(
            req(32, output=2), req(32, output=2), num_pages=10, headroom=0,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        totals = recording.totals
        assert (totals.finished, totals.steps, totals.peak_running) == (2, 4, 1)
        assert totals.pressed_steps == 2


def test_admission_by_prompt_waits_where_admission_by_chunk_goes_ahead():
    requests = (req(12, output=4), req(24, output=2, arrival=1.0))
    by_prompt = run(*requests, num_pages=8, headroom=0, chunk=8, admit="prompt")
    by_chunk = run(*requests, num_pages=8, headroom=0, chunk=8, admit="chunk")
    assert by_prompt.totals.retractions == 0 and by_prompt.totals.peak_running == 1
    assert by_chunk.totals.retractions > 0 and by_chunk.totals.peak_running == 2
    assert by_chunk.totals.decoded == by_prompt.totals.decoded == 6


def test_admission_by_prompt_counts_what_others_have_still_to_prefill():
    # 4 + 5 pages of prompts in 8: both first chunks fit, both prompts do not.
    requests = (req(16, output=2), req(20, output=2))
    recording = run(*requests, num_pages=8, headroom=0, chunk=17, admit="prompt")
    assert (recording.totals.peak_running, recording.totals.retractions) == (1, 0)
    roomier = run(*requests, num_pages=10, headroom=0, chunk=17, admit="prompt")
    assert roomier.totals.peak_running == 2


@pytest.mark.parametrize(("headroom", "together"), [(0, True), (4, True), (8, False)])
def test_headroom_is_left_free_for_those_that_run(headroom, together):
    # The first holds 2 of 6 pages; the second needs 2, and leaves 2: one each for headroom 4.
    recording = run(req(7, output=9), req(8, output=2, arrival=1.0), num_pages=6, headroom=headroom)
    assert recording.totals.peak_running == (2 if together else 1)
    assert (recording.totals.pressed_steps > 0) is not together


def test_the_running_limit_holds_and_is_no_pressure():
    recording = run(*(req(8, output=6) for _ in range(7)), running_limit=3)
    totals = recording.totals
    assert totals.peak_running == 3 == max(column(recording, "running"))
    assert (totals.finished, totals.steps) == (7, 18)
    assert totals.pressed_steps == 0


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
    assert column(recording, "committed") == [0, *committed, 0]
    # Before the first decode step nothing is reserved; after it the extent never falls.
    wanted = [-(-(tokens + reserve) // PAGE) * PAGE for tokens in committed]
    assert column(recording, "allocated") == [0, 8, *wanted[:-1], 0]
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


# The record


def plain(recording: Recording) -> dict[str, object]:
    """All of a recording but the times that were measured."""
    totals = dataclasses.asdict(recording.totals)
    del totals["wall_seconds"]
    return {
        "totals": totals,
        "samples": {name: list(values) for name, values in recording.samples.items()},
        "map": [frame.tolist() for frame in recording.map_frames],
        "map_times": recording.map_times,
        "calls": {verb: len(calls) for verb, calls in recording.verbs.items()},
        "steps": len(recording.step_ns),
        "rest": (recording.violation, recording.leaked_pages, recording.leaked_rows),
    }


def seeded(seed: int) -> dict[str, object]:
    options = Options(
        num_pages=3_000,
        page_size=16,
        device="cpu",
        speed=10.0,
        abort_rate=0.2,
        headroom=0,
        seed=seed,
        spec=SpecConfig("dflash", draft_tokens=8),
        acceptance=Acceptance(7, mean=3.0),
    )
    return plain(proven(Engine(generate("chat", 60, seed=1), options).run()))


def test_the_same_seed_gives_the_same_recording():
    first = seeded(4)
    assert first == seeded(4)
    assert first["totals"] != seeded(5)["totals"]


def test_samples_and_times_agree_with_the_totals():
    workload = generate("chat", 150, seed=2)
    options = Options(
        num_pages=2_500, page_size=64, speed=20.0, headroom=0, check_every=50, device="cpu"
    )
    recording = proven(Engine(workload, options).run())
    samples = {name: np.array(values) for name, values in recording.samples.items()}
    assert len({values.size for values in samples.values()}) == 1
    parts = ("owned", "locked", "evictable", "quarantined", "free")
    assert set(sum(samples[name] for name in parts)) == {2_500}
    assert all((samples[name] >= 0).all() for name in parts)
    assert (samples["committed"] <= samples["allocated"]).all()
    assert (np.diff(samples["time"]) >= 0).all()
    totals = recording.totals
    assert samples["running"].max() == totals.peak_running
    assert len(recording.step_ns) == len(recording.verbs["apply"]) == totals.steps
    assert len(recording.verbs["publish"]) == totals.finished + totals.retractions
    assert sum(recording.step_ns) <= recording.spent_ns
    assert sum(map(sum, recording.verbs.values())) == recording.spent_ns
    assert totals.hit + totals.prefilled == totals.looked_up
    assert totals.evicted > 0 and totals.hit > 0


def test_the_record_says_what_was_run():
    workload = Workload("two small ones", [req(4), req(5)], 0, [])
    options = Options(num_pages=60, page_size=PAGE, device="cpu")
    recording = Engine(workload, options, config={"answer": 42}).run()
    assert recording.config == {"answer": 42}
    assert (recording.workload, recording.device) == ("two small ones", "cpu")
    assert (recording.num_pages, recording.page_size) == (60, PAGE)
    assert recording.totals.requests == 2


def test_both_laws_are_checked_as_often_as_asked(monkeypatch):
    for every in (0, 1, 3, 7):
        watched = engine(req(6, output=22), check_every=every)
        asked: list[int] = []
        check = watched.alloc.check

        def counted(*args, check=check, asked=asked, watched=watched, **kwargs):
            asked.append(watched.recording.totals.steps)
            return check(*args, **kwargs)

        monkeypatch.setattr(watched.alloc, "check", counted)
        proven(watched.run())
        within = [step for step in range(1, 23) if every and step % every == 0]
        assert asked == [*within, 22, 22]


# Faults that were planted


def forgetful_pool(watched: Engine, monkeypatch) -> None:
    """Let the pool forget the last page of what requests give back."""
    pool = type(watched.alloc._core.pool)
    give = pool.give

    def forget(self, ids, holder):
        if np.ndim(holder) and np.size(ids) > 1:
            ids, holder = ids[:-1], np.asarray(holder)[:-1]
        give(self, ids, holder)

    monkeypatch.setattr(pool, "give", forget)


@pytest.mark.parametrize("check_every", [0, 1])
def test_a_page_that_is_forgotten_is_reported(monkeypatch, check_every):
    watched = engine(
        *(req(16, output=4, arrival=9.0 * at) for at in range(4)),
        prefix_cache=False,
        check_every=check_every,
    )
    forgetful_pool(watched, monkeypatch)
    recording = watched.run()
    assert not recording.sound
    assert recording.violation is not None and "lost" in recording.violation
    # Seen at once where every step is checked, otherwise at the end.
    assert recording.totals.steps == (4 if check_every else 16)
    assert recording.totals.wall_seconds > 0


def test_a_request_that_is_never_released_is_counted():
    watched = engine(*(req(16, output=4) for _ in range(3)), prefix_cache=False)
    release, seen = watched.alloc.release, []

    def drop_the_second(x, **options):
        handles = np.atleast_1d(x).tolist()
        seen.extend(handles)
        release([handle for handle in handles if handle != seen[1]], **options)

    watched.alloc.release = drop_the_second
    recording = watched.run()
    assert (recording.leaked_rows, recording.leaked_pages) == (1, 5)
    assert recording.violation is None and not recording.sound


def test_a_cached_page_that_stays_locked_is_counted():
    watched = engine(req(16, output=4))
    watched.alloc.prefix.clear = lambda: 0
    recording = watched.run()
    # 19 tokens are settled at the end: four whole pages.
    assert (recording.leaked_rows, recording.leaked_pages) == (0, 4)
    assert not recording.sound


@pytest.mark.parametrize("row", [0, 1])
def test_a_table_that_was_overwritten_is_reported(row):
    watched = engine(req(6, output=9))

    def spoil(totals):
        if totals.steps == 3:
            watched.alloc.req_to_token[row, 2] += 1
            watched.stop()

    recording = watched.run(spoil)
    assert recording.violation is not None
    assert f"req_to_token[{row}, 2]" in recording.violation
    assert not recording.sound


def test_a_page_in_two_hands_is_reported_with_both():
    watched = engine(req(16, output=9), req(16, output=9), prefix_cache=False)

    def double(totals):
        if totals.steps == 2:
            ledger = watched.alloc._core.ledger
            first, second = ledger.live().tolist()
            ledger.pages[second, 1] = ledger.pages[first, 0]

    recording = watched.run(double)
    assert recording.violation is not None
    assert "row 1" in recording.violation and "row 2" in recording.violation
    assert recording.totals.steps == 3


def test_a_page_in_two_hands_is_a_broken_law_however_it_comes_to_light():
    # Nothing is checked in between: it shows when the second tries to give the page back.
    watched = engine(req(16, output=9), req(16, output=30), prefix_cache=False, check_every=0)

    def double(totals):
        if totals.steps == 2:
            ledger = watched.alloc._core.ledger
            first, second = ledger.live().tolist()
            ledger.pages[second, 1] = ledger.pages[first, 0]

    recording = watched.run(double)
    assert recording.violation is not None and not recording.sound


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
