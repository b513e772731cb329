"""The verbs of the naive allocator that open, settle lengths, give back and receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sgalloc.fuzz.reference.caching import Caching, Tokens
from sgalloc.fuzz.reference.words import Match, Node, Refused, Request, Waiting


class Place(NamedTuple):
    """One token: its page in the main group, in the window group (0: none), and its offset."""

    page: int
    side: int
    offset: int


class Reference(Caching):
    """The whole of it. Every verb takes names, plain numbers and events with `over`."""

    def open(self, names: Sequence[int], namespace: Any = None) -> None:
        """Rows for new requests."""
        self.settle()
        self.check_rows(len(names))
        for name in names:
            self.take_row(name, namespace)

    def commit(self, names: Sequence[int], accepted: Sequence[int]) -> None:
        """C goes up."""
        self.settle()
        requests = self.find(names, live=True)
        for request, tokens in zip(requests, accepted, strict=True):
            if request.committed + tokens > len(request.pages) * self.page_size:
                raise Refused("extent")
        for request, tokens in zip(requests, accepted, strict=True):
            request.committed += tokens
            self.changes += tokens > 0
            self.doubts += tokens == 0

    def trim(self, names: Sequence[int], lengths: Sequence[int], event: Any = None) -> None:
        """C goes down, and pages past it go back."""
        self.settle()
        requests = self.find(names, live=True)
        for request, length in zip(requests, lengths, strict=True):
            length = min(length, request.committed)
            if length < len(request.shared) * self.page_size and length % self.page_size:
                raise Refused("edge", edge=length - length % self.page_size)
        for request, length in zip(requests, lengths, strict=True):
            before = (request.committed, len(request.pages))
            request.committed = min(request.committed, length)
            keep = self.pages_for(request.committed)
            shared = len(request.shared)
            moved = before != (request.committed, keep)
            self.changes += moved
            self.doubts += not moved
            if not moved:
                continue
            sides: list[int] = []
            if self.window is not None:
                sides = self.trim_window(request, keep, shared)
            elif self.sparse is not None:
                sides = self.trim_device(request, keep)
            own = request.pages[max(keep, shared) :]
            unlock = request.shared[keep:]
            request.pages, request.shared = request.pages[:keep], request.shared[:keep]
            self.part_with(Waiting([event], own, sides, unlock=unlock))

    def compact(
        self, names: Sequence[int], accepted: Sequence[Sequence[int]], event: Any = None
    ) -> list[tuple[Place, Place]]:
        """Commit the tokens at these positions; where each of them moves from and to."""
        requests = self.find(names, live=True)
        pairs = list(zip(requests, accepted, strict=True))
        if any(at < request.committed for request, some in pairs for at in some):
            raise Refused("value")
        if any(at >= len(request.pages) * self.page_size for request, some in pairs for at in some):
            raise Refused("extent")
        if any(list(some) != sorted(set(some)) for some in accepted):
            raise Refused("value")
        moves = []
        for request, some in pairs:
            for number, at in enumerate(some):
                to = request.committed + number
                if to != at:
                    moves.append((self.place(request, at), self.place(request, to)))
        for request, some in pairs:
            request.committed += len(some)
            self.changes += len(some) > 0
        self.trim(names, [request.committed for request in requests], event)
        return moves

    def place(self, request: Request, position: int) -> Place:
        """Where a token is."""
        number, offset = divmod(position, self.page_size)
        return Place(request.pages[number], request.window.get(number, 0), offset)

    def release(
        self,
        names: Sequence[int],
        tokens: Sequence[Tokens | None] | None = None,
        event: Any = None,
    ) -> None:
        """Everything goes back, whole pages of known tokens to the cache."""
        requests = self.find(names)
        if not self.prefix_cache or tokens is None:
            tokens = [None] * len(requests)
        known = [(r, t) for r, t in zip(requests, tokens, strict=True) if t is not None]
        self.prove_same_prompt([r for r, _ in known], [t for _, t in known])
        self.settle()
        if known:
            self.tick += 1
        for name, request, mine in zip(names, requests, tokens, strict=True):
            if request.missing:
                self.close_receiving(name, event, False)
                continue
            path_length = 0
            spare: list[int] = []
            fresh: list[Node] = []
            before = self.beside(request) if self.second else []
            if mine is not None:
                path, spare, fresh = self.enter(request, mine)
                path_length = len(path)
            kept = {node.side for node in self.nodes()} if self.window is not None else set()
            back = spare + request.pages[max(path_length, len(request.shared)) :]
            sides = [side for side in before if side not in kept]
            del self.requests[name]
            self.changes += 1
            self.part_with(Waiting([event], back, sides, [name], list(request.shared), list(fresh)))

    # -- receiving -------------------------------------------------------------------------

    def preallocate(
        self,
        names: Sequence[int],
        lengths: Sequence[int],
        writers: Sequence[int],
        matches: Sequence[Match | None],
        deadlines: Sequence[float | None],
        tails: Sequence[int] | None = None,
        only: bool = False,
    ) -> None:
        """Rows and pages that remote writers fill."""
        size = self.page_size
        if not names:
            return
        matched = [0 if match is None else len(match.nodes) for match in matches]
        if any(n < count * size for n, count in zip(lengths, matched, strict=True)):
            raise Refused("value")
        self.settle()
        if any(node.evicted for match in matches if match for node in match.nodes):
            raise Refused("plan")
        for length in lengths:
            if self.pages_for(length) * size > self.row_width:
                raise Refused("narrow", need=self.pages_for(length) * size, width=self.row_width)
        self.check_rows(len(names))
        locked = [node for match in matches if match for node in match.nodes]
        pages = [self.pages_for(length) for length in lengths]
        main = {self.main: sum(pages) - sum(matched)}
        self.refuse_if_short(main, locked)
        net = dict(main)
        if self.window is not None:
            begins = list(matched)
            if tails is not None:
                for at, (length, tail) in enumerate(zip(lengths, tails, strict=True)):
                    self.check_tail(length, matched[at] * size, tail)
                    begins[at] = max(matched[at], (length - tail) // size)
            net["window"] = sum(pages) - sum(begins)
        elif self.sparse is not None:
            net["device"] = 0 if only else sum(pages)
        self.refuse_if_short(net, locked)
        empty = Match(None, [])
        found = [empty if match is None else match for match in matches]
        if any(match is not None for match in matches):
            self.open_with_prefix(names, found)
        else:
            self.open(names)
        self.make_room(net)
        for at, name in enumerate(names):
            request = self.requests[name]
            while len(request.pages) < pages[at]:
                request.pages.append(self.pools[self.main].take())
            if self.window is not None:
                if tails is not None:
                    low = max(request.frontier, (lengths[at] - tails[at]) // size)
                    request.frontier = low
                    request.window = {n: p for n, p in request.window.items() if n >= low}
                numbers = range(max(request.frontier, matched[at]), pages[at])
                self.take_window(request, numbers)
            elif self.sparse is not None and not only:
                request.device = [self.pools["device"].take() for _ in range(pages[at])]
                self.show_all(request)
            request.length, request.prefix = lengths[at], request.committed
            request.writers, request.deadline = writers[at], deadlines[at]
            request.missing = set(range(writers[at]))
            self.receiving[name] = request

    def acknowledge(self, name: int, writer: int) -> bool:
        """A writer is done; whether that was news."""
        request = self.receiving.get(name)
        if request is None or writer not in request.missing:
            return False
        if len(request.missing) > 1:
            request.missing.discard(writer)
            self.doubts += 1
            return True
        self.settle()
        request.missing.discard(writer)
        self.changes += 1
        if request.aborted:
            self.take_back(name, None)
        else:
            del self.receiving[name]
            request.committed = request.length
        return True

    def close_receiving(self, name: int, event: Any, force: bool) -> None:
        """An abort of a request that writers still fill."""
        request = self.requests.pop(name)
        self.changes += 1
        request.aborted = True
        request.events.append(event)
        if force:
            self.take_back(name, event)

    def take_back(self, name: int, event: Any) -> None:
        """An aborted request gives back what was pinned."""
        request = self.receiving.pop(name)
        self.changes += 1
        own = request.pages[len(request.shared) :]
        sides = self.beside(request) if self.second else []
        events = [*request.events, event]
        self.part_with(Waiting(events, own, sides, [name], list(request.shared)))

    def abort(self, names: Sequence[int], force: bool = False, event: Any = None) -> None:
        """End requests in any state; what is unknown or gone is left alone."""
        once = list(dict.fromkeys(names))
        live = [name for name in once if name in self.requests]
        gone = [n for n in once if force and n in self.receiving and self.receiving[n].aborted]
        if not live and not gone:
            return
        self.settle()
        for name in live:
            if self.requests[name].missing:
                self.close_receiving(name, event, force)
            else:
                self.release([name], None, event)
        for name in gone:
            self.take_back(name, event)

    def reclaim(self, now: float) -> list[int]:
        """Take back all whose deadline has passed."""
        due = [n for n, r in self.receiving.items() if r.deadline is not None and now >= r.deadline]
        if due:
            self.settle()
        for name in due:
            if not self.receiving[name].aborted:
                self.close_receiving(name, None, False)
            self.take_back(name, None)
        return due

    def check_storable(self) -> None:
        """A snapshot is refused while an event that somebody waits for is not over."""
        pending = [*self.waiting]
        pending += [Waiting(r.events) for r in self.receiving.values() if r.aborted]
        if not all(waiting.over for waiting in pending):
            raise Refused("state")

    def restored(self) -> None:
        """In a restored allocator the map shows nothing of requests that are gone."""
        for request in self.receiving.values():
            if request.aborted:
                for page in request.pages[len(request.shared) :]:
                    self.map.pop(page, None)
