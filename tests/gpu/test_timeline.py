"""Timelines on a GPU: device spans are in order, take time, and nothing waits between."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cupy
import pytest
from gpu.spy import Spy

import sgalloc
from sgalloc import timeline


def make() -> Any:
    alloc = sgalloc.KVAllocator(1 << 18, 16, 4096, 4096, device="cuda")
    alloc.warm()
    b = alloc.batch(alloc.open(4096))
    alloc.extend(b, 160)
    cupy.cuda.runtime.deviceSynchronize()
    return alloc, b


def steps(alloc: Any, b: Any) -> None:
    alloc.reserve(b.handles[:8], 64)  # few pages, which a graph reads from mapped memory
    for _ in range(20):
        alloc.reserve(b, 16)
        alloc.commit(b, 4)
    alloc.extend(b, 700)  # too large for mapped memory, so it is copied


def test_spans_of_the_device_are_in_order_and_take_time() -> None:
    alloc, b = make()
    device = alloc._core.device
    before = device.launches + device.copies
    with timeline.record(alloc) as recording:
        steps(alloc, b)
    spans = [e for e in recording.events() if e["ph"] == "X" and e["pid"] == 2]
    assert len(spans) == device.launches + device.copies - before
    assert {"write (graph)", "copy", "write"} <= {span["name"] for span in spans}
    assert all(span["dur"] > 0.5 for span in spans), "a launch takes a microsecond or more"
    by_track: dict[int, list[Any]] = {}
    for span in spans:
        by_track.setdefault(span["tid"], []).append(span)
    for track in by_track.values():
        for one, following in pairwise(track):
            # Events tell the time in steps of half a microsecond.
            assert following["ts"] >= one["ts"] + one["dur"] - 1.5
    asked = {e["id"]: e["ts"] for e in recording.events() if e["ph"] == "s"}
    begun = {e["id"]: e["ts"] for e in recording.events() if e["ph"] == "f"}
    slack = recording.document()["otherData"]["device_clock_uncertainty_us"] + 5
    assert all(begun[n] >= asked[n] - slack for n in asked), "work begins after it is asked for"
    alloc.check(device=True)


def test_a_recorded_step_waits_for_nothing(spy: Spy) -> None:
    alloc, b = make()
    with timeline.record(alloc):
        spy.calls.clear()
        steps(alloc, b)
        assert spy.waits == {} and spy.never == {}
    spy.calls.clear()
    alloc.reserve(b, 64)
    assert spy.launches == 1 and spy.waits == {}


def test_torchs_profiler_sees_ranges_and_kernels_together(torch: Any) -> None:
    alloc, b = make()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        timeline.torch_ranges(alloc),
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
    ):
        steps(alloc, b)
        torch.cuda.synchronize()
    names = {one.name for one in profile.events()}
    assert {"sgalloc.reserve", "sgalloc.write", "sgalloc.launch"} <= names
    kernels = [name for name in names if name.startswith("assign_")]
    if not kernels:
        pytest.skip("this machine does not let torch see kernels (CUPTI is not permitted)")
    assert {"assign_mapped", "assign_pages"} <= set(kernels)
