"""The example of a timeline: a few steps of an engine that speculates, with prompts that share.

python -m profiling.timeline_example --out profiling/results/nvidia-h200/timeline.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import click
import numpy as np

import sgalloc
from sgalloc import timeline
from sgalloc.device import cuda_missing

PAGE, REQUESTS, PROMPT, RESERVE, STEPS = 64, 256, 1000, 16, 6
SHARED = 512
FORWARD_SECONDS = 200e-6
WIDTH = 2048


def forward_on(device: str) -> Callable[[], Any]:
    """Something in the place of a forward pass: the GPU is busy, or the host waits for nobody."""
    if device == "cpu":
        return lambda: sleep(FORWARD_SECONDS)
    import cupy

    square = cupy.zeros((WIDTH, WIDTH), cupy.float32)
    cupy.dot(square, square)
    return lambda: cupy.dot(square, square)


def run(path: Path | None, device: str) -> timeline.Recording:
    """Record the example; the first steps go unrecorded, so that all is warm."""
    pages = REQUESTS * (PROMPT // PAGE + 8)
    alloc = sgalloc.KVAllocator(pages, PAGE, REQUESTS, 2048, device=device, prefix_cache=True)
    alloc.warm()
    drawn = np.random.default_rng(1)
    prompts = drawn.integers(0, 50_000, (REQUESTS, PROMPT))
    prompts[:, :SHARED] = prompts[0, :SHARED]
    accepted = drawn.integers(1, 6, (STEPS, REQUESTS))
    forward = forward_on(device)

    def wave(record: timeline.Recording | None) -> None:
        def passes(name: str, **arguments: Any) -> None:
            if record is None:
                forward()
                return
            with record.span(name, **arguments):
                forward()

        handles = alloc.open_with_prefix([alloc.prefix.match(prompt) for prompt in prompts])
        batch = alloc.batch(handles)
        alloc.extend(batch, PROMPT)
        passes("forward", prefill=REQUESTS)
        for step in range(STEPS):
            alloc.reserve(batch, RESERVE)
            passes("forward", step=step)
            alloc.commit(batch, accepted[step])
        alloc.release(handles, tokens=list(prompts))

    wave(None)
    with timeline.record(alloc, path) as record:
        wave(record)
    alloc.check(device=True)
    return record


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--device", default=None, help="cpu or cuda; a GPU where there is one.")
def main(out: Path, device: str | None) -> None:
    """Write the example of a timeline, for https://ui.perfetto.dev and for the docs' picture."""
    chosen = device or ("cpu" if cuda_missing() is not None else "cuda")
    out.parent.mkdir(parents=True, exist_ok=True)
    record = run(out, chosen)
    click.echo(f"wrote {out}: {len(record.events())} events on {chosen}", file=sys.stderr)


if __name__ == "__main__":
    main()
