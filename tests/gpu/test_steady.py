"""What a step costs after `warm()`: launches and copies are counted, and nothing else happens.

No compile, no allocation, no wait for the GPU, whatever the size of the step; nothing at all
where there is nothing to do.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.naive import NaiveTables
from gpu.spy import Spy, device_allocations
from gpu.twins import host
from gpu.verbs import VERBS, World

import sgalloc
from sgalloc.device import kernels


class Budget:
    """What was spent inside `spending`."""

    def __init__(self) -> None:
        self.launches = -1
        self.copies = -1


@contextmanager
def spending(alloc: sgalloc.KVAllocator, spy: Spy, torch: Any) -> Iterator[Budget]:
    """Count launches and copies inside, and hold all else to be none.

    The device's own counts are compared with what really reached CUDA.
    """
    device = alloc._core.device
    pool = cupy.get_default_memory_pool()
    budget = Budget()
    gc.collect()  # allocators of earlier tests give their memory back now, not inside
    torch.cuda.synchronize()
    staging, compiled = alloc.stats().staging, kernels.compiled()
    memory = (pool.used_bytes(), pool.total_bytes())
    of_torch = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    mode = torch.cuda.get_sync_debug_mode()
    own = (device.launches, device.copies)
    spy.calls.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with device_allocations() as sizes:
            yield budget
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert spy.waits == {}, "a step waited for the GPU"
    assert spy.never == {}
    assert sizes == [], "a step allocated device memory"
    assert (pool.used_bytes(), pool.total_bytes()) == memory
    assert torch.cuda.memory_stats().get("allocation.all.allocated", 0) == of_torch
    assert alloc.stats().staging == staging, "a step allocated staging memory, or waited for it"
    assert kernels.compiled() == compiled, "a step looked a kernel up for the first time"
    budget.launches, budget.copies = device.launches - own[0], device.copies - own[1]
    assert (budget.launches, budget.copies) == (spy.launches, spy.copies)


@pytest.mark.parametrize("stream", [None, "plan"], ids=["one stream", "plan stream"])
@pytest.mark.parametrize("verb", [name for name in VERBS if name != "slots"])
def test_what_a_verb_costs(verb: str, stream: str | None, spy: Spy, torch: Any) -> None:
    world = World(stream=stream)
    with spending(world.alloc, spy, torch) as budget:
        VERBS[verb].call(world)
    assert (budget.launches, budget.copies) == (VERBS[verb].launches, VERBS[verb].copies)
    world.verify()


def test_slots_without_out_allocates_its_result_alone(spy: Spy) -> None:
    world = World()
    spy.calls.clear()
    with device_allocations() as sizes:
        found = world.alloc.slots(world.edge, 0, 3)
    assert sizes == [found.nbytes] == [48]
    assert (spy.launches, spy.copies, spy.waits) == (1, 0, {})


@pytest.mark.parametrize("ps", [1, 16])
def test_every_batch_size(ps: int, spy: Spy, torch: Any) -> None:
    """1 to 512 requests, each of which needs a page: one launch and at most one copy."""
    most = 512
    alloc = sgalloc.KVAllocator(700_000, ps, most, 1100 * ps, device="cuda", page_table=True)
    alloc.warm()
    h = alloc.open(most)
    out = cupy.empty(most * ps, cupy.int64)
    batches = [alloc.batch(h[:n]) for n in range(1, most + 1)]
    alloc.extend(h, ps)
    for batch in batches:
        n = len(batch)
        with spending(alloc, spy, torch) as budget:
            assert alloc.decode(batch, ps, out=out[: n * ps]).num_new_pages == n
        assert budget.launches == 1 and budget.copies <= 1, n
    for n, batch in enumerate(batches, 1):
        room = int((alloc.allocated(batch) - alloc.committed(batch)).min())
        with spending(alloc, spy, torch) as budget:
            assert alloc.reserve(batch, room + ps).num_new_pages >= 1
        assert budget.launches == 1 and budget.copies <= 1, n
        with spending(alloc, spy, torch) as budget:
            assert alloc.reserve(batch, room).num_new_pages == 0
            alloc.commit(batch, 0)
        assert budget.launches == budget.copies == 0, n
    runtime.deviceSynchronize()
    alloc.check(device=True)


TOKENS = (1, 17, 1_000, 32_000, 100_000, 1_100_000)


@pytest.mark.parametrize("with_out", [False, True], ids=["plain", "with out"])
@pytest.mark.parametrize("ps", [1, 16])
def test_extends_of_every_length(ps: int, with_out: bool, spy: Spy, torch: Any) -> None:
    alloc = sgalloc.KVAllocator(2_600_000 // ps, ps, 3, 1_200_000 // ps * ps, device="cuda")
    alloc.warm()
    h = alloc.open(3).tolist()
    outs = [cupy.empty(tokens, cupy.int32) if with_out else None for tokens in TOKENS]
    for tokens, out in zip(TOKENS, outs, strict=True):
        with spending(alloc, spy, torch) as budget:
            alloc.extend(h[0], tokens, out=out)
        assert budget.launches == 1 and budget.copies <= 1, tokens
        if out is not None:
            assert np.array_equal(host(out), host(alloc.req_to_token[1, :tokens]))
        with spending(alloc, spy, torch) as budget:
            alloc.trim(h[0], 0)
        assert budget.launches == budget.copies == 0
    with spending(alloc, spy, torch) as budget:
        alloc.reserve(h[1:], 1_100_000, rounding="device")
    assert budget.launches == budget.copies == 1
    alloc.check(device=True)


@pytest.mark.parametrize("rounding", ["host", "device", "auto"])
def test_a_batch_larger_than_the_small_slots(rounding: str, spy: Spy, torch: Any) -> None:
    alloc = sgalloc.KVAllocator(80_000, 4, 5000, 64, device="cuda")
    alloc.warm(80_000)
    batch = alloc.batch(alloc.open(5000))
    alloc.extend(batch, 3)
    for tokens in (9, 14):
        with spending(alloc, spy, torch) as budget:
            assert alloc.reserve(batch, tokens, rounding=rounding).num_new_pages >= 5000
        assert budget.launches == 1 and budget.copies <= 1
    naive = NaiveTables(5000, 64, 4)
    naive.write(alloc, batch.handles)
    assert np.array_equal(host(alloc.req_to_token), naive.table)


def test_nothing_to_do_launches_nothing(spy: Spy, torch: Any) -> None:
    world = World()
    alloc, empty = world.alloc, cupy.empty(0, cupy.int32)
    calls = [
        lambda: alloc.open(0),
        lambda: alloc.open_with_prefix([]),
        lambda: alloc.extend([], []),
        lambda: alloc.extend(world.edge, 12),
        lambda: alloc.extend([], 5, out=empty),
        lambda: alloc.decode([]),
        lambda: alloc.decode(world.batch, 0),
        lambda: alloc.decode(world.batch, 0, out=empty),
        lambda: alloc.reserve([], 16),
        lambda: alloc.reserve([], 16, rounding="device"),
        lambda: alloc.reserve(world.batch, 0),
        lambda: alloc.reserve(world.inside, 3),
        lambda: alloc.reserve(world.inside, [0, 1, 2, 3]),
        lambda: alloc.reserve(world.inside, 3, rounding="device"),
        lambda: alloc.reserve(world.inside, [0, 1, 2, 3], rounding="device"),
        lambda: alloc.reserve(world.batch, 0, rounding="device"),
        lambda: alloc.commit([], []),
        lambda: alloc.commit(world.batch, 0),
        lambda: alloc.trim([], 3),
        lambda: alloc.trim(world.batch, 12),
        lambda: alloc.release([]),
        lambda: alloc.slots([], 0, 0, out=empty),
        lambda: alloc.slots(world.edge, 5, 5, out=empty),
        lambda: alloc.apply(alloc.plan()),
        lambda: alloc.apply(alloc.plan(decode=([], 1), reserve=(world.inside, 2))),
        lambda: alloc.prefix.publish([], []),
        lambda: alloc.prefix.publish(world.sharing, [1, 2]),
    ]
    for call in calls:
        with spending(alloc, spy, torch) as budget:
            call()
        assert (budget.launches, budget.copies) == (0, 0)
    world.verify()


@pytest.mark.parametrize("each", [False, True], ids=["one reserve", "one each"])
@pytest.mark.parametrize("growing", [None, 0, 63, 64, 65, 4999])
def test_rounding_on_the_device_launches_where_a_request_grows(
    growing: int | None, each: bool, spy: Spy, torch: Any
) -> None:
    """Wherever in the batch that stands: none at all is needed for a batch that has its pages."""
    alloc = sgalloc.KVAllocator(20_000, 4, 5000, 64, device="cuda", prefix_cache=True)
    alloc.warm(20_000)
    batch = alloc.batch(alloc.open(5000))
    alloc.extend(batch, 5)
    if growing is not None:
        alloc.extend(batch.handles[growing], 6)
    tokens = np.full(5000, 3) if each else 3
    with spending(alloc, spy, torch) as budget:
        plan = alloc.reserve(batch, tokens, rounding="device")
    needed = growing is not None
    assert plan.num_new_pages == needed
    assert (budget.launches, budget.copies) == (needed, needed)
    with spending(alloc, spy, torch) as budget:
        assert alloc.reserve(batch, tokens, rounding="device").num_new_pages == 0
    assert (budget.launches, budget.copies) == (0, 0)
    naive = NaiveTables(5000, 64, 4)
    naive.write(alloc, batch.handles)
    assert np.array_equal(host(alloc.req_to_token), naive.table)


def test_a_decode_loop_stays_the_same(spy: Spy, torch: Any) -> None:
    """A thousand steps with requests coming and going: nothing grows, one launch a step."""
    alloc = sgalloc.KVAllocator(6000, 16, 64, 1024, device="cuda", stream="plan")
    alloc.warm(1024)
    h = alloc.open(48).tolist()
    alloc.extend(h, 100)
    rng = np.random.default_rng(0)
    needy = 0
    # A step is read from mapped memory, and a slot of its own comes round once it is done.
    with spending(alloc, spy, torch) as budget:
        for step in range(1000):
            plan = alloc.reserve(h, 16)
            needy += plan.num_new_pages > 0
            alloc.commit(h, rng.integers(0, 8, len(h)))
            if step % 10 == 9:
                done = [x for x in h if alloc.committed(x)[0] > 900] or h[:1]
                alloc.release(done)
                h = [x for x in h if x not in done]
                fresh = alloc.open(len(done)).tolist()
                alloc.extend(fresh, rng.integers(1, 200, len(done)))
                needy += 1
                h += fresh
            if step % 8 == 7:
                # Waited for by the test's own choice: the ring has sixteen slots.
                while not plan.ready.query():
                    pass
    assert budget.launches == needy and budget.copies == 0
    assert 0 < needy < 1100
    alloc.check(device=True)


def test_warm_a_second_time_costs_nothing(spy: Spy) -> None:
    alloc = sgalloc.KVAllocator(600, 16, 8, 640, device="cuda")
    alloc.warm(600)
    staging, compiled = alloc.stats().staging, kernels.compiled()
    spy.calls.clear()
    with device_allocations() as sizes:
        alloc.warm(600)
        alloc.warm(10)
    assert sizes == [] and alloc.stats().staging == staging
    assert (kernels.compiled(), spy.launches, spy.calls["compile"]) == (compiled, 0, 0)


def test_another_allocator_compiles_nothing(spy: Spy) -> None:
    """There is no variant for a page size, a width or a batch."""
    World()
    compiled = kernels.compiled()
    spy.calls.clear()
    for ps in (1, 2, 3, 16, 24, 128):
        alloc = sgalloc.KVAllocator(4000, ps, 10, 300 * ps + 1, device="cuda", page_table=ps != 3)
        alloc.warm(4000)
        h = alloc.open(10)
        alloc.extend(h, 200 * ps)
        alloc.reserve(h, 9, rounding="device")
        tables = alloc.page_tables(10, 200)
        tables.update(h, 1)
        runtime.deviceSynchronize()
    assert kernels.compiled() == compiled and spy.calls["compile"] == 0


# -- a process of its own ------------------------------------------------------------------------

FORKED = """
import os, sys
import sgalloc
loaded = [name for name in ("cupy", "torch", "cuda") if name in sys.modules]
assert not loaded, f"importing sgalloc imported {loaded}"

def work():
    alloc = sgalloc.KVAllocator(100, 16, 4, 320, device="cuda")
    h = alloc.open(3)
    alloc.extend(h, [5, 100, 33])
    alloc.reserve(h, 20)
    alloc.check(device=True)
    alloc.release(h)
    assert alloc.available() == 100

child = os.fork()
if child == 0:
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child could not work"
work()
print("passed")
"""


def test_import_fork_use(tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """Import alone touches no GPU, so a child of a fork may use one, and the parent, too."""
    root = request.path.parents[2]
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr[-2000:]
