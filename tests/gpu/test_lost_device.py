"""A GPU that is lost, and one that only says no: each in a process of its own.

A kernel that writes to an illegal address ends the context of its process. From then on the next
verb of the allocator says so once, whatever writes a table is refused, and the host goes on: it
answers, takes back, and its snapshot restores on the CPU with the same digest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import sys
import time
import numpy as np
import cupy
from cupy.cuda import runtime
import sgalloc

def refused(call):
    try:
        call()
    except sgalloc.DeviceFailed as failure:
        return failure
    sys.exit("it went through")

def broken(wait=True):
    # Far from any allocation.
    cupy.RawKernel(r'''
    extern "C" __global__ void broken(int* where) { where[threadIdx.x] = 1; }
    ''', "broken")((1,), (32,), (np.uint64(0x10),))
    try:
        if wait:
            runtime.deviceSynchronize()
    except runtime.CUDARuntimeError:
        pass

window = sgalloc.SlidingWindow(32, 8000, slot_map=True)
alloc = sgalloc.KVAllocator(
    8000, 16, 32, 4096, device="cuda", window=window, prefix_cache=True, **HOW
)
alloc.warm(4096)
h = alloc.open(8).tolist()
plan = alloc.extend(h, [100, 40, 16, 7, 300, 33, 500, 64])
received = int(alloc.preallocate([90], 2)[0])
alloc.check(device=True)
"""

LOST = {
    "the next step": """
broken()
first = refused(lambda: alloc.extend(h[0], 200))
assert "while writing 6 pages of row" in str(first) and "plan version" in str(first), first
""",
    "some step": """
broken(wait=False)
# How soon CUDA tells is its own matter.
first = refused(lambda: [(alloc.decode(h[1]), time.sleep(0.001)) for _ in range(3000)])
""",
    "a copied step": """
broken()
first = refused(lambda: alloc.extend(h[:6], 4000))
""",
    "rounding on the device": """
plain = sgalloc.KVAllocator(1000, 16, 8, 1024, device="cuda")
plain.warm(256)
g = plain.open(4)
broken()
first = refused(lambda: plain.reserve(g, 64, rounding="device"))
assert "rounding reserves" in str(first) and first.lost, first
first = refused(lambda: alloc.extend(h[0], 200))
""",
    "slots": """
broken()
first = refused(lambda: alloc.slots(h[0], 0, 50))
""",
    "an event of CuPy's that is polled": """
event = cupy.cuda.Event(disable_timing=True)
event.record()
broken()
alloc.release(h[7], after=event)
assert alloc.stats().rows.quarantined == 0
first = refused(lambda: alloc.extend(h[0], 200))
h[7] = alloc.open().tolist()[0]
""",
    "an event of torch's that is polled": """
try:
    import torch
    assert torch.cuda.is_available()
except (ImportError, AssertionError):
    print("passed")
    sys.exit()
event = torch.cuda.Event()
event.record()
broken()
alloc.release(h[7], after=event)
assert alloc.stats().rows.quarantined == 0
first = refused(lambda: alloc.extend(h[0], 200))
h[7] = alloc.open().tolist()[0]
""",
    "an update that was staged": """
update = alloc.captured(400)
update.stage(alloc.plan(extend=(h[3], 100)))
broken()
first = refused(lambda: alloc.extend(h[0], 200))
alloc.release(h[3])
h[3] = alloc.open().tolist()[0]
refused(lambda: update.stage(alloc.plan(extend=(h[0], 1000))))
""",
}

AFTERWARDS = """
assert first.lost and "illegal memory access" in first.cause, first
assert "snapshot(assume_done=True)" in str(first)
print(first, file=sys.stderr)
alloc.settle()
before = alloc.digest()
for call in (
    lambda: alloc.extend(h[0], 2500), lambda: alloc.decode(h, 64), lambda: alloc.reserve(h, 64),
    lambda: alloc.slots(h[0], 0, 1), lambda: alloc.preallocate([9]), lambda: alloc.captured(8),
    lambda: alloc.check(device=True), lambda: alloc.warm(1 << 23), lambda: alloc.page_tables(2, 2),
    lambda: alloc.evict_window(h[6], upto=160),
):
    again = refused(call)
    assert (again.cause, again.step) == (first.cause, first.step) and "had failed" in str(again)
assert alloc.digest() == before
alloc.check()
assert alloc.committed(h).size == 8 and alloc.pages(h[4]).size == 19 and alloc.fits([10])
data = alloc.snapshot(assume_done=True)
restored = sgalloc.KVAllocator.restore(data, device="cpu")
assert restored.digest() == before
restored.check(device=True)
restored.extend(h[0], 2500)
alloc.commit(h[6], 0)
alloc.trim(h[4], 5, after=plan.ready)
alloc.release(h[1], tokens=[list(range(40))], after=plan.ready)
alloc.acknowledge(received, 0)
alloc.abort(received)
alloc.acknowledge(received, 1)
alloc.abort([h[0], h[2]], force=True)
alloc.release([h[n] for n in (3, 4, 5, 6, 7)])
alloc.prefix.clear()
alloc.check()
assert all(group.free == group.total for group in alloc.stats().groups.values())
assert alloc.stats().rows.free == 32
print("passed", flush=True)
"""

RECOVERS = {
    "a grid that is too large": """
device = alloc._core.device
real = device.geometry.blocks
device.geometry.blocks = lambda *_: 1 << 31
device._small = sgalloc.device.staging.Ring(lambda _: device._make_small(False), 4, 8)
""",
    "no device memory": """
pool = cupy.cuda.MemoryPool()
cupy.cuda.set_allocator(pool.malloc)
pool.set_limit(size=1)
""",
}

SAYS_NO = """
import sgalloc.device.staging
before, state = alloc.digest(), alloc.stats()
{cause}
for call in ({calls}):
    failure = refused(call)
    assert not failure.lost and "call again" in str(failure), failure
    assert alloc.digest() == before
    alloc.check()
    print(failure, file=sys.stderr)
{cure}
alloc.check(device=True)
for call in ({calls}):
    call()
alloc.check(device=True)
print("passed")
"""

SMALL_STEP = "lambda: alloc.extend(h[0], 200)"
ALLOCATING = "lambda: alloc.slots(h[0], 0, 50), lambda: alloc.page_tables(64, 64)"
ALLOCATING += ", lambda: alloc.extend(h[0], 4000) if not alloc.warm(1 << 23) else None"
NO = {
    "a grid that is too large": (RECOVERS["a grid that is too large"], SMALL_STEP, """
device.geometry.blocks = real
"""),
    "no device memory": (RECOVERS["no device memory"], ALLOCATING, """
pool.set_limit(size=0)
"""),
}  # fmt: skip


def run(source: str, how: str, folder: Path, tests: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", source.replace("**HOW", f"**{how}")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def assert_passed(source: str, how: str, folder: Path, request: Any) -> None:
    done = run(source, how, folder, request.path.parents[1])
    assert done.stdout.strip() == "passed", done.stderr[-3000:]


@pytest.mark.parametrize("how", ["{}", "{'stream': 'plan'}"], ids=["current", "plan stream"])
@pytest.mark.parametrize("found", LOST)
def test_a_lost_gpu_leaves_the_host(
    found: str, how: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert_passed(HEAD + LOST[found] + AFTERWARDS, how, tmp_path, request)


@pytest.mark.parametrize("cause", NO)
def test_what_cuda_refuses_once_goes_through_afterwards(
    cause: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    begin, calls, cure = NO[cause]
    source = HEAD + SAYS_NO.format(cause=begin, calls=calls + ",", cure=cure)
    assert_passed(source, "{}", tmp_path, request)
