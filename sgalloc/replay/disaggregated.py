"""Two nodes in one run: prompts are prefilled on the first, sent, and decoded on the second."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sgalloc import sizing
from sgalloc.admission import admit
from sgalloc.allocator import KVAllocator
from sgalloc.errors import OutOfPages
from sgalloc.extents import pair_extents
from sgalloc.plan import Plan
from sgalloc.prefix import Match
from sgalloc.replay import windowed
from sgalloc.replay.admission import Blocked
from sgalloc.replay.clock import Until
from sgalloc.replay.engine import Engine
from sgalloc.replay.options import Options
from sgalloc.replay.recording import PoolRecord, Recording, time_verbs
from sgalloc.replay.requests import IntArray, Workload
from sgalloc.replay.state import NEVER
from sgalloc.retraction import choose_victims
from sgalloc.stats import Stats

PREFILL = "prefill"
_TIMED = ("preallocate", "acknowledge", "abort", "reclaim")
# A transfer is given up after so many times what it should take, and some seconds.
_PATIENCE, _GRACE = 8.0, 0.5
# How a request of those that are aborted may end while its KV is under way.
_NONE, _ABORTED, _ABORTED_LOST, _LOST = range(4)


def time_transfers(decode: KVAllocator, prefill: KVAllocator, recording: Recording) -> None:
    """Time the verbs that two nodes use beside those of one, in ``recording``."""
    time_verbs(decode, _TIMED, recording)
    time_verbs(prefill, ["pages"], recording, PREFILL + " ")


class News(NamedTuple):
    """Something that happens to a transfer, in order of time.

    Attributes:
        when: virtual seconds.
        number: breaks ties.
        kind: ``"ack"``, ``"abort"`` or ``"deadline"``.
        handle: of the decode node.
        writer: who acknowledges.
    """

    when: float
    number: int
    kind: str
    handle: int
    writer: int


class Disaggregated(Engine):
    """An engine of a prefill node (`entry`) and a decode node (`alloc`), each with its pool.

    The nodes share one clock: a turn is a step of the decode node; a step of the prefill node
    lasts as many turns as it takes. A prompt that is complete waits for pages of the decode
    node, is sent there by one or more writers, and joins the running requests when all have
    acknowledged. Its pages on the prefill node come back behind the transfer.

    Of the requests that are aborted half meet their end while their KV is under way: some are
    aborted and acknowledged later, some lose a writer besides, and some lose a writer alone:
    those are taken back at their deadline, and prefilled again.
    """

    def __init__(
        self,
        workload: Workload,
        options: Options,
        config: dict[str, object] | None = None,
        kept: Mapping[str, KVAllocator] | None = None,
    ) -> None:
        assert options.disaggregated is not None
        self._nodes = options.disaggregated
        super().__init__(workload, options, config, kept)
        requests = self._requests
        self.recording.pools[PREFILL] = PoolRecord(self._nodes.prefill_pages)
        self.entry = self._allocator(self._nodes.prefill_pages, PREFILL + " ")
        if kept is None:
            time_transfers(self.alloc, self.entry, self.recording)
        self._entry_handle = np.zeros(len(requests), np.int64)
        chosen = (requests.abort_at != NEVER) & (self._rng.random(len(requests)) < 0.5)
        fates = self._rng.integers(_ABORTED, _LOST + 1, len(requests))
        self._fate: IntArray = np.where(chosen, fates, _NONE)
        requests.abort_at[chosen] = NEVER
        self._ready: deque[int] = deque()
        self._ready_at = np.zeros(len(requests))
        self._receiving: dict[int, int] = {}
        self._aborted: set[int] = set()
        self._came_back: dict[int, int] = {}
        self._news: list[News] = []
        self._sending: list[float] = []
        self._told = 0
        self._full = Blocked()
        self._turns = 0
        self._spent = 0
        # Chunks of the step that the prefill node is in, and when it ends.
        self._chunk_step: tuple[list[tuple[int, int]], float] | None = None

    def _fits_alone(self, which: int) -> bool:
        """Whether it fits both nodes: a prompt, after a retraction with all but its last token."""
        requests, size = self._requests, self._options.page_size
        prefill = int(requests.prompt[which] + requests.goal[which]) - 1
        room = sizing.num_pages_for(prefill, size) <= self._nodes.prefill_pages
        return room and super()._fits_alone(which)

    def _allocators(self) -> list[KVAllocator]:
        return [self.entry, self.alloc]

    # -- a turn ----------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step of the decode node, and what the others do meanwhile."""
        self._turns += 1
        for alloc in self._allocators():
            alloc.settle()
        self._arrive()
        self._hear()
        self._prefill()
        waiting = self._receive()
        self._sample_before(waiting)
        if self._running.size:
            self._decode_step([])
            # With what both nodes spent in turns without a step of this one.
            self._after_step(self._spent)
            self._spent = self.recording.spent_ns
            return True
        return self._idle()

    def _idle(self) -> bool:
        """Go to the next moment at which something happens; False if there is none."""
        moments = [] if self._chunk_step is None else [self._chunk_step[1]]
        moments += self._sending[:1]
        while self._news and self._stale(self._news[0]):
            heapq.heappop(self._news)
        if self._news:
            moments.append(self._news[0].when)
        if self._next_arrival < len(self._requests):
            moments.append(float(self._requests.arrival[self._next_arrival]))
        if moments:
            self._now = max(self._now, min(moments))
            return True
        return bool(self._queue or self._prefilling or self._ready)

    # -- the prefill node ------------------------------------------------------------------

    def _stays(self) -> int:
        return len(self._prefilling) + len(self._ready) + len(self._sending)

    def _growing(self) -> int:
        return 0

    def _sharing(self) -> list[int]:
        return []

    def _prefill(self) -> None:
        """End the step of the prefill node, if it is over, and begin the next one."""
        while self._sending and self._sending[0] <= self._now:
            heapq.heappop(self._sending)
        if self._chunk_step is not None:
            chunks, ends = self._chunk_step
            if ends > self._now:
                return
            self._chunk_step = None
            for which in self._prefilled(chunks):
                self._ready.append(which)
                self._ready_at[which] = self._now
        self._admit()
        chunks = self._chunks()
        if not chunks:
            return
        plan = self._prefill_plan(chunks)
        while not plan.fits:
            chunks = self._send_back(plan, chunks)
            if not chunks:
                return
            plan = self._prefill_plan(chunks)
        self.entry.apply(plan)
        totals = self._totals
        if self._window is not None:
            totals.window_evicted += plan.gain[windowed.GROUP]
        prefilled = sum(upto - int(self._requests.filled[which]) for which, upto in chunks)
        totals.prefill_steps += 1
        totals.prefilled += prefilled
        self._chunk_step = (chunks, self._now + self._options.step_time.seconds(prefilled, 0))

    def _prefill_plan(self, chunks: list[tuple[int, int]]) -> Plan:
        return self.entry.plan(
            extend=self._extension(chunks), evict_window=self._window is not None
        )

    def _send_back(self, plan: Plan, chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Retract prompts until the step of the others fits; the chunks that are left."""
        which = np.array(self._prefilling, np.int64)
        handles = self._entry_handle[which]
        chosen = choose_victims(self.entry, handles, plan, order=np.arange(which.size))
        victims = [which[handles == handle].item() for handle in chosen.victims]
        if not chosen.fits:
            # What is on its way to the decode node gives pages back; alone it starts afresh.
            if self._ready or self._sending:
                return []
            victims = which.tolist()[::-1]
            self._unshare(victims[-1])
        if windowed.short_of_side_alone(self.entry, plan):
            self._totals.window_retractions += len(victims)
        self._release(self.entry, self._entry_handle, victims)
        self._queue.extendleft(victims)
        self._totals.retractions += len(victims)
        self._totals.prefill_retractions += len(victims)
        self._blocked.clear()
        gone = set(victims)
        self._prefilling = [one for one in self._prefilling if one not in gone]
        return [chunk for chunk in chunks if chunk[0] not in gone]

    # -- the decode node -------------------------------------------------------------------

    def _retract(self, plan: Plan) -> None:
        before = self._totals.retractions
        super()._retract(plan)
        for which in list(self._queue)[: self._totals.retractions - before]:
            self._came_back[which] = self._requests.fill(which)
        self._full.clear()

    def _receive(self) -> bool:
        """Take complete prompts in, first come first served; whether the next waits for pages."""
        requests, alloc, totals = self._requests, self.alloc, self._totals
        while self._ready:
            which, active = self._ready[0], self._running.size + len(self._receiving)
            if active >= self._options.running_limit:
                return False
            if active and self._full.still(self._turns, self._rooms(alloc)):
                return True
            tokens = requests.tokens(which)[: int(requests.filled[which])]
            match = None
            if self._options.prefix_cache:
                known = tokens[:0] if requests.unshared[which] else tokens
                match = alloc.prefix.match(known, self._options.namespace)
            others = [size for one, size in self._came_back.items() if one != which]
            entry = (tokens.size, 0 if match is None else match)
            if active and not admit(alloc, [entry], active, self._options.ahead, others):
                self._full.note(self._turns, self._rooms(alloc))
                return True
            writers = int(self._rng.integers(1, self._nodes.writers + 1))
            if not self._preallocated(which, tokens.size, match, writers):
                if not active and match is not None and match.length:
                    self._unshare(which)
                    continue
                self._full.note(self._turns, self._rooms(alloc))
                return True
            self._ready.popleft()
            self._came_back.pop(which, None)
            totals.peak_running = max(totals.peak_running, active + 1)
        return False

    def _preallocated(self, which: int, length: int, match: Match | None, writers: int) -> bool:
        """Have the pages of a prompt on the decode node and begin to send it, if they fit."""
        options, alloc, totals = self._options, self.alloc, self._totals
        tail = None
        if options.window is not None:
            tail = sizing.window_tail(
                length, options.window.tokens, options.page_size, options.prefix_cache
            )
        held = 0 if match is None else match.length
        source = self.entry.pages(int(self._entry_handle[which]), held, length)
        # The deadline is set before the extents are known: at worst each is a page.
        slowest = self._nodes.transfer_time.seconds(length - held, source.size)
        deadline = self._now + _PATIENCE * slowest + _GRACE
        try:
            handle = int(
                alloc.preallocate(
                    [length], writers, prefix=[match], deadline=deadline, window_tail=tail
                )[0]
            )
        except OutOfPages:
            return False
        first, _, _ = pair_extents(source, alloc.pages(handle, held, length))
        totals.transfers += 1
        totals.matched_tokens += held
        totals.sent_tokens += length - held
        totals.sent_pages += source.size
        totals.extents += first.size
        self._requests.handle[which] = handle
        self._receiving[handle] = which
        self._send(which, handle, writers, deadline, length - held, first.size)
        return True

    def _send(
        self, which: int, handle: int, writers: int, deadline: float, tokens: int, extents: int
    ) -> None:
        """Let the KV be under way: what will be heard of it, and when the sender is done."""
        takes = self._nodes.transfer_time.seconds(tokens, extents)
        acks = self._now + takes * (1.0 + self._rng.random(writers))
        fate, self._fate[which] = int(self._fate[which]), _NONE
        lost = fate in (_LOST, _ABORTED_LOST)
        for writer, when in enumerate(acks.tolist()):
            if not (lost and writer == writers - 1):
                self._tell(when, "ack", handle, writer)
        if fate in (_ABORTED, _ABORTED_LOST):
            self._tell(self._now + takes * self._rng.random(), "abort", handle)
        self._tell(deadline, "deadline", handle)
        done = deadline if lost else float(acks.max())
        heapq.heappush(self._sending, done)
        behind = Until(lambda: self._over or self._now >= done)
        self._release(self.entry, self._entry_handle, [which], behind)

    def _tell(self, when: float, kind: str, handle: int, writer: int = 0) -> None:
        self._told += 1
        heapq.heappush(self._news, News(when, self._told, kind, handle, writer))

    def _stale(self, news: News) -> bool:
        """Whether the deadline is that of a transfer which is over."""
        return news.kind == "deadline" and self.alloc.receiving(news.handle) is None

    def _hear(self) -> None:
        """Take in what has happened to transfers up to now."""
        joining = []
        while self._news and self._news[0].when <= self._now:
            news = heapq.heappop(self._news)
            if news.kind == "ack":
                self.alloc.acknowledge(news.handle, news.writer)
                if self.alloc.receiving(news.handle) is None:
                    self._aborted.discard(news.handle)
                    if news.handle in self._receiving:
                        joining.append(self._live(news.handle))
            elif news.kind == "abort":
                self._cut_off(news.handle)
            elif not self._stale(news):
                self._take_back()
            self._full.clear()
        if joining:
            self._set_running(np.append(self._running, joining))

    def _live(self, handle: int) -> int:
        """All writers of a request have acknowledged: it may decode."""
        which = self._receiving.pop(handle)
        took = self._now - float(self._ready_at[which])
        totals = self._totals
        totals.live += 1
        totals.live_seconds += took
        totals.live_seconds_most = max(totals.live_seconds_most, took)
        if self._options.prefix_cache and not self._requests.unshared[which]:
            self.alloc.prefix.publish(handle, [self._requests.tokens(which)])
        return which

    def _cut_off(self, handle: int) -> None:
        """Abort a request whose KV is under way, unless it has arrived."""
        which = self._receiving.pop(handle, None)
        if which is None:
            return
        self.alloc.abort(handle)
        if self.alloc.receiving(handle) is not None:
            self._aborted.add(handle)
        self._requests.handle[which] = 0
        self._totals.aborted += 1
        self._totals.transfer_aborts += 1

    def _take_back(self) -> None:
        """Give up transfers past their deadline; requests that still want to run start again."""
        for handle in self.alloc.reclaim(self._now).tolist():
            self._aborted.discard(handle)
            self._totals.reclaimed += 1
            which = self._receiving.pop(handle, None)
            if which is not None:
                self._requests.handle[which] = 0
                self._queue.appendleft(which)
                self._blocked.clear()

    # -- the record ------------------------------------------------------------------------

    def _sample_pools(self, stats: Stats) -> None:
        super()._sample_pools(stats)
        groups = self.entry.stats().groups
        self.recording.pools[PREFILL].sample(groups["full"])
        if self._window is not None:
            name = f"{PREFILL} {windowed.GROUP}"
            self.recording.pools[name].sample(groups[windowed.GROUP])

    def _give_all_back(self) -> None:
        # The transfers end where the run does.
        self.alloc.abort([*self._receiving, *self._aborted], force=True)
        if self._running.size:
            self.alloc.release(self._requests.handle[self._running])
        left = [*self._prefilling, *self._ready]
        if left:
            self.entry.release(self._entry_handle[left])
