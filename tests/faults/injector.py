"""Counts the calls that cross into a device, and lets the k-th of them fail in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

# What a verb may call of a device, as far as it can fail. `write_here` and `unmap` call `write`.
PROTOCOL = (
    "capturing", "checked_out", "done", "empty", "event", "export", "gather", "rejoin", "unmap",
    "unwritten", "waitable", "warm", "write", "write_here", "write_watermarks",
)  # fmt: skip
# What a CUDA device may call of CUDA.
RUNTIME = (
    "deviceSynchronize", "eventCreateWithFlags", "eventQuery", "eventRecord", "eventSynchronize",
    "getDevice", "graphLaunch", "memcpyAsync", "memsetAsync", "pointerGetAttributes", "setDevice",
    "streamIsCapturing", "streamWaitEvent",
)  # fmt: skip
LAUNCHES = ("graphLaunch", "kernel")

Make = Callable[[str], BaseException]


class Injector:
    """One fault at a time.

    Attributes:
        cuda: the state of the stand-in; None on a CPU.
        fired: the call that failed; None where none was reached.
        names: the calls of the last attempt, in order.
        behind_launch: whether a step is launched, and the event behind it not yet recorded.
        spare_launched: whether such a step is left alone: there the device is lost.
    """

    def __init__(self, spare_launched: bool = False) -> None:
        self.cuda: Any = None
        self.fired: str | None = None
        self.names: list[str] = []
        self.behind_launch = False
        self.spare_launched = spare_launched
        self._left = 0
        self._counts = False
        self._make: Make = RuntimeError
        self._refused: tuple[str, ...] = ()

    @contextmanager
    def at(self, k: int, make: Make) -> Iterator[None]:
        """Let the ``k``-th call inside raise what ``make`` makes of its name; none if 0."""
        self._left, self._make, self._counts = k, make, True
        self.fired, self.names, self.behind_launch = None, [], False
        try:
            yield
        finally:
            self._left, self._counts = 0, False

    @contextmanager
    def every(self, *names: str, make: Make) -> Iterator[None]:
        """Let every call of these ``names`` inside fail."""
        self._refused = names
        with self.at(0, make):
            yield
        self._refused = ()

    def hit(self, name: str) -> None:
        """A call of ``name`` is about to be made."""
        if not self._counts:
            return
        self.names.append(name)
        if name in self._refused:
            raise self._make(name)
        spared = self.behind_launch and self.spare_launched
        if self._left and not spared:
            self._left -= 1
            if not self._left:
                self.fired = name
                raise self._make(name)
        if name in LAUNCHES:
            self.behind_launch = True
        elif name in ("eventRecord", "end_capture"):
            self.behind_launch = False

    def watch(self, owner: Any, name: str, label: str | None = None) -> None:
        """Let every call of the attribute ``name`` of ``owner`` count."""
        real, called = getattr(owner, name), label or name

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.hit(called)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    def watch_allocator(self, alloc: Any) -> None:
        """Let the calls into its device count."""
        for name in PROTOCOL:
            self.watch(alloc._core.device, name)

    def watch_cuda(self) -> None:
        """Let the calls of CUDA count: of the stand-in, before any room has imported it."""
        import cupy
        from cupy.cuda import runtime

        for name in RUNTIME:
            self.watch(runtime, name)
        for name in ("empty", "zeros"):
            self.watch(cupy, name, f"cupy.{name}")
        self.watch(cupy.cuda.PinnedMemory, "__init__", "PinnedMemory")
        for name in ("begin_capture", "end_capture"):
            self.watch(cupy.cuda.Stream, name)
        self.watch(cupy.Function, "__call__", "kernel")


def cuda_failure(status: int | None = None) -> Make:
    """What CuPy raises: of a ``status``, or one of the failures that a call can survive."""

    def make(name: str) -> BaseException:
        import cupy
        from cupy.cuda import driver, runtime

        if name.startswith("cupy.") and status is None:
            return cupy.cuda.memory.OutOfMemoryError("Out of memory allocating 512 bytes")
        if name == "kernel":
            code = 701 if status is None else status
            error = driver.CUDADriverError(f"CUDA_ERROR_{code}: too many resources requested")
        else:
            code = 2 if status is None else status
            error = runtime.CUDARuntimeError(f"cudaError{code}: out of something")
        error.status = code
        return error

    return make


def interrupt(_: str) -> BaseException:
    """Ctrl-C."""
    return KeyboardInterrupt()


def plain_failure(name: str) -> BaseException:
    """What nobody foresaw."""
    return RuntimeError(f"{name} failed")


def no_memory(name: str) -> BaseException:
    """The host has no memory left."""
    return MemoryError(name)
