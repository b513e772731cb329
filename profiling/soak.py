"""Traffic through one allocator for ever: does memory grow, do calls slow down, is anything lost?

``python -m profiling.soak --steps 5000000`` runs both traces again and again in one process, in
all modes that one allocator serves, and ends with status 1 where something leaked. It needs NumPy
and nvtx, and CuPy for ``--device cuda``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from profiling import machine
from profiling.memory import memory, settle
from profiling.soak_verdict import finish, summary_lines
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.endless import Stage, endless
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.recording import Totals
from sgalloc.replay.requests import TraceRequest, Workload, real_number, whole_number
from sgalloc.replay.traces import read_trace
from sgalloc.replay.windowed import default_pages
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig, alloc_len_per_decode

SCHEMA, VERSION = "sgalloc-soak", 1
TRACES = ("mooncake_conversation.jsonl.xz", "azure2023_code.csv")
GENERATED = 8000
_CHAIN = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
_TREE = SpecConfig("eagle", steps=3, topk=4, draft_tokens=13)
_BLOCK = SpecConfig("dflash", draft_tokens=16)
# By name: what speculates, tokens that it keeps a step, and whether steps overlap.
MODES: dict[str, tuple[SpecConfig, float, bool]] = {
    "plain": (SpecConfig(), 1.0, False),
    "eagle": (_CHAIN, 2.65, False),
    "tree": (_TREE, 2.65, False),
    "dflash": (_BLOCK, 4.24, False),
    "eagle, overlapped": (_CHAIN, 2.65, True),
    "dflash, overlapped": (_BLOCK, 4.24, True),
}
# The cache is emptied after one run of so many, besides the last of each round of modes.
_EMPTY_ONE_OF = 4
# One run of so many ends where it is, with all its requests released.
_CUT_ONE_OF = 5
_COUNTED = ("finished", "aborted", "retractions", "refused", "moves", "live", "reclaimed")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a soak does.

    Attributes:
        steps: steps of the engine, all runs together (of both nodes where there are two).
        seconds: time after which it ends sooner; None for none.
        device: of the allocator.
        num_pages, page_size, running, chunk: of the pool and the engine.
        window: tokens of a sliding window, or None.
        sparse: logical pages for each of ``num_pages``, or None.
        disaggregated: whether a prefill node stands before the engine.
        abort_rate: share of the requests that are aborted at a random point.
        park_rate: chance of a step to park a request.
        requests: requests of one run, from all traces.
        every: steps between two records, at least; each is made at the end of a round of modes.
        check_every: steps between two checks of the laws; each tenth looks at the device.
        seed: of all that is random.
    """

    steps: int = 5_000_000
    seconds: float | None = None
    device: str = "cpu"
    num_pages: int = 4096
    page_size: int = 64
    running: int = 64
    chunk: int = 8192
    window: int | None = None
    sparse: float | None = None
    disaggregated: bool = False
    abort_rate: float = 0.1
    park_rate: float = 0.02
    requests: int = 1000
    every: int = 50_000
    check_every: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run; the engine and the allocator look at the rest."""
        for name in ("steps", "requests", "every"):
            whole_number(name, getattr(self, name), 1, 2**40)
        real_number("park_rate", self.park_rate, 0.0, 1.0)
        if self.seconds is not None:
            real_number("seconds", self.seconds, 0.0, 1e9)


def options_of(settings: Settings) -> dict[str, Options]:
    """The modes that the one allocator serves, by name."""
    found = {}
    modes = {
        name: mode
        for name, mode in MODES.items()
        if settings.sparse is None or mode[0].topk <= 1  # drafts stand in scratch, not in branches
    }
    scratch = max(alloc_len_per_decode(spec, settings.page_size) for spec, *_ in modes.values())
    pages, size = settings.num_pages, settings.page_size
    window = sparse = nodes = None
    if settings.window is not None:
        held = default_pages(pages, size, settings.window, settings.chunk)
        window = SlidingWindow(settings.window, held)
    if settings.sparse is not None:
        sparse = Sparse(settings.sparse, device_buffer=4096, draft_scratch=scratch)
    if settings.disaggregated:
        nodes = Disaggregation(pages)
    for name, (spec, mean, overlap) in modes.items():
        drafted = min(spec.steps or spec.draft_tokens, spec.draft_tokens - 1)
        found[name] = Options(
            num_pages=pages,
            page_size=size,
            running_limit=settings.running,
            chunk=settings.chunk,
            spec=spec,
            acceptance=Acceptance(drafted, mean=mean) if drafted > 0 else None,
            overlap=overlap,
            prefix_cache=sparse is None,
            window=window,
            sparse=sparse,
            disaggregated=nodes,
            headroom=0,
            abort_rate=settings.abort_rate,
            check_every=settings.check_every,
            device=settings.device,
        )
    return found


class Traffic:
    """Traces in a loop, cut into runs that hold a part of each; all requests are there at once.

    Args:
        traces: what to run.
        requests: requests of one run.

    Attributes:
        rounds: how often each trace was run so far.
    """

    def __init__(self, traces: list[Workload], requests: int) -> None:
        self.traces = traces
        self._at = [0] * len(traces)
        self.rounds = [0.0] * len(traces)
        total = sum(len(trace.requests) for trace in traces)
        self._take = [max(1, requests * len(trace.requests) // total) for trace in traces]

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request, tokens."""
        return max(r.prompt_len + r.output_len for trace in self.traces for r in trace.requests)

    def take(self) -> Workload:
        """The next run."""
        rows: list[tuple[float, int, TraceRequest]] = []
        for which, trace in enumerate(self.traces):
            first = self._at[which]
            cut = trace.requests[first : first + self._take[which]]
            self._at[which] = (first + len(cut)) % len(trace.requests)
            self.rounds[which] += len(cut) / len(trace.requests)
            # A trace has numbers of its own, so that its unshared text is not another's.
            number = (which << 24) + first
            rows += (
                (at / len(cut), number + at, row._replace(arrival=0.0))
                for at, row in enumerate(cut)
            )
        rows.sort(key=lambda row: row[:2])
        numbers = np.array([number for _, number, _ in rows], np.int64)
        return Workload("soak", [row for *_, row in rows], 0, [], numbers)


def traces_of(folder: Path | None) -> tuple[list[Workload], bool]:
    """Both traces, and whether they had to be made up.

    Args:
        folder: where they are; if None, ``SGALLOC_TRACES``, or ``../shared/traces`` beside the
            checkout.
    """
    if folder is None:
        beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
        folder = Path(os.environ.get("SGALLOC_TRACES", beside))
        if not all((folder / name).exists() for name in TRACES):
            return [generate(name, GENERATED, seed=0) for name in ("chat", "code")], True
    return [read_trace(folder / name) for name in TRACES], False


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
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
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
