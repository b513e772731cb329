"""Runs a journal again on a CPU, with the same ids, and compares what every call says."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from sgalloc.allocator import KVAllocator
from sgalloc.core import Core
from sgalloc.errors import AllocError, LawViolation
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.inputs import Int64
from sgalloc.pages import PagePool
from sgalloc.trust.arguments import Arguments
from sgalloc.trust.journal import state_digest
from sgalloc.trust.records import (
    ARGUMENTS,
    BATCH,
    CLOSED,
    CONFIG,
    DIGEST,
    POLLED,
    REFUSED,
    SETTLED,
    Cursor,
    JournalError,
    Reader,
    Record,
    unpacked_bits,
)
from sgalloc.trust.verbs import BY_KIND, Form, Verb

_ROW_MASK = (1 << 32) - 1


class Diverged(JournalError):
    """A record that the run again contradicts.

    Attributes:
        record: its number.
    """

    def __init__(self, message: str, record: int) -> None:
        super().__init__(message)
        self.record = record


class Touch(NamedTuple):
    """A call that had to do with what is watched.

    Attributes:
        record: its number.
        verb: its name.
        rows: the rows it named, int64.
        refused: the class of its error; empty where it went through.
        holder: of the watched page afterwards, as `KVAllocator.owners` says it; None without one.
    """

    record: int
    verb: str
    rows: Int64
    refused: str
    holder: int | None


class Watch(NamedTuple):
    """What to list the last calls of.

    Attributes:
        page: a page, or None.
        row: a row, or None.
        group: the group of the page; the main one if None.
        most: how many calls.
    """

    page: int | None = None
    row: int | None = None
    group: str | None = None
    most: int = 10


class _Event:
    """Stands for an event of the journal, which alone says when it was done."""

    def __init__(self, done: bool) -> None:
        self.done = done


_PENDING, _DONE = _Event(False), _Event(True)


class Rerun:
    """A journal, run again.

    Args:
        path: of the journal.
        watch: what to list the last calls of.

    Attributes:
        alloc: the allocator, on the CPU.
        config: how it was made.
        records, calls, refused, settled, digests: how many were run, or compared, so far.
        unheard: refusals that were taken on trust, since the journal has no arguments of them
            or they do not depend on the ledger.
        touches: the last calls of what is watched, the oldest first.
        torn: bytes of a last record that was not written to its end, once all are run.
        closed: whether the journal was closed, once all are run.

    Raises:
        JournalError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], watch: Watch | None = None) -> None:
        self._reader = Reader(path)
        self._records = iter(self._reader)
        first = next(self._records, None)
        if first is None or first.kind != CONFIG:
            raise JournalError(f"{path} has no configuration: it ends before its first record")
        self.config = _config(first)
        self.alloc = _made(self.config, first)
        self._core = self.alloc._core
        self._given = Arguments(self.alloc.page_size)
        self._next = 1
        self._free = {pool.group: pool.free for pool in _pools(self._core)}
        self._answers: deque[bool] = deque()
        quarantine: Any = self._core.quarantine
        self._come_back = quarantine.settle
        quarantine.settle = lambda: None
        quarantine.pending = self._pending
        self._watch = watch or Watch()
        self._rows: Int64 = np.empty(0, np.int64)
        self._pool = self._watched_pool()
        self.touches: deque[Touch] = deque(maxlen=self._watch.most)
        self.records = 1
        self.calls = self.refused = self.settled = self.digests = self.unheard = 0
        self._record = first

    @property
    def torn(self) -> int:
        """Bytes of a last record that was not written to its end."""
        return self._reader.torn

    @property
    def size(self) -> int:
        """Bytes of the journal."""
        return self._reader.size

    @property
    def offset(self) -> int:
        """Where the record that was run last begins, in bytes."""
        return self._record.offset

    @property
    def closed(self) -> bool:
        """Whether the journal was closed."""
        return self._reader.closed

    def run(
        self,
        until: int | None = None,
        check_every: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Run all records, or those before ``until``.

        Args:
            until: number of the first record that is not run.
            check_every: check both laws, the table included, after every so many calls.
            progress: told after each call how many records were run.

        Raises:
            Diverged: naming the first record that differs.
            JournalError: a damaged record.
            LawViolation: a law does not hold.
        """
        while until is None or self.records < until:
            record = next(self._records, None)
            if record is None:
                return
            self._record = record
            if record.kind in BY_KIND:
                self._call(BY_KIND[record.kind], Cursor(record))
                self.calls += 1
                if check_every and not self.calls % check_every:
                    self._check()
                if progress is not None:
                    progress(self.records + 1)
            else:
                self._between(record)
            self.records += 1

    # -- records ---------------------------------------------------------------------------

    def _between(self, record: Record) -> None:
        cursor = Cursor(record)
        if record.kind == BATCH:
            self._given.batches[record.number] = cursor.ints()
        elif record.kind == SETTLED:
            self._settle(cursor)
        elif record.kind == DIGEST:
            whole = cursor.flag()
            if cursor.take(8) != state_digest(self._core, whole):
                raise self._differs(
                    "digest", "its digest of the state differs, though every call before went alike"
                )
            self.digests += 1
        elif record.kind == CLOSED:
            calls = cursor.varint()
            if calls != self.calls:
                raise self._differs("close", f"it counts {calls} calls, and {self.calls} were run")
        else:
            raise cursor.wrong(f"there are no records of kind {record.kind}")
        cursor.end()

    def _settle(self, cursor: Cursor) -> None:
        quarantine, gone = self._core.quarantine, cursor.ints()
        waiting = len(quarantine.entries)
        if gone.size and (int(gone.min()) < 0 or int(gone.max()) >= waiting):
            raise self._differs(
                "settle", f"entry {int(gone.max())} came back, and here {waiting} wait"
            )
        for at in gone.tolist():
            quarantine.entries[at] = quarantine.entries[at]._replace(event=_DONE)
        before = self._holder()
        self._come_back()
        self.settled += gone.size
        if self._holder() != before:
            self._touch("settle", "", True)

    def _call(self, verb: Verb, cursor: Cursor) -> None:
        flags = cursor.choice(8)
        answers = unpacked_bits(cursor) if flags & POLLED else []
        refusal = cursor.text().decode("ascii", "replace") if flags & REFUSED else ""
        self.refused += bool(refusal)
        self._rows = np.empty(0, np.int64)
        if not flags & ARGUMENTS:
            # The refusal did not depend on the ledger alone, and changed nothing.
            self.unheard += 1
            self._touch(verb.name, refusal, False)
            return
        given = self._given.read(verb, cursor, _PENDING)
        self._rows = self._given.rows
        self._answers = deque(answers)
        held = self._touching()
        before = self._holder()
        try:
            result = self._do(verb, given)
        except JournalError:
            raise
        except Exception as error:
            if type(error) is LawViolation:
                # Debug mode proves the laws after every call.
                raise self._named(error) from None
            self._heard(verb, refusal, error)
            cursor.end()
            self._touch(verb.name, refusal, held)
            return
        if refusal:
            raise self._differs(
                verb.name, f"it was refused with {refusal}, and here it went through"
            )
        self._compare(verb, cursor, result)
        if self._answers:
            raise self._differs(verb.name, f"{len(self._answers)} more events were asked than here")
        if verb.name == "match":
            self._given.matches[self._record.number] = result
        self._touch(verb.name, "", held or self._touching() or self._holder() != before)

    def _do(self, verb: Verb, given: dict[str, Any]) -> Any:
        if verb.name == "apply":
            parts, counts_step = given["plan"]
            plan = self.alloc.plan(**parts)
            if counts_step:
                plan.decoding = plan.rows
            return self.alloc.apply(plan)
        if verb.name in ("extend", "decode", "reserve"):
            del given["after"]  # what a write waits for changes nothing on the host
        target = self.alloc.prefix if verb.of_cache else self.alloc
        return getattr(target, verb.attribute)(**given)

    def _heard(self, verb: Verb, refusal: str, error: Exception) -> None:
        found = type(error).__name__
        if not refusal:
            raise self._differs(verb.name, f"it went through, and here it is {found}: {error}")
        if found != refusal:
            raise self._differs(
                verb.name, f"it was refused with {refusal}, and here with {found}: {error}"
            )

    def _compare(self, verb: Verb, cursor: Cursor, result: Any) -> None:
        if verb.answer is Form.NUMBER:
            said, found = cursor.signed(), verb.says(result)
            if said != found:
                raise self._differs(verb.name, f"it said {said}, and here {found}")
        elif verb.answer is Form.IDS:
            ids = cursor.ints()
            if not np.array_equal(ids, result):
                raise self._differs(
                    verb.name, f"it returned {_few(ids)}, and here {_few(np.asarray(result))}"
                )
            if not self._rows.size:
                self._rows = ids & _ROW_MASK
        for pool in _pools(self._core):
            left = self._free[pool.group] + cursor.signed()
            if left != pool.free:
                raise self._differs(
                    verb.name,
                    f"it left {left} pages of group '{pool.group}' free, and here {pool.free}",
                )
            self._free[pool.group] = left
            if pool is self._core.pool:
                found = int(pool.head(1)[0]) if left else 0
                self._next += cursor.signed()
                if self._next != found:
                    raise self._differs(
                        verb.name, f"page {self._next} was next to go out, and here {found}"
                    )
        cursor.end()

    def _check(self) -> None:
        try:
            self.alloc.check(device=True)
        except AllocError as violation:
            raise self._named(violation) from None

    def _named(self, violation: AllocError) -> AllocError:
        """``violation``, found behind the record of now."""
        violation.args = (f"after record {self._record.number}: {violation}",)
        violation.told = ""
        return violation

    def _pending(self, after: Any) -> Any:
        if after is None:
            return None
        if not self._answers:
            raise self._differs("event", "an event is asked here that was not asked then")
        return _PENDING if self._answers.popleft() else None

    def _differs(self, name: str, how: str) -> Diverged:
        record = self._record
        return Diverged(
            f"record {record.number} ({name}, at byte {record.offset}) differs: {how}; --until "
            f"{record.number} shows the state before it",
            record.number,
        )

    # -- watching --------------------------------------------------------------------------

    def _watched_pool(self) -> Any:
        watch, core = self._watch, self._core
        group = core.pool.group if watch.group is None else watch.group
        for pool in _pools(core):
            if pool.group != group:
                continue
            if watch.page is not None and not 1 <= watch.page <= pool.num_pages:
                raise JournalError(
                    f"page {watch.page} is not in group '{group}': it has 1..{pool.num_pages}"
                )
            if watch.row is not None and not 1 <= watch.row <= core.ledger.max_requests:
                raise JournalError(
                    f"row {watch.row} does not exist: there are 1..{core.ledger.max_requests}"
                )
            return pool
        have = " and ".join(repr(pool.group) for pool in _pools(core))
        raise JournalError(f"there is no group {group!r}: the journal has {have}")

    def _holder(self) -> int | None:
        page = self._watch.page
        return None if page is None else int(self._pool.holder[page])

    def _touching(self) -> bool:
        """Whether a row that the call names is watched, or holds the watched page."""
        watch, ledger = self._watch, self._core.ledger
        if watch.row is not None and bool((self._rows == watch.row).any()):
            return True
        if watch.page is None or self._pool is not self._core.pool:
            return False
        rows = self._rows[(self._rows > 0) & (self._rows <= ledger.max_requests)]
        return any(bool((ledger.page_list(row) == watch.page).any()) for row in rows.tolist())

    def _touch(self, verb: str, refusal: str, touched: bool) -> None:
        if touched or (self._watch.row is not None and self._touching()):
            entry = Touch(self._record.number, verb, self._rows, refusal, self._holder())
            self.touches.append(entry)


def rerun(
    path: str | os.PathLike[str],
    until: int | None = None,
    check_every: int = 0,
    watch: Watch | None = None,
) -> Rerun:
    """Run the journal ``path`` again; see `Rerun` and `Rerun.run`."""
    found = Rerun(path, watch)
    found.run(until, check_every)
    return found


def _config(record: Record) -> dict[str, Any]:
    try:
        found = json.loads(record.payload)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Cursor(record).wrong("its configuration is no JSON object")
    return found


def _made(config: dict[str, Any], record: Record) -> KVAllocator:
    try:
        window = config.get("window")
        sparse = config.get("sparse")
        if sparse is not None and isinstance(sparse["ratio"], str):
            sparse = {**sparse, "ratio": Fraction(sparse["ratio"])}
        return KVAllocator(
            config["num_pages"],
            config["page_size"],
            config["max_requests"],
            config["row_width"],
            device="cpu",
            window=None if window is None else SlidingWindow(**window),
            sparse=None if sparse is None else Sparse(**sparse),
            prefix_cache=config["prefix_cache"],
        )
    except (KeyError, TypeError, ValueError, MemoryError) as error:
        raise Cursor(record).wrong(
            f"its configuration makes no allocator ({type(error).__name__}: {error})"
        ) from None


def _pools(core: Core) -> list[PagePool]:
    return [core.pool] if core.side is None else [core.pool, core.side.pool]


def _few(ids: Int64) -> str:
    shown = ", ".join(map(str, ids[:4].tolist()))
    return f"[{shown}{', ...' if ids.size > 4 else ''}] ({ids.size})"
