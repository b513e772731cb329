"""HiSparse: the whole KV under logical page ids, and on the device a buffer for each request."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from sgalloc.errors import WrongState
from sgalloc.groups import NO_PAGES, Cut
from sgalloc.groups.sparse_parts import Bools, DevicePart, MovingPart, Shown, Thinning, outside
from sgalloc.inputs import Int64, shown, whole_number
from sgalloc.ledger import NO_ROWS, Ledger, spread
from sgalloc.pages import Int32, PagePool
from sgalloc.plan import Plan, SideWrite

_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Sparse:
    """Settings of the groups ``logical`` and ``device``.

    Attributes:
        ratio: logical pages for each page of the device, at least 1; an int, a float or a
            fraction.
        device_buffer: tokens of a request that stay on the device, rounded up to whole pages.
        draft_scratch: tokens of the device that each sparse request has for drafts, rounded up
            to whole pages.
    """

    ratio: float | Fraction
    device_buffer: int
    draft_scratch: int = 0

    def __post_init__(self) -> None:
        ratio: Any = self.ratio
        if isinstance(ratio, np.generic) and not isinstance(ratio, np.timedelta64):
            ratio = ratio.item()
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float, Fraction)):
            raise TypeError(f"sparse.ratio must be a number, got {shown(ratio)}: pass 2, or 1.5")
        if not 1 <= ratio <= _MOST:
            raise ValueError(
                f"sparse.ratio must be from 1 to {_MOST}, got {ratio}: every page of the device "
                "needs a logical one"
            )
        object.__setattr__(self, "ratio", ratio)
        for name, least in (("device_buffer", 1), ("draft_scratch", 0)):
            number = whole_number(getattr(self, name), f"sparse.{name}", least, _MOST)
            object.__setattr__(self, name, number)

    def logical_pages(self, num_pages: int) -> int:
        """Pages of the group ``logical`` beside ``num_pages`` of the device."""
        return int(self.ratio * num_pages)


class DevicePages:
    """The group ``device``: which device pages each row holds, and which of them are mapped.

    A *dense* row has a device page for each of its first `count` logical pages, all mapped; that
    is all of them but for what grew with ``logical_only``. A *sparse* row with at most `buffer`
    pages is the same as far as its committed tokens go. One with more is *long*: `buffer` pages
    that are not mapped, and one behind them, mapped for the page of the newest token. What
    `trim` and `commit` leave behind in the map, the next growing verb catches up with.

    Attributes:
        settings: what it was made with.
        buffer: pages of a full buffer.
        scratch: pages of the drafts of a request.
        pool: the pages.
        mapped: a map is always kept.
        count: device pages of each row, scratch left out, int64 ``(max_requests + 1,)``.
        first, stop: page numbers of each row that are mapped, int64.
        sparse: which rows are sparse.
        is_long: which of these are long.
        has_scratch: which rows have their scratch pages.
        pages: device page ids of each row, int32 ``(max_requests + 1, row_pages)``; stale from
            `count` on.
        scratch_pages: int32 ``(max_requests + 1, scratch)``.
    """

    mapped = True

    def __init__(self, ledger: Ledger, settings: Sparse, num_pages: int) -> None:
        size = ledger.page_size
        self._ledger = ledger
        self.settings = settings
        self.buffer = -(-settings.device_buffer // size)
        self.scratch = -(-settings.draft_scratch // size)
        self.pool = PagePool(num_pages, "device")
        rows = ledger.max_requests + 1
        self.count: Int64 = np.zeros(rows, np.int64)
        self.first: Int64 = np.zeros(rows, np.int64)
        self.stop: Int64 = np.zeros(rows, np.int64)
        self.sparse: Bools = np.zeros(rows, np.bool_)
        self.is_long: Bools = np.zeros(rows, np.bool_)
        self.has_scratch: Bools = np.zeros(rows, np.bool_)
        self.pages: Int32 = np.zeros((rows, ledger.row_pages), np.int32)
        self.pages_flat: Int32 = self.pages.reshape(-1)
        self.scratch_pages: Int32 = np.zeros((rows, self.scratch), np.int32)

    # -- plans -----------------------------------------------------------------------------

    def part(
        self, plan: Plan, evict: bool, tail: int | Int64 | None, main_only: bool
    ) -> DevicePart | MovingPart:
        """What ``plan`` does in this group. See `Side.part`.

        ``main_only`` is about the rows that are extended, or all of a plan that commits nothing.

        Raises:
            ValueError: a tail.
            WrongState: a decode or a reserve of a dense row that lacks device pages.
        """
        if tail is not None:
            raise _no_window()
        rows, per_page = plan.rows, self._ledger.per_page
        commits = 0 if plan.committing is None else plan.committing.size
        extends = commits - (0 if plan.decoding is None else plan.decoding.size)
        if main_only and not commits:
            extends = rows.size
        settled = plan.stop if commits == rows.size else plan.start
        if 0 < commits < rows.size:
            settled = np.concatenate((plan.stop[:commits], plan.start[commits:]))
        covered = settled + self._ledger.per_page_less_one
        covered //= per_page
        stop, was_long = self.stop.take(rows), self.is_long.take(rows)
        if (main_only or not extends) and was_long.all():
            at = (stop != covered).nonzero()[0]
            return MovingPart(rows.take(at), stop.take(at), covered.take(at))
        held, first, sparse = self.count.take(rows), self.first.take(rows), self.sparse.take(rows)
        lacks = held < plan.cur // per_page
        lacks[:extends] = False
        lacks &= ~sparse
        if lacks.any():
            row = int(rows[lacks.argmax()])
            raise WrongState(
                f"row {row} has {self._ledger.allocated[row] // per_page} logical pages and "
                f"{self.count[row]} of the device: to_sparse it first, or extend it, which "
                "brings all of it onto the device"
            )
        whole = ~sparse
        whole[:extends] = not main_only
        full = self.buffer + 1
        target = np.where(was_long | (covered > self.buffer), full, np.maximum(held, covered))
        target = np.where(sparse, target, held)
        target[whole] = (plan.nxt // per_page)[whole]
        long = sparse & ~whole & (target == full)
        new_first = np.where(long, np.maximum(covered - 1, 0), 0)
        new_stop = np.where(long, covered, target)
        anew = was_long & whole
        return DevicePart(
            rows,
            held,
            target,
            Shown(first, stop, new_first, new_stop, long, anew),
            rows[sparse & whole],
        )

    def receiving(self, plan: Plan, tail: int | Int64 | None, main_only: bool) -> DevicePart:
        """As `part`, for fresh rows that remote writers fill: on the device, or not."""
        if tail is not None:
            raise _no_window()
        rows = plan.rows
        none = np.zeros_like(rows)
        target = none if main_only else plan.nxt // self._ledger.per_page
        shown_ = Shown(none, none, none, target, np.zeros(rows.shape, np.bool_), None)
        return DevicePart(rows, none, target, shown_)

    def need_for(
        self, lengths: Int64, matched: Int64, tail: int | Int64 | None, main_only: bool
    ) -> int:
        """Pages that new requests take. See `Side.need_for`."""
        if tail is not None:
            raise _no_window()
        return 0 if main_only else int((-(-lengths // self._ledger.page_size)).sum())

    def gained(self, part: DevicePart | MovingPart) -> tuple[Int64, Int32]:
        """Growth gives nothing back."""
        return NO_ROWS, NO_PAGES

    def takers(self, part: DevicePart | MovingPart) -> Int64:
        """The row of each page that ``part`` takes, int64."""
        if isinstance(part, MovingPart):
            return NO_ROWS
        return part.rows.repeat(part.target - part.held)

    def write(self, part: DevicePart | MovingPart, ids: Int32) -> SideWrite | None:
        """What the device has to write for ``part``, whose new pages are ``ids``."""
        if isinstance(part, MovingPart):
            return self._moving(part) if part.rows.size else None
        if ids.size:
            self._note(part.rows, part.held, part.target, ids)
        return self._mapping(part.rows, part.shown)

    def applied(self, part: DevicePart | MovingPart, ids: Int32) -> None:
        """Note that ``part`` was done with ``ids``."""
        rows = part.rows
        if isinstance(part, MovingPart):
            self.first[rows] = np.maximum(part.covered - 1, 0)
            self.stop[rows] = part.covered
            return
        shown_ = part.shown
        if ids.size:
            self.count[rows] = part.target
        self.first[rows] = shown_.new_first
        self.stop[rows] = shown_.new_stop
        self.is_long[rows] = shown_.long
        if part.dense is not None:
            self.sparse[part.dense] = False

    def _note(self, rows: Int64, held: Int64, target: Int64, ids: Int32) -> None:
        """Enter new pages behind those held, where the lists are stale."""
        self.pages_flat[spread(rows * self._ledger.per_row + held, target - held)] = ids

    def _moving(self, part: MovingPart) -> SideWrite:
        """The entries of the page that was the newest go, those of the new one come."""
        base = part.rows * self._ledger.per_row
        gone, come = base + part.stop, base + part.covered
        if not part.stop.all():
            gone = gone[part.stop > 0]
        places = np.concatenate((gone, come))
        places -= 1
        ids = np.zeros(places.size, np.int32)
        ids[gone.size :] = self.pages_flat.take(base + self.buffer)
        # There is no table of device slots; the places say whose pages these are.
        return SideWrite(places, ids, self._ledger.pages_flat.take(places))

    def _mapping(self, rows: Int64, what: Shown) -> SideWrite | None:
        """The entries that leave the map, and those that enter it; None where it stays."""
        changed = (what.first != what.new_first) | (what.stop != what.new_stop)
        at = changed.nonzero()[0]
        if not at.size:
            return None
        first, stop, new_first, new_stop = (column.take(at) for column in what[:4])
        base = rows.take(at) * self._ledger.per_row
        cleared, _ = outside(base, first, stop, new_first, new_stop)
        if what.anew is not None:
            stop = np.where(what.anew.take(at), first, stop)
        entering, counts = outside(base, new_first, new_stop, first, stop)
        # Of a long row only the page behind the buffer is mapped, whatever the number.
        shift = np.where(what.long.take(at), self.buffer - new_first, 0)
        where = entering + np.concatenate((shift, shift)).repeat(counts)
        ids = np.concatenate((np.zeros(cleared.size, np.int32), self.pages_flat.take(where)))
        places = np.concatenate((cleared, entering))
        return SideWrite(places, ids, self._ledger.pages_flat.take(places))

    # -- to sparse -------------------------------------------------------------------------

    def thinning(self, rows: Int64) -> Thinning:
        """What making ``rows`` sparse takes and gives back. Pure.

        Raises:
            WrongState: one is sparse already.
        """
        sparse = self.sparse.take(rows)
        if sparse.any():
            row = int(rows[sparse.argmax()])
            raise WrongState(
                f"row {row} is sparse already: decode it, or extend it, which makes it dense"
            )
        ledger = self._ledger
        held, pages = self.count.take(rows), ledger.page_counts(rows)
        covered = -(-ledger.committed.take(rows) // ledger.per_page)
        newest = covered - 1
        long = pages > self.buffer
        target = np.where(long, self.buffer + 1, pages)
        back = np.maximum(held - target, 0)
        places = spread(rows * ledger.per_row + target, back)
        ids = self.pages_flat.take(places)
        # The page of the newest token stays; the one behind the buffer goes in its stead.
        swapped = (long & (newest >= target) & (newest < held)).nonzero()[0]
        if swapped.size:
            at = (back.cumsum() - back + newest - target)[swapped]
            ids[at] = self.pages_flat.take(rows[swapped] * ledger.per_row + self.buffer)
        scratchless = rows[~self.has_scratch.take(rows)] if self.scratch else rows[:0]
        what = Shown(
            self.first.take(rows),
            self.stop.take(rows),
            np.where(long, np.maximum(newest, 0), 0),
            np.where(long, covered, target),
            long,
            None,
        )
        need = int(np.maximum(target - held, 0).sum()) + scratchless.size * self.scratch
        return Thinning(rows, held, target, newest, scratchless, what, need, rows.repeat(back), ids)

    def thinners(self, thin: Thinning) -> Int64:
        """The row of each page that ``thin`` takes, int64."""
        taken = thin.rows.repeat(np.maximum(thin.target - thin.held, 0))
        return np.concatenate((taken, thin.scratchless.repeat(self.scratch)))

    def thin_write(self, thin: Thinning, ids: Int32) -> SideWrite | None:
        """What the device has to write for ``thin``, whose new pages are ``ids``."""
        fresh = ids.size - thin.scratchless.size * self.scratch
        self._note(thin.rows, thin.held, np.maximum(thin.target, thin.held), ids[:fresh])
        return self._mapping(thin.rows, thin.shown)

    def thinned(self, thin: Thinning, ids: Int32) -> None:
        """Note that ``thin`` was done with ``ids``."""
        rows = thin.rows
        moved = (thin.shown.long & (thin.newest >= 0) & (thin.newest < thin.held)).nonzero()[0]
        base = rows[moved] * self._ledger.per_row
        newest, behind = base + thin.newest[moved], base + self.buffer
        self.pages_flat[newest], self.pages_flat[behind] = (
            self.pages_flat.take(behind),
            self.pages_flat.take(newest),
        )
        fresh = ids.size - thin.scratchless.size * self.scratch
        if thin.scratchless.size:
            self.scratch_pages[thin.scratchless] = ids[fresh:].reshape(-1, self.scratch)
            self.has_scratch[thin.scratchless] = True
        self.count[rows] = thin.target
        self.first[rows] = thin.shown.new_first
        self.stop[rows] = thin.shown.new_stop
        self.is_long[rows] = thin.shown.long
        self.sparse[rows] = True

    # -- giving back -----------------------------------------------------------------------

    def cutting(self, rows: Int64, committed: Int64, keep: Int64) -> Cut:
        """What goes back if C of ``rows`` becomes ``committed``, with ``keep`` pages. Pure.

        A long row that keeps more than a buffer keeps its device pages; one that keeps less
        has as many device pages as logical ones, and is long no more.
        """
        held, first, stop = self.count.take(rows), self.first.take(rows), self.stop.take(rows)
        target = np.minimum(held, keep)
        stop = np.minimum(stop, keep)
        gone = stop <= first
        first[gone] = stop[gone] = 0
        short = self.is_long.take(rows) & (target <= self.buffer)
        moved = short & (stop > first)
        base = rows * self._ledger.per_row
        back = held - target
        ids = self.pages_flat.take(spread(base + target, back))
        if moved.any():
            # The page behind the buffer stays mapped where it is, and another one goes.
            last = (back.cumsum() - 1)[moved]
            ids[last] = self.pages_flat.take((base + first)[moved])
        marks = (target, first, stop, (base + first)[moved], base[moved], rows[short])
        return Cut(rows.repeat(back), ids, marks)

    def cut(self, rows: Int64, cut: Cut) -> None:
        """Note that ``cut``, of these ``rows``, was done."""
        target, first, stop, place, base, short = cut.marks
        self.pages_flat[place] = self.pages_flat.take(base + self.buffer)
        self.count[rows], self.first[rows], self.stop[rows] = target, first, stop
        self.is_long[short] = False

    def held(self, rows: Int64) -> tuple[Int64, Int32]:
        """Rows (repeated) and ids of all device pages of ``rows``."""
        held = self.count.take(rows)
        owners = rows.repeat(held)
        ids = self.pages_flat.take(spread(rows * self._ledger.per_row, held))
        having = rows[self.has_scratch.take(rows)]
        if not having.size:
            return owners, ids
        return (
            np.concatenate((owners, having.repeat(self.scratch))),
            np.concatenate((ids, self.scratch_pages.take(having, axis=0).reshape(-1))),
        )

    def close(self, rows: Int64) -> None:
        """Forget what ``rows`` held."""
        for column in (self.count, self.first, self.stop):
            column[rows] = 0
        for flags in (self.sparse, self.is_long, self.has_scratch):
            flags[rows] = False

    # -- looking ---------------------------------------------------------------------------

    def mapped_pages(self, row: int) -> Int32:
        """The device page of each logical page of ``row``, 0 where none is mapped, int32."""
        found = np.zeros(int(self._ledger.allocated[row]) // self._ledger.page_size, np.int32)
        first, stop = int(self.first[row]), int(self.stop[row])
        begin = self.buffer if self.is_long[row] else first
        found[first:stop] = self.pages[row, begin : begin + stop - first]
        return found

    def buffer_of(self, row: int) -> Int32:
        """The pages of the buffer of ``row``, int32; none while it is dense."""
        count = min(int(self.count[row]), self.buffer) if self.sparse[row] else 0
        return self.pages[row, :count].copy()

    def scratch_of(self, row: int) -> Int32:
        """The scratch pages of ``row``, int32; none before it was made sparse."""
        return self.scratch_pages[row, : self.scratch if self.has_scratch[row] else 0].copy()


def _no_window() -> ValueError:
    return ValueError(
        "window_tail= is for a window group, and this allocator is sparse: leave it out"
    )
