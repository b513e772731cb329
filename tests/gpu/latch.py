"""Kernels that hold a stream on purpose, so that a test can tell whether a call waited for it.

A latch spins on its stream until the host opens it, or until its limit: a call that waited for
the stream comes back only then, and finds the latch no longer held. No clock of the host's
decides anything.
"""

from __future__ import annotations

import ctypes
import time
from functools import lru_cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

LIMIT_NS = 5_000_000_000
_WORDS = 4  # of a latch: opened by the host, started, ended (1: opened, 2: past the limit)
_OPENED, _STARTED, _ENDED = range(3)
_MOST = 256
_GUARD_S = 20.0

SOURCE = r"""
static __device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void hold(volatile int* words, long long limit) {
    words[1] = 1;
    __threadfence_system();
    unsigned long long start = nanoseconds();
    int ended = 0;
    while (!ended) {
        if (words[0]) ended = 1;
        else if (nanoseconds() - start > static_cast<unsigned long long>(limit)) ended = 2;
        else __nanosleep(200);
    }
    words[2] = ended;
    __threadfence_system();
}

extern "C" __global__ void spin(long long duration) {
    unsigned long long start = nanoseconds();
    while (nanoseconds() - start < static_cast<unsigned long long>(duration)) __nanosleep(200);
}

extern "C" __global__ void copy_entries(const int* from, int* to, int count) {
    int stride = gridDim.x * blockDim.x;
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        to[at] = from[at];
    }
}
"""


class Handle:
    """What CuPy's launch wants of a stream."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@lru_cache(maxsize=1)
def _functions() -> dict[str, Any]:
    """The kernels, each run once: loading one may wait for whatever runs on the GPU."""
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    found = {name: module.get_function(name).kernel for name in ("hold", "spin", "copy_entries")}
    words = _shared()[:_WORDS]
    words[:] = (1, 0, 0, 0)
    null = Handle(0)
    found["hold"]((1,), (1,), (words.ctypes.data, np.int64(LIMIT_NS)), 0, null)
    found["spin"]((1,), (1,), (np.int64(0),), 0, null)
    two = cupy.zeros(2, cupy.int32)
    found["copy_entries"]((1,), (1,), (two.data.ptr, two.data.ptr + 4, np.int32(1)), 0, null)
    runtime.deviceSynchronize()
    return found


@lru_cache(maxsize=1)
def _shared() -> NDArray[np.int32]:
    """Words that host and device both see; never freed, since freeing waits for the device."""
    flags = runtime.hostAllocPortable | runtime.hostAllocMapped
    memory = cupy.cuda.PinnedMemory(4 * _WORDS * _MOST, flags)
    _shared_owner.append(memory)
    return np.ctypeslib.as_array((ctypes.c_int32 * (_WORDS * _MOST)).from_address(memory.ptr))


_shared_owner: list[Any] = []


class Latch:
    """A stream that is held until `open`."""

    def __init__(self, words: NDArray[np.int32]) -> None:
        self._words = words

    @property
    def held(self) -> bool:
        """Whether the stream is still held: neither opened, nor past the limit."""
        return not self._words[_OPENED] and not self._words[_ENDED]

    @property
    def started(self) -> bool:
        """Whether the stream has got to it."""
        return bool(self._words[_STARTED])

    @property
    def outlasted(self) -> bool:
        """Whether it ended by its limit, because somebody waited for it."""
        return int(self._words[_ENDED]) == 2

    def open(self) -> None:
        """Let the stream go on."""
        self._words[_OPENED] = 1

    def wait_started(self) -> None:
        """Come back when the kernel runs, so that the stream is held for certain."""
        guard = time.monotonic() + _GUARD_S
        while not self.started:
            assert time.monotonic() < guard, "the latch never began: its stream is not running"
            time.sleep(0)


class Latches:
    """Latches of one test."""

    def __init__(self) -> None:
        _functions()
        self._used: list[Latch] = []

    def hold(self, stream: int, started: bool = True) -> Latch:
        """Hold ``stream`` (its handle) from now on; see to it that the kernel runs already.

        Args:
            stream: the raw handle.
            started: False where the stream waits for another latch first.
        """
        at = _WORDS * (len(self._used) + 1)
        words = _shared()[at : at + _WORDS]
        assert words.size == _WORDS, f"a test may use {_MOST - 1} latches"
        words[:] = 0
        latch = Latch(words)
        self._used.append(latch)
        arguments = (words.ctypes.data, np.int64(LIMIT_NS))
        _functions()["hold"]((1,), (1,), arguments, 0, Handle(stream))
        if started:
            latch.wait_started()
        return latch

    @staticmethod
    def let_the_rest_run() -> None:
        """Give what is not held the time to be done: a step that forgot to wait shows itself.

        Nothing is decided by this time; without it a fault might come too late to be seen.
        """
        time.sleep(0.003)

    def open_all(self) -> None:
        """Let everything go on."""
        for latch in self._used:
            latch.open()


def spin(stream: int, nanoseconds: int) -> None:
    """Keep ``stream`` busy for so long."""
    _functions()["spin"]((1,), (1,), (np.int64(nanoseconds),), 0, Handle(stream))


def copy_entries(source: int, target: int, count: int, stream: int) -> None:
    """Copy ``count`` int32 from one device address to another by a kernel on ``stream``."""
    arguments = (source, target, np.int32(count))
    _functions()["copy_entries"]((8,), (128,), arguments, 0, Handle(stream))
