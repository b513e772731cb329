"""What one fresh process sees: imports and first calls, printed as JSON.

By name the time that passed and the processor time of the process, both in µs: on a busy machine
the first has the work of others in it.

Run by `profiling.starting`, as `python -m profiling.started HOW`.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter_ns, process_time_ns
from typing import Any

BATCH, PAGE, PROMPT, WIDTH, RESERVE = 256, 64, 1000, 1536, 16
STEPS = 40
IMPORT, CPU, CPU_WARM, GPU = "import", "cpu", "cpu-warm", "gpu"


def seen(how: str) -> dict[str, tuple[float, float]]:
    """Times of the first calls.

    Args:
        how: `IMPORT` (no more than that), `CPU` or `GPU`, or `CPU_WARM` for a CPU with `warm()`.

    Returns:
        Microseconds that passed, and of the processor, by name in the order of the calls.
    """
    found: dict[str, tuple[float, float]] = {}
    last = [0, 0]

    def begin() -> None:
        last[:] = process_time_ns(), perf_counter_ns()

    def done(name: str) -> None:
        passed = perf_counter_ns() - last[1]
        found[name] = (passed / 1000, (process_time_ns() - last[0]) / 1000)
        begin()

    begin()

    import numpy as np

    done("import numpy")
    import sgalloc

    done("import sgalloc")
    if how == IMPORT:
        return found
    if how == GPU:
        from cupy.cuda import runtime

        done("import cupy")
        runtime.free(0)
        done("CUDA context")
    device = "cuda" if how == GPU else "cpu"
    pages = BATCH * WIDTH // PAGE
    alloc = sgalloc.KVAllocator(pages, PAGE, BATCH, WIDTH, device=device)
    done("constructor")

    def wait() -> None:
        if how == GPU:
            runtime.deviceSynchronize()

    if how != CPU:
        alloc.warm(4096)
        wait()
        done("warm()")
    lengths = PROMPT - np.arange(BATCH) % PAGE  # so that some grow in each step
    for turn in ("first", "second"):
        handles = alloc.open(BATCH)
        alloc.extend(handles, lengths)
        wait()
        done(f"prompts, {turn}")
        if turn == "first":
            alloc.release(handles)
            begin()
    batch: Any = alloc.batch(handles)
    names = {1: "step, first", 2: "step, second", STEPS: f"step, {STEPS}th"}
    for turn in range(1, STEPS + 1):
        begin()
        alloc.reserve(batch, RESERVE)
        wait()
        done(names.get(turn, ""))
        alloc.commit(batch, 3)
    found.pop("")
    return found


if __name__ == "__main__":
    json.dump(seen(sys.argv[1]), sys.stdout)
