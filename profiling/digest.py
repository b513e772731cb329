"""What a digest costs, read anew or kept up: `python -m profiling.digest`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

import sgalloc
from sgalloc.bench.harness import Effort, Key, Side, Step, alternate, summarize
from sgalloc.bench.machine import Watch, environment, slug

PAGE, RESERVE, CACHED, PROMPT = 64, 16, 512, 1024
PLAIN, KEPT, ANEW, COPY = "no digest", "kept up", "read anew", "compared with a copy"


class Loop:
    """Requests that speculate on a pool that they fill, and one a turn that the cache serves.

    Args:
        pages: in the pool.
        rows: requests that run.
        cache: whether one request a turn is matched, opened, extended and released into the cache.
    """

    def __init__(self, pages: int, rows: int, cache: bool) -> None:
        width = 2 * (pages // rows) * PAGE
        self.alloc = sgalloc.KVAllocator(
            pages, PAGE, rows + 1, width, device="cpu", prefix_cache=cache
        )
        self.alloc.warm()
        self.cache = cache
        drawn = np.random.default_rng(7)
        if cache:
            for _ in range(CACHED):
                self.serve(drawn.integers(0, 99, PROMPT))
        self.prompts = [drawn.integers(0, 99, PROMPT) for _ in range(64)]
        handles = self.alloc.open(rows)
        # All but what some hundred steps and the cache need.
        free = pages - CACHED * PROMPT // PAGE - 1024 - 4 * rows
        self.lengths = np.arange(rows) % PAGE + free // rows * PAGE
        self.alloc.extend(handles, self.lengths)
        self.batch = self.alloc.batch(handles)
        self.accepted = [drawn.integers(1, 6, rows) for _ in range(64)]
        self.turn = 0
        self.copies = [array.copy() for array in self.arrays()]

    def serve(self, prompt: Any) -> None:
        """One request from its match to its release."""
        (handle,) = self.alloc.open_with_prefix(self.alloc.prefix.match(prompt)).tolist()
        self.alloc.extend(handle, prompt.size)
        self.alloc.release(handle, tokens=prompt)

    def step(self) -> None:
        """Reserve for a step, and commit what was accepted of the one before."""
        self.turn += 1
        self.alloc.reserve(self.batch, RESERVE)
        self.alloc.commit(self.batch, self.accepted[self.turn % 64])
        if self.cache:
            self.serve(self.prompts[self.turn % 64])

    def back(self) -> None:
        """Begin again before pages are short; not timed."""
        if not self.turn % 64:
            self.alloc.trim(self.batch, self.lengths)

    def kept(self) -> str:
        """The digest, kept up."""
        return self.alloc.digest(incremental=True)

    def arrays(self) -> list[Any]:
        """What has an entry for each page."""
        ledger, pool = self.alloc._ledger, self.alloc._core.pool
        rows = ledger.live()
        lists = ledger.page_range(rows, np.zeros_like(rows), ledger.page_counts(rows))[1]
        return [pool.holder, pool._stack, lists]

    def compare(self) -> bool:
        """Look for what changed in what has an entry for each page: the least that it takes."""
        found = False
        for array, copy in zip(self.arrays(), self.copies, strict=True):
            size = min(array.size, copy.size)
            found |= bool((array[:size] != copy[:size]).any())
        return found


def measure(pages: int, rows: int, cache: bool, effort: Effort) -> list[dict[str, Any]]:
    """Each way in turn, a step between any two digests; microseconds."""
    loops = {side: Loop(pages, rows, cache) for side in (PLAIN, KEPT, ANEW, COPY)}
    asked = {
        KEPT: loops[KEPT].kept,
        ANEW: loops[ANEW].alloc.digest,
        COPY: loops[COPY].compare,
    }
    sides = [
        Side(
            side,
            [Step("step", loop.step)]
            + [Step("digest", asked[side]) for _ in range(side in asked)]
            + [Step(None, loop.back)],
        )
        for side, loop in loops.items()
    ]
    times = alternate(sides, effort)
    digests = {loops[side].alloc.digest() for side in (PLAIN, KEPT, ANEW)}
    if len(digests) != 1 or loops[KEPT].kept() not in digests:
        raise RuntimeError("the sides made the same calls, and their digests differ")
    found = []
    for side in loops:
        for name in ("step", "digest"):
            series = times.get(Key(side, name, ""))
            if series:
                took = summarize(series)
                at = {"pages": pages, "rows": rows, "cache": cache}
                found.append({"side": side, "name": name, "at": at, **took._asdict()})
    return found


@click.command()
@click.option("--pages", type=click.IntRange(4096), default=1 << 20, help="In the pool.")
@click.option("--rows", type=click.IntRange(1), default=4096, help="Requests that run.")
@click.option("--seconds", type=click.FloatRange(0.01), default=20.0, help="Of each measurement.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results.")
def main(pages: int, rows: int, seconds: float, out: Path | None) -> None:
    """Measure digests with a step between any two, on the CPU."""
    watch, records = Watch(), []
    effort = Effort(seconds, 20, most=400, warm_up=3, block=5)
    for cache in (False, True):
        for record in measure(pages, rows, cache, effort):
            records.append(record)
            click.echo(
                f"{pages} pages, {rows} rows, {'with' if cache else 'no'} cache: {record['name']}, "
                f"{record['side']}: {record['median']:.0f} µs "
                f"({record['p10']:.0f} to {record['p90']:.0f})"
            )
    if out is not None:
        machine = environment()
        path = out / slug(machine) / "digest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"environment": machine, "run": watch.report("full", 4), "records": records}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
