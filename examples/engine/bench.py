"""The picture: tokens a second, and what the allocator takes of a step, beside a naive one.

python -m examples.engine.bench --device cuda --model 1b --running 256 --steps 400 --out FILE.json

Both allocators, with and without overlap, one engine after the other, in two rounds: each is filled
first and then makes as many steps. All serve the same requests, so the steps do the same work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
from collections.abc import Callable
from datetime import date
from time import perf_counter
from typing import Any

import numpy as np

# Shapes differ from step to step: without this torch frees and asks for memory in the middle.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from examples.engine.engine import Engine, Settings
from examples.engine.model import LLAMA_1B, TINY, Model
from examples.engine.naive import NaiveAllocator, NaiveScheduler
from examples.engine.scheduler import Request

VERBS = ("open", "batch", "plan", "apply", "release", "settle", "rows", "committed")
PARTS = 4000  # of the last steps, that the time line shows


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


class Runner:
    """An engine that is kept full.

    Args:
        model: whose forwards it runs.
        settings: of the engine.
        naive: whether a plain Python allocator stands behind it.
    """

    def __init__(self, model: Model, settings: Settings, naive: bool) -> None:
        self.settings, self.naive = settings, naive
        self._engine = Engine(model, settings, NaiveAllocator(settings, model) if naive else None)
        if naive:
            limits = self._engine.scheduler.limits
            self._engine.scheduler = NaiveScheduler(self._engine.alloc, limits, False)
        self._scheduler, self._clock = self._engine.scheduler, Clock()
        self._next = workload(settings, model.config.vocab)
        for name in VERBS:
            self._clock.part(self._engine.alloc, name, verb=True)
        self._clock.part(self._scheduler, "_has_room", verb=True)
        self._clock.part(self._scheduler, "prefilled")
        for name in ("_prefill", "_decode", "land"):
            self._clock.part(self._engine, name)

    def fill(self) -> None:
        """Step until the engine is full, so that no graph and no kernel is new any more."""
        while self._scheduler.running.size < 0.95 * self.settings.running:
            self._step()
        for _ in range(20):
            self._step()

    def run(self, count: int, into: Measured) -> None:
        """Make ``count`` steps, and note each."""
        clock, scheduler = self._clock, self._scheduler
        gc.collect()
        gc.freeze()
        clock.events.clear()
        began, put_out = perf_counter(), scheduler.counts["tokens"]
        for _ in range(count):
            clock.spent, first, at = 0.0, len(clock.events), perf_counter()
            self._step()
            took, events = perf_counter() - at, clock.events[first:]
            into.steps.append(
                {
                    "at": into.wall + at - began,
                    "step": took,
                    "allocator": clock.spent,
                    "running": scheduler.running.size,
                    "prefills": any(name == "prefilled" for name, _, _ in events),
                }
            )
        if self._engine.gpu:
            torch.cuda.synchronize()
        into.wall += perf_counter() - began
        into.tokens += scheduler.counts["tokens"] - put_out
        into.parts = clock.events[-PARTS:]
        gc.unfreeze()

    def _step(self) -> None:
        while len(self._scheduler.queue) < 8:
            self._engine.submit(self._next())
        self._engine.step()


class Measured:
    """What the engines of one kind did, in all rounds."""

    def __init__(self, overlap: bool, naive: bool) -> None:
        self.overlap, self.naive = overlap, naive
        self.steps: list[dict[str, Any]] = []
        self.parts: list[tuple[str, float, float]] = []
        self.wall, self.tokens = 0.0, 0

    def result(self) -> dict[str, Any]:
        """All of it; steps without a prefill are told apart."""
        steps = self.steps
        whole, verbs = (np.array([one[name] for one in steps]) for name in ("step", "allocator"))
        decodes = np.array([not one["prefills"] for one in steps])
        return {
            "allocator": "naive" if self.naive else "sgalloc",
            "overlap": self.overlap,
            "tokens_per_second": self.tokens / self.wall,
            "steps": len(steps),
            "running": float(np.mean([one["running"] for one in steps])),
            "step_ms": _quantiles(whole * 1e3),
            "allocator_us": _quantiles(verbs * 1e6),
            "allocator_share": float(verbs.sum() / whole.sum()),
            "decode_steps": int(decodes.sum()),
            "decode_step_ms": _quantiles(whole[decodes] * 1e3),
            "decode_allocator_us": _quantiles(verbs[decodes] * 1e6),
            "decode_allocator_share": float(verbs[decodes].sum() / max(1e-9, whole[decodes].sum())),
            "time_line": steps,
            "parts": self.parts,
        }


def _quantiles(values: Any) -> dict[str, float]:
    if not len(values):
        return {}
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


def table(document: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| step | allocator | tokens/s | a decode step, ms | of it in the allocator, µs | share |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for run in document["runs"]:
        lines.append(
            f"| {'overlapped' if run['overlap'] else 'in step'} | {run['allocator']} "
            f"| {run['tokens_per_second']:,.0f} | {run['decode_step_ms']['p50']:.2f} "
            f"| {run['decode_allocator_us']['p50']:,.0f} "
            f"| {100 * run['decode_allocator_share']:.1f}% |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure both allocators, with and without overlap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("1b", "tiny"), default="1b")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400, help="of each of the four")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", required=True)
    given = parser.parse_args(arguments)
    gpu = given.device != "cpu"
    dtype = torch.bfloat16 if gpu else torch.float64
    model = Model(LLAMA_1B if given.model == "1b" else TINY, 0, dtype, given.device)
    pages = given.running * (given.context // given.page_size + 1)
    runs: dict[tuple[bool, bool], Measured] = {}
    kinds = list(itertools.product((True, False), (False, True)))
    # One engine at a time, anew in each round: torch keeps memory for each of their streams. What
    # it loads and tries at the first forwards of a process is left to one that does not count.
    for number in range(-1, given.rounds):
        for kind in kinds if number >= 0 else kinds[:1]:
            settings = Settings(
                pages, pages, given.page_size, given.running, given.context,
                chunk=4096 if gpu else 64, overlap=kind[0], prefix_cache=False, graphs=gpu,
            )  # fmt: skip
            runner = Runner(model, settings, naive=kind[1])
            runner.fill()
            into = runs.setdefault(kind, Measured(*kind)) if number >= 0 else Measured(*kind)
            runner.run(given.steps // given.rounds, into)
            del runner
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
    results = [measured.result() for measured in runs.values()]
    document = {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "date": date.today().isoformat(),
        "traceEvents": trace(results),
        "runs": results,
    }
    with open(given.out, "w", encoding="utf-8") as file:
        json.dump(document, file)
    print(table(document))


if __name__ == "__main__":
    main()
