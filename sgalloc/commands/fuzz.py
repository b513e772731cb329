"""``sgalloc fuzz``: random walks, each call held against a naive allocator."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgalloc import __version__
from sgalloc.device import open_device
from sgalloc.fuzz.running import Setting, batches, worlds_for
from sgalloc.fuzz.shrink import shrink
from sgalloc.fuzz.walk import Failure, Tally, run_calls, run_world
from sgalloc.trust import old_behaviour

_MOST_CALLS_SHOWN = 40


@click.command()
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Time.  [default: 60]")
@click.option("--calls", type=click.IntRange(1), help="Calls to make, in place of a time.")
@click.option("--world", type=click.IntRange(0), help="One world alone, by its number.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all worlds.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--device", default="cpu", show_default=True, help="Where the tables live.")
@click.option(
    "--laws-every",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Calls from one proof of both laws, and look at everything, to the next.",
)
@click.option(
    "--shrink-seconds", type=click.FloatRange(0), default=60.0, show_default=True,
    help="Time to make a failing walk shorter.",
)  # fmt: skip
@click.option(
    "--journal", type=click.Path(path_type=Path),
    help="Where a failing walk is written.  [default: fuzz-SEED-WORLD.journal]",
)  # fmt: skip
@click.option(
    "--old",
    help="Old behaviours to switch on, apart by commas, to see the fuzz find them: "
    f"{', '.join(old_behaviour.names())}.",
)
@click.option("--json", "report", type=click.Path(path_type=Path), help="File for the numbers.")
def fuzz(**given: Any) -> None:
    """Compare the allocator with a naive one, call by call.

    Each world is a random configuration and a walk of some 500 public calls, drawn from the seed
    and the number of the world alone: the same worlds are walked with any number of workers. Each
    answer, each refusal and what each call left are compared, both laws and everything else every
    16th call. A walk that fails is made short and written as a journal, and the exit status is 1.
    """
    if sum(given[name] is not None for name in ("seconds", "calls", "world")) > 1:
        _refuse("give one of --seconds, --calls and --world")
    if given["world"] is not None and given["workers"] > 1:
        _refuse("--world is one walk: leave out --workers")
    if given["old"] and given["workers"] > 1:
        _refuse("--old is for one process: leave out --workers")
    which = () if given["old"] is None else tuple(n.strip() for n in given["old"].split(","))
    try:
        open_device(given["device"], 1, 1, 1)
        with old_behaviour.switched_on(*which):
            pass
    except ValueError as error:
        _refuse(str(error))
    with old_behaviour.switched_on(*which):
        _fuzz(given)


def _fuzz(given: dict[str, Any]) -> None:
    setting = Setting(given["seed"], given["device"], given["laws_every"])
    begun = monotonic()
    tally, failures = _run(setting, given)
    seconds = monotonic() - begun
    console = Console()
    console.print(_table(tally, seconds))
    failures.sort(key=lambda failure: failure.world)
    if given["report"] is not None:
        _write(given["report"], _report(tally, failures, seconds, given))
    if failures:
        _explain(failures[0], given)
        sys.exit(1)


def _run(setting: Setting, given: dict[str, Any]) -> tuple[Tally, list[Failure]]:
    """All worlds, until one fails or the time is over; Ctrl-C ends the run, too."""
    tally, failures = Tally(), []  # type: tuple[Tally, list[Failure]]
    if given["world"] is not None:
        made, failure = run_world(setting.seed, given["world"], setting.device, setting.laws_every)
        return made, [] if failure is None else [failure]
    worlds = None if given["calls"] is None else worlds_for(given["calls"])
    until = monotonic() + (given["seconds"] or 60.0) if worlds is None else None

    def go_on() -> bool:
        return not failures and (until is None or monotonic() < until)

    with Progress(
        SpinnerColumn(),
        TextColumn("fuzz"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        task, begun = bars.add_task("", note=""), monotonic()
        try:
            for batch in batches(setting, worlds, given["workers"], go_on):
                tally.add(batch.tally)
                failures += batch.failures
                rate = tally.calls / max(monotonic() - begun, 1e-9)
                note = f"{tally.calls:,} calls, {tally.worlds:,} worlds, {rate:,.0f} a second"
                bars.update(task, note=note)
        except KeyboardInterrupt:
            click.echo("sgalloc fuzz: interrupted", err=True)
    return tally, failures


def _table(tally: Tally, seconds: float) -> Table:
    """Calls by verb, with what was refused."""
    rate = tally.calls / max(seconds, 1e-9)
    table = Table(
        title=f"{tally.calls:,} calls compared in {tally.worlds:,} worlds, {seconds:,.1f} s, "
        f"{rate:,.0f} a second; {tally.evicted:,} pages evicted",
        title_justify="left",
    )
    table.add_column("verb")
    table.add_column("done", justify="right")
    table.add_column("refused, by reason")
    refused: dict[str, list[str]] = {}
    for name, count in sorted(tally.refused.items()):
        verb, _, kind = name.partition(": ")
        refused.setdefault(verb, []).append(f"{kind or 'all'} {count:,}")
    for verb in sorted({*tally.seen, *refused}):
        table.add_row(verb, f"{tally.seen[verb]:,}", ", ".join(refused.get(verb, [])))
    return table


def _report(
    tally: Tally, failures: list[Failure], seconds: float, given: dict[str, Any]
) -> dict[str, Any]:
    """The numbers of a run, for a file."""
    return {
        "sgalloc": __version__,
        "machine": {
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "seed": given["seed"],
        "device": given["device"],
        "workers": given["workers"],
        "laws_every": given["laws_every"],
        "seconds": round(seconds, 1),
        "worlds": tally.worlds,
        "calls": tally.calls,
        "calls_per_second": round(tally.calls / max(seconds, 1e-9)),
        "evicted_pages": tally.evicted,
        "done": dict(sorted(tally.seen.items())),
        "refused": dict(sorted(tally.refused.items())),
        "failures": [{"world": one.world, "message": one.message} for one in failures],
    }


def _processor() -> str:
    """What the machine calls its processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _explain(failure: Failure, given: dict[str, Any]) -> None:
    """Shrink a failure, tell it, and write its journal."""
    click.echo(f"world {failure.world} of seed {failure.seed} failed: {failure.message}", err=True)
    until = monotonic() + given["shrink_seconds"]
    short = shrink(failure, lambda: monotonic() < until, given["device"])
    click.echo(f"{short.config}", err=True)
    click.echo(f"{len(short.calls)} of {len(failure.calls)} calls are enough:", err=True)
    for call in short.calls[-_MOST_CALLS_SHOWN:]:
        click.echo(f"  {call}", err=True)
    click.echo(short.message, err=True)
    path = given["journal"] or Path(f"fuzz-{failure.seed}-{failure.world}.journal")
    path.unlink(missing_ok=True)
    run_calls(short.config, short.calls, given["device"], str(path))
    click.echo(f"wrote {path}: sgalloc replay --journal {path} --check-every 1", err=True)
    again = f"sgalloc fuzz --seed {failure.seed} --world {failure.world}"
    if given["old"]:
        again += f" --old {given['old']}"
    if given["device"] != "cpu":
        again += f" --device {given['device']}"
    click.echo(f"again: {again}", err=True)


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _refuse(f"the numbers cannot be written: {error}")


def _refuse(line: str) -> NoReturn:
    click.echo(f"sgalloc fuzz: {line}", err=True)
    sys.exit(2)
