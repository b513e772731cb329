"""What the order of a request's pages does to the bandwidth of reading their KV.

`python -m profiling.gpu.contiguity --help`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, size, spread, times, us
from profiling.recycling import STACK, Seen, recycled
from sgalloc.bench.harness import summarize
from sgalloc.bench.measured import Record
from sgalloc.extents import extents

CONTIGUOUS, RECYCLED, SHUFFLED = "contiguous", "recycled", "shuffled"
ORDERS = (CONTIGUOUS, RECYCLED, SHUFFLED)
COPY = "copy of as many bytes"
# Tokens of a page, and the KV heads of one GPU; heads of 128 dimensions of two bytes.
CASES = ((64, 8), (64, 1), (16, 8), (16, 1), (1, 8), (1, 1))
HEAD_BYTES = 128 * 2
COLD, WARM = "cold", "warm"
# Bytes that are gathered: far more than any L2 holds, and less than half of one.
BYTES = {COLD: 1 << 28, WARM: 12 << 20}
REPLAYS = {COLD: 15, WARM: 40}
THREADS, EACH = 256, 4
_DEVICE_TO_DEVICE = 3
# A thread copies 16 bytes at a time, neighbours of neighbours; a page has 2**shift of them. It is
# looked up in the list as attention kernels look it up in their page table.
_GATHER = r"""
extern "C" __global__ void gather_kv(const int* __restrict__ pages,
                                     const int4* __restrict__ pool, int4* __restrict__ out,
                                     int shift, unsigned count) {
    unsigned start = blockIdx.x * blockDim.x * 4 + threadIdx.x;
    for (unsigned n = 0; n < 4; ++n) {
        unsigned at = start + n * blockDim.x;
        if (at >= count) return;
        unsigned inside = at & ((1u << shift) - 1);
        out[at] = pool[((long long)pages[at >> shift] << shift) + inside];
    }
}
"""


@lru_cache
def lists_of(page: int, seed: int) -> Any:
    """Page ids of all requests of one worn pool, from 0, int64."""
    seen: Seen = recycled("random", page, STACK, 600, seed=seed)[-1]
    return np.concatenate(seen.whole) - 1


def worn(page: int, count: int) -> Any:
    """Page ids of requests one after the other, int32, from pools that were in use for long.

    Further pools follow behind the first until there are ``count`` ids; a page of one token is
    made of sixteen to a page of 16, in order, as a pool of page 1 keeps them where they come and
    go together.
    """
    parts: list[Any] = []
    base = total = 0
    seed = 0
    while total < count:
        ids = lists_of(max(page, 16), seed)
        top = int(ids.max()) + 1
        if page == 1:
            ids = (ids[:, None] * 16 + np.arange(16)).reshape(-1)
            top *= 16
        parts.append(ids + base)
        base += top
        total += ids.size
        seed = (seed + 1) % 8
    return np.concatenate(parts)[:count].astype(np.int32)


def orders(page: int, count: int) -> dict[str, Any]:
    """Lists of ``count`` pages in every order, int32."""
    return {
        CONTIGUOUS: np.arange(count, dtype=np.int32),
        RECYCLED: worn(page, count),
        SHUFFLED: np.random.default_rng(0).permutation(count).astype(np.int32),
    }


def measure(
    gpu: Gpu, cases: Iterable[tuple[int, int]], amounts: dict[str, int] = BYTES
) -> common.Outcome:
    """Gathers by graph replay, in turns, beside a copy; each is compared with what it should be."""
    records: list[Record] = []
    for page, heads in cases:
        for state, amount in amounts.items():
            records += measured_cell(gpu, page, heads, state, amount)
            gpu.free_unused()
    return common.Outcome(records, [], sum(record.side != COPY for record in records))


def measured_cell(gpu: Gpu, page: int, heads: int, state: str, amount: int) -> list[Record]:
    """One size of pages in every order."""
    per_page = page * heads * HEAD_BYTES // 16
    lists = orders(page, amount // (16 * per_page))
    count = lists[CONTIGUOUS].size
    total = count * per_page
    pool = gpu.to_device(pattern(1 + max(int(ids.max()) for ids in lists.values()), per_page))
    out = gpu.empty((total, 4))
    there = {name: gpu.to_device(ids) for name, ids in lists.items()}
    # In a cold state one launch moves more than L2 holds; in a warm one many follow.
    repeats = 1 if state == COLD else 20
    graphs = {
        name: gpu.capture(gather(gpu, int(ids.data.ptr), pool, out, per_page, repeats))
        for name, ids in there.items()
    }
    for name, ids in lists.items():
        out.fill(-1)
        gpu.wait()
        gpu.launch(graphs[name])
        gpu.wait()
        check(gpu, out, ids, per_page, name)

    def copy(stream: int) -> None:
        source, target = int(pool.data.ptr), int(out.data.ptr)
        for _ in range(repeats):
            gpu.runtime.memcpyAsync(target, source, 16 * total, _DEVICE_TO_DEVICE, stream)

    graphs[COPY] = gpu.capture(copy)
    at: dict[str, int | str] = {"page": page, "heads": heads, "l2": state}
    at |= {"bytes": 16 * total, "pages": count}
    runs = {name: int(extents(ids + 1)[0].size) for name, ids in lists.items()} | {COPY: 1}
    return [
        Record("gather", name, {**at, "extents": runs[name]}, summarize(took, per=repeats))
        for name, took in gpu.replays(graphs, REPLAYS[state]).items()
    ]


def gather(
    gpu: Gpu, pages: int, pool: Any, out: Any, per_page: int, repeats: int
) -> Callable[[int], None]:
    """Puts gathers of the list at the address ``pages`` on a stream, one after the other."""
    from sgalloc.device.streams import Handle

    function = gpu.function(_GATHER, "gather_kv")
    total, shift = out.shape[0], per_page.bit_length() - 1
    if per_page != 1 << shift:
        raise ValueError(f"a page of {16 * per_page} bytes is no power of two")
    grid = (-(-total // (THREADS * EACH)),)
    arguments = (
        *(pages, int(pool.data.ptr), int(out.data.ptr)),
        *(np.int32(shift), np.uint32(total)),
    )

    def put(stream: int) -> None:
        for _ in range(repeats):
            function(grid, (THREADS,), arguments, 0, Handle(stream))

    return put


def pattern(pages: int, per_page: int) -> Any:
    """A pool in which every 16 bytes say where they are, int32 ``(pages * per_page, 4)``."""
    made = np.empty((pages * per_page, 4), np.int32)
    made[:] = np.arange(pages * per_page, dtype=np.int32)[:, None]
    return made


def check(gpu: Gpu, out: Any, ids: Any, per_page: int, name: str) -> None:
    """Prove that all that was gathered is in its place.

    Raises:
        RuntimeError: it is not.
    """
    wanted = (ids.astype(np.int64)[:, None] * per_page + np.arange(per_page)).reshape(-1)
    seen = gpu.to_host(out)
    if not all(np.array_equal(seen[:, word], wanted) for word in range(4)):
        raise RuntimeError(f"the gather of {name} pages does not read what it should")


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    rows, losses = [], []
    cells = dict.fromkeys(
        (r["at"]["page"], r["at"]["heads"], r["at"]["l2"], r["at"]["bytes"]) for r in found.records
    )
    for page, heads, state, count in cells:
        at = {"page": page, "heads": heads, "l2": state}
        copy = found.one("gather", COPY, **at)
        row = [f"{page} tokens, {heads} heads", size(page * heads * HEAD_BYTES), size(count), state]
        for name in ORDERS:
            record = found.one("gather", name, **at)
            row.append("" if record is None else f"{bandwidth(record)} ({spread(record)})")
        worn_by = ratio(
            found.median("gather", RECYCLED, **at), found.median("gather", CONTIGUOUS, **at)
        )
        mixed = ratio(
            found.median("gather", SHUFFLED, **at), found.median("gather", CONTIGUOUS, **at)
        )
        row += ["" if copy is None else f"{bandwidth(copy)} ({us(copy['median_us'])})"]
        rows.append(row)
        if state == COLD:
            losses.append(
                f"{size(page * heads * HEAD_BYTES)}: recycled {times(worn_by)}, "
                f"shuffled {times(mixed)}"
            )
    return [
        Table(
            "A gather of KV pages, GB/s read",
            "A kernel that looks pages up in a list and copies them, 16 bytes a thread; heads of "
            "128 dimensions of two bytes. Pages in ascending order, as sgalloc's pool has them "
            "after long recycling (`profiling.contiguity`, workload `random`), or shuffled. Cold: "
            "256 MiB; warm: 12 MiB again and again, out of L2. Graph replays, in turns; in "
            "brackets µs, median (p10–p90).",
            ["page", "bytes of it", "gathered", "L2", *ORDERS, COPY],
            rows,
            f"time by that of contiguous pages, cold: {'; '.join(losses)}.",
        )
    ]


def bandwidth(record: Any) -> str:
    """Bytes gathered by the time, in GB/s."""
    return f"{record['at']['bytes'] / record['median_us'] / 1000:,.0f}"


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time gathers of KV pages in several orders: about 30 seconds."""
    cases = CASES[:1] if quick else CASES
    common.run("contiguity", out, quick, lambda: measure(Gpu(), cases), tables)


if __name__ == "__main__":
    main()
