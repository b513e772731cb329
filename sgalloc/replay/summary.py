"""The outcome of a replay in numbers: as JSON for a program, as a table for a person."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sgalloc.replay.recording import Recording
from sgalloc.replay.usage import (
    FloatArray,
    pool_use,
    pools_use,
    ratio,
    sparse_use,
    transfer_use,
    window_use,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

FORMAT = 1
"""Version of the layout of `summarise`; it changes when a key is removed or means another thing."""

JSON_NAME = "report.json"


class ReportError(ValueError):
    """The report cannot be written; the message says why and what to do."""


def summarise(recording: Recording) -> dict[str, Any]:
    """The outcome of a replay: plain JSON types, all numbers finite, laid out as `keys.KEYS`."""
    totals = recording.totals
    done = totals.finished + totals.aborted + totals.refused
    tree: dict[str, Any] = {
        "format": FORMAT,
        "workload": recording.workload,
        "device": recording.device,
        "config": recording.config,
        "pool": {"pages": recording.num_pages, "page_tokens": recording.page_size},
        "requests": {
            "total": totals.requests,
            "finished": totals.finished,
            "aborted": totals.aborted,
            "refused": totals.refused,
            "unfinished": totals.requests - done,
            "peak_running": totals.peak_running,
            "retractions": totals.retractions,
        },
        "tokens": {
            "prompt": totals.prompt_tokens,
            "looked_up": totals.looked_up,
            "hit": totals.hit,
            "prefilled": totals.prefilled,
            "decoded": totals.decoded,
        },
        "prefix_cache": {
            "hit_share": ratio(totals.hit, totals.looked_up),
            "evicted_pages": totals.evicted,
        },
        "time": {
            "steps": totals.steps,
            "virtual_seconds": totals.virtual_seconds,
            "wall_seconds": totals.wall_seconds,
        },
        **pool_use(recording),
        "pressure": {
            "steps": totals.pressed_steps,
            "lowest_filled_share": totals.waiting_pressure if totals.pressed_steps else None,
        },
        "speculation": {
            "request_steps": totals.speculative_steps,
            "committed_tokens": totals.accepted,
            "mean_committed_tokens": ratio(totals.accepted, totals.speculative_steps),
            "reserve_tokens": recording.reserve or None,
            "mean_tail_tokens": ratio(totals.reserved_tail, totals.speculative_steps),
            "moved_tokens": totals.moves,
            "discarded_steps": totals.discarded_steps,
        },
        "window": window_use(recording),
        "sparse": sparse_use(recording),
        "disaggregation": transfer_use(recording),
        "pools": pools_use(recording),
        "allocator": _allocator_time(recording),
        "verdict": _verdict(recording),
    }
    plain: dict[str, Any] = _plain(tree)
    return plain


def write_json(summary: Mapping[str, Any], directory: str | PathLike[str]) -> Path:
    """Write ``report.json`` into a directory that exists, and return its path.

    Raises:
        ReportError: the file cannot be written.
    """
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    return write_text(Path(directory) / JSON_NAME, text + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a file of the report, in UTF-8, and return its path; ReportError where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReportError(
            f"cannot write {path} ({reason}): free that path, or name another directory"
        ) from error
    return path


def need_extra(extra: str, *modules: str) -> None:
    """Raise a ReportError that names the extra to install, unless its modules are there."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ReportError(f"{missing[0]} is not installed: pip install 'sgalloc[{extra}]'")


# -- the numbers -------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """The value in JSON types: a number that is not finite becomes null, an object its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _allocator_time(recording: Recording) -> dict[str, Any]:
    steps = _nanoseconds(recording.step_ns)
    verbs = {verb: _nanoseconds(calls) for verb, calls in recording.verbs.items()}
    whole = sum(float(calls.sum()) for calls in verbs.values())
    return {
        "step_median_us": _microseconds(steps, np.median),
        "step_p99_us": _microseconds(steps, _p99),
        "step_mean_us": _microseconds(steps, np.mean),
        "total_ms": float(steps.sum()) / 1e6,
        "verbs": {
            verb: {
                "calls": calls.size,
                "median_us": _microseconds(calls, np.median),
                "p99_us": _microseconds(calls, _p99),
                "total_ms": float(calls.sum()) / 1e6,
                "share": ratio(float(calls.sum()), whole),
            }
            for verb, calls in verbs.items()
        },
    }


def _nanoseconds(calls: array[int]) -> FloatArray:
    return np.array(calls, np.float64)


def _microseconds(calls: FloatArray, measure: Callable[[FloatArray], Any]) -> float | None:
    return float(measure(calls)) / 1e3 if calls.size else None


def _p99(calls: FloatArray) -> Any:
    return np.percentile(calls, 99)


def _verdict(recording: Recording) -> dict[str, Any]:
    pages, rows = recording.leaked_pages, recording.leaked_rows
    faults = []
    if recording.violation is not None:
        faults.append(recording.violation)
    if pages or rows:
        faults.append(f"{_many(pages, 'page')} and {_many(rows, 'row')} did not come back")
    if faults:
        text = "broken: " + "; ".join(faults)
    else:
        text = "sound: no law was broken, and every page and row came back"
    if recording.interrupted:
        text += " (interrupted before the end of the workload)"
    # A broken law ends the run before anything is counted.
    counted = recording.violation is None
    return {
        "outcome": "sound" if recording.sound else "broken",
        "text": text,
        "violation": recording.violation,
        "interrupted": recording.interrupted,
        "leaked_pages": pages if counted or pages else None,
        "leaked_rows": rows if counted or rows else None,
    }


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# -- what a person reads -----------------------------------------------------------------------


def show_count(value: float | None) -> str:
    """A whole number with its thousands apart; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def show_share(value: float | None) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.1f} %"


def show_number(value: float | None) -> str:
    """A measure, with more digits behind the point where it is small."""
    if value is None:
        return "–"
    if value == 0 or value >= 10:
        return f"{value:,.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


_FIGURES: dict[str, tuple[tuple[str, str, Callable[[float | None], str], str], ...]] = {
    "Requests": (
        ("total", "requests.total", show_count, ""),
        ("finished", "requests.finished", show_count, ""),
        ("aborted", "requests.aborted", show_count, ""),
        ("refused", "requests.refused", show_count, ""),
        ("unfinished", "requests.unfinished", show_count, ""),
        ("peak running", "requests.peak_running", show_count, ""),
        ("retractions", "requests.retractions", show_count, ""),
    ),
    "Tokens": (
        ("prompts", "tokens.prompt", show_count, ""),
        ("looked up in cache", "tokens.looked_up", show_count, ""),
        ("found there", "tokens.hit", show_count, ""),
        ("prefix hit rate", "prefix_cache.hit_share", show_share, ""),
        ("prefilled", "tokens.prefilled", show_count, ""),
        ("decoded", "tokens.decoded", show_count, ""),
    ),
    "Time": (
        ("steps", "time.steps", show_count, ""),
        ("virtual", "time.virtual_seconds", show_number, " s"),
        ("wall", "time.wall_seconds", show_number, " s"),
        ("allocator, total", "allocator.total_ms", show_number, " ms"),
        ("allocator/step median", "allocator.step_median_us", show_number, " µs"),
        ("allocator/step p99", "allocator.step_p99_us", show_number, " µs"),
        ("allocator/step mean", "allocator.step_mean_us", show_number, " µs"),
    ),
    "Pool": (
        ("occupied, mean", "occupancy.mean_share", show_share, ""),
        ("occupied, peak", "occupancy.peak_share", show_share, ""),
        ("owned or locked, mean", "occupancy.held_mean_share", show_share, ""),
        ("owned or locked, peak", "occupancy.held_peak_share", show_share, ""),
        ("tail waste, tokens", "tail_waste.mean_tokens", show_count, ""),
        ("tail waste, share", "tail_waste.share", show_share, ""),
        ("evicted pages", "prefix_cache.evicted_pages", show_count, ""),
        ("steps under pressure", "pressure.steps", show_count, ""),
        ("filled then, at least", "pressure.lowest_filled_share", show_share, ""),
    ),
    "Speculation": (
        ("per speculative step", "speculation.mean_committed_tokens", show_number, ""),
        ("reserved for it", "speculation.reserve_tokens", show_count, ""),
        ("tail in a step", "speculation.mean_tail_tokens", show_number, ""),
        ("moved in trees", "speculation.moved_tokens", show_count, ""),
        ("steps discarded", "speculation.discarded_steps", show_count, ""),
    ),
    "Window": (
        ("tokens", "window.tokens", show_count, ""),
        ("pages held, mean", "window.held_mean_pages", show_count, ""),
        ("pages held, peak", "window.held_peak_pages", show_count, ""),
        ("pages saved, mean", "window.saved_mean_pages", show_count, ""),
        ("saved, share", "window.saved_share", show_share, ""),
        ("left the window", "window.evicted_pages", show_count, ""),
        ("retractions for it", "window.retractions", show_count, ""),
        ("without their prefix", "window.unshared_requests", show_count, ""),
    ),
    "Sparse": (
        ("given back, thinned", "sparse.thinned_pages", show_count, ""),
        ("device pages, mean", "sparse.held_mean_pages", show_count, ""),
        ("device pages, peak", "sparse.held_peak_pages", show_count, ""),
        ("dense, mean", "sparse.dense_mean_pages", show_count, ""),
        ("device pages saved", "sparse.saved_share", show_share, ""),
        ("retractions for them", "sparse.retractions", show_count, ""),
        ("waits, logical", "sparse.logical_waits", show_count, ""),
        ("waits, device", "sparse.device_waits", show_count, ""),
    ),
    "Transfers": (
        ("begun", "disaggregation.transfers", show_count, ""),
        ("live", "disaggregation.live", show_count, ""),
        ("aborted", "disaggregation.aborted", show_count, ""),
        ("given up", "disaggregation.reclaimed", show_count, ""),
        ("tokens sent", "disaggregation.sent_tokens", show_count, ""),
        ("found instead", "disaggregation.matched_tokens", show_count, ""),
        ("extents", "disaggregation.extents", show_count, ""),
        ("pages an extent", "disaggregation.mean_run_pages", show_number, ""),
        ("pinned pages, mean", "disaggregation.pinned_mean_pages", show_count, ""),
        ("pinned pages, peak", "disaggregation.pinned_peak_pages", show_count, ""),
        ("to live, mean", "disaggregation.live_mean_seconds", show_number, " s"),
        ("to live, longest", "disaggregation.live_most_seconds", show_number, " s"),
        ("prefill steps", "disaggregation.prefill_steps", show_count, ""),
        ("prefill retractions", "disaggregation.prefill_retractions", show_count, ""),
    ),
}
# Left out where there is nothing to say: figures that are 0, and groups whose first is null.
_IF_ANY = ("requests.unfinished", "speculation.moved_tokens", "speculation.discarded_steps")
_GROUP_IF_ANY = ("Speculation", "Window", "Sparse", "Transfers")


def figures(summary: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The headline figures in words, as groups of ``(label, value)``."""

    def value(key: str) -> Any:
        group, name = key.split(".")
        return summary[group][name]

    return [
        (
            title,
            [
                (label, show(value(key)) + (unit if value(key) is not None else ""))
                for label, key, show, unit in rows
                if key not in _IF_ANY or value(key)
            ],
        )
        for title, rows in _FIGURES.items()
        if title not in _GROUP_IF_ANY or value(rows[0][1]) is not None
    ]


def headline(summary: Mapping[str, Any]) -> str:
    """What was run, in a line."""
    pool = summary["pool"]
    return (
        f"{summary['workload']}: {_many(pool['pages'], 'page')} of "
        f"{_many(pool['page_tokens'], 'token')} on {summary['device']}"
    )


def to_table(summary: Mapping[str, Any]) -> Group:
    """The outcome for a terminal or a file, to be printed by a rich console.

    It is made for 80 columns; on fewer, text is folded and nothing is cut off.

    Raises:
        ReportError: rich is not installed.
    """
    need_extra("cli", "rich")
    from rich.console import Group
    from rich.text import Text

    good = summary["verdict"]["outcome"] == "sound"
    verdict = summary["verdict"]["text"]
    parts: list[Text | Table] = [
        Text(headline(summary), style="bold"),
        Text(""),
        _figures_table(summary),
        Text(""),
    ]
    verbs = by_total(summary["allocator"]["verbs"])
    if verbs:
        parts += [_verbs_table(verbs), Text("")]
    parts.append(Text(verdict, style="bold green" if good else "bold red"))
    return Group(*parts)


def _figures_table(summary: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    groups = figures(summary)
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True, overflow="fold")

    def lines(chosen: Iterable[tuple[str, list[tuple[str, str]]]]) -> list[tuple[Text, Text]]:
        found: list[tuple[Text, Text]] = []
        for title, pairs in chosen:
            if found:
                found.append((Text(""), Text("")))
            found.append((Text(title, style="bold"), Text("")))
            found += [(Text(f"  {label}"), Text(value)) for label, value in pairs]
        return found

    blank = (Text(""), Text(""))
    for left, right in zip_longest(lines(groups[::2]), lines(groups[1::2]), fillvalue=blank):
        table.add_row(*left, *right)
    return table


def _verbs_table(verbs: Iterable[tuple[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Allocator time by verb", overflow="fold")
    for name in ("calls", "median µs", "p99 µs", "total ms", "share"):
        table.add_column(name, justify="right", overflow="fold")
    for verb, row in verbs:
        table.add_row(
            Text(verb),
            show_count(row["calls"]),
            show_number(row["median_us"]),
            show_number(row["p99_us"]),
            show_number(row["total_ms"]),
            show_share(row["share"]),
        )
    return table


def by_total(verbs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The verbs that were called, those that took most time first."""
    called = [(verb, row) for verb, row in verbs.items() if row["calls"]]
    return sorted(called, key=lambda item: -item[1]["total_ms"])
