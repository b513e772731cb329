"""What a probe asks of CUDA: one launch, no wait, its own memory; on the stand-in for it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_cuda import Cuda, stand_in
from trust.tables_support import WORLDS, plain, windowed

import sgalloc

pytestmark = pytest.mark.not_in_debug_mode("poison makes launches of its own")

NOT_READY = 600


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


class Asked:
    """Counts what is asked of the runtime from now on; `late` says which events are not done.

    Attributes:
        calls: by name.
        late: handles of events that are not done before somebody waits for them.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.late: set[int] = set()
        runtime: Any = sys.modules["cupy.cuda.runtime"]

        def watched(name: str, answer: Any) -> Any:
            def call(*args: Any) -> Any:
                self.calls[name] += 1
                return answer(*args)

            return call

        def query(event: int) -> int:
            return NOT_READY if event in self.late else 0

        for name, answer in (
            ("eventQuery", query),
            ("eventSynchronize", self.late.discard),
            ("deviceSynchronize", lambda: None),
            ("memcpyAsync", runtime.memcpyAsync),
        ):
            patch.setattr(runtime, name, watched(name, answer))


@pytest.fixture
def asked(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def slots_of(alloc: sgalloc.KVAllocator) -> list[Any]:
    return list(alloc._core.device._digests._slots)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_probe_is_one_launch_and_waits_for_nothing(kind: str, cuda: Cuda, asked: Asked) -> None:
    alloc = WORLDS[kind]("cuda").alloc
    alloc.warm()
    launches, made = alloc._core.device.launches, len(cuda.launches)
    asked.calls.clear()
    probe = alloc.probe()
    assert cuda.launches[made:] == ["row_digest"]
    assert alloc._core.device.launches == launches + 1
    assert not asked.calls - Counter(eventQuery=asked.calls["eventQuery"]), "it waited, or copied"
    assert probe.done
    assert probe.result().size == 0
    assert asked.calls["deviceSynchronize"] == 0, "what is right needs no reading back"
    asked.calls.clear()
    alloc.check(device=True)
    assert asked.calls["deviceSynchronize"] == 0 and asked.calls["eventSynchronize"] == 1


def test_a_probe_is_done_when_its_event_is(asked: Asked) -> None:
    alloc = plain("cuda").alloc
    alloc.warm()
    asked.late.update(slot.ready.ptr for slot in slots_of(alloc))
    probe = alloc.probe()
    assert probe.ready.ptr in asked.late and not probe.done
    assert asked.calls["eventSynchronize"] == 0
    assert probe.result().size == 0 and probe.done
    assert asked.calls["eventSynchronize"] == 1
    probe.result()
    assert asked.calls["eventSynchronize"] == 1, "what was looked at once is known"


def test_a_slot_is_not_written_over_while_it_is_read_or_waited_for(asked: Asked) -> None:
    alloc = plain("cuda").alloc
    alloc.warm()
    first, second = alloc.probe(), alloc.probe()
    one, two = slots_of(alloc)
    assert {first.ready.ptr, second.ready.ptr} == {one.ready.ptr, two.ready.ptr}
    third = alloc.probe()
    assert len(slots_of(alloc)) == 3, "two are waited for"
    for probe in (third, second, first):
        probe.result()
    alloc.probe().result()
    assert len(slots_of(alloc)) == 3
    asked.late.update(slot.ready.ptr for slot in slots_of(alloc))
    del first, second, third
    assert alloc.probe().ready.ptr not in (one.ready.ptr, two.ready.ptr), "still being written"


@pytest.mark.parametrize("journal", [False, True])
def test_a_probe_that_was_let_go_of_gives_its_slot_back(
    asked: Asked, journal: bool, tmp_path: Path
) -> None:
    """At once, and not when garbage is collected."""
    path = tmp_path / "calls" if journal else None
    alloc = sgalloc.KVAllocator(9, 4, 3, 12, device="cuda", journal=path)
    gc.disable()
    try:
        for _ in range(40):
            alloc.probe()
    finally:
        gc.enable()
    assert len(slots_of(alloc)) == 2


def test_too_many_that_nobody_looked_at(asked: Asked) -> None:
    alloc = plain("cuda").alloc
    kept = [alloc.probe() for _ in range(16)]
    launches = alloc._core.device.launches
    with pytest.raises(sgalloc.WrongState, match=r"16 probes .*ask result\(\) of them"):
        alloc.probe()
    assert alloc._core.device.launches == launches
    assert alloc.stats().refusals["WrongState"] == 1
    kept[7].result()
    alloc.probe().result()
    alloc.check()
    for probe in kept:
        probe.result()


def test_more_ranges_than_there_was_memory_for(asked: Asked) -> None:
    """Pages that wait cut the map into pieces; a probe under way keeps its own memory."""
    alloc = sgalloc.KVAllocator(
        4000, 1, 1500, 3, device="cuda", window=sgalloc.SlidingWindow(4, 3000, slot_map=True)
    )
    alloc.warm()
    handles = alloc.open(1500).tolist()
    alloc.extend(handles, 2)
    before = alloc.probe()
    room = slots_of(alloc)[0].room
    never = type("Event", (), {"query": lambda self: False})()
    alloc.trim(handles, 1, after=never)
    after = alloc.probe()
    assert slots_of(alloc)[0].room > room
    assert before.result().size == after.result().size == 0
    alloc.full_to_window[int(alloc.pages(handles[1])[0])] += 1
    with pytest.raises(sgalloc.LawViolation, match="full_to_window"):
        alloc.probe().result()


@pytest.mark.parametrize("kind", WORLDS)
def test_where_no_mapped_memory_is_read_it_is_copied(
    kind: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    world = WORLDS[kind]("cuda")
    world.alloc.warm()
    asked.calls.clear()
    assert world.alloc.probe().result().size == 0
    assert asked.calls["memcpyAsync"] == 2
    world.alloc.req_to_token[1, 2] += 1
    with pytest.raises(sgalloc.LawViolation, match=r"req_to_token\[1, 2\]"):
        world.alloc.probe().result()


# -- captures ------------------------------------------------------------------------------------


def test_a_capture_refuses_a_probe_and_is_not_touched(cuda: Cuda, asked: Asked) -> None:
    alloc = plain("cuda").alloc
    alloc.warm()
    before = alloc.probe()
    cuda.capturing[0] = []
    asked.calls.clear()
    launches = alloc._core.device.launches
    for look in (alloc.probe, lambda: alloc.check(device=True), before.result):
        with pytest.raises(sgalloc.WrongState, match=r"captured.* outside of the capture"):
            look()
    assert not before.done, "nothing is polled"
    alloc.check()
    assert cuda.capturing.pop(0) == [] and not asked.calls
    assert alloc._core.device.launches == launches
    assert before.done and before.result().size == 0
    alloc.check(device=True)


def test_before_anything_is_warm_a_capture_refuses_it_too(cuda: Cuda) -> None:
    alloc = sgalloc.KVAllocator(9, 4, 3, 12, device="cuda")
    cuda.capturing[0] = []
    with pytest.raises(sgalloc.WrongState, match="captured"):
        alloc.probe()
    assert cuda.capturing.pop(0) == []


def test_what_is_wrong_is_named_without_reading_back_during_a_capture(
    cuda: Cuda, asked: Asked
) -> None:
    """It was heard of before the capture began; the entry cannot be read in it."""
    alloc = plain("cuda").alloc
    alloc.req_to_token[1, 2] += 1
    probe = alloc.probe()
    probe._pending.wait()
    cuda.capturing[0] = []
    asked.calls.clear()
    with pytest.raises(sgalloc.LawViolation, match=r"row 1 of req_to_token .* not read back"):
        probe.result()
    assert cuda.capturing.pop(0) == [] and not asked.calls


def test_replays_are_waited_for_by_a_check_and_by_no_probe(asked: Asked) -> None:
    alloc = windowed("cuda").alloc
    update = alloc.captured(8)
    asked.calls.clear()
    alloc.probe().result()
    assert asked.calls["deviceSynchronize"] == 0
    alloc.check(device=True)
    assert asked.calls["deviceSynchronize"] == 1
    del update
    gc.collect()
    alloc.check(device=True)
    assert asked.calls["deviceSynchronize"] == 1


def test_a_step_in_a_graph_is_waited_for_by_every_check(cuda: Cuda, asked: Asked) -> None:
    """Its replays write on a stream that nobody named."""
    world = plain("cuda")
    cuda.capturing[0] = []
    world.alloc.decode(world.handles)
    for work in cuda.capturing.pop(0):
        work()
    asked.calls.clear()
    world.alloc.check(device=True)
    assert asked.calls["deviceSynchronize"] == 1
