"""A naive book of what every request holds: plain numbers in a dict, one request at a time.

It shares no code with the allocator. It tells for each call whether it is refused, and with which
error, and how many pages each place has afterwards, in each group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ErrorName = str


class Refuse(Exception):
    """The call would be refused, with an error of this name; nothing was changed."""

    def __init__(self, name: ErrorName, group: str = "") -> None:
        super().__init__(name)
        self.name, self.group = name, group


@dataclass(frozen=True)
class Config:
    """What a book and an allocator are made with."""

    name: str
    ps: int = 4
    pages: int = 40
    rows: int = 6
    cache: bool = False
    window: int = 0
    window_pages: int = 0
    slot_map: bool = False
    ratio: int = 0
    buffer: int = 0
    scratch: int = 0


@dataclass
class Request:
    """One request. Page numbers count from its first token."""

    ids: list[int]
    c: int = 0
    pages: int = 0
    shared: int = 0
    first: int = 0
    """Window pages are held for the numbers ``first`` to ``stop``, shared ones included."""
    stop: int = 0
    dense: int = 0
    """Device pages, scratch left out."""
    scratch: int = 0
    sparse: bool = False
    length: int = 0
    missing: set[int] = field(default_factory=set)
    """Writers that have yet to acknowledge."""
    aborted: bool = False
    deadline: int | None = None
    waits: list[object] = field(default_factory=list)


@dataclass
class Waiting:
    """What is in quarantine behind ``events``."""

    events: list[object]
    pages: int = 0
    beside: int = 0
    rows: int = 0
    locks: list[tuple[int, ...]] = field(default_factory=list)


class Book:
    """All requests, the cache, and what waits."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.requests: dict[int, Request] = {}
        self.cache: dict[tuple[int, ...], bool] = {}
        """Cached pages by all tokens up to their end; whether a window page is beside."""
        self.waiting: list[Waiting] = []
        self.main_total = config.pages * (config.ratio or 1)
        self.side_total = config.window_pages or (config.pages if config.ratio else 0)

    # -- counts ----------------------------------------------------------------------------

    def beside(self, r: Request) -> int:
        """Pages of the second group that the request alone holds."""
        if self.config.window:
            return max(r.stop - max(r.first, r.shared), 0)
        return r.dense + r.scratch

    def counts(self) -> dict[str, tuple[int, int]]:
        """By place: pages of the main group, and of the second one."""
        found = {
            "owned": [(r.pages - r.shared, self.beside(r)) for r in self.live()],
            "pinned": [(r.pages - r.shared, self.beside(r)) for r in self.all() if r.missing],
            "cached": [(1, int(live)) for live in self.cache.values()],
            "quarantined": [(w.pages, w.beside) for w in self.waiting],
        }
        totals = {
            place: (sum(a for a, _ in parts), sum(b for _, b in parts))
            for place, parts in found.items()
        }
        used = [sum(two[at] for two in totals.values()) for at in (0, 1)]
        totals["free"] = (self.main_total - used[0], self.side_total - used[1])
        return totals

    def rows(self) -> tuple[int, int, int]:
        """Open, free and quarantined rows."""
        aborted = sum(r.aborted for r in self.all())
        waiting = aborted + sum(w.rows for w in self.waiting)
        opened = len(self.requests) - aborted
        return opened, self.config.rows - opened - waiting, waiting

    def all(self) -> list[Request]:
        return list(self.requests.values())

    def live(self) -> list[Request]:
        return [r for r in self.all() if not r.missing]

    def path(self, ids: list[int], page: int) -> tuple[int, ...]:
        return tuple(ids[: (page + 1) * self.config.ps])

    def locked(self) -> set[tuple[int, ...]]:
        held = {self.path(r.ids, at) for r in self.all() for at in range(r.shared)}
        return held.union(*(w.locks for w in self.waiting)) if self.waiting else held

    def match(self, ids: list[int]) -> int:
        """Pages of the longest cached beginning whose last window is there."""
        ps, window = self.config.ps, self.config.window
        beginning: list[bool] = []
        while len(ids) >= (len(beginning) + 1) * ps:
            live = self.cache.get(self.path(ids, len(beginning)))
            if live is None:
                break
            beginning.append(live)
        for count in range(len(beginning), 0, -1):
            low = max(count * ps - window, 0) // ps if window else count
            if all(beginning[low:count]):
                return count
        return 0

    # -- who may be asked for what ---------------------------------------------------------

    def running(self, handle: int) -> Request:
        r = self.requests.get(handle)
        if r is None or r.aborted:
            raise Refuse("StaleHandle")
        if r.missing:
            raise Refuse("WrongState")
        return r

    def afford(self, main: int, beside: int) -> None:
        free = self.counts()["free"]
        if main > free[0]:
            raise Refuse("OutOfPages", "logical" if self.config.ratio else "full")
        if beside > free[1]:
            raise Refuse("OutOfPages", "device" if self.config.ratio else "window")

    def up(self, tokens: int) -> int:
        return (tokens + self.config.ps - 1) // self.config.ps

    # -- growth ----------------------------------------------------------------------------

    def open(self, handle: int, ids: list[int], cached: bool = False) -> None:
        r = Request(ids)
        if cached:
            self.adopt(r)
        self.requests[handle] = r

    def adopt(self, r: Request) -> None:
        r.shared = r.pages = self.match(r.ids)
        r.c = r.shared * self.config.ps
        live = [self.cache[self.path(r.ids, at)] for at in range(r.shared)]
        r.first = max((at + 1 for at, beside in enumerate(live) if not beside), default=0)
        r.stop = r.shared

    def grow(
        self,
        handle: int,
        verb: str,
        upto: int,
        evict: bool = False,
        tail: int | None = None,
        main_only: bool = False,
    ) -> None:
        """``extend``, ``decode`` or ``reserve`` to ``upto`` tokens."""
        r, config = self.running(handle), self.config
        pages = max(r.pages, self.up(upto))
        settled = r.c if verb == "reserve" else upto
        first, stop, dense, sparse = r.first, r.stop, r.dense, r.sparse
        back = 0
        if config.window:
            if tail is not None:
                if stop > first:
                    raise Refuse("WrongState")
                if tail > upto - r.c or (upto > r.c and (upto - tail) % config.ps):
                    raise Refuse("ValueError")
                first = (upto - tail) // config.ps if upto > r.c else first
            if evict:
                first = max(first, self.frontier(r))
                back = max(min(first, stop) - max(r.first, r.shared), 0)
            begin = max(stop, first)
            stop = pages if upto > r.c else begin
            need = stop - begin
        elif config.ratio:
            if verb == "extend" and not main_only:
                dense, sparse = pages, False
            elif not sparse:
                if verb != "extend":
                    if dense < r.pages:
                        raise Refuse("WrongState")
                    dense = pages
            elif dense > self.buffer() or self.up(settled) > self.buffer():
                dense = self.buffer() + 1
            else:
                dense = max(dense, self.up(settled))
            need = dense - r.dense
        else:
            need = 0
        self.afford(pages - r.pages, need - back)
        r.pages, r.first, r.stop, r.dense, r.sparse = pages, first, stop, dense, sparse
        r.c = settled

    def buffer(self) -> int:
        return self.up(self.config.buffer)

    def frontier(self, r: Request) -> int:
        ps, keep = self.config.ps, self.config.window
        if self.config.cache:
            keep = self.up(max(keep, ps)) * ps
        return max(r.c - keep, 0) // ps

    def commit(self, handle: int, accepted: int) -> None:
        r = self.running(handle)
        if r.c + accepted > r.pages * self.config.ps:
            raise Refuse("CommitPastExtent")
        r.c += accepted

    def compact(self, handle: int, positions: list[int], event: object | None) -> None:
        r = self.running(handle)
        if any(at >= r.pages * self.config.ps for at in positions):
            raise Refuse("CommitPastExtent")
        r.c += len(positions)
        self.trim(handle, r.c, event)

    def to_sparse(self, handle: int, event: object | None) -> None:
        r = self.running(handle)
        if r.sparse:
            raise Refuse("WrongState")
        dense = self.buffer() + 1 if r.pages > self.buffer() else r.pages
        scratch = self.up(self.config.scratch)
        need = max(dense - r.dense, 0) + scratch - r.scratch
        back = max(r.dense - dense, 0)
        if need - (0 if event is not None else back) > self.counts()["free"][1]:
            raise Refuse("OutOfPages", "device")
        r.dense, r.scratch, r.sparse = dense, scratch, True
        self.give(Waiting([event], 0, back))

    # -- giving back -----------------------------------------------------------------------

    def give(self, what: Waiting) -> None:
        """Let ``what`` wait behind its events, if it has any."""
        what.events = [event for event in what.events if event is not None]
        if what.events and (what.pages or what.beside or what.rows or what.locks):
            self.waiting.append(what)

    def done(self, event: object) -> None:
        for what in self.waiting:
            what.events = [one for one in what.events if one is not event]
        self.waiting = [what for what in self.waiting if what.events]
        for r in self.all():
            r.waits = [one for one in r.waits if one is not event]

    def trim(self, handle: int, length: int, event: object | None) -> None:
        r, ps = self.running(handle), self.config.ps
        c = min(r.c, length)
        if c < r.shared * ps and c % ps:
            raise Refuse("InsideSharedPage")
        keep = self.up(c)
        before = (r.pages - r.shared, self.beside(r))
        # Who keeps a page from eviction keeps all that comes before it.
        locks = [self.path(r.ids, at) for at in range(r.shared if keep < r.shared else 0)]
        if self.config.window:
            if c < r.first * ps:
                r.first = r.stop = c // ps
            else:
                r.stop = min(r.stop, keep)
        r.dense = min(r.dense, keep)
        r.c, r.pages, r.shared = c, keep, min(r.shared, keep)
        after = (r.pages - r.shared, self.beside(r))
        self.give(Waiting([event], before[0] - after[0], before[1] - after[1], 0, locks))

    def evict(self, handle: int, upto: int | None, event: object | None) -> None:
        r = self.running(handle)
        if upto is not None and upto > r.c:
            raise Refuse("ValueError")
        before = self.beside(r)
        r.first = max(r.first, self.frontier(r) if upto is None else upto // self.config.ps)
        r.stop = max(r.stop, r.first)
        self.give(Waiting([event], 0, before - self.beside(r)))

    def enter(self, r: Request) -> tuple[int, list[tuple[int, ...]]]:
        """Let the whole settled pages enter the cache.

        Returns:
            Window pages that the cache took, and the path, if it was new in any way.
        """
        took, new = 0, False
        count = min(r.c, len(r.ids)) // self.config.ps
        for at in range(r.shared, count):
            key = self.path(r.ids, at)
            live = self.config.window > 0 and r.first <= at < r.stop
            new |= key not in self.cache or (live and not self.cache[key])
            took += live and not self.cache.get(key, False)
            self.cache[key] = live or self.cache.get(key, False)
        return took, [self.path(r.ids, at) for at in range(count)] if new else []

    def publish(self, handle: int, event: object | None) -> None:
        r = self.running(handle)
        before = (r.pages - r.shared, self.beside(r), len(self.cache))
        took, locks = self.enter(r)
        r.shared = max(r.shared, min(r.c, len(r.ids)) // self.config.ps)
        main = before[0] - (r.pages - r.shared) - (len(self.cache) - before[2])
        self.give(Waiting([event], main, before[1] - self.beside(r) - took, 0, locks))

    def release(self, handle: int, keep: bool, event: object | None) -> None:
        r = self.requests.get(handle)
        if r is None or r.aborted:
            raise Refuse("StaleHandle")
        if r.missing:
            self.abort(handle, False, event)
            return
        locks = [self.path(r.ids, at) for at in range(r.shared)]
        pages, beside, cached, took = r.pages - r.shared, self.beside(r), len(self.cache), 0
        if keep and self.config.cache:
            took, path = self.enter(r)
            locks += path
        del self.requests[handle]
        pages -= len(self.cache) - cached
        self.give(Waiting([event], pages, beside - took, 1, locks))

    # -- receiving -------------------------------------------------------------------------

    def preallocate(
        self,
        handle: int,
        ids: list[int],
        length: int,
        writers: int,
        deadline: int | None,
        cached: bool,
        tail: int | None,
        main_only: bool,
    ) -> None:
        r, ps = Request(ids, length=length, deadline=deadline), self.config.ps
        if cached:
            self.adopt(r)
        if length < r.c:
            raise Refuse("ValueError")
        pages = self.up(length)
        if self.config.window:
            if tail is not None:
                r.first = max(r.first, (length - tail) // ps)
            need = pages - max(r.stop, r.first)
        else:
            need = pages if self.config.ratio and not main_only else 0
        self.afford(pages - r.shared, need)
        r.pages = r.stop = pages
        r.dense = 0 if self.config.window else need
        r.missing = set(range(writers))
        self.requests[handle] = r

    def acknowledge(self, handle: int, writer: int) -> bool:
        r = self.requests.get(handle)
        if r is None or writer not in r.missing:
            return False
        r.missing.discard(writer)
        if not r.missing:
            if r.aborted:
                self.back(handle, None)
            else:
                r.c = r.length
        return True

    def back(self, handle: int, event: object | None) -> None:
        """An aborted one comes back, or waits for its events alone."""
        r = self.requests.pop(handle)
        locks = [self.path(r.ids, at) for at in range(r.shared)]
        self.give(Waiting([*r.waits, event], r.pages - r.shared, self.beside(r), 1, locks))

    def abort(self, handle: int, force: bool, event: object | None) -> None:
        r = self.requests.get(handle)
        if r is None or (r.aborted and not force):
            return
        if not r.missing:
            self.release(handle, False, event)
            return
        if force:
            self.back(handle, event)
            return
        r.aborted = True
        r.waits += [] if event is None else [event]

    def reclaim(self, now: int) -> list[int]:
        due = [
            handle
            for handle, r in self.requests.items()
            if r.missing and r.deadline is not None and now >= r.deadline
        ]
        for handle in due:
            self.back(handle, None)
        return due

    def clear(self) -> int:
        held = self.locked()
        gone = [key for key in self.cache if key not in held]
        for key in gone:
            del self.cache[key]
        return len(gone)
