"""SGLang's own allocation beside sgalloc's, in one process, in turns.

`SGL_SRC=FOLDER python -m profiling.gpu.peer_sglang`, where FOLDER holds the Python files of the
wheel sglang==0.5.23: README.md says how to get there. None of its code is here; what is here are
the few objects that its functions take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click
import numpy as np

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.handmade import Growing
from profiling.gpu.layout import Found, Table, ratio, spread, times
from profiling.gpu.sglang_engine import VARIABLE, Engine, Peer, load
from sgalloc.bench.course import GROWS, MAX_ACCEPT, NO_NEED, RESERVE, growth
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, Summary, in_turns, summarize
from sgalloc.bench.measured import Record, both_records
from sgalloc.bench.twins import Shape, shape_for

MINE, SGLANG = "sgalloc", "SGLang"
AIMS = {256: 15.0, 4096: 30.0, 65536: 60.0}
AIM_PAGE = 64
RELEASED_TOKENS = 1000
# A side makes some steps in a row, as an engine does: each then finds its code and data in the
# caches, and not the other side's.
EFFORT = Effort(1.0, least=12, most=400, warm_up=3, block=12)
FIRST = "first step, compilation included"
ALLOC, ASSIGN, OURS = "alloc_extend_kernel", "assign_req_to_token_pool", "assign_pages"


class Cell(NamedTuple):
    """One thing to be measured.

    Attributes:
        what: "reserve", "decode", "release" or "kernels".
        batch: requests.
        page: page size.
    """

    what: str
    batch: int
    page: int


# In order of weight: what the time does not suffice for is left out from the end.
CELLS = (
    *(Cell("reserve", n, 64) for n in (256, 4096, 65536, 64, 1024, 16384, 16, 1)),
    *(Cell("decode", n, 64) for n in (256, 4096)),
    *(Cell("release", n, 64) for n in (64, 256, 1)),
    *(Cell("reserve", n, page) for page in (1, 16) for n in (256, 4096)),
    *(Cell("decode", n, 1) for n in (256, 4096)),
    *(Cell("kernels", n, 64) for n in (256, 4096, 16384, 65536)),
    *(Cell("release", n, page) for page in (1, 16) for n in (64, 256)),
    *(Cell("reserve", n, page) for page in (1, 16) for n in (1, 16, 64, 1024)),
    *(Cell("decode", n, page) for page in (64, 1) for n in (1, 64, 1024)),
)
QUICK = (Cell("reserve", 256, 64), Cell("decode", 256, 64), Cell("release", 64, 64))


def measure(
    cells: Sequence[Cell], gpu: Gpu, peer: Peer | str, budget: float, device: str = "cuda"
) -> common.Outcome:
    """The cells, as far as ``budget`` (seconds from now) goes; ``peer``, or why there is none."""
    records: list[Record] = []
    notes = [peer] if isinstance(peer, str) else [f"SGLang {peer.version}"]
    compared = 0
    end = perf_counter() + budget
    left = list(cells)
    while left and perf_counter() < end:
        cell = left.pop(0)
        begin = perf_counter()
        if cell.what == "kernels":
            records += kernels(gpu, cell, peer)
        else:
            found, checks = measure_cell(gpu, cell, peer, device)
            records += found
            compared += checks
        gpu.free_unused()
        took = perf_counter() - begin
        click.echo(f"{cell.what} {cell.batch} page {cell.page}: {took:.1f} s", err=True)
    if left:
        names = ", ".join(f"{cell.what} {cell.batch} page {cell.page}" for cell in left)
        notes.append(f"not run within {budget:.0f} s: {names}")
    return common.Outcome(records, notes, compared)


def measure_cell(gpu: Gpu, cell: Cell, peer: Peer | str, device: str) -> tuple[list[Record], int]:
    """One verb at one size, both sides in turns; how often their states were compared."""
    if cell.what == "release":
        shape = Shape(cell.batch, cell.page, RELEASED_TOKENS, row_width=1536)
    else:
        shape = shape_for(cell.batch, cell.page)
    rng = np.random.default_rng(0)
    base = np.full(shape.batch, shape.history) - rng.integers(0, 64, shape.batch)
    # Twice what fits: SGLang counts anew where its pool is nearly empty.
    pages = 2 * shape.num_pages
    alloc = sgalloc.KVAllocator(pages, shape.page_size, shape.batch, shape.row_width, device=device)
    alloc.warm(max(4096, shape.batch * (-(-RESERVE // shape.page_size) + 1)))
    engine = None if isinstance(peer, str) else Engine(peer, shape, pages, base.tolist())
    at: dict[str, int | str] = {"batch": cell.batch, "page": cell.page}
    records: list[Record] = []
    sides = {"reserve": reserve_sides, "decode": decode_sides, "release": release_sides}
    made = sides[cell.what](alloc, shape, base, engine, rng)
    if engine is not None and cell.what != "release":
        gpu.wait()
        begin = perf_counter()
        engine.reset()
        gpu.wait()
        took = (perf_counter() - begin) * 1e6
        records.append(
            Record(FIRST, SGLANG, {**at, "verb": cell.what}, Summary(1, took, took, took))
        )
    records += both_records(in_turns(made, EFFORT, gpu.wait), at)
    if engine is None:
        return records, 0
    if alloc.available() != engine.free_pages:
        raise RuntimeError(
            f"after {cell} {alloc.available()} pages are free in sgalloc, "
            f"{engine.free_pages} in SGLang"
        )
    return records, 1


def reserve_sides(
    alloc: sgalloc.KVAllocator, shape: Shape, base: Any, engine: Engine | None, rng: Any
) -> list[Side]:
    """EAGLE steps for ever; when the rows are full, all start again from their prompts."""
    handles = alloc.open(shape.batch)
    alloc.extend(handles, base)
    batch = alloc.batch(handles)
    accepted = rng.integers(1, MAX_ACCEPT + 1, (8 if shape.batch > 4096 else 64, shape.batch))
    full = (shape.row_width - int(base.max()) - RESERVE - shape.page_size) // MAX_ACCEPT

    def steps(advance: Callable[[int], None], restart: Callable[[], None]) -> Step:
        count = [0]

        def go_on() -> None:
            advance(count[0] % len(accepted))
            count[0] += 1
            if count[0] % full == 0:
                restart()

        return Step(None, go_on)

    mine = Side(
        MINE,
        [
            Step("reserve", lambda: alloc.reserve(batch, RESERVE), growth),
            steps(lambda n: alloc.commit(batch, accepted[n]), lambda: alloc.trim(batch, base)),
        ],
    )
    if engine is None:
        return [mine]
    lists = accepted.tolist()
    theirs = Side(
        SGLANG,
        [
            Step("reserve", engine.reserve, growth),
            steps(lambda n: engine.commit(lists[n]), engine.reset),
        ],
    )
    return [mine, theirs]


def decode_sides(
    alloc: sgalloc.KVAllocator, shape: Shape, base: Any, engine: Engine | None, rng: Any
) -> list[Side]:
    """Plain decode steps for ever, likewise."""
    handles = alloc.open(shape.batch)
    alloc.extend(handles, base)
    batch = alloc.batch(handles)
    full = shape.row_width - int(base.max()) - 1
    counts = {MINE: 0, SGLANG: 0}

    def full_after(side: str) -> bool:
        counts[side] += 1
        return counts[side] % full == 0

    def cut() -> None:
        if full_after(MINE):
            alloc.trim(batch, base)

    mine = Side(MINE, [Step("decode", lambda: alloc.decode(batch), growth), Step(None, cut)])
    if engine is None:
        return [mine]

    def restart() -> None:
        engine.after_decode()
        if full_after(SGLANG):
            engine.reset()

    theirs = [
        Step(None, engine.before_decode),
        Step("decode", engine.decode, lambda _: GROWS if engine.took() else NO_NEED),
        Step(None, restart),
    ]
    return [mine, Side(SGLANG, theirs)]


def release_sides(
    alloc: sgalloc.KVAllocator, shape: Shape, base: Any, engine: Engine | None, rng: Any
) -> list[Side]:
    """Releases of requests of `RELEASED_TOKENS` each."""
    handles: list[Any] = [None]

    def fill() -> None:
        handles[0] = alloc.open(shape.batch)
        alloc.extend(handles[0], RELEASED_TOKENS)

    mine = Side(MINE, [Step(None, fill), Step("release", lambda: alloc.release(handles[0]))])
    if engine is None:
        return [mine]
    theirs = [
        Step(None, lambda: engine.fill(RELEASED_TOKENS)),
        Step("release", lambda: engine.release(RELEASED_TOKENS)),
    ]
    return [mine, Side(SGLANG, theirs)]


def kernels(gpu: Gpu, cell: Cell, peer: Peer | str) -> list[Record]:
    """The kernels of a step by which each request gets one page, by graph replay."""
    n, page = cell.batch, cell.page
    count = 20 if n <= 4096 else 2
    step = Growing(gpu, page, n, 1, "places", 1)  # its memory has to outlive the graph
    mine = step.graph(20)
    step.check(mine)
    calls: dict[str, tuple[Callable[[], None], int]] = {OURS: (lambda: gpu.launch(mine), 20)}
    if not isinstance(peer, str):
        for name, call in their_kernels(peer, n, page).items():
            call()
            gpu.wait()
            graph = peer.torch.cuda.CUDAGraph()
            with peer.torch.cuda.graph(graph):
                for _ in range(count):
                    call()
            calls[name] = (graph.replay, count)
    series: dict[str, list[int]] = {name: [] for name in calls}
    for turn in range(9):
        for name, (call, _) in calls.items():
            gpu.wait()
            took = gpu.time_ns(call)
            if turn > 1:
                series[name].append(took)
    at: dict[str, int | str] = {"batch": n, "page": page}
    return [
        Record("kernels", name, at, summarize(times, per=calls[name][1]))
        for name, times in series.items()
    ]


def their_kernels(peer: Peer, n: int, page: int) -> dict[str, Callable[[], None]]:
    """SGLang's two kernels, ready to be called."""
    torch = peer.torch
    before = torch.full((n,), page, dtype=torch.int32, device="cuda")
    after = before + page
    last = torch.full((n,), 2 * page - 1, dtype=torch.int32, device="cuda")
    free = torch.arange(1, 2 * n + 2, dtype=torch.int64, device="cuda")
    slots = torch.empty(n * page, dtype=torch.int64, device="cuda")
    table = torch.zeros((n + 1, 4 * page), dtype=torch.int32, device="cuda")
    rows = torch.arange(1, n + 1, device="cuda")
    upper = 1 << (n - 1).bit_length()

    def alloc() -> None:
        peer.alloc_extend[(n,)](before, after, last, free, slots, upper, page)

    def assign() -> None:
        peer.allocation.assign_req_to_token_pool_func(rows, table, before, after, slots, n)

    return {ALLOC: alloc, ASSIGN: assign}


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [
        step_table(found, "reserve", "EAGLE step"),
        step_table(found, "decode", "Plain decode"),
        release_table(found),
        kernel_table(found),
    ]


def _cells(found: Found, name: str) -> list[tuple[int, int]]:
    at = (record["at"] for record in found.records if record["name"] == name)
    return sorted({(one["page"], one["batch"]) for one in at})


def step_table(found: Found, name: str, title: str) -> Table:
    """A step of both."""
    rows, verdicts, gains = [], [], []
    for page, batch in _cells(found, name):
        at = {"batch": batch, "page": page}
        row = [f"{batch:,}", str(page)]
        for label, until in (("all steps", RETURN), (GROWS, RETURN), ("all steps", DONE)):
            mine = found.one(name, MINE, label=label, until=until, **at)
            peer = found.one(name, SGLANG, label=label, until=until, **at)
            gain = ratio(None if peer is None else peer["median_us"], _of(mine))
            row += [spread(mine), spread(peer), times(gain)]
            if gain is None or (label, until) != ("all steps", RETURN):
                continue
            gains.append(gain)
            aim = AIMS.get(batch) if name == "reserve" and page == AIM_PAGE else None
            if aim is not None:
                met = "met" if gain >= aim else "missed"
                verdicts.append(f"{batch:,}: {times(gain)}, aim {aim:.0f}×, {met}")
        first = found.median(FIRST, SGLANG, verb=name, **at)
        rows.append([*row, "" if first is None else f"{first / 1e6:.2f}"])
    verdict = "ours alone; see the note."
    if verdicts:
        verdict = f"at page {AIM_PAGE}, host time of all steps: " + "; ".join(verdicts) + "."
    elif gains:
        verdict = f"{times(min(gains))} to {times(max(gains))} less host time in all steps."
    return Table(
        f"{title} (`{name}`), µs",
        f"Requests of up to 1,000 tokens (128 from 16,384 on); reserve {RESERVE}, 1 to "
        f"{MAX_ACCEPT} accepted. SGLang: watermarks, tensors, copies and `alloc_for_spec_decode`, "
        "or `alloc_for_decode_default`; without what its scheduler asks before. In turns, on an "
        "idle GPU before each call; median (p10–p90).",
        [
            "batch",
            "page",
            *("all steps, host", SGLANG, "×"),
            *("that grow, host", SGLANG, "×"),
            *("all steps, host + sync", SGLANG, "×"),
            "SGLang's first step, s",
        ],
        rows,
        verdict,
    )


def release_table(found: Found) -> Table:
    """Releases of both."""
    rows, gains = [], []
    for page, batch in _cells(found, "release"):
        row = [f"{batch:,}", str(page)]
        for until in (RETURN, DONE):
            at = {"batch": batch, "page": page, "until": until}
            mine, peer = found.one("release", MINE, **at), found.one("release", SGLANG, **at)
            gain = ratio(_of(peer), _of(mine))
            row += [spread(mine), spread(peer), times(gain)]
            if gain is not None and until == RETURN:
                gains.append(gain)
        rows.append(row)
    return Table(
        "Releasing finished requests, µs",
        f"{RELEASED_TOKENS:,} tokens each. SGLang: one free group with a segment a request.",
        ["batch", "page", "host", SGLANG, "×", "host + sync", SGLANG, "×"],
        rows,
        f"{times(min(gains))} to {times(max(gains))} less host time."
        if gains
        else "ours alone; see the note.",
    )


def kernel_table(found: Found) -> Table:
    """The kernels of both."""
    rows, gains = [], []
    for page, batch in _cells(found, "kernels"):
        at = {"batch": batch, "page": page}
        mine, one, two = (found.one("kernels", side, **at) for side in (OURS, ALLOC, ASSIGN))
        both = None if one is None or two is None else one["median_us"] + two["median_us"]
        gain = ratio(both, _of(mine))
        if gain is not None:
            gains.append(f"{batch:,}: {times(gain)}")
        rows.append([f"{batch:,}", str(page), spread(mine), spread(one), spread(two), times(gain)])
    return Table(
        "The kernels, GPU µs a launch",
        "Each request gets one page. By graph replay; SGLang needs both of its kernels.",
        ["batch", "page", OURS, ALLOC, ASSIGN, "both by ours"],
        rows,
        f"{'; '.join(gains)}." if gains else "ours alone; see the note.",
    )


def _of(record: Any) -> float | None:
    return None if record is None else float(record["median_us"])


@click.command()
@common.options
@click.option(
    "--budget", default=80.0, show_default=True, help="Seconds after which no more is begun."
)
def main(out: Path | None, quick: bool, budget: float) -> None:
    """Time SGLang's own allocation beside sgalloc's, from the folder that $SGL_SRC names."""

    def run() -> common.Outcome:
        begin = perf_counter()
        peer = load(os.environ.get(VARIABLE))
        if isinstance(peer, str):
            click.echo(peer)
        left = budget - (perf_counter() - begin)
        return measure(QUICK if quick else CELLS, Gpu(), peer, left)

    common.run("peer_sglang", out, quick, run, tables)


if __name__ == "__main__":
    main()
