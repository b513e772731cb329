"""Faults of every kind, planted into the package, are found by the fuzz that everybody runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.planted import FAULTS, Fault, function_at, mutated, planted
from stand_in_cuda import stand_in

from sgalloc.fuzz.running import Setting, batches, worlds_for

ROOT = Path(__file__).resolve().parents[2]
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


def test_faults_for_the_latch_tests_can_be_planted() -> None:
    """Their text is there, and what takes its place compiles; a GPU has to find them."""
    with stand_in():
        for fault in FAULTS:
            if fault.found_by != "fuzz":
                assert mutated(function_at(fault.where), fault.old, fault.new).co_code
                assert (ROOT / "tests" / fault.found_by.partition("::")[0]).is_file()


def test_the_page_on_fuzzing_lists_every_fault() -> None:
    page = (ROOT / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        found = "`sgalloc fuzz`" if fault.found_by == "fuzz" else f"`tests/{fault.found_by}`"
        assert f"| {fault.kind} | {fault.name} | {found} |" in page
