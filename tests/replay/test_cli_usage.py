"""What ``sgalloc replay`` refuses: one clear line, exit status 2."""

from __future__ import annotations

import re

import pytest
from click.testing import Result
from replay.cli_support import SMALL, azure, figure, module, sgalloc

from sgalloc.replay.engine import Engine

# Bad usage


def line_of(result: Result) -> str:
    """The one line that says what was wrong."""
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    if lines[-1].startswith("Error: "):
        # The shape of all command lines made with click: usage, where to find help, the error.
        assert len(lines) in (1, 4)
        return lines[-1]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("sgalloc replay: ")
    return lines[0]


@pytest.mark.parametrize(
    ("args", "fragments"),
    [
        ("--accept 2.0", ["--accept", "--spec"]),
        ("--steps 3", ["--steps", "--spec"]),
        ("--draft-tokens 3", ["--draft-tokens", "--spec"]),
        ("--share-partial", ["--share-partial", "--cache-only"]),
        ("--overlap", ["--overlap", "--spec"]),
        ("--overlap --spec eagle --topk 2", ["--overlap", "topk=2"]),
        ("--window-pages 9", ["--window-pages", "add --window"]),
        ("--window-every 9", ["--window-every", "add --window"]),
        ("--prefill-pages 9", ["--prefill-pages", "add --disaggregated"]),
        ("--writers 3", ["--writers", "add --disaggregated"]),
        ("--window 0", ["--window ", "0"]),
        ("--window -1", ["--window ", "-1"]),
        ("--window 64 --window-pages 0", ["--window-pages", "0"]),
        ("--window 64 --window-every 0", ["--window-every", "0"]),
        ("--window 64 --window-pages 3", ["--window-pages", "3", "at least"]),
        ("--window 64 --window-pages 3000000000", ["--window-pages", "3000000000"]),
        ("--disaggregated --prefill-pages 0", ["--prefill-pages", "0"]),
        ("--disaggregated --prefill-pages -4", ["--prefill-pages", "-4"]),
        ("--disaggregated --writers 0", ["--writers", "0"]),
        ("--disaggregated --admit chunk", ["--admit", "'chunk'", "'prompt'"]),
        ("--device-buffer 64", ["--device-buffer", "add --sparse"]),
        ("--draft-scratch 64", ["--draft-scratch", "add --sparse"]),
        ("--sparse 0.5", ["--sparse", "0.5"]),
        ("--sparse nan", ["--sparse", "nan"]),
        ("--sparse 4 --device-buffer 0", ["--device-buffer", "0"]),
        ("--sparse 4 --draft-scratch -1", ["--draft-scratch", "-1"]),
        ("--sparse 4 --prefix-cache", ["--prefix-cache", "sparse"]),
        ("--sparse 4 --window 64", ["--window", "sparse"]),
        ("--sparse 4 --disaggregated", ["--disaggregated", "sparse"]),
        ("--sparse 4 --spec eagle --topk 2", ["--topk", "2", "sparse"]),
        ("--cache-only --sparse 4", ["--cache-only", "--sparse"]),
        ("--cache-only --window 64", ["--cache-only", "--window"]),
        ("--cache-only --disaggregated", ["--cache-only", "--disaggregated"]),
        ("--cache-only --spec eagle", ["--cache-only", "--spec"]),
        ("--page-size 0", ["--page-size", "0"]),
        ("--page-size -16", ["--page-size", "-16"]),
        ("--page-size 1.5", ["--page-size", "1.5"]),
        ("--pages 0", ["pages", "0"]),
        ("--pages -1", ["pages", "-1"]),
        ("--pages 3000000000", ["pages", "3000000000"]),
        ("--pages many", ["--pages", "many"]),
        ("--pool-gib nan", ["--pool-gib", "nan"]),
        ("--pool-gib 0", ["--pool-gib", "0"]),
        ("--pool-gib -1", ["--pool-gib", "-1"]),
        ("--pool-gib inf", ["--pool-gib", "inf"]),
        ("--bytes-per-token 0", ["--bytes-per-token", "0"]),
        ("--limit 0", ["--limit", "0"]),
        ("--limit -3", ["--limit", "-3"]),
        ("--speed nan", ["speed", "nan"]),
        ("--speed 0", ["speed", "0"]),
        ("--speed -2", ["speed", "-2"]),
        ("--speed inf", ["speed", "inf"]),
        ("--running 0", ["running", "0"]),
        ("--chunk 0", ["chunk", "0"]),
        ("--headroom -1", ["headroom", "-1"]),
        ("--abort-rate 1.5", ["--abort-rate", "1.5"]),
        ("--abort-rate nan", ["--abort-rate", "nan"]),
        ("--check -1", ["check", "-1"]),
        ("--seed -1", ["seed", "-1"]),
        ("--device abacus", ["'abacus'", "'cpu'"]),
        ("--profile poetry", ["--profile", "poetry", "chat"]),
        ("--admit all", ["--admit", "all", "chunk"]),
        ("--spec magic", ["--spec", "magic", "eagle"]),
        ("--spec eagle --steps 0", ["steps", "0"]),
        ("--spec eagle --topk 0", ["topk", "0"]),
        ("--spec eagle --draft-tokens 0", ["--draft-tokens", "0"]),
        ("--spec dflash --draft-tokens -1", ["--draft-tokens", "-1"]),
        ("--spec eagle --accept 0.5", ["--accept", "0.5", "from 1 to 4"]),
        ("--spec eagle --accept 4.5", ["--accept", "4.5", "from 1 to 4"]),
        ("--spec dflash --accept nan", ["--accept", "nan", "from 1 to 16"]),
        ("--spec dflash --accept well", ["--accept", "well", "dflash-16-chat"]),
        ("--spec eagle --steps 2 --accept eagle3-60-high", ["3.71", "from 1 to 3"]),
        ("--cache-only --profile code", ["--cache-only", "block ids"]),
        ("--cache-only --pages 3", ["blocks", "3 pages", "at least"]),
        ("--cache-only --pages 0", ["0"]),
        ("--cache-only --device abacus", ["'abacus'", "'cpu'"]),
        ("--bogus", ["--bogus"]),
        ("--limit", ["--limit"]),
        ("trace.csv", ["trace.csv"]),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_status_two(args, fragments):
    line = line_of(sgalloc("replay", "--limit", "8", *args.split()))
    for fragment in fragments:
        assert fragment in line


def test_a_block_of_one_token_is_run_or_refused_by_the_number_given():
    result = sgalloc("replay", *SMALL, "--spec", "dflash", "--draft-tokens", "1")
    if result.exit_code == 0:
        assert float(figure(result, "per speculative step")) == 1.0
    else:
        assert re.search(r"draft.tokens\D* 1\b", line_of(result))


def test_a_trace_that_cannot_be_read_is_one_line(tmp_path):
    missing = tmp_path / "no such file.csv"
    line = line_of(sgalloc("replay", "--trace", missing))
    assert str(missing) in line and "No such file" in line
    line = line_of(sgalloc("replay", "--trace", tmp_path))
    assert str(tmp_path) in line and "directory" in line.lower()
    for name, content in (("empty", b""), ("noise", b"\x00\x01\x02"), ("prose", b"Dear all,\n")):
        path = tmp_path / name
        path.write_bytes(content)
        line = line_of(sgalloc("replay", "--trace", path))
        assert str(path) in line and "Mooncake" in line and "Azure" in line


def test_a_trace_without_a_usable_line_is_bad_usage(tmp_path):
    line = line_of(sgalloc("replay", "--trace", azure(tmp_path, ["x,y,z", "1,2"])))
    assert "code.csv" in line and "line 2" in line and "2 skipped" in line


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "run", lambda *args: pytest.fail("the replay began"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        line = line_of(sgalloc("replay", *SMALL, "--report", folder))
        assert str(folder) in line
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    line = line_of(sgalloc("replay", *SMALL, "--report", tmp_path / "taken"))
    assert "report.json" in line


def test_a_pool_that_memory_does_not_hold_is_one_line(monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError("Unable to allocate 497. GiB for an array with shape (1048577, 126656)")

    monkeypatch.setattr(module, "Engine", full)
    assert "497. GiB" in line_of(sgalloc("replay", *SMALL))


def test_an_unknown_command_is_bad_usage():
    result = sgalloc("reply")
    assert result.exit_code == 2 and "reply" in result.stderr.splitlines()[-1]
