"""Graphs that read the table, verbs on a stream that is being captured, and captured updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.currents import CURRENTS, STREAMS, cuda_torch, event_behind
from gpu.latch import Latches, copy_entries
from gpu.naive import NaiveTables
from gpu.spy import Spy
from gpu.twins import host
from gpu.verbs import LAUNCHING, VERBS, World
from host_support import Query, open_handles

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")

PS = 4


def make(ps: int = PS, rows: int = 8, pages: int = 4000, **how: Any) -> sgalloc.KVAllocator:
    alloc = sgalloc.KVAllocator(pages, ps, rows, 100 * ps, device="cuda", **how)
    alloc.warm(2048)
    return alloc


def assert_table(alloc: sgalloc.KVAllocator, entries: np.ndarray | None = None) -> None:
    """The table (or a copy of it) has every open row as the naive writer would."""
    found = host(alloc.req_to_token) if entries is None else entries
    naive = NaiveTables(alloc.max_requests, alloc.row_width, alloc.page_size)
    handles = open_handles(alloc)
    naive.write(alloc, handles)
    for row, held in zip(alloc.rows(handles), alloc.allocated(handles), strict=True):
        assert np.array_equal(found[row, :held], naive.table[row, :held]), f"row {row}"


@contextmanager
def captured_by_torch() -> Iterator[Any]:
    """Capture in torch's default mode, in which polling an event breaks the capture."""
    torch = cuda_torch()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            yield graph
    finally:
        # A capture that broke leaves torch on its capture stream.
        torch.cuda.set_stream(before)


@contextmanager
def captured_by_cupy(mode: int, replay: list[Callable[[], None]]) -> Iterator[int]:
    """Capture on a side stream of CuPy's, current and with torch not loaded."""
    with CURRENTS["cupy side"]() as handle:
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture(mode)
        try:
            yield handle
        except BaseException:
            with suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
    replay.append(lambda: graph.launch(stream))


# -- graphs that read the table ------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_torch_graph_reads_the_table_at_its_fixed_address(stream: str) -> None:
    torch = cuda_torch()
    alloc = make(stream=STREAMS[stream]([]))
    view = torch.from_dlpack(alloc.req_to_token)
    address = view.data_ptr()
    h = alloc.open(4).tolist()
    alloc.extend(h, 1).ready.wait()
    seen = torch.empty_like(view)
    with captured_by_torch() as graph:
        seen.copy_(view)
    for step in range(30):
        if step % 7 == 6:
            alloc.release(h[0])
            h[0] = int(alloc.open()[0])
        alloc.reserve(h, 5).ready.wait()
        graph.replay()
        torch.cuda.synchronize()
        assert_table(alloc, host(seen))
        alloc.commit(h, [1, 2, 3, 4])
    assert view.data_ptr() == alloc.req_to_token.data.ptr == address


@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_cupy_graph_reads_the_table_at_its_fixed_address(stream: str) -> None:
    with CURRENTS["cupy side"]() as handle:
        alloc = make(stream=STREAMS[stream]([]))
        h = alloc.open(4).tolist()
        alloc.extend(h, 1).ready.wait()
        seen = cupy.zeros_like(alloc.req_to_token)
        side = cupy.cuda.get_current_stream()
        copy_entries(alloc.req_to_token.data.ptr, seen.data.ptr, seen.size, handle)
        side.synchronize()
        side.begin_capture()
        copy_entries(alloc.req_to_token.data.ptr, seen.data.ptr, seen.size, handle)
        graph = side.end_capture()
        for _ in range(20):
            alloc.decode(h, [1, 2, 0, 4]).ready.wait()
            graph.launch(side)
            assert_table(alloc, host(seen))


# -- verbs on a stream that is being captured ----------------------------------------------------

# `slots` without `out` allocates, exports belong before the capture, and an event that is waited
# for in quarantine must be one of outside.
UNFIT = ("slots", "page tables", "release after", "trim after")
CAPTURED = [name for name in VERBS if name not in UNFIT]
WITH_READY = [
    name
    for name in LAUNCHING
    if name in CAPTURED and name.split()[0] in ("extend", "decode", "reserve")
]


@pytest.mark.parametrize("verb", CAPTURED)
def test_a_verb_while_torch_captures(verb: str, spy: Spy) -> None:
    """It polls nothing and breaks nothing; what it launched is in the graph."""
    torch = cuda_torch()
    world = World()
    view = torch.from_dlpack(world.alloc.req_to_token)
    seen = torch.empty_like(view)
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        world.stream = int(torch.cuda.current_stream().cuda_stream)
        spy.calls.clear()
        VERBS[verb].call(world)
        assert torch.cuda.is_current_stream_capturing()
        seen.copy_(view)
        calls = spy.calls.copy()
    assert (calls["eventQuery"], calls["graphLaunch"], spy.never) == (0, 0, {})
    assert sum(n for name, n in calls.items() if name.startswith("kernel")) == VERBS[verb].launches
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        world.verify()
        assert np.array_equal(host(seen), world.naive.table)


@pytest.mark.parametrize("verb", [name for name in LAUNCHING if name in CAPTURED])
@pytest.mark.parametrize("mode", ["relaxed", "global"])
def test_a_verb_while_cupy_captures(verb: str, mode: str) -> None:
    world = World()
    replay: list[Callable[[], None]] = []
    number = {"relaxed": runtime.streamCaptureModeRelaxed, "global": 0}[mode]
    with captured_by_cupy(number, replay) as handle:
        world.stream = handle
        VERBS[verb].call(world)
    replay[0]()
    runtime.deviceSynchronize()
    world.verify()


@pytest.mark.parametrize("verb", WITH_READY)
def test_a_plan_stream_joins_the_capture_and_leaves_it(verb: str, spy: Spy) -> None:
    """Forked by the call, joined by ``plan.ready.wait()``; free again afterwards."""
    torch = cuda_torch()
    world = World(stream="plan")
    view = torch.from_dlpack(world.alloc.req_to_token)
    seen = torch.empty_like(view)
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        world.stream = int(torch.cuda.current_stream().cuda_stream)
        spy.calls.clear()
        VERBS[verb].call(world).ready.wait()
        seen.copy_(view)
        assert spy.polls == 0
    graph.replay()
    torch.cuda.synchronize()
    world.verify()
    assert np.array_equal(host(seen), world.naive.table)
    before = spy.calls["graphLaunch"]
    world.alloc.reserve(world.inside, 16)
    assert spy.calls["graphLaunch"] == before + 1, "no longer captured"
    world.verify()


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
@pytest.mark.parametrize("stream", ["plan", "raw"])
def test_an_event_of_the_capture_brings_the_plan_stream_into_it(stream: str, kind: str) -> None:
    """The forward's "table read" event, recorded while it is captured."""
    torch = cuda_torch()
    keep: list[Any] = []
    alloc = make(stream=STREAMS[stream](keep))
    h = alloc.open(2).tolist()
    alloc.extend(h, PS)
    view = torch.from_dlpack(alloc.req_to_token)
    before, after = torch.empty_like(view), torch.empty_like(view)
    torch.cuda.synchronize()
    old = host(view)
    with captured_by_torch() as graph:
        before.copy_(view)
        event, owner = event_behind(int(torch.cuda.current_stream().cuda_stream), kind)
        keep.append(owner)
        alloc.decode(h, 3 * PS, after=event).ready.wait()
        after.copy_(view)
    graph.replay()
    torch.cuda.synchronize()
    assert np.array_equal(host(before), old), "the forward read a table that was written already"
    assert_table(alloc, host(after))
    alloc.check(device=True)


@pytest.mark.parametrize("stream", ["plan", "raw"])
def test_a_step_behind_a_named_reader_leaves_a_capture_alone(stream: str, spy: Spy) -> None:
    """The current stream is captured, the reader is not: whichever way, no capture breaks."""
    torch = cuda_torch()
    keep: list[Any] = []
    reader = cupy.cuda.Stream(non_blocking=True)
    alloc = make(stream=STREAMS[stream](keep), reader=reader)
    h = alloc.open(2).tolist()
    alloc.extend(h, PS)
    view = torch.from_dlpack(alloc.req_to_token)
    seen = torch.empty_like(view)
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        spy.calls.clear()
        for _ in range(4):  # each keeps a staging slot for good, and of these there are few
            alloc.decode(h, PS)
        assert spy.polls == 0
        seen.copy_(view)
    graph.replay()
    torch.cuda.synchronize()
    alloc.check(device=True)


DURING = {
    "open": lambda w: w.alloc.open(),
    "open with a prefix": lambda w: w.alloc.open_with_prefix(w.match),
    "extend": lambda w: w.alloc.extend(w.edge, 13),
    "decode": lambda w: w.alloc.decode(w.batch),
    "reserve": lambda w: w.alloc.reserve(w.batch, 3),
    "commit": lambda w: w.alloc.commit(w.inside, 1),
    "apply": lambda w: w.alloc.apply(w.alloc.plan(decode=(w.edge, 1))),
    "trim": lambda w: w.alloc.trim(w.inside, 5),
    "release": lambda w: w.alloc.release(w.edge),
    "publish": lambda w: w.alloc.prefix.publish(w.sharing, np.arange(8)),
    "settle": lambda w: w.alloc.settle(),
}


@pytest.mark.parametrize("call", DURING)
def test_what_waits_in_quarantine_is_not_polled_while_torch_captures(call: str) -> None:
    torch = cuda_torch()
    world = World()
    event = Query()
    world.alloc.release(world.spare, after=event)
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    polls = event.polls
    with captured_by_torch():
        DURING[call](world)
        seen.fill_(1)
    assert event.polls == polls, "polling an event breaks a capture in the default mode"
    event.over = True
    world.alloc.settle()
    assert world.alloc.stats().groups["full"].quarantined == 0


def test_an_event_given_to_a_release_is_not_polled_while_torch_captures() -> None:
    torch = cuda_torch()
    world = World()
    event = Query()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch():
        world.alloc.release(world.spare, after=event)
        seen.fill_(1)
    assert event.polls == 0
    assert world.alloc.stats().groups["full"].quarantined == 6
    event.over = True
    world.alloc.settle()
    assert world.alloc.stats().groups["full"].quarantined == 0


def test_a_captured_step_outlives_the_steps_that_follow() -> None:
    """Its staging memory is read at every replay, so no later step may take it."""
    torch = cuda_torch()
    alloc = make(pages=20_000, rows=200)
    h = alloc.open(200).tolist()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    out = torch.empty(6, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch() as graph:
        alloc.extend(h[0], 6, out=out)
        alloc.extend(h[1], 90)
        seen.fill_(1)
    for at in range(2, 200):
        alloc.extend(h[at], 5 + at % 80)
        alloc.reserve(h[2:at], 3)
        if at % 20 == 0:
            out.fill_(-1)
            graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == host(alloc.req_to_token)[1, :6].tolist()
    assert_table(alloc)
    alloc.check(device=True)


def test_without_a_slot_left_a_captured_step_is_refused() -> None:
    """Named is the way that has no such bound; the capture and the allocator go on."""
    torch = cuda_torch()
    alloc = make(pages=20_000)
    (h,) = alloc.open().tolist()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    done = 0
    with captured_by_torch() as graph:
        seen.fill_(1)
        with pytest.raises(sgalloc.WrongState, match="captured") as caught:
            for _ in range(100):
                alloc.decode(h, PS)
                done += 1
    assert "\n" not in str(caught.value) and done > 0
    assert alloc.committed(h).tolist() == [PS * done] == alloc.allocated(h).tolist()
    graph.replay()
    torch.cuda.synchronize()
    alloc.check(device=True)
    alloc.decode(h, PS)
    alloc.check(device=True)


def test_a_step_too_large_for_a_captured_slot_is_refused() -> None:
    torch = cuda_torch()
    alloc = sgalloc.KVAllocator(60_000, 1, 4, 50_000, device="cuda")
    alloc.warm(60_000)
    (h,) = alloc.open().tolist()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch():
        seen.fill_(1)
        with pytest.raises(sgalloc.WrongState, match="captured"):
            alloc.extend(h, 50_000)
    assert alloc.allocated(h).tolist() == [0] and alloc.available() == 60_000
    alloc.extend(h, 50_000)
    alloc.check(device=True)


def test_a_capture_before_warm_is_refused() -> None:
    torch = cuda_torch()
    alloc = sgalloc.KVAllocator(100, PS, 4, 40, device="cuda")
    (h,) = alloc.open().tolist()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch():
        seen.fill_(1)
        with pytest.raises(sgalloc.WrongState, match="warm"):
            alloc.extend(h, 5)
    assert alloc.available() == 100
    alloc.extend(h, 5)
    alloc.check(device=True)


def test_exports_during_a_capture_are_refused() -> None:
    torch = cuda_torch()
    world = World()
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with captured_by_torch():
        seen.fill_(1)
        with pytest.raises(sgalloc.WrongState, match="capture"):
            world.tables.update(world.edge)
    world.verify()


# -- captured updates ----------------------------------------------------------------------------


class Replayed:
    """An update in a graph of torch's or CuPy's, and what the graph sees of the table after it."""

    def __init__(self, library: str, alloc: sgalloc.KVAllocator, max_pages: int) -> None:
        self.alloc = alloc
        self.update = alloc.captured(max_pages)
        table = alloc.req_to_token
        self._seen = cupy.full(table.shape, -1, cupy.int32)
        target, size = self._seen.data.ptr, table.size
        copy_entries(table.data.ptr, target, size, 0)
        runtime.deviceSynchronize()
        self._replay: Callable[[], None]
        if library == "torch":
            torch = cuda_torch()
            with captured_by_torch() as graph:
                self.update.launch()
                handle = int(torch.cuda.current_stream().cuda_stream)
                copy_entries(table.data.ptr, target, size, handle)
            self._replay = graph.replay
        else:
            side = cupy.cuda.Stream(non_blocking=True)
            side.begin_capture(runtime.streamCaptureModeGlobal)
            self.update.launch(stream=side if library == "cupy" else int(side.ptr))
            copy_entries(table.data.ptr, target, size, int(side.ptr))
            graph = side.end_capture()
            self._replay = lambda: graph.launch(side)

    def replay(self, times: int = 1) -> np.ndarray:
        """Replay so often; what the last replay saw."""
        for _ in range(times):
            self._replay()
        return host(self._seen)

    def extend(self, handle: int, tokens: int) -> None:
        """Stage a growth of one request."""
        length = int(self.alloc.committed(handle)[0]) + tokens
        self.update.stage(self.alloc.plan(extend=([handle], [length])))

    def fill(self, handle: int) -> int:
        """Stage one page after the other until no more is taken; how many were."""
        for count in range(1000):
            try:
                self.extend(handle, self.alloc.page_size)
            except sgalloc.WrongState:
                return count
        raise AssertionError("the ring of staged steps has no end")


LIBRARIES = ["torch", "cupy", "raw"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("ps", [1, 4, 16])
def test_a_replay_applies_what_was_staged(ps: int, library: str) -> None:
    alloc = make(ps, page_table=True)
    h = alloc.open(6).tolist()
    replayed = Replayed(library, alloc, 64)
    for step in range(40):
        parts = (h[:2], h[2:4], h[4:])
        plan = alloc.plan(
            (parts[0], alloc.committed(parts[0]) + step % 3), (parts[1], 2), (parts[2], ps + 1)
        )
        replayed.update.stage(plan)
        assert alloc.committed(parts[1]).tolist() == [2 * (step + 1)] * 2, "the host is ahead"
        seen = replayed.replay()
        assert_table(alloc, seen)
        alloc.commit(parts[2], 1)
    alloc.check(device=True)
    naive = NaiveTables(alloc.max_requests, alloc.row_width, ps)
    naive.write(alloc, h)
    assert np.array_equal(host(alloc.page_table), naive.page_table)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_replay_with_nothing_staged_changes_nothing(library: str) -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    alloc.extend(h, 9)
    replayed = Replayed(library, alloc, 16)
    before = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(3), before)
    replayed.extend(h[0], 20)
    once = replayed.replay()
    assert_table(alloc, once)
    alloc.trim(h[0], 1)
    alloc.extend(h[1], 40)
    after = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(5), after), "a step was applied a second time"


@pytest.mark.parametrize("library", LIBRARIES)
def test_staged_steps_wait_in_order(library: str) -> None:
    """Each replay applies the oldest; the host may be several steps ahead."""
    alloc = make()
    (h,) = alloc.open().tolist()
    replayed = Replayed(library, alloc, 16)
    for _ in range(4):
        held = []
        for _ in range(2):
            replayed.extend(h, PS + 1)
            held.append(int(alloc.allocated(h)[0]))
        naive = NaiveTables(alloc.max_requests, alloc.row_width, PS)
        naive.write(alloc, [h])
        old = host(alloc.req_to_token)[1]
        for extent in held:
            seen = replayed.replay()[1]
            assert np.array_equal(seen[:extent], naive.table[1, :extent])
            assert np.array_equal(seen[extent:], old[extent:]), "a later step came too early"
    alloc.check(device=True)


def test_staged_steps_are_safe_behind_a_held_stream(latches: Latches) -> None:
    """Replays are queued behind a latch, each after its stage; nothing is overwritten."""
    torch = cuda_torch()
    alloc = make()
    h = alloc.open(4).tolist()
    replayed = Replayed("torch", alloc, 16)
    stream = torch.cuda.Stream()
    for round_ in range(10):
        with torch.cuda.stream(stream):
            latch = latches.hold(int(stream.cuda_stream))
            try:
                for at in range(40):
                    replayed.extend(h[at % 4], 1)
                    replayed._replay()
                raise AssertionError("the ring of staged steps has no end")
            except sgalloc.WrongState:
                assert at >= 2, "several steps may be staged"
            assert latch.held, "stage() waited for the GPU"
            latch.open()
        runtime.deviceSynchronize()
        assert_table(alloc)
        if round_ % 3 == 2:
            alloc.trim(h, 0)
    alloc.check(device=True)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_full_ring_is_refused_and_named(library: str) -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    alloc.extend(h[1], 9)
    replayed = Replayed(library, alloc, 16)
    count = replayed.fill(h[0])
    assert count >= 2, "several steps may be staged"
    plan = alloc.plan(extend=([h[0]], [int(alloc.committed(h[0])[0]) + 1]))
    state = (alloc.committed(h).tolist(), alloc.allocated(h).tolist(), alloc.owners().tolist())
    with pytest.raises(sgalloc.WrongState, match="replay") as caught:
        replayed.update.stage(plan)
    assert "\n" not in str(caught.value)
    assert state == (
        alloc.committed(h).tolist(),
        alloc.allocated(h).tolist(),
        alloc.owners().tolist(),
    )
    replayed.replay()
    replayed.update.stage(plan)  # which the refusal has not made stale
    assert_table(alloc, replayed.replay(count))
    alloc.check(device=True)
    # All round once more, past the end of the ring.
    again = replayed.fill(h[2])
    assert again == count
    assert_table(alloc, replayed.replay(count))


def test_a_plan_that_is_too_large_is_refused() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    replayed = Replayed("cupy", alloc, 5)
    with pytest.raises(ValueError, match="max_pages") as caught:
        replayed.extend(h[0], 5 * PS + 1)
    assert "6" in str(caught.value) and "\n" not in str(caught.value)
    assert alloc.allocated(h).tolist() == [0, 0] and alloc.available() == 4000
    replayed.extend(h[1], 5 * PS)
    assert_table(alloc, replayed.replay())
    alloc.check(device=True)


@pytest.mark.parametrize("bad", [0, -1])
def test_an_update_of_no_pages_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="max_pages"):
        make().captured(bad)


def test_a_stale_plan_is_not_staged() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    replayed = Replayed("cupy", alloc, 8)
    plan = alloc.plan(extend=([h[0]], [9]))
    alloc.extend(h[1], 3)
    with pytest.raises(sgalloc.StalePlan):
        replayed.update.stage(plan)
    before = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(), before)
    replayed.extend(h[0], 9)
    assert_table(alloc, replayed.replay())


def test_a_step_without_need_needs_no_room_in_the_ring() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    alloc.extend(h[1], 1)
    replayed = Replayed("cupy", alloc, 8)
    count = replayed.fill(h[0])
    replayed.update.stage(alloc.plan(decode=([h[1]], 2)))
    assert alloc.committed(h[1]).tolist() == [3]
    assert_table(alloc, replayed.replay(count))


def test_staged_and_plain_steps_together() -> None:
    """Of different requests, in any order; both are there once both were replayed or done."""
    alloc = make()
    h = alloc.open(4).tolist()
    replayed = Replayed("torch", alloc, 16)
    for step in range(12):
        replayed.extend(h[step % 2], 5)
        alloc.extend(h[2 + step % 2], 5 * (step // 2 + 1))
        assert_table(alloc, replayed.replay())
    alloc.check(device=True)


def test_many_pages_in_a_captured_update() -> None:
    """More than one block's worth, against the same plan made on the CPU."""
    pages = 5000
    shared: dict[str, Any] = {
        "num_pages": 3 * pages, "page_size": 3, "max_requests": 50, "row_width": 900 * 3 + 1,
    }  # fmt: skip
    alloc = sgalloc.KVAllocator(**shared, device="cuda")
    alloc.warm(pages)
    twin = sgalloc.KVAllocator(**shared, device="cpu")
    h = alloc.open(50)
    assert twin.open(50).tolist() == h.tolist()
    replayed = Replayed("torch", alloc, pages)
    rng = np.random.default_rng(0)
    for _ in range(4):
        lengths = alloc.committed(h) + rng.integers(0, 280, 50)
        replayed.update.stage(alloc.plan(extend=(h, lengths)))
        twin.extend(h, lengths)
        assert np.array_equal(replayed.replay(), twin.req_to_token)
    alloc.check(device=True)


def test_staging_beside_a_replay_is_all_or_nothing() -> None:
    """A step that is staged while a replay runs goes into it whole, or waits for the next."""
    torch = cuda_torch()
    rows, ps = 64, 4
    alloc = sgalloc.KVAllocator(200_000, ps, rows, 400 * ps, device="cuda")
    alloc.warm(16_384)
    h = alloc.open(rows)
    replayed = Replayed("torch", alloc, 16_384)
    for at in range(60):
        for _ in range(20):
            replayed._replay()
        for _ in range(2):
            lengths = alloc.committed(h) + ps * (1 + at % 3)
            replayed.update.stage(alloc.plan(extend=(h, lengths)))
        for _ in range(2):
            replayed._replay()
        torch.cuda.synchronize()
        assert_table(alloc)
        if at % 40 == 39:
            alloc.trim(h, 0)
    alloc.check(device=True)
