"""What the prefix cache's tree is made of: runs of pages, and pieces of them that leave."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.pages import Int32


class Node:
    """A run of cached pages with no branch in it, all last used at the same time.

    Attributes:
        tokens: the token ids on these pages, int64 ``(len(pages) * page_size,)``.
        pages: page ids, int32.
        sides: their pages in the second group, int32, 0 for none; None without such a group.
        live: how many of ``sides`` there are.
        end: pages from the root to the end of this node; negative once evicted.
        locks: open requests (and waiting events) that hold this node or one below it.
        last_use: clock of the last use.
        seq: insertion number of the first page; those of the others follow it.
        queued: whether the eviction queue knows the node.
        name: namespace, of a root alone.
    """

    __slots__ = (
        "children",
        "end",
        "last_use",
        "live",
        "locks",
        "name",
        "pages",
        "parent",
        "queued",
        "seq",
        "sides",
        "tokens",
    )

    def __init__(
        self,
        parent: Node | None,
        tokens: Int64,
        pages: Int32,
        sides: Int32 | None,
        last_use: int,
        seq: int,
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.tokens = tokens
        self.pages = pages
        self.sides = sides
        self.live = 0 if sides is None else int(np.count_nonzero(sides))
        self.end: int = pages.size + (parent.end if parent is not None else 0)
        self.locks = 0
        self.last_use = last_use
        self.seq = seq
        self.queued = False
        self.name: Hashable = None

    @property
    def start(self) -> int:
        """Pages from the root to the start of this node."""
        return self.end - self.pages.size


class Victim(NamedTuple):
    """The last ``taken`` pages of a leaf, to be evicted."""

    node: Node
    taken: int

    @property
    def pages(self) -> Int32:
        """Their ids, int32."""
        last: Int32 = self.node.pages[self.node.pages.size - self.taken :]
        return last

    @property
    def sides(self) -> Int32:
        """Those of them in the second group, int32, as many as there are."""
        node = self.node
        if node.sides is None:
            return node.pages[:0]
        last = node.sides[node.sides.size - self.taken :]
        live: Int32 = last[last != 0]
        return live


class Uses(NamedTuple):
    """When some nodes were used last.

    Attributes:
        clock: of the tree.
        used: each node, and its last use.
    """

    clock: int
    used: list[tuple[Node, int]]


def last_with(node: Node, sides: int) -> int:
    """How many of the last pages of ``node`` hold ``sides`` of the second group; at most all."""
    assert node.sides is not None
    if node.live < sides:
        return node.pages.size
    live = (node.sides[::-1] != 0).cumsum()
    return int(live.searchsorted(sides)) + 1
