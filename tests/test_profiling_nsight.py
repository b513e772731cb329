"""What runs under Nsight, what the scripts ask of it, and the tables made of its answer."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvtx
import pytest
from click.testing import CliRunner
from stand_in_cuda import Cuda, stand_in

from profiling import compiled, ncu_table
from profiling.gpu import profiled, resources
from sgalloc.device.kernels import read_kernels

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [ROOT / "profiling" / name for name in ("ncu.sh", "nsys.sh")]


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


class Domain:
    """Tells which ranges are open."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, message: str) -> None:
        self.open.append(message)

    def pop_range(self) -> None:
        self.open.pop()


# -- the workload ----------------------------------------------------------------------------------


def test_each_step_launches_its_kernel_once_inside_the_range(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = profiled.steps  # allocators are made before somebody listens
    monkeypatch.setattr(profiled, "LARGE", 512)
    domain, inside = Domain(), []
    ready = made("cuda")
    monkeypatch.setattr(profiled, "steps", lambda device: ready)
    monkeypatch.setattr(nvtx, "get_domain", lambda name: domain)

    def wait() -> None:
        if domain.open:
            assert domain.open == [profiled.RANGE]
            inside.append(list(cuda.launches))
        cuda.launches.clear()

    profiled.run(2, "cuda", wait)
    assert inside == [[case.kernel] for case in profiled.CASES for _ in range(2)]
    assert domain.open == []


def test_every_kernel_is_profiled() -> None:
    assert {case.kernel for case in profiled.CASES} == set(resources.kernels())
    listed = CliRunner().invoke(profiled.main, ["--list"])
    assert listed.exit_code == 0 and listed.output.count("\n") == len(profiled.CASES)


# -- the scripts -----------------------------------------------------------------------------------


def run_script(script: Path, tmp_path: Path, *arguments: str) -> list[list[str]]:
    """Run a script with a profiler that writes down how it was called."""
    calls = tmp_path / "calls"
    fake = tmp_path / "fake"
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" >>{calls}; echo >>{calls}\n')
    fake.chmod(0o755)
    env = {**os.environ, "NCU": str(fake), "NSYS": str(fake), "PYTHON": "python-of-mine"}
    command = ["bash", str(script), *arguments]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.rstrip("\0").split("\0") for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_without_arguments_says_how_it_is_used(script: Path) -> None:
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"profiling/{script.name}" in done.stderr
    assert "PYTHON" in done.stderr and os.access(script, os.X_OK)


def test_ncu_is_asked_for_what_the_table_reads(tmp_path: Path) -> None:
    (call,) = run_script(SCRIPTS[0], tmp_path, "table", "out.csv")
    metrics = call[call.index("--metrics") + 1].split(",")
    assert set(ncu_table.METRICS.values()) == set(metrics)
    assert call[call.index("--clock-control") + 1] == "none", "the clocks are left alone"
    assert call[call.index("--nvtx-include") + 1] == f"sgalloc@{profiled.RANGE}/"
    assert call[call.index("--log-file") + 1] == str(tmp_path / "out.csv")
    assert {"--csv", "--nvtx"} <= set(call)
    assert call[-5:] == ["python-of-mine", "-m", "profiling.gpu.profiled", "--repeat", "3"]
    pattern = call[call.index("--kernel-name") + 1].removeprefix("regex:")
    for kernel in resources.kernels():
        assert re.search(pattern, kernel), f"{kernel} is left out"
    assert not re.search(pattern, "cupy_copy")


def test_a_report_has_sections_and_passes_on_what_follows(tmp_path: Path) -> None:
    (call,) = run_script(SCRIPTS[0], tmp_path, "report", "out", "--launch-count", "1")
    sections = [one.split("=")[1] for one in call if one.startswith("--section=")]
    assert {"Occupancy", "MemoryWorkloadAnalysis", "LaunchStats"} <= set(sections)
    assert call[call.index("--launch-count") + 1] == "1"
    assert call[call.index("--export") + 1] == str(tmp_path / "out")


def test_nsys_sees_the_domain_alone_and_sums_it_up(tmp_path: Path) -> None:
    profile, stats = run_script(SCRIPTS[1], tmp_path, "out")
    assert profile[0] == "profile" and stats[0] == "stats"
    assert profile[profile.index("--nvtx-domain-include") + 1] == "sgalloc"
    assert profile[profile.index("--nvtx-capture") + 1] == f"{profiled.RANGE}@sgalloc"
    assert stats[-1] == str(tmp_path / "out.nsys-rep")
    (tmp_path / "calls").unlink()
    profile, _ = run_script(SCRIPTS[1], tmp_path, "out", "python", "serve.py")
    assert profile[-2:] == ["python", "serve.py"] and "--nvtx-capture" not in profile


# -- the resource table ----------------------------------------------------------------------------


def printed(names: list[str], unit: str = "ns", **changed: Any) -> str:
    """What ncu prints of launches of ``names``."""
    columns = ["ID", "Kernel Name", "Block Size", *ncu_table.METRICS.values()]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    units = {ncu_table.METRICS["ns"]: unit}
    writer.writerow(["", "", "", *(units.get(name, "") for name in columns[3:])])
    for n, name in enumerate(names):
        values = {key: 10 for key in ncu_table.METRICS} | {"ns": f"{1000 * (n % 3 + 1):,}"}
        values |= changed
        writer.writerow([n, f"{name}(int *, long)", "(256, 1, 1)", *values.values()])
    return f"==PROF== Connected to process 7\n==PROF== Profiling\n{out.getvalue()}"


NAMES = [case.kernel for case in profiled.CASES for _ in range(3)]


def test_a_row_is_the_median_of_the_launches_of_a_step() -> None:
    rows = ncu_table.table(printed(NAMES))
    assert [row["kernel"] for row in rows] == [case.kernel for case in profiled.CASES]
    assert all(row["ns"] == 2000 and row["launches"] == 3 for row in rows)
    text = ncu_table.markdown({"gpu": "H200", "date": "2026-01-01", "rows": rows})
    assert text.count("\n") == 3 + len(rows)
    large = next(row for row in rows if row["step"] == "8 pages each")
    assert f"| {large['written'] / 2000 / 1000:.2f} |" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== no permission", "no table of ncu"),
        (printed(NAMES[:-1]), "all kernels"),
        (printed(NAMES[::-1]), "in order"),
        (printed([]), "all kernels"),
        (printed(NAMES, unit="us"), "--print-units base"),
        (printed(NAMES).replace("dram__bytes_read.sum", "other"), "lacks dram__bytes_read"),
    ],
)
def test_a_table_of_something_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "kernels.csv"
    source.write_text(text)
    refused = CliRunner().invoke(ncu_table.main, [str(source), "--gpu", "H200"])
    assert refused.exit_code == 1 and words in refused.output


def test_the_command_writes_what_it_reads_back(tmp_path: Path) -> None:
    source, out = tmp_path / "kernels.csv", tmp_path / "ncu.json"
    source.write_text(printed(NAMES))
    done = CliRunner().invoke(ncu_table.main, [str(source), "--gpu", "H200", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert ncu_table.read(out)["rows"] == ncu_table.table(printed(NAMES))
    out.write_text("{}")
    with pytest.raises(ValueError, match="no sgalloc-ncu file"):
        ncu_table.read(out)


# -- what nvcc says --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "registers", "shared", "share"),
    [
        (90, 32, 0, 1.0),  # 65,536 registers over 2,048 threads
        (90, 33, 0, 0.75),  # 40 registers a thread are given
        (90, 64, 0, 0.5),
        (90, 255, 0, 0.125),
        (90, 32, 56 << 10, 0.5),  # four of 57 KiB are 228
        (120, 32, 0, 1.0),
        (120, 32, 49 << 10, 1 / 3),
    ],
)
def test_occupancy_is_bounded_by_registers_and_by_shared_memory(
    sm: int, registers: int, shared: int, share: float
) -> None:
    assert compiled.occupancy(compiled.CHIPS[sm], registers, shared) == pytest.approx(share)


def test_the_results_know_every_kernel_and_none_spills() -> None:
    data = compiled.read()
    assert set(data["kernels"]) == set(resources.kernels())
    for name, found in data["kernels"].items():
        assert set(found) == {str(sm) for sm in compiled.CHIPS}, name
        assert all(one["spilled_bytes"] == 0 for one in found.values()), name


def test_the_results_are_what_nvcc_says_now() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH to compile the kernels with")
    kept = compiled.read()
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if f"release {kept['nvcc']}," not in said:
        pytest.skip(f"the results are of nvcc {kept['nvcc']}")
    assert compiled.compile_all() == kept, "run python -m profiling.compiled --write"


def test_a_gpu_s_results_agree_with_the_rule_for_occupancy() -> None:
    """Where a GPU was asked: what CUDA says of its blocks is what the rule says."""
    chips = {"9.0": 90, "10.0": 100, "12.0": 120}
    for path in (ROOT / "profiling" / "results").glob("*/resources.json"):
        data = json.loads(path.read_text("utf-8"))
        assert data["schema"] == resources.SCHEMA
        assert {row["kernel"] for row in data["rows"]} <= set(resources.kernels())
        chip = compiled.CHIPS[chips[data["compute_capability"]]]
        for row in data["rows"]:
            share = compiled.occupancy(chip, row["registers"], row["shared_bytes"])
            assert row["occupancy"] == pytest.approx(share, abs=1e-3), row["kernel"]
            assert row["local_bytes"] == 0, f"{row['kernel']} spills"
        assert resources.markdown(data).count("\n") == 3 + len(data["rows"])


def test_kernels_are_found_in_the_sources() -> None:
    assert len(resources.kernels()) == read_kernels().count('extern "C" __global__')
