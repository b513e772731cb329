"""Sparse steps beside plain ones: `python -m profiling.sparse_verbs --help`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import sgalloc
from profiling.layout import us
from sgalloc.bench.course import growth
from sgalloc.bench.harness import Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of

PLAIN, SPARSE = "plain", "sparse"
HISTORY, WIDTH = 1024, 2048
BUFFER, SCRATCH = 512, 16  # tokens


def make(batch: int, page_size: int, sparse: bool) -> sgalloc.KVAllocator:
    """An allocator in which every row can be full."""
    pages = batch * (WIDTH // page_size)
    settings = sgalloc.Sparse(1, BUFFER, SCRATCH) if sparse else None
    alloc = sgalloc.KVAllocator(
        pages + batch * SCRATCH, page_size, batch, WIDTH, device="cpu", sparse=settings
    )
    alloc.warm()
    return alloc


def decode_side(alloc: sgalloc.KVAllocator, batch: int) -> Side:
    """One token a step, requests at all places in their pages; cut back when rows are full."""
    rng = np.random.default_rng(0)
    base = HISTORY - rng.integers(0, 64, batch)
    handles = alloc.open(batch)
    alloc.extend(handles, base)
    sparse = "device" in alloc.stats().groups
    if sparse:
        alloc.to_sparse(handles)
    kept = alloc.batch(handles)
    steps = [0]

    def cut() -> None:
        steps[0] += 1
        if steps[0] % (WIDTH - HISTORY - 1) == 0:
            alloc.trim(kept, base)

    name = SPARSE if sparse else PLAIN
    return Side(name, [Step("decode", lambda: alloc.decode(kept), growth), Step(None, cut)])


def life_side(alloc: sgalloc.KVAllocator, batch: int) -> Side:
    """Open, prefill, thin out where there is something to thin, release."""
    sparse = "device" in alloc.stats().groups
    handles = [alloc.open(0)]

    def opens() -> None:
        handles[0] = alloc.open(batch)

    steps = [Step(None, opens), Step("extend", lambda: alloc.extend(handles[0], HISTORY))]
    if sparse:
        steps.append(Step("to_sparse", lambda: alloc.to_sparse(handles[0])))
    steps.append(Step("release", lambda: alloc.release(handles[0])))
    return Side(SPARSE if sparse else PLAIN, steps)


def run(batches: Iterable[int], page_sizes: Iterable[int], effort: Effort) -> Bench:
    """Both allocators at each batch and page size, in turns."""
    records: list[Record] = []
    for batch in batches:
        for page_size in page_sizes:
            at = {"batch": batch, "page": page_size}
            allocs = [make(batch, page_size, sparse) for sparse in (False, True)]
            for sides in (life_side, decode_side):
                times = alternate([sides(alloc, batch) for alloc in allocs], effort)
                records += records_of(times, at)
            for alloc in allocs:
                alloc.check(device=True)
    return Bench(records)


def shown(bench: Bench) -> Table:
    """Medians with the 10th and 90th percentile, µs a call of the whole batch."""
    table = Table("verb", "batch", "page", "side", "n", "µs", "p10", "p90")
    for record in sorted(bench.records, key=lambda r: (r.name, r.label, *r.at.values(), r.side)):
        summary: Any = record.summary
        table.add_row(
            f"{record.name} {record.label}".strip(),
            *(str(size) for size in record.at.values()),
            record.side,
            str(summary.n),
            us(summary.median),
            us(summary.p10),
            us(summary.p90),
        )
    return table


@click.command()
@click.option("--batch", multiple=True, type=int, default=(256, 4096), help="Requests.")
@click.option("--page", multiple=True, type=int, default=(1, 64), help="Slots in a page.")
@click.option("--seconds", type=float, default=1.0, help="Of each measurement.")
def main(batch: tuple[int, ...], page: tuple[int, ...], seconds: float) -> None:
    """Measure decode, extend, to_sparse and release, sparse beside plain."""
    Console(width=100).print(shown(run(batch, page, Effort(seconds))))


if __name__ == "__main__":
    main()
