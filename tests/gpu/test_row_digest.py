"""row_digest on a GPU: equal to NumPy, one launch, no wait; what is wrong is found and named."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import Graph, captured_by_cupy, make
from gpu.currents import CURRENTS, MODES, STREAMS
from gpu.latch import Latches, copy_entries
from gpu.spy import Spy
from gpu.test_steady import spending
from gpu.twins import host
from host_support import PAGE_SIZES, Query
from row_digests import entries_digest
from trust.tables_support import WORLDS, World, entries_under_law, plain, windowed

import sgalloc
from sgalloc.device.row_digest import PAGES, SLOTS, Ranges

pytestmark = pytest.mark.usefixtures("no_collection")

LOOKS = {
    "check": lambda alloc: alloc.check(device=True),
    "probe": lambda alloc: alloc.probe().result(),
}
each_look = pytest.mark.parametrize("look", LOOKS)


def found(look: str, alloc: sgalloc.KVAllocator) -> str:
    with pytest.raises(sgalloc.LawViolation) as caught:
        LOOKS[look](alloc)
    return str(caught.value)


def rows_of(alloc: sgalloc.KVAllocator, count: int = 60) -> Ranges:
    """Ranges of the table and the page ids that begin and end anywhere, some of them empty."""
    rng = np.random.default_rng(count)
    start = rng.integers(0, alloc.req_to_token.size // 2, count)
    length = rng.integers(0, alloc.req_to_token.size // 2, count)
    length[rng.random(count) < 0.3] %= 9
    array = np.where(rng.random(count) < 0.8, SLOTS, PAGES)
    size = np.where(array == PAGES, alloc.page_table.size, alloc.req_to_token.size)
    start %= size
    return Ranges(array, start, np.minimum(length, size - start))


# -- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 65, 67, 4099])
def test_digests_are_those_of_numpy(width: int) -> None:
    """Any 32 bits, aligned and not, of ranges that many threads share and of few entries."""
    rng = np.random.default_rng(width)
    alloc = sgalloc.KVAllocator(900, 3, 30, width, device="cuda", page_table=True)
    device = alloc._core.device
    for table in (alloc.req_to_token, alloc.page_table):
        values = rng.integers(-(2**31), 2**31, table.shape).astype(np.int32)
        table[...] = cupy.asarray(values)
    ranges = rows_of(alloc)
    digests = device.digest(ranges).wait()
    tables = {SLOTS: host(alloc.req_to_token).ravel(), PAGES: host(alloc.page_table).ravel()}
    for digest, array, start, length in zip(digests, *ranges, strict=True):
        assert digest == entries_digest(tables[array][start : start + length])


def test_a_row_of_many_slots_and_many_rows() -> None:
    alloc = sgalloc.KVAllocator(70_000, 16, 300, 1 << 20, device="cuda")
    h = alloc.open(300).tolist()
    alloc.extend(h, 17)
    alloc.extend(h[150], 1 << 20)
    for look in LOOKS.values():
        assert look(alloc).size == 0
    (row,) = alloc.rows(h[150]).tolist()
    for column in (0, 12_345, (1 << 20) - 1):
        was = int(alloc.req_to_token[row, column])
        alloc.req_to_token[row, column] = was - 1
        assert f"req_to_token[{row}, {column}] is {was - 1} " in found("probe", alloc)
        alloc.req_to_token[row, column] = was


# -- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
@each_look
def test_every_entry_is_looked_at(kind: str, look: str) -> None:
    world = WORLDS[kind]("cuda", 3)
    for turn, (name, place) in enumerate(entries_under_law(world)):
        table = world.tables[name]
        was = int(table[place])
        table[place] = wrong = was ^ (1 << turn % 31)
        where = ", ".join(map(str, place))
        told = f"{name}[{where}] is {wrong} on the device, but the ledger says {was}; "
        assert found(look, world.alloc).startswith(told)
        table[place] = was
    LOOKS[look](world.alloc)


@pytest.mark.parametrize("ps", PAGE_SIZES)
@each_look
def test_the_last_plan_is_named(ps: int, look: str) -> None:
    alloc = make(ps, page_table=True)
    h = alloc.open(5)
    batch = alloc.batch(h)
    extend = alloc.extend(h, 3 * ps)
    reserve = alloc.reserve(batch, 2 * ps)
    LOOKS[look](alloc)
    (row, *_) = alloc.rows(h).tolist()
    for column, plan, how in (
        (3 * ps - 1, extend, "(extend of 5 requests, 15 new pages), 1 write ago"),
        (3 * ps, reserve, "(reserve of 5 requests, 10 new pages), the last write so far"),
    ):
        was = int(alloc.req_to_token[row, column])
        alloc.req_to_token[row, column] = 99_999
        assert found(look, alloc) == (
            f"req_to_token[{row}, {column}] is 99999 on the device, but the ledger says {was}; "
            f"last written by plan {plan.version} {how}"
        )
        alloc.req_to_token[row, column] = was


@each_look
def test_rounding_on_the_device_and_exchanged_pages(look: str) -> None:
    alloc = make(4, page_table=True)
    h = alloc.open(5)
    alloc.extend(h, 9)
    alloc.reserve(h, 30, rounding="device")
    LOOKS[look](alloc)
    sound = alloc.req_to_token.copy()
    alloc.req_to_token[2, 4:8], alloc.req_to_token[2, 12:16] = sound[2, 12:16], sound[2, 4:8]
    assert found(look, alloc).startswith("req_to_token[2, 4] is ")
    alloc.req_to_token[...] = sound
    LOOKS[look](alloc)


@each_look
def test_a_map_with_pages_that_wait(look: str) -> None:
    world = windowed("cuda")
    alloc, event = world.alloc, Query()
    alloc.release(world.handles[0], after=event)
    waits = alloc._core.quarantine.page_ids()
    LOOKS[look](alloc)
    for page in waits.tolist():
        alloc.full_to_window[4 * page : 4 * page + 4] = 77
    LOOKS[look](alloc)
    event.over = True
    alloc.settle()
    LOOKS[look](alloc)


@pytest.mark.parametrize("kind", WORLDS)
def test_where_no_mapped_memory_is_read_it_is_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    world = WORLDS[kind]("cuda")
    copies = world.alloc._core.device.copies
    for _ in range(5):
        world.alloc.probe().result()
        world.alloc.decode(world.handles)
    assert world.alloc._core.device.copies > copies
    world.alloc.req_to_token[1, 2] += 1
    assert "req_to_token[1, 2] is " in found("probe", world.alloc)


# -- no wait, no allocation ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [None, "plan"], ids=["one stream", "plan stream"])
def test_a_probe_costs_one_launch(stream: str | None, spy: Spy, torch: Any) -> None:
    alloc = make(4, rows=300, page_table=True, stream=stream)
    h = alloc.open(300)
    alloc.extend(h, 9)
    with spending(alloc, spy, torch) as budget:
        kept = [alloc.probe(), alloc.probe()]
    assert (budget.launches, budget.copies) == (2, 0)
    for probe in kept:
        assert probe.result().size == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_probe_returns_while_the_stream_is_held(mode: str, latches: Latches) -> None:
    current, stream = MODES[mode]
    with CURRENTS[current]() as held:
        alloc = make(4, stream=STREAMS[stream]([]))
        h = alloc.open(5)
        alloc.extend(h, 9)
        latch = latches.hold(held)
        alloc.decode(h, 7)
        probe = alloc.probe()
        alloc.decode(h, 9)
        assert not probe.done
        assert latch.held, "a probe waited for the GPU"
        latch.open()
        assert probe.result().size == 0 and probe.done


def test_a_probe_is_behind_what_was_written_and_before_what_follows(latches: Latches) -> None:
    """Each on a stream of its own; the rows are trimmed, and grow into other pages."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    with CURRENTS["cupy null"]():
        alloc = make(4)
        h = alloc.open(5)
        other = int(alloc.open()[0])
        with streams[0]:
            latch = latches.hold(int(streams[0].ptr))
            alloc.extend(h, 40)
        with streams[1]:
            probe = alloc.probe()
        alloc.trim(h, 0)
        with streams[2]:
            alloc.extend(other, 100)
            alloc.extend(h, 40)
        latches.let_the_rest_run()
        assert latch.held and not probe.done
        latch.open()
        assert probe.result().size == 0
        alloc.check(device=True)


def test_a_probe_behind_a_write_of_a_strangers(latches: Latches) -> None:
    """What was queued on the current stream before it, it sees; what comes later, it does not."""
    with CURRENTS["cupy side"]() as handle:
        alloc = make(4)
        h = alloc.open(3)
        alloc.extend(h, 9)
        address = alloc.req_to_token.data.ptr
        wrong = cupy.full(1, 12_345, cupy.int32)
        cupy.cuda.get_current_stream().synchronize()
        latch = latches.hold(handle)
        before = alloc.probe()
        copy_entries(wrong.data.ptr, address + 4 * (alloc.row_width + 5), 1, handle)
        after = alloc.probe()
        latch.open()
        assert before.result().size == 0
        with pytest.raises(sgalloc.LawViolation, match=r"req_to_token\[1, 5\] is 12345 "):
            after.result()


# -- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["streamCaptureModeGlobal", "streamCaptureModeRelaxed"])
@pytest.mark.parametrize("stream", [None, "plan"], ids=["one stream", "plan stream"])
def test_a_capture_refuses_a_probe_and_goes_on(mode: str, stream: str | None) -> None:
    alloc = make(4, stream=stream)
    h = alloc.open(3)
    alloc.extend(h, 9)
    earlier = alloc.probe()
    runtime.deviceSynchronize()
    replay: list[Any] = []
    with captured_by_cupy(getattr(runtime, mode), replay):
        for look in (alloc.probe, lambda: alloc.check(device=True), earlier.result):
            with pytest.raises(sgalloc.WrongState, match="captured"):
                look()
        assert not earlier.done
        alloc.decode(h, 4).ready.wait()
    replay[0]()
    assert earlier.result().size == 0
    assert alloc.check(device=True).size == 0, "it waits for the replay, on whatever stream"


def test_staged_steps_are_left_out_until_they_are_replayed() -> None:
    alloc = make(4)
    graph = Graph(alloc)
    h = alloc.open(3)
    alloc.extend(h, 9)
    (row, *_) = alloc.rows(h).tolist()
    graph.extend(h[:1], 30)
    probe = alloc.probe()
    assert probe.result().tolist() == alloc.check(device=True).tolist() == [row]
    alloc.req_to_token[2, 0] += 1
    assert "req_to_token[2, 0] is" in found("probe", alloc)
    alloc.req_to_token[2, 0] -= 1
    graph.replay()
    for look in LOOKS.values():
        assert look(alloc).size == 0
    alloc.req_to_token[row, 20] += 1
    line = found("probe", alloc)
    assert f"req_to_token[{row}, 20] is" in line and "extend of 1 request" in line


def test_a_check_waits_for_replays_under_way(latches: Latches) -> None:
    """On a stream that the allocator knows nothing of; a probe leaves them out instead."""
    alloc = make(4)
    graph = Graph(alloc)
    h = alloc.open(3)
    alloc.extend(h, 9)
    latch = latches.hold(int(graph.stream.ptr))
    graph.extend(h, 30)
    graph.launch()
    probe = alloc.probe()
    assert probe.result().tolist() == alloc.rows(h).tolist()
    assert latch.held
    latch.open()
    assert alloc.check(device=True).size == 0
    assert alloc.probe().result().size == 0


def test_a_probe_and_a_world_of_every_kind_after_many_steps() -> None:
    """Steps and probes in turn, none of them looked at before the end."""
    worlds: list[World] = [plain("cuda"), windowed("cuda")]
    for world in worlds:
        alloc, probes = world.alloc, []
        for turn in range(12):
            probes.append(alloc.probe())
            alloc.decode(world.handles, 1)
            if turn == 5:
                alloc.trim(world.handles, 4)
        for probe in probes:
            assert probe.result().size == 0
