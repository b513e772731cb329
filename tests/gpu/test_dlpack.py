"""torch and CuPy share the tables without a copy, and hand in the arrays that receive slots."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.currents import STREAMS
from gpu.latch import Latches
from gpu.naive import exported, gathered
from gpu.spy import Spy, device_allocations
from gpu.twins import host
from gpu.verbs import World

import sgalloc

PS = 16


def make(**how: Any) -> sgalloc.KVAllocator:
    alloc = sgalloc.KVAllocator(600, PS, 12, 40 * PS, device="cuda", page_table=True, **how)
    alloc.warm(256)
    return alloc


@pytest.fixture
def refuses_hidden_waits(torch: Any) -> Any:
    """torch raises where one of its operations would wait for the GPU unseen."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


# -- exported tables -----------------------------------------------------------------------------


def test_torch_shares_the_memory_of_the_tables(torch: Any) -> None:
    alloc = make()
    tables = alloc.page_tables(4, 8)
    shared = {
        "req_to_token": alloc.req_to_token,
        "page_table": alloc.page_table,
        "exported": tables.page_table,
        "indptr": tables.indptr,
        "indices": tables.indices,
        "last_page_len": tables.last_page_len,
    }
    with device_allocations() as sizes:
        views = {name: torch.from_dlpack(array) for name, array in shared.items()}
    assert sizes == [], "an export is no copy"
    for name, array in shared.items():
        view = views[name]
        assert view.data_ptr() == array.data.ptr, name
        assert tuple(view.shape) == array.shape and view.dtype == torch.int32
    h = alloc.open(3).tolist()
    alloc.extend(h, [5, 40, 100])
    tables.update(h)
    torch.cuda.synchronize()
    table = host(views["req_to_token"])
    assert np.array_equal(table, host(alloc.req_to_token))
    assert table[2, :40].tolist() == gathered(alloc, [h[1]], 0, 40).tolist()
    expected = exported(alloc, h, [5, 40, 100], 8)
    assert np.array_equal(host(views["exported"])[:3], expected.page_table)
    assert np.array_equal(host(views["indices"])[: expected.indptr[-1]], expected.indices)
    assert np.array_equal(host(views["indptr"])[:4], expected.indptr)
    assert np.array_equal(host(views["last_page_len"])[:3], expected.last_page_len)


@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_view_outlives_the_allocator(stream: str, torch: Any) -> None:
    alloc = make(stream=STREAMS[stream]([]))
    h = alloc.open(3).tolist()
    alloc.extend(h, [7, 100, 333]).ready.wait()
    view = torch.from_dlpack(alloc.req_to_token)
    expected = host(alloc.req_to_token)
    del alloc
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    # Whoever is given the memory next, if it went back, writes over it.
    takers = [cupy.full(expected.shape, -9, cupy.int32) for _ in range(8)]
    runtime.deviceSynchronize()
    assert np.array_equal(host(view), expected)
    assert all((host(taker) == -9).all() for taker in takers)


def test_the_allocator_outlives_a_view(torch: Any) -> None:
    alloc = make()
    (h,) = alloc.open().tolist()
    for _ in range(3):
        view = torch.from_dlpack(alloc.req_to_token)
        alloc.extend(h, int(alloc.committed(h)[0]) + 20)
        assert host(view)[1, :20].tolist() == gathered(alloc, [h], 0, 20).tolist()
        del view
        gc.collect()
    alloc.check(device=True)


@pytest.mark.parametrize("stream", ["plan", "raw", "torch"])
def test_exported_once_and_ordered_by_ready_each_step(
    stream: str, torch: Any, latches: Latches
) -> None:
    """The write is held up each time; a consumer that waits for ``ready`` sees it done."""
    keep: list[Any] = []
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        alloc = make(stream=STREAMS[stream](keep))
        view = torch.from_dlpack(alloc.req_to_token)
        h = alloc.open(4).tolist()
        seen = [torch.zeros_like(view) for _ in range(12)]
        torch.cuda.synchronize()
        expected = []
        for step in range(12):
            latch = latches.hold(int(producer.cuda_stream))
            plan = alloc.extend(h, alloc.committed(h) + 5 * (1 + step % 4))
            plan.ready.wait(consumer)
            with torch.cuda.stream(consumer):
                seen[step].copy_(view)
            expected.append(gathered(alloc, h, 0, alloc.allocated(h)))
            # The next step must not overtake the consumer, whom nobody has named so far.
            producer.wait_stream(consumer)
            latches.let_the_rest_run()
            assert latch.held
            latch.open()
            torch.cuda.synchronize()
        for copy, slots in zip(seen, expected, strict=True):
            table, at = host(copy), 0
            for row in alloc.rows(h).tolist():
                share = slots.size // 4
                assert np.array_equal(table[row, :share], slots[at : at + share])
                at += share


# -- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_torch_tensors_receive_slots(dtype: str, torch: Any, refuses_hidden_waits: None) -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    kind = getattr(torch, dtype)

    def out(size: int) -> Any:
        return torch.empty(size, dtype=kind, device="cuda")

    outs = [(out(39), h, [0, 0, 0], [17, 2, 20])]
    alloc.extend(h, [17, 2, 20], out=outs[0][0])
    outs.append((out(3), h, [17, 2, 20], [18, 3, 21]))
    alloc.decode(h, out=outs[1][0])
    outs.append((out(30), h, [18, 3, 21], [28, 13, 31]))
    alloc.reserve(h, 10, out=outs[2][0])
    plan = alloc.plan(extend=(h[:1], [30]), reserve=(h[1:], [5, 40]))
    outs.append((out(57), h, [18, 3, 21], [30, 8, 61]))
    alloc.apply(plan, out=outs[3][0])
    slots = out(9)
    assert alloc.slots(h, 4, 7, out=slots) is slots
    outs.append((slots, h, [4, 4, 4], [7, 7, 7]))
    torch.cuda.set_sync_debug_mode("default")
    for tensor, handles, start, stop in outs:
        assert tensor.dtype == kind
        assert host(tensor).tolist() == gathered(alloc, handles, start, stop).tolist()


def test_a_part_of_a_tensor_receives_slots(torch: Any) -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    whole = torch.full((20,), -1, dtype=torch.int64, device="cuda")
    alloc.extend(h, 3, out=whole[5:11])
    expected = [-1] * 5 + gathered(alloc, h, 0, 3).tolist() + [-1] * 9
    assert host(whole).tolist() == expected


def _tensor(torch: Any, size: int, dtype: str, device: str = "cuda") -> Any:
    return torch.empty(size, dtype=getattr(torch, dtype), device=device)


WRONG_OUT: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too short": (lambda torch: _tensor(torch, 5, "int32"), ValueError, "shape"),
    "too long": (lambda torch: cupy.empty(7, cupy.int32), ValueError, "shape"),
    "two dimensions": (lambda torch: cupy.empty((2, 3), cupy.int32), ValueError, "shape"),
    "every second": (lambda torch: cupy.empty(12, cupy.int32)[::2], ValueError, "contiguous"),
    "floats": (lambda torch: _tensor(torch, 6, "float32"), TypeError, "int32"),
    "int8": (lambda torch: cupy.empty(6, cupy.int8), TypeError, "int32"),
    "unsigned": (lambda torch: cupy.empty(6, cupy.uint32), TypeError, "int32"),
    "a NumPy array": (lambda torch: np.empty(6, np.int32), TypeError, "cuda"),
    "a tensor on the CPU": (lambda torch: _tensor(torch, 6, "int32", "cpu"), TypeError, "cuda"),
    "a list": (lambda torch: [0] * 6, TypeError, "cuda"),
    "a number": (lambda torch: 6, TypeError, "cuda"),
}


@pytest.mark.parametrize("wrong", WRONG_OUT)
def test_an_out_that_cannot_receive_is_refused(wrong: str, torch: Any) -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    alloc.extend(h, 2)
    make_out, error, match = WRONG_OUT[wrong]
    out = make_out(torch)
    device = alloc._core.device
    before, table = device.launches, host(alloc.req_to_token)
    for call in (
        lambda: alloc.extend(h, 4, out=out),
        lambda: alloc.decode(h, 2, out=out),
        lambda: alloc.reserve(h, 2, out=out),
        lambda: alloc.apply(alloc.plan(decode=(h, 2)), out=out),
        lambda: alloc.slots(h, 0, 2, out=out),
    ):
        with pytest.raises(error, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert alloc.committed(h).tolist() == [2] * 3 and alloc.available() == 597
    assert device.launches == before
    assert np.array_equal(host(alloc.req_to_token), table)


# -- numbers on the host -------------------------------------------------------------------------


def on_device(library: str, torch: Any, values: Any) -> Any:
    if library == "torch":
        return torch.tensor(values, device="cuda")
    return cupy.asarray(values)


# Each is given a world and a function that puts numbers onto the GPU.
DEVICE_NUMBERS: dict[str, Callable[[World, Callable[[Any], Any]], Any]] = {
    "open": lambda w, d: w.alloc.open(d(2)),
    "handles of rows": lambda w, d: w.alloc.rows(d(w.edge)),
    "handles of a batch": lambda w, d: w.alloc.batch(d(w.edge)),
    "handles of decode": lambda w, d: w.alloc.decode(d(w.edge)),
    "one handle": lambda w, d: w.alloc.decode(d(int(w.edge[0]))),
    "lengths of extend": lambda w, d: w.alloc.extend(w.edge, d([20, 20, 20, 20])),
    "one length": lambda w, d: w.alloc.extend(w.edge, d(20)),
    "tokens of decode": lambda w, d: w.alloc.decode(w.edge, d([1, 2, 3, 4])),
    "reserve": lambda w, d: w.alloc.reserve(w.edge, d([1, 2, 3, 4])),
    "reserve on the device": lambda w, d: w.alloc.reserve(w.edge, d(9), rounding="device"),
    "accepted": lambda w, d: w.alloc.commit(w.inside, d([1, 0, 1, 0])),
    "lengths of trim": lambda w, d: w.alloc.trim(w.inside, d([1, 2, 3, 4])),
    "handles of release": lambda w, d: w.alloc.release(d(w.spare)),
    "tokens of release": lambda w, d: w.alloc.release(w.spare, tokens=[d([1, 2]), d([3, 4])]),
    "start of slots": lambda w, d: w.alloc.slots(w.edge, d([0, 1, 2, 3]), 4),
    "stop of slots": lambda w, d: w.alloc.slots(w.edge, 0, d(3)),
    "start of pages": lambda w, d: w.alloc.pages(int(w.edge[0]), d(0)),
    "a part of a plan": lambda w, d: w.alloc.plan(decode=(w.edge, d([1, 1, 1, 1]))),
    "fits": lambda w, d: w.alloc.fits(d([100, 200])),
    "after releasing": lambda w, d: w.alloc.fits([100], after_releasing=d(w.spare)),
    "match": lambda w, d: w.alloc.prefix.match(d([0, 1, 2, 3, 4])),
    "publish": lambda w, d: w.alloc.prefix.publish(w.sharing, d(list(range(8)))),
    "exports": lambda w, d: w.tables.update(w.edge, d([1, 2, 3, 4])),
}


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("call", DEVICE_NUMBERS)
def test_a_device_array_is_no_host_number(
    call: str, library: str, torch: Any, spy: Spy, refuses_hidden_waits: None
) -> None:
    """A `TypeError` that says so; to read it would be a hidden copy that waits for the GPU."""
    world = World()
    alloc = world.alloc
    state = (alloc.stats(), alloc.owners().tolist(), alloc._core.device.launches)
    torch.cuda.set_sync_debug_mode("default")
    made = [on_device(library, torch, value) for value in ([1], 2)]  # both forms, warm
    del made
    torch.cuda.set_sync_debug_mode("error")

    def device(values: Any) -> Any:
        # torch copies what it is given behind a wait of its own.
        torch.cuda.set_sync_debug_mode("default")
        array = on_device(library, torch, np.asarray(values))
        torch.cuda.set_sync_debug_mode("error")
        spy.calls.clear()
        return array

    with pytest.raises(TypeError) as caught:
        DEVICE_NUMBERS[call](world, device)
    assert "\n" not in str(caught.value)
    assert "host" in str(caught.value) or "integer" in str(caught.value)
    assert spy.waits == {} and spy.copies == 0, "it was copied to the host all the same"
    assert state == (alloc.stats(), alloc.owners().tolist(), alloc._core.device.launches)
    torch.cuda.set_sync_debug_mode("default")
    world.verify()


def test_tensors_on_the_cpu_are_host_numbers(torch: Any) -> None:
    alloc = make()
    h = torch.from_numpy(alloc.open(3))
    alloc.extend(h, torch.tensor([5, 17, 33]))
    alloc.decode(h, torch.tensor([1, 2, 3], dtype=torch.int32))
    assert alloc.committed(h).tolist() == [6, 19, 36]
    alloc.check(device=True)


# -- nothing piles up ----------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_ten_thousand_exchanges(torch: Any) -> None:
    alloc = make()
    h = alloc.open(4).tolist()
    alloc.extend(h, 5)
    tables = alloc.page_tables(4, 8)
    wide = torch.empty(4, dtype=torch.int64, device="cuda")
    narrow = cupy.empty(4, cupy.int32)
    pool = cupy.get_default_memory_pool()

    def exchange(times: int) -> None:
        for at in range(times):
            for array in (alloc.req_to_token, alloc.page_table, tables.indices):
                view = torch.from_dlpack(array)
            back = cupy.from_dlpack(view)
            alloc.slots(h, 1, 2, out=wide if at % 2 else narrow)
            alloc.slots(h, 1, 2, out=torch.from_dlpack(narrow))
            del view, back
            if at % 8 == 7:  # the staging ring has no reason to grow
                torch.cuda.synchronize()

    exchange(1000)
    torch.cuda.synchronize()
    gc.collect()
    before = (pool.used_bytes(), pool.total_bytes(), torch.cuda.memory_allocated())
    owners = sys.getrefcount(alloc.req_to_token)
    bytes_before, staging = resident(), alloc.stats().staging
    exchange(10_000)
    torch.cuda.synchronize()
    gc.collect()
    assert (pool.used_bytes(), pool.total_bytes(), torch.cuda.memory_allocated()) == before
    owners_after = sys.getrefcount(alloc.req_to_token)
    assert owners_after == owners
    # A leak of a hundred bytes in each of 50,000 exchanges would be 5 MB.
    assert resident() - bytes_before < 4_000_000
    assert alloc.stats().staging == staging
    assert host(wide).tolist() == host(narrow).tolist() == gathered(alloc, h, 1, 2).tolist()
