"""Snapshots taken apart, changed, and signed again, as someone hostile would."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from host_support import Query
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


def held(name: str) -> Any:
    """Requests in every state that the configuration knows; one waits behind an event."""
    alloc, ids = make(name, 3, roomy=True), [[f * 1000 + n for n in range(60)] for f in range(4)]
    kept = alloc.open(3, "kept").tolist()
    alloc.extend(kept, [30, 31, 20])
    alloc.decode(kept)
    if alloc.has_window:
        alloc.evict_window(kept)
        alloc.trim(kept[1], 4)  # below its frontier, inside a page
    alloc.trim(kept[2], 11)
    match = None
    if alloc._core.prefix is not None:
        cached = alloc.open(2).tolist()
        alloc.extend(cached, 24)
        alloc.release(cached, tokens=ids[:2])
        alloc.open_with_prefix(alloc.prefix.match(ids[0][:12]))
        alloc.prefix.publish(kept[2], [ids[2]])
        match = alloc.prefix.match(ids[1][:9])
    if alloc._core.tree is None and "logical" in alloc.stats().groups:
        alloc.to_sparse(kept[:2])
    first, second = alloc.preallocate([22, 20], 3, match, deadline=[None, 7]).tolist()
    alloc.acknowledge(first, 1)
    alloc.acknowledge(second, 0)
    alloc.abort(second)
    gone = alloc.open(2).tolist()
    alloc.extend(gone, 13)
    tokens = None if alloc._core.prefix is None else [ids[3], ids[3]]
    alloc.release(gone, tokens=tokens, after=Query())
    alloc.check(device=True)
    return alloc


def dumps(header: Any) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()
