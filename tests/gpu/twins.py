"""One allocator on the CPU and one on the GPU that make the same calls, held against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime
from gpu.currents import cuda_torch
from gpu.naive import NaiveTables, equal
from host_support import open_handles
from numpy.typing import NDArray

import sgalloc
from sgalloc.plan import Plan
from sgalloc.prefix import Match

OUT_KINDS = ("cupy int32", "cupy int64", "torch int32", "torch int64")
_GUARD = 8  # entries on either side of every out array that nobody may touch
_POISON = -7
_REFUSALS = (sgalloc.AllocError, ValueError, TypeError)


class Both(NamedTuple):
    """What a call returned on either side; or that both refused it."""

    cpu: Any
    gpu: Any
    refused: bool = False

    def of(self, alloc: sgalloc.KVAllocator) -> Any:
        """The result that belongs to ``alloc``."""
        return self.cpu if alloc.device == "cpu" else self.gpu


class Out:
    """An array on the GPU, inside guards, and its twin on the CPU."""

    def __init__(self, size: int, kind: str, device: int = 0) -> None:
        library, name = kind.split()
        self._buffer: Any
        if library == "torch":
            torch = cuda_torch()
            dtype = getattr(torch, name)
            self._buffer = torch.full((size + 2 * _GUARD,), _POISON, dtype=dtype, device="cuda")
        else:
            with cupy.cuda.Device(device):
                self._buffer = cupy.full(size + 2 * _GUARD, _POISON, name)
        self.gpu = self._buffer[_GUARD : _GUARD + size]
        self.cpu = np.full(size, _POISON, name)

    def of(self, alloc: sgalloc.KVAllocator) -> Any:
        """The array that belongs to ``alloc``."""
        return self.cpu if alloc.device == "cpu" else self.gpu

    def verify(self) -> None:
        """The same slots on both sides, and nothing beside them."""
        whole = host(self._buffer)
        assert whole.dtype == self.cpu.dtype
        assert np.array_equal(whole[_GUARD : whole.size - _GUARD], self.cpu)
        assert (whole[:_GUARD] == _POISON).all() and (whole[whole.size - _GUARD :] == _POISON).all()


def host(array: Any) -> NDArray[Any]:
    """A host copy of whatever array, behind all that is queued."""
    if isinstance(array, np.ndarray):
        return array.copy()
    if isinstance(array, cupy.ndarray):
        with array.device:
            runtime.deviceSynchronize()
            return cupy.asnumpy(array)
    runtime.deviceSynchronize()
    return np.asarray(array.cpu().numpy())


@dataclass
class Counts:
    """What the steps of a walk took on the GPU."""

    launches: int = 0
    copies: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Twins:
    """The same calls on both devices; after every one everything is compared.

    Args:
        warm: new pages of one step that the GPU provides for at once.
        on_gpu: further arguments of the allocator on the GPU alone.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        prefix_cache: bool = False,
        warm: int = 1024,
        **on_gpu: Any,
    ) -> None:
        def make(device: str, **more: Any) -> sgalloc.KVAllocator:
            return sgalloc.KVAllocator(
                num_pages, page_size, max_requests, row_width, device=device,
                prefix_cache=prefix_cache, page_table=True, **more,
            )  # fmt: skip

        self.cpu = make("cpu")
        self.gpu = make("cuda", **on_gpu)
        self.gpu.warm(warm)
        self.naive = NaiveTables(max_requests, row_width, page_size)
        self.handles: list[int] = []
        self.counts = Counts()

    def call(
        self,
        do: Callable[[sgalloc.KVAllocator, Any], Any],
        size: int | None = None,
        kind: str = OUT_KINDS[0],
        opens: bool = False,
    ) -> Both:
        """Let ``do(alloc, out)`` run on both, and compare what it did.

        Args:
            do: the call.
            size: entries of the ``out`` that it gets; None for no ``out``.
            kind: library and dtype of that.
            opens: whether it returns handles of requests that it opened.
        """
        index = self.gpu.req_to_token.device.id
        out = None if size is None else Out(size, kind, index)
        device = self.gpu._core.device
        before = device.launches, device.copies
        # The out arrays were filled on whatever stream; the tests of order have no such wait.
        with cupy.cuda.Device(index):
            runtime.deviceSynchronize()
        cpu = self._one(self.cpu, do, out)
        gpu = self._one(self.gpu, do, out)
        after = device.launches, device.copies
        if isinstance(cpu, _REFUSALS) or isinstance(gpu, _REFUSALS):
            if type(cpu) is not type(gpu):
                raise AssertionError(f"the CPU said {cpu!r}, the GPU {gpu!r}")
            assert str(cpu) == str(gpu)
            assert after == before, "a refused call launched something"
            self.counts.refused[type(cpu).__name__] += 1
        else:
            assert_same(cpu, gpu)
            if opens:
                self.handles += cpu.tolist()
        self.counts.launches += after[0] - before[0]
        self.counts.copies += after[1] - before[1]
        self.compare()
        if out is not None:
            out.verify()
        return Both(cpu, gpu, isinstance(cpu, _REFUSALS))

    def _one(self, alloc: sgalloc.KVAllocator, do: Callable[..., Any], out: Out | None) -> Any:
        try:
            return do(alloc, None if out is None else out.of(alloc))
        except _REFUSALS as refusal:
            return refusal

    def open(self, count: int = 1) -> list[int]:
        """Open so many requests on both; their handles."""
        both = self.call(lambda a, out: a.open(count), opens=True)
        return [] if both.refused else list(both.cpu.tolist())

    def closed(self, handles: list[int]) -> None:
        """Take note that requests went away."""
        gone = set(handles)
        self.handles = [handle for handle in self.handles if handle not in gone]

    def compare(self) -> None:
        """Both tables byte for byte, each against the naive writer, and the two ledgers."""
        cpu, gpu = self.cpu, self.gpu
        live = _open(gpu, self.handles)
        assert _open(cpu, self.handles) == live  # asked of both, since refusals are counted
        for ask in ("rows", "committed", "allocated", "decode_index"):
            assert getattr(cpu, ask)(live).tolist() == getattr(gpu, ask)(live).tolist(), ask
        assert np.array_equal(cpu.owners(), gpu.owners())
        ours, theirs = cpu.stats(), gpu.stats()
        assert (ours.groups, ours.rows) == (theirs.groups, theirs.rows)
        assert dict(ours.refusals) == dict(theirs.refusals)
        self.naive.write(gpu, live)
        for name, table, expected in (
            ("req_to_token", gpu.req_to_token, self.naive.table),
            ("page_table", gpu.page_table, self.naive.page_table),
        ):
            found = host(table)
            assert equal(found, getattr(cpu, name)), _first(found, getattr(cpu, name))
            assert equal(found, expected), _first(found, expected)

    def check(self) -> None:
        """Both laws, as the allocators themselves prove them."""
        self.cpu.check(device=True)
        self.gpu.check(device=True)


def _open(alloc: sgalloc.KVAllocator, handles: list[int]) -> list[int]:
    """Those that are open: a call that closes some has just been made."""
    try:
        alloc.rows(handles)
    except sgalloc.StaleHandle:
        if len(handles) == 1:
            return []
        half = len(handles) // 2
        return _open(alloc, handles[:half]) + _open(alloc, handles[half:])
    return handles


def _first(found: NDArray[Any], expected: NDArray[Any]) -> str:
    wrong = np.argwhere(found != expected)
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} entries differ, first at {at}: {found[at]}, expected {expected[at]}"


def assert_same(ours: Any, theirs: Any) -> None:
    """Two results of the same call, on a CPU and on a GPU."""
    if isinstance(ours, Plan):
        assert isinstance(theirs, Plan)
        for name in ("rows", "cur", "nxt", "start", "stop"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        assert (ours.num_new_pages, ours.need, ours.gain) == (
            theirs.num_new_pages,
            theirs.need,
            theirs.gain,
        )
        assert ours.fits == theirs.fits
    elif isinstance(ours, Match):
        assert (ours.length, ours.pages.tolist()) == (theirs.length, theirs.pages.tolist())
    elif isinstance(ours, np.ndarray):
        array = host(theirs)
        assert array.dtype == ours.dtype and np.array_equal(array, ours)
    else:
        assert ours == theirs


def verify_rows(alloc: sgalloc.KVAllocator) -> None:
    """Every open row on the GPU is what the naive writer has, up to A; row 0 is zeros."""
    found = host(alloc.req_to_token)
    naive = NaiveTables(alloc.max_requests, alloc.row_width, alloc.page_size)
    handles = open_handles(alloc)
    naive.write(alloc, handles)
    for row, held in zip(alloc.rows(handles), alloc.allocated(handles), strict=True):
        wrong = (found[row, :held] != naive.table[row, :held]).nonzero()[0]
        assert not wrong.size, f"row {row} is wrong from column {wrong[0]} on"
    assert not found[0].any()
    alloc.check(device=True)
