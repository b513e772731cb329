"""Who wrote an entry of a device table last: the last writes, for a check that finds one wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from sgalloc.pages import Int32
from sgalloc.plan import Segments, SideWrite

if TYPE_CHECKING:
    from sgalloc.device import Device

KEPT = 64
# A write of more pages is counted and not listed: its arrays would hold much memory.
LISTED = 4096


class Step(NamedTuple):
    """A write, as it is noted in a steady step: nothing is worked out before somebody asks.

    Attributes:
        number: of the write, from 1.
        requests: how many it was for.
        what: the call that asked for it; None for a plan, which the next three tell of.
        commits: whether the plan commits tokens.
        commits_all: whether it does so for all its requests, by the very array of their rows.
        decodes: whether it counts a decode step.
        growth: pages of the main group; how many, where they are not listed; None for none.
        side: the same of the second group.
    """

    number: int
    requests: int
    what: str | None
    commits: bool
    commits_all: bool
    decodes: bool
    growth: Segments | int | None
    side: SideWrite | int | None

    @property
    def listed(self) -> bool:
        """Whether it is known which places it wrote."""
        return not isinstance(self.growth, int) and not isinstance(self.side, int)

    def __str__(self) -> str:
        of = f"of {self.requests} request{'' if self.requests == 1 else 's'}, "
        of = of if self.requests else ""
        pages, side = _pages(self.growth, self.side)
        unlisted = "" if self.listed else ", which are not listed"
        if self.what is not None:
            return f"{self.what}, write {self.number} ({of}{pages or side} pages{unlisted})"
        kind = "reserve"
        if self.commits:
            kind = "plan" if not self.commits_all else "decode" if self.decodes else "extend"
        more = f" and {side} of the second group" if side else ""
        return f"plan {self.number} ({kind} {of}{pages} new pages{more}{unlisted})"


class WriteLog:
    """The last `KEPT` writes into the tables of one device.

    Attributes:
        note: takes a tuple of the fields of a `Step`.
        next: the number of the next write.
    """

    __slots__ = ("_kept", "next", "note")

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.note = self._kept.append
        self.next = count(1).__next__

    @property
    def number(self) -> int:
        """The number of the last write; 0 before the first."""
        return self._kept[-1][0] if self._kept else 0

    def called(
        self, what: str, requests: int, growth: Segments | None, side: SideWrite | None
    ) -> None:
        """Note a write that is no plan's."""
        self.note((self.next(), requests, what, False, False, False, growth, side))
        self.shorten()

    def shorten(self) -> None:
        """Keep no list of the last write if that was a large one."""
        last = Step(*self._kept[-1])
        if sum(_pages(last.growth, last.side)) > LISTED:
            pages, side = _pages(last.growth, last.side)
            self._kept[-1] = tuple(last._replace(growth=pages, side=side))

    def of_entry(self, row: int, page: int) -> str:
        """Who wrote page number ``page`` of ``row`` into the table last, in words."""

        def wrote(step: Step) -> bool:
            runs = step.growth
            if not isinstance(runs, Segments):
                return False
            ahead = page - runs.first
            return bool(((runs.rows == row) & (ahead >= 0) & (ahead < runs.count)).any())

        return self._last(wrote)

    def of_side_entry(self, base: int, page: int) -> str:
        """The same of the second group's table; ``base`` is where the row's places begin."""
        return self._last(lambda step: _among(step.side, "places", base + page))

    def of_map(self, page: int) -> str:
        """The same of what the map says of ``page``, of the main group."""
        # 0 among these pages leaves the map alone.
        return self._last(lambda step: page > 0 and _among(step.side, "mains", page))

    def _last(self, wrote: Callable[[Step], bool]) -> str:
        # Whoever wrote so much that it is not listed may have written this, too.
        may: list[Step] = []
        for noted in reversed(self._kept):
            step = Step(*noted)
            if not step.listed or wrote(step):
                may.append(step)
                if step.listed:
                    break
        surely = bool(may) and may[-1].listed
        if not may:
            return self._before("written", "no plan has written it")
        ago = self.number - may[0].number
        when = f"{ago} write{'' if ago == 1 else 's'} ago" if ago else "the last write so far"
        told = f"last written by {may[0]}, {when}"
        told += "".join(f", or by {step}" for step in may[1:])
        return told if surely else f"{told}, or {self._before('', 'by none')}"

    def _before(self, verb: str, none: str) -> str:
        if self.number <= KEPT:
            return none
        return f"{verb} before the last {KEPT} plans".strip()


def write_and_note(
    device: Device,
    what: str,
    requests: int,
    pages: Segments | None,
    ids: Int32 | None,
    after: Any,
    side: SideWrite | None,
) -> None:
    """A write of which no caller gets the event, and that is no plan's.

    Args:
        device: which writes.
        what: the call that asks for it.
        requests: how many it is for.
        pages, ids, after, side: as `Device.write`.
    """
    device.rejoin(device.write(pages, ids, None, after, side))
    device.log.called(what, requests, pages, side)


def _pages(growth: Segments | int | None, side: SideWrite | int | None) -> tuple[int, int]:
    main = growth.total if isinstance(growth, Segments) else growth or 0
    return main, side.ids.size if isinstance(side, SideWrite) else side or 0


def _among(side: SideWrite | int | None, column: str, value: int) -> bool:
    return isinstance(side, SideWrite) and bool((getattr(side, column) == value).any())
