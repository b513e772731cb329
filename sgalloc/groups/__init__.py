"""Second groups of pages, which go along with those of the main group."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.pages import Int32, PagePool
from sgalloc.plan import Plan, SidePart, SideWrite

__all__ = ["NO_PAGES", "Cut", "Side", "clearing", "joined"]

NO_PAGES: Int32 = np.empty(0, np.int32)


class Cut(NamedTuple):
    """What a trim takes from a second group.

    Attributes:
        owners: row of each page that goes back, int64 ``(n,)``.
        ids: these pages, int32.
        marks: what the group has to note once they are gone; its own business.
    """

    owners: Int64
    ids: Int32
    marks: Any


class Side(Protocol):
    """A second group: what it does in a plan, and what each row holds of it."""

    pool: PagePool
    pages: Int32
    """Page ids of each row, ``(max_requests + 1, row_pages)``; stale where a row holds none."""
    mapped: bool
    """Whether a map from the slots of the main group to those of this one is kept."""

    def part(self, plan: Plan, evict: bool, tail: int | Int64 | None, main_only: bool) -> SidePart:
        """What ``plan`` does in this group. Pure.

        Args:
            plan: the plan, its growth in the main group computed.
            evict: whether pages that left the window go back first.
            tail: the last tokens alone that get pages, one number or one per request; None
                for all.
            main_only: whether the main group alone grows.
        """

    def receiving(self, plan: Plan, tail: int | Int64 | None, main_only: bool) -> SidePart:
        """As `part`, for fresh rows that remote writers fill; they may share a prefix."""

    def need_for(
        self, lengths: Int64, matched: Int64, tail: int | Int64 | None, main_only: bool
    ) -> int:
        """Pages that new requests take, of which the first ``matched`` pages are shared.

        Args:
            lengths: tokens of each, int64 ``(n,)``.
            matched: pages, int64 ``(n,)``.
            tail, main_only: as `part`.

        Raises:
            ValueError: as `part`.
        """

    def gained(self, part: Any) -> tuple[Int64, Int32]:
        """Rows and ids of the pages that ``part`` gives back first."""

    def takers(self, part: Any) -> Int64:
        """The row of each page that ``part`` takes, int64."""

    def write(self, part: Any, ids: Int32) -> SideWrite | None:
        """What the device has to write for ``part``, whose new pages are ``ids``."""

    def applied(self, part: Any, ids: Int32) -> None:
        """Note that ``part`` was done with ``ids``."""

    def held(self, rows: Int64) -> tuple[Int64, Int32]:
        """Rows (repeated) and ids of the pages that ``rows`` own, shared ones left out."""

    def cutting(self, rows: Int64, committed: Int64, keep: Int64) -> Cut:
        """What goes back if C of ``rows`` becomes ``committed``, with ``keep`` pages. Pure."""

    def cut(self, rows: Int64, cut: Cut) -> None:
        """Note that ``cut``, of these ``rows``, was done."""

    def close(self, rows: Int64) -> None:
        """Forget what ``rows`` held."""


def clearing(mains: Int32) -> SideWrite:
    """A write that clears the map for pages of the main group."""
    return SideWrite(np.full(mains.size, -1, np.int64), np.zeros(mains.size, np.int32), mains)


def joined(first: SideWrite | None, second: SideWrite) -> SideWrite:
    """Both writes in one."""
    if first is None:
        return second
    return SideWrite(
        np.concatenate((first.places, second.places)),
        np.concatenate((first.ids, second.ids)),
        np.concatenate((first.mains, second.mains)),
    )
