"""A prepared step of EAGLE and of DFLASH, beside `reserve` and beside the plain Python loop.

Run it alone with ``python -m profiling.speculation``; ``run`` and ``table`` have the form of the
host benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from profiling.layout import Found, Table, spread, times, us
from profiling.verbs import BLOCK, CHAIN, TOP_K
from sgalloc.bench.course import RESERVE, agree, courses
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.twins import Twins, shape_for
from sgalloc.sizing import alloc_reserve_per_decode
from sgalloc.speculative import dflash, eagle

RESERVES, EAGLE, DFLASH, LENGTHS = "reserve", "eagle step", "dflash step", "dflash step, lengths"
BATCHES, PAGES = (256, 4096), (1, 16, 64)


class Buffers(NamedTuple):
    """Where the plain loop puts the lengths of a DFLASH step, one setitem a number."""

    committed: NDArray[np.int64]
    cur: NDArray[np.int32]
    nxt: NDArray[np.int32]

    @classmethod
    def of(cls, batch: int) -> Buffers:
        """For so many requests."""
        return cls(np.zeros(batch, np.int64), np.zeros(batch, np.int32), np.zeros(batch, np.int32))


def run(batches: Iterable[int], page_sizes: Iterable[int], effort: Effort) -> Bench:
    """All kinds of step at each batch and page size."""
    records: list[Record] = []
    compared = 0
    for batch in batches:
        for page_size in page_sizes:
            twins = Twins(shape_for(batch, page_size))
            twins.fill()
            at = {"batch": batch, "page": page_size}
            for kind in (RESERVES, EAGLE, DFLASH, LENGTHS):
                records += records_of(alternate(sides(twins, kind), effort), at)
                compare(twins)
                compared += 1
                twins.reset()
    return Bench(records, compared)


def sides(twins: Twins, kind: str) -> list[Side]:
    """Prepare a step and commit what it accepted: for ever, cut back when rows are full."""
    assert alloc_reserve_per_decode(CHAIN, 1) == alloc_reserve_per_decode(BLOCK, 64) == RESERVE
    alloc, loop, requests = twins.alloc, twins.loop, twins.requests
    batch = alloc.batch(twins.handles)
    mine, theirs, cut_mine, cut_theirs = courses(twins, batch)

    return [
        Side(
            SUBJECT,
            [
                Step(kind, _subject(twins, kind, batch)),
                Step(None, lambda: alloc.commit(batch, mine.arrays[mine.at])),
                Step(None, cut_mine),
            ],
        ),
        Side(
            LOOP,
            [
                Step(kind, _baseline(twins, kind)),
                Step(None, lambda: loop.commit(requests, theirs.lists[theirs.at])),
                Step(None, cut_theirs),
            ],
        ),
    ]


def compare(twins: Twins) -> None:
    """Stop where the two sides differ, also in the steps that they counted."""
    agree(twins)
    counted = twins.alloc.decode_index(twins.handles).tolist()
    if counted != [request.decode_batch_idx for request in twins.requests]:
        raise RuntimeError(f"after {twins.shape} the two sides counted different steps")


def table(found: Found, page: int) -> Table:
    """Each kind of step at one page size."""
    batches = found.sizes("batch")
    rows, parts = [], []
    for name, label in found.names():
        row = [f"`{name}`"]
        for batch in batches:
            mine, theirs = (
                found.one(name, side, label, batch=batch, page=page) for side in (SUBJECT, LOOP)
            )
            row += [spread(mine), us(theirs["median_us"])]
        rows.append(row)
    for batch in batches:
        step = found.median(EAGLE, SUBJECT, batch=batch, page=page)
        plain = found.median(RESERVES, SUBJECT, batch=batch, page=page)
        loop = found.median(EAGLE, LOOP, batch=batch, page=page)
        parts.append(
            f"batch {batch:,}: {us(step - plain)} µs more than `reserve`, "
            f"{times(loop / step)} as fast as the loop"
        )
    return Table(
        f"A speculative step at page {page}, µs a call of the whole batch",
        f"Reserve {RESERVE}, a `Batch`; sgalloc's median (p10–p90) and the loop's median.",
        ["step", *(cell for b in batches for cell in (f"batch {b:,}", "loop"))],
        rows,
        "An EAGLE step takes " + "; ".join(parts) + ".",
    )


def _subject(twins: Twins, kind: str, batch: Any) -> Callable[[], Any]:
    alloc = twins.alloc
    if kind == RESERVES:
        return lambda: alloc.reserve(batch, RESERVE)
    if kind == EAGLE:
        return lambda: eagle.prepare_for_decode(alloc, batch, CHAIN)
    lengths = dflash.Lengths(alloc) if kind == LENGTHS else None
    return lambda: dflash.prepare_for_decode(alloc, batch, BLOCK, TOP_K, lengths=lengths)


def _baseline(twins: Twins, kind: str) -> Callable[[], Any]:
    loop, requests = twins.loop, twins.requests
    buffers = Buffers.of(len(requests))

    def reserve() -> int:
        return loop.reserve(requests, RESERVE)

    def step() -> int:
        reserve()
        loop.count_steps(requests)
        return max(request.kv.kv_committed_len for request in requests) + RESERVE

    def block() -> tuple[int, int, int]:
        for at, request in enumerate(requests):
            buffers.cur[at] = request.kv.kv_allocated_len
        longest = step()
        for at, request in enumerate(requests):
            buffers.committed[at] = request.kv.kv_committed_len
            buffers.nxt[at] = request.kv.kv_allocated_len
        return longest, int(buffers.committed.sum()), int(buffers.nxt.sum())

    return {RESERVES: reserve, EAGLE: step}.get(kind, block)


@click.command()
@click.option("--quick", is_flag=True, help="A twentieth of a second for each kind of step.")
def main(quick: bool) -> None:
    """Measure prepared steps on the host, beside `reserve` and the plain loop."""
    bench = run(BATCHES, PAGES, Effort(0.05 if quick else 0.5))
    found = Found([record.to_json() for record in bench.records])
    console = Console()
    for page in found.sizes("page"):
        console.print(table(found, page).rich())


if __name__ == "__main__":
    main()
