"""How long a step of the imagined engine takes."""

from __future__ import annotations

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
