"""The file of a journal, and what is written into it besides calls."""

from __future__ import annotations

import logging
import os
import weakref
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.core import Core
from sgalloc.inputs import Int64
from sgalloc.trust.last_calls import LastCalls
from sgalloc.trust.records import MAGIC, VERSION, JournalError, framed

FLUSH_BYTES = 1 << 16
DIGEST_EVERY = 1024
_HEAD_IDS = 256
_log = logging.getLogger("sgalloc.journal")


class Sink:
    """A new file that bytes are appended to, from the process that made it alone.

    Args:
        path: where; there must be no file yet.

    Attributes:
        pending: what `flush` will write.

    Raises:
        JournalError: it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self.path = os.path.abspath(os.fspath(path))
            self._file = os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise JournalError(
                f"journal={path!s} is there already, and a journal is never written over: name "
                "another file"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise JournalError(f"journal={path!s} cannot be made ({reason})") from None
        self._process = os.getpid()
        self.pending = bytearray()

    def flush(self) -> None:
        """Hand all to the operating system.

        Raises:
            OSError: it does not take all of it.
        """
        data = memoryview(bytes(self.pending))
        self.pending.clear()
        if self._file < 0 or os.getpid() != self._process:
            return
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Flush and close; a second time does nothing."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            file, self._file = self._file, -1
            os.close(file)


class PageHashes:
    """Keyed hashes of whole pages of tokens: equal ones tell that pages are equal, and no more.

    The key is drawn anew for each journal and is never written.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        drawn = np.frombuffer(os.urandom(8 * (page_size + 2)), np.uint64) | np.uint64(1)
        self._first, self._last = drawn[:1], drawn[1:2]
        self._places = drawn[2:]

    def __call__(self, tokens: Int64) -> NDArray[np.uint64]:
        """The hashes of the whole pages of ``tokens``, uint64 ``(n,)``."""
        pages = tokens.size // self._size
        words = tokens[: pages * self._size].astype(np.uint64).reshape(pages, self._size)
        words = words * self._first
        words ^= words >> np.uint64(32)
        words *= self._places
        hashes: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
        for shift in (29, 32):
            hashes ^= hashes >> np.uint64(shift)
            hashes = hashes * self._last
        hashes ^= hashes >> np.uint64(31)
        return hashes


class Log:
    """A journal that is being written.

    A fault of the disk ends the journal and leaves the allocator alone: it is logged once, and
    `close` raises it.

    Args:
        path: a file that is not there yet.

    Attributes:
        calls: calls written so far.
        number: of the next record.
        broken: what has ended the journal early, or None.
        last: the last calls, by number of their records.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._sink = Sink(path)
        self._check = 0
        self.path = self._sink.path
        self.calls = 0
        self.number = 0
        self.broken: Exception | None = None
        self.open = True
        self.last = LastCalls(f" in journal {self.path}")
        # At the end of the interpreter, or of the allocator, whatever is in memory is written.
        self._closing = weakref.finalize(self, _close_quietly, self._sink)
        self._sink.pending += MAGIC + bytes((VERSION,))

    def append(self, kind: int, payload: bytes) -> int:
        """Write one record; its number."""
        number = self.number
        record, self._check = framed(kind, payload, self._check)
        self.number = number + 1
        pending = self._sink.pending
        pending += record
        if len(pending) >= FLUSH_BYTES:
            self.flush()
        return number

    def flush(self) -> None:
        """Hand all to the operating system."""
        if self.open:
            try:
                self._sink.flush()
            except OSError as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the journal early, because of ``error``."""
        self.open = False
        self.broken = error
        self._closing()
        _log.error(
            "journal %s ends before record %d, the allocator goes on without it: %s",
            self.path,
            self.number,
            error,
        )

    def close(self) -> None:
        """Write what is left and close the file.

        Raises:
            JournalError: the journal had ended early.
        """
        if self.open:
            self.flush()
            self.open = False
            self._closing()
        if self.broken is not None:
            raise JournalError(
                f"journal {self.path} ends early ({self.broken}): calls after record "
                f"{self.number - 1} are not in it, and the last ones before may be missing"
            )


def _close_quietly(sink: Sink) -> None:
    try:
        sink.close()
    except OSError as error:
        _log.error("journal %s was not written to its end: %s", sink.path, error)


def config_of(alloc: Any, window: Any, sparse: Any, prefix_cache: bool) -> dict[str, Any]:
    """How ``alloc`` was made, as plain values."""
    found: dict[str, Any] = {
        "num_pages": alloc.num_pages,
        "page_size": alloc.page_size,
        "max_requests": alloc.max_requests,
        "row_width": alloc.row_width,
        "prefix_cache": prefix_cache,
        "device": alloc.device,
    }
    if window is not None:
        names = ("tokens", "num_pages", "slot_map", "evict_every")
        found["window"] = {name: getattr(window, name) for name in names}
    if sparse is not None:
        ratio = sparse.ratio
        found["sparse"] = {
            "ratio": str(ratio) if isinstance(ratio, Fraction) else ratio,
            "device_buffer": sparse.device_buffer,
            "draft_scratch": sparse.draft_scratch,
        }
    return found


def state_digest(core: Core, whole: bool) -> bytes:
    """Eight bytes that differ where two allocators do: who holds how much, and what is free.

    Args:
        core: the allocator's parts.
        whole: all page ids and the whole order of free ones, in time linear in pages; else the
            last page of each request and the next free ones alone.
    """
    ledger = core.ledger
    rows = ledger.live()
    allocated = ledger.allocated.take(rows)
    parts: list[NDArray[Any]] = [
        ledger.handle.take(rows),
        ledger.committed.take(rows),
        allocated,
        ledger.decode_steps.take(rows),
        ledger.shared.take(rows),
    ]
    pages = allocated // ledger.page_size
    first = np.zeros_like(pages) if whole else np.maximum(pages - 1, 0)
    parts.append(ledger.page_range(rows, first, pages)[1])
    pools = [core.pool] if core.side is None else [core.pool, core.side.pool]
    for pool in pools:
        parts.append(np.array((pool.free, pool.waiting, pool.pinned), np.int64))
        parts.append(pool.free_ids() if whole else pool.head(min(pool.free, _HEAD_IDS)))
    if core.side is not None:
        beside, ids = core.side.held(rows)
        parts.append(np.array([ids.size], np.int64))
        if whole:
            parts += [beside, ids]
    tree = core.tree
    if tree is not None:
        cached = (tree.cached, tree.evictable, tree.side_cached, tree.side_evictable)
        parts.append(np.array(cached, np.int64))
    if whole:
        parts.append(ledger.free_row_ids())
    found = blake2b(digest_size=8)
    for part in parts:
        found.update(part.size.to_bytes(8, "little"))
        found.update(np.ascontiguousarray(part).tobytes())
    return found.digest()
