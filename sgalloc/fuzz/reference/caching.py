"""The prefix cache of the naive allocator: a tree with a node for every page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgalloc.fuzz.reference.growing import Growing
from sgalloc.fuzz.reference.words import Match, Node, Refused, Request, Waiting

Tokens = Sequence[int]


class Caching(Growing):
    """Match, open with a prefix, publish, and what a release leaves behind."""

    def split(self, tokens: Tokens, limit: int) -> list[tuple[int, ...]]:
        """The whole pages of the first ``limit`` tokens."""
        size = self.page_size
        whole = min(limit, len(tokens)) // size
        return [tuple(tokens[n * size : n * size + size]) for n in range(whole)]

    def root(self, namespace: Any) -> Node:
        """Where the prompts of a namespace begin: 1, "1", b"1" and None are four of them."""
        return self.roots.setdefault((type(namespace), namespace), Node((), 0, None, 0))

    def prove_same_prompt(self, requests: Sequence[Request], tokens: Sequence[Tokens]) -> None:
        """Refuse other tokens than a request was opened with."""
        for request, known in zip(requests, tokens, strict=True):
            keys = self.split(known, request.committed)
            if any(key != node.key for key, node in zip(keys, request.shared, strict=False)):
                raise Refused("value")

    def enter(self, request: Request, tokens: Tokens) -> tuple[list[Node], list[int], list[Node]]:
        """-> the nodes of its whole pages, its duplicate pages, and the nodes that are new."""
        node = self.root(request.namespace)
        path: list[Node] = []
        spare: list[int] = []
        fresh: list[Node] = []
        took = False
        keys = self.split(tokens, request.committed)
        for number, (key, page) in enumerate(zip(keys, request.pages, strict=False)):
            child = node.children.get(key)
            new = child is None
            if child is None:
                self.inserted += 1
                child = node.children[key] = Node(key, page, node, self.inserted)
                fresh.append(child)
            elif child.page != page:
                spare.append(page)
            child.last_use = self.tick
            path.append(child)
            node = child
            mine = request.window.get(number, 0)
            if number >= len(request.shared) and mine and not child.side:
                # A new page brings its window page along; a twin that lost it gets this one.
                took = took or not new
                child.side = mine
                self.show(child.page, mine)
        return path, spare, [*fresh, path[-1]] if took else fresh

    def walk(self, tokens: Tokens, namespace: Any) -> list[Node]:
        """The cached path of these tokens."""
        node, path = self.root(namespace), []
        for key in self.split(tokens, len(tokens)):
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return path

    def match(self, tokens: Tokens, namespace: Any = None) -> Match:
        """The longest cached prefix that can be gone on from; a use of it."""
        self.tick += 1
        path = self.walk(tokens, namespace)
        path = path[: self.usable(path)]
        for node in path:
            node.last_use = self.tick
        return Match(namespace, path)

    def take_row(self, name: int, namespace: Any) -> Request:
        """A row for a new request."""
        self.changes += 1
        self.rows_out.add(name)
        request = self.requests[name] = Request(namespace)
        return request

    def open_with_prefix(self, names: Sequence[int], matches: Sequence[Match]) -> None:
        """Rows whose first pages are those of the matches."""
        self.settle()
        if any(node.evicted for match in matches for node in match.nodes):
            raise Refused("plan")
        self.check_rows(len(matches))
        self.tick += 1
        for name, match in zip(names, matches, strict=True):
            request = self.take_row(name, match.namespace)
            for node in match.nodes:
                node.locks += 1
                node.last_use = self.tick
                request.shared.append(node)
                request.pages.append(node.page)
            request.committed = len(request.pages) * self.page_size
            if self.window is not None:
                self.adopt_window(request)

    def check_rows(self, count: int) -> None:
        """Refuse more requests than there are rows."""
        free = self.max_requests - len(self.rows_out)
        if count > free:
            raise Refused("rows", need=count, free=free)

    def publish(self, names: Sequence[int], tokens: Sequence[Tokens], event: Any = None) -> None:
        """Enter settled whole pages; the requests go on with the cache's pages."""
        self.settle()
        requests = self.find(names, live=True)
        self.prove_same_prompt(requests, tokens)
        self.tick += 1
        for request, known in zip(requests, tokens, strict=True):
            window = dict(request.window)
            first = len(request.shared)
            path, spare, fresh = self.enter(request, known)
            for node in path[first:]:
                node.locks += 1
                request.pages[len(request.shared)] = node.page
                request.shared.append(node)
                self.changes += 1
            self.doubts += not path
            sides = []
            for number, side in window.items():
                if first <= number < len(request.shared):
                    request.window[number] = request.shared[number].side
                    if request.shared[number].side != side:
                        sides.append(side)
            if self.window is not None:
                self.pass_cut_pages(request)
            self.part_with(Waiting([event], spare, sides, settle=fresh))

    def pass_cut_pages(self, request: Request) -> None:
        """A page that a trim cut and that is shared now is not taken afresh: it is left behind."""
        if not request.window:
            request.frontier = max(request.frontier, len(request.shared))

    def clear(self) -> int:
        """Evict all that nobody holds; how many pages these were."""
        self.settle()
        count = len(self.loose())
        for _ in range(count):
            self.evict_one()
        self.doubts += 1
        return count
