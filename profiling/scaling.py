"""What growth costs by pages moved, by pool size, and by history."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

import sgalloc
from sgalloc.bench.course import agree
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.twins import Shape, Twins

ROWS = 16
POOL_ROWS = 32
POOL_TOKENS = 8  # of each row at page size 1, before it grows by as many
NEW, WORN, WORN_COLD = "new", "worn", "worn, not used lately"
WEAR = (NEW, WORN, WORN_COLD)
HISTORY_ROWS = 64
HISTORY_PAGE = 64


def run(
    moved: Iterable[int], pools: Iterable[int], histories: Iterable[int], effort: Effort
) -> Bench:
    """The three tables.

    Args:
        moved: pages moved by one call, multiples of `ROWS`.
        pools: pages of the pool, at least 1,000.
        histories: tokens of each request, multiples of `HISTORY_PAGE`.
        effort: for each cell.
    """
    records: list[Record] = []
    compared = 0
    for page_size in (1, 64):
        for pages in moved:
            tokens = pages // ROWS * page_size
            twins = Twins(Shape(ROWS, page_size, history=tokens, row_width=tokens))
            sides = moving_sides(twins)
            times = alternate(sides, effort)
            records += records_of(times, {"page": page_size, "pages moved": pages})
            for side in sides:  # once more, so that there is something to compare
                side.steps[0].call()
            agree(twins)
            compared += 1
    for num_pages in pools:
        for wear in WEAR:
            alloc = pool(num_pages, worn=wear != NEW)
            at: dict[str, int | str] = {
                "page": 1,
                "pool": num_pages,
                "ids": wear,
                "pages moved": POOL_ROWS * POOL_TOKENS,
            }
            side = pool_side(alloc, onwards=wear == WORN_COLD)
            records += records_of(alternate([side], effort), at)
            alloc.check()
    for history in histories:
        alloc, side = history_side(history)
        at = {"page": HISTORY_PAGE, "history": history, "pages moved": HISTORY_ROWS}
        records += records_of(alternate([side], effort), at)
        alloc.check()
    return Bench(records, compared)


def moving_sides(twins: Twins) -> list[Side]:
    """Grow `ROWS` requests from nothing, and cut them back to nothing."""
    alloc, loop = twins.alloc, twins.loop
    lengths = np.full(ROWS, twins.shape.history)
    long, short = lengths.tolist(), [0] * ROWS
    twins.handles = alloc.open(ROWS)
    batch = alloc.batch(twins.handles)
    loop.open(twins.requests)
    requests = twins.requests
    return [
        Side(
            SUBJECT,
            [
                Step("extend", lambda: alloc.extend(batch, lengths)),
                Step("trim", lambda: alloc.trim(batch, 0)),
            ],
        ),
        Side(
            LOOP,
            [
                Step("extend", lambda: loop.extend(requests, long)),
                Step("trim", lambda: loop.trim(requests, short)),
            ],
        ),
    ]


def pool(num_pages: int, worn: bool) -> sgalloc.KVAllocator:
    """An allocator of page size 1 whose pool is new, or worn.

    In a worn pool all pages went out in turns, one a request and step, and came back request
    by request in random order: neighbours on the free stack are 500 ids apart, or random.
    """
    users = 500
    width = max(num_pages // users, 2 * POOL_TOKENS)
    alloc = sgalloc.KVAllocator(num_pages, 1, users, width, device="cpu")
    alloc.warm()
    if worn:
        handles = alloc.open(users)
        batch = alloc.batch(handles)
        for _ in range(num_pages // users):
            alloc.decode(batch)
        alloc.release(np.random.default_rng(0).permutation(handles))
    return alloc


def pool_side(alloc: sgalloc.KVAllocator, onwards: bool) -> Side:
    """A growth of 256 pages, again and again.

    What it takes is given back at once, and goes out again with the next; or, ``onwards``, only
    when the rows are full, so that each growth takes ids that have not been touched lately.
    """
    batch = alloc.batch(alloc.open(POOL_ROWS))
    alloc.extend(batch, POOL_TOKENS)
    reserve = Step("reserve", lambda: alloc.reserve(batch, POOL_TOKENS))
    if not onwards:
        return Side(SUBJECT, [reserve, Step("trim", lambda: alloc.trim(batch, POOL_TOKENS))])
    room = min(alloc.row_width, alloc.num_pages // POOL_ROWS) - POOL_TOKENS

    def advance() -> None:
        if int(alloc.committed(batch)[0]) < room:
            alloc.commit(batch, POOL_TOKENS)
        if int(alloc.committed(batch)[0]) + POOL_TOKENS > room:
            alloc.trim(batch, POOL_TOKENS)

    return Side(SUBJECT, [reserve, Step(None, advance)])


def history_side(history: int) -> tuple[sgalloc.KVAllocator, Side]:
    """A growth of one page for each request, after a history of so many tokens."""
    width = history + HISTORY_PAGE
    num_pages = HISTORY_ROWS * width // HISTORY_PAGE
    alloc = sgalloc.KVAllocator(num_pages, HISTORY_PAGE, HISTORY_ROWS, width, device="cpu")
    alloc.warm()
    batch = alloc.batch(alloc.open(HISTORY_ROWS))
    alloc.extend(batch, history)
    return alloc, Side(
        SUBJECT,
        [
            Step("reserve", lambda: alloc.reserve(batch, HISTORY_PAGE)),
            Step("trim", lambda: alloc.trim(batch, history)),
        ],
    )


def first_touch(effort: Effort) -> Bench:
    """What the first write to memory costs that `KVAllocator.warm` would have touched.

    Measured in a process of its own: in this one, memory that earlier measurements have given
    back would be handed out again, touched already.
    """
    with get_context("spawn").Pool(1) as process:
        return process.apply(touch_new_memory, (effort,))


def touch_new_memory(effort: Effort, rows: int = 256, tokens: int = 1000) -> Bench:
    """`first_touch`, in this process. Each round makes a new allocator with a table of 64 MiB."""
    lengths = np.full(rows, tokens)
    state: list[sgalloc.KVAllocator] = []
    handles: list[NDArray[np.int64]] = [np.empty(0, np.int64)]

    def new(warm: bool) -> None:
        state[:] = []
        alloc = sgalloc.KVAllocator(rows * 1024, 64, rows, 1 << 16, device="cpu")
        state.append(alloc)
        if warm:
            alloc.warm()
        handles[0] = alloc.open(rows)

    def extend() -> None:
        state[0].extend(handles[0], lengths)

    def again() -> None:
        state[0].release(handles[0])
        handles[0] = state[0].open(rows)

    times = alternate(
        [
            Side(
                SUBJECT,
                [
                    Step(None, lambda: new(False)),
                    Step("extend, memory untouched", extend),
                    Step(None, lambda: new(True)),
                    Step("extend, after warm()", extend),
                    Step(None, again),
                    Step("extend, a second time", extend),
                ],
            )
        ],
        Effort(effort.seconds, effort.least, effort.most, warm_up=1, block=1),
    )
    return Bench(records_of(times, {"batch": rows, "page": 64, "tokens": tokens}))
