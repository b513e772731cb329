"""How many tokens a speculative step yields: a truncated geometric model.

Of K drafted tokens each is accepted with probability p so long as all before it were, and the
target model adds one token of its own (the bonus token). A step therefore yields v tokens,
1 <= v <= K + 1, with ``P(v > k) = p**k`` for k = 1..K, and on average

    tau = 1 + p + ... + p**K = (1 - p**(K + 1)) / (1 - p).

K is the longest run of drafts that one step can accept: the block less one for DFLASH, the depth
(steps) of the tree for EAGLE, where the engine's rows hold no more than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgalloc.replay.requests import real_number, whole_number

MAX_DRAFT_TOKENS = 65_536
MAX_DRAW = 2**31 - 1


class Acceptance:
    """The distribution of the tokens that one speculative step yields, between 1 and K + 1.

    Built from ``draft_tokens`` (K, 1 to 65,536) and exactly one of ``mean`` (tokens a step, the
    bonus token counted, 1 to K + 1) and ``p`` (chance that a draft is accepted, 0 to 1).
    Anything else is a ValueError that names the field.
    """

    __slots__ = ("_above", "draft_tokens", "p")

    draft_tokens: int
    p: float

    def __init__(
        self, draft_tokens: int, *, mean: float | None = None, p: float | None = None
    ) -> None:
        """Solve for the missing one of ``mean`` and ``p``."""
        self.draft_tokens = whole_number("draft_tokens", draft_tokens, 1, MAX_DRAFT_TOKENS)
        if (mean is None) is (p is None):
            raise ValueError(f"acceptance has mean {mean!r} and p {p!r}: give exactly one of them")
        if mean is not None:
            tau = real_number("mean", mean, 1.0, float(self.draft_tokens + 1))
            self.p = _solve(tau, self.draft_tokens)
        if p is not None:
            self.p = real_number("p", p, 0.0, 1.0)
        self._above = _chances(self.p, self.draft_tokens)[::-1].copy()

    @property
    def mean(self) -> float:
        """Tokens that a step yields on average, the bonus token counted."""
        return 1.0 + float(self._above.sum())

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """Return the yields of ``n`` steps, int64 of shape ``(n,)``, values in 1..K + 1.

        Takes n uniform numbers from ``rng`` and looks them up in the distribution (inverse CDF).
        """
        if not isinstance(rng, np.random.Generator):
            raise ValueError(f"rng is {rng!r}: give a numpy.random.Generator, as default_rng(0)")
        uniform = rng.random(whole_number("n", n, 0, MAX_DRAW))
        not_reached = np.searchsorted(self._above, uniform, side="right")
        return np.subtract(self.draft_tokens + 1, not_reached, dtype=np.int64)

    def __repr__(self) -> str:
        """Show the numbers that the model was built from."""
        return f"Acceptance(draft_tokens={self.draft_tokens}, p={self.p:.6g}) mean {self.mean:.3f}"


class Preset(NamedTuple):
    """A published mean yield: ``mean`` tokens a step at ``draft_tokens`` drafted."""

    mean: float
    draft_tokens: int
    about: str


PRESETS: dict[str, Preset] = {
    "eagle3-16-low": Preset(2.65, 16, "EAGLE-3, tree of 16 tokens, hardest dataset"),
    "eagle3-16-high": Preset(3.23, 16, "EAGLE-3, tree of 16 tokens, easiest dataset"),
    "eagle3-60-low": Preset(3.03, 60, "EAGLE-3, tree of 60 tokens, hardest dataset"),
    "eagle3-60-high": Preset(3.71, 60, "EAGLE-3, tree of 60 tokens, easiest dataset"),
    "dflash-16-chat": Preset(4.24, 16, "DFLASH, block of 16, chat"),
    "dflash-16-maths": Preset(7.87, 16, "DFLASH, block of 16, mathematics"),
}
"""Mean yields as published for EAGLE-3 and DFLASH, by name."""


def preset(name: str, *, draft_tokens: int | None = None) -> Acceptance:
    """Return the model with a published mean; ``draft_tokens`` bounds the yield otherwise (K).

    An unknown name, or a K too small for the mean, is a ValueError.
    """
    found = PRESETS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"acceptance preset {name!r} is unknown: give one of {', '.join(PRESETS)}")
    return Acceptance(found.draft_tokens if draft_tokens is None else draft_tokens, mean=found.mean)


def _chances(p: float, draft_tokens: int) -> npt.NDArray[np.float64]:
    """P(v > k) for k = 1..K, falling."""
    chances: npt.NDArray[np.float64] = np.power(p, np.arange(1, draft_tokens + 1, dtype=np.float64))
    return chances


def _solve(mean: float, draft_tokens: int) -> float:
    """The p whose mean is nearest, by bisection: the mean rises with p from 1 to K + 1."""
    if mean in (1.0, draft_tokens + 1):
        return 0.0 if mean == 1.0 else 1.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if 1.0 + float(_chances(middle, draft_tokens).sum()) < mean:
            low = middle
        else:
            high = middle
    return low
