"""The comparison can fail: each of these faults, planted, is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine.engine_support import assert_as_alone, random_requests, serve, settings

import sgalloc
from examples.engine.cache import Cache
from examples.engine.engine import Engine, Settings
from examples.engine.model import TINY, Model
from examples.engine.speculation import Speculation

COUNT = 8


def faults(engine: Engine, between: Callable[[Engine], None] = lambda engine: None) -> list[str]:
    """What is found wrong: outputs and logits, and answers that are NaN."""
    requests, found = random_requests(COUNT, seed=5), []
    try:
        serve(engine, requests, between=between)
    except (sgalloc.LawViolation, IndexError) as error:
        return [str(error)]  # in debug mode: a law, or an index by poison
    try:
        assert assert_as_alone(engine.model, requests, engine.recorded)
    except AssertionError as error:
        found.append(str(error))
    if int(engine.nans):
        found.append("NaN")
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, seed=3)


@pytest.mark.parametrize("mode", ["plain", "chain, overlapped", "tree", "block"])
def test_nothing_is_found_where_nothing_was_planted(model: Model, mode: str) -> None:
    assert faults(Engine(model, settings(mode, 4))) == []


@pytest.mark.parametrize("table", ["full", "window"])
def test_one_entry_of_a_table_that_is_off_by_one(model: Model, table: str) -> None:
    engine, planted = Engine(model, settings("plain", 4)), []

    def shift(engine: Engine) -> None:
        running = engine.scheduler.running
        if running.size and not planted:
            row = int(running[0])
            newest = int(engine.alloc.committed(engine.scheduler.handle[row])[0]) - 2
            getattr(engine.tables, table)[row, newest] -= 1
            planted.append(row)

    found = faults(engine, shift)
    assert planted and found


def test_two_rows_that_change_places(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Engine.look_up

    def wrong(self: Engine, rows: torch.Tensor, *rest: Any) -> Any:
        return looked_up(self, rows.flip(0), *rest)

    monkeypatch.setattr(Engine, "look_up", wrong)
    assert faults(Engine(model, settings("plain", 4)))


def test_a_page_that_is_free_while_it_is_read(model: Model) -> None:
    engine = Engine(model, settings("plain", 4))
    assert engine.canary is not None
    owners = engine.alloc.owners

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine.alloc, name)

        def owners(self, group: str) -> np.ndarray:
            found = owners(group)
            running = engine.scheduler.running
            if group == "full" and running.size:
                found[engine.alloc.pages(int(engine.scheduler.handle[running[0]]))[0]] = 0
            return found

    engine.canary.alloc = Wrong()
    assert "NaN" in faults(engine)


def test_window_pages_that_go_a_page_early(model: Model) -> None:
    class Early(Settings):
        def allocator(self, model: Model, stream: Any = None) -> sgalloc.KVAllocator:
            short = sgalloc.SlidingWindow(model.config.window - 4, self.window_pages, slot_map=True)
            return sgalloc.KVAllocator(
                self.pages, 4, 2 * self.running, 160, "cpu", short, prefix_cache=False
            )

    made = settings("plain", 4, prefix_cache=False)
    assert faults(Engine(model, Early(**made.__dict__)))


def test_the_moves_of_compact_left_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "move", lambda self, *moves: None)
    engine = Engine(model, settings("tree", 4))
    assert faults(engine)
    assert engine.speculation is not None and engine.speculation.moved


@pytest.mark.parametrize("group", [0, 1])
def test_the_moves_of_one_group_left_out(
    model: Model, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Cache.move

    def half(self: Cache, *moves: Any) -> None:
        none = torch.empty(0, dtype=torch.int64)
        move(self, *[(none, none) if at == group else pair for at, pair in enumerate(moves)])

    monkeypatch.setattr(Cache, "move", half)
    assert faults(Engine(model, settings("tree", 4)))


def test_the_lag_of_the_overlapped_step_forgotten(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Speculation._own
    monkeypatch.setattr(
        Speculation, "_own", lambda self, slots, lag: own(self, slots, torch.zeros_like(lag))
    )
    assert faults(Engine(model, settings("chain, overlapped", 4)))
