"""The bytes of a snapshot: a fixed head, a JSON header, and little-endian arrays."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import SnapshotError

MAGIC = b"SGALLOC\0"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES = 32
HEAD_BYTES = _HEAD.size + _CHECKSUM_BYTES
# Configuration, some counters and a table of some forty sections: a few thousand bytes.
MOST_HEADER = 1 << 16
_ALIGN = 8


def pack(
    header: Mapping[str, Any], sections: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]
) -> bytes:
    """The bytes of a snapshot.

    Args:
        header: what JSON can hold.
        sections: arrays by name.
        kinds: the names in order, and the dtype in which each is stored.
    """
    arrays = [np.ascontiguousarray(sections[name], kind) for name, kind in kinds.items()]
    table = [[name, kinds[name], array.size] for name, array in zip(kinds, arrays, strict=True)]
    text = json.dumps({**header, "sections": table}, separators=(",", ":")).encode()
    text += b" " * (-(HEAD_BYTES + len(text)) % _ALIGN)
    parts = [text]
    for array in arrays:
        parts += [array.tobytes(), b"\0" * (-array.nbytes % _ALIGN)]
    total = HEAD_BYTES + sum(map(len, parts))
    head = _HEAD.pack(MAGIC, VERSION, len(text), total)
    return b"".join((head, checksum(head, parts), *parts))


def checksum(head: bytes, parts: list[Any]) -> bytes:
    """BLAKE2b over the first 24 bytes and all that follows the checksum, 32 bytes."""
    hashed = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def unpack(data: Any) -> tuple[dict[str, Any], list[tuple[str, str, NDArray[Any]]]]:
    """The header, and the sections in order: name, dtype, a view of the bytes.

    Allocates nothing but the header, which is bounded.

    Raises:
        TypeError: not bytes.
        SnapshotError: what is wrong with them.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"restore takes the bytes of snapshot(), got a {type(data).__name__}")
    whole = memoryview(data)
    if whole.ndim != 1 or not whole.c_contiguous:
        raise SnapshotError("it has to be one contiguous run of bytes: pass bytes")
    whole = whole.cast("B")
    length = len(whole)
    if length < HEAD_BYTES:
        raise SnapshotError(f"it has {length} bytes, fewer than the {HEAD_BYTES} of its head")
    magic, version, size, total = _HEAD.unpack(whole[: _HEAD.size])
    if magic != MAGIC:
        raise SnapshotError(f"it begins with {magic!r}, not with {MAGIC!r}: no snapshot")
    if version != VERSION:
        raise SnapshotError(f"it has version {version}, and this release reads {VERSION}")
    if total != length:
        raise SnapshotError(f"it says it has {total} bytes, but has {length}: cut, or added to")
    body = whole[HEAD_BYTES:]
    stored = bytes(whole[_HEAD.size : HEAD_BYTES])
    if checksum(bytes(whole[: _HEAD.size]), [body]) != stored:
        raise SnapshotError("its checksum does not fit: it was altered")
    if size > min(MOST_HEADER, len(body)):
        raise SnapshotError(f"its header would have {size} bytes, of {len(body)} that follow")
    header = _parsed(bytes(body[:size]))
    return header, _sections(header.pop("sections", None), body[size:])


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise SnapshotError("its header is nested too deep") from None
    except ValueError as error:
        raise SnapshotError(f"its header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise SnapshotError(f"its header is a {type(header).__name__}, not an object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _sections(table: Any, body: memoryview) -> list[tuple[str, str, NDArray[Any]]]:
    if not isinstance(table, list):
        raise SnapshotError("its header has no table of sections")
    found, at = [], 0
    for entry in table:
        if not isinstance(entry, list) or [type(part) for part in entry] != [str, str, int]:
            raise SnapshotError(f"its table of sections has the entry {str(entry)[:60]}")
        name, kind, count = entry
        if kind not in ("|u1", "<i4", "<i8"):
            raise SnapshotError(f"section {name[:40]!r} has the unknown type {kind[:20]!r}")
        dtype = np.dtype(kind)
        size = count * dtype.itemsize
        if count < 0 or at + size > len(body):
            raise SnapshotError(
                f"section {name[:40]!r} would have {count} entries of {dtype.itemsize} bytes, but "
                f"{len(body) - at} bytes are left"
            )
        found.append((name, kind, np.frombuffer(body[at : at + size], dtype)))
        at += size + -size % _ALIGN
    if at != len(body):
        raise SnapshotError(f"its sections have {at} bytes, but {len(body)} follow its header")
    return found
