"""How long things take on the virtual clock of the imagined engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgalloc.replay.requests import real_number


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds a step: a fixed part, one for each prefilled token, one for each request decoded.

    The defaults resemble an 8B model on one H100: a decode step of 7 to 15 ms, and 20,000
    prefilled tokens a second. They set how requests queue up; the allocator's own time is
    measured and does not depend on them.
    """

    base: float = 7e-3
    per_prefill_token: float = 50e-6
    per_request: float = 30e-6

    def __post_init__(self) -> None:
        """Refuse what is negative, or a step that takes no time."""
        real_number("base", self.base, 1e-6, 1e3)
        real_number("per_prefill_token", self.per_prefill_token, 0.0, 1e3)
        real_number("per_request", self.per_request, 0.0, 1e3)

    def seconds(self, prefilled: int, decoding: int) -> float:
        """Time of a step over ``prefilled`` tokens and ``decoding`` requests."""
        return self.base + self.per_prefill_token * prefilled + self.per_request * decoding


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Seconds that the KV of a request is under way between two nodes.

    The defaults are 128 KiB a token at 50 GB/s, and 5 µs for each piece that is sent.
    """

    base: float = 5e-3
    per_token: float = 2.6e-6
    per_extent: float = 5e-6

    def __post_init__(self) -> None:
        """Refuse what is negative."""
        for name in ("base", "per_token", "per_extent"):
            real_number(name, getattr(self, name), 0.0, 1e3)

    def seconds(self, tokens: int, extents: int) -> float:
        """Time of a transfer of ``tokens`` in ``extents`` pieces."""
        return self.base + self.per_token * tokens + self.per_extent * extents


class Until:
    """An event of the virtual clock: done once ``passed`` says so."""

    def __init__(self, passed: Callable[[], bool]) -> None:
        self._passed = passed

    def query(self) -> bool:
        """Whether its time has come."""
        return self._passed()
