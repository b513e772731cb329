"""What of a journal is the same in that of another rank which made the same calls."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.trust.arguments import Arguments
from sgalloc.trust.records import (
    BATCH,
    CONFIG,
    POLLED,
    REFUSED,
    SETTLED,
    Cursor,
    Reader,
    Record,
    unpacked_bits,
)
from sgalloc.trust.verbs import BY_KIND, Form, Verb

_BYTES = 8
_HASHED = (Form.PROMPT, Form.PROMPTS)
_SAID = {
    "count": "of {} requests",
    "lengths": "to {}",
    "tokens": "by {}",
    "reserve": "by {}",
    "accepted": "by {}",
    "upto": "to {}",
    "handle": "of handle {}",
    "writer": "by writer {}",
    "namespace": "in namespace {!r}",
}
_SHOWN = 4


class Step(NamedTuple):
    """A record that changes what an allocator decides.

    Attributes:
        number: of the record.
        settled: whether it took in what waited behind events, and is no call.
        asked: hash of what the call was given, 8 bytes.
        answered: hash of what it did with the pages, 8 bytes.
        words: what it was.
    """

    number: int
    settled: bool
    asked: bytes
    answered: bytes
    words: str


class Trace:
    """The steps of one journal, chained: two chains agree up to the first step that differs.

    Args:
        path: of the journal.

    Raises:
        JournalError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._chain = array("Q")
        before = b""
        for step in _Steps(path):
            before = blake2b(before + step.asked + step.answered, digest_size=_BYTES).digest()
            self._chain.append(int.from_bytes(before, "little"))

    def __len__(self) -> int:
        return len(self._chain)

    def upto(self, at: int) -> int:
        """A hash of the steps 0..``at``."""
        return self._chain[at]

    def step(self, at: int) -> Step | None:
        """Step ``at``, read again; None past the end."""
        return next((step for n, step in enumerate(_Steps(self._path, at)) if n == at), None)


class _Steps:
    """Reads the steps of one journal; words are made only for the one that is asked for."""

    def __init__(self, path: str | os.PathLike[str], wanted: int = -1) -> None:
        self._reader = Reader(path)
        self._wanted = wanted
        self._found = 0
        self._given = Arguments(1)
        self._pages: dict[int, int] = {}
        self._folded: dict[int, bytes] = {}
        self._beside = False
        self._levels = (0, 0, 0)

    def __iter__(self) -> Iterator[Step]:
        for record in self._reader:
            step = self._step(record)
            if step is not None:
                yield step
                self._found += 1

    def _step(self, record: Record) -> Step | None:
        verb = BY_KIND.get(record.kind)
        cursor = Cursor(record)
        if verb is not None:
            return self._call(record, verb, cursor)
        if record.kind == BATCH:
            handles = self._given.batches[record.number] = cursor.ints()
            # Held by the reader of arguments, so that its id stays its own.
            self._folded[id(handles)] = blake2b(_folded(handles), digest_size=_BYTES).digest()
        elif record.kind == SETTLED:
            gone = cursor.ints()
            return self._made(record, _folded(gone), b"", lambda: _taken_in(gone))
        elif record.kind == CONFIG:
            config = json.loads(record.payload)
            self._beside = "window" in config or "sparse" in config
            # Where the table lives, and who wrote the journal, decides nothing.
            for name in ("device", "sgalloc", "digest_every"):
                config.pop(name, None)
            text = json.dumps(config, sort_keys=True)
            return self._made(record, text.encode(), b"", lambda: f"the configuration {text}")
        return None

    def _call(self, record: Record, verb: Verb, cursor: Cursor) -> Step | None:
        flags = cursor.choice(8)
        pending = sum(unpacked_bits(cursor)) if flags & POLLED else 0
        if flags & REFUSED:
            return None
        read = self._given.read(verb, cursor, None)
        answer: Any = None
        if verb.answer is Form.NUMBER:
            answer = cursor.signed()
        elif verb.answer is Form.IDS:
            answer = cursor.ints()
        free, following, beside = self._levels
        free, following = free + cursor.signed(), following + cursor.signed()
        if self._beside:
            beside += cursor.signed()
        # As what they are and not as changes, which calls that are left out may have had part in.
        self._levels = (free, following, beside)
        if verb.name == "match":
            self._given.matches[record.number] = (read["namespace"], answer)  # type: ignore[assignment]
        if _did_nothing(verb, answer):
            return None
        if verb.name == "reclaim":
            read = {}  # when it was asked says less than what came back
        parts = [b"%d %d" % (verb.kind, pending)]
        for argument in verb.arguments:
            if argument.name in read and argument.form is not Form.EVENT:
                parts.append(self._argument(argument.form, read[argument.name]))
        return self._made(
            record,
            b"".join(parts),
            _folded(answer) + repr(self._levels).encode(),
            lambda: _words(verb, read, self._given.rows, pending),
        )

    def _argument(self, form: Form | None, value: Any) -> bytes:
        if value is None or isinstance(value, int):
            return b"I%d" % value if value is not None else b"N"
        if form in _HASHED:
            # Keys differ: it counts which pages are equal to which earlier ones.
            prompts = [value] if form is Form.PROMPT else value
            value = [None if one is None else self._numbered(one) for one in prompts]
        elif form is Form.COUNTS:
            value = _alike(value)
        elif form is Form.HANDLES:
            return self._handles(value)
        elif form is Form.PLAN:
            parts, counts_step = value
            pairs = {key: part for key, part in parts.items() if isinstance(part, tuple)}
            flags = [part for part in parts.values() if not isinstance(part, tuple)]
            folded = [(key, self._handles(x), _alike(n)) for key, (x, n) in pairs.items()]
            value = (folded, flags, counts_step)
        return _folded(value)

    def _handles(self, handles: Int64) -> bytes:
        known = self._folded.get(id(handles))
        return blake2b(_folded(handles), digest_size=_BYTES).digest() if known is None else known

    def _numbered(self, hashes: Int64) -> Int64:
        numbers = self._pages
        return np.array([numbers.setdefault(one, len(numbers)) for one in hashes.tolist()], int)

    def _made(self, record: Record, asked: bytes, answered: bytes, words: Any) -> Step:
        return Step(
            record.number,
            record.kind == SETTLED,
            blake2b(asked, digest_size=_BYTES).digest(),
            blake2b(answered, digest_size=_BYTES).digest(),
            words() if self._found == self._wanted else "",
        )


def _did_nothing(verb: Verb, answer: Any) -> bool:
    """Whether the call said itself that it left everything as it was."""
    if verb.name in ("match", "acknowledge"):
        return not answer
    return verb.name == "reclaim" and not answer.size


def _alike(numbers: Any) -> Any:
    """One number for all where all are the same, as a caller may have said it either way."""
    if isinstance(numbers, np.ndarray) and numbers.size and numbers[0] == numbers[-1]:
        return int(numbers[0]) if (numbers == numbers[0]).all() else numbers
    return numbers


def _folded(value: Any) -> bytes:
    """``value`` as bytes that no other one has."""
    if isinstance(value, int):
        return b"I%d" % value
    if isinstance(value, np.ndarray):
        return b"A%d:" % value.size + np.ascontiguousarray(value, "<i8").tobytes()
    if isinstance(value, bytes):
        return b"B%d:" % len(value) + value
    if isinstance(value, (list, tuple)):
        return b"L%d:" % len(value) + b"".join(map(_folded, value))
    text = repr(value).encode("utf-8", "surrogatepass")
    return b"T%d:" % len(text) + text


# -- words ---------------------------------------------------------------------------------


def _taken_in(gone: Int64) -> str:
    which = ", ".join(map(str, gone[:_SHOWN].tolist())) + (", ..." if gone.size > _SHOWN else "")
    return f"took in what waited behind event{'s' * (gone.size != 1)} {which}"


def _words(verb: Verb, read: dict[str, Any], rows: Int64, pending: int) -> str:
    parts = [verb.name]
    if rows.size or (verb.arguments[:1] and verb.arguments[0].form is Form.HANDLES):
        parts.append(f"of {_counted(rows.size, 'request')}")
    for argument in verb.arguments:
        value = read.get(argument.name)
        if value is None or argument.form in (Form.HANDLES, Form.MATCHES):
            continue
        if argument.form is Form.FLAG:
            parts += [f"with {argument.name}"] if value else []
        elif argument.form is Form.NAME:
            parts.append(_SAID[argument.name].format(value))
        elif argument.form is Form.PROMPT:
            parts.append(f"of {_counted(value.size, 'page')} of tokens")
        elif argument.form is Form.PROMPTS:
            sizes = np.array([0 if one is None else one.size for one in value], np.int64)
            parts.append(f"with {_listed(_alike(sizes))} pages of tokens")
        elif argument.form is Form.PLAN:
            named = [f"{name} by {_listed(n)}" for name, n in _amounts(value[0])]
            parts.append(f"({', '.join(named)})")
        elif argument.form is Form.POSITIONS:
            sizes = np.array([one.size for one in value], np.int64)
            parts.append(f"of {_listed(_alike(sizes))} tokens")
        else:
            how = _SAID.get(argument.name, f"with {argument.name} {{}}")
            parts.append(how.format(_listed(_alike(value))))
    if pending:
        parts.append("behind an event that was not done")
    return " ".join(parts)


def _amounts(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, _alike(part[1])) for name, part in parts.items() if isinstance(part, tuple)]


def _listed(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    shown = ", ".join(map(str, value[:_SHOWN].tolist()))
    return f"[{shown}{', ...' if value.size > _SHOWN else ''}]"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
