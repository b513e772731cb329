"""What speculation and a second group add to a step on a GPU, beside the plain verb in turns.

`python -m profiling.gpu.groups --help`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

import sgalloc
from profiling.gpu import common
from profiling.gpu.clock import Gpu
from profiling.gpu.layout import Found, Table, ratio, spread, times, us
from profiling.verbs import BLOCK, CHAIN, TOP_K
from sgalloc.bench.course import RESERVE, Course
from sgalloc.bench.harness import DONE, RETURN, Effort, Side, Step, in_turns
from sgalloc.bench.measured import Record, both_records
from sgalloc.bench.twins import Shape, shape_for
from sgalloc.speculative import dflash, eagle

ON_GPU, ON_CPU, PLAIN = "sgalloc on the GPU", "sgalloc on the CPU", "plain verb on the GPU"
# What the other steps are held against, each with one group and no speculation.
RESERVES, DECODES, TRIMS = "reserve", "decode", "commit, trim"
EXTENDS, RELEASES = "open, extend 64", "release 64"
NAMED, LENGTH = 64, 1000  # requests that come and go, and their tokens
WINDOW, BUFFER, SCRATCH = 512, 512, 16  # tokens
DRAFTS, ACCEPTED = 16, 4  # of a tree


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: requests, page sizes, and how long each case goes on."""

    batches: tuple[int, ...]
    pages: tuple[int, ...]
    effort: Effort


FULL = Size((256, 4096), (16, 64), Effort(0.4, least=6, block=4))
QUICK = Size((256, 4096), (64,), Effort(0.1, least=4, block=2))


class World:
    """One allocator with running requests, and room for `NAMED` more.

    Attributes:
        alloc: the allocator.
        shape: of the running requests.
        base: tokens of each when it starts, int64.
        batch: the running requests; others after each `restart`.
    """

    def __init__(self, group: str, shape: Shape, device: str) -> None:
        rows = shape.batch + NAMED
        pages = rows * (shape.row_width // shape.page_size)
        window = sparse = None
        if group in ("window", "mapped"):
            window = sgalloc.SlidingWindow(WINDOW, pages, slot_map=group == "mapped")
        if group == "sparse":
            sparse = sgalloc.Sparse(1, BUFFER, SCRATCH)
            pages += rows * -(-SCRATCH // shape.page_size)
        self.alloc = sgalloc.KVAllocator(
            pages, shape.page_size, rows, shape.row_width, device, window, sparse
        )
        self.alloc.warm(max(4096, pages) if device != "cpu" else None)
        self.shape = shape
        self.rng = np.random.default_rng(0)
        self.base = shape.history - self.rng.integers(0, min(64, shape.history), shape.batch)
        self._sparse = sparse is not None
        self.batch: Any = None
        self.restart()
        self.course = Course(self)

    def restart(self) -> None:
        """Release the running requests, and run them anew."""
        if self.batch is not None:
            self.alloc.release(self.batch)
        self.batch = self.alloc.batch(self.alloc.open(self.shape.batch))
        self.alloc.extend(self.batch, self.base)
        if self._sparse:
            self.alloc.to_sparse(self.batch)

    def accept(self) -> None:
        """Commit what the present step of the course accepted; begin anew where rows are full."""
        self.alloc.commit(self.batch, self.course.arrays[self.course.at])
        self.turn()

    def turn(self) -> None:
        """Go to the next step of the course."""
        if self.course.advance():
            self.restart()


class Case(NamedTuple):
    """One step.

    Attributes:
        name: what it is reported as.
        group: of `World`; "" for none.
        beside: the plain step that it is held against.
        script: the untimed step before, the timed one, and the untimed one after.
        launches: how many launches a call may make, from what it returned.
    """

    name: str
    group: str
    beside: str
    script: Callable[[World], tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]]
    launches: Callable[[Any], tuple[int, ...]]


# -- the steps -------------------------------------------------------------------------------


def _nothing() -> None:
    """No step before, or after."""


def _reserving(world: World) -> Any:
    return _nothing, lambda: world.alloc.reserve(world.batch, RESERVE), world.accept


def _drafting(world: World) -> Any:
    return (
        _nothing,
        lambda: eagle.prepare_for_decode(world.alloc, world.batch, CHAIN),
        world.accept,
    )


def _blocks(with_lengths: bool) -> Callable[[World], Any]:
    def script(world: World) -> Any:
        lengths = dflash.Lengths(world.alloc) if with_lengths else None

        def step() -> Any:
            return dflash.prepare_for_decode(
                world.alloc, world.batch, BLOCK, TOP_K, lengths=lengths
            )

        return _nothing, step, world.accept

    return script


def _decoding(world: World) -> Any:
    return _nothing, lambda: world.alloc.decode(world.batch), world.turn


def _tree(world: World) -> NDArray[np.int64]:
    """Which drafts of each tree are accepted, ascending, int64 ``(n, ACCEPTED)``."""
    drawn = np.random.default_rng(1).random((world.shape.batch, DRAFTS))
    return np.sort(drawn.argsort(axis=1)[:, :ACCEPTED], axis=1)


def _compacting(world: World) -> Any:
    tree, positions = _tree(world), [np.empty(0)]

    def reserve() -> None:
        world.alloc.reserve(world.batch, DRAFTS)
        positions[0] = world.alloc.committed(world.batch)[:, None] + tree

    return reserve, lambda: world.alloc.compact(world.batch, positions[0]), world.turn


def _trimming(world: World) -> Any:
    after = [np.empty(0, np.int64)]

    def reserve() -> None:
        world.alloc.reserve(world.batch, DRAFTS)
        after[0] = world.alloc.committed(world.batch) + ACCEPTED

    def keep() -> None:
        world.alloc.commit(world.batch, ACCEPTED)
        world.alloc.trim(world.batch, after[0])

    return reserve, keep, world.turn


def _preallocating(world: World) -> Any:
    lengths, handles = np.full(NAMED, LENGTH), [world.batch.handles]

    def preallocate() -> None:
        handles[0] = world.alloc.preallocate(lengths)

    def end() -> None:
        for handle in handles[0].tolist():
            world.alloc.acknowledge(handle, 0)
        world.alloc.release(handles[0])

    return _nothing, preallocate, end


def _extending(world: World) -> Any:
    handles = [world.batch.handles]

    def extend() -> None:
        handles[0] = world.alloc.open(NAMED)
        world.alloc.extend(handles[0], LENGTH)

    return _nothing, extend, lambda: world.alloc.release(handles[0])


def _releasing(world: World) -> Any:
    handles = [world.batch.handles]

    def extend() -> None:
        handles[0] = world.alloc.open(NAMED)
        world.alloc.extend(handles[0], LENGTH)

    return extend, lambda: world.alloc.release(handles[0]), _nothing


def _if_it_grows(result: Any) -> tuple[int, ...]:
    """One launch for a plan, or a step with one, that adds pages; else none."""
    return (int(getattr(result, "plan", result).growth is not None),)


def _one_at_most(_: Any) -> tuple[int, ...]:
    return (0, 1)


def _one(_: Any) -> tuple[int, ...]:
    return (1,)


def _none(_: Any) -> tuple[int, ...]:
    return (0,)


CASES = (
    Case(RESERVES, "", RESERVES, _reserving, _if_it_grows),
    Case("eagle step", "", RESERVES, _drafting, _if_it_grows),
    Case("dflash step", "", RESERVES, _blocks(False), _if_it_grows),
    Case("dflash step, lengths", "", RESERVES, _blocks(True), _if_it_grows),
    Case("reserve, window", "window", RESERVES, _reserving, _if_it_grows),
    Case("reserve, window and map", "mapped", RESERVES, _reserving, _if_it_grows),
    Case("eagle step that evicts, window", "window", RESERVES, _drafting, _one_at_most),
    Case("eagle step that evicts, window and map", "mapped", RESERVES, _drafting, _one_at_most),
    Case(DECODES, "", DECODES, _decoding, _if_it_grows),
    Case("decode past the buffer, sparse", "sparse", DECODES, _decoding, _one_at_most),
    Case(TRIMS, "", TRIMS, _trimming, _none),
    Case("compact", "", TRIMS, _compacting, _none),
    Case(EXTENDS, "", EXTENDS, _extending, _one),
    Case("preallocate 64", "", EXTENDS, _preallocating, _one),
    Case(RELEASES, "", RELEASES, _releasing, _none),
    Case("release 64, window", "window", RELEASES, _releasing, _none),
    Case("release 64, window and map", "mapped", RELEASES, _releasing, _one),
)
PLAINS = {case.name: case for case in CASES if case.name == case.beside}


# -- measuring -------------------------------------------------------------------------------


class Counted:
    """The launches and copies of each timed call of one side.

    Attributes:
        launches, copies: the most of one call.
    """

    def __init__(self, case: Case, world: World) -> None:
        self.launches = self.copies = 0
        self._case, self._device = case, world.alloc._core.device
        self._before = (0, 0)
        self._result: Any = None

    def steps(self, world: World) -> list[Step]:
        """The script, with the counters read before and after the timed call."""
        before, call, after = self._case.script(world)

        def begin() -> None:
            before()
            self._before = self._device.launches, self._device.copies

        def timed() -> None:
            self._result = call()

        def end() -> None:
            self._check()
            after()

        return [Step(None, begin), Step(self._case.name, timed), Step(None, end)]

    def _check(self) -> None:
        launches = self._device.launches - self._before[0]
        copies = self._device.copies - self._before[1]
        allowed = self._case.launches(self._result)
        if launches not in allowed or copies > launches:
            raise RuntimeError(
                f"{self._case.name} made {launches} launches and {copies} copies, and not "
                f"{' or '.join(map(str, allowed))}, each with one copy at most"
            )
        self.launches = max(self.launches, launches)
        self.copies = max(self.copies, copies)


def measure(size: Size, gpu: Gpu, device: str = "cuda") -> common.Outcome:
    """All cases, each in turns with its plain verb on the same GPU and its twin on the CPU."""
    records: list[Record] = []
    for page in size.pages:
        for batch in size.batches:
            shape = shape_for(batch, page)
            for case in CASES:
                at: dict[str, int | str] = {"batch": batch, "page": page}
                records += measure_case(case, shape, gpu, device, size.effort, at)
                gpu.free_unused()
    return common.Outcome(records, [], len(size.pages) * len(size.batches) * len(CASES))


def measure_case(
    case: Case, shape: Shape, gpu: Gpu, device: str, effort: Effort, at: dict[str, int | str]
) -> list[Record]:
    """One case at one size; afterwards both tables are what the host says, and byte-equal."""
    mine, twin = (World(case.group, shape, where) for where in (device, "cpu"))
    counted = Counted(case, mine)
    before, call, after = case.script(twin)
    sides = [
        Side(ON_GPU, counted.steps(mine)),
        Side(ON_CPU, [Step(None, before), Step(case.name, call), Step(None, after)]),
    ]
    if case.name != case.beside:
        plain = PLAINS[case.beside]
        other = World(plain.group, shape, device)
        steps = Counted(plain, other).steps(other)
        renamed = [step._replace(name=case.name) if step.name else step for step in steps]
        sides.insert(0, Side(PLAIN, renamed))
    timed = in_turns(sides, effort, gpu.wait)
    agree(case.name, mine.alloc, twin.alloc)
    at = {**at, "launches": counted.launches, "copies": counted.copies}
    return both_records(timed, at)


def agree(name: str, mine: sgalloc.KVAllocator, twin: sgalloc.KVAllocator) -> None:
    """Stop where a table is not what the host says, or the two did different work.

    Raises:
        RuntimeError: they differ.
    """
    for alloc in (mine, twin):
        alloc.check(device=True)
    devices = [alloc._core.device for alloc in (mine, twin)]
    rows = np.arange(1, mine.max_requests + 1)
    shown = [[device.read_rows(rows)] for device in devices]
    for tables, device in zip(shown, devices, strict=True):
        if mine.has_window:
            tables.append(device.read_side_rows(rows))
        if device.side_map is not None:
            tables.append(device.read_map())
    ledgers = [alloc._ledger for alloc in (mine, twin)]
    for tables, ledger in zip(shown, ledgers, strict=True):
        tables += [ledger.committed, ledger.allocated]
    if not all(np.array_equal(a, b) for a, b in zip(*shown, strict=True)):
        raise RuntimeError(f"GPU and CPU differ after {name}")


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [step_table(found, page) for page in found.values(RESERVES, "page")]


def step_table(found: Found, page: int) -> Table:
    """All steps at one page size."""
    rows, shares = [], []
    batches = found.values(RESERVES, "batch")
    for case in CASES:
        for batch in batches:
            at = {"batch": batch, "page": page}
            mine = found.one(case.name, ON_GPU, until=RETURN, **at)
            if mine is None:
                continue
            plain = found.median(case.name, PLAIN, until=RETURN, **at)
            share = ratio(mine["median_us"], plain)
            if share is not None and batch == batches[0]:
                shares.append(f"{case.name} {times(share)}")
            rows.append(
                [
                    f"`{case.name}`",
                    f"{batch:,}",
                    str(mine["at"]["launches"]),
                    str(mine["at"]["copies"]),
                    spread(mine),
                    us(found.median(case.name, ON_GPU, until=DONE, **at)),
                    us(plain),
                    times(share),
                    us(found.median(case.name, ON_CPU, until=RETURN, **at)),
                ]
            )
    most = max(int(row[2]) for row in rows)
    return Table(
        f"Speculation and second groups at page {page}, host µs",
        f"Reserve {RESERVE} after 1 to 5 accepted tokens, a `Batch`, an idle GPU before each call. "
        f"Window {WINDOW}, buffer {BUFFER} tokens; a tree of {DRAFTS} drafts, {ACCEPTED} accepted; "
        f"{NAMED} requests of {LENGTH:,} tokens come or go. Plain: `reserve`, `decode`, `commit` "
        "and `trim`, `open` and `extend`, or `release` with one group, in turns with the step. "
        "Launches, and copies for them: the most of one call; lengths are three copies more.",
        [
            "step",
            "batch",
            "launches",
            "copies",
            "host",
            "host + sync",
            "plain, host",
            "ratio",
            "on the CPU",
        ],
        rows,
        f"no call makes more than {most} launch{'' if most == 1 else 'es'}. By the plain verb, "
        f"batch {batches[0]:,}: {', '.join(shares)}.",
    )


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time speculative steps, windows, sparse requests and transfers: about a minute."""
    common.run("groups", out, quick, lambda: measure(QUICK if quick else FULL, Gpu()), tables)


if __name__ == "__main__":
    main()
