"""Ranks that mirror each other, and what each of them is told: over gloo, and in threads."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from host_support import Query
from trust.walk import Walk, make

import sgalloc
from sgalloc.distributed import assert_mirrored
from sgalloc.trust.mirrored import Exchange, Parting, parting

RANKS = 3
SECONDS = 60

# What one rank does otherwise, and the call of it that is named; see `serve`.
CHANGES = {
    "another configuration": ("the configuration", "the configuration"),
    "first": ("open of 4 requests", "open of 3 requests"),
    "middle": ("reserve of 3 requests by 24", "reserve of 3 requests by 16"),
    "one of many": ("reserve of 3 requests by [16, 37, 16]", "reserve of 3 requests by 16"),
    "prompt": ("release of 1 request with 10 pages of tokens with other arguments",) * 2,
    "longer prompt": (
        "release of 1 request with 11 pages of tokens",
        "release of 1 request with 10 pages of tokens",
    ),
    "namespace": ("open of 1 requests in namespace b'other'", "open of 1 requests"),
    "event": (
        "took in what waited behind event 0, an event that the others had not",
        "open of 1 requests",
    ),
    "pending": ("trim of 1 request to 9 behind an event that was not done", "trim of 1 request"),
    "writer": ("match of 5 pages of tokens", "acknowledge of handle"),
    "match": ("match of 3 pages of tokens", "match of 5 pages of tokens"),
    "a call more": ("decode of 3 requests by 1", "reserve of 3 requests by 16"),
    "a call less": ("nothing more", "release of 1 request"),
    "last": ("trim of 1 request to 4", "release of 1 request"),
}
HARMLESS = ("", "refused", "said otherwise", "events that are done")


def serve(path: Path | None, change: str = "", device: str = "cpu") -> Any:
    """A few requests on an allocator that is fresh; ``change`` is what this rank does otherwise."""
    pages = 101 if change == "another configuration" else 100
    alloc = sgalloc.KVAllocator(pages, 4, 12, 160, device=device, prefix_cache=True, journal=path)
    event, prompt = Query(), np.arange(44)
    # On a GPU a write waits for CUDA's events alone.
    over = None if change == "said otherwise" or device != "cpu" else Query(True)
    handles = alloc.open(4 if change == "first" else 3)[:3]
    if change == "refused":
        for call in (
            lambda: alloc.open(100),
            lambda: alloc.extend(handles[:1], 4000),
            lambda: alloc.commit(alloc.batch(handles[:2]), 7),
            lambda: alloc.release([5], after=Query(True)),
            lambda: alloc.release(handles[0], tokens=[5, 5, 5, 5, 5, 5], after=object()),
        ):
            try:
                call()
            except (sgalloc.AllocError, TypeError):
                continue
            raise AssertionError("it was not refused")
        assert not alloc.prefix.match(prompt + 5000).length
        assert not alloc.acknowledge(77, 0)
        assert not alloc.reclaim(3).size
    batch = list(handles) if change == "said otherwise" else alloc.batch(handles)
    for turn in range(6):
        reserve: Any = np.array([16, 16, 16]) if change == "said otherwise" else 16
        if turn == 3 and change == "middle":
            reserve = 24
        if turn == 3 and change == "one of many":
            reserve = [16, 37, 16]
        alloc.reserve(batch, reserve, after=over)
        alloc.commit(batch, [turn % 2, 2, 3])
        if turn == 2 and change == "a call more":
            alloc.decode(batch)
    small = prompt[:12] + 900
    (other,) = alloc.open()
    alloc.extend(other, 12)
    alloc.release(other, tokens=small)
    for turn in range(2):
        (other,) = alloc.open(1, b"other" if turn and change == "namespace" else None)
        alloc.extend(other, 44)
        tokens = prompt[: 44 if turn and change == "longer prompt" else 40].copy()
        tokens[13] += turn and change == "prompt"
        alloc.release(other, tokens=[tokens])
    done = Query(True) if change == "events that are done" else None
    alloc.trim(handles[0], 9, after=Query() if change == "pending" else done)
    alloc.release(handles[1], after=event)
    event.over = change == "event"
    alloc.open(1)
    event.over = True
    alloc.settle()
    (received,) = alloc.preallocate([9], writers=2)
    alloc.acknowledge(received, 0)
    alloc.acknowledge(received, 1 if change != "writer" else 0)
    if change == "match":
        alloc.prefix.match(small)
    alloc.prefix.match(prompt[:20])
    if change == "last":
        alloc.trim(handles[0], 4)
    elif change != "a call less":
        alloc.release(handles[0])
    return alloc


class Round:
    """All-gathers among threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=SECONDS)
        self._sent: list[bytes] = [b""] * ranks
        self.exchanges = 0

    def exchange(self, rank: int) -> Exchange:
        def call(data: bytes) -> list[bytes]:
            self._sent[rank] = data
            self._barrier.wait()
            found = list(self._sent)
            assert {len(part) for part in found} == {len(data)}, "all send as many"
            self.exchanges += rank == 0
            self._barrier.wait()
            return found

        return call


def parted(journals: Sequence[Any]) -> tuple[Parting | None, int]:
    """What every one of these ranks finds, and the exchanges that it took."""
    found: list[Any] = [None] * len(journals)
    talk = Round(len(journals))

    def find(rank: int) -> None:
        try:
            found[rank] = parting(journals[rank], talk.exchange(rank))
        except BaseException as error:
            talk._barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(len(journals))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(isinstance(one, BaseException) for one in found), found
    assert all(one == found[0] for one in found)
    return found[0], talk.exchanges


def said(alloc: Any, group: Any = None, **how: Any) -> tuple[str, Any]:
    try:
        return "mirrored", assert_mirrored(alloc, group, **how)
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
    found["after a refusal"] = said(walk.alloc, incremental=rank > 0)
    if rank == 2:
        walk.alloc.prefix.clear()
        walk.alloc.abort(list(walk.text), force=True)
    found["diverged"] = said(walk.alloc)
    if rank < 2:
        found["the others"] = said(walk.alloc, low)
    if rank > 0:
        found["with it"] = said(walk.alloc, high)
    return found


def tell_calls(rank: int, ranks: int, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Of each change that the last rank makes, what every rank is told."""
    found = {}
    for at, change in enumerate((*HARMLESS, *CHANGES)):
        path = folder / f"{at}.{rank}"
        alloc = serve(path, change if rank == ranks - 1 else "", device)
        try:
            found[change] = assert_mirrored(alloc, incremental=bool(at % 2))
        except sgalloc.MirrorDiverged as error:
            found[change] = (str(error), error.record, error.calls, sorted(error.others))
    other = "middle" if rank else ""
    without = serve(folder / f"without.{rank}" if rank else None, other, device)
    found["without a journal"] = said(without)
    closed = serve(folder / f"closed.{rank}", other, device)
    if rank:
        closed.close_journal()
    found["closed"] = said(closed)
    gone = serve(folder / f"gone.{rank}", other, device)
    if rank:
        (folder / f"gone.{rank}").unlink()
    found["gone"] = said(gone)
    return found


def _run(
    rank: int,
    rendezvous: str,
    results: Any,
    ranks: int,
    work: Callable[[int], Any],
    backend: str = "gloo",
) -> None:
    """One process; its findings, or its traceback, go into the pipe ``results``."""
    try:
        # What a comparison sends needs no multicast, which not every host allows.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        import torch
        import torch.distributed as dist

        how: dict[str, Any] = {}
        if backend == "nccl":
            torch.cuda.set_device(rank)
            how["device_id"] = torch.device("cuda", rank)
        limit = timedelta(seconds=SECONDS)
        dist.init_process_group(
            backend, f"file://{rendezvous}", limit, world_size=ranks, rank=rank, **how
        )
        try:
            results.send(work(rank))
            dist.barrier()
        finally:
            dist.destroy_process_group()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None


def run(rank: int, rendezvous: str, results: Any) -> None:
    _run(rank, rendezvous, results, RANKS, mirror)


def run_calls(rank: int, rendezvous: str, results: Any, ranks: int = RANKS) -> None:
    folder = Path(rendezvous).parent
    _run(rank, rendezvous, results, ranks, partial(tell_calls, ranks=ranks, folder=folder))


def run_two(rank: int, rendezvous: str, results: Any) -> None:
    run_calls(rank, rendezvous, results, 2)


def run_gpus(rank: int, rendezvous: str, results: Any) -> None:
    """Two ranks over NCCL, each with its tables on a GPU of its own."""
    folder = Path(rendezvous).parent
    work = partial(tell_calls, ranks=2, folder=folder, device=f"cuda:{rank}")
    _run(rank, rendezvous, results, 2, work, "nccl")


def assert_named(found: Sequence[dict[str, Any]]) -> None:
    """Every rank was told the same, and of each change the call that is its cause."""
    assert all(part == found[0] for part in found)
    last = len(found) - 1
    equal = {found[0][change] for change in HARMLESS}
    assert len(equal) == 1 and len(equal.pop()) == 32
    for change, (one, other) in CHANGES.items():
        message, record, calls, others = found[0][change]
        assert others == [last] and set(calls) == set(range(last + 1))
        assert calls[last].startswith(one)
        assert all(calls[rank].startswith(other) for rank in range(last))
        assert f"record {record}" in message and calls[0] in message and "\n" not in message
    for lacking, hint in (
        ("without a journal", "journal="),
        ("closed", "journal="),
        ("gone", "cannot be read"),
    ):
        message, others = found[0][lacking]
        assert others and hint in message and "record" not in message
