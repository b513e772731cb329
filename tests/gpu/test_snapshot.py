"""Snapshots and digests across devices: the same calls, the same bytes, tables written anew."""

from __future__ import annotations

import cupy
import pytest
from trust.walk import CONFIGS, Walk, make

import sgalloc


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_and_a_cpu_store_and_restore_alike(name: str) -> None:
    for seed, ps in ((1, 1), (2, 3), (3, 4)):
        host, gpu = Walk(make(name, ps), seed), Walk(make(name, ps, "cuda"), seed)
        for number in range(60):
            assert host.step() == gpu.step(), number
            assert host.alloc.digest() == gpu.alloc.digest(), number
        for walk in (host, gpu):
            walk.finish()
            walk.alloc.settle()
        data = gpu.alloc.snapshot()
        assert data == host.alloc.snapshot()
        moved = {device: sgalloc.KVAllocator.restore(data, device) for device in ("cpu", "cuda")}
        twins = [gpu]
        for device, alloc in moved.items():
            assert alloc.device.startswith(device) and alloc.digest() == gpu.alloc.digest()
            alloc.check(device=True)
            twins.append(gpu.twin(alloc))
        for row in gpu.alloc._ledger.live().tolist():
            count = int(gpu.alloc._ledger.allocated[row]) // ps
            written = cupy.asnumpy(moved["cuda"].page_table)[row, :count]
            assert written.tolist() == gpu.alloc._ledger.page_list(row).tolist()
        for number in range(40):
            first, *others = [walk.step() for walk in twins]
            assert others == [first] * 2, number
        assert len({walk.alloc.digest() for walk in twins}) == 1
        for walk in twins:
            walk.alloc.check(device=True)


def test_pages_of_many_rows_are_written_in_several_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sgalloc.trust.rebuild._PAGES_AT_ONCE", 7)
    for name in CONFIGS:
        walk = Walk(make(name, 2, "cuda", roomy=True), 4)
        for _ in range(80):
            walk.step()
        walk.finish()
        walk.alloc.settle()
        restored = sgalloc.KVAllocator.restore(walk.alloc.snapshot(), "cuda")
        restored.check(device=True)


def test_a_staged_step_is_refused_unless_told_otherwise() -> None:
    alloc = sgalloc.KVAllocator(32, 4, 4, 40, device="cuda")
    x = alloc.open(2)
    update = alloc.captured(8)
    plain = alloc.snapshot()
    update.stage(alloc.plan(extend=(x, 9)))
    with pytest.raises(sgalloc.WrongState, match="staged"):
        alloc.snapshot()
    data = alloc.snapshot(assume_done=True)
    restored = sgalloc.KVAllocator.restore(data, "cuda")
    restored.check(device=True)
    assert restored.digest() == alloc.digest()
    update.launch()
    cupy.cuda.Device().synchronize()
    refused = sgalloc.KVAllocator.restore(alloc.snapshot(), "cpu")
    assert refused.digest() == restored.digest()
    assert refused.stats().refusals["WrongState"] == 1
    assert plain != data


def test_what_a_receiving_request_waits_for_is_the_write_of_the_restored_table() -> None:
    alloc = sgalloc.KVAllocator(32, 4, 4, 40, device="cuda")
    (handle,) = alloc.preallocate([9], 2).tolist()
    restored = sgalloc.KVAllocator.restore(alloc.snapshot(), "cuda")
    ready = restored.receiving(handle).ready
    ready.wait()
    ready.synchronize()
    assert ready.query()
    assert restored.acknowledge(handle, 0) and restored.acknowledge(handle, 1)
    assert restored.committed(handle).tolist() == [9]
    restored.check(device=True)
