"""What it costs to be watched: `python -m profiling.observers`.

Cache events, a timeline and a scrape of metrics, each beside the same calls without it, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import click
import numpy as np

import sgalloc
from sgalloc import cache_events, timeline
from sgalloc.bench.harness import Summary, collector_off, summarize

BATCH, PROMPT, RESERVE, WIDTH = 64, 1024, 16, 1 << 15


def _timed(call: Callable[[], Any]) -> int:
    begin = perf_counter_ns()
    call()
    return perf_counter_ns() - begin


def events(page_size: int, rounds: int) -> dict[str, Summary]:
    """Releases of prompts into the cache, µs a request, and drains, µs a page."""
    drawn = np.random.default_rng(0)
    plain, followed = "release", "release, followed"
    drains = {"drain": True, "drain, no token ids": False}
    series: dict[str, list[int]] = {name: [] for name in (plain, followed, *drains)}
    sides, following = [], []
    for name in (plain, followed, ""):
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
    series: dict[str, list[int]] = {"step": [], "step, recorded": []}
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
    calls: dict[str, Callable[[], Any]] = {"stats()": alloc.stats}
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError:
        click.echo("prometheus_client is not installed: no scrape is measured")
    else:
        registry = CollectorRegistry()
        registry.register(sgalloc.metrics.Collector(alloc))
        calls["scrape"] = lambda: generate_latest(registry)
    return {
        name: summarize([_timed(call) for _ in range(rounds)][3:]) for name, call in calls.items()
    }


@click.command()
@click.option("--rounds", type=click.IntRange(10), default=100, show_default=True)
def main(rounds: int) -> None:
    """What cache events, a timeline and metrics cost: about half a minute."""
    parts = {
        f"page {size}, µs a request (drain: a page)": events(size, rounds) for size in (16, 64)
    }
    parts["reserve and commit of 64 requests, µs"] = recorded(20 * rounds)
    parts["4,096 requests, µs"] = scraped(rounds)
    for title, found in parts.items():
        click.echo(title)
        for name, took in found.items():
            click.echo(f"  {name}: {took.median:.2f} ({took.p10:.2f}–{took.p90:.2f})")


if __name__ == "__main__":
    main()
