"""What a sparse allocator has to do, as counts and sets in plain Python: no ids, no code shared."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """The call must be refused: ``why`` names the error's class, ``group`` the group if any."""

    def __init__(self, why: str, group: str | None = None, need: int = 0) -> None:
        super().__init__(why, group, need)
        self.why, self.group, self.need = why, group, need


def up(tokens: int, size: int) -> int:
    """Pages that so many tokens fill or begin."""
    return (tokens + size - 1) // size


class Request:
    """One open request.

    Attributes:
        c: committed tokens.
        n: logical pages.
        dev: device pages, scratch left out.
        scratch: device pages for drafts.
        sparse: whether `to_sparse` was called.
        mapped: numbers of the logical pages that are mapped.
        steps: decode steps.
    """

    def __init__(self) -> None:
        self.c = self.n = self.dev = self.scratch = self.steps = 0
        self.sparse = False
        self.mapped: set[int] = set()


class Naive:
    """The pools as counts, the requests by handle, and what waits for which event."""

    def __init__(
        self, size: int, logical: int, device: int, width: int, buffer: int, scratch: int
    ) -> None:
        self.size, self.width = size, width
        self.free = {"logical": logical, "device": device}
        self.total = dict(self.free)
        self.buffer, self.scratch = up(buffer, size), up(scratch, size)
        self.open: dict[int, Request] = {}
        self.waiting: list[tuple[Any, int, int]] = []

    def settle(self) -> None:
        """Pages whose event is over come back."""
        for event, logical, device in [w for w in self.waiting if w[0].over]:
            self.free["logical"] += logical
            self.free["device"] += device
            self.waiting.remove((event, logical, device))

    def after(self, kind: str, r: Request, amount: int, logical_only: bool) -> Request:
        """What ``r`` becomes by one growing verb."""
        size = self.size
        new = Request()
        new.scratch, new.steps = r.scratch, r.steps + (kind == "decode")
        stop = amount if kind == "extend" else r.c + amount
        new.c = r.c if kind == "reserve" else stop
        new.n = max(r.n, up(stop, size))
        if new.n * size > self.width:
            raise Refused("RowTooNarrow")
        cover = up(new.c, size)
        new.sparse, new.dev, new.mapped = r.sparse, r.dev, set(r.mapped)
        if kind == "extend" and not logical_only:
            new.sparse, new.dev, new.mapped = False, new.n, set(range(new.n))
        elif not r.sparse:
            if kind != "extend":
                if r.dev < r.n:
                    raise Refused("WrongState")
                new.dev, new.mapped = new.n, set(range(new.n))
        elif r.dev > self.buffer or cover > self.buffer:
            new.dev, new.mapped = self.buffer + 1, {cover - 1} if cover else set()
        else:
            new.dev = max(r.dev, cover)
            new.mapped = set(range(new.dev))
        return new

    def grow(self, items: list[tuple[str, int, int]], logical_only: bool = False) -> dict[str, int]:
        """One step of (kind, handle, tokens) each; the pages taken per group."""
        self.settle()
        made, refusals = {}, []
        for kind, handle, amount in items:
            try:
                made[handle] = self.after(kind, self.open[handle], amount, logical_only)
            except Refused as refused:
                refusals.append(refused)
        for why in ("RowTooNarrow", "WrongState"):
            for refused in refusals:
                if refused.why == why:
                    raise refused
        need = {
            "logical": sum(new.n - self.open[h].n for h, new in made.items()),
            "device": sum(new.dev - self.open[h].dev for h, new in made.items()),
        }
        for group, count in need.items():
            if count > self.free[group]:
                raise Refused("OutOfPages", group, count)
        for group, count in need.items():
            self.free[group] -= count
        self.open.update(made)
        return need

    def commit(self, handle: int, tokens: int) -> None:
        self.settle()
        r = self.open[handle]
        if r.c + tokens > r.n * self.size:
            raise Refused("CommitPastExtent")
        r.c += tokens

    def to_sparse(self, handles: list[int], event: Any) -> None:
        waits = event is not None and not event.over
        self.settle()
        take = back = 0
        for handle in handles:
            r = self.open[handle]
            if r.sparse:
                raise Refused("WrongState")
            dev = min(r.n, self.buffer + 1)
            take += max(0, dev - r.dev) + self.scratch - r.scratch
            back += max(0, r.dev - dev)
        need = take if waits else take - back
        if need > self.free["device"]:
            raise Refused("OutOfPages", "device", need)
        self.free["device"] -= take
        self._give(0, back, event if waits else None)
        for handle in handles:
            r = self.open[handle]
            cover = up(r.c, self.size)
            r.sparse, r.scratch = True, self.scratch
            if r.n > self.buffer:
                r.dev, r.mapped = self.buffer + 1, {cover - 1} if cover else set()
            else:
                r.dev, r.mapped = r.n, set(range(r.n))

    def trim(self, handles: list[int], lengths: list[int], event: Any) -> None:
        waits = event is not None and not event.over
        self.settle()
        logical = device = 0
        for handle, length in zip(handles, lengths, strict=True):
            r = self.open[handle]
            r.c = min(r.c, length)
            keep = up(r.c, self.size)
            dev = min(r.dev, keep)
            logical, device = logical + r.n - keep, device + r.dev - dev
            r.n, r.dev = keep, dev
            r.mapped = {number for number in r.mapped if number < keep}
        self._give(logical, device, event if waits else None)

    def release(self, handles: list[int], event: Any) -> None:
        waits = event is not None and not event.over
        self.settle()
        gone = [self.open.pop(handle) for handle in handles]
        logical, device = sum(r.n for r in gone), sum(r.dev + r.scratch for r in gone)
        self._give(logical, device, event if waits else None)

    def _give(self, logical: int, device: int, event: Any) -> None:
        if event is not None:
            self.waiting.append((event, logical, device))
        else:
            self.free["logical"] += logical
            self.free["device"] += device
