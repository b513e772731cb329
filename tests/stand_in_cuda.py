"""Stands in for CuPy where there is no GPU, so that what drives one can be run from end to end.

Device memory is host memory; whatever is put on a stream is done at once, and what is put on a
capturing stream when its graph is launched. The kernels are done by NumPy, from the row law.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from row_digests import entries_digest

_ROOMS = (
    "batched",
    "captured",
    "cuda",
    "cuda_digest",
    "cuda_lengths",
    "cuda_tables",
    "failing",
    "cuda_poisoning",
    "layout",
    "order",
    "scan",
    "spans",
    "staging",
    "streams",
)
_NEVER = 2**31 - 1


class Array(np.ndarray):  # type: ignore[type-arg]
    """A device array."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Where it begins."""
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What others are told of it."""
        return {**self.__array_interface__, "strides": None, "version": 3}

    def get(self) -> Any:
        """A copy on the host."""
        return np.array(self)


class Cuda:
    """The state of the stand-in.

    Attributes:
        events: the clock's time of each event that was recorded.
        capturing: what was put on each capturing stream.
        launches: names of the kernels that ran.
    """

    def __init__(self) -> None:
        self._count = 0
        self.events: dict[int, float] = {}
        self.capturing: dict[int, list[Callable[[], None]]] = {}
        self.launches: list[str] = []
        self.scans: dict[int, int] = {}

    def number(self) -> int:
        """A new handle."""
        self._count += 1
        return self._count

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """Do ``work`` now, or with the graph that is being captured."""
        if stream in self.capturing:
            self.capturing[stream].append(work)
        else:
            work()

    def record(self, event: int, stream: int) -> None:
        """Note the time."""
        assert event, "no such event"
        self.put(stream, lambda: self.events.__setitem__(event, perf_counter()))

    def launch(self, graph: list[Callable[[], None]], stream: int) -> None:
        """Do what was captured."""
        assert stream not in self.capturing
        for work in graph:
            work()

    def run(self, name: str, grid: Any, block: Any, arguments: Any, stream: int) -> None:
        """Launch a kernel."""
        assert 0 < grid[0] < 2**31 and 0 < block[0] <= 1024
        assert stream <= self._count, "no such stream"

        def work() -> None:
            self.launches.append(name)
            if name in ("assign_pages", "assign_mapped", "assign_both", "assign_both_mapped"):
                _assign(name, *arguments)
            elif name == "page_watermarks":
                _page_watermarks(grid[0], *arguments)
            elif name == "poison_rows":
                _poison_rows(*arguments)
            elif name in ("replay_pages", "replay_both"):
                # It counts the step as applied, and does not write it.
                _view(arguments[-1], 1, np.uint32)[:] += 1
            elif name == "export_pages":
                _export(*arguments)
            elif name == "row_digest":
                _row_digest(*arguments)
            elif name == "fill_pages_alone":
                _fill(*arguments)
            elif name == "scatter_slots":
                _scatter(grid[0] * block[0], *arguments)
            elif name == "gather_kv":
                _gather(4 * grid[0] * block[0], *arguments)
            else:
                assert name in ("nothing", "takes", "copy_all", "sum_all"), name

        self.put(stream, work)


def _view(pointer: int, count: int, dtype: Any) -> Any:
    size = int(count) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(pointer)), dtype)


def _write(
    slots: int, pages: int, width: int, per_row: int, size: int, places: Any, ids: Any
) -> None:
    if not len(ids):
        return
    if pages:
        _view(pages, places.max() + 1, np.int32)[places] = ids
    row, number = np.divmod(places, per_row)
    entries = (row * width + number * size)[:, None] + np.arange(size)
    table = _view(slots, entries.max() + 1, np.int32)
    table[entries] = ids[:, None].astype(np.int64) * size + np.arange(size)


def _write_side(step: int, words: Any, width: int, per_row: int, size: int) -> None:
    slots, shown = (int(address) for address in words[18:22].view(np.int64))
    count, places_at, ids_at, mains_at = words[22:26].tolist()
    places = _view(step + places_at, count, np.int64)
    ids, mains = (_view(step + at, count, np.int32) for at in (ids_at, mains_at))
    entries = np.where(ids > 0, ids, 0)[:, None].astype(np.int64) * size
    entries = np.where(ids[:, None] > 0, entries + np.arange(size), 0)
    row, number = np.divmod(places, per_row)
    for pointer, first, some in (
        (slots, row * width + number * size, places >= 0),
        (shown, mains.astype(np.int64) * size, mains > 0),
    ):
        if pointer and some.any():
            where = first[some][:, None] + np.arange(size)
            _view(pointer, where.max() + 1, np.int32)[where] = entries[some]


def _assign(
    name: str,
    slots: int,
    table: int,
    width: Any,
    per_row: Any,
    size: Any,
    _shift: Any,
    tile: Any,
    step: int,
    *sides: int,
) -> None:
    assert 1 <= tile <= 1024
    fixed = name.endswith("_mapped")
    words = _view(step, 32, np.int32)
    pages, runs, requests, total, uniform, wide = words[:6].tolist()
    places_at, ids_at, offsets_at, *gathered = words[8:16].tolist()
    if fixed:
        # Read before the header is: as many as have a place.
        pages = int((_view(step + 128, 1024, np.int64) >= 0).sum())
        places_at, ids_at, total = 128, 128 + 8 * 1024, 0
    ids = _view(step + ids_at, pages, np.int32)
    page = np.arange(pages)
    if runs:
        run = _view(step + offsets_at, runs, np.int32).searchsorted(page, "right") - 1
        places = _view(step + places_at, runs, np.int64)[run] + page
        if words[17]:
            tiles = [*run[:: int(tile)], runs - 1]
            assert _view(step + int(words[17]), len(tiles), np.int32).tolist() == tiles
    else:
        places = _view(step + places_at, pages, np.int64)
    _write(slots, table, int(width), int(per_row), int(size), places, ids)
    if name == "assign_both_mapped":
        # The header is not read; ids behind the last are -1.
        at = [28800, 28800 + 8 * 1024, 28800 + 12 * 1024]
        count = int((_view(step + at[1], 1024, np.int32) >= 0).sum())
        words = words.copy()
        words[18:22].view(np.int64)[:] = sides
        words[22:26] = [count, *at]
    if words[22] and name.startswith("assign_both"):
        _write_side(step, words, int(width), int(per_row), int(size))
    if not total:
        return
    row, start, offset, fresh, new_at = (_view(step + at, requests, np.int32) for at in gathered)
    at = np.arange(total)
    r = at // uniform if uniform else offset.searchsorted(at, "right") - 1
    position = start[r] + at - (r * uniform if uniform else offset[r])
    where = row[r].astype(np.int64) * width + position
    found = _view(slots, where.max() + 1, np.int32)[where]
    ahead = position // size - fresh[r].astype(np.int64)
    new = ahead >= 0
    found[new] = ids[(new_at[r] + ahead)[new]] * size + position[new] % size
    out = _view(words[6:8].view(np.int64)[0], total, np.int64 if wide else np.int32)
    out[:] = found


def _row_digest(
    slots: int, side_slots: int, mapped: int, pages: int, ranges: int, count: Any, digests: int
) -> None:
    asked = _view(ranges, count, [("start", np.int64), ("length", np.int32), ("array", np.int32)])
    arrays = (slots, side_slots, mapped, pages)
    _view(digests, count, np.uint64)[:] = [
        entries_digest(_view(arrays[array] + 4 * start, length, np.int32))
        for start, length, array in asked.tolist()
    ]


def _scatter(threads: int, places: int, values: int, table: int, count: Any) -> None:
    assert threads >= count
    at = _view(places, count, np.int64)
    _view(table, at.max() + 1, np.int32)[at] = _view(values, count, np.int32)


def _gather(threads: int, pages: int, pool: int, out: int, shift: Any, count: Any) -> None:
    per_page = 1 << int(shift)
    assert threads >= count and count % per_page == 0
    ids = _view(pages, count // per_page, np.int32).astype(np.int64)
    there = _view(pool, (ids.max() + 1) * 4 * per_page, np.int32).reshape(-1, 4 * per_page)
    _view(out, 4 * int(count), np.int32)[:] = there[ids].reshape(-1)


def _fill(
    start: int,
    row_width: Any,
    page_size: Any,
    width: Any,
    segments: Any,
    each: Any,
    step: Any,
    stores: Any,
    value: Any,
) -> None:
    assert stores * width == segments * each * page_size and page_size % width == 0
    assert width == 1 or (width == 4 and start % 16 == 0 and row_width % 4 == 0)
    assert int(segments) * int(step) < 2**32
    rows = (np.arange(segments) * int(step) % int(segments))[:, None] * int(row_width)
    slots = rows + np.arange(int(each) * int(page_size))
    _view(start, slots.max() + 1, np.int32)[slots] = value


def _poison_rows(
    table: int, width: Any, row: Any, rows: Any, first: Any, stop: Any, value: Any
) -> None:
    assert row > 0 and rows > 0 and 0 <= first < stop <= width, "nothing there, or padding"
    _view(table, (row + rows) * width, np.int32).reshape(-1, width)[row:, first:stop] = value


def _export(
    slots: int,
    width: Any,
    size: Any,
    requests: Any,
    rows: int,
    indptr: int,
    lengths: int,
    padded: int,
    most: Any,
    indices: int,
    indptr_out: int,
    last_page_len: int,
) -> None:
    n, each = int(requests), int(most)
    row, tokens = (_view(at, n, np.int32) for at in (rows, lengths))
    first = _view(indptr, n + 1, np.int32)
    _view(indptr_out, n + 1, np.int32)[:] = first
    table, flat = _view(padded, n * each, np.int32), _view(indices, first[-1], np.int32)
    table[:] = 0
    for r in range(n):
        pages = int(first[r + 1] - first[r])
        at = int(row[r]) * int(width) + np.arange(pages) * int(size)
        ids = _view(slots, at.max() + 1, np.int32)[at] // size if pages else at
        table[r * each : r * each + pages] = flat[first[r] : first[r + 1]] = ids
    _view(last_page_len, n, np.int32)[:] = np.where(tokens > 0, (tokens - 1) % size + 1, 0)


def _page_watermarks(
    tiles: int,
    slots: int,
    table: int,
    width: Any,
    per_row: Any,
    size: Any,
    _shift: Any,
    tile: Any,
    tile_requests: Any,
    requests: Any,
    rows: int,
    committed: int,
    allocated: int,
    reserves: int,
    reserve: Any,
    ids: int,
    words: int,
    ticket: int,
    base: Any,
    epoch: Any,
) -> None:
    assert 1 <= tile <= 1024 and tiles == -(-int(requests) // int(tile_requests))
    taken, told = _view(ticket, 1, np.uint32), _view(words, tiles, np.uint64)
    assert taken[0] == base, "tickets of another launch are in the way"
    assert (told >> np.uint64(34) != epoch).all(), "words of another launch are in the way"
    taken[0] += tiles
    told[:] = (int(epoch) << 2 | 2) << 32
    row, done, held = (_view(at, requests, np.int32) for at in (rows, committed, allocated))
    more = _view(reserves, requests, np.int32) if reserves else reserve
    first = held.astype(np.int64) // size
    last = -(-(done.astype(np.int64) + more) // size)
    count = np.maximum(last - first, 0)
    within = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
    places = (row * np.int64(per_row) + first).repeat(count) + within
    taken_ids = _view(ids, count.sum(), np.int32)
    _write(slots, table, int(width), int(per_row), int(size), places, taken_ids)


def _modules(state: Cuda) -> dict[str, Any]:
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    runtime.CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
    runtime.deviceSynchronize = lambda: None
    runtime.getDevice = lambda: 0
    runtime.setDevice = lambda _: None
    runtime.pointerGetAttributes = lambda _: types.SimpleNamespace(device=0)
    runtime.getDeviceCount = lambda: 1
    runtime.getDeviceProperties = lambda _: {
        "name": b"Stand-in",
        "multiProcessorCount": 132,
        "l2CacheSize": 60 << 20,
        "totalGlobalMem": 141 << 30,
    }
    runtime.driverGetVersion = runtime.runtimeGetVersion = lambda: 13000
    runtime.eventCreate = state.number
    runtime.eventCreateWithFlags = lambda _: state.number()
    runtime.eventRecord = state.record
    runtime.eventQuery = runtime.eventSynchronize = lambda _: 0
    runtime.eventElapsedTime = lambda a, b: 1e3 * (state.events[b] - state.events[a])
    runtime.streamWaitEvent = lambda stream, event, flags=0: None
    runtime.pointerGetAttributes = lambda _: types.SimpleNamespace(device=0)
    runtime.streamIsCapturing = lambda stream: stream in state.capturing
    runtime.graphLaunch = state.launch
    runtime.memcpyAsync = lambda to, source, size, kind, stream: state.put(
        stream, lambda: ctypes.memmove(to, source, size) and None
    )
    runtime.memsetAsync = lambda to, value, size, stream: state.put(
        stream, lambda: ctypes.memset(to, value, size) and None
    )

    class Graph:
        def __init__(self, work: list[Callable[[], None]]) -> None:
            self.graphExec = work

        def upload(self, stream: Any) -> None: ...

    class Stream:
        null: Any

        def __init__(
            self, null: bool = False, non_blocking: bool = False, priority: int | None = None
        ) -> None:
            self.ptr = 0 if null else state.number()

        def begin_capture(self, mode: int) -> None:
            state.capturing[self.ptr] = []

        def end_capture(self) -> Graph:
            return Graph(state.capturing.pop(self.ptr))

        def synchronize(self) -> None: ...

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Event:
        done = True

        def __init__(self, disable_timing: bool = False) -> None:
            self.ptr = state.number()

        def record(self, stream: Any) -> None:
            state.record(self.ptr, stream.ptr)

        def synchronize(self) -> None: ...

    class Function:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, self

        def __call__(
            self, grid: Any, block: Any, args: Any, shared: int = 0, stream: Any = None
        ) -> None:
            state.run(self.name, grid, block, args, 0 if stream is None else stream.ptr)

    class RawModule:
        def __init__(self, code: str, options: Any = ()) -> None:
            self._code = code

        def get_function(self, name: str) -> Function:
            assert f" {name}(" in self._code
            return Function(name)

    class PinnedMemory:
        def __init__(self, size: int, flags: int) -> None:
            self._buffer = ctypes.create_string_buffer(size + 64)
            self.ptr = -(-ctypes.addressof(self._buffer) // 64) * 64

    class Device:
        attributes = {"MultiProcessorCount": 132}  # noqa: RUF012

        def __init__(self, index: int) -> None: ...

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None: ...

    Stream.null = Stream(null=True)
    stream_module: Any = types.ModuleType("cupy.cuda.stream")
    stream_module.Stream = Stream
    stream_module.get_current_stream = lambda device=None: Stream.null
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.__path__ = []
    cuda.runtime, cuda.stream, cuda.Stream = runtime, stream_module, Stream
    cuda.Device, cuda.PinnedMemory, cuda.Event = Device, PinnedMemory, Event
    cuda.driver, cuda.memory = (
        types.ModuleType("cupy.cuda.driver"),
        types.ModuleType("cupy.cuda.memory"),
    )
    cuda.driver.CUDADriverError = type("CUDADriverError", (RuntimeError,), {})
    cuda.memory.OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {})
    cupy: Any = types.ModuleType("cupy")
    cupy.__path__ = []
    cupy.cuda, cupy.RawModule, cupy.Function = cuda, RawModule, Function
    cupy.RawKernel = lambda code, name: Function(name)
    for name in ("int32", "int64", "uint8", "uint32", "uint64"):
        setattr(cupy, name, getattr(np, name))
    cupy.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(Array)
    cupy.empty = lambda shape, dtype: np.full(shape, 77, dtype).view(Array)
    cupy.asarray = lambda a: a if isinstance(a, Array) else np.array(a).view(Array)
    cupy.asnumpy = lambda a: np.array(a)
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    return {
        "cupy": cupy,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": runtime,
        "cupy.cuda.stream": stream_module,
        "cupy.cuda.driver": cuda.driver,
        "cupy.cuda.memory": cuda.memory,
    }


@contextmanager
def stand_in(state: Cuda | None = None) -> Iterator[Cuda]:
    """Let CuPy be the stand-in; the rooms that import it are imported anew, and forgotten."""
    from sgalloc import device
    from sgalloc.device import kernels

    state = Cuda() if state is None else state
    replaced = _modules(state)
    rooms = {name: f"sgalloc.device.{name}" for name in _ROOMS}
    names = [*replaced, *rooms.values()]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    held = {name: vars(device).pop(name) for name in rooms if name in vars(device)}
    sys.modules.update(replaced)
    try:
        yield state
    finally:
        for name in names:
            sys.modules.pop(name, None)
        for name in rooms:
            vars(device).pop(name, None)
        sys.modules.update(before)
        vars(device).update(held)
        for cached in (kernels.kernel, kernels._module):
            cached.cache_clear()
