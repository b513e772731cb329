"""What remote writers may still write: pinned pages, acknowledgements, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.ledger import concatenate
from sgalloc.nodes import Node
from sgalloc.pages import Int32


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far the filling of one preallocated request is: a snapshot.

    Attributes:
        length: tokens that the request will have, those of its prefix match included.
        prefix: tokens of the prefix match; the writers fill ``[prefix, length)``.
        writers: how many writers have to acknowledge, 0..``writers - 1``.
        acks: those that have, ascending.
        deadline: when `KVAllocator.reclaim` takes it back; None for never.
        aborted: whether it was aborted, and waits only for its writers or its deadline.
        ready: the event behind which page ids may be sent: it follows every former reader of
            the pages.
    """

    length: int
    prefix: int
    writers: int
    acks: tuple[int, ...]
    deadline: int | float | None
    aborted: bool
    ready: Any


@dataclass(slots=True, eq=False)
class Pin:
    """One request whose pages are pinned.

    Attributes:
        handle: its handle, which stays known to `Pins` after an abort.
        row: its row.
        length: tokens it will have.
        prefix: tokens of its prefix match.
        writers: how many have to acknowledge.
        deadline: when it may be taken back; None for never.
        pages: the pinned ids, int32.
        sides: those of the second group, int32.
        ready: the event of the table write.
        acked: the writers that have acknowledged.
        aborted: whether its row is closed already.
        nodes: locks in the prefix cache, which it owns once aborted.
        event: what the pages wait for besides, once aborted; None for nothing.
    """

    handle: int
    row: int
    length: int
    prefix: int
    writers: int
    deadline: int | float | None
    pages: Int32
    sides: Int32
    ready: Any
    acked: set[int] = field(default_factory=set)
    aborted: bool = False
    nodes: list[Node] = field(default_factory=list)
    event: Any = None

    def due(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and now >= self.deadline

    def snapshot(self) -> Transfer:
        """What callers may see of it."""
        return Transfer(
            self.length,
            self.prefix,
            self.writers,
            tuple(sorted(self.acked)),
            self.deadline,
            self.aborted,
            self.ready,
        )


class Pins:
    """The requests with pinned pages, by handle, in order of preallocation."""

    def __init__(self) -> None:
        self.by_handle: dict[int, Pin] = {}

    def aborted(self) -> list[Pin]:
        """Those whose rows are closed already, and wait."""
        return [pin for pin in self.by_handle.values() if pin.aborted]

    def page_ids(self) -> Int32:
        """The pages of aborted requests, int32; those of the others stand in the ledger."""
        return concatenate([pin.pages for pin in self.aborted()], np.int32)

    def side_ids(self) -> Int32:
        """The same in the second group, int32."""
        return concatenate([pin.sides for pin in self.aborted()], np.int32)

    def row_ids(self) -> Int64:
        """The rows of aborted requests, int64."""
        return np.array([pin.row for pin in self.aborted()], np.int64)

    def nodes(self) -> list[Node]:
        """The locks that aborted requests still hold in the prefix cache."""
        return [node for pin in self.aborted() for node in pin.nodes]
