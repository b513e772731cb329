"""A prefill node on one device and a decode node on another, which move KV by page lists.

Two processes, each with its allocator and its pools of K and V. Bytes go by torch.distributed, in
extents; page ids and what else the nodes tell each other go through a pipe. Over NCCL the devices
are two GPUs; over gloo, two times the CPU, it is the same but for the streams.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from host_support import Query, assert_drained
from transfer.nodes import (
    FINISHED,
    PS,
    REQUESTS,
    WIDTH,
    WRITERS,
    content,
    prompt_of,
)

import sgalloc
from sgalloc.extents import pair_extents

SECONDS = 120  # for what the other node does; starting NCCL included
PREFILL, DECODE = 0, 1


class Node:
    """An allocator beside pools of K and V on its device, with nothing in them yet."""

    def __init__(self, rank: int, backend: str, pipe: Any, num_pages: int, cache: bool) -> None:
        import torch

        self.rank, self.peer, self.pipe = rank, 1 - rank, pipe
        self.gpu = backend == "nccl"
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        self.alloc = sgalloc.KVAllocator(
            num_pages, PS, 12, 40, device=f"cuda:{rank}" if self.gpu else "cpu", prefix_cache=cache
        )
        self.alloc.warm(256)
        self.table = torch.from_dlpack(self.alloc.req_to_token)
        assert self.table.device == self.device
        shape = (num_pages + 1, PS, WIDTH)
        self.pools = [
            torch.full(shape, -1, dtype=torch.int64, device=self.device) for _ in range(WRITERS)
        ]
        # As after hours of work: free pages come in short runs, other ones on each node.
        handles = self.alloc.open(4)
        for length in range(2 + rank, 10 - rank, 2 + rank):
            self.alloc.extend(handles, length * PS)
        for handle in handles[[2, 0, 3, 1]]:
            self.alloc.release(handle)

    # -- the other node --------------------------------------------------------------------

    def tell(self, value: Any) -> None:
        self.pipe.send(value)

    def hear(self) -> Any:
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"node {self.peer} said nothing for {SECONDS} s")
        return self.pipe.recv()

    # -- KV --------------------------------------------------------------------------------

    def fill(self, handle: int, ids: np.ndarray, start: int = 0) -> None:
        """What a forward does: write K and V of tokens from ``start`` on, on the device."""
        import torch

        slots = torch.empty(ids.size - start, dtype=torch.int64, device=self.device)
        self.alloc.slots(handle, start, ids.size, out=slots if self.gpu else slots.numpy())
        for writer, pool in enumerate(self.pools):
            kv = torch.from_numpy(np.ascontiguousarray(content(ids, writer)[start:]))
            pool.view(-1, WIDTH)[slots] = kv.to(self.device)

    def tokens(self, handle: int, length: int, writer: int) -> np.ndarray:
        """K or V of each token, read as a forward reads it: through req_to_token, on the device."""
        (row,) = self.alloc.rows(handle).tolist()
        slots = self.table[row, :length].long()
        found: np.ndarray = self.pools[writer].view(-1, WIDTH)[slots].cpu().numpy()
        return found

    def wait_for(self, event: Any) -> None:
        """Poll, as a scheduler does between steps."""
        end = time.monotonic() + SECONDS
        while not event.query():
            if time.monotonic() > end:
                raise TimeoutError(f"an event was not done after {SECONDS} s")
            time.sleep(0.001)

    def move(self, writer: int, firsts: list[int], counts: list[int], sends: bool) -> None:
        """Send or receive extents of one pool in one batch; back when they have landed or left."""
        import torch
        import torch.distributed as dist

        call = dist.isend if sends else dist.irecv
        pool = self.pools[writer]
        pieces = [pool[first : first + n] for first, n in zip(firsts, counts, strict=True)]
        if pieces:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(call, piece, self.peer) for piece in pieces]
            ):
                work.wait()  # of NCCL: the current stream waits, not the host
        if self.gpu:
            done = torch.cuda.Event()
            done.record()
            self.wait_for(done)

    def send(self, handle: int, writer: int, start: int, ids: list[int]) -> int:
        """One writer's part of one request; how many extents it was."""
        src, dst, count = pair_extents(self.alloc.pages(handle, start=start), ids)
        self.tell((dst.tolist(), count.tolist()))
        self.move(writer, src.tolist(), count.tolist(), sends=True)
        return int(src.size)

    def receive(self, writer: int) -> None:
        """Let the sender's bytes land where it says, by page ids alone."""
        firsts, counts = self.hear()
        self.move(writer, firsts, counts, sends=False)


# -- the two sides -------------------------------------------------------------------------------


def prefill(node: Node) -> dict[str, Any]:
    alloc = node.alloc
    handles = dict(zip(REQUESTS, alloc.open(len(REQUESTS)).tolist(), strict=True))
    for name, handle in handles.items():  # in two chunks
        ids = prompt_of(name)
        alloc.extend(handle, ids.size // 2)
        alloc.extend(handle, ids.size)
        node.fill(handle, ids)
    wanted = node.hear()
    extents = pages = 0
    for name in FINISHED:
        start, ids = wanted[name]
        for writer in range(WRITERS):
            extents += node.send(handles[name], writer, start, ids)
            pages += len(ids)
            node.tell((name, writer))
    node.send(handles["aborted"], 0, *wanted["aborted"])
    node.tell(("aborted", 0))
    assert node.hear() == "aborted it"  # and the second writer has begun all the same
    node.send(handles["aborted"], 1, *wanted["aborted"])
    node.tell(("aborted", 1))
    # Pages stay with their sender until all has left.
    sender, before = Query(), alloc.available()
    alloc.release(list(handles.values()), after=sender)
    assert alloc.available() == before and alloc.stats().rows.quarantined == len(handles)
    assert node.hear() == "compared"
    sender.over = True
    alloc.settle()
    assert_drained(alloc)
    node.tell("drained")
    return {"extents": extents, "pages": pages, "device": alloc.device}


def decode(node: Node) -> dict[str, Any]:
    alloc = node.alloc
    (seed,) = alloc.open().tolist()
    ids = prompt_of("whole")
    alloc.extend(seed, ids.size)
    node.fill(seed, ids)
    alloc.release(seed, tokens=ids)
    matches = [alloc.prefix.match(prompt_of(name)) for name in REQUESTS]
    assert [match.length for match in matches] == [cached for _, cached in REQUESTS.values()]
    lengths = [length for length, _ in REQUESTS.values()]
    deadlines = [100 if name == "dead" else None for name in REQUESTS]
    received = alloc.preallocate(lengths, WRITERS, prefix=matches, deadline=deadlines)
    handles = dict(zip(REQUESTS, received.tolist(), strict=True))
    for handle in handles.values():  # before any page id leaves the node
        node.wait_for(alloc.receiving(handle).ready)
    wanted = {
        name: (cached, alloc.pages(handles[name], start=cached, stop=length).tolist())
        for name, (length, cached) in REQUESTS.items()
    }
    node.tell(wanted)
    for name in FINISHED:
        for writer in range(WRITERS):
            node.receive(writer)
            assert node.hear() == (name, writer)
            assert alloc.acknowledge(handles[name], writer)
            alloc.check(device=True)
        assert alloc.committed(handles[name]).tolist() == [REQUESTS[name][0]]
    node.receive(0)
    assert node.hear() == ("aborted", 0) and alloc.acknowledge(handles["aborted"], 0)
    alloc.abort(handles["aborted"])
    # Nobody gets its pages while a writer may write: not even one who takes all there is.
    rest = alloc.preallocate(PS * min(alloc.available(), 10))
    assert not set(alloc.pages(rest[0], stop=40).tolist()) & set(wanted["aborted"][1])
    node.tell("aborted it")
    node.receive(1)
    assert node.hear() == ("aborted", 1)
    held = alloc.available()
    assert alloc.acknowledge(handles["aborted"], 1)
    assert alloc.available() == held + len(wanted["aborted"][1])
    assert alloc.reclaim(100).tolist() == [handles["dead"]]
    compared = 0
    for name in FINISHED:
        for writer in range(WRITERS):
            got = node.tokens(handles[name], REQUESTS[name][0], writer)
            assert (got == content(prompt_of(name), writer)).all(), name
            compared += got.shape[0]
    node.tell("compared")
    # What was received runs on like any other request.
    running = [handles[name] for name in FINISHED]
    alloc.decode(running)
    alloc.check(device=True)
    alloc.release(running, tokens=[prompt_of(name) for name in FINISHED])
    assert alloc.prefix.match(prompt_of("plain")).length == 24
    alloc.abort(rest, force=True)
    alloc.prefix.clear()
    assert_drained(alloc)
    assert node.hear() == "drained"
    return {"compared": compared, "device": alloc.device}


# -- the processes -------------------------------------------------------------------------------


def run(rank: int, backend: str, rendezvous: str, pipe: Any, results: Any) -> None:
    """One process; its findings, or its traceback, go into ``results``."""
    try:
        # Sending and receiving need no multicast, which not every host allows.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        import torch
        import torch.distributed as dist

        how: dict[str, Any] = {}
        if backend == "nccl":
            import cupy

            torch.cuda.set_device(rank)
            cupy.cuda.Device(rank).use()
            how["device_id"] = torch.device("cuda", rank)
        dist.init_process_group(
            backend,
            f"file://{rendezvous}",
            timedelta(seconds=SECONDS),
            world_size=2,
            rank=rank,
            **how,
        )
        try:
            node = Node(rank, backend, pipe, (40, 48)[rank], cache=rank == DECODE)
            results.send((prefill, decode)[rank](node))
        finally:
            dist.destroy_process_group()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None


def run_both(backend: str, folder: Path) -> list[dict[str, Any]]:
    """What the prefill and the decode node found.

    Raises:
        AssertionError: one of them failed, with its traceback, or said nothing.
    """
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe(duplex=True)
    processes, ends = [], []
    for rank in (PREFILL, DECODE):
        end, other = context.Pipe(duplex=False)
        process = context.Process(
            target=run, args=(rank, backend, str(folder / "store"), pipes[rank], other), daemon=True
        )
        process.start()
        other.close()
        processes.append(process)
        ends.append(end)
    for pipe in pipes:
        pipe.close()
    try:
        found = []
        for rank, end in enumerate(ends):
            assert end.poll(2 * SECONDS), f"node {rank} said nothing for {2 * SECONDS} s"
            found.append(end.recv())
            assert isinstance(found[-1], dict), found[-1]
        for process in processes:
            process.join(SECONDS)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return found


def assert_moved(found: list[dict[str, Any]], devices: list[str]) -> None:
    """All tokens were compared, and all pages that were not cached were sent, in extents."""
    sent, received = found
    assert [sent["device"], received["device"]] == devices
    lengths = [REQUESTS[name][0] for name in FINISHED]
    assert received["compared"] == WRITERS * sum(lengths)
    # ceil(27 / 4) = 7, (30 - 12) / 4 up = 5, (21 - 12) / 4 up = 3, and nothing for the last.
    assert sent["pages"] == WRITERS * (7 + 5 + 3 + 0)
    assert WRITERS * 3 < sent["extents"] < sent["pages"], "runs were merged, and there are some"
