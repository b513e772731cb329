"""What it costs to prove the device's tables: the kernel, what a probe costs, and a check.

`python -m profiling.gpu.row_digest --help`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, size, spread, times, us
from sgalloc import laws
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, in_turns, summarize
from sgalloc.bench.measured import Record, both_records
from sgalloc.core import Core
from sgalloc.ledger import NO_ROWS
from sgalloc.trust.claims import Claims, claims_of

KERNEL = "row_digest"
MINE, SUM, COPY = "sgalloc", "plain sum", "copy"
EXPECTED, PROBE, RESULT = "expected digests", "probe", "probe, result"
LAWS, CHECK, READ_BACK = "check()", "check(device=True)", "read back"
# Over a plain sum of the same bytes, for tables that no cache holds.
AIM = 1.2
_LARGE = 240_000_000
_DEVICE_TO_DEVICE = 3
_POISON = 0x5A
_THREADS = 256
# A sum over all entries, 16 bytes at a time: what reading them takes at least.
_SUM = """
extern "C" __global__ void sum_all(const int4* entries, long long count, int* sums) {
    int sum = 0;
    long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 3 * stride < count; at += 4 * stride) {
        int4 one = __ldcs(entries + at), two = __ldcs(entries + at + stride);
        int4 three = __ldcs(entries + at + 2 * stride), four = __ldcs(entries + at + 3 * stride);
        sum += one.x + one.y + one.z + one.w + two.x + two.y + two.z + two.w;
        sum += three.x + three.y + three.z + three.w + four.x + four.y + four.z + four.w;
    }
    for (; at < count; at += stride) {
        int4 one = __ldcs(entries + at);
        sum += one.x + one.y + one.z + one.w;
    }
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


class Case(NamedTuple):
    """An allocator whose rows are full.

    Attributes:
        requests: rows.
        slots: slots of each.
        page: slots in a page.
    """

    requests: int
    slots: int
    page: int

    @property
    def at(self) -> dict[str, int | str]:
        """As a record has it."""
        return {**self._asdict(), "bytes": 4 * self.requests * self.slots}


CASES = tuple(
    Case(requests, slots, page)
    for page in (16, 64)
    for requests, slots in ((1, 1 << 20), (256, 1024), (256, 32_768), (4096, 1024), (4096, 32_768))
)
QUICK = tuple(case for case in CASES if case.page == 64 and case.requests > 1)


def made(case: Case, device: str = "cuda") -> sgalloc.KVAllocator:
    """An allocator whose requests have all slots of their rows."""
    pages = case.requests * (case.slots // case.page)
    alloc = sgalloc.KVAllocator(pages, case.page, case.requests, case.slots, device=device)
    alloc.warm()
    alloc.extend(alloc.open(case.requests), case.slots)
    return alloc


def measure(cases: tuple[Case, ...], effort: Effort, gpu: Gpu, replays: int) -> common.Outcome:
    """Each case: the kernel beside a sum and a copy, and what the calls cost the host."""
    records: list[Record] = []
    for case in cases:
        alloc = made(case)
        records += kernel_records(case, alloc, gpu, replays)
        records += host_records(case, alloc, gpu, effort)
        del alloc
        gpu.free_unused()
    return common.Outcome(records, [], 2 * len(cases))


# -- the kernel ------------------------------------------------------------------------------


def kernel_records(case: Case, alloc: sgalloc.KVAllocator, gpu: Gpu, replays: int) -> list[Record]:
    """Replays of a graph of digests of the whole table, of one of sums, and of one of copies."""
    core = alloc._core
    claims = claims_of(core, core.ledger.live(), True)
    written = 4 * case.requests * case.slots
    count = 4 if written >= _LARGE else 40
    slot = core.device._digests._made()  # type: ignore[attr-defined]
    target = gpu.empty((max(written, 8 * 4 * _THREADS * gpu.sms),), np.uint8)
    graphs = {
        MINE: gpu.capture(digests(core, claims, slot, count)),
        SUM: gpu.capture(sums(gpu, alloc, target, written, count)),
        COPY: gpu.capture(copies(gpu, alloc, target, written, count)),
    }
    slot.digests[:] = _POISON
    found = [
        Record(KERNEL, side, case.at, summarize(series, per=count))
        for side, series in gpu.replays(graphs, replays).items()
    ]
    if not np.array_equal(slot.digests[: claims.digests.size], claims.digests):
        raise RuntimeError(f"digests differ from what the ledger says, {case}")
    return found


def digests(core: Core, claims: Claims, slot: Any, count: int) -> Callable[[int], None]:
    """Puts ``count`` launches of the kernel on a stream, over all rows."""
    device: Any = core.device
    for name, column in zip(("array", "start", "length"), claims.ranges, strict=True):
        slot.ranges[name][: column.size] = column

    def put(stream: int) -> None:
        for _ in range(count):
            slot.launch(device._digests._arrays, claims.digests.size, stream, device.index)

    return put


def sums(
    gpu: Gpu, alloc: sgalloc.KVAllocator, target: Any, written: int, count: int
) -> Callable[[int], None]:
    """Puts ``count`` sums over as many bytes of the table on a stream."""
    from sgalloc.device.streams import Handle

    function = gpu.function(_SUM, "sum_all")
    blocks = max(1, min(-(-written // 16 // _THREADS), 8 * gpu.sms))
    start = int(alloc.req_to_token.data.ptr) + 4 * alloc.row_width
    arguments = (start, np.int64(written // 16), int(target.data.ptr))

    def put(stream: int) -> None:
        for _ in range(count):
            function((blocks,), (_THREADS,), arguments, 0, Handle(stream))

    return put


def copies(
    gpu: Gpu, alloc: sgalloc.KVAllocator, target: Any, written: int, count: int
) -> Callable[[int], None]:
    """Puts ``count`` copies of as many bytes of the table on a stream."""
    to, start = int(target.data.ptr), int(alloc.req_to_token.data.ptr) + 4 * alloc.row_width

    def put(stream: int) -> None:
        for _ in range(count):
            gpu.runtime.memcpyAsync(to, start, written, _DEVICE_TO_DEVICE, stream)

    return put


# -- the host --------------------------------------------------------------------------------


def host_records(case: Case, alloc: sgalloc.KVAllocator, gpu: Gpu, effort: Effort) -> list[Record]:
    """What a probe and a check cost, beside reading all rows back one by one."""
    core = alloc._core
    calls: dict[str, Callable[[], Any]] = {
        EXPECTED: lambda: claims_of(core, core.ledger.live(), True),
        PROBE: alloc.probe,
        RESULT: lambda: alloc.probe().result(),
        LAWS: alloc.check,
        CHECK: lambda: alloc.check(device=True),
        READ_BACK: lambda: read_back(core),
    }
    sides = [Side(MINE, [Step(name, call) for name, call in calls.items()])]
    return both_records(in_turns(sides, effort, gpu.wait), case.at)


def read_back(core: Core) -> None:
    """Every row back to the host, and compared there."""
    rows = np.concatenate(([0], core.ledger.live()))
    laws.check_table(core.ledger, core.device, rows, NO_ROWS)


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [kernel_table(found), host_table(found)]


def kernel_table(found: Found) -> Table:
    """The kernel beside a sum and a copy of the same bytes."""
    rows, judged = [], []
    for mine in found.where(KERNEL, MINE):
        at = mine["at"]
        plain, copied = found.one(KERNEL, SUM, **at), found.one(KERNEL, COPY, **at)
        over = ratio(mine["median_us"], None if plain is None else plain["median_us"])
        if over is not None and at["bytes"] >= _LARGE:
            judged.append(over)
        beside = ratio(mine["median_us"], None if copied is None else copied["median_us"])
        rows.append(
            [
                f"{at['requests']:,}",
                f"{at['slots']:,}",
                str(at["page"]),
                size(at["bytes"]),
                spread(mine),
                spread(plain),
                times(over),
                spread(copied),
                times(beside),
                f"{at['bytes'] / mine['median_us'] / 1e6:.2f}",
            ]
        )
    verdict = "no table larger than the cache was measured."
    if judged:
        word = "met" if max(judged) <= AIM else "missed"
        verdict = (
            f"aim at most {AIM}× a plain sum for tables that no cache holds: "
            f"{times(min(judged))} to {times(max(judged))}, {word}."
        )
    return Table(
        "`row_digest`, GPU µs a launch",
        "Replays of a graph of launches over all rows of a full table, in turns with a graph of "
        "sums that only read the same bytes, 16 at a time, and one of copies, which write them, "
        "too; median (p10–p90). What is smaller than L2 is read from there.",
        [
            "requests",
            "slots of each",
            "page",
            "bytes",
            "kernel",
            SUM,
            "ratio",
            COPY,
            "ratio",
            "TB/s",
        ],
        rows,
        verdict,
    )


def host_table(found: Found) -> Table:
    """What a probe and a check cost, beside reading back."""
    rows, gains = [], []
    for mine in found.where(PROBE, MINE, until=RETURN):
        at = mine["at"]

        def one(name: str, until: str = RETURN, at: Any = at) -> Any:
            return found.one(name, MINE, **{**at, "until": until})

        gain = ratio(*(one(name)["median_us"] for name in (READ_BACK, CHECK)))
        gains += [] if gain is None else [(gain, at)]
        rows.append(
            [
                f"{at['requests']:,}",
                f"{at['slots']:,}",
                str(at["page"]),
                spread(one(EXPECTED)),
                spread(mine),
                us(one(PROBE, DONE)["median_us"]),
                spread(one(RESULT)),
                spread(one(LAWS)),
                spread(one(CHECK)),
                spread(one(READ_BACK)),
                times(gain),
            ]
        )
    told = "; ".join(
        f"{times(gain)} at {at['requests']:,} × {at['slots']:,}, page {at['page']}"
        for gain, at in gains
    )
    return Table(
        "A probe and a check, host µs",
        "On an idle GPU; a call until it returns, median (p10–p90), and for a probe also until the "
        "GPU is done. Expected digests are part of a probe, and the laws on the host of a check. "
        "Read back: every row copied to the host and compared there, one after the other, and no "
        "law of the host's.",
        [
            "requests",
            "slots of each",
            "page",
            EXPECTED,
            PROBE,
            "probe + sync",
            RESULT,
            LAWS,
            CHECK,
            READ_BACK,
            "by check(device=True)",
        ],
        rows,
        f"reading back takes {told} as long as a whole check.",
    )


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time digests of the table, probes and checks: about a minute."""
    effort = Effort(0.2 if quick else 1.0, least=3, most=200, warm_up=1, block=1)
    cases = QUICK if quick else CASES
    common.run(
        KERNEL, out, quick, lambda: measure(cases, effort, Gpu(), 5 if quick else 15), tables
    )


if __name__ == "__main__":
    main()
