"""The pictures of README and docs, and the tables of docs/profiling.md, made from the results.

`python -m profiling.plots --write` makes them anew. Each picture has the hash of what it shows in
it, and a test holds that this is the hash of the present results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import click

from profiling import compiled, ncu_table
from profiling.gpu import resources
from sgalloc.bench.harness import DONE, LOOP, RETURN, SUBJECT

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiling" / "results"
HOST, GPU = RESULTS / "amd-epyc-2-cores", RESULTS / "nvidia-h200"
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "profiling.md"
NOT_YET = "Not measured yet."

BLUE, ORANGE, GREY, GREEN = "#2563a8", "#d9730d", "#8a8a8a", "#2f855a"
_ENGINE_STEPS, _ENGINE_US = 30, 50_000
_BLOCK = re.compile(r"(<!-- made: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HASH = re.compile(r"data ([0-9a-f]{64})")


class Line(NamedTuple):
    """One line of a plot: what it is, and its points."""

    name: str
    color: str
    x: list[float]
    y: list[float]
    style: str = "-"


class Panel(NamedTuple):
    """One pair of axes, both logarithmic."""

    title: str
    across: str
    up: str
    lines: list[Line]


class Span(NamedTuple):
    """One box of the timeline: track, name, depth, begin and length in µs."""

    track: str
    name: str
    depth: int
    begin: float
    took: float


class Picture(NamedTuple):
    """What one file shows."""

    panels: list[Panel]
    spans: list[Span]
    title: str


# -- what is shown -------------------------------------------------------------------------------


def host_cost() -> Picture:
    """A speculative step's host time by batch, beside SGLang and beside a Python loop."""
    peer = _records(GPU / "peer_sglang.json")
    verbs = json.loads((HOST / "host.json").read_text("utf-8"))["benches"]["verbs"]
    at = {"page": 64, "until": RETURN}
    here = {"page": 64}
    return Picture(
        [
            Panel(
                "H200, beside SGLang 0.5.23",
                "requests",
                "host µs a step",
                [
                    _line("SGLang", ORANGE, peer, "batch", "reserve", "SGLang", "all steps", at),
                    _line("sgalloc", BLUE, peer, "batch", "reserve", SUBJECT, "all steps", at),
                ],
            ),
            Panel(
                "2 cores of an AMD EPYC, beside a Python loop",
                "requests",
                "host µs a step",
                [
                    _line("Python loop", GREY, verbs, "batch", "reserve", LOOP, "all steps", here),
                    _line("sgalloc", BLUE, verbs, "batch", "reserve", SUBJECT, "all steps", here),
                ],
            ),
        ],
        [],
        "reserve of 16 after 1 to 5 accepted tokens, page size 64",
    )


def kernel_limit() -> Picture:
    """Kernel time by bytes written, beside a memset of them and a fill of the same places."""
    records = _records(GPU / "kernels.json")
    panels = []
    for name, form, run in (("assign_pages", "places", 1), ("page_watermarks", "one reserve", 1)):
        at = {"page": 64, "run": run, "form": form}
        panels.append(
            Panel(
                f"{name}, pages of 64 apart from each other",
                "bytes written",
                "GPU µs a launch",
                [
                    _line("sgalloc", BLUE, records, "bytes", name, SUBJECT, "", at),
                    _line(
                        "strided fill", GREEN, records, "bytes", name, "strided fill", "", at, "--"
                    ),
                    _line("memset", GREY, records, "bytes", name, "memset", "", at, ":"),
                ],
            )
        )
    return Picture(panels, [], "H200, by replays of a graph of launches")


def crossover() -> Picture:
    """Where a copy overtakes mapped memory, and where the device rounds sooner."""
    records = _records(GPU / "crossover.json")
    launches = sorted({r["at"]["launch"] for r in records if r["name"] == "write"})
    writes = [
        _line(
            f"{side}, {launch}",
            color,
            records,
            "bytes",
            "write",
            side,
            "",
            {"launch": launch, "until": DONE},
            style,
        )
        for side, color in (("mapped", BLUE), ("copied", ORANGE))
        for launch, style in zip(launches, ("-", "--"), strict=False)
    ]
    rounding = [
        _line(
            f"{side} rounds, until {until}",
            color,
            records,
            "requests",
            "reserve",
            side,
            "",
            {"page": 16, "until": until},
            style,
        )
        for side, color in (("host", BLUE), ("device", ORANGE))
        for until, style in ((RETURN, "-"), (DONE, "--"))
    ]
    return Picture(
        [
            Panel("a step's plan: mapped memory or a copy", "bytes of the plan", "µs", writes),
            Panel("reserve at page 16: who rounds", "requests", "µs", rounding),
        ],
        [],
        "H200; the write until the table is written",
    )


def trace_file() -> Path:
    """The example trace that is shown: a GPU's where there is one."""
    there = GPU / "timeline.json"
    return there if there.exists() else HOST / "timeline.json"


def timeline() -> Picture:
    """The example trace from its prefill to the third step after it."""
    events = json.loads(trace_file().read_text("utf-8"))["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    boxes = [e for e in events if e["ph"] == "X"]
    begin = min(e["ts"] for e in boxes if e["name"] == "extend")
    end = sorted(e["ts"] + e["dur"] for e in boxes if e["name"] == "commit")[2]
    spans: list[Span] = []
    open_until: dict[tuple[int, int], list[float]] = {}
    for e in sorted(boxes, key=lambda e: (e["ts"], -e["dur"])):
        if not begin <= e["ts"] <= end:
            continue
        key = (e["pid"], e["tid"])
        stack = open_until.setdefault(key, [])
        while stack and stack[-1] <= e["ts"] + 1e-6:
            stack.pop()
        track = "host" if e["pid"] == 1 else tracks[key]
        spans.append(Span(track, e["name"], len(stack), round(e["ts"] - begin, 3), e["dur"]))
        stack.append(e["ts"] + e["dur"])
    where = "an H200" if trace_file().parent == GPU else "a CPU"
    return Picture([], spans, f"256 requests that speculate on {where}: one prefill, three steps")


def engine() -> Picture:
    """Steps of the example engine on sgalloc and on a naive allocator, overlapped."""
    document = json.loads((GPU / "engine.json").read_text("utf-8"))
    events = document["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans: list[Span] = []
    for pid in (pid for pid, name in names.items() if "overlapped" in name):
        boxes = sorted(
            (e for e in events if e["ph"] == "X" and e["pid"] == pid),
            key=lambda e: (e["ts"], -e["dur"]),
        )
        begin = [e["ts"] for e in boxes if e["name"] == "_decode"][-_ENGINE_STEPS]
        open_until: list[float] = []
        for e in boxes:
            if not begin <= e["ts"] < begin + _ENGINE_US:
                continue
            while open_until and open_until[-1] <= e["ts"] + 1e-6:
                open_until.pop()
            track = names[pid].partition(",")[0]
            at = round(e["ts"] - begin, 1)
            took = round(min(e["dur"], _ENGINE_US - at), 1)
            spans.append(Span(track, e["name"].lstrip("_"), len(open_until), at, took))
            open_until.append(e["ts"] + e["dur"])
    return Picture([], spans, f"256 requests of a 1B-shaped model on an {document['device']}")


PICTURES_BY_NAME: dict[str, Callable[[], Picture]] = {
    "host_cost": host_cost,
    "kernel_limit": kernel_limit,
    "crossover": crossover,
    "timeline": timeline,
    "engine": engine,
}


def hash_of(picture: Picture) -> str:
    """A hash of all that a picture shows."""
    return sha256(json.dumps(picture, sort_keys=True).encode()).hexdigest()


def noted_hash(path: Path) -> str | None:
    """The hash that a file has in it."""
    found = _HASH.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return found[1] if found else None


def _records(path: Path) -> list[Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["records"]
    return records


def _line(
    title: str,
    color: str,
    records: Sequence[Mapping[str, Any]],
    across: str,
    name: str,
    side: str,
    label: str,
    at: Mapping[str, Any],
    style: str = "-",
) -> Line:
    points = sorted(
        (record["at"][across], record["median_us"])
        for record in records
        if (record["name"], record["side"], record["label"]) == (name, side, label)
        and all(record["at"].get(key) == value for key, value in at.items())
    )
    if len(points) < 2 or len({x for x, _ in points}) != len(points):
        raise ValueError(f"{len(points)} points for {title}: two or more were expected, all apart")
    return Line(title, color, [x for x, _ in points], [y for _, y in points], style)


# -- drawing -------------------------------------------------------------------------------------


def draw(picture: Picture, path: Path) -> None:
    """Draw a picture into an SVG file that depends on nothing but what it shows."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": "sgalloc",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9,
    }
    with matplotlib.rc_context(settings):
        if picture.spans:
            figure = _draw_spans(picture)
        else:
            figure = Figure(figsize=(8.4, 3.1), layout="constrained")
            for axes, panel in zip(
                figure.subplots(1, len(picture.panels), squeeze=False)[0],
                picture.panels,
                strict=True,
            ):
                _draw_panel(axes, panel)
        figure.suptitle(picture.title, fontsize=9, color="#555555")
        note = f"data {hash_of(picture)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": note})


def _plain(value: float, _: Any) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _size(value: float, _: Any) -> str:
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:,g} {name}"
    return f"{value:g} B"


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for line in panel.lines:
        axes.plot(
            line.x,
            line.y,
            line.style,
            color=line.color,
            label=line.name,
            marker="o",
            markersize=3,
            linewidth=1.4,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(panel.title)
    axes.set_xlabel(panel.across)
    low, high = (f(y for line in panel.lines for y in line.y) for f in (min, max))
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.xaxis.set_major_formatter(FuncFormatter(_size if "bytes" in panel.across else _plain))
    axes.set_ylabel(panel.up)
    axes.minorticks_off()
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def _draw_spans(picture: Picture) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = list(dict.fromkeys(span.track for span in picture.spans))
    depth = {t: 1 + max(s.depth for s in picture.spans if s.track == t) for t in tracks}
    top, at = {}, 0.0
    for track in tracks:
        top[track] = at
        at += depth[track] + 0.8
    figure = Figure(figsize=(8.4, 1.0 + 0.32 * at), layout="constrained")
    axes = figure.subplots()
    end = max(span.begin + span.took for span in picture.spans)
    colors = {
        "forward": "#d0d0d0",
        "decode": "#c9d7e8",
        "prefill": "#e2d3ea",
        "land": "#e0e0e0",
        "plan": GREEN,
        "write": ORANGE,
        "stage": "#b8860b",
        "launch": "#b03a2e",
        "copy": "#7b4fa3",
    }
    used = dict.fromkeys(span.name.split(" (")[0] for span in picture.spans)
    shown = {"verbs": BLUE} | {name: color for name, color in colors.items() if name in used}
    for span in picture.spans:
        y = top[span.track] + span.depth
        color = colors.get(span.name.split(" (")[0], BLUE)
        axes.barh(
            y, span.took, left=span.begin, height=0.9, color=color, edgecolor="white", linewidth=0.3
        )
        # About the width of the letters, in µs.
        if span.took > end * 0.0115 * len(span.name):
            axes.text(
                span.begin + span.took / 2,
                y,
                span.name,
                ha="center",
                va="center",
                fontsize=7,
                color="black" if span.name in ("forward", "decode", "prefill", "land") else "white",
            )
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in shown.items()],
        loc="outside lower center",
        ncols=len(shown),
        frameon=False,
        fontsize=8,
    )
    axes.set_ylim(at - 0.6, -0.8)
    axes.set_xlim(0, end)
    axes.set_yticks([top[t] + (depth[t] - 1) / 2 for t in tracks], tracks)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("µs")
    return figure


# -- the page ------------------------------------------------------------------------------------


def made(name: str) -> str:
    """What stands in docs/profiling.md between the marks of ``name``."""
    if name == "compiled":
        return compiled.markdown(compiled.read())
    path = GPU / f"{name}.json"
    if not path.exists():
        return NOT_YET
    if name == "ncu":
        return ncu_table.markdown(ncu_table.read(path))
    assert name == "resources", name
    return resources.markdown(json.loads(path.read_text(encoding="utf-8")))


def fill(text: str) -> str:
    """The page with all its marked blocks made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{made(m[2])}\n{m[3]}", text)


@click.command()
@click.option("--write", is_flag=True, help="Make those anew that are not up to date.")
@click.option("--all", "everything", is_flag=True, help="With --write: all pictures anew.")
def main(write: bool, everything: bool) -> None:
    """Say which pictures and tables are not up to date, or make them."""
    for name, show in PICTURES_BY_NAME.items():
        path = PICTURES / f"{name}.svg"
        picture = show()
        current = noted_hash(path) == hash_of(picture)
        if write and (everything or not current):
            draw(picture, path)
            click.echo(f"wrote {path.relative_to(ROOT)}")
        elif not current:
            click.echo(f"{path.relative_to(ROOT)} is not up to date")
    text = PAGE.read_text(encoding="utf-8")
    filled = fill(text)
    if write and filled != text:
        PAGE.write_text(filled, encoding="utf-8")
        click.echo(f"wrote {PAGE.relative_to(ROOT)}")
    elif filled != text:
        click.echo(f"{PAGE.relative_to(ROOT)} is not up to date")


if __name__ == "__main__":
    main()
