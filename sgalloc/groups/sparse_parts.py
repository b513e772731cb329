"""What a step does to the device pages of its requests, and to the map."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgalloc.inputs import Int64
from sgalloc.ledger import spread
from sgalloc.pages import Int32

Bools = NDArray[np.bool_]


class Shown(NamedTuple):
    """What of each row is mapped, and what will be: page numbers ``[first, stop)``.

    Attributes:
        first, stop: now, int64 ``(n,)``.
        new_first, new_stop: afterwards, int64 ``(n,)``.
        long: rows whose one mapped page afterwards is the one behind the buffer.
        anew: rows whose entries are all written, whatever is mapped now; None for none.
    """

    first: Int64
    stop: Int64
    new_first: Int64
    new_stop: Int64
    long: Bools
    anew: Bools | None


class DevicePart:
    """What a plan does in the device group.

    Attributes:
        rows: int64 ``(n,)``, those of the plan.
        held, target: device pages of each row now and afterwards, int64 ``(n,)``.
        need: new pages.
        gain: pages that go back first: none.
        shown: what is mapped.
        dense: sparse rows that become dense, int64; None for none.
    """

    group = "device"
    gain = 0

    __slots__ = ("dense", "held", "need", "rows", "shown", "target")

    def __init__(
        self, rows: Int64, held: Int64, target: Int64, shown: Shown, dense: Int64 | None = None
    ) -> None:
        self.rows = rows
        self.held = held
        self.target = target
        self.shown = shown
        self.dense = dense
        self.need = 0 if target is held else int((target - held).sum())

    def without(self, leaving: Int64) -> int:
        """Pages that it takes if the rows ``leaving`` were no part of the plan."""
        return int((self.target - self.held)[~np.isin(self.rows, leaving)].sum())


class MovingPart:
    """The same of a step of long rows alone: the page of the newest token moves, if at all.

    Attributes:
        rows: those whose page moves, int64 ``(n,)``.
        stop, covered: one past the number of the page that is mapped, now (0 for none) and
            afterwards, int64 ``(n,)``.
    """

    group = "device"
    need = gain = 0

    __slots__ = ("covered", "rows", "stop")

    def __init__(self, rows: Int64, stop: Int64, covered: Int64) -> None:
        self.rows = rows
        self.stop = stop
        self.covered = covered

    def without(self, leaving: Int64) -> int:
        """No pages."""
        return 0


class Thinning(NamedTuple):
    """What `to_sparse` does.

    Attributes:
        rows: int64 ``(n,)``.
        held, target: device pages of each row now and afterwards, scratch left out.
        newest: number of the page of the newest token, int64 ``(n,)``; -1 for none.
        scratchless: rows that take scratch pages, int64.
        shown: what is mapped.
        need: pages taken.
        owners, ids: pages that go back.
    """

    rows: Int64
    held: Int64
    target: Int64
    newest: Int64
    scratchless: Int64
    shown: Shown
    need: int
    owners: Int64
    ids: Int32


def outside(
    base: Int64, first: Int64, stop: Int64, hole_first: Int64, hole_stop: Int64
) -> tuple[Int64, Int64]:
    """``base + [first, stop)`` without ``base + [hole_first, hole_stop)``.

    Returns:
        What is below the holes, then what is above them, int64; and how many of each row are
        below, then how many are above, int64 ``(2 * n,)``.
    """
    above = np.maximum(first, hole_stop)
    counts = np.concatenate((np.minimum(stop, hole_first) - first, stop - above))
    np.maximum(counts, 0, out=counts)
    return spread(np.concatenate((base + first, base + above)), counts), counts
