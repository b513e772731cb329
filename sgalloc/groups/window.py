"""Sliding window attention: a second group of pages, for the last tokens of each request alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import WrongState
from sgalloc.groups import NO_PAGES, Cut
from sgalloc.inputs import Int64, shown, whole_number
from sgalloc.ledger import NO_ROWS, Ledger, spread
from sgalloc.pages import Int32, PagePool
from sgalloc.plan import Plan, Segments, SideWrite

_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Settings of the group ``window``.

    Attributes:
        tokens: positions that a token attends to, itself included.
        num_pages: pages in the group, ids 1..``num_pages``.
        slot_map: whether ``full_to_window`` is kept.
        evict_every: tokens by which a frontier has to be behind before it moves by itself; 1
            moves it by every page. `KVAllocator.evict_window` with ``upto`` heeds it not.
    """

    tokens: int
    num_pages: int
    slot_map: bool = False
    evict_every: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "num_pages", "evict_every"):
            number = whole_number(getattr(self, name), f"window.{name}", 1, _MOST)
            object.__setattr__(self, name, number)
        if not isinstance(self.slot_map, bool):
            raise TypeError(f"window.slot_map must be True or False, got {shown(self.slot_map)}")


class WindowPart:
    """What a plan does in the window group, for the rows in which it does anything.

    A row holds the window pages of its page numbers ``[first, stop)``. Afterwards it holds
    ``[leave, end)``: what is below ``leave`` reads 0, what is from `begin` on is new.

    Attributes:
        rows: int64 ``(n,)``.
        first, stop: now, pages, int64 ``(n,)``.
        leave, end: afterwards, pages, int64 ``(n,)``.
        begin: first new page, int64 ``(n,)``.
        fresh: flat places of the new pages, ``row * row_pages + number``, int64 ``(need,)``.
        own: first page that the row does not share, at least ``first``, int64 ``(n,)``.
        back: pages that each row gives back first, int64 ``(n,)``; None for none at all.
        need: new pages.
        gain: pages that go back first.
        moves: whether a frontier moves.
        idle: whether it changes nothing at all.
    """

    group = "window"

    __slots__ = (
        "back", "begin", "end", "first", "fresh", "gain", "idle", "leave", "moves", "need", "own",
        "rows", "stop",
    )  # fmt: skip

    def __init__(
        self,
        rows: Int64,
        first: Int64,
        stop: Int64,
        leave: Int64,
        end: Int64 | None,
        shared: Int64,
        per_row: Int64,
    ) -> None:
        """As the attributes, and for each row:

        Args:
            end: None where no page is taken.
            shared: pages that it shares with the prefix cache, int64 ``(n,)``.
            per_row: pages in a row.
        """
        self.rows = rows
        self.first = first
        self.stop = stop
        self.leave = leave
        self.begin = np.maximum(stop, leave)
        self.own = np.maximum(first, shared)
        self.end, self.fresh = self.begin, NO_ROWS
        if end is not None:
            self.end, self.fresh = end, spread(rows * per_row + self.begin, end - self.begin)
        self.need = self.fresh.size
        self.moves = bool(np.count_nonzero(leave != first))
        self.back: Int64 | None = None
        self.gain = 0
        if self.moves:
            self.back = np.maximum(np.minimum(leave, stop) - self.own, 0)
            self.gain = int(self.back.sum())
        self.idle = not (self.need or self.moves)

    @classmethod
    def along(cls, growth: Segments, first: Int64) -> WindowPart:
        """The part of a plan that takes a window page with each page of ``growth``.

        Args:
            growth: what it takes in the main group.
            first: the frontiers of these rows, pages, int64.
        """
        part = cls.__new__(cls)
        part.rows = growth.rows
        part.first = part.leave = part.own = first
        part.stop = part.begin = growth.first
        part.end = growth.first + growth.count
        part.fresh = growth.where
        part.need, part.gain = growth.total, 0
        part.moves = part.idle = False
        part.back = None
        return part

    def without(self, leaving: Int64) -> int:
        """Pages that it takes, net, if the rows ``leaving`` were no part of the plan."""
        stays = ~np.isin(self.rows, leaving)
        net = self.end - self.begin
        if self.back is not None:
            net -= self.back
        return int(net[stays].sum())


_IDLE = WindowPart(NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS)


class Window:
    """The group ``window``: which window pages each row holds.

    Attributes:
        settings: what it was made with.
        tokens: positions that a token attends to.
        pool: the pages.
        mapped: whether the map ``full_to_window`` is kept.
        first: the frontier of each row, pages, int64 ``(max_requests + 1,)``.
        stop: one past the last window page of each row, int64; below A only where a trim went
            below the frontier and cut a page.
        due: C from which on the frontier of each row moves by itself, tokens, int64.
        lag: tokens by which C is then past the frontier.
        cut_rows: rows whose last page a trim has cut: their window pages do not reach to A.
        pages: window page ids of each row by page number, int32
            ``(max_requests + 1, row_pages)``; stale outside ``[first, stop)``.
    """

    def __init__(self, ledger: Ledger, settings: SlidingWindow, prefix_cache: bool) -> None:
        self._ledger = ledger
        self.settings = settings
        self.tokens = settings.tokens
        self.pool = PagePool(settings.num_pages, "window")
        self.mapped = settings.slot_map
        rows = ledger.max_requests + 1
        self.first: Int64 = np.zeros(rows, np.int64)
        self.stop: Int64 = np.zeros(rows, np.int64)
        self.pages: Int32 = np.zeros((rows, ledger.row_pages), np.int32)
        self.pages_flat: Int32 = self.pages.reshape(-1)
        size = ledger.page_size
        # A prefix that others may share ends on a page edge, and needs a whole window below it.
        self._keep = -(-max(self.tokens, size) // size) * size if prefix_cache else self.tokens
        self.lag = -(-settings.evict_every // size) * size + self._keep
        self.due: Int64 = np.full(rows, self.lag, np.int64)
        self.cut_rows: set[int] = set()

    # -- plans -----------------------------------------------------------------------------

    def part(
        self, plan: Plan, evict: bool, tail: int | Int64 | None, main_only: bool
    ) -> WindowPart:
        """What ``plan`` does in this group. See `Side.part`.

        Raises:
            WrongState: a tail for a row that holds window pages.
            ValueError: a tail longer than what is new, or one that does not begin on a page edge.
        """
        if main_only:
            raise _not_sparse()
        ledger, growth = self._ledger, plan.growth
        rows, start, upto, nxt = plan.rows, plan.start, plan.stop, plan.nxt
        if tail is None:
            moving = self.behind(rows, start) if evict else None
            if moving is not None and not np.count_nonzero(moving):
                moving = None
            if moving is None and not self.cut_rows:
                if growth is None:
                    return _IDLE
                return WindowPart.along(growth, self.first.take(growth.rows))
            some = np.zeros(rows.size, bool) if moving is None else moving
            some[plan.growing] = True
            if self.cut_rows:
                some |= (self.stop.take(rows) != plan.cur // ledger.per_page) & (upto > start)
            at = some.nonzero()[0]
            rows, start, upto, nxt = rows[at], start[at], upto[at], nxt[at]
        first, stop = self.first.take(rows), self.stop.take(rows)
        # A page that a trim cut is taken afresh by the next token.
        end = np.where(upto > start, nxt // ledger.per_page, stop)
        if tail is not None:
            leave = self._tail(plan, first, stop, tail)
        elif evict:
            leave = self.leaving(rows, start, first)
        else:
            leave = first
        shared = ledger.shared.take(rows)
        return WindowPart(rows, first, stop, leave, end, shared, ledger.per_row)

    def behind(self, rows: Int64, committed: Int64) -> NDArray[np.bool_]:
        """Which of ``rows`` have a frontier that moves by itself at these C, bool ``(n,)``."""
        behind: NDArray[np.bool_] = committed >= self.due.take(rows)
        return behind

    def leaving(self, rows: Int64, committed: Int64, first: Int64) -> Int64:
        """Where the frontiers of ``rows``, now at ``first``, go by themselves, pages, int64."""
        moved = (committed - self._keep) // self._ledger.per_page
        return np.where(self.behind(rows, committed), moved, first)

    def most_pages(self, step: int) -> int:
        """Most pages that a row holds once its frontier follows it, before every step.

        Args:
            step: tokens that one step takes ahead of C, at least 1.
        """
        size = self._ledger.page_size
        late = (self.lag - self._keep) // size - 1
        return -(-(size - 1 + self._keep + step) // size) + late

    def moving(self, rows: Int64, committed: Int64, upto: Int64 | None) -> WindowPart:
        """A part that moves frontiers and takes nothing; they never fall.

        Args:
            rows: int64 ``(n,)``.
            committed: C, tokens, int64 ``(n,)``.
            upto: tokens below which all may go, at most C; None for what left the window.
        """
        ledger = self._ledger
        if upto is None:
            at = self.behind(rows, committed).nonzero()[0]
        else:
            pages = upto // ledger.page_size
            at = (pages > self.first.take(rows)).nonzero()[0]
        if not at.size:
            return _IDLE
        rows = rows[at]
        first, stop = self.first.take(rows), self.stop.take(rows)
        leave = self.leaving(rows, committed[at], first) if upto is None else pages[at]
        return WindowPart(rows, first, stop, leave, None, ledger.shared.take(rows), ledger.per_row)

    def need_for(
        self, lengths: Int64, matched: Int64, tail: int | Int64 | None, main_only: bool
    ) -> int:
        """Pages that new requests take. See `Side.need_for`."""
        if main_only:
            raise _not_sparse()
        size = self._ledger.page_size
        begin = matched
        if tail is not None:
            self._check_tail(None, matched * size, lengths, tail, matched > 0)
            begin = np.maximum(matched, (lengths - tail) // size)
        return int((-(-lengths // size) - begin).sum())

    def receiving(self, plan: Plan, tail: int | Int64 | None, main_only: bool) -> WindowPart:
        """As `part`, for fresh rows; a tail may begin inside the prefix that they share."""
        if main_only:
            raise _not_sparse()
        rows = plan.rows
        first, stop = self.first.take(rows), self.stop.take(rows)
        shared, leave = self._ledger.shared.take(rows), first
        if tail is not None:
            self._check_tail(rows, plan.start, plan.stop, tail, shared > 0)
            leave = np.maximum((plan.stop - tail) // self._ledger.page_size, first)
        end = plan.nxt // self._ledger.per_page
        return WindowPart(rows, first, stop, leave, end, shared, self._ledger.per_row)

    def _tail(self, plan: Plan, first: Int64, stop: Int64, tail: int | Int64) -> Int64:
        holds = (stop > first).nonzero()[0]
        if holds.size:
            row = int(plan.rows[holds[0]])
            raise WrongState(
                f"window_tail= is for rows that hold no window page, and row {row} holds "
                f"{stop[holds[0]] - first[holds[0]]}: extend it without, or evict_window first"
            )
        self._check_tail(plan.rows, plan.start, plan.stop, tail, np.zeros(first.shape, np.bool_))
        begin = (plan.stop - tail) // self._ledger.page_size
        return np.where(plan.stop > plan.start, begin, first)

    def _check_tail(
        self,
        rows: Int64 | None,
        start: Int64,
        stop: Int64,
        tail: int | Int64,
        shares: NDArray[np.bool_],
    ) -> None:
        """Refuse tails that do not leave whole pages; one may reach into a shared prefix.

        ``rows`` is None where they are not known yet.
        """
        size = self._ledger.page_size
        begin, fresh = stop - tail, stop - start
        asked = (fresh > 0) | shares
        for broken, law in (
            (~shares & (tail > fresh), "is longer than the {fresh} new tokens"),
            (shares & (begin < 0), "is longer than the {stop} tokens of the request"),
            (asked & (begin % size != 0), "leaves {begin} tokens before it, no whole pages"),
        ):
            at = broken.nonzero()[0]
            if at.size:
                i = int(at[0])
                length = int(np.broadcast_to(tail, begin.shape)[i])
                whose = f"lengths[{i}]={stop[i]}" if rows is None else f"row {rows[i]}"
                text = law.format(fresh=int(fresh[i]), begin=int(begin[i]), stop=int(stop[i]))
                raise ValueError(
                    f"window_tail={length} of {whose} {text}: give a tail of at most "
                    f"the new tokens that begins on a page edge (page_size={size})"
                )

    def gained(self, part: WindowPart) -> tuple[Int64, Int32]:
        """Rows and ids of the pages that ``part`` gives back first."""
        if part.back is None or not part.gain:
            return NO_ROWS, NO_PAGES
        return self._range(part.rows, part.own, part.own + part.back)

    def takers(self, part: WindowPart) -> Int64:
        """The row of each page that ``part`` takes, int64."""
        return part.rows.repeat(part.end - part.begin)

    def write(self, part: WindowPart, ids: Int32) -> SideWrite | None:
        """What the device has to write for ``part``, whose new pages are ``ids``."""
        if part.idle:
            return None
        ledger, places = self._ledger, part.fresh
        if not part.moves:
            mains = ledger.pages_flat.take(places) if self.mapped else np.zeros_like(ids)
            return SideWrite(places, ids, mains)
        rows = part.rows
        base = rows * ledger.per_row
        gone = part.leave - part.first
        cleared = spread(base + part.first, gone)
        places = np.concatenate((cleared, places))
        new_ids = np.concatenate((np.zeros(cleared.size, np.int32), ids))
        if not self.mapped:
            return SideWrite(places, new_ids, np.zeros(places.size, np.int32))
        mains = ledger.pages_flat.take(places)
        # What the prefix cache holds keeps its window page, and its place in the map.
        number = cleared - base.repeat(gone)
        mains[: cleared.size][number < ledger.shared.take(rows).repeat(gone)] = 0
        return SideWrite(places, new_ids, mains)

    def applied(self, part: WindowPart, ids: Int32) -> None:
        """Note that ``part`` was done with ``ids``."""
        if part.idle:
            return
        rows = part.rows
        if ids.size:
            self.pages_flat[part.fresh] = ids
        self.stop[rows] = part.end
        if part.moves:
            self._move(rows, part.leave)
        if self.cut_rows:
            self.cut_rows.difference_update(rows[part.end > part.stop].tolist())

    def _move(self, rows: Int64, first: Int64) -> None:
        """Let the frontiers of ``rows`` be at ``first``, pages."""
        self.first[rows] = first
        self.due[rows] = first * self._ledger.per_page + self.lag

    # -- giving back -----------------------------------------------------------------------

    def held(self, rows: Int64) -> tuple[Int64, Int32]:
        """Rows (repeated) and ids of the window pages that ``rows`` own."""
        first = np.maximum(self.first.take(rows), self._ledger.shared.take(rows))
        return self._range(rows, first, np.maximum(self.stop.take(rows), first))

    def cutting(self, rows: Int64, committed: Int64, keep: Int64) -> Cut:
        """What goes back if C of ``rows`` becomes ``committed``, with ``keep`` pages. Pure."""
        size = self._ledger.page_size
        first, stop = self.first.take(rows), self.stop.take(rows)
        below = committed < first * size
        floor = committed // size
        new_first = np.where(below, floor, first)
        new_stop = np.where(below, floor, np.minimum(stop, keep))
        begin = np.maximum(np.maximum(first, self._ledger.shared.take(rows)), new_stop)
        owners, ids = self._range(rows, begin, np.maximum(stop, begin))
        return Cut(owners, ids, (new_first, new_stop))

    def cut(self, rows: Int64, cut: Cut) -> None:
        """Note that ``cut``, of these ``rows``, was done."""
        first, stop = cut.marks
        self._move(rows, first)
        self.stop[rows] = stop
        self.cut_rows.difference_update(rows.tolist())
        self.cut_rows.update(rows[stop < self._ledger.page_counts(rows)].tolist())

    def close(self, rows: Int64) -> None:
        """Forget what ``rows`` held."""
        self.first[rows] = 0
        self.stop[rows] = 0
        self.due[rows] = self.lag
        if self.cut_rows:
            self.cut_rows.difference_update(rows.tolist())

    def restore(self, rows: Int64, first: Int64, stop: Int64) -> None:
        """Let fresh ``rows`` hold window pages ``[first, stop)``, as a snapshot says."""
        self._move(rows, first)
        self.stop[rows] = stop
        self.cut_rows.update(rows[stop < self._ledger.page_counts(rows)].tolist())

    # -- sharing ---------------------------------------------------------------------------

    def adopt(self, row: int, sides: Int32) -> None:
        """Let a fresh ``row`` begin with cached pages; their window pages are ``sides``, or 0."""
        first = _live_from(sides)
        self.pages[row, : sides.size] = sides
        self._move(np.array([row]), np.array([first]))
        self.stop[row] = sides.size

    def readable(self, sides: Int32) -> Int32:
        """``sides`` without those below a missing one: the frontier of who shares them is there."""
        seen = sides.copy()
        seen[: _live_from(sides)] = 0
        return seen

    def own_sides(self, row: int, count: int) -> Int32:
        """The window pages of the first ``count`` pages of ``row``, 0 for none, int32."""
        sides = np.zeros(count, np.int32)
        first, stop = int(self.first[row]), min(int(self.stop[row]), count)
        if stop > first:
            sides[first:stop] = self.pages[row, first:stop]
        return sides

    def share(self, row: int, at: int, sides: Int32) -> None:
        """From page ``at`` on the row goes on with ``sides``, where it holds window pages.

        The ledger knows already how many pages the row shares: the frontier of one that holds no
        window page there goes up to their end.
        """
        first, stop = int(self.first[row]), int(self.stop[row])
        low, high = max(first, at), min(stop, at + sides.size)
        if high > low:
            self.pages[row, low:high] = sides[low - at : high - at]
        shared = int(self._ledger.shared[row])
        if stop < shared:
            # A page that a trim cut, and that is shared now, is not taken afresh: no write of
            # this row's goes there any more.
            self._move(np.array([row]), np.array([shared]))
            self.stop[row] = shared
            self.cut_rows.discard(row)

    def usable(self, sides: Int32) -> int:
        """How many leading pages a request may share: its last window has to be live, pages.

        Args:
            sides: window page ids of a cached prefix, int32, 0 for none.
        """
        count = sides.size
        if not count:
            return 0
        size = self._ledger.page_size
        lengths = np.arange(1, count + 1, dtype=np.int64)
        needed = np.maximum(lengths * size - self.tokens, 0) // size
        last_dead = np.maximum.accumulate(np.where(sides == 0, lengths - 1, -1))
        good = (last_dead < needed).nonzero()[0]
        return int(lengths[good[-1]]) if good.size else 0

    def _range(self, rows: Int64, first: Int64, stop: Int64) -> tuple[Int64, Int32]:
        count = stop - first
        where = spread(rows * self._ledger.per_row + first, count)
        return rows.repeat(count), self.pages_flat.take(where)


def _not_sparse() -> ValueError:
    return ValueError("logical_only= is for sparse=: a window group always grows along")


def _live_from(sides: Int32) -> int:
    """The page from which on all window pages are there."""
    dead = (sides == 0).nonzero()[0]
    return int(dead[-1]) + 1 if dead.size else 0
