"""Debug mode: the laws after every call, poison where nobody owns, and who touched it last.

An allocator that is not in debug mode pays nothing: what is here is put around the methods of
one allocator, as a journal is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from sgalloc.core import Core
from sgalloc.errors import AllocError, LawViolation
from sgalloc.inputs import Int64, flag, int64_array
from sgalloc.ledger import NO_ROWS, Batch
from sgalloc.pages import PagePool
from sgalloc.plan import Plan
from sgalloc.trust.frozen import frozen
from sgalloc.trust.last_calls import LastCalls
from sgalloc.trust.poison import Poison
from sgalloc.trust.verbs import VERBS

SWITCH = "SGALLOC_DEBUG"
DEVICE_EVERY = "SGALLOC_DEBUG_DEVICE_EVERY"
_ROW_MASK = (1 << 32) - 1
# They change nothing, but may refuse; some allocators have no such group.
_ASKING = (
    "batch", "rows", "committed", "allocated", "decode_index", "pages", "window_pages",
    "device_pages", "buffer_pages", "scratch_pages", "slots", "plan", "fits", "runs", "frontier",
    "snapshot",
)  # fmt: skip
_HANDLES = ("x", "plan", "handle")
# Their ``after`` is behind whoever reads what they may write: all rows and pages that are free.
_WRITING = ("extend", "decode", "reserve", "apply")
_REFUSALS = (AllocError, ValueError, TypeError)


def wanted(debug: bool | None) -> bool:
    """Whether an allocator is made in debug mode; ``debug`` of None leaves it to `SWITCH`.

    Raises:
        TypeError: ``debug`` is neither a bool nor None.
        ValueError: the environment variable is neither 1 nor 0.
    """
    if debug is not None:
        return flag(debug, "debug")
    setting = os.environ.get(SWITCH, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} is {setting!r}: set it to 1, or to 0 (or unset it) for none")
    return setting == "1"


class _Seen(NamedTuple):
    """What a call may change, before it.

    Attributes:
        handles, committed, allocated: of all rows, int64.
        holders: of each group's pages, by name of the group, int64.
        entries: what waits in quarantine.
    """

    handles: Int64
    committed: Int64
    allocated: Int64
    holders: dict[str, Int64]
    entries: list[object]


class Debugging:
    """Debug mode of one allocator; see `docs/debugging.md`.

    Args:
        alloc: the allocator, its journal on already.
        core: its parts.
        calls: the ring that its journal keeps of the last calls, or None.

    Raises:
        ValueError: `DEVICE_EVERY` is no number.
    """

    def __init__(self, alloc: Any, core: Core, calls: LastCalls | None = None) -> None:
        self._core = core
        self._calls = LastCalls() if calls is None else calls
        self._pools: list[PagePool] = [core.pool]
        if core.side is not None:
            self._pools.append(core.side.pool)
        self._every = _device_every(core.device.name)
        self._count = 0
        self._state: dict[str, bytes] = {}
        self._poison = Poison(core)
        for verb in VERBS.values():
            target = core.prefix if verb.of_cache else alloc
            if target is not None:
                self._put(target, verb.attribute, verb.name, [a.name for a in verb.arguments])
        self._put(alloc, "_apply_through", "stage", ["plan"])
        self._put(alloc, "settle", "settle", [])
        for name in _ASKING:
            setattr(alloc, name, self._asking(getattr(alloc, name)))
        self._laws = alloc.check
        alloc.check = self._checking(alloc.check)
        quarantine: Any = core.quarantine
        quarantine.settle = self._settling(quarantine.settle)

    # -- around the methods ----------------------------------------------------------------

    def _put(self, target: Any, attribute: str, name: str, arguments: list[str]) -> None:
        """Do all that debug mode does around a method that changes the ledger.

        Args:
            target: whose method.
            attribute: its name.
            name: as messages have it.
            arguments: the names of its arguments, in order.
        """
        method = getattr(target, attribute)
        handles = arguments[0] if arguments and arguments[0] in _HANDLES else ""
        place = arguments.index("after") if name in _WRITING else 0
        owner = self._core.owner

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not owner.mine():
                return method(*args, **kwargs)  # which refuses this thread
            named = NO_ROWS
            if handles:
                named = _rows_named(args[0] if args else kwargs.get(handles))
            before = self._look()
            last = self._calls.ring[-1] if self._calls.ring else None
            self._state = frozen(self._core)
            try:
                result = method(*args, **kwargs)
            except Exception as error:
                number = self._number(last)
                self._tell(error)
                self._note(number, f"refused {name}", named, before)
                if isinstance(error, _REFUSALS) and not isinstance(error, LawViolation):
                    self._prove(before, f"refused {name}")
                    self._unchanged(name, error)
                raise
            self._note(self._number(last), name, named, before)
            if place:
                after = args[place] if place < len(args) else kwargs.get("after")
                self._prove(before, name, True, after)
            else:
                self._prove(before, name)
            return result

        setattr(target, attribute, call)

    def _asking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        owner = self._core.owner

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                if owner.mine():
                    self._tell(error)
                raise

        return call

    def _checking(self, check: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(check)
        def call(device: Any = False) -> Any:
            try:
                result = check(device)
                if device:
                    self._poison.check()
                return result
            except LawViolation as violation:
                self._tell(violation)
                raise

        return call

    def _settling(self, settle: Callable[[], None]) -> Callable[[], None]:
        """What comes back behind an event is no change by the call that takes it in."""
        quarantine = self._core.quarantine

        def call() -> None:
            before = quarantine.entries
            settle()
            if len(quarantine.entries) != len(before):
                self._poison.spread()
                self._state = frozen(self._core)

        return call

    # -- what is done ----------------------------------------------------------------------

    def _look(self) -> _Seen:
        ledger = self._core.ledger
        return _Seen(
            ledger.handle.copy(),
            ledger.committed.copy(),
            ledger.allocated.copy(),
            {pool.group: pool.holder.copy() for pool in self._pools},
            list(self._core.quarantine.entries),
        )

    def _changed(self, before: _Seen) -> Int64:
        """Rows that the call has changed, int64."""
        ledger = self._core.ledger
        changed = ledger.handle != before.handles
        changed |= ledger.committed != before.committed
        changed |= ledger.allocated != before.allocated
        rows: Int64 = changed.nonzero()[0]
        return rows

    def _number(self, last: object) -> int:
        """Of the call behind ``last``; the entry that a journal has made of it already is gone."""
        ring = self._calls.ring
        if not ring:
            return 1
        return ring[-1][0] + 1 if ring[-1] is last else ring.pop()[0]

    def _note(self, number: int, name: str, named: Int64, before: _Seen) -> None:
        """Enter the call into the ring."""
        moved = {}
        for pool in self._pools:
            pages = (pool.holder != before.holders[pool.group]).nonzero()[0]
            if pages.size:
                moved[pool.group] = pages.astype(np.int32)
        rows = np.union1d(named, self._changed(before))
        self._calls.ring.append((number, name, rows, moved))

    def _prove(self, before: _Seen, name: str, writing: bool = False, after: Any = None) -> None:
        """Put poison where the call has left something, and prove the laws.

        Args:
            before: what was there before it.
            name: of the call, as messages have it.
            writing, after: as `Poison.spread`.

        Raises:
            LawViolation: naming this call, too.
        """
        core, poison = self._core, self._poison
        capturing = core.device.capturing()
        if capturing:
            poison.captured(self._changed(before))
        else:
            known = set(map(id, before.entries))
            new: list[object] = [e for e in core.quarantine.entries if id(e) not in known]
            poison.shrunk((core.ledger.allocated < before.allocated).nonzero()[0], new)
            poison.spread(writing, after)
        self._count += 1
        device = not capturing and self._every > 0 and self._count % self._every == 0
        try:
            self._laws(device)
            if device:
                self._poison.check(self._calls.ring[-1][2])
        except LawViolation as violation:
            self._tell(violation)
            self._found(violation, name)
            raise

    def _unchanged(self, name: str, refusal: Exception) -> None:
        """Prove that a refused call has changed nothing.

        Raises:
            LawViolation: it has.
        """
        now = frozen(self._core)
        if now == self._state:
            return
        parts = [part for part in now if now[part] != self._state.get(part)]
        violation = LawViolation(
            f"{name} was refused ({type(refusal).__name__}: {refusal}), but has changed the state: "
            f"{', '.join(parts[:8])}"
        )
        self._tell(violation)
        self._found(violation, f"refused {name}")
        raise violation from refusal

    def _found(self, violation: LawViolation, name: str) -> None:
        known = violation.told.removeprefix(" (").removesuffix(")")
        number = self._calls.ring[-1][0]
        violation.told = f" (found behind call {number}, {name}{'; ' + known if known else ''})"

    def _tell(self, error: Exception) -> None:
        """Let the message of ``error`` end with the last calls on what it names."""
        if isinstance(error, AllocError):
            error.told = error.told or self._calls.told(str(error), self._core, always=True)
        elif type(error) is ValueError and len(error.args) == 1:
            error.args = (f"{error}{self._calls.told(str(error), self._core)}",)


def _rows_named(given: Any) -> Int64:
    """The rows of a batch, a plan or handles; none of what is no handle, which is refused."""
    if isinstance(given, (Batch, Plan)):
        return given.rows
    try:
        return int64_array(given, "handles") & _ROW_MASK
    except (TypeError, ValueError):
        return NO_ROWS


def _device_every(device: str) -> int:
    """Calls from one comparison of the device's tables to the next; 0 for never."""
    setting = os.environ.get(DEVICE_EVERY)
    if setting is None:
        # On a GPU a comparison reads tables back, and waits for all work.
        return 1 if device == "cpu" else 0
    if not setting.isdecimal():
        raise ValueError(
            f"{DEVICE_EVERY} is {setting!r}: give a number of calls, or 0 to compare only when "
            "check(device=True) is asked for"
        )
    return int(setting)
