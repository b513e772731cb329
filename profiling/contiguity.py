"""How contiguous the pages of a request are after long recycling, and the pieces of a transfer.

`python -m profiling.contiguity --help`
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np

from profiling import question
from profiling.layout import Found, Table, times, us
from profiling.recycling import (
    LOOKS,
    ORDERS,
    RUNNING,
    SHUFFLED,
    SORTED,
    STACK,
    WORKLOADS,
    recycled,
)
from sgalloc.bench.harness import collector_off, summarize
from sgalloc.bench.measured import Record
from sgalloc.extents import extents, pair_extents

PAGES = (16, 64)
NAME = "extents of a request"


def measure(workloads: Iterable[str], pages: Iterable[int], requests: int) -> question.Answer:
    """All workloads, page sizes and orders."""
    records = [
        measured_cell(workload, page, order, requests)
        for workload in workloads
        for page in pages
        for order in ORDERS
    ]
    return question.Answer(records, [])


def measured_cell(workload: str, page: int, order: str, requests: int) -> Record:
    """What became of the pages, as sizes, and the time of one call of `extents`."""
    looks = recycled(workload, page, order, requests)
    whole = [ids for seen in looks for ids in seen.whole]
    prompts = [ids for seen in looks for ids in seen.prompts]
    others = [
        ids for seen in recycled(workload, page, order, requests, seed=1) for ids in seen.prompts
    ]
    took, runs = [], []
    with collector_off():
        for ids in whole:
            begin = perf_counter_ns()
            first, _ = extents(ids)
            took.append(perf_counter_ns() - begin)
            runs.append(first.size)
    sent, pieces, single = 0, 0, 0
    for mine, theirs in zip(prompts, others, strict=False):
        count = min(mine.size, theirs.size)
        sent += count
        pieces += pair_extents(mine[:count], theirs[:count])[0].size
    for ids in prompts:
        single += extents(ids)[0].size
    at: dict[str, int | str] = {
        "workload": workload,
        "page": page,
        "requests": len(whole),
        "pages": sum(ids.size for ids in whole),
        "extents": sum(runs),
        "extents p10": int(np.percentile(runs, 10)),
        "extents p50": int(np.percentile(runs, 50)),
        "extents p90": int(np.percentile(runs, 90)),
        "prompt pages": sum(ids.size for ids in prompts),
        "prompt extents": single,
        "pages sent": sent,
        "pieces sent": pieces,
    }
    return Record(NAME, order, at, summarize(took))


def tables(found: Found) -> list[Table]:
    """What the results say."""
    rows, gains = [], []
    workloads = dict.fromkeys(r["at"]["workload"] for r in found.records)
    for workload in workloads:
        for page in found.sizes("page"):
            per_extent: dict[str, float] = {}
            for order in ORDERS:
                record = found.one(NAME, order, workload=workload, page=page)
                at: dict[str, Any] = record["at"]
                per_extent[order] = at["prompt pages"] / at["prompt extents"]
                rows.append(
                    [
                        workload,
                        str(page),
                        order,
                        f"{at['pages'] / at['requests']:.1f}",
                        f"{at['extents p50']} ({at['extents p10']}–{at['extents p90']})",
                        f"{at['pages'] / at['extents']:.2f}",
                        f"{per_extent[order]:.2f}",
                        f"{at['pages sent'] / at['pieces sent']:.2f}",
                        us(record["median_us"]),
                    ]
                )
            shuffled, kept = per_extent[SHUFFLED], per_extent[SORTED]
            gains.append(
                f"{workload} {page}: {times(per_extent[STACK] / shuffled)} shuffled, "
                f"{per_extent[STACK] / kept:.2f}× sorted"
            )
    return [
        Table(
            "Contiguity after long recycling",
            f"Some {RUNNING} requests at a time in a pool that they nearly fill; each decodes a "
            "token a step, ends, and makes room for others. Page lists of all who run, at "
            f"{LOOKS} moments of the second half. Free pages go out as sgalloc has them (what came "
            "back last first), lowest first, or shuffled. Extents: runs of ascending ids, median "
            "(p10–p90) of a request. Sent: runs on both sides at once, from one such pool into "
            "another. µs: one call of `extents`.",
            [
                "workload",
                "page",
                "order",
                "pages a request",
                "extents a request",
                "pages an extent",
                "prompt pages an extent",
                "pages a piece sent",
                "`extents`, µs",
            ],
            rows,
            "prompt pages an extent as sgalloc has them, by those of a pool: "
            + "; ".join(gains)
            + ".",
        )
    ]


@click.command()
@question.options
def main(out: Path | None, quick: bool) -> None:
    """Count the runs of page ids after long recycling: about two minutes."""
    size = (("random",), (16,), 400) if quick else (WORKLOADS, PAGES, 3000)
    question.run("contiguity", out, quick, lambda: measure(*size), tables)


if __name__ == "__main__":
    main()
