"""Timelines: what is recorded is what happened, and nothing stays wrapped behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_cuda import Cuda, stand_in
from trace_schema import check_schema

import sgalloc
from sgalloc import ranges, timeline


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


def make(device: str = "cpu", **kwargs: Any) -> sgalloc.KVAllocator:
    kwargs.setdefault("prefix_cache", True)
    kwargs.setdefault("debug", False)  # these look for whatever wraps a method
    return sgalloc.KVAllocator(200, 4, 8, 256, device=device, **kwargs)


def names(recording: timeline.Recording, pid: int = 1) -> list[str]:
    return [e["name"] for e in recording.events() if e["ph"] == "X" and e["pid"] == pid]


def wrapped(alloc: sgalloc.KVAllocator) -> set[str]:
    """Methods of the allocator and its parts that are not as their classes have them."""
    places = ranges.places(alloc, alloc._core)
    return {p.method for p in places if hasattr(vars(p.target).get(p.method), "__wrapped__")}


def test_spans_are_in_the_order_of_calls_and_hold_their_parts() -> None:
    alloc = make()
    with timeline.record(alloc) as recording:
        h = alloc.open(2)
        alloc.extend(h, [5, 9])
        alloc.reserve(h, 8)
        alloc.release(h, tokens=[range(5), range(9)])
        alloc.prefix.match(range(9))
        alloc.prefix.clear()
    assert names(recording) == [
        *("open", "extend", "plan", "write", "reserve", "plan", "write"),
        *("release", "match", "clear"),
    ]
    check_schema(recording.document())
    (first, _) = (e for e in recording.events() if e["name"] == "write")
    assert first["args"] == {"pages": 5, "rows": 2, "bytes": 5 * 4 + 2 * 8}


def test_levels_are_noted_where_they_change() -> None:
    alloc = make(window=sgalloc.SlidingWindow(8, 40))
    with timeline.record(alloc) as recording:
        h = alloc.open(2)
        alloc.extend(h, [5, 9])
        alloc.commit(h, 0)
        alloc.release(h, tokens=[range(5), range(9)])
    levels = [(e["name"], e["args"]) for e in recording.events() if e["ph"] == "C"]
    assert levels == [
        ("free pages", {"full": 200, "window": 40}),
        ("open rows", {"open": 0}),
        ("cached pages", {"cached": 0}),
        ("open rows", {"open": 2}),
        ("free pages", {"full": 195, "window": 35}),
        ("free pages", {"full": 198, "window": 38}),
        ("open rows", {"open": 0}),
        ("cached pages", {"cached": 2}),
    ]


def test_nothing_is_wrapped_before_or_behind() -> None:
    alloc = make()
    before = dict(vars(alloc))
    assert wrapped(alloc) == set()
    with timeline.record(alloc):
        assert {"extend", "_reserve", "write", "match", "_make_plan"} <= wrapped(alloc)
    assert wrapped(alloc) == set() and vars(alloc) == before
    assert alloc._make_plan is sgalloc.Plan


def test_a_refusal_is_a_span_that_says_so_and_an_error_still_writes_the_file(
    tmp_path: Path,
) -> None:
    alloc = make()
    path = tmp_path / "step.json"
    with pytest.raises(sgalloc.RowTooNarrow), timeline.record(alloc, path):
        h = alloc.open()
        alloc.extend(h, 257)
    document = json.loads(path.read_text("utf-8"))
    check_schema(document)
    refused = {e["name"]: e["args"] for e in document["traceEvents"] if "refused" in str(e)}
    assert refused == {name: {"refused": "RowTooNarrow"} for name in ("extend", "plan")}
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]
    assert alloc.stats().refusals == {"RowTooNarrow": 1} and wrapped(alloc) == set()


def test_spans_of_the_caller_and_of_other_threads_have_their_place() -> None:
    alloc = make()
    with timeline.record(alloc) as recording, recording.span("forward", step=3):
        other = threading.Thread(target=lambda: alloc.open())
        other.start()
        other.join()
        alloc.open()
    spans = [e for e in recording.events() if e["ph"] == "X"]
    assert [(e["name"], e["tid"]) for e in spans] == [("forward", 2), ("open", 1), ("open", 2)]
    assert spans[0]["args"] == {"step": 3}
    check_schema(recording.document())


def test_what_somebody_else_wrapped_meanwhile_is_left_alone() -> None:
    alloc = make()
    recording = timeline.record(alloc)
    with recording:
        inner, calls = alloc.open, []
        alloc.open = lambda *args: calls.append(args) or inner(*args)  # type: ignore[method-assign, assignment, func-returns-value]
    assert alloc.open(2).size == 2 and calls == [(2,)]
    assert names(recording) == [], "a recording that is over records no more"


def test_a_limit_bounds_the_spans_and_counts_the_rest() -> None:
    alloc = make()
    with timeline.record(alloc, limit=3) as recording:
        for _ in range(5):
            alloc.open()
    assert names(recording) == ["open"] * 3
    assert recording.dropped == recording.document()["otherData"]["dropped_spans"] == 2


def test_a_journal_and_a_recording_go_together(tmp_path: Path) -> None:
    alloc = make(journal=tmp_path / "calls")
    before = alloc.extend
    with timeline.record(alloc) as recording:
        alloc.extend(alloc.open(), 7)
    assert names(recording) == ["open", "extend", "plan", "write"]
    assert alloc.extend == before, "the journal is still there"
    alloc.release(alloc.open())
    alloc.close_journal()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: timeline.record(3), TypeError, "record takes a KVAllocator"),
        (lambda a: timeline.record(a, "no/such/folder/x.json"), ValueError, "make it first"),
        (lambda a: timeline.record(a, limit=0), ValueError, "limit"),
        (lambda a: timeline.torch_ranges(3).__enter__(), TypeError, "takes a KVAllocator"),
    ],
)
def test_bad_input_is_named(call: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(make())


def test_a_recording_is_used_once() -> None:
    recording = timeline.record(make())
    with recording:
        recording._alloc.open()
    with pytest.raises(sgalloc.WrongState, match="used once"), recording:
        pass


# -- on a GPU, whose work is done at once here -----------------------------------------------------


def run_steps(alloc: sgalloc.KVAllocator) -> None:
    """Steps of every kind that launches: small, with a gather, large, rounded there, exported."""
    b = alloc.batch(alloc.open(4))
    alloc.extend(b, 30)
    alloc.slots(b, 0, 7)
    alloc.reserve(b, 16, rounding="device")
    alloc.commit(b, 2)
    alloc.page_tables(8, 64).update(b)
    alloc.release(b.handles)


def spans_of(document: dict[str, Any], pid: int) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]


@pytest.mark.parametrize("mapped", ["16384", "0"])
def test_every_launch_and_copy_has_a_span_of_the_device(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, mapped: str
) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", mapped)
    alloc = make("cuda")
    alloc.warm()
    device = alloc._core.device
    before = device.launches, device.copies  # type: ignore[attr-defined]
    with timeline.record(alloc) as recording:
        run_steps(alloc)
    launches = device.launches - before[0]  # type: ignore[attr-defined]
    copies = device.copies - before[1]  # type: ignore[attr-defined]
    document = recording.document()
    check_schema(document)
    found = [span["name"] for span in spans_of(document, 2)]
    assert launches >= 4 and copies >= 2
    assert found.count("copy") == copies and len(found) == launches + copies
    assert {"round and write", "export"} <= set(found)
    assert ("write (graph)" if mapped != "0" else "write") in found
    arrows = [e for e in document["traceEvents"] if e["ph"] == "s"]
    assert len(arrows) == launches + copies
    assert document["otherData"]["device"] == "cuda:0"
    assert document["otherData"]["device_clock_uncertainty_us"] >= 0
    tracks = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert "stream for copies" in tracks and "stream 0x0" in tracks
    assert wrapped(alloc) == set()
    alloc.check(device=True)


def test_work_of_the_device_lies_where_the_host_asked_for_it(cuda: Cuda) -> None:
    alloc = make("cuda")
    alloc.warm()
    with timeline.record(alloc) as recording:
        run_steps(alloc)
    document = recording.document()
    launching = [e for e in spans_of(document, 1) if e["name"] in ("launch", "write", "extend")]
    drift = 2 * document["otherData"]["device_clock_uncertainty_us"] + 1
    for span in spans_of(document, 2):
        if span["name"].startswith("write"):
            assert any(
                one["ts"] - drift <= span["ts"] <= one["ts"] + one["dur"] + drift
                for one in launching
            ), span


def test_events_are_used_again(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgalloc.device import spans

    alloc = make("cuda")
    alloc.warm()
    monkeypatch.setattr(spans, "_ANCHOR_NS", 0)  # each span is measured from the one before it
    b = alloc.batch(alloc.open(4))
    alloc.extend(b, 8)
    made = cuda._count
    with timeline.record(alloc) as recording:
        for _ in range(40):
            alloc.reserve(b, 4)
            alloc.commit(b, 4)
    assert len(spans_of(recording.document(), 2)) == 40
    assert cuda._count - made < 20, "an event each would be 80"
    begins = [span["ts"] for span in spans_of(recording.document(), 2)]
    assert begins == sorted(begins)


def test_a_wait_for_a_staging_slot_is_a_span(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = make("cuda")
    alloc.warm()
    device: Any = alloc._core.device
    ring = device._small
    ring._cap = len(ring)
    b = alloc.batch(alloc.open(4))
    with timeline.record(alloc) as recording:
        for _ in range(2 * len(ring)):
            monkeypatch.setattr("cupy.cuda.runtime.eventQuery", lambda _: 600)  # not ready
            alloc.reserve(b, 4)
            alloc.commit(b, 4)
        monkeypatch.setattr("cupy.cuda.runtime.eventQuery", lambda _: 0)
    waits = names(recording).count("wait for a slot")
    assert waits == ring.waits > 0
    last = [e["args"] for e in recording.events() if e["name"] == "staging"][-1]
    assert last == {"slots": alloc.stats().staging.slots, "waits": waits}


def test_what_is_captured_is_not_timed(cuda: Cuda) -> None:
    alloc = make("cuda")
    h = alloc.open(2)
    with timeline.record(alloc) as recording:
        alloc.warm()  # captures graphs of its own
        assert spans_of(recording.document(), 2) == []
        cuda.capturing[0] = []
        alloc.extend(h, 9)
        recorded = len(cuda.capturing.pop(0))
    assert spans_of(recording.document(), 2) == []
    assert recorded == 2, "the launch and the event of its slot, and no event of ours"
    assert "extend" in names(recording)


def test_a_lost_gpu_leaves_what_the_host_did(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alloc = make("cuda")
    alloc.warm()
    path = tmp_path / "step.json"
    with timeline.record(alloc, path):
        alloc.extend(alloc.open(), 9)

        def lost() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr("cupy.cuda.runtime.deviceSynchronize", lost)
    document = json.loads(path.read_text("utf-8"))
    check_schema(document)
    assert "illegal memory access" in document["otherData"]["device_lost"]
    assert [e["name"] for e in spans_of(document, 1)][:2] == ["open", "extend"]
    assert wrapped(alloc) == set()


# -- torch's profiler ------------------------------------------------------------------------------


def test_torchs_profiler_sees_the_ranges() -> None:
    torch = pytest.importorskip("torch")
    alloc = make()
    b = alloc.batch(alloc.open(2))
    with timeline.torch_ranges(alloc):
        alloc.extend(b, 5)  # the profiler is off
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            alloc.reserve(b, 16)
            with pytest.raises(sgalloc.RowTooNarrow):
                alloc.reserve(b, 1000)
            alloc.prefix.match(range(5))
    seen = {one.key: one.count for one in profile.key_averages() if one.key[:8] == "sgalloc."}
    assert seen == {
        "sgalloc.reserve": 2,
        "sgalloc.plan": 2,
        "sgalloc.write": 1,
        "sgalloc.match": 1,
    }
    inside = {one.name: one for one in profile.events()}
    assert inside["sgalloc.write"].cpu_parent.name == "sgalloc.reserve"
    assert wrapped(alloc) == set()


def test_no_range_is_made_while_torchs_profiler_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def never(name: str) -> None:
        raise AssertionError(f"a range {name} was made for nobody")

    monkeypatch.setattr(torch.profiler, "record_function", never)
    alloc = make()
    with timeline.torch_ranges(alloc):
        alloc.extend(alloc.open(), 5)


def test_without_torch_its_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(sgalloc.WrongState, match="import torch first"):
        timeline.torch_ranges(make()).__enter__()
