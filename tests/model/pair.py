"""Drives the real allocator and the reference side by side and compares them at every step.

Page ids and row numbers are compared up to renaming: whatever is out (owned, cached or waiting)
has exactly one name on either side, and the name is given up when the thing becomes free.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from model.reference import Match, Plan, Reference, Refused
from model.window_pair import compare_window
from model.windowed import WindowReference

import sgalloc

REFUSALS: dict[str, tuple[type[Exception], ...]] = {
    "pages": (sgalloc.OutOfPages,),
    "rows": (sgalloc.OutOfRows,),
    "narrow": (sgalloc.RowTooNarrow,),
    "stale": (sgalloc.StaleHandle,),
    "extent": (sgalloc.CommitPastExtent,),
    "plan": (sgalloc.StalePlan,),
    "rows or plan": (sgalloc.OutOfRows, sgalloc.StalePlan),
    "edge": (sgalloc.AllocError,),
    "state": (sgalloc.WrongState,),
    "value": (ValueError,),
}


class Disagreement(AssertionError):
    """The real allocator and the reference differ."""


class Waits:
    """What a release waits for: over when the walk says so."""

    def __init__(self) -> None:
        self.over = False


class Event(Waits):
    def query(self) -> bool:
        return self.over


class Flag(Waits):
    @property
    def done(self) -> bool:
        return self.over


class Future(Waits):
    def done(self) -> bool:
        return self.over


@dataclass(frozen=True)
class WindowConfig:
    tokens: int
    pages: int
    slot_map: bool = True
    evict_every: int = 1


@dataclass(frozen=True)
class Config:
    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    prefix_cache: bool
    window: WindowConfig | None = None

    def pages_of(self, group: str) -> int:
        return self.num_pages if self.window is None or group == "full" else self.window.pages


@dataclass
class Kept:
    """A plan that was made and not yet applied."""

    real: Any
    ref: Plan


@dataclass
class Pair:
    """One real allocator, one reference, and what ties their names together."""

    config: Config
    handles: dict[int, int] = field(default_factory=dict)  # open real handle -> reference name
    texts: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    page_of: dict[int, int] = field(default_factory=dict)
    side_of: dict[int, int] = field(default_factory=dict)
    row_of: dict[int, int] = field(default_factory=dict)
    events: list[Waits] = field(default_factory=list)
    matches: list[tuple[Any, Match, list[int]]] = field(default_factory=list)
    plans: list[Kept] = field(default_factory=list)
    batches: list[tuple[Any, list[int]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    trace: int = 0  # a checksum of every handle and every table entry that was ever seen

    def __post_init__(self) -> None:
        numbers = dict(vars(self.config))
        window = numbers.pop("window")
        self.ref: Any
        if window is None:
            self.real: Any = sgalloc.KVAllocator(**numbers, device="cpu")
            self.ref = Reference(**numbers)
        else:
            named = sgalloc.SlidingWindow(
                window.tokens, window.pages, window.slot_map, window.evict_every
            )
            self.real = sgalloc.KVAllocator(**numbers, window=named, device="cpu")
            self.ref = WindowReference(
                window.tokens, window.pages, window.slot_map, window.evict_every, **numbers
            )
        self.groups = ["full"] if window is None else ["full", "window"]
        self.table = self.real.req_to_token

    # Telling a difference

    def fail(self, message: str) -> None:
        calls = "\n  ".join(self.log[-12:])
        raise Disagreement(f"{message}\n{self.config}\nlast calls:\n  {calls}")

    def same(self, what: str, real: Any, ref: Any) -> None:
        if real != ref:
            self.fail(f"{what}: the allocator says {real!r}, the reference {ref!r}")

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that a refused call must leave as it was."""
        stats = self.real.stats()
        handles = list(self.handles)
        extents = self.real.allocated(handles).tolist()
        window: tuple[Any, ...] = ()
        if self.config.window is not None:
            window = (
                self.real.frontier(handles).tolist(),
                self.real.window_table.tobytes(),
                self.real.full_to_window.tobytes() if self.config.window.slot_map else b"",
            )
        return (
            window,
            [self.real.available(g, counting_cache=c) for g in self.groups for c in (False, True)],
            (dict(stats.groups), stats.rows, stats.committed, stats.allocated, stats.staging),
            self.real.committed(handles).tolist(),
            self.real.decode_index(handles).tolist(),
            [self.pages(h, 0, a) for h, a in zip(handles, extents, strict=True)],
            self.table.tobytes(),
        )

    def both(
        self, label: str, real: Callable[[], Any], ref: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        """Makes the same call on both sides; None when both refused it for the same reason."""
        self.log.append(label)
        verb = label.split(" ")[0]
        before = None if self.ref.ripe() else self.fingerprint()
        refusal = None
        expected = result = None
        try:
            expected = ref()
        except Refused as refused:
            refusal = refused
        try:
            result = real()
        except (sgalloc.AllocError, ValueError, TypeError) as error:
            if refusal is None:
                self.fail(f"{label} was refused ({error!r}), the reference did it")
            else:
                self.same_refusal(label, error, refusal)
            if before is not None and before != self.fingerprint():
                self.fail(f"{label} was refused and changed something")
            assert refusal is not None
            self.seen[f"{verb} refused: {refusal.kind}"] += 1
            if refusal.kind not in ("pages", "rows"):
                # Bad arguments may be refused before or after what is done was taken in.
                self.real.settle()
                self.ref.settle()
            self.compare()
            return None
        if refusal is not None:
            self.fail(f"{label} went through, the reference refused it: {refusal}")
        self.seen[verb] += 1
        return result, expected

    def same_refusal(self, label: str, error: Exception, refusal: Refused) -> None:
        if not isinstance(error, REFUSALS[refusal.kind]):
            self.fail(f"{label}: {error!r} where the reference says {refusal}")
        numbers = dict(refusal.numbers)
        if refusal.kind == "pages":
            self.same("OutOfPages.group", error.group, refusal.group)  # type: ignore[attr-defined]
            if refusal.group not in str(error):
                self.fail(f"{error!r} does not name the group {refusal.group}")
        if refusal.kind == "edge" and not isinstance(error, ValueError):
            self.fail(f"{label}: {error!r} is not a ValueError")
        if refusal.kind == "narrow":
            # Any row that is too narrow may be the one that is named.
            numbers.pop("need")
            rows = self.real.rows(list(self.handles)).tolist()
            if error.need <= error.width or error.row not in rows:  # type: ignore[attr-defined]
                self.fail(f"{label}: {error!r} names no row that is too narrow")
        for name, number in numbers.items():
            if name != "edge":
                self.same(f"{type(error).__name__}.{name}", getattr(error, name), number)
            if str(number) not in str(error):
                self.fail(f"{error!r} does not carry {name}={number}")
        if not str(error) or "\n" in str(error):
            self.fail(f"{label}: {error!r} is not one line")

    def compare(self) -> None:
        """Both sides hold the same, up to the names of pages and rows."""
        try:
            self.real.check()
        except sgalloc.LawViolation as violation:
            self.fail(f"check: {violation}")
        self.ref.check()
        self.trace = zlib.crc32(self.table.tobytes(), self.trace)
        self.trace = zlib.crc32(repr(list(self.handles)).encode(), self.trace)
        for page in self.ref.freed_pages:
            self.page_of.pop(page, None)
        for row in self.ref.freed_rows:
            self.row_of.pop(row, None)
        self.ref.freed_pages.clear()
        self.ref.freed_rows.clear()
        for group in self.groups:
            for counting in (False, True):
                self.same(
                    f"available({group}, counting_cache={counting})",
                    self.real.available(group, counting_cache=counting),
                    self.ref.available_in(group, counting),
                )
        stats = self.real.stats()
        for group, counts in self.ref.group_counts().items():
            for name, number in counts.items():
                self.same(f"stats.{group}.{name}", getattr(stats.groups[group], name), number)
        for name, number in self.ref.row_counts().items():
            self.same(f"stats.rows.{name}", getattr(stats.rows, name), number)
        handles = list(self.handles)
        requests = [self.ref.requests[name] for name in self.handles.values()]
        extents = [self.ref.allocated(name) for name in self.handles.values()]
        self.same(
            "committed", self.real.committed(handles).tolist(), [r.committed for r in requests]
        )
        self.same("allocated", self.real.allocated(handles).tolist(), extents)
        self.same(
            "decode_index", self.real.decode_index(handles).tolist(), [r.steps for r in requests]
        )
        self.same("stats.committed", stats.committed, sum(r.committed for r in requests))
        self.same("stats.allocated", stats.allocated, sum(extents))
        rows = self.real.rows(handles).tolist()
        for handle, request, row, extent in zip(handles, requests, rows, extents, strict=True):
            self.same("row of the handle", handle & 0xFFFFFFFF, row)
            self.same_name("row", self.row_of, request.row, row)
            pages = self.pages(handle, 0, extent)
            self.same("number of pages", len(pages), len(request.pages))
            for mine, theirs in zip(request.pages, pages, strict=True):
                self.same_name("page", self.page_of, mine, theirs)
            self.same(
                f"row {row} of the table", self.table[row, :extent].tolist(), self.slots(pages)
            )
        self.same(
            "pages that are out", len(self.page_of), self.config.num_pages - len(self.ref.free)
        )
        out = self.config.max_requests - len(self.ref.free_rows)
        self.same("rows that are out", len(self.row_of), out)
        if self.table[0].any():
            self.fail("the padding row was written")
        if self.config.window is not None:
            compare_window(self, handles, requests, rows)

    def same_name(self, what: str, names: dict[int, int], mine: int, theirs: int) -> None:
        group = "window" if what == "window page" else "full"
        limit = self.config.max_requests if what == "row" else self.config.pages_of(group)
        if not 1 <= theirs <= limit:
            self.fail(f"{what} {theirs} does not exist")
        if mine not in names and theirs in names.values():
            self.fail(f"{what} {theirs} was handed out a second time")
        self.same(f"{what} (reference {mine})", theirs, names.setdefault(mine, theirs))

    def pages(self, handle: int, start: int = 0, stop: int | None = None) -> list[int]:
        return [int(page) for page in self.real.pages(handle, start, stop)]

    def slots(self, pages: Sequence[int]) -> list[int]:
        size = self.config.page_size
        return [page * size + offset for page in pages for offset in range(size)]

    # Calls, each made and compared

    def names(self, handles: Sequence[int]) -> list[int]:
        # A handle that is not open has a name that the reference does not know.
        return [self.handles.get(handle, -handle - 1) for handle in handles]

    def opened(self, did: tuple[Any, Any] | None, texts: Sequence[tuple[Any, list[int]]]) -> bool:
        if did is None:
            return False
        handles = [int(handle) for handle in did[0]]
        self.same("number of handles", len(handles), len(did[1]))
        for handle, name, text in zip(handles, did[1], texts, strict=True):
            if handle in self.handles or handle in self.gone or handle >> 32 < 1:
                self.fail(f"handle {handle:#x} was used before or has no generation")
            self.handles[handle] = name
            self.texts[handle] = text
        self.compare()
        return True

    def forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            del self.handles[handle], self.texts[handle]
            self.gone.append(handle)

    def grow(
        self,
        parts: dict[str, tuple[list[int], list[int]]],
        shape: Callable[[list[int]], Any] = list,
        amounts: Callable[[list[int]], Any] = list,
        by_plan: bool = False,
        with_out: bool = False,
        evict: bool = False,
    ) -> bool:
        """Plans, asks, does, and holds the answer against what happened."""
        mine = {verb: (self.names(x), n) for verb, (x, n) in parts.items()}
        theirs = {verb: (shape(x), amounts(n)) for verb, (x, n) in parts.items()}
        evicting: dict[str, Any] = {"evict": True} if evict else {}
        planned = self.both(
            f"plan {parts} {evicting}",
            lambda: self.real.plan(**theirs, evict_window=evict),
            lambda: self.ref.plan(**mine, **evicting),
        )
        fits = False
        if planned is not None:
            fits = self.same_plan(*planned)
        elif len(parts) > 1:
            return False
        settled = not self.ref.ripe()
        rooms = {g: self.real.available(g, counting_cache=True) for g in self.groups}
        room = rooms["full"]
        order = [(verb, *one) for verb, (x, n) in parts.items() for one in zip(x, n, strict=True)]
        spans = []
        if planned is not None:
            for verb, handle, tokens in order:
                start = self.ref.requests[self.handles[handle]].committed
                spans.append((handle, start, tokens if verb == "extend" else start + tokens))
        out = None
        if with_out and planned is not None:
            out = np.full(sum(b - a for _, a, b in spans), -7, dtype=[np.int32, np.int64][room % 2])
        if by_plan and planned is not None:
            did = self.both(
                f"apply {parts}",
                lambda: self.real.apply(planned[0], out=out),
                lambda: self.ref.apply(planned[1]),
            )
        elif len(parts) == 1:
            [(verb, (x, n))] = theirs.items()
            did = self.both(
                f"{verb} {parts[verb]}",
                lambda: getattr(self.real, verb)(x, n, out=out),
                lambda: self.ref.grow(**mine),
            )
        else:
            return False
        if settled:
            self.same("fits, against what happened", fits, did is not None)
        if did is None:
            return False
        assert planned is not None
        need, gain = self.ref.needs(planned[1]), self.ref.gains(planned[1])
        self.same("need of the applied plan", dict(did[0].need), need)
        if settled:
            for group in self.groups:
                fall = rooms[group] - self.real.available(group, counting_cache=True)
                self.same(f"fall of available({group})", fall, need[group] - gain[group])
        self.compare()
        if out is not None:
            slots = [self.slots(self.pages(h, 0, self.extent(h)))[a:b] for h, a, b in spans]
            self.same("out", out.tolist(), [slot for one in slots for slot in one])
        return True

    def extent(self, handle: int) -> int:
        return self.ref.allocated(self.handles[handle])

    def same_plan(self, real: Any, ref: Plan, fresh: bool = True) -> bool:
        need = self.ref.needs(ref)
        self.same("plan.need", dict(real.need), need)
        self.same("plan.gain", dict(real.gain), self.ref.gains(ref))
        self.same("plan.num_new_pages", real.num_new_pages, sum(need.values()))
        self.same("plan.cur", real.cur.tolist(), [growth.cur for growth in ref.growths])
        self.same("plan.nxt", real.nxt.tolist(), [growth.nxt for growth in ref.growths])
        fits = self.ref.fits(plan=ref)
        if fresh:
            self.same("plan.fits", bool(real.fits), fits)
        for counting in (True, False):
            asked = self.both(
                f"fits plan, counting_cache={counting}",
                lambda counting=counting: self.real.fits(real, counting_cache=counting),
                lambda counting=counting: self.ref.fits(plan=ref, counting_cache=counting),
            )
            assert asked is not None
            self.same(self.log[-1], *asked)
        return fits

    def settle(self) -> None:
        self.both("settle", self.real.settle, self.ref.settle)
        self.compare()

    def match(self, tokens: list[int], namespace: Any, given: Any = None) -> None:
        did = self.both(
            f"match {tokens} {namespace!r}",
            lambda: self.real.prefix.match(tokens if given is None else given, namespace),
            lambda: self.ref.match(tokens, namespace),
        )
        assert did is not None
        real, ref = did
        self.same("match.length", real.length, len(ref.nodes) * self.config.page_size)
        pages = [self.page_of[node.page] for node in ref.nodes]
        self.same("match.pages", [int(page) for page in real.pages], pages)
        self.matches.append((real, ref, tokens))
        del self.matches[:-6]

    def finish(self) -> None:
        """Aborts everything; every page and every row must come back."""
        for event in self.events:
            event.over = True
        self.settle()
        self.release_all()
        for group in self.groups:
            self.same(
                f"pages of {group} that came back",
                self.real.available(group, counting_cache=True),
                self.config.pages_of(group),
            )
        count = self.config.max_requests
        did = self.both(
            f"open {count}", lambda: self.real.open(count), lambda: self.ref.open(count)
        )
        if not self.opened(did, [(None, [])] * count):
            self.fail("not all rows came back")
        self.release_all()

    def release_all(self) -> None:
        handles = list(self.handles)
        self.both(
            f"release {handles}",
            lambda: self.real.release(handles),
            lambda: self.ref.release(self.names(handles)),
        )
        self.forget(handles)
        self.compare()
