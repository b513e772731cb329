"""Calls as data: what was asked, of which requests, in symbols that outlive any allocator.

Requests, matches, plans, batches and events are known by labels, so that a list of calls keeps
its sense when some of them are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAMESPACES: tuple[Any, ...] = (None, 7, "7", b"7")
Prompt = tuple[tuple[int, ...], int]
"""Kinds of pages, and how many tokens of them."""


@dataclass(frozen=True)
class Call:
    """One call, or a few that belong together.

    Attributes:
        verb: what to do: a method of `sgalloc.fuzz.doing.Doing` by this name.
        who: whom it is about, each a label (of a request unless said there) and its numbers.
        how: everything else, by name.
    """

    verb: str
    who: tuple[tuple[Any, ...], ...] = ()
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.how.items() if value not in (None, ())]
        return " ".join([self.verb, *(str(one) for one in self.who), *given])


def page_of(kind: int, size: int) -> list[int]:
    """Tokens of a page: few kinds, which also differ in their last token alone."""
    if kind < 2:
        return [0] * size
    return [1] * size if kind == 2 else [0] * (size - 1) + [1]


def tokens_of(prompt: Prompt, size: int) -> list[int]:
    """The token ids of a prompt."""
    kinds, length = prompt
    return [token for kind in kinds for token in page_of(kind, size)][:length]


class Event:
    """What a release waits for: over when the walk says so."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        """Whether it is over, as torch's events say it."""
        return self.over


class Flag:
    """The same with a value, as CuPy's events have it."""

    def __init__(self) -> None:
        self.over = False

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.over


class Future:
    """The same with a method, as futures have it."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        """Whether it is over."""
        return self.over


KINDS_OF_EVENT = (Event, Flag, Future)


def shaped_handles(handles: Sequence[int], form: int) -> Any:
    """Handles in one of the forms that verbs take."""
    if form == 1 and len(handles) == 1:
        return handles[0]
    if form == 2:
        return np.array(handles, dtype=np.int64)
    return tuple(handles) if form == 3 else list(handles)


def shaped_numbers(numbers: Sequence[int], form: int) -> Any:
    """Numbers in one of the forms that verbs take."""
    if form == 1 and len(set(numbers)) == 1:
        return numbers[0]
    if form > 1:
        return np.array(numbers, dtype=np.int32 if form == 2 else np.int64)
    return list(numbers)


BATCH_FORM = 4
"""The form of handles that is a `Batch`, made for the call."""
