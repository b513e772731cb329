"""Where the calls of ranks part: found by chains of hashes, named in words on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trust.mirrors import CHANGES, HARMLESS, parted, serve
from trust.walk import Walk, make

import sgalloc
from sgalloc.trust.steps import Trace


def journals(folder: Path, changes: Sequence[str]) -> list[Any]:
    return [serve(folder / f"{at}", change)._journal for at, change in enumerate(changes)]


@pytest.mark.parametrize("change", HARMLESS)
def test_what_changes_nothing_is_no_difference(tmp_path: Path, change: str) -> None:
    """Refused calls, misses and late acknowledgements; numbers for all or one each; handles or a
    batch; events that are done, or that only a write waits for."""
    allocs = [serve(tmp_path / f"{at}", some) for at, some in enumerate(("", change, ""))]
    assert len({alloc.digest() for alloc in allocs}) == 1
    found, exchanges = parted([alloc._journal for alloc in allocs])
    assert found is None and exchanges > 1


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_first_call_that_differs_is_named(tmp_path: Path, change: str, where: int) -> None:
    changes = ["", "", ""]
    changes[where] = change
    allocs = [serve(tmp_path / f"{at}", some) for at, some in enumerate(changes)]
    assert len({alloc.digest() for alloc in allocs}) == 2
    found, exchanges = parted([alloc._journal for alloc in allocs])
    assert found is not None
    words = found.words()
    one, other = CHANGES[change]
    assert words[where].startswith(one) and words[where - 1].startswith(other), words
    assert words[where - 1] == words[where - 2]
    going_on = [step.number for step in found.steps if step.number >= 0]
    assert found.record == going_on[0]
    assert exchanges < 6 + math.log2(len(Trace(tmp_path / "0")))


def test_what_changes_nothing_does_not_hide_what_does(tmp_path: Path) -> None:
    """The records of a rank that was refused are numbered otherwise; it differs in none."""
    (found, _) = parted(journals(tmp_path, ("refused", "middle", "said otherwise")))
    assert found is not None
    first, second, third = found.words()
    assert (second.partition(" (its")[0], first) == CHANGES["middle"]
    assert third.startswith(first) and "its record" in second and "its record" in third


def test_the_same_call_with_another_outcome_says_so(tmp_path: Path) -> None:
    allocs = [serve(tmp_path / f"{at}") for at in range(2)]
    for at, alloc in enumerate(allocs):
        pool = alloc._core.pool
        if at:  # as a stray write would
            top = slice(pool.free - 2, pool.free)
            pool._stack[top] = pool._stack[top][::-1].copy()
        (handle,) = alloc.open()
        alloc.extend(handle, 1)
    found, _ = parted([alloc._journal for alloc in allocs])
    assert found is not None
    assert found.words() == ["open of 1 requests with another outcome"] * 2


def test_without_a_journal_that_can_be_read_nothing_is_named(tmp_path: Path) -> None:
    one, two = journals(tmp_path, ("", "middle"))
    assert parted([one, None]) == (None, 1)
    two.log.path = str(tmp_path / "not there")
    assert parted([one, two]) == (None, 1)
    one.close()
    assert parted([one, one]) == (None, 1)


@pytest.mark.parametrize("name", ["prefix cache", "window, map, prefix", "sparse"])
def test_walks_that_part_after_any_number_of_calls(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same walk on two ranks but for one call; the step that is named is that call's."""
    real = sgalloc.KVAllocator
    for case, steps in enumerate((0, 1, 17, 60, 119)):
        walks = []
        for rank in range(2):
            path = tmp_path / f"{case}.{rank}"
            monkeypatch.setattr(
                sgalloc, "KVAllocator", lambda path=path, **how: real(**how, journal=path)
            )
            walks.append(Walk(make(name), 21))
        monkeypatch.setattr(sgalloc, "KVAllocator", real)
        for step in range(120):
            if step == steps:
                walks[0].finish(), walks[1].finish()
                for walk in walks:
                    walk.alloc.settle()
                walks[1].alloc.abort(list(walks[1].text)[:1])
                walks[1].alloc.open(1, "stray")
            said = [walk.step() for walk in walks]
            if step < steps:
                assert said[0] == said[1]
        found, _ = parted([walk.alloc._journal for walk in walks])
        assert found is not None
        assert found.words()[1].startswith(("abort", "open")), found.words()
