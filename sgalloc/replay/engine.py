"""A continuous-batching engine in miniature: it has no model, but the allocator is the real one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from sgalloc import sizing
from sgalloc.allocator import KVAllocator
from sgalloc.errors import LawViolation
from sgalloc.plan import Plan
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.recording import Recording, Totals, time_verbs
from sgalloc.replay.requests import IntArray, Workload, real_number, whole_number
from sgalloc.replay.state import Requests
from sgalloc.retraction import choose_victims

_TIMED = (
    "open",
    "open_with_prefix",
    "batch",
    "plan",
    "apply",
    "commit",
    "trim",
    "release",
    "fits",
)
_TIMED_PREFIX = ("match", "publish")
# Steps after which a request that waits for pages is looked at again, whatever is free.
_LOOK_AGAIN = 16


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine runs.

    Attributes:
        num_pages, page_size: of the pool.
        running_limit: most requests at once.
        chunk: most tokens prefilled in a step.
        spec: speculative decoding, or none.
        acceptance: how many drafted tokens a step keeps; needed with speculation.
        prefix_cache: whether finished requests leave their pages for others.
        admit: ``"prompt"`` opens a request when its whole prompt fits, ``"chunk"`` when its
            first chunk does, which fills the pool closer and retracts more.
        headroom: tokens a running request that admission leaves free for its growth.
        abort_rate: share of requests that are aborted at a random point.
        speed: how many times faster than in the workload requests arrive.
        check_every: steps between two checks of the laws; 0 checks at the end alone.
        seed: of acceptance and aborts.
        device: of the allocator.
        step_time: the clock.
    """

    num_pages: int
    page_size: int = 64
    running_limit: int = 256
    chunk: int = 8192
    spec: sizing.SpecConfig = field(default_factory=sizing.SpecConfig)
    acceptance: Acceptance | None = None
    prefix_cache: bool = True
    admit: str = "prompt"
    headroom: int = 32
    abort_rate: float = 0.0
    speed: float = 1.0
    check_every: int = 0
    seed: int = 0
    device: str = "auto"
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        """Refuse what cannot be run; the allocator looks at the pool itself."""
        whole_number("running_limit", self.running_limit, 1, 2**20)
        whole_number("chunk", self.chunk, 1, 2**31 - 1)
        whole_number("headroom", self.headroom, 0, 2**31 - 1)
        whole_number("check_every", self.check_every, 0, 2**62)
        whole_number("seed", self.seed, 0, 2**62)
        real_number("abort_rate", self.abort_rate, 0.0, 1.0)
        real_number("speed", self.speed, 1e-6, 1e6)
        if self.admit not in ("prompt", "chunk"):
            raise ValueError(f"admit is {self.admit!r}: give 'prompt' or 'chunk'")
        if self.spec.algorithm != "none" and self.acceptance is None:
            raise ValueError(f"speculation by {self.spec.algorithm} needs an acceptance model")
        if self.acceptance is not None and self.spec.algorithm != "none":
            kept = self.acceptance.draft_tokens + 1
            step = sizing.alloc_len_per_decode(self.spec, self.page_size)
            if kept > step:
                raise ValueError(
                    f"acceptance may keep {kept} tokens a step, but a step of {self.spec} has "
                    f"{step}: draft more tokens, or accept fewer"
                )


class Engine:
    """Runs a workload to its end and records what happened.

    Args:
        workload: the requests.
        options: how.
        config: the options as plain values, for the record.
    """

    def __init__(
        self, workload: Workload, options: Options, config: dict[str, object] | None = None
    ) -> None:
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._requests = Requests(workload, options.speed, options.abort_rate, self._rng)
        longest = int((self._requests.prompt + self._requests.goal).max(initial=1))
        spec = options.spec
        self._reserve = (
            0
            if spec.algorithm == "none"
            else sizing.alloc_reserve_per_decode(spec, options.page_size)
        )
        self.alloc = KVAllocator(
            options.num_pages,
            options.page_size,
            options.running_limit,
            sizing.row_width(longest, spec, options.page_size),
            device=options.device,
            prefix_cache=options.prefix_cache,
        )
        self.recording = Recording(
            dict(config or {}),
            workload.name,
            options.num_pages,
            options.page_size,
            device=self.alloc.device,
        )
        time_verbs(self.alloc, _TIMED, self.recording)
        if options.prefix_cache:
            time_verbs(self.alloc.prefix, _TIMED_PREFIX, self.recording)
        self._totals = self.recording.totals
        self._totals.requests = len(self._requests)
        self._now = 0.0
        self._next_arrival = 0
        self._queue: deque[int] = deque()
        self._prefilling: list[int] = []
        self._running: IntArray = np.empty(0, np.int64)
        self._batch = self.alloc.batch([])
        self._blocked: tuple[int, int] | None = None
        self._frame_every = 1
        self._stopping = False

    def stop(self) -> None:
        """End the run after the present step; safe to call from a signal handler."""
        self._stopping = True

    def run(self, progress: Callable[[Totals], None] | None = None) -> Recording:
        """Run until every request is done, or `stop`; then give everything back and check."""
        began = perf_counter()
        try:
            while not self._stopping and self._step():
                if progress is not None:
                    progress(self._totals)
            self.recording.interrupted = self._stopping
            self._drain()
        except LawViolation as violation:
            self.recording.violation = str(violation)
        self._totals.virtual_seconds = self._now
        self._totals.wall_seconds = perf_counter() - began
        return self.recording

    # -- a step ----------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step of the engine; False once there is nothing left to do."""
        spent = self.recording.spent_ns
        self._arrive()
        waiting = self._admit()
        self._sample(waiting)
        if not self._prefilling and not self._running.size:
            if self._queue:
                return True
            if self._next_arrival == len(self._requests):
                return False
            self._now = max(self._now, float(self._requests.arrival[self._next_arrival]))
            return True
        chunks = self._chunks()
        plan = self._plan(chunks)
        if not plan.fits:
            self._retract(plan)
            chunks = [chunk for chunk in chunks if self._requests.handle[chunk[0]]]
            plan = self._plan(chunks)
        self.alloc.apply(plan)
        prefilled = sum(upto - int(self._requests.filled[which]) for which, upto in chunks)
        self._totals.steps += 1
        self._totals.prefilled += prefilled
        self._now += self._options.step_time.seconds(prefilled, self._running.size)
        self._decoded()
        self._prefilled(chunks)
        self.recording.step_ns.append(self.recording.spent_ns - spent)
        every = self._options.check_every
        if every and self._totals.steps % every == 0:
            self.alloc.check(device=self._totals.steps % (10 * every) == 0)
        return True

    def _plan(self, chunks: list[tuple[int, int]]) -> Plan:
        which = np.array([one for one, _ in chunks], np.int64)
        extend = (self._requests.handle[which], [upto for _, upto in chunks])
        if self._reserve:
            return self.alloc.plan(extend=extend, reserve=(self._batch, self._reserve))
        return self.alloc.plan(extend=extend, decode=(self._batch, 1))

    def _decoded(self) -> None:
        """Account for the tokens that the running requests put out in this step."""
        requests, running = self._requests, self._running
        if not running.size:
            return
        if self._reserve:
            assert self._options.acceptance is not None
            drawn = self._options.acceptance.draw(self._rng, running.size)
            accepted = np.minimum(drawn, requests.goal[running] - requests.produced[running])
            self.alloc.commit(self._batch, accepted)
            self._totals.accepted += int(accepted.sum())
            self._totals.speculative_steps += running.size
        else:
            accepted = np.ones(running.size, np.int64)
        requests.produced[running] += accepted
        self._totals.decoded += int(accepted.sum())
        produced = requests.produced[running]
        done = produced >= requests.goal[running]
        aborted = ~done & (requests.prompt[running] + produced >= requests.abort_at[running])
        if done.any():
            self._finish(running[done])
        if aborted.any():
            self._abort(running[aborted].tolist())
        if done.any() or aborted.any():
            self._set_running(running[~(done | aborted)])

    def _prefilled(self, chunks: list[tuple[int, int]]) -> None:
        """Account for prefilled chunks; a prompt that is complete puts out its next token."""
        requests = self._requests
        joining = []
        for which, upto in chunks:
            requests.filled[which] = upto
            if upto >= requests.abort_at[which]:
                self._abort([which])
                self._prefilling.remove(which)
            elif upto == requests.fill(which):
                self._prefilling.remove(which)
                if self._options.prefix_cache:
                    handle = int(requests.handle[which])
                    self.alloc.prefix.publish(handle, [requests.tokens(which)])
                requests.produced[which] += 1
                self._totals.decoded += 1
                if requests.produced[which] >= requests.goal[which]:
                    self._finish(np.array([which]))
                elif upto + 1 >= requests.abort_at[which]:
                    self._abort([which])
                else:
                    joining.append(which)
        if joining:
            self._set_running(np.append(self._running, joining))

    # -- coming and going ------------------------------------------------------------------

    def _arrive(self) -> None:
        requests, options = self._requests, self._options
        while (
            self._next_arrival < len(requests) and requests.arrival[self._next_arrival] <= self._now
        ):
            which = self._next_arrival
            self._next_arrival += 1
            # The last token put out needs no slot; a speculative step ends one before that.
            longest = int(requests.prompt[which] + requests.goal[which]) - 1
            if self._reserve and requests.goal[which] > 1:
                longest += self._reserve - 1
            if sizing.num_pages_for(longest, options.page_size) > options.num_pages:
                self._totals.refused += 1
            else:
                self._queue.append(which)

    def _admit(self) -> bool:
        """Open requests, first come first served; whether the next one waits for pages."""
        requests, options, alloc = self._requests, self._options, self.alloc
        backlog = sum(
            requests.fill(which) - int(requests.filled[which]) for which in self._prefilling
        )
        while self._queue and backlog < options.chunk:
            which = self._queue[0]
            active = self._running.size + len(self._prefilling)
            if active >= options.running_limit:
                return False
            if requests.abort_at[which] == 0:
                self._totals.aborted += 1
                self._queue.popleft()
                continue
            if active and self._still_blocked():
                return True
            handle, matched = self._open(which)
            fill = requests.fill(which)
            first = fill
            room = alloc.available(counting_cache=True)
            room -= -(-options.headroom // options.page_size) * (self._running.size + 1)
            if options.admit == "chunk":
                first = min(fill, matched + options.chunk - backlog)
            else:
                room -= self._owed()
            need = alloc.plan(extend=(handle, first)).num_new_pages
            if need > room and active:
                alloc.release(handle)
                self._blocked = (self._totals.steps, alloc.available(counting_cache=True))
                return True
            self._blocked = None
            self._queue.popleft()
            requests.handle[which] = handle
            requests.filled[which] = matched
            self._prefilling.append(which)
            backlog += fill - matched
            totals = self._totals
            if options.prefix_cache:
                totals.looked_up += fill
                totals.hit += matched
            if not requests.admitted[which]:
                requests.admitted[which] = True
                totals.prompt_tokens += int(requests.prompt[which])
            totals.peak_running = max(totals.peak_running, active + 1)
        return False

    def _still_blocked(self) -> bool:
        """Whether nothing has come free since the first in the queue did not fit."""
        if self._blocked is None:
            return False
        step, available = self._blocked
        waited = self._totals.steps - step
        return waited < _LOOK_AGAIN and self.alloc.available(counting_cache=True) <= available

    def _open(self, which: int) -> tuple[int, int]:
        """A handle for the request, and how many of its tokens the cache has."""
        if not self._options.prefix_cache:
            return int(self.alloc.open()[0]), 0
        # The last token is computed in any case: its logits are the first output.
        match = self.alloc.prefix.match(self._requests.tokens(which)[:-1])
        return int(self.alloc.open_with_prefix(match)[0]), match.length

    def _owed(self) -> int:
        """Pages that the requests being prefilled still need for the rest of their prompts."""
        size = self._options.page_size
        return sum(
            -(-self._requests.fill(which) // size) - -(-int(self._requests.filled[which]) // size)
            for which in self._prefilling
        )

    def _chunks(self) -> list[tuple[int, int]]:
        """Which requests are prefilled up to which length in this step."""
        left = self._options.chunk
        chunks = []
        for which in self._prefilling:
            filled = int(self._requests.filled[which])
            take = min(left, self._requests.fill(which) - filled)
            if take <= 0:
                break
            chunks.append((which, filled + take))
            left -= take
        return chunks

    def _retract(self, plan: Plan) -> None:
        """Send requests back to the queue until the rest of the plan fits."""
        requests = self._requests
        active = np.append(self._running, np.array(self._prefilling, np.int64))
        chosen = choose_victims(
            self.alloc,
            requests.handle[active],
            plan,
            output_lens=requests.produced[active],
            prompt_lens=requests.prompt[active],
        )
        number = dict(zip(requests.handle[active].tolist(), active.tolist(), strict=True))
        victims = [number[handle] for handle in chosen.victims.tolist()]
        self._release(victims)
        self._queue.extendleft(victims)
        self._totals.retractions += len(victims)
        self._blocked = None
        self._leave(victims)

    def _finish(self, which: IntArray) -> None:
        if self._reserve:
            handles = self._requests.handle[which]
            self.alloc.trim(handles, self.alloc.committed(handles))
        self._release(which.tolist())
        self._totals.finished += which.size

    def _abort(self, which: list[int]) -> None:
        self.alloc.release(self._requests.handle[which])
        self._requests.handle[which] = 0
        self._totals.aborted += len(which)

    def _release(self, which: list[int]) -> None:
        requests = self._requests
        tokens = [requests.tokens(one) for one in which] if self._options.prefix_cache else None
        self.alloc.release(requests.handle[which], tokens=tokens)
        requests.handle[which] = 0

    def _leave(self, which: list[int]) -> None:
        gone = set(which)
        self._prefilling = [one for one in self._prefilling if one not in gone]
        self._set_running(self._running[~np.isin(self._running, which)])

    def _set_running(self, running: IntArray) -> None:
        self._running = running
        self._batch = self.alloc.batch(self._requests.handle[running])

    # -- the record ------------------------------------------------------------------------

    def _sample(self, waiting: bool) -> None:
        stats = self.alloc.stats()
        group = stats.groups["full"]
        self._totals.evicted = group.evicted
        if waiting:
            share = (group.owned + group.cached) / group.total
            self._totals.pressed_steps += 1
            self._totals.waiting_pressure = min(self._totals.waiting_pressure, share)
        self.recording.sample(
            {
                "time": self._now,
                "running": self._running.size + len(self._prefilling),
                "queued": len(self._queue),
                "owned": group.owned,
                "locked": group.locked,
                "evictable": group.cached - group.locked,
                "quarantined": group.quarantined,
                "free": group.free,
                "committed": stats.committed,
                "allocated": stats.allocated,
            }
        )
        if self._totals.steps % self._frame_every == 0:
            frames = len(self.recording.map_frames)
            self.recording.frame(self._now, self.alloc.owners()[1:])
            if len(self.recording.map_frames) <= frames:
                self._frame_every *= 2

    def _drain(self) -> None:
        """Give everything back, empty the cache, and see that nothing is missing."""
        alloc = self.alloc
        alloc.check(device=True)
        left = [*self._running.tolist(), *self._prefilling]
        if left:
            alloc.release(self._requests.handle[left])
        if self._options.prefix_cache:
            alloc.prefix.clear()
        alloc.check(device=True)
        stats = alloc.stats()
        self.recording.leaked_pages = stats.groups["full"].total - stats.groups["full"].free
        self.recording.leaked_rows = stats.rows.total - stats.rows.free
