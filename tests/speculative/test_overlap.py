"""Overlap: the host commits what a step accepted only after the next step was prepared.

A small model runs through every sequence of accepted lengths: the device writes a step's tokens
past the true C, the host reserves past the C that it knows, one step behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from host_support import make

import sgalloc
from sgalloc import sizing
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle

CHAIN = SpecConfig("eagle", steps=2, topk=1, draft_tokens=3)
BLOCK = SpecConfig("dflash", draft_tokens=3)
LOOKUP = SpecConfig("ngram", draft_tokens=3)
ROOTED = SpecConfig("uno", draft_tokens=2)
STEPS = 4

Prepare = Callable[[sgalloc.KVAllocator, Any, int], Any]


def prepare_with(spec: SpecConfig) -> Prepare:
    module = dflash if spec.algorithm == "dflash" else eagle
    return lambda alloc, x, reserve: module.prepare_for_decode(alloc, x, spec, reserve=reserve)


def runs(spec: SpecConfig, ps: int, reserve: int) -> Iterator[bool]:
    """Whether every write of the device stayed within A, for each run of the model."""
    writes = sizing.alloc_len_per_decode(spec, ps)
    prepare = prepare_with(spec)
    alloc = make(200, ps, max_requests=1, row_width=200 * ps)
    for start in range(1, ps + 1):
        for accepted in product(range(1, writes + 1), repeat=STEPS):
            handle = alloc.open()
            alloc.extend(handle, start)
            true_c, inside = start, True
            unheard: int | None = None
            for tokens in accepted:
                prepare(alloc, handle, reserve)
                held = int(alloc.allocated(handle)[0])
                inside &= true_c + writes <= held
                if unheard is not None:
                    alloc.commit(handle, unheard)
                true_c, unheard = true_c + tokens, tokens
                if not inside:
                    break
            yield inside
            assert alloc.decode_index(handle)[0] <= STEPS
            alloc.release(handle)
    assert alloc.available() == 200


@pytest.mark.parametrize("ps", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("spec", [CHAIN, BLOCK, LOOKUP, ROOTED], ids=lambda s: s.algorithm)
def test_twice_the_step_always_suffices_and_is_the_least(spec: SpecConfig, ps: int) -> None:
    """One token less fails at every page size: where C + 2 L - 1 ends a page."""
    length = sizing.alloc_len_per_decode(spec, ps)
    assert sizing.alloc_reserve_per_decode(spec, ps) == 2 * length == 6
    assert all(runs(spec, ps, 2 * length))
    assert not all(runs(spec, ps, 2 * length - 1))
    assert not all(runs(spec, ps, length)), "one step alone is not enough"


@pytest.mark.parametrize("ps", [1, 2, 3, 4, 16])
def test_where_one_token_less_is_too_few(ps: int) -> None:
    """The failing run: C + 2 L - 1 is a page edge, and the step before accepted everything."""
    length = sizing.alloc_len_per_decode(CHAIN, ps)
    edge = -(-2 * length // ps) * ps
    start = edge - (2 * length - 1)
    alloc = make(40, ps, max_requests=1, row_width=40 * ps)
    handle = alloc.open()
    alloc.extend(handle, start)
    for _ in range(2):  # the second is prepared before the first is heard of
        step = eagle.prepare_for_decode(alloc, handle, CHAIN, reserve=2 * length - 1)
        assert step.nxt[0] == edge
    assert start + length + length == edge + 1
    with pytest.raises(ValueError, match="not in the extent"):
        alloc.slots(handle, start + length, start + 2 * length)
    eagle.prepare_for_decode(alloc, handle, CHAIN)
    assert alloc.slots(handle, start + length, start + 2 * length).size == length


@pytest.mark.parametrize("ps", [1, 2, 3, 16])
def test_a_step_that_is_heard_of_at_once_needs_one_length_alone(ps: int) -> None:
    """Without overlap L suffices and L - 1 does not: the second L is for the lag."""
    length = sizing.alloc_len_per_decode(CHAIN, ps)
    rng = np.random.default_rng(ps)
    for less, enough in ((0, True), (1, False)):
        alloc = make(100, ps, max_requests=1, row_width=100 * ps)
        handle = alloc.open()
        alloc.extend(handle, 1)
        inside = True
        for tokens in rng.integers(1, length + 1, 30):
            eagle.prepare_for_decode(alloc, handle, CHAIN, reserve=length - less)
            c, a = int(alloc.committed(handle)[0]), int(alloc.allocated(handle)[0])
            inside &= c + length <= a
            alloc.commit(handle, min(int(tokens), a - c))
        assert inside is enough


def test_a_tree_accepts_less_than_it_writes_so_twice_is_more_than_enough() -> None:
    """At page size 1 a tree writes steps * topk and accepts at most steps + 1."""
    tree = SpecConfig("eagle", steps=2, topk=3, draft_tokens=4)
    writes = sizing.alloc_len_per_decode(tree, 1)
    assert writes == 6
    for lag in range(1, 2 + 2):
        assert lag + writes < sizing.alloc_reserve_per_decode(tree, 1)


def test_requests_of_a_batch_lag_each_on_its_own() -> None:
    """A long run of many requests in one batch, each with its own accepted lengths."""
    rng = np.random.default_rng(3)
    for ps in (1, 3, 16):
        n, length = 9, sizing.alloc_len_per_decode(BLOCK, ps)
        alloc = make(3000 // ps + 20 * n, ps, max_requests=n, row_width=400)
        handles = alloc.open(n)
        alloc.extend(handles, rng.integers(1, 40, n))
        batch = alloc.batch(handles)
        true_c, unheard = alloc.committed(batch), None
        for step in range(60):
            result = dflash.prepare_for_decode(alloc, batch, BLOCK)
            assert (true_c + length <= result.nxt).all()
            assert (result.committed <= true_c).all()
            if unheard is not None:
                alloc.commit(batch, unheard)
            unheard = rng.integers(1, length + 1, n)
            true_c = true_c + unheard
            assert alloc.decode_index(batch).tolist() == [step + 1] * n
        alloc.check(device=True)
