"""How a step's bytes get to the GPU, alone and beside a forward, and what the forward loses.

`python -m profiling.gpu.transport --help`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import click
import numpy as np

from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.handmade import Grid, fill_small_slot, lay_out, made_up_ids, small_slot
from profiling.gpu.layout import Found, Table, size, us
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, in_turns, summarize
from sgalloc.bench.measured import Record, both_records
from sgalloc.device.kernels import THREADS, kernel

# The first two fit into a small staging slot.
BYTES = (4_096, 12_288, 65_536, 262_144, 1_048_576)
PAGE_SIZE = 16
MAPPED, MAPPED_GRAPH = "mapped", "mapped, in a graph"
COPY, COPY_GRAPH, SIDE = "copy, same stream", "copy, in a graph", "copy, side stream"
CARRIERS = (MAPPED, MAPPED_GRAPH, COPY, COPY_GRAPH, SIDE)
ALONE = "alone"
PLAN_STREAM, ONE_STREAM = "plan stream", "one stream"
BANDWIDTH, COMPUTE = "bandwidth-bound", "compute-bound"
_HOST_TO_DEVICE = 1
_FORWARD_BYTES = 1 << 27
_COPY_ALL = r"""
extern "C" __global__ void copy_all(const int4* from, int4* to, long long count) {
    long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) to[at] = from[at];
}
"""


class Forward(NamedTuple):
    """Work that keeps the GPU busy.

    Attributes:
        name: of what it is bound by.
        put: puts one piece of it on the stream with this handle.
        pieces: pieces of one forward.
    """

    name: str
    put: Callable[[int], None]
    pieces: int


class Update:
    """One step of so many bytes, and every way to get it to the kernel that applies it.

    Every way ends with the event that guards the staging slot.
    """

    def __init__(self, gpu: Gpu, count: int) -> None:
        from sgalloc.device.layout import SMALL_PAGES
        from sgalloc.device.staging import pinned
        from sgalloc.device.streams import Handle, new_event, new_stream

        self._gpu, self._bytes = gpu, count
        self._handle = Handle
        pages = (count - 128) // 12
        self._grid = Grid(gpu, PAGE_SIZE, pages, 1, 1)
        ids, rows = made_up_ids(pages, PAGE_SIZE, 0), np.arange(1, pages + 1)
        row_pages = self._grid.row_pages
        self._owner, memory = pinned(count)
        lay_out(memory, rows, 0, 1, ids, row_pages, "places")
        # What is read in place lies as the device lays it out, where a small slot suffices.
        self._small, block = small_slot() if pages <= SMALL_PAGES else (None, None)
        if block is not None:
            fill_small_slot(block, rows, 0, 1, ids, row_pages)
        self._ids, self._pages = ids, pages
        self._target = gpu.empty((count,), np.uint8)
        self._host, self._there = int(self._owner.ptr), int(self._target.data.ptr)
        self._side = new_stream()
        self._copied, self.event = new_event(), new_event()
        geometry = self._grid.geometry
        tile = geometry.tile_for(pages)
        self._blocks = geometry.blocks(pages, tile)
        self._mapped_tile = geometry.mapped_tile
        self._leading, self._tile = geometry.arguments, np.int32(tile)
        self._function = kernel("assign_pages", gpu.device)
        self._in_place = kernel("assign_mapped", gpu.device)
        self._graphs = {
            MAPPED_GRAPH: gpu.capture(self._launch_mapped),
            COPY_GRAPH: gpu.capture(self._copy_and_launch),
        }

    def way(self, name: str) -> Callable[[int], None]:
        """Puts the step on the stream with a handle, in the way of that name."""
        runtime, event = self._gpu.runtime, self.event
        graph = self._graphs.get(name)

        def mapped(stream: int) -> None:
            self._launch_mapped(stream)
            runtime.eventRecord(event, stream)

        def copied(stream: int) -> None:
            self._copy_and_launch(stream)
            runtime.eventRecord(event, stream)

        def aside(stream: int) -> None:
            side = self._side.ptr
            runtime.memcpyAsync(self._there, self._host, self._bytes, _HOST_TO_DEVICE, side)
            runtime.eventRecord(self._copied, side)
            runtime.streamWaitEvent(stream, self._copied)
            self._launch(stream)
            runtime.eventRecord(event, stream)

        def replayed(stream: int) -> None:
            runtime.graphLaunch(graph.graphExec, stream)
            runtime.eventRecord(event, stream)

        if graph is not None:
            return replayed
        return {MAPPED: mapped, COPY: copied, SIDE: aside}[name]

    def check(self, name: str) -> None:
        """Prove that the step arrives in that way.

        Raises:
            RuntimeError: it does not.
        """
        self._target.fill(0)
        self._gpu.wait()
        graph = self._graphs.get(name)
        if graph is None:
            self.way(name)(int(self._side.ptr))
            self._gpu.wait()
            graph = self._gpu.capture(self._launch_mapped if name == MAPPED else self._launch)
        self._grid.check(graph, [self._ids[:, None]])

    def _copy_and_launch(self, stream: int) -> None:
        runtime = self._gpu.runtime
        runtime.memcpyAsync(self._there, self._host, self._bytes, _HOST_TO_DEVICE, stream)
        self._launch(stream)

    def _launch(self, stream: int, source: int = 0) -> None:
        arguments = (*self._leading, self._tile, source or self._there)
        self._function((self._blocks,), (THREADS,), arguments, 0, self._handle(stream))

    def _launch_mapped(self, stream: int) -> None:
        if self._small is None:
            self._launch(stream, self._host)
            return
        tile = self._mapped_tile
        arguments = (*self._leading, np.int32(tile), int(self._small.ptr))
        grid = (self._grid.geometry.blocks(self._pages, tile),)
        self._in_place(grid, (THREADS,), arguments, 0, self._handle(stream))


def measure(quick: bool, gpu: Gpu, turns: int | None = None) -> common.Outcome:
    """Every way at every size: alone, and beside each forward in both stream modes."""
    from sgalloc.device.streams import new_stream

    records: list[Record] = []
    notes: list[str] = []
    compared = 0
    own = new_stream()
    found = list(forwards(gpu, quick))
    if COMPUTE not in {forward.name for forward in found}:
        notes.append("no compute-bound forward: torch with CUDA is not here")
    effort = Effort(0.05 if quick else 0.25, least=20, most=400, block=5)
    again = (2 if quick else 4) if turns is None else turns
    for count in BYTES[::2] if quick else BYTES:
        step = Update(gpu, count)
        for name in CARRIERS:
            step.check(name)
            compared += 1
        ways = {name: step.way(name) for name in CARRIERS}
        steps = [
            Step(name, lambda way=way: way(own.ptr))
            for name, way in ways.items()  # type: ignore[misc]
        ]
        alone = in_turns([Side(ALONE, steps)], effort, gpu.wait)
        records += both_records(alone, {"bytes": count})
        for forward in found:
            records += beside(gpu, forward, ways, step.event, int(own.ptr), again, count)
            records += within(gpu, forward, ways, again, count, notes)
        del step, ways, steps
        gpu.free_unused()
    return common.Outcome(records, notes, compared)


def forwards(gpu: Gpu, quick: bool) -> Iterator[Forward]:
    """A copy of much memory, and bf16 matrix products where torch has CUDA."""
    from sgalloc.device.streams import Handle

    source = gpu.to_device(np.random.default_rng(0).integers(0, 255, _FORWARD_BYTES, np.uint8))
    target = gpu.empty((_FORWARD_BYTES,), np.uint8)
    function = gpu.function(_COPY_ALL, "copy_all")
    count = _FORWARD_BYTES // 16
    arguments = (source.data.ptr, target.data.ptr, np.int64(count))

    def copy(stream: int, keep: Any = (source, target)) -> None:
        function((-(-count // 256),), (256,), arguments, 0, Handle(stream))

    yield Forward(BANDWIDTH, copy, 150 if quick else 500)
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    product = torch.empty(4096, 2048, device="cuda", dtype=torch.bfloat16)
    streams: dict[int, Any] = {}

    def multiply(stream: int) -> None:
        if stream not in streams:
            streams[stream] = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(streams[stream]):
            torch.matmul(left, right, out=product)

    yield Forward(COMPUTE, multiply, 100 if quick else 400)


def beside(
    gpu: Gpu,
    forward: Forward,
    ways: dict[str, Callable[[int], None]],
    event: int,
    own: int,
    again: int,
    count: int,
) -> list[Record]:
    """One update after the other on a stream of its own, as long as a forward runs."""
    from sgalloc.device.streams import event_done

    runtime = gpu.runtime
    stream = gpu.stream()
    start, stop = runtime.eventCreate(), runtime.eventCreate()
    host: dict[str, list[int]] = {name: [] for name in ways}
    done: dict[str, list[int]] = {name: [] for name in ways}
    lasted: dict[str, list[int]] = {name: [] for name in (ALONE, *ways)}
    updates: dict[str, list[int]] = {name: [] for name in (ALONE, *ways)}
    for turn in range(again + 1):
        for name in (ALONE, *ways):
            gpu.wait()
            runtime.eventRecord(start, stream.ptr)
            for _ in range(forward.pieces):
                forward.put(int(stream.ptr))
            runtime.eventRecord(stop, stream.ptr)
            made = 0
            while name != ALONE and not event_done(stop):
                begin = perf_counter_ns()
                ways[name](own)
                back = perf_counter_ns()
                runtime.eventSynchronize(event)
                ready = perf_counter_ns()
                made += 1
                if turn:
                    host[name].append(back - begin)
                    done[name].append(ready - begin)
            gpu.wait()
            if turn:
                lasted[name].append(round(runtime.eventElapsedTime(start, stop) * 1e6))
                updates[name].append(made)
    records = []
    for name, series in lasted.items():
        at = _at(count, forward, PLAN_STREAM)
        made = round(median(updates[name]))
        records.append(Record("forward", name, {**at, "updates": made}, summarize(series)))
        if name != ALONE and host[name]:
            for until, times in ((RETURN, host[name]), (DONE, done[name])):
                records.append(Record("update", name, {**at, "until": until}, summarize(times)))
    return records


def within(
    gpu: Gpu,
    forward: Forward,
    ways: dict[str, Callable[[int], None]],
    again: int,
    count: int,
    notes: list[str],
) -> list[Record]:
    """An update between any two pieces of a forward, on the forward's own stream."""
    runtime = gpu.runtime
    stream = gpu.stream()
    start, stop = runtime.eventCreate(), runtime.eventCreate()
    lasted: dict[str, list[int]] = {name: [] for name in (ALONE, *ways)}
    for turn in range(again + 1):
        for name in lasted:
            gpu.wait()
            begin = perf_counter_ns()
            runtime.eventRecord(start, stream.ptr)
            for _ in range(forward.pieces):
                forward.put(int(stream.ptr))
                if name != ALONE:
                    ways[name](int(stream.ptr))
            runtime.eventRecord(stop, stream.ptr)
            enqueued = perf_counter_ns() - begin
            gpu.wait()
            took = round(runtime.eventElapsedTime(start, stop) * 1e6)
            if turn:
                lasted[name].append(took)
            late = enqueued > 0.95 * took and name != ALONE
            if turn == again and late and took < 1.5 * min(lasted[ALONE]):
                notes.append(
                    f"{name} of {size(count)} on the stream of the {forward.name} forward: the "
                    "host was no faster than the GPU, so that what the forward loses reads high"
                )
    records = []
    for name, series in lasted.items():
        made = 0 if name == ALONE else forward.pieces
        at = {**_at(count, forward, ONE_STREAM), "updates": made}
        records.append(Record("forward", name, at, summarize(series)))
    return records


def _at(count: int, forward: Forward, mode: str) -> dict[str, int | str]:
    return {"bytes": count, "forward": forward.name, "mode": mode}


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [alone_table(found), *(loss_table(found, m) for m in (PLAN_STREAM, ONE_STREAM))]


def alone_table(found: Found) -> Table:
    """Every way on an idle GPU."""
    sizes = found.values(MAPPED, "bytes")
    rows = []
    for until, clock in ((RETURN, "host"), (DONE, "host + sync")):
        for count in sizes:
            cells = [us(found.median(name, ALONE, bytes=count, until=until)) for name in CARRIERS]
            rows.append([size(count), clock, *cells])

    def best(count: int) -> str:
        return min(
            CARRIERS,
            key=lambda name: found.median(name, ALONE, bytes=count, until=DONE) or float("inf"),
        )

    return Table(
        "Transports on an idle GPU, µs",
        "A step of so many bytes (places and ids of pages of 16, one a row) by `assign_pages`, "
        "its staging slot laid out before, and the event that guards the slot.",
        ["bytes", "clock", *CARRIERS],
        rows,
        "ready first: " + ", ".join(f"{size(count)}: {best(count)}" for count in sizes) + ".",
    )


def lost_us(found: Found, name: str, count: int, forward: str, mode: str) -> float | None:
    """What a forward loses by one update, in µs."""
    at = {"bytes": count, "forward": forward, "mode": mode}
    mine, alone = found.one("forward", name, **at), found.one("forward", ALONE, **at)
    if mine is None or alone is None or not mine["at"]["updates"]:
        return None
    return float(mine["median_us"] - alone["median_us"]) / int(mine["at"]["updates"])


def loss_table(found: Found, mode: str) -> Table:
    """What a forward loses by a thousand updates, and when these are ready."""
    rows, verdicts = [], []
    own = mode == PLAN_STREAM
    for forward in found.values("forward", "forward"):
        for count in found.values("forward", "bytes"):
            at = {"bytes": count, "forward": forward, "mode": mode}
            lost = {name: lost_us(found, name, count, forward, mode) for name in CARRIERS}
            cells = ["" if lost[name] is None else f"{lost[name]:+.2f}" for name in CARRIERS]
            if own:
                ready = (us(found.median("update", n, until=DONE, **at)) for n in CARRIERS)
                cells = [f"{a} / {b}" for a, b in zip(ready, cells, strict=True)]
            alone = found.median("forward", ALONE, **at)
            rows.append([f"{forward}, {size(count)}", us(None if alone is None else alone / 1000)])
            rows[-1] += cells
            known = {name: value for name, value in lost.items() if value is not None}
            if known:
                least = min(known, key=lambda name: known[name])
                verdicts.append(f"{forward} {size(count)}: {least} ({known[least]:+.2f} µs)")
    where = "a high-priority stream of their own" if own else "the forward's own stream"
    what = "µs until an update is ready / µs that the forward loses by it" if own else "µs lost"
    return Table(
        f"Updates on {where}: {what}",
        "The forward's time with updates less its time without, in turns, divided by the updates: "
        "µs for one, or ms for a thousand.",
        ["forward, bytes", "forward alone, ms", *CARRIERS],
        rows,
        f"the forward loses least by {'; '.join(verdicts) or 'no way: no update was made'}.",
    )


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time mapped memory and copies, alone and beside a forward: about 40 seconds."""
    common.run("transport", out, quick, lambda: measure(quick, Gpu()), tables)


if __name__ == "__main__":
    main()
