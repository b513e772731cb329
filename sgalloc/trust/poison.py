"""Where poison has to be: what no request owns of the tables with rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.core import Core
from sgalloc.device.poisoning import POISON
from sgalloc.errors import LawViolation
from sgalloc.inputs import Int64

# Entries of a table that a check looks at together, and those that one behind a call looks at.
_ENTRIES_AT_ONCE = 1 << 22
_ENTRIES_A_CALL = 1 << 16


class Poison:
    """Follows the extents of an allocator's rows, and keeps poison in all entries past them.

    A row that shrinks, or closes, is poisoned as it would be used again. What waits behind an
    event: when it comes back. The rest: at once, where that is behind its readers for certain;
    elsewhere with the next step that writes, behind whoever that step waits for. Row 0 is padding
    and stays 0.

    Args:
        core: the allocator's parts, which are looked at between its calls.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        rows, width = core.ledger.max_requests + 1, core.ledger.row_width
        self._poisoner = core.device.poisoner()
        self._from: Int64 = np.full(rows, width, np.int64)
        """Entries from here on hold poison, tokens."""
        self._from[0] = 0
        self._loose = np.zeros(rows, np.bool_)
        """Rows that a graph of the caller's may write at each of its replays."""
        self._waited = np.zeros(rows, np.bool_)
        """Rows that an event kept from being poisoned."""
        self._waiting: list[tuple[list[object], Int64]] = []
        self._turn = 0
        self.spread(writing=True)

    def shrunk(self, rows: Int64, entries: list[object]) -> None:
        """Note that ``rows`` shrank in a call whose pages wait as ``entries`` of the quarantine."""
        if rows.size and entries:
            self._waiting.append((entries, rows))

    def captured(self, rows: Int64) -> None:
        """Note that ``rows`` changed while a stream was captured: no poison stays in them."""
        self._loose[rows] = True

    def spread(self, writing: bool = False, after: Any = None) -> None:
        """Poison what has become free; nothing while a stream is captured.

        Args:
            writing: whether a step has just come behind all readers of what is free.
            after: the event that it waited for, or None.
        """
        allocated = self._core.ledger.allocated
        np.maximum(self._from, allocated, out=self._from)
        exempt = self._exempt()
        free = (allocated < self._from) & ~exempt
        if not (writing or self._poisoner.at_once):
            free &= self._waited
        self._waited |= exempt
        rows = free.nonzero()[0]
        if rows.size and self._poisoner.write(rows, allocated[rows], self._from[rows], after):
            self._from[rows] = allocated[rows]
            self._waited[rows] = False

    def check(self, rows: Int64 | None = None) -> None:
        """Prove that nobody wrote past an extent, or into a row that is not his.

        This waits for all readers, so what is free is poisoned here, too.

        Args:
            rows: of a large table a few of these alone, and a few others in turn; None for all.

        Raises:
            LawViolation: naming the entry, its value, and the row.
        """
        self._poisoner.wait()
        self.spread(writing=True)
        looked = ~self._exempt()
        if rows is not None:
            looked &= self._some(rows)
        rows = looked.nonzero()[0]
        ledger = self._core.ledger
        for some in np.array_split(rows, -(-rows.size * ledger.row_width // _ENTRIES_AT_ONCE) or 1):
            for name, entries, tokens in self._poisoner.read(some):
                first = -(-self._from[some] // tokens)
                wrong = entries != POISON
                wrong &= np.arange(entries.shape[1]) >= first[:, None]
                if not wrong.any():
                    continue
                at, column = np.argwhere(wrong)[0].tolist()
                row = int(some[at])
                held = ledger.allocated[row]
                whose = f"{held} tokens" if ledger.handle[row] else "a row that nobody holds"
                raise LawViolation(
                    f"{name}[{row}, {column}] is {entries[at, column]} on the device, written "
                    f"past the extent of {whose}: poison ({POISON}) was there, and no call of "
                    "this allocator took it away"
                )

    def _some(self, rows: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """As many of ``rows``, and as many next in turn, as a call looks at; bool."""
        count = self._from.size
        most = min(count, -(-_ENTRIES_A_CALL // self._core.ledger.row_width))
        some = np.zeros(count, np.bool_)
        some[rows[rows < count][:most]] = True
        some[np.arange(self._turn, self._turn + most) % count] = True
        self._turn = (self._turn + most) % count
        return some

    def _exempt(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Rows that may still be read, or written, by others, and the padding row; bool."""
        core = self._core
        exempt = self._loose.copy()
        exempt[0] = True
        exempt[core.quarantine.row_ids()] = True
        exempt[core.pins.row_ids()] = True
        if self._waiting:
            there = set(map(id, core.quarantine.entries))
            self._waiting = [
                (entries, rows)
                for entries, rows in self._waiting
                if not there.isdisjoint(map(id, entries))
            ]
            for _, rows in self._waiting:
                exempt[rows] = True
        return exempt
