"""The kernels of a step with what they write in the L2 cache, and not: cold and warm.

`python -m profiling.gpu.l2 --help`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.kernels import ASSIGN, MARKS, MEMSET, MINE, Case, launches_of, made, memsets
from profiling.gpu.layout import Found, Table, ratio, size, spread, times
from sgalloc.bench.harness import summarize
from sgalloc.bench.measured import Record

COLD, WARM = "cold", "warm"
# What the sets of a cold series write together: several times the L2 of any card.
_COLD = 240_000_000
WRITTEN = (1 << 18, 1 << 20, 16_000_000)


def cases() -> Iterator[Case]:
    """A page for each of so many requests, by both kernels."""
    for page in (16, 64):
        for written in WRITTEN:
            pages = written // (4 * page)
            yield Case(ASSIGN, page, pages, 1, "places", 4 * page * pages)
            yield Case(MARKS, page, pages, 1, "one reserve", 4 * page * pages)


def sets_of(case: Case, state: str) -> int:
    """Inputs and outputs that the launches go through in turn: one stays in L2."""
    return 1 if state == WARM else max(2, min(1024, -(-_COLD // case.written)))


def measure(gpu: Gpu, chosen: Iterable[Case], rounds: int) -> common.Outcome:
    """Each case cold and warm, each beside a memset of as many bytes, all in turns."""
    records: list[Record] = []
    compared = 0
    for case in chosen:
        graphs, counts, kept = {}, {}, []
        for state in (COLD, WARM):
            sets = sets_of(case, state)
            count = -(-launches_of(case, 1) // sets) * sets
            launch = made(case, gpu, sets)
            kept.append((launch, f"{MINE}, {state}", sets))
            graphs[f"{MINE}, {state}"] = launch.graph(count)
            put = memsets(gpu, launch, case.written, count, sets)
            graphs[f"{MEMSET}, {state}"] = gpu.capture(put)
            counts[f"{MINE}, {state}"] = counts[f"{MEMSET}, {state}"] = count
        # One after the other, so that a series finds in L2 what it left there itself.
        for name, graph in graphs.items():
            series = gpu.replays({name: graph}, rounds)[name]
            side, state = name.split(", ")
            at = {**case.at, "l2": state}
            records.append(Record(case.kernel, side, at, summarize(series, per=counts[name])))
        for launch, name, sets in kept:
            launch.check(graphs[name])
            compared += sets
        del graphs, kept, launch
        gpu.free_unused()
    return common.Outcome(records, [], compared)


def tables(found: Found) -> list[Table]:
    """What the results say."""
    rows, parts = [], []
    cells = dict.fromkeys((r["name"], r["at"]["page"], r["at"]["bytes"]) for r in found.records)
    for name, page, count in cells:
        row = [f"`{name}`, page {page}", size(count)]
        gains = []
        for state in (COLD, WARM):
            at = {"page": page, "bytes": count, "l2": state}
            mine, memset = (found.one(name, side, **at) for side in (MINE, MEMSET))
            beside = found.median(name, MEMSET, **at)
            gains.append(found.median(name, MINE, **at))
            row += [spread(mine), spread(memset), times(ratio(gains[-1], beside))]
        cold = times(ratio(*gains))
        rows.append([*row, cold])
        parts.append(f"`{name}` page {page}, {size(count)}: {cold}")
    return [
        Table(
            "Kernels with cold and with warm L2, GPU µs a launch",
            "Replays of a graph of many launches. Cold: they go through inputs and outputs of "
            "240 MB in turn. Warm: all write the same places, which fit into L2. Memsets of as "
            "many bytes in the same way; median (p10–p90).",
            [
                "kernel",
                "bytes",
                *("cold", "memset", "×"),
                *("warm", "memset, warm", "×, warm"),
                "cold by warm",
            ],
            rows,
            f"cold by warm: {'; '.join(parts)}.",
        )
    ]


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time the kernels with cold and with warm L2: about 15 seconds."""
    chosen = list(cases())[:2] if quick else cases()
    common.run("l2", out, quick, lambda: measure(Gpu(), chosen, 5 if quick else 15), tables)


if __name__ == "__main__":
    main()
