"""Pages of a second group, run on the CPU under ASan and UBSan: set, cleared, mapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import Buffer, Emulator, kernels
from cuda_on_cpu.launches import Replays, assign, assign_mapped, some_mapped
from cuda_on_cpu.sides import ASSIGN, Side, SidePage, some_pages, some_side
from cuda_on_cpu.steps import FIXED_PAGES
from cuda_on_cpu.tables import (
    PAGE_SIZES,
    Growth,
    Table,
    expect_growth,
    own_old_pages,
    some_growths,
    some_launch,
    some_width,
)
from stand_in_cuda import stand_in

from sgalloc.plan import Gather, Segments, SideWrite

FAR_ROW = 5_000_001
each_page_size = pytest.mark.parametrize("size", PAGE_SIZES)


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


@each_page_size
def test_side_pages_beside_pages_and_a_gather(cpu: Emulator, size: int) -> None:
    """One step that writes pages, side pages and slots; each array shows its own law alone."""
    rng = np.random.default_rng([size, 20])
    for turn in range(14):
        rows, row_pages = int(rng.integers(1, 20)), int(rng.integers(1, 9))
        width = some_width(rng, size, row_pages)
        table = Table(rows, width, size, lead=int(rng.choice([0, 0, 16, 4])))
        side = some_side(rng, table)
        growths = some_growths(rng, rows, table.row_pages, size, even=turn % 2 == 0)
        assign(
            cpu,
            table,
            growths if turn % 4 else [],
            rng,
            runs=bool(rng.integers(2)),
            wide=bool(rng.integers(2)),
            tile=int(rng.choice([1, 7, 64, 1024])),
            side=(side, some_pages(rng, side)),
            **some_launch(rng),
        )


@pytest.mark.parametrize("size", [1, 3, 4, 12, 16, 64])
def test_small_steps_with_side_pages_at_their_fixed_places(cpu: Emulator, size: int) -> None:
    rng = np.random.default_rng([size, 21])
    for requests in (1, 200, FIXED_PAGES):
        growing = rng.random(requests) < 0.5
        growths = [
            Growth(row, 3, int(new), 3 * size - 1, 1)
            for row, new in zip(rng.permutation(requests).tolist(), growing, strict=True)
        ]
        table = Table(requests, 4 * size, size)
        side = some_side(rng, table, mains=2000)
        pages = some_pages(rng, side, most=FIXED_PAGES)
        how: dict[str, Any] = {"grid": 5, "tile": 64, "threads": 64, "seed": requests}
        assign(cpu, table, growths, rng, small=True, side=(side, pages), **how)


@each_page_size
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_mapped_steps_with_side_pages(cpu: Emulator, size: int, captured: bool) -> None:
    """Without a header: each part ends by itself, and either may have more pages, or none."""
    rng = np.random.default_rng([size, captured, 29])
    for turn in range(10):
        rows, row_pages = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        table = Table(
            rows,
            some_width(rng, size, row_pages),
            size,
            with_pages=bool(rng.integers(2)),
            lead=int(rng.choice([0, 0, 16, 4])),
        )
        side = some_side(rng, table, mains=300)
        growths = some_growths(rng, rows, table.row_pages, size, even=True)
        growths = growths if turn % 4 else []
        pages = some_pages(rng, side, most=300) if turn % 5 else []
        most = max(sum(g.new for g in growths), len(pages))
        how = some_mapped(rng, most, captured)
        assign_mapped(cpu, table, growths, rng, side=(side, pages), **how)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_mapped_step_may_be_full_of_side_pages(cpu: Emulator, size: int) -> None:
    rng = np.random.default_rng([size, 30])
    table = Table(40, 32 * size, size)
    side = Side(table, 1100)
    for count in (FIXED_PAGES - 1, FIXED_PAGES):
        mains = 1 + rng.permutation(1100)[:count]
        pages = [
            SidePage(at // 32, at % 32, at % 7 and at + 1, int(main) if at % 5 else 0)
            for at, main in enumerate(mains)
        ]
        assign_mapped(cpu, table, [], rng, tile=256, captured=True, side=(side, pages))


def test_a_small_step_may_be_full_of_side_pages(cpu: Emulator) -> None:
    rng = np.random.default_rng(22)
    for size in (1, 4, 6):
        table = Table(32, 32 * size, size)
        side = Side(table, 1100)
        mains = 1 + rng.permutation(1100)[:FIXED_PAGES]
        pages = [
            SidePage(at // 32, at % 32, at % 7 and at + 1, int(main))
            for at, main in enumerate(mains)
        ]
        assign(cpu, table, [], rng, small=True, wide=False, side=(side, pages), grid=2)


@each_page_size
def test_the_first_and_the_last_entries_and_none_beside_them(cpu: Emulator, size: int) -> None:
    """Place 0 and the last one, the first and the last page of the map; -1 and 0 are none."""
    rng = np.random.default_rng(23)
    for rest in {0, size - 1}:
        table = Table(2, 3 * size + rest, size)
        side = Side(table, 4)
        last = (2**31 - 1) // size - 1
        pages = [
            SidePage(0, 0, last, 4),
            SidePage(1, 2, 1, 1),
            SidePage(None, 0, 7, 2),
            SidePage(0, 2, 8, 0),
            SidePage(None, 0, 9, 0),
            SidePage(1, 0, 0, 3),
        ]
        for at in range(len(pages) + 1):
            assign(cpu, table, [], rng, side=(side, pages[at:] + pages[:at]), grid=2, threads=32)
        assert not side.map.data[3 * size : 4 * size].any()


def test_a_cleared_page_reads_0_whatever_was_there(cpu: Emulator) -> None:
    rng = np.random.default_rng(24)
    for size in (1, 3, 4, 12, 64):
        table = Table(3, 5 * size, size)
        side = Side(table, 15)
        places = [(row, number) for row in range(3) for number in range(5)]
        full = [SidePage(r, n, 100 + at, 1 + at) for at, (r, n) in enumerate(places)]
        assign(cpu, table, [], rng, side=(side, full), **some_launch(rng))
        gone = [page._replace(id=0) for page in full[::2]]
        assign(cpu, table, [], rng, side=(side, gone), **some_launch(rng))
        kept = [page._replace(id=0, main=0) for page in full[1::2]]
        assign(cpu, table, [], rng, side=(side, kept), **some_launch(rng))
        assert not side.slots.data.any(), "the table shows none, the map still does"
        assert np.count_nonzero(side.map.data.reshape(-1, size).any(1)) == 7 + 1


@pytest.mark.parametrize("size", [1, 3, 4, 24])
def test_side_pages_behind_two_to_the_32_entries(cpu: Emulator, size: int) -> None:
    """Rows and pages of the map whose others are not there; ids up to the last slot of int32."""
    rng = np.random.default_rng([size, 25])
    for rest in (0, 1 if size % 4 else 4):
        width = 1008 // size * size + (rest if size > 1 else 0)
        table = Table(4, width, size, first_row=FAR_ROW)
        assert FAR_ROW * width > 2**32
        last = (2**31 - 1) // size - 1
        side = Side(table, 40, first_main=last - 40)
        for _ in range(3):
            pages = some_pages(rng, side)
            assign(cpu, table, [Growth(2, 0, 2, 1, size)], rng, side=(side, pages))
            grown, pages = [Growth(2, 2, 1)], some_pages(rng, side)
            assign_mapped(cpu, table, grown, rng, tile=64, captured=False, side=(side, pages))


def test_the_widest_row_has_side_pages_at_its_end(cpu: Emulator) -> None:
    rng = np.random.default_rng(26)
    for size, rest in ((1000, 647), (5, 2)):
        pages = (2**31 - 1) // size
        table = Table(1, pages * size + rest, size, first_row=3, first_page=pages - 4)
        side = Side(table, 9)
        for _ in range(3):
            assign(cpu, table, [], rng, side=(side, some_pages(rng, side)))


@pytest.mark.parametrize("size", [1, 4, 6])
def test_replays_write_side_pages_too(cpu: Emulator, size: int) -> None:
    """Each replay applies its own step's side pages, with pages of the table and without."""
    rng = np.random.default_rng([size, 27])
    table = Table(4, 40 * size, size)
    side = Side(table, 300)
    replays = Replays(table, ring=3, stride=8192)
    held, waiting, applied = [0] * 4, [], 0
    for turn in range(14):
        while len(waiting) < 3 and rng.random() < 0.5:
            rows = rng.permutation(4)[: rng.integers(1, 4)].tolist() if turn % 3 else []
            growths = [Growth(row, held[row], 1) for row in rows]
            for row in rows:
                held[row] += 1
            beside = some_pages(rng, side) if rng.random() < 0.8 else None
            told = None if beside is None else (side, beside)
            ids = replays.stage(growths, rng, side=told)
            waiting.append((growths, ids, beside))
        if waiting:
            growths, ids, beside = waiting.pop(0)
            expect_growth(table, growths, ids)
            side.expect(beside or [])
            applied += 1
        replays.replay(cpu, tile=2, **some_launch(rng))
        replays.check(applied)
        side.check()


def _side_write(side: Side, pages: list[SidePage]) -> SideWrite:
    return SideWrite(*side.arrays(pages))


def test_a_small_slot_that_is_used_again_shows_nothing_of_the_steps_before(cpu: Emulator) -> None:
    """Steps of all forms share a slot: with pages, with side pages, with both, with a gather."""
    rng, size, most = np.random.default_rng(31), 4, 20
    with stand_in():
        from sgalloc.device.cuda_tables import Out
        from sgalloc.device.layout import (
            SMALL_BYTES,
            SideAddresses,
            fill_both,
            fill_pages,
            fill_small,
            lay_out_small,
        )
        from sgalloc.device.staging import Block

        table = Table(most, 90 * size, size)
        side = Side(table, 100)
        memory = np.zeros(SMALL_BYTES, np.uint8)
        block = Block(memory, 0)
        lay_out_small(block, SideAddresses(1, 2))
        per_row, told = np.array(table.row_pages), 0
        for turn in range(80):
            n, at = int(rng.integers(0, most + 1)), turn
            ids = (20_000 + rng.permutation(n)).astype(np.int32)
            ones = np.ones(n, np.int64)
            segments = Segments(np.arange(n), at * ones, ones, n, per_row) if n else None
            given = ids if n else None
            pages = some_pages(rng, side, most)
            form = rng.choice(["pages", "both", "gather"])
            if form == "pages" and segments is not None:
                fill_pages(block, segments, ids)
            elif form == "gather":
                asked = Gather(np.arange(1), np.zeros(1, int), np.ones(1, int), 1, Out(8, 0), None)
                fill_small(block, segments, given, asked, 1, _side_write(side, pages))
            elif form == "both":
                fill_both(block, segments, given, _side_write(side, pages))
                expect_growth(table, [Growth(row, at, 1) for row in range(n)], ids)
                side.expect(pages)
                step = Buffer(memory.copy())
                arguments = [*table.arguments, np.int32(64), step, *side.arguments]
                cpu.launch("assign_both_mapped", 16, 256, arguments)
                table.check()
                side.check()
                told += 1
        assert told > 20


@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_the_host_lays_side_pages_out_as_the_kernel_reads_them(
    cpu: Emulator, size: int, small: bool
) -> None:
    """The bytes are the host's; the kernel may read no other, and finds every array."""
    rng = np.random.default_rng([size, small, 28])
    with stand_in():
        from sgalloc.device.layout import (
            SMALL_BYTES,
            SideAddresses,
            fill,
            fill_small,
            lay_out_small,
        )
        from sgalloc.device.staging import HEADER_BYTES, SIDE_MAP_LOW, SIDE_SLOTS_LOW, Block

        assert (4 * SIDE_SLOTS_LOW, 4 * SIDE_MAP_LOW) == (72, 80)
        assert HEADER_BYTES == 128 and SMALL_BYTES % 8 == 0
        for counts in ([], [1, 1, 1], [3, 1, 2]):
            rows = max(1, len(counts))
            table = Table(rows, 8 * size, size)
            growths = [Growth(row, 2, new) for row, new in enumerate(counts)]
            own_old_pages(table, growths, rng)
            side = Side(table, 30)
            pages = some_pages(rng, side, most=20)
            total = sum(counts)
            ids = (20_000 + rng.permutation(total)).astype(np.int32)
            segments = None
            if counts:
                n = len(counts)
                per_row = np.array(table.row_pages)
                segments = Segments(np.arange(n), np.full(n, 2), np.array(counts), total, per_row)
            memory = np.zeros(SMALL_BYTES, np.uint8)
            block = Block(memory, 0)
            addresses = SideAddresses(1, 2)
            given = ids if counts else None
            write = _side_write(side, pages)
            if small:
                lay_out_small(block, addresses)
                for told in (write, None, write):  # the slot is used again and again
                    fill_small(block, segments, given, None, 0, told)
                used = SMALL_BYTES
            else:
                used = fill(block, segments, given, None, 0, table.row_pages, 0, write, addresses)
            assert block.longs[[9, 10]].tolist() == [1, 2]
            expect_growth(table, growths, ids)
            step = Buffer(memory[:used].copy(), links=side.links)
            cpu.launch(ASSIGN, 3, 64, [*table.arguments, np.int32(4), step])
            table.check()
            side.expect(pages)
            side.check()
