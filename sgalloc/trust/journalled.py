"""Lets an allocator write each call that changes its ledger into a journal."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np

from sgalloc._version import __version__
from sgalloc.compacting import read_accepted
from sgalloc.core import Core
from sgalloc.errors import AllocError, DeviceFailed, LawViolation, StalePlan, WrongState
from sgalloc.inputs import Int64, int64_array, token_counts, token_sequences
from sgalloc.ledger import Batch, names_one
from sgalloc.plan import Plan
from sgalloc.prefix import Match
from sgalloc.trust.journal import DIGEST_EVERY, Log, PageHashes, state_digest
from sgalloc.trust.records import (
    ARGUMENTS,
    BATCH,
    CLOSED,
    CONFIG,
    DIGEST,
    POLLED,
    REFUSED,
    SETTLED,
    ints,
    packed_bits,
    signed,
    text,
    varint,
)
from sgalloc.trust.verbs import VERBS, Form, Verb

_ROW_MASK = (1 << 32) - 1
_BATCHES = 16
_INT64 = np.dtype(np.int64)
_Writer: TypeAlias = tuple[int, str, Any, Callable[[Any], bytes]]


class Planned(Plan):
    """A plan that knows which call made it.

    Attributes:
        call: the arguments of that call, as a journal writes them.
    """

    __slots__ = ("call",)
    call: bytes


class Found(Match):
    """A match that knows its record.

    Attributes:
        number: of the record.
    """

    __slots__ = ("number",)
    number: int


class Journalled:
    """The journal of one allocator.

    Args:
        path: a file that is not there yet.
        config: how the allocator was made, as plain values.

    Raises:
        JournalError: the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        self.log = Log(path)
        self._polls: list[bool] = []
        self._batches: OrderedDict[int, tuple[Batch, bytes]] = OrderedDict()
        self._rows: Int64 | None = None
        self._single = False
        named = {"sgalloc": __version__, "digest_every": DIGEST_EVERY, **config}
        self.log.append(CONFIG, json.dumps(named).encode())

    def wrap(self, alloc: Any, core: Core) -> None:
        """Let every verb of ``alloc`` that changes the ledger be written."""
        self._core = core
        self._free, self._next = core.pool.free, 1
        self._side_free = 0 if core.side is None else core.side.pool.free
        self._hashes = PageHashes(core.ledger.page_size)
        for verb in VERBS.values():
            target = core.prefix if verb.of_cache else alloc
            if target is not None:
                method = getattr(target, verb.attribute)
                setattr(target, verb.attribute, self._noted(verb, method))
        alloc._apply_through = self._noted(VERBS["apply"], _returning_plan(alloc._apply_through))
        alloc.plan = self._remembering(alloc.plan)
        alloc.check = self._explaining(alloc.check)
        alloc.probe = self._explaining_later(alloc.probe)
        quarantine: Any = core.quarantine
        quarantine.pending = self._polling(quarantine.pending)
        quarantine.settle = self._settling(quarantine.settle)

    def close(self) -> None:
        """Write a last digest and close the file. Raises as `Log.close`."""
        if self.log.open:
            self._digest(whole=True)
            self.log.append(CLOSED, varint(self.log.calls))
        self.log.close()

    # -- around the methods ----------------------------------------------------------------

    def _noted(self, verb: Verb, method: Callable[..., Any]) -> Callable[..., Any]:
        log, polls, pool = self.log, self._polls, self._core.pool
        ids = pool._stack
        side = None if self._core.side is None else self._core.side.pool
        writers, kind, called = self._writers(verb), verb.kind, verb.name
        ring = log.last.ring
        numbered, listed = verb.answer is Form.NUMBER, verb.answer is Form.IDS
        lists, matches = verb.name == "open_with_prefix", verb.name == "match"
        owner = self._core.owner

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A thread that is refused has no part in the journal either.
            if not log.open or (get_ident() != owner.thread and not owner.mine()):
                return method(*args, **kwargs)
            if polls:
                polls.clear()
            if lists and args:
                args = (_listed(args[0]), *args[1:])
            elif lists:
                kwargs = {name: _listed(value) for name, value in kwargs.items()}
            # Before the call, which may write what it was given: ``out`` may be the same memory.
            parts, problem, self._rows = [_PLAIN], None, None
            try:
                given = len(args)
                for at, name, default, write in writers:
                    parts.append(write(args[at] if at < given else kwargs.get(name, default)))
            except Exception as error:
                problem = error
            rows = self._rows
            try:
                result = method(*args, **kwargs)
            except BaseException as refusal:
                self._refused(verb, None if problem is not None else parts, rows, refusal)
                raise
            try:
                if problem is not None:
                    raise problem
                if polls:
                    parts[0] = _POLLED + packed_bits(polls)
                if numbered:
                    parts.append(signed(verb.says(result)))
                elif listed:
                    parts.append(ints(result))
                    if rows is None:
                        rows = result & _ROW_MASK
                # How many pages are free, and which is next, as changes since the last call.
                free = pool.free
                following = ids.item(free - 1) if free else 0
                if free == self._free and following == self._next:
                    parts.append(_UNCHANGED)
                else:
                    parts.append(signed(free - self._free) + signed(following - self._next))
                    self._free, self._next = free, following
                if side is not None:
                    parts.append(signed(side.free - self._side_free))
                    self._side_free = side.free
                number = log.append(kind, b"".join(parts))
                ring.append((number, called, rows, None))
                log.calls = calls = log.calls + 1
                if not calls % DIGEST_EVERY:
                    self._digest(whole=False)
                return _found(result, number) if matches else result
            except Exception as error:
                # The call went through; that it could not be written is no matter of the caller.
                log.fail(error)
                return result

        return call

    def _remembering(self, plan: Callable[..., Plan]) -> Callable[..., Plan]:
        names = ("extend", "decode", "reserve", "evict_window", "logical_only")

        @wraps(plan)
        def call(*args: Any, **kwargs: Any) -> Plan:
            made = plan(*args, **kwargs)
            if self.log.open and isinstance(made, Planned):
                try:
                    given = dict(zip(names, args, strict=False)) | kwargs
                    made.call = self._parts(given)
                except Exception as error:
                    self.log.fail(error)
            return made

        return call

    def _polling(self, pending: Callable[[Any], Any]) -> Callable[[Any], Any]:
        polls = self._polls

        def call(after: Any) -> Any:
            event = pending(after)
            if after is not None:
                polls.append(event is not None)
            return event

        return call

    def _settling(self, settle: Callable[[], None]) -> Callable[[], None]:
        quarantine, log = self._core.quarantine, self.log

        def call() -> None:
            before = quarantine.entries
            settle()
            after = quarantine.entries
            if len(after) != len(before) and log.open:
                kept = set(map(id, after))
                gone = [at for at, entry in enumerate(before) if id(entry) not in kept]
                log.append(SETTLED, ints(np.array(gone, np.int64)))

        return call

    def _explaining(self, check: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(check)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return check(*args, **kwargs)
            except LawViolation as violation:
                self.log.flush()
                violation.told = self._history(str(violation))
                raise

        return call

    def _explaining_later(self, probe: Callable[..., Any]) -> Callable[..., Any]:
        def explain(problem: str) -> str:
            self.log.flush()
            return problem + self._history(problem)

        @wraps(probe)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = probe(*args, **kwargs)
            made.explain = explain
            return made

        return call

    # -- records ---------------------------------------------------------------------------

    def _refused(
        self,
        verb: Verb,
        parts: list[bytes] | None,
        rows: Int64 | None,
        refusal: BaseException,
    ) -> None:
        """Write a call that has changed nothing; without ``parts`` the refusal alone is kept."""
        log, polls = self.log, self._polls
        if not log.open:
            return
        flags = REFUSED | (POLLED if polls else 0)
        body = []
        if parts is not None and self._decided_by_the_ledger(verb, refusal):
            flags |= ARGUMENTS
            body = parts[1:]
        try:
            name = text(type(refusal).__name__.encode())
            head = bytes((flags,)) + (packed_bits(polls) if polls else b"") + name
            number = log.append(verb.kind, head + b"".join(body))
            log.last.ring.append((number, f"refused {verb.name}", rows, None))
            log.calls += 1
            if not log.calls % DIGEST_EVERY:
                self._digest(whole=False)
        except Exception as error:
            log.fail(error)

    def _decided_by_the_ledger(self, verb: Verb, refusal: BaseException) -> bool:
        """Whether a run again on a CPU, without ``out`` and events, has to be refused, too."""
        if not isinstance(refusal, AllocError) or isinstance(refusal, LawViolation | DeviceFailed):
            return False
        if verb.name == "apply" and type(refusal) is StalePlan:
            return False  # which plan it was cannot be told by its parts
        if isinstance(refusal, WrongState) and refusal.of_device:
            return False  # an event that a run again knows nothing of
        device = self._core.device
        # Steps staged for a graph, and captures, are known to the device alone.
        alone = bool(device.updates) or device.capturing()
        return not (alone and type(refusal) is WrongState)

    def _digest(self, whole: bool) -> None:
        level = b"\x01" if whole else b"\x00"
        self.log.append(DIGEST, level + state_digest(self._core, whole))
        self.log.flush()

    def _history(self, problem: str) -> str:
        """The last calls on the rows that have, or had, what ``problem`` names."""
        known = self.log.last.told(problem, self._core)
        return known or f" (journal {self.log.path}, record {self.log.number} is next)"

    # -- arguments -------------------------------------------------------------------------

    def _writers(self, verb: Verb) -> list[_Writer]:
        """Place, name, default and writer of each argument that is written."""
        return [
            (at, argument.name, argument.default, getattr(self, f"_{argument.form.name.lower()}"))
            for at, argument in enumerate(verb.arguments)
            if argument.form is not None
        ]

    def _handles(self, x: Any) -> bytes:
        if type(x) is Batch:
            self._rows, self._single = x.rows, False
            known = self._batches.get(id(x))
            return known[1] if known is not None else self._batch(x)
        named = int64_array(x, "handles")
        self._rows, self._single = named & _ROW_MASK, names_one(x)
        return b"\x01" + ints(named)

    def _batch(self, x: Batch) -> bytes:
        """A batch is written once, and known by the number of its record from then on."""
        code = b"\x00" + varint(self.log.append(BATCH, ints(x.handles)))
        self._batches[id(x)] = (x, code)  # held, so that its id stays its own
        if len(self._batches) > _BATCHES:
            self._batches.popitem(last=False)
        return code

    def _counts(self, value: Any) -> bytes:
        if type(value) is int:
            return b"\x00" + varint(value)
        if type(value) is np.ndarray and value.dtype == _INT64 and value.ndim == 1:
            return b"\x01" + ints(value)
        if value is None:
            return b"\x02"
        read = token_counts(value, "lengths")
        return b"\x00" + varint(read) if isinstance(read, int) else b"\x01" + ints(read.ravel())

    def _number(self, value: Any) -> bytes:
        return signed(int(value))

    def _flag(self, value: Any) -> bytes:
        return b"\x01" if value else b"\x00"

    def _event(self, value: Any) -> bytes:
        return b"\x00" if value is None else b"\x01"

    def _name(self, value: Any) -> bytes:
        if value is None:
            return b"\x00"
        if isinstance(value, str):
            return b"\x01" + text(str(value).encode("utf-8", "surrogatepass"))
        if isinstance(value, bytes):
            return b"\x02" + text(bytes(value))
        return b"\x03" + signed(int(value))

    def _matches(self, value: Any) -> bytes:
        """None, one match for all, or one (or None) a request."""
        if value is None:
            return b"\x00"
        if isinstance(value, Match):
            return b"\x01" + varint(value.number)  # type: ignore[attr-defined]
        numbers = [0 if match is None else match.number for match in value]
        return b"\x02" + ints(np.array(numbers, np.int64))

    def _prompt(self, tokens: Any) -> bytes:
        hashes = self._hashes(int64_array(tokens, "tokens"))
        return varint(hashes.size) + hashes.astype("<u8").tobytes()

    def _prompts(self, tokens: Any) -> bytes:
        if tokens is None or self._core.prefix is None:
            return b"\x00"
        n = 0 if self._rows is None else self._rows.size
        known = token_sequences(tokens, n, self._single)
        parts = [b"\x01" + varint(n)]
        for ids in known:
            parts.append(b"\x00" if ids is None else b"\x01" + self._prompt(ids))
        return b"".join(parts)

    def _positions(self, accepted: Any) -> bytes:
        n = 0 if self._rows is None else self._rows.size
        positions, lens = read_accepted(accepted, n, self._single)
        return ints(lens) + ints(positions)

    def _times(self, value: Any) -> bytes:
        return text(json.dumps(value, default=_plain).encode())

    def _plan(self, plan: Any) -> bytes:
        # A plan that another verb has applied already goes through again if it does nothing.
        call = getattr(plan, "call", _NO_PARTS)
        # A step is counted for all, or for what the parts themselves decode.
        return call + self._flag(plan.decoding is plan.rows)

    def _ids(self, value: Any) -> bytes:
        return ints(int64_array(value, "lengths"))

    def _parts(self, given: dict[str, Any]) -> bytes:
        parts = []
        for name in ("extend", "decode", "reserve"):
            part = given.get(name)
            if part is None:
                parts.append(b"\x00")
            else:
                parts += [b"\x01", self._handles(part[0]), self._counts(part[1])]
        parts += [self._flag(given.get(name)) for name in ("evict_window", "logical_only")]
        return b"".join(parts)


_NO_PARTS = bytes(5)
_UNCHANGED = bytes(2)
_PLAIN = bytes((ARGUMENTS,))
_POLLED = bytes((ARGUMENTS | POLLED,))


def _returning_plan(staged: Callable[[Plan, Any], None]) -> Callable[[Plan, Any], Plan]:
    """A plan that is staged for a graph, as a call that returns it."""

    def call(plan: Plan, writer: Any) -> Plan:
        staged(plan, writer)
        return plan

    return call


def _found(match: Match, number: int) -> Found:
    found = Found(match._tree, match._node, match.length, match.pages, match.namespace)
    found.number = number
    return found


def _listed(matches: Any) -> Any:
    """An iterator of matches as a list, so that it can be read twice."""
    if isinstance(matches, (Match, list, tuple)) or not isinstance(matches, Iterable):
        return matches
    return list(matches)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value.item()
