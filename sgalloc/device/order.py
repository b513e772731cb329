"""On which stream a step runs, and behind whom."""

from __future__ import annotations

from typing import Any

from cupy.cuda import runtime
from cupy.cuda.stream import get_current_stream

from sgalloc.device.streams import (
    event_pointer,
    new_event,
    new_stream,
    stream_pointer,
    torch_stream,
)


class StreamOrder:
    """Chooses the stream of each step and puts it behind the table's readers and last writer.

    Args:
        device: index of the GPU.
        stream: None for the stream current at each call, ``"plan"`` for an own one, or a
            stream.
        reader: the stream that reads the table, where that is another one.

    Attributes:
        copies: the stream that copies go to, as CuPy's object: the allocator's own one where it
            has that, else one for copies alone.
        copying: its handle.
        between: an event that is recorded on streams to be waited for.
    """

    def __init__(self, device: int, stream: Any, reader: Any) -> None:
        self._device = device
        self._own: Any = None
        self._fixed: int | None = None
        if isinstance(stream, str):
            if stream != "plan":
                raise ValueError(f"stream must be a stream, None or 'plan', got {stream!r}")
            self._own = new_stream()
            self._fixed = int(self._own.ptr)
        elif stream is not None:
            # The object is kept, since whoever made it may let go of it.
            self._own = stream
            self._fixed = stream_pointer(stream)
        self.copies = self._own if isinstance(stream, str) else new_stream()
        self.copying = int(self.copies.ptr)
        self._kept_reader = reader
        self._reader = None if reader is None else stream_pointer(reader)
        self.between = new_event()
        self._last_stream = -1
        self._last_event = 0

    def enter(self, after: Any, asked_here: bool = False) -> tuple[int, bool, bool]:
        """The stream of a step, which waits for whom it must.

        The device is current already.

        Args:
            after: the event behind the last reader, or None.
            asked_here: the step writes nothing but what the current stream reads next, so it
                is behind that one, too, where a reader was named.

        Returns:
            The stream, whether it is being captured, and whether some capture is under way, in
            which nothing may be polled.

        Raises:
            TypeError: ``after`` is no CUDA event.
        """
        cupy = int(get_current_stream().ptr)
        torch = torch_stream(self._device)
        current = cupy if torch is None else torch
        stream = current if self._fixed is None else self._fixed
        # An event of a capture brings the stream into it.
        if after is not None:
            runtime.streamWaitEvent(stream, event_pointer(after))
        capturing = quiet = bool(runtime.streamIsCapturing(stream))
        if current != stream or cupy != current:
            forking = bool(runtime.streamIsCapturing(current))
            quiet = capturing or forking
            if after is None and (self._reader is None or asked_here):
                # What is captured cannot wait for what is not.
                if forking or not capturing:
                    self._behind(stream, current)
                capturing = quiet
                if not quiet:
                    self._behind(stream, cupy)
        if after is None and self._reader is not None and not capturing:
            self._behind(stream, self._reader)
        if stream != self._last_stream and self._last_event and not capturing:
            runtime.streamWaitEvent(stream, self._last_event)
        return stream, capturing, quiet

    def lose(self, refuse: Any) -> None:
        """The device is lost: ``refuse`` whatever would ask CUDA for a stream."""
        for name in ("enter", "capturing", "rejoin", "come_back", "wait"):
            setattr(self, name, refuse)

    def capturing(self) -> bool:
        """Whether a capture is under way on the stream that is current, or on the own one."""
        return any(runtime.streamIsCapturing(stream) for stream in set(self._streams()))

    def leave(self, stream: int, event: int) -> None:
        """Note that ``event`` was recorded behind a step on ``stream``."""
        self._last_stream = stream
        self._last_event = event

    def rejoin(self, event: int, capturing: bool) -> None:
        """Let the streams current now wait for a step that the caller has no event for.

        Args:
            event: recorded behind the step.
            capturing: whether the step is part of a capture. What is captured cannot wait for
                what is not, nor the other way round without being drawn into the capture.
        """
        current, stream = self._streams()
        cupy = int(get_current_stream().ptr)
        if current != stream and bool(runtime.streamIsCapturing(current)) == capturing:
            runtime.streamWaitEvent(current, event)
        if not (capturing or cupy in (current, stream) or runtime.streamIsCapturing(cupy)):
            runtime.streamWaitEvent(cupy, event)

    def come_back(self) -> None:
        """Let a capture end that drew the stream of a step in, though there was no step."""
        current, stream = self._streams()
        if stream != current and all(map(runtime.streamIsCapturing, (current, stream))):
            self._behind(current, stream)

    def wait(self, after: Any) -> None:
        """Let the stream that a step would take wait for ``after``."""
        _, stream = self._streams()
        runtime.streamWaitEvent(stream, event_pointer(after))
        # It may be an event of a capture.
        self.come_back()

    def _streams(self) -> tuple[int, int]:
        """The current stream, and the one that a step would take."""
        torch = torch_stream(self._device)
        current = int(get_current_stream().ptr) if torch is None else torch
        return current, current if self._fixed is None else self._fixed

    def _behind(self, stream: int, reader: int) -> None:
        if reader != stream:
            runtime.eventRecord(self.between, reader)
            runtime.streamWaitEvent(stream, self.between)
