"""The guide points at lines that are there, and the example's page runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_docs import run_blocks

import sgalloc

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "examples" / "engine"
GUIDE = (ROOT / "docs" / "engine-guide.md").read_text("utf-8")
STEPS = {
    int(number): text
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## )", GUIDE, re.MULTILINE | re.DOTALL)
}
POINTER = re.compile(r"`(\w+\.py)`\s+`([\w.]+)`")
MARK = re.compile(r"# guide: step (\d+)$", re.MULTILINE)


def lines_of(file: str, name: str) -> range:
    """The lines of a function, and the one above it."""
    body: list[ast.stmt] = ast.parse((ENGINE / file).read_text("utf-8")).body
    for part in name.split("."):
        (found,) = [node for node in body if getattr(node, "name", None) == part]
        assert isinstance(found, ast.ClassDef | ast.FunctionDef) and found.end_lineno
        body = found.body
    return range(found.lineno - 1, found.end_lineno + 1)


def marks() -> list[tuple[int, str, int]]:
    """Each mark in the source: step, file, line."""
    return [
        (int(found[1]), path.name, at)
        for path in sorted(ENGINE.glob("*.py"))
        for at, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if (found := MARK.search(line))
    ]


def test_there_are_ten_steps() -> None:
    assert list(STEPS) == list(range(1, 11))


@pytest.mark.parametrize("step", STEPS)
def test_each_step_points_at_its_lines(step: int) -> None:
    pointers = POINTER.findall(STEPS[step])
    assert pointers
    own = {(file, line) for number, file, line in marks() if number == step}
    for file, name in pointers:
        lines = lines_of(file, name)
        assert any(at == file and line in lines for at, line in own), f"{file} {name}: no mark"
    for file, line in own:
        found = any(at == file and line in lines_of(at, name) for at, name in pointers)
        assert found, f"{file}:{line} is marked, and not pointed at"


def test_our_names_in_the_table_are_there() -> None:
    table = GUIDE[GUIDE.index("## What it is called elsewhere") :]
    named = {
        name.split("(")[0].rpartition(".")[2]
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    known = {*dir(sgalloc.KVAllocator), *dir(sgalloc), *dir(sgalloc.plan.Plan)}
    for module in (sgalloc.sizing, sgalloc.admission, sgalloc.retraction, sgalloc.extents):
        known.update(dir(module))
    known.update(dir(sgalloc.speculative.eagle), dir(sgalloc.caching.PrefixCache))
    assert len(named) > 20
    assert named - known == {"after="} | (named - known) & {"fits"}


def test_the_page_of_the_example_runs() -> None:
    names = run_blocks(ENGINE / "README.md")
    engine = names["engine"]
    assert engine.scheduler.counts["finished"] == 6 and not int(engine.nans)  # type: ignore[attr-defined]


def test_the_example_uses_public_names_alone() -> None:
    sources = [path.read_text("utf-8") for path in ENGINE.glob("*.py")]
    assert not any("._core" in text or "._ledger" in text for text in sources)
    imported = {
        node.module
        for text in sources
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sgalloc")
    }
    assert imported <= {
        "sgalloc", "sgalloc.errors", "sgalloc.extents", "sgalloc.retraction",
        "sgalloc.speculative",
    }  # fmt: skip
