"""A timeline without a profiler, and the same ranges in torch's profiler.

`record` writes what an allocator did, on the host and on the GPU, as a JSON file that
https://ui.perfetto.dev and ``chrome://tracing`` open. Nothing is wrapped before or after, so that
an allocator that nobody records pays nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from time import perf_counter_ns, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sgalloc import ranges
from sgalloc.errors import WrongState
from sgalloc.inputs import shown, whole_number
from sgalloc.wrapping import Wraps

if TYPE_CHECKING:
    from sgalloc.allocator import KVAllocator

_HOST, _DEVICE = 1, 2
_MOST = (1 << 31) - 1


class Recording:
    """What `record` gives: spans of one allocator, from ``with`` to its end.

    Attributes:
        path: where the file goes at the end; None for nowhere.
        dropped: spans past the limit.
    """

    def __init__(
        self,
        alloc: KVAllocator,
        path: str | os.PathLike[str] | None = None,
        *,
        limit: int = 200_000,
    ) -> None:
        core = getattr(alloc, "_core", None)
        if core is None:
            raise TypeError(f"record takes a KVAllocator, got {shown(alloc)}")
        self._alloc, self._core = alloc, core
        self._limit = whole_number(limit, "limit", 1, _MOST)
        self.path = None if path is None else Path(path)
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(
                f"there is no folder {str(self.path.parent)!r} for the timeline: make it first"
            )
        self.dropped = 0
        self._on = False
        self._wraps = Wraps()
        # Each (name, begin, end, thread, arguments); times in ns.
        self._spans: list[tuple[str, int, int, int, dict[str, Any] | None]] = []
        self._levels: list[tuple[int, dict[str, dict[str, int]]]] = []
        self._last: dict[str, dict[str, int]] = {}
        self._threads: dict[int, int] = {}
        self._gpu: Any = None
        self._done: list[Any] = []
        self._lost: str | None = None

    # -- recording -------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._on or self._spans:
            raise WrongState("a recording is used once: call sgalloc.timeline.record again")
        self._on = True
        self._began_at, self._began = time_ns(), perf_counter_ns()
        device = self._core.device
        if device.name != "cpu":
            from sgalloc.device.spans import DeviceSpans

            self._gpu = DeviceSpans(device, perf_counter_ns, self._thread, self._limit)
            self._gpu.wrap(self._wraps.put)
        for place in ranges.places(self._alloc, self._core):
            method = getattr(place.target, place.method)
            self._wraps.put(place.target, place.method, self._spanned(place, method))
        self._sample()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._on = False
        self._wraps.undo()
        if self._gpu is not None:
            try:
                self._done = self._gpu.finish()
                self.dropped += self._gpu.dropped
            except Exception as lost:
                # What the host did is worth having all the more.
                self._lost = f"{type(lost).__name__}: {lost}"
        if self.path is not None:
            self.write(self.path)

    @contextmanager
    def span(self, name: str, **arguments: Any) -> Iterator[None]:
        """A span of the caller's own, such as a forward pass; ``arguments`` go along with it."""
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self._add(str(name), begin, arguments or None)

    # -- the result ------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """The events of the file, as the trace event format of Chrome has them; times in µs."""
        began = self._began
        found = [_named("process_name", _HOST, 0, f"sgalloc on the host, pid {os.getpid()}")]
        for ident, number in self._threads.items():
            found.append(_named("thread_name", _HOST, number, f"thread {ident}"))
        # Who holds others comes before them.
        for name, begin, end, thread, arguments in sorted(
            self._spans, key=lambda span: (span[1], -span[2])
        ):
            event = _complete(name, _HOST, thread, begin - began, end - begin)
            if arguments:
                event["args"] = arguments
            found.append(event)
        for at, levels in self._levels:
            for name, values in levels.items():
                found.append(
                    {"ph": "C", "name": name, "pid": _HOST, "tid": 0, "ts": (at - began) / 1000}
                    | {"args": dict(values)}
                )
        return found + self._device_events()

    def document(self) -> dict[str, Any]:
        """The whole file."""
        other: dict[str, Any] = {
            "device": self._alloc.device,
            "pages": self._core.pool.num_pages,
            "page_size": self._core.ledger.page_size,
            "start_unix_ns": self._began_at,
            "dropped_spans": self.dropped,
        }
        if self._gpu is not None:
            other["device_clock_uncertainty_us"] = self._gpu.uncertainty / 1000
        if self._lost is not None:
            other["device_lost"] = self._lost
        events = self.events()
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; one that is there is replaced once the new one is whole."""
        into = Path(path)
        parts = into.with_name(into.name + ".part")
        parts.write_text(json.dumps(self.document(), separators=(",", ":")), encoding="utf-8")
        parts.replace(into)

    # -- inside ----------------------------------------------------------------------------

    def _spanned(self, place: ranges.Place, method: Callable[..., Any]) -> Callable[..., Any]:
        name, verb, step = place.name, place.verb, place.step
        clock = perf_counter_ns

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return method(*args, **kwargs)
            arguments = None
            if step:
                pages, rows, size = ranges.step_payload(*args[:2]).item()
                arguments = {"pages": pages, "rows": rows, "bytes": size}
            begin = clock()
            try:
                result = method(*args, **kwargs)
            except BaseException as refusal:
                self._add(name, begin, {"refused": type(refusal).__name__})
                raise
            self._add(name, begin, arguments)
            if verb:
                self._sample()
            return result

        return call

    def _add(self, name: str, begin: int, arguments: dict[str, Any] | None) -> None:
        end = perf_counter_ns()
        if len(self._spans) < self._limit:
            self._spans.append((name, begin, end, self._thread(), arguments))
        else:
            self.dropped += 1

    def _thread(self) -> int:
        """A small number for the calling thread."""
        ident = threading.get_ident()
        return self._threads.setdefault(ident, len(self._threads) + 1)

    def _sample(self) -> None:
        """Note the levels that have changed."""
        core = self._core
        free = {core.pool.group: core.pool.free}
        if core.side is not None:
            free[core.side.pool.group] = core.side.pool.free
        slots, waits, _ = core.device.staging
        levels = {"free pages": free, "open rows": {"open": core.ledger.open_rows}}
        if core.tree is not None:
            levels["cached pages"] = {"cached": core.tree.cached}
        if slots:
            levels["staging"] = {"slots": slots, "waits": waits}
        changed = {name: now for name, now in levels.items() if self._last.get(name) != now}
        if changed and len(self._levels) < self._limit:
            self._levels.append((perf_counter_ns(), changed))
            self._last |= changed

    def _device_events(self) -> list[dict[str, Any]]:
        if not self._done:
            return []
        found = [_named("process_name", _DEVICE, 0, f"sgalloc on {self._alloc.device}")]
        tracks: dict[int, int] = {}
        for span in self._done:
            if span.stream not in tracks:
                tracks[span.stream] = len(tracks) + 1
                copies = span.stream == self._gpu.copying
                name = "stream for copies" if copies else f"stream {span.stream:#x}"
                found.append(_named("thread_name", _DEVICE, tracks[span.stream], name))
        for number, span in enumerate(self._done, 1):
            track, begin = tracks[span.stream], span.begin - self._began
            found.append(_complete(span.name, _DEVICE, track, begin, span.end - span.begin))
            # An arrow from where the host asked for it.
            arrow = {"cat": "launch", "name": "launch", "id": number}
            asked = (span.asked - self._began) / 1000
            found.append({"ph": "s", "pid": _HOST, "tid": span.thread, "ts": asked} | arrow)
            found.append(
                {"ph": "f", "bp": "e", "pid": _DEVICE, "tid": track, "ts": begin / 1000} | arrow
            )
        return found


def record(
    alloc: KVAllocator, path: str | os.PathLike[str] | None = None, *, limit: int = 200_000
) -> Recording:
    """Record what ``alloc`` does inside ``with``: verbs, plans, staging, launches and waits for a
    staging slot on the host; copies and launches on the GPU by timed events; free and cached
    pages, open rows and staging slots as counters.

    The GPU is waited for at the beginning and at the end, and never between.

    Args:
        alloc: the allocator.
        path: the file to be written at the end; its folder is there already.
        limit: most spans of the host, and of the GPU; those past it are counted alone.

    Raises:
        TypeError, ValueError: no allocator, no such folder, a limit below 1.
    """
    return Recording(alloc, path, limit=limit)


@contextmanager
def torch_ranges(alloc: KVAllocator) -> Iterator[None]:
    """Let torch's profiler see the ranges of ``alloc`` inside ``with``, as ``sgalloc.reserve`` and
    so on; they cost a look at a flag while the profiler is off.

    Raises:
        TypeError: no allocator.
        WrongState: torch is not loaded.
    """
    core = getattr(alloc, "_core", None)
    if core is None:
        raise TypeError(f"torch_ranges takes a KVAllocator, got {shown(alloc)}")
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise WrongState("torch is not loaded, so it has no profiler: import torch first")
    profiling = torch.autograd._profiler_enabled
    span = torch.profiler.record_function

    def ranged(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not profiling():
                return method(*args, **kwargs)
            with span(name):
                return method(*args, **kwargs)

        return call

    wrapped = Wraps()
    for place in ranges.places(alloc, core):
        method = getattr(place.target, place.method)
        wrapped.put(place.target, place.method, ranged(f"{ranges.DOMAIN}.{place.name}", method))
    try:
        yield
    finally:
        wrapped.undo()


def _complete(name: str, pid: int, tid: int, begin: int, took: int) -> dict[str, Any]:
    times = {"ts": begin / 1000, "dur": took / 1000}
    return {"ph": "X", "cat": ranges.DOMAIN, "name": name, "pid": pid, "tid": tid, **times}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
