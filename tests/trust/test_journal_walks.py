"""Random walks in every configuration, run again from their journals in a fresh process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from host_support import Query
from sparse.test_sparse_walk import VERBS as SPARSE_VERBS
from sparse.test_sparse_walk import Walk as SparseWalk
from states.test_walks_of_states import CONFIGS
from states.test_walks_of_states import Walk as StatesWalk
from transfer.walking import Walk as TransferWalk
from trust.journal_support import Half, Journals, half_of

import sgalloc
from sgalloc.fuzz.calls import Call
from sgalloc.fuzz.config import Chooser, any_config
from sgalloc.fuzz.doing import Doing
from sgalloc.fuzz.walk import drawn_calls
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle
from sgalloc.trust.records import REFUSED, Reader
from sgalloc.trust.verbs import BY_KIND


@pytest.fixture
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journals:
    return Journals(tmp_path, monkeypatch)


def same(pairs: list[tuple[str, str]]) -> None:
    wrong = [at for at, (here, there) in enumerate(pairs) if here != there]
    assert not wrong, f"journals {[at // 2 for at in wrong]} end in another state"


def met(journals: Journals) -> set[str]:
    """The verbs that the journals hold, refused ones with a sign, and other records by kind."""
    found = set()
    for _, path in journals.made:
        for record in Reader(path):
            name = BY_KIND[record.kind].name if record.kind in BY_KIND else f"#{record.kind}"
            refused = record.kind in BY_KIND and record.payload[0] & REFUSED
            found.add(name + ("!" if refused else ""))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_walks_of_all_states(journals: Journals, name: str) -> None:
    halves = []
    for seed in range(5):
        walk = StatesWalk(name, seed)
        walk.world.quiet = True
        for _ in range(150):
            walk.step()
        halves.append(half_of(journals.made[-1][0]))
        drain(walk.world.alloc, walk.world.events)
    same(journals.run_again(halves))
    seen = met(journals)
    assert {"#2", "preallocate", "acknowledge", "reclaim", "abort", "compact"} <= seen
    tried = {name.rstrip("!") for name in seen}
    assert {"reserve", "extend", "decode", "apply", "commit", "trim", "release"} <= tried
    assert {"extend!", "release!"} <= seen
    cache, config = {"match", "open_with_prefix", "publish", "clear"}, CONFIGS[name]
    assert not config.cache or cache <= seen
    assert not config.window or {"evict_window"} <= seen
    assert not config.ratio or {"to_sparse", "to_sparse!"} <= seen


def drain(alloc: sgalloc.KVAllocator, events: list[Any]) -> None:
    """Abort all by force, let each event end, and empty the cache."""
    known = list(alloc._core.pins.by_handle)
    alloc.abort(alloc._ledger.handle[1:][alloc._ledger.handle[1:] != 0], force=True)
    alloc.abort(known, force=True)
    for event in reversed(events):
        event.over = True
        alloc.settle()
    if alloc._core.prefix is not None:
        alloc.prefix.clear()
    assert alloc.available(alloc._core.pool.group) == alloc._core.pool.num_pages


def test_walks_that_evict_and_plan(journals: Journals) -> None:
    """Pools under pressure: evictions, stale plans and matches, batches, windows of every kind."""
    halves: list[Half] = []
    for seed in range(16):
        choose, path = Chooser(random.Random(seed).randint), journals.folder / f"{seed}.journal"
        world = Doing(any_config(choose), journal=path)
        for call in drawn_calls(world, choose, 400):
            # A restored allocator has no journal, and neither has a twin.
            if call.verb not in ("snapshot", "recycle", "part", "finish"):
                world.run(call)
        alloc = world.subjects[0].alloc
        journals.made.append((alloc, path))
        halves.append(half_of(alloc))
        world.run(Call("finish"))
    same(journals.run_again(halves))
    evicted = [
        group.evicted for alloc, _ in journals.made for group in alloc.stats().groups.values()
    ]
    assert sum(evicted) > 50
    assert {"apply!", "open_with_prefix!", "commit!", "open!", "#1", "#2"} <= met(journals)
    assert {"evict_window", "to_sparse", "preallocate!", "compact", "publish"} <= met(journals)


def test_walks_of_receiving_nodes(journals: Journals) -> None:
    halves = []
    for seed in range(6):
        walk = TransferWalk(seed, (1, 2, 3)[seed % 3], prefix_cache=seed % 2 == 1)
        for _ in range(150):
            walk.step()
        halves.append(half_of(walk.alloc))
    same(journals.run_again(halves))
    assert {"preallocate!", "reclaim", "acknowledge", "extend!"} <= met(journals)


def test_walks_of_sparse_requests(journals: Journals) -> None:
    halves = []
    for seed, size in enumerate((1, 3, 16, 64)):
        walk = SparseWalk(size, seed)
        names = walk.rng.choice(SPARSE_VERBS, 120).tolist()
        for name in names:
            walk.step(name)
        halves.append(half_of(walk.alloc))
        walk.end()
    same(journals.run_again(halves))
    assert {"to_sparse", "apply", "reserve", "extend!"} <= met(journals)


@pytest.mark.parametrize("window", [None, 6])
def test_speculative_steps(journals: Journals, window: int | None) -> None:
    """`prepare_for_decode` counts its steps, and lets a window go first, in the run again, too."""
    settings = None if window is None else sgalloc.SlidingWindow(window, 60)
    alloc = sgalloc.KVAllocator(60, 4, 8, 64, device="cpu", window=settings)
    handles = alloc.open(3)
    alloc.extend(handles, [5, 9, 2])
    batch = alloc.batch(handles)
    chain = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
    block = SpecConfig("dflash", draft_tokens=3)
    half = half_of(alloc)
    for step in range(5):
        eagle.prepare_for_decode(alloc, batch, chain)
        alloc.commit(batch, [step % 3, 1, 2])
        dflash.prepare_for_decode(alloc, handles[:2], block, after=Query(True))
        alloc.compact(handles[:1], [[int(alloc.committed(handles)[0]) + 1]])
    assert alloc.decode_index(handles).tolist() == [10, 10, 5]
    assert window is None or alloc.frontier(handles).any()
    same(journals.run_again([half]))
