"""The picture: tokens a second, and what the allocator takes of a step, beside a naive one.

python -m examples.engine.bench --device cuda --model 1b --running 256 --steps 400 --out FILE.json

Four engines over one model (both allocators, with and without overlap) are filled first, and then
make as many steps each, in turns. All serve the same requests, so the steps do the same work.
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
    """An engine that is kept full, measured in turns.

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
        self._steps: list[dict[str, Any]] = []
        self._wall, self._tokens = 0.0, 0

    def fill(self) -> None:
        """Step until the engine is full, so that no graph and no kernel is new any more."""
        while self._scheduler.running.size < 0.95 * self.settings.running:
            self._step()
        for _ in range(20):
            self._step()

    def turn(self, count: int) -> None:
        """Make ``count`` steps, and note each."""
        self._clock.events.clear()
        began, put_out = perf_counter(), self._scheduler.counts["tokens"]
        for _ in range(count):
            self._clock.spent, first, at = 0.0, len(self._clock.events), perf_counter()
            self._step()
            took, events = perf_counter() - at, self._clock.events[first:]
            self._steps.append(
                {
                    "at": self._wall + at - began,
                    "step": took,
                    "allocator": self._clock.spent,
                    "running": self._scheduler.running.size,
                    "prefills": any(name == "prefilled" for name, _, _ in events),
                }
            )
        if self._engine.gpu:
            torch.cuda.synchronize()
        self._wall += perf_counter() - began
        self._tokens += self._scheduler.counts["tokens"] - put_out

    def result(self) -> dict[str, Any]:
        """What came of all turns; steps that prefill, too, are told apart."""
        steps = self._steps
        whole, verbs = (np.array([one[name] for one in steps]) for name in ("step", "allocator"))
        decodes = np.array([not one["prefills"] for one in steps])
        shown = [one for one in self._clock.events if one[1] >= self._clock.events[-1][1] - 2]
        return {
            "allocator": "naive" if self.naive else "sgalloc",
            "overlap": self.settings.overlap,
            "tokens_per_second": self._tokens / self._wall,
            "steps": len(steps),
            "running": float(np.mean([one["running"] for one in steps])),
            "step_ms": _quantiles(whole * 1e3),
            "allocator_us": _quantiles(verbs * 1e6),
            "allocator_share": float(verbs.sum() / whole.sum()),
            "decode_steps": int(decodes.sum()),
            "decode_step_ms": _quantiles(whole[decodes] * 1e3),
            "decode_allocator_us": _quantiles(verbs[decodes] * 1e6),
            "time_line": steps,
            "parts": shown[-PARTS:],
        }

    def _step(self) -> None:
        while len(self._scheduler.queue) < 8:
            self._engine.submit(self._next())
        self._engine.step()


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


def main(arguments: list[str] | None = None) -> None:
    """Measure both allocators, with and without overlap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("1b", "tiny"), default="1b")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400, help="of each of the four")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--out", required=True)
    given = parser.parse_args(arguments)
    gpu = given.device != "cpu"
    dtype = torch.bfloat16 if gpu else torch.float64
    model = Model(LLAMA_1B if given.model == "1b" else TINY, 0, dtype, given.device)
    pages = given.running * (given.context // given.page_size + 1)
    runners = [
        Runner(
            model,
            Settings(
                pages, pages, given.page_size, given.running, given.context,
                chunk=4096 if gpu else 64, overlap=overlap, prefix_cache=False, graphs=gpu,
            ),
            naive,
        )
        for overlap in (True, False)
        for naive in (False, True)
    ]  # fmt: skip
    for runner in runners:
        runner.fill()
    gc.collect()
    gc.freeze()
    # In turns, so that whatever else the machine does hits all alike.
    for _ in range(given.turns):
        for runner in runners:
            runner.turn(-(-given.steps // given.turns))
    gc.unfreeze()
    runs = [runner.result() for runner in runners]
    for run in runs:
        short = {key: run[key] for key in run if key not in ("time_line", "parts")}
        print(json.dumps(short))
    name = torch.cuda.get_device_name() if gpu else "CPU"
    with open(given.out, "w", encoding="utf-8") as file:
        json.dump({"device": name, "traceEvents": trace(runs), "runs": runs}, file)


if __name__ == "__main__":
    main()
