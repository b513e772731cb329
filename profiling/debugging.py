"""What debug mode costs a step: `python -m profiling.debugging`."""

from __future__ import annotations

import click

from profiling.journal import Loop
from sgalloc.bench.harness import Effort, Key, Side, Step, Summary, alternate, summarize

WIDTH = 4096
PLAIN, DEBUGGED = "without", "in debug mode"


def measure(batch: int, seconds: float) -> dict[str, tuple[Summary, Summary]]:
    """Each kind of step at one size of batch, without debug mode and with it, in turn."""
    found = {}
    for name in ("decode", "speculate"):
        loops = {side: Loop(batch, None, side == DEBUGGED, WIDTH) for side in (PLAIN, DEBUGGED)}
        sides = [
            Side(side, [Step(name, getattr(loop, name)), Step(None, loop.back)])
            for side, loop in loops.items()
        ]
        # A row of this width is full after some five hundred steps of five tokens.
        times = alternate(sides, Effort(seconds, 20, most=400, warm_up=8, block=10))
        plain, debugged = (summarize(times[Key(side, name, "")]) for side in loops)
        found[name] = plain, debugged
    return found


@click.command()
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 256))
@click.option("--seconds", type=click.FloatRange(0.01), default=4.0, help="Of each measurement.")
def main(batches: tuple[int, ...], seconds: float) -> None:
    """Measure steps with and without debug mode, on the CPU."""
    for batch in batches:
        for name, (plain, debugged) in measure(batch, seconds).items():
            click.echo(
                f"{name} of {batch}: {plain.median:.1f} µs without, {debugged.median:.0f} µs in "
                "debug mode"
            )


if __name__ == "__main__":
    main()
