"""The report of a replay: the page and its plots, odd recordings, and directories that fail."""

from __future__ import annotations

import base64
import html
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from array import array
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from sgalloc.replay import page
from sgalloc.replay.keys import KEYS
from sgalloc.replay.page import MAX_POINTS, ReportError, prepare_directory, thin, write_report
from sgalloc.replay.recording import (
    MAP_OWNERS,
    POOL_SAMPLED,
    SAMPLED,
    PoolRecord,
    Recording,
)
from sgalloc.replay.summary import figures, summarise

SECTIONS = ["figures", "occupancy", "map", "requests", "time", "verbs", "options", "keys"]
PLOTS = ["occupancy", "map", "requests", "time", "verbs"]
VOID = {"meta", "img", "br"}


def record(steps: int, pages: int = 50) -> Recording:
    """A run of `steps` steps in which every column of the samples differs from every other."""
    rng = np.random.default_rng(7)
    recording = Recording({"page_size": 16, "trace": "a & b.jsonl"}, "made up", pages, 16)
    for step in range(steps):
        owned, locked, evictable, quarantined, pinned, free = rng.multinomial(
            pages, [0.4, 0.1, 0.2, 0.1, 0.1, 0.1]
        )
        running, queued = rng.integers(0, 90, 2)
        by_owner = (owned, locked, evictable, quarantined, pinned, free)
        row = (step * 0.01, running, queued, *by_owner, 70, 80)
        recording.sample(dict(zip(SAMPLED, map(float, row), strict=True)))
        held = (owned, locked + evictable, quarantined, pinned, free)
        owners = np.repeat([3, -1, -2, -4, 0], held)
        if step % max(1, steps // 100) == 0:
            recording.frame(step * 0.01, owners)
        recording.step_ns.append(int(rng.integers(1_000, 90_000)))
    recording.verbs = {"plan": array("q", range(1_000, 9_000, 7)), "open": array("q", [5])}
    recording.totals.steps = steps
    recording.totals.virtual_seconds = steps * 0.01
    return recording


def empty() -> Recording:
    return Recording({}, "", 1, 1)


def one_sample() -> Recording:
    recording = record(1, pages=1)
    recording.totals.virtual_seconds = 0.0
    return recording


def interrupted() -> Recording:
    recording = record(20)
    recording.interrupted = True
    recording.samples["time"].append(99.0)
    recording.map_times.append(99.0)
    return recording


def broken() -> Recording:
    recording = record(3)
    recording.workload = "<script>alert(1)</script>"
    recording.violation = "page 3 is held by <row 4> & by the 'cache'"
    return recording


def timeless() -> Recording:
    """The clock never moved, the timer saw nothing, and a verb was never called."""
    recording = record(5)
    for column in (recording.samples["time"], recording.step_ns):
        for index in range(len(column)):
            column[index] = 0
    recording.map_times = [0.0] * len(recording.map_times)
    recording.totals.virtual_seconds = 0.0
    recording.verbs = {"plan": array("q", [0, 0]), "open": array("q")}
    return recording


def alike() -> Recording:
    recording = record(30)
    recording.step_ns = array("q", [43_000] * 30)
    recording.verbs = {"plan": array("q", [43_000] * 30)}
    return recording


RECORDINGS = [empty, one_sample, interrupted, broken, timeless, alike, lambda: record(3000)]


class Page(HTMLParser):
    """Reads a page, and refuses tags that do not nest and ids that stand twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: dict[str, str] = {}
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "object", "base"}
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [v for k, v in attrs if k in {"src", "href", "srcset", "data", "action"}]
        if tag == "img":
            assert given["alt"]
            self.images[self.ids[-1]] = given["src"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def written(recording: Recording, folder: Path) -> str:
    assert write_report(recording, folder) == [folder / "report.json", folder / "report.html"]
    return (folder / "report.html").read_text(encoding="utf-8")


def drawing(uri: str) -> ET.Element:
    head, body = uri.split(",", 1)
    assert head == "data:image/svg+xml;base64"
    return ET.fromstring(base64.b64decode(body, validate=True))


@pytest.mark.parametrize("make", RECORDINGS)
def test_a_valid_page_that_needs_nothing_beside_it(tmp_path, make: Callable[[], Recording]):
    recording = make()
    source = written(recording, tmp_path)
    found = Page(source)
    assert source.startswith("<!DOCTYPE html>\n<html lang=")
    assert found.ids == SECTIONS
    assert list(found.images) == ([] if make is empty else PLOTS)
    assert found.text.count("Nothing to show") == (len(PLOTS) if make is empty else 0)
    assert all(link.startswith("data:") for link in found.links)
    assert "http" not in source and "url(" not in source and "@import" not in source
    for uri in found.images.values():
        picture = drawing(uri)
        ids = [element.get("id") for element in picture.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
        for element in picture.iter():
            assert not element.tag.endswith("metadata")
            for name, value in element.items():
                assert not name.endswith("href") or value.startswith(("#", "data:image/png;"))
    assert html.escape(recording.workload) in source
    summary = summarise(recording)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == summary
    assert summary["verdict"]["text"] in found.text
    assert f'class="verdict {summary["verdict"]["outcome"]}"' in source


def test_parts_without_a_recording_say_so(tmp_path):
    recording = record(20)
    recording.map_times.clear()
    recording.map_frames.clear()
    recording.verbs = {"open": array("q")}
    found = Page(written(recording, tmp_path))
    assert list(found.images) == ["occupancy", "requests", "time"]
    assert found.text.count("Nothing to show") == 2


def test_the_page_says_what_the_table_says(tmp_path):
    recording = record(40)
    summary = summarise(recording)
    found = Page(written(recording, tmp_path))
    for title, pairs in figures(summary):
        shown = " ".join(f"{label} {value}" for label, value in pairs)
        assert f"{title} {shown}" in found.text
    assert "plan 1,143 5.00 8.91 5.71 100.0 % open 1 0.005 0.005 5e-06 0.0 %" in found.text
    assert "page_size 16 trace a & b.jsonl" in found.text
    assert all(f"{key} {meaning}" in found.text for key, meaning in KEYS.items())


def test_writing_again_replaces_the_report(tmp_path):
    first = written(record(40), tmp_path)
    assert "made up" in first
    second = written(empty(), tmp_path)
    assert "made up" not in second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


# -- thinning ----------------------------------------------------------------------------------


def test_few_samples_are_shown_as_they_are():
    recording = record(MAX_POINTS)
    thinned = thin(recording)
    assert thinned.width == 0.0
    assert thinned.start.tolist() == recording.samples["time"].tolist()
    for name in SAMPLED[1:]:
        assert thinned.mean[name].tolist() == recording.samples[name].tolist()
        assert thinned.peak[name].tolist() == recording.samples[name].tolist()


def test_many_samples_are_binned_by_time_and_keep_their_peaks(tmp_path):
    recording = record(9_000)
    # Nothing happens between 30 s and 70 s: the value before holds, and no bin is made up.
    times = recording.samples["time"]
    for step in range(3_000, 9_000):
        times[step] += 40.0
    recording.totals.virtual_seconds = 131.0
    thinned = thin(recording)
    assert thinned.width == pytest.approx(131.0 / MAX_POINTS)
    bins: dict[int, list[int]] = {}
    for step, time in enumerate(times):
        bins.setdefault(min(int(time / thinned.width), MAX_POINTS - 1), []).append(step)
    assert thinned.start.tolist() == [times[steps[0]] for steps in bins.values()]
    for name in ("running", "free"):
        column = recording.samples[name]
        kept = [[column[step] for step in steps] for steps in bins.values()]
        assert thinned.mean[name] == pytest.approx([sum(each) / len(each) for each in kept])
        assert thinned.peak[name].tolist() == [max(each) for each in kept]
    assert thinned.peak["used"].max() == 50 - min(recording.samples["free"])
    text = Page(written(recording, tmp_path)).text
    assert "9,000 samples are shown as means over stretches of 0.0655 virtual seconds" in text


# -- what the plots show -----------------------------------------------------------------------


def test_occupancy_stacks_the_owners_up_to_the_whole_pool():
    recording = Recording({}, "", 40, 1)
    for row in ([0, 0, 0, 4, 8, 12, 5, 1, 10, 0, 0], [5, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0]):
        recording.sample(dict(zip(SAMPLED, row, strict=True)))
    recording.totals.virtual_seconds = 6.0
    figure = Figure()
    page._occupancy(figure, thin(recording), 40)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, 6)
    tops = {}
    for area in axes.collections:
        points = area.get_paths()[0].vertices
        tops[area.get_label()] = points[points[:, 0] < 5.0][:, 1].max()
    assert tops == {
        "owned": 10.0,
        "pinned": 12.5,
        "cached and locked": 32.5,
        "cached, evictable": 62.5,
        "quarantined": 75.0,
        "free": 100.0,
    }
    assert len({tuple(area.get_facecolor()[0]) for area in axes.collections}) == 6
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(tops)


def with_pools(steps: int) -> Recording:
    """A run with two more pools, whose pages are those of the main one, but for who has them."""
    recording = record(steps)
    for name, swapped in (("window", ("owned", "free")), ("prefill", ("locked", "free"))):
        pool = recording.pools[name] = PoolRecord(50)
        here = {column: column for column in POOL_SAMPLED}
        here |= {swapped[0]: swapped[1], swapped[1]: swapped[0]}
        for column, other in here.items():
            pool.samples[column].extend(recording.samples[other])
    return recording


@pytest.mark.parametrize("steps", [1, 20, 3000])
def test_every_pool_has_a_plot_of_its_own(tmp_path, steps):
    recording = with_pools(steps)
    write_report(recording, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    sections = [part.split('"')[0] for part in text.split('<section id="')[1:]]
    assert sections == [*SECTIONS[:2], "pool-window", "pool-prefill", *SECTIONS[2:]]
    assert text.count("<img") == len(PLOTS) + 2
    main, window, prefill = (thin(recording, name) for name in (None, "window", "prefill"))
    assert window.mean["owned"].tolist() == main.mean["free"].tolist()
    assert window.mean["free"].tolist() == main.mean["owned"].tolist()
    assert prefill.mean["locked"].tolist() == main.mean["free"].tolist()
    # The dark line of the peaks is that of the pool itself.
    used = 50 - main.mean["owned"]
    assert window.mean["used"].tolist() == pytest.approx(used.tolist())


def test_the_map_has_a_colour_for_every_owner():
    recording = Recording({}, "", 6, 1)
    recording.frame(0.0, np.array([0, 0, 0, 0, 0, 0]))
    recording.frame(2.0, np.array([9, -1, -2, -3, -4, 0]))
    recording.totals.virtual_seconds = 3.0
    figure = Figure()
    page._map(figure, recording)
    (axes,) = figure.axes
    (mesh,) = axes.collections
    coordinates = mesh.get_coordinates()
    assert coordinates[0, :, 0].tolist() == [0.0, 2.0, 3.0]
    assert coordinates[:, 0, 1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    shades = mesh.to_rgba(mesh.get_array())
    colours = {name: to_rgba(page._MAP_COLOURS[name]) for name in MAP_OWNERS}
    assert len(set(colours.values())) == 6
    names = ["owned", "cached", "quarantined", "locked", "pinned", "free"]
    for index, name in enumerate(names):
        assert tuple(shades[index, 0]) == colours["free"]
        assert tuple(shades[index, 1]) == colours[name]
    (legend,) = figure.legends
    keys = zip(legend.get_patches(), legend.get_texts(), strict=True)
    assert {text.get_text(): patch.get_facecolor() for patch, text in keys} == colours


@pytest.mark.parametrize("make", [one_sample, timeless, alike, lambda: record(3000)])
def test_the_histogram_holds_every_step(make):
    recording = make()
    summary = summarise(recording)
    figure = Figure()
    page._step_time(figure, recording, summary)
    (axes,) = figure.axes
    (bars,) = axes.patches
    counts, edges, _ = bars.get_data()
    assert counts.sum() == len(recording.step_ns)
    assert axes.get_xscale() == "log"
    median, p99 = (line.get_xdata()[0] for line in axes.lines)
    assert median == max(summary["allocator"]["step_median_us"], 1e-3)
    assert p99 == max(summary["allocator"]["step_p99_us"], 1e-3)
    assert edges[0] < median <= p99 < edges[-1]
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high]


def test_requests_have_an_axis_each():
    recording = record(60)
    figure = Figure()
    page._requests(figure, thin(recording))
    for axes, name in zip(figure.axes, ("running", "queued"), strict=True):
        (line,) = axes.lines
        assert line.get_ydata()[:-1].tolist() == recording.samples[name].tolist()
        assert axes.get_ylabel().startswith(name)
        assert axes.get_ylim()[1] >= max(recording.samples[name])


def test_verbs_stand_in_the_order_of_their_cost():
    recording = record(5)
    recording.verbs["release"] = array("q", [80_000_000])
    recording.verbs["fits"] = array("q")
    figure = Figure()
    page._verb_time(figure, summarise(recording))
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["release", "plan", "open"]
    assert [bar.get_width() for bar in left.patches] == pytest.approx([80.0, 5.711571, 5e-6])
    p99, median = right.lines
    assert median.get_xdata() == pytest.approx([80_000.0, 4.997, 0.005])
    assert p99.get_xdata() == pytest.approx([80_000.0, 8.91406, 0.005])


# -- directories and missing packages ----------------------------------------------------------


def test_a_directory_is_made_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b µ"
    assert prepare_directory(str(folder)) == folder
    assert list(folder.iterdir()) == []
    assert prepare_directory(folder) == folder
    written(empty(), folder)
    assert prepare_directory(folder) == folder
    assert len(list(folder.iterdir())) == 2


def in_the_way(root: Path) -> Path:
    (root / "file").write_text("mine", encoding="utf-8")
    return root / "file"


def below_a_file(root: Path) -> Path:
    return in_the_way(root) / "report" / "of today"


def taken_by_a_directory(root: Path) -> Path:
    (root / "report.html").mkdir()
    return root


def no_path(root: Path) -> Path:
    return root / "a\0b"


def too_long(root: Path) -> Path:
    return root / ("x" * 300)


@pytest.mark.parametrize("call", [prepare_directory, lambda path: write_report(record(2), path)])
@pytest.mark.parametrize(
    "spoil", [in_the_way, below_a_file, taken_by_a_directory, no_path, too_long]
)
def test_a_directory_that_cannot_be_written_is_named(tmp_path, call, spoil):
    folder = spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ReportError) as caught:
        call(folder)
    message = str(caught.value)
    assert "cannot write" in message and "name a" in message
    assert repr(str(folder)) in message or str(folder / "report.html") in message
    assert "\n" not in message
    assert sorted(tmp_path.rglob("*")) == before
    for path in tmp_path.glob("file"):
        assert path.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_before_the_run(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    wanted = rf"{missing} is not installed: pip install 'sgalloc\[report\]'"
    with pytest.raises(ReportError, match=wanted):
        prepare_directory(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # After the run the numbers are saved all the same.
    with pytest.raises(ReportError, match=wanted):
        write_report(record(2), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


def test_plots_leave_no_global_state(tmp_path):
    before = dict(rcParams)
    written(record(30), tmp_path)
    assert dict(rcParams) == before
    code = f"""
import sys
from sgalloc.replay import page
from sgalloc.replay.recording import Recording
loaded = {{"matplotlib", "jinja2", "rich"}} & set(sys.modules)
recording = Recording({{}}, "x", 1, 1)
recording.step_ns.append(5000)
page.write_report(recording, {str(tmp_path / "again")!r})
print(sorted(loaded), "matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[] True False\n", "")
