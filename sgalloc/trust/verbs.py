"""What a journal notes of each verb: its arguments, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sgalloc.trust.records import FIRST_CALL


class Form(Enum):
    """How one argument, or one answer, is written."""

    HANDLES = auto()  # a batch by number, or handles
    COUNTS = auto()  # an int for all, one per request, or None
    NUMBER = auto()  # any whole number
    FLAG = auto()
    EVENT = auto()  # whether there was one
    NAME = auto()  # a namespace
    MATCHES = auto()  # records of the matches
    PROMPT = auto()  # hashes of whole pages
    PROMPTS = auto()  # these of each request, or None
    POSITIONS = auto()  # positions of each request
    TIMES = auto()  # an instant, one per request, or None
    PLAN = auto()  # the parts of a plan
    IDS = auto()  # an int64 array


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a verb.

    Attributes:
        name: as callers spell it.
        form: how it is written; None for what changes nothing on the host and is left out.
        default: what it is where it is not given.
    """

    name: str
    form: Form | None
    default: Any = None


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        name: as callers spell it.
        kind: of its records.
        arguments: in the order of its signature.
        answer: form of what it says; None for nothing.
        says: makes that of what it returns.
        of_cache: whether it is a method of `KVAllocator.prefix`.
    """

    name: str
    kind: int
    arguments: tuple[Argument, ...]
    answer: Form | None = None
    says: Callable[[Any], Any] = lambda result: result
    of_cache: bool = False

    @property
    def attribute(self) -> str:
        """The method that does it: of `reserve` the one that speculative steps go through, too."""
        return "_reserve" if self.name == "reserve" else self.name


def _new_pages(plan: Any) -> int:
    return int(plan.num_new_pages)


def _match_says(match: Any) -> int:
    """The length of a match, and its last page."""
    pages = match.pages.size
    last = int(match.pages[-1]) if pages else 0
    return int(pages) << 32 | last


_X = Argument("x", Form.HANDLES)
_OUT = Argument("out", None)
_AFTER = Argument("after", Form.EVENT)
_ONLY = Argument("logical_only", Form.FLAG, False)
_TAIL = Argument("window_tail", Form.COUNTS)
_TOKENS = Argument("tokens", Form.PROMPTS)

# The place of a verb is the kind of its records: new ones go to the end.
_VERBS: tuple[tuple[Any, ...], ...] = (
    (
        "open",
        (Argument("count", Form.NUMBER, 1), Argument("namespace", Form.NAME)),
        Form.IDS,
    ),
    ("open_with_prefix", (Argument("matches", Form.MATCHES),), Form.IDS),
    (
        "extend",
        (_X, Argument("lengths", Form.COUNTS), _OUT, _AFTER, _TAIL, _ONLY),
        Form.NUMBER,
        _new_pages,
    ),
    (
        "decode",
        (_X, Argument("tokens", Form.COUNTS, 1), _OUT, _AFTER),
        Form.NUMBER,
        _new_pages,
    ),
    (
        "reserve",
        (
            _X,
            Argument("reserve", Form.COUNTS),
            _OUT,
            _AFTER,
            Argument("rounds_from", None),
            Argument("evict", Form.FLAG, False),
            Argument("counts_step", Form.FLAG, False),
            Argument("through", None),
        ),
        Form.NUMBER,
        _new_pages,
    ),
    ("apply", (Argument("plan", Form.PLAN), _OUT, _AFTER), Form.NUMBER, _new_pages),
    ("commit", (_X, Argument("accepted", Form.COUNTS))),
    ("trim", (_X, Argument("lengths", Form.COUNTS), _AFTER)),
    (
        "compact",
        (_X, Argument("accepted", Form.POSITIONS), _AFTER),
        Form.NUMBER,
        lambda moves: int(moves[0].size),
    ),
    ("evict_window", (_X, Argument("upto", Form.COUNTS), _AFTER), Form.IDS),
    ("to_sparse", (_X, _AFTER)),
    ("release", (_X, _TOKENS, _AFTER)),
    ("abort", (_X, Argument("force", Form.FLAG, False), _AFTER)),
    (
        "preallocate",
        (
            Argument("lengths", Form.IDS),
            Argument("writers", Form.COUNTS, 1),
            Argument("prefix", Form.MATCHES),
            Argument("deadline", Form.TIMES),
            _TAIL,
            _ONLY,
        ),
        Form.IDS,
    ),
    (
        "acknowledge",
        (Argument("handle", Form.NUMBER), Argument("writer", Form.NUMBER)),
        Form.NUMBER,
        int,
    ),
    ("reclaim", (Argument("now", Form.TIMES),), Form.IDS),
    (
        "match",
        (Argument("tokens", Form.PROMPT), Argument("namespace", Form.NAME)),
        Form.NUMBER,
        _match_says,
        True,
    ),
    ("publish", (_X, _TOKENS, _AFTER), None, None, True),
    ("clear", (), Form.NUMBER, int, True),
)

VERBS = {name: Verb(name, FIRST_CALL + at, *rest) for at, (name, *rest) in enumerate(_VERBS)}
BY_KIND = {verb.kind: verb for verb in VERBS.values()}
