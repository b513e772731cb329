"""The engine puts out what the model alone does, token for token, in every mode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.engine_support import (
    MODES,
    STOP,
    assert_all_back,
    assert_as_alone,
    random_requests,
    serve,
    settings,
)

from examples.engine.engine import Engine, Flight
from examples.engine.model import TINY, Alone, Model
from examples.engine.scheduler import Request

COUNT = 30


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, seed=3)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", MODES)
def test_every_output_is_that_of_the_model_alone(model: Model, mode: str, page_size: int) -> None:
    page_size = 4 if page_size == 1 and "overlapped" in mode else page_size
    engine = Engine(model, settings(mode, page_size))
    requests = random_requests(COUNT, seed=page_size + len(mode))
    serve(engine, requests, abort_rate=0.05)
    assert assert_as_alone(model, requests, engine.recorded) > 5 * COUNT
    states = [request.state for request in requests]
    assert set(states) <= {"done", "aborted"} and states.count("done") > COUNT / 2
    assert_all_back(engine)
    counts = engine.scheduler.counts
    assert counts["finished"] == states.count("done") and not counts["failed"]
    assert counts["matched"], "prefixes were shared"
    assert engine.alloc.stats().groups["window"].evicted, "there was pressure"
    if "tree" in mode:
        assert engine.speculation is not None and engine.speculation.moved


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_requests_are_retracted_and_come_back(model: Model, mode: str) -> None:
    engine = Engine(model, settings(mode, 1))
    requests = random_requests(COUNT // 2, seed=5)
    serve(engine, requests)
    assert_as_alone(model, requests, engine.recorded)
    assert {request.state for request in requests} == {"done"}
    assert engine.scheduler.counts["retracted"] > 1
    assert_all_back(engine)


def test_a_draft_is_sometimes_right_and_sometimes_wrong(model: Model) -> None:
    """Otherwise acceptance would be one number, and the lag another."""
    engine = Engine(model, settings("chain", 4))
    seen = set()
    land = engine.land

    def noted(step: list[Flight]) -> None:
        seen.update(int(n) for flight in step if flight.commits for n in flight.counts)
        land(step)

    engine.land = noted  # type: ignore[method-assign]
    serve(engine, random_requests(COUNT // 2, seed=4))
    assert seen == {1, 2, 3, 4}


def test_the_output_is_that_of_a_greedy_loop(model: Model) -> None:
    """The comparison leads the model along the output; here it finds its own way."""
    engine = Engine(model, settings("chain, overlapped", 16))
    requests = random_requests(6, seed=21)
    serve(engine, requests)
    for request in requests:
        alone, tokens, output = Alone(model), request.prompt, []
        while len(output) < request.most and STOP not in output:
            with torch.no_grad():
                output.append(int(alone.forward(tokens)[-1].argmax()))
            tokens = np.array(output[-1:])
        assert request.output == output


def test_what_fits_no_row_is_refused(model: Model) -> None:
    engine = Engine(model, settings("plain", 4))
    for prompt, most in ((np.arange(0), 1), (np.arange(3), 0), (np.arange(400), 1)):
        with pytest.raises(ValueError, match="request 7"):
            engine.submit(Request(7, prompt, most))


def test_a_tree_is_not_overlapped(model: Model) -> None:
    with pytest.raises(ValueError, match="a tree is not overlapped"):
        Engine(model, replace(settings("tree", 4), overlap=True))
