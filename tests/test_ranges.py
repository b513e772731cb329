"""NVTX: what a tool would see, and that nobody pays where none listens."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvtx
import pytest

import sgalloc
from sgalloc import ranges


class Attributes:
    def __init__(self, message: str) -> None:
        self.message = message
        self.payload: Any = None


class Counter:
    def __init__(self) -> None:
        self.samples: list[tuple[int, ...]] = []

    def sample(self, value: Any) -> None:
        self.samples.append(tuple(value.item()))


class Domain:
    """Stands in for the domain of an attached tool."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []
        self.payloads: dict[str, Any] = {}
        self.counters: dict[str, Counter] = {}

    def get_event_attributes(self, message: str) -> Attributes:
        return Attributes(message)

    def push_range(self, attributes: Attributes) -> None:
        self.open.append(attributes.message)
        self.seen.append(tuple(self.open))
        if attributes.payload is not None:
            self.payloads[attributes.message] = attributes.payload.copy()

    def pop_range(self) -> None:
        self.open.pop()

    def get_counter(self, name: str, dtype: Any) -> Counter:
        assert np.dtype(dtype).names == ("free_pages", "ring_slots", "ring_waits")
        return self.counters.setdefault(name, Counter())


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Domain:
    domain = Domain()

    def get_domain(name: str) -> Domain:
        assert name == "sgalloc"
        return domain

    monkeypatch.setattr(nvtx, "get_domain", get_domain)
    return domain


def make(debug: bool | None = None) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(40, 4, 4, 64, device="cpu", prefix_cache=True, debug=debug)


def test_verbs_hold_the_ranges_of_their_parts(tool: Domain) -> None:
    alloc = make()
    h = alloc.open(2)
    alloc.extend(h, [5, 9])
    assert tool.seen == [
        ("open",),
        ("extend",),
        ("extend", "plan"),
        ("extend", "write"),
    ]
    assert tool.open == []


def test_a_write_carries_pages_rows_and_bytes(tool: Domain) -> None:
    alloc = make()
    alloc.extend(alloc.open(2), [5, 9])
    assert tool.payloads["write"].item() == (5, 2, 5 * 4 + 2 * 8)
    assert tool.payloads["write"].dtype.names == ("pages", "rows", "bytes")


def test_the_counters_follow_the_pool(tool: Domain) -> None:
    alloc = make()
    h = alloc.open(2)
    alloc.extend(h, [5, 9])
    alloc.release(h)
    assert tool.counters["levels"].samples == [(40, 0, 0), (35, 0, 0), (40, 0, 0)]


def test_a_range_is_closed_behind_a_refusal(tool: Domain) -> None:
    alloc = make()
    h = alloc.open()
    with pytest.raises(sgalloc.RowTooNarrow):
        alloc.extend(h, 65)
    assert tool.open == []
    assert tool.seen[-2:] == [("extend",), ("extend", "plan")]
    assert alloc.stats().refusals == {"RowTooNarrow": 1}


def test_results_are_the_same_with_a_tool(tool: Domain) -> None:
    seen = make()
    h = seen.open(3)
    plan = seen.plan(extend=(h[:1], [7]), reserve=(h[1:], 6))
    assert plan.num_new_pages == 6
    seen.apply(plan)
    seen.check(device=True)


def test_without_a_tool_nothing_is_wrapped() -> None:
    assert not ranges.listening()
    alloc = make(debug=False)
    assert not set(vars(alloc)) & {"open", "extend", "decode", "reserve", "commit", "release"}
    assert alloc._make_plan is sgalloc.Plan
    assert "write" not in vars(alloc._core.device)
