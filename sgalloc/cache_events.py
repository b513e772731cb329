"""Which pages enter and leave the prefix cache, told to whoever routes requests by prefix.

The events are those that vLLM and SGLang publish, by their names and fields, so that a router that
understands theirs needs no other code. They are collected here and handed out once a step; how
they travel is the engine's matter. A verb notes what it did; the hashing is left to `drain`. An
allocator that nobody follows pays nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from sgalloc.caching import checked_namespace
from sgalloc.errors import WrongState
from sgalloc.inputs import Int64, int64_array, shown, whole_number
from sgalloc.ledger import concatenate
from sgalloc.nodes import Node, Victim
from sgalloc.pages import Int32
from sgalloc.prefix import RadixTree
from sgalloc.wrapping import Wraps

_Hashes: TypeAlias = NDArray[np.uint64]
_BYTES = 8
_MOST = (1 << 31) - 1
_TOKEN = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages that entered, one behind the other.

    Attributes:
        block_hashes: of each page, 64 bits, in the order of the tokens.
        parent_block_hash: of the page before them; None at the beginning of a prompt.
        token_ids: of these pages; empty if they were not asked for.
        block_size: tokens of a page.
        namespace: whose they are.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    namespace: Hashable = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that left.

    Attributes:
        block_hashes: of each.
    """

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing of this allocator is cached any more."""


_FOLLOWED: WeakSet[RadixTree] = WeakSet()

CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Stored(NamedTuple):
    """Pages that entered; ``parent`` is the page before them, 0 for none."""

    pages: Int32
    parent: int
    tokens: Int64
    namespace: Hashable


class CacheEvents:
    """What `follow` gives.

    Attributes:
        lost: how often so many events waited that all were let go; the next `drain` then tells
            of everything that is cached, behind an `AllBlocksCleared`.
    """

    def __init__(self, alloc: Any, tokens: bool = True, limit: int = 65536) -> None:
        core = getattr(alloc, "_core", None)
        if core is None:
            raise TypeError(f"follow takes a KVAllocator, got {shown(alloc)}")
        if not isinstance(tokens, bool):
            raise TypeError(f"tokens must be True or False, got {shown(tokens)}")
        self._limit = whole_number(limit, "limit", 1, _MOST)
        prefix = alloc.prefix  # says what to do where there is none
        self._tree: RadixTree = core.tree
        self._owner = core.owner
        if self._tree in _FOLLOWED:
            raise WrongState("this prefix cache is followed already: close() that first")
        self._tokens = tokens
        self._size: int = core.ledger.page_size
        self._hash: _Hashes = np.zeros(core.pool.num_pages + 1, np.uint64)
        # What entered and what left, in order; hashed when it is drained, so that verbs need not.
        self._waiting: list[_Stored | Int32] = []
        # Whether the next drain begins anew with all that is cached then.
        self._anew = True
        self.lost = 0
        self._open = True
        self._wraps = Wraps()
        for target, method, around in (
            (self._tree, "insert", self._inserting),
            (self._tree, "evict", self._evicting),
            (prefix, "clear", self._clearing),
        ):
            self._wraps.put(target, method, around(getattr(target, method)))
        _FOLLOWED.add(self._tree)

    def drain(self) -> list[CacheEvent]:
        """What happened since the last call, in order; removals that follow each other are one.

        Raises:
            WrongState: a thread that does not own the allocator asks.
        """
        self._owner.check()
        events: list[CacheEvent] = []
        waiting, self._waiting = self._waiting, []
        if self._anew:
            self._anew = False
            events.append(AllBlocksCleared())
            waiting = self._all()
        gone: list[_Hashes] = []
        for one in waiting:
            if isinstance(one, np.ndarray):
                gone.append(self._hash[one])
                continue
            if gone:
                events.append(_removed(gone))
                gone = []
            events.append(self._stored(*one))
        if gone:
            events.append(_removed(gone))
        return events

    def close(self) -> None:
        """Follow no longer; what waits can still be drained."""
        if self._open:
            self._open = False
            self._wraps.undo()
            _FOLLOWED.discard(self._tree)

    # -- around the cache --------------------------------------------------------------------

    def _inserting(self, insert: Any) -> Any:
        @wraps(insert)
        def call(name: Hashable, tokens: Int64, pages: Int32, *sides: Any) -> Any:
            node, matched = found = insert(name, tokens, pages, *sides)
            if matched < pages.size and self._telling():
                self._waiting.append(_entered(node, name))
            return found

        return call

    def _evicting(self, evict: Any) -> Any:
        @wraps(evict)
        def call(victims: list[Victim]) -> None:
            pages = concatenate([victim.pages for victim in victims], np.int32)
            evict(victims)
            if pages.size and self._telling():
                self._waiting.append(pages)

        return call

    def _clearing(self, clear: Any) -> Any:
        @wraps(clear)
        def call() -> int:
            count: int = clear()
            if count and not self._tree.cached and self._open:
                # That says all that is still to be told.
                self._waiting, self._anew = [], True
            return count

        return call

    # -- inside ------------------------------------------------------------------------------

    def _telling(self) -> bool:
        """Whether an event is to be kept."""
        if self._anew or not self._open:
            return False
        if len(self._waiting) < self._limit:
            return True
        self.lost += 1
        self._waiting, self._anew = [], True
        return False

    def _stored(self, pages: Int32, parent: int, tokens: Int64, name: Hashable) -> BlockStored:
        """Tell of pages whose parent was told of."""
        before = int(self._hash[parent]) if parent else None
        hashes = _chained(tokens, self._size, before, name)
        self._hash[pages] = hashes
        ids = tokens.tolist() if self._tokens else []
        return BlockStored(hashes.tolist(), before, ids, self._size, name)

    def _all(self) -> list[_Stored | Int32]:
        """All that is cached, parents first."""
        found: list[_Stored | Int32] = []
        level = [(node, name) for name, node in self._tree.tops()]
        while level:
            found += [_entered(node, name) for node, name in level]
            level = [(child, name) for node, name in level for child in node.children.values()]
        return found


def _entered(node: Node, name: Hashable) -> _Stored:
    """The pages of a node; the tree replaces these arrays, and never writes them."""
    above = node.parent
    assert above is not None
    parent = above.pages.item(-1) if above.pages.size else 0
    return _Stored(node.pages, parent, node.tokens, name)


def follow(alloc: Any, *, tokens: bool = True, limit: int = 65536) -> CacheEvents:
    """Collect what enters and leaves the prefix cache of ``alloc`` from now on.

    The first `CacheEvents.drain` begins with `AllBlocksCleared` and all that is cached then, so
    that a router forgets what it knew of a worker that was started again. A page that is stored
    can be matched at once. In an allocator with a window the events tell of the main group alone:
    a match also needs window pages, so it may be shorter than what is stored.

    Args:
        alloc: an allocator with a prefix cache.
        tokens: whether `BlockStored` carries the token ids.
        limit: most events that may wait for `CacheEvents.drain`.

    Raises:
        TypeError, ValueError: no allocator, none with a prefix cache, a limit below 1.
        WrongState: it is followed already.
    """
    return CacheEvents(alloc, tokens, limit)


def page_hashes(tokens: Any, page_size: int, namespace: Any = None) -> list[int]:
    """The hashes of the whole pages of a prompt, as the events have them: for a router.

    A hash is the first 64 bits of BLAKE2b over the hash of the page before it (8 bytes, little
    endian; that of the namespace on the first page, nothing without one) and its tokens (int64,
    little endian), read as a little-endian number.

    Args:
        tokens: token ids, flat.
        page_size: tokens of a page.
        namespace: whose prefix it is.
    """
    size = whole_number(page_size, "page_size", 1, _MOST)
    ids = int64_array(tokens, "tokens")
    whole = np.ascontiguousarray(ids[: ids.size // size * size])
    hashes: list[int] = _chained(whole, size, None, checked_namespace(namespace)).tolist()
    return hashes


def _chained(tokens: Int64, size: int, parent: int | None, namespace: Hashable) -> _Hashes:
    data = tokens.astype(_TOKEN, copy=False).tobytes()
    before = _seed(namespace) if parent is None else parent.to_bytes(_BYTES, "little")
    found = []
    step = _TOKEN.itemsize * size
    for at in range(0, len(data), step):
        before = blake2b(before + data[at : at + step], digest_size=_BYTES).digest()
        found.append(before)
    return np.frombuffer(b"".join(found), "<u8").astype(np.uint64, copy=False)


def _removed(hashes: list[_Hashes]) -> BlockRemoved:
    return BlockRemoved(np.concatenate(hashes).tolist())


def _seed(namespace: Hashable) -> bytes:
    """What stands before the first page, by kind and value of the namespace."""
    if namespace is None:
        return b""
    if isinstance(namespace, str):
        name = b"s" + namespace.encode("utf-8", "surrogatepass")
    elif isinstance(namespace, bytes):
        name = b"b" + namespace
    else:
        name = b"i" + str(namespace).encode()
    return blake2b(name, digest_size=_BYTES).digest()
