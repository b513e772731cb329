"""Acknowledgements, aborts, deadlines and events in every order, in each group.

A book of one request says after every call where its pages have to be, and that its entries of
the map stay until they are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
from host_support import Query, cached, prompt
from transfer.group_support import (
    Alloc,
    assert_nothing_held,
    links,
    numbers,
    sparse,
    windowed,
)

PS = 4


@dataclass
class Book:
    """What has to be true of a request with two writers and a deadline at 10."""

    place: str = "pinned"
    acked: set[int] = field(default_factory=set)
    aborted: bool = False
    waits: set[str] = field(default_factory=set)
    """Events that are not over, behind which it comes back or came back."""

    def back(self) -> None:
        self.place = "quarantined" if self.waits else "free"

    def acknowledge(self, writer: int) -> bool:
        if self.place != "pinned" or writer in self.acked:
            return False
        self.acked.add(writer)
        if len(self.acked) == 2:
            if self.aborted:
                self.back()
            else:
                self.place = "owned"
        return True

    def abort(self, event: str | None = None, force: bool = False, over: bool = False) -> None:
        again = self.aborted and not force
        if self.place not in ("pinned", "owned") or again:
            return
        self.waits |= {event} if event is not None and not over else set()
        if self.place == "owned" or force:
            self.back()
        self.aborted = True

    def reclaim(self) -> bool:
        if self.place != "pinned":
            return False
        self.aborted = True
        self.back()
        return True

    def done(self, event: str) -> None:
        self.waits.discard(event)
        if self.place == "quarantined" and not self.waits:
            self.place = "free"


class Scene:
    """An allocator, one request that is received in it, the book, and two events."""

    def __init__(self, alloc: Alloc, handle: int) -> None:
        self.alloc, self.handle, self.book = alloc, handle, Book()
        self.events = {"a": Query(), "b": Query()}
        self.held = numbers(alloc, "pinned")
        own = self.own()
        self.entries = {page: side for page, side in links(alloc).items() if page in own}
        self.others = {page: side for page, side in links(alloc).items() if page not in own}

    def own(self) -> set[int]:
        (row,) = self.alloc.rows(self.handle)
        pages = self.alloc.pages(self.handle, 0, int(self.alloc.allocated(self.handle)[0]))
        return set(pages.tolist()[int(self.alloc._ledger.shared[row]) :])

    def do(self, name: str) -> None:
        alloc, book, handle = self.alloc, self.book, self.handle
        if name in ("ack 0", "ack 1"):
            writer = int(name[-1])
            assert alloc.acknowledge(handle, writer) == book.acknowledge(writer)
        elif name == "reclaim early":
            assert alloc.reclaim(9.5).size == 0
        elif name == "reclaim":
            assert (alloc.reclaim(10).size == 1) == book.reclaim()
        elif name.startswith("done"):
            self.events[name[-1]].over = True
            alloc.settle()
            book.done(name[-1])
        else:
            event = name[-1] if "behind" in name else None
            over = event is not None and self.events[event].over
            book.abort(event, "force" in name, over)
            alloc.abort(handle, "force" in name, None if event is None else self.events[event])

    def compare(self) -> None:
        self.alloc.check(device=True)
        for place in ("pinned", "owned", "quarantined"):
            held = self.held if self.book.place == place else dict.fromkeys(self.held, 0)
            assert numbers(self.alloc, place) == held, (place, self.book)
        expected = {} if self.book.place == "free" else self.entries
        assert links(self.alloc) == {**self.others, **expected}
        rows = self.alloc.stats().rows
        open_ = self.book.place in ("pinned", "owned") and not self.book.aborted
        assert rows.open == open_
        assert rows.quarantined == (self.book.place != "free" and not open_)
        seen = self.alloc.receiving(self.handle)
        if self.book.place == "pinned":
            assert (seen.acks, seen.aborted) == (tuple(sorted(self.book.acked)), self.book.aborted)
        else:
            assert seen is None

    def drain(self) -> None:
        for name in ("force", "done a", "done b"):
            self.do(name)
            self.compare()
        if self.alloc._core.prefix is not None:
            self.alloc.prefix.clear()
        assert_nothing_held(self.alloc)


def received(alloc: Alloc, length: int, **how: Any) -> Scene:
    (handle,) = alloc.preallocate(length, writers=2, deadline=10, **how)
    return Scene(alloc, int(handle))


def with_prefix(tail: int | None) -> Scene:
    if tail is None:
        alloc = Alloc(12, PS, 2, 48, device="cpu", prefix_cache=True)
    else:
        alloc = windowed(12, PS, 8, 12, rows=2, cache=True)
    cached(alloc, prompt(3, PS))
    how = {} if tail is None else {"window_tail": tail}
    return received(alloc, 21, prefix=alloc.prefix.match(prompt(3, PS)), **how)


SCENES: dict[str, Callable[[], Scene]] = {
    "plain": lambda: received(Alloc(8, PS, 2, 32, device="cpu"), 21),
    "prefix": lambda: with_prefix(None),
    "window": lambda: received(windowed(8, PS, 8, 8, rows=2), 21, window_tail=9),
    "window, prefix": lambda: with_prefix(13),
    "window without a map": lambda: received(
        windowed(8, PS, 8, 8, rows=2, slot_map=False), 20, window_tail=8
    ),
    "sparse": lambda: received(sparse(8, PS, 8, rows=2), 21),
    "logical": lambda: received(sparse(8, PS, 8, rows=2), 21, logical_only=True),
}
CALLS = (
    "ack 0",
    "ack 1",
    "abort",
    "abort behind a",
    "force",
    "force behind b",
    "reclaim",
    "reclaim early",
    "done a",
)


@pytest.mark.parametrize("which", SCENES)
def test_every_order(which: str) -> None:
    places = set()
    for order in permutations(CALLS, 4 if which == "window, prefix" else 3):
        scene = SCENES[which]()
        for name in order:
            scene.do(name)
            try:
                scene.compare()
            except AssertionError as wrong:
                raise AssertionError(f"after {name!r} of {order}") from wrong
            places.add(scene.book.place)
        scene.drain()
        places.add(scene.book.place)
    assert places == {"pinned", "owned", "quarantined", "free"}
