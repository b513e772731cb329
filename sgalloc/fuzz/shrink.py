"""Makes a walk that failed as short as it gets: fewer calls, requests and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sgalloc.fuzz.calls import Call
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.walk import Failure, run_calls

_FELL_OVER = "fell over"
# What a call does as well without.
_OPTIONAL = ("after", "out", "keep", "ask", "rounding", "namespace", "array", "evict", "form",
             "number_form", "twin")  # fmt: skip


def shrink(failure: Failure, more: Callable[[], bool], device: str = "cpu") -> Failure:
    """A failure of fewer calls.

    Args:
        failure: of `run_world`.
        more: whether there is time for another try.
        device: where it happened.
    """
    tried = Shrinking(failure.config, device, more, _FELL_OVER in failure.message)
    if not tried.fails(failure.calls):
        # It depends on more than its calls; they are told as they were.
        return failure
    before: list[Call] = []
    while tried.calls != before and more():
        before = tried.calls
        tried.leave_out()
        tried.simplify()
    return Failure(failure.seed, failure.world, failure.config, tried.calls, tried.message)


class Shrinking:
    """Calls that fail, made fewer step by step.

    Attributes:
        calls: the fewest so far.
        message: what they fail with.
    """

    def __init__(
        self, config: Config, device: str, more: Callable[[], bool], fell_over: bool
    ) -> None:
        self._config, self._device, self._more = config, device, more
        self._fell_over = fell_over
        self._made = 0
        self.calls: list[Call] = []
        self.message = ""

    def fails(self, calls: list[Call]) -> bool:
        """Whether these calls fail; they are then the fewest, up to the one that fails."""
        found, made = run_calls(self._config, calls, self._device)
        if not found or (_FELL_OVER in found and not self._fell_over):
            return False
        self.calls, self.message = calls[:made], found
        return True

    def leave_out(self) -> None:
        """Leave out half of them, quarters, and so on, down to single calls."""
        size = max(1, len(self.calls) // 2)
        while self._more():
            shorter, at = False, 0
            while at < len(self.calls) and self._more():
                if self.fails(self.calls[:at] + self.calls[at + size :]):
                    shorter = True
                else:
                    at += size
            if size == 1 and not shorter:
                return
            size = max(1, size // 2)

    def simplify(self) -> None:
        """Leave out requests and options of single calls."""
        again = True
        while again and self._more():
            again = False
            for at in range(len(self.calls) - 1, -1, -1):
                for simpler in simpler_calls(self.calls[at]) if at < len(self.calls) else ():
                    if not self._more():
                        return
                    if self.fails([*self.calls[:at], simpler, *self.calls[at + 1 :]]):
                        again = True
                        break


def simpler_calls(call: Call) -> Iterator[Call]:
    """The call with one thing less, in every way."""
    if len(call.who) > 1:
        for at in range(len(call.who)):
            yield Call(call.verb, (*call.who[:at], *call.who[at + 1 :]), call.how)
    for name in _OPTIONAL:
        if call.how.get(name):
            yield Call(call.verb, call.who, call.how | {name: type(call.how[name])() if name in
                       ("form", "number_form") else None})  # fmt: skip
