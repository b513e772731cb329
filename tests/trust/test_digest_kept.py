"""The digest, kept up: always the number that reading everything anew gives."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trust.forge import held, rich
from trust.journal_support import state
from trust.test_digest import key, plants
from trust.walk import CONFIGS, Walk, make

import sgalloc
from profiling import digest as benchmark
from sgalloc.bench.harness import Effort
from sgalloc.cache_events import follow
from sgalloc.prefix import RadixTree
from sgalloc.trust.cached import Cached
from sgalloc.trust.following import follow_tree
from sgalloc.trust.rerun import rerun
from sgalloc.trust.sums import (
    Holders,
    Lists,
    Rows,
    Stack,
    Table,
    Tokens,
    Uses,
    hashes,
    run,
    salt,
    total,
)


def kept(alloc: Any) -> str:
    found = alloc.digest(incremental=True)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("ps", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_digest_after_every_call(name: str, ps: int) -> None:
    """Asked first at once or on the way, and then after every call or after many."""
    seen, verbs = set(), Counter()
    for seed in range(5):
        alloc = make(name, ps=ps)
        walk, drawn = Walk(alloc, seed), random.Random(seed)
        begin, often = drawn.choice((0, 0, 30)), drawn.choice((1.0, 0.3, 0.05))
        for number in range(160):
            said = walk.step()
            if number >= begin and drawn.random() < often:
                assert kept(alloc) == alloc.digest(), said
                seen.add(kept(alloc))
                verbs[said.partition(":")[0]] += 1
        assert kept(alloc) == alloc.digest()
        alloc.check(device=True)
    assert len(seen) > 60 and len(verbs) > 12


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_equal_on_twins_of_which_one_keeps_it_up(name: str) -> None:
    """Whoever keeps it up does the same things, and finds the same number, refusals included."""
    one, other = Walk(make(name), 7), Walk(make(name), 7)
    kept(one.alloc)
    for _ in range(120):
        assert one.step() == other.step()
        assert kept(one.alloc) == other.alloc.digest()
        before = kept(one.alloc)
        with pytest.raises(sgalloc.OutOfRows):
            one.alloc.open(100)
        assert kept(one.alloc) == before
    one.finish(), other.finish()
    one.alloc.settle(), other.alloc.settle()
    assert state(one.alloc) == state(other.alloc)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_single_call_that_differs_is_seen(name: str) -> None:
    """Two ranks keep it up; one of them is a call ahead, over and over."""
    seen: Counter[str] = Counter()
    for seed in range(13, 16):
        one, other = Walk(make(name, ps=2), seed), Walk(make(name, ps=2), seed)
        for _ in range(150):
            before = other.alloc.digest()
            assert kept(one.alloc) == kept(other.alloc) == before
            said = other.step()
            differs = other.alloc.digest() != before
            assert (kept(one.alloc) != kept(other.alloc)) == differs, said
            seen[said.partition(":")[0]] += differs
            assert one.step() == said
    assert sum(seen.values()) > 100 and sum(n > 0 for n in seen.values()) > 8


def test_order_of_use_alone_of_the_clock_counts() -> None:
    digests = []
    for calls in ((1, 2), (2, 1), (1, 7, 2, 7)):
        alloc = make("prefix cache", ps=2)
        x = alloc.open(2)
        alloc.extend(x, 4)
        alloc.release(x, tokens=[[1, 1, 1, 1], [2, 2, 2, 2]])
        kept(alloc)
        for first in calls:
            alloc.prefix.match([first] * 4)
        digests.append(kept(alloc))
    assert digests[0] != digests[1] and digests[0] == digests[2]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_planted_in_the_numbers_of_a_row_is_seen(name: str) -> None:
    """They are looked at each time; who writes lists or nodes past the verbs goes unseen here."""
    alloc = held(name)
    before = kept(alloc)
    numbers = {
        "ledger.committed", "ledger.decode_steps", "ledger.shared", "ledger.receiving",
        "ledger.receiving_rows", "ledger.handle", "ledger._generation", "ledger._row_stack",
        "ledger.free_rows", "ledger.waiting_rows", "pool.waiting", "pool.pinned", "side.due",
        "side.lag", "side.cut_rows", "side.is_long", "tree.cached", "tree.evictable", "pin.acked",
    }  # fmt: skip
    planted = set()
    for what, plant in plants(alloc).items():
        if plant is not None and what in numbers:
            with plant():
                assert kept(alloc) != before, what
            assert kept(alloc) == before, what
            planted.add(what)
    assert len(planted) >= 13


def test_a_long_time_without_asking_is_looked_at_whole() -> None:
    """What is noted is bounded, in pages and in nodes of the cache."""
    alloc = make("window, map, prefix", roomy=True)
    kept(alloc)
    tally = alloc._tally
    forgotten = 0
    for turn in range(1500):
        (handle,) = alloc.open()
        alloc.extend(handle, 9)
        alloc.release(handle, tokens=np.arange(9) + 10 * turn)
        pools = [pool for pool in tally._pools if pool._moved is not None]
        assert all(pool._count <= pool.pool.num_pages for pool in pools)
        assert len(tally._cached._noted) <= 2 * len(tally._cached._seen) + 1024
        forgotten += tally._cached._uses is None
    assert forgotten
    assert all(pool._moved is None for pool in tally._pools)
    assert kept(alloc) == alloc.digest()
    alloc.prefix.match(np.arange(9) + 10 * 1499)
    assert kept(alloc) == alloc.digest()


@pytest.mark.parametrize("often", [True, False])
def test_a_prefix_that_is_given_up_and_taken_again(often: bool) -> None:
    """Between two looks a row may come to share as many pages as before, and others."""
    alloc = make("prefix cache", ps=2, roomy=True)
    one, other = np.arange(8), np.arange(8) + 100
    (handle,) = alloc.open()
    alloc.extend(handle, 8)
    alloc.prefix.publish(handle, one)
    before = kept(alloc)
    alloc.trim(handle, 0)
    if often:
        assert kept(alloc) == alloc.digest()
    alloc.extend(handle, 8)
    alloc.prefix.publish(handle, other)
    assert kept(alloc) == alloc.digest() != before


def test_a_row_that_goes_on_with_the_window_pages_of_its_twin() -> None:
    alloc = make("window, map, prefix", ps=2, roomy=True)
    handles = alloc.open(2)
    alloc.extend(handles, 8)
    kept(alloc)
    for handle in handles:
        alloc.prefix.publish(handle, np.arange(8))
        assert kept(alloc) == alloc.digest()
    assert alloc.window_pages(handles[0]).tolist() == alloc.window_pages(handles[1]).tolist()


def test_every_change_of_a_tree_is_noted_by_itself() -> None:
    """Whatever else a verb does to the same nodes: each method is looked at alone."""
    drawn, tree = random.Random(6), RadixTree(2)
    cached = Cached(tree, 2)
    follow_tree(tree, cached.note)
    cached.refresh()
    locked: list[Any] = []
    done: Counter[str] = Counter()
    for number in range(500):
        nodes = tree.nodes()
        tree.tick()
        what = drawn.choice(("insert", "insert", "touch", "lock", "unlock", "take_over", "evict"))
        if what == "insert":
            pages = drawn.randint(1, 5)
            tokens = np.array([drawn.randint(0, 1) for _ in range(2 * pages)])
            sides = np.array([drawn.choice((0, 50 + n)) for n in range(pages)], np.int32)
            ids = np.arange(pages, dtype=np.int32) + 10 * number
            tree.insert(drawn.choice((None, "x")), tokens, ids, sides)
        elif what == "touch" and nodes:
            tree.touch(drawn.choice(nodes))
        elif what == "lock" and nodes:
            locked.append(drawn.choice(nodes))
            tree.lock(locked[-1])
        elif what == "unlock" and locked:
            tree.unlock(locked.pop(drawn.randrange(len(locked))))
        elif what == "take_over" and nodes:
            node = drawn.choice(nodes)
            tree.take_over(node, np.full(node.end, number + 1, np.int32))
        elif what == "evict" and tree.evictable:
            # On the way to a victim others were touched, which only it can tell of.
            victims = tree.victims(drawn.randint(1, min(tree.evictable, 6)))
            if drawn.random() < 0.5:
                tree.touch(victims[0].node)
            tree.evict(victims)
        done[what] += 1
        cached.refresh()
        fresh = Cached(tree, 2)
        fresh.refresh()
        assert cached.sum == fresh.sum, what
        assert set(cached._seen) == set(fresh._seen)
    assert min(done.values()) > 30


def test_it_goes_with_a_journal_and_after_a_restore(tmp_path: Path) -> None:
    noted = sgalloc.KVAllocator(
        60, 4, 6, 80, device="cpu", prefix_cache=True, journal=tmp_path / "one"
    )
    walk = Walk(noted, 4)
    for _ in range(80):
        walk.step()
        assert kept(noted) == noted.digest()
    walk.finish()
    noted.settle()
    again = sgalloc.KVAllocator.restore(noted.snapshot(), device="cpu")
    assert kept(again) == kept(noted)
    twin = walk.twin(again)
    for _ in range(80):
        assert twin.step() == walk.step()
        assert kept(again) == kept(noted) == again.digest()
    noted.close_journal()
    assert state(rerun(tmp_path / "one").alloc) == state(noted)


@pytest.mark.parametrize("first", [True, False])
def test_it_stays_beside_who_follows_the_cache(first: bool) -> None:
    """Cache events are wrapped around the same tree, and go again, before or behind."""
    walk = Walk(make("window, map, prefix"), 12)
    if first:
        events = follow(walk.alloc)
    assert kept(walk.alloc) == walk.alloc.digest()
    if not first:
        events = follow(walk.alloc)
    for step in range(120):
        if step == 60:
            assert events.drain()
            events.close()
        said = walk.step()
        assert kept(walk.alloc) == walk.alloc.digest(), said


def test_who_never_asks_pays_nothing() -> None:
    alloc, other = make("window, map, prefix"), make("window, map, prefix")
    kept(other)
    alloc.digest()
    core = alloc._core
    assert type(core.ledger).__name__ == "Ledger" and type(core.pool).__name__ == "PagePool"
    assert not {"touch", "lock", "insert"} & set(vars(core.tree))
    assert not {"applied", "cut", "close"} & set(vars(core.side))
    assert type(other._core.ledger) is not type(core.ledger)


def test_another_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="incremental"):
        make("plain").digest(incremental=1)


def test_rich_states_are_told_apart_both_ways() -> None:
    found = set()
    for name in CONFIGS:
        alloc = rich(name)
        assert kept(alloc) == alloc.digest()
        found.add(kept(alloc))
    assert len(found) == len(CONFIGS)


# -- the sums --------------------------------------------------------------------------------------


def test_hashes_tell_places_values_and_arrays_apart() -> None:
    at = np.arange(3000)
    seen: set[int] = set()
    for name in ("one", "other"):
        for value in (0, 1, -1, 1 << 40):
            seen.update(hashes(salt(name), at, np.full(3000, value)).tolist())
    assert len(seen) == 8 * 3000
    some = np.arange(100_000, dtype=np.int32)
    assert total(salt("a"), some.astype(np.int64), some) == run(salt("a"), some)
    order = np.random.default_rng(0).permutation(some.size)
    assert total(salt("a"), order, some[order]) == run(salt("a"), some)
    assert run(salt("a"), some[::-1].copy()) != run(salt("a"), some)
    assert run(salt("a"), some[:0]) == 0


def test_paths_are_sums_of_their_parts() -> None:
    """A node that is split says together what it said alone; other tokens or places say else."""
    path, tokens = Tokens("p"), np.random.default_rng(5).integers(0, 1 << 17, 100_000)
    whole = path(tokens, 7)
    for at in (0, 1, 33_000, 99_999, 100_000):
        parts = Tokens("p")(tokens[:at].copy(), 7) + path(tokens[at:].copy(), 7 + at)
        assert parts % (1 << 64) == whole
    seen = {whole, path(tokens, 8), path(tokens[::-1].copy(), 7), Tokens("q")(tokens, 7)}
    for at in (0, 500, 99_999):
        for other in (tokens[at] + 1, -tokens[at] - 1, tokens[at] + (1 << 40)):
            changed = tokens.copy()
            changed[at] = other
            seen.add(path(changed, 7))
    assert len(seen) == 13


def test_tables_and_holders() -> None:
    drawn = np.random.default_rng(1)
    now = drawn.integers(-2, 3, 500)
    table, holders = Table("t", True), Holders("h", now, True)
    for _ in range(20):
        touched = drawn.integers(0, 500, 30)
        now[touched] = drawn.integers(-2, 3, 30)
        before = None if table._seen is None else table._seen.copy()
        changed = table.refresh(now.copy())
        if before is not None:
            assert changed.tolist() == (before != now).nonzero()[0].tolist()
        holders.refresh(touched)
        fresh_table, fresh_holders = Table("t", False), Holders("h", now, False)
        fresh_table.refresh(now.copy())
        fresh_holders.refresh(None)
        assert table.sum == fresh_table.sum and holders.sum == fresh_holders.sum


def test_stacks_and_lists() -> None:
    drawn = random.Random(2)
    ids = np.arange(60, dtype=np.int32)
    stack, size = Stack("s", ids, True), 60
    flat, width = np.zeros(50, np.int32), np.int64(10)
    lists, sizes = Lists("l", flat, 5, width, True), np.zeros(5, np.int64)
    for _ in range(200):
        for _ in range(drawn.randint(0, 3)):
            size = drawn.randint(0, size)
            stack.low = min(stack.low, size)
            more = drawn.randint(size, 60)
            ids[size:more] = [drawn.randint(1, 99) for _ in range(more - size)]
            size = more
            row = drawn.randrange(5)
            short = drawn.randint(0, int(sizes[row]))
            lists.low[row] = min(int(lists.low[row]), short)
            sizes[row] = drawn.randint(short, 10)
            where = slice(row * 10 + short, row * 10 + int(sizes[row]))
            flat[where] = [drawn.randint(1, 99) for _ in flat[where]]
        stack.refresh(size)
        lists.refresh(sizes.copy())
        fresh, fresh_lists = Stack("s", ids, False), Lists("l", flat, 5, width, False)
        fresh.refresh(size)
        fresh_lists.refresh(sizes.copy())
        assert (stack.sum, lists.sum) == (fresh.sum, fresh_lists.sum)


def test_sums_of_rows() -> None:
    drawn, rows = np.random.default_rng(3), Rows(6)
    held: dict[int, list[int]] = {}
    for _ in range(30):
        some = np.sort(drawn.choice(6, drawn.integers(0, 4), replace=False))
        count = drawn.integers(0, 4, some.size)
        found = drawn.integers(0, 1 << 63, int(count.sum())).astype(np.uint64) * np.uint64(2)
        rows.put(some, count, found)
        at = 0
        for row, n in zip(some.tolist(), count.tolist(), strict=True):
            held[row] = found[at : at + n].tolist()
            at += n
        assert rows.sum == sum(map(sum, held.values())) % (1 << 64)


def test_uses_come_and_go_in_any_order() -> None:
    """Equal to what is made at once from the same; times count by their order alone."""
    drawn, uses = random.Random(4), Uses()
    held: list[tuple[int, int]] = []
    for _ in range(600):
        if held and drawn.random() < 0.45:
            time, hashed = held.pop(drawn.randrange(len(held)))
            uses.add(time, -hashed, -1)
        else:
            held.append((drawn.randint(0, 12), drawn.getrandbits(64)))
            uses.add(*held[-1])
        mask = (1 << 64) - 1
        assert uses.sum & mask == Uses(held).sum & mask
        order = {time: at for at, time in enumerate(sorted({time for time, _ in held}))}
        assert Uses((order[time], found) for time, found in held).sum & mask == uses.sum & mask
    swapped = Uses([(1, 5), (2, 6)]).sum, Uses([(1, 6), (2, 5)]).sum, Uses([(1, 5), (1, 6)]).sum
    assert len(set(swapped)) == 3


def test_namespaces_that_end_are_forgotten() -> None:
    alloc = make("plain")
    kept(alloc)
    named = alloc.open(2, "tenant")
    assert kept(alloc) == alloc.digest()
    with key(alloc._ledger.namespace, int(named[0] & 7), "planted"):
        assert alloc.digest() != kept(alloc)
    alloc.release(named)
    assert kept(alloc) == alloc.digest()


def test_the_benchmark_compares_the_digests_of_its_sides() -> None:
    effort = Effort(0.01, 2, most=2, warm_up=1, block=1)
    for cache in (False, True):
        records = benchmark.measure(1 << 14, 16, cache, effort)
        timed = {(record["side"], record["name"]) for record in records}
        assert len(timed) == 7 and (benchmark.PLAIN, "digest") not in timed
