"""Where the time of a growing reserve goes, what NumPy charges, and what the loop's parts cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sgalloc
from sgalloc.bench.course import GROWS, RESERVE, Course, growth
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Key, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.python_loop import PythonLoop
from sgalloc.bench.twins import Shape, Twins
from sgalloc.device import CpuDevice
from sgalloc.ledger import Ledger
from sgalloc.pages import PagePool
from sgalloc.plan import Plan

# The rooms that a growing reserve goes through: who owns the function, and its name.
PARTS: dict[str, tuple[Any, str]] = {
    "look-up": (Ledger, "holding"),
    "input check": (sgalloc.allocator, "counts"),
    "plan": (Plan, "__init__"),
    "free ids": (PagePool, "peek"),
    "table write": (CpuDevice, "write"),
    "page holders": (PagePool, "take"),
    "ledger": (Ledger, "grow"),
    "batch": (sgalloc.Batch, "moved"),
}
WHOLE = "whole call"
EMPTY = "an empty part"
_TURNS = 3
_CALLS = 100


def run(page_sizes: Iterable[int], effort: Effort, batch: int = 256) -> Bench:
    """The parts of a growing reserve beside the whole call, in turns."""
    records: list[Record] = []
    for page_size in page_sizes:
        twins = Twins(Shape(batch, page_size, history=1000, row_width=1536))
        twins.fill()
        times = parts_and_whole(twins, effort)
        records += records_of(times, {"batch": batch, "page": page_size})
        twins.alloc.check()
    return Bench(records)


def parts_and_whole(twins: Twins, effort: Effort) -> dict[Key, list[int]]:
    """Time whole reserves for a while, then the parts of others, in turns.

    The parts are timed from within: their functions are replaced by ones that read the clock
    before and after, and put back. That costs something itself, which ``EMPTY`` measures. What
    the whole call has beyond the parts are its wrapper, the calls from room to room, and the
    little that is done in between.
    """
    alloc = twins.alloc
    batch = alloc.batch(twins.handles)
    course = Course(twins)
    series: dict[str, list[int]] = {name: [] for name in (WHOLE, *PARTS, EMPTY)}
    pace = Effort(effort.seconds / _TURNS / 2, effort.least, effort.most, block=1)

    def advance() -> None:
        alloc.commit(batch, course.arrays[course.at])
        if course.advance():
            alloc.trim(batch, twins.base)

    def reserve() -> sgalloc.Plan:
        return alloc.reserve(batch, RESERVE)

    whole = [Step(WHOLE, reserve, growth), Step(None, advance)]
    for _ in range(_TURNS):
        timed = alternate([Side(SUBJECT, whole)], pace)
        series[WHOLE] += timed.get(Key(SUBJECT, WHOLE, GROWS), [])
        with timed_parts() as seen:

            def in_parts(seen: dict[str, list[int]] = seen) -> None:
                for times in seen.values():
                    times.clear()
                plan = reserve()
                seen[EMPTY].append(_empty_part(seen))
                if plan.num_new_pages:
                    for part, times in seen.items():
                        series[part].append(sum(times))

            alternate([Side(SUBJECT, [Step(None, in_parts), Step(None, advance)])], pace)
    return {Key(SUBJECT, name, ""): times for name, times in series.items() if times}


@contextmanager
def timed_parts() -> Iterator[dict[str, list[int]]]:
    """Let the functions of `PARTS` note how long each call took, in nanoseconds, by part."""
    seen: dict[str, list[int]] = {name: [] for name in (*PARTS, EMPTY)}
    before = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, _timed(before[part], seen[part]))
    try:
        yield seen
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, before[part])


def _timed(function: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    clock = perf_counter_ns

    def call(*args: Any) -> Any:
        begin = clock()
        result = function(*args)
        times.append(clock() - begin)
        return result

    return call


def _empty_part(seen: dict[str, list[int]]) -> int:
    """How long a part takes in which nothing is done."""
    times: list[int] = []
    _timed(_nothing, times)(seen, times, EMPTY)
    return times[0]


def _nothing(*_: Any) -> None:
    pass


def prices(effort: Effort, sizes: Iterable[int] = (12, 256)) -> Bench:
    """What single NumPy calls cost, each timed a hundred times between two clock readings."""
    records: list[Record] = []
    for size in sizes:
        steps = [Step(name, _many(call)) for name, call in _priced(size).items()]
        times = alternate([Side("numpy", steps)], effort)
        records += records_of(times, {"elements": size}, per=_CALLS)
    return Bench(records)


def _priced(size: int) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    column: NDArray[np.int64] = rng.integers(0, 1000, 4096)
    index = rng.permutation(4096)[:size]
    narrow = index.astype(np.int32)
    values = rng.integers(0, 1000, size)
    other = rng.integers(0, 1000, size)
    zero_dim = np.array(16)
    scalar = np.int64(16)

    def scatter() -> None:
        column[index] = values

    def scatter_narrow() -> None:
        column[narrow] = values

    def scatter_converted() -> None:
        column[narrow.astype(np.int64)] = values

    return {
        "array + Python int": lambda: values + 16,
        "array + NumPy scalar": lambda: values + scalar,
        "array + array of no dimensions": lambda: values + zero_dim,
        "array + array": lambda: values + other,
        "array // array of no dimensions": lambda: values // zero_dim,
        "array > array": lambda: values > other,
        "column.take(int64 index)": lambda: column.take(index),
        "column[int64 index]": lambda: column[index],
        "column[int32 index]": lambda: column[narrow],
        "column[int64 index] = values": scatter,
        "column[int32 index] = values": scatter_narrow,
        "column[int32 index.astype(int64)] = values": scatter_converted,
        "nonzero of a mask, none set": (values > 5000).nonzero,
        "copy": values.copy,
        "argmax": values.argmax,
        "max": values.max,
        "sum": values.sum,
        "sum of tolist": lambda: sum(values.tolist()),
    }


def _many(call: Callable[[], Any]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(_CALLS):
            call()

    return calls


def loop_parts(batches: Iterable[int], effort: Effort) -> Bench:
    """The parts of the plain loop's speculative step, without any table write."""
    records: list[Record] = []
    for batch in batches:
        twins = Twins(Shape(batch, 64, history=1000, row_width=1536))
        twins.fill()
        loop, requests = twins.loop, twins.requests
        loop.reserve(requests, RESERVE)
        steps = _loop_steps(loop, twins)
        times = alternate([Side(LOOP, steps)], effort)
        records += records_of(times, {"batch": batch, "page": 64})
    return Bench(records)


def _loop_steps(loop: PythonLoop, twins: Twins) -> list[Step]:
    requests = twins.requests
    cur, nxt, _ = loop.watermarks(requests, RESERVE)
    return [
        Step("estimate", lambda: loop.estimate_reserve(requests, RESERVE)),
        Step("watermarks", lambda: loop.watermarks(requests, RESERVE)),
        Step("two arrays from lists", lambda: (np.array(cur, np.int32), np.array(nxt, np.int32))),
        Step("write-back", lambda: loop.write_back(requests, nxt)),
        Step("count steps", lambda: loop.count_steps(requests)),
    ]
