"""Run the host benchmarks: `python -m profiling.bench_host --help`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from profiling import (
    answers,
    breakdown,
    cache_verbs,
    group_verbs,
    question,
    scaling,
    verbs,
    window_verbs,
)
from sgalloc.bench import aim, machine, measured
from sgalloc.bench.harness import Effort
from sgalloc.bench.measured import Bench


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is measured.

    Attributes:
        effort: what the run is called in its results.
        seconds: of one measurement, as `Effort` takes it.
        least: rounds of one measurement, at least.
        batches: requests.
        pages: page sizes.
        moved: pages moved by one growth.
        pools: pages of a pool.
        histories: tokens.
        parts: batches at which the plain loop is taken apart.
        grouped: requests that speculate, or have a second group.
        received: requests that are preallocated at once.
    """

    effort: str
    seconds: float
    least: int
    batches: tuple[int, ...]
    pages: tuple[int, ...]
    moved: tuple[int, ...]
    pools: tuple[int, ...]
    histories: tuple[int, ...]
    parts: tuple[int, ...]
    grouped: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def pace(self) -> Effort:
        """For the many cells of a table."""
        return Effort(self.seconds, self.least)

    @property
    def steady(self) -> Effort:
        """For the few that matter most."""
        return Effort(5 * self.seconds, self.least, most=5000, warm_up=10)


FULL = Size(
    effort="full",
    seconds=0.25,
    least=5,
    batches=(1, 16, 256, 4096, 65536),
    pages=(1, 16, 64),
    moved=(16, 160, 1600, 16000, 160000),
    pools=(1000, 10_000, 100_000, 1_000_000, 10_000_000),
    histories=(64, 1024, 8192, 65536),
    parts=(32, 256, 1024),
    grouped=(256, 4096),
    received=(1, 64, 256),
)
QUICK = Size(
    effort="quick",
    seconds=0.05,
    least=5,
    batches=(1, 256, 4096),
    pages=(1, 64),
    moved=(16, 1600, 16000),
    pools=(1000, 100_000),
    histories=(64, 8192),
    parts=(32, 256),
    grouped=(256,),
    received=(1, 64),
)

RUNNERS: dict[str, Callable[[Size], Bench]] = {
    "aim": lambda size: aim.run((64, 16, 1), size.steady),
    "verbs": lambda size: verbs.run(size.batches, size.pages, size.pace),
    "cache": lambda size: cache_verbs.run(size.batches, size.pages, size.pace),
    "groups": lambda size: group_verbs.run(
        size.grouped, [page for page in size.pages if page > 1], size.received, size.pace
    ),
    "window": lambda size: window_verbs.run(
        size.grouped, [page for page in size.pages if page > 1], size.pace
    ),
    "scaling": lambda size: scaling.run(size.moved, size.pools, size.histories, size.pace),
    "breakdown": lambda size: breakdown.run((64, 16, 1), size.steady),
    "prices": lambda size: breakdown.prices(size.pace),
    "loop-parts": lambda size: breakdown.loop_parts(size.parts, size.pace),
    "first-touch": lambda size: scaling.first_touch(size.pace),
}


def measure(size: Size, names: tuple[str, ...], console: Console) -> dict[str, Any]:
    """Run the benchmarks ``names``, print their tables, and return the document."""
    environment = machine.environment()
    watch = machine.Watch()
    benches: dict[str, Bench] = {}
    for name in names:
        with console.status(f"{name} ..."):
            benches[name] = RUNNERS[name](size)
        part = measured.document({}, {}, {name: benches[name]})
        for table in answers.build(part, name):
            console.print(table.rich())
    run = watch.report(size.effort, sum(bench.states_compared for bench in benches.values()))
    data = measured.document(environment, run, benches)
    measured.validate(data)
    console.print(question.machine_text(data))
    return data


@click.command()
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds: about 20 seconds.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(tuple(RUNNERS)),
    help="Run this benchmark alone; may be given more than once.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write MACHINE/host.json into this folder, such as profiling/results.",
)
def main(quick: bool, only: tuple[str, ...], out: Path | None) -> None:
    """Measure sgalloc on the host, beside the plain Python loop: about four minutes."""
    if out is not None:
        question.prepare(out)
    data = measure(QUICK if quick else FULL, only or tuple(RUNNERS), Console())
    if out is not None:
        path = out / machine.slug(data["environment"]) / "host.json"
        measured.write(data, path)
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
