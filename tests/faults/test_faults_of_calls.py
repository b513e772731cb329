"""The calls that a random walk does not make, failed at each point, go through in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from faults.injector import (
    LAUNCHES,
    Injector,
    cuda_failure,
    interrupt,
    no_memory,
    plain_failure,
)
from faults.walking import look
from host_support import Query, prompt
from stand_in_cuda import stand_in

import sgalloc
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle

PS = 4
EAGLE = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
DFLASH = SpecConfig("dflash", draft_tokens=6)


def world(device: str, rows: int = 6, **how: Any) -> tuple[Any, np.ndarray]:
    alloc = sgalloc.KVAllocator(199, PS, rows, 96, device=device, page_table=True, **how)
    h = alloc.open(3)
    alloc.extend(h, [9, 10, 4])
    return alloc, h


def worlds(scene: str, device: str) -> tuple[tuple[Any, np.ndarray], tuple[Any, np.ndarray]]:
    how: dict[str, Any] = {}
    if "many" in scene:
        how["rows"] = 40  # more than the first buffers have room for
    if "window" in scene:
        how["window"] = sgalloc.SlidingWindow(3, 60, slot_map=True)
    return world(device, **how), world(device, **how)


def in_a_new_step(alloc: Any, h: np.ndarray, spec: SpecConfig, module: Any, **how: Any) -> Any:
    step = module.prepare_for_decode(alloc, h, spec, **how)
    return step.cur.tolist(), step.nxt.tolist(), step.needed, step.max_seq_len


def with_lengths(alloc: Any, h: np.ndarray) -> Callable[[], Any]:
    lengths = dflash.Lengths(alloc)

    def step() -> Any:
        said = in_a_new_step(alloc, h, DFLASH, dflash, lengths=lengths)
        shown = (lengths.cur, lengths.nxt, lengths.committed)
        return said, [np.asarray(array)[: len(h)].tolist() for array in shown]

    return step


def with_many_lengths(alloc: Any, h: np.ndarray) -> Callable[[], Any]:
    more = np.append(h, alloc.open(37))
    alloc.trim(more, 0)  # where there are pages for all
    return with_lengths(alloc, more)


def with_tables(alloc: Any, h: np.ndarray) -> Callable[[], Any]:
    tables = alloc.page_tables(6, 8)

    def update() -> Any:
        tables.update(h)
        arrays = (tables.page_table, tables.indptr, tables.indices, tables.last_page_len)
        return [np.asarray(array).tolist() for array in arrays]

    return update


def staged(alloc: Any, h: np.ndarray) -> Callable[[], Any]:
    update = alloc.captured(32)

    def stage() -> Any:
        plan = alloc.plan(reserve=(h, 9))
        update.stage(plan)
        return plan.nxt.tolist(), update.unwritten()[0].tolist()

    return stage


Scene = Callable[[Any, np.ndarray], Callable[[], Any]]
SCENES: dict[str, Scene] = {
    "slots": lambda a, h: lambda: np.asarray(a.slots(h, 0, [9, 10, 4])).tolist(),
    "page tables": with_tables,
    "making page tables": lambda a, h: lambda: a.page_tables(2, 2).page_table.shape,
    "eagle": lambda a, h: lambda: in_a_new_step(a, h, EAGLE, eagle),
    "dflash": lambda a, h: lambda: in_a_new_step(a, h, DFLASH, dflash),
    "dflash with lengths": with_lengths,
    "dflash with lengths and nothing to take": lambda a, h: a.reserve(h, 40) and with_lengths(a, h),
    "dflash with many lengths": with_many_lengths,
    "dflash with lengths and a window": with_lengths,
    "making lengths": lambda a, h: lambda: repr(dflash.Lengths(a, 6)),
    "reserve on the device": lambda a, h: (
        lambda: a.reserve(h, [9, 0, 17], rounding="device").nxt.tolist()
    ),
    "a step that is copied": lambda a, h: lambda: a.extend(h, 60).nxt.tolist(),
    "a larger step than was warmed for": lambda a, h: lambda: a.extend(h, 96).nxt.tolist(),
    "warm": lambda a, h: lambda: a.warm(5000),
    "snapshot": lambda a, h: lambda: len(a.snapshot()),
    "check": lambda a, h: lambda: a.check(device=True).tolist(),
    "probe": lambda a, h: lambda: a.probe().result().tolist(),
    "a plan behind a reader": lambda a, h: (
        lambda: a.apply(
            a.plan(decode=(h[:1], 8), reserve=(h[1:], 8)), after=Query(True)
        ).nxt.tolist()
    ),
}
ON_CUDA: dict[str, Scene] = {
    "a staged step": staged,
    "making an update": lambda a, h: lambda: a.captured(8).unwritten(),
}
ONLY_CPU = ("a plan behind a reader",)


def goes_through(alloc: Any, call: Callable[[], Any], injector: Injector, kinds: Any) -> Any:
    """What ``call`` says once it went through, having failed at each point before it."""
    failed = 0
    for k in range(1, 1000):
        for make in kinds:
            before = look(alloc)
            del before["staging"]
            with injector.at(k, make):
                try:
                    said = call()
                except (sgalloc.DeviceFailed, RuntimeError, MemoryError, KeyboardInterrupt) as e:
                    said = e
            if injector.fired is None:
                assert not isinstance(said, BaseException), said
                return said, failed
            assert isinstance(said, BaseException), f"{injector.fired} failed, and nobody said so"
            if "cuda" in make.__qualname__:
                assert isinstance(said, sgalloc.DeviceFailed) and not said.lost, repr(said)
                assert "\n" not in str(said) and "call again" in str(said)
            after = look(alloc)
            del after["staging"]
            assert after == before, f"{injector.fired}, call {k} of {injector.names}"
            alloc.check(device=not alloc._core.device.updates)
            assert injector.cuda is None or not injector.cuda.capturing, "a capture never ended"
            failed += 1
    raise AssertionError


@pytest.mark.parametrize("scene", SCENES)
def test_a_call_fails_at_each_point_on_a_cpu(scene: str) -> None:
    injector = Injector()
    (alloc, h), (other, g) = worlds(scene, "cpu")
    injector.watch_allocator(alloc)
    said, _ = goes_through(
        alloc, SCENES[scene](alloc, h), injector, (plain_failure, no_memory, interrupt)
    )
    assert said == SCENES[scene](other, g)()
    assert look(alloc) == look(other)


@pytest.fixture
def cuda() -> Iterator[Injector]:
    injector = Injector(spare_launched=True)
    with stand_in() as injector.cuda:
        injector.watch_cuda()
        yield injector


@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("scene", [*SCENES.keys() - set(ONLY_CPU), *ON_CUDA])
def test_a_call_fails_at_each_point_on_a_gpu(
    scene: str, warmed: bool, cuda: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "copied" in scene:
        monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    (alloc, h), (other, g) = worlds(scene, "cuda")
    for each in (alloc, other):
        each.warm(8)
        if not warmed:  # as if nothing had been made yet: the first call makes it
            device = each._core.device
            device._small = device._large = device._spare = device._scan = None
            device._large_bytes = 0
    do = {**SCENES, **ON_CUDA}[scene]
    call, twin = do(alloc, h), do(other, g)
    said, failed = goes_through(alloc, call, cuda, (cuda_failure(), interrupt))
    assert said == twin()
    assert look(alloc)["digest"] == look(other)["digest"]
    if scene not in ("snapshot", "a staged step"):
        assert failed, "nothing of this reaches the device"
    held = [slot for ring in (alloc._core.device._small,) if ring for slot in ring._slots]
    assert all(not slot.busy() for slot in held)


def test_a_small_pool_of_pinned_memory(cuda: Injector) -> None:
    """A ring that cannot grow refuses the step; it grows once there is memory."""
    from cupy.cuda import runtime

    alloc, h = world("cuda")
    alloc.warm(8)
    # Nothing that is queued comes to an end.
    done, runtime.eventQuery = runtime.eventQuery, lambda _: 600
    ring = alloc._core.device._small
    slots = len(ring)
    for _ in range(slots + 1):
        alloc.release(h[:1])
        h = np.append(h[1:], alloc.open())
        alloc.extend(h[-1], 4)
    grown = len(ring)
    assert grown > slots
    h = np.append(h[1:], alloc.open()) if alloc.stats().rows.free else h
    before = look(alloc)
    refused = pytest.raises(sgalloc.DeviceFailed, match="give the GPU room, and call again")
    with cuda.every("PinnedMemory", make=cuda_failure()), refused:
        alloc.reserve(h, 24)
    assert look(alloc) == before
    alloc.reserve(h, 24)
    assert len(ring) == grown + 1
    runtime.eventQuery = done
    alloc.check(device=True)


@pytest.mark.parametrize("verb", ["extend", "reserve on the device", "page tables", "dflash"])
def test_a_copy_that_is_under_way_guards_its_slot(
    verb: str, cuda: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails behind its copy: the slot stays busy until that copy is done."""
    from cupy.cuda import runtime

    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    alloc, h = world("cuda")
    alloc.warm(64)
    lengths, tables = dflash.Lengths(alloc), alloc.page_tables(6, 8)
    calls: dict[str, Callable[[], Any]] = {
        "extend": lambda: alloc.extend(h, 30),
        "reserve on the device": lambda: alloc.reserve(h, 30, rounding="device"),
        "page tables": lambda: tables.update(h),
        "dflash": lambda: dflash.prepare_for_decode(alloc, h, DFLASH, lengths=lengths),
    }
    recorded: list[int] = []
    copied: list[int] = []
    real, copy = runtime.eventRecord, runtime.memcpyAsync
    runtime.eventRecord = lambda event, stream: recorded.append(event) or real(event, stream)
    runtime.memcpyAsync = lambda *args: copied.append(args[1]) or copy(*args)
    done, runtime.eventQuery = runtime.eventQuery, lambda event: 600 * (event in recorded)
    failing = LAUNCHES if verb != "dflash" else ("memcpyAsync",)
    if verb == "dflash":
        # The first of three copies goes through.
        count = iter(range(9))
        hit = cuda.hit

        def second(name: str) -> None:
            if name == "memcpyAsync" and next(count) == 1:
                raise cuda_failure()(name)

        monkeypatch.setattr(cuda, "hit", second)
        failing = ()
    with cuda.every(*failing, make=cuda_failure()), pytest.raises(sgalloc.DeviceFailed):
        calls[verb]()
    if verb == "dflash":
        monkeypatch.setattr(cuda, "hit", hit)
    rings = [alloc._core.device._large, lengths._arrays._ring]
    slots = [slot for ring in rings for slot in ring._slots]
    (slot,) = [s for s in slots if any(s.ptr <= at < s.ptr + s.size for at in copied)]
    assert slot.busy(), "it would be filled anew while the copy reads it"
    runtime.eventQuery = done
    calls[verb]()
    alloc.check(device=True)


def test_a_probe_that_fails_behind_its_copy_guards_its_slot(
    cuda: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import runtime

    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    alloc, _ = world("cuda")
    alloc.warm(64)
    recorded: list[int] = []
    real = runtime.eventRecord
    runtime.eventRecord = lambda event, stream: recorded.append(event) or real(event, stream)
    runtime.eventQuery = lambda event: 600 * (event in recorded)
    slots = alloc._core.device._digests._slots
    with cuda.every(*LAUNCHES, make=cuda_failure()), pytest.raises(sgalloc.DeviceFailed):
        alloc.probe()
    assert [slot.idle for slot in slots] == [False, True]
    runtime.eventQuery = lambda _: 0
    assert alloc.probe().result().tolist() == []


def test_a_spare_slot_is_used_up_by_a_launch_alone(cuda: Injector) -> None:
    """A launch that fails while a stream is captured costs none of the slots set aside for that."""
    from cupy.cuda import stream

    held = stream.Stream()
    alloc, h = world("cuda", stream=held)
    alloc.warm(8)
    spare = alloc._core.device._spare
    held.begin_capture(0)
    left = len(spare._slots)
    for _ in range(20):
        refused = pytest.raises(sgalloc.DeviceFailed)
        with cuda.every(*LAUNCHES, make=cuda_failure()), refused:
            alloc.reserve(h, 24)
    assert len(spare._slots) == left
    alloc.reserve(h, 24)
    assert len(spare._slots) == left - 1
    held.end_capture()


@pytest.mark.parametrize("polled", ["query", "done"])
def test_an_event_that_raises_at_any_poll(polled: str) -> None:
    """Whatever polls it, however often: the call fails whole, and the next one works."""

    class Raising(Query):
        raises_at = 0

        def query(self) -> bool:
            self.polls += 1
            if self.polls == self.raises_at:
                raise OSError("the transfer engine is gone")
            return self.over

    class Other(Raising):
        query = None  # type: ignore[assignment]

        @property
        def done(self) -> bool:
            return Raising.query(self)

    make = Raising if polled == "query" else Other
    ids = prompt(6, PS)

    def verbs(alloc: Any, x: Any) -> dict[str, Callable[[Any], Any]]:
        c = int(alloc.committed(x)[0])
        return {
            "trim": lambda e: alloc.trim(x, 3, after=e),
            "compact": lambda e: alloc.compact(x, [[c + 1, c + 3]], after=e)[0].tolist(),
            "publish": lambda e: alloc.prefix.publish(x, [ids], after=e),
            "release": lambda e: alloc.release(x, after=e),
            "release with tokens": lambda e: alloc.release(x, tokens=[ids], after=e),
            "abort": lambda e: alloc.abort(x, after=e),
            "evict": lambda e: alloc.evict_window(x, after=e).tolist(),
            "open": lambda _: alloc.open().tolist(),
            "snapshot": lambda _: alloc.snapshot(assume_done=True),
        }

    names = list(verbs(*(lambda a: (a, a.open()))(_windowed())))
    for name in names:
        for over in (False, True):
            for at in range(1, 12):
                alloc, twin = _windowed(), _windowed()
                calls = []
                for each in (alloc, twin):
                    x = each.open()
                    each.extend(x, 21)
                    each.reserve(x, 6)
                    (gone,) = each.open()
                    each.extend(gone, 5)
                    waiting, own = make(), make(over)
                    each.release(gone, after=waiting)
                    waiting.polls = 0
                    calls.append((verbs(each, x)[name], waiting, own))
                (call, waiting, own), (same, _, other) = calls
                waiting.raises_at = own.raises_at = at
                before = look(alloc)
                try:
                    said = call(own)
                except OSError:
                    assert look(alloc) == before, (name, at)
                    waiting.raises_at = own.raises_at = 0
                    said = call(own)
                assert said == same(other), (name, at)
                assert look(alloc)["digest"] == look(twin)["digest"], (name, at)
                alloc.check(device=True)


def _windowed() -> Any:
    window = sgalloc.SlidingWindow(6, 40, slot_map=True)
    return sgalloc.KVAllocator(
        60, PS, 6, 96, device="cpu", window=window, prefix_cache=True, page_table=True
    )
