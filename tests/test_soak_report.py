"""The pages say of soaks what the results say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from profiling import soak, soak_report, soak_verdict
from profiling.soak import Soak, document
from profiling.soak_traffic import Settings
from sgalloc.bench.machine import Watch
from sgalloc.replay.workload import generate

RESULTS = sorted((soak_report.HERE / "results").glob("*/soak*.json"))


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """A very short soak, with records made up from its last one."""
    traces = [generate("code", 60, seed=1), generate("code", 30, seed=2)]
    one = Soak(Settings(steps=400, num_pages=300, requests=30, every=50, chunk=1024), traces)
    watch = Watch()
    one.run()
    found = document(one, watch, False)
    last = [record for record in found["records"] if record["verbs"]][-1]
    found["records"] = [last | {"steps": at * 10, "whole": True} for at in range(41)]
    return soak_verdict.finish(found)


@pytest.mark.parametrize("page", soak_report.PAGES, ids=lambda page: page.name)
def test_the_pages_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- soak " in text
    assert soak_report.fill(text) == text


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_results_are_whole_and_sound(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["schema"], data["version"]) == (soak.SCHEMA, soak.VERSION)
    plain = soak_verdict.finish(
        {key: data[key] for key in data if key not in ("growth", "drift", "cpu_us")}
    )
    assert json.loads(json.dumps(plain)) == data
    assert data["verdict"] == {"sound": True, "causes": []}
    assert not data["traffic"]["generated"]


def test_every_result_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in soak_report.PAGES)
    for path in RESULTS:
        assert f"{path.parent.name}/{path.name} -->" in text


def test_tables_show_growth_and_drift(data: dict[str, Any]) -> None:
    text = soak_report.tables(data)
    assert f"{data['steps']:,} steps of at most 64 requests" in text
    assert "memory is flat, and nothing leaked" in text
    for name in data["drift"]:
        assert "| allocator, a step |" in text if name == "step" else f"| `{name}` |" in text
    for name in data["growth"]:
        assert f"| {soak_verdict.LIMITS[name].about} |" in text


def test_what_went_wrong_is_shown(data: dict[str, Any]) -> None:
    broken = soak_verdict.finish(data | {"problem": "page 7 is nobody's"})
    assert "*Verdict:* page 7 is nobody's" in soak_report.tables(broken)
    assert "It ended with: page 7 is nobody's." in soak_report.figures(broken)


def test_a_short_soak_compares_nothing(data: dict[str, Any]) -> None:
    short = soak_verdict.finish(data | {"records": data["records"][:2]})
    for text in (soak_report.tables(short), soak_report.figures(short)):
        assert text.endswith(soak_report.TOO_SHORT)


def test_a_gpu_is_named(data: dict[str, Any]) -> None:
    there = data["environment"] | {"gpu": "Some GPU", "cupy": "14.0"}
    assert soak_report.figures(data | {"environment": there}).startswith("Some GPU: ")
    assert soak_report.tables(data | {"environment": there}).startswith("Some GPU, CuPy 14.0; ")


def test_blocks_are_filled_and_missing_results_say_so(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_report, "HERE", tmp_path)
    soak.write(data, tmp_path / "results" / "there" / "soak.json")
    blocks = "".join(
        f"before\n<!-- soak {kind}: {name}/soak.json -->\nold\n<!-- end of soak -->\nafter\n"
        for kind in ("tables", "figures")
        for name in ("there", "nowhere")
    )
    filled = soak_report.fill(blocks)
    assert "old" not in filled and filled.count("Not run yet.") == 2
    assert soak_report.tables(data) in filled and soak_report.figures(data) in filled
    assert soak_report.fill(filled) == filled


def test_the_command_prints_the_pages() -> None:
    done = CliRunner().invoke(soak_report.main, [])
    assert done.exit_code == 0 and "<!-- soak figures" in done.output


# -- what the records say ------------------------------------------------------------------


def made_up(growth: float, drift: float, name: str = "blocks", count: int = 40) -> dict[str, Any]:
    """Records of a soak in which one kind of memory grows a step, and a verb slows down."""
    records = []
    for at in range(count):
        held = dict.fromkeys(soak_verdict.LIMITS, 10_000_000)
        held[name] += round(growth * at * 100_000)
        slow = 10_000 * (1 + drift * at / count)
        records.append(
            {
                "steps": at * 100_000,
                "whole": True,
                "memory": held,
                "step_cpu_us": 200 + at,
                "verbs": {"plan": [100, slow, 3 * slow]},
            }
        )
    return {"steps": (count - 1) * 100_000, "problem": None, "records": records}


@pytest.mark.parametrize("name", soak_verdict.LIMITS)
def test_growth_past_its_limit_is_a_cause(name: str) -> None:
    assert soak_verdict.finish(made_up(0.0, 0.0, name))["verdict"]["sound"]
    limit = soak_verdict.LIMITS[name]
    span = 3_200_000
    growth = 1.05 * max(limit.least, limit.per_million * span / 1e6, span / 100_000) / span
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
    assert data["cpu_us"] == [205.0, 238.0]


def test_only_whole_rounds_are_compared() -> None:
    data = made_up(0.0, 0.0)
    data["records"][-1]["whole"] = False
    data["records"][-1]["verbs"] = {"plan": [1, 9e9, 9e9]}
    assert soak_verdict.finish(data)["drift"]["plan"]["ratio"] == 1.0


def test_a_problem_is_a_cause_and_memory_unknown_is_none() -> None:
    data = made_up(0.0, 0.0)
    data["problem"] = "page 3 is owned twice"
    for one in data["records"]:
        one["memory"] |= {"native": None, "device": None, "device_taken": None}
    found = soak_verdict.finish(data)
    assert found["verdict"] == {"sound": False, "causes": ["page 3 is owned twice"]}
    assert set(found["growth"]) == {"blocks", "resident"}


def test_too_few_records_say_nothing() -> None:
    data = copy.deepcopy(made_up(100.0, 0.0, count=3))
    found = soak_verdict.finish(data)
    assert (
        found["growth"] == found["drift"] == {}
        and found["cpu_us"] == []
        and found["verdict"]["sound"]
    )
