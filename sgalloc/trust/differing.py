"""Where the journals of two allocators that should have made the same calls part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from sgalloc.inputs import Int64
from sgalloc.trust.arguments import Arguments
from sgalloc.trust.records import (
    ARGUMENTS,
    BATCH,
    CONFIG,
    POLLED,
    REFUSED,
    Cursor,
    Reader,
    Record,
    unpacked_bits,
)
from sgalloc.trust.verbs import BY_KIND, Form, Verb

_NAMES = {0: "the configuration", 1: "a batch", 2: "a return behind events", 3: "a digest"}
_HASHED = (Form.PROMPT, Form.PROMPTS)


class Difference(NamedTuple):
    """The first record in which two journals differ.

    Attributes:
        record: its number.
        one, other: what each of them has there, in words; ``"nothing"`` past its end.
    """

    record: int
    one: str
    other: str


def first_difference(
    one: str | os.PathLike[str], other: str | os.PathLike[str]
) -> Difference | None:
    """The first record in which two journals differ; None where they are the same calls.

    The hashes of pages have another key in each journal. So it is compared which pages are equal
    to which earlier ones.

    Args:
        one, other: the journals.

    Raises:
        JournalError: one of them cannot be read.
    """
    pairs = zip_longest(_comparable(one), _comparable(other))
    for number, (here, there) in enumerate(pairs):
        if here is None or there is None or here[1] != there[1]:
            return Difference(number, _words(here), _words(there))
    return None


def _comparable(path: str | os.PathLike[str]) -> Iterator[tuple[Record, Any]]:
    """Each record of a journal, and what of it is the same in another one of the same calls."""
    given = Arguments(1)
    numbers: dict[int, int] = {}
    for record in Reader(path):
        verb = BY_KIND.get(record.kind)
        if record.kind == CONFIG:
            config = json.loads(record.payload)
            yield record, {key: value for key, value in config.items() if key != "device"}
        elif verb is not None and any(a.form in _HASHED for a in verb.arguments):
            yield record, (record.kind, _call(verb, Cursor(record), given, numbers))
        else:
            if record.kind == BATCH:
                given.batches[record.number] = Cursor(record).ints()
            yield record, (record.kind, record.payload)


def _call(verb: Verb, cursor: Cursor, given: Arguments, numbers: dict[int, int]) -> list[Any]:
    flags = cursor.choice(8)
    found: list[Any] = [flags, unpacked_bits(cursor) if flags & POLLED else None]
    found.append(cursor.text() if flags & REFUSED else None)
    if not flags & ARGUMENTS:
        return found
    read = given.read(verb, cursor, True)
    for argument in verb.arguments:
        value = read[argument.name]
        if argument.form is Form.PROMPT:
            value = _numbered(value, numbers)
        elif argument.form is Form.PROMPTS and value is not None:
            value = [None if one is None else _numbered(one, numbers) for one in value]
        elif argument.form is Form.HANDLES:
            value = value.tolist()
        found.append(value)
    return [*found, cursor.rest()]


def _numbered(hashes: Int64, numbers: dict[int, int]) -> list[int]:
    """Each hash as the place among all distinct ones at which it came first."""
    return [numbers.setdefault(one, len(numbers)) for one in hashes.tolist()]


def _words(found: tuple[Record, Any] | None) -> str:
    if found is None:
        return "nothing"
    kind = found[0].kind
    if kind not in BY_KIND:
        return _NAMES.get(kind, "the close")
    refused = ", refused" if found[0].payload[0] & REFUSED else ""
    return BY_KIND[kind].name + refused
