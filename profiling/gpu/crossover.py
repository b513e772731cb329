"""From how many requests the device rounds sooner than the host, and from how many bytes a copy
beats mapped memory.

`python -m profiling.gpu.crossover --help`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

import click
import numpy as np

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, size, spread, times
from sgalloc.bench.course import MAX_ACCEPT, RESERVE
from sgalloc.bench.harness import (
    DONE,
    RETURN,
    Effort,
    Side,
    Step,
    collector_off,
    in_turns,
    summarize,
)
from sgalloc.bench.measured import Record, both_records
from sgalloc.plan import Segments

ON_HOST, ON_DEVICE = "host", "device"
ROUNDINGS = (ON_HOST, ON_DEVICE)
ON_GPU_CLOCK = "done, by the GPU's clock"
MAPPED, COPIED = "mapped", "copied"
ROW_SLOTS = 256
# How `device.write` does it, or both by a plain launch.
SHIPPED, PLAIN = "as shipped", "plain launches"
_HOST_TO_DEVICE = 1


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        requests: of a step.
        pages: page sizes.
        moved: pages of a write.
        seconds: of one cell.
        least: steps of each kind in a cell.
    """

    requests: tuple[int, ...]
    pages: tuple[int, ...]
    moved: tuple[int, ...]
    seconds: float
    least: int


FULL = Size(
    tuple(1 << n for n in range(10, 21)),
    (16, 64),
    (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 65536),
    seconds=0.7,
    least=7,
)
QUICK = Size((1 << 12, 1 << 16, 1 << 18), (64,), (16, 256, 1024, 4096), seconds=0.2, least=5)


def measure(size: Size, gpu: Gpu, device: str = "cuda") -> common.Outcome:
    """Both crossovers; ``device`` is where the tables live."""
    records: list[Record] = []
    compared = 0
    for page_size in size.pages:
        for requests in size.requests:
            at: dict[str, int | str] = {"requests": requests, "page": page_size}
            cell, checks = rounding(gpu, page_size, requests, size, device)
            for (side, until), series in cell.items():
                where = {**at, "until": until}
                records.append(Record("reserve", side, where, summarize(series)))
            compared += checks
            gpu.free_unused()
    found, checks = carried(gpu, size, device)
    return common.Outcome([*records, *found], [], compared + checks)


# -- who rounds ------------------------------------------------------------------------------


def rounding(
    gpu: Gpu, page_size: int, requests: int, size: Size, device: str
) -> tuple[dict[tuple[str, str], list[int]], int]:
    """Steps that the host rounds and steps that the device does, in turns, on one allocator."""
    row_pages = ROW_SLOTS // page_size
    bound = requests * (-(-RESERVE // page_size) + 1)
    alloc = sgalloc.KVAllocator(
        requests * row_pages + bound, page_size, requests, ROW_SLOTS, device=device
    )
    alloc.warm(bound)
    rng = np.random.default_rng(0)
    handles = alloc.open(requests)
    base = rng.integers(32, 96, requests)
    alloc.extend(handles, base)
    batch = alloc.batch(handles)
    accepted = list(rng.integers(1, MAX_ACCEPT + 1, (8, requests)))
    steps = (ROW_SLOTS - 96 - RESERVE - page_size) // MAX_ACCEPT
    series: dict[tuple[str, str], list[int]] = {
        (side, until): [] for side in ROUNDINGS for until in (RETURN, DONE, ON_GPU_CLOCK)
    }
    alloc.reserve(batch, RESERVE)
    at = -2 * len(ROUNDINGS)
    with collector_off(), stamped(gpu) as stamp:
        end = perf_counter() + size.seconds
        while at < len(ROUNDINGS) * size.least or perf_counter() < end:
            where = ROUNDINGS[at % len(ROUNDINGS)]
            alloc.commit(batch, accepted[at % len(accepted)])
            if at % steps == steps - 1:
                alloc.trim(batch, base)
                alloc.reserve(batch, RESERVE)
            gpu.wait()
            begin = perf_counter_ns()
            stamp.begin()
            plan = alloc.reserve(batch, RESERVE, rounding=where)
            back = perf_counter_ns()
            plan.ready.synchronize()
            done = perf_counter_ns()
            gpu.wait()
            if at >= 0 and plan.num_new_pages:
                series[where, RETURN].append(back - begin)
                series[where, DONE].append(done - begin)
                series[where, ON_GPU_CLOCK].append(stamp.took())
            at += 1
    if requests > 1 << 17:
        return series, 0  # reading so large a table back takes longer than all else
    alloc.check(device=True)
    return series, 1


class Stamp:
    """Two time stamps of the GPU's on the stream of a step: at its start, and behind its write."""

    def __init__(self, gpu: Gpu) -> None:
        self._runtime = gpu.runtime
        self._start, self._stop = gpu.runtime.eventCreate(), gpu.runtime.eventCreate()
        self._stream = 0

    def begin(self) -> None:
        """The step starts: its stream is the one that is current."""
        from sgalloc.device.streams import current_stream

        self._stream = current_stream(self._runtime.getDevice())
        self._runtime.eventRecord(self._start, self._stream)

    def end(self, stream: int) -> None:
        """The step's write was just put on ``stream``."""
        self._runtime.eventRecord(self._stop, stream)

    def took(self) -> int:
        """Nanoseconds between the two."""
        return round(self._runtime.eventElapsedTime(self._start, self._stop) * 1e6)


@contextmanager
def stamped(gpu: Gpu) -> Iterator[Stamp]:
    """Let every write put a time stamp behind itself, since the verbs' own events have none.

    A device that rounds is done while the host still counts, so that a clock read after the
    call comes too late.
    """
    from sgalloc.device.staging import Slot

    stamp = Stamp(gpu)
    hold = Slot.hold

    def hold_and_stamp(slot: Any, stream: int) -> None:
        hold(slot, stream)
        stamp.end(stream)

    Slot.hold = hold_and_stamp  # type: ignore[method-assign]
    try:
        yield stamp
    finally:
        Slot.hold = hold  # type: ignore[method-assign]


# -- how bytes are carried -------------------------------------------------------------------


def carried(gpu: Gpu, size: Size, device: str) -> tuple[list[Record], int]:
    """Writes whose step is read from mapped memory, or copied first, in turns."""
    records: list[Record] = []
    most = max(size.moved)
    page_size = 16
    alloc = sgalloc.KVAllocator(4 * most, page_size, most, 4 * page_size, device=device)
    alloc.warm(most)
    handles = alloc.open(most)
    plan = alloc.extend(handles, page_size)
    ids = alloc._ledger.pages[plan.rows, 0]
    table = alloc._core.device
    effort = Effort(size.seconds / 4, least=20, most=400, block=5)
    for moved in size.moved:
        rows = plan.rows[:moved]
        start = np.zeros(moved, np.int64)
        pages = Segments(rows, start, start + 1, moved, alloc._ledger.per_row)
        at: dict[str, int | str] = {"pages": moved, "bytes": 12 * moved}
        ways = {PLAIN: plain(gpu, table, pages, ids[:moved])}
        if moved <= 1024:
            ways[SHIPPED] = shipped(table, pages, ids[:moved])
        for how, (mapped, copied) in ways.items():
            sides = [Side(MAPPED, [Step("write", mapped)]), Side(COPIED, [Step("write", copied)])]
            timed = in_turns(sides, replace(effort, warm_up=10), gpu.wait)
            records += both_records(timed, {**at, "launch": how})
    alloc.check(device=True)
    return records, 1


def shipped(table: Any, pages: Segments, ids: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """`device.write` with its bound forced: all mapped, and all copied."""

    def forced(limit: int) -> Callable[[], Any]:
        def call() -> Any:
            table._mapped_bytes = table._mapped_pages = limit
            return table.write(pages, ids, None, None)

        return call

    return forced(1024 * 16), forced(0)


def plain(
    gpu: Gpu, table: Any, pages: Segments, ids: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same by plain launches, whatever the size: fill a slot, launch, record its event."""
    from sgalloc.device.layout import NO_SIDE, SMALL_BYTES, fill, fill_pages, lay_out_small
    from sgalloc.device.staging import Slot

    runtime = gpu.runtime
    size = -(-(128 + 12 * pages.total + 64) // 128) * 128
    slot = Slot(size, True, gpu.device)
    small = Slot(SMALL_BYTES, False, gpu.device)
    lay_out_small(small, NO_SIDE)

    def in_place() -> None:
        fill_pages(small, pages, ids)
        table._launch_small(small.ptr, pages.total, 0, 0)
        small.hold(0)

    def mapped() -> None:
        fill(slot, pages, ids, None, 0, table.row_pages)
        table._launch_step(slot.ptr, pages.total, 0, 0)
        slot.hold(0)

    def copied() -> None:
        used = fill(slot, pages, ids, None, 0, table.row_pages)
        runtime.memcpyAsync(slot.target, slot.ptr, used, _HOST_TO_DEVICE, 0)
        table._launch_step(slot.target, pages.total, 0, 0)
        slot.hold(0)

    return in_place if pages.total <= 1024 else mapped, copied


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    pages = found.values("reserve", "page")
    return [*(rounding_table(found, page) for page in pages), bytes_table(found)]


def first_from(better: list[tuple[int, bool]]) -> int | None:
    """The least size from which it is better at every size measured; None where it never is."""
    from_here = None
    for at, good in reversed(better):
        if not good:
            break
        from_here = at
    return from_here


def rounding_table(found: Found, page: int) -> Table:
    """Who rounds sooner at one page size."""
    rows = []
    better: dict[str, list[tuple[int, bool]]] = {DONE: [], ON_GPU_CLOCK: []}
    for requests in found.values("reserve", "requests"):
        at = {"requests": requests, "page": page}
        row = [f"{requests:,}"]
        for until in (RETURN, DONE, ON_GPU_CLOCK):
            host = found.one("reserve", ON_HOST, until=until, **at)
            device = found.one("reserve", ON_DEVICE, until=until, **at)
            if host is None or device is None:
                continue
            share = ratio(host["median_us"], device["median_us"])
            row += [spread(host), spread(device), times(share)]
            if until in better:
                better[until].append((requests, device["median_us"] < host["median_us"]))
        rows.append(row)
    parts = []
    for until, clock in ((DONE, "the host's clock"), (ON_GPU_CLOCK, "the GPU's")):
        start = first_from(better[until])
        parts.append(f"{'at no size' if start is None else f'from {start:,} requests'} by {clock}")
    return Table(
        f"Who rounds a reserve sooner, page {page}, µs",
        f"EAGLE steps (reserve {RESERVE}, 1 to {MAX_ACCEPT} accepted), from the start of the call "
        "until it returns, until the host sees the table ready, and until the GPU's own time "
        "stamp behind the write; host and device in turns on one allocator. Times: host by "
        "device.",
        [
            "requests",
            *("host, return", "device, return", "×"),
            *("host, ready", "device, ready", "×"),
            *("host, GPU's stamp", "device, GPU's stamp", "×"),
        ],
        rows,
        f"rounding on the device has the table ready sooner {' and '.join(parts)}.",
    )


def bytes_table(found: Found) -> Table:
    """Mapped memory beside a copy."""
    rows, verdicts = [], []
    for how in (SHIPPED, PLAIN):
        better = []
        for moved in found.values("write", "pages"):
            at = {"pages": moved, "launch": how}
            row = [f"{how}, {moved:,} pages", size(12 * moved)]
            for until in (RETURN, DONE):
                mapped = found.one("write", MAPPED, until=until, **at)
                copied = found.one("write", COPIED, until=until, **at)
                if mapped is None or copied is None:
                    break
                row += [spread(mapped), spread(copied)]
                if until == DONE:
                    better.append((12 * moved, copied["median_us"] < mapped["median_us"]))
            else:
                rows.append(row)
        start = first_from(better)
        verdicts.append(f"{how}: {'at no size' if start is None else f'from {size(start)}'}")
    return Table(
        "Mapped memory or a copy, µs",
        "As shipped: `device.write` (a graph launch of a kernel that reads mapped memory, or a "
        "copy and a plain launch), its bound forced both ways; it has mapped slots for 1,024 "
        "pages. Plain launches: the same kernel launched plainly after either. 12 bytes a page.",
        ["step", "bytes", "mapped, host", "copied, host", "mapped, ready", "copied, ready"],
        rows,
        "a copy has the table ready sooner, " + "; ".join(verdicts) + ".",
    )


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Find where the device rounds sooner, and where a copy beats mapped memory: a minute."""
    common.run("crossover", out, quick, lambda: measure(QUICK if quick else FULL, Gpu()), tables)


if __name__ == "__main__":
    main()
