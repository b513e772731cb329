"""The two processes of the disaggregated test."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
from engine.engine_support import (
    assert_all_back,
    assert_as_alone,
    random_requests,
    serve,
    settings,
)

from examples.engine.disaggregated import DecodeNode, Link, PrefillNode
from examples.engine.model import TINY, Model
from examples.engine.scheduler import Scheduler

PREFILL, DECODE = 0, 1
COUNT = 24
RUNS = ("chain, overlapped", "plain")


def run(rank: int, store: str, end: Any) -> None:
    """What one node does; what it found goes through ``end``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        found = {mode: _one(rank, mode, False) for mode in RUNS}
        found["forgets"] = _one(rank, RUNS[0], True)
        end.send(found)
    except BaseException:
        end.send({"error": traceback.format_exc()})
        raise
    finally:
        dist.destroy_process_group()


def _one(rank: int, mode: str, forgets: bool) -> Any:
    """A run of both nodes; one that forgets gives pages back before they have left."""
    model, how = Model(TINY, seed=3), settings(mode, 4)
    if rank == PREFILL:
        node = PrefillNode(model, settings("chain" if "chain" in mode else "plain", 4), Link(rank))
        if forgets:
            leave = Scheduler._leave
            node.sender._leave = lambda rows, after, cached: leave(  # type: ignore[method-assign]
                node.sender, rows, None, False
            )
        node.serve()
        if not forgets:
            assert_all_back(node)
        return node.scheduler.counts
    engine = DecodeNode(model, how, Link(rank))
    requests = random_requests(COUNT, seed=9)
    serve(engine, requests, abort_rate=0.1)
    engine.finish()
    if forgets:
        return int(engine.nans)
    for request in requests:
        # The first token's logits stayed with the other node.
        assert_as_alone(model, [request])
    assert_all_back(engine)
    return {"states": [one.state for one in requests], **engine.scheduler.counts}
