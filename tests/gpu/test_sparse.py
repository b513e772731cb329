"""Sparse allocators: the GPU's map is the CPU's, byte for byte, and a step is one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.latch import Latches, copy_entries
from gpu.spy import Spy
from gpu.twins import assert_same, host
from host_support import Query

import sgalloc

SIZES = [1, 2, 3, 16, 64]
REFUSALS = (sgalloc.AllocError, ValueError, TypeError)
VERBS = (
    "open", "extend", "logical_only", "decode", "decode", "reserve", "commit", "trim", "to_sparse",
    "to_sparse", "release", "mixed", "batch", "settle",
)  # fmt: skip


def make(device: str, ps: int, pages: int = 60, **more: Any) -> sgalloc.KVAllocator:
    """A buffer of three pages, and two of scratch."""
    settings = sgalloc.Sparse(3, 3 * ps, ps + 1)
    return sgalloc.KVAllocator(
        pages, ps, 8, 40 * ps + ps // 2, device=device, sparse=settings, page_table=True, **more
    )


class Twins:
    """The same calls on both; tables and maps are compared whole after each."""

    def __init__(self, ps: int, seed: int = 0, **on_gpu: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.cpu, self.gpu = make("cpu", ps), make("cuda", ps, **on_gpu)
        self.gpu.warm(1024)
        self.handles: list[int] = []
        self.events: list[Query] = []
        self.done: Counter[str] = Counter()

    def call(self, do: Callable[[sgalloc.KVAllocator], Any], most: int = 1) -> Any:
        """``do`` on both, in at most so many launches; None where both refused."""
        device = self.gpu._core.device
        before = device.launches
        results: list[Any] = []
        for alloc in (self.cpu, self.gpu):
            try:
                results.append(do(alloc))
            except REFUSALS as refusal:
                results.append(refusal)
        launched = device.launches - before
        cpu, gpu = results
        if isinstance(cpu, REFUSALS):
            assert (type(cpu), str(cpu)) == (type(gpu), str(gpu))
            assert launched == 0, "a refused call launched something"
            cpu = None
        else:
            assert_same(cpu, gpu)
            assert launched <= most
        self.compare()
        return cpu

    def compare(self) -> None:
        for name in ("req_to_token", "page_table", "logical_to_device"):
            ours, theirs = getattr(self.cpu, name), host(getattr(self.gpu, name))
            wrong = np.argwhere(ours != theirs)
            assert not wrong.size, f"{name} differs first at {wrong[0]}"
        ours, theirs = self.cpu.stats(), self.gpu.stats()
        assert (ours.groups, ours.rows) == (theirs.groups, theirs.rows)
        for handle in self.handles:
            for ask in ("device_pages", "buffer_pages", "scratch_pages"):
                assert getattr(self.cpu, ask)(handle).tolist() == (
                    getattr(self.gpu, ask)(handle).tolist()
                )

    def check(self) -> None:
        self.cpu.check(device=True)
        self.gpu.check(device=True)

    # -- a walk ----------------------------------------------------------------------------

    def some(self, most: int) -> list[int]:
        count = int(self.rng.integers(1, most + 1))
        return list(self.rng.permutation(self.handles)[:count].tolist())

    def tokens(self, count: int, pages: int) -> Any:
        return self.rng.integers(0, pages * self.cpu.page_size + 2, count)

    def event(self) -> Query | None:
        if self.rng.random() < 0.6:
            return None
        self.events.append(Query())
        return self.events[-1]

    def step(self, name: str) -> None:
        if not self.handles:
            name = "open"
        h = self.some(6) if self.handles else []
        at = self.cpu.committed(h)
        event = self.event() if name in ("trim", "to_sparse", "release") else None
        # What waited comes back first, in a launch of its own.
        self.call(lambda a: a.settle())
        did: Any = True
        if name == "open":
            opened = self.call(lambda a: a.open(2))
            self.handles += [] if opened is None else opened.tolist()
            did = opened
        elif name in ("extend", "logical_only"):
            lengths, only = at + self.tokens(len(h), 6), name == "logical_only"
            did = self.call(lambda a: a.extend(h, lengths, logical_only=only))
        elif name == "decode":
            count = 1 if self.rng.random() < 0.6 else self.tokens(len(h), 2)
            did = self.call(lambda a: a.decode(h, count))
        elif name == "batch":
            for _ in range(5):
                did = self.call(lambda a: a.decode(a.batch(h)))
        elif name == "reserve":
            count = self.tokens(len(h), 2)
            did = self.call(lambda a: a.reserve(h, count))
        elif name == "commit":
            accepted = self.rng.integers(0, self.cpu.allocated(h) - at + 1)
            self.call(lambda a: a.commit(h, accepted), most=0)
        elif name == "trim":
            lengths = self.rng.integers(0, at + 2)
            self.call(lambda a: a.trim(h, lengths, after=event))
        elif name == "to_sparse":
            h = [x for x in h if not self.cpu.buffer_pages(x).size]
            did = self.call(lambda a: (a.to_sparse(h, after=event), True)[1])
        elif name == "release":
            self.handles = [x for x in self.handles if x not in h[:2]]
            self.call(lambda a: a.release(h[:2], after=event))
        elif name == "mixed":
            did = self.mixed(h, at)
        elif self.events:
            self.events.pop(int(self.rng.integers(len(self.events)))).over = True
            self.call(lambda a: a.settle())
        self.done[name] += did is not None

    def mixed(self, h: list[int], at: Any) -> Any:
        cut = int(self.rng.integers(0, len(h) + 1))
        lengths, more = at[:cut] + self.tokens(cut, 3), self.tokens(len(h) - cut, 2)
        plans: list[sgalloc.Plan] = []

        def plan(alloc: sgalloc.KVAllocator) -> sgalloc.Plan:
            plans.append(alloc.plan(extend=(h[:cut], lengths), reserve=(h[cut:], more)))
            return plans[-1]

        if self.call(plan, most=0) is None:
            return None
        return self.call(lambda a: a.apply(plans[a is self.gpu]))

    def end(self) -> None:
        rest, self.handles = self.handles, []
        self.call(lambda a: a.release(rest))
        for event in self.events:
            event.over = True
        self.call(lambda a: a.settle())
        for alloc in (self.cpu, self.gpu):
            assert (alloc.available("logical"), alloc.available("device")) == (180, 60)
            assert not host(alloc.logical_to_device).any()
        self.check()


@pytest.mark.parametrize("stream", [None, "plan"])
@pytest.mark.parametrize("ps", SIZES)
def test_a_walk(ps: int, stream: str | None) -> None:
    done: Counter[str] = Counter()
    for seed in range(3):
        twins = Twins(ps, 100 * ps + seed, stream=stream)
        for name in twins.rng.choice(VERBS, 100).tolist():
            twins.step(name)
        twins.check()
        twins.end()
        done += twins.done
    assert all(done[name] > 5 for name in VERBS), done


@pytest.mark.parametrize("ps", [1, 16])
def test_a_walk_without_mapped_memory(ps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    twins = Twins(ps, ps)
    for name in twins.rng.choice(VERBS, 100).tolist():
        twins.step(name)
    twins.end()


@pytest.mark.parametrize("ps", [1, 16])
def test_each_step_is_one_launch_and_no_wait(ps: int, spy: Spy) -> None:
    """A prefill, to_sparse, and a step in which the newest page of every request moves."""
    alloc = make("cuda", ps)
    alloc.warm(1024)
    h = alloc.open(4)
    batch = alloc.batch(h)
    steps: list[tuple[Callable[[], Any], int]] = [
        (lambda: alloc.extend(batch, 6 * ps), 1),
        (lambda: alloc.to_sparse(batch), 1),
        (lambda: alloc.decode(batch), 1),
        (lambda: alloc.reserve(batch, 3 * ps), 1),
        (lambda: alloc.commit(batch, 2 * ps), 0),
        (lambda: alloc.reserve(batch, ps), 1),
        (lambda: alloc.reserve(batch, ps), 0),
        (lambda: alloc.trim(batch, 2 * ps), 1),
        (lambda: alloc.extend(batch, 2 * ps), 1),
        (lambda: alloc.release(batch), 1),
    ]
    for number, (call, launches) in enumerate(steps):
        spy.calls.clear()
        call()
        assert spy.launches == launches, number
        assert not spy.never and not spy.waits, number
    alloc.check(device=True)


def test_many_entries_at_once() -> None:
    """More pages than a small slot holds: they are copied, in one launch all the same."""
    cpu, gpu = (
        sgalloc.KVAllocator(6000, 1, 8, 3000, device=device, sparse=sgalloc.Sparse(2, 100, 3))
        for device in ("cpu", "cuda")
    )
    gpu.warm(4096)
    device = gpu._core.device
    h = cpu.open(2)
    assert gpu.open(2).tolist() == h.tolist()
    steps: list[Callable[[sgalloc.KVAllocator], Any]] = [
        lambda a: a.extend(h, [2500, 2600]),
        lambda a: a.to_sparse(h),
        lambda a: a.decode(h, 50),
        lambda a: a.extend(h, 2900),
        lambda a: a.trim(h, 40),
    ]
    for do in steps:
        before = device.launches
        do(cpu)
        do(gpu)
        assert device.launches == before + 1
        assert np.array_equal(host(gpu.logical_to_device), cpu.logical_to_device)
    gpu.check(device=True)


@pytest.mark.parametrize("stream", [None, "plan"])
def test_the_map_is_cleared_behind_the_event_of_the_copy(
    stream: str | None, latches: Latches
) -> None:
    """The copy out of a prefill still reads the map when `to_sparse` is called."""
    alloc = make("cuda", 4, stream=stream)
    alloc.warm(64)
    h = alloc.open()
    alloc.extend(h, 32)
    runtime.deviceSynchronize()
    old = host(alloc.logical_to_device)
    copying = cupy.cuda.Stream(non_blocking=True)
    seen = cupy.full(old.size, -1, cupy.int32)
    runtime.deviceSynchronize()
    latch = latches.hold(int(copying.ptr))
    copy_entries(alloc.logical_to_device.data.ptr, seen.data.ptr, old.size, int(copying.ptr))
    event = cupy.cuda.Event(disable_timing=True)
    event.record(copying)
    alloc.to_sparse(h, after=event)
    assert latch.held, "the call did not wait"
    assert alloc.stats().groups["device"].quarantined == 4
    latch.open()
    runtime.deviceSynchronize()
    assert np.array_equal(host(seen), old)
    assert alloc.stats().groups["device"].quarantined == 4
    alloc.settle()
    assert alloc.available("device") == 60 - 4 - 2
    alloc.check(device=True)


def test_an_update_in_a_graph_moves_the_map() -> None:
    """Steps without a new page, too: the page of the newest token moves, and that is written."""
    alloc = make("cuda", 4)
    alloc.warm(64)
    h = alloc.open(3)
    alloc.extend(h, [30, 9, 5])
    alloc.to_sparse(h)
    update = alloc.captured(32)
    side = cupy.cuda.Stream(non_blocking=True)
    side.begin_capture(runtime.streamCaptureModeGlobal)
    update.launch(stream=side)
    graph = side.end_capture()
    for step in range(30):
        update.stage(alloc.plan(decode=(h, 1)) if step % 3 else alloc.plan(reserve=(h, 6)))
        if step % 3 == 0:
            alloc.commit(h, 5)
        graph.launch(side)
        runtime.deviceSynchronize()
        alloc.check(device=True)


def test_a_step_that_only_moves_the_map_takes_a_place_in_the_ring() -> None:
    alloc = make("cuda", 4)
    alloc.warm(64)
    h = alloc.open(3)
    alloc.extend(h, 20)
    alloc.to_sparse(h)
    alloc.reserve(h, 80)
    update = alloc.captured(32)
    for _ in range(8):
        alloc.commit(h, 4)
        update.stage(alloc.plan(reserve=(h, 0)))
    alloc.commit(h, 4)
    plan = alloc.plan(reserve=(h, 0))
    before = [alloc.device_pages(x).tolist() for x in h]
    with pytest.raises(sgalloc.WrongState, match="wait for their replay"):
        update.stage(plan)
    assert [alloc.device_pages(x).tolist() for x in h] == before
    for _ in range(8):
        update.launch()
    runtime.deviceSynchronize()
    alloc.check(device=True)
    update.stage(plan)
    update.launch()
    runtime.deviceSynchronize()
    alloc.check(device=True)
