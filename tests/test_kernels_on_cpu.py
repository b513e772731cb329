"""The kernels' own source, run on the CPU under ASan and UBSan, against the row law in NumPy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.emulator import CUDA, Buffer, Emulator, kernels
from cuda_on_cpu.launches import (
    Export,
    assign,
    assign_mapped,
    export,
    mapped_grid,
    some_mapped,
    watermarks,
)
from cuda_on_cpu.steps import FIXED_PAGES
from cuda_on_cpu.tables import (
    PAGE_SIZES,
    Growth,
    Table,
    expect_growth,
    fresh_ids,
    own_old_pages,
    quad_shift,
    some_growths,
    some_launch,
    some_width,
)
from stand_in_cuda import stand_in

import sgalloc
from sgalloc.device.kernels import THREADS, Geometry
from sgalloc.plan import Segments

FORMS: dict[str, dict[str, bool]] = {
    "places": {},
    "runs": {"runs": True},
    "runs of tiles": {"runs": True, "tiled": True},
}
each_page_size = pytest.mark.parametrize("size", PAGE_SIZES)
each_form = pytest.mark.parametrize("form", FORMS)
# Behind so many rows of a thousand slots, entries lie past 2**32.
FAR_ROW = 5_000_001


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


@each_page_size
@each_form
def test_assign_pages_writes_the_row_law_and_nothing_else(
    cpu: Emulator, size: int, form: str
) -> None:
    rng = np.random.default_rng([size, len(form)])
    for _ in range(12):
        rows, row_pages = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        table = Table(
            rows,
            some_width(rng, size, row_pages),
            size,
            with_pages=bool(rng.integers(2)),
            lead=int(rng.choice([0, 0, 16, 4])),
        )
        assign(
            cpu,
            table,
            some_growths(rng, rows, table.row_pages, size, even=bool(rng.integers(2))),
            rng,
            **FORMS[form],
            wide=bool(rng.integers(2)),
            idle=bool(rng.integers(2)),
            tile=int(rng.choice([1, 2, 7, 64, 1000, 1024])),
            **some_launch(rng),
        )


@pytest.mark.parametrize("tile", [1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024])
def test_a_step_may_fill_its_last_tile_or_not(cpu: Emulator, tile: int) -> None:
    rng = np.random.default_rng(tile)
    for pages in {tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 1}:
        for size, form in ((1, "runs of tiles"), (4, "places"), (3, "runs")):
            table = Table(2, pages * size + size, size)
            growths = [Growth(1, 1, pages, size - 1, pages)]
            assign(cpu, table, growths, rng, **FORMS[form], tile=tile, **some_launch(rng))


@pytest.mark.parametrize("tile", [1, 2, 4, 64, 100])
def test_runs_begin_and_end_anywhere_in_a_tile(cpu: Emulator, tile: int) -> None:
    """Runs longer than a tile, as long, and shorter; with each tile, and across its ends."""
    rng = np.random.default_rng([tile, 2])
    counts = {
        "as long": [tile] * 7,
        "longer": [3 * tile, 1, 2 * tile - 1, 2 * tile, 5],
        "across": [1, *[tile] * 5, tile + 1],
        "single": [1] * (2 * tile + 1),
        "mixed": rng.integers(1, 2 * tile + 2, 9).tolist(),
    }
    for pages in counts.values():
        for size in (1, 4):
            table = Table(len(pages), (max(pages) + 2) * size, size)
            growths = [Growth(row, 1, new) for row, new in enumerate(pages)]
            how = {"runs": True, "tiled": True, "tile": tile}
            assign(cpu, table, growths, rng, **how, **some_launch(rng))


def test_the_host_lays_runs_out_for_the_tile_of_the_launch(cpu: Emulator) -> None:
    """The kernel gets the bytes that the host has written, and not one more may be read."""
    rng = np.random.default_rng(13)
    with stand_in():
        from sgalloc.device.layout import fill
        from sgalloc.device.staging import HEADER_BYTES, TILE_RUNS_AT, Block

        for pages, tile in (([5, 1, 9], 4), ([64] * 4, 64), ([3, 1, 1], 1), ([1000, 2], 7)):
            table = Table(len(pages), (max(pages) + 2) * 4, 4)
            growths = [Growth(row, 2, new) for row, new in enumerate(pages)]
            own_old_pages(table, growths, rng)
            total, n = sum(pages), len(pages)
            ids = fresh_ids(rng, total, 4)
            rows, first = np.arange(n), np.full(n, 2)
            count, per_row = np.array(pages), np.array(table.row_pages)
            segments = Segments(rows, first, count, total, per_row)
            memory = np.zeros(HEADER_BYTES + 12 * n + 4 * total + 4 * (-(-total // tile) + 2), "u1")
            memory = memory[: memory.size // 8 * 8]
            block = Block(memory, 0)
            for given in (tile, 0):
                used = fill(block, segments, ids, None, 0, table.row_pages, given)
                assert bool(block.words[TILE_RUNS_AT]) == bool(given)
                expect_growth(table, growths, ids)
                step = Buffer(memory[:used].copy())
                cpu.launch("assign_pages", 3, 64, [*table.arguments, np.int32(tile), step])
                table.check()
                table.slots.data[...] = table.pages.data[...] = -9
                own_old_pages(table, growths, rng)


@each_page_size
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_assign_mapped_writes_the_row_law_and_nothing_else(
    cpu: Emulator, size: int, captured: bool
) -> None:
    rng = np.random.default_rng([size, captured, 1])
    for _ in range(8):
        rows, row_pages = int(rng.integers(1, 30)), int(rng.integers(1, 12))
        table = Table(
            rows,
            some_width(rng, size, row_pages),
            size,
            with_pages=bool(rng.integers(2)),
            lead=int(rng.choice([0, 0, 16, 4])),
        )
        growths = some_growths(rng, rows, table.row_pages, size, even=True)
        how = some_mapped(rng, sum(g.new for g in growths), captured)
        assign_mapped(cpu, table, growths, rng, **how)


@pytest.mark.parametrize("tile", [4, 7, 32, 33, 64, 96, 128, 250, 256])
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_mapped_step_may_have_any_number_of_pages(
    cpu: Emulator, tile: int, captured: bool
) -> None:
    rng = np.random.default_rng([tile, captured])
    counts = {0, 1, tile - 1, tile, tile + 1, 3 * tile + 2, 960, 1000, 1023, 1024}
    for n, pages in enumerate(sorted(counts)):
        size = (1, 4, 3)[n % 3]
        cuts = [0, *np.sort(rng.integers(0, pages + 1, 2)).tolist(), pages]
        counts_of_rows = zip((2, 0, 1), np.diff(cuts).tolist(), strict=True)
        growths = [Growth(row, 2, new) for row, new in counts_of_rows]
        grid = mapped_grid(pages, tile, captured)
        assign_mapped(
            cpu,
            Table(3, (pages + 3) * size, size, with_pages=bool(n % 2)),
            growths,
            rng,
            tile=tile,
            captured=captured,
            threads=256 if grid < 40 else 32 * -(-tile // 32),
            order=rng.permutation(grid).tolist(),
            resident=min(3, grid),
            seed=n,
        )


@pytest.mark.parametrize("size", [1, 12, 16, 64, 1000])
def test_a_small_step_with_a_gather(cpu: Emulator, size: int) -> None:
    """A decode step: each request asks for as many slots, of its old pages or of a new one."""
    rng = np.random.default_rng(size)
    tile = Geometry(0, 0, 3 * size, size, sms=132).mapped_tile
    for requests, asked, wide in ((FIXED_PAGES, 1, False), (200, 3, True), (1, 2, False)):
        for share in (1.0, 0.4, 0.0):
            growing = rng.random(requests) < share
            growths = [
                Growth(row, 3, int(new), 3 * size - (1 if new else asked), asked)
                for row, new in zip(rng.permutation(requests).tolist(), growing, strict=True)
                if size >= asked
            ]
            table = Table(requests, 4 * size, size)
            how = {"wide": wide, "tile": tile, "threads": 256, "seed": requests}
            assign(cpu, table, growths, rng, small=True, **how)


@each_form
@pytest.mark.parametrize("size", [1, 12, 16])
def test_one_request_with_very_many_pages(cpu: Emulator, size: int, form: str) -> None:
    rng = np.random.default_rng(size)
    table = Table(1, 5003 * size, size)
    growth = Growth(0, 2, 5000, 2 * size - 1, 4900 * size)
    assign(cpu, table, [growth], rng, **FORMS[form], tile=256, **some_launch(rng, grid=7))


@each_form
@pytest.mark.parametrize("size", [1, 12, 16])
def test_very_many_requests_with_one_page(cpu: Emulator, size: int, form: str) -> None:
    rng = np.random.default_rng(size)
    table = Table(3000, 2 * size, size)
    growths = [Growth(row, 1, 1, size, 1) for row in rng.permutation(3000).tolist()]
    assign(cpu, table, growths, rng, **FORMS[form], tile=64, **some_launch(rng, grid=40))


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
def test_a_gather_needs_no_new_page(cpu: Emulator, wide: bool, even: bool) -> None:
    rng = np.random.default_rng([wide, even])
    for size in (1, 3, 16):
        table = Table(50, 6 * size, size)
        growths = [
            Growth(
                row, 6, 0, int(rng.integers(size)), size if even else int(rng.integers(5 * size))
            )
            for row in range(50)
        ]
        assign(cpu, table, growths, rng, wide=wide, **some_launch(rng))


ASKED = [
    *([n] for n in range(10)),
    [0, 0, 3, 0, 1, 0, 0, 5, 6, 0],
    [0, 4, 0],
    [1, 0, 0, 0, 0, 0, 1],
    [0, 0, 0],
    [4, 4, 0, 0, 4, 4],
    [3, 0, 0, 1, 8, 0, 1, 1, 1, 1, 0],
    [126, 0, 2, 0, 0, 130, 0, 1],
    [0, 513, 0, 0, 258],
    [1] * 9,
    [2] * 131,
    [3] * 7,
    [4] * 5,
    [5] * 103,
    [300] * 3,
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{len(asked)}-ask-{sum(asked)}")
def test_a_gather_meets_the_boundaries_of_requests(cpu: Emulator, asked: list[int]) -> None:
    """Requests that ask for nothing, and are told of or not, are first, last, and between."""
    rng = np.random.default_rng(asked)
    for size, threads in ((1, 32), (3, 64), (16, 32)):
        growths = []
        for row, slots in enumerate(asked):
            start = int(rng.integers(2 * size))
            pages = -(-(start + slots) // size)
            new = int(rng.integers(pages + 1)) * (row % 3 > 0)
            growths.append(Growth(row, pages - new, new, start, slots))
        row_pages = max(g.old + g.new for g in growths) + 1
        for idle in (False, True):
            table = Table(len(asked), row_pages * size, size)
            how = {"grid": 1 + size % 2, "threads": threads, "wide": idle, "idle": idle}
            assign(cpu, table, growths, rng, seed=size, **how)


def test_nothing_to_do_changes_nothing(cpu: Emulator) -> None:
    rng = np.random.default_rng(0)
    for form in FORMS.values():
        for idle in (False, True):
            assign(cpu, Table(3, 20, 4), [], rng, **form, idle=idle)
            assign(cpu, Table(3, 20, 4), [Growth(1, 2, 0)], rng, **form, idle=idle)


@pytest.mark.parametrize("size", [1, 3, 4, 24])
@pytest.mark.parametrize("whole", [True, False], ids=["whole-rows", "cut-rows"])
def test_rows_behind_two_to_the_32_entries(cpu: Emulator, size: int, whole: bool) -> None:
    """All these kernels, on the last rows of a table whose others are not there."""
    rng = np.random.default_rng([size, whole])
    width = 1008 + (0 if whole else 4 if size == 24 else 1 - size % 2)
    if size == 1:
        width = 1008
    far = {"first_row": FAR_ROW}
    table = Table(5, width, size, **far)
    assert FAR_ROW * width > 2**32
    growths = [Growth(4, 3, 5, 2 * size, 4 * size), Growth(0, 0, 2, 1, size)]
    for form in FORMS.values():
        assign(cpu, table, growths, rng, **form)
    table = Table(5, width, size, **far)
    growths = [Growth(4, 3, 5, 2 * size, size), Growth(0, 0, 2, 1, size)]
    assign_mapped(cpu, table, growths, rng, tile=4, captured=False)
    table = Table(5, width, size, **far)
    committed = np.array([0, 3 * size, 7], np.int32)
    allocated = -(-committed // size) * size
    rows = np.array([4, 0, 2], np.int32)
    watermarks(cpu, table, rows, committed, allocated.astype(np.int32), 3 * size, rng)
    export(cpu, Table(5, width, size, **far), rows, committed, 9, rng)


def test_entries_are_computed_in_64_bits(cpu: Emulator) -> None:
    rng = np.random.default_rng(3)
    for size, row_pages, rest in ((1, 10**6, 0), (16, 2**17, 0), (16, 2**17, 5), (1000, 3, 999)):
        width = row_pages * size + rest
        places = [0, 1, row_pages - 1, row_pages, 2**31 - 1, 2**31, 2**32 + 1, 2**40 + 12345]
        places += rng.integers(2**31, 2**42, 200).tolist()
        entries = Buffer(np.full(len(places), -1, np.int64), writable=True)
        cpu.launch(
            "probe_entry_of",
            2,
            32,
            [
                np.int64(width),
                np.int32(row_pages),
                np.int32(size),
                np.int32(len(places)),
                Buffer(np.array(places, np.int64)),
                entries,
            ],
        )
        wanted = [place // row_pages * width + place % row_pages * size for place in places]
        assert entries.data.tolist() == wanted


def test_insertion_is_behind_equals(cpu: Emulator) -> None:
    rng = np.random.default_rng(4)
    for count in (0, 1, 2, 3, 100, 1024, 5000):
        offsets = np.sort(rng.integers(-5, 40, count)).astype(np.int32)
        values = np.arange(-7, 44, dtype=np.int32)
        for first, last in {(0, count), (count // 3, count), (0, count // 2)}:
            found = Buffer(np.full(len(values), -1, np.int32), writable=True)
            arguments = [Buffer(offsets), np.int32(first), np.int32(last), np.int32(len(values))]
            cpu.launch("probe_insertion", 1, 64, [*arguments, Buffer(values), found])
            wanted = first + np.searchsorted(offsets[first:last], values, side="right")
            assert found.data.tolist() == wanted.tolist()


@pytest.mark.parametrize(("size", "rest"), [(1000, 647), (1000, 0), (5, 2)])
def test_the_last_slots_of_the_widest_row(cpu: Emulator, size: int, rest: int) -> None:
    """Lengths near 2**31, and rows as wide: only the last four pages of one row are there."""
    rng = np.random.default_rng(7)
    extent = (2**31 - 1) // size * size
    pages = extent // size
    there = {"first_row": 3, "first_page": pages - 4}
    assert extent + rest < 2**31
    for form in FORMS.values():
        table = Table(1, extent + rest, size, **there)
        growths = [Growth(0, pages - 2, 2, extent - 3 * size, 3 * size)]
        assign(cpu, table, growths, rng, **form)
    table = Table(1, extent + rest, size, **there)
    assign_mapped(cpu, table, growths, rng, tile=4, captured=True, threads=32)
    # Requests that hold all they can: the marks round up past 2**31, and nothing is to be done.
    full = np.array([extent, extent - 1, extent - size + 1], np.int32)
    rows, allocated = np.zeros(3, np.int32), np.full(3, extent, np.int32)
    for reserve in (0, np.array([0, 1, size - 1], np.int32)):
        table = Table(1, extent + rest, size, **there)
        watermarks(cpu, table, rows, full, allocated, reserve, rng)
    allocated[1] = extent - 3 * size
    table = Table(1, extent + rest, size, **there)
    watermarks(cpu, table, rows, allocated, allocated, np.array([0, 3 * size, 0], np.int32), rng)


@each_page_size
def test_export_pages(cpu: Emulator, size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (0, 1, 5, 40):
        for width in (0, 1, 4, 9):
            table = Table(n + 1, some_width(rng, size, 6), size)
            lengths = rng.integers(0, 6 * size + 1, n) * (rng.random(n) < 0.8)
            asked = Export(*(bool(rng.integers(3)) for _ in range(4)))
            rows = rng.permutation(n + 1)[:n].astype(np.int32)
            export(
                cpu, table, rows, lengths.astype(np.int32), width, rng, asked, **some_launch(rng)
            )


@pytest.mark.parametrize("missing", Export._fields)
def test_export_pages_without_one_output_or_with_it_alone(cpu: Emulator, missing: str) -> None:
    rng = np.random.default_rng(9)
    rows, lengths = np.array([2, 0, 3], np.int32), np.array([7, 0, 13], np.int32)
    for asked in (
        Export()._replace(**{missing: False}),
        Export(False, False, False, False)._replace(**{missing: True}),
    ):
        export(cpu, Table(4, 20, 4), rows, lengths, 5, rng, asked)


@pytest.mark.parametrize("address", [1 << 20, (1 << 20) + 4])
def test_the_host_tells_the_kernels_which_stores_are_aligned(address: int) -> None:
    for size in (*PAGE_SIZES, 8, 12, 20, 32):
        for width in (size, 7 * size, 7 * size + 1, 8 * size + 4):
            geometry = Geometry(address, 0, width, size, sms=132)
            assert geometry.arguments[-1] == quad_shift(size, width, address)
            assert 1 <= geometry.tile <= 1024
            assert 1 <= geometry.mapped_tile <= THREADS


@pytest.mark.parametrize("sms", [1, 20, 132, 148])
def test_no_step_has_more_tiles_than_the_host_provides_for(sms: int) -> None:
    for size in (1, 3, 16, 64, 1000, 5000):
        geometry = Geometry(0, 0, size, size, sms)
        steps = [1, 2, 63, 64, 65, 131, 132, 133, 5000, 40_000, 10**6, 2**31 - 1]
        for most in steps:
            for pages in (step for step in steps if step <= most):
                tiles = -(-pages // geometry.tile_for(pages))
                assert tiles <= geometry.most_tiles(most)


@pytest.mark.parametrize("sms", [1, 20, 132, 148])
def test_the_host_asks_for_tiles_that_the_scan_takes(sms: int) -> None:
    for size in (1, 3, 16, 64, 5000):
        geometry = Geometry(0, 0, size, size, sms)
        for requests in (1, 2, 63, 64, 65, 5000, 40_000, 10**6, 2**31 - 1):
            for pages in (0, 1, 8, 300, 10**6):
                tile = geometry.tile_requests(requests, pages)
                assert 32 <= tile <= 1024 and tile & (tile - 1) == 0
                # Five tiles a multiprocessor, but none of fewer than 256 pages: within the
                # nearest power of two, as far as the bounds let it go.
                wanted = max(256.0, requests * max(1, pages) / (5 * sms)) / max(1, pages)
                assert tile == 32 or tile <= 1.42 * wanted
                assert tile == 1024 or tile >= wanted / 1.42
        assert geometry.tile <= geometry.marking_tile <= 1024


def test_the_host_and_the_kernel_agree_on_the_fixed_places() -> None:
    layout = Path(sgalloc.__file__).parent / "device" / "layout.py"
    host = re.findall(r"^SMALL_\w+ = (\d+)$", layout.read_text(encoding="utf-8"), re.MULTILINE)
    assert host == [str(FIXED_PAGES)] * 3
    kernel = (CUDA / "assign_pages.cu").read_text(encoding="utf-8")
    assert f"constexpr i32 kFixedPages = {FIXED_PAGES};" in kernel
