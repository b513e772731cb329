"""The short benchmark behind ``sgalloc bench``, beside results that came with the package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

import sgalloc
from sgalloc.bench import aim, machine, measured
from sgalloc.bench.course import GROWS, RESERVE, Course, growth
from sgalloc.bench.harness import (
    LOOP,
    SUBJECT,
    Effort,
    Side,
    Step,
    in_turns,
)
from sgalloc.bench.measured import Bench, both_records
from sgalloc.bench.twins import Shape

SHIPPED = "shipped.json"
PAGES = (64, 1)
ON_GPU = "sgalloc on the GPU"
# What is compared: the name and label of a record, and what it is called.
CALLS = (
    ("reserve", GROWS, "reserve, steps that grow"),
    ("reserve again", "", "reserve, without need"),
    ("commit", "", "commit"),
    ("release", "", "release, a request of 1,000 tokens"),
)
# Runs of `aim.run` for one page size: steps and releases, both ways of taking turns.
_CELLS = 4
_HISTORY, _WIDTH = 1000, 1536


class Row(NamedTuple):
    """One call here and on the machine whose results were shipped, medians in µs.

    Attributes:
        call: what was called.
        page: slots in a page.
        turns: how the sides took turns; on a GPU until when it was timed.
        here, low, high: the median here, and the 10th and 90th percentile.
        there: the median there; None where it was not measured.
        loop: the plain Python loop here; None where there is none beside it.
    """

    call: str
    page: int
    turns: str
    here: float
    low: float
    high: float
    there: float | None
    loop: float | None


class _OnGpu:
    """One allocator on a GPU with requests that speculate."""

    def __init__(self, device: str) -> None:
        self.shape = Shape(aim.BATCH, PAGES[0], _HISTORY, _WIDTH)
        self.rng = np.random.default_rng(0)
        shape = self.shape
        self.alloc = sgalloc.KVAllocator(
            shape.num_pages, shape.page_size, shape.batch, shape.row_width, device=device
        )
        self.alloc.warm()
        self.base = shape.history - self.rng.integers(0, 64, shape.batch)
        self.batch = self.alloc.batch(self.alloc.open(shape.batch))
        self.alloc.extend(self.batch, self.base)

    def side(self) -> Side:
        """Reserve, the same again, commit: for ever, cut back when full."""
        alloc, batch = self.alloc, self.batch
        course = Course(self)

        def advance() -> None:
            alloc.commit(batch, course.arrays[course.at])
            if course.advance():
                alloc.trim(batch, self.base)

        return Side(
            ON_GPU,
            [
                Step("reserve", lambda: alloc.reserve(batch, RESERVE), growth),
                Step("reserve again", lambda: alloc.reserve(batch, RESERVE)),
                Step(None, advance),
            ],
        )


def run(seconds: float, device: str | None, pages: Iterable[int] = PAGES) -> dict[str, Any]:
    """Measure here.

    Args:
        seconds: about how long it takes.
        device: a GPU to measure, too, such as ``"cuda"``; None for none.
        pages: page sizes.

    Returns:
        A document as `measured.validate` takes it; ``"gpu"`` names the GPU, or is None.

    Raises:
        ValueError: there is no such GPU.
    """
    sizes = tuple(pages)
    environment = machine.environment()
    watch = machine.Watch()
    cells = _CELLS * len(sizes) + (device is not None)
    pace = Effort(seconds / cells, least=5, most=5000, warm_up=10)
    # First, so that a GPU that is not there is refused before anything is measured.
    gpu = None if device is None else _OnGpu(device)
    benches = {"aim": aim.run(sizes, pace)}
    name = None
    if gpu is not None:
        name, benches["gpu"] = _run_gpu(gpu, pace)
    compared = sum(bench.states_compared for bench in benches.values())
    data = measured.document(environment, watch.report("short", compared), benches)
    measured.validate(data)
    return {**data, "gpu": name}


def shipped() -> dict[str, Any]:
    """The results that came with the package: ``"host"`` and ``"gpu"``, each a document's
    ``environment``, ``run`` and ``records``.
    """
    found = resources.files("sgalloc.bench").joinpath(SHIPPED).read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(found)
    return data


def compared(data: Mapping[str, Any], beside: Mapping[str, Any]) -> list[Row]:
    """Each call of `run` beside what `shipped` says of it."""
    rows = []
    here, there = data["benches"]["aim"], beside["host"]["records"]
    for name, label, call in CALLS:
        for record in _found(here, name, label, SUBJECT):
            loop = _found(here, name, label, LOOP, record["at"])
            theirs = _found(there, name, label, SUBJECT, record["at"])
            rows.append(_row(call, record, record["at"]["turns"], theirs, loop))
    for record in data["benches"].get("gpu", []):
        calls = [call for name, label, call in CALLS if _is(record, name, label, ON_GPU)]
        if calls:
            key = (record["name"], record["label"], ON_GPU)
            theirs = _found(beside["gpu"]["records"], *key, record["at"])
            rows.append(_row(calls[0], record, f"GPU, until {record['at']['until']}", theirs, []))
    return rows


def kept(records: Iterable[Mapping[str, Any]], side: str) -> list[dict[str, Any]]:
    """Of a document's records those that `compared` looks at, with what tells them apart."""
    found = []
    for record in records:
        if any(_is(record, name, label, side) for name, label, _ in CALLS):
            at = {key: record["at"][key] for key in sorted(_KEYS & set(record["at"]))}
            found.append({**record, "at": at})
    return found


_KEYS = {"batch", "page", "turns", "until"}


def _run_gpu(gpu: _OnGpu, pace: Effort) -> tuple[str, Bench]:
    from cupy.cuda import runtime

    index = gpu.alloc._core.device.index  # type: ignore[attr-defined]
    name = runtime.getDeviceProperties(index)["name"]
    times = in_turns([gpu.side()], pace, runtime.deviceSynchronize)
    at = {"batch": gpu.shape.batch, "page": gpu.shape.page_size}
    gpu.alloc.check(device=True)
    text = name.decode() if isinstance(name, bytes) else str(name)
    return text, Bench(both_records(times, at), 1)


def _is(record: Mapping[str, Any], name: str, label: str, side: str) -> bool:
    return (record["name"], record["label"], record["side"]) == (name, label, side)


def _found(
    records: Iterable[Mapping[str, Any]],
    name: str,
    label: str,
    side: str,
    at: Mapping[str, Any] | None = None,
) -> list[Mapping[str, Any]]:
    return [
        record
        for record in records
        if _is(record, name, label, side) and (at is None or record["at"] == at)
    ]


def _row(
    call: str,
    record: Mapping[str, Any],
    turns: str,
    theirs: list[Mapping[str, Any]],
    loop: list[Mapping[str, Any]],
) -> Row:
    return Row(
        call,
        record["at"]["page"],
        turns,
        record["median_us"],
        record["p10_us"],
        record["p90_us"],
        theirs[0]["median_us"] if theirs else None,
        loop[0]["median_us"] if loop else None,
    )
