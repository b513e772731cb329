"""The prefix cache as callers see it: match, open with a prefix, publish, and release into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.device.unwritten import refuse_unwritten
from sgalloc.errors import AllocError, InsideSharedPage, RowTooNarrow, StalePlan
from sgalloc.inputs import Int64, int64_array, token_sequences
from sgalloc.ledger import NO_ROWS, Ledger, names_one
from sgalloc.pages import CACHED, WAITING, Int32, PagePool
from sgalloc.plan import Segments
from sgalloc.prefix import Match, Node, RadixTree

if TYPE_CHECKING:
    from sgalloc.device import Device
    from sgalloc.quarantine import Quarantine


class Prepared(NamedTuple):
    """A request whose whole pages are about to enter the tree."""

    row: int
    tokens: Int64
    pages: int


class PrefixCache:
    """`KVAllocator.prefix`: whole pages of finished and running requests, shared by content."""

    def __init__(
        self,
        tree: RadixTree,
        ledger: Ledger,
        pool: PagePool,
        device: Device,
        quarantine: Quarantine,
        count: Callable[[AllocError], None],
    ) -> None:
        self._count = count
        self.tree = tree
        self.holds: dict[int, Node] = {}
        self._ledger = ledger
        self._pool = pool
        self._device = device
        self._quarantine = quarantine

    # -- public ----------------------------------------------------------------------------

    def match(self, tokens: Any, namespace: Any = None) -> Match:
        """The longest cached prefix of ``tokens`` in whole pages; a use of it.

        Args:
            tokens: token ids, flat; int64 is enough for any of them.
            namespace: None, an int, a str or bytes; prefixes of others are not seen.

        Returns:
            Match with ``length`` (tokens) and ``pages`` (ids, int32), for `open_with_prefix`.
        """
        ids = int64_array(tokens, "tokens")
        name = checked_namespace(namespace)
        whole = ids.size // self._ledger.page_size * self._ledger.page_size
        self.tree.tick()
        node, matched = self.tree.match(name, np.ascontiguousarray(ids[:whole]))
        pages = self.tree.pages_to(node)
        return Match(self.tree, node, matched * self._ledger.page_size, pages, name)

    def publish(self, x: Any, tokens: Any, after: Any = None) -> None:
        """Enter the settled whole pages of running requests, which go on with the tree's pages.

        Args:
            x: a batch, handles or a handle.
            tokens: the token ids of each request, one sequence per request (or one flat
                sequence for a single handle). Whole pages within min(C, known ids) enter.
            after: an event behind which pages given up for the tree's twins are freed.

        Raises:
            ValueError: the ids differ from the prefix that a request was opened with.
            WrongState: a staged step has yet to write a page that would be given up.
        """
        try:
            rows = self._ledger.rows_of(x)
            prepared = self.prepare(rows, token_sequences(tokens, rows.size, names_one(x)))
            event = self._quarantine.pending(after)
            # Whatever can fail comes before the first change of host state.
            twins = self._twins(prepared)
            running = np.array([one.row for one in prepared], np.int64)
            shared = self._ledger.shared.take(running)
            if self._device.updates:
                stop = shared + np.array([ids.size for ids in twins], np.int64)
                refuse_unwritten(self._device, running, shared, stop, self._ledger.row_pages, "")
            self._quarantine.settle()
            self._write(running, shared, twins)
        except AllocError as refusal:
            self._count(refusal)
            raise
        self.tree.tick()
        for one, ids in zip(prepared, twins, strict=True):
            self._publish(one, ids, event)

    def clear(self) -> int:
        """Evict every page that no request holds; how many these were."""
        self._quarantine.settle()
        victims = self.tree.victims(self.tree.evictable)
        pages = [victim.pages for victim in victims]
        self.tree.evict(victims)
        for ids in pages:
            self._pool.give(ids, CACHED)
        return sum(ids.size for ids in pages)

    # -- for the allocator -----------------------------------------------------------------

    def prepare(self, rows: Int64, tokens: Sequence[Int64 | None]) -> list[Prepared]:
        """What of each request can enter the tree. Changes nothing.

        Raises:
            ValueError: other tokens than the request was opened with.
        """
        size = self._ledger.page_size
        prepared = []
        for row, known in zip(rows.tolist(), tokens, strict=True):
            if known is None:
                continue
            pages = min(int(self._ledger.committed[row]), known.size) // size
            whole = np.ascontiguousarray(known[: pages * size])
            shared = min(int(self._ledger.shared[row]), pages)
            if shared:
                node, matched = self.tree.common(self._ledger.namespace.get(row), whole)
                # Other ids may be cached, too, so it is the path that has to be the same.
                path = self.tree.pages_to(node)[: min(matched, shared)]
                same = path == self._ledger.pages[row, : path.size]
                at = path.size if same.all() else int(same.argmin())
                if at < shared:
                    raise ValueError(
                        f"tokens of row {row} differ from its shared prefix on page {at} "
                        f"(positions {at * size}..{(at + 1) * size - 1}): "
                        "pass the ids that the request was opened with"
                    )
            prepared.append(Prepared(row, whole, pages))
        return prepared

    def enter(self, one: Prepared) -> tuple[Node | None, int]:
        """Put the pages of one request into the tree.

        Returns:
            The node that ends where they do, and how many were known before: the request's
            own pages below that number are duplicates, unless shared already.
        """
        ledger = self._ledger
        pages = ledger.pages[one.row, : one.pages]
        node, matched = self.tree.insert(ledger.namespace.get(one.row), one.tokens, pages)
        self._pool.hand_over(pages[matched:], one.row, CACHED)
        return node, matched

    def open_with(self, matches: Sequence[Match]) -> Int64:
        """Rows whose first pages are those of ``matches``, locked; their handles, int64.

        Raises:
            StalePlan: a page of a match was evicted.
            RowTooNarrow: a match is longer than a row.
            OutOfRows: too few rows.
        """
        ledger = self._ledger
        nodes = [match.node_in(self.tree) for match in matches]
        for match in matches:
            if match.evicted:
                raise StalePlan(
                    f"a page of this match of {match.length} tokens was evicted since: match again"
                )
            if match.pages.size > ledger.row_pages:
                raise RowTooNarrow(0, match.length, ledger.row_width)
        rows = ledger.next_rows(len(matches))
        self._write(rows, np.zeros_like(rows), [match.pages for match in matches])
        handles = ledger.open(len(matches))
        self.tree.tick()
        for row, match, node in zip(rows.tolist(), matches, nodes, strict=True):
            ledger.adopt(row, match.pages, match.namespace)
            if node is not None:
                self.tree.touch(node)
                self._hold(row, node)
        return handles

    def drop(self, rows: Int64) -> list[Node]:
        """Forget what ``rows`` hold; the nodes whose locks the caller now owns."""
        if not self.holds:
            return []
        held = [self.holds.pop(row, None) for row in rows.tolist()]
        return [node for node in held if node is not None]

    def unlocked_by(self, rows: Int64) -> int:
        """Cached pages that would become evictable if ``rows`` were released."""
        return self.tree.unlocked_by(
            [self.holds[row] for row in rows.tolist() if row in self.holds]
        )

    def shorten(self, row: int, pages: int) -> Node:
        """Let ``row`` hold only its first ``pages`` pages; the node whose lock is left over."""
        old = self.holds.pop(row)
        self._hold(row, self.tree.ancestor(old, pages))
        return old

    def check_trim(self, rows: Int64, lengths: Int64) -> None:
        """Refuse to cut inside a shared page.

        Raises:
            InsideSharedPage: naming the nearest page edges.
        """
        size = self._ledger.page_size
        inside = (lengths < self._ledger.shared.take(rows) * size) & (lengths % size != 0)
        bad = inside.nonzero()[0]
        if bad.size:
            row, length = int(rows[bad[0]]), int(lengths[bad[0]])
            edge = length // size * size
            raise InsideSharedPage(
                f"row {row} cannot be trimmed to {length} tokens, inside a page shared with the "
                f"prefix cache: trim to the page edge {edge} (or {edge + size})"
            )

    # -- inside ----------------------------------------------------------------------------

    def _twins(self, prepared: list[Prepared]) -> list[Int32]:
        """For each request the cached pages that take the place of its own; nothing changes.

        A request also meets those before it in the same call, which are not in the tree yet.
        """
        ledger, size = self._ledger, self._ledger.page_size
        coming: dict[tuple[Any, bytes], list[tuple[Int64, Int32]]] = {}
        twins = []
        for one in prepared:
            name, shared = ledger.namespace.get(one.row), int(ledger.shared[one.row])
            node, matched = self.tree.common(name, one.tokens)
            known = self.tree.pages_to(node)[:matched]
            alike = coming.setdefault((name, one.tokens[:size].tobytes()), [])
            for tokens, pages in alike:
                length = min(tokens.size, one.tokens.size)
                differs = (tokens[:length] != one.tokens[:length]).nonzero()[0]
                common = (int(differs[0]) if differs.size else length) // size
                if common > known.size:
                    known = pages[:common]
            own = ledger.pages[one.row, : one.pages]
            alike.append((one.tokens, np.concatenate((known, own[known.size :]))))
            twins.append(known[shared:])
        return twins

    def _publish(self, one: Prepared, twins: Int32, event: Any) -> None:
        ledger, row = self._ledger, one.row
        shared = int(ledger.shared[row])
        if one.pages <= shared:
            if one.pages:
                self.tree.match(ledger.namespace.get(row), one.tokens)
            return
        duplicates = ledger.pages[row, shared : shared + twins.size].copy()
        node, matched = self.enter(one)
        assert node is not None and matched == shared + twins.size
        old = self.holds.pop(row, None)
        self._hold(row, node)
        if old is not None:
            self.tree.unlock(old)
        ledger.share(row, one.pages, shared, twins)
        if event is None:
            self._pool.give(duplicates, row)
            return
        self._pool.hand_over(duplicates, row, WAITING)
        fresh = [node] if matched < one.pages else []
        for new in fresh:
            self.tree.lock(new)
        self._quarantine.add(event, duplicates, NO_ROWS, fresh)

    def _write(self, rows: Int64, first: Int64, pages: Sequence[Int32]) -> None:
        """Write runs of cached pages into the table."""
        count = np.array([ids.size for ids in pages])
        some = count > 0
        if some.any():
            total = int(count.sum())
            runs = Segments(rows[some], first[some], count[some], total, self._ledger.per_row)
            self._device.rejoin(self._device.write(runs, np.concatenate(pages), None, None))

    def _hold(self, row: int, node: Node | None) -> None:
        if node is not None:
            self.tree.lock(node)
            self.holds[row] = node


def checked_namespace(namespace: Any) -> Any:
    """``namespace`` if it can be one.

    Raises:
        TypeError: neither None, an int, a str nor bytes.
    """
    if namespace is None:
        return None
    # Subclasses, such as the members of an enum, are taken as what they are.
    if isinstance(namespace, str):
        return str(namespace)
    if isinstance(namespace, bytes):
        return bytes(namespace)
    odd = isinstance(namespace, (bool, np.bool_, np.timedelta64))
    if isinstance(namespace, (int, np.integer)) and not odd:
        return int(namespace)
    raise TypeError(f"namespace must be None, an int, a str or bytes, got {namespace!r}")
