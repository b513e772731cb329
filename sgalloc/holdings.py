"""What an allocator holds, seen from outside: nothing here changes anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from sgalloc.caching import PrefixCache
from sgalloc.contiguity import Runs, page_runs
from sgalloc.core import Core
from sgalloc.errors import AllocError, StalePlan
from sgalloc.exports import PageTables
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64, counts, flag, int64_array, shown, whole_number
from sgalloc.ledger import Batch, Ledger
from sgalloc.ownership import Owner, Unpicklable
from sgalloc.pages import LOCKED, Int32, PagePool
from sgalloc.plan import Gather, Plan
from sgalloc.stats import GroupStats, RowStats, StagingStats, Stats

_Method = TypeVar("_Method", bound=Callable[..., Any])
_MOST = (1 << 31) - 1


def counted(method: _Method) -> _Method:
    """Refuse other threads than the owner, and count refusals by reason."""

    @wraps(method)
    def call(self: Holdings, *args: Any, **kwargs: Any) -> Any:
        try:
            if get_ident() != self._owner.thread:
                self._owner.claim()
            return method(self, *args, **kwargs)
        except AllocError as refusal:
            self._count(refusal)
            raise

    return call  # type: ignore[return-value]


class Holdings(Unpicklable):
    """The questions that `KVAllocator` answers."""

    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    _ledger: Ledger
    _core: Core
    _owner: Owner
    _refusals: Counter[str]

    def __repr__(self) -> str:
        pool = self._core.pool
        return (
            f"KVAllocator({pool.num_pages} pages of {self.page_size}, {pool.free} free, "
            f"{self._ledger.open_rows} of {self.max_requests} rows open, {self._core.device.name})"
        )

    @property
    def device(self) -> str:
        """Where the table lives: ``"cpu"``, ``"cuda:0"``, ..."""
        return self._core.device.name

    @property
    def req_to_token(self) -> Any:
        """The table, int32 ``(max_requests + 1, row_width)``: written here, read by forwards."""
        return self._core.device.table

    @property
    def page_table(self) -> Any:
        """Page ids, int32 ``(max_requests + 1, row_width // page_size)``, written as the table is.

        Raises:
            ValueError: this allocator was made without one.
        """
        if self._core.device.page_table is None:
            raise ValueError("this allocator keeps no page table: make it with page_table=True")
        return self._core.device.page_table

    @property
    def has_window(self) -> bool:
        """Whether there is a window group."""
        return isinstance(self._core.side, Window)

    @property
    def window_table(self) -> Any:
        """Slots of the window group, int32, of the shape of `req_to_token`, 0 below the frontier.

        Raises:
            ValueError: this allocator was made without a window.
        """
        if self._core.device.side_table is None:
            raise ValueError("this allocator has no window group: make it with window=")
        return self._core.device.side_table

    @property
    def full_to_window(self) -> Any:
        """From slots of the full group to those of the window, int32, 0 where none is mapped;
        ``((num_pages + 1) * page_size,)``.

        Raises:
            ValueError: this allocator was made without such a map.
        """
        if not isinstance(self._core.side, Window) or not self._core.side.mapped:
            raise ValueError(
                "this allocator keeps no map: make it with window=SlidingWindow(..., slot_map=True)"
            )
        return self._core.device.side_map

    @property
    def logical_to_device(self) -> Any:
        """From slots of the logical group to those of the device, int32, 0 where none is
        resident; ``((logical_pages + 1) * page_size,)``.

        Raises:
            ValueError: this allocator was made without ``sparse=``.
        """
        self._device_pages()
        return self._core.device.side_map

    @property
    def prefix(self) -> PrefixCache:
        """The prefix cache: ``match`` and ``publish``.

        Raises:
            ValueError: this allocator was made without one.
        """
        if self._core.prefix is None:
            raise ValueError("this allocator has no prefix cache: make it with prefix_cache=True")
        return self._core.prefix

    @counted
    def batch(self, x: Any) -> Batch:
        """What a decode loop keeps: ``x`` looked up once."""
        if isinstance(x, Batch):
            x.rows_in(self._ledger)
            x = x.handles
        return Batch(self._ledger, x)

    @counted
    def rows(self, x: Any) -> Int32:
        """Rows of the table, int32 ``(n,)``."""
        return self._ledger.rows_of(x).astype(np.int32)

    @counted
    def committed(self, x: Any) -> Int64:
        """C, tokens, int64 ``(n,)``."""
        return self._ledger.committed.take(self._ledger.rows_of(x))

    @counted
    def allocated(self, x: Any) -> Int64:
        """A, tokens, int64 ``(n,)``."""
        return self._ledger.allocated.take(self._ledger.rows_of(x))

    @counted
    def decode_index(self, x: Any) -> Int64:
        """Decode steps taken, int64 ``(n,)``."""
        return self._ledger.decode_steps.take(self._ledger.rows_of(x))

    @counted
    def pages(self, handle: Any, start: int = 0, stop: int | None = None) -> Int32:
        """Page ids of the tokens ``[start, stop)`` of one request, int32, from the ledger.

        Args:
            handle: the request.
            start: first token, on a page edge.
            stop: one past the last token, at most A; C if None.

        Raises:
            ValueError: off a page edge, or outside the extent.
        """
        row, size = self._one_row(handle, "pages"), self.page_size
        held = int(self._ledger.allocated[row])
        last = int(self._ledger.committed[row]) if stop is None else whole_number(stop, "stop")
        first = whole_number(start, "start")
        if first % size:
            raise ValueError(f"start={first} is inside a page of {size}: begin on a page edge")
        if not first <= last <= held:
            raise ValueError(
                f"tokens [{first}, {last}) are not in the extent of {held} tokens of row {row}: "
                "ask for tokens within it"
            )
        return self._ledger.pages[row, first // size : -(-last // size)].copy()

    @counted
    def window_pages(self, handle: Any) -> Int32:
        """The window page of each page of one request, 0 below the frontier, int32
        ``(A // page_size,)``, from the ledger: what `window_table` says, without reading it.
        """
        row, window = self._one_row(handle, "window_pages"), self._window()
        return window.own_sides(row, int(self._ledger.allocated[row]) // self.page_size)

    @counted
    def device_pages(self, handle: Any) -> Int32:
        """The device page of each logical page of one request, 0 where none is mapped, int32
        ``(A // page_size,)``, from the ledger: what `logical_to_device` says.
        """
        group = self._device_pages()
        return group.mapped_pages(self._one_row(handle, "device_pages"))

    @counted
    def buffer_pages(self, handle: Any) -> Int32:
        """Device page ids of one request's buffer, int32: a full one is not mapped, and is for
        the engine's own swaps; one that is not full yet is mapped; a dense request has none.
        """
        group = self._device_pages()
        return group.buffer_of(self._one_row(handle, "buffer_pages"))

    @counted
    def scratch_pages(self, handle: Any) -> Int32:
        """Device page ids for the drafts of one request, int32, never mapped; none before it was
        made sparse.
        """
        group = self._device_pages()
        return group.scratch_of(self._one_row(handle, "scratch_pages"))

    @counted
    def slots(self, x: Any, start: Any, stop: Any, out: Any = None) -> Any:
        """The slots of positions ``[start, stop)`` of each request, flat, in order.

        Args:
            x: a batch, handles or a handle.
            start: first position, an int or one per request.
            stop: one past the last position, at most A.
            out: int32 or int64 array on the device, of exactly the right size.

        Returns:
            ``out``, or a new int32 array.
        """
        rows = self._ledger.rows_of(x)
        first = np.broadcast_to(counts(start, rows.size, "start"), rows.shape)
        last = np.broadcast_to(counts(stop, rows.size, "stop"), rows.shape)
        bad = ((last < first) | (last > self._ledger.allocated.take(rows))).nonzero()[0]
        if bad.size:
            at = bad[0]
            row = int(rows[at])
            raise ValueError(
                f"positions [{first[at]}, {last[at]}) are not in the extent of "
                f"{self._ledger.allocated[row]} tokens of row {row}: ask for positions within it"
            )
        if out is not None:
            size = int((last - first).sum())
            target = self._core.device.checked_out(out, size)
            self._core.device.write(None, None, Gather(rows, first, last, size, target), None)
            return out
        return self._core.device.gather(rows, first, last)

    def available(self, group: str = "full", counting_cache: bool = False) -> int:
        """Pages that could be handed out now.

        Args:
            group: name of the group.
            counting_cache: count the pages of the prefix cache that could be evicted, too.
        """
        core, counting_cache = self._core, flag(counting_cache, "counting_cache")
        pool = self._pool(group)
        if not counting_cache:
            return pool.free
        return pool.free + (core.evictable if pool is core.pool else core.side_evictable)

    @counted
    def fits(
        self, plan_or_lengths: Any, after_releasing: Any = (), counting_cache: bool = True
    ) -> bool:
        """Whether it would go through, also in a world where some requests were released.

        Args:
            plan_or_lengths: a `Plan`, or the tokens of new requests (an int or a sequence):
                rows, row width and pages count.
            after_releasing: requests taken to be released first, without ``tokens``; if they
                are part of the plan, they leave it. One that is still being received gives
                nothing back at once. With ``tokens`` as much comes back, but where a cached
                prefix that others hold has lost window pages: it takes theirs over.
            counting_cache: whether cached pages may be evicted for it.

        Raises:
            StalePlan: the ledger changed since the plan was made.
        """
        counting_cache = flag(counting_cache, "counting_cache")
        leaving = self._ledger.rows_of(after_releasing)
        if self._ledger.receiving_rows:
            # What is still being received gives nothing back before its writers are done.
            leaving = leaving[~self._ledger.receiving.take(leaving)]
        core = self._core
        rooms = core.rooms(counting_cache)
        if leaving.size:
            back = int((self._ledger.page_counts(leaving) - self._ledger.shared[leaving]).sum())
            rooms[core.pool.group] += back
            if core.side is not None:
                rooms[core.side.pool.group] += core.side.held(leaving)[1].size
            if counting_cache and core.prefix is not None:
                unlocked, beside = core.prefix.unlocked_by(leaving)
                rooms[core.pool.group] += unlocked
                if core.side is not None:
                    rooms[core.side.pool.group] += beside
        if isinstance(plan_or_lengths, Plan):
            self._check_plan(plan_or_lengths)
            net = plan_or_lengths.need_without(leaving)
            return all(need <= rooms[group] for group, need in net.items())
        lengths = int64_array(plan_or_lengths, "lengths")
        counts(lengths, lengths.size, "lengths")
        if lengths.size > self._ledger.free_rows + leaving.size:
            return False
        pages = -(-lengths // self.page_size)
        return not pages.size or (
            int(pages.max()) <= self._ledger.row_pages and int(pages.sum()) <= min(rooms.values())
        )

    def stats(self) -> Stats:
        """A frozen snapshot of absolute numbers, in time that grows with ``max_requests``."""
        core, ledger, tree = self._core, self._ledger, self._core.tree
        groups = {
            core.pool.group: _group_stats(
                core.pool, *((tree.cached, tree.evictable, tree.evicted) if tree else (0, 0, 0))
            )
        }
        if core.side is not None:
            beside = (0, 0, 0)
            if tree is not None:
                beside = (tree.side_cached, tree.side_evictable, tree.side_evicted)
            groups[core.side.pool.group] = _group_stats(core.side.pool, *beside)
        rows = RowStats(
            ledger.max_requests, ledger.open_rows, ledger.free_rows, ledger.waiting_rows
        )
        live = ledger.live()
        return Stats(
            MappingProxyType(groups),
            rows,
            MappingProxyType(dict(self._refusals)),
            committed=int(ledger.committed.take(live).sum()),
            allocated=int(ledger.allocated.take(live).sum()),
            staging=StagingStats(*self._core.device.staging),
        )

    @counted
    def runs(self, x: Any = None) -> Runs:
        """How contiguous the page ids of ``x`` (all open requests if None) are."""
        rows = self._ledger.live() if x is None else self._ledger.rows_of(x)
        return page_runs(self._ledger, rows)

    @counted
    def frontier(self, x: Any) -> Int64:
        """The window's frontier, tokens, int64 ``(n,)``: what is below it was evicted.

        Raises:
            ValueError: this allocator was made without a window.
        """
        return self._window().first.take(self._ledger.rows_of(x)) * self.page_size

    def owners(self, group: str | None = None) -> Int64:
        """Who has each page of a group, int64 ``(pages + 1,)``, a copy; entry 0 is padding.

        A positive number is the row of the one request that owns the page. 0 is free, -1 in
        the prefix cache, -2 in quarantine, -3 in the prefix cache and held by a request or an
        event, -4 pinned for a remote writer.

        Args:
            group: its name; the group whose slots the table holds if None.

        Raises:
            ValueError: there is no such group.
        """
        self._owner.check()
        pool = self._core.pool if group is None else self._pool(group)
        owners = pool.holder.copy()
        if self._core.tree is not None:
            main = pool is self._core.pool
            for node in self._core.tree.nodes():
                if node.locks:
                    # A cached page without one in the second group names its padding page.
                    owners[node.pages if main else node.sides] = LOCKED
            owners[0] = 0
        return owners

    def page_tables(self, max_requests: int, max_pages: int) -> PageTables:
        """Arrays for attention kernels: a padded page table and a CSR list, exported on demand.

        Args:
            max_requests: most requests of one update.
            max_pages: most pages of a request.
        """
        self._owner.check()
        most = whole_number(max_requests, "max_requests", 1, _MOST)
        return PageTables(self._core, most, whole_number(max_pages, "max_pages", 1, _MOST))

    def _window(self) -> Window:
        if not isinstance(self._core.side, Window):
            raise ValueError("this allocator has no window group: make it with window=")
        return self._core.side

    def _pool(self, group: str) -> PagePool:
        """The pool of pages of a group."""
        core = self._core
        if group == core.pool.group:
            return core.pool
        if core.side is not None and group == core.side.pool.group:
            return core.side.pool
        have = " and ".join(f"'{name}'" for name in core.rooms(False))
        raise ValueError(f"there is no group {group!r}: this allocator has {have}")

    def _device_pages(self) -> DevicePages:
        if not isinstance(self._core.side, DevicePages):
            raise ValueError("this allocator has no device group: make it with sparse=")
        return self._core.side

    def _one_row(self, handle: Any, name: str) -> int:
        rows = self._ledger.rows_of(handle)
        if rows.size != 1:
            raise ValueError(f"{name}() takes one handle, got {rows.size}: call it for each")
        return int(rows[0])

    def _check_plan(self, plan: Any) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"apply takes a plan of plan(), got {shown(plan)}")
        if plan.ledger is not self._ledger:
            raise ValueError("this plan belongs to another allocator: plan with this one")
        if plan.version != self._ledger.version:
            raise StalePlan(
                "a call changed the ledger after this plan was made (or applied it): plan again"
            )

    def _count(self, refusal: AllocError) -> None:
        self._refusals[type(refusal).__name__] += 1


def _group_stats(pool: PagePool, cached: int, evictable: int, evicted: int) -> GroupStats:
    # Each is read once: another thread may ask in the middle of a call.
    total, free, waiting, pinned = pool.num_pages, pool.free, pool.waiting, pool.pinned
    return GroupStats(
        total=total,
        free=free,
        quarantined=waiting,
        cached=cached,
        locked=cached - evictable,
        pinned=pinned,
        owned=total - free - waiting - pinned - cached,
        high_water=pool.high_water,
        evicted=evicted,
    )
