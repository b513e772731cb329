"""Debug mode on a GPU: poison in stream order, and no call that waits."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu import test_latch
from gpu.capturing import captured_by_cupy
from gpu.currents import MODES
from gpu.latch import Latches
from gpu.twins import host
from gpu.verbs import VERBS
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc.device.poisoning import POISON
from sgalloc.trust.debugging import DEVICE_EVERY, SWITCH


@pytest.fixture(autouse=True)
def _debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


def tables(alloc: Any) -> list[bytes]:
    device = alloc._core.device
    found = [device.table, device.page_table, device.side_table, device.side_map]
    return [host(table).tobytes() for table in found if table is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_are_those_of_the_cpu_poison_included(name: str) -> None:
    for seed, ps in ((3, 1), (4, 3), (5, 4)):
        here, there = Walk(make(name, ps), seed), Walk(make(name, ps, "cuda"), seed)
        for number in range(80):
            assert here.step() == there.step(), number
            if number % 8 == 0:
                there.alloc.check(device=True)
                assert tables(here.alloc) == tables(there.alloc), number
        data = there.alloc.snapshot(assume_done=True)
        again = sgalloc.KVAllocator.restore(data, "cuda")
        again.check(device=True)
        table = cupy.asnumpy(again.req_to_token)
        free = again._ledger.free_row_ids()
        assert (table[free] == POISON).all() and not table[0].any()


@pytest.mark.parametrize("ps", [1, 16])
@pytest.mark.parametrize("forward", test_latch.FORWARDS)
def test_d9_with_poison(forward: str, ps: int, latches: Latches) -> None:
    """A forward sees its row, not the poison that comes when the row goes back."""
    test_latch.test_d9_a_row_is_reused_behind_its_last_reader(forward, ps, latches)


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_waits(verb: str, latches: Latches) -> None:
    for mode in MODES:
        test_latch.test_a_verb_returns_while_the_stream_is_held(verb, mode, latches)


def test_staging_is_not_poisoned_while_it_is_read(latches: Latches) -> None:
    """D10 again: more steps behind a latch than the ring has slots at first."""
    alloc = sgalloc.KVAllocator(4000, 4, 65, 200, device="cuda")
    alloc.warm()
    handles = alloc.open(64).tolist()
    latch = latches.hold(cupy.cuda.get_current_stream().ptr)
    for number, handle in enumerate(handles):
        alloc.extend(handle, 4 + number)
    assert latch.held, "the host waited"
    latches.let_the_rest_run()
    latch.open()
    alloc.check(device=True)


@pytest.mark.parametrize("table", ["req_to_token", "page_table", "window_table"])
def test_a_kernel_that_writes_outside_of_its_row_is_found(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = sgalloc.SlidingWindow(8, 60)
    alloc = sgalloc.KVAllocator(60, 4, 4, 48, device="cuda", page_table=True, window=window)
    (one,) = alloc.open().tolist()
    alloc.extend(one, 7)
    row = int(alloc.rows(one)[0])
    alloc.check(device=True)
    for at, column in ((row, 9), (row, 11), (3, 0)):
        getattr(alloc, table)[at, column] = 5
        alloc.settle()  # on a GPU the tables are not read back unasked
        with pytest.raises(sgalloc.LawViolation, match=rf"{table}\[{at}, {column}\] is 5 .*past"):
            alloc.check(device=True)
        getattr(alloc, table)[at, column] = POISON
    monkeypatch.setenv(DEVICE_EVERY, "2")
    alloc = sgalloc.KVAllocator(60, 4, 4, 48, device="cuda")
    alloc.req_to_token[2, 2] = 5
    alloc.open()
    with pytest.raises(sgalloc.LawViolation, match="found behind call 2, open"):
        alloc.open()


def test_a_captured_step_is_no_writer_outside_of_its_row() -> None:
    alloc = sgalloc.KVAllocator(400, 4, 6, 200, device="cuda")
    alloc.warm()
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], 12)
    replay: list[Any] = []
    with captured_by_cupy(runtime.streamCaptureModeGlobal, replay):
        alloc.extend(one, 30)
    alloc.release(one)
    for again in replay:
        again()
    runtime.deviceSynchronize()
    alloc.check(device=True)
    alloc.extend(alloc.open(4), 9)  # one of them in the row that the graph writes past its extent
    for again in replay:
        again()
    alloc.check(device=True)


def test_rows_past_32_bits_are_poisoned() -> None:
    """Entries past 2**31, in a table of 9 GiB."""
    free, _ = runtime.memGetInfo()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    rows, width = 4_700, 480_000
    alloc = sgalloc.KVAllocator(20_000, 16, rows, width, device="cuda")
    (handle,) = alloc.open().tolist()
    alloc.extend(handle, 1000)
    last = alloc.req_to_token[rows]
    assert bool((last == POISON).all()) and not bool(alloc.req_to_token[0].any())
    held = alloc.req_to_token[int(alloc.rows(handle)[0])]
    assert np.array_equal(host(held[1008:1016]), np.full(8, POISON, np.int32))
