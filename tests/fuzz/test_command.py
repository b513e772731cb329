"""``sgalloc fuzz``: what it says of a run, and of a failure, which it makes short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fuzz.planted import FAULTS, Fault, planted
from replay.cli_support import sgalloc, text

from sgalloc.fuzz.calls import Call
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.shrink import shrink, simpler_calls
from sgalloc.fuzz.walk import run_calls, run_world
from sgalloc.trust.rerun import rerun


def fault_named(name: str) -> Fault:
    return next(fault for fault in FAULTS if name in fault.name)


def test_a_run_says_what_was_compared(tmp_path: Path) -> None:
    report = tmp_path / "fuzz.json"
    result = sgalloc("fuzz", "--calls", "1200", "--seed", "4", "--json", report)
    assert result.exit_code == 0, result.stderr
    numbers = json.loads(report.read_text())
    assert (numbers["worlds"], numbers["seed"], numbers["failures"]) == (3, 4, [])
    assert numbers["calls"] >= 1500 and numbers["calls_per_second"] > 0
    assert numbers["done"]["fits"] > 0 and sum(numbers["refused"].values()) > 0
    assert f"{numbers['calls']:,} calls compared in 3 worlds" in text(result.stdout)
    again = sgalloc("fuzz", "--calls", "1200", "--seed", "4", "--json", report)
    assert again.exit_code == 0
    assert json.loads(report.read_text())["done"] == numbers["done"]


def test_a_time_ends_a_run() -> None:
    result = sgalloc("fuzz", "--seconds", "0.2")
    assert result.exit_code == 0, result.stderr
    assert "calls compared" in text(result.stdout)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seconds", "1", "--calls", "5"), "give one of --seconds, --calls and --world"),
        (("--world", "1", "--calls", "5"), "give one of --seconds, --calls and --world"),
        (("--world", "1", "--workers", "2"), "leave out --workers"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--calls", "0"), "Invalid value"),
        (("--calls", "5", "--old", "the-good-old"), "the-good-old"),
        (("--calls", "5", "--old", "release-by-totals", "--workers", "2"), "leave out --workers"),
        (("--calls", "5", "--json", "/nowhere/at/all.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_refused(options: tuple[str, ...], said: str) -> None:
    result = sgalloc("fuzz", *options)
    assert result.exit_code == 2
    assert said in text(result.stderr)


@pytest.mark.not_in_debug_mode("the run again ends at the law that the planted fault breaks")
def test_a_failure_is_made_short_and_can_be_run_again(tmp_path: Path) -> None:
    journal, report = tmp_path / "short.journal", tmp_path / "fuzz.json"
    with planted(fault_named("an aborted transfer loses a page")):
        options = ("--journal", journal, "--shrink-seconds", "60")
        result = sgalloc("fuzz", "--calls", "20000", "--json", report, *options)
        assert result.exit_code == 1
        said = text(result.stderr)
        [failure] = json.loads(report.read_text())["failures"]
        assert f"world {failure['world']} of seed 0 failed: {failure['message']}" in said
        found = re.search(r"(\d+) of (\d+) calls are enough", said)
        assert found is not None and int(found[1]) <= 8 and int(found[1]) < int(found[2])
        assert f"again: sgalloc fuzz --seed 0 --world {failure['world']}" in said
        again = sgalloc("fuzz", "--seed", "0", "--world", failure["world"], *options)
        assert again.exit_code == 1 and failure["message"] in text(again.stderr)
        run = rerun(journal)
        assert run.closed and run.calls >= 3, "the journal has the calls of the short walk"
    result = sgalloc("fuzz", "--seed", "0", "--world", failure["world"])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "most"),
    [("the namespace of a row's", 16), ("one id comes back", 6), ("loses its scratch", 8)],
)
def test_what_is_short_still_fails_and_nothing_can_be_left_out(name: str, most: int) -> None:
    with planted(fault_named(name)):
        failure = next(f for f in (run_world(0, number)[1] for number in range(40)) if f)
        short = shrink(failure, lambda: True)
        assert len(short.calls) <= most
        assert run_calls(short.config, short.calls)[0] == short.message
        for at in range(len(short.calls)):
            assert not run_calls(short.config, short.calls[:at] + short.calls[at + 1 :])[0]
    assert not run_calls(short.config, short.calls)[0], "without the fault nothing fails"


def test_shrinking_ends_when_its_time_is_over() -> None:
    with planted(fault_named("one id comes back")):
        failure = next(f for f in (run_world(0, number)[1] for number in range(40)) if f)
        tries = iter([True] * 3)
        short = shrink(failure, lambda: next(tries, False))
        assert len(short.calls) <= len(failure.calls) and short.message


def test_any_call_may_be_left_out_and_the_rest_keeps_its_sense() -> None:
    """Labels that nobody knows any more are left out; nothing falls over."""
    config = Config(9, 2, 3, 12, True)
    text_of = ((0, 2, 0, 2, 0, 2, 0), 6)
    calls = [
        Call("open", ((1,), (2,)), {"namespace": None}),
        Call("grow", ((1, 6), (2, 4)), {"grows": "extend", "ask": True, "keep": 9}),
        Call("batch", ((1,), (2,)), {"batch": 7}),
        Call("grow", ((1, 1), (2, 1)), {"grows": "decode", "batch": 7, "number_form": 1}),
        Call("release", ((1, text_of),), {"tokens": True, "after": (5, 2)}),
        Call("match", (), {"prompt": text_of, "namespace": None, "match": 8}),
        Call("open_with_prefix", ((8, 3),)),
        Call("over", (), {"event": 5}),
        Call("apply_kept", (), {"plan": 9}),
        Call("what_if", ((3,),), {"lengths": (4,), "stay": ((2, 3),), "new": (4,), "go": True,
                                  "then_grow": False}),
        Call("snapshot", (), {"assume_done": True}),
        Call("recycle", (), {"twin": True}),
        Call("finish"),
    ]  # fmt: skip
    assert run_calls(config, calls) == ("", len(calls))
    for at in range(len(calls)):
        assert run_calls(config, calls[:at] + calls[at + 1 :])[0] == "", calls[at]
        for simpler in simpler_calls(calls[at]):
            assert run_calls(config, [*calls[:at], simpler, *calls[at + 1 :]])[0] == "", simpler


@pytest.mark.parametrize("name", ["unaligned-watermark", "release-by-totals"])
def test_an_old_behaviour_is_found(name: str, tmp_path: Path) -> None:
    journal = tmp_path / "walk.journal"
    how = ("--calls", "5000", "--shrink-seconds", "1", "--journal", journal)
    result = sgalloc("fuzz", *how, "--old", name)
    assert result.exit_code == 1 and f"--old {name}" in text(result.stderr)
    assert sgalloc("fuzz", "--calls", "1000").exit_code == 0, "it is switched off again"
