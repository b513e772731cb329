"""Whether the device's tables say what the ledger says: at once, or without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgalloc import laws
from sgalloc.core import Core
from sgalloc.device.row_digest import MAP
from sgalloc.errors import LawViolation, WrongState
from sgalloc.inputs import Int64
from sgalloc.ownership import Unpicklable
from sgalloc.pages import Int32
from sgalloc.trust.claims import claims_of, late_rows, look_closer, name_of


class Probe(Unpicklable):
    """A look at the device's tables behind all that was written, compared when it is there.

    Attributes:
        ready: an event behind the last read of the tables, for graphs that write them on another
            stream.
        left_out: rows that were not compared, since a staged step had yet to write pages of them,
            int32 ``(n,)``; with any of these the map was not compared either.
        explain: adds to a message what else is known.
    """

    def __init__(self, core: Core, rows: Int64 | None = None) -> None:
        """Launch it.

        Args:
            core: the allocator's parts.
            rows: open rows, int64 ``(n,)``; None for all of them, and the map.

        Raises:
            WrongState: as `Device.digest`.
        """
        ledger = core.ledger
        late = late_rows(core, core.device.unwritten())
        looked_at = ledger.live() if rows is None else rows
        if late.size:
            late = late[np.isin(late, looked_at)]
            looked_at = looked_at[~np.isin(looked_at, late)]
        self._core = core
        self._claims = claims_of(core, looked_at, rows is None and not late.size)
        self._handles = ledger.handle.take(self._claims.subject, mode="clip")
        self._version = ledger.version
        self._pending = core.device.digest(self._claims.ranges)
        self._problem: str | None = None
        self._known = False
        self.explain: Callable[[str], str] = str
        self.ready: Any = self._pending.ready
        self.left_out: Int32 = late.astype(np.int32)

    @property
    def done(self) -> bool:
        """Whether `result` would wait for nothing; polls, and never waits."""
        self._core.owner.check()
        return self._pending.done

    def result(self) -> Int32:
        """Compare; waits until the device has looked, if it has not yet.

        Where something differs it is read back, which waits for the device.

        Returns:
            `left_out`.

        Raises:
            LawViolation: a table is not what the ledger said: naming the entry, both values and
                who wrote it last; or, where it is right by now, the row.
            WrongState: a stream is being captured, or another thread owns the allocator.
        """
        self._core.owner.check()
        if not self._known:
            wrong = (self._pending.wait() != self._claims.digests).nonzero()[0]
            if wrong.size:
                self._problem = self.explain(self._named(wrong))
            self._known = True
        if self._problem is not None:
            raise LawViolation(self._problem)
        return self.left_out

    def _named(self, wrong: Int64) -> str:
        """What is wrong, in words, by the first range whose entries still are."""
        core, claims = self._core, self._claims
        if core.device.capturing():
            return self._then(int(wrong[0]), "a capture is under way, so it was not read back")
        try:
            for at in wrong.tolist():
                if not self._gone(at):
                    look_closer(core, int(claims.ranges.array[at]), int(claims.subject[at]))
        except LawViolation as violation:
            return str(violation)
        at = int(wrong[0])
        if self._gone(at):
            return self._then(at, "its request is gone by now")
        return self._then(at, "it reads right by now, so somebody wrote it meanwhile")

    def _gone(self, at: int) -> bool:
        """Whether the request that a range was about is gone; the map is always there."""
        row = self._claims.subject[at]
        of_map = self._claims.ranges.array[at] == MAP
        return not of_map and bool(self._core.ledger.handle[row] != self._handles[at])

    def _then(self, at: int, now: str) -> str:
        claims, core = self._claims, self._core
        name = name_of(core.device, int(claims.ranges.array[at]), int(claims.subject[at]))
        return (
            f"{name} differed from the ledger when it was probed, at version {self._version}, "
            f"{core.log.since(self._version)} writes ago; {now}"
        )


def check_tables(core: Core) -> Int32:
    """Compare all tables with the ledger now, and wait for the device to look.

    Returns:
        Rows of which pages were left out, since a staged step has yet to write them, int32.

    Raises:
        LawViolation: as `Probe.result`.
        WrongState: a stream is being captured.
    """
    device = core.device
    if device.capturing():
        raise WrongState(
            "check(device=True) waits for the GPU, and a stream is being captured: check outside "
            "of the capture"
        )
    device.finish_replays()
    left_out = Probe(core).result()
    if left_out.size:
        rows = left_out.astype(np.int64)
        laws.check_table(core.ledger, device, rows, device.unwritten())
    return left_out
