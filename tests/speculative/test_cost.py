"""A step costs the bytecodes of its columns, not of its requests: nothing loops over a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import make
from test_prefix_cost import bytecodes

import sgalloc
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle

CHAIN = SpecConfig("eagle", 3, 1, 4)
BLOCK = SpecConfig("dflash", draft_tokens=4)
# Below some dozens of growing requests a plan adds up a list: another way, as many bytecodes. Above
# 4,096 pages the write is noted in short, which costs some once.
FEW, MANY = 100, 2000


def scene(requests: int) -> tuple[sgalloc.KVAllocator, Any, np.ndarray]:
    """A batch of which every request is at a page edge."""
    alloc = make(requests * 6, 4, max_requests=requests, row_width=24, debug=False)
    handles = alloc.open(requests)
    alloc.extend(handles, 4)
    return alloc, alloc.batch(handles), handles


def eagles(requests: int) -> Callable[[], Any]:
    alloc, batch, _ = scene(requests)
    return lambda: eagle.prepare_for_decode(alloc, batch, CHAIN)


def adaptive(requests: int) -> Callable[[], Any]:
    alloc, batch, _ = scene(requests)
    reserve = np.arange(requests) % 9
    return lambda: eagle.prepare_for_decode(alloc, batch, CHAIN, reserve=reserve)


def dflashes(requests: int) -> Callable[[], Any]:
    alloc, batch, _ = scene(requests)
    lengths, top_k = dflash.Lengths(alloc), np.full(requests, 20)
    return lambda: dflash.prepare_for_decode(alloc, batch, BLOCK, top_k, lengths=lengths)


def compacts(requests: int) -> Callable[[], Any]:
    alloc, batch, _ = scene(requests)
    alloc.reserve(batch, 8)
    accepted = [[5, 7, 9], [4]] * (requests // 2)
    return lambda: alloc.compact(batch, accepted)


def retracts(requests: int) -> Callable[[], Any]:
    alloc, _, handles = scene(requests)
    order = np.arange(requests)
    return lambda: sgalloc.retraction.retract_until_fits(
        alloc, handles, lambda some: alloc.plan(reserve=(some, 8)), order
    )


@pytest.mark.parametrize("kind", [eagles, adaptive, dflashes, compacts])
def test_a_large_batch_costs_the_bytecodes_of_a_small_one(kind: Callable[[int], Any]) -> None:
    few, many = (min(bytecodes(kind(n)) for _ in range(3)) for n in (FEW, MANY))
    assert 0 < many < few + 60


def test_retraction_asks_as_often_as_halving_takes() -> None:
    """Seven questions for a hundred requests, eleven for two thousand."""
    few, many = (min(bytecodes(retracts(n)) for _ in range(3)) for n in (FEW, MANY))
    assert few < many < 2 * few
