"""K4: from new, prefilling, running, parked, received, aborted, waiting: everything comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from transfer.walking import Walk

from sgalloc import transfer
from sgalloc.pins import Pin, Pins
from sgalloc.transfer import acknowledge


def walk(seed: int, page_size: int, prefix_cache: bool, steps: int = 150) -> Counter[str]:
    one = Walk(seed, page_size, prefix_cache)
    for _ in range(steps):
        one.step()
    one.finish()
    return one.seen


@pytest.mark.parametrize("ps", [1, 2, 3, 16])
def test_walks_end_with_everything_free(ps: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += walk(seed, ps, prefix_cache=seed % 2 == 1)
    rare = {
        name: seen[name]
        for name in (
            "open", "preallocate", "extend", "decode", "trim", "abort", "release", "reclaimed",
            "received", "aborted and written", "idle acknowledgement", "wrong state",
            "with a prefix", "quarantined", "OutOfPages", "OutOfRows",
        )
        if seen[name] < 3
    }  # fmt: skip
    assert not rare, rare


def test_the_same_seed_gives_the_same_ids() -> None:
    one, other = Walk(3, 2, True), Walk(3, 2, True)
    for _ in range(120):
        one.step()
        other.step()
        assert one.alloc.owners().tolist() == other.alloc.owners().tolist()
    assert one.ever == other.ever


# -- the walk is judged --------------------------------------------------------------------------


def acknowledges_for_another(core: Any, handle: int, writer: int) -> bool:
    return acknowledge(core, handle, writer) and (acknowledge(core, handle, 0) or True)


def due_too_late(pin: Pin, now: float) -> bool:
    return pin.deadline is not None and now > pin.deadline


def due_if_aborted(pin: Pin, now: float) -> bool:
    return pin.aborted and pin.deadline is not None and now >= pin.deadline


FAULTS = {
    "live a writer too soon": mock.patch.object(transfer, "acknowledge", acknowledges_for_another),
    "due too late": mock.patch.object(Pin, "due", due_too_late),
    "due only if aborted": mock.patch.object(Pin, "due", due_if_aborted),
    "aborted pages forgotten": mock.patch.object(Pins, "aborted", lambda self: []),
    "never taken back": mock.patch.object(transfer, "_take_back", lambda core, pin, event: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_walk_reports_a_planted_fault(fault: str) -> None:
    with FAULTS[fault], pytest.raises(Exception):  # noqa: B017
        for seed in range(12):
            walk(seed, 2, prefix_cache=True)
