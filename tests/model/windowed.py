"""The naive allocator with a window group: each request keeps a dict of page number to id.

Nothing here adds up or compares ranges: which pages are missing, dead or given back is asked of
every page number by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.reference import (
    NOTHING,
    Match,
    Node,
    Part,
    Plan,
    Reference,
    Refused,
    Request,
    Waiting,
)


class WindowReference(Reference):
    """A second pool, whose pages go along with the last tokens of each request."""

    def __init__(
        self,
        window_tokens: int,
        window_pages: int,
        slot_map: bool,
        evict_every: int,
        **numbers: Any,
    ) -> None:
        super().__init__(**numbers)
        self.window_tokens, self.window_pages = window_tokens, window_pages
        self.evict_every = evict_every
        self.side_free = list(range(1, window_pages + 1))
        self.side_high = self.side_evicted = 0
        # Which window page the map shows beside a page of the main group, while it shows one.
        self.map: dict[int, int] = {}

    # Questions

    def reach(self) -> int:
        """How far below C a position may be and still has to be there."""
        if not self.prefix_cache:
            return self.window_tokens
        return self.ceil(max(self.window_tokens, self.page_size))

    def own(self, request: Request) -> list[int]:
        """Window pages that belong to the request alone."""
        return [i for number, i in request.window.items() if number >= len(request.shared)]

    def side_evictable(self, unlocked: Sequence[Node] = ()) -> int:
        return sum(1 for node in self.nodes() if node.side and self.can_go(node, unlocked))

    def available_in(self, group: str, counting_cache: bool) -> int:
        if group == "full":
            return self.available(counting_cache)
        return len(self.side_free) + (self.side_evictable() if counting_cache else 0)

    def group_counts(self) -> dict[str, dict[str, int]]:
        beside = sum(1 for node in self.nodes() if node.side)
        window = {
            "total": self.window_pages,
            "free": len(self.side_free),
            "quarantined": sum(len(waiting.sides) for waiting in self.waiting),
            "cached": beside,
            "locked": beside - self.side_evictable(),
            "pinned": 0,
            "owned": sum(len(self.own(r)) for r in self.requests.values()),
            "high_water": self.side_high,
            "evicted": self.side_evicted,
        }
        return {"full": self.counts(), "window": window}

    def needs(self, plan: Plan) -> dict[str, int]:
        return {"full": plan.need, "window": sum(len(g.fresh) for g in plan.growths)}

    def gains(self, plan: Plan) -> dict[str, int]:
        return {"full": 0, "window": sum(len(g.leaving) for g in plan.growths)}

    def check(self) -> None:
        super().check()
        pages = list(self.side_free) + [node.side for node in self.nodes() if node.side]
        for waiting in self.waiting:
            pages += waiting.sides
        for request in self.requests.values():
            pages += self.own(request)
            for number, side in request.window.items():
                if not request.frontier <= number < len(request.pages):
                    raise AssertionError("a window page lies outside the extent")
                if number < len(request.shared) and request.shared[number].side != side:
                    raise AssertionError("a request reads another window page than the cache has")
        if sorted(pages) != list(range(1, self.window_pages + 1)):
            raise AssertionError(f"partition of the window pages is broken: {sorted(pages)}")

    def fits(
        self,
        new: Sequence[int] = (),
        plan: Plan | None = None,
        after_releasing: Sequence[int] = (),
        counting_cache: bool = True,
    ) -> bool:
        if not super().fits(new, plan, after_releasing, counting_cache):
            return False
        gone = self.find(after_releasing)
        room = len(self.side_free) + sum(len(self.own(request)) for request in gone)
        if counting_cache:
            room += self.side_evictable([node for r in gone for node in r.shared])
        if plan is None:
            return sum(self.ceil(length) for length in new) <= room * self.page_size
        left = [g for g in plan.growths if g.name not in after_releasing]
        return sum(len(g.fresh) - len(g.leaving) for g in left) <= room

    # What comes back, and what has to go

    def give_back(self, waiting: Waiting) -> None:
        super().give_back(waiting)
        self.side_free += waiting.sides
        self.freed_sides += waiting.sides
        for page in waiting.pages:
            self.map.pop(page, None)

    def evict_one(self) -> None:
        before = {id(node): node for node in self.nodes()}
        super().evict_one()
        for node in self.nodes():
            del before[id(node)]
        [gone] = before.values()
        self.map.pop(gone.page, None)
        if gone.side:
            self.side_evicted += 1
            self.side_free.append(gone.side)
            self.freed_sides.append(gone.side)

    def make_both_rooms(self, need: int, side_net: int) -> None:
        cached = self.evictable()
        if need > len(self.free) + cached:
            raise Refused("pages", need=need, free=len(self.free), cached=cached)
        beside = self.side_evictable()
        if side_net > len(self.side_free) + beside:
            raise Refused("pages", "window", need=side_net, free=len(self.side_free), cached=beside)
        while len(self.free) < need or len(self.side_free) < side_net:
            self.evict_one()

    # Verbs

    def frontier(self, request: Request) -> int:
        """The frontier after an eviction by itself, in pages."""
        page = request.frontier
        # The page after it may go, too, while its last token is out of reach of the next one.
        while (page + 1) * self.page_size <= request.committed - self.reach():
            page += 1
        far = (page - request.frontier) * self.page_size
        return page if far >= self.evict_every else request.frontier

    def plan(
        self,
        extend: Part = NOTHING,
        decode: Part = NOTHING,
        reserve: Part = NOTHING,
        evict: bool = False,
        tails: Sequence[int] | None = None,
    ) -> Plan:
        plan = super().plan(extend, decode, reserve)
        uptos = list(extend[1])
        uptos += [self.requests[n].committed + t for n, t in zip(*decode, strict=True)]
        uptos += [self.requests[n].committed + t for n, t in zip(*reserve, strict=True)]
        requests = [self.requests[growth.name] for growth in plan.growths]
        if tails is not None:
            if any(request.window for request in requests):
                raise Refused("state")
            for request, upto, tail in zip(requests, uptos, tails, strict=True):
                fresh = upto - request.committed
                if tail > fresh or (fresh and (upto - tail) % self.page_size):
                    raise Refused("value")
        for at, (request, growth) in enumerate(zip(requests, plan.growths, strict=True)):
            growth.frontier = request.frontier
            grows = uptos[at] > request.committed
            if tails is not None and grows:
                growth.frontier = (uptos[at] - tails[at]) // self.page_size
            elif evict:
                growth.frontier = self.frontier(request)
            own = [number for number in request.window if number >= len(request.shared)]
            growth.leaving = [number for number in own if number < growth.frontier]
            if grows:
                numbers = range(growth.nxt // self.page_size)
                growth.fresh = [
                    n for n in numbers if n >= growth.frontier and n not in request.window
                ]
        return plan

    def apply(self, plan: Plan) -> Plan:
        self.settle()
        if plan.changes != self.changes:
            raise Refused("plan")
        self.make_both_rooms(plan.need, self.needs(plan)["window"] - self.gains(plan)["window"])
        super().apply(plan)
        for growth in plan.growths:
            self.move_frontier(growth.name, growth.frontier, None)
        for growth in plan.growths:
            request = self.requests[growth.name]
            for number in growth.fresh:
                side = request.window[number] = self.side_free.pop()
                self.map[request.pages[number]] = side
                self.changes += 1
            self.side_high = max(self.side_high, self.window_pages - len(self.side_free))
        return plan

    def move_frontier(self, name: int, frontier: int, event: Any) -> bool:
        request = self.requests[name]
        if frontier == request.frontier:
            return False
        sides = []
        for number in sorted(request.window):
            if number < frontier:
                side = request.window.pop(number)
                if number >= len(request.shared):
                    sides.append(side)
                    del self.map[request.pages[number]]
        request.frontier = frontier
        self.changes += 1
        self.part_with(Waiting(event, [], [], [], [], sides))
        return True

    def evict_window(
        self, names: Sequence[int], uptos: Sequence[int] | None, event: Any = None
    ) -> list[int]:
        self.settle()
        requests = self.find(names)
        if uptos is not None and any(
            upto > request.committed for request, upto in zip(requests, uptos, strict=True)
        ):
            raise Refused("value")
        for at, (name, request) in enumerate(zip(names, requests, strict=True)):
            if uptos is None:
                frontier = self.frontier(request)
            else:
                frontier = max(request.frontier, uptos[at] // self.page_size)
            self.move_frontier(name, frontier, event)
        return [request.frontier * self.page_size for request in requests]

    def trim(self, names: Sequence[int], lengths: Sequence[int], event: Any = None) -> None:
        self.settle()
        requests = self.find(names)
        held = [len(request.shared) for request in requests]
        super().trim(names, lengths, event)
        for request, shared in zip(requests, held, strict=True):
            keep, edge = len(request.pages), request.committed // self.page_size
            if edge < request.frontier:
                request.frontier = keep = edge
            cut = [number for number in request.window if number >= keep]
            sides = [request.window[number] for number in cut if number >= shared]
            for number in cut:
                del request.window[number]
            self.part_with(Waiting(event, [], [], [], [], sides))

    def release(
        self,
        names: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        event: Any = None,
    ) -> None:
        self.settle()
        requests = self.find(names)
        super().release(names, tokens, event)
        kept = {node.side for node in self.nodes()}
        for request in requests:
            sides = [side for side in self.own(request) if side not in kept]
            self.part_with(Waiting(event, [], [], [], [], sides))

    # The prefix cache

    def enter(
        self, request: Request, tokens: Sequence[int]
    ) -> tuple[list[Node], list[int], list[Node]]:
        path, spare, fresh = super().enter(request, tokens)
        took = False
        for number, node in enumerate(path):
            mine = request.window.get(number, 0)
            if number < len(request.shared) or node.side or not mine:
                continue
            # A new page brings its window page along; a twin that lost it gets this one.
            took = took or node not in fresh
            node.side = mine
            self.map[node.page] = mine
        return path, spare, [*fresh, path[-1]] if took else fresh

    def usable(self, path: list[Node]) -> int:
        """How many pages of a cached path somebody could go on from."""
        for count in range(len(path), 0, -1):
            end = count * self.page_size
            positions = range(max(0, end - self.window_tokens), end)
            if all(path[position // self.page_size].side for position in positions):
                return count
        return 0

    def match(self, tokens: Sequence[int], namespace: Any = None) -> Match:
        node = self.root(namespace)
        path = []
        for key in self.split(tokens, len(tokens)):
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return super().match(tokens[: self.usable(path) * self.page_size], namespace)

    def open_with_prefix(self, matches: Sequence[Match]) -> list[int]:
        names = super().open_with_prefix(matches)
        for name in names:
            request = self.requests[name]
            for number, node in enumerate(request.shared):
                if node.side:
                    request.window[number] = node.side
                else:
                    request.window.clear()
                    request.frontier = number + 1
        return names

    def publish(
        self,
        names: Sequence[int],
        tokens: Sequence[Sequence[int]],
        event: Any = None,
    ) -> None:
        self.settle()
        requests = self.find(names)
        before = [dict(request.window) for request in requests]
        shared = [len(request.shared) for request in requests]
        super().publish(names, tokens, event)
        for request, window, first in zip(requests, before, shared, strict=True):
            spare = []
            for number, side in window.items():
                if first <= number < len(request.shared):
                    request.window[number] = request.shared[number].side
                    if request.shared[number].side != side:
                        spare.append(side)
            self.part_with(Waiting(event, [], [], [], [], spare))
