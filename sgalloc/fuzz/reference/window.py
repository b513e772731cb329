"""The window group of the naive allocator: a dict of page number to window page a request.

Nothing here adds up or compares ranges: which pages are missing, dead or given back is asked of
every page number by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgalloc.fuzz.reference.books import Books
from sgalloc.fuzz.reference.words import Growth, Node, Refused, Request, Waiting


class Window(Books):
    """Frontiers, tails, and window pages that go along with the last tokens."""

    def reach(self) -> int:
        """How far below C a position may be and still has to be there."""
        assert self.window is not None
        if not self.prefix_cache:
            return self.window.tokens
        return self.pages_for(max(self.window.tokens, self.page_size)) * self.page_size

    def moved_frontier(self, request: Request) -> int:
        """The frontier after an eviction by itself, in pages."""
        assert self.window is not None
        page, reach = request.frontier, self.reach()
        # The page after it may go, too, while its last token is out of reach of the next one.
        while (page + 1) * self.page_size <= request.committed - reach:
            page += 1
        far = (page - request.frontier) * self.page_size
        return page if far >= self.window.evict_every else request.frontier

    def plan_window(
        self, growths: Sequence[Growth], evict: bool, tails: Sequence[int] | None
    ) -> None:
        """What these growths do in the window group."""
        requests = [self.requests[growth.name] for growth in growths]
        if tails is not None:
            if any(request.window for request in requests):
                raise Refused("state")
            for growth, tail in zip(growths, tails, strict=True):
                new = growth.upto - growth.start
                if tail > new or (new and (growth.upto - tail) % self.page_size):
                    raise Refused("value")
        for at, (request, growth) in enumerate(zip(requests, growths, strict=True)):
            grows = growth.upto > growth.start
            growth.frontier = request.frontier
            if tails is not None and grows:
                growth.frontier = (growth.upto - tails[at]) // self.page_size
            elif evict:
                growth.frontier = self.moved_frontier(request)
            own = [number for number in request.window if number >= len(request.shared)]
            growth.leaving = [number for number in own if number < growth.frontier]
            if grows:
                held = request.window
                growth.fresh = [n for n in range(growth.frontier, growth.nxt) if n not in held]

    def apply_window(self, growths: Sequence[Growth]) -> None:
        """Frontiers move first, then pages are taken."""
        for growth in growths:
            self.move_frontier(self.requests[growth.name], growth.frontier, None)
        for growth in growths:
            self.take_window(self.requests[growth.name], growth.fresh)

    def take_window(self, request: Request, numbers: Sequence[int]) -> None:
        """A window page for each of these page numbers."""
        for number in numbers:
            side = request.window[number] = self.pools["window"].take()
            self.show(request.pages[number], side)
            self.changes += 1

    def show(self, page: int, side: int) -> None:
        """Enter a pair into the map, if there is one."""
        assert self.window is not None
        if self.window.slot_map:
            self.map[page] = side

    def move_frontier(self, request: Request, frontier: int, event: object) -> None:
        """Pages below the frontier go back; those of the cache stay with it."""
        if frontier == request.frontier:
            return
        sides = []
        for number in sorted(request.window):
            if number < frontier:
                side = request.window.pop(number)
                if number >= len(request.shared):
                    sides.append(side)
                    self.map.pop(request.pages[number], None)
        request.frontier = frontier
        self.changes += 1
        self.part_with(Waiting([event], sides=sides))

    def evict_window(
        self, names: Sequence[int], uptos: Sequence[int] | None, event: object = None
    ) -> list[int]:
        """Frontiers afterwards, in tokens."""
        self.settle()
        requests = self.find(names, live=True)
        if uptos is not None and any(
            upto > request.committed for request, upto in zip(requests, uptos, strict=True)
        ):
            raise Refused("value")
        for at, request in enumerate(requests):
            if uptos is None:
                frontier = self.moved_frontier(request)
            else:
                frontier = max(request.frontier, uptos[at] // self.page_size)
            self.move_frontier(request, frontier, event)
            self.doubts += 1
        return [request.frontier * self.page_size for request in requests]

    def trim_window(self, request: Request, keep: int, shared: int) -> list[int]:
        """Window pages that go back when ``keep`` pages stay; the frontier may fall."""
        edge = request.committed // self.page_size
        if edge < request.frontier:
            request.frontier = keep = edge
        cut = [number for number in request.window if number >= keep]
        sides = [request.window[number] for number in cut if number >= shared]
        for number in cut:
            del request.window[number]
        return sides

    def check_tail(self, length: int, matched: int, tail: int) -> None:
        """A tail of a request to be received may begin inside its prefix, on a page edge."""
        new = length - matched
        if not matched and tail > new:
            raise Refused("value")
        if matched and tail > length:
            raise Refused("value")
        if (new or matched) and (length - tail) % self.page_size:
            raise Refused("value")

    def usable(self, path: Sequence[Node]) -> int:
        """How many pages of a cached path somebody could go on from."""
        if self.window is None:
            return len(path)
        for count in range(len(path), 0, -1):
            end = count * self.page_size
            low = max(0, end - self.window.tokens) // self.page_size
            if all(path[number].side for number in range(low, count)):
                return count
        return 0

    def adopt_window(self, request: Request) -> None:
        """A request goes on from its shared pages; below a dead one nothing is read."""
        for number, node in enumerate(request.shared):
            if node.side:
                request.window[number] = node.side
            else:
                request.window.clear()
                request.frontier = number + 1
