"""The books of the naive allocator: what there is, what waits, and its own laws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sgalloc.fuzz.reference.words import (
    Node,
    Pool,
    Refused,
    Request,
    SparseSettings,
    Waiting,
    WindowSettings,
)


class Books:
    """Requests are known by names that their callers choose and never use twice."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        prefix_cache: bool = False,
        window: WindowSettings | None = None,
        sparse: SparseSettings | None = None,
    ) -> None:
        self.page_size, self.max_requests, self.row_width = page_size, max_requests, row_width
        self.prefix_cache = prefix_cache
        self.window, self.sparse = window, sparse
        self.main, self.second = "full", ""
        self.pools = {"full": Pool(num_pages)}
        if window is not None:
            self.second = "window"
            self.pools["window"] = Pool(window.pages)
        elif sparse is not None:
            self.main, self.second = "logical", "device"
            self.pools = {"logical": Pool(sparse.logical_pages), "device": Pool(num_pages)}
        self.requests: dict[int, Request] = {}
        self.receiving: dict[int, Request] = {}
        """Those that writers may still write, aborted ones too, in order of preallocation."""
        self.rows_out: set[int] = set()
        """Names that have a row: open ones, and those whose row waits."""
        self.waiting: list[Waiting] = []
        self.roots: dict[tuple[type, Any], Node] = {}
        self.tick = self.inserted = 0
        # Which page of the second group the map shows for a page of the main group.
        self.map: dict[int, int] = {}
        # Calls that changed something, and calls of which the contract does not say whether
        # they age a plan.
        self.changes = self.doubts = 0

    # -- questions -------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return (tokens + self.page_size - 1) // self.page_size

    def find(self, names: Sequence[int], live: bool = False) -> list[Request]:
        """The open requests of these names; ``live``: they must not be received still."""
        for name in names:
            if name not in self.requests:
                raise Refused("stale")
        if len(set(names)) != len(names):
            raise Refused("value")
        found = [self.requests[name] for name in names]
        if live and any(request.missing for request in found):
            raise Refused("state")
        return found

    def nodes(self) -> list[Node]:
        """Every cached page."""
        found: list[Node] = []
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found

    def loose(self, unlocked: Sequence[Node] = (), locked: Sequence[Node] = ()) -> list[Node]:
        """Cached pages that could be evicted, in a world where some locks were other."""
        found: list[Node] = []

        def visit(node: Node) -> bool:
            free = True
            for child in node.children.values():
                free = visit(child) and free
            locks = node.locks - sum(1 for other in unlocked if other is node)
            if any(other is node for other in locked):
                locks += 1
            if free and not locks and not node.unsettled:
                found.append(node)
                return True
            return False

        for root in self.roots.values():
            for child in root.children.values():
                visit(child)
        return found

    def beside(self, request: Request) -> list[int]:
        """Pages of the second group that belong to the request alone."""
        if self.window is not None:
            return [p for number, p in request.window.items() if number >= len(request.shared)]
        return request.device + request.scratch

    def rooms(self, counting_cache: bool, unlocked: Sequence[Node] = ()) -> dict[str, int]:
        """Pages of each group that could be had."""
        rooms = {name: pool.free for name, pool in self.pools.items()}
        if counting_cache and self.prefix_cache:
            loose = self.loose(unlocked)
            rooms["full"] += len(loose)
            if self.window is not None:
                rooms["window"] += sum(1 for node in loose if node.side)
        return rooms

    def ripe(self) -> bool:
        """Whether something waits behind events that are over."""
        return any(waiting.over for waiting in self.waiting)

    def group_counts(self) -> dict[str, dict[str, int]]:
        """What `stats()` has to say of each group."""
        nodes, loose = self.nodes(), self.loose()
        found = {}
        for name, pool in self.pools.items():
            first = name == self.main
            live = [r for r in self.requests.values() if not r.missing]
            mine = nodes if first else [node for node in nodes if node.side]
            free = loose if first else [node for node in loose if node.side]
            found[name] = {
                "total": pool.total,
                "free": pool.free,
                "quarantined": sum(len(w.pages if first else w.sides) for w in self.waiting),
                "cached": len(mine),
                "locked": len(mine) - len(free),
                "pinned": sum(self._held(r, first) for r in self.receiving.values()),
                "owned": sum(self._held(r, first) for r in live),
                "high_water": pool.high_water,
                "evicted": pool.evicted,
            }
        return found

    def _held(self, request: Request, first: bool) -> int:
        if first:
            return len(request.pages) - len(request.shared)
        return len(self.beside(request))

    def row_counts(self) -> dict[str, int]:
        """What `stats()` has to say of rows."""
        return {
            "total": self.max_requests,
            "open": len(self.requests),
            "free": self.max_requests - len(self.rows_out),
            "quarantined": len(self.rows_out) - len(self.requests),
        }

    def holders(self) -> Iterator[tuple[int, int | Request]]:
        """Who has each page of the main group that is out: a code of `owners()`, or a request."""
        for request in self.requests.values():
            for page in request.pages[len(request.shared) :]:
                yield page, -4 if request.missing else request
        for request in self.receiving.values():
            if request.aborted:
                for page in request.pages[len(request.shared) :]:
                    yield page, -4
        for waiting in self.waiting:
            for page in waiting.pages:
                yield page, -2
        loose = set(self.loose())
        for node in self.nodes():
            yield node.page, -1 if node in loose else -3

    # -- its own laws ----------------------------------------------------------------------

    def check(self) -> None:
        """Both laws, for the reference itself."""
        nodes = self.nodes()
        held: dict[str, list[int]] = {name: [] for name in self.pools}
        held[self.main] += [node.page for node in nodes]
        rows = list(self.requests)
        locked: list[Node] = []
        everybody = list(self.requests.values())
        for name, request in self.receiving.items():
            if request.aborted:
                everybody.append(request)
                rows.append(name)
        for request in everybody:
            shared = [node.page for node in request.shared]
            assert request.pages[: len(shared)] == shared, "a request lost a shared page"
            assert len(shared) * self.page_size <= request.committed, "a shared page is written"
            assert request.committed <= len(request.pages) * self.page_size <= self.row_width
            held[self.main] += request.pages[len(shared) :]
            locked += request.shared
            if self.second:
                held[self.second] += self.beside(request)
            for number, side in request.window.items():
                assert request.frontier <= number < len(request.pages), "outside the extent"
                if number < len(shared):
                    assert request.shared[number].side == side, "another window page than cached"
        for waiting in self.waiting:
            held[self.main] += waiting.pages
            if self.second:
                held[self.second] += waiting.sides
            rows += waiting.rows
            locked += waiting.unlock
        if self.window is not None:
            held["window"] += [node.side for node in nodes if node.side]
        for group, pool in self.pools.items():
            assert sorted(held[group]) == sorted(pool.out), f"partition of {group} is broken"
            assert len(pool.out) <= pool.total
        assert sorted(rows) == sorted(self.rows_out), "partition of the rows is broken"
        assert len(rows) <= self.max_requests
        count: dict[Node, int] = {}
        for node in locked:
            count[node] = count.get(node, 0) + 1
        assert all(node.locks == count.get(node, 0) for node in nodes), "locks do not add up"

    # -- what comes back, and what has to go -----------------------------------------------

    def settle(self) -> None:
        """Take in what waits behind events that are over."""
        if not self.ripe():
            return
        before, self.waiting = self.waiting, []
        for waiting in before:
            if not waiting.over:
                self.waiting.append(waiting)
                continue
            for node in waiting.settle:
                node.unsettled -= 1
            self.give_back(waiting)

    def give_back(self, waiting: Waiting) -> None:
        """Everything of it is free again."""
        self.pools[self.main].give(waiting.pages)
        if self.second:
            self.pools[self.second].give(waiting.sides)
        for page in waiting.pages:
            self.map.pop(page, None)
        for name in waiting.rows:
            self.rows_out.remove(name)
        for node in waiting.unlock:
            node.locks -= 1

    def part_with(self, waiting: Waiting) -> None:
        """Give back at once, or when the events are over."""
        if waiting.over:
            self.give_back(waiting)
            return
        if waiting.pages or waiting.sides or waiting.rows or waiting.unlock or waiting.settle:
            self.waiting.append(waiting)
            for node in waiting.settle:
                node.unsettled += 1

    def evict_one(self) -> None:
        """The leaf that was used longest ago leaves, with its page in each group."""
        leaves = [n for n in self.nodes() if not (n.children or n.locks or n.unsettled)]
        victim = min(leaves, key=lambda node: (node.last_use, node.number))
        assert victim.parent is not None
        del victim.parent.children[victim.key]
        victim.evicted = True
        self.map.pop(victim.page, None)
        self.pools["full"].give([victim.page])
        self.pools["full"].evicted += 1
        if victim.side:
            self.pools["window"].give([victim.side])
            self.pools["window"].evicted += 1

    def refuse_if_short(self, net: dict[str, int], locked: Sequence[Node] = ()) -> None:
        """Refuse what not even an empty cache has room for, if ``locked`` stay in it."""
        loose = self.loose((), locked) if self.prefix_cache else []
        for name, need in net.items():
            cached = len(loose)
            if name == "window":
                cached = sum(1 for node in loose if node.side)
            free = self.pools[name].free
            if need > free + cached:
                raise Refused("pages", name, need=need, free=free, cached=cached)

    def make_room(self, net: dict[str, int]) -> None:
        """Evict until so many pages are free in each group, or refuse and evict nothing."""
        if all(self.pools[name].free >= need for name, need in net.items()):
            return
        self.refuse_if_short(net)
        while any(self.pools[name].free < need for name, need in net.items()):
            self.evict_one()
