"""A naive book of pins and acknowledgements, kept beside an allocator through random calls."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from host_support import Query, assert_drained, cached, fingerprint, make

import sgalloc

WRITERS, HORIZON = 3, 40
REFUSED = (sgalloc.OutOfPages, sgalloc.OutOfRows, sgalloc.RowTooNarrow)


@dataclass
class Entry:
    """One request, as the book has it."""

    ids: np.ndarray
    """The token ids it stands for, more than it will ever have."""
    committed: int = 0
    length: int = 0
    """Of a request to be received."""
    pages: set[int] = field(default_factory=set)
    """Those that it alone holds."""
    missing: set[int] = field(default_factory=set)
    """Writers that have not acknowledged; empty once it is live."""
    writers: int = 0
    deadline: float | None = None
    aborted: bool = False
    events: list[Query] = field(default_factory=list)


class Walk:
    """Random calls, each of them compared with the book; the same seed makes the same calls."""

    def __init__(self, seed: int, page_size: int, prefix_cache: bool) -> None:
        self.random = random.Random(seed)
        self.size = page_size
        self.alloc = make(24, page_size, 8, 14 * page_size + 1, prefix_cache)
        if prefix_cache:
            for _ in range(2):
                cached(self.alloc, self.tokens()[: 4 * page_size])
        self.book: dict[int, Entry] = {}
        """Live, receiving and aborted ones."""
        self.ever: list[int] = [0, -5]
        self.quarantined: list[tuple[list[Query], set[int], int]] = []
        """Events, pages and a number of rows."""
        self.events: list[Query] = []
        self.now = 0
        self.seen: Counter[str] = Counter()

    # -- the calls -------------------------------------------------------------------------

    def step(self) -> None:
        verbs = (
            self.open, self.preallocate, self.preallocate, self.extend, self.extend, self.extend,
            self.decode, self.trim, self.acknowledge, self.acknowledge, self.acknowledge,
            self.acknowledge, self.abort, self.release, self.reclaim, self.finish_event,
            self.finish_event, self.wrong_state,
        )  # fmt: skip
        self.random.choice(verbs)()
        self.compare()

    def open(self) -> None:
        if self.attempt("open", lambda: self.alloc.open()):
            (handle,) = self.result.tolist()
            self.enter(handle, Entry(self.tokens()))

    def preallocate(self) -> None:
        n, writers = self.random.randint(0, 3), self.random.randint(1, WRITERS)
        fresh = [Entry(self.tokens()) for _ in range(n)]
        matches: Any = None
        if self.alloc._core.prefix is not None and self.random.random() < 0.7:
            matches = [self.alloc.prefix.match(entry.ids) for entry in fresh]
        lengths = []
        for at, entry in enumerate(fresh):
            entry.committed = matches[at].length if matches else 0
            entry.length = entry.committed + self.random.randint(0, 5 * self.size)
            entry.writers, entry.missing = writers, set(range(writers))
            if self.random.random() < 0.5:
                entry.deadline = self.now + self.random.randint(0, HORIZON)
            lengths.append(entry.length)
        deadlines = [entry.deadline for entry in fresh]
        call = lambda: self.alloc.preallocate(lengths, writers, matches, deadlines)  # noqa: E731
        if self.attempt("preallocate", call):
            for handle, entry in zip(self.result.tolist(), fresh, strict=True):
                shared = entry.committed // self.size
                held = self.alloc.pages(handle, stop=entry.length).tolist()
                entry.pages = set(held[shared:])
                assert len(entry.pages) == -(-entry.length // self.size) - shared
                self.enter(handle, entry)
                self.seen["with a prefix"] += shared > 0

    def extend(self) -> None:
        self.grow("extend", lambda c: c + self.random.randint(0, 2 * self.size))

    def decode(self) -> None:
        self.grow("decode", lambda c: c + 1)

    def grow(self, verb: str, more: Any) -> None:
        chosen = self.some(self.live())
        target = [more(self.book[h].committed) for h in chosen]
        call = getattr(self.alloc, verb)
        if self.attempt(verb, lambda: call(chosen, target if verb == "extend" else 1)):
            for handle, length in zip(chosen, target, strict=True):
                self.book[handle].committed = length
                self.look(handle)

    def trim(self) -> None:
        chosen = self.some(self.live())
        edge = [self.random.randint(0, 20) // self.size * self.size for _ in chosen]
        event = self.event()
        before = [set(self.book[h].pages) for h in chosen]
        if self.attempt("trim", lambda: self.alloc.trim(chosen, edge, event)):
            for handle, length, held in zip(chosen, edge, before, strict=True):
                entry = self.book[handle]
                entry.committed = min(entry.committed, length)
                self.look(handle)
                self.wait([event], held - entry.pages, 0)

    def acknowledge(self) -> None:
        waiting = [h for h, entry in self.book.items() if entry.missing]
        handle = self.random.choice(
            waiting if waiting and self.random.random() < 0.8 else self.ever
        )
        writer = self.random.randint(-1, WRITERS)
        entry = self.book.get(handle)
        if entry is not None and entry.missing and self.random.random() < 0.7:
            writer = self.random.choice(sorted(entry.missing))
        counts = entry is not None and writer in entry.missing
        assert self.alloc.acknowledge(handle, writer) is counts
        if entry is None or not counts:
            self.seen["idle acknowledgement"] += 1
            return
        entry.missing.discard(writer)
        if not entry.missing:
            self.seen["aborted and written" if entry.aborted else "received"] += 1
            if entry.aborted:
                self.forget(handle)
            else:
                entry.committed = entry.length

    def abort(self) -> None:
        chosen = [self.random.choice(self.ever) for _ in range(self.random.randint(0, 3))]
        force, event = self.random.random() < 0.3, self.event()
        self.alloc.abort(chosen, force, event)
        self.seen["abort"] += 1
        for handle in dict.fromkeys(chosen):
            self.end(handle, force, event, again=True)

    def release(self) -> None:
        chosen = self.some([h for h, entry in self.book.items() if not entry.aborted])
        event = self.event()
        into_cache = self.alloc._core.prefix is not None and self.random.random() < 0.8
        tokens = [self.book[h].ids for h in chosen] if into_cache else None
        self.alloc.release(chosen, tokens=tokens, after=event)
        self.seen["release"] += 1
        for handle in chosen:
            if not self.book[handle].missing and into_cache:
                # What became cached, or went with a duplicate, is not followed.
                self.book[handle].pages.clear()
            self.end(handle, False, event)

    def reclaim(self) -> None:
        self.now += self.random.randint(0, 12)
        due = [
            handle
            for handle, entry in self.book.items()
            if entry.missing and entry.deadline is not None and entry.deadline <= self.now
        ]
        assert self.alloc.reclaim(self.now).tolist() == due
        for handle in due:
            self.seen["reclaimed"] += 1
            self.book[handle].aborted = True
            self.forget(handle)

    def finish_event(self) -> None:
        if self.events:
            self.random.choice(self.events).over = True
        self.alloc.settle()

    def wrong_state(self) -> None:
        receiving = [h for h, entry in self.book.items() if entry.missing and not entry.aborted]
        if not receiving:
            return
        handle = self.random.choice(receiving)
        calls = (
            lambda: self.alloc.decode(handle),
            lambda: self.alloc.extend([*self.live(), handle], 10**6),
            lambda: self.alloc.trim(handle, 0),
            lambda: self.alloc.commit(handle, 0),
            lambda: self.alloc.plan(reserve=(handle, 1)),
        )
        before = fingerprint(self.alloc)
        with pytest.raises(sgalloc.WrongState):
            self.random.choice(calls)()
        assert fingerprint(self.alloc) == before
        self.seen["wrong state"] += 1

    def finish(self) -> None:
        """Abort all, acknowledge or let the time pass: everything comes back."""
        self.alloc.abort(list(self.book))
        for handle in list(self.book):
            self.end(handle, False, None)
        self.compare()
        for handle, entry in list(self.book.items()):
            if entry.deadline is None:
                for writer in sorted(entry.missing):
                    assert self.alloc.acknowledge(handle, writer)
                self.forget(handle)
        self.compare()
        assert self.alloc.reclaim(float("inf")).tolist() == list(self.book)
        self.book.clear()
        for event in self.events:
            event.over = True
        self.alloc.settle()
        if self.alloc._core.prefix is not None:
            self.alloc.prefix.clear()
        assert_drained(self.alloc)

    # -- the book --------------------------------------------------------------------------

    def compare(self) -> None:
        alloc = self.alloc
        alloc.check(device=True)
        # An entry whose event is over may come back at any call.
        self.quarantined = [q for q in self.quarantined if not all(e.over for e in q[0])]
        owners = alloc.owners()
        pinned = [page for e in self.book.values() if e.missing for page in e.pages]
        assert len(pinned) == len(set(pinned)) == alloc.stats().groups["full"].pinned
        assert set((owners == -4).nonzero()[0].tolist()) == set(pinned)
        held = [page for q in self.quarantined for page in q[1]]
        assert (owners[held] == -2).all()
        rows = sum(entry.aborted for entry in self.book.values())
        assert alloc.stats().rows.quarantined >= rows + sum(q[2] for q in self.quarantined)
        assert alloc.stats().rows.open == len(self.book) - rows
        for handle, entry in self.book.items():
            seen = alloc.receiving(handle)
            if entry.missing:
                acked = tuple(sorted(set(range(entry.writers)) - entry.missing))
                assert (seen.acks, seen.aborted, seen.deadline, seen.length) == (
                    acked, entry.aborted, entry.deadline, entry.length,
                )  # fmt: skip
            else:
                assert seen is None
            if not entry.aborted:
                assert alloc.committed(handle).tolist() == [entry.committed]
                if not entry.missing:
                    assert (owners[list(entry.pages)] == alloc.rows(handle)[0]).all()

    def attempt(self, name: str, call: Any) -> bool:
        """Whether the call went through; its result is kept. A refused one changes nothing."""
        self.alloc.settle()
        before = fingerprint(self.alloc)
        try:
            self.result = call()
        except REFUSED as refusal:
            assert fingerprint(self.alloc) == before
            self.seen[type(refusal).__name__] += 1
            return False
        except sgalloc.WrongState:
            assert name == "trim", "inside a shared page alone"
            return False
        self.seen[name] += 1
        return True

    def enter(self, handle: int, entry: Entry) -> None:
        self.book[handle] = entry
        self.ever.append(handle)

    def end(self, handle: int, force: bool, event: Query | None, again: bool = False) -> None:
        """An abort or a release of ``handle``, which may be anything; ``again``: of an aborted."""
        entry = self.book.get(handle)
        if entry is None or (entry.aborted and not (force and again)):
            return
        entry.events += [event] if event is not None else []
        if not entry.missing or force:
            entry.aborted = True
            self.forget(handle)
        elif not entry.aborted:
            entry.aborted = True

    def forget(self, handle: int) -> None:
        entry = self.book.pop(handle)
        self.wait(entry.events, entry.pages, 1)

    def wait(self, events: list[Query | None], pages: set[int], rows: int) -> None:
        real = [event for event in events if event is not None]
        if any(not event.over for event in real):
            self.quarantined.append((real, pages, rows))
            self.seen["quarantined"] += 1

    def look(self, handle: int) -> None:
        """Take over what the ledger says a live request holds."""
        (row,), (held,) = self.alloc.rows(handle), self.alloc.allocated(handle)
        shared = int(self.alloc._ledger.shared[row])
        self.book[handle].pages = set(self.alloc.pages(handle, 0, int(held)).tolist()[shared:])

    def live(self) -> list[int]:
        return [h for h, entry in self.book.items() if not entry.missing]

    def some(self, handles: list[int]) -> list[int]:
        return self.random.sample(handles, self.random.randint(0, min(3, len(handles))))

    def event(self) -> Query | None:
        if self.random.random() < 0.6:
            return None
        self.events.append(Query(over=self.random.random() < 0.2))
        return self.events[-1]

    def tokens(self) -> np.ndarray:
        """Ids of one of two families, which share beginnings of two pages or more."""
        ids = np.arange(16 * self.size, dtype=np.int64) + 10_000 * self.random.randint(0, 1)
        ids[self.random.randint(2 * self.size, ids.size) :] += 1_000_000 * self.random.randint(0, 3)
        return ids
