"""The verbs of disaggregated serving: a decode node receives KV that remote nodes write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgalloc import transfer
from sgalloc.giving_back import GivingBack
from sgalloc.holdings import counted
from sgalloc.inputs import Int64, counts, int64_array, shown, whole_number
from sgalloc.ledger import NO_ROWS
from sgalloc.pins import Transfer
from sgalloc.prefix import Match

_INT64 = (-(1 << 63), (1 << 63) - 1)


class Receiving(GivingBack):
    """What `KVAllocator` does for requests whose KV is written by others."""

    @counted
    def preallocate(
        self,
        lengths: Any,
        writers: Any = 1,
        prefix: Any = None,
        deadline: Any = None,
        window_tail: Any = None,
        logical_only: bool = False,
    ) -> Int64:
        """Rows and pages for requests to be received; their handles, int64 ``(n,)``.

        All of them or none. Pages that a remote writer fills are pinned until every writer
        0..``writers - 1`` has said `acknowledge`; from then on the request is live, with C =
        its length, even where nothing was left to receive. Until then C is its prefix match;
        `pages` (with ``stop=`` the length), `slots`, `rows` and `allocated` answer, and
        growing, committing, trimming, planning or publishing it is `WrongState`. `release` of
        it is an abort. Page ids may be sent once ``receiving(handle).ready`` is done.

        Args:
            lengths: tokens of each request, those of its prefix match included.
            writers: how many have to acknowledge, an int or one per request, at least 1.
            prefix: of ``prefix.match``: one match for all, or one (or None) per request. Its
                pages are locked and shared as by `open_with_prefix`; the request is in the
                namespace of its match.
            deadline: when `reclaim` may take it back, in a unit of the caller's: a number for
                all, or one (or None) per request; None for never.
            window_tail: with a window group, the last tokens alone that get window pages, an
                int or one per request; what is before them is whole pages.
            logical_only: with a sparse allocator, take pages of the logical group alone.

        Raises:
            OutOfRows, RowTooNarrow, OutOfPages: they do not all fit. Cached pages may be
                evicted for them.
            StalePlan: a page of a match was evicted since.
            ValueError: a length below its match.
            WrongState: a stream is being captured.
        """
        wanted = int64_array(lengths, "lengths")
        n = wanted.size
        counts(wanted, n, "lengths")
        number = np.broadcast_to(counts(writers, n, "writers"), n)
        if number.size and number.min() < 1:
            raise ValueError(
                f"writers must be at least 1, got {number.min()}: a request that nobody writes is "
                "opened with open or open_with_prefix"
            )
        matches, deadlines = _matches(prefix, n), _deadlines(deadline, n)
        if not isinstance(logical_only, bool):
            raise TypeError(f"logical_only must be True or False, got {shown(logical_only)}")
        if not n:
            return NO_ROWS.copy()
        if self._core.side is None and (window_tail is not None or logical_only):
            name, maker = ("logical_only", "sparse") if logical_only else ("window_tail", "window")
            raise ValueError(
                f"{name}= is for a second group of pages: make the allocator with {maker}="
            )
        tail = None if window_tail is None else counts(window_tail, n, "window_tail")
        return transfer.preallocate(
            self._core, wanted, number, matches, deadlines, tail, logical_only
        )

    @counted
    def acknowledge(self, handle: Any, writer: Any) -> bool:
        """``writer`` will not write the pages of ``handle`` any more.

        Late, double and unknown ones change nothing and raise nothing.

        Args:
            handle: one handle of `preallocate`, also of a request aborted since.
            writer: 0..``writers - 1``.

        Returns:
            Whether it counted.
        """
        named = whole_number(handle, "handle", *_INT64, meaning="a handle of preallocate")
        who = whole_number(writer, "writer", *_INT64, meaning="the number of the writer")
        return transfer.acknowledge(self._core, named, who)

    @counted
    def abort(self, x: Any, force: bool = False, after: Any = None) -> None:
        """End requests in any state. Stale handles and second aborts change nothing.

        A live request is released. One that is being received is closed; its pages, its row
        and its lock on the prefix come back once every writer has acknowledged, or at the
        first `reclaim` past its deadline.

        Args:
            x: a batch, handles or a handle.
            force: take back at once what remote writers may still write, for an engine that
                knows them to be dead. It also ends the wait of requests aborted before.
            after: an event of this node; everything waits in quarantine until it is done, too.
        """
        if not isinstance(force, bool):
            raise TypeError(f"force must be True or False, got {shown(force)}: pass a bool")
        transfer.abort(self._core, x, force, after)

    @counted
    def reclaim(self, now: Any) -> Int64:
        """Abort and take back every request to be received whose deadline is ``now`` or before.

        Also takes back those that were aborted before and waited. One without a deadline is
        never taken.

        Args:
            now: an int or a float, in the unit of the deadlines.

        Returns:
            The handles of all that came back, int64, in order of preallocation.
        """
        return transfer.reclaim(self._core, _instant(now, "now"))

    def receiving(self, handle: Any) -> Transfer | None:
        """How far the filling of ``handle`` is; None where no writer is waited for (any more).

        Args:
            handle: one handle of `preallocate`.
        """
        named = whole_number(handle, "handle", *_INT64, meaning="a handle of preallocate")
        pin = self._core.pins.by_handle.get(named)
        return None if pin is None else pin.snapshot()


def _matches(prefix: Any, n: int) -> list[Match | None]:
    if prefix is None or isinstance(prefix, Match):
        return [prefix] * n
    if not isinstance(prefix, Sequence) or isinstance(prefix, (str, bytes)):
        raise TypeError(
            f"prefix takes a match of prefix.match, or one per request, got {shown(prefix)}"
        )
    for match in prefix:
        if match is not None and not isinstance(match, Match):
            raise TypeError(f"prefix takes matches of prefix.match, or None, got {shown(match)}")
    if len(prefix) != n:
        raise ValueError(
            f"prefix has {len(prefix)} matches for {n} requests: pass one for all, or {n}"
        )
    return list(prefix)


def _deadlines(deadline: Any, n: int) -> list[int | float | None]:
    if isinstance(deadline, np.ndarray):
        # Not tolist(), which makes plain ints of spans of time.
        deadline = list(deadline) if deadline.ndim else deadline[()]
    if not isinstance(deadline, (list, tuple)):
        return [None if deadline is None else _instant(deadline, "deadline")] * n
    if len(deadline) != n:
        raise ValueError(
            f"deadline has {len(deadline)} numbers for {n} requests: pass one for all, or {n}"
        )
    return [
        None if when is None else _instant(when, f"deadline[{at}]")
        for at, when in enumerate(deadline)
    ]


def _instant(value: Any, name: str) -> int | float:
    """``value`` as a point in time.

    Raises:
        TypeError: neither an int nor a float.
        ValueError: NaN.
    """
    odd = isinstance(value, (bool, np.timedelta64))
    if isinstance(value, (int, np.integer)) and not odd:
        return int(value)
    if not isinstance(value, (float, np.floating)):
        raise TypeError(f"{name} must be an int or a float, got {shown(value)}: pass a number")
    if value != value:
        raise ValueError(f"{name} must be a point in time, got nan: pass a number")
    return float(value)
