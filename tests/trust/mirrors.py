"""Ranks that mirror each other over gloo, and what each of them is told."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

from trust.walk import Walk, make

import sgalloc
from sgalloc.distributed import assert_mirrored

RANKS = 3
SECONDS = 60


def said(alloc: Any, group: Any = None) -> tuple[str, Any]:
    try:
        return "mirrored", assert_mirrored(alloc, group)
    except sgalloc.MirrorDiverged as error:
        return str(error), sorted(error.others)


def mirror(rank: int) -> dict[str, Any]:
    """The same walk on each rank, until one of them makes a call more."""
    import torch.distributed as dist

    low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
    walk = Walk(make("window, map, prefix", 3), 8, events=False)
    for _ in range(50):
        walk.step()
    found = {"walked": said(walk.alloc)}
    if rank == 1:
        try:
            walk.alloc.open(100)
        except sgalloc.OutOfRows:
            found["refused"] = ("", None)
    found["after a refusal"] = said(walk.alloc)
    if rank == 2:
        walk.alloc.prefix.clear()
        walk.alloc.abort(list(walk.text), force=True)
    found["diverged"] = said(walk.alloc)
    if rank < 2:
        found["the others"] = said(walk.alloc, low)
    if rank > 0:
        found["with it"] = said(walk.alloc, high)
    return found


def run(rank: int, rendezvous: str, results: Any) -> None:
    """One process; its findings, or its traceback, go into the pipe ``results``."""
    try:
        import torch.distributed as dist

        limit = timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", f"file://{rendezvous}", limit, world_size=RANKS, rank=rank)
        try:
            results.send(mirror(rank))
            dist.barrier()
        finally:
            dist.destroy_process_group()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None
