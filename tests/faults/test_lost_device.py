"""A device that is lost: one error that names the failure, and a host that goes on without CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.injector import LAUNCHES, Injector, cuda_failure, interrupt
from host_support import Query, prompt
from stand_in_cuda import stand_in
from trust.walk import CONFIGS, Walk, make, visible

import sgalloc
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash
from sgalloc.trust.rerun import rerun

PS = 4
STICKY = (700, 702, 709, 714, 715, 716, 718, 719, 214, 46, 999)
IDS = prompt(5, PS)
WINDOW = {"window": sgalloc.SlidingWindow(6, 60, slot_map=True)}
SPARSE = {"sparse": sgalloc.Sparse(3, 8, 3)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix cache": {"prefix_cache": True},
    "window": WINDOW,
    "window, prefix": {**WINDOW, "prefix_cache": True},
    "sparse": SPARSE,
}


@pytest.fixture
def cuda() -> Iterator[Injector]:
    injector = Injector()
    with stand_in():
        injector.watch_cuda()
        yield injector


def made(kind: str, **how: Any) -> tuple[Any, np.ndarray]:
    """Five open requests; another is received, and another waits behind an event of the GPU."""
    alloc = sgalloc.KVAllocator(60, PS, 9, 96, device="cuda", page_table=True, **KINDS[kind], **how)
    h = alloc.open(5)
    if alloc._core.prefix is not None:
        alloc.extend(h[0], 20)
        alloc.release(h[0], tokens=[IDS])
        h = np.append(alloc.open_with_prefix(alloc.prefix.match(IDS)), h[1:])
    plan = alloc.extend(h[1:], [9, 10, 4, 13])
    alloc.preallocate([9], 2)
    (gone,) = alloc.open()
    alloc.extend(gone, 6)
    alloc.release(gone, after=Behind(plan.ready.ptr))
    return alloc, h


class Behind:
    """An event of CuPy's, not done while the device is there."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @property
    def done(self) -> bool:
        from cupy.cuda import runtime

        runtime.eventQuery(self.ptr)
        return False


def lose(alloc: Any, h: np.ndarray, injector: Injector, status: int = 700) -> sgalloc.DeviceFailed:
    """Let the next launch find the device gone."""
    failed = pytest.raises(sgalloc.DeviceFailed)
    with injector.every(*LAUNCHES, make=cuda_failure(status)), failed as found:
        alloc.extend(h[1], 30)
    return found.value


Call = Callable[[Any, np.ndarray], Any]
WRITING: dict[str, Call] = {
    "extend": lambda a, h: a.extend(h[1], 30),
    "decode": lambda a, h: a.decode(h[1], 20),
    "reserve": lambda a, h: a.reserve(h[1:3], 30),
    "reserve on the device": lambda a, h: a.reserve(h[1:3], 30, rounding="device"),
    "apply": lambda a, h: a.apply(a.plan(reserve=(h[1:3], 30))),
    "slots": lambda a, h: a.slots(h[1], 0, 5),
    "page tables": lambda a, h: a.page_tables(2, 2),
    "preallocate": lambda a, h: a.preallocate([9]),
    "check": lambda a, h: a.check(device=True),
    "probe": lambda a, h: a.probe(),
    "warm": lambda a, h: a.warm(1 << 22),
    "captured": lambda a, h: a.captured(8),
    "dflash lengths": lambda a, h: dflash.Lengths(a),
}
OF_KIND: dict[str, dict[str, Call]] = {
    "prefix": {
        "open_with_prefix": lambda a, h: a.open_with_prefix(a.prefix.match(IDS)),
    },
    "window": {
        "evict_window": lambda a, h: a.evict_window(h[1], upto=8),
        "evict and plan": lambda a, h: a.apply(a.plan(decode=(h[4], 1), evict_window=True)),
    },
    "sparse": {"to_sparse": lambda a, h: a.to_sparse(h[4])},
}


def writing_of(kind: str) -> dict[str, Call]:
    found = dict(WRITING)
    for part, calls in OF_KIND.items():
        found |= calls if part in kind else {}
    return found


def drained(alloc: Any, h: np.ndarray) -> None:
    """All that only gives back, and all that only asks; then nothing is held."""
    alloc.check()
    assert alloc.fits([3]) and alloc.plan(decode=(h[1:3], 20)).num_new_pages > 0
    assert alloc.pages(h[1]).size and alloc.committed(h).tolist()
    assert alloc.stats().rows.open >= 5
    alloc.commit(h[1], 0)
    alloc.trim(h[1], 5)
    alloc.trim(h[2], 2, after=Behind(1))
    alloc.compact(h[3], [[]])
    (received,) = [pin.handle for pin in alloc._core.pins.by_handle.values()][:1]
    assert alloc.acknowledge(received, 0)
    alloc.abort(received)
    assert alloc.acknowledge(received, 1)
    alloc.reclaim(10)
    alloc.settle()
    assert alloc.stats().rows.quarantined == 0, "events of the GPU count as done"
    tokens = [IDS[:12]] if alloc._core.prefix is not None else None
    alloc.release(h[1], tokens=tokens)
    alloc.abort(h[2:4], force=True)
    alloc.release(h[[0, 4]], after=Behind(1))
    alloc.check()
    if alloc._core.prefix is not None:
        alloc.prefix.clear()
    for group in alloc.stats().groups.values():
        assert group.free == group.total
    assert alloc.stats().rows.free == alloc.max_requests


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_device_leaves_the_host(kind: str, cuda: Injector) -> None:
    alloc, h = made(kind)
    before = visible(alloc)
    failure = lose(alloc, h, cuda)
    assert failure.lost and failure.first and "700" in failure.cause
    assert {**visible(alloc), "refusals": {}} == {**before, "refusals": {}}
    words = str(failure)
    assert "failed while writing 5 pages of row " in words
    assert f"plan version {alloc._ledger.version}" in words
    assert re.search(r", after plan \d+ \(extend of 1 request, ", words), words
    assert "snapshot(assume_done=True)" in words and "\n" not in words
    alloc.settle()  # what waited behind an event of the GPU
    before = visible(alloc)
    with cuda.at(0, interrupt):
        for name, call in writing_of(kind).items():
            with pytest.raises(sgalloc.DeviceFailed, match="had failed while writing") as again:
                call(alloc, h)
            assert again.value.cause == failure.cause and again.value.step == failure.step, name
            assert again.value is not failure and again.value.lost
            assert {**visible(alloc), "refusals": {}} == {**before, "refusals": {}}, name
        restored = sgalloc.KVAllocator.restore(alloc.snapshot(assume_done=True), device="cpu")
        alloc.settle()
        assert restored.digest() == alloc.digest()
        restored.extend(h[1], 30)
        restored.check(device=True)
        drained(alloc, h)
        assert cuda.names == [], "CUDA was asked again"


@pytest.mark.parametrize("status", STICKY)
def test_each_error_that_stays_is_known(status: int, cuda: Injector) -> None:
    alloc, h = made("plain")
    assert lose(alloc, h, cuda, status).lost


@pytest.mark.parametrize("status", [1, 2, 9, 98, 209, 400, 701, 720, 801, 900, 901, 906])
def test_an_error_that_passes_loses_nothing(status: int, cuda: Injector) -> None:
    alloc, h = made("plain")
    failure = lose(alloc, h, cuda, status)
    assert not failure.lost and "call again" in str(failure)
    alloc.extend(h[1], 30)
    alloc.check(device=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [700, 2])
def test_a_failure_at_any_point_of_a_step(kind: str, status: int, cuda: Injector) -> None:
    """Also behind the launch, where nobody knows what the table holds: then it is lost, too."""
    lost, points = 0, 0
    for k in range(1, 60):
        alloc, h = made(kind)
        alloc.warm(64)
        before = visible(alloc)
        settled = sgalloc.KVAllocator.restore(alloc.snapshot(assume_done=True), device="cpu")
        with cuda.at(k, cuda_failure(status)):
            try:
                alloc.extend(h[1:], 30)
            except sgalloc.DeviceFailed as error:
                failure = error
        if cuda.fired is None:
            break
        points += 1
        lost += failure.lost
        assert failure.lost == (status == 700 or cuda.behind_launch), cuda.names
        if failure.lost:
            # Where it was a poll that found it lost, what waited has come back.
            assert alloc.digest() in (before["digest"], settled.digest())
            drained(alloc, h)
        else:
            assert {**visible(alloc), "refusals": {}} == {**before, "refusals": {}}
            alloc.extend(h[1:], 30)
            alloc.check(device=True)
    assert points > 4 and lost > 0


class Torch:
    """An event of torch's, whose errors are its own."""

    def __init__(self, ptr: int = 1) -> None:
        self.cuda_event = ptr

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("event", [Behind, Torch], ids=["CuPy's", "torch's"])
@pytest.mark.parametrize("verb", ["settle", "open", "trim", "release", "commit", "acknowledge"])
def test_a_poll_that_finds_the_device_gone_goes_on(verb: str, event: Any, cuda: Injector) -> None:
    """What only gives back does not fail for it; what writes does, from then on."""
    alloc, h = made("plain")
    (received,) = alloc._core.pins.by_handle
    alloc.abort(received)
    alloc.acknowledge(received, 0)
    calls: dict[str, Callable[[], Any]] = {
        "settle": alloc.settle,
        "open": alloc.open,
        "trim": lambda: alloc.trim(h[1], 3, after=event(1)),
        "release": lambda: alloc.release(h[1], after=event(1)),
        "commit": lambda: alloc.commit(h[1], 0),
        "acknowledge": lambda: alloc.acknowledge(received, 1),
    }
    with cuda.every("eventQuery", "streamIsCapturing", make=cuda_failure(700)):
        calls[verb]()
    assert alloc.stats().groups["full"].quarantined == 0
    alloc.check()
    with pytest.raises(sgalloc.DeviceFailed, match=r"had failed while (polling|asking)"):
        alloc.extend(h[2], 30)


def test_an_event_that_raises_of_itself_loses_nothing(cuda: Injector) -> None:
    alloc, h = made("plain")
    with pytest.raises(RuntimeError, match="CUDA error"):
        alloc.release(h[1], after=Torch())
    alloc.extend(h[1], 30)
    alloc.check(device=True)


def test_an_event_of_the_host_is_waited_for_all_the_same(cuda: Injector) -> None:
    """A transfer engine's future tells as before: only what is the GPU's counts as done."""
    alloc, h = made("plain")
    waiting = Query()
    alloc.release(h[2], after=waiting)
    lose(alloc, h, cuda)
    alloc.release(h[1], after=waiting)
    alloc.settle()
    assert alloc.stats().rows.quarantined == 2
    with pytest.raises(sgalloc.WrongState, match="assume_done=True"):
        alloc.snapshot()
    waiting.over = True
    alloc.settle()
    assert alloc.stats().rows.quarantined == 0
    assert alloc.snapshot()


def test_what_lives_beside_the_table_is_refused_too(cuda: Injector) -> None:
    """Updates, lengths and page tables made before; a staged step holds nobody back."""
    alloc, h = made("plain")
    update, tables = alloc.captured(32), alloc.page_tables(8, 24)
    lengths, spec = dflash.Lengths(alloc), SpecConfig("dflash", draft_tokens=6)
    update.stage(alloc.plan(extend=(h[4], 20)))
    with pytest.raises(sgalloc.WrongState, match="staged step"):
        alloc.release(h[4])
    lose(alloc, h, cuda)
    with cuda.at(0, interrupt):
        alloc.release(h[4])
        for call in (
            lambda: update.stage(alloc.plan(extend=(h[1], 20))),
            lambda: update.launch(),
            lambda: tables.update(h[1]),
            lambda: dflash.prepare_for_decode(alloc, h[1:3], spec, lengths=lengths),
        ):
            with pytest.raises(sgalloc.DeviceFailed):
                call()
        alloc.check()
        assert cuda.names == []


def test_a_journal_of_a_device_that_was_lost_runs_again(cuda: Injector, tmp_path: Path) -> None:
    path = tmp_path / "lost.journal"
    alloc, h = made("window, prefix", journal=path)
    lose(alloc, h, cuda)
    for call in writing_of("window, prefix").values():
        with pytest.raises(sgalloc.DeviceFailed):
            call(alloc, h)
    drained(alloc, h)
    alloc.close_journal()
    run = rerun(path, check_every=1)
    assert run.closed and run.alloc.digest() == alloc.digest()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_walk_goes_on_after_the_device_is_lost(name: str, cuda: Injector) -> None:
    """Whatever the state: what gives back works, the laws hold, and the snapshot restores."""
    walk = Walk(make(name, device="cuda"), 5)
    for _ in range(70):
        walk.step()
    from cupy.cuda import runtime

    alloc = walk.alloc
    alloc._core.device.done(Query(True))
    (failure,) = [cuda_failure(719)("eventRecord")]
    assert isinstance(failure, runtime.CUDARuntimeError)
    alloc._core.device._failed(failure, "looking")
    with cuda.at(0, interrupt):
        for _ in range(60):
            walk.step()
            alloc.check()
        alloc.abort(list(walk.text), force=True)
        alloc.reclaim(1 << 90)
        alloc.abort(walk.pinned, force=True)
        data = alloc.snapshot(assume_done=True)
        walk.finish()
        alloc.settle()
        names = [n for n in cuda.names if n not in ("cupy.empty",)]
        assert names == [], "CUDA was asked again"
    assert sgalloc.KVAllocator.restore(data, device="cpu").digest() == alloc.digest()


def test_an_interrupt_leaves_no_slot_unguarded(cuda: Injector) -> None:
    """Ctrl-C where an event is recorded behind a launch: the slot is busy until the launch is."""
    from cupy.cuda import runtime

    alloc, h = made("plain")
    alloc.warm(64)
    device = alloc._core.device
    for k in range(1, 40):
        before = alloc.digest()
        with cuda.at(k, interrupt):
            try:
                alloc.reserve(h[1:], 40)
            except KeyboardInterrupt:
                assert alloc.digest() == before
        if cuda.fired is None:
            break
        if cuda.fired == "eventRecord" and "graphLaunch" in cuda.names:
            slot = device._small._slots[device._small._next - 1]
            assert slot.used
            real, runtime.eventQuery = runtime.eventQuery, lambda event: 600
            assert slot.busy()
            runtime.eventQuery = real
            break
    assert cuda.fired is not None, "no launch was met"
    alloc.reserve(h[1:], 40)
    alloc.check(device=True)
