"""The pool of page ids: who holds each page, and which are free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import NotHeld
from sgalloc.inputs import Int64

Int32 = NDArray[np.int32]

# What `PagePool.holder` says of a page; a positive number is the row that owns it.
FREE = 0
CACHED = -1
WAITING = -2
# A cached page that a request holds; the tree knows which these are, the pool does not.
LOCKED = -3
# A remote writer may still write it.
PINNED = -4


class PagePool:
    """Ids 1..``num_pages`` of one group, as a stack.

    Taking and giving back cost the ids moved, whatever the size of the pool. The stack is
    filled so that a fresh pool hands out ascending runs, and what comes back as a run goes
    out as one.

    Attributes:
        num_pages: pages in the pool.
        free: pages that are free now.
        waiting: pages in quarantine behind an event.
        pinned: pages that a remote writer may still write.
        high_water: most pages that were ever out at once.
        holder: int64 ``(num_pages + 1,)``: `FREE`, `CACHED`, `WAITING`, `PINNED`
            or the owner's row.
    """

    __slots__ = (
        "_mark",
        "_stack",
        "free",
        "group",
        "high_water",
        "holder",
        "num_pages",
        "pinned",
        "waiting",
    )

    def __init__(self, num_pages: int, group: str = "full") -> None:
        self.group = group
        self.num_pages = num_pages
        self._stack: Int32 = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._mark: Int64 = np.zeros(num_pages + 1, np.int64)
        self.holder: Int64 = np.zeros(num_pages + 1, np.int64)
        self.free = num_pages
        self.waiting = 0
        self.pinned = 0
        self.high_water = 0

    def free_ids(self) -> Int32:
        """The free ids, int32 ``(free,)``, those handed out last first."""
        return self._stack[: self.free].copy()

    def peek(self, count: int, returning: Int32 | None = None) -> Int32:
        """The ids that ``count`` pages would get now, in order; nothing changes.

        Args:
            count: pages, at most what is free plus what returns.
            returning: ids, int32, that would be given back just before.
        """
        if returning is None or not returning.size:
            return self.head(count).copy()
        rest = count - returning.size
        if rest <= 0:
            return returning[:count]
        return np.concatenate((returning, self.head(rest)))

    def head(self, count: int) -> Int32:
        """The ids that would be handed out next, int32 ``(count,)``; a view, read at once."""
        return self._stack[self.free - count : self.free][::-1]

    def take(self, ids: Int32, holder: int | Int64) -> None:
        """Take ``ids``, which `peek` has just named, for ``holder`` (a row, or one per id)."""
        self.free -= ids.size
        # An index of NumPy's own integer type is taken several times faster than int32.
        self.holder[ids.astype(np.int64)] = holder
        out = self.num_pages - self.free
        if out > self.high_water:
            self.high_water = out

    def give(self, ids: Int32, holder: int | Int64) -> None:
        """Take ``ids`` back from ``holder``; a page it does not hold, or one twice, is refused.

        Raises:
            NotHeld: an id is out of range, named twice, or held by another; nothing changed.
        """
        if not ids.size:
            return
        self.holder[self._verified(ids, holder)] = FREE
        self._stack[self.free : self.free + ids.size] = ids[::-1]
        self.free += ids.size

    def hand_over(self, ids: Int32, holder: int | Int64, to: int) -> None:
        """Change the holder of ``ids``: to the prefix cache, or into quarantine.

        Raises:
            NotHeld: as `give`.
        """
        self.holder[self._verified(ids, holder)] = to
        if to == WAITING:
            self.waiting += ids.size

    def return_waiting(self, ids: Int32) -> None:
        """Free ``ids``, whose event is done."""
        self.give(ids, WAITING)
        self.waiting -= ids.size

    def pin(self, ids: Int32, holder: int | Int64) -> None:
        """Hand ``ids`` over from ``holder`` to remote writers."""
        self.hand_over(ids, holder, PINNED)
        self.pinned += ids.size

    def unpin(self, ids: Int32, to: int) -> None:
        """Hand ``ids``, which no remote writer writes any more, over to a row or quarantine."""
        self.hand_over(ids, PINNED, to)
        self.pinned -= ids.size

    def restore(self, free: Int32, high_water: int) -> None:
        """Let a fresh pool have ``free`` ids alone, as `free_ids` gave them; none is pinned."""
        self.free = free.size
        self._stack[: free.size] = free
        self.high_water = high_water

    def _verified(self, ids: Int32, holder: int | Int64) -> Int64:
        """``ids`` as an index, if ``holder`` holds each of them, and each stands once."""
        pages = ids.astype(np.int64)
        size = pages.size
        if not size:
            return pages
        low, high = int(pages[pages.argmin()]), int(pages[pages.argmax()])
        if low < 1 or high > self.num_pages:
            bad = low if low < 1 else high
            raise NotHeld(
                f"page {bad} is not in group '{self.group}' (1..{self.num_pages}): "
                "give back only pages that were taken"
            )
        order = np.arange(size)
        self._mark[pages] = order
        wrong = (self._mark.take(pages) != order).nonzero()[0]
        if wrong.size:
            raise NotHeld(f"page {pages[wrong[0]]} is named twice: name each page once")
        held = self.holder.take(pages)
        wrong = ((held != holder) | (held == FREE)).nonzero()[0]
        if wrong.size:
            page = int(pages[wrong[0]])
            raise NotHeld(
                f"page {page} is held by {describe_holder(int(self.holder[page]))}: "
                "only its holder can give it back"
            )
        return pages


def describe_holder(code: int) -> str:
    """In words, what a value of `PagePool.holder` stands for."""
    names = {
        FREE: "nobody (it is free)",
        CACHED: "the prefix cache",
        WAITING: "the quarantine",
        PINNED: "a remote writer",
    }
    return names.get(code, f"row {code}")
