"""``sgalloc bench``: what a step costs on this machine, beside the results that were shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from sgalloc.bench import short
from sgalloc.device import cuda_missing

_LEAST_SECONDS = 0.1


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(_LEAST_SECONDS),
    default=10.0,
    show_default=True,
    help="About how long to measure.",
)
@click.option(
    "--device",
    type=str,
    default="auto",
    show_default=True,
    help="A GPU to measure, too: cuda, cuda:N; cpu for none; auto where there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def bench(seconds: float, device: str, as_json: bool) -> None:
    """Measure steps of 256 requests here, beside a plain Python loop and beside shipped results.

    Compare machines by the columns on the right, and runs on one machine only while it is idle.
    """
    missing = cuda_missing()
    chosen: str | None = "cuda" if device == "auto" else device
    if device == "cpu" or (device == "auto" and missing is not None):
        chosen = None
    elif missing is not None:
        raise click.BadParameter(f"{missing}; or use --device cpu", param_hint="--device")
    try:
        data = short.run(seconds, chosen)
    except ValueError as refusal:
        raise click.BadParameter(str(refusal), param_hint="--device") from None
    beside = short.shipped()
    rows = short.compared(data, beside)
    if as_json:
        machines = {name: beside[name]["environment"] for name in ("host", "gpu")}
        compared = [row._asdict() for row in rows]
        click.echo(json.dumps({**data, "compared": compared, "shipped": machines}, indent=1))
        return
    show(Console(), data, beside, rows)


def show(
    console: Console, data: Mapping[str, Any], beside: Mapping[str, Any], rows: list[short.Row]
) -> None:
    """Print the table, and what it was measured on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("µs a call")
    table.add_column("page", justify="right")
    table.add_column("turns")
    for name in ("here", "p10–p90", "shipped", "here/shipped", "loop here", "loop/here"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.call,
            str(row.page),
            row.turns.replace("in blocks of 100 steps", "in blocks"),
            _us(row.here),
            f"{_us(row.low)}–{_us(row.high)}",
            _us(row.there),
            _times(row.here, row.there),
            _us(row.loop),
            _times(row.loop, row.here),
        )
    console.print(table)
    run = data["run"]
    console.print(f"Here: {_machine(data['environment'])}", highlight=False)
    if data["gpu"] is not None:
        console.print(f"GPU here: {data['gpu']}", highlight=False)
    console.print(f"Shipped: {_machine(beside['host']['environment'])}", highlight=False)
    gpu = beside["gpu"]["environment"]
    if data["gpu"] is not None:
        console.print(f"Shipped, GPU: {gpu['gpu']}, {gpu['cpu']}", highlight=False)
    idle = "" if run["otherwise_idle"] else ": measure again on an idle machine"
    console.print(
        f"{run['seconds']:.0f} s; other processes used {run['other_cores']:.2f} cores{idle}. The "
        f"two sides' states were compared {run['states_compared']} times and were equal.",
        highlight=False,
    )


def _machine(environment: Mapping[str, Any]) -> str:
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['python']}, "
        f"NumPy {environment['numpy']}, sgalloc {environment['sgalloc']}"
    )


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _times(value: float | None, by: float | None) -> str:
    return "" if value is None or not by else f"{value / by:.2f}×"
