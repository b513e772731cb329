"""Random requests, every mode of the engine, and the comparison with the model run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from examples.engine.engine import Engine, Settings
from examples.engine.model import TINY, Alone, Model
from examples.engine.scheduler import Request
from sgalloc.sizing import SpecConfig, ceil_align

CONTEXT, STOP, MARGIN = 140, 7, 1e-6
CHAIN = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
TREE = SpecConfig("eagle", steps=3, topk=2, draft_tokens=6)
BLOCK = SpecConfig("dflash", draft_tokens=4)
# What a decode step drafts, and whether the host hears of it a step late.
MODES = {
    "plain": (SpecConfig(), False),
    "plain, overlapped": (SpecConfig(), True),
    "chain": (CHAIN, False),
    "chain, overlapped": (CHAIN, True),
    "tree": (TREE, False),
    "block": (BLOCK, False),
    "block, overlapped": (BLOCK, True),
}


def settings(mode: str, page_size: int, room: float = 1.6, **how: Any) -> Settings:
    """Pools for about ``room`` of the longest requests, for eight at once: there is pressure."""
    spec, overlap = MODES[mode]
    how = {"stop": STOP, "canary": True, "record": True, **how}
    made = Settings(0, 0, page_size, 8, CONTEXT, 32, spec, overlap)
    alone = ceil_align(CONTEXT + made.reserve, page_size)
    beside = ceil_align(2 * TINY.window + 32 + made.reserve + 3 * page_size, page_size)
    how.setdefault("pages", int(room * alone) // page_size)
    how.setdefault("window_pages", int(room * beside) // page_size)
    return Settings(**{**made.__dict__, **how})


def random_requests(count: int, seed: int) -> list[Request]:
    """Prompts of random lengths, many of which share beginnings, in two namespaces."""
    draw = np.random.default_rng(seed)
    roots = [draw.integers(0, TINY.vocab, size) for size in draw.integers(8, 70, 5)]
    found = []
    for name in range(count):
        root = roots[draw.integers(len(roots))]
        cut = draw.integers(0, root.size + 1) if draw.random() < 0.5 else root.size
        own = draw.integers(0, TINY.vocab, int(draw.integers(1, 40)))
        prompt = np.concatenate((root[:cut], own)).astype(np.int64)
        namespace = "tenant" if draw.random() < 0.2 else None
        if found and draw.random() < 0.2:  # a later turn of an earlier one
            earlier = found[draw.integers(len(found))]
            prompt = np.append(earlier.prompt, own)[: CONTEXT - 40]
            namespace = earlier.namespace
        found.append(Request(name, prompt, int(draw.integers(1, 30)), namespace))
    return found


def serve(
    engine: Any,
    requests: Sequence[Request],
    seed: int = 0,
    abort_rate: float = 0.0,
    between: Callable[[Any], None] = lambda engine: None,
) -> None:
    """Submit requests a few at a time, abort some, and step until all are done."""
    draw, waiting, steps = np.random.default_rng(seed), list(requests), 0
    while waiting or engine.busy:
        for request in [waiting.pop(0) for _ in range(min(len(waiting), draw.integers(0, 4)))]:
            engine.submit(request)
        engine.step()
        between(engine)
        if draw.random() < abort_rate:
            engine.abort(int(draw.integers(len(requests))))
        steps += 1
        assert steps < 200 * len(requests), "the engine goes round in circles"
    engine.drain()


def assert_as_alone(
    model: Model,
    requests: Sequence[Request],
    logits_of: Any = None,
    tolerance: float = 1e-9,
    margin: float = MARGIN,
) -> int:
    """Each output is that of the model by itself with a contiguous cache; tokens compared.

    The model is led along the output in one pass: as long as each token was its own choice, this
    is what it would have put out. Where its two best logits are within `margin`, the comparison
    of a request ends. A wrong key may leave the best token as it was, but not the logits, so
    those that were recorded are compared, too.
    """
    compared = 0
    for request in requests:
        output = request.output
        if not output:
            assert request.state != "done"
            continue
        with torch.no_grad():
            logits = Alone(model).forward(request.tokens)[request.prompt.size - 1 : -1]
        (first, second), best = logits.topk(2).values.T, logits.argmax(-1)
        for at, token in enumerate(output):
            if first[at] - second[at] <= margin:
                break
            assert token == int(best[at]), f"token {at} of request {request.name} is wrong"
            compared += 1
        if logits_of is not None:
            recorded = torch.cat(logits_of[request.name])
            close = torch.allclose(recorded, logits, rtol=0, atol=tolerance)
            assert close, f"logits of request {request.name} are wrong"
        if request.state == "done":
            ends = len(output) == request.most or output[-1] == STOP
            assert ends, f"request {request.name} ended early"
        assert STOP not in output[:-1]
    return compared


def assert_all_back(engine: Engine) -> None:
    """Nobody holds anything once all are done, and no answer was NaN."""
    alloc = engine.alloc
    assert int(engine.nans) == 0, "a page was read that nobody had written"
    alloc.settle()
    alloc.check(device=True)
    alloc.prefix.clear()
    for group in alloc.stats().groups.values():
        assert group.free == group.total
    assert alloc.stats().rows.free == alloc.max_requests
