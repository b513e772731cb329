"""Plans: what one call will do, computed once and read by all who need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgalloc.errors import RowTooNarrow
from sgalloc.inputs import Int64
from sgalloc.ledger import NO_ROWS, Ledger, concatenate, spread
from sgalloc.ownership import Unpicklable
from sgalloc.pages import Int32


class Segments:
    """Runs of pages to be written into rows, one after the other.

    Attributes:
        rows: the rows, int64 ``(n,)``.
        first: number of the first page of each run in its row, int64 ``(n,)``.
        count: pages of each run, int64 ``(n,)``, at least 1.
        total: pages in all.
        where: flat places of the pages in the page lists, ``row * row_pages + number``,
            int64 ``(total,)``.
    """

    __slots__ = ("count", "first", "rows", "total", "where")

    def __init__(self, rows: Int64, first: Int64, count: Int64, total: int, per_row: Int64) -> None:
        self.rows = rows
        self.first = first
        self.count = count
        self.total = total
        where = rows * per_row
        where += first
        self.where = where if total == rows.size else spread(where, count)

    def page_rows(self) -> Int64:
        """The row of each page, int64 ``(total,)``."""
        return self.rows if self.total == self.rows.size else self.rows.repeat(self.count)


class Gather(NamedTuple):
    """Slots asked for: those of positions ``[start, stop)`` of each row, flat.

    Attributes:
        rows: int64 ``(n,)``.
        start: int64 ``(n,)``.
        stop: int64 ``(n,)``.
        size: slots in all.
        out: the device's array that receives them, int32 or int64 ``(size,)``.
        growing: which of the requests the pages of the same write go to, one each, as
            positions, int64; None for none.
    """

    rows: Int64
    start: Int64
    stop: Int64
    size: int
    out: Any
    growing: Int64 | None = None


class SideWrite(NamedTuple):
    """Pages of a second group that a launch writes, or clears.

    Attributes:
        places: flat places in the group's own table, ``row * row_pages + number``, int64
            ``(n,)``; -1 for those that it does not show.
        ids: page ids of the second group, int32 ``(n,)``; 0 clears the place, and the map.
        mains: page ids of the main group, int32 ``(n,)``, whose slots the map sends to those
            of ``ids``; 0 leaves the map alone.
    """

    places: Int64
    ids: Int32
    mains: Int32


class SidePart(Protocol):
    """What a plan does in a second group.

    Attributes:
        group: its name.
        rows: those that it is about, int64; with none, it does nothing.
        need: pages that it takes.
        gain: pages that it gives back first.
    """

    group: str
    rows: Int64
    need: int
    gain: int

    @property
    def idle(self) -> bool:
        """Whether it changes nothing at all."""

    def without(self, leaving: Int64) -> int:
        """Pages that it takes, net, if the rows ``leaving`` were no part of the plan."""


class Plan(Unpicklable):
    """What one call will do, or has done. Pure until applied.

    Attributes:
        rows: int64 ``(n,)``, in the order extend, decode, reserve.
        cur: A before, tokens, int64 ``(n,)``.
        nxt: A afterwards, tokens, int64 ``(n,)``.
        start: C before, tokens, int64 ``(n,)``; ``out`` receives the slots from here ...
        stop: ... up to here, tokens, int64 ``(n,)``.
        num_new_pages: pages in all groups together.
        growth: the pages that it adds, or None for none.
        growing: the requests that grow, as positions, int64, in the order of ``growth``.
        extents: A afterwards of the rows that grow, tokens, int64, as ``growth.rows``.
        fits: whether the pages could be had when the plan was made.
        ready: once applied, an event that is done when the table is written.
        version: of the ledger, when it was made; a check that finds an entry wrong calls it by
            this number.
        side: what it does in the second group, or None where there is no such group.
    """

    __slots__ = (
        "committing",
        "cur",
        "decoding",
        "extents",
        "fits",
        "growing",
        "growth",
        "ledger",
        "num_new_pages",
        "nxt",
        "ready",
        "rows",
        "side",
        "start",
        "stop",
        "version",
    )

    def __init__(
        self,
        ledger: Ledger,
        rows: Int64,
        start: Int64,
        cur: Int64,
        stop: Int64,
        committing: Int64 | None = None,
        decoding: Int64 | None = None,
    ) -> None:
        """Plan for ``rows`` to cover ``stop`` tokens each.

        Args:
            ledger: what the requests hold now.
            rows: int64 ``(n,)``.
            start: C now, int64 ``(n,)``.
            cur: A now, int64 ``(n,)``.
            stop: tokens to cover, int64 ``(n,)``.
            committing: the rows whose C becomes their ``stop`` when the plan is applied: the
                first so many of ``rows``.
            decoding: the rows that count a decode step.

        Raises:
            RowTooNarrow: a row cannot hold what it would have to.
        """
        self.ledger = ledger
        self.rows = rows
        self.start = start
        self.stop = stop
        self.committing = committing
        self.decoding = decoding
        self.version = ledger.version
        self.fits = True
        self.ready: Any = None
        self.side: Any = None
        self.cur = cur
        at = self.growing = (stop > cur).nonzero()[0]
        if not at.size:
            self.nxt = cur
            self.growth: Segments | None = None
            self.extents = NO_ROWS
            self.num_new_pages = 0
            return
        per_page = ledger.per_page
        growing = rows[at]
        first = cur[at]
        first //= per_page
        last = stop[at]
        last += ledger.per_page_less_one
        last //= per_page
        widest = last.argmax()
        if last[widest] > ledger.row_pages:
            row = int(growing[widest])
            raise RowTooNarrow(row, int(last[widest]) * ledger.page_size, ledger.row_width)
        count = last - first
        last *= per_page
        nxt = self.nxt = cur.copy()
        nxt[at] = last
        # Below some dozens a list adds up faster than a reduction starts.
        total = sum(count.tolist()) if at.size < 64 else int(count.sum())
        self.num_new_pages = total
        self.extents = last
        self.growth = Segments(growing, first, count, total, ledger.per_row)

    @property
    def need(self) -> dict[str, int]:
        """Pages that the plan takes, per group."""
        main = self.growth.total if self.growth is not None else 0
        part: SidePart | None = self.side
        if part is None:
            return {self.ledger.group: main}
        return {self.ledger.group: main, part.group: part.need}

    @property
    def gain(self) -> dict[str, int]:
        """Pages that the plan gives back first, per group."""
        part: SidePart | None = self.side
        if part is None:
            return {self.ledger.group: 0}
        return {self.ledger.group: 0, part.group: part.gain}

    def attach(self, part: SidePart) -> None:
        """Let ``part`` say what the plan does in the second group."""
        self.side = part
        self.num_new_pages += part.need

    def need_without(self, leaving: Int64) -> dict[str, int]:
        """Pages that the plan takes, net, per group, if the rows ``leaving`` were no part of it."""
        growth = self.growth
        net = {self.ledger.group: 0}
        if not leaving.size:
            gain = self.gain
            return {group: need - gain[group] for group, need in self.need.items()}
        if growth is not None:
            stays = ~np.isin(growth.rows, leaving)
            net[self.ledger.group] = int(growth.count[stays].sum())
        if self.side is not None:
            net[self.side.group] = self.side.without(leaving)
        return net

    def __repr__(self) -> str:
        return (
            f"Plan({self.rows.size} requests, {self.num_new_pages} new pages, "
            f"{'fits' if self.fits else 'does not fit'})"
        )


class Covering(NamedTuple):
    """Requests of one kind in a plan, int64 ``(n,)`` each.

    Attributes:
        rows: the rows.
        start: C, tokens.
        cur: A, tokens.
        stop: tokens to cover.
    """

    rows: Int64
    start: Int64
    cur: Int64
    stop: Int64


def mixed_plan(
    make: Callable[..., Plan],
    ledger: Ledger,
    extend: Covering | None,
    decode: Covering | None,
    reserve: Covering | None,
) -> Plan:
    """One plan over any mix of the three kinds.

    ``make`` is `Plan`, or `Plan` behind a range.

    Raises:
        ValueError: a request stands in two kinds.
        RowTooNarrow: as `Plan`.
    """
    kinds = [kind for kind in (extend, decode, reserve) if kind is not None and kind.rows.size]
    rows, start, cur, stop = kinds[0] if len(kinds) == 1 else _joined(kinds)
    twice = ledger.repeated(rows) if len(kinds) > 1 else None
    if twice is not None:
        raise ValueError(
            f"row {rows[twice]} stands in two parts of one plan: name each request once"
        )
    committing = rows.size - (reserve.rows.size if reserve is not None else 0)
    return make(
        ledger,
        rows,
        start,
        cur,
        stop,
        committing=rows[:committing] if committing else None,
        decoding=decode.rows if decode is not None else None,
    )


def _joined(kinds: list[Covering]) -> Covering:
    columns = zip(*kinds, strict=True) if kinds else [()] * 4
    return Covering(*(concatenate(column, np.int64) for column in columns))
