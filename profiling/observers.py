"""What it costs to be watched: `python -m profiling.observers`.

Cache events, a timeline and a scrape of metrics, each beside the same calls without it, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click
import numpy as np

import sgalloc
from profiling import question
from profiling.layout import Found, Table, spread, us
from sgalloc import cache_events, timeline
from sgalloc.bench.harness import SUBJECT, Summary, collector_off, summarize
from sgalloc.bench.measured import Record

BATCH, PROMPT, RESERVE, WIDTH = 64, 1024, 16, 1 << 15
RELEASE, FOLLOWED, DRAIN, DRAIN_BARE = (
    "release",
    "release, followed",
    "drain",
    "drain, no token ids",
)
STEP, RECORDED, STATS, SCRAPE = "step", "step, recorded", "stats()", "scrape"
EVENT_PAGES = (16, 64)
# What a call of each is divided by.
UNITS = {RELEASE: "a request", FOLLOWED: "a request", DRAIN: "a page", DRAIN_BARE: "a page"}


def _timed(call: Callable[[], Any]) -> int:
    begin = perf_counter_ns()
    call()
    return perf_counter_ns() - begin


def events(page_size: int, rounds: int) -> dict[str, Summary]:
    """Releases of prompts into the cache, µs a request, and drains, µs a page."""
    drawn = np.random.default_rng(0)
    drains = {DRAIN: True, DRAIN_BARE: False}
    series: dict[str, list[int]] = {name: [] for name in (RELEASE, FOLLOWED, *drains)}
    sides, following = [], []
    for name in (RELEASE, FOLLOWED, ""):
        pages = BATCH * (rounds + 8) * PROMPT // page_size
        alloc = sgalloc.KVAllocator(pages, page_size, BATCH, PROMPT, "cpu", prefix_cache=True)
        alloc.warm()
        sides.append((name, alloc))
    for (name, tokens), (_, alloc) in zip(drains.items(), sides[1:], strict=True):
        following.append((name, cache_events.follow(alloc, tokens=tokens)))
        following[-1][1].drain()
    with collector_off():
        for turn in range(rounds + 4):
            prompts = list(drawn.integers(0, 100_000, (BATCH, PROMPT)))
            for name, alloc in sides:
                handles = alloc.open(BATCH)
                alloc.extend(handles, PROMPT)
                took = _timed(partial(alloc.release, handles, tokens=prompts))
                if turn >= 4 and name:
                    series[name].append(took)
            for name, one in following:
                took = _timed(one.drain)
                if turn >= 4:
                    series[name].append(took)
    drained = BATCH * PROMPT // page_size
    return {
        name: summarize(found, drained if name in drains else BATCH)
        for name, found in series.items()
    }


def recorded(rounds: int) -> dict[str, Summary]:
    """Steps that reserve and commit, with and without a timeline, µs a step."""
    series: dict[str, list[int]] = {STEP: [], RECORDED: []}
    sides = []
    for name in series:
        alloc = sgalloc.KVAllocator(BATCH * WIDTH // 64, 64, BATCH, WIDTH, "cpu")
        alloc.warm()
        batch = alloc.batch(alloc.open(BATCH))
        alloc.extend(batch, PROMPT)
        sides.append((name, alloc, batch))

    def step(alloc: sgalloc.KVAllocator, batch: Any) -> None:
        alloc.reserve(batch, RESERVE)
        alloc.commit(batch, 3)

    with collector_off(), timeline.record(sides[1][1]):
        for turn in range(rounds + 10):
            for name, alloc, batch in sides:
                took = _timed(partial(step, alloc, batch))
                if turn >= 10:
                    series[name].append(took)
    return {name: summarize(found) for name, found in series.items()}


def scraped(rounds: int) -> dict[str, Summary]:
    """`stats()` and a whole scrape of an allocator with 4,096 rows, µs."""
    alloc = sgalloc.KVAllocator(1 << 16, 64, 4096, 4096, "cpu", prefix_cache=True)
    alloc.extend(alloc.open(4096), 640)
    calls: dict[str, Callable[[], Any]] = {STATS: alloc.stats}
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError:
        pass
    else:
        registry = CollectorRegistry()
        registry.register(sgalloc.metrics.Collector(alloc))
        calls[SCRAPE] = lambda: generate_latest(registry)
    return {
        name: summarize([_timed(call) for _ in range(rounds)][3:]) for name, call in calls.items()
    }


def measure(rounds: int) -> question.Answer:
    """All of them; a note where no scrape can be measured."""
    records: list[Record] = []
    for size in EVENT_PAGES:
        for name, took in events(size, rounds).items():
            records.append(Record(name, SUBJECT, {"page": size, "batch": BATCH}, took))
    for name, took in recorded(20 * rounds).items():
        records.append(Record(name, SUBJECT, {"page": 64, "batch": BATCH}, took))
    for name, took in scraped(rounds).items():
        records.append(Record(name, SUBJECT, {"page": 64, "batch": 4096}, took))
    scrapes = any(record.name == SCRAPE for record in records)
    missing = [] if scrapes else ["prometheus_client is not installed: no scrape is measured"]
    return question.Answer(records, missing)


def tables(found: Found) -> list[Table]:
    """What the results say."""
    rows = [
        [
            f"`{record['name']}`",
            f"{record['at']['batch']:,}",
            str(record["at"]["page"]),
            UNITS.get(record["name"], "a call"),
            spread(record),
        ]
        for record in found.records
    ]

    def more(name: str, plain: str, page: int) -> str:
        return us(found.median(name, page=page) - found.median(plain, page=page))

    page = EVENT_PAGES[0]
    return [
        Table(
            "What it costs to be watched, µs",
            f"Each beside the same calls without it, in turns; median (p10–p90). Releases of "
            f"requests of {PROMPT:,} tokens into the prefix cache; steps that reserve {RESERVE} "
            "tokens and commit 3; a scrape by prometheus_client.",
            ["call", "batch", "page", "of", "µs"],
            rows,
            f"events add {more(FOLLOWED, RELEASE, page)} µs to the release of a request at page "
            f"{page}, a timeline {more(RECORDED, STEP, 64)} µs to a step of {BATCH}; `stats()` of "
            f"4,096 requests takes {us(found.median(STATS))} µs.",
        )
    ]


@click.command()
@question.options
@click.option("--rounds", type=click.IntRange(10), default=100, show_default=True)
def main(out: Path | None, quick: bool, rounds: int) -> None:
    """What cache events, a timeline and metrics cost: about half a minute."""
    question.run("observers", out, quick, lambda: measure(10 if quick else rounds), tables)


if __name__ == "__main__":
    main()
