"""Every verb against the plain Python loop, over batch and page size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sgalloc.bench.course import RESERVE, agree, courses, growth
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, Side, Step, alternate
from sgalloc.bench.measured import Bench, Record, records_of
from sgalloc.bench.python_loop import Request
from sgalloc.bench.twins import Twins, shape_for
from sgalloc.sizing import SpecConfig

CHUNK = 64
# Speculative decoders whose reserve is RESERVE.
CHAIN = SpecConfig("eagle", steps=RESERVE // 2 - 1, topk=1, draft_tokens=RESERVE // 2)
BLOCK = SpecConfig("dflash", draft_tokens=RESERVE // 2)
TOP_K = 20


def run(batches: Iterable[int], page_sizes: Iterable[int], effort: Effort) -> Bench:
    """All verbs at each batch and page size."""
    records: list[Record] = []
    compared = 0
    for batch in batches:
        for page_size in page_sizes:
            cell, checks = measure_cell(batch, page_size, effort)
            records += cell
            compared += checks
    return Bench(records, compared)


def measure_cell(batch: int, page_size: int, effort: Effort) -> tuple[list[Record], int]:
    """All verbs at one batch and page size, and how often the states were compared."""
    twins = Twins(shape_for(batch, page_size))
    at = {"batch": batch, "page": page_size}
    records = records_of(alternate(life_sides(twins), effort), at)
    agree(twins)
    twins.fill()
    records += records_of(alternate(speculative_sides(twins), effort), at)
    agree(twins)
    twins.reset()
    records += records_of(alternate(decode_sides(twins), effort), at)
    agree(twins)
    twins.reset()
    records += records_of(alternate(chunk_sides(twins), effort), at)
    agree(twins)
    return records, 4


def life_sides(twins: Twins) -> list[Side]:
    """Open, prefill a whole prompt, release; nothing is held before and after."""
    alloc, loop, shape = twins.alloc, twins.loop, twins.shape
    prompt = [shape.history] * shape.batch
    lengths = np.array(prompt)
    handles = [np.empty(0, np.int64)]
    requests = [Request() for _ in prompt]

    def opens() -> None:
        handles[0] = alloc.open(shape.batch)

    return [
        Side(
            SUBJECT,
            [
                Step("open", opens),
                Step("extend, whole prompt", lambda: alloc.extend(handles[0], lengths)),
                Step("release", lambda: alloc.release(handles[0])),
            ],
        ),
        Side(
            LOOP,
            [
                Step("open", lambda: loop.open(requests)),
                Step("extend, whole prompt", lambda: loop.extend(requests, prompt)),
                Step("release", lambda: loop.release(requests)),
            ],
        ),
    ]


def speculative_sides(twins: Twins) -> list[Side]:
    """Reserve, reserve again, commit, and the questions an engine asks in between."""
    alloc, loop, requests, base = twins.alloc, twins.loop, twins.requests, twins.base
    batch = alloc.batch(twins.handles)
    mine, theirs, cut_mine, cut_theirs = courses(twins, batch)
    start = min(64, int(base.min()) - RESERVE)
    stop = start + RESERVE
    new = [twins.shape.history] * twins.shape.batch
    new_lengths = np.array(new)
    first = int(twins.handles[0])
    plan: list[Any] = [None]

    def plans() -> None:
        plan[0] = alloc.plan(reserve=(batch, RESERVE))

    return [
        Side(
            SUBJECT,
            [
                Step("reserve", lambda: alloc.reserve(batch, RESERVE), growth),
                Step("reserve without need", lambda: alloc.reserve(batch, RESERVE)),
                Step("commit", lambda: alloc.commit(batch, mine.arrays[mine.at])),
                Step("slots", lambda: alloc.slots(batch, start, stop)),
                Step("pages, of one request", lambda: alloc.pages(first)),
                Step("plan", plans),
                Step("fits, the planned step", lambda: alloc.fits(plan[0])),
                Step("fits, new prompts", lambda: alloc.fits(new_lengths)),
                Step(None, cut_mine),
            ],
        ),
        Side(
            LOOP,
            [
                Step("reserve", lambda: loop.reserve(requests, RESERVE), growth),
                Step("reserve without need", lambda: loop.reserve(requests, RESERVE)),
                Step("commit", lambda: loop.commit(requests, theirs.lists[theirs.at])),
                Step("slots", lambda: loop.slots(requests, start, stop)),
                Step("pages, of one request", lambda: loop.pages(requests[0])),
                Step("plan", lambda: loop.watermarks(requests, RESERVE)),
                Step("fits, the planned step", lambda: loop.fits_reserve(requests, RESERVE)),
                Step("fits, new prompts", lambda: loop.fits(new)),
                Step(None, cut_theirs),
            ],
        ),
    ]


def decode_sides(twins: Twins) -> list[Side]:
    """Plain decode, one token a step."""
    alloc, loop, requests, base = twins.alloc, twins.loop, twins.requests, twins.base
    batch, lengths = alloc.batch(twins.handles), base.tolist()
    rows = np.array([request.kv.row for request in requests])
    seq_lens = base.copy()
    full = twins.shape.row_width - int(base.max()) - 1
    steps = {SUBJECT: 0, LOOP: 0}

    def cut_mine() -> None:
        steps[SUBJECT] += 1
        if steps[SUBJECT] % full == 0:
            alloc.trim(batch, base)

    def cut_theirs() -> None:
        steps[LOOP] += 1
        if steps[LOOP] % full == 0:
            loop.trim(requests, lengths)
            seq_lens[:] = base

    return [
        Side(SUBJECT, [Step("decode", lambda: alloc.decode(batch), growth), Step(None, cut_mine)]),
        Side(
            LOOP,
            [
                Step("decode", lambda: loop.decode(requests, rows, seq_lens), growth),
                Step(None, cut_theirs),
            ],
        ),
    ]


def chunk_sides(twins: Twins) -> list[Side]:
    """The next chunk of a prompt, and cutting it off again."""
    alloc, loop, requests, base = twins.alloc, twins.loop, twins.requests, twins.base
    batch = alloc.batch(twins.handles)
    longer = base + CHUNK
    short: Sequence[int] = base.tolist()
    long: Sequence[int] = longer.tolist()
    return [
        Side(
            SUBJECT,
            [
                Step("extend, 64 tokens", lambda: alloc.extend(batch, longer)),
                Step("trim, 64 tokens", lambda: alloc.trim(batch, base)),
            ],
        ),
        Side(
            LOOP,
            [
                Step("extend, 64 tokens", lambda: loop.extend(requests, long)),
                Step("trim, 64 tokens", lambda: loop.trim(requests, short)),
            ],
        ),
    ]
