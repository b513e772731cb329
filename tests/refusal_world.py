"""The world in which refusals are tried, and what every one of them has to be like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from host_support import Query, fingerprint, make, prompt

import sgalloc

PS = 4


class World(NamedTuple):
    """An allocator with something in every place that a refused call could disturb."""

    alloc: sgalloc.KVAllocator
    h: np.ndarray
    """Two open requests: C = 9, A = 16; and C = 10, A = 12, opened with two shared pages."""
    gone: int
    plan: sgalloc.Plan
    match: sgalloc.Match


def world() -> World:
    alloc = make(40, PS, max_requests=8, row_width=41, prefix_cache=True)
    seeds = alloc.open(2, namespace=None)
    alloc.extend(seeds, [12, 20])
    alloc.release(seeds, tokens=[prompt(3, PS), prompt(5, PS, seed=1)])
    (plain,) = alloc.open()
    (shared,) = alloc.open_with_prefix(alloc.prefix.match(prompt(2, PS)))
    (gone, waiting) = alloc.open(2)
    alloc.extend([plain, shared, gone, waiting], [9, 10, 3, 7])
    alloc.reserve(plain, 7)
    alloc.decode([plain, shared], 0)
    alloc.release(waiting, after=Query())
    alloc.release(gone)
    match = alloc.prefix.match(prompt(5, PS, seed=1))
    h = np.array([plain, shared])
    return World(alloc, h, int(gone), alloc.plan(decode=(h, 8)), match)


def assert_refused(
    call: Callable[[World], Any],
    error: type[Exception] | tuple[type[Exception], ...],
    naming: str | None,
    w: World | None = None,
    remedy: str = r"\b(must|takes)\b|: \w",
) -> None:
    """The call is refused in one line that names the value and a remedy; nothing changed."""
    w = world() if w is None else w
    before = fingerprint(w.alloc)
    with pytest.raises(error) as refused:
        call(w)
    message = str(refused.value)
    assert message and "\n" not in message
    if naming is not None:
        assert naming in message, message
    assert re.search(remedy, message), f"no remedy in {message!r}"
    assert fingerprint(w.alloc) == before
    assert w.alloc.fits(w.plan)
    w.alloc.apply(w.plan)  # made before, and as good as it was
    w.alloc.check(device=True)
