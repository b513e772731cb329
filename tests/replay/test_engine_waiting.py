"""The engine short of pages: who is sent back, who waits, and who goes first."""

from __future__ import annotations

import numpy as np
import pytest
from replay.engine_support import Release, column, engine, proven, req, run

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
