"""Where the calls of ranks part that should mirror each other, found without their journals."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from sgalloc.trust.journalled import Journalled
from sgalloc.trust.records import JournalError
from sgalloc.trust.steps import Step, Trace

_LENGTH, _HASH = struct.Struct("<q"), struct.Struct("<Q")
_STEP = struct.Struct("<qB8s8sB")
_WORDS = 215  # so that a step has 240 bytes
_PAST_THE_END = Step(-1, False, b"", b"", "nothing more")

Exchange = Callable[[bytes], list[bytes]]
"""Sends as many bytes as all others do, and returns those of every rank, in one order for all."""


class Parting(NamedTuple):
    """What each rank has where the calls first differ, in the order of the ranks.

    Attributes:
        steps: of every rank; past its end one numbered -1.
        how: what tells them apart where their words do not; empty where they do.
    """

    steps: list[Step]
    how: str

    @property
    def record(self) -> int:
        """The number of the record, in the first journal that goes so far."""
        return next(step.number for step in self.steps if step.number >= 0)

    def words(self) -> list[str]:
        """What each rank did, in words; with the number of the record where it is another."""
        alone = sum(step.settled for step in self.steps) == 1
        found = []
        for step in self.steps:
            words = step.words + self.how
            if step.settled and alone:
                words += ", an event that the others had not"
            if step.number not in (-1, self.record):
                words += f" (its record {step.number})"
            found.append(words)
        return found


def parting(journal: Journalled | None, exchange: Exchange) -> Parting | None:
    """The first step in which ranks differ; None where a journal is missing, or all are alike.

    Every rank has to call it. It costs one exchange for every halving of the shortest journal,
    and each rank reads its own.

    Args:
        journal: this rank's.
        exchange: among all ranks.
    """
    trace = None
    if journal is not None and journal.log.open:
        journal.log.flush()
        try:
            trace = Trace(journal.log.path)
        except JournalError:
            trace = None
    own = -1 if trace is None or not journal or not journal.log.open else len(trace)
    lengths = [_LENGTH.unpack(part)[0] for part in exchange(_LENGTH.pack(own))]
    if trace is None or min(lengths) < 0:
        return None
    # Steps before ``low`` are the same; those up to ``high`` are not, or end there.
    low, high = 0, min(lengths)
    while low < high:
        middle = (low + high) // 2
        found = exchange(_HASH.pack(trace.upto(middle)))
        if len(set(found)) == 1:
            low = middle + 1
        else:
            high = middle
    if low == max(lengths):
        return None
    steps = [_unpacked(part) for part in exchange(_packed(trace.step(low) or _PAST_THE_END))]
    return Parting(steps, _apart(steps))


def _apart(steps: list[Step]) -> str:
    if len({step.words for step in steps}) > 1:
        return ""
    if len({step.asked for step in steps}) > 1:
        return " with other arguments"
    return " with another outcome"


def _packed(step: Step) -> bytes:
    words = step.words.encode("ascii", "backslashreplace")
    if len(words) > _WORDS:
        words = words[: _WORDS - 3] + b"..."
    head = _STEP.pack(step.number, step.settled, step.asked, step.answered, len(words))
    return head + words.ljust(_WORDS)


def _unpacked(part: bytes) -> Step:
    number, settled, asked, answered, size = _STEP.unpack(part[: _STEP.size])
    words = part[_STEP.size : _STEP.size + size].decode("ascii")
    return Step(number, bool(settled), asked, answered, words)
