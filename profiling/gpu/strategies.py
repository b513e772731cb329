"""Five ways to keep the GPU's table up to date, side by side, from the host's decision on.

`python -m profiling.gpu.strategies --help`
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
from profiling.gpu.crossover import shipped
from profiling.gpu.layout import Found, Table, ratio, size, spread, times
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, in_turns
from sgalloc.bench.measured import Record, both_records
from sgalloc.plan import Segments

FULL_TABLE, REBUILD, DIFF = "full-table copy", "padded rebuild", "staged diff"
MAPPED, PAGES = "mapped gather", "page-granular scatter"
STRATEGIES = (FULL_TABLE, REBUILD, DIFF, MAPPED, PAGES)
BATCHES, PAGE_SIZES = (16, 256, 1024, 4096, 16384), (16, 64)
QUICK_BATCHES = (16, 1024)
WIDTH, HELD = 1536, 1024  # slots of a row, and tokens that each request has before
THREADS = 256
_HOST_TO_DEVICE = 1
# A slot a thread: where it stands in the table, as int64, and its value, behind all places.
_SCATTER = r"""
extern "C" __global__ void scatter_slots(const long long* places, const int* values, int* table,
                                         int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) table[places[at]] = values[at];
}
"""


class Steps:
    """One step, by which each request opens a page, and every way to bring it to the GPU.

    Each way begins with the page ids on the host and ends with a table on the GPU; what the host
    has to write before is part of it. Three tables are apart: sgalloc's own, one of slots for the
    full copy and the diff, and one of page ids for the rebuild.
    """

    def __init__(self, gpu: Gpu, batch: int, page: int, device: str = "cuda") -> None:
        from sgalloc.device.staging import pinned
        from sgalloc.device.streams import Handle

        self._gpu, self._batch, self._page, self._handle = gpu, batch, page, Handle
        pages = batch * (HELD // page + 1)
        self.alloc = alloc = sgalloc.KVAllocator(pages, page, batch, WIDTH, device=device)
        alloc.warm(batch)
        handles = alloc.open(batch)
        alloc.extend(handles, HELD)
        plan = alloc.extend(handles, HELD + page)
        self._rows, self._at = plan.rows, HELD // page
        ledger = alloc._ledger
        # The new ids were decided; from here on each way has to tell the GPU.
        self._ids = ledger.pages[self._rows, self._at].copy()
        self._held = ledger.pages
        first = np.full(batch, self._at, np.int64)
        self._segments = Segments(self._rows, first, first + 1, batch, ledger.per_row)
        self._offsets = np.arange(page, dtype=np.int32)
        self._columns = np.arange(HELD, HELD + page)
        slots = batch * page
        self._owners = []

        def memory(shape: tuple[int, ...], dtype: Any) -> Any:
            owner, flat = pinned(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            self._owners.append(owner)
            return flat.view(dtype)[: int(np.prod(shape))].reshape(shape), int(owner.ptr)

        self.table, self._table_at = memory((batch + 1, WIDTH), np.int32)
        self.table[:] = gpu.to_host(alloc.req_to_token)
        self.padded, self._padded_at = memory((batch, self._at + 1), np.int32)
        words, self._diff_at = memory((3 * slots,), np.int32)
        self._places, self._values = words[: 2 * slots].view(np.int64), words[2 * slots :]
        self.slots_there = gpu.empty(self.table.shape)
        self.padded_there = gpu.empty(self.padded.shape)
        self._diff_there = gpu.empty((3 * slots,))
        self._scatter = gpu.function(_SCATTER, "scatter_slots")
        self.ways: dict[str, Callable[[], Any]] = {
            FULL_TABLE: self._full_table,
            REBUILD: self._rebuild,
            DIFF: self._diff,
        }
        mapped, copied = shipped(alloc._core.device, self._segments, self._ids)
        self.ways[PAGES] = copied
        if batch <= 1024:  # as many pages as a slot of mapped memory holds
            self.ways[MAPPED] = mapped

    @property
    def bytes(self) -> dict[str, int]:
        """What each way sends over the bus."""
        return {
            FULL_TABLE: self.table.nbytes,
            REBUILD: self.padded.nbytes,
            DIFF: 12 * self._batch * self._page,
            MAPPED: 12 * self._batch,
            PAGES: 12 * self._batch,
        }

    def _new_slots(self) -> Any:
        return self._ids[:, None] * np.int32(self._page) + self._offsets

    def _full_table(self) -> None:
        self.table[self._rows[:, None], self._columns] = self._new_slots()
        self._copy(self.slots_there, self._table_at, self.table.nbytes)

    def _rebuild(self) -> None:
        self.padded[:] = self._held[self._rows, : self._at + 1]
        self._copy(self.padded_there, self._padded_at, self.padded.nbytes)

    def _diff(self) -> None:
        starts = self._rows[:, None] * WIDTH
        np.add(starts, self._columns, out=self._places.reshape(self._batch, self._page))
        self._values.reshape(self._batch, self._page)[:] = self._new_slots()
        count = self._places.size
        self._copy(self._diff_there, self._diff_at, 12 * count)
        there = int(self._diff_there.data.ptr)
        target = int(self.slots_there.data.ptr)
        arguments = (there, there + 8 * count, target, np.int32(count))
        self._scatter((-(-count // THREADS),), (THREADS,), arguments, 0, self._handle(0))

    def _copy(self, target: Any, source: int, count: int) -> None:
        self._gpu.runtime.memcpyAsync(int(target.data.ptr), source, count, _HOST_TO_DEVICE, 0)

    def check(self) -> None:
        """Prove that the step arrives in every way, in place of what was spoilt before.

        Raises:
            RuntimeError: it does not.
        """
        gpu, whole = self._gpu, self.table.copy()
        ids = self._held[self._rows, : self._at + 1].copy()
        own = self.alloc.req_to_token
        for name, way in self.ways.items():
            if name == REBUILD:
                self.padded_there.fill(-1)
                seen, wanted = self.padded_there, ids
            elif name in (FULL_TABLE, DIFF):
                seen, wanted = self.slots_there, whole
                seen[1:, HELD:] = -1
            else:
                seen, wanted = own, whole
                seen[1:, HELD : HELD + self._page] = -1
            gpu.wait()
            way()
            gpu.wait()
            if name == DIFF:  # it writes what is new, and nothing else
                columns = slice(HELD, HELD + self._page)
                wanted, seen = wanted[1:, columns], seen[1:, columns]
            if not np.array_equal(gpu.to_host(seen), wanted):
                raise RuntimeError(f"{name} of {self._batch} requests does not arrive as it should")


def measure(gpu: Gpu, quick: bool, device: str = "cuda") -> common.Outcome:
    """Every way at every size, in turns; each is checked before and after."""
    records: list[Record] = []
    compared = 0
    effort = Effort(0.05 if quick else 0.25, least=20, most=400, warm_up=10, block=5)
    for page in PAGE_SIZES:
        for batch in QUICK_BATCHES if quick else BATCHES:
            steps = Steps(gpu, batch, page, device)
            steps.check()
            sides = [Side(name, [Step("step", way)]) for name, way in steps.ways.items()]
            found = in_turns(sides, effort, gpu.wait)
            sent = steps.bytes
            for record in both_records(found, {"batch": batch, "page": page}):
                records.append(record._replace(at={**record.at, "bytes": sent[record.side]}))
            steps.check()
            compared += 2 * len(steps.ways)
            del steps, sides
            gpu.free_unused()
    notes = ["mapped memory is read in place up to 1,024 pages a step; beyond, nothing is mapped"]
    return common.Outcome(records, notes, compared)


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [strategy_table(found, page) for page in found.values("step", "page")]


def strategy_table(found: Found, page: int) -> Table:
    """All ways at one page size."""
    rows, verdicts = [], []
    batches = sorted({r["at"]["batch"] for r in found.where("step", page=page)})
    for batch in batches:
        ready: dict[str, float] = {}
        for name in STRATEGIES:
            at = {"batch": batch, "page": page}
            done = found.one("step", name, until=DONE, **at)
            if done is None:
                continue
            ready[name] = done["median_us"]
            host = found.one("step", name, until=RETURN, **at)
            rows.append([name, f"{batch:,}", size(done["at"]["bytes"]), spread(host), spread(done)])
        best = min(ready, key=lambda name: ready[name])
        full = times(ratio(ready[FULL_TABLE], ready[best]))
        verdicts.append(f"{batch:,}: {best} (a full copy takes {full} as long)")
    return Table(
        f"A page more for each request at page {page}, µs",
        f"Rows of {WIDTH:,} slots, {HELD:,} tokens each before. From the page ids on the host to a "
        "table on the GPU, what the host writes included: its whole table of slots copied; a "
        "padded table of page ids made anew and copied; places and values of the new slots, 12 "
        "bytes each, copied and scattered; sgalloc's 12 bytes a page, read from mapped memory or "
        "copied, and made into slots by its kernel. Until the call returns, and until the GPU is "
        "done; in turns, on an idle GPU; median (p10–p90).",
        ["way", "batch", "bytes sent", "host", "host + sync"],
        rows,
        f"ready first: {'; '.join(verdicts)}.",
    )


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time five ways to update the table: about 25 seconds."""
    common.run("strategies", out, quick, lambda: measure(Gpu(), quick), tables)


if __name__ == "__main__":
    main()
