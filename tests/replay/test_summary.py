"""The summary of a replay: its numbers by hand, its JSON, and the table a person reads."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from array import array
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sgalloc.replay.keys import KEYS
from sgalloc.replay.recording import POOL_SAMPLED, SAMPLED, PoolRecord, Recording, Totals
from sgalloc.replay.summary import (
    FORMAT,
    ReportError,
    figures,
    headline,
    show_count,
    show_number,
    show_share,
    summarise,
    to_table,
    write_json,
)

# time, running, queued, owned, locked, evictable, quarantined, pinned, free, committed, allocated
ROWS = [
    (0.0, 2, 1, 3, 1, 1, 0, 1, 4, 15, 20),
    (1.0, 3, 0, 4, 2, 0, 1, 2, 1, 30, 32),
    (4.0, 0, 0, 0, 0, 5, 0, 0, 5, 0, 0),
    (10.0, 1, 0, 2, 0, 5, 0, 0, 3, 7, 8),
]
# The same moments in a group of 5 window pages, one of 4 pages of a device, and on a prefill
# node of 8; these never stand together but here.
WINDOW_ROWS = [(2, 1, 0, 0, 1, 1), (2, 1, 0, 1, 1, 0), (0, 0, 2, 0, 0, 3), (1, 0, 2, 0, 0, 2)]
DEVICE_ROWS = [(2, 0, 0, 1, 0, 1), (3, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 4), (1, 0, 0, 0, 0, 3)]
PREFILL_ROWS = [(8, 0, 0, 0, 0, 0), (4, 1, 1, 2, 0, 0), (0, 0, 0, 0, 0, 8), (1, 1, 1, 1, 0, 4)]


def small() -> Recording:
    recording = Recording({"seed": 3, "spec": "eagle"}, "by hand", 10, 4, device="cpu")
    for row in ROWS:
        recording.sample(dict(zip(SAMPLED, row, strict=True)))
    recording.totals = Totals(
        requests=9,
        finished=5,
        aborted=2,
        refused=1,
        steps=3,
        virtual_seconds=12.0,
        wall_seconds=0.5,
        prompt_tokens=70,
        looked_up=80,
        hit=20,
        prefilled=60,
        decoded=33,
        retractions=4,
        evicted=6,
        peak_running=3,
        waiting_pressure=0.9,
        pressed_steps=2,
        accepted=14,
        speculative_steps=8,
        discarded_steps=2,
        reserved_tail=84,
        moves=11,
        window_evicted=17,
        window_retractions=3,
        unshared=1,
        thinned=31,
        device_retractions=1,
        side_waits=6,
        main_waits=7,
        prefill_steps=19,
        prefill_retractions=2,
        transfers=13,
        live=8,
        transfer_aborts=4,
        reclaimed=1,
        matched_tokens=48,
        sent_tokens=200,
        sent_pages=56,
        extents=21,
        live_seconds=6.0,
        live_seconds_most=2.5,
    )
    recording.reserve, recording.window = 24, 6
    groups = (("window", 5, WINDOW_ROWS), ("device", 4, DEVICE_ROWS), ("prefill", 8, PREFILL_ROWS))
    for name, pages, rows in groups:
        pool = recording.pools[name] = PoolRecord(pages, evicted=pages + 10)
        for row in rows:
            for column, value in zip(POOL_SAMPLED, row, strict=True):
                pool.samples[column].append(value)
    recording.step_ns = array("q", [2000, 1000, 4000])
    recording.verbs = {
        "plan": array("q", [1000, 2000, 1000]),
        "commit": array("q", [500]),
        "open": array("q"),
    }
    return recording


def flat(tree: object, path: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {path: tree}
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}.{key}" if path else key)
    return found


def printed(recording: Recording, width: int = 80, **console: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(to_table(summarise(recording)))
    return out.getvalue()


def test_numbers_worked_out_by_hand():
    # Requests ran for 1, 3 and 2 of the 12 seconds; the 6 idle ones do not count.
    expected = {
        "format": FORMAT,
        "workload": "by hand",
        "device": "cpu",
        "config.seed": 3,
        "config.spec": "eagle",
        "pool.pages": 10,
        "pool.page_tokens": 4,
        "requests.total": 9,
        "requests.finished": 5,
        "requests.aborted": 2,
        "requests.refused": 1,
        "requests.unfinished": 1,
        "requests.peak_running": 3,
        "requests.retractions": 4,
        "tokens.prompt": 70,
        "tokens.looked_up": 80,
        "tokens.hit": 20,
        "tokens.prefilled": 60,
        "tokens.decoded": 33,
        "prefix_cache.hit_share": 0.25,
        "prefix_cache.evicted_pages": 6,
        "time.steps": 3,
        "time.virtual_seconds": 12.0,
        "time.wall_seconds": 0.5,
        "occupancy.mean_share": (1 * 0.6 + 3 * 0.9 + 2 * 0.7) / 6,
        "occupancy.peak_share": 0.9,
        "occupancy.held_mean_share": (1 * 0.5 + 3 * 0.8 + 2 * 0.2) / 6,
        "occupancy.held_peak_share": 0.8,
        "tail_waste.mean_tokens": (1 * 5 + 3 * 2 + 2 * 1) / 6,
        "tail_waste.share": 13 / 132,
        "pressure.steps": 2,
        "pressure.lowest_filled_share": 0.9,
        "speculation.request_steps": 8,
        "speculation.committed_tokens": 14,
        "speculation.mean_committed_tokens": 1.75,
        "speculation.reserve_tokens": 24,
        "speculation.mean_tail_tokens": 10.5,
        "speculation.moved_tokens": 11,
        "speculation.discarded_steps": 2,
        "window.tokens": 6,
        "window.evicted_pages": 17,
        "window.held_mean_pages": (1 * 4 + 3 * 4 + 2 * 1) / 6,
        "window.held_peak_pages": 4.0,
        "window.saved_mean_pages": (1 * 1 + 3 * 4 + 2 * 1) / 6,
        "window.saved_share": 15 / 33,
        "window.retractions": 3,
        "window.unshared_requests": 1,
        "sparse.held_mean_pages": (1 * 2 + 3 * 3 + 2 * 1) / 6,
        "sparse.held_peak_pages": 3.0,
        "sparse.dense_mean_pages": (1 * 5 + 3 * 8 + 2 * 2) / 6,
        "sparse.saved_mean_pages": (1 * 3 + 3 * 5 + 2 * 1) / 6,
        "sparse.saved_share": 20 / 33,
        "sparse.thinned_pages": 31,
        "sparse.retractions": 1,
        "sparse.logical_waits": 7,
        "sparse.device_waits": 6,
        "disaggregation.prefill_steps": 19,
        "disaggregation.prefill_retractions": 2,
        "disaggregation.transfers": 13,
        "disaggregation.live": 8,
        "disaggregation.aborted": 4,
        "disaggregation.reclaimed": 1,
        "disaggregation.matched_tokens": 48,
        "disaggregation.sent_tokens": 200,
        "disaggregation.sent_pages": 56,
        "disaggregation.extents": 21,
        "disaggregation.mean_run_pages": 56 / 21,
        "disaggregation.pinned_mean_pages": (1 * 1 + 3 * 2) / 6,
        "disaggregation.pinned_peak_pages": 2.0,
        "disaggregation.live_mean_seconds": 0.75,
        "disaggregation.live_most_seconds": 2.5,
        "pools.window.pages": 5,
        "pools.window.mean_share": (1 * 4 + 3 * 5 + 2 * 3) / 6 / 5,
        "pools.window.peak_share": 1.0,
        "pools.window.held_mean_pages": (1 * 4 + 3 * 4 + 2 * 1) / 6,
        "pools.window.held_peak_pages": 4.0,
        "pools.window.evicted_pages": 15,
        "pools.device.pages": 4,
        "pools.device.mean_share": (1 * 3 + 3 * 3 + 2 * 1) / 6 / 4,
        "pools.device.peak_share": 0.75,
        "pools.device.held_mean_pages": (1 * 2 + 3 * 3 + 2 * 1) / 6,
        "pools.device.held_peak_pages": 3.0,
        "pools.device.evicted_pages": 14,
        "pools.prefill.pages": 8,
        "pools.prefill.mean_share": (1 * 8 + 3 * 8 + 2 * 4) / 6 / 8,
        "pools.prefill.peak_share": 1.0,
        "pools.prefill.held_mean_pages": (1 * 8 + 3 * 5 + 2 * 2) / 6,
        "pools.prefill.held_peak_pages": 8.0,
        "pools.prefill.evicted_pages": 18,
        "allocator.step_median_us": 2.0,
        "allocator.step_p99_us": 3.96,
        "allocator.step_mean_us": 7 / 3,
        "allocator.total_ms": 0.007,
        "allocator.verbs.plan.calls": 3,
        "allocator.verbs.plan.median_us": 1.0,
        "allocator.verbs.plan.p99_us": 1.98,
        "allocator.verbs.plan.total_ms": 0.004,
        "allocator.verbs.plan.share": 8 / 9,
        "allocator.verbs.commit.calls": 1,
        "allocator.verbs.commit.median_us": 0.5,
        "allocator.verbs.commit.p99_us": 0.5,
        "allocator.verbs.commit.total_ms": 0.0005,
        "allocator.verbs.commit.share": 1 / 9,
        "allocator.verbs.open.calls": 0,
        "allocator.verbs.open.median_us": None,
        "allocator.verbs.open.p99_us": None,
        "allocator.verbs.open.total_ms": 0.0,
        "allocator.verbs.open.share": 0.0,
        "verdict.outcome": "sound",
        "verdict.text": "sound: no law was broken, and every page and row came back",
        "verdict.violation": None,
        "verdict.interrupted": False,
        "verdict.leaked_pages": 0,
        "verdict.leaked_rows": 0,
    }
    assert flat(summarise(small())) == {
        key: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        for key, value in expected.items()
    }


def test_nothing_recorded_is_null_and_not_a_number_made_up():
    found = flat(summarise(Recording({}, "nothing", 4, 16)))
    empty = {key for key, value in found.items() if value is None}
    # A group of figures that the run has no use for is null as a whole.
    for group in ("window.", "sparse.", "disaggregation."):
        unused = {key for key in found if key.startswith(group)}
        assert unused and unused <= empty
        empty -= unused
    assert empty == {
        "prefix_cache.hit_share",
        "occupancy.mean_share",
        "occupancy.peak_share",
        "occupancy.held_mean_share",
        "occupancy.held_peak_share",
        "tail_waste.mean_tokens",
        "tail_waste.share",
        "pressure.lowest_filled_share",
        "speculation.mean_committed_tokens",
        "speculation.reserve_tokens",
        "speculation.mean_tail_tokens",
        "allocator.step_median_us",
        "allocator.step_p99_us",
        "allocator.step_mean_us",
        "verdict.violation",
    }
    assert found["allocator.total_ms"] == 0.0


def test_a_run_without_time_or_requests_counts_every_sample_alike():
    recording = Recording({}, "idle", 10, 4)
    for owned in (2, 4, 9):
        row = (5.0, 0, 0, owned, 0, 0, 0, 0, 10 - owned, 0, 0)
        recording.sample(dict(zip(SAMPLED, row, strict=True)))
    occupancy = summarise(recording)["occupancy"]
    assert occupancy["mean_share"] == pytest.approx(0.5)
    assert occupancy["peak_share"] == 0.9
    assert summarise(recording)["tail_waste"] == {"mean_tokens": 0.0, "share": None}


@pytest.mark.parametrize("written", range(1, len(SAMPLED)))
def test_a_sample_cut_short_by_an_interrupt_is_left_out(written):
    whole, cut = small(), small()
    for name in SAMPLED[:written]:
        cut.samples[name].append(1000.0)
    assert summarise(cut) == summarise(whole)


def test_every_key_is_documented_and_every_documented_key_occurs():
    found = flat(summarise(small()))
    undocumented = [key for key in found if not any(fnmatchcase(key, name) for name in KEYS)]
    assert undocumented == []
    assert [name for name in KEYS if not any(fnmatchcase(key, name) for key in found)] == []
    assert all(len(meaning) > 5 for meaning in KEYS.values())


def test_json_comes_back_as_it_was(tmp_path):
    summary = summarise(small())
    path = write_json(summary, tmp_path)
    assert path == tmp_path / "report.json"
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == summary
    assert text.endswith("}\n")


def test_only_finite_numbers_and_plain_types():
    recording = small()
    recording.config = {
        "speed": math.inf,
        "rate": float("nan"),
        "pages": np.int64(7),
        "share": np.float32(0.5),
        "on": np.bool_(True),
        "trace": Path("traces/µ.jsonl"),
        "nested": {"list": [np.int32(1), (2, -math.inf)], 3: None},
    }
    recording.totals.wall_seconds = math.inf
    recording.totals.requests = np.int64(9)
    summary = summarise(recording)
    assert summary["config"] == {
        "speed": None,
        "rate": None,
        "pages": 7,
        "share": 0.5,
        "on": True,
        "trace": "traces/µ.jsonl",
        "nested": {"list": [1, [2, None]], "3": None},
    }
    assert summary["time"]["wall_seconds"] is None
    plain = {bool, int, float, str, list, type(None)}
    assert {type(value) for value in flat(summary).values()} <= plain
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("violation", "pages", "rows", "interrupted", "outcome", "text"),
    [
        (None, 0, 0, True, "sound", "came back (interrupted before the end of the workload)"),
        (None, 1, 2, False, "broken", "broken: 1 page and 2 rows did not come back"),
        (None, 0, 1, False, "broken", "broken: 0 pages and 1 row did not come back"),
        ("page 3 has two owners", 0, 0, False, "broken", "broken: page 3 has two owners"),
        ("page 3", 1500, 0, True, "broken", "page 3; 1,500 pages and 0 rows did not come back ("),
    ],
)
def test_verdict(violation, pages, rows, interrupted, outcome, text):
    recording = small()
    recording.violation, recording.interrupted = violation, interrupted
    recording.leaked_pages, recording.leaked_rows = pages, rows
    verdict = summarise(recording)["verdict"]
    assert (verdict["outcome"], verdict["violation"]) == (outcome, violation)
    assert verdict["interrupted"] is interrupted
    assert text in verdict["text"]
    assert ("interrupted" in verdict["text"]) is interrupted
    # Where a law broke, nothing was counted: that is not the same as nothing leaked.
    assert verdict["leaked_pages"] == (pages if violation is None or pages else None)
    assert verdict["leaked_rows"] == (rows if violation is None or rows else None)
    assert verdict["text"] in " ".join(printed(recording).split())


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        (show_count, 1234567, "1,234,567"),
        (show_share, 0.12345, "12.3 %"),
        (show_number, 0, "0.0"),
        (show_number, 0.0123, "0.012"),
        (show_number, 1.234, "1.23"),
        (show_number, 12345.67, "12,345.7"),
        *((show, None, "–") for show in (show_count, show_share, show_number)),
    ],
)
def test_formats(show, value, shown):
    assert show(value) == shown


def test_what_is_not_there_is_left_out_of_the_figures():
    recording = small()
    labels = dict(pair for _, pairs in figures(summarise(recording)) for pair in pairs)
    assert (labels["unfinished"], labels["per speculative step"]) == ("1", "1.75")
    recording.totals.finished += 1
    recording.totals.moves = 0
    without = dict(pair for _, pairs in figures(summarise(recording)) for pair in pairs)
    assert labels.keys() - without.keys() == {"unfinished", "moved in trees"}
    # Whole groups, where there is no speculation, no window and no second node.
    recording.totals.accepted = recording.totals.speculative_steps = recording.window = 0
    recording.pools.clear()
    assert [title for title, _ in figures(summarise(recording))] == [
        "Requests",
        "Tokens",
        "Time",
        "Pool",
    ]
    empty = dict(p for _, pairs in figures(summarise(Recording({}, "", 1, 1))) for p in pairs)
    assert empty["allocator/step p99"] == "–"


def huge() -> Recording:
    recording = small()
    totals = recording.totals
    totals.requests = totals.finished = 123_456_789_012
    for field in ("prompt_tokens", "looked_up", "hit", "prefilled", "decoded", "evicted", "steps"):
        setattr(totals, field, 987_654_321_012)
    totals.virtual_seconds, totals.wall_seconds = 12_345_678.9, 345_678.9
    recording.verbs["open_with_prefix"] = array("q", [98_765_432_101] * 3)
    recording.step_ns = array("q", [98_765_432_101] * 3)
    return recording


@pytest.mark.parametrize("make", [small, huge, lambda: Recording({}, "nothing", 4, 16)])
@pytest.mark.parametrize("terminal", [False, True])
def test_table_at_80_columns_cuts_no_number(make, terminal):
    recording = make()
    summary = summarise(recording)
    text = printed(recording, force_terminal=terminal, no_color=True)
    assert ("\x1b[" in text) is terminal
    assert max(map(len, printed(recording).splitlines())) <= 80
    assert "…" not in text
    words = f" {' '.join(text.split())} "
    assert headline(summary) in words
    for _, pairs in figures(summary):
        for _, value in pairs:
            assert f" {value} " in words
    for verb, row in summary["allocator"]["verbs"].items():
        if not row["calls"]:
            assert f" {verb} " not in words
            continue
        cells = [verb, show_count(row["calls"]), show_number(row["median_us"])]
        cells += [show_number(row["p99_us"]), show_number(row["total_ms"])]
        assert f" {' '.join(cells)} {show_share(row['share'])} " in words


def test_labels_fold_before_numbers_do():
    text = " ".join(printed(huge(), width=56).split())
    for _, pairs in figures(summarise(huge())):
        assert all(f" {value} " in text for _, value in pairs)


def test_small_numbers_stand_beside_their_labels():
    recording = small()
    recording.totals.finished += 1  # a whole run: nothing is left over
    lines = [" ".join(line.split()) for line in printed(recording).splitlines()]
    assert "aborted 2 found there 20" in lines
    assert "steps 3 occupied, mean 78.3 %" in lines
    assert "allocator/step p99 3.96 µs tail waste, share 9.8 %" in lines


def test_verbs_stand_in_the_order_of_their_cost():
    text = printed(huge())
    assert text.index("open_with_prefix") < text.index("\nplan") < text.index("\ncommit")


def test_a_narrow_table_folds_and_keeps_every_character():
    text = printed(small(), width=44)
    assert max(map(len, text.splitlines())) <= 44
    wide = printed(small()).replace("─", "")
    assert Counter("".join(text.replace("─", "").split())) == Counter("".join(wide.split()))


def test_names_and_faults_are_no_markup():
    recording = small()
    recording.workload = "[bold]trace[/bold] [/] :smile:"
    recording.violation = "page 3 is held by row [red]4"
    recording.verbs = {"[verb]": array("q", [1])}
    text = printed(recording)
    assert "[bold]trace[/bold] [/] :smile:" in text
    assert "held by row [red]4" in text
    assert "[verb]" in text


def test_the_color_tells_sound_from_broken():
    broken = small()
    broken.leaked_rows = 1
    shown = {"force_terminal": True, "color_system": "standard"}
    assert "\x1b[1;32msound" in printed(small(), **shown)
    assert "\x1b[1;31mbroken" in printed(broken, **shown)


@pytest.mark.parametrize("where", ["missing", "file", "directory"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, where):
    folder = tmp_path / "out"
    if where == "file":
        folder.write_text("mine", encoding="utf-8")
    elif where == "directory":
        (folder / "report.json").mkdir(parents=True)
    with pytest.raises(ReportError, match="name another directory") as caught:
        write_json(summarise(small()), folder)
    assert str(folder / "report.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    if where == "file":
        assert folder.read_text(encoding="utf-8") == "mine"


def test_rich_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ReportError, match=r"rich is not installed: pip install 'sgalloc\[cli\]'"):
        to_table(summarise(small()))


def test_the_numbers_need_no_extra():
    code = """
import sys
for name in ("rich", "matplotlib", "jinja2"):
    sys.modules[name] = None
from sgalloc.replay.recording import Recording
from sgalloc.replay.summary import figures, summarise
print(len(figures(summarise(Recording({}, "x", 1, 1)))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("4\n", "")
