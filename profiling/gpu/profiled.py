"""What runs under Nsight: each kernel in a steady step, inside the NVTX range ``profiled``.

`profiling/ncu.sh` and `profiling/nsys.sh` start it; alone it shows that it runs.
`python -m profiling.gpu.profiled --help`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click
import nvtx

import sgalloc
from sgalloc.device import cuda_missing
from sgalloc.ranges import DOMAIN

RANGE = "profiled"
PAGE = 64
ENTRY = 4
# Requests of a small step and of a large one, which writes some pages of each.
SMALL, LARGE, GROWTH = 256, 65_536, 8
ROW_PAGES = 2 * GROWTH


class Case(NamedTuple):
    """One kernel in one step.

    Attributes:
        kernel: its name.
        step: what the step is.
        requests: in the batch.
        written: bytes that it writes.
    """

    kernel: str
    step: str
    requests: int
    written: int


def _pages(count: int) -> int:
    return count * PAGE * ENTRY


CASES = (
    Case("assign_mapped", "a page each", SMALL, _pages(SMALL)),
    Case("assign_pages", "8 pages each", LARGE, _pages(GROWTH * LARGE)),
    Case("assign_pages", "a gather of 16 slots each", LARGE, 16 * LARGE * ENTRY),
    Case("assign_both_mapped", "a page each in both groups", SMALL, 2 * _pages(SMALL)),
    Case("assign_both", "8 pages each in both groups", LARGE, 2 * _pages(GROWTH * LARGE)),
    Case("replay_pages", "a page each, staged for a graph", SMALL, _pages(SMALL)),
    Case("replay_both", "a page each in both groups, staged", SMALL, 2 * _pages(SMALL)),
    Case("page_watermarks", "8 pages each, rounded there", LARGE, _pages(GROWTH * LARGE)),
    Case("export_pages", "8 pages each", LARGE, (ROW_PAGES + GROWTH + 2) * LARGE * ENTRY),
    Case("row_digest", "8 pages each, hashed", LARGE, 8 * (LARGE + 1)),
)


class Workload:
    """An allocator whose requests are cut back before each step, so that all steps are alike."""

    def __init__(self, requests: int, window: bool, device: str) -> None:
        pages = requests * ROW_PAGES
        side = sgalloc.SlidingWindow(ROW_PAGES * PAGE, pages) if window else None
        self.alloc = sgalloc.KVAllocator(
            pages, PAGE, requests, ROW_PAGES * PAGE, device=device, window=side
        )
        self.alloc.warm(max(4096, requests * GROWTH))
        self.batch = self.alloc.batch(self.alloc.open(requests))
        self.requests = requests

    def cut(self, tokens: int = 0) -> None:
        """Leave each request ``tokens`` tokens; a trim launches nothing."""
        self.alloc.trim(self.batch, tokens)

    def grow(self, pages: int) -> None:
        """The next ``pages`` pages of each request, in one step."""
        self.alloc.extend(self.batch, pages * PAGE)


def steps(device: str) -> list[tuple[Case, Callable[[], Any], Callable[[], Any]]]:
    """Each case with what prepares a step of it, launching nothing, and the step."""
    small, large = (Workload(n, False, device) for n in (SMALL, LARGE))
    pair = [Workload(n, True, device) for n in (SMALL, LARGE)]
    # A plan of both groups counts the pages of both.
    staged = [(load, load.alloc.captured(2 * SMALL)) for load in (small, pair[0])]
    export = large.alloc.page_tables(LARGE, ROW_PAGES)

    def stage(load: Workload, update: Any) -> None:
        load.cut()
        update.stage(load.alloc.plan(extend=(load.batch, PAGE)))

    def gather() -> Any:
        # A gather alone; the pages before it are there already.
        return large.alloc.slots(large.batch, 0, 16)

    def nothing() -> None: ...

    pages = GROWTH * PAGE
    made: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (small.cut, lambda: small.grow(1)),
        (large.cut, lambda: large.grow(GROWTH)),
        (nothing, gather),
        (pair[0].cut, lambda: pair[0].grow(1)),
        (pair[1].cut, lambda: pair[1].grow(GROWTH)),
        (lambda: stage(*staged[0]), lambda: staged[0][1].launch()),
        (lambda: stage(*staged[1]), lambda: staged[1][1].launch()),
        (large.cut, lambda: large.alloc.reserve(large.batch, pages, rounding="device")),
        # What the step before has reserved is what it exports.
        (nothing, lambda: export.update(large.batch, pages)),
        (nothing, lambda: large.alloc.probe()),
    ]
    return [(case, *pair) for case, pair in zip(CASES, made, strict=True)]


def run(repeat: int, device: str, wait: Callable[[], Any]) -> None:
    """Each step once outside of the range, and ``repeat`` times inside."""
    made = steps(device)
    domain = nvtx.get_domain(DOMAIN)
    mark = domain.get_event_attributes(message=RANGE)
    for _, prepare, step in made:
        prepare()
        step()
        wait()
        for _ in range(repeat):
            prepare()
            wait()
            domain.push_range(mark)
            step()
            wait()
            domain.pop_range()


@click.command()
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
@click.option("--list", "listing", is_flag=True, help="Say what would run, and run nothing.")
def main(repeat: int, listing: bool) -> None:
    """Run every kernel in a steady step, for a profiler to look at."""
    if listing:
        for case in CASES:
            click.echo(f"{case.kernel}: {case.step}, {case.requests:,} requests")
        return
    missing = cuda_missing()
    if missing is not None:
        raise click.ClickException(f"nothing to profile here: {missing}")
    from cupy.cuda import runtime

    run(repeat, "cuda", runtime.deviceSynchronize)
    click.echo(f"{len(CASES)} steps, {repeat} times each")


if __name__ == "__main__":
    main()
