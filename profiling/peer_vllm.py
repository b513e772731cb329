"""vLLM's `KVCacheManager.allocate_slots` beside sgalloc, on the CPU, in one process, in turns.

`VLLM_SRC=FOLDER python -m profiling.peer_vllm`, where FOLDER holds vLLM's Python files; without it
the vllm that is installed. README.md says what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from profiling import peers, question
from profiling.layout import Found, Table
from profiling.peers import TOKENS, Cell
from profiling.vllm_engine import DRAFTED, LOOKAHEAD, VARIABLE, Engine, Peer, load
from sgalloc.bench.course import MAX_ACCEPT, RESERVE
from sgalloc.bench.harness import SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Record, records_of

VLLM = "vLLM"
DECODE, SPECULATE, ADMIT, FREE = "decode", "speculative step", "admit", "free"
BATCHES, PAGES = (16, 256, 4096), (16, 64)
CELLS = tuple(
    Cell(what, batch, page, cache)
    for cache in ("off", "on")
    for what in (DECODE, SPECULATE, ADMIT)
    for page in PAGES
    for batch in BATCHES
)
QUICK = tuple(
    Cell(what, 64, 16, cache) for cache in ("off", "on") for what in (DECODE, SPECULATE, ADMIT)
)
VOCABULARY = 1 << 17


def measure(cells: Sequence[Cell], peer: Peer | str, seconds: float) -> question.Answer:
    """All cells; ``peer``, or why there is none."""
    if isinstance(peer, str):
        return question.Answer([], [peer])
    records: list[Record] = []
    for cell in cells:
        records += measure_cell(cell, peer, seconds)
    return question.Answer(records, [f"vLLM {peer.version}", peers.clock_note()], len(cells))


def measure_cell(cell: Cell, peer: Peer, seconds: float) -> list[Record]:
    """One kind of step at one size, both sides in turns, and their states compared."""
    large = cell.batch > 1024
    pace = Effort(seconds, least=5, most=2000, warm_up=2, block=2 if large else 20)
    if cell.what == ADMIT:
        pace = Effort(seconds, least=3, most=400, warm_up=2, block=1 if large else 4)
        return records_of(alternate(admitting(cell, peer), pace, peers.CLOCK), cell.at)
    shape, lengths = cell.shape, peers.lengths_of(cell)
    alloc = peers.allocator(cell, shape.num_pages)
    engine = Engine(peer, shape, shape.num_pages, cell.cache == "on")
    prompts = [[7] * length for length in lengths.tolist()]
    handles = alloc.open(cell.batch)
    alloc.extend(handles, lengths)
    batch = alloc.batch(handles)

    def begin() -> None:
        engine.free()
        engine.make(prompts)
        engine.admit(look=False)
        engine.begin()

    begin()
    drawn = np.random.default_rng(1).integers(1, MAX_ACCEPT + 1, (64, cell.batch))
    lists = drawn.tolist()
    room = shape.row_width - int(lengths.max())
    if cell.what == DECODE:
        full, ones = room - 1, [1] * cell.batch
        sides = [
            peers.stepping(
                *(SUBJECT, DECODE, lambda: alloc.decode(batch), lambda n: None),
                *(full, lambda: alloc.trim(batch, lengths)),
            ),
            peers.stepping(
                *(VLLM, DECODE, engine.decode, lambda n: engine.commit(ones)), *(full, begin)
            ),
        ]
    else:
        full = (room - RESERVE) // MAX_ACCEPT
        sides = [
            peers.stepping(
                *(SUBJECT, SPECULATE, lambda: alloc.reserve(batch, RESERVE)),
                lambda n: alloc.commit(batch, drawn[n % 64]),
                *(full, lambda: alloc.trim(batch, lengths)),
            ),
            peers.stepping(
                *(VLLM, SPECULATE, engine.speculate, lambda n: engine.commit(lists[n % 64])),
                *(full, begin),
            ),
        ]
    records = records_of(alternate(sides, pace, peers.CLOCK), cell.at)
    # Once more, so that it is not the start again that is compared.
    for side in sides:
        side.steps[0].call()
    peers.agree(cell, alloc, handles, engine.free_pages, engine.held_pages, VLLM)
    return records


def admitting(cell: Cell, peer: Peer) -> list[Side]:
    """Prompts come and go.

    With caching the pool holds just one batch: what one round leaves in the cache is evicted by
    the next, whose prompts are others.
    """
    caching, size = cell.cache == "on", cell.page
    pages = cell.batch * -(-TOKENS // size)
    alloc = peers.allocator(cell, pages)
    engine = Engine(peer, cell.shape, pages, caching)
    sets = np.random.default_rng(2).integers(0, VOCABULARY, (2, cell.batch, TOKENS))
    arrays = [list(tokens) for tokens in sets]
    lists = [tokens.tolist() for tokens in sets] if caching else [[[7] * TOKENS] * cell.batch] * 2
    turns = {SUBJECT: 0, VLLM: 0}
    handles = [np.empty(0, np.int64)]

    def admit() -> None:
        if caching:
            tokens = arrays[turns[SUBJECT] % 2]
            matches = [alloc.prefix.match(prompt) for prompt in tokens]
            handles[0] = alloc.open_with_prefix(matches)
        else:
            handles[0] = alloc.open(cell.batch)
        alloc.extend(handles[0], TOKENS)

    def free() -> None:
        if caching:
            alloc.release(handles[0], tokens=arrays[turns[SUBJECT] % 2])
        else:
            alloc.release(handles[0])

    def make() -> None:
        engine.make(lists[turns[VLLM] % 2])

    def turn(side: str) -> None:
        turns[side] += 1

    def compare() -> None:
        peers.agree(cell, alloc, handles[0], engine.free_pages, engine.held_pages, VLLM)

    checked: list[Any] = []

    def compare_once() -> None:
        # Both hold their prompts only now: ours is admitted anew behind vLLM's first admission.
        if not checked:
            checked.append(1)
            admit()
            compare()
            free()
            turn(SUBJECT)

    return [
        Side(SUBJECT, [Step(ADMIT, admit), Step(FREE, free), Step(None, lambda: turn(SUBJECT))]),
        Side(
            VLLM,
            [
                Step(None, make),
                Step(ADMIT, engine.admit),
                Step(None, compare_once),
                Step(FREE, engine.free),
                Step(None, lambda: turn(VLLM)),
            ],
        ),
    ]


def tables(found: Found) -> list[Table]:
    """What the results say."""
    common = (
        "µs of processor time, a call of the whole batch, in turns, median (p10–p90). vLLM is "
        "called once a request, as its scheduler does"
    )
    titles = {
        DECODE: (
            "A decode step of one token",
            f"{common}. sgalloc writes its table of slots in the call; vLLM's table is written "
            "later, by its worker, and not timed. With caching vLLM enters full blocks into its "
            "cache here, and sgalloc when a request ends; tokens are hashed untimed.",
        ),
        SPECULATE: (
            "A speculative step",
            f"{common}: {DRAFTED} tokens and {LOOKAHEAD} of look-ahead, {RESERVE} together as in "
            f"`reserve`; 1 to {MAX_ACCEPT} are accepted. Else as above.",
        ),
        ADMIT: (
            f"Admission of prompts of {TOKENS:,} tokens",
            f"{common}. With caching: a look into the cache that finds nothing, then pages, for "
            "which as many cached ones are evicted. vLLM's requests, and with them the hashes of "
            "their prompts, are made untimed.",
        ),
        FREE: (
            "The end of these requests",
            f"{common}. With caching sgalloc enters the prompts into its tree here; vLLM has its "
            "blocks in its cache since admission.",
        ),
    }
    return [
        peers.table(found, what, title, method, VLLM)
        for what, (title, method) in titles.items()
        if found.where(what)
    ]


@click.command()
@question.options
@click.option("--seconds", default=0.5, show_default=True, help="Of one measurement, about.")
def main(out: Path | None, quick: bool, seconds: float) -> None:
    """Time vLLM's `allocate_slots` beside sgalloc, from the folder that $VLLM_SRC names."""

    def run() -> question.Answer:
        return measure(QUICK if quick else CELLS, load(os.environ.get(VARIABLE)), seconds)

    question.run("peer_vllm", out, quick, run, tables)


if __name__ == "__main__":
    main()
