"""The prefix cache as callers see it: match, open with a prefix, publish, and release into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgalloc.device.unwritten import refuse_unwritten
from sgalloc.device.write_log import write_and_note
from sgalloc.errors import AllocError, InsideSharedPage, RowTooNarrow, StalePlan
from sgalloc.groups import NO_PAGES, clearing, joined
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64, int64_array, shown, token_sequences
from sgalloc.ledger import NO_ROWS, Ledger, concatenate, names_one
from sgalloc.nodes import Node, Uses
from sgalloc.ownership import Owner, Unpicklable
from sgalloc.pages import CACHED, Int32, PagePool
from sgalloc.plan import Segments, SideWrite
from sgalloc.prefix import Match, RadixTree
from sgalloc.quarantine import Returning

if TYPE_CHECKING:
    from sgalloc.device import Device
    from sgalloc.quarantine import Quarantine


class Prepared(NamedTuple):
    """A request whose whole pages are about to enter the tree."""

    row: int
    tokens: Int64
    pages: int


class Twins(NamedTuple):
    """Cached pages that take the place of a request's own.

    Attributes:
        first: number of the first of them.
        pages: ids, int32 ``(n,)``.
        sides: in the second group, int32 ``(n,)``, 0 where the request holds none.
        given: pages of the second group that the twins take over, int32 ``(n,)``, 0 for none.
    """

    first: int
    pages: Int32
    sides: Int32
    given: Int32


class PrefixCache(Unpicklable):
    """`KVAllocator.prefix`: whole pages of finished and running requests, shared by content."""

    def __init__(
        self,
        tree: RadixTree,
        ledger: Ledger,
        pool: PagePool,
        device: Device,
        quarantine: Quarantine,
        count: Callable[[AllocError], None],
        owner: Owner,
        side: Window | None = None,
    ) -> None:
        self._owner = owner
        self._side = side
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
        self._owner.check()
        ids = int64_array(tokens, "tokens")
        name = checked_namespace(namespace)
        whole = ids.size // self._ledger.page_size * self._ledger.page_size
        self.tree.tick()
        node, matched = self.tree.common(name, np.ascontiguousarray(ids[:whole]))
        if self._side is not None:
            matched = self._side.usable(self.tree.sides_to(node)[:matched])
        node, matched = self.tree.use(node, matched)
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
            WrongState: one is still being received, or a staged step has yet to write a page that
                would be given up.
        """
        try:
            self._owner.check()
            rows = self._ledger.rows_of(x)
            self._ledger.check_received(rows)
            prepared = self.prepare(rows, token_sequences(tokens, rows.size, names_one(x)))
            event = self._quarantine.pending(after)
            # Whatever can fail comes before the first change of host state.
            twins = self.twins(prepared)
            running = [one.row for one in prepared]
            if self._device.updates:
                rows = np.array(running, np.int64)
                first = np.array([run.first for run in twins], np.int64)
                stop = first + np.array([run.pages.size for run in twins], np.int64)
                refuse_unwritten(self._device, rows, first, stop, self._ledger.row_pages, "")
            self._quarantine.settle()
            given_up = [self._given_up(*pair) for pair in zip(prepared, twins, strict=True)]
            gone = NO_PAGES
            if event is None:
                gone = concatenate([what.unmapped for what in given_up], np.int32)
            self._show("publish", running, twins, gone)
        except AllocError as refusal:
            self._count(refusal)
            raise
        self.tree.tick()
        for one, known, what in zip(prepared, twins, given_up, strict=True):
            self._publish(one, known, what, event)

    def clear(self) -> int:
        """Evict every page that no request holds; how many these were."""
        self._owner.check()
        self._quarantine.settle()
        victims = self.tree.victims(self.tree.evictable)
        pages = concatenate([victim.pages for victim in victims], np.int32)
        sides = concatenate([victim.sides for victim in victims], np.int32)
        if self._side is not None and self._side.mapped:
            self._quarantine.unmap(pages)
        self.tree.evict(victims)
        self._pool.give(pages, CACHED)
        if self._side is not None:
            self._side.pool.give(sides, CACHED)
        return pages.size

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

    def enter(self, one: Prepared) -> tuple[Node | None, int, bool]:
        """Put the pages of one request into the tree.

        Returns:
            The node that ends where they do; how many were known before: the request's own
            pages below that number are duplicates, unless shared already; and whether some of
            these took over a page of the second group.
        """
        ledger, side = self._ledger, self._side
        pages = ledger.pages[one.row, : one.pages]
        name = ledger.namespace.get(one.row)
        if side is None:
            node, matched = self.tree.insert(name, one.tokens, pages)
            self._pool.hand_over(pages[matched:], one.row, CACHED)
            return node, matched, False
        sides = side.own_sides(one.row, one.pages)
        node, matched = self.tree.insert(name, one.tokens, pages, sides)
        self._pool.hand_over(pages[matched:], one.row, CACHED)
        fresh = sides[matched:]
        side.pool.hand_over(fresh[fresh != 0], one.row, CACHED)
        given = self.given(node, matched, int(ledger.shared[one.row]), sides)
        if not given.any():
            return node, matched, False
        assert node is not None
        padded = np.zeros(node.end, np.int32)
        padded[: given.size] = given
        self.tree.take_over(node, padded)
        side.pool.hand_over(given[given != 0], one.row, CACHED)
        return node, matched, True

    def given(self, node: Node | None, matched: int, shared: int, sides: Int32) -> Int32:
        """Of ``sides``, those that cached pages without a page of the second group take over.

        Args:
            node: where the cached path ends.
            matched: pages of it that are the request's.
            shared: pages that the request shares already.
            sides: what the request holds in the second group, int32, 0 for none.

        Returns:
            int32 ``(matched,)``, 0 for none.
        """
        given: Int32 = np.where(self.tree.sides_to(node)[:matched] == 0, sides[:matched], 0)
        given[: min(shared, matched)] = 0
        return given.astype(np.int32, copy=False)

    def entering(self, prepared: list[Prepared]) -> tuple[SideWrite | None, Int32]:
        """What the map has to show before a release into the tree. Nothing changes.

        Returns:
            The entries of what cached twins take over, None for none; and the pages of the
            requests that will be the tree's, int32, which stay in the map.
        """
        mains, ids, fresh = [], [], []
        for one, twins in zip(prepared, self.twins(prepared), strict=True):
            some = twins.given != 0
            mains.append(twins.pages[some])
            ids.append(twins.given[some])
            known = twins.first + twins.pages.size
            fresh.append(self._ledger.pages[one.row, known : max(one.pages, known)])
        pages = concatenate(mains, np.int32)
        write = None
        if pages.size:
            nowhere = np.full(pages.size, -1, np.int64)
            write = SideWrite(nowhere, concatenate(ids, np.int32), pages)
        return write, concatenate(fresh, np.int32)

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
        side = self._side
        sides = [
            NO_PAGES if side is None else side.readable(self.tree.sides_to(node)) for node in nodes
        ]
        shown = [
            Twins(0, match.pages, beside, NO_PAGES)
            for match, beside in zip(matches, sides, strict=True)
        ]
        self._show("open_with_prefix", rows.tolist(), shown)
        handles = ledger.open(len(matches))
        self.tree.tick()
        for row, match, node, beside in zip(rows.tolist(), matches, nodes, sides, strict=True):
            ledger.adopt(row, match.pages, match.namespace)
            if self._side is not None:
                self._side.adopt(row, beside)
            if node is not None:
                self.tree.touch(node)
                self._hold(row, node)
        return handles

    def unopen(self, rows: Int64, uses: Uses) -> None:
        """Undo `open_with` of ``rows`` in the tree, whose uses were ``uses`` before."""
        nodes = self.drop(rows)
        self.tree.restore_uses(uses)
        for node in nodes:
            self.tree.unlock(node)

    def drop(self, rows: Int64) -> list[Node]:
        """Forget what ``rows`` hold; the nodes whose locks the caller now owns."""
        if not self.holds:
            return []
        held = [self.holds.pop(row, None) for row in rows.tolist()]
        return [node for node in held if node is not None]

    def unlocked_by(self, rows: Int64) -> tuple[int, int]:
        """Cached pages, of both groups, that would become evictable if ``rows`` were released."""
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

    def twins(self, prepared: list[Prepared]) -> list[Twins]:
        """For each request the cached pages that take the place of its own; nothing changes.

        A request also meets those before it in the same call, which are not in the tree yet.
        """
        ledger, size, side = self._ledger, self._ledger.page_size, self._side
        coming: dict[tuple[Any, bytes], list[tuple[Int64, Int32, Int32]]] = {}
        # What twins take over from earlier requests of this call, by their page.
        taken: dict[int, int] = {}
        twins = []
        for one in prepared:
            name, shared = ledger.namespace.get(one.row), int(ledger.shared[one.row])
            node, matched = self.tree.common(name, one.tokens)
            known = self.tree.pages_to(node)[:matched]
            beside = NO_PAGES if side is None else self.tree.sides_to(node)[:matched]
            alike = coming.setdefault((name, one.tokens[:size].tobytes()), [])
            for tokens, pages, sides in alike:
                length = min(tokens.size, one.tokens.size)
                differs = (tokens[:length] != one.tokens[:length]).nonzero()[0]
                common = (int(differs[0]) if differs.size else length) // size
                if common > known.size:
                    known, beside = pages[:common], sides[:common]
            own = ledger.pages[one.row, : one.pages]
            entering = np.concatenate((known, own[known.size :]))
            if side is None:
                alike.append((one.tokens, entering, NO_PAGES))
                twins.append(Twins(shared, known[shared:], NO_PAGES, NO_PAGES))
                continue
            held = side.own_sides(one.row, one.pages)
            if taken:
                over = [taken.get(page, 0) for page in known.tolist()]
                beside = np.where(beside == 0, np.array(over, np.int32), beside)
            given = np.where(beside == 0, held[: known.size], 0).astype(np.int32)
            given[:shared] = 0
            some = given != 0
            taken.update(zip(known[some].tolist(), given[some].tolist(), strict=True))
            beside = np.where(some, given, beside)
            alike.append((one.tokens, entering, np.concatenate((beside, held[known.size :]))))
            shows = np.where(held[: known.size] != 0, beside, 0).astype(np.int32)
            twins.append(Twins(shared, known[shared:], shows[shared:], given[shared:]))
        return twins

    def _given_up(self, one: Prepared, twins: Twins) -> Returning:
        """What a published request gives up for its twins."""
        ledger, row = self._ledger, one.row
        last = twins.first + twins.pages.size
        pages = ledger.pages[row, twins.first : last].copy()
        owners = np.full(pages.size, row, np.int64)
        if self._side is None:
            return Returning(pages, owners, NO_ROWS, [])
        held = self._side.own_sides(row, last)[twins.first :]
        held = held[(held != 0) & (twins.given == 0)]
        beside = np.full(held.size, row, np.int64)
        unmapped = pages if self._side.mapped else NO_PAGES
        return Returning(pages, owners, NO_ROWS, [], held, beside, unmapped)

    def _publish(self, one: Prepared, twins: Twins, given_up: Returning, event: Any) -> None:
        ledger, row = self._ledger, one.row
        shared = int(ledger.shared[row])
        if one.pages <= shared:
            if one.pages:
                self.tree.match(ledger.namespace.get(row), one.tokens)
            return
        node, matched, took = self.enter(one)
        assert node is not None and matched == shared + twins.pages.size
        old = self.holds.pop(row, None)
        self._hold(row, node)
        if old is not None:
            self.tree.unlock(old)
        ledger.share(row, one.pages, shared, twins.pages)
        if self._side is not None:
            self._side.share(row, shared, twins.sides)
        if event is not None and (matched < one.pages or took):
            self.tree.lock(node)
            given_up = given_up._replace(nodes=[node])
        self._quarantine.give_back(given_up, event)

    def _show(
        self, what: str, rows: list[int], twins: Sequence[Twins], gone: Int32 = NO_PAGES
    ) -> None:
        """Write runs of cached pages into the tables of rows, for the call ``what``.

        The map loses ``gone``, which go back for them, with the same launch.
        """
        count = np.array([run.pages.size for run in twins], np.int64)
        some = count > 0
        if not some.any():
            return
        total = int(count.sum())
        row = np.array(rows, np.int64)
        first = np.array([run.first for run in twins], np.int64)
        runs = Segments(row[some], first[some], count[some], total, self._ledger.per_row)
        pages = np.concatenate([run.pages for run in twins])
        write = None
        if self._side is not None:
            sides = np.concatenate([run.sides for run in twins])
            # The map knows cached pages already, but for what they take over.
            mains = np.zeros(total, np.int32)
            if self._side.mapped:
                given = [
                    run.given if run.given.size else np.zeros(run.pages.size, np.int32)
                    for run in twins
                ]
                mains = np.where(np.concatenate(given) != 0, pages, 0).astype(np.int32)
            write = SideWrite(runs.where, sides, mains)
            write = joined(write, clearing(gone)) if gone.size else write
        write_and_note(
            self._device, self._ledger.version, what, runs.rows.size, runs, pages, None, write
        )

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
    raise TypeError(f"namespace must be None, an int, a str or bytes, got {shown(namespace)}")
