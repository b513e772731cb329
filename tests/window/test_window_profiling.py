"""The benchmark of the window's verbs: all sides do the same work, and faults stop it."""

from __future__ import annotations

from typing import Any

import pytest

from profiling import window_verbs
from profiling.layout import Found
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, alternate

BRIEF = Effort(0.0, 10, most=10, block=5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("script", ["decode", "reserve"])
def test_the_sides_agree_also_after_they_began_again(page_size: int, script: str) -> None:
    trio = window_verbs.Trio(5, page_size)
    effort = Effort(0.0, 480, most=480, block=5)
    times = alternate(window_verbs.sides_of(trio, script), effort)
    trio.agree()
    sides = {key.side for key in times}
    assert sides == {SUBJECT, window_verbs.BARE, LOOP}
    labels = {key.label for key in times if key.step == "evict_window"}
    if script == "decode":
        assert labels == ({window_verbs.MOVES} if page_size == 1 else
                          {window_verbs.MOVES, window_verbs.STAYS})  # fmt: skip
    assert trio.alloc.stats().groups["window"].high_water > 0


def test_a_loop_that_frees_another_number_of_pages_is_noticed() -> None:
    trio = window_verbs.Trio(4, 16)
    trio.loop.window.free_pages.pop()
    with pytest.raises(RuntimeError, match="free pages differ"):
        trio.agree()
    trio = window_verbs.Trio(4, 16)
    trio.loop.requests[2].evicted -= 16
    with pytest.raises(RuntimeError, match="frontiers differ"):
        trio.agree()


def test_the_table_has_every_call_and_a_verdict(monkeypatch: Any) -> None:
    bench = window_verbs.run((3,), (16,), BRIEF)
    assert bench.states_compared == 2
    table = window_verbs.table(Found([record.to_json() for record in bench.records]))
    text = table.markdown()
    for name in ("decode", "evict_window", "reserve without need", "reserve and evict, planned"):
        assert f"`{name}`" in text
    assert "the loop takes" in table.verdict
    assert all(len(row) == len(table.columns) for row in table.rows)
