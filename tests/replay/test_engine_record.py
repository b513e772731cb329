"""What a recording says, and that it tells of every fault that was planted."""

from __future__ import annotations

import numpy as np
import pytest
from replay.engine_support import PAGE, engine, plain, proven, req

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.requests import Workload
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig

# The record


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


@pytest.mark.not_in_debug_mode("the call that breaks a law says so at once")
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


@pytest.mark.not_in_debug_mode("the call that breaks a law says so at once")
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
