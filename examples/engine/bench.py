"""The picture: tokens a second, and what the allocator takes of a step, beside a naive one.

python -m examples.engine.bench --device cuda --model 1b --running 256 --seconds 10 --out FILE.json
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from examples.engine.engine import Engine, Settings
from examples.engine.model import LLAMA_1B, TINY, Model
from examples.engine.naive import NaiveAllocator, NaiveScheduler
from examples.engine.scheduler import Request

VERBS = ("open", "batch", "plan", "apply", "release", "settle", "rows", "committed")
TRACED = 200  # steps that the time line shows


class Clock:
    """Notes when parts of steps began and how long they took, in seconds of the host."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []
        self.spent = 0.0  # in verbs of the allocator
        self._inside = False

    def part(self, owner: Any, name: str, verb: bool = False) -> None:
        """Time a method of ``owner`` from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if verb and self._inside:  # a verb that another one calls
                return method(*args, **kwargs)
            self._inside, began = verb, perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = perf_counter() - began
                self.events.append((name, began, took))
                if verb:
                    self._inside = False
                    self.spent += took

        setattr(owner, name, timed)


def workload(settings: Settings, vocab: int) -> Callable[[], Request]:
    """Endless requests of random lengths."""
    draw, longest = np.random.default_rng(1), settings.context

    def request() -> Request:
        prompt = draw.integers(0, vocab, int(draw.integers(longest // 16, longest // 2)))
        return Request(0, prompt, int(draw.integers(longest // 16, longest // 3)))

    return request


def measure(model: Model, settings: Settings, naive: bool, seconds: float) -> dict[str, Any]:
    """Keep the engine full for ``seconds``; what came of it."""
    engine = Engine(model, settings, NaiveAllocator(settings, model) if naive else None)
    if naive:
        engine.scheduler = NaiveScheduler(engine.alloc, engine.scheduler.limits, False)
    scheduler, clock = engine.scheduler, Clock()
    next_request = workload(settings, model.config.vocab)
    for name in VERBS:
        clock.part(engine.alloc, name, verb=True)
    clock.part(scheduler, "_has_room", verb=True)
    for name in ("_prefill", "_decode", "land"):
        clock.part(engine, name)

    def step() -> None:
        while len(scheduler.queue) < 8:
            engine.submit(next_request())
        engine.step()

    while scheduler.running.size < 0.95 * settings.running:
        step()
    for _ in range(20):
        step()
    gc.collect()
    gc.freeze()
    clock.events.clear()
    steps: list[dict[str, float]] = []
    began, put_out = perf_counter(), scheduler.counts["tokens"]
    while perf_counter() - began < seconds:
        clock.spent, at = 0.0, perf_counter()
        step()
        took = perf_counter() - at
        running = scheduler.running.size
        steps.append({"at": at - began, "step": took, "allocator": clock.spent, "running": running})
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    wall = perf_counter() - began
    gc.unfreeze()
    whole, verbs = (np.array([one[name] for one in steps]) for name in ("step", "allocator"))
    last = steps[-TRACED:][0]["at"] + began
    return {
        "allocator": "naive" if naive else "sgalloc",
        "overlap": settings.overlap,
        "tokens_per_second": (scheduler.counts["tokens"] - put_out) / wall,
        "steps": len(steps),
        "running": float(np.mean([one["running"] for one in steps])),
        "step_ms": _quantiles(whole * 1e3),
        "allocator_us": _quantiles(verbs * 1e6),
        "allocator_share": float(verbs.sum() / whole.sum()),
        "time_line": steps,
        "parts": [event for event in clock.events if event[1] >= last],
    }


def _quantiles(values: Any) -> dict[str, float]:
    return {f"p{at}": float(np.percentile(values, at)) for at in (10, 50, 90, 99)}


def trace(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of the last steps of each run as events of a Chrome trace."""
    found = []
    for number, run in enumerate(runs):
        parts = run.pop("parts")
        title = f"{run['allocator']}{', overlapped' if run['overlap'] else ''}"
        found.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        for name, began, took in parts:
            where = {"pid": number, "tid": int(name in VERBS)}
            when = {"ts": (began - parts[0][1]) * 1e6, "dur": took * 1e6}
            found.append({"ph": "X", "name": name, **where, **when})
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure both allocators, with and without overlap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("1b", "tiny"), default="1b")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", required=True)
    given = parser.parse_args(arguments)
    gpu = given.device != "cpu"
    dtype = torch.bfloat16 if gpu else torch.float64
    model = Model(LLAMA_1B if given.model == "1b" else TINY, 0, dtype, given.device)
    pages = given.running * (given.context // given.page_size + 1)
    runs = []
    for overlap in (True, False):
        for naive in (False, True):
            settings = Settings(
                pages, pages, given.page_size, given.running, given.context,
                chunk=4096 if gpu else 64, overlap=overlap, prefix_cache=False, graphs=gpu,
            )  # fmt: skip
            runs.append(measure(model, settings, naive, given.seconds))
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
            short = {key: runs[-1][key] for key in runs[-1] if key not in ("time_line", "parts")}
            print(json.dumps(short))
    name = torch.cuda.get_device_name() if gpu else "CPU"
    with open(given.out, "w", encoding="utf-8") as file:
        json.dump({"device": name, "traceEvents": trace(runs), "runs": runs}, file)


if __name__ == "__main__":
    main()
