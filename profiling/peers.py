"""What is common to the peers that are measured on the CPU beside sgalloc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np

import sgalloc
from profiling.layout import Found, Table, spread
from sgalloc.bench.harness import SUBJECT, Side, Step, empty_call
from sgalloc.bench.twins import Shape

# A peer's call may take a thousand times as long as ours. On a machine that does other things, too,
# it would be interrupted as much more often, so the time of the thread is what is compared.
CLOCK = thread_time_ns
TOKENS = 1000  # of a prompt; up to 63 fewer where requests are to stand at different places


class Cell(NamedTuple):
    """One thing to be measured.

    Attributes:
        what: which of the steps.
        batch: requests.
        page: page size.
        cache: "off", or "on" where the prefix caches of both are.
    """

    what: str
    batch: int
    page: int
    cache: str = "off"

    @property
    def at(self) -> dict[str, int | str]:
        """As a record has it."""
        return {"batch": self.batch, "page": self.page, "cache": self.cache}

    @property
    def shape(self) -> Shape:
        """Requests of up to `TOKENS` tokens with room for 536 more."""
        return Shape(self.batch, self.page, TOKENS, 1536)


def lengths_of(cell: Cell) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of each prompt, each ending at another place in its page."""
    drawn = np.random.default_rng(0).integers(0, 64, cell.batch)
    return np.full(cell.batch, TOKENS, np.int64) - drawn


def allocator(cell: Cell, pages: int) -> sgalloc.KVAllocator:
    """One for `cell`, with a pool of so many pages."""
    shape = cell.shape
    alloc = sgalloc.KVAllocator(
        pages, shape.page_size, shape.batch, shape.row_width, "cpu", prefix_cache=cell.cache == "on"
    )
    alloc.warm()
    return alloc


def agree(
    cell: Cell, alloc: sgalloc.KVAllocator, handles: Any, free: int, held: Sequence[int], who: str
) -> None:
    """Stop where sgalloc and the peer called ``who`` have not done the same work.

    Args:
        cell: what was measured.
        alloc: sgalloc's side, with the requests ``handles``.
        handles: int64, shape (batch,).
        free: pages that the peer has free.
        held: pages of each request on its side.
        who: its name.

    Raises:
        RuntimeError: naming the first difference.
    """
    if alloc.available() != free:
        raise RuntimeError(
            f"after {cell} {alloc.available()} pages are free in sgalloc, {free} in {who}"
        )
    mine = (alloc.allocated(handles) // cell.page).tolist()
    for number, (ours, theirs) in enumerate(zip(mine, held, strict=True)):
        if ours != theirs:
            raise RuntimeError(
                f"after {cell} request {number} has {ours} pages in sgalloc, {theirs} in {who}"
            )
    alloc.check()


def stepping(
    side: str,
    name: str,
    call: Callable[[], Any],
    advance: Callable[[int], None],
    full: int,
    restart: Callable[[], None],
) -> Side:
    """Steps for ever; after ``full`` of them all requests start again from their prompts.

    Args:
        side: who makes them.
        name: of the step.
        call: the step, timed.
        advance: what follows it, untimed; given the number of the step.
        full: steps until the rows are full.
        restart: starts again.
    """
    count = [0]

    def go_on() -> None:
        advance(count[0])
        count[0] += 1
        if count[0] % full == 0:
            restart()

    return Side(side, [Step(name, call), Step(None, go_on)])


def table(found: Found, what: str, title: str, method: str, peer: str) -> Table:
    """One kind of step of both, at all sizes."""
    rows, gains = [], []
    cells = {(r["at"]["cache"], r["at"]["page"], r["at"]["batch"]): None for r in found.where(what)}
    for cache, page, batch in sorted(cells):
        at = {"batch": batch, "page": page, "cache": cache}
        mine, theirs = (found.one(what, side, **at) for side in (SUBJECT, peer))
        gain = theirs["median_us"] / mine["median_us"]
        gains.append(gain)
        rows.append([f"{batch:,}", str(page), cache, spread(mine), spread(theirs), share(gain)])
    return Table(
        title,
        method,
        ["batch", "page", "prefix cache", "sgalloc", peer, f"{peer} by sgalloc"],
        rows,
        f"{peer} takes {share(min(gains))} to {share(max(gains))} as long as sgalloc.",
    )


def clock_note() -> str:
    """What reading `CLOCK` costs."""
    return (
        f"an empty call reads {empty_call(CLOCK).median:.2f} µs of processor time, which is not "
        "taken off"
    )


def share(ratio: float) -> str:
    """A ratio that may be far below one."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.0f}×"
