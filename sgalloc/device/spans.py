"""What a GPU does, and when: timed events around each copy and launch, for a timeline.

Nothing is waited for until the end. Events of spans that are over are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from cupy.cuda import runtime

from sgalloc.device.streams import current_device, event_done

_TRIES = 5
# A later event is measured from another one once they are so far apart, since CUDA tells the time
# between two as a float of 24 bits.
_ANCHOR_NS = 500_000_000


class DeviceSpan(NamedTuple):
    """One piece of work on a stream; times on the host's clock, ns.

    Attributes:
        name: what it is.
        stream: the handle of its stream.
        begin, end: when it ran.
        asked: when the host put it there.
        thread: which thread of the host that was.
    """

    name: str
    stream: int
    begin: int
    end: int
    asked: int
    thread: int


class _Pending(NamedTuple):
    name: str
    stream: int
    begin: int
    end: int
    asked: int
    thread: int


class DeviceSpans:
    """Times what a `CudaDevice` puts on streams, from `wrap` on.

    Args:
        device: a `CudaDevice`; its GPU is waited for once.
        clock: ns on the host.
        thread: number of the calling thread.
        limit: most spans.

    Attributes:
        copying: the handle of the stream for copies.
        dropped: spans past the limit.
        uncertainty: how far off the host's clock the times may be, ns.
    """

    def __init__(
        self, device: Any, clock: Callable[[], int], thread: Callable[[], int], limit: int
    ) -> None:
        self._device = device
        self._clock = clock
        self._thread = thread
        self._limit = limit
        self._index: int = device.index
        self.copying: int = device._order.copying
        self.dropped = 0
        self._count = 0
        self._pending: deque[_Pending] = deque()
        self._over: list[DeviceSpan] = []
        self._free: list[int] = []
        self._behind_copy: tuple[int, int] | None = None
        with current_device(self._index):
            runtime.deviceSynchronize()
            tries = []
            for _ in range(_TRIES):
                event = int(runtime.eventCreate())
                before = clock()
                runtime.eventRecord(event, self.copying)
                runtime.eventSynchronize(event)
                tries.append((clock() - before, before, event))
        took, before, self._anchor = min(tries)
        # The event took place at some time between the two readings.
        self._anchor_ns = before + took // 2
        self.uncertainty = took // 2

    def wrap(self, put: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Time copies and launches; ``put(target, method, call)`` puts ``call`` in place."""
        device = self._device
        for method, place, name in (
            ("_graph_launch", 1, "write (graph)"),
            ("_launch_small", 3, "write (mapped)"),
            ("_launch_step", 3, "write"),
        ):
            put(device, method, self._launched(getattr(device, method), place, name))
        put(device, "_send", self._sent(device._send))
        for method, name in (("write_watermarks", "round and write"), ("export", "export")):
            put(device, method, self._behind(getattr(device, method), name))

    def finish(self) -> list[DeviceSpan]:
        """All spans, in the order they were asked for; waits for the GPU."""
        with current_device(self._index):
            runtime.deviceSynchronize()
            while self._pending:
                self._resolve(self._pending.popleft())
        return self._over

    # -- around the methods ----------------------------------------------------------------

    def _launched(self, method: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            stream = int(args[place])
            asked = self._clock()
            copied = self._take_behind_copy()
            begin = copied[1] if copied is not None else self._mark(stream)
            result = method(*args)
            self._close(name, stream, begin, asked)
            return result

        return call

    def _sent(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(slot: Any, first: int, stop: int, stream: int) -> Any:
            asked = self._clock()
            begin = self._mark(self.copying)
            result = method(slot, first, stop, stream)
            # Whatever else stands on the stream for copies waits for nobody.
            self._close("copy", self.copying, begin, asked)
            # The stream of the launch waits for the copy from here on.
            behind = self._mark(stream)
            self._behind_copy = (stream, behind) if behind else None
            return result

        return call

    def _behind(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What copies and launches in one method: from the end of the copy on."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._take_behind_copy()
            asked = self._clock()
            result = method(*args, **kwargs)
            copied = self._take_behind_copy()
            if copied is not None:
                self._close(name, *copied, asked)
            return result

        return call

    def _take_behind_copy(self) -> tuple[int, int] | None:
        """The stream that waits for the last copy, and an event on it behind that."""
        copied, self._behind_copy = self._behind_copy, None
        return copied

    # -- events ----------------------------------------------------------------------------

    def _mark(self, stream: int) -> int:
        """A timed event, recorded on ``stream``; 0 under a capture, or past the limit."""
        if runtime.streamIsCapturing(stream) or self._device.capturing():
            return 0
        if self._count >= self._limit:
            self.dropped += 1
            return 0
        with current_device(self._index):
            event = self._event()
            runtime.eventRecord(event, stream)
        return event

    def _close(self, name: str, stream: int, begin: int, asked: int) -> None:
        if not begin:
            return
        with current_device(self._index):
            end = self._event()
            runtime.eventRecord(end, stream)
        self._keep(_Pending(name, stream, begin, end, asked, self._thread()))

    def _keep(self, span: _Pending) -> None:
        self._count += 1
        self._pending.append(span)

    def _event(self) -> int:
        if not self._free and self._pending and event_done(self._pending[0].end):
            self._resolve(self._pending.popleft())
        return self._free.pop() if self._free else int(runtime.eventCreate())

    def _resolve(self, span: _Pending) -> None:
        begin, end = self._time(span.begin), self._time(span.end)
        self._over.append(DeviceSpan(span.name, span.stream, begin, end, span.asked, span.thread))
        self._free.append(span.end)
        if begin - self._anchor_ns > _ANCHOR_NS:
            self._free.append(self._anchor)
            self._anchor, self._anchor_ns = span.begin, begin
        else:
            self._free.append(span.begin)

    def _time(self, event: int) -> int:
        past = float(runtime.eventElapsedTime(self._anchor, event))
        return self._anchor_ns + round(1e6 * past)
