"""Drives the real allocator and the reference side by side and compares them at every step.

Page ids and row numbers are compared up to renaming: whatever is out (owned, cached or waiting)
has exactly one name on either side, and the name is given up when the thing becomes free.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from model.reference import Match, Plan, Reference, Refused

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
    "value": (ValueError,),
}
NAMESPACES = (None, 7, "7", b"7")


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
class Config:
    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    prefix_cache: bool


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
    row_of: dict[int, int] = field(default_factory=dict)
    events: list[Waits] = field(default_factory=list)
    matches: list[tuple[Any, Match, list[int]]] = field(default_factory=list)
    plans: list[Kept] = field(default_factory=list)
    batches: list[tuple[Any, list[int]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    trace: int = 0  # a checksum of every handle and every table entry that was ever seen

    def __post_init__(self) -> None:
        numbers = vars(self.config)
        self.real: Any = sgalloc.KVAllocator(**numbers, device="cpu")
        self.ref = Reference(**numbers)
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
        return (
            self.real.available("full"),
            self.real.available("full", counting_cache=True),
            (stats.groups["full"], stats.rows, stats.committed, stats.allocated, stats.staging),
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
            self.same("OutOfPages.group", error.group, "full")  # type: ignore[attr-defined]
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
        for counting in (False, True):
            self.same(
                f"available(counting_cache={counting})",
                self.real.available("full", counting_cache=counting),
                self.ref.available(counting),
            )
        stats = self.real.stats()
        for name, number in self.ref.counts().items():
            self.same(f"stats.{name}", getattr(stats.groups["full"], name), number)
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

    def same_name(self, what: str, names: dict[int, int], mine: int, theirs: int) -> None:
        limit = self.config.num_pages if what == "page" else self.config.max_requests
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
    ) -> bool:
        """Plans, asks, does, and holds the answer against what happened."""
        mine = {verb: (self.names(x), n) for verb, (x, n) in parts.items()}
        theirs = {verb: (shape(x), amounts(n)) for verb, (x, n) in parts.items()}
        planned = self.both(
            f"plan {parts}", lambda: self.real.plan(**theirs), lambda: self.ref.plan(**mine)
        )
        fits = False
        if planned is not None:
            fits = self.same_plan(*planned)
        elif len(parts) > 1:
            return False
        settled = not self.ref.ripe()
        room = self.real.available("full", counting_cache=True)
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
        need = planned[1].need
        self.same("need of the applied plan", dict(did[0].need), {"full": need})
        if settled:
            fall = room - self.real.available("full", counting_cache=True)
            self.same("fall of available", fall, need)
        self.compare()
        if out is not None:
            slots = [self.slots(self.pages(h, 0, self.extent(h)))[a:b] for h, a, b in spans]
            self.same("out", out.tolist(), [slot for one in slots for slot in one])
        return True

    def extent(self, handle: int) -> int:
        return self.ref.allocated(self.handles[handle])

    def same_plan(self, real: Any, ref: Plan, fresh: bool = True) -> bool:
        self.same("plan.need", dict(real.need), {"full": ref.need})
        self.same("plan.gain", {k: v for k, v in dict(real.gain).items() if v}, {})
        self.same("plan.num_new_pages", real.num_new_pages, ref.need)
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
        self.same(
            "pages that came back",
            self.real.available("full", counting_cache=True),
            self.config.num_pages,
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


class Chooser:
    """Choices from whole numbers: a seeded generator in a walk, Hypothesis in the machine."""

    def __init__(self, number: Callable[[int, int], int]) -> None:
        self.number = number

    def pick(self, things: Sequence[Any]) -> Any:
        return things[self.number(0, len(things) - 1)]

    def flag(self, one_in: int) -> bool:
        return self.number(1, one_in) == one_in

    def some(self, things: Sequence[Any], most: int = 4) -> list[Any]:
        left = list(things)
        count = 0 if not left or self.flag(12) else self.number(1, min(most, len(left)))
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]


def any_config(choose: Chooser) -> Config:
    """Small pools, so that nearly every call meets pressure."""
    page_size = choose.pick((1, 2, 3, 16, 64))
    width = choose.number(2, 8) * page_size + choose.number(0, page_size - 1)
    return Config(
        num_pages=choose.number(3, 14),
        page_size=page_size,
        max_requests=choose.number(1, 6),
        row_width=width,
        prefix_cache=choose.number(0, 3) > 0,
    )


def text(pair: Pair, choose: Chooser) -> list[int]:
    """A prompt as long as a row, of few kinds of pages, so that prompts often begin alike."""
    size = pair.config.page_size
    pages = pair.config.row_width // size + 1
    code = choose.number(0, 4**pages - 1)
    kinds = ([0] * size, [0] * size, [1] * size, [0] * (size - 1) + [1])
    return [token for n in range(pages) for token in kinds[code // 4**n % 4]]


def shape(pair: Pair, choose: Chooser) -> Callable[[list[int]], Any]:
    kind = choose.number(0, 4)

    def shaped(handles: list[int]) -> Any:
        if kind == 1 and len(handles) == 1:
            return handles[0]
        if kind == 2:
            return np.array(handles, dtype=np.int64)
        if kind == 3:
            return pair.real.batch(handles)
        return tuple(handles) if kind == 4 else list(handles)

    return shaped


def amounts(choose: Chooser) -> Callable[[list[int]], Any]:
    kind = choose.number(0, 3)

    def shaped(numbers: list[int]) -> Any:
        if kind == 1 and len(set(numbers)) == 1:
            return numbers[0]
        if kind > 1:
            return np.array(numbers, dtype=np.int32 if kind == 2 else np.int64)
        return list(numbers)

    return shaped


def event(pair: Pair, choose: Chooser) -> Waits | None:
    if not choose.flag(3):
        return None
    if not pair.events or choose.flag(2):
        pair.events.append(choose.pick((Event, Event, Flag, Future))())
    return choose.pick(pair.events[-4:])


def part(pair: Pair, choose: Chooser, verb: str, handles: list[int]) -> tuple[list[int], list[int]]:
    """How far each of these requests shall grow: now and then too far, or below C."""
    size, width = pair.config.page_size, pair.config.row_width
    numbers = []
    for handle in handles:
        committed = pair.ref.requests[pair.handles[handle]].committed
        kind = choose.number(0, 40)
        ahead = choose.number(0, size + 1) if kind < 25 else choose.number(0, 3 * size)
        if kind == 39:
            ahead = max(0, width - committed + choose.number(-size, size))
        if kind == 40 and verb == "extend":
            ahead = -choose.number(0, committed)
        numbers.append(committed + ahead if verb == "extend" else ahead)
    return handles, numbers


def move_open(pair: Pair, choose: Chooser) -> None:
    count = choose.number(0, 3)
    namespace = choose.pick(NAMESPACES) if choose.flag(3) else None
    texts = [(namespace, text(pair, choose)) for _ in range(count)]
    fits = pair.real.fits([0] * count)
    pair.same("fits(rows)", fits, pair.ref.fits([0] * count))
    ripe = pair.ref.ripe()
    did = pair.both(
        f"open {count} {namespace!r}",
        lambda: pair.real.open(count, namespace=namespace),
        lambda: pair.ref.open(count, namespace),
    )
    if pair.opened(did, texts) != fits and not ripe:
        pair.fail("fits did not foretell open")


def move_grow(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles))
    parts = {}
    for verb in ("extend", "decode", "reserve"):
        mine = handles if verb == "reserve" else choose.some(handles)
        handles = [handle for handle in handles if handle not in mine]
        if mine or choose.flag(4):
            parts[verb] = part(pair, choose, verb, mine)
    shaping, counting = shape(pair, choose), amounts(choose)
    pair.grow(parts, shaping, counting, by_plan=True, with_out=choose.flag(2))


def move_verb(pair: Pair, choose: Chooser) -> None:
    verb = choose.pick(("extend", "extend", "decode", "reserve"))
    parts = {verb: part(pair, choose, verb, choose.some(list(pair.handles)))}
    shaping, counting = shape(pair, choose), amounts(choose)
    pair.grow(parts, shaping, counting, choose.flag(3), with_out=choose.flag(2))


def move_batch(pair: Pair, choose: Chooser) -> None:
    """A batch that is kept, also after some of its requests went away."""
    if not pair.batches or choose.flag(4):
        handles = choose.some(list(pair.handles))
        pair.batches.append((pair.real.batch(handles), handles))
        del pair.batches[:-3]
    batch, handles = choose.pick(pair.batches)
    tokens = choose.number(0, pair.config.page_size)
    verb = choose.pick(("decode", "reserve", "commit"))
    if verb == "commit":
        did = pair.both(
            f"commit batch {handles} {tokens}",
            lambda: pair.real.commit(batch, tokens),
            lambda: pair.ref.commit(pair.names(handles), [tokens] * len(handles)),
        )
        if did is not None:
            pair.compare()
    else:
        pair.grow({verb: (handles, [tokens] * len(handles))}, lambda _: batch)


def move_commit(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles))
    accepted = []
    for handle in handles:
        room = pair.extent(handle) - pair.ref.requests[pair.handles[handle]].committed
        accepted.append(choose.number(0, room) + choose.flag(12))
    shaping, counting = shape(pair, choose), amounts(choose)
    did = pair.both(
        f"commit {handles} {accepted}",
        lambda: pair.real.commit(shaping(handles), counting(accepted)),
        lambda: pair.ref.commit(pair.names(handles), accepted),
    )
    if did is not None:
        pair.compare()


def move_trim(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles), 3)
    lengths = []
    for handle in handles:
        length = choose.number(0, pair.ref.requests[pair.handles[handle]].committed + 2)
        lengths.append(length - length % pair.config.page_size if choose.flag(2) else length)
    shaping, counting, after = shape(pair, choose), amounts(choose), event(pair, choose)
    did = pair.both(
        f"trim {handles} {lengths} {after}",
        lambda: pair.real.trim(shaping(handles), counting(lengths), after=after),
        lambda: pair.ref.trim(pair.names(handles), lengths, after),
    )
    if did is None:
        return
    pair.compare()
    for handle in handles:  # what comes after the cut may be another text
        namespace, old = pair.texts[handle]
        cut = pair.ref.requests[pair.handles[handle]].committed
        pair.texts[handle] = (namespace, old[:cut] + text(pair, choose)[cut:])


def move_release(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles), 3)
    tokens = None
    if not choose.flag(4):  # without a cache they are ignored
        tokens = [known_tokens(pair, choose, handle) for handle in handles]
    shaping, after = shape(pair, choose), event(pair, choose)
    did = pair.both(
        f"release {handles} {tokens} {after}",
        lambda: pair.real.release(shaping(handles), tokens=tokens, after=after),
        lambda: pair.ref.release(pair.names(handles), tokens, after),
    )
    if did is not None:
        pair.forget(handles)
        pair.compare()


def known_tokens(pair: Pair, choose: Chooser, handle: int) -> list[int]:
    """What the engine knows of a prompt: all of C, less, or more."""
    tokens = pair.texts[handle][1]
    committed = pair.ref.requests[pair.handles[handle]].committed
    known = tokens[: choose.number(0, len(tokens)) if choose.flag(3) else committed]
    if choose.flag(20) and known:
        known = [1 - known[0], *known[1:]]
    return known


def move_match(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    tokens, namespace = text(pair, choose), choose.pick(NAMESPACES)
    if pair.texts and choose.flag(2):
        namespace, tokens = choose.pick(list(pair.texts.values()))
    elif choose.flag(2):
        namespace = None
    tokens = tokens[: choose.number(0, len(tokens))]
    pair.match(tokens, namespace, np.array(tokens, dtype=np.int64) if choose.flag(2) else None)


def move_open_with_prefix(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    move_match(pair, choose)
    chosen = [choose.pick(pair.matches[-3:]) for _ in range(choose.number(0, 2))]
    texts = []
    for _, ref, tokens in chosen:
        length = len(ref.nodes) * pair.config.page_size
        texts.append((ref.namespace, tokens[:length] + text(pair, choose)[length:]))
    did = pair.both(
        f"open_with_prefix {[tokens for _, _, tokens in chosen]}",
        lambda: pair.real.open_with_prefix([real for real, _, _ in chosen]),
        lambda: pair.ref.open_with_prefix([ref for _, ref, _ in chosen]),
    )
    pair.opened(did, texts)


def move_publish(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    handles = choose.some(list(pair.handles), 3)
    tokens = [known_tokens(pair, choose, handle) for handle in handles]
    after = event(pair, choose)
    did = pair.both(
        f"publish {handles} {tokens} {after}",
        lambda: pair.real.prefix.publish(handles, tokens, after=after),
        lambda: pair.ref.publish(pair.names(handles), tokens, after),
    )
    if did is not None:
        pair.compare()


def move_keep_plan(pair: Pair, choose: Chooser) -> None:
    verb = choose.pick(("extend", "decode", "reserve"))
    handles, numbers = part(pair, choose, verb, choose.some(list(pair.handles)))
    made = pair.both(
        f"plan {verb} {handles} {numbers}",
        lambda: pair.real.plan(**{verb: (handles, numbers)}),
        lambda: pair.ref.plan(**{verb: (pair.names(handles), numbers)}),
    )
    if made is not None:
        pair.plans.append(Kept(*made))
        del pair.plans[:-3]


def move_apply_kept(pair: Pair, choose: Chooser) -> None:
    """Applies a plan made some calls ago: refused if anything changed, else as good as new."""
    if not pair.plans:
        return
    kept = choose.pick(pair.plans)
    if kept.ref.doubts != pair.ref.doubts:
        pair.plans.remove(kept)
        return
    pair.settle()
    if kept.ref.changes == pair.ref.changes:
        pair.same_plan(kept.real, kept.ref, fresh=False)
    else:
        try:
            fits = pair.real.fits(kept.real)
        except sgalloc.StalePlan:
            fits = False
        pair.same("fits of a stale plan", fits, False)
    did = pair.both(
        "apply kept plan", lambda: pair.real.apply(kept.real), lambda: pair.ref.apply(kept.ref)
    )
    if did is not None:
        pair.compare()


def move_what_if(pair: Pair, choose: Chooser) -> None:
    """Asks for the world without some requests, lets them go, and holds the answer against it."""
    pair.settle()
    gone = choose.some(list(pair.handles), 2)
    size = pair.config.page_size
    lengths = [choose.number(0, 3 * size) for _ in range(choose.number(0, 3))]
    shaped = lengths[0] if len(lengths) == 1 and choose.flag(2) else lengths
    answers = {}
    for counting in (False, True):
        answers[counting] = pair.real.fits(
            shaped, after_releasing=shape(pair, choose)(gone), counting_cache=counting
        )
        expected = pair.ref.fits(lengths, None, pair.names(gone), counting)
        pair.same(
            f"fits({lengths}, after_releasing={gone}, {counting})", answers[counting], expected
        )
    staying, numbers = part(pair, choose, "reserve", choose.some(list(pair.handles)))
    planned = pair.both(
        f"plan reserve {staying} {numbers}",
        lambda: pair.real.plan(reserve=(staying, numbers)),
        lambda: pair.ref.plan(reserve=(pair.names(staying), numbers)),
    )
    plan_fits = None
    if planned is not None:
        plan_fits = pair.real.fits(planned[0], after_releasing=gone)
        expected = pair.ref.fits((), planned[1], pair.names(gone))
        pair.same(f"fits(plan of {staying}, after_releasing={gone})", plan_fits, expected)
    if not choose.flag(3):
        return
    pair.both(
        f"release {gone}",
        lambda: pair.real.release(gone),
        lambda: pair.ref.release(pair.names(gone)),
    )
    pair.forget(gone)
    pair.compare()
    if plan_fits is not None and choose.flag(2):
        left = [(h, n) for h, n in zip(staying, numbers, strict=True) if h not in gone]
        went = pair.grow({"reserve": ([h for h, _ in left], [n for _, n in left])})
        pair.same("fits(plan, after_releasing), against what happened", plan_fits, went)
        return
    texts = [(None, text(pair, choose)) for _ in lengths]
    did = pair.both(
        f"open {len(lengths)}",
        lambda: pair.real.open(len(lengths)),
        lambda: pair.ref.open(len(lengths)),
    )
    went = pair.opened(did, texts)
    if went:
        handles = [int(handle) for handle in did[0]]  # type: ignore[index]
        went = pair.grow({"extend": (handles, lengths)})
    pair.same("fits(lengths, after_releasing), against what happened", answers[True], went)


def move_read(pair: Pair, choose: Chooser) -> None:
    """Slots and pages of ranges: they read, and change nothing."""
    size = pair.config.page_size
    handles = choose.some(list(pair.handles))
    starts, stops, expected = [], [], []
    for handle in handles:
        stop = choose.number(0, pair.extent(handle))
        start = choose.number(0, stop)
        pages = pair.pages(handle, 0, pair.extent(handle))
        expected += pair.slots(pages)[start:stop]
        starts.append(start)
        stops.append(stop)
        edge = start - start % size
        some = pair.pages(handle, edge, stop)
        pair.same("pages of a range", some, pages[edge // size : -(-stop // size)])
        committed = pair.ref.requests[pair.handles[handle]].committed
        pair.same("pages up to C", pair.pages(handle), pages[: -(-committed // size)])
    shaping, counting = shape(pair, choose), amounts(choose)
    out = np.full(len(expected), -7, dtype=np.int64) if choose.flag(2) else None
    slots = pair.real.slots(shaping(handles), counting(starts), counting(stops), out=out)
    pair.same("slots", (slots if out is None else out).tolist(), expected)


def move_event(pair: Pair, choose: Chooser) -> None:
    undone = [event for event in pair.events if not event.over]
    if undone:
        choose.pick(undone).over = True
    if choose.flag(3):
        pair.settle()


def move_audit(pair: Pair, choose: Chooser) -> None:
    """Asks for every cached prompt: what was evicted, and whose page is where, must agree."""
    leaves = [node for node in pair.ref.nodes() if not node.children]
    roots = {id(root): space for (_, space), root in pair.ref.roots.items()}
    prompts = []
    for leaf in sorted(leaves, key=lambda node: node.number):
        tokens: list[int] = []
        node = leaf
        while node.parent is not None:
            tokens = [*node.key, *tokens]
            node = node.parent
        prompts.append((tokens, roots[id(node)]))
    for tokens, namespace in prompts:
        pair.match([*tokens, 0], namespace)


MOVES: dict[Callable[[Pair, Chooser], None], int] = {
    move_open: 3,
    move_verb: 8,
    move_grow: 5,
    move_batch: 2,
    move_commit: 4,
    move_trim: 2,
    move_release: 5,
    move_match: 1,
    move_open_with_prefix: 4,
    move_publish: 3,
    move_keep_plan: 2,
    move_apply_kept: 2,
    move_what_if: 3,
    move_read: 1,
    move_event: 2,
    move_audit: 1,
}


def walk(
    seed: int,
    steps: int,
    config: Config | None = None,
    more: Sequence[Callable[[Pair, Chooser], None]] = (),
) -> Pair:
    """Makes `steps` random moves, aborts everything, and returns the pair for what it saw.

    The same seed makes the same calls. `more`: moves of the caller's own, to mix in.
    """
    choose = Chooser(random.Random(seed).randint)
    pair = Pair(any_config(choose) if config is None else config)
    moves = [move for move, weight in MOVES.items() for _ in range(weight)] + list(more)
    for _ in range(steps):
        move = choose.pick(moves)
        if not pair.handles and not choose.flag(4):
            # Most moves need a request, and its row may wait behind an event.
            move = choose.pick((move_open, move_open_with_prefix, move_event))
        move(pair, choose)
        if choose.flag(150):
            pair.finish()
    pair.finish()
    return pair
