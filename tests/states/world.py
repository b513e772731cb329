"""An allocator beside a book: every call goes to both, and both have to agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from host_support import Query, fingerprint
from states.book import Book, Config, Refuse
from transfer.group_support import assert_nothing_held

import sgalloc
from sgalloc.sizing import window_tail

CONFIGS = {
    config.name: config
    for config in (
        Config("plain"),
        Config("prefix cache", cache=True),
        Config("window", window=6, window_pages=40),
        Config("window, map, prefix", cache=True, window=6, window_pages=40, slot_map=True),
        Config("sparse", ratio=3, buffer=7, scratch=3),
    )
}
PLACES = ("owned", "pinned", "cached", "quarantined", "free")


def ids_of(family: int, branch: int = 0, at: int = 8) -> list[int]:
    """40 token ids: those of one family begin alike, up to ``at`` where the branches differ."""
    return [family * 1000 + i for i in range(at)] + [
        family * 1000 + branch * 100 + i for i in range(at, 40)
    ]


def make(config: Config) -> sgalloc.KVAllocator:
    window = sparse = None
    if config.window:
        window = sgalloc.SlidingWindow(config.window, config.window_pages, config.slot_map)
    if config.ratio:
        sparse = sgalloc.Sparse(config.ratio, config.buffer, config.scratch)
    return sgalloc.KVAllocator(
        config.pages,
        config.ps,
        config.rows,
        160 // config.ps * config.ps,
        device="cpu",
        window=window,
        sparse=sparse,
        prefix_cache=config.cache,
    )


class World:
    """Both, and the events that were given out."""

    def __init__(self, config: Config) -> None:
        self.config, self.alloc, self.book = config, make(config), Book(config)
        self.events: list[Query] = []
        self.seen: Counter[str] = Counter()
        self.refused = False
        self.quiet = False
        """Whether the way to a state, which others have compared step by step, is not again."""

    # -- calls -----------------------------------------------------------------------------

    def call(self, name: str, real: Callable[[], Any], noted: Callable[[], Any]) -> Any:
        """Do it, note it, and compare; what the allocator said, or None if both refuse."""
        expected, group, before = "", "", None
        try:
            wanted = noted()
        except Refuse as refusal:
            expected, group, before = refusal.name, refusal.group, fingerprint(self.alloc)
        try:
            found = real()
        except (sgalloc.AllocError, ValueError) as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            assert expected in kinds, f"{name}: {error!r}, where the book says {expected!r}"
            assert not group or error.group == group, f"{name}: {error}"  # type: ignore[union-attr]
            assert fingerprint(self.alloc) == before, f"a refused {name} changed something"
            self.refused = True
            self.seen[expected] += 1
            return None
        assert not expected, f"{name} went through, where the book says {expected}"
        self.refused = False
        self.seen[name] += 1
        if wanted is not None:
            assert found == wanted, f"{name} said {found}, and the book {wanted}"
        self.compare()
        return found

    def open(self, ids: list[int], cached: bool = False) -> int:
        if cached:
            match = self.alloc.prefix.match(ids)
            assert match.length == self.book.match(ids) * self.config.ps
            (handle,) = self.alloc.open_with_prefix(match).tolist()
        else:
            (handle,) = self.alloc.open().tolist()
        self.book.open(handle, ids, cached)
        self.compare()
        return int(handle)

    def preallocate(
        self,
        ids: list[int],
        length: int,
        writers: int = 2,
        deadline: int | None = None,
        cached: bool = False,
        tail: bool = False,
        main_only: bool = False,
    ) -> int | None:
        match = self.alloc.prefix.match(ids) if cached else None
        cut = None
        if tail:
            cut = window_tail(length, self.config.window, self.config.ps, self.config.cache)
        box: list[int] = []

        def real() -> None:
            how: dict[str, Any] = {"window_tail": cut, "logical_only": main_only}
            box.extend(self.alloc.preallocate([length], writers, match, deadline, **how).tolist())

        def noted() -> None:
            self.book.preallocate(-1, ids, length, writers, deadline, cached, cut, main_only)

        expected, before = None, None
        try:
            noted()
        except Refuse as refusal:
            expected, before = refusal, fingerprint(self.alloc)
        try:
            real()
        except (sgalloc.AllocError, ValueError) as error:
            assert expected is not None and type(error).__name__ == expected.name, error
            assert not expected.group or error.group == expected.group  # type: ignore[union-attr]
            assert fingerprint(self.alloc) == before
            self.seen[expected.name] += 1
            return None
        assert expected is None, f"preallocate went through, where the book says {expected}"
        self.book.requests[box[0]] = self.book.requests.pop(-1)
        self.compare()
        self.seen["preallocate"] += 1
        return box[0]

    def event(self) -> Query:
        self.events.append(Query())
        return self.events[-1]

    def finish(self, event: Query) -> None:
        event.over = True
        self.alloc.settle()
        self.book.done(event)
        self.compare()

    # -- comparing -------------------------------------------------------------------------

    def compare(self) -> None:
        if self.quiet:
            return
        alloc, book = self.alloc, self.book
        alloc.check(device=True)
        stats, counts = alloc.stats(), book.counts()
        for at, group in enumerate(stats.groups.values()):
            found = {place: getattr(group, place) for place in PLACES}
            assert found == {place: counts[place][at] for place in PLACES}, (at, book.requests)
        rows = stats.rows
        assert (rows.open, rows.free, rows.quarantined) == book.rows()
        opened = {handle: r for handle, r in book.requests.items() if not r.aborted}
        handles, requests = list(opened), list(opened.values())
        ps = self.config.ps
        assert alloc.committed(handles).tolist() == [r.c for r in requests]
        assert alloc.allocated(handles).tolist() == [r.pages * ps for r in requests]
        if self.config.window:
            assert alloc.frontier(handles).tolist() == [r.first * ps for r in requests]
        for handle, r in book.requests.items():
            seen = alloc.receiving(handle)
            assert (seen is not None) == bool(r.missing)
            if seen is not None:
                assert set(seen.acks) == set(range(seen.writers)) - r.missing
                assert (seen.aborted, seen.length) == (r.aborted, r.length)

    def drain(self, force: bool) -> None:
        """Abort all; then acknowledge or reclaim, and let events end: nothing is held."""
        for handle in list(self.book.requests):
            self.book.abort(handle, False, None)
        self.alloc.abort(list(self.alloc._ledger.handle[1:][self.alloc._ledger.handle[1:] != 0]))
        self.compare()
        for handle, r in list(self.book.requests.items()):
            if force:
                self.book.abort(handle, True, None)
                self.alloc.abort(handle, force=True)
            else:
                for writer in sorted(r.missing):
                    assert self.alloc.acknowledge(handle, writer)
                    self.book.acknowledge(handle, writer)
            self.compare()
        for event in reversed(self.events):
            if not event.over:
                self.finish(event)
        if self.config.cache:
            assert self.alloc.prefix.clear() == self.book.clear()
            self.compare()
        assert not self.book.requests and not self.book.waiting and not self.book.cache
        assert_nothing_held(self.alloc)
        if self.config.window:
            assert not np.asarray(self.alloc.window_table)[0].any()
