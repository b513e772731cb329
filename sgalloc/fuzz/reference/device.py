"""The device group of the naive allocator: whole requests, buffers, newest pages and scratch."""

from __future__ import annotations

from collections.abc import Sequence

from sgalloc.fuzz.reference.books import Books
from sgalloc.fuzz.reference.words import Growth, Refused, Request, Waiting


class Device(Books):
    """Which device pages each request keeps, and which of them the map shows."""

    def buffer(self) -> int:
        """Pages of a full buffer."""
        assert self.sparse is not None
        return self.pages_for(self.sparse.buffer)

    def scratch(self) -> int:
        """Pages for the drafts of a sparse request."""
        assert self.sparse is not None
        return self.pages_for(self.sparse.scratch)

    def plan_device(self, growths: Sequence[Growth]) -> None:
        """What these growths do in the device group."""
        for growth in growths:
            request = self.requests[growth.name]
            held = len(request.device)
            if growth.kind != "extend" and not request.sparse and held < growth.cur:
                raise Refused("state")
            if (growth.kind == "extend" and not growth.only) or (
                growth.kind != "extend" and not request.sparse
            ):
                growth.whole = True
                growth.more = growth.nxt - held
            elif request.sparse:
                covered = self.pages_for(growth.settled)
                if request.long or covered > self.buffer():
                    growth.more = self.buffer() + 1 - held
                else:
                    growth.more = max(0, covered - held)

    def apply_device(self, growths: Sequence[Growth]) -> None:
        """Pages are taken, and the map shows what it has to."""
        for growth in growths:
            request = self.requests[growth.name]
            for _ in range(growth.more):
                request.device.append(self.pools["device"].take())
                self.changes += 1
            before = dict(request.shown)
            if growth.whole:
                self.doubts += request.sparse
                request.sparse = request.long = False
                self.show_all(request)
            elif request.sparse:
                request.long = len(request.device) > self.buffer()
                self.show_kept(request, self.pages_for(growth.settled))
            self.changes += before != request.shown

    def show_all(self, request: Request) -> None:
        """Every device page is mapped, in order."""
        self.set_shown(request, dict(enumerate(request.device)))

    def show_kept(self, request: Request, covered: int) -> None:
        """Of a long request the page of its newest token is mapped alone."""
        if not request.long:
            self.show_all(request)
        elif covered:
            self.set_shown(request, {covered - 1: request.device[-1]})
        else:
            self.set_shown(request, {})

    def set_shown(self, request: Request, shown: dict[int, int]) -> None:
        """Let the map show this of a request."""
        for number in request.shown:
            self.map.pop(request.pages[number], None)
        for number, page in shown.items():
            self.map[request.pages[number]] = page
        request.shown = shown

    def to_sparse(self, names: Sequence[int], event: object = None) -> None:
        """Keep a buffer and the page of the newest token; the rest goes back."""
        self.settle()
        requests = self.find(names, live=True)
        if any(request.sparse for request in requests):
            raise Refused("state")
        take = back = 0
        for request in requests:
            target = min(len(request.pages), self.buffer() + 1)
            take += max(0, target - len(request.device))
            take += self.scratch() - len(request.scratch)
            back += max(0, len(request.device) - target)
        free = self.pools["device"].free
        need = take - back if Waiting([event]).over else take
        if need > free:
            raise Refused("pages", "device", need=need, free=free, cached=0)
        for request in requests:
            self.let_go(request, event)
        for request in requests:
            while len(request.device) < min(len(request.pages), self.buffer() + 1):
                request.device.append(self.pools["device"].take())
            newest = self.pages_for(request.committed) - 1
            request.long = len(request.pages) > self.buffer()
            if request.long and request.shown.get(newest) in request.device[:-1]:
                # The page that has the newest token stays the mapped one.
                page = request.shown[newest]
                at = request.device.index(page)
                request.device[at], request.device[-1] = request.device[-1], page
            self.show_kept(request, newest + 1)
            while len(request.scratch) < self.scratch():
                request.scratch.append(self.pools["device"].take())
            request.sparse = True
            self.changes += 1

    def let_go(self, request: Request, event: object) -> None:
        """What is past a buffer and the newest page goes back."""
        keep = min(len(request.pages), self.buffer() + 1)
        if len(request.device) <= keep:
            return
        newest = self.pages_for(request.committed) - 1
        page = request.shown.get(newest)
        kept = request.device[:keep]
        if page is not None and page not in kept:
            kept[-1] = page
        gone = [one for one in request.device if one not in kept]
        request.device = kept
        left = {n: one for n, one in request.shown.items() if one in kept}
        self.set_shown(request, left)
        self.part_with(Waiting([event], sides=gone))

    def trim_device(self, request: Request, keep: int) -> list[int]:
        """Device pages that go back when ``keep`` logical pages stay."""
        left = {number: page for number, page in request.shown.items() if number < keep}
        # The map shows what is cut until the pages come back.
        request.shown = left
        if not request.long or keep > self.buffer():
            gone = request.device[keep:] if not request.long else []
            if not request.long:
                request.device = request.device[:keep]
            return gone
        request.long = False
        kept = request.device[:keep]
        for number, page in left.items():
            kept[number] = page
        gone = [page for page in request.device if page not in kept]
        request.device = kept
        return gone
