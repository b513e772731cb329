"""``sgalloc replay`` as its user meets it: options, output, exit statuses, Ctrl-C."""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sgalloc import __version__
from sgalloc.commands import cli
from sgalloc.pages import PagePool
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.requests import Workload
from sgalloc.sizing import SpecConfig

# The package re-exports the command under the module's own name.
module = importlib.import_module("sgalloc.commands.replay")

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--limit", "12", "--device", "cpu")
OPTIONS = (
    *("trace", "profile", "limit", "speed", "page-size", "pages", "pool-gib", "bytes-per-token"),
    *("running", "chunk", "admit", "headroom", "spec", "steps", "topk", "draft-tokens", "accept"),
    *("prefix-cache", "no-prefix-cache", "abort-rate", "seed", "device", "check", "cache-only"),
    *("share-partial", "report"),
)
SOUND = "sound: no law was broken, and every page and row came back"


@pytest.fixture(autouse=True)
def _restored_ctrl_c() -> Iterator[None]:
    """Whatever a command does to Ctrl-C, the rest of the tests can be interrupted."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def sgalloc(*args: object) -> Result:
    """Run the command line in this process, with stdout and stderr apart."""
    apart = "mix_stderr" in inspect.signature(CliRunner).parameters  # click before 8.2
    runner = CliRunner(mix_stderr=False) if apart else CliRunner()
    result = runner.invoke(cli, [str(arg) for arg in args], prog_name="sgalloc")
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def replayed(*args: object) -> Result:
    """A replay that has to go well."""
    result = sgalloc("replay", *args)
    assert result.exit_code == 0, result.stderr
    return result


def figure(result: Result, label: str) -> str:
    """What the table says behind a label."""
    found = re.search(rf"(?:^| ){re.escape(label)} +(\S+)", result.stdout, re.MULTILINE)
    assert found is not None, f"{label!r} is not in the table:\n{result.stdout}"
    return found[1]


def text(output: str) -> str:
    """The output without its line breaks: where it is folded depends on the width."""
    return " ".join(output.split())


def mooncake(folder: Path, prompts: list[tuple[int, list[int]]], name: str = "talk.jsonl") -> Path:
    """A trace of prompts: tokens and block ids, a second apart, 5 tokens put out each."""
    path = folder / name
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": blocks,
        }
        for at, (tokens, blocks) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def azure(folder: Path, rows: list[str]) -> Path:
    path = folder / "code.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# A run


def test_without_options_a_thousand_chat_requests_end_well():
    result = replayed()
    assert result.stdout.startswith("chat x 1000, seed 0: 7,680 pages of 64 tokens on ")
    assert (figure(result, "total"), figure(result, "finished")) == ("1,000", "1,000")
    for label in ("aborted", "refused"):
        assert figure(result, label) == "0"
    assert text(result.stdout).endswith(SOUND)
    for label in ("steps", "prefilled", "decoded", "peak running", "found there"):
        assert int(figure(result, label).replace(",", "")) > 0
    for verb in ("plan", "apply", "release", "match", "publish"):
        assert re.search(rf"^{verb} +[\d,]+ ", result.stdout, re.MULTILINE)
    assert "1000/1000" in result.stderr


def test_the_same_seed_prints_the_same_figures():
    def counts(seed: int) -> list[str]:
        result = replayed(*SMALL, "--seed", seed, "--abort-rate", 0.3, "--spec", "dflash")
        return [figure(result, x) for x in ("steps", "prefilled", "decoded", "aborted", "virtual")]

    assert counts(3) == counts(3)
    assert counts(3) != counts(4)


def test_requests_that_cannot_fit_are_refused_and_counted():
    result = replayed("--limit", 20, "--page-size", 64, "--pages", 50)
    refused = int(figure(result, "refused"))
    assert 0 < refused < 20
    assert int(figure(result, "finished")) == 20 - refused


def test_version():
    assert sgalloc("--version").stdout.split() == ["sgalloc,", "version", __version__]


def test_help_names_every_option():
    shown = sgalloc("replay", "--help")
    assert shown.exit_code == 0
    assert sgalloc("replay", "-h").stdout == shown.stdout
    for option in OPTIONS:
        assert re.search(rf"--{option}\b", shown.stdout), option
    assert "exit status is 1" in text(shown.stdout) and "2 for bad usage" in text(shown.stdout)
    assert "replay" in sgalloc("--help").stdout


# What options do


class Made(NamedTuple):
    """What the command made of its arguments."""

    workload: Workload
    options: Options
    config: dict[str, Any]


@pytest.fixture
def made(monkeypatch) -> list[Made]:
    """Filled with what each run of the command is made of."""
    seen: list[Made] = []

    class Kept(Engine):
        def __init__(self, workload, options, config=None):
            seen.append(Made(workload, options, config))
            super().__init__(workload, options, config)

    monkeypatch.setattr(module, "Engine", Kept)
    return seen


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ((), {"num_pages": 7_680, "page_size": 64, "running_limit": 256, "chunk": 8_192}),
        ((), {"admit": "prompt", "headroom": 32, "prefix_cache": True, "speed": 1.0}),
        ((), {"abort_rate": 0.0, "seed": 0, "check_every": 0, "spec": SpecConfig()}),
        (("--page-size", 16), {"page_size": 16, "num_pages": 30_720}),
        (("--pages", 1_777), {"num_pages": 1_777, "page_size": 64}),
        (("--pool-gib", 20), {"num_pages": 2_560}),
        (("--bytes-per-token", 65_536), {"num_pages": 15_360}),
        (("--pages", 5_000, "--pool-gib", 1), {"num_pages": 5_000}),
        (("--running", 7), {"running_limit": 7}),
        (("--chunk", 1_000), {"chunk": 1_000}),
        (("--admit", "chunk"), {"admit": "chunk"}),
        (("--headroom", 5), {"headroom": 5}),
        (("--no-prefix-cache",), {"prefix_cache": False}),
        (("--speed", 2.5), {"speed": 2.5}),
        (("--abort-rate", 0.5), {"abort_rate": 0.5}),
        (("--seed", 9), {"seed": 9}),
        (("--check", 3), {"check_every": 3}),
        (("--device", "cpu"), {"device": "cpu"}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_options_reach_the_engine(made, args, wanted):
    replayed(*SMALL, *args)
    (one,) = made
    assert {name: getattr(one.options, name) for name in wanted} == wanted
    assert len(one.workload.requests) == 12


@pytest.mark.parametrize(
    ("args", "spec", "drafted", "mean"),
    [
        ("--spec eagle", SpecConfig("eagle", 3, 1, 4), 3, 2.65),
        ("--spec dflash", SpecConfig("dflash", draft_tokens=16), 15, 4.24),
        ("--spec ngram", SpecConfig("ngram", 3, 1, 4), 3, 2.65),
        ("--spec uno", SpecConfig("uno", draft_tokens=4), 4, 2.65),
        (
            "--spec eagle --steps 5 --topk 8 --draft-tokens 64 --accept 3.03",
            SpecConfig("eagle", 5, 8, 64),
            5,
            3.03,
        ),
        ("--spec eagle --steps 1", SpecConfig("eagle", 1, 1, 4), 1, 2.0),
        (
            "--spec eagle --steps 6 --draft-tokens 7 --accept eagle3-60-high",
            SpecConfig("eagle", 6, 1, 7),
            6,
            3.71,
        ),
        ("--spec dflash --accept dflash-16-maths", SpecConfig("dflash", draft_tokens=16), 15, 7.87),
        ("--spec dflash --accept 1", SpecConfig("dflash", draft_tokens=16), 15, 1.0),
    ],
)
def test_speculation_is_set_up_as_asked(made, args, spec, drafted, mean):
    result = replayed(*SMALL, *args.split())
    (one,) = made
    assert one.options.spec == spec
    assert one.options.acceptance.draft_tokens == drafted
    assert one.options.acceptance.mean == pytest.approx(mean, abs=1e-6)
    kept = float(figure(result, "per speculative step"))
    assert 1.0 <= kept <= drafted + 1
    assert kept == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize("args", ["--spec eagle --steps 6", "--spec eagle --steps 2 --topk 4"])
def test_what_is_not_asked_for_follows_from_what_is(args):
    kept = float(figure(replayed(*SMALL, *args.split()), "per speculative step"))
    assert kept == pytest.approx(2.65, rel=0.15)


def test_without_speculation_there_is_no_acceptance_model(made):
    result = replayed(*SMALL)
    assert made[0].options.acceptance is None
    assert "per speculative step" not in result.stdout


def test_profile_and_seed_choose_the_workload(made):
    replayed(*SMALL, "--profile", "code", "--seed", 5)
    replayed(*SMALL, "--seed", 6)
    first, second = made
    assert first.workload.name == "code x 12, seed 5"
    assert all(request.blocks is None for request in first.workload.requests)
    assert second.workload.name == "chat x 12, seed 6"


def test_options_have_their_effect():
    busy = ("--limit", 60, "--device", "cpu", "--speed", 50)
    free = replayed(*busy)
    limited = replayed(*busy, "--running", 3)
    assert int(figure(free, "peak running")) > 3 == int(figure(limited, "peak running"))
    assert figure(replayed(*busy, "--no-prefix-cache"), "found there") == "0"
    assert figure(replayed(*busy, "--abort-rate", 1), "aborted") == "60"
    pressed = replayed(*busy, "--pages", 3_000, "--admit", "chunk", "--headroom", 0)
    assert int(figure(pressed, "retractions")) > 0
    assert figure(pressed, "finished") == "60"
    slow = replayed(*busy[:4], "--speed", 0.1)
    assert float(figure(slow, "virtual")) > 2 * float(figure(free, "virtual"))


# Traces


def test_a_mooncake_trace_is_replayed_with_its_prefixes(tmp_path):
    path = mooncake(tmp_path, [(1100, [1, 2, 3]), (1300, [1, 2, 4]), (600, [1, 9])])
    result = replayed("--trace", path, "--device", "cpu")
    assert result.stdout.startswith("talk.jsonl: ")
    assert (figure(result, "finished"), figure(result, "prompts")) == ("3", "3,000")
    assert (figure(result, "found there"), figure(result, "decoded")) == ("1,536", "15")
    packed = tmp_path / "talk.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    again = replayed("--trace", packed, "--device", "cpu", "--limit", 2)
    assert (figure(again, "finished"), figure(again, "found there")) == ("2", "1,024")


def test_an_azure_trace_is_replayed_and_bad_lines_are_reported(tmp_path):
    rows = [f"2023-11-16 18:17:0{at}.0000000,{100 + at},3" for at in range(6)]
    rows[2] = "2023-11-16 18:17:02.0000000,many,3"
    rows[4] = "yesterday,100,3"
    path = azure(tmp_path, rows)
    result = replayed("--trace", path)
    assert (figure(result, "finished"), figure(result, "prompts")) == ("4", "409")
    errors = result.stderr.splitlines()
    assert errors[0].startswith("skipped: line 4: ContextTokens is 'many'")
    assert errors[1].startswith("skipped: line 6: TIMESTAMP is 'yesterday'")
    assert errors[2] == f"skipped 2 lines of {path}"
    assert "skipped" not in result.stdout


def test_a_single_skipped_line_is_one_line(tmp_path):
    path = azure(tmp_path, ["2023-11-16 18:17:03.0000000,7,3", "nonsense"])
    result = replayed("--trace", path)
    assert re.search(r"^skipped 1 lines? of ", result.stderr, re.MULTILINE)


def test_a_clean_trace_says_nothing_of_skipped_lines(tmp_path):
    path = azure(tmp_path, ["2023-11-16 18:17:03.0000000,7,3"])
    assert "skipped" not in replayed("--trace", path).stderr


# The prefix cache alone


def test_cache_only_reports_the_hit_rate(tmp_path):
    path = mooncake(tmp_path, [(1536, [1, 2, 3]), (1300, [1, 2, 4]), (1300, [1, 2, 4])])
    whole = replayed("--trace", path, "--cache-only", "--pages", 50)
    assert text(whole.stdout) == (
        "4 of 9 blocks of 512 tokens found in a cache of 50 pages: 44.44 % (0 pages evicted)"
    )
    shared = replayed("--trace", path, "--cache-only", "--pages", 50, "--share-partial")
    assert text(shared.stdout).startswith("5 of 9 blocks")
    # In three pages 4 takes the place of 3.
    tight = replayed("--trace", path, "--cache-only", "--pages", 3, "--share-partial")
    assert text(tight.stdout).endswith("a cache of 3 pages: 55.56 % (1 pages evicted)") or text(
        tight.stdout
    ).endswith("a cache of 3 pages: 55.56 % (1 page evicted)")


def test_cache_only_sizes_its_pool_in_blocks(tmp_path):
    path = mooncake(tmp_path, [(1536, [1, 2, 3])])
    result = replayed(
        "--trace", path, "--cache-only", "--pool-gib", 1, "--bytes-per-token", 65_536
    )  # fmt: skip
    # 1 GiB of 64 KiB tokens are 16,384 tokens.
    assert "a cache of 32 pages" in text(result.stdout)


def test_cache_only_with_a_report_writes_it_or_says_that_it_cannot(tmp_path):
    folder = tmp_path / "out"
    result = sgalloc("replay", *SMALL, "--cache-only", "--report", folder)
    if result.exit_code == 0:
        assert (folder / "report.json").is_file()
    else:
        assert result.exit_code == 2 and "--report" in result.stderr


# The report


def test_a_report_is_written(tmp_path, made):
    path = mooncake(tmp_path, [(1100, [1, 2, 3]), (1300, [1, 2, 4])])
    folder = tmp_path / "deep" / "out"
    result = replayed("--trace", path, "--report", folder, "--seed", 3, "--spec", "eagle")
    assert {file.name for file in folder.iterdir()} == {"report.json", "report.html"}
    for name in ("report.json", "report.html"):
        assert f"wrote {folder / name}" in text(result.stdout)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["requests"]["finished"] == 2
    assert report["verdict"]["outcome"] == "sound"
    assert report["pool"] == {"pages": 7_680, "page_tokens": 64}
    # Of files the name alone, and no word of where the report lies.
    config = report["config"]
    assert (config["trace"], config["seed"], config["spec"]) == ("talk.jsonl", 3, "eagle")
    assert "report" not in config and str(tmp_path) not in json.dumps(report)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>") and "talk.jsonl" in page
    # A second report goes over the first.
    replayed(*SMALL, "--report", folder)
    again = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert again["requests"]["finished"] == 12


def test_no_folder_is_made_where_another_option_is_bad(tmp_path):
    for bad in (("--page-size", 0), ("--pages", 0), ("--speed", "nan"), ("--device", "abacus")):
        result = sgalloc("replay", "--limit", 5, "--report", tmp_path / "out", *bad)
        assert result.exit_code == 2
        assert not (tmp_path / "out").exists(), bad


# A broken law


@pytest.fixture
def leaky(monkeypatch) -> None:
    """A pool that forgets the last page of whatever requests give back."""
    give = PagePool.give

    def forget(self, ids, holder):
        if np.ndim(holder) and np.size(ids) > 1:
            ids, holder = ids[:-1], np.asarray(holder)[:-1]
        give(self, ids, holder)

    monkeypatch.setattr(PagePool, "give", forget)


@pytest.mark.parametrize("check", [0, 1])
def test_a_lost_page_is_exit_status_one(leaky, tmp_path, check):
    folder = tmp_path / "out"
    args = ("--no-prefix-cache", "--check", check, "--report", folder)
    result = sgalloc("replay", *SMALL, *args)
    assert result.exit_code == 1
    # The table is shown all the same, and so is the report.
    assert result.stdout.startswith("chat x 12")
    assert re.search(r"broken: page \d+ of group 'full' is lost", text(result.stdout))
    assert SOUND not in result.stdout
    verdict = json.loads((folder / "report.json").read_text(encoding="utf-8"))["verdict"]
    assert verdict["outcome"] == "broken" and "lost" in verdict["violation"]


def test_a_row_that_stays_open_is_exit_status_one(monkeypatch):
    class Forgetful(Engine):
        def _drain(self) -> None:
            self.alloc.open()
            super()._drain()

    monkeypatch.setattr(module, "Engine", Forgetful)
    result = sgalloc("replay", *SMALL)
    assert result.exit_code == 1
    assert "broken: 0 pages and 1 row did not come back" in text(result.stdout)


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


# As a process of its own

START = """
from sgalloc.cli import main
main()
"""


def environment(**more: str) -> dict[str, str]:
    """This one's, without what changes the look of the output."""
    unwanted = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PYTHONIOENCODING")
    return {key: value for key, value in os.environ.items() if key not in unwanted} | more


def process(
    *args: object, code: str | None = None, **more: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command (or ``code``, which starts it) to its end, its output in pipes."""
    start = ["-m", "sgalloc.cli"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *map(str, args)],
        cwd=ROOT,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_output_to_a_pipe_is_plain_text():
    done = process("replay", *SMALL, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    lines = done.stdout.decode("utf-8").splitlines()
    assert lines[0].startswith("chat x 12") and lines[-1] == SOUND
    assert max(map(len, lines)) <= 80
    for stream in (done.stdout, done.stderr):
        assert b"\x1b" not in stream and b"\r" not in stream
    # No bar that is drawn over and over.
    assert done.stderr.decode("utf-8").count("12/12") == 1
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_output_in_a_narrow_encoding_is_still_an_outcome(encoding):
    done = process("replay", *SMALL, PYTHONIOENCODING=encoding)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0
    assert SOUND in done.stdout.decode(encoding)


def test_bad_usage_and_broken_laws_reach_the_shell():
    bad = process("replay", "--page-size", "0")
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"sgalloc replay: --page-size") and bad.stderr.count(b"\n") == 1
    leak = """
import sys
import numpy as np
from sgalloc.pages import PagePool
give = PagePool.give
def forget(self, ids, holder):
    if np.ndim(holder) and np.size(ids) > 1:
        ids, holder = ids[:-1], np.asarray(holder)[:-1]
    give(self, ids, holder)
PagePool.give = forget
"""
    broken = process("replay", *SMALL, "--no-prefix-cache", code=leak + START)
    assert broken.returncode == 1
    assert b"broken: page" in broken.stdout and b"Traceback" not in broken.stderr


HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] == {missing!r}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("click", "cli"), ("rich", "cli"), ("matplotlib", "report"), ("jinja2", "report")],
)
def test_a_missing_extra_is_one_line_with_its_remedy(tmp_path, missing, extra):
    code = HIDE.format(missing=missing) + START
    done = process("replay", *SMALL, "--report", tmp_path / "out", code=code)
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 1, errors
    assert f"{missing} is not installed" in errors[0]
    assert f"pip install 'sgalloc[{extra}]'" in errors[0]
    # No law was broken: that is what 1 would say.
    assert done.returncode == 2
    assert done.stdout == b"" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_a_report_its_extra_is_not_needed(missing):
    done = process("replay", *SMALL, code=HIDE.format(missing=missing) + START)
    assert done.returncode == 0 and SOUND.encode() in done.stdout


# Ctrl-C

# A process that was started in the background may have been told to ignore Ctrl-C.
HEED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

# Says "running" once a run is on its way.
LOUD = f"""
{HEED}
import importlib, sys
module = importlib.import_module("sgalloc.commands.replay")
class Loud(module.Engine):
    def run(self, progress=None):
        def shown(totals):
            if totals.steps == 50:
                print("running", file=sys.stderr, flush=True)
            progress(totals)
        return super().run(shown)
module.Engine = Loud
alone = module.replay_prefixes
def loud(*args, progress, **options):
    def shown(index):
        if index == 50:
            print("running", file=sys.stderr, flush=True)
        progress(index)
    return alone(*args, progress=shown, **options)
module.replay_prefixes = loud
"""


class Interrupted(NamedTuple):
    """How a process ended that was sent Ctrl-C."""

    status: int
    stdout: str
    stderr: str


def interrupted(*args: object) -> Interrupted:
    """Start a replay, send Ctrl-C once it runs, and wait for its end."""
    running = subprocess.Popen(
        [sys.executable, "-c", LOUD + START, "replay", *map(str, args)],
        cwd=ROOT,
        env=environment(PYTHONIOENCODING="utf-8"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if "running" in line:
                break
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    return Interrupted(running.returncode, stdout, stderr)


LONG = ("--limit", 8_000, "--pages", 4_000, "--device", "cpu")


def test_ctrl_c_ends_with_the_table_and_the_report_so_far(tmp_path):
    ended = interrupted(*LONG, "--report", tmp_path)
    assert ended.status == 0
    assert "Traceback" not in ended.stderr and "Aborted" not in ended.stderr
    assert ended.stdout.startswith("chat x 8000")
    assert f"{SOUND} (interrupted before the end of the workload)" in text(ended.stdout)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"]["interrupted"] is True
    assert report["verdict"]["leaked_pages"] == report["verdict"]["leaked_rows"] == 0
    assert report["time"]["steps"] >= 50
    assert 0 < report["requests"]["unfinished"] <= 8_000
    assert (tmp_path / "report.html").is_file()


def test_ctrl_c_ends_the_prefix_cache_alone_with_the_rate_so_far():
    ended = interrupted(*LONG, "--cache-only")
    assert "Traceback" not in ended.stderr
    assert ended.status == 0
    assert re.search(r"[\d,]+ of [\d,]+ blocks of 512 tokens found", text(ended.stdout))


def test_ctrl_c_before_the_run_is_no_broken_law(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = subprocess.Popen(
        [sys.executable, "-c", HEED + START, "replay", "--trace", str(pipe)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        # Opening the pipe for writing succeeds as soon as the trace is being read.
        with pipe.open("wb") as feed:
            feed.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
            feed.flush()
            time.sleep(0.3)
            running.send_signal(signal.SIGINT)
            stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    assert b"Traceback" not in stderr and stdout == b""
    assert running.returncode not in (0, 1)


def test_ctrl_c_means_what_it_did_before_once_the_run_is_over():
    before = signal.getsignal(signal.SIGINT)
    replayed(*SMALL)
    assert signal.getsignal(signal.SIGINT) is before
