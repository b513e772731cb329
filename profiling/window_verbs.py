"""The verbs of a sliding window: `python -m profiling.bench_host --only window`.

Three sides make the same calls: sgalloc with a window group, sgalloc without one (what the window
adds is the difference), and a plain Python loop with a second list of free pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

import sgalloc
from profiling.layout import Found, Table, spread, times, us
from sgalloc.bench.course import MAX_ACCEPT, RESERVE, growth
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.python_loop import PythonLoop, Request

BARE = "sgalloc, no window"
WINDOW = 256
HISTORY, ROW_WIDTH = 1000, 1536
MOVES, STAYS = "frontiers that move", "frontiers that stay"


class WindowRequest(Request):
    """A request of the loop.

    Attributes:
        evicted: tokens below which its window pages are gone.
    """

    __slots__ = ("evicted",)

    def __init__(self) -> None:
        super().__init__()
        self.evicted = 0


class WindowLoop:
    """Both groups, handled request by request: a loop for the one, and the same for the other."""

    def __init__(self, num_pages: int, page_size: int, max_requests: int, row_width: int) -> None:
        self.page_size = page_size
        self.full = PythonLoop(num_pages, page_size, max_requests, row_width)
        self.window = PythonLoop(num_pages, page_size, max_requests, row_width)
        self.requests = [WindowRequest() for _ in range(max_requests)]
        self.beside = [Request() for _ in range(max_requests)]

    def start(self, lengths: Sequence[int]) -> None:
        """Open all requests and prefill them."""
        for loop, requests in ((self.full, self.requests), (self.window, self.beside)):
            loop.open(requests)
            loop.extend(requests, lengths)
        self.evict()

    def finish(self) -> None:
        """Free what is held; the window pages below the frontier are free already."""
        size, free = self.page_size, self.window.free_pages
        self.full.release(self.requests)
        for request, beside in zip(self.requests, self.beside, strict=True):
            kv = beside.kv
            row = self.window.table[kv.row, request.evicted : kv.kv_allocated_len : size]
            free.extend((row // size).tolist())
            self.window.free_rows.append(kv.row)
            kv.row = kv.kv_committed_len = kv.kv_allocated_len = 0
            request.evicted = 0

    def decode(self, rows: NDArray[np.int64], seq_lens: NDArray[np.int64]) -> int:
        """One token for each, in both groups; the pages that this took in one of them."""
        both = seq_lens.copy()
        self.window.decode(self.beside, rows, both)
        return self.full.decode(self.requests, rows, seq_lens)

    def reserve(self, reserve: int) -> int:
        """Room for ``reserve`` tokens past C, in both groups."""
        self.window.reserve(self.beside, reserve)
        return self.full.reserve(self.requests, reserve)

    def commit(self, accepted: Sequence[int]) -> None:
        """C += ``accepted`` of each."""
        self.full.commit(self.requests, accepted)
        self.window.commit(self.beside, accepted)

    def evict(self) -> int:
        """Free what left the window of each request; the pages."""
        size, table, free = self.page_size, self.window.table, self.window.free_pages
        pages = 0
        for request, beside in zip(self.requests, self.beside, strict=True):
            frontier = max(0, request.kv.kv_committed_len - WINDOW) // size * size
            if frontier > request.evicted:
                row = table[beside.kv.row]
                gone = (row[request.evicted : frontier : size] // size).tolist()
                free.extend(gone)
                row[request.evicted : frontier] = 0
                request.evicted = frontier
                pages += len(gone)
        return pages


class Trio:
    """The three sides with the same requests.

    Attributes:
        alloc, bare, loop: with a window, without one, and the plain loop.
        batches: what ``alloc`` and ``bare`` keep of them.
        base: tokens of each request at the start, int64 ``(batch,)``.
    """

    def __init__(self, batch: int, page_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        pages = batch * (ROW_WIDTH // page_size)
        sizes = (pages, page_size, batch, ROW_WIDTH)
        window = sgalloc.SlidingWindow(WINDOW, pages)
        self.alloc = sgalloc.KVAllocator(*sizes, device="cpu", window=window)
        self.bare = sgalloc.KVAllocator(*sizes, device="cpu")
        self.loop = WindowLoop(*sizes)
        self.base = HISTORY - rng.integers(0, 64, batch)
        self.accepted = rng.integers(1, MAX_ACCEPT + 1, (64, batch))
        self.lists: list[list[int]] = self.accepted.tolist()
        self.alloc.warm()
        self.bare.warm()
        self.loop.full.warm()
        self.loop.window.warm()
        self.batches: dict[str, sgalloc.Batch] = {}
        self.rows: NDArray[np.int64] = np.empty(0, np.int64)
        self.seq_lens: NDArray[np.int64] = np.empty(0, np.int64)
        for side in (SUBJECT, BARE, LOOP):
            self.start(side)

    def start(self, side: str) -> None:
        """Begin again from the first lengths; no row of the window is cut by a trim."""
        if side == LOOP:
            if self.rows.size:
                self.loop.finish()
            self.loop.start(self.base.tolist())
            self.rows = np.array([request.kv.row for request in self.loop.requests])
            self.seq_lens = self.base.copy()
            return
        alloc = self.alloc if side == SUBJECT else self.bare
        if side in self.batches:
            alloc.release(self.batches[side])
        self.batches[side] = batch = alloc.batch(alloc.open(self.base.size))
        alloc.extend(batch, self.base)
        if side == SUBJECT:
            alloc.evict_window(batch)

    def agree(self) -> None:
        """Stop where the sides did different work."""
        batch = self.batches[SUBJECT]
        full = len(self.loop.full.free_pages)
        window = len(self.loop.window.free_pages)
        mine = (self.alloc.available(), self.alloc.available("window"))
        if mine != (full, window) or self.bare.available() != full:
            raise RuntimeError(f"free pages differ: sgalloc {mine}, the loop {(full, window)}")
        if self.alloc.frontier(batch).tolist() != [r.evicted for r in self.loop.requests]:
            raise RuntimeError("the frontiers differ")
        self.alloc.check(device=True)


def sides_of(trio: Trio, script: str) -> list[Side]:
    """The calls of each side in one round of ``script``."""
    alloc, bare, loop = trio.alloc, trio.bare, trio.loop
    advance = 1 if script == "decode" else MAX_ACCEPT
    rounds = (ROW_WIDTH - HISTORY - RESERVE - 64) // advance
    turns = {SUBJECT: 0, BARE: 0, LOOP: 0}

    def turn(side: str) -> None:
        turns[side] += 1
        if turns[side] % rounds == 0:
            trio.start(side)

    def counted(freed: int) -> str:
        return MOVES if freed else STAYS

    def evict() -> int:
        before = alloc.available("window")
        alloc.evict_window(trio.batches[SUBJECT])
        return alloc.available("window") - before

    def accepted(side: str) -> int:
        return turns[side] % 64

    if script == "decode":
        mine = [
            Step("decode", lambda: alloc.decode(trio.batches[SUBJECT]), growth),
            Step("evict_window", evict, counted),
        ]
        plain = [Step("decode", lambda: bare.decode(trio.batches[BARE]), growth)]
        theirs = [
            Step("decode", lambda: loop.decode(trio.rows, trio.seq_lens), growth),
            Step("evict_window", loop.evict, counted),
        ]
    else:
        mine = [
            Step("reserve", lambda: alloc.reserve(trio.batches[SUBJECT], RESERVE), growth),
            Step("reserve without need", lambda: alloc.reserve(trio.batches[SUBJECT], RESERVE)),
            Step(
                "reserve and evict, planned",
                lambda: alloc.apply(
                    alloc.plan(reserve=(trio.batches[SUBJECT], RESERVE), evict_window=True)
                ),
            ),
            Step(
                None,
                lambda: alloc.commit(trio.batches[SUBJECT], trio.accepted[accepted(SUBJECT)]),
            ),
        ]
        plain = [
            Step("reserve", lambda: bare.reserve(trio.batches[BARE], RESERVE), growth),
            Step("reserve without need", lambda: bare.reserve(trio.batches[BARE], RESERVE)),
            Step(
                "reserve and evict, planned",
                lambda: bare.apply(bare.plan(reserve=(trio.batches[BARE], RESERVE))),
            ),
            Step(None, lambda: bare.commit(trio.batches[BARE], trio.accepted[accepted(BARE)])),
        ]
        theirs = [
            Step("reserve", lambda: loop.reserve(RESERVE), growth),
            Step("reserve without need", lambda: loop.reserve(RESERVE)),
            Step("reserve and evict, planned", lambda: (loop.evict(), loop.reserve(RESERVE))),
            Step(None, lambda: loop.commit(trio.lists[accepted(LOOP)])),
        ]
    return [
        Side(name, [*steps, Step(None, lambda name=name: turn(name))])  # type: ignore[misc]
        for name, steps in ((SUBJECT, mine), (BARE, plain), (LOOP, theirs))
    ]


def run(batches: Iterable[int], page_sizes: Iterable[int], effort: Effort) -> Bench:
    """Both scripts at each batch and page size."""
    records: list[Record] = []
    compared = 0
    for batch in batches:
        for page_size in page_sizes:
            for script in ("decode", "reserve"):
                trio = Trio(batch, page_size)
                at = {"batch": batch, "page": page_size}
                records += records_of(alternate(sides_of(trio, script), effort), at)
                trio.agree()
                compared += 1
    return Bench(records, compared)


def table(found: Found) -> Table:
    """What a window adds, and what the loop takes."""
    rows, ratios = [], []
    for name, label in found.names():
        for page in found.sizes("page"):
            row = [f"`{name}`" + (f", {label}" if label else ""), str(page)]
            for batch in found.sizes("batch"):
                cells = []
                for side in (SUBJECT, BARE, LOOP):
                    some = found.where(name, side, label, batch=batch, page=page)
                    cells.append(some[0] if some else None)
                row += [spread(cells[0]) if cells[0] else ""]
                row += [us(cell["median_us"]) if cell else "" for cell in cells[1:]]
                if cells[0] and cells[2]:
                    ratios.append(cells[2]["median_us"] / cells[0]["median_us"])
            rows.append(row)
    heads = [
        head
        for batch in found.sizes("batch")
        for head in (f"batch {batch:,}", "no window", "python loop")
    ]
    return Table(
        f"A window of {WINDOW} tokens, µs a call of the whole batch",
        "sgalloc's median (p10–p90), the same call without a window, and the loop's median.",
        ["call", "page", *heads],
        rows,
        f"the loop takes {times(min(ratios))} to {times(max(ratios))} as long as sgalloc.",
    )
