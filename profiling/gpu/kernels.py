"""What the kernels cost on the GPU, beside a memset of the bytes and a fill of the same places.

`python -m profiling.gpu.kernels --help`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from profiling.gpu import common
from profiling.gpu.beside import CLEARS, MAP, Siding
from profiling.gpu.clock import Gpu
from profiling.gpu.handmade import Gathering, Growing, Launch, Marking
from profiling.gpu.layout import Found, Table, ratio, size, spread, times, us
from sgalloc.bench.harness import summarize
from sgalloc.bench.measured import Record

ASSIGN, MARKS, GATHER = "assign_pages", "page_watermarks", "gather_slots"
SIDE = "assign_pages, second group"
MEMSET, FILL, MINE = "memset", "strided fill", "sgalloc"
AIMS = {ASSIGN: 1.5, MARKS: 2.0}
LARGE = (16_000_000, 160_000_000)
SECTOR = 32
SWEPT = {(1, "places"), (64, "runs")}
# Data of all sets together that no replay finds in the L2 cache.
_COLD = 240_000_000
_SMALL_SETS = 8
_BYTE = 0x5A
_METHOD = (
    "Replays of a graph of many launches over inputs and outputs that together are larger than "
    "L2 where the size asks for it, in turns with a graph of memsets and one of strided fills; "
    "median (p10–p90). At page 1 the memset writes the 32 bytes of each sector touched; bytes "
    "are the memset's. A strided fill stores into the very places that the kernel writes, 16 "
    "bytes at a time where a page is that large, and reads nothing."
)
_SIDE_METHOD = (
    "Replays as above, in turns with a graph of memsets of as many bytes. A step that grows writes "
    "a page of each row in both tables, one that clears a page in the second alone; with the map, "
    "its entries, too, which are in no order. 256 pages are read from mapped memory."
)


class Case(NamedTuple):
    """One kernel at one size.

    Attributes:
        kernel: its name.
        page_size: slots in a page.
        pages: pages that a launch writes; slots for a gather.
        run: pages of each segment, slots of each request for a gather; 0: one has all.
        form: how the step tells of them.
        written: bytes that the memset beside it writes.
    """

    kernel: str
    page_size: int
    pages: int
    run: int
    form: str
    written: int

    @property
    def segments(self) -> int:
        """Segments, or requests."""
        return self.pages // self.run if self.run else 1

    @property
    def at(self) -> dict[str, int | str]:
        """As a record has it."""
        return {
            "page": self.page_size,
            "pages": self.pages,
            "run": self.run,
            "form": self.form,
            "bytes": self.written,
        }


def cases(quick: bool = False) -> Iterator[Case]:
    """What is measured."""
    large = LARGE[:1] if quick else LARGE
    for page in (16, 64):
        each = 4 * page
        for pages in (10, 256):
            for form in ("places, mapped", "places"):
                yield Case(ASSIGN, page, pages, 1, form, pages * each)
        for written in large:
            pages = written // each // 64 * 64
            yield Case(ASSIGN, page, pages, 1, "places", pages * each)
            yield Case(ASSIGN, page, pages, 1, "places, rows in any order", pages * each)
            yield Case(ASSIGN, page, pages, 1, "places, short rows", pages * each)
            yield Case(ASSIGN, page, pages, 64, "places", pages * each)
            yield Case(ASSIGN, page, pages, 64, "runs", pages * each)
            yield Case(ASSIGN, page, pages, 0, "runs", pages * each)
        for requests in (256, 4096):
            yield Case(MARKS, page, requests, 1, "one reserve", requests * each)
        for written in large:
            pages = written // each // 64 * 64
            yield Case(MARKS, page, pages, 1, "one reserve", pages * each)
            yield Case(MARKS, page, pages, 1, "a reserve each", pages * each)
            yield Case(MARKS, page, pages, 8, "one reserve", pages * each)
    for written in large:
        # At page 1 every store touches a sector; here each segment begins one of its own.
        sectors = written // SECTOR
        yield Case(ASSIGN, 1, sectors, 1, "places", sectors * SECTOR)
        yield Case(MARKS, 1, sectors, 1, "one reserve", sectors * SECTOR)
    yield Case(ASSIGN, 1, LARGE[0] // SECTOR * 8, 16, "runs", LARGE[0])
    for form, entry in (("int32", 4), ("int64", 8), ("int64, ragged", 8)):
        yield Case(GATHER, 64, 4096, 16, form, 4096 * entry)
        yield Case(GATHER, 64, LARGE[0] // entry, 16, form, LARGE[0] // entry * entry)
    for page in (16, 64):
        for pages in (256, 65_536):
            for form, parts in (("grows", 2), ("grows" + MAP, 3), (CLEARS, 1), (CLEARS + MAP, 2)):
                yield Case(SIDE, page, pages, 1, form, parts * pages * 4 * page)


def sets_of(case: Case) -> int:
    """How many inputs and outputs the launches of one graph go through in turn."""
    return max(2, -(-_COLD // case.written)) if case.written >= 1_000_000 else _SMALL_SETS


def launches_of(case: Case, sets: int) -> int:
    """Launches of one graph: enough that the replay itself is a small part."""
    wanted = 20 if case.written > 50_000_000 else 60 if case.written > 1_000_000 else 200
    return -(-wanted // sets) * sets


def made(case: Case, gpu: Gpu, sets: int) -> Launch:
    """The inputs and outputs of a case, on the GPU."""
    kind = {ASSIGN: Growing, MARKS: Marking, GATHER: Gathering, SIDE: Siding}[case.kernel]
    return kind(gpu, case.page_size, case.segments, case.pages // case.segments, case.form, sets)


def measure(quick: bool, gpu: Gpu, sweep: bool = False, chosen: Any = None) -> common.Outcome:
    """All cases, or those ``chosen``, each with a memset and a strided fill beside it in turns."""
    records: list[Record] = []
    compared = 0
    for case in cases(quick) if chosen is None else chosen:
        sets = sets_of(case)
        count = launches_of(case, sets)
        launch = made(case, gpu, sets)
        graphs = {
            MINE: launch.graph(count),
            MEMSET: gpu.capture(memsets(gpu, launch, case.written, count, sets)),
        }
        fill = launch.filling(count)
        if fill is not None:
            graphs[FILL] = fill
        at = {**case.at, "row": int(launch.geometry.arguments[2])}
        for side, series in gpu.replays(graphs, 5 if quick else 15).items():
            records.append(Record(case.kernel, side, at, summarize(series, per=count)))
        launch.check(graphs[MINE])
        if fill is not None:
            launch.check_filled(fill)
        compared += sets * (1 if fill is None else 2)
        if sweep and case.kernel == ASSIGN and (case.run, case.form) in SWEPT:
            records += swept(case, launch, gpu, count)
        del launch, graphs, fill
        gpu.free_unused()
    return common.Outcome(records, [], compared)


def memsets(gpu: Gpu, launch: Launch, written: int, count: int, sets: int) -> Callable[[int], None]:
    """Puts ``count`` memsets of ``written`` bytes on a stream, over the same memory."""

    def put(stream: int) -> None:
        for n in range(count):
            start = launch.memory + n % sets * written // 128 * 128
            gpu.runtime.memsetAsync(start, _BYTE, written, stream)

    return put


def swept(case: Case, launch: Launch, gpu: Gpu, count: int) -> list[Record]:
    """The same launches with other blocks and grids, and with other tiles where there are any."""
    sms = launch.geometry.sms
    records = []
    tiles = (16, 32, 64, 128, 256, 512, 1024) if case.form == "runs" else (1024,)
    for threads in (128, 256, 512):
        for tile in tiles:
            for waves in (1, 2, 4, 8, 16, 32):
                graph = launch.graph(count, tile, waves * sms, threads)
                series = gpu.replays({MINE: graph}, 5)[MINE]
                at = {**case.at, "threads": threads, "tile": tile, "blocks": waves * sms}
                records.append(Record("sweep", MINE, at, summarize(series, per=count)))
    return records


# -- tables ----------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    """What the results say."""
    swept = [sweep_table(found)] if found.where("sweep") else []
    # Older results have no second group.
    measured = [ASSIGN, MARKS, GATHER, *([SIDE] if found.where(SIDE) else [])]
    return [*(kernel_table(found, kernel) for kernel in measured), *swept]


def kernel_table(found: Found, kernel: str) -> Table:
    """One kernel beside a memset and a strided fill; older results have no such fill."""
    rows, judged, beside = [], [], []
    for mine in found.where(kernel, MINE):
        at = mine["at"]
        floor = found.one(kernel, MEMSET, **at)
        share = ratio(mine["median_us"], None if floor is None else floor["median_us"])
        fill = found.one(kernel, FILL, **at)
        over = ratio(mine["median_us"], None if fill is None else fill["median_us"])
        if kernel == SIDE or (kernel in AIMS and at["bytes"] > 10_000_000):
            judged += [] if share is None else [(share, at)]
            beside += [] if over is None else [(over, at)]
        rows.append(
            [
                f"{at['form']}",
                str(at["page"]),
                f"{at['pages']:,}",
                f"{at['run']:,}" if at["run"] else "all",
                f"{at['row']:,}",
                size(at["bytes"]),
                spread(mine),
                spread(floor),
                times(share),
                spread(fill),
                times(over),
                f"{at['bytes'] / mine['median_us'] / 1e6:.2f}",
            ]
        )
    what = "slots" if kernel == GATHER else "pages"
    return Table(
        f"`{kernel}`, GPU µs a launch",
        _SIDE_METHOD if kernel == SIDE else _METHOD,
        [
            "step",
            "page",
            what,
            f"{what} of a segment",
            "slots of a row",
            "bytes",
            "kernel",
            "memset",
            "ratio",
            "strided fill",
            "ratio to it",
            "TB/s",
        ],
        rows,
        _verdict(kernel, judged, beside),
    )


def _verdict(kernel: str, judged: list[tuple[float, Any]], beside: list[tuple[float, Any]]) -> str:
    if kernel == SIDE:
        parts = []
        for pages in sorted({at["pages"] for _, at in judged}):
            shares = [share for share, at in judged if at["pages"] == pages]
            parts.append(f"{pages:,} pages: {times(min(shares))} to {times(max(shares))}")
        return f"over a memset of the same bytes: {'; '.join(parts)}."
    if kernel not in AIMS:
        return "no aim was set; it reads as many slots of the table as it writes."
    if not judged:
        return "no step of 16 MB or more was measured."
    aim = AIMS[kernel]
    text = f"aim at most {aim}×. {'; '.join(_ranges(judged, aim))}."
    if beside:
        text += f" Over a strided fill of the same places: {'; '.join(_ranges(beside))}."
    return text


def _ranges(judged: list[tuple[float, Any]], aim: float | None = None) -> list[str]:
    """For each size the least and the largest ratio, where the largest is, and whether it meets."""
    parts = []
    for written in sorted({round(at["bytes"] / 1e6) for _, at in judged}):
        here = [(share, at) for share, at in judged if round(at["bytes"] / 1e6) == written]
        least, (most, at) = min(share for share, _ in here), max(here, key=lambda one: one[0])
        verdict = "" if aim is None else f", {'met' if most <= aim else 'missed'}"
        parts.append(
            f"{written} MB: {times(least)} to {times(most)} (page {at['page']}, segments of "
            f"{at['run'] or 'all'}, {at['form']}){verdict}"
        )
    return parts


def sweep_table(found: Found) -> Table:
    """The best and the worst grids, and how far what is shipped is from the best."""
    rows, verdicts = [], []
    sizes = {tuple(sorted(record["at"].items())): record for record in found.where("sweep")}
    steps = sorted({(at["form"], at["page"], at["pages"], at["run"]) for at in map(dict, sizes)})
    for form, page, pages, run in steps:
        at = {"form": form, "page": page, "pages": pages, "run": run}
        tried = sorted(found.where("sweep", **at), key=lambda record: record["median_us"])
        shipped = found.median(ASSIGN, MINE, **at)
        name = f"{form}, {pages:,} pages of {page}"
        for record in [*tried[:5], *tried[-2:]]:
            at = record["at"]
            tile = str(at["tile"]) if form == "runs" else ""
            blocks = f"{at['blocks']:,}"
            rows.append([name, str(at["threads"]), tile, blocks, spread(record), us(shipped)])
        share = times(ratio(shipped, tried[0]["median_us"]))
        verdicts.append(f"{name}: {share}")
    return Table(
        "`assign_pages` by threads, tile and blocks, GPU µs a launch",
        "The five fastest and the two slowest of each step. Places need no tiles.",
        ["step", "threads", "tile", "blocks", "kernel", "as shipped"],
        rows,
        "what is shipped over the best: " + "; ".join(verdicts) + ".",
    )


@click.command()
@common.options
@click.option("--sweep", is_flag=True, help="Try other tiles, grids and blocks, too.")
def main(out: Path | None, quick: bool, sweep: bool) -> None:
    """Time the kernels by graph replay, beside memsets and strided fills: 90 seconds or so."""
    common.run("kernels", out, quick, lambda: measure(quick, Gpu(), sweep), tables)


if __name__ == "__main__":
    main()
