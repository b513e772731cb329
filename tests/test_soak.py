"""A soak in short: nothing leaks, a planted leak is found, and the records say what happened."""

from __future__ import annotations

import copy
import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiling import soak, soak_verdict
from profiling.soak import MODES, Settings, Soak, Traffic, options_of
from sgalloc import KVAllocator
from sgalloc.ledger import Ledger
from sgalloc.pages import PagePool
from sgalloc.prefix import RadixTree
from sgalloc.replay.requests import TraceRequest, Workload
from sgalloc.replay.workload import generate

SMALL = Settings(
    steps=12_000,
    num_pages=300,
    running=24,
    chunk=2048,
    requests=60,
    every=1000,
    check_every=250,
)
SHAPES: dict[str, dict[str, Any]] = {
    "window": {"window": 512},
    "sparse": {"sparse": 2.0},
    "two nodes": {"disaggregated": True, "num_pages": 600},
    "two nodes, window": {"disaggregated": True, "num_pages": 600, "window": 512},
}
Data = dict[str, Any]


def chats(count: int) -> Workload:
    """Short requests that share the first blocks of their prompts with others."""
    rng = np.random.default_rng(5)
    rows = []
    for at in range(count):
        blocks = rng.integers(8) * 10 + np.arange(1 + rng.integers(4))
        blocks[-1] = 1000 + at
        prompt, output = blocks.size * 512 - int(rng.integers(500)), 1 + int(rng.integers(150))
        rows.append(TraceRequest(0.0, prompt, output, blocks, 512))
    return Workload("chats", rows, 0, [])


@pytest.fixture(scope="module")
def traces() -> list[Workload]:
    return [chats(300), generate("code", 200, seed=1)]


@pytest.fixture(scope="module")
def short(traces: list[Workload], tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Path]:
    """A short soak, and the file that it wrote."""
    path = tmp_path_factory.mktemp("soak") / "soak.json"
    return soak.measure(SMALL, traces, True, path, lambda _: None), path


def counts_of(data: Data) -> Counter[str]:
    return sum((Counter(one["counts"]) for one in data["records"]), Counter())


# -- nothing leaks -------------------------------------------------------------------------


def test_a_short_soak_is_sound(short: tuple[Data, Path]) -> None:
    data, _ = short
    assert data["verdict"] == {"sound": True, "causes": []}
    assert data["steps"] == SMALL.steps
    assert data["runs"] > 3 * len(MODES)
    assert min(data["traffic"]["rounds"]) > 2
    assert set(data["growth"]) >= {"blocks", "resident"}


def test_it_was_under_pressure_all_the_time(short: tuple[Data, Path]) -> None:
    data, _ = short
    for one in data["records"][1:]:
        for name in ("finished", "aborted", "retractions", "parked", "evicted"):
            assert one["counts"].get(name, 0) > 0 or not one["whole"], (name, one)
    counts = counts_of(data)
    assert counts["moves"] > 0 and counts["refused OutOfPages"] > 0
    assert counts["retractions"] > counts["finished"] // 20


def test_every_verb_has_its_latency_in_every_record(short: tuple[Data, Path]) -> None:
    data, _ = short
    whole = [one for one in data["records"] if one["whole"]]
    assert len(whole) >= 5
    for one in whole:
        assert {"step", "plan", "apply", "prepare", "commit", "compact"} <= set(one["verbs"])
        assert all(calls > 0 and 0 <= mid <= high for calls, mid, high in one["verbs"].values())
    steps = [one["verbs"].get("step", [0])[0] for one in data["records"]]
    assert sum(steps) == SMALL.steps
    assert data["records"][-1]["steps"] == SMALL.steps
    assert set(data["drift"]) <= set(whole[0]["verbs"]) and "step" in data["drift"]


def test_what_is_held_is_the_same_in_the_middle_and_at_the_end(short: tuple[Data, Path]) -> None:
    data, _ = short
    held = [one["memory"] for one in data["records"]][2:]
    half = len(held) // 2
    for name in ("blocks", "objects"):
        before = max(one[name] for one in held[:half])
        after = min(one[name] for one in held[half:])
        assert after < before + 500, name


def test_the_file_has_all_of_it(short: tuple[Data, Path]) -> None:
    data, path = short
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(data))
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_are_sound(shape: str, traces: list[Workload]) -> None:
    settings = replace(SMALL, steps=2500, requests=30, every=400, **SHAPES[shape])
    one = Soak(settings, traces)
    one.run()
    assert one.problem is None
    assert one.steps >= settings.steps and one.runs >= len(one.modes) > 0
    for alloc in one.stage.allocators.values():
        stats = alloc.stats()
        assert all(group.free == group.total for group in stats.groups.values())
        assert stats.rows.free == stats.rows.total
        alloc.check(device=True)


def test_modes_differ_and_one_allocator_serves_them_all() -> None:
    modes = options_of(SMALL)
    assert set(modes) == set(MODES)
    assert {one.tree for one in modes.values()} == {True, False}
    assert {one.overlap for one in modes.values()} == {True, False}
    plain = {"spec": MODES["plain"][0], "acceptance": None, "overlap": False}
    pools = [replace(one, **plain) for one in modes.values()]
    assert all(one == pools[0] for one in pools)
    assert not any(one.tree for one in options_of(replace(SMALL, sparse=2.0)).values())


# -- a planted leak is found ---------------------------------------------------------------


def leaky(settings: Settings, traces: list[Workload]) -> Data:
    return soak.measure(settings, traces, True, show=lambda _: None)


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (lambda: object(), "Python blocks grew"),
        (lambda: np.zeros(1024), "bytes from malloc grew"),
    ],
    ids=["an object", "an array"],
)
def test_an_entry_kept_by_each_release_is_found(
    entry: Callable[[], Any],
    cause: str,
    traces: list[Workload],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    release = KVAllocator.release

    def keeps(self: KVAllocator, x: Any, **given: Any) -> None:
        release(self, x, **given)
        kept.append(entry())

    monkeypatch.setattr(KVAllocator, "release", keeps)
    data = leaky(SMALL, traces)
    if cause.startswith("bytes") and data["records"][0]["memory"]["native"] is None:
        pytest.skip("this C library does not tell what malloc has out")
    assert not data["verdict"]["sound"]
    assert any(one.startswith(cause) for one in data["verdict"]["causes"])
    assert data["problem"] is None


def keep_a_page(monkeypatch: pytest.MonkeyPatch, nowhere: bool) -> None:
    """Let one page of the hundredth that comes back stay with its holder, or with nobody."""
    give, turn = PagePool.give, itertools.count()

    def faulty(pool: PagePool, ids: Any, holder: Any) -> None:
        if not ids.size or next(turn) != 100:
            give(pool, ids, holder)
        elif nowhere:
            give(pool, ids, holder)
            pool.free -= 1
        else:
            give(pool, ids[1:], holder[1:] if np.ndim(holder) else holder)

    monkeypatch.setattr(PagePool, "give", faulty)


@pytest.mark.parametrize("nowhere", [False, True])
def test_a_page_that_does_not_come_back_is_found(
    nowhere: bool, traces: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_a_page(monkeypatch, nowhere)
    data = leaky(replace(SMALL, check_every=0), traces)
    assert not data["verdict"]["sound"]
    assert data["steps"] < SMALL.steps
    assert data["problem"] is not None and "page" in data["problem"]


def test_a_lock_that_stays_is_found(
    traces: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlock, turn = RadixTree.unlock, itertools.count(1)
    monkeypatch.setattr(
        RadixTree, "unlock", lambda tree, node: unlock(tree, node) if next(turn) % 50 else None
    )
    data = leaky(replace(SMALL, check_every=0), traces)
    assert not data["verdict"]["sound"] and data["problem"] is not None


def test_a_row_that_does_not_come_back_is_found(
    traces: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    push, turn = Ledger._push_rows, itertools.count()
    monkeypatch.setattr(
        Ledger,
        "_push_rows",
        lambda ledger, rows: push(ledger, rows) if next(turn) != 30 else None,
    )
    data = leaky(replace(SMALL, check_every=0), traces)
    assert not data["verdict"]["sound"]
    assert data["problem"] is not None and "row" in data["problem"]


# -- it ends with a report -----------------------------------------------------------------


def test_ctrl_c_ends_it_with_a_full_report(traces: list[Workload], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    path = tmp_path / "soak.json"
    data = soak.measure(SMALL, traces, True, path, show)
    assert data["steps"] < SMALL.steps
    assert data["verdict"] == {"sound": True, "causes": []}
    assert data["run"]["effort"] == "partial"
    assert json.loads(path.read_text(encoding="utf-8"))["steps"] == data["steps"]
    assert signal.getsignal(signal.SIGINT) is before


def test_its_time_can_be_over(traces: list[Workload]) -> None:
    one = Soak(replace(SMALL, seconds=0.0), traces)
    one.run()
    assert one.steps == 1 and one.problem is None
    assert one.alloc.stats().rows.open == 0


def test_the_file_is_there_while_it_runs(traces: list[Workload], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "soak.json"
    seen = []

    def show(_: str) -> None:
        if path.exists():
            seen.append(json.loads(path.read_text(encoding="utf-8")))

    soak.measure(replace(SMALL, steps=3000), traces, True, path, show)
    assert len(seen) >= 2
    for one in seen:
        assert one["run"]["effort"] == "partial" or one["steps"] >= 3000
        assert set(one) >= {"verdict", "growth", "drift", "records", "settings", "environment"}


# -- the command ---------------------------------------------------------------------------


def test_the_command_says_where_the_traces_were_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGALLOC_TRACES", str(tmp_path))
    monkeypatch.setattr(soak, "GENERATED", 100)
    out = tmp_path / "soak.json"
    assert soak.main(["--steps", "200", "--requests", "20", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "generated traffic" in printed and printed.rstrip().endswith("sound")
    assert json.loads(out.read_text(encoding="utf-8"))["traffic"]["generated"]


def test_the_command_ends_with_1_where_something_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGALLOC_TRACES", str(tmp_path))
    monkeypatch.setattr(soak, "GENERATED", 100)
    keep_a_page(monkeypatch, nowhere=True)
    assert soak.main(["--steps", "2000", "--requests", "20"]) == 1
    assert "page" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--steps", "0"], "steps"),
        (["--every", "-1"], "every"),
        (["--requests", "0"], "requests"),
        (["--park-rate", "2"], "park_rate"),
        (["--seconds", "-1"], "seconds"),
        (["--abort-rate", "7"], "abort_rate"),
        (["--traces", "nowhere"], "nowhere"),
        (["--sparse", "2", "--window", "64"], "window"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGALLOC_TRACES", str(tmp_path))
    monkeypatch.setattr(soak, "GENERATED", 20)
    assert soak.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and name in lines[0]


# -- traffic -------------------------------------------------------------------------------


def trace(name: str, count: int) -> Workload:
    return Workload(name, [TraceRequest(9.0, 5 + at, 2, None, 512) for at in range(count)], 0, [])


def test_traffic_goes_round_and_round() -> None:
    traffic = Traffic([trace("one", 7), trace("two", 4)], 5)
    seen: list[list[int]] = [[], []]
    for _ in range(12):
        run = traffic.take()
        assert run.numbers is not None and len(run.numbers) == len(run.requests) > 0
        for number, row in zip(run.numbers.tolist(), run.requests, strict=True):
            which, at = number >> 24, number & 0xFFFFFF
            assert row.prompt_len == 5 + at and row.arrival == 0.0
            seen[which].append(at)
    for part, size, rounds in zip(seen, (7, 4), traffic.rounds, strict=True):
        assert len(part) > 2 * size
        assert part == [at % size for at in range(len(part))]
        assert rounds == pytest.approx(len(part) / size)


# -- what the records say ------------------------------------------------------------------


def made_up(growth: float, drift: float, name: str = "blocks", count: int = 40) -> Data:
    """Records of a soak in which one kind of memory grows a step, and a verb slows down."""
    records = []
    for at in range(count):
        held = dict.fromkeys(("resident", "native", "blocks", "objects", "device"), 10_000_000)
        held[name] += round(growth * at * 100_000)
        slow = 10_000 * (1 + drift * at / count)
        records.append(
            {
                "steps": at * 100_000,
                "whole": True,
                "memory": held,
                "verbs": {"plan": [100, slow, 3 * slow]},
            }
        )
    return {"steps": (count - 1) * 100_000, "problem": None, "records": records}


@pytest.mark.parametrize("name", soak_verdict.LIMITS)
def test_growth_past_its_limit_is_a_cause(name: str) -> None:
    assert soak_verdict.finish(made_up(0.0, 0.0, name))["verdict"]["sound"]
    limit = soak_verdict.LIMITS[name]
    span = 3_200_000
    growth = 1.05 * max(limit.least, limit.per_million * span / 1e6, 100) / span
    verdict = soak_verdict.finish(made_up(growth, 0.0, name))["verdict"]
    assert not verdict["sound"]
    assert [one.startswith(limit.about) for one in verdict["causes"]] == [True]


def test_shrinking_is_no_cause() -> None:
    assert soak_verdict.finish(made_up(-1.0, 0.0))["verdict"]["sound"]


def test_drift_is_reported_and_not_judged() -> None:
    data = soak_verdict.finish(made_up(0.0, 9.0))
    assert data["verdict"]["sound"]
    found = data["drift"]["plan"]
    assert found["ratio"] > 4 and found["p99_ratio"] == pytest.approx(found["ratio"], rel=0.01)
    assert found["calls"] == 4000


def test_only_whole_rounds_are_compared() -> None:
    data = made_up(0.0, 0.0)
    data["records"][-1]["whole"] = False
    data["records"][-1]["verbs"] = {"plan": [1, 9e9, 9e9]}
    assert soak_verdict.finish(data)["drift"]["plan"]["ratio"] == 1.0


def test_a_problem_is_a_cause_and_memory_unknown_is_none() -> None:
    data = made_up(0.0, 0.0)
    data["problem"] = "page 3 is owned twice"
    for one in data["records"]:
        one["memory"] |= {"native": None, "device": None}
    found = soak_verdict.finish(data)
    assert found["verdict"] == {"sound": False, "causes": ["page 3 is owned twice"]}
    assert set(found["growth"]) == {"blocks", "resident"}


def test_too_few_records_say_nothing() -> None:
    data = copy.deepcopy(made_up(100.0, 0.0, count=3))
    found = soak_verdict.finish(data)
    assert found["growth"] == found["drift"] == {} and found["verdict"]["sound"]
