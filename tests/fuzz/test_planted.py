"""Faults of every kind, planted into the package, are found by the fuzz that everybody runs."""

from __future__ import annotations

import pytest
from fuzz.planted import FAULTS, Fault, planted

from sgalloc.fuzz.running import Setting, batches, worlds_for

BY_FUZZ = [fault for fault in FAULTS if fault.found_by == "fuzz"]
MOST_CALLS = 20_000


def found(worlds: int) -> str:
    """What the worlds of seed 0 report, up to the first that reports anything."""
    for batch in batches(Setting(), worlds, 1, lambda: True):
        for failure in batch.failures:
            return failure.message
    return ""


def test_every_kind_has_its_fault() -> None:
    kinds = {fault.kind for fault in FAULTS}
    assert kinds == {f"K{number}" for number in range(1, 11)}
    assert {fault.kind for fault in BY_FUZZ} == kinds, "each is found without a GPU, too"
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_without_a_fault_the_same_worlds_agree() -> None:
    assert found(worlds_for(MOST_CALLS)) == ""


@pytest.mark.parametrize("fault", BY_FUZZ, ids=lambda fault: f"{fault.kind} {fault.name}")
def test_a_planted_fault_is_found(fault: Fault) -> None:
    with planted(fault):
        assert found(worlds_for(MOST_CALLS))
