"""Graphs that read the table, and verbs on a stream that is being captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, assert_table, captured_by_cupy, captured_by_torch, make
from gpu.currents import CURRENTS, STREAMS, cuda_torch, event_behind
from gpu.latch import copy_entries
from gpu.spy import Spy
from gpu.twins import host
from gpu.verbs import LAUNCHING, VERBS, World
from host_support import Query

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")

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
# for in quarantine must be one of outside. A remote writer cannot wait for a replay.
UNFIT = (
    "slots", "page tables", "release after", "trim after", "abort after",
    "preallocate", "preallocate with a prefix",
)  # fmt: skip
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
