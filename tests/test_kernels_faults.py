"""Faults planted into the kernels: the launches that the tests make find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import (
    CUDA,
    BuildFailed,
    Emulator,
    LaunchFailed,
    build,
    kernels,
    mutated,
    require_compiler,
    require_tsan,
)
from cuda_on_cpu.launches import Replays, Scan, assign, export, watermarks
from cuda_on_cpu.tables import Growth, Table, expect_growth, some_requests

FAR_ROW = 5_000_001
Battery = Callable[[Emulator], None]


def assign_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(1)
    for seed in range(4):
        how: dict[str, Any] = {"grid": 2, "threads": 32, "seed": seed, "tile": 7}
        for size, runs in ((4, True), (3, True), (16, False), (12, False), (1, True)):
            for even in (False, True):
                # The blocks run one after the other, the last one first. It gathers slots of
                # the second request, whose page the other one writes.
                growths = [
                    Growth(0, 1, 34, 0, 2 if even else 35),
                    Growth(1, 3, 1, 4 * size - 2, 2),
                    Growth(4, 5, 30, 6, 2 if even else 9),
                    Growth(3, 2, 7),
                    Growth(2, 3, 0, 1, 2),
                ]
                table = Table(5, 35 * size, size, with_pages=even)
                assign(emulator, table, growths, rng, runs=runs, order=[1, 0], **how)
        for size, width in ((3, 1008), (3, 1009)):
            table = Table(3, width, size, first_row=FAR_ROW)
            growths = [Growth(1, 3, 2, 2, 3 * size)]
            assign(emulator, table, growths, rng, **how)


def scan_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(2)
    scan = Scan(4)
    for seed in range(6):
        rows, committed, allocated, reserves = some_requests(rng, 3500, 8, 8, 24)
        how: dict[str, Any] = {"resident": 4, "seed": seed, "stall": seed % 2 == 1}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
        how = {"order": [3, 2, 1, 0], "seed": seed, "tile_pages": 100}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
    rows, committed, allocated, reserves = some_requests(rng, 40_000, 1, 2, 2)
    how = {"resident": 40, "seed": 2, "stall": True}
    watermarks(emulator, Table(40_003, 2, 1), rows, committed, allocated, reserves, rng, **how)
    full = np.full(3, (2**31 - 1) // 5 * 5, np.int32)
    table = Table(1, int(full[0]) + 2, 5, first_page=int(full[0]) // 5 - 2)
    watermarks(emulator, table, full * 0, full - 4, full, 4, rng)


def export_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(3)
    lengths = np.array([0, 7, 12, 20, 0, 1, 16, 0], np.int32)
    rows = np.array([2, 0, 3, 7, 1, 4, 6, 5], np.int32)
    for width in (3, 5, 8):
        export(emulator, Table(8, 21, 4), rows, lengths, width, rng, seed=2)
    export(emulator, Table(8, 1001, 4, first_row=FAR_ROW), rows, lengths, 5, rng)


def replay_battery(emulator: Emulator) -> None:
    rng = np.random.default_rng(4)
    table = Table(2, 80, 4)
    replays = Replays(table, ring=2, stride=1024)
    for turn in range(6):
        if turn % 3 < 2:
            growths = [Growth(turn % 2, turn, 3)]
            expect_growth(table, growths, replays.stage(growths, rng))
        replays.replay(emulator, grid=3, threads=32, tile=1, seed=turn)
        replays.check(turn + 1 - (turn + 1) // 3)


BATTERIES: dict[str, Battery] = {
    "assign_pages.cu": assign_battery,
    "page_watermarks.cu": scan_battery,
    "export_pages.cu": export_battery,
}
BARRIER = "__syncthreads();"

# The source whose launches are to find it, the file it is planted in, what is replaced, by what.
FAULTS: dict[str, tuple[str, str, str, str]] = {
    "insertion in front of equals": (
        "assign_pages.cu",
        "common.cuh",
        "offsets[middle] <= value",
        "offsets[middle] < value",
    ),
    "32-bit product, whole rows": (
        "assign_pages.cu",
        "common.cuh",
        "return where * t.page_size;",
        "return static_cast<i64>(static_cast<u32>(where * t.page_size));",
    ),
    "32-bit product, cut rows": (
        "assign_pages.cu",
        "common.cuh",
        "return row * t.row_width",
        "return static_cast<i64>(static_cast<u32>(row * t.row_width))",
    ),
    "16-byte stores of any table": (
        "assign_pages.cu",
        "common.cuh",
        "t.quad_shift > -2",
        "true",
    ),
    "a shift where it is no power": (
        "assign_pages.cu",
        "common.cuh",
        "t.quad_shift >= 0 ? at >> t.quad_shift : at / quads",
        "at >> (31 - __builtin_clz(static_cast<u32>(quads)))",
    ),
    "slots that repeat": (
        "assign_pages.cu",
        "common.cuh",
        "slot + 2, slot + 3",
        "slot + 2, slot + 2",
    ),
    "a tile past the end": (
        "assign_pages.cu",
        "assign_pages.cu",
        "min(tile, pages - begin)",
        "tile",
    ),
    "no barrier behind the bounds": (
        "assign_pages.cu",
        "assign_pages.cu",
        f"            {BARRIER}\n        }}\n        for",
        "        }\n        for",
    ),
    "no barrier before the tile is written": (
        "assign_pages.cu",
        "assign_pages.cu",
        f"            {BARRIER}\n            write_tile",
        "            write_tile",
    ),
    "no barrier before the next tile": (
        "assign_pages.cu",
        "assign_pages.cu",
        f"        }}\n        {BARRIER}\n    }}",
        "        }\n    }",
    ),
    "a page table that nobody wants": (
        "assign_pages.cu",
        "assign_pages.cu",
        "if (t.pages) t.pages",
        "t.pages",
    ),
    "runs searched behind the tile alone": (
        "assign_pages.cu",
        "assign_pages.cu",
        "run_bounds[1] + 1, page",
        "run_bounds[1], page",
    ),
    "new slots read from the table": (
        "assign_pages.cu",
        "gather.cuh",
        "ahead >= 0",
        "ahead > 0",
    ),
    "gather with a 32-bit product": (
        "assign_pages.cu",
        "gather.cuh",
        "static_cast<i64>(g.row[r]) * t.row_width + position",
        "static_cast<i64>(static_cast<u32>(g.row[r] * t.row_width + position))",
    ),
    "gather from the first position": (
        "assign_pages.cu",
        "gather.cuh",
        "g.start[r] + (at - g.offset[r])",
        "at - g.offset[r]",
    ),
    "words of an earlier launch": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "static_cast<u32>(heard >> 34) != epoch || ",
        "",
    ),
    "tiles by block number": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "static_cast<i32>(atomicAdd(ticket, 1u) - ticket_base)",
        "static_cast<i32>(blockIdx.x + 0 * (atomicAdd(ticket, 1u) - ticket_base))",
    ),
    "an aggregate told as the sum": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "tile ? kAggregate : kInclusive",
        "kInclusive",
    ),
    "a sum without what came before": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "told(epoch, kInclusive, before + total)",
        "told(epoch, kInclusive, total)",
    ),
    "look-back that leaves the sum out": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "lane <= stop",
        "lane < stop",
    ),
    "look-back windows that overlap": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "last -= 32",
        "last -= 31",
    ),
    "no barrier behind the ticket": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        f"    {BARRIER}\n    i32 tile = shared_tile;",
        "    i32 tile = shared_tile;",
    ),
    "no barrier behind the sums of warps": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        f"warp_sums[warp] = sum;\n    {BARRIER}",
        "warp_sums[warp] = sum;",
    ),
    "no barrier behind the look-back": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        f"    {BARRIER}\n\n    total = shared_total;",
        "\n    total = shared_total;",
    ),
    "no barrier before the tile is written, scan": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        f"        {BARRIER}\n        write_tile",
        "        write_tile",
    ),
    "no barrier before the next tile, scan": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        f"write_tile(t, entries, page_ids, pages);\n        {BARRIER}",
        "write_tile(t, entries, page_ids, pages);",
    ),
    "requests that shrink": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "max(last - first, 0)",
        "last - first",
    ),
    "marks in 32 bits": (
        "page_watermarks.cu",
        "page_watermarks.cu",
        "i64 mark = static_cast<i64>(committed[r])",
        "i32 mark = committed[r]",
    ),
    "padding that is not": (
        "export_pages.cu",
        "export_pages.cu",
        "page < indptr[r + 1] - indptr[r]",
        "page <= indptr[r + 1] - indptr[r]",
    ),
    "a last page of a request without tokens": (
        "export_pages.cu",
        "export_pages.cu",
        "pages ? lengths[r] - (pages - 1) * page_size : 0",
        "lengths[r] - (pages - 1) * page_size",
    ),
    "an indptr without its end": (
        "export_pages.cu",
        "export_pages.cu",
        "r <= requests",
        "r < requests",
    ),
    "export with a 32-bit product": (
        "export_pages.cu",
        "export_pages.cu",
        "static_cast<i64>(rows[r]) * row_width",
        "static_cast<i64>(static_cast<u32>(rows[r] * row_width))",
    ),
}
REPLAY_FAULTS: dict[str, tuple[str, str]] = {
    "blocks that are never counted anew": ("counters[1] = 0;", ""),
    "steps counted that were not there": ("if (staged) {", "{"),
    "steps past the end of the ring": ("(serial % ring)", "(serial % (ring + 1))"),
    "steps told before they are due": ("== gridDim.x - 1", "== 0"),
}
# What the results do not show, or not each time.
RACES: dict[str, tuple[str, str, str, str]] = {
    "tiles that several blocks write": (
        "assign_pages.cu",
        "assign_pages.cu",
        "begin += gridDim.x * tile",
        "begin += tile",
    ),
    "words stored as plain memory": (
        "page_watermarks.cu",
        "common.cuh",
        "__atomic_store_n(word, value, __ATOMIC_RELEASE)",
        "*word = value",
    ),
    **{name: FAULTS[name] for name in FAULTS if name.startswith("no barrier before the next")},
    "new slots read from the table": FAULTS["new slots read from the table"],
}


def racing_battery(emulator: Emulator) -> None:
    """A few launches whose blocks all run at a time."""
    rng = np.random.default_rng(5)
    for runs in (False, True):
        # The first block writes the first new page of the last request, the second one reads it.
        growths = [Growth(0, 1, 18, 3, 12), Growth(2, 0, 1), Growth(1, 3, 6, 2, 30)]
        how: dict[str, Any] = {"grid": 3, "resident": 3, "threads": 32, "seed": 2}
        assign(emulator, Table(5, 168, 8), growths, rng, runs=runs, tile=3, **how)
    rows, committed, allocated, reserves = some_requests(rng, 3500, 8, 8, 24)
    scan = Scan(4)
    for seed in (2, 3):
        how = {"resident": 4, "seed": seed, "tile_pages": 200}
        table = Table(3503, 64, 8)
        watermarks(emulator, table, rows, committed, allocated, reserves, rng, scan, **how)
    lengths = np.array([0, 7, 12, 20, 0, 1, 16, 0], np.int32)
    rows = np.array([2, 0, 3, 7, 1, 4, 6, 5], np.int32)
    export(emulator, Table(8, 21, 4), rows, lengths, 5, rng, grid=3, resident=3, seed=2)
    replays = Replays(Table(2, 80, 4), ring=2, stride=1024)
    for turn in range(2):
        growths = [Growth(turn, 0, 5)]
        expect_growth(replays.table, growths, replays.stage(growths, rng))
        replays.replay(emulator, grid=3, threads=32, tile=1, resident=3, seed=2)
        replays.check(turn + 1)


def test_the_sources_as_they_are_pass_every_battery() -> None:
    with Emulator(kernels()) as emulator:
        for battery in (*BATTERIES.values(), replay_battery):
            battery(emulator)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    require_compiler()
    source, file, old, new = FAULTS[fault]
    cuda = mutated(tmp_path / "cuda", file, old, new)
    program = build().program(f"fault-{list(FAULTS).index(fault)}", [cuda / source], cuda)
    with Emulator(program, timeout_s=10) as emulator, pytest.raises(AssertionError) as found:
        BATTERIES[source](emulator)
    assert not isinstance(found.value, BuildFailed)


@pytest.mark.parametrize("fault", REPLAY_FAULTS)
def test_a_fault_planted_into_the_replay_is_found(fault: str, tmp_path: Path) -> None:
    require_compiler()
    cuda = mutated(tmp_path / "cuda", "assign_pages.cu", *REPLAY_FAULTS[fault])
    name = f"replay-fault-{list(REPLAY_FAULTS).index(fault)}"
    program = build().program(name, [cuda / "assign_pages.cu"], cuda)
    with Emulator(program, timeout_s=10) as emulator, pytest.raises(AssertionError):
        replay_battery(emulator)


def test_the_kernels_have_no_race_within_blocks_or_between_them() -> None:
    require_tsan()
    program = build(tsan=True).program("sound", sorted(CUDA.glob("*.cu")))
    with Emulator(program) as emulator:
        racing_battery(emulator)


@pytest.mark.parametrize("fault", RACES)
def test_a_planted_race_is_found(fault: str, tmp_path: Path) -> None:
    require_tsan()
    _, file, old, new = RACES[fault]
    cuda = mutated(tmp_path / "cuda", file, old, new)
    name = f"race-{list(RACES).index(fault)}"
    program = build(tsan=True).program(name, sorted(cuda.glob("*.cu")), cuda)
    with Emulator(program) as emulator, pytest.raises(LaunchFailed, match="data race"):
        racing_battery(emulator)
