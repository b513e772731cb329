"""Cache events: a router that reads them knows exactly what the cache knows."""

from __future__ import annotations

import random
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

import sgalloc
from sgalloc import cache_events
from sgalloc.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

SIZE = 4
NAMES = (None, 3, "3", b"3")


def make(pages: int = 60, **kwargs: Any) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(pages, SIZE, 8, 128, device="cpu", prefix_cache=True, **kwargs)


class Router:
    """What a prefix-aware router keeps of one worker, and how it looks prompts up."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}

    def hear(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.parents.clear()
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.parents[one]  # never of what was not stored
            else:
                parent = event.parent_block_hash
                assert parent is None or parent in self.parents, "parents are told first"
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                for one in event.block_hashes:
                    assert one not in self.parents, "a page is stored once"
                    self.parents[one] = parent
                    parent = one

    def knows(self, tokens: Any, name: Any) -> int:
        """Tokens of the longest known prefix."""
        known = 0
        for one in cache_events.page_hashes(tokens, SIZE, name):
            if one not in self.parents:
                break
            known += SIZE
        return known


def put(alloc: sgalloc.KVAllocator, tokens: Any, name: Any = None) -> None:
    h = alloc.open(namespace=name)
    alloc.extend(h, len(tokens))
    alloc.release(h, tokens=[tokens])


def test_events_have_the_fields_of_the_field() -> None:
    alloc = make()
    events = cache_events.follow(alloc)
    assert events.drain() == [AllBlocksCleared()]
    put(alloc, range(10), "a")
    put(alloc, [*range(8), *range(50, 58)], "a")
    first, second, third, fourth = cache_events.page_hashes([*range(8), *range(50, 58)], SIZE, "a")
    assert events.drain() == [
        BlockStored([first, second], None, list(range(8)), SIZE, "a"),
        BlockStored([third, fourth], second, list(range(50, 58)), SIZE, "a"),
    ]
    assert events.drain() == []


def test_a_hash_is_what_its_description_says() -> None:
    tokens = np.arange(9, dtype=np.int64)

    def digest(data: bytes) -> bytes:
        return blake2b(data, digest_size=8).digest()

    one = digest(tokens[:4].astype("<i8").tobytes())
    two = digest(one + tokens[4:8].astype("<i8").tobytes())
    known = [int.from_bytes(part, "little") for part in (one, two)]
    assert cache_events.page_hashes(tokens, SIZE) == known
    assert cache_events.page_hashes(range(3), SIZE) == []
    alike = (*NAMES, "", b"", "b3", "i3", "s3", b"s3", b"i3")
    seen = {tuple(cache_events.page_hashes(tokens, SIZE, name)) for name in alike}
    assert len(seen) == len(alike), "namespaces never share, however alike they look"


@pytest.mark.parametrize("seed", range(12))
def test_a_router_knows_what_the_cache_knows(seed: int) -> None:
    rng = random.Random(seed)
    pick = np.random.default_rng(seed)
    alloc = make()
    events = cache_events.follow(alloc, limit=rng.choice((1, 3, 65536)))
    router, prompts, running = Router(), [], []
    for _ in range(150):
        name = rng.choice(NAMES[:2])
        head = rng.choice(prompts)[0] if prompts and rng.random() < 0.7 else []
        tokens = [*head[: rng.randrange(len(head) + 1)], *pick.integers(0, 3, rng.randrange(30))]
        tokens = [int(one) for one in tokens[:60]]
        prompts.append((tokens, name))
        with suppress(sgalloc.OutOfPages):  # what was refused is told by nobody
            kind = rng.random()
            if kind < 0.5:
                put(alloc, tokens, name)
            elif kind < 0.7 and len(running) < 4:
                match = alloc.prefix.match(tokens, name)
                h = alloc.open_with_prefix(match)
                running.append((h, tokens))
                alloc.extend(h, max(len(tokens), match.length))
                alloc.prefix.publish(h, [tokens])
            elif kind < 0.9 and running:
                h, known = running.pop(rng.randrange(len(running)))
                alloc.release(h, tokens=[known] if rng.random() < 0.5 else None)
            elif kind > 0.97:
                alloc.prefix.clear()
        if rng.random() < 0.5:
            router.hear(events.drain())
            assert len(router.parents) == alloc.stats().groups["full"].cached
            for tokens, name in prompts[-20:]:
                assert router.knows(tokens, name) == alloc.prefix.match(tokens, name).length
    alloc.check()


def test_an_eviction_tells_what_went_and_a_clear_of_all_says_so() -> None:
    alloc = make(10)
    put(alloc, range(16))
    events = cache_events.follow(alloc)
    router = Router()
    router.hear(events.drain())
    assert router.knows(range(16), None) == 16, "what was cached before is told, too"
    h = alloc.open()
    alloc.extend(h, 8 * SIZE)  # six are free, so two leave from the end
    assert events.drain() == [BlockRemoved(cache_events.page_hashes(range(16), SIZE)[2:])]
    alloc.release(h)
    put(alloc, range(100, 108))
    assert alloc.prefix.clear() == 4
    assert events.drain() == [AllBlocksCleared()]
    assert alloc.prefix.clear() == 0 and events.drain() == []


def test_a_clear_that_leaves_locked_pages_tells_of_the_others() -> None:
    alloc = make()
    put(alloc, range(16))
    events = cache_events.follow(alloc)
    events.drain()
    h = alloc.open_with_prefix(alloc.prefix.match(range(8)))
    assert alloc.prefix.clear() == 2
    assert events.drain() == [BlockRemoved(cache_events.page_hashes(range(16), SIZE)[2:])]
    alloc.release(h)


def test_removals_in_a_row_are_one_event() -> None:
    alloc = make(10)
    put(alloc, range(20))
    events = cache_events.follow(alloc, tokens=False)
    assert [type(e) for e in events.drain()] == [AllBlocksCleared, BlockStored]
    h = alloc.open()
    for tokens in (28, 32, 36):
        alloc.extend(h, tokens)
    (gone,) = events.drain()
    assert isinstance(gone, BlockRemoved) and len(gone.block_hashes) == 4


def test_token_ids_are_left_out_where_they_are_not_wanted() -> None:
    alloc = make()
    events = cache_events.follow(alloc, tokens=False)
    put(alloc, range(8))
    (_, stored) = events.drain()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [] and len(stored.block_hashes) == 2


def test_nobody_drains_and_the_next_drain_begins_anew() -> None:
    alloc = make()
    events = cache_events.follow(alloc, limit=2)
    events.drain()
    for n in range(5):
        put(alloc, range(100 * n, 100 * n + 8))
    assert len(events._waiting) <= 2 and events.lost >= 1
    told = events.drain()
    assert told[0] == AllBlocksCleared() and len(told) == 6
    router = Router()
    router.hear(told)
    assert len(router.parents) == 10


@pytest.mark.not_in_debug_mode("it looks for whatever wraps a method")
def test_closing_leaves_the_cache_as_it_was_and_two_do_not_follow_it() -> None:
    alloc = make()
    before = dict(vars(alloc._core.tree)), dict(vars(alloc.prefix))
    events = cache_events.follow(alloc)
    with pytest.raises(sgalloc.WrongState, match="followed already"):
        cache_events.follow(alloc)
    events.drain()
    put(alloc, range(8))
    events.close()
    events.close()
    put(alloc, range(50, 58))
    assert [type(e) for e in events.drain()] == [BlockStored]
    after = vars(alloc._core.tree), vars(alloc.prefix)
    assert [set(one) for one in after] == [set(one) for one in before]
    assert "insert" not in after[0] and "clear" not in after[1]
    again = cache_events.follow(alloc)
    assert len(again.drain()) == 3


def test_a_refused_growth_tells_nothing_and_the_digest_is_the_same() -> None:
    alloc, twin = make(10), make(10)
    events = cache_events.follow(alloc)
    for one in (alloc, twin):
        put(one, range(16))
    events.drain()
    h = alloc.open()
    with pytest.raises(sgalloc.OutOfPages):
        alloc.extend(h, 11 * SIZE)
    assert events.drain() == []
    twin.open()
    assert alloc.digest() == twin.digest()


def test_a_restored_allocator_tells_what_it_holds() -> None:
    alloc = make()
    put(alloc, range(16), "a")
    put(alloc, [*range(8), *range(90, 98)], "a")
    copy = sgalloc.KVAllocator.restore(alloc.snapshot(), device="cpu")
    routers = []
    for one in (alloc, copy):
        routers.append(Router())
        routers[-1].hear(cache_events.follow(one).drain())
    assert routers[0].parents == routers[1].parents and len(routers[0].parents) == 6


def test_with_a_window_the_main_group_is_told_of() -> None:
    alloc = make(window=sgalloc.SlidingWindow(8, 40))
    events = cache_events.follow(alloc)
    h = alloc.open()
    alloc.extend(h, 40)
    alloc.evict_window(h)
    alloc.release(h, tokens=[range(40)])
    router = Router()
    router.hear(events.drain())
    assert router.knows(range(40), None) == 40
    assert router.knows(range(20), None) == 20
    assert alloc.prefix.match(range(20)).length == 0, "its window pages are gone"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: cache_events.follow(3), TypeError, "follow takes a KVAllocator"),
        (
            lambda: cache_events.follow(sgalloc.KVAllocator(4, 4, 2, 8, device="cpu")),
            ValueError,
            "prefix_cache=True",
        ),
        (lambda: cache_events.follow(make(), limit=0), ValueError, "limit"),
        (lambda: cache_events.follow(make(), tokens=1), TypeError, "tokens must be"),
        (lambda: cache_events.page_hashes(range(4), 0), ValueError, "page_size"),
        (lambda: cache_events.page_hashes(range(4), 4, 1.5), TypeError, "namespace"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
