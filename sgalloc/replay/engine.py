"""A continuous-batching engine in miniature: it has no model, but the allocator is the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from sgalloc.allocator import KVAllocator
from sgalloc.errors import LawViolation, OutOfPages
from sgalloc.plan import Plan
from sgalloc.replay import windowed
from sgalloc.replay.admission import Admission
from sgalloc.replay.clock import Until
from sgalloc.replay.options import Options
from sgalloc.replay.recording import Recording, Totals, by_owner
from sgalloc.replay.requests import IntArray, Workload
from sgalloc.replay.speculation import Speculation
from sgalloc.retraction import choose_victims
from sgalloc.stats import Stats

__all__ = ["Engine", "Options"]


class Engine(Admission):
    """Runs a workload to its end and records what happened.

    Args:
        workload: the requests.
        options: how.
        config: the options as plain values, for the record.
        kept: allocators to run on, by node; they are not timed here.

    Raises:
        ValueError: a pool, or a window group, that cannot hold one request.
    """

    def __init__(
        self,
        workload: Workload,
        options: Options,
        config: dict[str, object] | None = None,
        kept: Mapping[str, KVAllocator] | None = None,
    ) -> None:
        super().__init__(workload, options, config, kept)
        self._speculation = Speculation(options) if options.speculates else None
        self._batch = self.alloc.batch([])
        # Of an overlapped step that still runs: who took part, and what the model will keep.
        self._flight: tuple[IntArray, IntArray] | None = None
        self._ends: float | None = None
        self._sample_late: bool | None = None
        self._frame_every = 1
        self._stopping = False
        self._over = False

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
        if self._options.overlap:
            self.alloc.settle()
        self._arrive()
        waiting = self._admit()
        self._sample_before(waiting)
        if not self._prefilling and not self._running.size:
            if self._queue:
                return True
            if self._next_arrival == len(self._requests):
                return False
            self._now = max(self._now, float(self._requests.arrival[self._next_arrival]))
            return True
        chunks = self._decode_step(self._chunks())
        joining = self._prefilled(chunks)
        if joining:
            self._set_running(np.append(self._running, joining))
        self._after_step(spent)
        return True

    def _decode_step(self, chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """One forward over the running requests and these chunks; the chunks that took part."""
        plan, chunks = self._prepared(chunks)
        if self._sample_late is not None:
            self._sample(self._sample_late)
            self._sample_late = None
        totals = self._totals
        if self._window is not None:
            totals.window_evicted += plan.gain[windowed.GROUP]
        prefilled = sum(upto - int(self._requests.filled[which]) for which, upto in chunks)
        totals.steps += 1
        totals.prefilled += prefilled
        ends = self._now + self._options.step_time.seconds(prefilled, self._running.size)
        self._decoded(plan, ends)
        self._now = ends
        return chunks

    def _sample_before(self, waiting: bool) -> None:
        """Sample at the start of a step, but where the branches of trees would be missed.

        They are there while the step runs and gone at the next start, so such a step is sampled
        once it is prepared.
        """
        if self._options.tree and (self._running.size or self._sharing()):
            self._sample_late = waiting
        else:
            self._sample(waiting)

    def _after_step(self, spent: int) -> None:
        self.recording.step_ns.append(self.recording.spent_ns - spent)
        every = self._options.check_every
        if every and self._totals.steps % every == 0:
            for alloc in self._allocators():
                alloc.check(device=self._totals.steps % (10 * every) == 0)
            if self._speculation is not None and self._running.size:
                self._speculation.check_estimate(self.alloc, self._batch)

    def _allocators(self) -> list[KVAllocator]:
        return [self.alloc]

    def _prepared(self, chunks: list[tuple[int, int]]) -> tuple[Plan, list[tuple[int, int]]]:
        """The applied plan of the next step; requests are sent back until it fits.

        A step that only speculates goes through ``prepare_for_decode``, as an engine's does. One
        that prefills, too, is a single plan asked in the same way, since either part alone may
        fit where both do not.
        """
        if self._speculation is not None and not chunks:
            try:
                return self._speculation.prepare(self.alloc, self._batch), chunks
            except OutOfPages:
                pass
        plan = self._plan(chunks)
        if not plan.fits and self._flight is not None:
            # The step in flight may end requests; who is to go is known once it has landed.
            self._land()
            plan = self._plan(chunks)
        while not plan.fits:
            # What goes to the cache may hand window pages to prefixes that others hold, so less
            # may come free than was foretold.
            self._retract(plan)
            chunks = [chunk for chunk in chunks if self._entry_handle[chunk[0]]]
            plan = self._plan(chunks)
        self.alloc.apply(plan)
        return plan, chunks

    def _plan(self, chunks: list[tuple[int, int]]) -> Plan:
        evict = self._window is not None
        extend = self._extension(chunks) if chunks else None
        if self._speculation is not None:
            reserve = (self._batch, self._speculation.reserve)
            return self.alloc.plan(extend=extend, reserve=reserve, evict_window=evict)
        return self.alloc.plan(extend=extend, decode=(self._batch, 1), evict_window=evict)

    # -- what a step puts out --------------------------------------------------------------

    def _decoded(self, plan: Plan, ends: float) -> None:
        """Account for the tokens that the running requests put out in this step."""
        running, totals, speculation = self._running, self._totals, self._speculation
        if not running.size:
            return
        if speculation is None:
            self._put_out(running, np.ones(running.size, np.int64))
            return
        totals.speculative_steps += running.size
        totals.reserved_tail += int((plan.nxt - plan.start)[-running.size :].sum())
        drawn = speculation.draw(self._rng, running.size)
        if self._options.overlap:
            # What the step before this one kept is heard of while this one runs.
            self._ends = ends
            self._land()
            stay = self._requests.handle[running] != 0
            totals.discarded_steps += running.size - int(stay.sum())
            self._flight = (running[stay], drawn[stay])
            self._ends = None
            return
        self._keep(running, drawn, plan.start[-running.size :])

    def _keep(self, which: IntArray, drawn: IntArray, committed: IntArray | None = None) -> None:
        """Commit what the target model kept, cut at each request's goal."""
        requests, speculation = self._requests, self._speculation
        kept = np.minimum(drawn, requests.goal[which] - requests.produced[which])
        batch = self._batch if which is self._running else requests.handle[which]
        if speculation is not None and speculation.tree:
            assert committed is not None
            paths = speculation.paths(self._rng, committed, kept)
            self._totals.moves += self.alloc.compact(batch, paths)[0].size
        else:
            self.alloc.commit(batch, kept)
        self._totals.accepted += int(kept.sum())
        self._put_out(which, kept)

    def _land(self) -> None:
        """Hear of what the step in flight kept."""
        if self._flight is not None:
            which, drawn = self._flight
            self._flight = None
            self._keep(which, drawn)

    def _put_out(self, which: IntArray, tokens: IntArray) -> None:
        """Count tokens put out by running requests; those that are done, or aborted, end."""
        requests = self._requests
        requests.produced[which] += tokens
        self._totals.decoded += int(tokens.sum())
        produced = requests.produced[which]
        done = produced >= requests.goal[which]
        aborted = ~done & (requests.prompt[which] + produced >= requests.abort_at[which])
        if done.any():
            self._finish(which[done])
        if aborted.any():
            self._abort(which[aborted].tolist())
        if done.any() or aborted.any():
            self._set_running(self._running[requests.handle[self._running] != 0])

    # -- going -----------------------------------------------------------------------------

    def _behind(self) -> Until | None:
        """What pages wait for that the step in flight still reads; None where none does."""
        ends = self._ends
        return None if ends is None else Until(lambda: self._over or self._now >= ends)

    def _retract(self, plan: Plan) -> None:
        """Send requests back to the queue until the rest of the plan fits."""
        requests = self._requests
        active = np.append(self._running, np.array(self._sharing(), np.int64))
        handles = requests.handle[active]
        chosen = choose_victims(
            self.alloc,
            handles,
            plan,
            output_lens=requests.produced[active],
            prompt_lens=requests.prompt[active],
        )
        number = dict(zip(handles.tolist(), active.tolist(), strict=True))
        victims = [number.pop(handle) for handle in chosen.victims.tolist()]
        if not chosen.fits:
            # The last one is short of pages that are not its own: it starts afresh.
            victims += number.values()
            if self._window is not None:
                self._unshare(victims[-1])
        if windowed.short_of_side_alone(self.alloc, plan):
            if self._window is not None:
                self._totals.window_retractions += len(victims)
            else:
                self._totals.device_retractions += len(victims)
        self._release(self.alloc, requests.handle, victims)
        self._queue.extendleft(victims)
        self._totals.retractions += len(victims)
        self._blocked.clear()
        self._leave(victims)

    def _sharing(self) -> list[int]:
        """Requests that are prefilled in the steps that decode."""
        return self._prefilling

    def _finish(self, which: IntArray) -> None:
        behind = self._behind()
        if self._options.reserve:
            handles = self._requests.handle[which]
            self.alloc.trim(handles, self.alloc.committed(handles), after=behind)
        self._release(self.alloc, self._requests.handle, which.tolist(), behind)
        self._totals.finished += which.size

    def _abort(self, which: list[int]) -> None:
        self.alloc.release(self._requests.handle[which], after=self._behind())
        self._requests.handle[which] = 0
        self._totals.aborted += len(which)

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
        group = stats.groups[self._options.group]
        self._totals.evicted = group.evicted
        if waiting:
            share = max(
                (one.owned + one.pinned + one.cached) / one.total for one in stats.groups.values()
            )
            self._totals.pressed_steps += 1
            self._totals.waiting_pressure = min(self._totals.waiting_pressure, share)
        self.recording.sample(
            {
                "time": self._now,
                "running": self._stays(),
                "queued": len(self._queue),
                **by_owner(group),
                "committed": stats.committed,
                "allocated": stats.allocated,
            }
        )
        self._sample_pools(stats)
        if self._totals.steps % self._frame_every == 0:
            frames = len(self.recording.map_frames)
            self.recording.frame(self._now, self.alloc.owners()[1:])
            if len(self.recording.map_frames) <= frames:
                self._frame_every *= 2

    def _sample_pools(self, stats: Stats) -> None:
        side = self._options.side
        if side is not None:
            self.recording.pools[side].sample(stats.groups[side])

    def _drain(self, empty: bool = True) -> None:
        """Give everything back, empty the cache if so asked, and see that nothing is missing."""
        for alloc in self._allocators():
            alloc.check(device=True)
        self._over = True
        self._give_all_back()
        for alloc in self._allocators():
            alloc.settle()
            if self._options.prefix_cache and empty:
                alloc.prefix.clear()
            alloc.check(device=True)
            stats = alloc.stats()
            for group in stats.groups.values():
                kept = 0 if empty else group.cached - group.locked
                self.recording.leaked_pages += group.total - group.free - kept
            self.recording.leaked_rows += stats.rows.total - stats.rows.free

    def _give_all_back(self) -> None:
        left = [*self._running.tolist(), *self._prefilling]
        if left:
            self.alloc.release(self._requests.handle[left])
