"""The last calls on an allocator, and what they say of a row or a page that an error names."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import numpy as np

from sgalloc.core import Core
from sgalloc.inputs import Int64
from sgalloc.pages import Int32

_RING = 1024
_TOLD = 8
# What messages call a row, and a page id (and not the number of a page in a row).
_ROW = re.compile(r"(?:\brow |_table\[|req_to_token\[)(\d+)")
_PAGE = re.compile(r"\bpage (\d+)\b(?! of row)(?: of group '(\w+)')?")
_ENTRY = re.compile(r"\b(?:full_to_window|logical_to_device)\[(\d+)\]")

Call: TypeAlias = tuple[int, str, Int64 | None, Mapping[str, Int32] | None]
"""Number, verb, rows, and by name of the group the pages that changed hands (None: not known)."""


class LastCalls:
    """A ring of calls.

    Args:
        where: where the calls are written down, in words behind what they are about, or "".

    Attributes:
        ring: the calls, the oldest first.
    """

    def __init__(self, where: str = "") -> None:
        self.ring: deque[Call] = deque(maxlen=_RING)
        self._where = where

    def told(self, problem: str, core: Core, always: bool = False) -> str:
        """The last calls on what ``problem`` names, as the end of a message.

        Args:
            problem: the message.
            core: the allocator's parts: page lists tell which rows have, or had, a page.
            always: whether to tell the very last calls where the message names nothing.

        Returns:
            "" where there is nothing to tell.
        """
        rows, pages = _named(problem, core)
        parts = []
        wanted = set(rows.tolist())
        calls = self._in_words(partial(_named_one, rows=wanted)) if wanted else ""
        if calls:
            parts.append(f" on row {_listed(rows)}{self._where}: {calls}")
        for group, page in pages:
            calls = self._in_words(partial(_moved, group=group, page=page))
            if calls:
                parts.append(f" on page {page}: {calls}")
        if not parts and always and self.ring:
            parts.append(f"{self._where}: {self._in_words(lambda _: True)}")
        return f" (last calls{';'.join(parts)})" if parts else ""

    def _in_words(self, wanted: Callable[[Call], bool]) -> str:
        """The last calls that are ``wanted``, the newest last."""
        found: list[str] = []
        for call in reversed(self.ring):
            if len(found) == _TOLD:
                break
            if wanted(call):
                found.append(f"{call[0]} {call[1]}")
        return ", ".join(found[::-1])


def _named(problem: str, core: Core) -> tuple[Int64, list[tuple[str, int]]]:
    """The rows and the pages (with their groups) that a message is about."""
    ledger, main = core.ledger, core.pool.group
    lists = {main: ledger.pages}
    if core.side is not None:
        lists[core.side.pool.group] = core.side.pages
    pages = [(group or main, int(page)) for page, group in _PAGE.findall(problem)]
    pages += [(main, int(entry) // ledger.page_size) for entry in _ENTRY.findall(problem)]
    pages = [(group, page) for group, page in dict.fromkeys(pages) if group in lists]
    rows = [int(row) for row in _ROW.findall(problem)]
    for group, page in pages:
        # Lists are stale from A on: who had the page stands there still.
        rows += (lists[group] == page).any(axis=1).nonzero()[0].tolist()
    named = np.unique(np.array(rows, np.int64))
    return named[named > 0], pages


def _named_one(call: Call, rows: set[int]) -> bool:
    """Whether ``call`` named one of ``rows``."""
    return call[2] is not None and not rows.isdisjoint(call[2].tolist())


def _moved(call: Call, group: str, page: int) -> bool:
    """Whether ``page`` changed hands in ``call``."""
    moved = call[3]
    return moved is not None and group in moved and bool((moved[group] == page).any())


def _listed(rows: Int64) -> str:
    more = f" and {rows.size - _TOLD} more" if rows.size > _TOLD else ""
    return ", ".join(str(row) for row in rows[:_TOLD].tolist()) + more
