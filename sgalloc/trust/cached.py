"""The prefix cache as one sum: what is cached, who holds it, and in which order it would go."""

from __future__ import annotations

import struct
from typing import Any

from sgalloc.nodes import Node
from sgalloc.prefix import RadixTree
from sgalloc.trust.sums import MASK, Tokens, Uses, word

_tokens = Tokens("tree.tokens")
_NODE = struct.Struct("<QQQqqq")
# Nodes that may be noted for each that is known, before it is cheaper to look at all.
_MOST_NOTED = 2


class _Seen:
    """What is known of a node.

    Attributes:
        path: hash of the namespace and of all tokens up to the end of the node.
        said: hash of the pages on it.
        arrays: what these two were made from; the tree replaces arrays, and changes none.
        time: of its last use.
        hash: of all that, its locks and its number of insertion.
    """

    __slots__ = ("arrays", "hash", "path", "said", "time")

    def __init__(self) -> None:
        self.arrays: tuple[Any, ...] = ()
        self.path = self.said = self.time = self.hash = 0


class Cached:
    """The sum over the nodes of a tree.

    Args:
        tree: the tree.
        page_size: tokens of a page.
    """

    def __init__(self, tree: RadixTree, page_size: int) -> None:
        self._tree = tree
        self._page_size = page_size
        self._seen: dict[Node, _Seen] = {}
        self._noted: dict[Node, None] = {}
        self._uses: Uses | None = None

    @property
    def sum(self) -> int:
        """Of the nodes in order of use, as of the last `refresh`."""
        assert self._uses is not None
        return self._uses.sum & MASK

    def note(self, *nodes: Node | None) -> None:
        """Something changed on the way to these nodes, or they went."""
        if self._uses is None:
            return
        for node in nodes:
            if node is not None:
                self._noted[node] = None
        if len(self._noted) > _MOST_NOTED * len(self._seen) + 1024:
            self._uses = None
            self._noted.clear()
            self._seen.clear()

    def path(self, node: Node) -> int:
        """A hash of the namespace and the tokens up to the end of ``node``."""
        if node.parent is None:
            return named(node.name)
        return self._seen[node].path

    def refresh(self) -> None:
        """Take in what changed."""
        if self._uses is None:
            self._from_all()
            return
        done: set[Node] = set()
        for node in self._noted:
            if node.parent is None:
                self._forget(node)
                continue
            way: list[Node] = []
            step: Node | None = node
            while step is not None and step.parent is not None and step not in done:
                way.append(step)
                step = step.parent
            for step in reversed(way):
                self._look(step)
            done.update(way)
        self._noted.clear()

    def _from_all(self) -> None:
        self._seen.clear()
        nodes: list[Node] = list(self._tree._roots.values())
        for node in nodes:  # which grows on the way
            if node.parent is not None:
                self._learn(node)
            nodes.extend(node.children.values())
        self._uses = Uses((seen.time, seen.hash) for seen in self._seen.values())

    def _learn(self, node: Node) -> _Seen:
        seen = self._seen.get(node)
        if seen is None:
            seen = self._seen[node] = _Seen()
        arrays = (node.tokens, node.pages, node.sides)
        if not _same(arrays, seen.arrays):
            assert node.parent is not None
            start = node.start
            seen.arrays = arrays
            seen.path = self.path(node.parent) + _tokens(node.tokens, start * self._page_size)
            seen.path &= MASK
            sides = b"" if node.sides is None else node.sides.astype("<i4").tobytes()
            seen.said = word(node.pages.astype("<i4").tobytes() + sides)
        seen.time = node.last_use
        size = node.pages.size
        seen.hash = word(_NODE.pack(seen.path, seen.said, node.end, size, node.locks, node.seq))
        return seen

    def _look(self, node: Node) -> None:
        assert self._uses is not None
        seen = self._seen.get(node)
        time, hashed, known = (0, 0, 0) if seen is None else (seen.time, seen.hash, 1)
        seen = self._learn(node)
        if known and (seen.time, seen.hash) == (time, hashed):
            return
        if known:
            self._uses.add(time, -hashed, -1)
        self._uses.add(seen.time, seen.hash)

    def _forget(self, node: Node) -> None:
        seen = self._seen.pop(node, None)
        if seen is not None and self._uses is not None:
            self._uses.add(seen.time, -seen.hash, -1)


def named(value: Any) -> int:
    """A hash of a namespace or a deadline, 64 bits; 0 for None."""
    return 0 if value is None else word(f"{type(value).__name__} {value!r}".encode())


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
