"""A naive allocator with the same promises: dicts, lists and loops, no arrays, no speed.

It shares no code with the package. Every cached page is its own tree node, every question is
answered by walking over everything, and ids are handed out in another order on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def is_done(event: Any) -> bool:
    """An event says so by `query()` or by `done`, a value or a method; no event is done."""
    answer = True if event is None else getattr(event, "query", getattr(event, "done", None))
    return bool(answer() if callable(answer) else answer)


class Refused(Exception):
    """The call is refused: `kind` says why, `numbers` what the error must carry."""

    def __init__(self, kind: str, group: str = "full", **numbers: int) -> None:
        super().__init__(f"{kind} {group} {numbers}")
        self.kind = kind
        self.group = group
        self.numbers = numbers


@dataclass(eq=False)
class Node:
    """One cached page, below the pages that come before it in the prompt."""

    key: tuple[int, ...]
    page: int
    parent: Node | None
    number: int
    last_use: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    unsettled: int = 0
    evicted: bool = False
    side: int = 0


@dataclass(eq=False)
class Request:
    row: int
    namespace: Any
    committed: int = 0
    steps: int = 0
    pages: list[int] = field(default_factory=list)
    shared: list[Node] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)
    frontier: int = 0


@dataclass(eq=False)
class Waiting:
    """What comes back when the event is done."""

    event: Any
    pages: list[int]
    rows: list[int]
    unlock: list[Node]
    settle: list[Node]
    sides: list[int] = field(default_factory=list)


@dataclass
class Growth:
    name: int
    cur: int
    nxt: int
    committed: int
    step: int
    frontier: int = 0
    fresh: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)


@dataclass
class Plan:
    growths: list[Growth]
    need: int
    changes: int
    doubts: int


@dataclass
class Match:
    namespace: Any
    nodes: list[Node]


Part = tuple[Sequence[int], Sequence[int]]
NOTHING: Part = ((), ())


class Reference:
    """Requests are known by a serial number, their name, that is never used twice."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        prefix_cache: bool = False,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.max_requests, self.row_width = max_requests, row_width
        self.prefix_cache = prefix_cache
        self.free = list(range(1, num_pages + 1))
        self.free_rows = list(range(1, max_requests + 1))
        self.requests: dict[int, Request] = {}
        self.waiting: list[Waiting] = []
        self.roots: dict[tuple[type, Any], Node] = {}
        self.opened = self.tick = self.inserted = self.evicted = self.high_water = 0
        # Calls that changed something, and calls of which the contract does not say whether
        # they age a plan (they had a batch but nothing to change).
        self.changes = self.doubts = 0
        # What became free since the reader last emptied these lists.
        self.freed_pages: list[int] = []
        self.freed_rows: list[int] = []
        self.freed_sides: list[int] = []

    # Questions

    def ceil(self, tokens: int) -> int:
        while tokens % self.page_size:
            tokens += 1
        return tokens

    def find(self, names: Sequence[int]) -> list[Request]:
        for name in names:
            if name not in self.requests:
                raise Refused("stale")
        if len(set(names)) != len(names):
            raise Refused("value")
        return [self.requests[name] for name in names]

    def allocated(self, name: int) -> int:
        return len(self.requests[name].pages) * self.page_size

    def nodes(self) -> list[Node]:
        found: list[Node] = []
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found

    def can_go(self, node: Node, unlocked: Sequence[Node] = ()) -> bool:
        locks = node.locks - sum(1 for other in unlocked if other is node)
        return (
            locks == 0
            and node.unsettled == 0
            and all(self.can_go(child, unlocked) for child in node.children.values())
        )

    def evictable(self, unlocked: Sequence[Node] = ()) -> int:
        return sum(1 for node in self.nodes() if self.can_go(node, unlocked))

    def available(self, counting_cache: bool = False) -> int:
        return len(self.free) + (self.evictable() if counting_cache else 0)

    def available_in(self, group: str, counting_cache: bool) -> int:
        return self.available(counting_cache)

    def group_counts(self) -> dict[str, dict[str, int]]:
        return {"full": self.counts()}

    def needs(self, plan: Plan) -> dict[str, int]:
        return {"full": plan.need}

    def gains(self, plan: Plan) -> dict[str, int]:
        return {"full": 0}

    def ripe(self) -> bool:
        """Whether something waits behind an event that is already done."""
        return any(is_done(waiting.event) for waiting in self.waiting)

    def counts(self) -> dict[str, int]:
        nodes = self.nodes()
        return {
            "total": self.num_pages,
            "free": len(self.free),
            "quarantined": sum(len(waiting.pages) for waiting in self.waiting),
            "cached": len(nodes),
            "locked": len(nodes) - self.evictable(),
            "pinned": 0,
            "owned": sum(len(r.pages) - len(r.shared) for r in self.requests.values()),
            "high_water": self.high_water,
            "evicted": self.evicted,
        }

    def row_counts(self) -> dict[str, int]:
        return {
            "total": self.max_requests,
            "open": len(self.requests),
            "free": len(self.free_rows),
            "quarantined": sum(len(waiting.rows) for waiting in self.waiting),
        }

    def check(self) -> None:
        """Both laws, for the reference itself."""
        pages = list(self.free) + [node.page for node in self.nodes()]
        rows = list(self.free_rows) + [r.row for r in self.requests.values()]
        for waiting in self.waiting:
            pages += waiting.pages
            rows += waiting.rows
        for request in self.requests.values():
            pages += request.pages[len(request.shared) :]
            if request.pages[: len(request.shared)] != [node.page for node in request.shared]:
                raise AssertionError("a request lost a shared page")
            if not len(request.shared) * self.page_size <= request.committed:
                raise AssertionError("a shared page may be written")
            if not request.committed <= len(request.pages) * self.page_size <= self.row_width:
                raise AssertionError("C <= A <= W is broken")
        if sorted(pages) != list(range(1, self.num_pages + 1)):
            raise AssertionError(f"partition of the pages is broken: {sorted(pages)}")
        if sorted(rows) != list(range(1, self.max_requests + 1)):
            raise AssertionError(f"partition of the rows is broken: {sorted(rows)}")
        locks: dict[Node, int] = {}
        for shared in [r.shared for r in self.requests.values()] + [w.unlock for w in self.waiting]:
            for node in shared:
                locks[node] = locks.get(node, 0) + 1
        if any(node.locks != locks.get(node, 0) for node in self.nodes()):
            raise AssertionError("the locks of the cache do not add up")

    def fits(
        self,
        new: Sequence[int] = (),
        plan: Plan | None = None,
        after_releasing: Sequence[int] = (),
        counting_cache: bool = True,
    ) -> bool:
        gone = self.find(after_releasing)
        unlocked = [node for request in gone for node in request.shared]
        room = len(self.free) + sum(len(r.pages) - len(r.shared) for r in gone)
        if counting_cache:
            room += self.evictable(unlocked)
        if plan is not None:
            left = [g for g in plan.growths if g.name not in after_releasing]
            return sum(g.nxt - g.cur for g in left) <= room * self.page_size
        if len(new) > len(self.free_rows) + len(gone):
            return False
        lengths = [self.ceil(length) for length in new]
        fit_rows = all(length <= self.row_width for length in lengths)
        return fit_rows and sum(lengths) <= room * self.page_size

    # What comes back, and what has to go

    def settle(self) -> None:
        before, self.waiting = self.waiting, []
        for waiting in before:
            for node in waiting.settle:
                node.unsettled -= 1
            self.part_with(waiting)

    def give_back(self, waiting: Waiting) -> None:
        self.free += waiting.pages
        self.freed_pages += waiting.pages
        self.free_rows += waiting.rows
        self.freed_rows += waiting.rows
        for node in waiting.unlock:
            node.locks -= 1

    def part_with(self, waiting: Waiting) -> None:
        """Give back at once, or when the event is done."""
        if is_done(waiting.event):
            self.give_back(waiting)
        else:
            self.waiting.append(waiting)
            for node in waiting.settle:
                node.unsettled += 1

    def evict_one(self) -> None:
        leaves = [n for n in self.nodes() if not (n.children or n.locks or n.unsettled)]
        victim = min(leaves, key=lambda node: (node.last_use, node.number))
        assert victim.parent is not None
        del victim.parent.children[victim.key]
        victim.evicted = True
        self.evicted += 1
        self.free.append(victim.page)
        self.freed_pages.append(victim.page)

    def make_room(self, need: int) -> None:
        cached = self.evictable()
        if need > len(self.free) + cached:
            raise Refused("pages", need=need, free=len(self.free), cached=cached)
        while len(self.free) < need:
            self.evict_one()

    # Verbs

    def open(self, count: int = 1, namespace: Any = None) -> list[int]:
        self.settle()
        if count > len(self.free_rows):
            raise Refused("rows")
        names = []
        for _ in range(count):
            self.opened += 1
            self.changes += 1
            self.requests[self.opened] = Request(self.free_rows.pop(), namespace)
            names.append(self.opened)
        return names

    def plan(self, extend: Part = NOTHING, decode: Part = NOTHING, reserve: Part = NOTHING) -> Plan:
        self.find([*extend[0], *decode[0], *reserve[0]])
        targets = [(name, upto, upto, 0) for name, upto in zip(*extend, strict=True)]
        for name, tokens in zip(*decode, strict=True):
            upto = self.requests[name].committed + tokens
            targets.append((name, upto, upto, 1))
        for name, ahead in zip(*reserve, strict=True):
            committed = self.requests[name].committed
            targets.append((name, committed + ahead, committed, 0))
        growths = []
        for name, upto, committed, step in targets:
            if committed < self.requests[name].committed:
                raise Refused("value")
            cur = self.allocated(name)
            growths.append(Growth(name, cur, max(cur, self.ceil(upto)), committed, step))
        for growth in growths:
            if growth.nxt > self.row_width:
                raise Refused("narrow", need=growth.nxt, width=self.row_width)
        need = sum(growth.nxt - growth.cur for growth in growths) // self.page_size
        return Plan(growths, need, self.changes, self.doubts)

    def apply(self, plan: Plan) -> Plan:
        self.settle()
        if plan.changes != self.changes:
            raise Refused("plan")
        self.make_room(plan.need)
        for growth in plan.growths:
            request = self.requests[growth.name]
            while len(request.pages) * self.page_size < growth.nxt:
                request.pages.append(self.free.pop())
            self.high_water = max(self.high_water, self.num_pages - len(self.free))
            before = (growth.cur, request.committed, 0)
            moved = before != (growth.nxt, growth.committed, growth.step)
            self.changes += moved
            self.doubts += not moved
            request.committed = growth.committed
            request.steps += growth.step
        return plan

    def grow(self, **parts: Part) -> Plan:
        self.settle()
        return self.apply(self.plan(**parts))

    def commit(self, names: Sequence[int], accepted: Sequence[int]) -> None:
        self.settle()
        requests = self.find(names)
        for request, tokens in zip(requests, accepted, strict=True):
            if request.committed + tokens > len(request.pages) * self.page_size:
                raise Refused("extent")
        for request, tokens in zip(requests, accepted, strict=True):
            request.committed += tokens
            self.changes += tokens > 0
            self.doubts += tokens == 0

    def trim(self, names: Sequence[int], lengths: Sequence[int], event: Any = None) -> None:
        self.settle()
        requests = self.find(names)
        for request, length in zip(requests, lengths, strict=True):
            if length < len(request.shared) * self.page_size and length % self.page_size:
                raise Refused("edge", edge=length - length % self.page_size)
        for request, length in zip(requests, lengths, strict=True):
            before = (request.committed, len(request.pages))
            request.committed = min(request.committed, length)
            keep = self.ceil(request.committed) // self.page_size
            own = request.pages[max(keep, len(request.shared)) :]
            unlock = request.shared[keep:]
            request.pages, request.shared = request.pages[:keep], request.shared[:keep]
            moved = before != (request.committed, keep)
            self.changes += moved
            self.doubts += not moved
            self.part_with(Waiting(event, own, [], unlock, []))

    def release(
        self,
        names: Sequence[int],
        tokens: Sequence[Sequence[int]] | None = None,
        event: Any = None,
    ) -> None:
        self.settle()
        requests = self.find(names)
        if not self.prefix_cache:
            tokens = None
        if tokens is not None:
            self.prove_same_prompt(requests, tokens)
            self.tick += 1
        for number, (name, request) in enumerate(zip(names, requests, strict=True)):
            entered: list[Node] = []
            spare: list[int] = []
            fresh: list[Node] = []
            if tokens is not None:
                entered, spare, fresh = self.enter(request, tokens[number])
            back = spare + request.pages[max(len(entered), len(request.shared)) :]
            del self.requests[name]
            self.changes += 1
            self.part_with(Waiting(event, back, [request.row], request.shared, fresh))

    # The prefix cache

    def split(self, tokens: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        whole = min(limit, len(tokens)) // self.page_size
        size = self.page_size
        return [tuple(tokens[n * size : n * size + size]) for n in range(whole)]

    def root(self, namespace: Any) -> Node:
        # 1, "1", b"1" and None are different tenants.
        return self.roots.setdefault((type(namespace), namespace), Node((), 0, None, 0))

    def prove_same_prompt(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]
    ) -> None:
        for request, known in zip(requests, tokens, strict=True):
            keys = self.split(known, request.committed)
            if any(a != b.key for a, b in zip(keys, request.shared, strict=False)):
                raise Refused("value")

    def enter(
        self, request: Request, tokens: Sequence[int]
    ) -> tuple[list[Node], list[int], list[Node]]:
        """-> the nodes of the request's whole pages, its duplicate pages, the new nodes."""
        node = self.root(request.namespace)
        path: list[Node] = []
        spare: list[int] = []
        fresh: list[Node] = []
        keys = self.split(tokens, request.committed)
        for key, page in zip(keys, request.pages, strict=False):
            child = node.children.get(key)
            if child is None:
                self.inserted += 1
                child = node.children[key] = Node(key, page, node, self.inserted)
                fresh.append(child)
            elif child.page != page:
                spare.append(page)
            child.last_use = self.tick
            path.append(child)
            node = child
        return path, spare, fresh

    def match(self, tokens: Sequence[int], namespace: Any = None) -> Match:
        self.tick += 1
        node = self.root(namespace)
        path = []
        for key in self.split(tokens, len(tokens)):
            if key not in node.children:
                break
            node = node.children[key]
            node.last_use = self.tick
            path.append(node)
        return Match(namespace, path)

    def open_with_prefix(self, matches: Sequence[Match]) -> list[int]:
        self.settle()
        stale = any(node.evicted for match in matches for node in match.nodes)
        short = len(matches) > len(self.free_rows)
        if stale or short:
            raise Refused("rows or plan" if stale and short else "plan" if stale else "rows")
        self.tick += 1
        names = []
        for match in matches:
            [name] = self.open(1, match.namespace)
            request = self.requests[name]
            for node in match.nodes:
                node.locks += 1
                node.last_use = self.tick
                request.shared.append(node)
                request.pages.append(node.page)
            request.committed = len(request.pages) * self.page_size
            names.append(name)
        return names

    def publish(
        self,
        names: Sequence[int],
        tokens: Sequence[Sequence[int]],
        event: Any = None,
    ) -> None:
        self.settle()
        requests = self.find(names)
        self.prove_same_prompt(requests, tokens)
        self.tick += 1
        for request, known in zip(requests, tokens, strict=True):
            path, spare, fresh = self.enter(request, known)
            for node in path[len(request.shared) :]:
                node.locks += 1
                request.pages[len(request.shared)] = node.page
                request.shared.append(node)
                self.changes += 1
            self.doubts += not path
            self.part_with(Waiting(event, spare, [], [], fresh))
