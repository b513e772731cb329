"""What one call to CUDA costs the host: launches, events, copies, and the staging of a step.

`python -m profiling.gpu.launch --help`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, spread, times, us
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, in_turns
from sgalloc.bench.measured import Record, both_records
from sgalloc.plan import Segments

CALLS = 8  # in a row; fewer than the staging ring has slots
IN_A_ROW, ON_IDLE = "in a row", "on an idle GPU"
BARE = "graph launch"
WRITE = "device.write, {} pages"
FEW, MORE, MANY = 10, 256, 4096
FULL = Effort(0.5, least=50, most=2000, warm_up=20, block=5)
QUICK = Effort(0.1, least=50, most=2000, warm_up=20, block=5)
_HOST_TO_DEVICE = 1
_NOTHING = 'extern "C" __global__ void nothing() {}'
_TAKES = """
extern "C" __global__ void takes(int* slots, int* pages, long long width, int row_pages,
                                 int page_size, int shift, int tile, const void* step) {}
"""


def measure(short: Effort, gpu: Gpu, device: str = "cuda") -> common.Outcome:
    """Every call some times in a row, and those that use the GPU also on an idle one."""
    alloc = sgalloc.KVAllocator(2 * MANY, 64, MANY, 128, device=device)
    alloc.warm(2 * MANY)
    handles = alloc.open(MANY)
    plan = alloc.extend(handles, 64)
    ids = alloc._ledger.pages[plan.rows, 0]

    def part(count: int) -> tuple[Segments, Any]:
        rows = plan.rows[:count]
        first = np.zeros(count, np.int64)
        return Segments(rows, first, first + 1, count, alloc._ledger.per_row), ids[:count]

    launched = calls_to_cuda(gpu) | writes(alloc, part)
    records: list[Record] = []
    for name, call in (launched | host_calls(alloc, gpu, part)).items():

        def several(call: Callable[[], Any] = call) -> None:
            for _ in range(CALLS):
                call()

        # The bare launch takes turns with everything, so that each has one of its own time.
        sides = [Side(name, [Step(name, several)]), Side(BARE, [Step("beside", bare_of(gpu))])]
        timed = in_turns(sides, short, gpu.wait)
        for record in both_records(timed, {"how": IN_A_ROW, "call": name}, per=CALLS):
            records.append(record)
    for name, call in launched.items():
        sides = [Side(name, [Step(name, call)])]
        timed = in_turns(sides, short, gpu.wait)
        records += both_records(timed, {"how": ON_IDLE, "call": name})
    alloc.check(device=True)
    return common.Outcome(records, [], 1)


def bare_of(gpu: Gpu) -> Callable[[], None]:
    """Bare graph launches in a row."""
    graph = gpu.bare_graph()

    def several() -> None:
        for _ in range(CALLS):
            gpu.launch(graph)

    return several


def calls_to_cuda(gpu: Gpu) -> dict[str, Callable[[], Any]]:
    """Launches by every road, and what stands around them."""
    import cupy

    from sgalloc.device.staging import pinned
    from sgalloc.device.streams import Handle, new_event

    runtime = gpu.runtime
    null = Handle(0)
    raw = cupy.RawKernel(_NOTHING, "nothing")
    raw_takes = cupy.RawKernel(_TAKES, "takes")
    function, takes = gpu.function(_NOTHING, "nothing"), gpu.function(_TAKES, "takes")
    graph = gpu.bare_graph()
    event, other = new_event(), new_event()
    owner, _ = pinned(65536)
    target = gpu.empty((65536,), np.uint8)
    there, host = int(target.data.ptr), int(owner.ptr)
    arguments = (there, 0, np.int64(1), np.int32(1), np.int32(1), np.int32(1), np.int32(1), host)

    def record_behind_graph() -> None:
        gpu.launch(graph)
        runtime.eventRecord(event, 0)

    def record_and_ask() -> None:
        gpu.launch(graph)
        runtime.eventRecord(event, 0)
        runtime.eventQuery(other)

    runtime.eventRecord(other, 0)
    keep = (owner, target)
    return {
        "RawKernel, no argument": lambda: raw((1,), (1,), ()),
        "its Function, no argument": lambda: function((1,), (1,), (), 0, null),
        "RawKernel, 8 arguments": lambda: raw_takes((1,), (1,), arguments),
        "its Function, 8 arguments": lambda: takes((1,), (1,), arguments, 0, null),
        BARE: lambda: gpu.launch(graph),
        "graph launch, event record": record_behind_graph,
        "graph launch, event record, query": record_and_ask,
        "memcpyAsync, 4 KiB": lambda: runtime.memcpyAsync(there, host, 4096, _HOST_TO_DEVICE, 0),
        "memcpyAsync, 64 KiB": lambda keep=keep: runtime.memcpyAsync(  # type: ignore[misc]
            there, host, 65536, _HOST_TO_DEVICE, 0
        ),
        "memsetAsync, 4 KiB": lambda: runtime.memsetAsync(there, 1, 4096, 0),
        "event record": lambda: runtime.eventRecord(event, 0),
    }


def writes(alloc: sgalloc.KVAllocator, part: Callable[[int], Any]) -> dict[str, Callable[[], Any]]:
    """The device part of a step, whole."""
    table = alloc._core.device
    made: dict[str, Callable[[], Any]] = {}
    for count in (FEW, MORE, MANY):
        pages, ids = part(count)
        made[WRITE.format(f"{count:,}")] = lambda pages=pages, ids=ids: table.write(  # type: ignore[misc]
            pages, ids, None, None
        )
    return made


def host_calls(
    alloc: sgalloc.KVAllocator, gpu: Gpu, part: Callable[[int], Any]
) -> dict[str, Callable[[], Any]]:
    """What a write does beside launching, each alone; nothing here uses the GPU but one launch."""
    from sgalloc.device.layout import NO_SIDE, SMALL_BYTES, fill, fill_pages, lay_out_small
    from sgalloc.device.staging import Slot
    from sgalloc.device.streams import Ready, new_event

    runtime, table = gpu.runtime, alloc._core.device
    small = Slot(SMALL_BYTES, False, gpu.device)
    lay_out_small(small, NO_SIDE)
    large = Slot(128 + 12 * MANY + 64, True, gpu.device)
    few, more, many = part(FEW), part(MORE), part(MANY)
    event = new_event()
    runtime.eventRecord(event, 0)
    fill_pages(small, *few)
    return {
        "assign_mapped by its Function": lambda: table._launch_small(small.ptr, FEW, 0, 0),
        "staging slot taken from the ring": lambda: table._small.take(),
        f"staging filled, {FEW} pages": lambda: fill_pages(small, *few),
        f"staging filled, {MORE} pages": lambda: fill_pages(small, *more),
        f"staging filled, {MANY:,} pages": lambda: fill(large, *many, None, 0, table.row_pages),
        "stream chosen (StreamOrder.enter)": lambda: table._order.enter(None),
        "event query": lambda: runtime.eventQuery(event),
        "streamIsCapturing": lambda: runtime.streamIsCapturing(0),
        "getDevice": lambda: runtime.getDevice(),
        "Ready made": lambda: Ready(event, gpu.device),
    }


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    names = list(dict.fromkeys(r["at"]["call"] for r in found.records))
    rows = []
    for name in names:
        at = {"call": name}
        mine = found.one(name, name, how=IN_A_ROW, until=RETURN, **at)
        bare = found.median("beside", BARE, how=IN_A_ROW, until=RETURN, **at)
        rows.append(
            [
                name,
                spread(mine),
                times(ratio(None if mine is None else mine["median_us"], bare)),
                spread(found.one(name, name, how=ON_IDLE, until=RETURN, **at)),
                spread(found.one(name, name, how=ON_IDLE, until=DONE, **at)),
            ]
        )
    parts = []
    for name in (name for name in names if name.startswith(WRITE.split(",")[0])):
        pages = name.split(", ")[1]
        mine = found.median(name, name, how=IN_A_ROW, until=RETURN, call=name)
        bare = found.median("beside", BARE, how=IN_A_ROW, until=RETURN, call=name)
        idle = found.median(name, name, how=ON_IDLE, until=RETURN, call=name)
        alone = found.median(BARE, BARE, how=ON_IDLE, until=RETURN, call=BARE)
        parts.append(
            f"{pages} {us(mine)} µs in a row ({times(ratio(mine, bare))} a bare graph "
            f"launch), {us(idle)} on an idle GPU ({times(ratio(idle, alone))})"
        )
    return [
        Table(
            "One call, host µs",
            f"In a row: {CALLS} calls between two readings of the clock, then a wait; in turns "
            "with as many bare graph launches, to which the ratio refers. On an idle GPU: one "
            "call, until it returns and until the GPU is done. Median (p10–p90); the call of a "
            "Python function is in it.",
            ["call", IN_A_ROW, "by a bare graph launch", f"{ON_IDLE}, host", "host + sync"],
            rows,
            "`device.write`: " + "; ".join(parts) + ".",
        )
    ]


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time launches, events, copies and staging: about 40 seconds."""
    common.run("launch", out, quick, lambda: measure(QUICK if quick else FULL, Gpu()), tables)


if __name__ == "__main__":
    main()
