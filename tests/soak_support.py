"""A small soak: settings, traces, and a page that does not come back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from profiling.soak_traffic import Settings
from sgalloc.pages import PagePool
from sgalloc.replay.requests import TraceRequest, Workload
from sgalloc.replay.workload import generate

SMALL = Settings(
    steps=12_000,
    num_pages=300,
    running=24,
    chunk=2048,
    requests=60,
    every=1000,
    check_every=250,
)


def small_traces() -> list[Workload]:
    """Two traces of short requests."""
    return [chats(300), generate("code", 200, seed=1)]


def chats(count: int) -> Workload:
    """Short requests that share the first blocks of their prompts with others."""
    rng = np.random.default_rng(5)
    rows = []
    for at in range(count):
        blocks = rng.integers(8) * 10 + np.arange(1 + rng.integers(4))
        blocks[-1] = 1000 + at
        prompt, output = blocks.size * 512 - int(rng.integers(500)), 1 + int(rng.integers(150))
        rows.append(TraceRequest(0.0, prompt, output, blocks, 512))
    return Workload("chats", rows, 0, [])


def keep_a_page(monkeypatch: pytest.MonkeyPatch, nowhere: bool) -> None:
    """Let one page of the hundredth that comes back stay with its holder, or with nobody."""
    give, turn = PagePool.give, itertools.count()

    def faulty(pool: PagePool, ids: Any, holder: Any) -> None:
        if not ids.size or next(turn) != 100:
            give(pool, ids, holder)
        elif nowhere:
            give(pool, ids, holder)
            pool.free -= 1
        else:
            give(pool, ids[1:], holder[1:] if np.ndim(holder) else holder)

    monkeypatch.setattr(PagePool, "give", faulty)
