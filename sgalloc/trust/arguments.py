"""Reads the arguments of a call back out of a journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.prefix import Match
from sgalloc.trust.records import Cursor, JournalError
from sgalloc.trust.verbs import Form, Verb

_ROW_MASK = (1 << 32) - 1


class Arguments:
    """What the calls of one journal were given, in the forms in which verbs take it.

    Args:
        page_size: slots in a page.

    Attributes:
        batches: handles of each batch, int64, by the number of its record.
        matches: what each match has found in the run again, by the number of its record.
        rows: the rows that the call which was read last names, int64.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.batches: dict[int, Int64] = {}
        self.matches: dict[int, Match] = {}
        self.rows: Int64 = np.empty(0, np.int64)

    def read(self, verb: Verb, cursor: Cursor, event: Any) -> dict[str, Any]:
        """The arguments of a call of ``verb`` by name, ``event`` for one that there was.

        Raises:
            JournalError: the record cannot be read.
        """
        self.rows = np.empty(0, np.int64)
        found = {}
        for argument in verb.arguments:
            if argument.form is Form.EVENT:
                found[argument.name] = event if cursor.flag() else None
            elif argument.form is not None:
                try:
                    found[argument.name] = _READERS[argument.form](self, cursor)
                except JournalError:
                    raise
                except (ValueError, TypeError, OverflowError) as error:
                    raise cursor.wrong(f"{argument.name} cannot be read ({error})") from None
        return found

    def _handles(self, cursor: Cursor) -> Int64:
        if cursor.choice(2):
            found = cursor.ints()
        else:
            number = cursor.varint()
            if number not in self.batches:
                raise cursor.wrong(f"record {number} is no batch before it")
            found = self.batches[number]
        self.rows = found & _ROW_MASK
        return found

    def _counts(self, cursor: Cursor) -> int | Int64 | None:
        form = cursor.choice(3)
        if form == 2:
            return None
        return cursor.ints() if form else cursor.varint()

    def _number(self, cursor: Cursor) -> int:
        return cursor.signed()

    def _flag(self, cursor: Cursor) -> bool:
        return cursor.flag()

    def _name(self, cursor: Cursor) -> Any:
        form = cursor.choice(4)
        if not form:
            return None
        if form == 3:
            return cursor.signed()
        read = cursor.text()
        return read if form == 2 else read.decode("utf-8", "surrogatepass")

    def _matches(self, cursor: Cursor) -> Any:
        form = cursor.choice(3)
        if not form:
            return None
        if form == 1:
            return self._match_of(cursor, cursor.varint())
        return [self._match_of(cursor, number) for number in cursor.ints().tolist()]

    def _match_of(self, cursor: Cursor, number: int) -> Match | None:
        if not number:
            return None
        if number not in self.matches:
            raise cursor.wrong(f"record {number} is no match before it")
        return self.matches[number]

    def _prompt(self, cursor: Cursor) -> Int64:
        """One token, over and over, for each distinct page: only whole pages are compared."""
        return cursor.words(cursor.varint()).view(np.int64).repeat(self._page_size)

    def _prompts(self, cursor: Cursor) -> Any:
        if not cursor.flag():
            return None
        return [self._prompt(cursor) if cursor.flag() else None for _ in range(cursor.varint())]

    def _positions(self, cursor: Cursor) -> list[Int64]:
        lens, positions = cursor.ints(), cursor.ints()
        return np.split(positions, lens.cumsum()[:-1]) if lens.size else []

    def _times(self, cursor: Cursor) -> Any:
        try:
            return json.loads(cursor.text())
        except ValueError:
            raise cursor.wrong("its points in time are no JSON") from None

    def _plan(self, cursor: Cursor) -> tuple[dict[str, Any], bool]:
        given: dict[str, Any] = {}
        rows = []
        for name in ("extend", "decode", "reserve"):
            if cursor.flag():
                given[name] = (self._handles(cursor), self._counts(cursor))
                rows.append(self.rows)
        if rows:
            self.rows = np.concatenate(rows)
        given["evict_window"] = cursor.flag()
        given["logical_only"] = cursor.flag()
        return given, cursor.flag()

    def _ids(self, cursor: Cursor) -> Int64:
        return cursor.ints()


_READERS: dict[Form, Callable[[Arguments, Cursor], Any]] = {
    form: getattr(Arguments, f"_{form.name.lower()}") for form in Form if form is not Form.EVENT
}
