"""The engine of `examples/` on a GPU: led along its output, the model alone has the same logits.

In float64 the bar is that of the CPU: tokens equal wherever the two best logits differ by 1e-6,
logits within 1e-9. In bfloat16 logits, which have a standard deviation of 1, agree within 0.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the example needs torch")

from engine.engine_support import (  # noqa: E402
    MODES,
    assert_all_back,
    assert_as_alone,
    random_requests,
    serve,
    settings,
)

from examples.engine.cache import Cache  # noqa: E402
from examples.engine.engine import Engine  # noqa: E402
from examples.engine.model import TINY, Config, Model  # noqa: E402

COUNT = 24
MIDDLE = Config(dim=256, heads=8, kv_heads=2, head_dim=32, hidden=512, late=0.25)
LOOSE = 0.2


@pytest.fixture(autouse=True)
def _cuda(torch: Any, no_collection: None) -> None:
    """torch with CUDA; garbage that is freed while a graph is captured would break it."""


def served(engine: Engine, seed: int, abort_rate: float = 0.05) -> list[Any]:
    requests = random_requests(COUNT, seed)
    serve(engine, requests, abort_rate=abort_rate)
    torch.cuda.synchronize()
    return requests


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_float64(mode: str, page_size: int) -> None:
    model = Model(TINY, seed=3, device="cuda")
    engine = Engine(model, settings(mode, page_size))
    requests = served(engine, page_size)
    assert assert_as_alone(model, requests, engine.recorded) > 5 * COUNT
    assert_all_back(engine)


@pytest.mark.parametrize("mode", ["plain", "plain, overlapped"])
def test_captured_steps_in_float64(mode: str) -> None:
    model = Model(TINY, seed=3, device="cuda")
    engine = Engine(model, settings(mode, 4, graphs=True))
    requests = served(engine, 7)
    assert assert_as_alone(model, requests, engine.recorded) > 5 * COUNT
    assert_all_back(engine)


@pytest.mark.parametrize("mode", ["plain, overlapped", "chain, overlapped", "tree", "block"])
def test_bfloat16_within_the_tolerance(mode: str) -> None:
    model = Model(MIDDLE, seed=3, dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, settings(mode, 16, graphs=mode.startswith("plain")))
    requests = served(engine, 11)
    # Few tokens are so clear a choice that they are compared; all logits are.
    assert assert_as_alone(model, requests, engine.recorded, LOOSE, 2 * LOOSE)
    assert sum(len(request.output) for request in requests) > 5 * COUNT
    assert_all_back(engine)


def test_the_table_stays_where_the_graph_reads_it() -> None:
    """A captured step that reads a stale copy of the table, planted, is found."""
    model = Model(TINY, seed=3, device="cuda")
    engine = Engine(model, replace(settings("plain", 4), graphs=False))
    engine.tables.full = engine.tables.full.clone()
    requests = served(engine, 7, abort_rate=0)
    with pytest.raises(AssertionError):
        assert_as_alone(model, requests, engine.recorded)


def test_the_moves_of_compact_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "move", lambda self, *moves: None)
    model = Model(TINY, seed=3, device="cuda")
    engine = Engine(model, settings("tree", 4))
    requests = served(engine, 7, abort_rate=0)
    with pytest.raises(AssertionError):
        assert_as_alone(model, requests, engine.recorded)
        assert int(engine.nans) == 0
