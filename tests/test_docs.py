"""The code in README and docs runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_blocks(path: Path) -> dict[str, object]:
    text = path.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = BLOCK.findall(text)
    assert blocks, f"{path.name} shows no code"
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
    return names


def test_the_example_of_the_readme_runs_and_says_what_it_should(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_blocks(ROOT / "README.md")
    assert names["match"].length == 960  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    assert printed.startswith("Plan(1 requests, 0 new pages, fits) [1003] [")
    source = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 25


def test_the_guide_runs() -> None:
    names = run_blocks(ROOT / "docs" / "guide.md")
    assert len(names["gone"].victims) >= 1, "the guide shows a retraction"  # type: ignore[attr-defined]


def test_the_page_on_speculation_runs() -> None:
    names = run_blocks(ROOT / "docs" / "speculative.md")
    assert names["src"].size >= 2, "the tree has something to move"  # type: ignore[attr-defined]
    assert names["running"].size < 8, "the pool was too small for all"  # type: ignore[attr-defined]


def test_the_page_on_disaggregation_runs() -> None:
    names = run_blocks(ROOT / "docs" / "disaggregation.md")
    for side in ("prefill", "decode", "node", "host"):
        names[side].check(device=True)  # type: ignore[attr-defined]
    assert names["decode"].stats().rows.open == 0  # type: ignore[attr-defined]


def test_the_page_on_sparse_requests_runs() -> None:
    names = run_blocks(ROOT / "docs" / "sparse.md")
    assert names["plan"].need["device"] == 21, "the page shows a request turn dense"  # type: ignore[attr-defined]


def test_the_page_on_fuzzing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(ROOT / "docs" / "fuzzing.md")
    assert names["failure"] is None and capsys.readouterr().out.strip()


def test_the_page_on_the_window_runs() -> None:
    names = run_blocks(ROOT / "docs" / "window.md")
    assert names["match"].length == 1600  # type: ignore[attr-defined]


@pytest.mark.not_in_debug_mode("the page spoils what debug mode would find")
def test_the_page_on_trust_runs() -> None:
    names = run_blocks(ROOT / "docs" / "trust.md")
    assert names["refused"] and names["caught"], "the page shows refusals"


def test_the_page_on_trust_names_every_section() -> None:
    from sgalloc.trust.sections import layout

    text = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    sections = layout(True, True, True)
    assert [name for name in sections if f"`{name}`" not in text] == []


@pytest.mark.not_in_debug_mode("the page spoils what debug mode would find")
def test_the_page_on_faults_runs_and_names_what_there_is() -> None:
    from sgalloc.trust.old_behaviour import BEHAVIOURS

    names = run_blocks(ROOT / "docs" / "faults.md")
    assert names["failed"] and names["found"], "the page shows a failure, and what finds a fault"
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert [name for name in BEHAVIOURS if f"| `{name}` |" not in text] == []


def test_the_page_on_the_journal_runs() -> None:
    names = run_blocks(ROOT / "docs" / "journal.md")
    assert names["run"].digests == 1 and names["run"].refused == 1  # type: ignore[attr-defined]
    assert names["before"].records == 10  # type: ignore[attr-defined]


def test_the_page_on_debug_mode_runs() -> None:
    names = run_blocks(ROOT / "docs" / "debugging.md")
    assert names["said"] and names["told"], "the page shows what fails"


def test_the_page_on_profiling_runs() -> None:
    names = run_blocks(ROOT / "docs" / "profiling.md")
    assert names["names"].count("forward") == 3, "the page records three steps"  # type: ignore[attr-defined]
    assert len(names["known"]) == 3  # type: ignore[arg-type]
    if "torch" in names:
        assert "sgalloc.reserve" in names["seen"]  # type: ignore[operator]
    if "registry" in names:
        assert 'sgalloc_pages{group="full",model="a",state="free"} 4096.0' in names["text"]  # type: ignore[operator]


def test_every_picture_that_the_pages_show_is_there() -> None:
    shown = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / name).exists(), f"{page.name} shows {name}, which does not exist"
            shown += 1
    assert shown >= 5


def test_every_file_that_the_pages_name_is_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:docs|profiling|tests|cuda|sgalloc)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("replay", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_table_of_the_readme_is_what_the_results_say() -> None:
    from profiling import headline

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert headline.filled(text) == text, "run python -m profiling.headline --write"
    assert text.count("×") >= 8
