"""KVAllocator: the public verbs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from threading import get_ident
from typing import Any

import numpy as np

from sgalloc import growing, ranges
from sgalloc.caching import checked_namespace
from sgalloc.core import Core
from sgalloc.device import Writer, open_device
from sgalloc.errors import AllocError
from sgalloc.groups import Side
from sgalloc.groups.sparse import DevicePages, Sparse
from sgalloc.groups.window import SlidingWindow, Window
from sgalloc.holdings import counted
from sgalloc.inputs import Int64, counts, flag, shown, whole_number
from sgalloc.ledger import NO_ROWS, Batch, Ledger
from sgalloc.pages import PagePool
from sgalloc.plan import Covering, Plan, mixed_plan
from sgalloc.prefix import Match
from sgalloc.shape import checked_shape
from sgalloc.trust import debugging
from sgalloc.trust.debugging import Debugging
from sgalloc.trust.journal import config_of
from sgalloc.trust.journalled import Journalled, Planned
from sgalloc.trust.snapshot import restore
from sgalloc.upkeep import Upkeep

_NEVER = 1 << 62


class KVAllocator(Upkeep):
    """Decides on the host which pages every request holds, and writes ``req_to_token``.

    Args:
        num_pages: pages in the pool, ids 1..``num_pages``; page 0 is never handed out.
        page_size: slots in a page.
        max_requests: rows of the table that requests can take, 1..``max_requests``.
        row_width: slots in a row; see `sgalloc.sizing.row_width`.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: a GPU where there is one.
        window: a second group of pages for sliding window attention.
        sparse: KV in host memory under logical pages, which the table names, and on the device a
            buffer for each request: ``num_pages`` are those of the device.
        prefix_cache: whether to keep the pages of finished requests for those to come.
        stream: where the table is written: None for the stream current at each call (torch's
            if torch is loaded, else CuPy's), a stream or a raw handle, or ``"plan"`` for one of
            its own.
        reader: the stream that reads the table, where that is another one.
        page_table: whether to keep page ids on the device, too, as `page_table`.
        journal: a file, not there yet, that every call which changes the ledger is written to.
        debug: whether to prove the laws after every call, and to poison what nobody owns; None
            for what the environment variable ``SGALLOC_DEBUG`` says.

    Handles may be one int, a sequence, an array or a `Batch`; lengths one int for all or one
    per request. A call that raises has changed nothing. One thread at a time uses an allocator, as
    `adopt` says; `stats`, `available` and `receiving` can be asked from any.

    Raises:
        TypeError, ValueError: a configuration that cannot be served, naming the field; a journal
            that cannot be made.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        device: str = "auto",
        window: SlidingWindow | None = None,
        sparse: Sparse | None = None,
        *,
        prefix_cache: bool = False,
        stream: Any = None,
        reader: Any = None,
        page_table: bool = False,
        journal: str | PathLike[str] | None = None,
        debug: bool | None = None,
    ) -> None:
        debugged = debugging.wanted(debug)
        shape = checked_shape(
            num_pages,
            page_size,
            max_requests,
            row_width,
            window,
            sparse,
            prefix_cache,
            page_table,
        )
        self.num_pages, self.page_size = shape.num_pages, shape.page_size
        self.max_requests, self.row_width = shape.max_requests, shape.row_width
        table = open_device(
            device,
            self.max_requests,
            self.row_width,
            self.page_size,
            stream,
            reader,
            page_table,
            shape.side,
        )
        group = "full" if sparse is None else "logical"
        ledger = Ledger(self.max_requests, self.row_width, self.page_size, group)
        self._ledger = ledger
        self._refusals: Counter[str] = Counter()
        pool = PagePool(shape.main_pages, group)
        side: Side | None = None
        if window is not None:
            side = Window(ledger, window, prefix_cache)
        elif sparse is not None:
            side = DevicePages(ledger, sparse, self.num_pages)
        self._core = Core.build(ledger, pool, table, prefix_cache, self._count, side)
        self._owner = self._core.owner
        self._make_plan = Plan if journal is None else Planned
        ranges.listen(self, self._core)
        self._journal = None
        if journal is not None:
            config = config_of(self, window, sparse, prefix_cache)
            self._journal = Journalled(journal, config)
            self._journal.wrap(self, self._core)
        self._debugging = self._debug() if debugged else None

    @classmethod
    def restore(
        cls,
        data: Any,
        device: str = "auto",
        stream: Any = None,
        *,
        reader: Any = None,
        max_table_bytes: int | None = None,
        debug: bool | None = None,
    ) -> KVAllocator:
        """An allocator from the bytes of `snapshot`: handles stay valid, tables are written anew.

        Args:
            data: bytes; everything in them is checked before it is used.
            device, stream, reader, debug: as of the constructor.
            max_table_bytes: most bytes of tables that may be allocated, 16 GiB if None.

        Raises:
            SnapshotError: bytes that are no snapshot, or one cut, altered or made up.
        """
        debugged = debugging.wanted(debug)
        # Poison comes behind what is written into tables of zeros.
        how = {"device": device, "stream": stream, "reader": reader, "debug": False}
        alloc = restore(data, max_table_bytes, lambda config: cls(**config, **how))
        if debugged:
            alloc._debugging = alloc._debug()
        return alloc

    # -- opening ---------------------------------------------------------------------------

    @counted
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
            return NO_ROWS.copy()
        return self._ledger.open(number, name)

    @counted
    def open_with_prefix(self, matches: Match | Sequence[Match]) -> Int64:
        """Rows whose first pages are those of ``matches``; their handles, int64.

        The pages are locked and never written; C = A = the length of the match.

        Raises:
            StalePlan: a page of a match was evicted since.
            OutOfRows: fewer rows are free.
            RowTooNarrow: a match is longer than a row.
        """
        wanted: list[Any]
        try:
            wanted = [matches] if isinstance(matches, Match) else list(matches)
        except TypeError:
            # Whatever is no sequence; some that have iter() refuse it only when asked.
            wanted = [matches]
        for match in wanted:
            if not isinstance(match, Match):
                raise TypeError(
                    f"open_with_prefix takes matches of prefix.match, got {shown(match)}"
                )
        prefix = self.prefix
        self._core.settle()
        return prefix.open_with(wanted) if wanted else NO_ROWS.copy()

    # -- growing ---------------------------------------------------------------------------

    def extend(
        self,
        x: Any,
        lengths: Any,
        out: Any = None,
        after: Any = None,
        window_tail: Any = None,
        logical_only: bool = False,
    ) -> Plan:
        """Prefill, or the next chunk: grow until A covers ``lengths``, then C = lengths.

        Args:
            x: a batch, handles or a handle.
            lengths: tokens of the whole request, an int or one per request.
            out: int32 or int64 array that receives the slots of the new tokens, flat.
            after: a CUDA event that the write waits for.
            window_tail: for rows that hold no window page: the last tokens alone that get
                window pages, an int or one per request; what is before them is whole pages.
            logical_only: with ``sparse=``: take logical pages alone. Without it all of a request
                comes onto the device, a sparse one's, too.

        Returns:
            The applied plan.

        Raises:
            ValueError: a length below C (that is `trim`), or a tail that is longer than what is
                new or does not begin on a page edge.
            WrongState: a tail for a row that holds window pages.
            OutOfPages, RowTooNarrow: it does not fit.
        """
        try:
            if get_ident() != self._owner.thread:
                self._owner.claim()
            rows, start, cur = self._ledger.holding(x)
            stop = self._extend_stop(rows, start, lengths)
            self._core.settle()
            plan = self._make_plan(self._ledger, rows, start, cur, stop, committing=rows)
            only = logical_only is not False and self._logical_only(logical_only)
            if self._core.side is not None or window_tail is not None:
                self._beside(plan, tail=window_tail, main_only=only)
            growing.apply(self._core, plan, out, after)
        except AllocError as refusal:
            self._count(refusal)
            raise
        if type(x) is Batch:
            x.moved(stop, plan.nxt)
        return plan

    def decode(self, x: Any, tokens: Any = 1, out: Any = None, after: Any = None) -> Plan:
        """Plain decode: grow until A covers C + ``tokens``, then C += tokens.

        Args, returns, raises: as `extend`; ``tokens`` an int or one per request.
        """
        try:
            if get_ident() != self._owner.thread:
                self._owner.claim()
            rows, start, cur = self._ledger.holding(x)
            stop = start + _operand(tokens, rows.size, "tokens")
            self._core.settle()
            plan = self._make_plan(
                self._ledger, rows, start, cur, stop, committing=rows, decoding=rows
            )
            if self._core.side is not None:
                self._beside(plan)
            growing.apply(self._core, plan, out, after)
        except AllocError as refusal:
            self._count(refusal)
            raise
        if type(x) is Batch:
            x.moved(stop, plan.nxt)
        return plan

    def reserve(
        self, x: Any, reserve: Any, out: Any = None, after: Any = None, rounding: str = "auto"
    ) -> Plan:
        """Speculative decode: grow until A covers C + ``reserve``, in whole pages. C stays.

        Args:
            x: a batch, handles or a handle.
            reserve: tokens past C, an int or one per request; it may change every step.
            out: int32 or int64 array that receives the slots of ``[C, C + reserve)``, flat.
            after: a CUDA event that the write waits for.
            rounding: where watermarks are rounded: ``"host"``, ``"device"`` (where a bound
                proves at once that the step fits) or ``"auto"``, by the size of the batch. On a
                CPU these are one and the same. The host counts in any case.

        Returns:
            The applied plan.

        Raises:
            OutOfPages, RowTooNarrow: it does not fit.
        """
        return self._reserve(x, reserve, out, after, self._rounds_from(rounding))

    @counted
    def plan(
        self,
        extend: tuple[Any, Any] | None = None,
        decode: tuple[Any, Any] | None = None,
        reserve: tuple[Any, Any] | None = None,
        evict_window: bool = False,
        logical_only: bool = False,
    ) -> Plan:
        """Any mix of extend, decode and reserve, not yet done.

        Args:
            extend: requests and lengths.
            decode: requests and tokens.
            reserve: requests and reserves.
            evict_window: let what left the window of these requests go back first; the plan
                counts it as ``gain``.
            logical_only: what is extended takes logical pages alone.

        Returns:
            The plan; ``plan.fits`` says whether `apply` would succeed now.

        Raises:
            RowTooNarrow: a row cannot hold what it would have to.
        """
        evict = flag(evict_window, "evict_window")
        parts: list[Covering | None] = []
        for name, part in (("extend", extend), ("decode", decode), ("reserve", reserve)):
            if part is None:
                parts.append(None)
                continue
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise TypeError(f"{name} must be a pair of requests and numbers, got {shown(part)}")
            x, amount = part
            rows, start, cur = self._ledger.holding(x)
            if name == "extend":
                stop = self._extend_stop(rows, start, amount)
            else:
                stop = start + _operand(amount, rows.size, name)
            parts.append(Covering(rows, start, cur, stop))
        plan = mixed_plan(self._make_plan, self._ledger, *parts)
        if evict:
            self._window()
        only = logical_only is not False and self._logical_only(logical_only)
        if self._core.side is not None:
            only = only and parts[0] is not None and parts[0][0].size > 0
            self._beside(plan, evict=evict, main_only=only)
        plan.fits = self._core.has_room(plan)
        return plan

    @counted
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

    def commit(self, x: Any, accepted: Any) -> None:
        """C += ``accepted`` (an int or one per request, 0 allowed).

        Raises:
            CommitPastExtent: C would pass A.
        """
        try:
            if get_ident() != self._owner.thread:
                self._owner.claim()
            rows = self._ledger.rows_of(x)
            if self._ledger.receiving_rows:
                self._ledger.check_received(rows)
            tokens = _operand(accepted, rows.size, "accepted")
            self._core.settle()
            if rows.size and np.count_nonzero(tokens):
                self._ledger.commit(x, tokens)
        except AllocError as refusal:
            self._count(refusal)
            raise

    # -- inside ----------------------------------------------------------------------------

    def _debug(self) -> Debugging:
        """Debug mode, from now on."""
        journal = self._journal
        return Debugging(self, self._core, None if journal is None else journal.log.last)

    def _reserve(
        self,
        x: Any,
        reserve: Any,
        out: Any = None,
        after: Any = None,
        rounds_from: int = _NEVER,
        evict: bool = False,
        counts_step: bool = False,
        through: Callable[[Plan, Writer], Writer] | None = None,
    ) -> Plan:
        """`reserve`, also as a decode step, and with what left the window going back first.

        Args:
            x, reserve, out, after: as `reserve`.
            rounds_from: requests from which the device rounds.
            evict: whether what left the window goes back first.
            counts_step: whether each request counts a decode step.
            through: makes, of the plan and the device, who writes in its place.
        """
        try:
            if get_ident() != self._owner.thread:
                self._owner.claim()
            rows, start, cur = self._ledger.holding(x)
            tokens = _operand(reserve, rows.size, "reserve")
            self._core.settle()
            writer: Writer | None = None
            if rows.size >= rounds_from and out is None:
                writer = growing.round_on_device(self._core, rows, start, cur, tokens, after)
            steps = rows if counts_step else None
            plan = self._make_plan(self._ledger, rows, start, cur, start + tokens, None, steps)
            if self._core.side is not None:
                self._beside(plan, evict)
            if through is not None:
                writer = through(plan, self._core.device)
            growing.apply(self._core, plan, out, after, writer)
        except AllocError as refusal:
            self._count(refusal)
            raise
        if type(x) is Batch:
            x.moved(start, plan.nxt)
        return plan

    def _beside(
        self, plan: Plan, evict: bool = False, tail: Any = None, main_only: bool = False
    ) -> None:
        """Let the second group take its part in ``plan``."""
        side = self._core.side
        if side is None:
            raise ValueError("window_tail= is for a window group: make the allocator with window=")
        if tail is not None:
            tail = counts(tail, plan.rows.size, "window_tail")
        plan.attach(side.part(plan, evict, tail, main_only))

    def _logical_only(self, wanted: Any) -> bool:
        """``wanted``, if this allocator can do so."""
        if not isinstance(wanted, bool):
            raise TypeError(f"logical_only must be True or False, got {shown(wanted)}")
        if wanted and not isinstance(self._core.side, DevicePages):
            raise ValueError("logical_only= is for a device group: make the allocator with sparse=")
        return wanted

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

    def _rounds_from(self, rounding: str) -> int:
        """Requests from which a reserve is rounded on the device."""
        if rounding == "auto":
            return self._core.device.rounds_from
        if rounding not in ("host", "device"):
            raise ValueError(f"rounding must be 'auto', 'host' or 'device', got {rounding!r}")
        return _NEVER if rounding == "host" else 1


def _operand(value: Any, n: int, name: str) -> Int64:
    """`counts`, as an array: NumPy adds one without dimensions in half the time of an int."""
    return np.asarray(counts(value, n, name))
