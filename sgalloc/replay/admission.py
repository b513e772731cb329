"""Who comes in: arrival, admission by pages of both groups, and prefill in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from sgalloc import sizing
from sgalloc.allocator import KVAllocator
from sgalloc.errors import OutOfPages
from sgalloc.plan import Plan
from sgalloc.replay import windowed
from sgalloc.replay.options import Options
from sgalloc.replay.recording import PoolRecord, Recording, time_verbs
from sgalloc.replay.requests import IntArray, Workload
from sgalloc.replay.state import Requests

_TIMED = ("open", "open_with_prefix", "batch", "plan", "apply", "commit", "trim", "release", "fits")
_TIMED_PREFIX = ("match", "publish")
# Steps after which a request that waits for pages is looked at again, whatever is free.
_LOOK_AGAIN = 16


def made(
    options: Options, num_pages: int, longest: int, recording: Recording, where: str = ""
) -> KVAllocator:
    """An allocator for requests of up to ``longest`` tokens, its verbs timed in ``recording``.

    Args:
        options: how the engine runs.
        num_pages: pages of the pool.
        longest: prompt and output of the longest request, tokens.
        recording: where the time of the verbs and the samples of the second group go.
        where: the node, as its verbs and pools are called.
    """
    alloc = KVAllocator(
        num_pages,
        options.page_size,
        options.running_limit,
        sizing.row_width(longest, options.spec, options.page_size),
        device=options.device,
        window=options.window,
        sparse=options.sparse,
        prefix_cache=options.prefix_cache,
    )
    verbs = [*_TIMED]
    if options.tree:
        verbs.append("compact")
    if options.window is not None:
        verbs.append("evict_window")
        recording.pools[where + windowed.GROUP] = PoolRecord(options.window.num_pages)
    if options.sparse is not None:
        verbs.append("to_sparse")
        recording.pools["device"] = PoolRecord(options.num_pages)
    time_verbs(alloc, verbs, recording, where)
    if options.prefix_cache:
        time_verbs(alloc.prefix, _TIMED_PREFIX, recording, where)
    return alloc


class Blocked:
    """Remembers why the first in a queue did not fit, so that it is not asked in vain."""

    def __init__(self) -> None:
        self._seen: tuple[int, tuple[int, ...]] | None = None

    def clear(self) -> None:
        """Ask again in any case."""
        self._seen = None

    def note(self, step: int, rooms: tuple[int, ...]) -> None:
        """In ``step`` it did not fit into ``rooms``, pages by group."""
        self._seen = (step, rooms)

    def still(self, step: int, rooms: tuple[int, ...]) -> bool:
        """Whether nothing has come free since."""
        if self._seen is None or step - self._seen[0] >= _LOOK_AGAIN:
            return False
        return all(now <= then for now, then in zip(rooms, self._seen[1], strict=True))


class Admission:
    """The part of the engine that takes requests in and prefills them.

    Args:
        workload: the requests.
        options: how.
        config: the options as plain values, for the record.
        kept: allocators to run on, by node (``""``, and ``"prefill "`` where there are two);
            they were made for these options, and their verbs are not timed here.

    Attributes:
        alloc: the allocator; of the decode node where there are two.
        entry: the allocator on which prompts are prefilled; the same where there is one.
        recording: what happened.
    """

    def __init__(
        self,
        workload: Workload,
        options: Options,
        config: dict[str, object] | None = None,
        kept: Mapping[str, KVAllocator] | None = None,
    ) -> None:
        self._options = options
        self._kept = {} if kept is None else kept
        self._rng = np.random.default_rng(options.seed)
        self._requests = Requests(workload, options.speed, options.abort_rate, self._rng)
        self.recording = Recording(
            dict(config or {}),
            workload.name,
            options.main_pages,
            options.page_size,
            reserve=options.reserve,
        )
        self._totals = self.recording.totals
        self._totals.requests = len(self._requests)
        self._now = 0.0
        self._next_arrival = 0
        self._queue: deque[int] = deque()
        self._prefilling: list[int] = []
        self._running: IntArray = np.empty(0, np.int64)
        self._blocked = Blocked()
        self.alloc = self._allocator(options.num_pages, "")
        self.recording.device = self.alloc.device
        self.entry = self.alloc
        self._entry_handle = self._requests.handle
        self._scratch = 0
        if options.sparse is not None:
            self._scratch = -(-options.sparse.draft_scratch // options.page_size)
        self._window: windowed.WindowNeeds | None = None
        if options.window is not None:
            self.recording.window = options.window.tokens
            self._window = windowed.WindowNeeds(options.window, options)
            self._window.check(max(map(self._longest, range(len(self._requests))), default=1))

    def _allocator(self, num_pages: int, where: str) -> KVAllocator:
        """An allocator whose verbs are timed, and whose second group is sampled."""
        if where in self._kept:
            return self._kept[where]
        longest = int((self._requests.prompt + self._requests.goal).max(initial=1))
        return made(self._options, num_pages, longest, self.recording, where)

    # -- arrival ---------------------------------------------------------------------------

    def _longest(self, which: int) -> int:
        """The most tokens that a request ever needs pages for."""
        # The last token put out needs no slot; a speculative step ends one before that.
        longest = int(self._requests.prompt[which] + self._requests.goal[which]) - 1
        if self._options.reserve and self._requests.goal[which] > 1:
            longest += self._options.reserve - 1
        return longest

    def _fits_alone(self, which: int) -> bool:
        """Whether a request fits into pools that are empty but for it."""
        options, requests = self._options, self._requests
        pages = sizing.num_pages_for(self._longest(which), options.page_size)
        if options.sparse is not None:
            # One that was sent back is prefilled as a whole on the device.
            dense = int(requests.prompt[which] + requests.goal[which]) - 1
            held = sizing.num_pages_for(dense, options.page_size) + self._scratch
            if held > options.num_pages:
                return False
        return pages <= options.main_pages

    def _arrive(self) -> None:
        requests = self._requests
        while (
            self._next_arrival < len(requests) and requests.arrival[self._next_arrival] <= self._now
        ):
            which = self._next_arrival
            self._next_arrival += 1
            if self._fits_alone(which):
                self._queue.append(which)
            else:
                self._totals.refused += 1

    # -- admission -------------------------------------------------------------------------

    def _stays(self) -> int:
        """Requests that hold pages of `entry`, or will give some back."""
        return self._running.size + len(self._prefilling)

    def _growing(self) -> int:
        """Requests that grow on `entry` by decoding."""
        return self._running.size

    def _rooms(self, alloc: KVAllocator) -> tuple[int, ...]:
        """Pages that could be had, cached ones included, of each group."""
        main = alloc.available(self._options.group, counting_cache=True)
        side = self._options.side
        if side is None:
            return (main,)
        return (main, alloc.available(side, counting_cache=True))

    def _admit(self) -> bool:
        """Open requests, first come first served; whether the next one waits for pages."""
        requests, options, totals = self._requests, self._options, self._totals
        backlog = sum(
            requests.fill(which) - int(requests.filled[which]) for which in self._prefilling
        )
        while self._queue and backlog < options.chunk:
            which = self._queue[0]
            stays = self._stays()
            if stays >= options.running_limit:
                return False
            if requests.abort_at[which] == 0:
                totals.aborted += 1
                self._queue.popleft()
                continue
            if stays and self._blocked.still(totals.steps, self._rooms(self.entry)):
                return True
            handle, matched = self._open(which, alone=not stays)
            fill = requests.fill(which)
            first = fill
            if options.admit == "chunk":
                first = min(fill, matched + options.chunk - backlog)
            plan = self.entry.plan(extend=(handle, first))
            if stays and not self._has_room(plan, matched, fill):
                self.entry.release(handle)
                self._blocked.note(totals.steps, self._rooms(self.entry))
                return True
            self._blocked.clear()
            self._queue.popleft()
            self._entry_handle[which] = handle
            requests.filled[which] = matched
            self._prefilling.append(which)
            backlog += fill - matched
            if options.prefix_cache:
                totals.looked_up += fill
                totals.hit += matched
            if not requests.admitted[which]:
                requests.admitted[which] = True
                totals.prompt_tokens += int(requests.prompt[which])
            totals.peak_running = max(totals.peak_running, stays + 1)
        return False

    def _has_room(self, plan: Plan, matched: int, fill: int) -> bool:
        """Whether admission may do ``plan``, the prefill of ``matched`` to ``fill`` tokens."""
        options = self._options
        headroom = -(-options.ahead // options.page_size) * (self._growing() + 1)
        by_prompt = options.admit == "prompt"
        rooms = self._rooms(self.entry)
        owed = self._owed() if by_prompt else 0
        if plan.need[options.group] > rooms[0] - headroom - owed:
            self._totals.main_waits += 1
            return False
        if options.side is None:
            return True
        need = plan.need[options.side]
        if self._window is None:
            # A prompt is dense while it is prefilled, and takes its scratch at the end.
            need += self._scratch
            owed += self._scratch * len(self._prefilling)
        elif by_prompt:
            requests, window = self._requests, self._window
            need = min(need, window.reach(fill))
            owed = sum(
                window.reach(requests.fill(which)) - window.reach(int(requests.filled[which]))
                for which in self._prefilling
            )
        if need > rooms[1] - headroom - owed:
            self._totals.side_waits += 1
            return False
        return True

    def _open(self, which: int, alone: bool) -> tuple[int, int]:
        """A handle for the request, and how many of its tokens the cache has.

        Args:
            which: the request.
            alone: whether it is the only one, so that its prefix must not take the room of
                its own window.
        """
        requests = self._requests
        if not self._options.prefix_cache or requests.unshared[which]:
            return self._unmatched(), 0
        # The last token is computed in any case: its logits are the first output.
        known = requests.tokens(which)[:-1]
        match = self.entry.prefix.match(known, self._options.namespace)
        handle = int(self.entry.open_with_prefix(match)[0])
        if alone and self._window is not None:
            room = self.entry.available(windowed.GROUP, counting_cache=True)
            if room < self._window.of(self._longest(which)) and match.length:
                self.entry.release(handle)
                self._unshare(which)
                return self._unmatched(), 0
        return handle, match.length

    def _unmatched(self) -> int:
        """A handle of a request that begins with nothing."""
        return int(self.entry.open(namespace=self._options.namespace)[0])

    def _unshare(self, which: int) -> None:
        """From now on a request goes without cached prefixes, whose window pages it locks."""
        self._totals.unshared += not self._requests.unshared[which]
        self._requests.unshared[which] = True

    def _owed(self) -> int:
        """Pages that the requests being prefilled still need for the rest of their prompts."""
        size = self._options.page_size
        return sum(
            -(-self._requests.fill(which) // size) - -(-int(self._requests.filled[which]) // size)
            for which in self._prefilling
        )

    # -- prefill ---------------------------------------------------------------------------

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

    def _extension(self, chunks: list[tuple[int, int]]) -> tuple[IntArray, list[int]]:
        """The chunks as a plan takes them: handles and lengths."""
        which = np.array([one for one, _ in chunks], np.int64)
        return self._entry_handle[which], [upto for _, upto in chunks]

    def _prefilled(self, chunks: list[tuple[int, int]]) -> list[int]:
        """Account for prefilled chunks; a prompt that is complete puts out its next token.

        Returns:
            Requests that go on to decode.
        """
        requests = self._requests
        joining = []
        for which, upto in chunks:
            requests.filled[which] = upto
            if upto >= requests.abort_at[which]:
                self._prefilling.remove(which)
                self._close(which, finished=False)
            elif upto == requests.fill(which):
                self._prefilling.remove(which)
                if self._options.sparse is not None and not self._thin(which):
                    continue
                self._publish(self.entry, int(self._entry_handle[which]), which)
                requests.produced[which] += 1
                self._totals.decoded += 1
                if requests.produced[which] >= requests.goal[which]:
                    self._close(which, finished=True)
                elif upto + 1 >= requests.abort_at[which]:
                    self._close(which, finished=False)
                else:
                    joining.append(which)
        return joining

    def _publish(self, alloc: KVAllocator, handle: int, which: int) -> None:
        """Share a prompt that is complete, less what has left its window."""
        if self._window is not None:
            self._totals.window_evicted += windowed.evict(alloc, handle)
        if self._options.prefix_cache and not self._requests.unshared[which]:
            alloc.prefix.publish(handle, [self._requests.tokens(which)])

    def _thin(self, which: int) -> bool:
        """Make a complete prompt sparse; one that finds no scratch goes back to the queue."""
        before = self.alloc.available("device")
        try:
            self.alloc.to_sparse(int(self._entry_handle[which]))
        except OutOfPages:
            self._release(self.alloc, self._entry_handle, [which])
            self._queue.appendleft(which)
            self._totals.retractions += 1
            self._totals.device_retractions += 1
            self._blocked.clear()
            return False
        self._totals.thinned += max(self.alloc.available("device") - before, 0)
        return True

    def _close(self, which: int, finished: bool) -> None:
        """End a request that has just been prefilled."""
        if finished:
            self._release(self.entry, self._entry_handle, [which])
            self._totals.finished += 1
        else:
            self.entry.release(self._entry_handle[[which]])
            self._entry_handle[which] = 0
            self._totals.aborted += 1

    def _release(
        self, alloc: KVAllocator, handles: IntArray, which: list[int], after: object = None
    ) -> None:
        """Give requests back; their pages go to the prefix cache, where there is one."""
        requests = self._requests
        tokens = [requests.tokens(one) for one in which] if self._options.prefix_cache else None
        alloc.release(handles[which], tokens=tokens, after=after)
        handles[which] = 0
