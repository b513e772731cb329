"""mini-sglang's `allocate_paged` beside sgalloc, on the CPU, in one process, in turns.

`MINISGL_SRC=FOLDER python -m profiling.peer_minisgl`, where FOLDER is `python` of its repository.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from profiling import peers, question
from profiling.layout import Found, Table
from profiling.minisgl_engine import VARIABLE, Engine, Peer, load
from profiling.peers import TOKENS, Cell
from sgalloc.bench.harness import SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Record, records_of

MINISGL = "mini-sglang"
DECODE, ADMIT = "decode", "admit"
CELLS = tuple(
    Cell(what, batch, page)
    for what in (DECODE, ADMIT)
    for page in (1, 16, 64)
    for batch in (16, 256, 4096)
)
QUICK = (Cell(DECODE, 64, 16), Cell(ADMIT, 64, 16))


def measure(cells: Sequence[Cell], peer: Peer | str, seconds: float) -> question.Answer:
    """All cells; ``peer``, or why there is none."""
    if isinstance(peer, str):
        return question.Answer([], [peer])
    records: list[Record] = []
    for cell in cells:
        records += measure_cell(cell, peer, seconds)
    return question.Answer(
        records, [f"mini-sglang: {peer.version}", peers.clock_note()], len(cells)
    )


def measure_cell(cell: Cell, peer: Peer, seconds: float) -> list[Record]:
    """One kind of call at one size, both sides in turns, and their states compared."""
    shape, lengths = cell.shape, peers.lengths_of(cell)
    alloc = peers.allocator(cell, shape.num_pages)
    engine = Engine(peer, shape, shape.num_pages)
    handles = [np.empty(0, np.int64)]
    prompts = lengths.tolist()

    def admit() -> None:
        handles[0] = alloc.open(cell.batch)
        alloc.extend(handles[0], lengths)

    def restart() -> None:
        engine.reset(prompts)
        engine.allocate()
        engine.advance()

    large = cell.batch > 1024
    pace = Effort(seconds, least=3, most=2000, warm_up=2, block=1 if large else 4)
    if cell.what == ADMIT:
        sides = [
            Side(SUBJECT, [Step(ADMIT, admit), Step(None, lambda: alloc.release(handles[0]))]),
            Side(
                MINISGL,
                [Step(None, lambda: engine.reset(prompts)), Step(ADMIT, engine.allocate)],
            ),
        ]
        records = records_of(alternate(sides, pace, peers.CLOCK), cell.at)
        admit()
    else:
        admit()
        restart()
        batch = alloc.batch(handles[0])
        full = shape.row_width - int(lengths.max()) - 1
        sides = [
            peers.stepping(
                *(SUBJECT, DECODE, lambda: alloc.decode(batch), lambda n: None),
                *(full, lambda: alloc.trim(batch, lengths)),
            ),
            peers.stepping(
                *(MINISGL, DECODE, engine.allocate, lambda n: engine.advance()), *(full, restart)
            ),
        ]
        pace = Effort(seconds, least=5, most=2000, warm_up=2, block=2 if large else 20)
        records = records_of(alternate(sides, pace, peers.CLOCK), cell.at)
        for side in sides:
            side.steps[0].call()
    held = [-(-request.device_len // cell.page) for request in engine.requests]
    peers.agree(cell, alloc, handles[0], engine.free_pages, held, MINISGL)
    return records


def tables(found: Found) -> list[Table]:
    """What the results say."""
    common = (
        "µs of processor time, a call of the whole batch, in turns, median (p10–p90); both write "
        "a table of slots, in one thread. mini-sglang does without pinned memory, which needs a "
        "GPU, and without its prefix cache, which it asks only when the pool is empty"
    )
    titles = {
        DECODE: ("A decode step of one token (`allocate_paged`)", f"{common}."),
        ADMIT: (
            f"Pages for prompts of up to {TOKENS:,} tokens",
            f"{common}. sgalloc opens rows, too.",
        ),
    }
    return [
        peers.table(found, what, title, method, MINISGL)
        for what, (title, method) in titles.items()
        if found.where(what)
    ]


@click.command()
@question.options
@click.option("--seconds", default=0.5, show_default=True, help="Of one measurement, about.")
def main(out: Path | None, quick: bool, seconds: float) -> None:
    """Time mini-sglang's `allocate_paged` beside sgalloc, from the folder in $MINISGL_SRC."""

    def run() -> question.Answer:
        return measure(QUICK if quick else CELLS, load(os.environ.get(VARIABLE)), seconds)

    question.run("peer_minisgl", out, quick, run, tables)


if __name__ == "__main__":
    main()
