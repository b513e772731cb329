"""A radix tree over pages: which prefixes are cached, in use, and next to go."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.nodes import Node, Uses, Victim, last_with
from sgalloc.ownership import Unpicklable
from sgalloc.pages import Int32

_DEAD = -1


class RadixTree:
    """Cached prefixes by namespace, at page granularity.

    Every page counts as a node of its own for order of eviction; runs without a branch are
    stored as one, so that a long prompt costs a few NumPy calls.

    Attributes:
        cached: pages in the tree.
        evictable: those that no request holds.
        evicted: pages evicted so far.
        side_cached, side_evictable, side_evicted: the same in the second group.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._seq = 0
        self._queue: list[tuple[int, int, int, Node]] = []
        self._order = count()
        self.cached = 0
        self.evictable = 0
        self.evicted = 0
        self.side_cached = 0
        self.side_evictable = 0
        self.side_evicted = 0

    # -- use -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Begin a use: what is touched from now on is younger than all before."""
        self._clock += 1

    def common(self, name: Hashable, tokens: Int64) -> tuple[Node | None, int]:
        """How far the tree knows ``tokens``; nothing changes.

        Args:
            name: the namespace.
            tokens: int64, whole pages.

        Returns:
            The node in which the common prefix ends (None for none), and its pages.
        """
        size = self._page_size
        total = tokens.size // size
        node, matched = self._roots.get(name), 0
        last: Node | None = None
        while node is not None and matched < total:
            at = matched * size
            child = node.children.get(tokens[at : at + size].tobytes())
            if child is None:
                break
            span = min(child.pages.size, total - matched)
            differs = child.tokens[: span * size] != tokens[at : at + span * size]
            first = int(differs.argmax())
            last = child
            if differs[first]:
                matched += first // size
                break
            matched += span
            node = child
        return last, matched

    def match(self, name: Hashable, tokens: Int64) -> tuple[Node | None, int]:
        """As `common`, but as a use: the node returned ends where the prefix does."""
        node, matched = self.common(name, tokens)
        return self.use(node, matched)

    def use(self, node: Node | None, pages: int) -> tuple[Node | None, int]:
        """Use the first ``pages`` pages of the path to ``node``: the node that ends there."""
        if node is None or not pages:
            return None, 0
        node = self._ending_at(node, pages)
        self.touch(node)
        return node, pages

    def insert(
        self, name: Hashable, tokens: Int64, pages: Int32, sides: Int32 | None = None
    ) -> tuple[Node | None, int]:
        """Enter ``tokens``; a use of the whole path.

        Args:
            name: the namespace.
            tokens: int64, whole pages.
            pages: ids, int32, one for each page of tokens; those that the tree knows
                already are left to the caller.
            sides: ids in the second group, int32, as many, 0 for none.

        Returns:
            The node that ends where the tokens do (None for no tokens), and the pages that
            were known already.
        """
        if not pages.size:
            return None, 0
        node, matched = self.match(name, tokens)
        if matched == pages.size:
            return node, matched
        if node is None:
            node = self._roots.get(name)
            if node is None:
                node = self._roots[name] = Node(None, tokens[:0], pages[:0], None, 0, 0)
                node.name = name
        rest = tokens[matched * self._page_size :].copy()
        beside = None if sides is None else sides[matched:].copy()
        new = Node(node, rest, pages[matched:].copy(), beside, self._clock, self._seq)
        self._seq += new.pages.size
        node.children[self._key(new)] = new
        self.cached += new.pages.size
        self.evictable += new.pages.size
        self.side_cached += new.live
        self.side_evictable += new.live
        self._enqueue(new)
        return new, matched

    def take_over(self, node: Node, sides: Int32) -> None:
        """Give pages on the path to ``node`` pages of the second group, where they have none.

        Args:
            node: where the path ends.
            sides: ids, int32, one a page of the path, 0 for none.
        """
        step = node
        while step.parent is not None:
            assert step.sides is not None
            fresh = sides[step.start : step.end]
            taken = (step.sides == 0) & (fresh != 0)
            count = int(np.count_nonzero(taken))
            if count:
                step.sides = np.where(taken, fresh, step.sides)
                step.live += count
                self.side_cached += count
                if not step.locks:
                    self.side_evictable += count
            step = step.parent

    def touch(self, node: Node) -> None:
        """Mark the path to ``node`` as used now."""
        step: Node | None = node
        while step is not None:
            step.last_use = self._clock
            step = step.parent

    def uses(self, nodes: Sequence[Node]) -> Uses:
        """When the paths to ``nodes`` were used last, for `restore_uses`."""
        used = []
        for node in nodes:
            step: Node | None = node
            while step is not None:
                used.append((step, step.last_use))
                step = step.parent
        return Uses(self._clock, used)

    def restore_uses(self, uses: Uses) -> None:
        """Let it be as if what came after ``uses`` had been no use."""
        self._clock = uses.clock
        for node, last_use in uses.used:
            node.last_use = last_use

    def pages_to(self, node: Node | None) -> Int32:
        """The page ids from the root to the end of ``node``, int32."""
        parts = []
        while node is not None and node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def sides_to(self, node: Node | None) -> Int32:
        """As `pages_to`, in the second group, 0 for none."""
        parts = []
        while node is not None and node.parent is not None:
            assert node.sides is not None
            parts.append(node.sides)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    # -- locks -----------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` from eviction until `unlock`."""
        step = node
        while step.parent is not None:
            if step.locks == 0:
                self.evictable -= step.pages.size
                self.side_evictable -= step.live
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock`."""
        step = node
        while step.parent is not None:
            step.locks -= 1
            if step.locks == 0:
                self.evictable += step.pages.size
                self.side_evictable += step.live
                self._enqueue(step)
            step = step.parent

    def unlocked_by(self, nodes: list[Node]) -> tuple[int, int]:
        """Pages that would become evictable if the locks at ``nodes`` were taken back.

        Returns:
            Those of the main group, and of the second one.
        """
        held: dict[Node, int] = {}
        pages = sides = 0
        for node in nodes:
            step = node
            while step.parent is not None:
                held[step] = held.get(step, 0) + 1
                if held[step] == step.locks:
                    pages += step.pages.size
                    sides += step.live
                step = step.parent
        return pages, sides

    def ancestor(self, node: Node, pages: int) -> Node | None:
        """The node on the path to ``node`` that ends after ``pages`` pages (None for none)."""
        return self._ending_at(node, pages) if pages else None

    # -- eviction --------------------------------------------------------------------------

    def victims(self, count: int, sides: int = 0) -> list[Victim]:
        """The next pages to go: ``count``, and among them ``sides`` of the second group.

        At most `evictable` and `side_evictable`. Nothing changes.

        Leaves first, least recently used, ties by insertion, one page at a time from the
        ends of leaves. A run has one time of use, so its pages go one after the other.
        """
        queue = self._queue
        chosen: list[Victim] = []
        seen: list[tuple[int, int, int, Node]] = []
        gone: dict[Node, int] = {}
        while count > 0 or sides > 0:
            entry = heapq.heappop(queue)
            node = entry[-1]
            alone = not node.children or gone.get(node) == len(node.children)
            if node.end < 0 or node.locks or not alone:
                node.queued = False
                continue
            if entry[0] != node.last_use:
                heapq.heappush(queue, self._entry(node))
                continue
            seen.append(entry)
            taken = min(max(count, 0), node.pages.size)
            if sides > 0:
                taken = max(taken, last_with(node, sides))
            victim = Victim(node, taken)
            chosen.append(victim)
            count -= taken
            if sides > 0:
                sides -= victim.sides.size
            parent = node.parent
            if taken == node.pages.size and parent is not None and parent.parent is not None:
                gone[parent] = gone.get(parent, 0) + 1
                if gone[parent] == len(parent.children):
                    self._enqueue(parent, leaf=True)
        for entry in seen:
            heapq.heappush(queue, entry)
        return chosen

    def evict(self, victims: list[Victim]) -> None:
        """Take out what `victims` named."""
        for victim in victims:
            node, taken = victim
            gone = victim.sides.size
            left = node.pages.size - taken
            parent = node.parent
            assert parent is not None
            if left:
                pages, tokens = node.pages[:left], node.tokens[: left * self._page_size]
                # A view would keep the whole run in memory; copied only once half is gone.
                base = pages.base
                if base is None or base.size >= 2 * left:
                    pages, tokens = pages.copy(), tokens.copy()
                node.pages, node.tokens = pages, tokens
                node.end -= taken
                if node.sides is not None:
                    node.sides = node.sides[:left].copy()
                    node.live -= gone
            else:
                del parent.children[self._key(node)]
                node.end = _DEAD
                node.parent = None
                if parent.parent is not None:
                    self._enqueue(parent)
                elif not parent.children:
                    del self._roots[parent.name]
            self.cached -= taken
            self.evictable -= taken
            self.evicted += taken
            self.side_cached -= gone
            self.side_evictable -= gone
            self.side_evicted += gone
        if not self.cached:
            # Nodes that are gone would stay in memory, with their prompts, until the next eviction.
            self._queue.clear()

    # -- looking ---------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """Every node but the roots."""
        found: list[Node] = []
        open_nodes = list(self._roots.values())
        while open_nodes:
            children = open_nodes.pop().children.values()
            found.extend(children)
            open_nodes.extend(children)
        return found

    def tops(self) -> list[tuple[Hashable, Node]]:
        """The first node of every prefix, with its namespace."""
        return [
            (name, child) for name, root in self._roots.items() for child in root.children.values()
        ]

    # -- inside ----------------------------------------------------------------------------

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self._page_size].tobytes()

    def _ending_at(self, node: Node, pages: int) -> Node:
        """The node of the path to ``node`` that ends after ``pages`` pages, split off if need be.

        The lower half stays the same object, so that whoever holds it still does.
        """
        while node.start >= pages:
            assert node.parent is not None
            node = node.parent
        if node.end == pages:
            return node
        parent = node.parent
        assert parent is not None
        at = pages - node.start
        cut = at * self._page_size
        beside = None if node.sides is None else node.sides[:at].copy()
        upper = Node(
            parent,
            node.tokens[:cut].copy(),
            node.pages[:at].copy(),
            beside,
            node.last_use,
            node.seq,
        )
        upper.locks = node.locks
        if node.sides is not None:
            node.sides = node.sides[at:].copy()
            node.live -= upper.live
        parent.children[self._key(node)] = upper
        node.parent = upper
        node.tokens, node.pages = node.tokens[cut:].copy(), node.pages[at:].copy()
        node.seq += at
        upper.children[self._key(node)] = node
        return upper

    def _entry(self, node: Node) -> tuple[int, int, int, Node]:
        return (node.last_use, node.seq, next(self._order), node)

    def _enqueue(self, node: Node, leaf: bool = False) -> None:
        """Tell the queue of a node that may be evicted; `victims` drops those that may not."""
        if not node.queued and node.locks == 0 and (leaf or not node.children):
            node.queued = True
            heapq.heappush(self._queue, self._entry(node))


class Match(Unpicklable):
    """A cached prefix, as `PrefixCache.match` found it.

    Attributes:
        length: tokens, whole pages.
        pages: page ids, int32 ``(length / page_size,)``.
    """

    __slots__ = ("_node", "_tree", "length", "namespace", "pages")

    def __init__(
        self, tree: RadixTree, node: Node | None, length: int, pages: Int32, namespace: Any
    ) -> None:
        self._tree = tree
        self._node = node
        self.length = length
        self.pages = pages
        self.namespace = namespace

    def node_in(self, tree: RadixTree) -> Node | None:
        """The node it ends in.

        Raises:
            ValueError: the match comes from another cache.
        """
        if self._tree is not tree:
            raise ValueError("this match belongs to another allocator: match again in this one")
        return self._node

    @property
    def evicted(self) -> bool:
        """Whether a page of it was evicted since."""
        return self._node is not None and self._node.end != self.pages.size

    def __repr__(self) -> str:
        return f"Match(length={self.length}, pages={self.pages.size}, namespace={self.namespace!r})"
