"""``sgalloc replay`` with each feature: sound, and the report says what it cost and saved."""

from __future__ import annotations

import json

import pytest
from replay.cli_support import SMALL, SOUND, figure, module, replayed, text

from sgalloc.commands.replay_options import options_of
from sgalloc.replay.summary import summarise, write_json

FEATURES = {
    "chain": ("--spec", "eagle", "--overlap"),
    "tree": ("--spec", "eagle", "--topk", "4", "--steps", "5"),
    "block": ("--spec", "dflash", "--accept", "dflash-16-maths"),
    "window": ("--window", "1024"),
    "window, all given": (
        *("--window", "512", "--window-pages", "500", "--window-every", "128"),
        *("--chunk", "4096"),
    ),
    "sparse": ("--sparse", "4", "--device-buffer", "1024", "--spec", "eagle", "--overlap"),
    "nodes": ("--disaggregated", "--writers", "3", "--abort-rate", "0.4"),
    "all": (
        *("--disaggregated", "--prefill-pages", "4000", "--window", "1024"),
        *("--spec", "eagle", "--overlap"),
    ),
}


def numbers_alone(recording, folder):
    """The report without its plots, which take most of the time."""
    return [write_json(summarise(recording), folder)]


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_runs_and_its_report_says_so(name, tmp_path, monkeypatch):
    options = FEATURES[name]
    with_page = name in ("all", "sparse")
    if not with_page:
        monkeypatch.setattr(module, "write_report", numbers_alone)
    args = (*SMALL, "--limit", "25", "--pages", "6000", "--check", "50", *options)
    result = replayed(*args, "--report", tmp_path)
    assert SOUND in text(result.stdout)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8") if with_page else None
    requests, verbs = report["requests"], report["allocator"]["verbs"]
    assert requests["finished"] + requests["aborted"] == 25
    assert all(row["median_us"] > 0 for row in verbs.values() if row["calls"])

    speculation = report["speculation"]
    assert (speculation["reserve_tokens"] is not None) is ("--spec" in options)
    if "--spec" in options:
        least = speculation["reserve_tokens"]
        assert least <= speculation["mean_tail_tokens"] < least + 2 * 64
        assert float(figure(result, "tail in a step").replace(",", "")) >= least
    assert (speculation["moved_tokens"] > 0) is ("--topk" in options)
    assert ("compact" in verbs) is ("--topk" in options)
    assert (speculation["discarded_steps"] > 0) is ("--overlap" in options)

    window = report["window"]
    assert (window["tokens"] is not None) is ("--window" in options)
    assert ("Window" in result.stdout) is ("--window" in options)
    assert page is None or ('id="pool-window"' in page) is ("--window" in options)
    if "--window" in options:
        assert window["evicted_pages"] > 0 and 0 < window["saved_share"] < 1
        assert window["held_peak_pages"] <= report["pools"]["window"]["pages"]
        # Prompts lose what left the window where they are prefilled.
        where = "prefill " if "--disaggregated" in options else ""
        assert verbs[f"{where}evict_window"]["calls"] > 0

    sparse = report["sparse"]
    assert (sparse["thinned_pages"] is not None) is ("--sparse" in options)
    assert ("Sparse" in result.stdout) is ("--sparse" in options)
    assert page is None or ('id="pool-device"' in page) is ("--sparse" in options)
    if "--sparse" in options:
        assert report["pool"]["pages"] == 4 * report["pools"]["device"]["pages"] == 4 * 6_000
        assert sparse["thinned_pages"] > 1_000 and 0.5 < sparse["saved_share"] < 1
        assert verbs["to_sparse"]["calls"] >= 25 - requests["aborted"]
        assert report["tokens"]["looked_up"] == 0

    nodes = report["disaggregation"]
    assert (nodes["transfers"] is not None) is ("--disaggregated" in options)
    assert ("Transfers" in result.stdout) is ("--disaggregated" in options)
    assert page is None or ('id="pool-prefill"' in page) is ("--disaggregated" in options)
    if "--disaggregated" in options:
        assert nodes["transfers"] >= nodes["live"] + nodes["aborted"]
        assert nodes["mean_run_pages"] >= 1 and nodes["pinned_peak_pages"] > 0
        assert nodes["live_mean_seconds"] > 0.005
        assert verbs["preallocate"]["calls"] >= nodes["transfers"]
        assert verbs["prefill apply"]["calls"] == nodes["prefill_steps"]
        assert report["pools"]["prefill"]["held_peak_pages"] > 0


def test_pages_of_the_second_pools_have_defaults(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_report", numbers_alone)
    args = (*SMALL, "--pages", "8000", "--window", "1024", "--disaggregated")
    replayed(*args, "--report", tmp_path)
    pools = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["pools"]
    assert {name: pool["pages"] for name, pool in pools.items()} == {
        "window": 2_000,
        "prefill": 8_000,
        "prefill window": 2_000,
    }


def test_a_tree_drafts_whole_levels_unless_told_otherwise():
    # 3 levels of 2 nodes behind the root: 2 * max(3 * 2, 7) at page size 1.
    for more, reserve in (((), "14"), (("--draft-tokens", "9"), "18")):
        args = (*SMALL, "--limit", "3", "--profile", "code", "--page-size", "1")
        result = replayed(*args, "--spec", "eagle", "--topk", "2", *more)
        assert figure(result, "reserved for it") == reserve


def test_scratch_for_drafts_is_what_a_step_writes_unless_told_otherwise():
    # A step of a block of 16 writes 16 tokens, one page; without speculation there is nothing.
    assert [scratch_pages(tokens) for tokens in (None, 16, 64)] == [0, 1, 4]


def scratch_pages(tokens: int | None) -> int:
    """Pages of scratch that the options for so many drafts ask for, by default or by name."""
    context = module.replay.make_context("replay", ["--sparse", "2", "--page-size", "16"])
    given = dict(context.params)
    given["prefix_cache"] = False
    if tokens is not None:
        given["spec"] = "dflash"
    if tokens not in (None, 16):
        given["draft_scratch"] = tokens
    settings = options_of(given).sparse
    assert settings is not None
    return -(-settings.draft_scratch // 16)


def test_without_being_asked_sparse_has_no_prefix_cache():
    cached = replayed(*SMALL, "--limit", "3")
    sparse = replayed(*SMALL, "--limit", "3", "--sparse", "2")
    assert figure(cached, "looked up in cache") != "0" == figure(sparse, "looked up in cache")
