"""The benchmarks measure what they say, both sides do the same work, and the page is current."""

from __future__ import annotations

import copy
import gc
import getpass
import json
import platform
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from profiling import (
    answers,
    bench_host,
    breakdown,
    cache_verbs,
    group_verbs,
    question,
    tables,
    verbs,
)
from sgalloc.bench import aim, course, machine, measured
from sgalloc.bench.harness import (
    LOOP,
    SUBJECT,
    Effort,
    Key,
    Side,
    Step,
    Summary,
    alternate,
    collector_off,
    summarize,
)
from sgalloc.bench.measured import Bench, Record
from sgalloc.bench.python_loop import OutOfMemory, PythonLoop, Request
from sgalloc.bench.twins import Shape, Twins

TINY = bench_host.Size(
    effort="tiny",
    seconds=0.0,
    least=2,
    batches=(1, 40),
    pages=(1, 16, 64),
    moved=(16, 160),
    pools=(1000, 2000),
    histories=(64, 128),
    parts=(32,),
    grouped=(1, 7),
    received=(1, 3),
)
ROUNDS = Effort(seconds=0.0, least=25, warm_up=1, block=3)


@pytest.fixture(scope="module")
def small_run() -> tuple[dict[str, Any], str]:
    """One run of everything at tiny sizes: the document, and what was printed."""
    text = StringIO()
    console = Console(file=text, width=200)
    return bench_host.measure(TINY, tuple(bench_host.RUNNERS), console), text.getvalue()


# -- a run ---------------------------------------------------------------------------------


def test_a_run_is_complete(small_run: tuple[dict[str, Any], str]) -> None:
    data, text = small_run
    assert tuple(data["benches"]) == answers.BENCHES == tuple(bench_host.RUNNERS)
    series = {
        (record["name"], record["side"], record["at"]["batch"], record["at"]["page"])
        for record in data["benches"]["verbs"]
    }
    assert series == {
        (name, side, batch, page)
        for name in {name for name, _ in answers.VERBS}
        for side in (SUBJECT, LOOP)
        for batch in TINY.batches
        for page in TINY.pages
    }
    cached = {
        (record["name"], record["at"]["batch"], record["at"]["page"])
        for record in data["benches"]["cache"]
    }
    assert cached == {
        (name, batch, page)
        for name in (
            "match",
            "open_with_prefix",
            "publish",
            "release with tokens",
            "extend that evicts",
        )
        for batch in TINY.batches
        for page in TINY.pages
    }
    grouped = {
        (record["name"], record["side"], record["at"]["batch"], record["at"]["page"])
        for record in data["benches"]["groups"]
    }
    received = ("preallocate", "acknowledge", "abort")
    assert grouped == {
        (name, side, batch, page)
        for name in group_verbs.NAMES
        for side in (SUBJECT, group_verbs.PLAIN if name in group_verbs.BESIDE else LOOP)
        for batch in (TINY.received if name in received else TINY.grouped)
        for page in (16, 64)
    }
    assert (
        data["run"]["states_compared"]
        == 4 * 2 * 3 + 2 * 2 * 3 + 2 * 2 + 2 * (4 * 2 + 2 * 2) + 2 * 2 * 2
    )
    for bench in answers.BENCHES:
        for table in answers.build(data, bench):
            assert table.title.replace("`", "") in re.sub(r"\s+", " ", text)
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_document_survives_its_file_and_names_nobody(
    small_run: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    data, _ = small_run
    path = tmp_path / "some" / "host.json"
    measured.write(data, path)
    assert measured.read(path) == json.loads(path.read_text(encoding="utf-8")) == data
    text = path.read_text(encoding="utf-8").lower()
    values = list(data["environment"].values()) + list(data["run"].values())
    for private in (platform.node(), getpass.getuser(), str(Path.cwd()), str(Path.home())):
        assert private.lower() not in map(str, values)
        if len(private) > 4:
            assert private.lower() not in text
    slug = machine.slug(data["environment"])
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*-cores", slug)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d.update(schema="other"), "no sgalloc-host-benchmarks document"),
        (lambda d: d.update(version=0), "version 0"),
        (lambda d: d["environment"].pop("cpu"), "environment lacks or adds cpu"),
        (lambda d: d["environment"].update(host="x"), "environment lacks or adds host"),
        (lambda d: d["environment"].update(cores="2"), "environment.cores must be int"),
        (lambda d: d["run"].update(otherwise_idle=1), "run.otherwise_idle must be bool"),
        (lambda d: d.update(benches={}), "at least one benchmark"),
        (lambda d: d["benches"].update(aim=[]), "benches.aim must be a list"),
        (lambda d: d["benches"]["aim"][0].pop("n"), r"benches.aim\[0\] lacks or adds n"),
        (lambda d: d["benches"]["aim"][0].update(n=0), "n must be at least 1"),
        (lambda d: d["benches"]["aim"][0].update(side=""), "needs a name and a side"),
        (lambda d: d["benches"]["aim"][0].update(p90_us=0.0), "p10 <= median <= p90"),
        (lambda d: d["benches"]["aim"][0].update(p90_us=float("inf")), "p10 <= median <= p90"),
        (lambda d: d["benches"]["aim"][0]["at"].update(page=1.5), "at.page must be an int"),
        (lambda d: d["benches"]["aim"].append(d["benches"]["aim"][0]), "repeats"),
    ],
)
def test_a_spoilt_document_is_refused(
    small_run: tuple[dict[str, Any], str], spoil: Callable[[dict[str, Any]], Any], says: str
) -> None:
    data = copy.deepcopy(small_run[0])
    measured.validate(data)
    spoil(data)
    with pytest.raises(ValueError, match=says):
        measured.validate(data)


# -- both sides do the same work -----------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("batch", [1, 7])
def test_both_sides_end_in_the_same_state(batch: int, page_size: int) -> None:
    twins = Twins(Shape(batch, page_size, history=100, row_width=384), seed=batch)
    alternate(verbs.life_sides(twins), ROUNDS)
    assert twins.difference() is None
    assert twins.alloc.available() == twins.shape.num_pages
    twins.fill()
    start = twins.alloc.committed(twins.handles)
    for sides in (verbs.speculative_sides, verbs.decode_sides, verbs.chunk_sides):
        times = alternate(sides(twins), ROUNDS)
        assert {key.side for key in times} == {SUBJECT, LOOP}
        assert twins.difference() is None
        twins.alloc.check(device=True)
        if sides is not verbs.chunk_sides:
            assert (twins.alloc.committed(twins.handles) > start).all()
        twins.reset()
        assert twins.difference() is None


def test_growing_steps_are_told_from_the_others_alike() -> None:
    twins = Twins(Shape(3, 64, history=100, row_width=1536))
    twins.fill()
    times = alternate(verbs.decode_sides(twins), Effort(seconds=0.0, least=64, warm_up=0))
    count = {key: len(series) for key, series in times.items()}
    for label in (course.GROWS, course.NO_NEED):
        assert count[Key(SUBJECT, "decode", label)] == count[Key(LOOP, "decode", label)] > 0
    # In 64 steps each request opens one page of 64, at most all in different steps.
    assert count[Key(SUBJECT, "decode", course.GROWS)] <= 4


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: setattr(t.requests[1].kv, "kv_committed_len", 5), "C of request 1"),
        (lambda t: setattr(t.requests[2].kv, "kv_allocated_len", 400), "A of request 2"),
        (lambda t: t.loop.free_pages.pop(), "pages are free"),
        (lambda t: t.loop.table[t.requests[0].kv.row].__setitem__(3, 4), "another offset"),
        (
            lambda t: t.loop.table[t.requests[0].kv.row].__setitem__(
                3, t.loop.table[t.requests[1].kv.row, 3]
            ),
            "do not belong together",
        ),
        (
            lambda t: t.loop.table[t.requests[0].kv.row].__setitem__(
                slice(0, 16), t.loop.table[t.requests[1].kv.row, :16]
            ),
            "stands twice",
        ),
        (
            lambda t: t.loop.table[t.requests[0].kv.row].__setitem__(
                slice(0, 16), np.arange(16, dtype=np.int32)
            ),
            "does not exist",
        ),
        (lambda t: t.alloc.req_to_token[1].__setitem__(0, 1), "table of sgalloc"),
    ],
)
def test_a_difference_is_found(spoil: Callable[[Twins], Any], says: str) -> None:
    twins = Twins(Shape(4, 16, history=100, row_width=384))
    twins.fill()
    course.agree(twins)
    spoil(twins)
    with pytest.raises(RuntimeError, match=says):
        course.agree(twins)


def test_the_loop_refuses_what_it_has_no_room_for() -> None:
    loop = PythonLoop(num_pages=4, page_size=16, max_requests=2, row_width=64)
    requests = [Request(), Request()]
    loop.open(requests)
    with pytest.raises(OutOfMemory, match="1 rows wanted, 0 free"):
        loop.open([Request()])
    with pytest.raises(OutOfMemory, match="4 pages of 16 free"):
        loop.extend(requests, [33, 32])
    with pytest.raises(OutOfMemory, match="64 slots is too narrow"):
        loop.extend(requests, [65, 1])
    loop.extend(requests, [32, 17])
    assert not loop.free_pages
    assert loop.fits_reserve(requests, 0)
    assert not loop.fits_reserve(requests, 16)
    with pytest.raises(OutOfMemory, match="0 pages of 16 free"):
        loop.reserve(requests, 16)
    loop.release(requests)
    assert sorted(loop.free_pages) == [1, 2, 3, 4]
    assert loop.fits([33]) and loop.fits([32, 32])
    assert not loop.fits([33, 32]) and not loop.fits([65]) and not loop.fits([1, 1, 1])


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_round_of_the_cache_evicts_its_own_pages_and_no_others(page_size: int) -> None:
    prompts = cache_verbs.Prompts.draw(20)
    alloc, side = cache_verbs.cache_side(prompts, page_size)
    for _ in range(2):
        for step in side.steps:
            step.call()
            if step.name == "match":
                group = alloc.stats().groups["full"]
                assert group.cached == 2 * prompts.shared // page_size
            if step.name == "release with tokens":
                group = alloc.stats().groups["full"]
                assert (group.cached, group.free) == (group.total, 0)
        alloc.check(device=True)
    own = 20 * (prompts.length - prompts.shared) // page_size
    assert alloc.stats().groups["full"].evicted == 2 * own


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_both_sides_compact_receive_and_abort_alike(page_size: int) -> None:
    twins = Twins(Shape(7, page_size, history=100, row_width=384), seed=5)
    for sides in (group_verbs.receive_sides, group_verbs.abort_sides):
        alternate(sides(twins), ROUNDS)
        assert twins.difference() is None
        assert twins.alloc.available() == twins.shape.num_pages
    twins.fill()
    start = twins.alloc.committed(twins.handles)
    alternate(group_verbs.compact_sides(twins), ROUNDS)
    assert twins.difference() is None
    assert (twins.alloc.committed(twins.handles) != start).all()
    alternate(group_verbs.extent_sides(twins), ROUNDS)
    twins.alloc.check(device=True)


def test_a_loop_that_moves_fewer_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(Shape(5, 16, history=100, row_width=384), seed=5)
    twins.fill()
    real = group_verbs.compact_in
    monkeypatch.setattr(
        group_verbs, "compact_in", lambda *args: tuple(part[1:] for part in real(*args))
    )
    with pytest.raises(RuntimeError, match=r"compact moves \d+ tokens, and the loop \d+"):
        alternate(group_verbs.compact_sides(twins), ROUNDS)


def test_what_is_compacted_by_the_loop_stands_where_it_should() -> None:
    loop = PythonLoop(num_pages=8, page_size=4, max_requests=1, row_width=32)
    request = Request()
    loop.open([request])
    loop.extend([request], [6])
    loop.reserve([request], 8)
    row = loop.table[request.kv.row].tolist()
    moved = group_verbs.compact_in(loop, [request], [[6, 9, 12]])
    assert moved == ([row[9], row[12]], [row[7], row[8]])
    assert (request.kv.kv_committed_len, len(loop.free_pages)) == (9, 5)


def test_a_window_loses_a_page_of_each_request_in_a_call() -> None:
    mine, plain = group_verbs.window_sides(3, 64)
    for side in (mine, plain):
        before, call = side.steps
        moved = []
        for _ in range(12):
            before.call()
            moved.append(call.call())
        if side is mine:
            steps = np.diff(np.array(moved)[:8], axis=0)
            assert (steps == 64).all()


# -- timing --------------------------------------------------------------------------------


def test_sides_take_turns_and_untimed_steps_leave_no_times() -> None:
    calls: list[str] = []

    def side(name: str) -> Side:
        def grows() -> int:
            calls.append(name)
            return len(calls) % 2

        label = {0: "even", 1: "odd"}
        return Side(
            name,
            [
                Step("a", grows, lambda result: label[result]),
                Step(None, lambda: calls.append(f"{name} untimed")),
            ],
        )

    times = alternate([side("x"), side("y")], Effort(0.0, least=4, warm_up=1, block=2))
    once = ["x", "x untimed", "x", "x untimed", "y", "y untimed", "y", "y untimed"]
    assert calls == ["x", "x untimed", "y", "y untimed", *once, *once]
    assert {key: len(series) for key, series in times.items()} == {
        Key("x", "a", "odd"): 4,
        Key("y", "a", "odd"): 4,
    }
    assert all(took >= 0 for series in times.values() for took in series)


def test_the_collector_is_off_while_timing_and_on_again_after() -> None:
    assert gc.isenabled()
    seen: list[bool] = []
    step = Step("a", lambda: seen.append(gc.isenabled() or gc.get_freeze_count() == 0))
    alternate([Side("x", [step])], Effort(0.0, least=2))
    assert set(seen) == {False}
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(KeyError), collector_off():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_a_summary_has_the_quantiles_of_its_series(n: int) -> None:
    series = np.random.default_rng(n).integers(100, 10_000, n)
    summary = summarize(series.tolist(), per=4)
    assert summary.n == n
    expected = np.percentile(series, [50, 10, 90]) / 4000
    assert np.allclose([summary.median, summary.p10, summary.p90], expected)
    with pytest.raises(ValueError, match="no timings"):
        summarize([])


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_parts_of_a_reserve_are_each_seen_once_and_put_back(page_size: int) -> None:
    twins = Twins(Shape(5, page_size, history=100, row_width=1536))
    twins.fill(staggered=False)
    before = [getattr(owner, name) for owner, name in breakdown.PARTS.values()]
    batch = twins.alloc.batch(twins.handles)
    twins.alloc.reserve(batch, 16)
    with breakdown.timed_parts() as seen:
        plan = twins.alloc.reserve(batch, 80)
        calls = {part: len(times) for part, times in seen.items()}
    assert plan.num_new_pages
    assert calls == dict.fromkeys(breakdown.PARTS, 1) | {breakdown.EMPTY: 0}
    assert [getattr(owner, name) for owner, name in breakdown.PARTS.values()] == before
    twins.loop.reserve(twins.requests, 80)
    assert twins.difference() is None


# -- the page ------------------------------------------------------------------------------


def test_the_page_shows_what_its_results_say() -> None:
    text = tables.README.read_text(encoding="utf-8")
    data = measured.read(tables.source(text))
    assert data["run"]["effort"] == "full"
    assert machine.slug(data["environment"]) == tables.source(text).parent.name
    assert tables.fill(text, data) == text, "run python -m profiling.tables --write"
    shown = re.findall(r"<!-- table: ([a-z_-]+) -->", text)
    others = ("machine", "log", "questions", *question.QUESTIONS)
    assert sorted(shown) == sorted((*answers.BENCHES, *others))
    assert text.count("<!-- end -->") == len(shown)
    assert len({(r["at"]["batch"], r["at"]["page"]) for r in data["benches"]["verbs"]}) == 15


def test_verdicts_follow_the_numbers() -> None:
    def document(reserve: float) -> dict[str, Any]:
        made = []
        for turns in (aim.BLOCKS, aim.STEPWISE):
            for side in (SUBJECT, LOOP):
                at: dict[str, int | str] = {"batch": 256, "page": 64, "turns": turns}
                for name, label in (("reserve", course.GROWS), ("reserve", answers.ALL)):
                    summary = Summary(7, reserve, reserve, reserve)
                    made.append(Record(name, side, at, summary, label))
                for name in ("reserve again", "commit", "release"):
                    made.append(Record(name, side, at, Summary(7, 0.5, 0.5, 0.5)))
        return measured.document({}, {}, {"aim": Bench(made)})

    for value, word in ((15.0, "met"), (15.1, "missed")):
        (table,) = answers.build(document(value), "aim")
        assert f"{value} µs in blocks, limit 15, {word}; step by step" in table.verdict
        assert "0.50 µs in blocks, limit 5, met" in table.verdict
        assert f"| {value} ({value}–{value}) |" in table.markdown()


# -- the command ---------------------------------------------------------------------------


def test_the_command_writes_a_document(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        bench_host.main, ["--quick", "--only", "prices", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/host.json")
    data = measured.read(path)
    assert list(data["benches"]) == ["prices"]
    assert data["run"]["effort"] == "quick"
    assert "column[int32 index] = values" in result.output


def test_bad_use_of_the_command_gets_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench_host.main, ["--only", "nothing"])
    assert result.exit_code == 2
    assert "'nothing' is not one of" in result.output
    taken = tmp_path / "taken"
    taken.write_text("")
    out = str(taken / "results")
    result = CliRunner().invoke(bench_host.main, ["--only", "prices", "--out", out])
    assert result.exit_code == 2
    assert "nothing can be written to" in result.output
    assert "µs" not in result.output


def test_results_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is no JSON"):
        measured.read(path)
    with pytest.raises(ValueError, match="names no results"):
        tables.source("# A page\n")
