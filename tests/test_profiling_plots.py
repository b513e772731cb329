"""Pictures and tables of the docs: they are those of the present results."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from trace_schema import check_schema

from profiling import plots, timeline_example

each_picture = pytest.mark.parametrize("name", plots.PICTURES_BY_NAME)


@each_picture
def test_a_picture_shows_the_present_results(name: str) -> None:
    path = plots.PICTURES / f"{name}.svg"
    assert plots.noted_hash(path) == plots.hash_of(plots.PICTURES_BY_NAME[name]()), (
        "run python -m profiling.plots --write"
    )
    text = path.read_text("utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert len(text) < 60_000 and not re.search(r"20\d\d-\d\d-\d\dT", text)
    used = [*(plots.ROOT / "docs").glob("*.md"), plots.ROOT / "README.md"]
    assert any(f"pictures/{name}.svg" in page.read_text("utf-8") for page in used)


def test_the_page_is_what_the_results_say() -> None:
    text = plots.PAGE.read_text("utf-8")
    assert plots.fill(text) == text, "run python -m profiling.plots --write"
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == {"compiled", "resources", "ncu"}


def test_other_numbers_have_another_hash() -> None:
    picture = plots.host_cost()
    other = copy.deepcopy(picture)
    other.panels[0].lines[0].y[0] += 1
    assert plots.hash_of(other) != plots.hash_of(picture)
    assert plots.hash_of(picture._replace(title="")) != plots.hash_of(picture)


def test_a_line_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="0 points for nobody"):
        plots._line("nobody", "red", [], "batch", "reserve", "nobody", "", {})


@each_picture
def test_a_picture_is_drawn_alike_each_time(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for turn in ("one", "two"):
        path = tmp_path / f"{turn}.svg"
        plots.draw(plots.PICTURES_BY_NAME[name](), path)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert plots.noted_hash(tmp_path / "one.svg") == plots.hash_of(plots.PICTURES_BY_NAME[name]())


def test_the_example_s_trace_is_a_trace(tmp_path: Path) -> None:
    check_schema(json.loads(plots.trace_file().read_text("utf-8")))
    path = tmp_path / "new" / "timeline.json"
    done = CliRunner().invoke(timeline_example.main, ["--out", str(path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text("utf-8"))
    check_schema(document)
    names = [e["name"] for e in document["traceEvents"] if e["ph"] == "X"]
    assert names.count("reserve") == names.count("commit") == timeline_example.STEPS
    assert names.count("forward") == timeline_example.STEPS + 1
    assert {"extend", "open_with_prefix", "release", "plan", "write"} <= set(names)
