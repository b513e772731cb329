"""Who wrote an entry of a device table last: the last writes, for a check that finds one wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.pages import Int32
from sgalloc.plan import Segments, SideWrite

if TYPE_CHECKING:
    from sgalloc.device import Device

# So few that what is noted is written over while it is in the cache: 64 cost a step 0.1 µs more.
KEPT = 16
# Of a write of more pages only the number is kept: its arrays would hold much memory.
LISTED = 4096


class Along:
    """Stands for a second group in which each page of the main group got one at the same place."""


ALONG = Along()


class Step(NamedTuple):
    """One write, in the words that a message needs.

    Attributes:
        number: the ledger's version before it, which a plan has as ``plan.version``.
        what: the call that asked for it, or the kind of plan.
        planned: whether it was a plan's.
        requests: how many it was for; 0 where that says nothing.
        ids: pages of the main group, int32; their number where they are not listed.
        runs: where a call that was no plan's put them; None for a plan.
        side: what was written of the second group, listed or not; None for nothing.
        along: whether it went along with ``ids``.
    """

    number: int
    what: str
    planned: bool
    requests: int
    ids: Int32 | int
    runs: Segments | None
    side: SideWrite | int | None
    along: bool = False

    @property
    def listed(self) -> bool:
        """Whether it is known which pages it wrote."""
        return not isinstance(self.ids, int) and not isinstance(self.side, int)

    @property
    def counts(self) -> tuple[int, int]:
        """Pages of the main group, and of the second one."""
        ids, side = self.ids, self.side
        main = ids if isinstance(ids, int) else ids.size
        if self.along:
            return main, main
        return main, side.ids.size if isinstance(side, SideWrite) else side or 0

    def has(self, page: int) -> bool:
        """Whether ``page`` of the main group is among its pages."""
        return not isinstance(self.ids, int) and bool((self.ids == page).any())

    def __str__(self) -> str:
        main, side = self.counts
        pages = f"{main or side:,} {'new ' * (self.planned and main > 0)}pages"
        pages += f" and {side:,}" * (main > 0 and side > 0)
        pages += " of the second group" * (side > 0) + ", too many to list" * (not self.listed)
        of = f" of {self.requests:,} request{'s' * (self.requests != 1)}" if self.requests else ""
        if self.planned:
            return f"plan {self.number} ({self.what}{of}, {pages})"
        return f"{self.what}{of} at version {self.number} ({pages})"


class WriteLog:
    """The last `KEPT` writes into the tables of one device.

    A steady step notes what it has at hand, and nothing is worked out before somebody asks: of a
    plan ``(version, rows, committing, decoding, ids, side)``, of another call ``(version, what,
    requests, runs, ids, side)``.

    Attributes:
        note: takes such a tuple.
    """

    __slots__ = ("_kept", "note")

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.note = self._kept.append

    def noted_much(self) -> None:
        """Keep only the number of pages of the last write, if these are more than `LISTED`."""
        ids, side = self._kept[-1][4:]
        main, beside = _step(self._kept[-1]).counts
        if main + beside > LISTED:
            short = None if side is None else beside
            self._kept[-1] = (*self._kept[-1][:4], 0 if ids is None else main, short)

    def last(self) -> str:
        """The last write in words; "" for none."""
        return str(_step(self._kept[-1])) if self._kept else ""

    def since(self, version: int) -> int:
        """Writes since the ledger had ``version``; as many as are kept, where it may be more."""
        return sum(noted[0] >= version for noted in self._kept)

    def of_entry(self, row: int, pages: Int32, number: int) -> str:
        """Who wrote page ``number`` of ``row``, whose page list is ``pages``, last, in words."""
        page = int(pages[number])

        def wrote(step: Step) -> bool:
            if step.runs is None:
                # A page that the pool has handed out is written into one row at once.
                return step.has(page)
            ahead = number - step.runs.first
            here = (step.runs.rows == row) & (ahead >= 0) & (ahead < step.runs.count)
            return bool(here.any())

        return self._last(wrote)

    def of_side_entry(self, base: int, pages: Int32, number: int) -> str:
        """The same of the second group's table; ``base`` is where the row's places begin."""
        page = int(pages[number])

        def wrote(step: Step) -> bool:
            if step.along:
                return step.has(page)
            return _among(step.side, "places", base + number)

        return self._last(wrote)

    def of_map(self, page: int) -> str:
        """The same of what the map says of ``page``, of the main group."""

        def wrote(step: Step) -> bool:
            if step.along:
                return step.has(page)
            # Among the pages of a write, 0 stands for one that leaves the map alone.
            return page > 0 and _among(step.side, "mains", page)

        return self._last(wrote)

    def _last(self, wrote: Callable[[Step], bool]) -> str:
        # Whoever wrote so much that it is not listed may have written this, too.
        may: list[tuple[int, Step]] = []
        for ago, noted in enumerate(reversed(self._kept)):
            step = _step(noted)
            if not step.listed or wrote(step):
                may.append((ago, step))
                if step.listed:
                    break
        told = ", or ".join(f"by {step}, {_ago(ago)}" for ago, step in may)
        if may and may[-1][1].listed:
            return f"last written {told}"
        before = f"before the last {KEPT} plans" if len(self._kept) == KEPT else "by no plan"
        return f"last written {told}, or {before}" if may else f"written {before}"


def write_and_note(
    device: Device,
    version: int,
    what: str,
    requests: int,
    runs: Segments | None,
    ids: Int32 | None,
    after: Any,
    side: SideWrite | None,
) -> None:
    """A write of which no caller gets the event, and that is no plan's.

    Args:
        device: which writes.
        version: of the ledger.
        what: the call that asks for it.
        requests: how many it is for.
        runs, ids, after, side: as `Device.write`.
    """
    device.write_here(runs, ids, after, side)
    note_call(device.log, version, what, requests, runs, ids, side)


def unmap_and_note(device: Device, version: int, what: str, side: SideWrite) -> None:
    """`Device.unmap`, noted. See `write_and_note`."""
    device.unmap(side)
    note_call(device.log, version, what, 0, None, None, side)


def note_call(
    log: WriteLog,
    version: int,
    what: str,
    requests: int,
    runs: Segments | None,
    ids: Int32 | None,
    side: SideWrite | None,
) -> None:
    """Note a write that is no plan's. See `write_and_note`."""
    log.note((version, what, requests, runs, ids, side))
    log.noted_much()


def _step(noted: tuple[Any, ...]) -> Step:
    number, who = noted[:2]
    ids, side = noted[4:]
    along = side is ALONG
    ids, side = _NONE if ids is None else ids, None if along else side
    if isinstance(who, str):
        return Step(number, who, False, noted[2], ids, noted[3], side)
    rows: Int64 = who
    committing, decoding = noted[2:4]
    commits = 0 if committing is None else committing.size
    decodes = 0 if decoding is None else decoding.size
    what = "reserve"
    if 0 < commits < rows.size or 0 < decodes < commits:
        what = "mixed plan"
    elif commits:
        what = "decode" if decodes else "extend"
    return Step(number, what, True, rows.size, ids, None, side, along)


def _ago(ago: int) -> str:
    return f"{ago} write{'s' * (ago != 1)} ago" if ago else "the last write so far"


def _among(side: SideWrite | int | None, column: str, value: int) -> bool:
    return isinstance(side, SideWrite) and bool((getattr(side, column) == value).any())


_NONE: Int32 = np.empty(0, np.int32)
