"""What a step costs the host on a GPU, beside the same step on the CPU, and its device part.

`python -m profiling.gpu.steps --help`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, spread, times, us
from sgalloc.bench.course import GROWS, MAX_ACCEPT, NO_NEED, RESERVE, Course, growth
from sgalloc.bench.harness import DONE, RETURN, Effort, Key, Side, Step, in_turns
from sgalloc.bench.measured import Record, both_records
from sgalloc.bench.twins import Shape, shape_for
from sgalloc.plan import Segments

ON_GPU, ON_CPU, BARE = "sgalloc on the GPU", "sgalloc on the CPU", "graph launch"
WRITE, LAUNCH = "device.write", "bare graph launch"
ONE, TOGETHER = "one at a time", "back to back"
TIMES_A_LAUNCH = 3.0
UP_TO = 256
RELEASED_TOKENS = 1000
RELEASED = (1, 64, 256)
_CALLS = 8  # back to back; fewer than the staging ring has slots
_NOTHING = "nothing to write"

# Host µs of SGLang 0.5.23, measured in another run on an H200: (batch, page) of an EAGLE step.
SGLANG = {
    **{(n, 1): us for n, us in zip((1, 16, 64, 256, 1024, 4096),
                                   (79, 101, 162, 185, 1218, 4581), strict=True)},
    **{(n, 16): us for n, us in zip((1, 16, 64, 256, 1024, 4096),
                                    (39, 364, 421, 305, 740, 2538), strict=True)},
    **{(n, 64): us for n, us in zip((1, 16, 64, 256, 1024, 4096, 16384, 65536),
                                    (27, 162, 201, 298, 1268, 2331, 16166, 33512), strict=True)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        batches: requests.
        pages: page sizes.
        effort: of the speculative steps; the others take a part of it.
    """

    batches: tuple[int, ...]
    pages: tuple[int, ...]
    effort: Effort


FULL = Size((1, 16, 64, 256, 1024, 4096, 16384, 65536), (1, 16, 64), Effort(0.7, least=6, block=4))
QUICK = Size((1, 256, 4096), (1, 64), Effort(0.15, least=4, block=2))


class Pair:
    """One allocator on the GPU and one on the CPU, told the same things.

    Attributes:
        gpu, cpu: the allocators.
        handles: of the open requests, int64, the same in both.
        base: tokens of each after `fill`, int64.
    """

    def __init__(self, shape: Shape, device: str = "cuda", seed: int = 0) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        size = (shape.num_pages, shape.page_size, shape.batch, shape.row_width)
        self.gpu = sgalloc.KVAllocator(*size, device=device)
        self.cpu = sgalloc.KVAllocator(*size, device="cpu")
        # The most that a step here takes: what `reserve` adds after the rows were cut back.
        most = shape.batch * (-(-RESERVE // shape.page_size) + 1)
        self.gpu.warm(max(most, 4096))
        self.cpu.warm()
        self.handles: NDArray[np.int64] = np.empty(0, np.int64)
        self.base: NDArray[np.int64] = np.empty(0, np.int64)

    def fill(self) -> None:
        """Open all requests, each at another place in its page."""
        shape = self.shape
        below = self.rng.integers(0, min(64, shape.history), shape.batch)
        self.base = np.full(shape.batch, shape.history, np.int64) - below
        self.handles = self.gpu.open(shape.batch)
        self.cpu.open(shape.batch)
        for alloc in (self.gpu, self.cpu):
            alloc.extend(self.handles, self.base)

    def agree(self) -> None:
        """Stop where the two did different work: both tables are byte-equal, and all they hold.

        Raises:
            RuntimeError: they differ.
        """
        for name, of in (("C", "committed"), ("A", "allocated")):
            if not np.array_equal(*(getattr(a, of)(self.handles) for a in (self.gpu, self.cpu))):
                raise RuntimeError(f"{name} differs between GPU and CPU after {self.shape}")
        rows = np.arange(1, self.shape.batch + 1)
        tables = (alloc._core.device.read_rows(rows) for alloc in (self.gpu, self.cpu))
        if not np.array_equal(*tables):
            raise RuntimeError(f"the tables differ between GPU and CPU after {self.shape}")


def measure(size: Size, gpu: Gpu, device: str = "cuda") -> common.Outcome:
    """All cells; ``device`` is where the subject's table lives."""
    records: list[Record] = []
    compared = 0
    bare = gpu.bare_graph()
    short = replace(size.effort, seconds=size.effort.seconds / 2)
    for page_size in size.pages:
        for batch in size.batches:
            pair = Pair(shape_for(batch, page_size), device)
            pair.fill()
            at: dict[str, int | str] = {"batch": batch, "page": page_size}
            records += speculative(pair, gpu, bare, size.effort, at)
            pair.agree()
            for alloc in (pair.gpu, pair.cpu):
                alloc.trim(pair.handles, pair.base)
            records += both_records(in_turns(decode_sides(pair), short, gpu.wait), at)
            pair.agree()
            compared += 2
            del pair
            gpu.free_unused()
        for batch in RELEASED:
            pair = Pair(Shape(batch, page_size, RELEASED_TOKENS, row_width=1536), device)
            at = {"batch": batch, "page": page_size}
            records += both_records(in_turns(release_sides(pair), short, gpu.wait), at)
            pair.agree()
            compared += 1
    return common.Outcome(records, [], compared)


def speculative(
    pair: Pair, gpu: Gpu, bare: Any, effort: Effort, at: dict[str, int | str]
) -> list[Record]:
    """Reserve, the same without need, the device part of the former, and a bare launch."""
    written = in_turns(reserve_sides(pair, gpu, bare), effort, gpu.wait)
    for series in written:
        series.pop(Key(ON_GPU, WRITE, _NOTHING), None)
    records = both_records(written, {**at, "calls": ONE})
    short = replace(effort, seconds=effort.seconds / 4)
    together = in_turns(together_sides(pair, gpu, bare), short, gpu.wait)
    return records + both_records(together, {**at, "calls": TOGETHER}, per=_CALLS)


def reserve_sides(pair: Pair, gpu: Gpu, bare: Any) -> list[Side]:
    """Speculative steps for ever, cut back when the rows are full."""
    device, flat = pair.gpu._core.device, pair.gpu._ledger.pages_flat
    plan: list[Any] = [None, None]
    mine, theirs = Course(pair), Course(pair)
    theirs.arrays = mine.arrays
    batches = [alloc.batch(pair.handles) for alloc in (pair.gpu, pair.cpu)]

    def reserve() -> sgalloc.Plan:
        plan[0] = made = pair.gpu.reserve(batches[0], RESERVE)
        return made

    def look_up() -> None:
        grown = plan[0].growth
        plan[1] = None if grown is None else flat.take(grown.where)

    # The pages are the rows' own, so that writing them again changes nothing.
    def write() -> Any:
        ids = plan[1]
        return None if ids is None else device.write(plan[0].growth, ids, None, None)

    def cut(alloc: sgalloc.KVAllocator, batch: Any, course: Course) -> Callable[[], None]:
        def advance() -> None:
            alloc.commit(batch, course.arrays[course.at])
            if course.advance():
                alloc.trim(batch, pair.base)

        return advance

    return [
        Side(
            ON_GPU,
            [
                Step("reserve", reserve, growth),
                Step(None, look_up),
                Step("reserve again", lambda: pair.gpu.reserve(batches[0], RESERVE)),
                Step(WRITE, write, lambda ready: _NOTHING if ready is None else ""),
                Step(LAUNCH, lambda: gpu.launch(bare)),
                Step(None, cut(pair.gpu, batches[0], mine)),
            ],
        ),
        Side(
            ON_CPU,
            [
                Step("reserve", lambda: pair.cpu.reserve(batches[1], RESERVE), growth),
                Step("reserve again", lambda: pair.cpu.reserve(batches[1], RESERVE)),
                Step(None, cut(pair.cpu, batches[1], theirs)),
            ],
        ),
    ]


def together_sides(pair: Pair, gpu: Gpu, bare: Any) -> list[Side]:
    """The device part and the bare launch, each some times before the GPU is waited for."""
    device, grown = pair.gpu._core.device, next_growth(pair)
    ids = pair.gpu._ledger.pages_flat.take(grown.where)

    def writes() -> None:
        for _ in range(_CALLS):
            device.write(grown, ids, None, None)

    def launches() -> None:
        for _ in range(_CALLS):
            gpu.launch(bare)

    return [Side(ON_GPU, [Step(WRITE, writes)]), Side(BARE, [Step(LAUNCH, launches)])]


def next_growth(pair: Pair) -> Segments:
    """Cut the requests back, and go on until a step grows; the pages that it added."""
    for alloc in (pair.gpu, pair.cpu):
        alloc.trim(pair.handles, pair.base)
        alloc.reserve(pair.handles, RESERVE)
    while True:
        accepted = pair.rng.integers(1, MAX_ACCEPT + 1, pair.shape.batch)
        for alloc in (pair.cpu, pair.gpu):
            alloc.commit(pair.handles, accepted)
            plan = alloc.reserve(pair.handles, RESERVE)
        if plan.growth is not None:
            return plan.growth


def decode_sides(pair: Pair) -> list[Side]:
    """Plain decode, one token a step, cut back when the rows are full."""
    full = pair.shape.row_width - int(pair.base.max()) - 1

    def side(name: str, alloc: sgalloc.KVAllocator) -> Side:
        batch = alloc.batch(pair.handles)
        count = [0]

        def cut() -> None:
            count[0] += 1
            if count[0] % full == 0:
                alloc.trim(batch, pair.base)

        return Side(name, [Step("decode", lambda: alloc.decode(batch), growth), Step(None, cut)])

    return [side(ON_GPU, pair.gpu), side(ON_CPU, pair.cpu)]


def release_sides(pair: Pair) -> list[Side]:
    """Release a batch of requests that hold `RELEASED_TOKENS` each."""

    def side(name: str, alloc: sgalloc.KVAllocator) -> Side:
        handles = [pair.handles]

        def fill() -> None:
            handles[0] = alloc.open(pair.shape.batch)
            alloc.extend(handles[0], pair.shape.history)

        return Side(name, [Step(None, fill), Step("release", lambda: alloc.release(handles[0]))])

    return [side(ON_GPU, pair.gpu), side(ON_CPU, pair.cpu)]


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    pages = found.values("reserve", "page")
    return [
        *(step_table(found, page) for page in pages),
        device_table(found, pages),
        release_table(found, pages),
    ]


def step_table(found: Found, page: int) -> Table:
    """The verbs at one page size."""
    rows, gains = [], []
    for batch in found.values("reserve", "batch"):
        at = {"batch": batch, "page": page}
        grows = found.one("reserve", ON_GPU, label=GROWS, until=RETURN, **at)
        before = SGLANG.get((batch, page))
        gain = ratio(before, _all_steps(found, batch, page))
        if gain is not None:
            gains.append(f"{gain:.0f}× at {batch:,}")
        rows.append(
            [
                f"{batch:,}",
                spread(grows),
                us(found.median("reserve", ON_GPU, label=GROWS, until=DONE, **at)),
                us(_all_steps(found, batch, page)),
                us(found.median("reserve again", ON_GPU, until=RETURN, **at)),
                us(found.median("reserve", ON_CPU, label=GROWS, until=RETURN, **at)),
                "" if before is None else f"{before:,}",
                spread(found.one("decode", ON_GPU, label=GROWS, until=RETURN, **at)),
                us(found.median("decode", ON_GPU, label=GROWS, until=DONE, **at)),
                us(found.median("decode", ON_GPU, label=NO_NEED, until=RETURN, **at)),
                us(found.median("decode", ON_CPU, label=GROWS, until=RETURN, **at)),
            ]
        )
    return Table(
        f"Steps at page {page}, µs",
        "`reserve` of 16 after 1 to 5 accepted tokens, and plain `decode`; a `Batch`, an idle GPU "
        "before each call. Host: until the call returns, median (p10–p90). SGLang 0.5.23: its "
        "host figure for all steps, from another run on an H200.",
        [
            "batch",
            "reserve that grows, host",
            "host + sync",
            "all steps, host",
            "no need, host",
            "on the CPU",
            "SGLang",
            "decode that grows, host",
            "host + sync",
            "no need, host",
            "on the CPU",
        ],
        rows,
        f"against SGLang's earlier figures, all steps of `reserve`: {', '.join(gains)}."
        if gains
        else "no earlier figures at these sizes.",
    )


def device_table(found: Found, pages: list[int]) -> Table:
    """The device part beside a bare graph launch."""
    rows, worst = [], []
    for page in pages:
        for batch in found.values("reserve", "batch"):
            row = [f"{batch:,}", str(page)]
            for calls in (ONE, TOGETHER):
                at = {"batch": batch, "page": page, "calls": calls, "until": RETURN}
                mine, bare = found.one(WRITE, ON_GPU, **at), found.one(LAUNCH, **at)
                below = None if bare is None else bare["median_us"]
                share = ratio(None if mine is None else mine["median_us"], below)
                if share is not None and batch <= UP_TO:
                    worst.append((share, calls, batch, page))
                row += [spread(mine), us(below), times(share)]
            rows.append(row)
    verdict = "no step of that size grew."
    if worst:
        share, calls, batch, page = max(worst)
        verdict = (
            f"up to {UP_TO} requests at most {times(share)} a bare graph launch (batch {batch}, "
            f"page {page}, {calls}); aim {TIMES_A_LAUNCH:.0f}×, "
            f"{'met' if share <= TIMES_A_LAUNCH else 'missed'}."
        )
    return Table(
        "The device part of a step, host µs",
        "`device.write` of the pages that the steps above added (staging, launch, event), and the "
        f"launch of a graph of one empty kernel: on an idle GPU, and {_CALLS} in a row.",
        ["batch", "page", ONE, "bare", "ratio", TOGETHER, "bare", "ratio"],
        rows,
        verdict,
    )


def release_table(found: Found, pages: list[int]) -> Table:
    """Releases."""
    rows = []
    for page in pages:
        for batch in found.values("release", "batch"):
            at = {"batch": batch, "page": page}
            mine = found.one("release", ON_GPU, until=RETURN, **at)
            cpu = found.median("release", ON_CPU, until=RETURN, **at)
            done = found.median("release", ON_GPU, until=DONE, **at)
            each = None if mine is None else mine["median_us"] / batch
            rows.append([f"{batch:,}", str(page), spread(mine), us(done), us(each), us(cpu)])
    many, page = max(found.values("release", "batch")), pages[-1]
    whole = found.median("release", ON_GPU, batch=many, page=page, until=RETURN)
    each = None if whole is None else whole / many
    return Table(
        "Releasing finished requests, µs",
        f"Requests of {RELEASED_TOKENS:,} tokens, without a prefix cache. A release writes no "
        "table.",
        ["batch", "page", "host", "host + sync", "host, a request", "on the CPU"],
        rows,
        f"{us(each)} µs a request in batches of {many} at page {page}.",
    )


def _all_steps(found: Found, batch: int, page: int) -> float | None:
    at = {"batch": batch, "page": page, "until": RETURN}
    return found.median("reserve", ON_GPU, label="all steps", **at)


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time the verbs on the GPU, beside a twin on the CPU: about a minute."""
    common.run("steps", out, quick, lambda: measure(QUICK if quick else FULL, Gpu()), tables)


if __name__ == "__main__":
    main()
