"""KVAllocator: the public verbs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from sgalloc import growing, laws, ranges, returning
from sgalloc.caching import PrefixCache, checked_namespace
from sgalloc.contiguity import Runs, page_runs
from sgalloc.core import Core
from sgalloc.device import open_device
from sgalloc.errors import AllocError, StalePlan
from sgalloc.exports import PageTables
from sgalloc.inputs import Int64, counts, int64_array, token_sequences, whole_number
from sgalloc.ledger import Batch, Ledger, names_one
from sgalloc.pages import LOCKED, Int32, PagePool
from sgalloc.plan import Gather, Plan, mixed_plan
from sgalloc.prefix import Match
from sgalloc.stats import GroupStats, RowStats, StagingStats, Stats

_NO_ROWS: Int64 = np.empty(0, np.int64)
_MAX_SLOT = (1 << 31) - 1
_MAX_ENTRIES = 1 << 60
_RANGED = (
    "open",
    "open_with_prefix",
    "extend",
    "decode",
    "reserve",
    "plan",
    "apply",
    "commit",
    "trim",
    "release",
    "slots",
)

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _verb(method: _Verb) -> _Verb:
    """Count refusals by reason."""

    @wraps(method)
    def call(self: KVAllocator, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except AllocError as refusal:
            self._refusals[type(refusal).__name__] += 1
            raise

    return call  # type: ignore[return-value]


class KVAllocator:
    """Decides on the host which pages every request holds, and writes ``req_to_token``.

    Args:
        num_pages: pages in the pool, ids 1..``num_pages``; page 0 is never handed out.
        page_size: slots in a page.
        max_requests: rows of the table that requests can take, 1..``max_requests``.
        row_width: slots in a row; see `sgalloc.sizing.row_width`.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: a GPU where there is one.
        prefix_cache: whether to keep the pages of finished requests for those to come.
        stream: where the table is written: None for the stream current at each call (torch's
            if torch is loaded, else CuPy's), a stream or a raw handle, or ``"plan"`` for one of
            its own.
        reader: the stream that reads the table, where that is another one.
        page_table: whether to keep page ids on the device, too, as `page_table`.

    Handles may be one int, a sequence, an array or a `Batch`; lengths one int for all or one
    per request. A call that raises has changed nothing.

    Raises:
        TypeError, ValueError: a configuration that cannot be served, naming the field.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        device: str = "auto",
        prefix_cache: bool = False,
        stream: Any = None,
        reader: Any = None,
        page_table: bool = False,
    ) -> None:
        self.num_pages = whole_number(num_pages, "num_pages", 1, _MAX_SLOT)
        self.page_size = whole_number(page_size, "page_size", 1, _MAX_SLOT)
        self.max_requests = whole_number(max_requests, "max_requests", 1, _MAX_SLOT - 1)
        self.row_width = whole_number(row_width, "row_width", 1, _MAX_SLOT)
        if (self.num_pages + 1) * self.page_size - 1 > _MAX_SLOT:
            raise ValueError(
                f"num_pages={num_pages} of page_size={page_size} need slots past 2**31 - 1, the "
                f"last that int32 holds: use at most {(_MAX_SLOT + 1) // self.page_size - 1} pages"
            )
        if self.row_width < self.page_size:
            raise ValueError(
                f"row_width={row_width} holds no page of page_size={page_size}: "
                "make rows at least one page wide"
            )
        if (self.max_requests + 1) * self.row_width > _MAX_ENTRIES:
            raise ValueError(
                f"max_requests={max_requests} rows of row_width={row_width} cannot be addressed: "
                "lower one of them"
            )
        if not isinstance(prefix_cache, bool):
            raise TypeError(f"prefix_cache must be True or False, got {prefix_cache!r}")
        if not isinstance(page_table, bool):
            raise TypeError(f"page_table must be True or False, got {page_table!r}")
        table = open_device(
            device, self.max_requests, self.row_width, self.page_size, stream, reader, page_table
        )
        ledger = Ledger(self.max_requests, self.row_width, self.page_size)
        self._ledger = ledger
        self._core = Core.build(ledger, PagePool(self.num_pages), table, prefix_cache)
        self._rounds_from = {"auto": table.rounds_from, "device": 1}
        self._refusals: Counter[str] = Counter()
        ranges.instrument(self, _RANGED)

    def __repr__(self) -> str:
        return (
            f"KVAllocator({self.num_pages} pages of {self.page_size}, {self.available()} free, "
            f"{self._ledger.open_rows} of {self.max_requests} rows open, {self._core.device.name})"
        )

    # -- what is held ----------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Where the table lives: ``"cpu"``, ``"cuda:0"``, ..."""
        return self._core.device.name

    @property
    def req_to_token(self) -> Any:
        """The table, int32 ``(max_requests + 1, row_width)``: written here, read by forwards."""
        return self._core.device.table

    @property
    def prefix(self) -> PrefixCache:
        """The prefix cache: ``match`` and ``publish``.

        Raises:
            ValueError: this allocator was made without one.
        """
        if self._core.prefix is None:
            raise ValueError("this allocator has no prefix cache: make it with prefix_cache=True")
        return self._core.prefix

    @property
    def page_table(self) -> Any:
        """Page ids, int32 ``(max_requests + 1, row_width // page_size)``, written as the table is.

        Raises:
            ValueError: this allocator was made without one.
        """
        if self._core.device.page_table is None:
            raise ValueError("this allocator keeps no page table: make it with page_table=True")
        return self._core.device.page_table

    def page_tables(self, max_requests: int, max_pages: int) -> PageTables:
        """Arrays for attention kernels: a padded page table and a CSR list, exported on demand.

        Args:
            max_requests: most requests of one update.
            max_pages: most pages of a request.
        """
        most = whole_number(max_requests, "max_requests", 1, _MAX_SLOT)
        return PageTables(self._core, most, whole_number(max_pages, "max_pages", 1, _MAX_SLOT))

    def batch(self, x: Any) -> Batch:
        """What a decode loop keeps: ``x`` looked up once."""
        return Batch(self._ledger, x.handles if isinstance(x, Batch) else x)

    def rows(self, x: Any) -> Int32:
        """Rows of the table, int32 ``(n,)``."""
        return self._ledger.rows_of(x).astype(np.int32)

    def committed(self, x: Any) -> Int64:
        """C, tokens, int64 ``(n,)``."""
        return self._ledger.committed.take(self._ledger.rows_of(x))

    def allocated(self, x: Any) -> Int64:
        """A, tokens, int64 ``(n,)``."""
        return self._ledger.allocated.take(self._ledger.rows_of(x))

    def decode_index(self, x: Any) -> Int64:
        """Decode steps taken, int64 ``(n,)``."""
        return self._ledger.decode_steps.take(self._ledger.rows_of(x))

    def pages(self, handle: Any, start: int = 0, stop: int | None = None) -> Int32:
        """Page ids of the tokens ``[start, stop)`` of one request, int32, from the ledger.

        Args:
            handle: the request.
            start: first token, on a page edge.
            stop: one past the last token, at most A; C if None.

        Raises:
            ValueError: off a page edge, or outside the extent.
        """
        rows = self._ledger.rows_of(handle)
        if rows.size != 1:
            raise ValueError(f"pages() takes one handle, got {rows.size}: call it for each")
        row, size = int(rows[0]), self.page_size
        held = int(self._ledger.allocated[row])
        last = int(self._ledger.committed[row]) if stop is None else whole_number(stop, "stop")
        first = whole_number(start, "start")
        if first % size:
            raise ValueError(f"start={first} is inside a page of {size}: begin on a page edge")
        if not first <= last <= held:
            raise ValueError(
                f"tokens [{first}, {last}) are not in the extent of {held} tokens of row {row}"
            )
        return self._ledger.pages[row, first // size : -(-last // size)].copy()

    @_verb
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
                f"{self._ledger.allocated[row]} tokens of row {row}"
            )
        if out is not None:
            size = int((last - first).sum())
            target = self._core.device.checked_out(out, size)
            self._core.device.write(None, None, Gather(rows, first, last, size, target), None)
            return out
        return self._core.device.gather(rows, first, last)

    # -- opening ---------------------------------------------------------------------------

    @_verb
    def open(self, count: int = 1, namespace: Any = None) -> Int64:
        """Take rows for ``count`` new requests; their handles, int64 ``(count,)``.

        Args:
            count: requests.
            namespace: None, an int, a str or bytes: whose prefixes they see and leave.

        Raises:
            OutOfRows: fewer rows are free.
        """
        number = whole_number(count, "count")
        name = checked_namespace(namespace)
        self._core.settle()
        if not number:
            return _NO_ROWS.copy()
        return self._ledger.open(number, name)

    @_verb
    def open_with_prefix(self, matches: Match | Sequence[Match]) -> Int64:
        """Rows whose first pages are those of ``matches``; their handles, int64.

        The pages are locked and never written; C = A = the length of the match.

        Raises:
            StalePlan: a page of a match was evicted since.
            OutOfRows: fewer rows are free.
            RowTooNarrow: a match is longer than a row.
        """
        wanted = [matches] if isinstance(matches, Match) else list(matches)
        for match in wanted:
            if not isinstance(match, Match):
                raise TypeError(f"open_with_prefix takes matches of prefix.match, got {match!r}")
        prefix = self.prefix
        self._core.settle()
        return prefix.open_with(wanted) if wanted else _NO_ROWS.copy()

    # -- growing ---------------------------------------------------------------------------

    @_verb
    def extend(self, x: Any, lengths: Any, out: Any = None, after: Any = None) -> Plan:
        """Prefill, or the next chunk: grow until A covers ``lengths``, then C = lengths.

        Args:
            x: a batch, handles or a handle.
            lengths: tokens of the whole request, an int or one per request.
            out: int32 or int64 array that receives the slots of the new tokens, flat.
            after: a CUDA event that the write waits for.

        Returns:
            The applied plan.

        Raises:
            ValueError: a length below C (that is `trim`).
            OutOfPages, RowTooNarrow: it does not fit.
        """
        rows = self._ledger.rows_of(x)
        start = self._ledger.committed.take(rows)
        stop = self._extend_stop(rows, start, lengths)
        return self._do(rows, start, stop, out, after, settling=rows)

    @_verb
    def decode(self, x: Any, tokens: Any = 1, out: Any = None, after: Any = None) -> Plan:
        """Plain decode: grow until A covers C + ``tokens``, then C += tokens.

        Args, returns, raises: as `extend`; ``tokens`` an int or one per request.
        """
        rows = self._ledger.rows_of(x)
        start = self._ledger.committed.take(rows)
        stop = start + np.asarray(counts(tokens, rows.size, "tokens"))
        return self._do(rows, start, stop, out, after, settling=rows, decoding=rows)

    @_verb
    def reserve(
        self, x: Any, reserve: Any, out: Any = None, after: Any = None, rounding: str = "auto"
    ) -> Plan:
        """Speculative decode: grow until A covers C + ``reserve``, in whole pages. C stays.

        Args:
            x: a batch, handles or a handle.
            reserve: tokens past C, an int or one per request; it may change every step.
            out: int32 or int64 array that receives the slots of ``[C, C + reserve)``, flat.
            after: a CUDA event that the write waits for.
            rounding: where watermarks are rounded, ``"host"``, ``"device"`` or ``"auto"``;
                on a CPU these are one and the same.

        Returns:
            The applied plan.

        Raises:
            OutOfPages, RowTooNarrow: it does not fit.
        """
        if rounding not in ("auto", "host", "device"):
            raise ValueError(f"rounding must be 'auto', 'host' or 'device', got {rounding!r}")
        rows = self._ledger.rows_of(x)
        start = self._ledger.committed.take(rows)
        # asarray: NumPy adds a zero-dimensional array in half the time of a Python int.
        tokens = counts(reserve, rows.size, "reserve")
        stop = start + np.asarray(tokens)
        if rounding == "host" or out is not None or rows.size < self._rounds_from[rounding]:
            return self._do(rows, start, stop, out, after)
        self._core.settle()
        writer = growing.round_on_device(self._core, rows, start, tokens, after)
        plan = Plan(self._ledger, rows, start, stop)
        growing.apply(self._core, plan, None, None if writer else after, writer)
        return plan

    @_verb
    def plan(
        self,
        extend: tuple[Any, Any] | None = None,
        decode: tuple[Any, Any] | None = None,
        reserve: tuple[Any, Any] | None = None,
    ) -> Plan:
        """Any mix of extend, decode and reserve, not yet done.

        Args:
            extend: requests and lengths.
            decode: requests and tokens.
            reserve: requests and reserves.

        Returns:
            The plan; ``plan.fits`` says whether `apply` would succeed now.

        Raises:
            RowTooNarrow: a row cannot hold what it would have to.
        """
        parts: list[tuple[Int64, Int64] | None] = []
        for name, part in (("extend", extend), ("decode", decode), ("reserve", reserve)):
            if part is None:
                parts.append(None)
                continue
            x, amount = part
            rows = self._ledger.rows_of(x)
            start = self._ledger.committed.take(rows)
            if name == "extend":
                parts.append((rows, self._extend_stop(rows, start, amount)))
            else:
                parts.append((rows, start + counts(amount, rows.size, name)))
        plan = mixed_plan(self._ledger, *parts)
        plan.fits = plan.num_new_pages <= self.available(counting_cache=True)
        return plan

    @_verb
    def apply(self, plan: Plan, out: Any = None, after: Any = None) -> Plan:
        """Do what ``plan`` says.

        Args:
            plan: of `plan`.
            out: receives the slots of the new tokens, flat, in the order of the plan.
            after: a CUDA event that the write waits for.

        Raises:
            StalePlan: the ledger changed since the plan was made.
            OutOfPages: it does not fit.
        """
        self._check_plan(plan)
        self._core.settle()
        growing.apply(self._core, plan, out, after)
        return plan

    @_verb
    def commit(self, x: Any, accepted: Any) -> None:
        """C += ``accepted`` (an int or one per request, 0 allowed).

        Raises:
            CommitPastExtent: C would pass A.
        """
        rows = self._ledger.rows_of(x)
        tokens = counts(accepted, rows.size, "accepted")
        self._core.settle()
        if np.count_nonzero(tokens) and rows.size:
            self._ledger.commit(rows, tokens)

    # -- giving back -----------------------------------------------------------------------

    @_verb
    def trim(self, x: Any, lengths: Any, after: Any = None) -> None:
        """Park, or resume at a shorter prefix: C = min(C, lengths), pages past it go back.

        Args:
            x: a batch, handles or a handle.
            lengths: tokens to keep, an int or one per request.
            after: an event; pages wait in quarantine until it is done.

        Raises:
            InsideSharedPage: it would end inside a page shared with the prefix cache.
        """
        rows = self._ledger.rows_of(x)
        returning.trim(self._core, rows, counts(lengths, rows.size, "lengths"), after)

    @_verb
    def release(self, x: Any, *, tokens: Any = None, after: Any = None) -> None:
        """Everything goes back: pages and row.

        Args:
            x: a batch, handles or a handle.
            tokens: the token ids of each request (one sequence per request): the whole pages
                they cover go to the prefix cache instead. Without a cache they are ignored.
            after: an event; pages, rows and locks wait in quarantine until it is done.

        Raises:
            StaleHandle: one was released before; none is released now.
            ValueError: one stands twice, or tokens differ from the shared prefix.
        """
        rows, prefix = self._ledger.rows_of(x), self._core.prefix
        prepared = []
        if tokens is not None:
            known = token_sequences(tokens, rows.size, names_one(x))
            prepared = prefix.prepare(rows, known) if prefix is not None else []
        returning.release(self._core, rows, prepared, after)

    @_verb
    def settle(self) -> None:
        """Take in what waits behind events that are done; waits for none."""
        self._core.settle()

    def warm(self, max_pages: int | None = None) -> None:
        """Compile, allocate and touch all that a steady step uses, so that no later one pays.

        Args:
            max_pages: the most new pages of one step; on a GPU 2**21 if None, on a CPU there is
                no bound.
        """
        if max_pages is not None:
            whole_number(max_pages, "max_pages", 1)
        self._ledger.warm()
        self._core.device.warm(max_pages)

    # -- asking ----------------------------------------------------------------------------

    def available(self, group: str = "full", counting_cache: bool = False) -> int:
        """Pages that could be handed out now.

        Args:
            group: name of the group.
            counting_cache: count the pages of the prefix cache that could be evicted, too.
        """
        if group != "full":
            raise ValueError(f"there is no group {group!r}: this allocator has 'full'")
        return self._core.pool.free + (self._core.evictable if counting_cache else 0)

    def fits(
        self, plan_or_lengths: Any, after_releasing: Any = (), counting_cache: bool = True
    ) -> bool:
        """Whether it would go through, also in a world where some requests were released.

        Args:
            plan_or_lengths: a `Plan`, or the tokens of new requests (an int or a sequence):
                rows, row width and pages count.
            after_releasing: requests taken to be released first; if they are part of the
                plan, they leave it.
            counting_cache: whether cached pages may be evicted for it.

        Raises:
            StalePlan: the ledger changed since the plan was made.
        """
        leaving = self._ledger.rows_of(after_releasing)
        room = self.available(counting_cache=counting_cache)
        if leaving.size:
            room += int((self._ledger.page_counts(leaving) - self._ledger.shared[leaving]).sum())
            if counting_cache and self._core.prefix is not None:
                room += self._core.prefix.unlocked_by(leaving)
        if isinstance(plan_or_lengths, Plan):
            self._check_plan(plan_or_lengths)
            return plan_or_lengths.need_without(leaving) <= room
        lengths = int64_array(plan_or_lengths, "lengths")
        counts(lengths, lengths.size, "lengths")
        if lengths.size > self._ledger.free_rows + leaving.size:
            return False
        pages = -(-lengths // self.page_size)
        return not pages.size or (
            int(pages.max()) <= self._ledger.row_pages and int(pages.sum()) <= room
        )

    def stats(self) -> Stats:
        """A frozen snapshot of absolute numbers, in time that grows with open rows alone."""
        pool, ledger, tree = self._core.pool, self._ledger, self._core.tree
        cached = tree.cached if tree is not None else 0
        group = GroupStats(
            total=pool.num_pages,
            free=pool.free,
            quarantined=pool.waiting,
            cached=cached,
            locked=cached - tree.evictable if tree is not None else 0,
            pinned=0,
            owned=pool.num_pages - pool.free - pool.waiting - cached,
            high_water=pool.high_water,
            evicted=tree.evicted if tree is not None else 0,
        )
        rows = RowStats(
            ledger.max_requests, ledger.open_rows, ledger.free_rows, ledger.waiting_rows
        )
        live = ledger.live()
        return Stats(
            {"full": group},
            rows,
            dict(self._refusals),
            committed=int(ledger.committed.take(live).sum()),
            allocated=int(ledger.allocated.take(live).sum()),
            staging=StagingStats(*self._core.device.staging),
        )

    def runs(self, x: Any = None) -> Runs:
        """How contiguous the page ids of ``x`` (all open requests if None) are."""
        rows = self._ledger.live() if x is None else self._ledger.rows_of(x)
        return page_runs(self._ledger, rows)

    def owners(self) -> Int64:
        """Who has each page, int64 ``(num_pages + 1,)``, a copy; entry 0 is the padding page.

        A positive number is the row of the one request that owns the page. 0 is free, -1 in
        the prefix cache, -2 in quarantine, -3 in the prefix cache and held by a request or an
        event.
        """
        owners = self._core.pool.holder.copy()
        if self._core.tree is not None:
            for node in self._core.tree.nodes():
                if node.locks:
                    owners[node.pages] = LOCKED
        return owners

    def check(self, device: bool = False) -> None:
        """Prove the row law and the partition law, in time linear in pages.

        Args:
            device: compare the device table, too (this reads it back).

        Raises:
            LawViolation: naming the page and both owners, or the entry.
        """
        core = self._core
        laws.check_rows(core.ledger)
        if core.tree is not None and core.prefix is not None:
            laws.check_shared(core.ledger, core.tree, core.prefix.holds)
        laws.check_pages(core.ledger, core.pool, core.tree, core.quarantine)
        laws.check_row_ids(core.ledger, core.quarantine)
        if device:
            laws.check_table(core.ledger, core.device)

    # -- inside ----------------------------------------------------------------------------

    def _check_plan(self, plan: Any) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"apply takes a plan of plan(), got {plan!r}")
        if plan.ledger is not self._ledger:
            raise ValueError("this plan belongs to another allocator: plan with this one")
        if plan.version != self._ledger.version:
            raise StalePlan(
                "a call changed the ledger after this plan was made (or applied it): plan again"
            )

    def _extend_stop(self, rows: Int64, start: Int64, lengths: Any) -> Int64:
        stop = counts(lengths, rows.size, "lengths")
        # A copy, since the caller may go on to change the array before the plan is applied.
        stop = np.full(rows.size, stop) if isinstance(stop, int) else stop.copy()
        short = (stop < start).nonzero()[0]
        if short.size:
            at = short[0]
            raise ValueError(
                f"lengths[{at}]={stop[at]} is below the {start[at]} committed tokens of row "
                f"{rows[at]}: use trim to shorten a request"
            )
        return stop

    def _do(
        self,
        rows: Int64,
        start: Int64,
        stop: Int64,
        out: Any,
        after: Any,
        settling: Int64 | None = None,
        decoding: Int64 | None = None,
    ) -> Plan:
        self._core.settle()
        plan = Plan(self._ledger, rows, start, stop, settling, decoding)
        growing.apply(self._core, plan, out, after)
        return plan
