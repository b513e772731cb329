"""One run after another on the same allocators: what a soak is made of."""

from __future__ import annotations

from array import array

from sgalloc import sizing
from sgalloc.allocator import KVAllocator
from sgalloc.replay.admission import made
from sgalloc.replay.disaggregated import PREFILL, Disaggregated, time_transfers
from sgalloc.replay.engine import Engine
from sgalloc.replay.options import Options
from sgalloc.replay.recording import Recording, time_verbs
from sgalloc.replay.requests import Workload


class Stage:
    """Allocators that outlive the runs on them, and the time that their verbs take.

    Args:
        modes: the options of all runs to come, which differ in how they decode alone.
        longest: prompt and output of the longest request, tokens.

    Attributes:
        allocators: by node, as `Engine` takes them.
        times: whose ``verbs``, ``step_ns`` and ``spent_ns`` are those of all runs.
    """

    def __init__(self, modes: list[Options], longest: int) -> None:
        widest = max(modes, key=lambda one: sizing.extra_context_len(one.spec, one.page_size))
        self.times = Recording({}, "", widest.main_pages, widest.page_size)
        alloc = made(widest, widest.num_pages, longest, self.times)
        more = ["settle"]
        if any(one.tree for one in modes) and not widest.tree:
            more.append("compact")
        time_verbs(alloc, more, self.times)
        self.allocators: dict[str, KVAllocator] = {"": alloc}
        if widest.disaggregated is not None:
            where = PREFILL + " "
            pages = widest.disaggregated.prefill_pages
            self.allocators[where] = made(widest, pages, longest, self.times, where)
            time_transfers(alloc, self.allocators[where], self.times)
        self._seen = 0

    def step_done(self) -> None:
        """Note what the allocators took since the last step."""
        spent = self.times.spent_ns
        self.times.step_ns.append(spent - self._seen)
        self._seen = spent

    def take(self) -> dict[str, array[int]]:
        """Nanoseconds of each call since the last time, by verb; ``step`` is a whole step."""
        series = {"step": self.times.step_ns} | self.times.verbs
        taken = {name: values[:] for name, values in series.items() if values}
        for values in series.values():
            del values[:]
        return taken


class Endless(Engine):
    """A run on allocators that were there before it, and go on after it.

    Nothing is sampled. Requests are parked at random: cut back to whole pages of what they
    have, and prefilled again when their turn comes; with two nodes, or sparse, the reserve
    alone is given back.

    Args:
        workload: the requests.
        options: how; one of the modes of ``stage``.
        stage: the allocators.
        park_rate: chance of a step to park a request.
        empty: whether the cache is emptied at the end.

    Attributes:
        empties: whether the cache is emptied at the end.
        parked: requests parked so far.
    """

    def __init__(
        self, workload: Workload, options: Options, stage: Stage, park_rate: float, empty: bool
    ) -> None:
        super().__init__(workload, options, kept=stage.allocators)
        self._stage = stage
        self._park_rate = park_rate
        self.empties = empty
        self._parks_short = options.sparse is None and options.disaggregated is None
        self.parked = 0
        if self._speculation is not None:
            time_verbs(self._speculation, ["prepare"], stage.times)

    def _sample(self, waiting: bool) -> None:
        self._totals.pressed_steps += waiting

    def _after_step(self, spent: int) -> None:
        super()._after_step(spent)
        self._stage.step_done()
        if self._running.size and self._rng.random() < self._park_rate:
            self._park()

    def _park(self) -> None:
        """Cut one request back."""
        # Who is still there, and what it has, is known once the step in flight has landed.
        self._land()
        if not self._running.size:
            return
        requests = self._requests
        which = int(self._running[self._rng.integers(self._running.size)])
        handle = int(requests.handle[which])
        keep = int(self.alloc.committed(handle)[0])
        self.parked += 1
        if not self._parks_short:
            self.alloc.trim(handle, keep)
            return
        keep = int(self._rng.integers(keep + 1)) // self.alloc.page_size * self.alloc.page_size
        self.alloc.trim(handle, keep)
        requests.filled[which] = keep
        self._set_running(self._running[self._running != which])
        self._prefilling.append(which)

    def _drain(self, empty: bool = True) -> None:
        super()._drain(empty and self.empties)


class EndlessPair(Endless, Disaggregated):
    """The same of a prefill node and a decode node."""


def endless(
    workload: Workload, options: Options, stage: Stage, park_rate: float, empty: bool
) -> Endless:
    """The engine for the next run on ``stage``."""
    kind = Endless if options.disaggregated is None else EndlessPair
    return kind(workload, options, stage, park_rate, empty)
