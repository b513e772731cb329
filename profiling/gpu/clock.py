"""How anything here is timed: on an idle GPU by the host's clock, or by replays of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Gpu:
    """The GPU that is current, as a clock: waits, graphs, and the time that one takes.

    Attributes:
        runtime: CuPy's module of CUDA's functions.
        device: its number.
        sms: its multiprocessors.
    """

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import runtime

        self._cupy = cupy
        self.runtime: Any = runtime
        self.device = int(runtime.getDevice())
        self.sms = int(runtime.getDeviceProperties(self.device)["multiProcessorCount"])
        self._start = runtime.eventCreate()
        self._stop = runtime.eventCreate()

    def wait(self) -> None:
        """Wait until the GPU has nothing left to do."""
        self.runtime.deviceSynchronize()

    def stream(self, priority: int | None = None) -> Any:
        """A stream of its own, for whoever keeps it."""
        return self._cupy.cuda.Stream(non_blocking=True, priority=priority)

    def capture(self, put: Callable[[int], None]) -> Any:
        """The graph of what ``put`` puts on the stream whose handle it is given."""
        stream = self.stream()
        stream.begin_capture(_RELAXED)
        put(int(stream.ptr))
        graph = stream.end_capture()
        graph.upload(stream)
        stream.synchronize()
        return graph

    def function(self, code: str, name: str) -> Any:
        """The kernel ``name`` of a source text, launched as `sgalloc.device.kernels.kernel`."""
        return self._cupy.RawModule(code=code).get_function(name).kernel

    def bare_graph(self) -> Any:
        """A graph of one kernel that does nothing."""
        function = self.function('extern "C" __global__ void nothing() {}', "nothing")
        stream = self.stream()
        function((1,), (1,), (), 0, stream)
        stream.synchronize()
        stream.begin_capture(_RELAXED)
        function((1,), (1,), (), 0, stream)
        return stream.end_capture()

    def launch(self, graph: Any, stream: int = 0) -> None:
        """Launch ``graph`` on the stream with the handle ``stream``."""
        self.runtime.graphLaunch(graph.graphExec, stream)

    def time_ns(self, call: Callable[[], Any]) -> int:
        """Nanoseconds that the GPU takes for what ``call`` puts on the idle default stream."""
        runtime = self.runtime
        runtime.eventRecord(self._start, 0)
        call()
        runtime.eventRecord(self._stop, 0)
        runtime.eventSynchronize(self._stop)
        return round(runtime.eventElapsedTime(self._start, self._stop) * 1e6)

    def replay_ns(self, graph: Any, stream: int) -> int:
        """Nanoseconds that the GPU takes for ``graph`` on an idle ``stream``."""
        runtime = self.runtime
        runtime.eventRecord(self._start, stream)
        runtime.graphLaunch(graph.graphExec, stream)
        runtime.eventRecord(self._stop, stream)
        runtime.eventSynchronize(self._stop)
        return round(runtime.eventElapsedTime(self._start, self._stop) * 1e6)

    def replays(self, graphs: Mapping[str, Any], times: int) -> dict[str, list[int]]:
        """Nanoseconds of each of ``times`` replays of each graph, in turns; three go untimed."""
        stream = self.stream()
        self.wait()  # for what was copied to the device just before
        series: dict[str, list[int]] = {name: [] for name in graphs}
        for turn in range(times + 3):
            for name, graph in graphs.items():
                took = self.replay_ns(graph, int(stream.ptr))
                if turn >= 3:
                    series[name].append(took)
        return series

    def to_device(self, array: NDArray[Any]) -> Any:
        """A copy of ``array`` on the GPU."""
        return self._cupy.asarray(array)

    def to_host(self, array: Any) -> NDArray[Any]:
        """A copy of an array of the GPU's."""
        copy: NDArray[Any] = self._cupy.asnumpy(array)
        return copy

    def empty(self, shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
        """An array on the GPU, with whatever is there."""
        return self._cupy.empty(shape, dtype)

    def free_unused(self) -> None:
        """Give device memory that nothing uses back to CUDA."""
        self._cupy.get_default_memory_pool().free_all_blocks()
