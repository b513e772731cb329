"""Questions with scripts of their own measure what they say, and the page has them all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from profiling import (
    absent,
    contiguity,
    everything,
    index,
    million,
    observers,
    processes,
    question,
    recycling,
    starting,
    tables,
)
from profiling.gpu import common, smi
from profiling.layout import Found
from sgalloc.bench import measured
from sgalloc.bench.harness import Summary
from sgalloc.bench.measured import Record

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")

ROOT = Path(__file__).resolve().parents[1]
RUNS: dict[str, Callable[[], question.Answer]] = {
    "million": lambda: million.measure((200, 300), seconds=0.0),
    "contiguity": lambda: contiguity.measure(("random", "code"), (16,), 150),
    "observers": lambda: observers.measure(5),
    "starting": lambda: starting.measure(1, dropping=False),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_question_is_answered_and_kept(name: str, tmp_path: Path) -> None:
    answer = RUNS[name]()
    assert name in question.QUESTIONS
    run = {**_RUN, "states_compared": answer.states_compared}
    data = question.document(name, _ENVIRONMENT, run, answer)
    path = tmp_path / f"{name}.json"
    measured.write(data, path)
    assert question.read(path) == data
    text = question.block(name, tmp_path)
    assert "*Verdict:* " in text and "nan" not in text and "None" not in text
    for note in answer.notes:
        assert f"*Note:* {note}" in text
    assert question.block(name, tmp_path / "elsewhere") == question.NOT_YET
    del data["notes"]
    measured.write(data, path)
    with pytest.raises(ValueError, match="needs notes"):
        question.read(path)


def test_a_script_prints_its_tables_and_writes_its_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(observers.main, ["--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/observers.json")
    assert result.output.endswith(f"wrote {path}\n") and "Verdict: events add" in result.output
    assert question.read(path)["run"]["effort"] == "quick"
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    result = CliRunner().invoke(observers.main, ["--out", str(taken / "results")])
    assert result.exit_code == 2 and "nothing can be written to" in result.output


def test_both_sides_of_a_million_end_in_the_same_state() -> None:
    answer = million.measure((200,), seconds=0.0)
    assert answer.states_compared == 2
    found = Found([record.to_json() for record in answer.records])
    for name, label in million.CALLS:
        for side in ("sgalloc", "python loop"):
            assert found.one(name, side, label, batch=200)["n"] >= 1


# -- contiguity ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", recycling.ORDERS)
def test_free_pages_go_out_in_the_order_that_is_measured(order: str) -> None:
    run = recycling.Recycling(recycling.lengths_of("random", 300, 0), 16, order)
    run.run(300)
    run.alloc.check()
    pool = run.alloc._core.pool
    free = pool.free_ids()
    seen = run.seen()
    held = np.concatenate(seen.whole)
    assert np.array_equal(np.sort(np.concatenate((free, held))), np.arange(1, pool.num_pages + 1))
    for whole, prompt in zip(seen.whole, seen.prompts, strict=True):
        assert np.array_equal(whole[: prompt.size], prompt)
    run.alloc.release(run._handles)
    run._arrange()
    ahead = pool.head(pool.free)
    rises = float((np.diff(ahead) == 1).mean())
    if order == recycling.SORTED:
        assert np.array_equal(ahead, np.arange(1, pool.num_pages + 1))
    elif order == recycling.SHUFFLED:
        assert rises < 0.02
    else:
        assert rises > 0.02


def test_lengths_repeat_and_workloads_differ() -> None:
    for workload in recycling.WORKLOADS:
        one, again = (recycling.lengths_of(workload, 50, 3) for _ in range(2))
        assert np.array_equal(one.prompts, again.prompts)
        assert one.prompts.shape == one.outputs.shape == (50,) and one.outputs.min() >= 1
    assert not np.array_equal(
        recycling.lengths_of("random", 50, 0).prompts, recycling.lengths_of("random", 50, 1).prompts
    )


def test_extents_are_counted_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [np.array([3, 4, 5, 9]), np.array([8, 7])]
    seen = recycling.Seen(lists, [ids[:3] for ids in lists])
    other = recycling.Seen([], [np.array([1, 2, 8]), np.array([4, 5])])
    monkeypatch.setattr(contiguity, "recycled", lambda *args, seed=0: [other if seed else seen])
    at = contiguity.measured_cell("random", 16, recycling.STACK, 2).at
    assert (at["pages"], at["extents"], at["requests"]) == (6, 4, 2)
    assert (at["prompt pages"], at["prompt extents"]) == (5, 3)
    # 3, 4 beside 1, 2 is one piece, 5 beside 8 another; 8, 7 are two wherever they go.
    assert (at["pages sent"], at["pieces sent"]) == (5, 4)


# -- starting ------------------------------------------------------------------------------


def test_what_is_not_compiled_is_ours_alone(tmp_path: Path) -> None:
    starting.compiled_without_ours(tmp_path)
    assert not list((tmp_path / str(ROOT / "sgalloc").lstrip("/")).rglob("*.pyc"))
    assert list(tmp_path.rglob("numpy/__init__*.pyc"))
    seen = processes.fresh("import", tmp_path)
    assert list(seen) == ["import numpy", "import sgalloc"]
    assert list((tmp_path / str(ROOT / "sgalloc").lstrip("/")).rglob("*.pyc"))


def test_a_process_that_fails_and_caches_that_stay_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match=r"a fresh process failed: .*pilot error"):
        processes.fresh("import", tmp_path, {"PYTHONPATH": _broken(tmp_path)})
    monkeypatch.setattr(starting, "DROP", tmp_path)  # a folder cannot be written to
    assert "cannot be dropped here" in str(starting.drop())


def _broken(folder: Path) -> str:
    (folder / "numpy.py").write_text("raise OSError('pilot error')", encoding="utf-8")
    return str(folder)


# -- everything at once --------------------------------------------------------------------


def test_what_is_absent_is_left_out_and_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert everything.chosen((), "there is none") == list(everything.HOST)
    assert everything.chosen((), None) == [*everything.HOST, *everything.GPU]
    assert everything.chosen(("gpu.steps", "million"), "there is none") == ["million"]
    ends = {
        "million": (0, "measured as it should\n"),
        "peer_vllm": (1, "Error: vLLM is not measured: set VLLM_SRC\n"),
        "starting": (1, "Traceback\nValueError: a fault that is not measured\n"),
    }
    asked = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        code, said = ends[command[2].removeprefix("profiling.")]
        return types.SimpleNamespace(returncode=code, stderr=said)

    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(everything, "cuda_missing", lambda: "there is none")
    only = [part for name in ends for part in ("--only", name)]
    result = CliRunner().invoke(everything.main, [*only, "--quick"])
    assert [command[1:] for command in asked] == [
        ["-m", f"profiling.{name}", "--quick"] for name in ends
    ]
    assert result.exit_code == 1
    assert "million: measured in" in result.output
    assert "peer_vllm: left out in 0 s: vLLM is not measured: set VLLM_SRC" in result.output
    assert "starting: failed in" in result.output
    assert "Error: starting failed" in result.output
    assert "The GPU's are left out: there is none" in result.output


def test_results_go_to_the_folders_of_the_machine_and_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[2:])
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(everything.subprocess, "run", run)
    for name in ("million", "gpu.l2"):
        everything.run(name, False, tmp_path, common.slug({"gpu": "NVIDIA RTX (5090)"}))
    assert asked == [
        ["profiling.million", "--out", str(tmp_path)],
        ["profiling.gpu.l2", "--out", str(tmp_path / "nvidia-rtx-5090" / "l2.json")],
    ]


def test_every_script_that_is_run_is_there() -> None:
    for name in (*everything.HOST, *everything.GPU):
        assert (ROOT / "profiling" / f"{name.replace('.', '/')}.py").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_bench_installs_cupy_where_there_is_a_gpu() -> None:
    for extra in ("", "cuda12", "cuda13"):
        command = ["make", "-n", "bench", f"CUDA={extra}", "ARGS=--quick"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith("python -m profiling.everything --quick")
        assert (f"[cli,report,{extra}]" in done.stdout) == bool(extra)


# -- the page ------------------------------------------------------------------------------


def test_every_question_has_its_row_and_its_section() -> None:
    entries = {(entry.kind, entry.bench) for entry in index.ENTRIES}
    assert {bench for kind, bench in entries if kind == index.ALONE} == set(question.QUESTIONS)
    assert {bench for kind, bench in entries if kind == index.GPU} == set(common.BENCHES)
    pages = {"": tables.README, "gpu/README.md": common.README}
    for entry in index.ENTRIES:
        page, anchor = entry.link.split("#")
        text = pages[page].read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in anchors, f"{entry.text}: no section {anchor}"
        section = re.split(r"^#+ ", text.split("\n# ")[0] + text, flags=re.MULTILINE)
        block = f"<!-- table: {entry.bench} -->"
        named = [
            part
            for part in section
            if re.sub(r"[^\w -]", "", part.split("\n")[0].lower()).replace(" ", "-") == anchor
        ]
        assert any(block in part for part in named), f"{entry.text} does not stand in {anchor}"


def test_a_verdict_is_that_of_the_results(tmp_path: Path) -> None:
    data = measured.read(tables.source(tables.README.read_text(encoding="utf-8")))
    entry = next(one for one in index.ENTRIES if one.bench == "million")
    assert index.verdict(entry, data, tmp_path) == question.NOT_YET
    at = {"batch": 10, "page": 64}
    records = [
        Record(name, side, at, Summary(3, 0.5, 0.5, 0.5), label)
        for name, label in million.CALLS
        for side in ("sgalloc", "python loop")
    ]
    run = {**_RUN, "states_compared": 1}
    answer = question.Answer(records, [])
    measured.write(
        question.document("million", _ENVIRONMENT, run, answer), tmp_path / "million.json"
    )
    assert "a request costs at 10: `reserve` 50 ns" in index.verdict(entry, data, tmp_path)
    assert "50 ns" in index.table(data, tmp_path)


# -- what a GPU's driver says --------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "clock", "link"),
    [
        ("580.1, 1200, 1980, 2619, 700.00, 5, 16", 1980, "gen 5 x16"),
        ("580.1, [N/A], [Not Supported], 2619, [N/A], [N/A], 16", 0, ""),
        ("an error", 0, ""),
        ("", 0, ""),
    ],
)
def test_clocks_and_link_are_read_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, line: str, clock: int, link: str
) -> None:
    runtime = types.SimpleNamespace(
        getDevice=lambda: 1, deviceGetPCIBusId=lambda device: f"0000:0{device}:00.0"
    )
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(runtime=runtime))
    asked = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return types.SimpleNamespace(stdout=f"{line}\n")

    monkeypatch.setattr(smi.subprocess, "run", run)
    found = smi.asked()
    assert asked[0][-1] == "--id=0000:01:00.0"
    assert (smi.number(found, "clocks.max.sm"), smi.link(found)) == (clock, link)

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(smi.subprocess, "run", missing)
    assert smi.asked() == {}


def test_what_stands_in_is_only_what_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    absent.stand_in(("json", "no_such_package.inner"))
    import json

    assert json.dumps([1]) == "[1]"
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_package")
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_package.other")
    absent.stand_in(("no_such_package",))
    module = __import__("no_such_package.inner.deep", fromlist=["deep"])
    assert isinstance(module.Kind | None, absent.Nothing)
    assert isinstance(None | module.Kind(1).attribute, absent.Nothing)
    with pytest.raises(AttributeError):
        _ = module.__missing__
    for name in [name for name in sys.modules if name.startswith("no_such_package")]:
        del sys.modules[name]


_ENVIRONMENT: dict[str, Any] = {
    **{"cpu": "a", "cpu_family_model": "1/2", "cores": 2, "memory_gib": 1.0, "system": "Linux"},
    **{"huge_pages": "none", "python": "3", "numpy": "2", "sgalloc": "0", "empty_call_us": 0.1},
}
_RUN: dict[str, Any] = {
    **{"date": "2026-01-31", "effort": "tiny", "seconds": 1.0, "load_before": 0.5},
    **{"other_cores": 0.0, "otherwise_idle": True, "peak_memory_gib": 0.1},
}
