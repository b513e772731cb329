"""What a soak runs: settings, the modes that one allocator serves, and traces in a loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.requests import TraceRequest, Workload, real_number, whole_number
from sgalloc.replay.traces import read_trace
from sgalloc.replay.windowed import default_pages
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig, alloc_len_per_decode

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


@dataclass(frozen=True, slots=True)
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
