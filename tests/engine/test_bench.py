"""The picture is drawn, and what it compares with puts out the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine.engine_support import assert_as_alone, random_requests, serve, settings

from examples.engine import bench
from examples.engine.engine import Engine
from examples.engine.model import TINY, Model
from examples.engine.naive import NaiveAllocator, NaiveScheduler

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mode", ["plain", "plain, overlapped"])
def test_the_naive_allocator_serves_the_same_engine(mode: str) -> None:
    model = Model(TINY, seed=3)
    how = settings(mode, 4, room=9, canary=False, prefix_cache=False)
    engine = Engine(model, how, NaiveAllocator(how, model))
    engine.scheduler = NaiveScheduler(engine.alloc, engine.scheduler.limits, False)
    requests = random_requests(12, seed=2)
    serve(engine, requests, abort_rate=0.05)
    assert assert_as_alone(model, requests, engine.recorded) > 50
    assert sorted(engine.alloc.free) == list(range(1, how.pages + 1))
    assert sorted(engine.alloc.window_free) == list(range(1, how.window_pages + 1))


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    bench.main(f"--device cpu --model tiny --running 4 --context 64 --steps 8 --out {out}".split())
    found = json.loads(out.read_text("utf-8"))
    runs = [(run["allocator"], run["overlap"]) for run in found["runs"]]
    assert sorted(runs) == [(a, o) for a in ("naive", "sgalloc") for o in (False, True)]
    for run in found["runs"]:
        assert run["tokens_per_second"] > 0 and 0 < run["allocator_share"] < 1
        assert len(run["time_line"]) == run["steps"] > 0
    names = {event["name"] for event in found["traceEvents"]}
    assert {"plan", "apply", "_prefill", "_decode", "land", "process_name"} <= names
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4


def test_the_guide_shows_the_results() -> None:
    found = json.loads((ROOT / "profiling/results/nvidia-h200/engine.json").read_text("utf-8"))
    assert bench.table(found) in (ROOT / "docs/engine-guide.md").read_text("utf-8")
