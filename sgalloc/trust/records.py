"""The bytes of a journal: records, each with a length, a kind and checks, and what is in them."""

from __future__ import annotations

import os
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import AllocError
from sgalloc.inputs import Int64

MAGIC = b"SGALLOC journal\n"
VERSION = 1
# Kinds of records that are no calls; those of calls are numbered from FIRST_CALL on.
CONFIG, BATCH, SETTLED, DIGEST, CLOSED = range(5)
FIRST_CALL = 16
# Flags of a call.
REFUSED, ARGUMENTS, POLLED = 1, 2, 4

_HEAD = Struct("<IBH")  # length of the payload, kind, check of the five bytes before it
_START = Struct("<IB")
_CHECK = Struct("<I")
_LONGEST = (1 << 32) - 1
_SHORT = 1 << 10
_heads: dict[int, bytes] = {}  # of short records, which a steady step repeats
_SMALL = [bytes((number,)) for number in range(128)]
_BYTES = np.dtype(np.uint8)
_WORDS = np.dtype(np.uint64)
_WIDTHS: tuple[Any, ...] = (_BYTES, np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))
_LIMITS = (1 << 8, 1 << 16, 1 << 32, 1 << 64)
_BASED = 4
_WORD = (1 << 64) - 1


class JournalError(AllocError, ValueError):
    """A journal that cannot be written, read, or run again as it says."""


class Record(NamedTuple):
    """One record of a journal.

    Attributes:
        number: its place, 0 for the configuration.
        kind: what it is.
        payload: its bytes.
        offset: where it begins in the file.
    """

    number: int
    kind: int
    payload: bytes
    offset: int


# -- writing -------------------------------------------------------------------------------


def framed(kind: int, payload: bytes, before: int) -> tuple[bytes, int]:
    """A record as it stands in the file, and its check, which the next record builds on.

    Args:
        kind: what it is.
        payload: what it says.
        before: the check of the record before it, 0 for the first.
    """
    length = len(payload)
    head = _heads.get(length << 8 | kind)
    if head is None:
        head = _head(kind, length)
    check = crc32(payload, crc32(head, before))
    return head + payload + _CHECK.pack(check), check


def _head(kind: int, length: int) -> bytes:
    if length > _LONGEST:
        raise JournalError(f"a record of {length} bytes is longer than 2**32 - 1")
    head = _HEAD.pack(length, kind, crc_hqx(_START.pack(length, kind), 0))
    if length < _SHORT:
        _heads[length << 8 | kind] = head
    return head


def varint(number: int) -> bytes:
    """A number from 0 on, seven bits a byte, the low ones first."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def signed(number: int) -> bytes:
    """Any whole number, as a `varint`."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def text(value: bytes) -> bytes:
    """Some bytes behind their length."""
    return varint(len(value)) + value


def ints(values: Int64) -> bytes:
    """An int64 array ``(n,)`` in the fewest whole bytes a number, from 0 or from its least."""
    size = values.size
    if not size:
        return b"\x00"
    words = values.view(_WORDS)
    # An arg-reduction starts in a third of the time of a reduction.
    top = words.item(words.argmax())
    if top < 256:
        return varint(size) + b"\x00" + values.astype(_BYTES).tobytes()
    count = varint(size)
    if top < 1 << 32:
        width = 1 if top < 1 << 16 else 2
        return count + _SMALL[width] + values.astype(_WIDTHS[width]).tobytes()
    least = int(values[values.argmin()])
    span = int(values[values.argmax()]) - least
    width = next(at for at, limit in enumerate(_LIMITS) if span < limit)
    offsets = (words - np.uint64(least & _WORD)).astype(_WIDTHS[width])
    return count + _SMALL[_BASED + width] + signed(least) + offsets.tobytes()


# -- reading -------------------------------------------------------------------------------


class Cursor:
    """Reads one payload from front to back.

    Raises:
        JournalError: from any method, where the payload ends early or says what it cannot.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._data = record.payload
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self._at + count
        if end > len(self._data):
            raise self.wrong("it ends early")
        found = self._data[self._at : end]
        self._at = end
        return found

    def varint(self) -> int:
        """The next number from 0 on."""
        number = shift = 0
        while True:
            byte = self.take(1)[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    def signed(self) -> int:
        """The next whole number."""
        number = self.varint()
        return -(number + 1 >> 1) if number & 1 else number >> 1

    def text(self) -> bytes:
        """The next bytes that stand behind their length."""
        return self.take(self.varint())

    def flag(self) -> bool:
        """The next byte, which is 0 or 1."""
        return bool(self.choice(2))

    def choice(self, count: int) -> int:
        """The next byte, below ``count``."""
        (found,) = self.take(1)
        if found >= count:
            raise self.wrong(f"byte {self._at - 1} of its payload is {found}")
        return found

    def ints(self) -> Int64:
        """The next int64 array."""
        count = self.varint()
        if not count:
            return np.empty(0, np.int64)
        code = self.choice(2 * _BASED)
        width, least = code % _BASED, self.signed() if code >= _BASED else 0
        dtype = np.dtype(_WIDTHS[width])
        raw = np.frombuffer(self.take(count * dtype.itemsize), dtype).astype(np.uint64)
        found: Int64 = (raw + np.uint64(least & _WORD)).view(np.int64)
        return found

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words of 64 bits."""
        raw = np.frombuffer(self.take(8 * count), np.dtype("<u8"))
        return raw.astype(np.uint64)

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        """Nothing is left."""
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes are left over")

    def wrong(self, problem: str) -> JournalError:
        """What is wrong with the record."""
        record = self._record
        return JournalError(
            f"record {record.number} at byte {record.offset} cannot be read: {problem}; it was "
            "written by another version, or by hand"
        )


class Reader:
    """The records of a journal, in order, each checked before it is handed out.

    Attributes:
        torn: bytes of a last record that was not written to its end, once all are read.
        closed: whether the journal was closed, once all are read.
        size: bytes of the file.

    Raises:
        JournalError: not a journal, or another version of one; while reading, damage, naming the
            record and the byte.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.torn = 0
        self.closed = False
        self._data: mmap | bytes = b""
        try:
            with self.path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size:
                    self._data = mmap(file.fileno(), self.size, access=ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise JournalError(f"journal {self.path} cannot be read ({reason})") from None
        begin = self._data[: len(MAGIC) + 1]
        if begin[: len(MAGIC)] != MAGIC or len(begin) == len(MAGIC):
            raise JournalError(
                f"{self.path} is no journal: it does not begin with {MAGIC.decode().strip()!r}"
            )
        if begin[-1] != VERSION:
            raise JournalError(
                f"{self.path} is a journal of version {begin[-1]}, and this release reads "
                f"version {VERSION}: read it with the release that wrote it"
            )

    def __iter__(self) -> Iterator[Record]:
        number = check = 0
        offset = len(MAGIC) + 1
        while offset < self.size:
            begin = offset + _HEAD.size
            if begin > self.size:
                break
            head = self._data[offset:begin]
            length, kind, proof = _HEAD.unpack(head)
            if crc_hqx(head[: _START.size], 0) != proof:
                raise self._damaged(number, offset, offset, "the check of its length is wrong")
            end = begin + length + _CHECK.size
            if end > self.size:
                break
            payload = self._data[begin : begin + length]
            check = crc32(payload, crc32(head, check))
            if self._data[begin + length : end] != _CHECK.pack(check):
                raise self._damaged(number, offset, begin, f"its {length} bytes fail their check")
            if self.closed:
                raise self._damaged(number, offset, offset, "the journal was closed before it")
            self.closed = kind == CLOSED
            yield Record(number, kind, payload, offset)
            number += 1
            offset = end
        self.torn = self.size - offset

    def _damaged(self, number: int, offset: int, byte: int, problem: str) -> JournalError:
        return JournalError(
            f"{self.path} is damaged in record {number}, which begins at byte {offset}: {problem} "
            f"(from byte {byte} on); what is before it can be run with --until {number}"
        )


def packed_bits(bits: Sequence[bool]) -> bytes:
    """Some bits behind their number."""
    number = 0
    for at, bit in enumerate(bits):
        number |= bit << at
    return varint(len(bits)) + number.to_bytes(-(-len(bits) // 8), "little")


def unpacked_bits(cursor: Cursor) -> list[bool]:
    """What `packed_bits` has written."""
    count = cursor.varint()
    number = int.from_bytes(cursor.take(-(-count // 8)), "little")
    return [bool(number >> at & 1) for at in range(count)]
