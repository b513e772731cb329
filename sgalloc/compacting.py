"""Compact: bring the accepted path of a tree of drafts to where the request goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sgalloc import returning
from sgalloc.core import Core
from sgalloc.errors import CommitPastExtent
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64, int64_array, on_device, shown
from sgalloc.ledger import Ledger
from sgalloc.pages import Int32

_NO_POSITION = -1


class Accepted(NamedTuple):
    """The accepted tokens of some requests.

    Attributes:
        positions: their places in the rows, request by request, int64 ``(total,)``.
        lens: how many of each request, int64 ``(n,)``.
    """

    positions: Int64
    lens: Int64


class Moves(tuple[Int32, Int32]):
    """``(src_slots, dst_slots)``, int32 ``(moved,)`` each: what has to be moved.

    Attributes:
        window: the same in slots of the window group; None without one.
    """

    window: tuple[Int32, Int32] | None = None


def read_accepted(accepted: Any, n: int, single: bool) -> Accepted:
    """What a caller passes: one sequence of positions a request.

    Args:
        accepted: sequences, or an array ``(n, most)`` with -1 at the ends of shorter rows; for a
            ``single`` request also a flat one.
        n: requests.
        single: whether the caller named one handle, not a sequence of handles.

    Raises:
        TypeError, ValueError: no integers on the host, a wrong number of sequences, or a -1
            before a position.
    """
    if not _sized(accepted) or on_device(accepted):
        raise TypeError(
            f"accepted must be one sequence of row positions per request, got {shown(accepted)}: "
            "pass a list of lists on the host"
        )
    if single and (not len(accepted) or not _sized(accepted[0])):
        accepted = [accepted]
    if len(accepted) != n:
        raise ValueError(
            f"accepted has {len(accepted)} sequences for {n} requests: pass one per request"
        )
    if not n:
        return Accepted(np.empty(0, np.int64), np.empty(0, np.int64))
    if type(accepted) is np.ndarray and accepted.ndim == 2:
        return _padded(int64_array(accepted.reshape(-1), "accepted").reshape(accepted.shape))
    if set(map(type, accepted)) <= {list, tuple}:
        flat = int64_array(list(chain.from_iterable(accepted)), "accepted")
        return Accepted(flat, np.fromiter(map(len, accepted), np.int64, n))
    parts = []
    for at, one in enumerate(accepted):
        if not _sized(one):
            raise TypeError(
                f"accepted[{at}] must be a sequence of row positions, got {shown(one)}: pass a list"
            )
        parts.append(int64_array(one, "accepted"))
    lens = np.fromiter(map(len, parts), np.int64, n)
    return Accepted(np.concatenate(parts), lens)


def moves(
    ledger: Ledger, window: Window | None, rows: Int64, accepted: Accepted
) -> tuple[Moves, Int64]:
    """Where each accepted token is and where it has to be. Nothing changes.

    Args:
        ledger: what the requests hold.
        window: what they hold of the window group, where there is one.
        rows: int64 ``(n,)``.
        accepted: their accepted tokens.

    Returns:
        The moves, tokens in place left out; and C once all are committed, int64 ``(n,)``.

    Raises:
        ValueError: a position below C, or positions that do not ascend.
        CommitPastExtent: a position at or past A.
    """
    positions, lens = accepted
    committed, allocated = ledger.committed.take(rows), ledger.allocated.take(rows)
    which = np.arange(rows.size).repeat(lens)
    below = (positions < committed.take(which)).nonzero()[0]
    if below.size:
        at = int(below[0])
        raise ValueError(
            f"accepted position {positions[at]} of row {rows[which[at]]} is below its "
            f"{committed[which[at]]} committed tokens: pass row positions from C on"
        )
    past = (positions >= allocated.take(which)).nonzero()[0]
    if past.size:
        at = int(past[0])
        raise CommitPastExtent(
            f"accepted position {positions[at]} of row {rows[which[at]]} is not below the "
            f"{allocated[which[at]]} tokens allocated: reserve before the step"
        )
    falls = ((np.diff(positions) <= 0) & (np.diff(which) == 0)).nonzero()[0]
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"accepted positions of row {rows[which[at]]} must ascend, but {positions[at + 1]} "
            f"follows {positions[at]}: pass them in the order of the tokens, each once"
        )
    first = lens.cumsum() - lens
    target = np.arange(positions.size) + (committed - first).take(which)
    moved = (target != positions).nonzero()[0]
    home = rows.take(which.take(moved)) * ledger.per_row
    source, target = positions.take(moved), target.take(moved)
    found = Moves((_slots(ledger, ledger, home, source), _slots(ledger, ledger, home, target)))
    if window is not None:
        found.window = (
            _slots(ledger, window, home, source),
            _slots(ledger, window, home, target),
        )
    return found, committed + lens


def compact(core: Core, rows: Int64, accepted: Accepted, after: Any) -> Moves:
    """Commit ``accepted``, give pages wholly past them back, and tell what has to be moved.

    Raises:
        TypeError: ``after`` cannot be polled.
        ValueError, CommitPastExtent: as `moves`.
    """
    window = core.side if isinstance(core.side, Window) else None
    found, committed = moves(core.ledger, window, rows, accepted)
    returning.trim(core, rows, committed, after, committing=True)
    return found


def _padded(accepted: Int64) -> Accepted:
    """The rows of an array, -1 at their ends left out."""
    given = accepted != _NO_POSITION
    gap = (given[:, 1:] & ~given[:, :-1]).any(axis=1).nonzero()[0]
    if gap.size:
        raise ValueError(
            f"accepted[{gap[0]}] has a position behind a -1: -1 stands at the end of a row alone"
        )
    return Accepted(accepted[given], given.sum(axis=1))


def _slots(ledger: Ledger, lists: Ledger | Window, home: Int64, positions: Int64) -> Int32:
    number, offset = np.divmod(positions, ledger.per_page)
    pages = lists.pages_flat.take(home + number).astype(np.int64)
    return (pages * ledger.per_page + offset).astype(np.int32)


def _sized(value: Any) -> bool:
    """Whether ``value`` is a sequence, array or tensor with at least one dimension."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes)
    if isinstance(value, Mapping | Set):
        return False
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "__len__")
