"""Named faults that other engines had, to be switched on for bisecting and to try the checks.

Nothing outside of this room knows of them: each is a patch that is put on from here, for the whole
process, and taken off again. Without one switched on nothing is changed, and nothing is paid.

>>> with switched_on("conservative-estimate"):
...     sizing.new_tokens_required_next_decode([31, 40], [32, 64], 16, EAGLE)
32
>>> sizing.new_tokens_required_next_decode([31, 40], [32, 64], 16, EAGLE)
16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from sgalloc import sizing
from sgalloc.device import cuda_missing
from sgalloc.inputs import Int64
from sgalloc.pages import FREE, Int32, PagePool
from sgalloc.plan import Plan

EAGLE = sizing.SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
"""A chain of three drafts, of the example above."""

# SGLang 0.5.23 adds so much to the drafts of a row.
_SLACK = 4


class Patch(NamedTuple):
    """An attribute, and what stands in its place.

    Attributes:
        owner: whose.
        name: of the attribute.
        value: the old behaviour.
    """

    owner: Any
    name: str
    value: Any


class OldBehaviour(NamedTuple):
    """One of them.

    Attributes:
        name: what it is called.
        summary: what it does.
        known_from: who did so.
        caught_by: the check that has to find it.
        patches: makes its patches of what is there now.
    """

    name: str
    summary: str
    known_from: str
    caught_by: str
    patches: Callable[[], list[Patch]]


def names() -> tuple[str, ...]:
    """The names that `switched_on` takes."""
    return tuple(BEHAVIOURS)


def switched() -> tuple[str, ...]:
    """Those that are on now, in the order in which they were switched on."""
    return tuple(_on)


@contextmanager
def switched_on(*which: str) -> Iterator[None]:
    """Let the process behave as these names say until the block ends; then all is as it was.

    Blocks may be nested, each with other names. Allocators made outside behave so, too, as long
    as the block lasts; what it has done to them stays.

    Raises:
        ValueError: a name that is unknown, or on already, or that needs a GPU where CuPy is not.
    """
    for name in which:
        _checked(name, which)
    with ExitStack() as stack:
        for name in which:
            stack.enter_context(_one(BEHAVIOURS[name]))
        yield


def _checked(name: str, which: tuple[str, ...]) -> None:
    if name not in BEHAVIOURS:
        raise ValueError(f"old behaviour {name!r} is unknown: use one of {', '.join(BEHAVIOURS)}")
    if name in _on or which.count(name) > 1:
        raise ValueError(f"old behaviour {name!r} is on already: name it once")


@contextmanager
def _one(old: OldBehaviour) -> Iterator[None]:
    before = [(patch, getattr(patch.owner, patch.name)) for patch in old.patches()]
    _on.append(old.name)
    try:
        for patch, _ in before:
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch, was in before:
            setattr(patch.owner, patch.name, was)
        _on.remove(old.name)


# -- what they do --------------------------------------------------------------------------------


def _unaligned_watermark() -> list[Patch]:
    real = Plan.__init__

    def init(self: Plan, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.growth is not None:
            at = self.growing
            self.extents = self.stop[at]
            self.nxt = self.cur.copy()
            self.nxt[at] = self.extents

    return [Patch(Plan, "__init__", init)]


def _row_without_headroom() -> list[Patch]:
    real = sizing.extra_context_len

    def extra_context_len(spec: sizing.SpecConfig | None, page_size: int) -> int:
        found = real(spec, page_size)
        if spec is None or spec.algorithm == "none" or page_size != 1:
            return found
        return _SLACK + spec.draft_tokens

    return [Patch(sizing, "extra_context_len", extra_context_len)]


def _conservative_estimate() -> list[Patch]:
    # The defaults of the one function, so that whoever imported it by name asks for it, too.
    return [
        Patch(
            sizing.new_tokens_required_next_decode,
            "__defaults__",
            (None, "conservative"),
        )
    ]


def _unguarded_staging() -> list[Patch]:
    missing = cuda_missing()
    if missing is not None:
        raise ValueError(f"old behaviour 'unguarded-staging' is a GPU's, and {missing}")
    from sgalloc.device.staging import Slot

    def busy(_: Any) -> bool:
        return False

    return [Patch(Slot, "busy", busy)]


def _release_by_totals() -> list[Patch]:
    real = PagePool.give

    def give(self: PagePool, ids: Int32, holder: int | Int64) -> None:
        if ids.size < 2:
            real(self, ids, holder)
            return
        # As many pages as go back, in a run from the first one on, whoever has them.
        run = (int(ids[0]) - 1 + np.arange(ids.size)) % self.num_pages + 1
        self.holder[run] = FREE
        self._stack[self.free : self.free + run.size] = run[::-1]
        self.free += run.size

    return [Patch(PagePool, "give", give)]


_on: list[str] = []
BEHAVIOURS = {
    old.name: old
    for old in (
        OldBehaviour(
            "unaligned-watermark",
            "A is C plus the reserve, not rounded up to whole pages: the rest of the last page is "
            "stranded, and the next growth takes that page once more",
            "SGLang, in overlapped speculation",
            "the row law: A is whole pages",
            _unaligned_watermark,
        ),
        OldBehaviour(
            "row-without-headroom",
            "at page size 1 a row has room for its drafts and 4 slots, not for the reserve",
            "SGLang 0.5.23, which then wrote into the row of a neighbour",
            "RowTooNarrow, before anything is written",
            _row_without_headroom,
        ),
        OldBehaviour(
            "conservative-estimate",
            "what the next step asks for is estimated, and not what the plan will take",
            "SGLang before its estimate became tight",
            "one number: the estimate is the need of the plan",
            _conservative_estimate,
        ),
        OldBehaviour(
            "unguarded-staging",
            "a staging slot is filled anew while a copy or a kernel may still read it",
            "TensorRT-LLM, LMCache and others",
            "the row law on the device, behind a held stream",
            _unguarded_staging,
        ),
        OldBehaviour(
            "release-by-totals",
            "as many pages go back as a request has, in a run from its first one on",
            "reports with balanced sums and aliased pages",
            "the partition law, which compares ids",
            _release_by_totals,
        ),
    )
}
