"""Counts what the package asks of CUDA: launches, copies, waits, polls, allocations, compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import pytest
from cupy.cuda import compiler, runtime

from sgalloc.device import batched, cuda, cuda_digest, kernels

WAITS = ("deviceSynchronize", "streamSynchronize", "eventSynchronize")
POLLS = ("eventQuery", "streamQuery")
COPIES = ("memcpyAsync",)
# None of these belongs into a step at all.
NEVER = (
    "memcpy", "malloc", "mallocAsync", "mallocManaged", "hostAlloc", "free", "freeAsync",
    "freeHost", "memset", "streamBeginCapture", "graphInstantiate",
)  # fmt: skip


class Spy:
    """Counts calls from now on, by the name of the CUDA function.

    Attributes:
        calls: by name; a kernel launched the plain way counts as ``"kernel NAME"``, and one
            that a graph launches as ``"graphLaunch"``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in (*WAITS, *POLLS, *COPIES, *NEVER, "graphLaunch"):
            self._watch(monkeypatch, runtime, name, name)
        # CuPy's own objects call CUDA below the functions above.
        for owner, names in (
            (cupy.cuda.Stream, ("synchronize",)),
            (cupy.cuda.Event, ("synchronize",)),
            (cupy.ndarray, ("get", "set", "item")),
        ):
            for name in names:
                self._watch(monkeypatch, owner, name, f"{owner.__name__}.{name}")
        for name in ("_compile_module_with_cache", "_compile_using_nvrtc_no_warning"):
            self._watch(monkeypatch, compiler, name, "compile")
        real = kernels.kernel

        def kernel(name: str, device: int) -> Any:
            function = real(name, device)

            def launch(*args: Any, **kwargs: Any) -> Any:
                self.calls[f"kernel {name}"] += 1
                return function(*args, **kwargs)

            return launch

        for module in (cuda, batched, cuda_digest):
            monkeypatch.setattr(module, "kernel", kernel)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, label: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[label] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    @property
    def launches(self) -> int:
        """Kernels launched, plainly or by a graph."""
        plain = sum(n for name, n in self.calls.items() if name.startswith("kernel "))
        return plain + self.calls["graphLaunch"]

    @property
    def copies(self) -> int:
        """Copies asked for."""
        return sum(self.calls[name] for name in COPIES)

    @property
    def polls(self) -> int:
        """Times an event or a stream was asked whether it is done."""
        return sum(self.calls[name] for name in POLLS)

    @property
    def waits(self) -> dict[str, int]:
        """Whatever the host waits in; every hidden copy to or from the host does, too."""
        names = (*WAITS, "Stream.synchronize", "Event.synchronize")
        names += ("ndarray.get", "ndarray.set", "ndarray.item")
        return {name: self.calls[name] for name in names if self.calls[name]}

    @property
    def never(self) -> dict[str, int]:
        """What no step may do: compile, allocate, free, capture, copy and wait."""
        return {name: self.calls[name] for name in (*NEVER, "compile") if self.calls[name]}


@contextmanager
def device_allocations() -> Iterator[list[int]]:
    """Sizes of all device memory asked of CuPy inside, pooled memory included."""
    sizes: list[int] = []
    pool = cupy.get_default_memory_pool()

    def counting(size: int) -> Any:
        if size:
            sizes.append(size)
        return pool.malloc(size)

    with cupy.cuda.using_allocator(counting):
        yield sizes
