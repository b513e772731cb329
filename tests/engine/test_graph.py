"""The captured decode step, with a stand-in for a CUDA graph that runs what was captured again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine.engine_support import (
    assert_all_back,
    assert_as_alone,
    random_requests,
    serve,
    settings,
)

from examples.engine.engine import Engine
from examples.engine.model import TINY, Model


class Graph:
    """Stands for a CUDA graph."""

    replays = 0
    run: Callable[[], None]

    def pool(self) -> None:
        """Of memory."""

    def replay(self) -> None:
        self.replays += 1
        self.run()


def test_padding_rows_read_and_write_the_padding_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *how: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    model = Model(TINY, seed=3)
    engine = Engine(model, settings("plain", 4, graphs=True))
    graphs = engine.graphs
    assert graphs is not None
    graphs.lengths = [64, *graphs.lengths]
    graphs.graphs[64] = (Graph(), *(part.clone() for part in graphs.graphs[graphs.lengths[1]][1:]))

    def again(keys: int, found: Any, logits: Any) -> None:
        new = engine.decode_forward(graphs.rows, graphs.slots, keys)
        found.copy_(new[0])
        logits.copy_(new[1])

    for keys, (graph, found, logits) in graphs.graphs.items():
        graph.run = lambda where=(keys, found, logits): again(*where)  # type: ignore[attr-defined]
    requests = random_requests(15, seed=8)
    serve(engine, requests, abort_rate=0.1)
    assert assert_as_alone(model, requests, engine.recorded) > 50
    assert_all_back(engine)
    assert all(graph.replays for graph, _, _ in graphs.graphs.values())  # type: ignore[attr-defined]
    assert int(engine.last[0]) == int(engine.length[0]) == 0
