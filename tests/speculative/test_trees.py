"""Trees of drafts on pages: every branch fits, and `compact` brings the accepted path home.

A branch on pages has its own copy of the request's last page, so that its tokens stand behind
that page's: branch b of C = base + r begins at ``base + b * pages * page_size``, its tokens r
places further on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from host_support import assert_laws, make

import sgalloc
from sgalloc import sizing
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import eagle

TREES = [(steps, topk) for steps in (1, 2, 3, 5, 17) for topk in (2, 3, 4)]
PAGES = (2, 3, 4, 16)


class Branches(NamedTuple):
    """Where the drafts of one request stand.

    Attributes:
        positions: row positions, int64 ``(topk, steps)``.
        stop: one past the last page of the last branch.
    """

    positions: np.ndarray
    stop: int


def branches(committed: int, steps: int, topk: int, ps: int) -> Branches:
    inside = committed % ps
    base = committed - inside
    pages = len({j // ps for j in range(inside + steps)})
    first = base + np.arange(topk)[:, None] * pages * ps
    return Branches(first + inside + np.arange(steps), base + topk * pages * ps)


@pytest.mark.parametrize("ps", PAGES)
@pytest.mark.parametrize(("steps", "topk"), TREES)
def test_every_reachable_tree_fits_the_reserve_and_the_row(steps: int, topk: int, ps: int) -> None:
    """Also the one that begins a step later than the host knows, up to the context's end."""
    context = 5 * ps
    spec = SpecConfig("eagle", steps, topk, draft_tokens=steps + 1)
    width = sizing.row_width(context, spec, ps)
    tightest = 1 << 60
    for committed in range(context - 2 * ps, context + 1):
        alloc = make(width // ps, ps, max_requests=1, row_width=width)
        handle = alloc.open()
        alloc.extend(handle, committed)
        step = eagle.prepare_for_decode(alloc, handle, spec)
        assert step.nxt[0] <= width
        for lag in range(steps + 2):
            tree = branches(committed + lag, steps, topk, ps)
            assert tree.stop <= step.nxt[0]
            assert np.unique(tree.positions).size == steps * topk, "branches share no position"
            assert (tree.positions >= committed + lag).all()
        one = sizing.alloc_len_per_decode(spec, ps)
        tightest = min(tightest, committed + one - branches(committed, steps, topk, ps).stop)
    assert 0 <= tightest < ps, "the worst tree leaves less than a page"


def random_path(
    rng: np.random.Generator, committed: int, steps: int, topk: int, draft: int, ps: int
) -> list[int]:
    """Row positions of an accepted path: of a branch, or through a tree that was verified."""
    if rng.integers(2):
        depth = int(rng.integers(0, steps + 1))
        branch = int(rng.integers(topk))
        return branches(committed, steps, topk, ps).positions[branch, :depth].tolist()
    # A tree laid out in the order of its nodes: each hangs on one before it.
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(draft)]
    node, path = int(rng.integers(-1, draft)), []
    while node >= 0:
        path.append(committed + node)
        node = parents[node]
    return path[::-1]


def scene(
    seed: int,
) -> tuple[sgalloc.KVAllocator, np.ndarray, SpecConfig, np.random.Generator]:
    rng = np.random.default_rng(seed)
    ps = int(rng.choice([1, 2, 3, 4, 16]))
    steps, topk = int(rng.integers(1, 6)), int(rng.integers(2, 5))
    spec = SpecConfig("eagle", steps, topk, int(rng.integers(steps + 1, 3 * steps + 3)))
    n = int(rng.integers(1, 6))
    width = sizing.row_width(200, spec, ps)
    alloc = make(n * (width // ps), ps, max_requests=n, row_width=width, prefix_cache=True)
    handles = alloc.open(n)
    alloc.extend(handles, rng.integers(0, 40, n))
    return alloc, handles, spec, rng


@pytest.mark.parametrize("chunk", range(10))
def test_the_accepted_path_comes_home(chunk: int) -> None:
    """Tokens in a pool, moved as compact says, read as a request that was never a tree."""
    moved = 0
    for seed in range(30 * chunk, 30 * (chunk + 1)):
        alloc, handles, spec, rng = scene(seed)
        ps, fresh = alloc.page_size, iter(range(1, 1 << 30))
        pool = np.zeros((alloc.num_pages + 1) * ps, np.int64)
        texts: list[list[int]] = []
        for handle in handles.tolist():
            texts.append([next(fresh) for _ in range(int(alloc.committed(handle)[0]))])
            pool[alloc.slots(handle, 0, len(texts[-1]))] = texts[-1]
        for _ in range(3):
            who = rng.permutation(handles.size)[: int(rng.integers(1, handles.size + 1))]
            step = eagle.prepare_for_decode(alloc, handles[who], spec)
            accepted = []
            for at, nxt in zip(who.tolist(), step.nxt.tolist(), strict=True):
                handle, c = int(handles[at]), len(texts[at])
                pool[alloc.slots(handle, c, nxt)] = [next(fresh) for _ in range(nxt - c)]
                path = random_path(rng, c, spec.steps, spec.topk, spec.draft_tokens, ps)
                texts[at] += [int(pool[alloc.slots(handle, p, p + 1)[0]]) for p in path]
                accepted.append(path)
            src, dst = alloc.compact(handles[who], accepted)
            pool[dst] = pool[src]
            assert src.dtype == dst.dtype == np.int32 and src.size == dst.size
            assert not (src == dst).any(), "tokens in place are left out"
            moved += src.size
            for at, handle in enumerate(handles.tolist()):
                c, a = int(alloc.committed(handle)[0]), int(alloc.allocated(handle)[0])
                assert c == len(texts[at])
                assert pool[alloc.slots(handle, 0, c)].tolist() == texts[at]
                if at in who:
                    assert a == -(-c // ps) * ps, "pages wholly past C went back"
            assert_laws(alloc)
    assert moved > 100


@pytest.mark.parametrize("ps", [1, 2, 16])
def test_a_chain_has_nothing_to_move(ps: int) -> None:
    """Accepted tokens are in place: compact is commit and trim, in the same ledger state."""
    spec = SpecConfig("eagle", 3, 1, 4)
    one, two = (make(60, ps, max_requests=3, row_width=20 * ps) for _ in range(2))
    accepted = [[], [1], [3, 2, 4]]
    for alloc in (one, two):
        alloc.extend(alloc.open(3), [0, ps, ps + 1])
    first, second = (a._ledger.handle[[1, 2, 3]] for a in (one, two))
    for counts in ([0, 2, 4], [1, 1, 1], [4, 0, 3]):
        eagle.prepare_for_decode(one, first, spec)
        committed = one.committed(first).tolist()
        accepted = [list(range(c, c + k)) for c, k in zip(committed, counts, strict=True)]
        src, dst = one.compact(first, accepted)
        assert src.size == dst.size == 0
        eagle.prepare_for_decode(two, second, spec)
        two.commit(second, counts)
        two.trim(second, two.committed(second))
        assert one.committed(first).tolist() == two.committed(second).tolist()
        assert one.allocated(first).tolist() == two.allocated(second).tolist()
        assert one.owners().tolist() == two.owners().tolist()
        assert one.req_to_token.tobytes() == two.req_to_token.tobytes()
        assert one.decode_index(first).tolist() == two.decode_index(second).tolist()


def test_a_token_only_moves_to_an_earlier_place_and_may_land_on_one_still_to_be_read() -> None:
    """Why the engine gathers all before it scatters."""
    alloc = make(4, 8, max_requests=1, row_width=32)
    handle = alloc.open()
    alloc.extend(handle, 2)
    alloc.reserve(handle, 20)
    row = alloc.req_to_token[1].copy()
    src, dst = alloc.compact(handle, [[3, 5, 6, 9]])
    assert src.tolist() == row[[3, 5, 6, 9]].tolist()
    assert dst.tolist() == row[[2, 3, 4, 5]].tolist()
    assert set(src.tolist()) & set(dst.tolist()), "positions 3 and 5 are read and written"
    tokens = np.arange(40)
    scattered = tokens.copy()
    scattered[dst] = tokens[src]
    assert scattered[row[[2, 3, 4, 5]]].tolist() == src.tolist()
