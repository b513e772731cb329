"""What a request costs in batches of up to a million: `python -m profiling.million --help`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from profiling import peers, question, verbs
from profiling.layout import Found, Table, times
from sgalloc.bench import aim
from sgalloc.bench.course import GROWS, RESERVE, agree
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, alternate
from sgalloc.bench.measured import Record, records_of
from sgalloc.bench.twins import Shape, Twins

BATCHES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
QUICK = (1 << 10, 1 << 12)
PAGE = 64
# A name, and the label of what is shown of it.
CALLS = (
    ("reserve", GROWS),
    ("reserve again", ""),
    ("commit", ""),
    ("decode", GROWS),
    ("open", ""),
    ("extend, whole prompt", ""),
    ("release", ""),
)


def measure(batches: Iterable[int], seconds: float) -> question.Answer:
    """Steps, and prompts that come and go, at each batch; both sides' states are compared."""
    records: list[Record] = []
    compared = 0
    for batch in batches:
        twins = Twins(Shape(batch, PAGE, history=128, row_width=320))
        pace = Effort(seconds, least=3, warm_up=1, block=1 if batch > 1 << 14 else 5)
        at = {"batch": batch, "page": PAGE}
        records += records_of(alternate(verbs.life_sides(twins), pace, peers.CLOCK), at)
        twins.fill()
        for sides in (aim.step_sides, verbs.decode_sides):
            records += records_of(alternate(sides(twins), pace, peers.CLOCK), at)
            agree(twins)
            twins.reset()
            compared += 1
    return question.Answer(records, [peers.clock_note()], compared)


def tables(found: Found) -> list[Table]:
    """What the results say."""
    batches = found.sizes("batch")
    rows, parts = [], []
    for name, label in CALLS:
        row = [f"`{name}`, {label}" if label else f"`{name}`"]
        medians = []
        for batch in batches:
            mine, loop = (found.median(name, side, label, batch=batch) for side in (SUBJECT, LOOP))
            medians.append(mine * 1000 / batch)
            row.append(f"{shown(mine, batch)} · {shown(loop, batch)} ({times(loop / mine)})")
        rows.append(row)
        if name in ("reserve", "decode", "release"):
            parts.append(f"`{name}` {', '.join(f'{one:.0f}' for one in medians)} ns")
    return [
        Table(
            "Up to a million requests, ns a request",
            f"Page {PAGE}, requests of up to 128 tokens in rows of 320 slots, reserve {RESERVE}, a "
            "`Batch`, on the CPU, where the table is written by the same core. Processor time, "
            "medians: sgalloc · the plain Python loop (their ratio).",
            ["call", *(f"batch {batch:,}" for batch in batches)],
            rows,
            f"a request costs at {', '.join(f'{batch:,}' for batch in batches)}: "
            + "; ".join(parts)
            + ".",
        )
    ]


def shown(us: float, batch: int) -> str:
    """Nanoseconds a request."""
    ns = us * 1000 / batch
    return f"{ns:.1f}" if ns < 100 else f"{ns:,.0f}"


@click.command()
@question.options
@click.option("--seconds", default=1.0, show_default=True, help="Of one measurement, about.")
def main(out: Path | None, quick: bool, seconds: float) -> None:
    """Measure batches of up to a million requests, beside the plain loop: about two minutes."""
    batches = QUICK if quick else BATCHES
    question.run("million", out, quick, lambda: measure(batches, seconds), tables)


if __name__ == "__main__":
    main()
