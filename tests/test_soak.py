"""A soak in short: nothing leaks, a planted leak is found, and the records say what happened."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from soak_support import SMALL, keep_a_page, small_traces

from profiling import soak
from profiling.soak import Soak
from profiling.soak_traffic import MODES, Settings, Traffic, options_of
from sgalloc import KVAllocator
from sgalloc.ledger import Ledger
from sgalloc.prefix import RadixTree
from sgalloc.replay.requests import TraceRequest, Workload

SHAPES: dict[str, dict[str, Any]] = {
    "window": {"window": 512},
    "sparse": {"sparse": 2.0},
    "two nodes": {"disaggregated": True, "num_pages": 600},
    "two nodes, window": {"disaggregated": True, "num_pages": 600, "window": 512},
}
Data = dict[str, Any]


@pytest.fixture(scope="module")
def traces() -> list[Workload]:
    return small_traces()


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
    """A soak in which something was planted."""
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
    data = leaky(replace(SMALL, steps=8000, every=500), traces)
    if cause.startswith("bytes") and data["records"][0]["memory"]["native"] is None:
        pytest.skip("this C library does not tell what malloc has out")
    assert not data["verdict"]["sound"]
    assert any(one.startswith(cause) for one in data["verdict"]["causes"])
    assert data["problem"] is None


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
