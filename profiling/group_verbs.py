"""Speculation, trees, transfers, sparse requests and windows, each beside the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sgalloc
from profiling import speculation
from profiling.sparse_verbs import BUFFER, make
from sgalloc.bench.course import agree
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.python_loop import PythonLoop, Request
from sgalloc.bench.twins import Shape, Twins, shape_for
from sgalloc.extents import extents

PLAIN = "plain verb"
KINDS = (speculation.EAGLE, speculation.DFLASH, speculation.LENGTHS)
DRAFTS, ACCEPTED = 16, 4  # of a tree
LENGTH = 1000  # tokens of a request that is received, or made sparse
WINDOW = 512  # tokens
NAMES = (
    *KINDS,
    "compact",
    "preallocate",
    "acknowledge",
    "abort",
    "to_sparse",
    "decode, sparse",
    "extents",
    "evict_window",
)
# What a call is held against, where that is no Python loop but a verb of an allocator of one group.
BESIDE = {
    "to_sparse": "trim to the buffer",
    "decode, sparse": "decode",
    "evict_window": "trim of as many pages",
}


def run(
    batches: Iterable[int], page_sizes: Iterable[int], received: Iterable[int], effort: Effort
) -> Bench:
    """Every call at each batch and page size; what is received, in batches of ``received``."""
    records: list[Record] = []
    compared = 0
    received = tuple(received)
    for page in page_sizes:
        for batch in batches:
            at = {"batch": batch, "page": page}
            twins = Twins(shape_for(batch, page))
            twins.fill()
            for kind in KINDS:
                records += records_of(alternate(speculation.sides(twins, kind), effort), at)
                speculation.compare(twins)
                twins.reset()
            records += records_of(alternate(compact_sides(twins), effort), at)
            agree(twins)
            records += records_of(alternate(extent_sides(twins), effort), at)
            for pair in (thin_sides(batch, page), sparse_sides(batch, page)):
                records += records_of(alternate(pair, effort), at)
            records += records_of(alternate(window_sides(batch, page), effort), at)
            compared += len(KINDS) + 1
        for batch in received:
            twins = Twins(Shape(batch, page, LENGTH, row_width=1536))
            at = {"batch": batch, "page": page}
            for sides in (receive_sides, abort_sides):
                records += records_of(alternate(sides(twins), effort), at)
                agree(twins)
                compared += 1
    return Bench(records, compared)


# -- trees -----------------------------------------------------------------------------------


def compact_sides(twins: Twins) -> list[Side]:
    """Reserve a tree of drafts, and keep the accepted path; cut back where rows are full."""
    alloc, loop, requests, base = twins.alloc, twins.loop, twins.requests, twins.base
    batch, lengths = alloc.batch(twins.handles), base.tolist()
    drawn = twins.rng.random((twins.shape.batch, DRAFTS)).argsort(axis=1)[:, :ACCEPTED]
    tree = np.sort(drawn, axis=1)
    mine: list[Any] = [None, None]
    theirs: list[Any] = [None, None]
    full = twins.shape.row_width - DRAFTS - twins.shape.page_size

    def reserve() -> None:
        if int(alloc.committed(batch).max()) > full:
            alloc.trim(batch, base)
        alloc.reserve(batch, DRAFTS)
        mine[0] = alloc.committed(batch)[:, None] + tree

    def reserve_too() -> None:
        if max(request.kv.kv_committed_len for request in requests) > full:
            loop.trim(requests, lengths)
        loop.reserve(requests, DRAFTS)
        held = np.array([request.kv.kv_committed_len for request in requests])
        theirs[0] = (held[:, None] + tree).tolist()

    def compact() -> None:
        mine[1] = alloc.compact(batch, mine[0])

    def compact_too() -> None:
        theirs[1] = compact_in(loop, requests, theirs[0])

    def check() -> None:
        if mine[1][0].size != len(theirs[1][0]):
            raise RuntimeError(
                f"compact moves {mine[1][0].size} tokens, and the loop {len(theirs[1][0])}"
            )

    return [
        Side(SUBJECT, [Step(None, reserve), Step("compact", compact)]),
        Side(LOOP, [Step(None, reserve_too), Step("compact", compact_too), Step(None, check)]),
    ]


def compact_in(
    loop: PythonLoop, requests: Sequence[Request], accepted: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """What has to be moved from where to where, in slots; the accepted tokens are committed."""
    source, target = [], []
    for request, positions in zip(requests, accepted, strict=True):
        kv = request.kv
        row = loop.table[kv.row]
        for to, position in enumerate(positions, kv.kv_committed_len):
            if to != position:
                source.append(int(row[position]))
                target.append(int(row[to]))
        kv.kv_committed_len += len(positions)
    loop.trim(requests, [request.kv.kv_committed_len for request in requests])
    return source, target


# -- transfers -------------------------------------------------------------------------------


def receive_sides(twins: Twins) -> list[Side]:
    """Preallocate, hear of the writer of each, release."""
    alloc, loop, shape = twins.alloc, twins.loop, twins.shape
    lengths = [shape.history] * shape.batch
    wanted = np.array(lengths)
    handles: list[Any] = [None]
    requests = [Request() for _ in lengths]
    waiting: dict[int, Request] = {}

    def preallocate() -> None:
        handles[0] = alloc.preallocate(wanted)

    def acknowledge() -> None:
        for handle in handles[0].tolist():
            alloc.acknowledge(handle, 0)

    def preallocate_too() -> None:
        loop.open(requests)
        loop.extend(requests, lengths)
        for request in requests:
            waiting[request.kv.row] = request

    def acknowledge_too() -> None:
        for request in requests:
            waiting.pop(request.kv.row)

    return [
        Side(
            SUBJECT,
            [
                Step("preallocate", preallocate),
                Step("acknowledge", acknowledge),
                Step(None, lambda: alloc.release(handles[0])),
            ],
        ),
        Side(
            LOOP,
            [
                Step("preallocate", preallocate_too),
                Step("acknowledge", acknowledge_too),
                Step(None, lambda: loop.release(requests)),
            ],
        ),
    ]


def abort_sides(twins: Twins) -> list[Side]:
    """Preallocate, and abort what nobody writes any more: all comes back at once."""
    alloc, loop, shape = twins.alloc, twins.loop, twins.shape
    lengths = [shape.history] * shape.batch
    handles: list[Any] = [None]
    requests = [Request() for _ in lengths]

    def preallocate() -> None:
        handles[0] = alloc.preallocate(lengths)

    def extend() -> None:
        loop.open(requests)
        loop.extend(requests, lengths)

    return [
        Side(
            SUBJECT,
            [Step(None, preallocate), Step("abort", lambda: alloc.abort(handles[0], force=True))],
        ),
        Side(LOOP, [Step(None, extend), Step("abort", lambda: loop.release(requests))]),
    ]


def extent_sides(twins: Twins) -> list[Side]:
    """The page lists of a batch as runs: the ids of all its requests, one after the other."""
    ids = np.concatenate([twins.alloc.pages(handle) for handle in twins.handles.tolist()])
    listed = ids.tolist()
    first, count = extents(ids)
    if runs_of(listed) != list(zip(first.tolist(), count.tolist(), strict=True)):
        raise RuntimeError("extents and the loop found other runs")
    return [
        Side(SUBJECT, [Step("extents", lambda: extents(ids))]),
        Side(LOOP, [Step("extents", lambda: runs_of(listed))]),
    ]


def runs_of(ids: Sequence[int]) -> list[tuple[int, int]]:
    """First id and length of each run of consecutive ids."""
    runs: list[tuple[int, int]] = []
    first = last = ids[0]
    for one in ids[1:]:
        if one != last + 1:
            runs.append((first, last + 1 - first))
            first = one
        last = one
    runs.append((first, last + 1 - first))
    return runs


# -- second groups ---------------------------------------------------------------------------


def thin_sides(batch: int, page_size: int) -> list[Side]:
    """Prefill, and leave a buffer; beside it, a trim to as many tokens."""

    def side(name: str, sparse: bool) -> Side:
        alloc = make(batch, page_size, sparse)
        handles, rounds = [alloc.open(0)], [0]

        def fill() -> None:
            rounds[0] += 1
            if rounds[0] % 16 == 2:
                alloc.check(device=True)
            alloc.release(handles[0])
            handles[0] = alloc.open(batch)
            alloc.extend(handles[0], LENGTH)

        def thin() -> None:
            alloc.to_sparse(handles[0])

        def trim() -> None:
            alloc.trim(handles[0], BUFFER)

        call = thin if sparse else trim
        return Side(name, [Step(None, fill), Step("to_sparse", call)])

    return [side(SUBJECT, True), side(PLAIN, False)]


def sparse_sides(batch: int, page_size: int) -> list[Side]:
    """One token a step, past the buffer where there is one; begun anew where rows are full."""

    def side(name: str, sparse: bool) -> Side:
        alloc = make(batch, page_size, sparse)
        base = LENGTH - np.random.default_rng(0).integers(0, 64, batch)
        return _running(name, "decode, sparse", alloc, base, sparse, lambda x: alloc.decode(x))

    return [side(SUBJECT, True), side(PLAIN, False)]


def window_sides(batch: int, page_size: int) -> list[Side]:
    """A page of every request leaves the window; beside it, one is trimmed away at the end."""
    shape = shape_for(batch, page_size)
    size = (shape.num_pages, page_size, batch, shape.row_width)
    window = sgalloc.SlidingWindow(min(WINDOW, shape.history // 2), shape.num_pages)
    alloc = sgalloc.KVAllocator(*size, device="cpu", window=window)
    other = sgalloc.KVAllocator(*size, device="cpu")
    base = np.full(batch, shape.history // page_size * page_size)
    mine = _running(
        SUBJECT, "evict_window", alloc, base, False, alloc.evict_window, lambda x: _page(alloc, x)
    )
    plain = other.batch(other.open(batch))
    other.warm()
    other.extend(plain, base)
    return [
        mine,
        Side(
            PLAIN,
            [
                Step(None, lambda: other.decode(plain, page_size)),
                Step("evict_window", lambda: other.trim(plain, base)),
            ],
        ),
    ]


def _page(alloc: sgalloc.KVAllocator, x: Any) -> None:
    alloc.decode(x, alloc.page_size)


def _running(
    side: str,
    name: str,
    alloc: sgalloc.KVAllocator,
    base: NDArray[np.int64],
    sparse: bool,
    call: Callable[[Any], Any],
    before: Callable[[Any], Any] | None = None,
) -> Side:
    """``call`` on requests of ``base`` tokens, which begin anew where a row is nearly full."""
    alloc.warm()
    running: list[Any] = [None]
    full = alloc.row_width - alloc.page_size

    def ready() -> None:
        if running[0] is None or int(alloc.committed(running[0]).max()) >= full:
            if running[0] is not None:
                alloc.check(device=True)
                alloc.release(running[0])
            running[0] = alloc.batch(alloc.open(base.size))
            alloc.extend(running[0], base)
            if sparse:
                alloc.to_sparse(running[0])
        if before is not None:
            before(running[0])

    return Side(side, [Step(None, ready), Step(name, lambda: call(running[0]))])
