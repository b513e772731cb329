"""When page ids may be sent to a remote writer, which writes outside of all stream order."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, assert_table, captured_by_cupy, captured_by_torch, make
from gpu.currents import CURRENTS, event_behind
from gpu.latch import Latches
from gpu.twins import host
from host_support import open_handles

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.parametrize("stream", [None, "plan"])
@pytest.mark.parametrize("tokens", [5 * PS, 900 * PS])
def test_ready_follows_the_former_readers_on_the_stream(
    stream: str | None, tokens: int, latches: Latches
) -> None:
    with CURRENTS["cupy side"]() as held:
        alloc = sgalloc.KVAllocator(1000, PS, 4, 1000 * PS, device="cuda", stream=stream)
        alloc.warm(2048)
        (former,) = alloc.open()
        alloc.extend(former, 990 * PS)
        latch = latches.hold(held)  # a forward that reads the pages ...
        alloc.release(former)  # ... which go back by stream order alone
        (h,) = alloc.preallocate(tokens)
        ready = alloc.receiving(h).ready
        latches.let_the_rest_run()
        assert latch.held, "the call waited for the forward"
        assert not ready.query(), "a remote writer would write below a reader"
        latch.open()
        runtime.deviceSynchronize()
        assert ready.query() and alloc.receiving(h).ready.query()
        assert_rows(alloc, h, tokens)


def test_ready_follows_a_named_reader(latches: Latches) -> None:
    reader = cupy.cuda.Stream(non_blocking=True)
    alloc = make(stream="plan", reader=reader)
    (former,) = alloc.open()
    alloc.extend(former, 90 * PS)
    runtime.deviceSynchronize()
    latch = latches.hold(reader.ptr)
    alloc.release(former)
    (h,) = alloc.preallocate(9 * PS)
    latches.let_the_rest_run()
    assert latch.held and not alloc.receiving(h).ready.query()
    latch.open()
    runtime.deviceSynchronize()
    assert alloc.receiving(h).ready.query()


def test_a_wholly_matched_request_is_ready_behind_the_write_of_its_prefix(
    latches: Latches,
) -> None:
    with CURRENTS["cupy side"]() as held:
        alloc = make(prefix_cache=True)
        (seed,) = alloc.open()
        ids = np.arange(3 * PS)
        alloc.extend(seed, ids.size)
        alloc.release(seed, tokens=[ids])
        runtime.deviceSynchronize()
        latch = latches.hold(held)
        (h,) = alloc.preallocate(ids.size, prefix=alloc.prefix.match(ids))
        latches.let_the_rest_run()
        assert latch.held and not alloc.receiving(h).ready.query()
        latch.open()
        runtime.deviceSynchronize()
        assert alloc.receiving(h).ready.query()
        assert_rows(alloc, h, ids.size)


def test_what_was_aborted_behind_an_event_of_the_gpu_waits_for_it(latches: Latches) -> None:
    with CURRENTS["cupy side"]() as held:
        alloc = make()
        (h,) = alloc.preallocate(9 * PS)
        latch = latches.hold(held)
        event, owner = event_behind(held, "raw")
        alloc.abort(h, after=event)
        alloc.acknowledge(h, 0)
        assert alloc.stats().groups["full"].quarantined == 9
        alloc.settle()
        assert alloc.stats().groups["full"].quarantined == 9 and latch.held
        latch.open()
        runtime.deviceSynchronize()
        alloc.settle()
        assert alloc.available() == alloc.num_pages
        del owner


@pytest.mark.parametrize("by", ["torch", "cupy"])
@pytest.mark.parametrize("with_match", [False, True])
def test_a_preallocation_while_a_stream_is_captured_is_refused(by: str, with_match: bool) -> None:
    alloc = make(prefix_cache=True)
    (seed, running) = alloc.open(2)
    alloc.extend([seed, running], 3 * PS)
    alloc.release(seed, tokens=[np.arange(3 * PS)])
    match = alloc.prefix.match(np.arange(2 * PS)) if with_match else None
    before = state(alloc)
    replay: list[Any] = []
    with captured_by_torch() if by == "torch" else captured_by_cupy(0, replay):
        with pytest.raises(sgalloc.WrongState, match=r"captured.*outside of the capture"):
            alloc.preallocate([20, 9], prefix=match)
        assert state(alloc) == before
        alloc.decode(running)  # the capture goes on
    runtime.deviceSynchronize()
    assert alloc.preallocate([20, 9], prefix=match).size == 2
    alloc.check()


def assert_rows(alloc: sgalloc.KVAllocator, handle: int, tokens: int) -> None:
    (row,) = alloc.rows(handle)
    pages = alloc.pages(handle, stop=tokens).astype(np.int64)
    expected = (pages[:, None] * PS + np.arange(PS)).reshape(-1)[:tokens]
    assert np.array_equal(host(alloc.req_to_token)[row, :tokens], expected)
    assert_table(alloc)


def state(alloc: sgalloc.KVAllocator) -> Any:
    """All of the host's state that the same calls must make the same on every device."""
    handles = open_handles(alloc)
    waiting = {
        pin.handle: (pin.row, pin.pages.tolist(), sorted(pin.acked), pin.aborted, pin.deadline)
        for pin in alloc._core.pins.by_handle.values()
    }
    return (
        (handles, alloc.committed(handles).tolist(), alloc.allocated(handles).tolist()),
        (alloc.owners().tolist(), alloc._core.pool.free_ids().tolist()),
        (alloc._ledger.free_row_ids().tolist(), repr(alloc.stats().groups), alloc.stats().rows),
        waiting,
    )


def test_the_same_calls_give_the_same_on_both_devices() -> None:
    found = []
    for device in ("cpu", "cuda"):
        alloc = sgalloc.KVAllocator(60, PS, 8, 20 * PS, device=device, prefix_cache=True)
        (seed,) = alloc.open()
        alloc.extend(seed, 4 * PS)
        alloc.release(seed, tokens=[np.arange(4 * PS)])
        match = alloc.prefix.match(np.arange(3 * PS))
        h = alloc.preallocate([15, 13, 30, 9], 2, [match, None, match, None], [None, 5, 9, None])
        for at, writer in ((0, 0), (0, 1), (2, 1), (3, 0)):
            alloc.acknowledge(h[at], writer)
        alloc.abort(h[3])
        reclaimed = alloc.reclaim(6).tolist()
        alloc.decode(h[0], 3)
        alloc.check(device=True)
        rows = alloc.rows(h[[0, 2]])
        table = host(alloc.req_to_token)[rows, : 4 * PS].tolist()
        found.append((state(alloc), reclaimed, table))
    assert found[0] == found[1]
    assert found[0][1] == [h[1]]
