"""Streams and events of whoever: CuPy's, torch's, any ``__cuda_stream__``, or a raw handle."""

from __future__ import annotations

import sys
from typing import Any

from cupy.cuda import runtime
from cupy.cuda import stream as cupy_stream

from sgalloc.inputs import shown

_NOT_READY = 600  # cudaErrorNotReady
_NON_BLOCKING = 1
_NO_TIMING = 2
# The handles that CUDA gives to its two default streams.
LEGACY, PER_THREAD = 1, 2


class Handle:
    """What CuPy's launch wants of a stream."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def stream_pointer(stream: Any) -> int:
    """The handle of a stream.

    Args:
        stream: an object with ``__cuda_stream__``, ``ptr`` (CuPy) or ``cuda_stream`` (torch),
            or a raw handle.

    Raises:
        TypeError: none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise TypeError(f"a raw stream handle is not negative, got {stream}")
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, pointer = protocol() if callable(protocol) else protocol
        return int(pointer)
    for attribute in ("ptr", "cuda_stream"):
        pointer = getattr(stream, attribute, None)
        if isinstance(pointer, int):
            return pointer
    raise TypeError(
        f"{shown(stream)} is no stream: pass a CuPy or torch stream, an object with "
        "__cuda_stream__, or a raw handle"
    )


def event_pointer(event: Any) -> int:
    """The handle of a CUDA event.

    Args:
        event: an object with ``ptr`` (CuPy) or ``cuda_event`` (torch), or a raw handle.

    Raises:
        TypeError: none of these, or a torch event that was never recorded.
    """
    if isinstance(event, int) and not isinstance(event, bool):
        pointer: Any = event
    else:
        pointer = getattr(event, "ptr", None)
        if pointer is None:
            pointer = getattr(event, "cuda_event", None)
    if not isinstance(pointer, int) or pointer <= 0:
        raise TypeError(
            f"after={shown(event)} is no recorded CUDA event: pass one with .ptr or .cuda_event, "
            "or its raw handle"
        )
    return pointer


def torch_stream(device: int) -> int | None:
    """torch's current stream on ``device``; None where torch is not loaded, or has no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # As compilers built on torch do: the public call makes an object of 1 µs each time.
    core = getattr(torch, "_C", None)
    current = getattr(core, "_cuda_getCurrentRawStream", None)
    return None if current is None else int(current(device))


def cupy_current_stream(device: int) -> int:
    """CuPy's current stream on the current device."""
    return int(cupy_stream.get_current_stream(device).ptr)


def current_stream(device: int) -> int:
    """The stream current now: torch's if torch is loaded, else CuPy's."""
    pointer = torch_stream(device)
    return cupy_current_stream(device) if pointer is None else pointer


def new_stream() -> Any:
    """A non-blocking stream of the highest priority, as CuPy's object; kept by whoever asks."""
    # Priorities below the lowest number are clamped to it.
    return cupy_stream.Stream(non_blocking=True, priority=-100)


def new_event() -> int:
    """An event that takes no time stamps."""
    return int(runtime.eventCreateWithFlags(_NO_TIMING))


def event_done(event: int) -> bool:
    """Whether all that came before ``event`` on its stream is done; True if never recorded."""
    return int(runtime.eventQuery(event)) != _NOT_READY


class Ready:
    """An event behind which the table is written.

    Waits: ``ready.wait(stream)``, or by its handle (``ptr``, ``cuda_event``). It may come to
    stand for a later write of the same allocator, which only ever makes a wait longer.

    Attributes:
        ptr: the handle of the event.
        captured: whether it belongs to a capture, and means nothing outside of it.
    """

    __slots__ = ("_device", "captured", "ptr")

    def __init__(self, ptr: int, device: int, captured: bool = False) -> None:
        self.ptr = ptr
        self._device = device
        self.captured = captured

    @property
    def cuda_event(self) -> int:
        """The handle, as torch names it."""
        return self.ptr

    def query(self) -> bool:
        """Whether the write is done; does not wait."""
        return event_done(self.ptr)

    @property
    def done(self) -> bool:
        """As `query`."""
        return event_done(self.ptr)

    def wait(self, stream: Any = None) -> None:
        """Let ``stream`` (the current one if None) wait for the write; the host goes on.

        A capturing stream can wait only for a write of the same capture, and takes no other.
        """
        pointer = current_stream(self._device) if stream is None else stream_pointer(stream)
        if self.captured or not runtime.streamIsCapturing(pointer):
            runtime.streamWaitEvent(pointer, self.ptr)

    def synchronize(self) -> None:
        """Let the host wait for the write."""
        runtime.eventSynchronize(self.ptr)


class current_device:
    """Make a device current, and restore the one that was."""

    __slots__ = ("_before", "_wanted")

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = runtime.getDevice()
        if self._before != self._wanted:
            runtime.setDevice(self._wanted)

    def __exit__(self, *_: object) -> None:
        if self._before != self._wanted:
            runtime.setDevice(self._before)
