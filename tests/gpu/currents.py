"""Streams of every kind, as the current one and as the allocator's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
import pytest
from cupy.cuda import runtime


class Foreign:
    """Some library's stream: it knows the protocol and nothing else."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.owner.ptr)


def cuda_torch() -> Any:
    """torch with CUDA, or the test is skipped."""
    torch = pytest.importorskip("torch", reason="this test uses torch's streams")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@contextmanager
def torch_unloaded() -> Iterator[None]:
    """As in a process that never imported torch: CuPy's current stream is the current one."""
    torch = sys.modules.pop("torch", None)
    try:
        yield
    finally:
        if torch is not None:
            sys.modules["torch"] = torch


@contextmanager
def _torch_default() -> Iterator[int]:
    yield int(cuda_torch().cuda.default_stream().cuda_stream)


@contextmanager
def _torch_side() -> Iterator[int]:
    torch = cuda_torch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield int(stream.cuda_stream)


@contextmanager
def _cupy(make: Callable[[], Any], unloaded: bool = True) -> Iterator[int]:
    stream = make()
    if unloaded:
        with torch_unloaded(), stream:
            yield int(stream.ptr)
    else:
        cuda_torch()
        with stream:
            yield int(stream.ptr)


def _side() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


# Each makes a stream current and gives its handle.
CURRENTS: dict[str, Callable[[], AbstractContextManager[int]]] = {
    "torch default": _torch_default,
    "torch side": _torch_side,
    "cupy null": lambda: _cupy(lambda: cupy.cuda.Stream.null),
    "cupy side": lambda: _cupy(_side),
    "cupy blocking side": lambda: _cupy(cupy.cuda.Stream),
    "per-thread default": lambda: _cupy(lambda: cupy.cuda.Stream.ptds),
    "cupy side beside torch": lambda: _cupy(_side, unloaded=False),
}


def _raw(keep: list[Any]) -> int:
    keep.append(_side())
    return int(keep[-1].ptr)


# Each gives what to pass as stream=; a stream whose handle alone is passed is kept in the list.
STREAMS: dict[str, Callable[[list[Any]], Any]] = {
    "current": lambda keep: None,
    "plan": lambda keep: "plan",
    "cupy": lambda keep: _side(),
    "cupy blocking": lambda keep: cupy.cuda.Stream(),
    "cupy null": lambda keep: cupy.cuda.Stream.null,
    "cupy per-thread": lambda keep: cupy.cuda.Stream.ptds,
    "torch": lambda keep: cuda_torch().cuda.Stream(),
    "torch default": lambda keep: cuda_torch().cuda.default_stream(),
    "protocol": lambda keep: Foreign(_side()),
    "raw": _raw,
    "raw null": lambda keep: 0,
    "raw legacy": lambda keep: 1,
    "raw per-thread": lambda keep: 2,
}


class Raw:
    """A raw handle that knows the stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def event_behind(stream: int, kind: str) -> tuple[Any, Any]:
    """An event recorded on ``stream`` now: torch's, CuPy's, or the raw handle of a CuPy one.

    Returns:
        What to pass as ``after=``, and the object to keep.
    """
    if kind == "torch":
        torch = cuda_torch()
        event = torch.cuda.Event()
        event.record(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream())
        return event, event
    owner = cupy.cuda.Event(disable_timing=True)
    runtime.eventRecord(owner.ptr, stream)
    return (int(owner.ptr) if kind == "raw" else owner), owner


# Under which current stream, and on which of its own, an allocator writes.
MODES = {
    "one stream, torch's default": ("torch default", "current"),
    "one stream, torch's side": ("torch side", "current"),
    "one stream, CuPy's side": ("cupy side", "current"),
    "plan stream": ("torch side", "plan"),
}
