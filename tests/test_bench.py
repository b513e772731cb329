"""`sgalloc bench`: it measures what it says, and compares like with like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from stand_in_cuda import Cuda, stand_in

from profiling import observers, shipped
from sgalloc.bench import measured, short
from sgalloc.commands import cli


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


run = short.run


def in_no_time(seconds: float, device: str | None) -> dict[str, Any]:
    return run(0.0, device, pages=(64,))


def test_what_is_shipped_is_what_the_results_say() -> None:
    text = shipped.INTO.read_text("utf-8")
    assert text == shipped.made(), "run python -m profiling.shipped --write"
    assert short.shipped() == json.loads(text)


def test_each_call_here_stands_beside_the_same_call_there() -> None:
    data = short.run(0.0, None, pages=(64, 1))
    measured.validate({key: value for key, value in data.items() if key != "gpu"})
    rows = short.compared(data, short.shipped())
    assert len({(row.call, row.page, row.turns) for row in rows}) == len(rows) == 16
    assert all(row.there is not None and row.loop is not None for row in rows)
    assert all(row.low <= row.here <= row.high for row in rows)
    assert data["gpu"] is None and data["run"]["states_compared"] == 8
    host = json.loads(shipped.HOST.read_text("utf-8"))["benches"]["aim"]
    (row,) = (r for r in rows if r[:2] == ("commit", 1) and "blocks" in r.turns)
    (there,) = (
        r["median_us"]
        for r in host
        if (r["name"], r["side"], r["at"]["page"]) == ("commit", "sgalloc", 1)
        and r["at"]["turns"] == row.turns
    )
    assert row.there == there


def test_a_gpu_is_measured_until_the_return_and_until_it_is_done(cuda: Cuda) -> None:
    data = short.run(0.0, "cuda", pages=(64,))
    assert data["gpu"] == "Stand-in"
    rows = [row for row in short.compared(data, short.shipped()) if row.turns.startswith("GPU")]
    assert sorted((row.call, row.turns) for row in rows) == [
        (call, f"GPU, until {until}")
        for call in ("reserve, steps that grow", "reserve, without need")
        for until in ("done", "return")
    ]
    assert all(row.there is not None and row.loop is None for row in rows)


def test_what_was_not_measured_there_has_no_figure() -> None:
    data = in_no_time(1.0, None)
    rows = short.compared(data, {"host": {"records": []}, "gpu": {"records": []}})
    assert rows and all(row.there is None and row.loop is not None for row in rows)


def test_the_command_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "run", in_no_time)
    monkeypatch.setenv("COLUMNS", "150")
    shown = CliRunner().invoke(cli, ["bench", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("reserve, steps that grow") == 2
    assert "Here: " in shown.output and "Shipped: AMD EPYC" in shown.output
    printed = CliRunner().invoke(cli, ["bench", "--device", "cpu", "--json"])
    document = json.loads(printed.output)
    assert {"environment", "run", "benches", "compared", "shipped", "gpu"} <= set(document)
    assert document["shipped"]["gpu"]["gpu"] == "NVIDIA H200"
    assert len(document["compared"]) == 8


def test_a_gpu_that_is_not_there_is_refused() -> None:
    refused = CliRunner().invoke(cli, ["bench", "--device", "cuda:99"])
    assert refused.exit_code == 2 and "--device" in refused.output
    too_short = CliRunner().invoke(cli, ["bench", "--seconds", "0"])
    assert too_short.exit_code == 2 and "0.1" in too_short.output


def test_what_watching_costs_is_measured() -> None:
    shown = CliRunner().invoke(observers.main, ["--rounds", "10"])
    assert shown.exit_code == 0, shown.output
    for name in ("release, followed", "drain, no token ids", "step, recorded", "stats()"):
        assert name in shown.output
