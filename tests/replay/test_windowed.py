"""The replay with a second group for sliding window attention: held, saved, and who waits."""

from __future__ import annotations

import numpy as np
import pytest
from replay.engine_support import PAGE, engine, proven, req, run

from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.summary import summarise
from sgalloc.replay.windowed import WindowNeeds, default_pages
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig


def window_column(recording, name):
    return list(recording.pools["window"].samples[name])


def test_one_request_holds_its_window_alone():
    # A window of 8 on pages of 4, without a cache: at C the frontier is the page floor of C - 8.
    watched = engine(req(20, output=20), window=SlidingWindow(8, 30), prefix_cache=False, chunk=8)
    recording = proven(watched.run())
    # At the start of each step: what the step before it left. The frontier moves with the plan,
    # and once the prompt is complete.
    committed = recording.samples["committed"]
    owned = window_column(recording, "owned")
    # A step evicts by the C that it begins with: nothing, 0 and 8, then on with every token.
    assert list(committed)[:4] == [0, 8, 16, 20]
    assert owned[:4] == [0, 2, 4, 2]
    for before, now, pages in zip(committed[3:-2], committed[4:-1], owned[4:-1], strict=True):
        assert pages == -(-now // PAGE) - max(before - 8, 0) // PAGE
    full = np.array(recording.samples["owned"])
    assert (full >= np.array(owned)).all() and full.max() == 10
    # 10 pages for 39 tokens; the last frontier is the floor of 38 - 8.
    assert recording.totals.window_evicted == 30 // PAGE
    found = summarise(recording)["window"]
    assert found["tokens"] == 8 and found["evicted_pages"] == 7
    assert found["held_peak_pages"] == max(owned)
    assert found["saved_mean_pages"] == pytest.approx(float((full - owned)[:-1].mean()))


@pytest.mark.parametrize("every", [1, 16, 40])
def test_a_cadence_evicts_as_much_in_the_end_but_holds_more(every):
    peaks = []
    for cadence in (1, every):
        recording = run(
            req(20, output=200),
            window=SlidingWindow(8, 80, evict_every=cadence),
            prefix_cache=False,
            num_pages=80,
        )
        peaks.append(max(window_column(recording, "owned")[5:]))
        # The pages of 219 tokens, less what the window and the cadence keep.
        kept = -(-219 // PAGE) - recording.totals.window_evicted
        assert 2 <= kept <= 4 + cadence // PAGE
    assert peaks[1] - peaks[0] == (every - 1) // PAGE


def test_window_pages_are_what_admission_waits_for():
    # Each prompt of 40 tokens holds 5 window pages at most in chunks of 8; the full group would
    # hold all of them at once.
    requests = [req(40, output=40) for _ in range(4)]
    window = {"prefix_cache": False, "chunk": 8, "headroom": 0, "num_pages": 100}
    roomy = run(*requests, window=SlidingWindow(8, 100), **window)
    tight = run(*requests, window=SlidingWindow(8, 10), **window)
    assert roomy.totals.pressed_steps == 0
    assert tight.totals.pressed_steps > 0
    assert max(window_column(tight, "owned")) <= 10
    assert tight.totals.finished == 4
    # At the start of those steps the window group was the fuller one by far.
    full = np.array(tight.samples["owned"])
    assert tight.totals.waiting_pressure > (full / 100).max()


def test_who_is_sent_back_for_window_pages_is_told_apart():
    requests = [req(12, output=40) for _ in range(8)]
    common = {"prefix_cache": False, "headroom": 0, "admit": "chunk", "chunk": 64}
    window = run(*requests, window=SlidingWindow(16, 30), num_pages=400, **common)
    assert 0 < window.totals.retractions == window.totals.window_retractions
    full = run(*requests, window=SlidingWindow(16, 400), num_pages=60, **common)
    assert full.totals.retractions > 0 == full.totals.window_retractions
    assert window.totals.finished == full.totals.finished == 8


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("admit", ["prompt", "chunk"])
@pytest.mark.parametrize("spec", ["none", "chain", "tree"])
def test_under_pressure_of_both_groups_every_request_finishes(prefix_cache, admit, spec):
    given = {
        "none": {},
        "chain": {
            "spec": SpecConfig("eagle", 3, 1, 4),
            "acceptance": Acceptance(3, mean=2.2),
            "overlap": True,
        },
        "tree": {"spec": SpecConfig("eagle", 3, 2, 7), "acceptance": Acceptance(3, mean=2.2)},
    }[spec]
    workload = generate("chat", 14, seed=4)
    options = Options(
        num_pages=14_000,
        page_size=16,
        device="cpu",
        speed=400.0,
        check_every=100,
        chunk=2_048,
        admit=admit,
        headroom=0,
        window=SlidingWindow(1_024, 420, evict_every=32),
        prefix_cache=prefix_cache,
        **given,
    )
    recording = proven(Engine(workload, options).run())
    totals = recording.totals
    assert totals.finished == 14
    assert totals.decoded == sum(request.output_len for request in workload.requests)
    assert totals.pressed_steps > 0
    if admit == "chunk":
        assert totals.window_retractions > 0
    pool = {name: np.array(values) for name, values in recording.pools["window"].samples.items()}
    assert set(sum(pool.values())) == {420}
    found = summarise(recording)
    assert 0.5 < found["window"]["saved_share"] < 1
    assert found["pools"]["window"]["peak_share"] > 0.9


def test_a_prefix_that_leaves_no_room_for_its_own_window_is_given_up():
    # The prefixes of ever longer turns end in window pages of their own. A turn that shares them
    # all locks those pages, and its next chunk finds none, although nobody else runs.
    turns = [req(8 * at, output=2, arrival=100.0 * at, blocks=list(range(2 * at)))
             for at in range(1, 15)]  # fmt: skip
    watched = engine(*turns, window=SlidingWindow(8, 11), num_pages=60, chunk=8)
    totals = proven(watched.run()).totals
    assert totals.finished == 14
    assert totals.unshared > 0
    assert totals.hit > 0


def test_the_window_costs_prefixes_that_are_cut_before_their_end():
    # Both continue the first two blocks, whose window pages went as the first prompt went on.
    requests = [
        req(40, output=2, blocks=list(range(10))),
        req(16, output=2, arrival=50.0, blocks=[0, 1, 98, 99]),
    ]
    assert run(*requests, num_pages=60).totals.hit == 8
    assert run(*requests, num_pages=60, window=SlidingWindow(8, 60)).totals.hit == 0
    # Where one ends there, its window is kept.
    shorter = [requests[0], req(44, arrival=50.0, blocks=list(range(11)))]
    assert run(*shorter, num_pages=60, window=SlidingWindow(8, 60)).totals.hit == 40


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("every", [1, 50])
def test_no_request_ever_holds_more_than_its_bound(prefix_cache, page_size, every):
    for tokens in (1, 7, 100):
        settings = SlidingWindow(tokens, 2_000, evict_every=every)
        common = {"page_size": page_size, "chunk": 48, "prefix_cache": prefix_cache}
        common["check_every"] = 50
        watched = engine(req(700, output=150), num_pages=900, window=settings, **common)
        needs = WindowNeeds(settings, watched._options)
        recording = proven(watched.run())
        held = np.array(window_column(recording, "owned")) + window_column(recording, "locked")
        assert held.max() <= needs.of(849)
        prefill = held[: -(-700 // 48) + 1]
        assert prefill.max() <= needs.prefill
        # And not far more than it needs: the whole prompt would be another matter.
        assert needs.of(849) <= 2 * held.max() + 2 * (1 + every // page_size) + 4


def test_a_group_too_small_for_one_request_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^window_pages is 5: .* at least \d+") as caught:
        engine(req(100, output=9), window=SlidingWindow(8, 5), chunk=16)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert run(req(100, output=9), window=SlidingWindow(8, least), chunk=16).totals.finished == 1
    with pytest.raises(ValueError, match="window_pages"):
        engine(req(100, output=9), window=SlidingWindow(8, least - 1), chunk=16)
    # A short one needs no more than its own pages.
    assert run(req(10, output=9), window=SlidingWindow(8, 5), chunk=16).totals.finished == 1


def test_the_default_is_a_quarter_but_never_less_than_two_chunks():
    assert default_pages(10_000, 64, 4_096, 8_192) == 2_500
    assert default_pages(1_000, 64, 4_096, 8_192) == 2 * (192 + 2)
    assert default_pages(100, 64, 4_096, 8_192) == 100
