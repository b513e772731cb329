"""Poison for debug mode: what no request owns holds a number that no slot and no page has.

`POISON` is -559038737, 0xDEADBEEF as int32: whoever reads past an extent, or a row that was given
back, gets an index that fails loudly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sgalloc.inputs import Int64

if TYPE_CHECKING:
    from sgalloc.device.cpu import CpuDevice

POISON = -559038737


class Table(NamedTuple):
    """A table with rows, or some rows of one.

    Attributes:
        name: as messages have it.
        entries: int32 ``(rows, width)``.
        tokens: of one entry.
    """

    name: str
    entries: Any
    tokens: int


class Block(NamedTuple):
    """Entries of a table that poison is to be put into; at least one.

    Attributes:
        entries: the table.
        rows: ``[rows[0], rows[1])``.
        columns: ``[columns[0], columns[1])``.
    """

    entries: Any
    rows: tuple[int, int]
    columns: tuple[int, int]


class Poisoner(Protocol):
    """Puts poison into the tables of one device."""

    @property
    def at_once(self) -> bool:
        """Whether every write comes behind all readers, whoever asks for it."""

    def write(self, rows: Int64, start: Int64, stop: Int64, after: Any = None) -> bool:
        """Poison positions ``[start, stop)`` of each row in every table, as a step would.

        Args:
            rows: int64 ``(n,)``, ascending.
            start, stop: tokens, int64 ``(n,)``; starts are page edges.
            after: a CUDA event that the write waits for, or None.

        Returns:
            False while a stream is being captured: nothing was written.
        """

    def wait(self) -> None:
        """Let the host wait for all who read or write the tables."""

    def read(self, rows: Int64) -> list[Table]:
        """Host copies of whole rows of every table, behind all that was written."""


class CpuPoisoner:
    """Poison in NumPy tables, written at once."""

    at_once = True

    def __init__(self, device: CpuDevice, page_size: int) -> None:
        self._tables = tables_of(device, page_size)

    def write(self, rows: Int64, start: Int64, stop: Int64, after: Any = None) -> bool:
        """See `Poisoner.write`."""
        for block in blocks(self._tables, rows, start, stop):
            block.entries[slice(*block.rows), slice(*block.columns)] = POISON
        return True

    def wait(self) -> None:
        """There is nobody to wait for."""

    def read(self, rows: Int64) -> list[Table]:
        """See `Poisoner.read`."""
        return [table._replace(entries=table.entries[rows]) for table in self._tables]


def tables_of(device: Any, page_size: int) -> list[Table]:
    """The tables of ``device`` that have rows."""
    tables = [
        Table("req_to_token", device.table, 1),
        Table("page_table", device.page_table, page_size),
        Table("window_table", device.side_table, 1),
    ]
    return [table for table in tables if table.entries is not None]


def blocks(tables: list[Table], rows: Int64, start: Int64, stop: Int64) -> Iterator[Block]:
    """Positions ``[start, stop)`` of ascending ``rows``: rows that are next to each other, and have
    the same positions, in one block.
    """
    for table in tables:
        width = table.entries.shape[1]
        first = (start // table.tokens).tolist()
        last = (-(-stop // table.tokens)).clip(max=width).tolist()
        runs: list[list[int]] = []
        for row, low, high in zip(rows.tolist(), first, last, strict=True):
            if runs and runs[-1][1:] == [row, low, high]:
                runs[-1][1] += 1
            elif low < high:
                runs.append([row, row + 1, low, high])
        for begin, end, low, high in runs:
            yield Block(table.entries, (begin, end), (low, high))
