"""``sgalloc replay --journal``: the calls of a journal, run again."""

from __future__ import annotations

import sys
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgalloc.errors import LawViolation
from sgalloc.trust.journal import DIGEST_EVERY
from sgalloc.trust.rerun import Diverged, Rerun, Touch, Watch

_OPTIONS = ("journal", "until", "page", "row", "group")
_ALSO = ("check_every", "old")
_HOLDERS = {0: "free", -1: "cached", -2: "in quarantine", -4: "pinned"}


def replayed_journal(context: click.Context, given: dict[str, Any]) -> bool:
    """Run a journal again, if one was named; options of it are taken out of ``given``.

    Raises:
        ValueError: options that do not go together; a journal that cannot be read.
    """
    own = {name: given.pop(name) for name in _OPTIONS}
    if own["journal"] is None:
        for name, value in own.items():
            if value is not None:
                raise ValueError(f"--{name} does nothing alone: add --journal")
        return False
    for name in given:
        if name not in _ALSO and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ValueError(
                f"--{name.replace('_', '-')} is for traffic, and --journal runs what is in the "
                "journal: leave it out"
            )
    if own["group"] is not None and own["page"] is None:
        raise ValueError("--group does nothing alone: add --page")
    if given["check_every"] < 0:
        raise ValueError(f"--check-every is {given['check_every']}: give calls, or 0 for never")
    run = Rerun(own["journal"], Watch(own["page"], own["row"], own["group"]))
    try:
        _run(run, own["until"], given["check_every"])
    except (Diverged, LawViolation) as problem:
        Console().print(_table(run))
        click.echo(f"sgalloc replay: {' '.join(str(problem).split())}", err=True)
        sys.exit(1)
    Console().print(_table(run))
    _calls(run, own)
    until = own["until"]
    if until is not None and run.records < until:
        click.echo(f"the journal has {run.records} records, so nothing was left to stop before")
    elif until is None:
        click.echo(_ending(run))
    return True


def _run(run: Rerun, until: int | None, check_every: int) -> None:
    """Run it, behind a bar of the bytes that were read."""
    with Progress(
        TextColumn("journal"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bars:
        task = bars.add_task("", total=run.size)

        def show(records: int) -> None:
            if not records % DIGEST_EVERY:
                bars.update(task, completed=run.offset)

        run.run(until, check_every, show)
        bars.update(task, completed=run.offset)


def _table(run: Rerun) -> Table:
    alloc = run.alloc
    stats = alloc.stats()
    table = Table.grid(padding=(0, 2))
    made = {key: value for key, value in run.config.items() if key not in ("sgalloc", "device")}
    rows = [
        ("written by", f"sgalloc {run.config.get('sgalloc')} on {run.config.get('device')}"),
        ("made with", ", ".join(f"{key}={value}" for key, value in made.items())),
        ("records", f"{run.records:,}"),
        ("calls", f"{run.calls:,}, {run.refused:,} of them refused"),
        ("refusals taken on trust", f"{run.unheard:,}"),
        ("returned behind events", f"{run.settled:,}"),
        ("digests compared", f"{run.digests:,}"),
        (
            "rows",
            f"{stats.rows.open} open, {stats.rows.free} free, {stats.rows.quarantined} waiting",
        ),
        ("tokens", f"{stats.committed:,} committed, {stats.allocated:,} allocated"),
    ]
    for name, group in stats.groups.items():
        places = ("free", "owned", "cached", "locked", "pinned", "quarantined")
        held = ", ".join(f"{getattr(group, place):,} {place}" for place in places)
        rows.append((f"pages of {name}", f"{held}, of {group.total:,}"))
    for label, text in rows:
        table.add_row(label, text)
    return table


def _calls(run: Rerun, own: dict[str, Any]) -> None:
    what = " and ".join(f"{name} {own[name]}" for name in ("page", "row") if own[name] is not None)
    if not what:
        return
    if not run.touches:
        click.echo(f"no call had to do with {what}")
        return
    click.echo(f"last calls that had to do with {what}:")
    for touch in run.touches:
        click.echo(f"  {_line(touch)}")


def _line(touch: Touch) -> str:
    named = touch.rows.tolist()
    rows = ", ".join(map(str, named[:8])) + (", ..." if len(named) > 8 else "")
    line = f"record {touch.record}: {touch.verb}" + (f" of rows {rows}" if named else "")
    if touch.refused:
        return f"{line}, refused with {touch.refused}"
    if touch.holder is not None:
        holder = _HOLDERS.get(touch.holder, f"with row {touch.holder}")
        return f"{line}; the page is {holder} afterwards"
    return line


def _ending(run: Rerun) -> str:
    alike = "every call went as it did"
    if run.torn:
        return f"{alike}; the last record was not written to its end: {run.torn} bytes are left out"
    if not run.closed:
        return f"{alike}; the journal was not closed, so its last calls may be missing"
    return f"{alike}, and the journal was closed"
