"""How a soak ends, its command, and what it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from soak_support import SMALL, keep_a_page, small_traces
from stand_in_cuda import stand_in

from profiling import soak, soak_traffic
from profiling.memory import memory
from profiling.soak import Soak
from sgalloc.replay.requests import Workload


@pytest.fixture(scope="module")
def traces() -> list[Workload]:
    return small_traces()


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
    monkeypatch.setattr(soak_traffic, "GENERATED", 100)
    out = tmp_path / "soak.json"
    assert soak.main(["--steps", "200", "--requests", "20", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "generated traffic" in printed and printed.rstrip().endswith("sound")
    assert json.loads(out.read_text(encoding="utf-8"))["traffic"]["generated"]


def test_the_command_ends_with_1_where_something_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGALLOC_TRACES", str(tmp_path))
    monkeypatch.setattr(soak_traffic, "GENERATED", 100)
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
    monkeypatch.setattr(soak_traffic, "GENERATED", 20)
    assert soak.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and name in lines[0]


# -- what it needs -------------------------------------------------------------------------


def test_it_needs_numpy_and_nvtx_alone(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('click', 'rich', 'torch', 'cupy', 'pytest', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from profiling import soak, soak_traffic\n"
        "soak_traffic.GENERATED = 20\n"
        "sys.exit(soak.main(['--steps', '50', '--requests', '10']))\n"
    )
    root = Path(soak.__file__).parents[1]
    here = os.environ | {"SGALLOC_TRACES": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [{}, {"window": 512}, {"disaggregated": True}])
def test_a_gpu_is_soaked_and_its_memory_noted(
    more: dict[str, Any], traces: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in():
        import cupy

        pool = SimpleNamespace(used_bytes=lambda: 512, total_bytes=lambda: 1024)
        monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool, raising=False)
        monkeypatch.setattr(cupy, "__version__", "14.0", raising=False)
        runtime = cupy.cuda.runtime
        monkeypatch.setattr(runtime, "memGetInfo", lambda: (30, 100), raising=False)
        data = soak.measure(
            replace(SMALL, steps=500, every=100, device="cuda", **more),
            traces,
            True,
            show=lambda _: None,
        )
    assert data["problem"] is None and data["steps"] == 500
    assert set(data["environment"]) >= {"gpu", "cupy", "cuda_driver"}
    last = data["records"][-1]
    assert last["staging"]["slots"] > 0
    held = last["memory"]
    assert (held["device"], held["device_pool"], held["device_taken"]) == (512, 1024, 70)


def test_a_cpu_has_no_device_memory() -> None:
    assert memory().device is None
    assert soak.gpu_environment("cpu") == {}
