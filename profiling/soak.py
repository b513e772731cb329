"""Traffic through one allocator for ever: does memory grow, do calls slow down, is anything lost?

``python -m profiling.soak --steps 5000000`` runs both traces again and again in one process, in
all modes that one allocator serves, and ends with status 1 where something leaked. It needs NumPy
and nvtx, and CuPy for ``--device cuda``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from profiling.memory import memory, settle
from profiling.soak_traffic import Settings, Traffic, options_of, traces_of
from profiling.soak_verdict import finish, summary_lines
from sgalloc.bench import machine
from sgalloc.replay.endless import Stage, endless
from sgalloc.replay.options import Options
from sgalloc.replay.recording import Totals
from sgalloc.replay.requests import Workload

SCHEMA, VERSION = "sgalloc-soak", 1
# The cache is emptied after one run of so many, besides the last of each round of modes.
_EMPTY_ONE_OF = 4
# One run of so many ends where it is, with all its requests released.
_CUT_ONE_OF = 5
_COUNTED = ("finished", "aborted", "retractions", "refused", "moves", "live", "reclaimed")


class Soak:
    """A soak, and what it notes on the way.

    Args:
        settings: what to do.
        traces: what to run.

    Attributes:
        steps: steps so far.
        records: JSON, of what happened since the one before, and what is held when there is
            nothing to hold: all requests gone and the cache empty.
        problem: what was wrong, or None.
        interrupted: whether it ended before its steps were done.
    """

    def __init__(self, settings: Settings, traces: list[Workload]) -> None:
        self.settings = settings
        self.traffic = Traffic(traces, settings.requests)
        self.modes = options_of(settings)
        room = settings.num_pages * settings.page_size
        self.stage = Stage(list(self.modes.values()), min(self.traffic.longest, room))
        self.alloc = self.stage.allocators[""]
        for alloc in self.stage.allocators.values():
            alloc.warm()
        self.device = self.alloc.device
        self.steps = self.runs = 0
        self.records: list[str] = []
        self.problem: str | None = None
        self.interrupted = False
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(settings.seed)
        self._began = self._since = perf_counter()
        self._next = settings.every
        self._before: Counter[str] = Counter()
        self._steps_before = 0
        self._busy = process_time()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self._began

    def stop(self) -> None:
        """End after the present step; safe to call from a signal handler."""
        self.interrupted = True

    def run(self, note: Callable[[Soak], None] = lambda _: None) -> None:
        """Run all steps, or until it is stopped, its time is over or something is wrong.

        Args:
            note: called after each record.
        """
        settle()
        spread([0])
        self._record(False, note)  # before the first step; and all code of a record is loaded then
        while self._goes_on():
            for number, mode in enumerate(self.modes.values(), 1):
                last = number == len(self.modes)
                self._run(mode, last or bool(self._rng.integers(_EMPTY_ONE_OF) == 0))
                if not self._goes_on():
                    break
            whole = self.runs % len(self.modes) == 0
            if self.steps >= self._next or not whole:
                self._record(whole, note)
                self._next = self.steps + self.settings.every

    def _goes_on(self) -> bool:
        return self.steps < self.settings.steps and not self.interrupted and self.problem is None

    def _run(self, mode: Options, empty: bool) -> None:
        """One run, to its end or cut short; its requests are all gone afterwards."""
        seed = int(self._rng.integers(2**31))
        # One more in each round, so that each mode meets all of it.
        turn = self.runs + self.runs // len(self.modes)
        # Each other run is a tenant of its own, that leaves nothing for the next one.
        namespace = f"tenant {self.runs}" if turn % 2 else None
        admit = "chunk" if turn % 3 and mode.disaggregated is None else "prompt"
        options = dataclasses.replace(mode, seed=seed, namespace=namespace, admit=admit)
        workload = self.traffic.take()
        if self._rng.integers(_CUT_ONE_OF) == 0:
            cut = int(self._rng.integers(10 * len(workload.requests)))
        else:
            cut = self.settings.steps
        engine = endless(workload, options, self.stage, self.settings.park_rate, empty)
        base, end = self.steps, self.settings.seconds

        def progress(totals: Totals) -> None:
            done = totals.steps + totals.prefill_steps
            self.steps = base + done
            if end is not None and self.seconds >= end:
                self.stop()
            if self.steps >= self.settings.steps or self.interrupted:
                engine.empties = True
                engine.stop()
            elif done >= cut:
                engine.stop()

        try:
            recording = engine.run(progress)
        except Exception as error:  # whatever it is, it ends a soak with a report
            self.problem = f"{type(error).__name__} in step {self.steps:,}: {error}"
            return
        totals = recording.totals
        self.counts.update({name: getattr(totals, name) for name in _COUNTED})
        self.counts["parked"] += engine.parked
        self.runs += 1
        if recording.violation is not None:
            self.problem = f"after {self.steps:,} steps: {recording.violation}"
        elif not recording.sound:
            self.problem = (
                f"after {self.steps:,} steps {recording.leaked_pages} pages and "
                f"{recording.leaked_rows} rows did not come back"
            )

    def _record(self, whole: bool, note: Callable[[Soak], None]) -> None:
        """Note what happened since the last record, in whole rounds or not."""
        now = perf_counter()
        counts = Counter(self.counts)
        refusals: Counter[str] = Counter()
        staging = dict.fromkeys(("slots", "waits", "grows"), 0)
        for alloc in self.stage.allocators.values():
            stats = alloc.stats()
            refusals.update({f"refused {name}": n for name, n in stats.refusals.items()})
            counts["evicted"] += sum(group.evicted for group in stats.groups.values())
            for name in staging:
                staging[name] += getattr(stats.staging, name)
        counts.update(refusals)
        steps = self.steps - self._steps_before
        record = {
            "steps": self.steps,
            "whole": whole,
            "seconds": round(now - self._began, 1),
            "step_us": round((now - self._since) / max(steps, 1) * 1e6, 1),
            "step_cpu_us": round((process_time() - self._busy) / max(steps, 1) * 1e6, 1),
            "staging": staging,
            "counts": {name: n for name, n in (counts - self._before).items() if n},
            "verbs": {name: spread(times) for name, times in self.stage.take().items()},
        }
        # What is held between two records is gone now.
        record["memory"] = memory(self.device != "cpu")._asdict()
        self.records.append(json.dumps(record))
        note(self)
        self._before, self._steps_before = counts, self.steps
        self._since, self._busy = perf_counter(), process_time()


def spread(times: Sequence[int]) -> list[int]:
    """How many there are, their median and their 99th percentile, to 10 ns."""
    middle, high = np.percentile(times, (50, 99)).tolist()
    return [len(times), round(middle / 10) * 10, round(high / 10) * 10]


def document(soak: Soak, watch: machine.Watch, generated: bool) -> dict[str, Any]:
    """All that is known, as it is kept."""
    done = soak.steps >= soak.settings.steps
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "environment": machine.environment() | gpu_environment(soak.device),
        "run": watch.report("full" if done else "partial", 0),
        "settings": dataclasses.asdict(soak.settings),
        "traffic": {
            "generated": generated,
            "traces": [trace.name for trace in soak.traffic.traces],
            "rounds": [round(share, 2) for share in soak.traffic.rounds],
        },
        "modes": list(soak.modes),
        "steps": soak.steps,
        "runs": soak.runs,
        "problem": soak.problem,
        "records": [json.loads(line) for line in soak.records],
    }


def gpu_environment(device: str) -> dict[str, Any]:
    """The GPU that has the table, if one has."""
    if device == "cpu":
        return {}
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "gpu": properties["name"].decode(),
        "cupy": cupy.__version__,
        "cuda_driver": runtime.driverGetVersion(),
    }


def write(data: dict[str, Any], path: Path) -> None:
    """Write a document, one record a line; what was there before stays until it is whole."""
    head = json.dumps({key: data[key] for key in data if key != "records"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(record)}" for record in data["records"])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    start = head.removesuffix("\n}")
    beside.write_text(f'{start},\n "records": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    beside.replace(path)


def measure(
    settings: Settings,
    traces: list[Workload],
    generated: bool,
    out: Path | None = None,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run a soak; the document, which is also in ``out`` as far as it got, at every moment."""
    watch = machine.Watch()
    soak = Soak(settings, traces)

    def note(soak: Soak) -> None:
        last = json.loads(soak.records[-1])
        show(
            f"{soak.steps:,} steps in {last['seconds']:,.0f} s, {last['step_us']:.0f} µs each, "
            f"{last['memory']['resident'] / 2**20:,.1f} MiB resident"
        )
        if out is not None:
            write(finish(document(soak, watch, generated)), out)

    with _on_interrupt(soak.stop):
        soak.run(note)
    data = finish(document(soak, watch, generated))
    if out is not None:
        write(data, out)
    return data


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call ``stop``, and put back what it did before."""
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where something leaked, grew or broke, 2 for bad usage."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m profiling.soak", description=__doc__)
    for name, kind, about in (
        ("steps", int, "steps in all"),
        ("seconds", float, "end after so many seconds"),
        ("device", str, "cpu or cuda"),
        ("num-pages", int, "pages of the pool"),
        ("page-size", int, "slots in a page"),
        ("running", int, "most requests at once"),
        ("chunk", int, "prefilled tokens a step"),
        ("window", int, "tokens of a sliding window"),
        ("sparse", float, "logical pages for each of the pool's"),
        ("abort-rate", float, "share of the requests that are aborted"),
        ("park-rate", float, "chance of a step to park a request"),
        ("requests", int, "requests of one run"),
        ("every", int, "steps between two records"),
        ("check-every", int, "steps between two checks of the laws"),
        ("seed", int, "of all that is random"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [{default}]")
    parser.add_argument("--disaggregated", action="store_true", help="a prefill node before it")
    parser.add_argument("--traces", type=Path, help="folder of both traces")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    given = vars(parser.parse_args(arguments))
    folder, out = given.pop("traces"), given.pop("out")
    try:
        traces, generated = traces_of(folder)
        if generated:
            print("The traces are not here: soaking in generated traffic.", flush=True)
        data = measure(
            Settings(**given), traces, generated, out, lambda line: print(line, flush=True)
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"profiling.soak: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary_lines(data)))
    return 0 if data["verdict"]["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())
