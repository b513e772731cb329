"""The record of a long run, as the page shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from replay.cli_support import sgalloc

from profiling import fuzz_record


def test_the_numbers_of_a_run_are_put_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "fuzz.json"
    assert sgalloc("fuzz", "--calls", "1000", "--json", report).exit_code == 0
    data = json.loads(report.read_text())
    page = tmp_path / "fuzzing.md"
    page.write_text("# F\n\n<!-- record -->\nNot run yet.\n<!-- end -->\n\nmore\n")
    monkeypatch.setattr(fuzz_record, "PAGE", page)
    for _ in range(2):
        ran = CliRunner().invoke(fuzz_record.main, [str(report), "--write"])
        assert ran.exit_code == 0, ran.output
    text = page.read_text()
    assert f"{data['calls']:,} public calls in 2 worlds of seed 0" in text and "no failures" in text
    assert f"| fits | {data['done']['fits']:,} |" in text
    assert text.startswith("# F") and text.endswith("<!-- end -->\n\nmore\n")
    shown = CliRunner().invoke(fuzz_record.main, [str(report)]).output
    assert shown.strip() in text


def test_the_page_has_a_place_for_the_record() -> None:
    data = {"calls": 5, "worlds": 1, "seed": 0, "laws_every": 16, "failures": [{}], "seconds": 1.0,
            "workers": 1, "calls_per_second": 5, "evicted_pages": 0, "device": "cpu",
            "done": {"open": 3}, "refused": {"open: rows": 2, "wrong": 1},
            "machine": {"processor": "P", "cpus": 2, "python": "3", "numpy": "2"}}  # fmt: skip
    filled = fuzz_record.fill(fuzz_record.PAGE.read_text(encoding="utf-8"), data)
    assert "1 failure." in filled and "| open | 3 | rows 2 |" in filled
    assert "| wrong | 0 | all 1 |" in filled
    with pytest.raises(ValueError, match="no place"):
        fuzz_record.fill("nothing", data)
