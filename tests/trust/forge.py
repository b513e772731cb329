"""Snapshots taken apart, changed, and signed again, as someone hostile would."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from trust.walk import Walk, make

from sgalloc.trust import format as form

HEAD = struct.Struct("<8sIIQ")


def sign(data: bytes) -> bytes:
    """The right length and checksum, whatever the rest is."""
    magic, version, size, _ = HEAD.unpack(data[: HEAD.size])
    head = HEAD.pack(magic, version, size, len(data))
    body = data[form.HEAD_BYTES :]
    return head + form.checksum(head, [body]) + body


def with_header(text: bytes, body: bytes) -> bytes:
    text += b" " * (-(form.HEAD_BYTES + len(text)) % 8)
    head = HEAD.pack(form.MAGIC, form.VERSION, len(text), 0)
    return sign(head + b"\0" * (form.HEAD_BYTES - HEAD.size) + text + body)


class Parts:
    """A snapshot as its header and its sections, both to be changed at will."""

    def __init__(self, data: bytes) -> None:
        self.header, sections = form.unpack(data)
        self.sections = {name: array.copy() for name, _, array in sections}
        self.kinds = {name: kind for name, kind, _ in sections}

    def joined(self) -> bytes:
        return form.pack(self.header, self.sections, self.kinds)


def places(header: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a header."""
    found = [path] if path else []
    items = header.items() if isinstance(header, dict) else ()
    items = enumerate(header) if isinstance(header, list) else items
    for key, value in items:
        found += places(value, (*path, key))
    return found


def put(header: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        header = header[key]
    header[path[-1]] = value


def rich(name: str, seed: int = 3, steps: int = 120, ps: int = 3) -> Any:
    """An allocator in as many states at once as a walk reaches; nothing waits for an event."""
    best, most = None, -1
    for more in range(12):
        alloc = make(name, ps)
        walk = Walk(alloc, seed + more)
        for _ in range(steps):
            walk.step()
            if walk.random.random() < 0.1:
                walk.finish()
        walk.finish()
        alloc.settle()
        core, pins = alloc._core, alloc._core.pins
        held = [alloc._ledger.namespace, pins.by_handle, pins.aborted(), alloc._ledger.live()]
        held += [np.flatnonzero(alloc._ledger.shared), pins.nodes()]
        held += [core.tree.nodes(), core.pins.nodes()] if core.tree is not None else []
        side = core.side
        held += [side.cut_rows] if hasattr(side, "cut_rows") else []
        held += [np.flatnonzero(side.is_long)] if hasattr(side, "is_long") else []
        score = sum(len(part) > 0 for part in held)
        if score > most:
            best, most = alloc, score
    return best


def dumps(header: Any) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()
