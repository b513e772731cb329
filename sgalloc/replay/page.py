"""The report of a replay: ``report.json``, and one page with plots that needs nothing beside it."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from importlib.resources import files
from io import BytesIO
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sgalloc.replay.keys import KEYS
from sgalloc.replay.recording import MAP_OWNERS, Recording
from sgalloc.replay.summary import (
    JSON_NAME,
    ReportError,
    by_total,
    figures,
    headline,
    need_extra,
    show_count,
    show_number,
    show_share,
    summarise,
    write_json,
    write_text,
)
from sgalloc.replay.usage import pool_samples, samples, used

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["HTML_NAME", "JSON_NAME", "ReportError", "prepare_directory", "write_report"]

FloatArray = npt.NDArray[np.float64]

HTML_NAME = "report.html"

MAX_POINTS = 2_000
"""Stretches of virtual time that a plot shows at most."""

# From the palette of Okabe and Ito, which colour-blind readers can tell apart.
_BLUE, _SKY, _ORANGE, _VERMILION, _PURPLE = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7"
_GREEN, _GREY, _INK = "#009E73", "#E4E4E4", "#222222"
_OWNERS = {
    "owned": ("owned", _BLUE),
    "pinned": ("pinned", _GREEN),
    "locked": ("cached and locked", _VERMILION),
    "evictable": ("cached, evictable", _ORANGE),
    "quarantined": ("quarantined", _PURPLE),
    "free": ("free", _GREY),
}
_MAP_COLOURS = {
    "free": _GREY,
    "cached": _ORANGE,
    "quarantined": _PURPLE,
    "locked": _VERMILION,
    "pinned": _GREEN,
    "owned": _BLUE,
}
_TIME_AXIS = "virtual time, seconds"
_RASTER_DPI = 160


class Thinned(NamedTuple):
    """Samples, binned where there are more than a plot can show.

    Attributes:
        start: first time of each bin, virtual seconds, float64 ``(n,)``.
        end: where the last bin ends.
        mean, peak: mean and highest value of each column in each bin, float64 ``(n,)``.
        width: virtual seconds of a bin; 0.0 where nothing was thinned.
    """

    start: FloatArray
    end: float
    mean: dict[str, FloatArray]
    peak: dict[str, FloatArray]
    width: float


class Plot(NamedTuple):
    """A plot of the page: a data URI (None where there is nothing to show), and its caption."""

    key: str
    title: str
    uri: str | None
    caption: str


def prepare_directory(directory: str | PathLike[str]) -> Path:
    """Make the directory of a report; to be called before a run, so that trouble shows at once.

    Raises:
        ReportError: a package for the page is missing, the directory cannot be made or written,
            or a directory stands in the way of one of the files.
    """
    need_extra("report", "matplotlib", "jinja2")
    return _make_directory(directory)


def write_report(recording: Recording, directory: str | PathLike[str]) -> list[Path]:
    """Write ``report.json`` and ``report.html`` into ``directory``, made if need be.

    The numbers are written first, so that they survive where the page cannot be made.

    Raises:
        ReportError: as `prepare_directory`.
    """
    summary = summarise(recording)
    folder = _make_directory(directory)
    written = [write_json(summary, folder)]
    written.append(write_text(folder / HTML_NAME, render(recording, summary)))
    return written


def render(recording: Recording, summary: Mapping[str, Any]) -> str:
    """The page as HTML, with its style and its plots inside.

    Raises:
        ReportError: matplotlib or jinja2 is not installed.
    """
    need_extra("report", "matplotlib", "jinja2")
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(count=show_count, number=show_number, share=show_share)
    source = files("sgalloc.replay").joinpath("templates", HTML_NAME).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        summary=summary,
        headline=headline(summary),
        groups=figures(summary),
        plots=_plots(recording, summary),
        pools=_pool_plots(recording),
        verbs=by_total(summary["allocator"]["verbs"]),
        keys=KEYS,
    )


def thin(recording: Recording, pool: str | None = None) -> Thinned:
    """Bin the samples by virtual time, into `MAX_POINTS` bins where there are more samples.

    Args:
        recording: a run.
        pool: of which of its pools; the main one if None.
    """
    columns = samples(recording)
    time = columns.pop("time")
    if pool is not None:
        columns = pool_samples(recording, pool)
    columns["used"] = used(columns)
    if not time.size:
        return Thinned(time, 0.0, columns, columns, 0.0)
    end = max(recording.totals.virtual_seconds, float(time[-1]))
    if time.size <= MAX_POINTS:
        return Thinned(time, end, columns, columns, 0.0)
    width = (end - float(time[0])) / MAX_POINTS
    number = np.minimum((time - time[0]) / (width or 1.0), MAX_POINTS - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    count = np.diff(first, append=time.size)
    mean = {name: np.add.reduceat(column, first) / count for name, column in columns.items()}
    peak = {name: np.maximum.reduceat(column, first) for name, column in columns.items()}
    return Thinned(time[first], end, mean, peak, width)


def _make_directory(directory: str | PathLike[str]) -> Path:
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReportError(
            f"cannot write a report into {str(directory)!r} ({reason}): "
            "name a directory that can be made and written"
        ) from error
    for name in (JSON_NAME, HTML_NAME):
        if (folder / name).is_dir():
            raise ReportError(
                f"cannot write {folder / name} (it is a directory): "
                "move it away, or name another directory"
            )
    return folder


# -- plots -------------------------------------------------------------------------------------


def _plots(recording: Recording, summary: Mapping[str, Any]) -> dict[str, Plot]:
    thinned = thin(recording)
    binned = _binned(recording, thinned)
    sampled = bool(thinned.start.size)
    called = len(by_total(summary["allocator"]["verbs"]))
    per_cell = recording.num_pages / max(map(len, recording.map_frames), default=1)
    cell = f"{_tick(round(per_cell, 1))} pages of neighbouring ids" if per_cell > 1 else "a page"
    plots = [
        Plot(
            "occupancy",
            "Who holds the pool",
            _figure(_occupancy, thinned, recording.num_pages) if sampled else None,
            f"Share of the {recording.num_pages:,} pages by owner, at the start of each step. "
            + binned.format("the dark line is the highest use within each."),
        ),
        Plot(
            "requests",
            "Requests running and queued",
            _figure(_requests, thinned) if sampled else None,
            "At the start of each step. " + binned.format("the pale band reaches to the peak."),
        ),
        Plot(
            "time",
            "Time in the allocator, by step",
            _figure(_step_time, recording, summary) if recording.step_ns else None,
            "Host time of all calls of a step together, on a logarithmic scale.",
        ),
        Plot(
            "verbs",
            "Time in the allocator, by verb",
            _figure(_verb_time, summary, height=1.3 + 0.3 * called) if called else None,
            "Left: all calls together. Right: one call, from its median (dot) to its 99th "
            "percentile (bar).",
        ),
        Plot(
            "map",
            "Map of the pool",
            _figure(_map, recording, height=4.6) if recording.map_frames else None,
            f"A cell is {cell} at one moment, in the colour of what most of it was (cached: locked "
            "or not).",
        ),
    ]
    return {plot.key: plot for plot in plots}


def _pool_plots(recording: Recording) -> list[Plot]:
    """One plot for each pool beside the main one."""
    plots = []
    for name, pool in recording.pools.items():
        thinned = thin(recording, name)
        caption = f"Share of the {pool.num_pages:,} pages by owner, at the start of each step. "
        plots.append(
            Plot(
                "pool-" + name.replace(" ", "-"),
                f"Who holds the pool: {name}",
                _figure(_occupancy, thinned, pool.num_pages) if thinned.start.size else None,
                caption
                + _binned(recording, thinned).format("the dark line is the highest use within."),
            )
        )
    return plots


def _binned(recording: Recording, thinned: Thinned) -> str:
    if not thinned.width:
        return ""
    return (
        f"{len(samples(recording)['time']):,} samples are shown as means over stretches of "
        f"{thinned.width:.3g} virtual seconds; {{}}"
    )


def _figure(draw: Callable[..., None], *arguments: Any, height: float = 3.6) -> str:
    """Draw on a figure of its own, and return it as a data URI of an SVG.

    As an image of its own it shares no ids with the other plots of the page.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, height), layout="constrained", facecolor="white")
    draw(figure, *arguments)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    picture = BytesIO()
    # Without its metadata the SVG names no address but those of its XML namespaces.
    nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(picture, format="svg", dpi=_RASTER_DPI, metadata=nameless)
    return "data:image/svg+xml;base64," + base64.b64encode(picture.getvalue()).decode("ascii")


def _held(values: FloatArray) -> FloatArray:
    """A value holds until the next one, the last one to the end."""
    return np.append(values, values[-1:])


def _time_axis(axes: Axes, start: float, end: float) -> None:
    axes.set_xlim(start, end)
    axes.xaxis.set_major_formatter(_tick)
    axes.set_xlabel(_TIME_AXIS)


def _moments(thinned: Thinned) -> FloatArray:
    start = float(thinned.start[0])
    return np.append(thinned.start, thinned.end if thinned.end > start else start + 1.0)


def _occupancy(figure: Figure, thinned: Thinned, num_pages: int) -> None:
    axes = figure.add_subplot()
    moments = _moments(thinned)
    below = np.zeros(moments.size)
    for name, (label, colour) in _OWNERS.items():
        above = below + _held(thinned.mean[name]) * 100 / num_pages
        axes.fill_between(
            moments, below, above, step="post", color=colour, lw=0, label=label, rasterized=True
        )
        below = above
    if thinned.width:
        highest = _held(thinned.peak["used"]) * 100 / num_pages
        axes.step(moments, highest, where="post", color=_INK, lw=0.6, label="peak use")
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the pool, %")
    _time_axis(axes, moments[0], moments[-1])
    figure.legend(loc="outside upper center", ncols=7, frameon=False)


def _requests(figure: Figure, thinned: Thinned) -> None:
    moments = _moments(thinned)
    upper, lower = figure.subplots(2, sharex=True)
    for axes, name, colour in ((upper, "running", _BLUE), (lower, "queued", _VERMILION)):
        peak = _held(thinned.peak[name])
        axes.fill_between(
            moments, 0, peak, step="post", color=colour, alpha=0.3, lw=0, rasterized=True
        )
        axes.step(moments, _held(thinned.mean[name]), where="post", color=colour, lw=1.0)
        axes.set_ylim(0, max(1.0, 1.05 * float(thinned.peak[name].max())))
        _count_axis(axes, f"{name},\nrequests")
    figure.align_ylabels()
    _time_axis(lower, moments[0], moments[-1])
    upper.set_xlabel("")


def _log_axis(axes: Axes, low: float, high: float) -> tuple[float, float]:
    """A logarithmic scale over [low, high], widened to hold a labelled tick: its limits."""
    from matplotlib.ticker import LogLocator, NullFormatter

    middle = math.sqrt(low * high)
    low, high = min(low / 1.1, middle / 2), max(high * 1.1, middle * 2)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
    axes.xaxis.set_major_formatter(_tick)
    axes.xaxis.set_minor_formatter(NullFormatter())
    return low, high


def _count_axis(axes: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(_tick)
    axes.set_ylabel(label)


def _tick(value: float, _place: float = 0.0) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _step_time(figure: Figure, recording: Recording, summary: Mapping[str, Any]) -> None:
    axes = figure.add_subplot()
    # The clock cannot tell less than a nanosecond from nothing.
    times = np.maximum(np.array(recording.step_ns, np.float64), 1.0) / 1e3
    low, high = _log_axis(axes, float(times.min()), float(times.max()))
    counts, edges = np.histogram(times, np.geomspace(low, high, 81))
    axes.stairs(counts, edges, fill=True, color=_SKY)
    for name, line, colour in (("median", "--", _INK), ("p99", ":", _VERMILION)):
        value = summary["allocator"][f"step_{name}_us"]
        label = f"{name} {show_number(value)} µs"
        axes.axvline(max(value, 1e-3), color=colour, ls=line, lw=1.6, label=label)
    _count_axis(axes, "steps")
    axes.set_xlabel("time in the allocator, µs a step")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


def _verb_time(figure: Figure, summary: Mapping[str, Any]) -> None:
    rows = by_total(summary["allocator"]["verbs"])
    left, right = figure.subplots(1, 2, sharey=True)
    place = np.arange(len(rows))
    totals = [row["total_ms"] for _, row in rows]
    left.barh(place, totals, color=_SKY, height=0.7)
    left.set_xlim(0, 1.05 * max(totals) or 1.0)
    left.set_yticks(place, [verb for verb, _ in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.xaxis.set_major_formatter(_tick)
    left.set_xlabel("all calls, ms")
    median = np.array([max(row["median_us"], 1e-3) for _, row in rows])
    p99 = np.array([max(row["p99_us"], 1e-3) for _, row in rows])
    _log_axis(right, float(median.min()), float(p99.max()))
    right.hlines(place, median, p99, color=_BLUE, lw=1.6)
    right.plot(p99, place, "|", color=_BLUE, ms=9, mew=1.6)
    right.plot(median, place, "o", color=_BLUE, ms=5)
    right.set_xlabel("one call, µs: median to p99")
    right.grid(axis="x", color=_GREY, lw=0.6)
    right.set_axisbelow(True)


def _map(figure: Figure, recording: Recording) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    count = min(len(recording.map_times), len(recording.map_frames))
    times = np.array(recording.map_times[:count], np.float64)
    end = max(recording.totals.virtual_seconds, float(times[-1]))
    moments = np.append(times, end if end > times[0] else times[0] + 1.0)
    cells = np.stack(recording.map_frames[:count], axis=1)
    ids = np.linspace(1, recording.num_pages + 1, len(cells) + 1)
    colours = [_MAP_COLOURS[owner] for owner in MAP_OWNERS]
    axes.pcolormesh(
        *(moments, ids, cells),
        cmap=ListedColormap(colours),
        norm=BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours)),
        rasterized=True,
    )
    _count_axis(axes, "page id")
    _time_axis(axes, moments[0], moments[-1])
    figure.legend(
        handles=[Patch(color=_MAP_COLOURS[owner], label=owner) for owner in MAP_OWNERS[::-1]],
        loc="outside upper center",
        ncols=len(colours),
        frameon=False,
    )
