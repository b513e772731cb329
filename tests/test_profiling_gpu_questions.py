"""Ways to update a table, gathers by page order, cold and warm L2: held without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import Buffer, Emulator, build, require_compiler
from stand_in_cuda import Cuda, stand_in

from profiling.gpu import clock, common, contiguity, kernels, l2, layout, strategies
from sgalloc.bench.harness import DONE, RETURN, Summary
from sgalloc.bench.measured import Record

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


def found_of(*records: Record) -> layout.Found:
    return layout.Found({"records": [record.to_json() for record in records], "notes": []})


def flat(value: float) -> Summary:
    return Summary(3, value, value, value)


# -- the kernels that are only here ----------------------------------------------------------


def test_the_kernels_as_a_gpu_runs_them(tmp_path: Path) -> None:
    """Their sources on the CPU, under ASan: they read and write what they should, and no more."""
    require_compiler()
    source = tmp_path / "questions.cu"
    source.write_text(strategies._SCATTER + contiguity._GATHER, encoding="utf-8")
    rng = np.random.default_rng(0)
    with Emulator(build().program("questions", [source])) as cpu:
        for count in (1, 31, 32, 100):
            places = rng.permutation(4 * count)[:count].astype(np.int64)
            values = rng.integers(0, 1000, count, np.int32)
            wanted = np.full(4 * count, -1, np.int32)
            wanted[places] = values
            table = Buffer(np.full(4 * count, -1, np.int32), writable=True)
            arguments = [Buffer(places), Buffer(values), table, np.int32(count)]
            cpu.launch("scatter_slots", -(-count // 32), 32, arguments)
            np.testing.assert_array_equal(table.data, wanted)
        for shift, pages in ((0, 5), (3, 7), (5, 33)):
            ids = rng.permutation(2 * pages)[:pages].astype(np.int32)
            pool = contiguity.pattern(2 * pages, 1 << shift)
            total = pages << shift
            out = Buffer(np.full((total, 4), -1, np.int32), writable=True)
            arguments = [Buffer(ids), Buffer(pool), out, np.int32(shift), np.uint32(total)]
            cpu.launch("gather_kv", -(-total // 128), 32, arguments)
            wanted = pool.reshape(2 * pages, -1)[ids].reshape(-1, 4)
            np.testing.assert_array_equal(out.data, wanted)


# -- ways to update a table ------------------------------------------------------------------


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("batch", [1, 5, 1100])
def test_every_way_ends_with_the_same_table(cuda: Cuda, batch: int, page: int) -> None:
    steps = strategies.Steps(clock.Gpu(), batch, page)
    assert set(steps.ways) == set(strategies.STRATEGIES) - (
        {strategies.MAPPED} if batch > 1024 else set()
    )
    steps.check()
    steps.alloc.check(device=True)
    sent = steps.bytes
    assert sent[strategies.FULL_TABLE] == 4 * (batch + 1) * strategies.WIDTH
    assert sent[strategies.DIFF] == 12 * batch * page == page * sent[strategies.PAGES]
    assert sent[strategies.REBUILD] == 4 * batch * (strategies.HELD // page + 1)


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_a_way_that_brings_something_else_is_found(cuda: Cuda, name: str) -> None:
    steps = strategies.Steps(clock.Gpu(), 5, 16)
    way = steps.ways[name]

    def wrong() -> None:
        way()
        if name == strategies.REBUILD:
            steps.padded_there[3, 2] += 1
        elif name in (strategies.FULL_TABLE, strategies.DIFF):
            steps.slots_there[2, strategies.HELD + 1] += 1
        else:
            steps.alloc.req_to_token[4, strategies.HELD] += 1

    steps.ways[name] = lambda: None
    with pytest.raises(RuntimeError, match=f"{name} of 5 requests does not arrive"):
        steps.check()
    steps.ways[name] = wrong
    with pytest.raises(RuntimeError, match=f"{name} of 5 requests does not arrive"):
        steps.check()


def test_the_soonest_way_is_named() -> None:
    records = [
        Record("step", name, {"batch": 16, "page": 64, "bytes": 8, "until": until}, flat(took))
        for name, took in zip(strategies.STRATEGIES, (50.0, 30.0, 20.0, 10.0, 40.0), strict=True)
        for until in (RETURN, DONE)
    ]
    (table,) = strategies.tables(found_of(*records))
    assert f"16: {strategies.MAPPED} (a full copy takes 5.00× as long)" in table.verdict
    assert len(table.rows) == 5


# -- gathers by page order -------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 64])
def test_page_orders_are_of_as_many_pages_without_one_twice(page: int) -> None:
    found = contiguity.orders(page, 3000)
    for ids in found.values():
        assert ids.dtype == np.int32 and ids.size == np.unique(ids).size == 3000
        assert ids.min() >= 0
    rises = {name: float((np.diff(ids) == 1).mean()) for name, ids in found.items()}
    assert rises[contiguity.CONTIGUOUS] == 1.0 and rises[contiguity.SHUFFLED] < 0.02
    assert (page == 1) == (rises[contiguity.RECYCLED] > 0.9)


def test_a_gather_of_other_pages_is_found(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = clock.Gpu()
    records = contiguity.measured_cell(gpu, 64, 1, contiguity.WARM, 1 << 17)
    assert {record.name for record in records} == {"gather"}
    assert {record.side for record in records} == {*contiguity.ORDERS, contiguity.COPY}
    (straight,) = (r for r in records if r.side == contiguity.CONTIGUOUS)
    assert straight.at["extents"] == 1 and straight.at["bytes"] == 1 << 17
    real = contiguity.gather
    monkeypatch.setattr(contiguity, "gather", lambda gpu, ids, *rest: real(gpu, ids + 4, *rest))
    monkeypatch.setattr(
        contiguity, "orders", lambda page, count: {contiguity.CONTIGUOUS: np.arange(9, dtype="i4")}
    )
    with pytest.raises(RuntimeError, match="contiguous pages does not read what it should"):
        contiguity.measured_cell(gpu, 64, 1, contiguity.WARM, 1 << 17)
    with pytest.raises(ValueError, match="48 bytes is no power of two"):
        real(gpu, 0, gpu.empty((3, 4)), gpu.empty((3, 4)), 3, 1)


def test_bandwidth_is_what_is_gathered_by_the_time() -> None:
    at = {"page": 64, "heads": 8, "bytes": 1 << 28, "l2": "cold", "pages": 2048, "extents": 1}
    sides = (*contiguity.ORDERS, contiguity.COPY)
    records = [
        Record("gather", side, at, flat(took))
        for side, took in zip(sides, (100.0, 110.0, 125.0, 90.0), strict=True)
    ]
    (table,) = contiguity.tables(found_of(*records))
    assert table.rows[0][4].startswith("2,684 (100")
    assert table.verdict.endswith("128 KiB: recycled 1.10×, shuffled 1.25×.")


# -- cold and warm L2 ------------------------------------------------------------------------


def test_a_warm_series_writes_one_set_and_a_cold_one_more_than_l2_holds() -> None:
    for case in l2.cases():
        assert l2.sets_of(case, l2.WARM) == 1
        assert l2.sets_of(case, l2.COLD) * case.written >= 200_000_000
        assert case.written <= 16_000_000 and case.kernel in (kernels.ASSIGN, kernels.MARKS)


def test_cold_is_held_against_warm(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "_COLD", 4000)
    monkeypatch.setattr(l2, "launches_of", lambda case, sets: 2 * sets)
    case = kernels.Case(kernels.MARKS, 16, 20, 1, "one reserve", 20 * 64)
    outcome = l2.measure(clock.Gpu(), [case], rounds=4)
    assert outcome.states_compared == 1 + 4
    at = {**case.at, "l2": "warm"}
    kinds = {(r.name, r.side, r.at["l2"]) for r in outcome.records}
    assert kinds == {(case.kernel, s, c) for s in ("sgalloc", "memset") for c in ("cold", "warm")}
    records = [
        Record(case.kernel, side, {**at, "l2": state}, flat(took))
        for side, state, took in (
            *((kernels.MINE, "cold", 6.0), (kernels.MINE, "warm", 2.0)),
            *((kernels.MEMSET, "cold", 4.0), (kernels.MEMSET, "warm", 1.0)),
        )
    ]
    (table,) = l2.tables(found_of(*records))
    assert table.rows[0][4] == "1.50×" and table.rows[0][7] == "2.00×"
    assert table.verdict.endswith("1.28 kB: 3.00×.")


# -- the environment -------------------------------------------------------------------------


def test_results_from_before_clocks_were_read_are_still_results(cuda: Cuda) -> None:
    outcome = common.Outcome([Record("a", "b", {}, flat(1.0))], [])
    environment: dict[str, Any] = common.environment()
    run = {"date": "2026-01-31"}
    common.validate(common.document("launch", environment, run, outcome))
    told = layout.machine_text({"environment": {**environment, **_CLOCKS}, "run": _AFTER | run})
    assert "clocks up to 1980 and 2619 MHz, 1965 MHz after the run, 700 W, PCIe gen 5 x16" in told
    for name in common._LATER:
        del environment[name]
    common.validate(common.document("launch", environment, run, outcome))
    assert "MHz" not in layout.machine_text({"environment": environment, "run": run})
    environment["pcie"] = 5
    with pytest.raises(ValueError, match=r"environment\.pcie must be str"):
        common.validate(common.document("launch", environment, run, outcome))


_AFTER: dict[str, Any] = {"sm_clock_mhz": 1965}
_CLOCKS: dict[str, Any] = {
    **{"sm_clock_mhz": 1980, "memory_clock_mhz": 2619, "power_limit_w": 700},
    "pcie": "gen 5 x16",
}
