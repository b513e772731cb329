"""Captures by torch and by CuPy, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from gpu.currents import CURRENTS, cuda_torch
from gpu.naive import NaiveTables
from gpu.twins import host
from host_support import open_handles

import sgalloc

PS = 4
# What a refusal says of a step that is staged and not replayed.
REMEDY = "replay the graph and let it finish"


def make(ps: int = PS, rows: int = 8, pages: int = 4000, **how: Any) -> sgalloc.KVAllocator:
    alloc = sgalloc.KVAllocator(pages, ps, rows, 100 * ps, device="cuda", **how)
    alloc.warm(2048)
    return alloc


def assert_table(alloc: sgalloc.KVAllocator, entries: np.ndarray | None = None) -> None:
    """The table (or a copy of it) has every open row as the naive writer would."""
    found = host(alloc.req_to_token) if entries is None else entries
    naive = NaiveTables(alloc.max_requests, alloc.row_width, alloc.page_size)
    handles = open_handles(alloc)
    naive.write(alloc, handles)
    for row, held in zip(alloc.rows(handles), alloc.allocated(handles), strict=True):
        assert np.array_equal(found[row, :held], naive.table[row, :held]), f"row {row}"


@contextmanager
def captured_by_torch() -> Iterator[Any]:
    """Capture in torch's default mode, in which polling an event breaks the capture."""
    torch = cuda_torch()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            yield graph
    finally:
        # A capture that broke leaves torch on its capture stream.
        torch.cuda.set_stream(before)


@contextmanager
def captured_by_cupy(mode: int, replay: list[Callable[[], None]]) -> Iterator[int]:
    """Capture on a side stream of CuPy's, current and with torch not loaded."""
    with CURRENTS["cupy side"]() as handle:
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture(mode)
        try:
            yield handle
        except BaseException:
            with suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
    replay.append(lambda: graph.launch(stream))


class Graph:
    """An update in a graph of CuPy's, replayed on a stream of its own."""

    def __init__(self, alloc: sgalloc.KVAllocator, max_pages: int = 64) -> None:
        self.alloc = alloc
        self.update = alloc.captured(max_pages)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        runtime.deviceSynchronize()
        self.stream.begin_capture(runtime.streamCaptureModeGlobal)
        self.update.launch(self.stream)
        self._graph = self.stream.end_capture()

    def launch(self) -> None:
        """Replay, and go on at once."""
        self._graph.launch(self.stream)

    def replay(self, times: int = 1) -> None:
        """Replay so often, and let it finish."""
        for _ in range(times):
            self.launch()
        runtime.deviceSynchronize()

    def extend(self, handles: Any, lengths: Any) -> None:
        """Stage a growth up to ``lengths``."""
        self.update.stage(self.alloc.plan(extend=(handles, lengths)))
