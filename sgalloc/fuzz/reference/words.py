"""What the naive allocator keeps: pools, requests, cached pages, plans, and what waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


class Refused(Exception):
    """The call is refused.

    Attributes:
        kind: why: "pages", "rows", "narrow", "stale", "extent", "plan", "edge", "state", "value".
        group: the group that is short of pages.
        numbers: what the error has to carry.
    """

    def __init__(self, kind: str, group: str = "", **numbers: int) -> None:
        super().__init__(f"{kind} {group} {numbers}")
        self.kind = kind
        self.group = group
        self.numbers = numbers


@dataclass(frozen=True)
class WindowSettings:
    """A window group: tokens of the window, pages, whether there is a map, and the cadence."""

    tokens: int
    pages: int
    slot_map: bool = True
    evict_every: int = 1


@dataclass(frozen=True)
class SparseSettings:
    """A device group: logical pages, and tokens of a buffer and of scratch."""

    logical_pages: int
    buffer: int
    scratch: int = 0


class Pool:
    """Pages of one group. Numbers are never used twice; only how many are out is limited."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.out: set[int] = set()
        self.taken = self.high_water = self.evicted = 0

    @property
    def free(self) -> int:
        """How many may still be taken."""
        return self.total - len(self.out)

    def take(self) -> int:
        """A page."""
        assert self.free > 0, "the reference took a page that is not there"
        self.taken += 1
        self.out.add(self.taken)
        self.high_water = max(self.high_water, len(self.out))
        return self.taken

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        for page in pages:
            self.out.remove(page)


@dataclass(eq=False)
class Node:
    """One cached page, below the pages that come before it in the prompt."""

    key: tuple[int, ...]
    page: int
    parent: Node | None
    number: int
    last_use: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    unsettled: int = 0
    evicted: bool = False
    side: int = 0
    """The window page beside it; 0 for none."""


@dataclass(eq=False)
class Request:
    """One request: pages by number, and what of them is whose."""

    namespace: Any = None
    committed: int = 0
    steps: int = 0
    pages: list[int] = field(default_factory=list)
    shared: list[Node] = field(default_factory=list)
    # With a window group.
    window: dict[int, int] = field(default_factory=dict)
    frontier: int = 0
    # With a device group: pages in order (a long one's buffer, then the page of its newest token).
    device: list[int] = field(default_factory=list)
    shown: dict[int, int] = field(default_factory=dict)
    scratch: list[int] = field(default_factory=list)
    sparse: bool = False
    long: bool = False
    # While remote writers fill it.
    length: int = 0
    prefix: int = 0
    writers: int = 0
    missing: set[int] = field(default_factory=set)
    deadline: float | None = None
    aborted: bool = False
    events: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Waiting:
    """What comes back when its events are over."""

    events: list[Any]
    pages: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    unlock: list[Node] = field(default_factory=list)
    settle: list[Node] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether nothing holds it back."""
        return all(event is None or event.over for event in self.events)


@dataclass(eq=False)
class Growth:
    """What a plan does for one request; extents in pages, lengths in tokens."""

    name: int
    kind: str
    start: int
    upto: int
    settled: int
    cur: int
    nxt: int
    step: int
    # In the window group: page numbers that go and come, and the frontier afterwards.
    frontier: int = 0
    leaving: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    # In the device group.
    more: int = 0
    whole: bool = False
    only: bool = False

    @property
    def need(self) -> int:
        """Pages that it takes of the second group."""
        return len(self.fresh) + self.more


@dataclass(eq=False)
class Plan:
    """Growths, and how much had changed when it was made."""

    growths: list[Growth]
    changes: int
    doubts: int


@dataclass(eq=False)
class Match:
    """A cached beginning of a prompt."""

    namespace: Any
    nodes: list[Node]


Part = tuple[Sequence[int], Sequence[int]]
NOTHING: Part = ((), ())
