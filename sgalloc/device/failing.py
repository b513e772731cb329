"""What a CUDA device does when CUDA fails: one clear error, and a host that goes on.

A failure is either of one call (no memory, a launch refused), and the next call works; or the
device is lost, and with it all that is on it. Then whatever would write a table is refused with
the first failure, without a word to CUDA, while all that only gives back goes on.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from cupy.cuda import driver, memory, runtime

from sgalloc.device.order import StreamOrder
from sgalloc.device.ready import DONE, Done
from sgalloc.device.staging import Slot
from sgalloc.device.streams import Ready, current_device, event_pointer
from sgalloc.device.write_log import WriteLog
from sgalloc.errors import DeviceFailed
from sgalloc.events import is_done
from sgalloc.inputs import Int64
from sgalloc.pages import Int32
from sgalloc.plan import Gather, Segments, SideWrite

if TYPE_CHECKING:
    from sgalloc.device.captured import CapturedUpdate

_Method = TypeVar("_Method", bound=Callable[..., Any])

FAILURES: tuple[type[Exception], ...] = (
    runtime.CUDARuntimeError,
    driver.CUDADriverError,
    memory.OutOfMemoryError,
)
"""What CuPy raises when CUDA fails; the numbers of runtime and driver are the same."""

# After these CUDA answers every call of the process with the same error: the context is gone. In
# order: not initialised any more, unloading; devices unavailable; no context, an ECC error, NVLink,
# a contained error; illegal address, launch timeout, context destroyed, assert; stack, instruction,
# alignment, address space, program counter, launch; tensor memory, MPS (two), external device,
# unknown.
LOST = frozenset((3, 4, 46, 201, 214, 220, 226, 700, 702, 709, 710))
LOST |= {714, 715, 716, 717, 718, 719, 721, 805, 806, 911, 999}
# A capture that was broken off says nothing of the device.
_CAPTURE = range(900, 909)
_NAMED = 4
# What has to reach the device, and what it says once the device is lost.
_REFUSED = (
    "captured", "checked_out", "digest", "empty", "export", "finish_replays", "gather", "read_map",
    "read_page_ids", "read_rows", "read_side_rows", "warm", "write_here", "write_watermarks",
)  # fmt: skip


def telling(step: str) -> Callable[[_Method], _Method]:
    """Let a method of a `Failing` raise `DeviceFailed` where CUDA fails while ``step``."""

    def around(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Failing, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except FAILURES as error:
                raise self._failed(error, step) from error

        return call  # type: ignore[return-value]

    return around


def told(pages: Segments | None, gather: Gather | None, side: SideWrite | None) -> str:
    """A step in words."""
    parts = []
    if pages is not None:
        parts.append(f"writing {_count(pages.total, 'page')} of {_rows(pages.rows)}")
    if side is not None:
        parts.append(f"writing or clearing {_count(side.ids.size, 'page')} of the second group")
    if gather is not None:
        parts.append(f"gathering {_count(gather.size, 'slot')} of {_rows(gather.rows)}")
    return " and ".join(parts) or "waiting for an event"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _rows(rows: Int64) -> str:
    named = ", ".join(map(str, np.unique(rows)[:_NAMED].tolist()))
    more = f", ... ({rows.size} rows)" if rows.size > _NAMED else ""
    return f"row{'s' * (rows.size > 1)} {named}{more}"


class Failing(ABC):
    """The part of a CUDA device that is about failures, and about events, which tell of them.

    Attributes:
        lost: the failure after which the device is gone; None while it is there.
    """

    name: str
    index: int
    updates: list[weakref.ref[CapturedUpdate]]
    lost: DeviceFailed | None = None
    _order: StreamOrder
    log: WriteLog
    # Whether a step was launched that no event stands behind.
    _doubt = False

    @abstractmethod
    def write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Ready | Done:
        """One launch. See `Device.write`."""

    # -- failures ----------------------------------------------------------------------------

    def _failed(self, error: Exception, step: str) -> DeviceFailed:
        """The error to raise for what CuPy raised; the device is lost, or as before."""
        if self.lost is not None:
            return self.lost.again()
        status = getattr(error, "status", None)
        lost = status in LOST or (self._doubt and status not in _CAPTURE)
        self._doubt = False
        cause = " ".join(str(error).split()) or type(error).__name__
        failure = DeviceFailed(self.name, cause, step, self.log.last(), lost)
        if lost:
            self._lose(failure)
        else:
            # A capture may have been drawn in, and has to be able to end.
            with suppress(*FAILURES), current_device(self.index):
                self._order.come_back()
        return failure

    def _guard(self, slot: Slot, stream: int, error: BaseException, launched: bool) -> None:
        """See to it that ``slot`` is left alone while ``stream`` may read it, for all of ``error``.

        Where a step was launched behind which CUDA cannot put an event, nobody knows what the
        table holds.
        """
        if launched and isinstance(error, FAILURES):
            self._doubt = True
            return
        try:
            slot.hold(stream)
        except FAILURES:
            self._doubt = True

    def _lose(self, failure: DeviceFailed) -> None:
        """From now on refuse what needs the device; a method put in place costs no step a check."""
        self.lost = failure
        for name in _REFUSED:
            setattr(self, name, self._refuse)
        for update in filter(None, (ref() for ref in self.updates)):
            update.lose(self._refuse)
        self._order.lose(self._refuse)
        # Steps that wait for a replay wait for ever, and hold nobody back.
        self.updates = []
        own = {"write": self._nothing_to_write, "unmap": _nothing, "rejoin": _nothing}
        own |= {"capturing": _never, "event": self._event_of_host, "done": self._done_on_host}
        for name, method in own.items():
            setattr(self, name, method)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        assert self.lost is not None
        raise self.lost.again()

    def _nothing_to_write(
        self,
        pages: Segments | None,
        ids: Int32 | None,
        gather: Gather | None,
        after: Any,
        side: SideWrite | None = None,
    ) -> Done:
        if pages is None and side is None and (gather is None or not gather.size):
            return DONE
        self._refuse()
        raise AssertionError

    def _event_of_host(self, after: Any) -> Any:
        """An event of the GPU counts as done: what it stands for will never be read."""
        return after if self.waitable(after) is None else DONE

    def _done_on_host(self, event: Any) -> bool:
        return self.waitable(event) is not None or is_done(event)

    # -- steps whose event nobody gets -------------------------------------------------------

    def write_here(
        self, pages: Segments | None, ids: Int32 | None, after: Any, side: SideWrite | None
    ) -> None:
        """`write` and `rejoin`. See `Device.write_here`."""
        self.rejoin(self.write(pages, ids, None, after, side))

    def unmap(self, side: SideWrite) -> None:
        """`write_here` of entries of the map, unless the device is lost. See `Device.unmap`."""
        try:
            self.write_here(None, None, None, side)
        except DeviceFailed as failure:
            if not failure.lost:
                raise

    def rejoin(self, ready: Ready | Done) -> None:
        """Let a capture that a write was drawn into end. See `Device.rejoin`."""
        if isinstance(ready, Ready) and ready.captured:
            try:
                with current_device(self.index):
                    self._order.rejoin(ready.ptr, True)
            except FAILURES as error:
                self._doubt = True
                raise self._failed(error, "letting a capture end") from error

    # -- events ------------------------------------------------------------------------------

    def waitable(self, after: Any) -> Any:
        """``after``, if it is a CUDA event, for which a stream can wait; None if it is not."""
        raw = isinstance(after, int) or hasattr(after, "ptr") or hasattr(after, "cuda_event")
        return after if raw else None

    def event(self, after: Any) -> Any:
        """A raw CUDA event (a handle, or an object with one) as something that can be polled.

        Raises:
            TypeError: neither a CUDA event nor anything with ``query()`` or ``done``.
        """
        # Asked of the class first, since to look at ``done`` may be to poll it.
        polled = callable(getattr(after, "query", None)) or hasattr(type(after), "done")
        if polled or hasattr(after, "done"):
            return after
        return Ready(event_pointer(after), self.index)

    def done(self, event: Any) -> bool:
        """Whether an event is done. One that cannot tell, since the device is lost, is.

        Raises:
            DeviceFailed: CUDA cannot tell, and yet the device is there.
        """
        try:
            return is_done(event)
        except Exception as error:
            if not self._lost_by(error):
                raise
        return self.done(event)  # as it is from now on

    def capturing(self) -> bool:
        """Whether a capture is under way, in which no event may be polled."""
        try:
            with current_device(self.index):
                return self._order.capturing()
        except FAILURES as error:
            failure = self._failed(error, "asking whether a stream is captured")
            if not failure.lost:
                raise failure from error
        return False

    def _lost_by(self, error: Exception) -> bool:
        """Whether what a poll raised tells that the device is lost.

        Raises:
            DeviceFailed: CUDA failed, and the device is not lost.
        """
        step = "polling an event"
        if isinstance(error, FAILURES):
            failure = self._failed(error, step)
            if not failure.lost:
                raise failure from error
            return True
        if not isinstance(error, RuntimeError):
            return False
        # torch has errors of its own for the same. The device itself is asked with an own event.
        try:
            runtime.eventQuery(self._order.between)
        except FAILURES as own:
            return self._failed(own, step).lost
        return False


def _nothing(*_: Any) -> None:
    """A lost device has nothing to do."""


def _never() -> bool:
    """Nothing is captured on a lost device."""
    return False
