"""Feeding only the prefix cache: hits worked out by hand, by a naive LRU, and as published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgalloc.replay.prefix_only import PrefixHits, replay_prefixes
from sgalloc.replay.requests import TraceRequest, Workload
from sgalloc.replay.traces import read_trace

SIZE = 4
"""Tokens of a block in the small examples."""


def prompt(blocks, tokens=None) -> TraceRequest:
    """A prompt of these block ids, the last of them filled up unless ``tokens`` says otherwise."""
    if tokens is None:
        tokens = SIZE * len(blocks)
    return TraceRequest(0.0, tokens, 1, np.array(blocks, np.int64), SIZE)


def fed(requests, num_pages, **options) -> PrefixHits:
    return replay_prefixes(
        Workload("small", requests, 0, []), num_pages, **({"device": "cpu"} | options)
    )


# Worked out by hand


def test_a_block_is_hit_where_all_before_it_are_the_same():
    found = fed([prompt([1, 2, 3]), prompt([1, 2, 4]), prompt([1, 2, 3]), prompt([9, 2, 3])], 50)
    assert found == PrefixHits(blocks=12, hits=0 + 2 + 3 + 0, evicted=0)
    assert found.rate == 5 / 12


def test_a_partial_block_is_cached_only_when_asked_and_counts_in_both_cases():
    same = [prompt([1, 2, 3], tokens=10), prompt([1, 2, 3], tokens=10)]
    assert fed(same, 50) == PrefixHits(6, 2, 0)
    assert fed(same, 50, share_partial=True) == PrefixHits(6, 3, 0)
    # A block that is cached whole is not what a shorter prompt ends with.
    short_after_long = [prompt([1, 2, 3]), prompt([1, 2, 3], tokens=9)]
    assert fed(short_after_long, 50) == PrefixHits(6, 2, 0)


def test_a_prompt_below_one_block_hits_only_as_a_partial_block():
    same = [prompt([5], tokens=1), prompt([5], tokens=1)]
    assert fed(same, 1) == PrefixHits(2, 0, 0)
    assert fed(same, 1, share_partial=True) == PrefixHits(2, 1, 0)


def test_the_least_recently_used_page_goes_first():
    # Three pages: [1 2], [3]; 1 2 used again; 4 takes the place of 3; 3 takes that of 4.
    prompts = [prompt(blocks) for blocks in ([1, 2], [3], [1, 2], [4], [1, 2], [3])]
    assert fed(prompts, 3) == PrefixHits(blocks=9, hits=2 + 2, evicted=2)


def test_pages_go_from_the_end_of_a_prompt():
    # 4 takes the place of 3, the last page of the first prompt, so that 1 2 are still there.
    prompts = [prompt([1, 2, 3]), prompt([4]), prompt([1, 2, 3])]
    assert fed(prompts, 3) == PrefixHits(blocks=7, hits=2, evicted=2)


def test_a_shared_prefix_outlives_its_older_branches():
    # 1 2 and 1 3; five pages hold both and 8 9; then 7 evicts 2, and 1 stays: 3 needs it.
    prompts = [prompt(blocks) for blocks in ([1, 2], [1, 3], [8, 9], [7], [1, 3], [1, 2])]
    assert fed(prompts, 5) == PrefixHits(blocks=11, hits=1 + 2 + 1, evicted=2)


def test_an_exact_fit_is_served_and_one_block_more_is_refused():
    assert fed([prompt(range(7)), prompt(range(7))], 7) == PrefixHits(14, 7, 0)
    with pytest.raises(ValueError) as caught:
        fed([prompt([0]), prompt(range(8))], 7)
    assert "8 blocks" in str(caught.value) and "7 pages" in str(caught.value)
    assert "at least 8" in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_without_blocks_hit_nothing_and_count():
    unknown = TraceRequest(0.0, 5, 1, None, SIZE)
    found = fed([prompt([1, 2]), unknown, unknown, prompt([1, 2])], 20)
    assert found == PrefixHits(blocks=2 + 2 + 2 + 2, hits=2, evicted=0)


def test_no_requests_have_a_rate_of_nothing():
    found = fed([], 3)
    assert found == PrefixHits(0, 0, 0) and found.rate == 0.0


def test_progress_names_each_request_in_order():
    seen: list[int] = []
    fed([prompt([block]) for block in range(4)], 2, progress=seen.append)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("num_pages", "error"), [(0, ValueError), (-5, ValueError), (2.5, (TypeError, ValueError))]
)
def test_a_cache_that_cannot_be_is_refused(num_pages, error):
    with pytest.raises(error):
        fed([prompt([1])], num_pages)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'abacus'"):
        fed([prompt([1])], 4, device="abacus")


# Against a cache that keeps every path of blocks apart


def naive(prompts: list[list[int]], num_pages: int) -> tuple[int, int]:
    """Hits and evictions of an LRU cache of paths: leaves alone can go, the oldest first."""
    used: dict[tuple[int, ...], int] = {}
    hits = evicted = 0
    for now, blocks in enumerate(prompts):
        path = [tuple(blocks[: end + 1]) for end in range(len(blocks))]
        known = sum(1 for one in path if one in used)
        hits += known
        for one in path[:known]:
            used[one] = now
        while len(used) + len(path) - known > num_pages:
            inner = {one[:-1] for one in used}
            leaves = [one for one in used if one not in inner and one not in path]
            del used[min(leaves, key=used.__getitem__)]
            evicted += 1
        used.update(dict.fromkeys(path, now))
    return hits, evicted


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)


@given(prompts=paths, num_pages=st.integers(5, 14))
def test_any_prompts_hit_what_a_naive_lru_cache_hits(prompts, num_pages):
    found = fed([prompt(blocks) for blocks in prompts], num_pages)
    assert (found.hits, found.evicted) == naive(prompts, num_pages)
    assert found.blocks == sum(map(len, prompts))


# The published trace

PUBLISHED = {
    # pages of the cache: per cent of the blocks hit, partial blocks left out and shared
    500: (4.22, 4.22),
    2_000: (5.53, 5.37),
    10_000: (21.49, 21.12),
    50_000: (35.56, 35.46),
    None: (36.60, 36.64),
}


@pytest.fixture(scope="module")
def conversation(traces_dir) -> Workload:
    return read_trace(traces_dir / "mooncake_conversation.jsonl.xz")


@pytest.mark.slow
@pytest.mark.parametrize("share_partial", [False, True], ids=["whole-blocks", "partial-blocks-too"])
@pytest.mark.parametrize("num_pages", PUBLISHED, ids=lambda n: f"{n} pages" if n else "unbounded")
def test_the_conversation_trace_hits_as_often_as_published(conversation, num_pages, share_partial):
    blocks = sum(len(request.blocks) for request in conversation.requests)
    found = replay_prefixes(
        conversation, num_pages or blocks, share_partial=share_partial, device="cpu"
    )
    assert found.blocks == blocks
    assert 100 * found.rate == pytest.approx(PUBLISHED[num_pages][share_partial], abs=0.1)
    assert (found.evicted == 0) is (num_pages is None)
