"""The GPU benchmarks, as far as they can be held without a GPU: on a stand-in for CUDA."""

from __future__ import annotations

import copy
import getpass
import json
import platform
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_in_cuda
from click.testing import CliRunner
from cuda_on_cpu.emulator import Buffer, Emulator, build, require_compiler
from stand_in_cuda import Cuda, stand_in

from profiling.gpu import (
    clock,
    common,
    contiguity,
    crossover,
    groups,
    handmade,
    kernels,
    l2,
    launch,
    layout,
    peer_sglang,
    row_digest,
    sglang_engine,
    starting,
    steps,
    strategies,
    strided,
    transport,
)
from profiling.started import CPU_WARM
from sgalloc.bench import harness
from sgalloc.bench.harness import Effort, Key, Side, Step, Summary, in_turns
from sgalloc.bench.measured import Record

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")

SCRIPTS: dict[str, Any] = {
    "steps": steps,
    "peer_sglang": peer_sglang,
    "kernels": kernels,
    "l2": l2,
    "transport": transport,
    "strategies": strategies,
    "crossover": crossover,
    "launch": launch,
    "groups": groups,
    "row_digest": row_digest,
    "contiguity": contiguity,
    "starting": starting,
}
SHORT = Effort(seconds=0.0, least=4, warm_up=2, block=2)
WRONG = r"broke the row law|entries were written|other slots"
NO_PEER = "SGLang is not measured: there is none"
SMALL_CASES = (
    kernels.Case("assign_pages", 16, 40, 1, "places, mapped", 2560),
    kernels.Case("assign_pages", 64, 128, 64, "places", 128 * 256),
    kernels.Case("assign_pages", 64, 128, 64, "runs", 128 * 256),
    kernels.Case("assign_pages", 3, 50, 0, "runs", 600),
    kernels.Case("assign_pages", 16, 100, 1, "places, rows in any order", 6400),
    kernels.Case("assign_pages", 1, 100, 1, "places", 3200),
    kernels.Case("page_watermarks", 16, 2000, 1, "one reserve", 2000 * 64),
    kernels.Case("page_watermarks", 64, 80, 8, "a reserve each", 80 * 256),
    kernels.Case("gather_slots", 64, 800, 16, "int32", 3200),
    kernels.Case("gather_slots", 64, 20_000, 16, "int64", 160_000),
    kernels.Case("gather_slots", 64, 80, 16, "int64, ragged", 640),
    kernels.Case(kernels.SIDE, 16, 40, 1, "grows", 2 * 2560),
    kernels.Case(kernels.SIDE, 64, 700, 1, "grows, map", 3 * 700 * 256),
    kernels.Case(kernels.SIDE, 3, 40, 1, "clears", 480),
    kernels.Case(kernels.SIDE, 1, 700, 1, "clears, map", 2 * 2800),
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


def tiny(name: str, gpu: clock.Gpu, patch: pytest.MonkeyPatch) -> common.Outcome:
    """One benchmark from start to end, at sizes that take a second or two."""
    if name == "steps":
        patch.setattr(steps, "RELEASED", (1, 3))
        return steps.measure(steps.Size((1, 5), (1, 16, 64), SHORT), gpu)
    if name == "peer_sglang":
        cells = [peer_sglang.Cell(what, 3, 16) for what in ("reserve", "decode", "release")]
        cells.append(peer_sglang.Cell("kernels", 40, 64))
        return peer_sglang.measure(cells, gpu, NO_PEER, budget=60.0)
    if name == "kernels":
        patch.setattr(kernels, "launches_of", lambda case, sets: 2 * sets)
        return kernels.measure(True, gpu, chosen=SMALL_CASES)
    if name == "transport":
        patch.setattr(transport, "BYTES", (512, 1024, 16384))
        patch.setattr(transport, "_FORWARD_BYTES", 1 << 12)
        return transport.measure(True, gpu, turns=2)
    if name == "l2":
        patch.setattr(l2, "_COLD", 3000)
        patch.setattr(l2, "launches_of", lambda case, sets: 2 * sets)
        return l2.measure(gpu, SMALL_CASES[1:2], rounds=4)
    if name == "strategies":
        patch.setattr(strategies, "QUICK_BATCHES", (3, 1100))
        return strategies.measure(gpu, quick=True)
    if name == "contiguity":
        return contiguity.measure(gpu, ((64, 1), (1, 2)), {"cold": 1 << 18, "warm": 1 << 17})
    if name == "starting":
        return starting.measure(1, CPU_WARM)  # a fresh process has no stand-in
    if name == "groups":
        return groups.measure(groups.Size((1, 5), (16, 64), SHORT), gpu)
    if name == "row_digest":
        cases = (row_digest.Case(3, 640, 64), row_digest.Case(5, 4000, 16))
        patch.setattr(row_digest, "_LARGE", 60_000)
        return row_digest.measure(cases, SHORT, gpu, 2)
    if name == "crossover":
        size = crossover.Size((40, 1500), (16, 64), (1, 100, 1024, 1100), seconds=0.0, least=3)
        return crossover.measure(size, gpu)
    patch.setattr(launch, "MANY", 300)
    return launch.measure(SHORT, gpu)


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """The documents of one tiny run of each, and what the stand-in launched for it."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in SCRIPTS:
            with stand_in() as state:
                outcome = tiny(name, clock.Gpu(), patch)
                made[name] = common.document(
                    name, common.environment(), {"date": "2026-01-31", "seconds": 1.0}, outcome
                )
                made[name]["launched"] = sorted(set(state.launches))
                made[name]["compared"] = outcome.states_compared
    return made


def document(documents: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    data = copy.deepcopy(documents[name])
    return {k: v for k, v in data.items() if k not in ("launched", "compared")}


# -- whole runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_makes_a_document_and_its_tables(
    documents: dict[str, dict[str, Any]], name: str, tmp_path: Path
) -> None:
    data = document(documents, name)
    path = tmp_path / "some" / f"{name}.json"
    common.write(data, path)
    assert common.read(path) == json.loads(path.read_text(encoding="utf-8")) == data
    for private in (platform.node(), getpass.getuser(), str(Path.cwd()), str(Path.home())):
        assert private not in map(str, data["environment"].values())
    made = SCRIPTS[name].tables(layout.Found(data))
    assert made
    for table in made:
        assert table.verdict.endswith(".") and "None" not in table.verdict
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.text().count("\n") >= len(table.rows)
        assert table.markdown().count("\n| ") == len(table.rows) + 2
    shown = "".join(cell for table in made for row in table.rows for cell in row)
    assert "None" not in shown and "nan" not in shown


def test_every_kernel_is_launched_and_every_result_checked(
    documents: dict[str, dict[str, Any]],
) -> None:
    assert {"assign_mapped", "assign_pages", "page_watermarks"} <= set(
        documents["kernels"]["launched"]
    )
    assert "page_watermarks" in documents["crossover"]["launched"], "no step was rounded there"
    assert {"copy_all", "assign_mapped", "assign_pages"} <= set(documents["transport"]["launched"])
    compared = {name: data["compared"] for name, data in documents.items()}
    assert compared == {
        "steps": 3 * (2 * 2 + 2),
        "peer_sglang": 0,
        "kernels": 8 * sum(1 if case.kernel == kernels.SIDE else 2 for case in SMALL_CASES),
        "l2": 1 + 2,
        "transport": 2 * len(transport.CARRIERS),
        "strategies": 2 * 2 * (5 + 4),
        "crossover": 2 * 2 + 1,
        "launch": 1,
        "groups": 2 * 2 * len(groups.CASES),
        "row_digest": 2 * 2,
        "contiguity": 2 * 2 * 3,
        "starting": 0,
    }
    assert {"row_digest", "sum_all"} <= set(documents["row_digest"]["launched"])


def test_steps_cover_what_they_should(documents: dict[str, dict[str, Any]]) -> None:
    found = layout.Found(documents["steps"])
    for batch in (1, 5):
        for page in (1, 16, 64):
            at = {"batch": batch, "page": page}
            for until in (harness.RETURN, harness.DONE):
                for side in (steps.ON_GPU, steps.ON_CPU):
                    assert found.one("reserve", side, label="all steps", until=until, **at)
                    assert found.one("decode", side, label="all steps", until=until, **at)
                    assert found.one("reserve again", side, until=until, **at)
                assert found.one(steps.WRITE, calls=steps.TOGETHER, until=until, **at)
                assert found.one(steps.LAUNCH, calls=steps.ONE, until=until, **at)
        assert found.values("release", "batch") == [1, 3]
    assert not found.where(steps.WRITE, label=steps._NOTHING)


def test_groups_cover_what_they_should(documents: dict[str, dict[str, Any]]) -> None:
    found = layout.Found(documents["groups"])
    for case in groups.CASES:
        assert case.beside in groups.PLAINS
        for batch in (1, 5):
            for page in (16, 64):
                at = {"batch": batch, "page": page}
                for until in (harness.RETURN, harness.DONE):
                    mine = found.one(case.name, groups.ON_GPU, until=until, **at)
                    assert mine and found.one(case.name, groups.ON_CPU, until=until, **at)
                    plain = found.one(case.name, groups.PLAIN, until=until, **at)
                    assert (plain is None) == (case.name == case.beside)
                    assert mine["at"]["copies"] <= mine["at"]["launches"] <= 1
    for name, launches in (
        (groups.RESERVES, 1),
        ("eagle step that evicts, window and map", 1),
        ("compact", 0),
        ("release 64, window", 0),
        ("release 64, window and map", 1),
    ):
        for record in found.where(name, groups.ON_GPU, batch=5):
            assert record["at"]["launches"] == launches


def test_digests_cover_what_they_should(
    documents: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = layout.Found(documents["row_digest"])
    assert len(found.where(row_digest.KERNEL)) == 2 * 3
    for name in (row_digest.PROBE, row_digest.CHECK, row_digest.READ_BACK, row_digest.EXPECTED):
        assert len(found.where(name, row_digest.MINE, until=harness.RETURN)) == 2
    assert "no table larger" in row_digest.kernel_table(found).verdict
    monkeypatch.setattr(row_digest, "_LARGE", 60_000)
    assert "aim at most 1.2×" in row_digest.kernel_table(found).verdict
    assert len(set(row_digest.CASES)) == len(row_digest.CASES) > len(row_digest.QUICK)


@pytest.mark.parametrize(("took", "word"), [(12.0, "met"), (12.1, "missed")])
def test_a_digest_is_held_against_a_plain_sum(took: float, word: str) -> None:
    case = row_digest.Case(4096, 32_768, 64)
    sides = {row_digest.MINE: took, row_digest.SUM: 10.0, row_digest.COPY: 20.0}
    records = [Record(row_digest.KERNEL, side, case.at, flat(us)) for side, us in sides.items()]
    table = row_digest.kernel_table(found_of(*records))
    assert table.verdict.endswith(f"{took / 10:.2f}×, {word}.")


def test_a_digest_that_is_wrong_is_found(cuda: Cuda) -> None:
    case = row_digest.Case(3, 640, 64)
    alloc = row_digest.made(case)
    row_digest.kernel_records(case, alloc, clock.Gpu(), 2)
    alloc.req_to_token[2, 5] += 1
    with pytest.raises(RuntimeError, match="digests differ"):
        row_digest.kernel_records(case, alloc, clock.Gpu(), 2)


def test_kernels_name_each_case_once() -> None:
    every = list(kernels.cases())
    assert len({(case.kernel, *case.at.values()) for case in every}) == len(every)
    large = [case for case in every if case.kernel in kernels.AIMS and case.written > 10**7]
    sides = {
        (case.page_size, case.pages, case.form) for case in every if case.kernel == kernels.SIDE
    }
    assert sides == {
        (page, pages, form)
        for page in (16, 64)
        for pages in (256, 65_536)
        for form in ("grows", "grows, map", "clears", "clears, map")
    }
    for kernel in kernels.AIMS:
        for page in (1, 16, 64):
            sizes = {
                round(case.written / 1e6)
                for case in large
                if (case.kernel, case.page_size) == (kernel, page)
            }
            assert sizes == {16, 160}
    for case in every:
        assert case.segments * (case.pages // case.segments) == case.pages
        sets = kernels.sets_of(case)
        assert kernels.launches_of(case, sets) % sets == 0
        if case.written > 10**6:
            assert sets * case.written > 3 * (60 << 20)


@pytest.mark.parametrize("case", SMALL_CASES)
def test_a_kernel_that_writes_elsewhere_is_found(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, case: kernels.Case
) -> None:
    gpu = clock.Gpu()
    made = kernels.made(case, gpu, 2)
    graph = made.graph(2)
    made.check(graph)
    real = cuda.run

    def spoil(*args: Any) -> None:
        real(*args)
        entry = stand_in_cuda._view(made.memory + 8, 1, np.int32)
        entry += 1

    spoilt = [*graph.graphExec, lambda: spoil("nothing", (1,), (1,), (), 0)]
    with pytest.raises(RuntimeError, match=WRONG):
        made.check(types.SimpleNamespace(graphExec=spoilt))
    with pytest.raises(RuntimeError, match=WRONG):
        made.check(types.SimpleNamespace(graphExec=graph.graphExec[:-1]))


@pytest.mark.parametrize("case", [case for case in SMALL_CASES if case.kernel != kernels.SIDE])
def test_a_fill_of_other_places_is_found(cuda: Cuda, case: kernels.Case) -> None:
    gpu = clock.Gpu()
    made = kernels.made(case, gpu, 2)
    graph = made.filling(2)
    made.check_filled(graph)
    with pytest.raises(RuntimeError, match="the fill left"):
        made.check_filled(types.SimpleNamespace(graphExec=graph.graphExec[:-1]))
    if case.kernel == kernels.GATHER:
        return  # the slots are all that there is
    table = made._table._table

    def spoil() -> None:
        table[0, 0] = 5

    with pytest.raises(RuntimeError, match="entries were written"):
        made.check_filled(types.SimpleNamespace(graphExec=[*graph.graphExec, spoil]))


@pytest.mark.parametrize("segments", [1, 2, 1021, 2042, 4096, 249_984, 2_499_968])
def test_a_shuffled_fill_meets_every_row_far_from_the_last(segments: int) -> None:
    step = strided.Places([], 4, 4, segments, 1, True).step
    assert strided.Places([], 4, 4, segments, 1, False).step == 1
    assert np.unique(np.arange(segments) * step % segments).size == segments
    assert step * segments < 2**32 and (segments < 4096 or step > 500)


def test_the_fill_as_a_gpu_runs_it(tmp_path: Path) -> None:
    """Its source on the CPU, under ASan: it stores into its pages and nowhere else."""
    require_compiler()
    source = tmp_path / "strided.cu"
    source.write_text(strided.FILL, encoding="utf-8")
    with Emulator(build().program("strided", [source])) as cpu:
        for page_size, width, segments, each, row_width, shuffled in (
            (16, 4, 7, 3, 64, True),
            (12, 4, 5, 2, 24, False),
            (64, 4, 1, 9, 576, False),
            (1, 1, 40, 1, 8, True),
            (3, 1, 4, 5, 17, False),
        ):
            step = strided.Places([], row_width, page_size, segments, each, shuffled).step
            assert (step > 1) == shuffled
            table = np.full((segments, row_width), -1, np.int32)
            wanted = table.copy()
            wanted[:, : each * page_size] = 99
            stores = segments * each * page_size // width
            sizes = (page_size, width, segments, each, step, stores)
            given = Buffer(table, writable=True)
            arguments = [given, np.int64(row_width), *map(np.uint32, sizes), np.int32(99)]
            cpu.launch("fill_pages_alone", 3, 32, arguments)
            np.testing.assert_array_equal(given.data, wanted)


def test_sets_of_a_case_share_no_sector() -> None:
    with stand_in():
        gpu = clock.Gpu()
        for page, each in ((1, 1), (1, 16), (3, 2), (16, 1), (64, 4)):
            grid = handmade.Grid(gpu, page, 4, each, 3)
            bytes_apart = 4 * page * (grid.first(1) - grid.first(0))
            assert bytes_apart >= max(32, 4 * page * each) or bytes_apart % 32 == 0
            assert grid.first(2) + each <= grid.row_pages


# -- the clock -----------------------------------------------------------------------------


def test_every_timed_call_begins_and_ends_on_an_idle_gpu() -> None:
    log: list[str] = []
    side = Side(
        "x",
        [
            Step("a", lambda: log.append("a"), lambda _: "label"),
            Step(None, lambda: log.append("untimed")),
        ],
    )
    host, total = in_turns([side], SHORT, lambda: log.append("wait"))
    assert "".join(log).count("waitawait") == log.count("a") == 2 + 4
    assert host.keys() == total.keys() == {Key("x", "a", "label")}
    (mine,), (whole,) = host.values(), total.values()
    assert len(mine) == len(whole) == 4
    assert all(0 <= a <= b for a, b in zip(mine, whole, strict=True))


# -- verdicts ------------------------------------------------------------------------------


def found_of(*records: Record) -> layout.Found:
    return layout.Found({"records": [record.to_json() for record in records], "notes": []})


def flat(value: float) -> Summary:
    return Summary(3, value, value, value)


@pytest.mark.parametrize(("took", "word"), [(7.5, "met"), (7.6, "missed")])
def test_a_kernel_is_held_against_its_aim(took: float, word: str) -> None:
    case = kernels.Case("assign_pages", 64, 62_500, 1, "places", 16_000_000)
    small = case._replace(pages=10, written=2560)
    records = (
        Record(case.kernel, kernels.MINE, {**case.at, "row": 4096}, flat(took)),
        Record(case.kernel, kernels.MEMSET, {**case.at, "row": 4096}, flat(5.0)),
        Record(case.kernel, kernels.FILL, {**case.at, "row": 4096}, flat(6.0)),
        Record(case.kernel, kernels.MINE, {**small.at, "row": 4096}, flat(9.0)),
        Record(case.kernel, kernels.MEMSET, {**small.at, "row": 4096}, flat(1.0)),
    )
    table = kernels.kernel_table(found_of(*records), case.kernel)
    assert f"{word}." in table.verdict and f"{took / 5:.2f}×" in table.verdict
    over = f"{took / 6:.2f}×"
    assert f"Over a strided fill of the same places: 16 MB: {over} to {over}" in table.verdict
    # Results of before there were such fills say nothing of them.
    assert [row[-4] for row in table.rows] == [f"{took / 5:.2f}×", "9.00×"]
    assert [row[-3:-1] for row in table.rows] == [["6.00 (6.00–6.00)", over], ["", ""]]
    old = found_of(*(r for r in records if r.side != kernels.FILL))
    assert "fill" not in kernels.kernel_table(old, case.kernel).verdict


@pytest.mark.parametrize(("took", "word"), [(7.2, "met"), (7.3, "missed")])
def test_the_device_part_is_held_against_three_launches(took: float, word: str) -> None:
    records = []
    for batch, mine in ((256, took), (1024, 100.0)):
        at = {"batch": batch, "page": 64, "calls": steps.ONE, "until": harness.RETURN}
        records.append(Record("reserve", steps.ON_GPU, at, flat(20.0), "all steps"))
        records.append(Record(steps.WRITE, steps.ON_GPU, at, flat(mine)))
        records.append(Record(steps.LAUNCH, steps.ON_GPU, at, flat(2.4)))
    verdict = steps.device_table(found_of(*records), [64]).verdict
    assert f"{took / 2.4:.2f}×" in verdict and verdict.endswith(f"{word}.")


def test_crossovers_are_where_it_stays_better() -> None:
    better = [(1, True), (2, False), (4, True), (8, True)]
    assert crossover.first_from(better) == 4
    assert crossover.first_from([*better, (16, False)]) is None
    assert crossover.first_from([]) is None


def test_what_a_forward_loses_is_for_one_update() -> None:
    at = {"bytes": 64, "forward": "f", "mode": transport.PLAN_STREAM}
    found = found_of(
        Record("forward", transport.ALONE, {**at, "updates": 0}, flat(1000.0)),
        Record("forward", transport.MAPPED, {**at, "updates": 200}, flat(1100.0)),
    )
    assert transport.lost_us(found, transport.MAPPED, 64, "f", transport.PLAN_STREAM) == 0.5
    assert transport.lost_us(found, transport.COPY, 64, "f", transport.PLAN_STREAM) is None


# -- commands and documents ----------------------------------------------------------------


def test_nothing_here_needs_cupy_torch_or_rich_to_be_imported() -> None:
    names = [f"profiling.gpu.{name}" for name in ("common", "handmade", *SCRIPTS)]
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('cupy', 'torch', 'rich')))\n"
        f"import {', '.join(names)}\n"
        "from profiling.gpu.layout import Table\n"
        "Table('t', 'm', ['a'], [['x']], 'v.').show()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "t\nm\n\na\nx\n\nVerdict: v.\n\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(common, "cuda_missing", lambda: "there is no GPU")
    out = tmp_path / "x" / "out.json"
    result = CliRunner().invoke(SCRIPTS[name].main, ["--quick", "--out", str(out)])
    assert result.exit_code == 1
    assert result.output == "Error: nothing to measure here: there is no GPU\n"
    assert not out.parent.exists()
    assert "--quick" in CliRunner().invoke(SCRIPTS[name].main, ["--help"]).output


def test_a_script_prints_its_tables_and_writes_its_file(cuda: Cuda, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    result = CliRunner().invoke(peer_sglang.main, ["--quick", "--out", str(taken / "out.json")])
    assert result.exit_code == 2 and "nothing can be written beside" in result.output
    assert not cuda.launches
    path = tmp_path / "new" / "peer_sglang.json"
    result = CliRunner().invoke(
        peer_sglang.main, ["--quick", "--out", str(path)], env={sglang_engine.VARIABLE: None}
    )
    assert result.exit_code == 0, result.output
    assert "set SGL_SRC" in result.output and result.output.endswith(f"wrote {path}\n")
    data = common.read(path)
    assert data["run"]["effort"] == "quick" and data["environment"]["gpu"] == "Stand-in"
    assert {r["name"] for r in data["records"]} == {"reserve", "decode", "release"}


def test_what_the_time_does_not_suffice_for_is_named(cuda: Cuda) -> None:
    outcome = peer_sglang.measure(peer_sglang.QUICK, clock.Gpu(), NO_PEER, budget=0.0)
    assert outcome.records == []
    assert "reserve 256 page 64, decode 256 page 64" in outcome.notes[1]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d.update(schema="other"), "is no sgalloc-gpu-benchmarks"),
        (lambda d: d.update(version=0), "version 0"),
        (lambda d: d.update(bench="other"), "bench 'other'"),
        (lambda d: d["environment"].pop("gpu"), "environment must have exactly"),
        (lambda d: d["environment"].update(host="x"), "environment must have exactly"),
        (lambda d: d["environment"].update(sms="132"), "environment.sms must be int"),
        (lambda d: d.update(run={}), "run must be"),
        (lambda d: d.update(notes=[1]), "notes must be"),
        (lambda d: d.update(records=[]), "at least one record"),
        (lambda d: d["records"][0].pop("n"), "must have exactly"),
        (lambda d: d["records"][0].update(n=0), "n >= 1"),
        (lambda d: d["records"][0].update(p90_us=0.0), "p10 <= median <= p90"),
        (lambda d: d["records"][0].update(side=""), "a name and a side"),
        (lambda d: d["records"][0]["at"].update(page=1.5), "must be an int or a str"),
        (lambda d: d["records"].append(d["records"][0]), "repeats"),
    ],
)
def test_a_spoilt_document_is_refused(
    documents: dict[str, dict[str, Any]], spoil: Callable[[dict[str, Any]], Any], says: str
) -> None:
    data = document(documents, "launch")
    common.validate(data)
    spoil(data)
    with pytest.raises(ValueError, match=says):
        common.validate(data)


def test_the_page_shows_what_its_results_say(
    documents: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = common.README.read_text(encoding="utf-8")
    assert common.fill(text) == text, "run python -m profiling.gpu.common tables --write"
    assert sorted(found[1] for found in common._BLOCK.findall(text)) == sorted(common.BENCHES)
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(common, "HERE", tmp_path / "gpu")
    assert common.fill(text).count(common.NOT_YET) == len(common.BENCHES)
    common.write(
        document(documents, "launch"), tmp_path / "results" / "nvidia-h200" / "launch.json"
    )
    filled = common.fill(text)
    assert filled.count(common.NOT_YET) == len(common.BENCHES) - 1
    assert "Stand-in (132 multiprocessors" in filled and "**One call, host µs.**" in filled
    assert common.fill(filled) == filled
