"""``sgalloc replay`` as its user meets it: options, traces, output, the report, exit statuses."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from replay.cli_support import (
    SMALL,
    SOUND,
    azure,
    figure,
    module,
    mooncake,
    replayed,
    sgalloc,
    text,
)

from sgalloc import __version__
from sgalloc.pages import PagePool
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.requests import Workload
from sgalloc.sizing import SpecConfig

OPTIONS = (
    *("trace", "profile", "limit", "speed", "page-size", "pages", "pool-gib", "bytes-per-token"),
    *("running", "chunk", "admit", "headroom", "spec", "steps", "topk", "draft-tokens", "accept"),
    *("prefix-cache", "no-prefix-cache", "abort-rate", "seed", "device", "check", "cache-only"),
    *("share-partial", "report"),
)


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
