"""Lets the parts of one allocator tell what they change, and leaves those of others alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgalloc.groups.sparse_parts import MovingPart
from sgalloc.inputs import Int64
from sgalloc.ledger import Ledger
from sgalloc.pages import Int32, PagePool


class Moves(Protocol):
    """Hears of pages that change hands."""

    def taken(self, ids: Int32) -> None:
        """``ids`` are free no more."""

    def moved(self, ids: Int32) -> None:
        """``ids`` have another holder."""


def follow_ledger(ledger: Ledger, low: Int64) -> None:
    """Let ``ledger`` keep ``low``: leading pages of each row that it left as they were.

    What only grows leaves all as it was, so that a step pays nothing.
    """
    base: Any = type(ledger)

    class Followed(base):  # type: ignore[misc]
        """A ledger that tells of page lists which become shorter, or others."""

        __slots__ = ()

        def share(self, row: int, count: int, first: int, twins: Int32) -> None:
            low[row] = min(int(low[row]), first)
            super().share(row, count, first, twins)

        def cut(self, rows: Int64, committed: Int64, pages: Int64) -> None:
            low[rows] = np.minimum(low[rows], pages)
            super().cut(rows, committed, pages)

        def close(self, rows: Int64, waiting: bool) -> None:
            low[rows] = 0
            super().close(rows, waiting)

    ledger.__class__ = Followed


def follow_pool(pool: PagePool, moves: Moves) -> None:
    """Let ``pool`` tell ``moves`` of pages that change hands."""
    base: Any = type(pool)

    class Followed(base):  # type: ignore[misc]
        """A pool that tells which pages change hands."""

        __slots__ = ()

        def take(self, ids: Int32, holder: int | Int64) -> None:
            super().take(ids, holder)
            moves.taken(ids)

        def give(self, ids: Int32, holder: int | Int64) -> None:
            super().give(ids, holder)
            moves.moved(ids)

        def hand_over(self, ids: Int32, holder: int | Int64, to: int) -> None:
            super().hand_over(ids, holder, to)
            moves.moved(ids)

    pool.__class__ = Followed


def follow_side(side: Any, changed: NDArray[np.bool_]) -> None:
    """Let a second group flag in ``changed`` the rows whose lists of pages may be others."""

    def rows_of_part(part: Any, *_: Any) -> Any:
        # One that only moves what is mapped leaves the lists alone.
        return slice(0) if isinstance(part, MovingPart) else part.rows

    def first(rows: Any, *_: Any) -> Any:
        return rows

    for name, which in (
        ("applied", rows_of_part),
        ("thinned", rows_of_part),
        ("cut", first),
        ("close", first),
        ("adopt", first),
        ("share", first),
    ):
        method = getattr(side, name, None)
        if method is not None:
            setattr(side, name, _flagging(method, which, changed))


def follow_tree(tree: Any, note: Callable[..., None]) -> None:
    """Let ``tree`` tell ``note`` of nodes: something changed on the way to them, or they went."""
    insert, evict, ending_at = tree.insert, tree.evict, tree._ending_at

    def inserted(*args: Any) -> Any:
        node, matched = insert(*args)
        note(node)
        return node, matched

    def evicted(victims: Any) -> None:
        # What is above a victim may have been noted by way of the victim alone.
        ways = [node for victim in victims for node in (victim.node, victim.node.parent)]
        evict(victims)
        note(*ways)

    def ended(node: Any, pages: int) -> Any:
        upper = ending_at(node, pages)
        note(node)
        return upper

    tree.insert, tree.evict, tree._ending_at = inserted, evicted, ended
    for name in ("touch", "lock", "unlock", "take_over"):
        setattr(tree, name, _noting(getattr(tree, name), note))


def _flagging(
    method: Callable[..., Any], which: Callable[..., Any], changed: NDArray[np.bool_]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        changed[which(*args)] = True
        return method(*args)

    return call


def _noting(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def call(node: Any, *args: Any) -> Any:
        found = method(node, *args)
        note(node)
        return found

    return call
