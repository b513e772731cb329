"""A prefill node and a decode node in miniature: two processes that move bytes by page lists.

K and V are pools of their own, and each is sent by a writer of its own. What a token's K and V
are follows from the request's tokens alone, so that every byte that arrives can be told.
"""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

import numpy as np
from host_support import Query, assert_drained

import sgalloc
from sgalloc.extents import pair_extents

PS, WIDTH, WRITERS = 4, 3, 2
PREFILL, DECODE = 0, 1
# By name: tokens of the prompt, and how many of them the decode node has cached.
REQUESTS = {
    "plain": (27, 0),
    "shared": (30, 12),
    "also shared": (21, 12),
    "aborted": (18, 0),
    "dead": (10, 0),
    "whole": (12, 12),
}
FINISHED = ("plain", "shared", "also shared", "whole")


def prompt_of(name: str) -> np.ndarray:
    """Token ids; the first 12 of those with a cached prefix are the same."""
    length, cached = REQUESTS[name]
    ids = np.arange(length) + 1000 * (1 + list(REQUESTS).index(name))
    ids[:cached] = np.arange(cached)
    return ids


def content(ids: np.ndarray, writer: int) -> np.ndarray:
    """K (writer 0) or V of each token, int64 ``(tokens, WIDTH)``: no two are alike."""
    at = np.arange(ids.size)
    base = (ids * 1009 + at) * WRITERS + writer
    return base[:, None] * WIDTH + np.arange(WIDTH)


class Node:
    """An allocator beside pools of K and V, with nothing in them yet."""

    def __init__(self, num_pages: int, prefix_cache: bool, run: int) -> None:
        import torch

        self.alloc = sgalloc.KVAllocator(
            num_pages, PS, 12, 40, device="cpu", prefix_cache=prefix_cache
        )
        shape = (num_pages + 1, PS, WIDTH)
        self.pools = [torch.full(shape, -1, dtype=torch.int64) for _ in range(WRITERS)]
        self.scatter_free_pages(run)

    def scatter_free_pages(self, run: int) -> None:
        """Let free pages come in runs of ``run``, as after hours of work."""
        handles = self.alloc.open(4)
        for length in range(run, 10 - run + 1, run):
            self.alloc.extend(handles, length * PS)
        for handle in handles[[2, 0, 3, 1]]:
            self.alloc.release(handle)

    def fill(self, handle: int, ids: np.ndarray, start: int = 0) -> None:
        """What a forward does: write K and V of tokens from ``start`` on through the table."""
        for writer, pool in enumerate(self.pools):
            slots = self.alloc.slots(handle, start, ids.size)
            pool.view(-1, WIDTH)[slots] = _tensor(content(ids, writer)[start:])

    def tokens(self, handle: int, length: int, writer: int) -> np.ndarray:
        """K or V of each token, read as a forward reads it: through req_to_token."""
        (row,) = self.alloc.rows(handle)
        slots = self.alloc.req_to_token[row, :length]
        return self.pools[writer].view(-1, WIDTH)[slots].numpy()


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def tell(value: Any, to: int) -> None:
    import torch.distributed as dist

    dist.send_object_list([value], dst=to)


def hear(source: int) -> Any:
    import torch.distributed as dist

    box: list[Any] = [None]
    dist.recv_object_list(box, src=source)
    return box[0]


def send(node: Node, handle: int, writer: int, start: int, dst_ids: list[int]) -> int:
    """Send one request's K or V in extents; how many these were."""
    import torch.distributed as dist

    src_ids = node.alloc.pages(handle, start=start)
    src, dst, count = pair_extents(src_ids, dst_ids)
    tell((dst.tolist(), count.tolist()), DECODE)
    for first, pages in zip(src.tolist(), count.tolist(), strict=True):
        dist.send(node.pools[writer][first : first + pages], dst=DECODE)
    return int(src.size)


def receive(node: Node, writer: int) -> None:
    """Let the sender's bytes land where it says: one write an extent, by page ids alone."""
    import torch.distributed as dist

    for first, pages in zip(*hear(PREFILL), strict=True):
        dist.recv(node.pools[writer][first : first + pages], src=PREFILL)


# -- the two sides -------------------------------------------------------------------------------


def prefill() -> dict[str, Any]:
    node = Node(40, prefix_cache=False, run=2)
    alloc = node.alloc
    handles = dict(zip(REQUESTS, alloc.open(len(REQUESTS)).tolist(), strict=True))
    for name, handle in handles.items():  # in two chunks
        ids = prompt_of(name)
        alloc.extend(handle, ids.size // 2)
        alloc.extend(handle, ids.size)
        node.fill(handle, ids)
    wanted = hear(DECODE)
    pieces = pages = 0
    for name in ("plain", "shared", "also shared", "whole"):
        start, dst_ids = wanted[name]
        for writer in range(WRITERS):
            pieces += send(node, handles[name], writer, start, dst_ids)
            pages += len(dst_ids)
            tell((name, writer), DECODE)
    send(node, handles["aborted"], 0, *wanted["aborted"])
    tell(("aborted", 0), DECODE)
    assert hear(DECODE) == "aborted it"  # and the second writer has begun all the same
    send(node, handles["aborted"], 1, *wanted["aborted"])
    tell(("aborted", 1), DECODE)
    # Pages stay with their sender until the other side has read what it compares with.
    sender, before = Query(), alloc.available()
    everything = {
        name: [node.tokens(handles[name], REQUESTS[name][0], w) for w in range(WRITERS)]
        for name in FINISHED
    }
    alloc.release(list(handles.values()), after=sender)
    assert alloc.available() == before and alloc.stats().rows.quarantined == len(handles)
    tell(everything, DECODE)
    assert hear(DECODE) == "compared"
    sender.over = True
    alloc.settle()
    assert_drained(alloc)
    return {"pieces": pieces, "pages": pages}


def decode() -> dict[str, Any]:
    node = Node(48, prefix_cache=True, run=3)
    alloc = node.alloc
    (seed,) = alloc.open()
    ids = prompt_of("whole")
    alloc.extend(seed, ids.size)
    node.fill(seed, ids)
    alloc.release(seed, tokens=ids)
    lengths = [length for length, _ in REQUESTS.values()]
    matches = [alloc.prefix.match(prompt_of(name)) for name in REQUESTS]
    assert [match.length for match in matches] == [cached for _, cached in REQUESTS.values()]
    deadlines = [100 if name == "dead" else None for name in REQUESTS]
    received = alloc.preallocate(lengths, WRITERS, prefix=matches, deadline=deadlines)
    handles = dict(zip(REQUESTS, received.tolist(), strict=True))
    assert all(alloc.receiving(handle).ready.query() for handle in handles.values())
    wanted = {
        name: (cached, alloc.pages(handles[name], start=cached, stop=length).tolist())
        for name, (length, cached) in REQUESTS.items()
    }
    tell(wanted, PREFILL)
    for name in ("plain", "shared", "also shared", "whole"):
        for writer in range(WRITERS):
            receive(node, writer)
            assert alloc.receiving(handles[name]).acks == tuple(range(writer))
            said = hear(PREFILL)
            assert said == (name, writer)
            assert alloc.acknowledge(handles[name], writer)
            alloc.check(device=True)
        assert alloc.committed(handles[name]).tolist() == [REQUESTS[name][0]]
    receive(node, 0)
    assert alloc.acknowledge(handles["aborted"], hear(PREFILL)[1])
    alloc.abort(handles["aborted"])
    # Nobody gets its pages while a writer may write: not even one who takes all there is.
    rest = alloc.preallocate(PS * min(alloc.available(), 10))
    assert not set(alloc.pages(rest[0], stop=40).tolist()) & set(wanted["aborted"][1])
    tell("aborted it", PREFILL)
    receive(node, 1)
    held = alloc.available()
    assert alloc.acknowledge(handles["aborted"], hear(PREFILL)[1])
    assert alloc.available() == held + len(wanted["aborted"][1])
    assert alloc.reclaim(99).size == 0
    assert alloc.reclaim(100).tolist() == [handles["dead"]]
    assert alloc.available() == held + len(wanted["aborted"][1]) + len(wanted["dead"][1])
    assert not alloc.acknowledge(handles["dead"], 0), "late"
    compared = 0
    for name, sent in hear(PREFILL).items():
        for writer in range(WRITERS):
            got = node.tokens(handles[name], REQUESTS[name][0], writer)
            assert (got == sent[writer]).all(), name
            assert (got == content(prompt_of(name), writer)).all(), name
            compared += got.shape[0]
    tell("compared", PREFILL)
    # What was received runs on like any other request.
    running = [handles[name] for name in FINISHED]
    alloc.decode(running)
    alloc.release(running, tokens=[prompt_of(name) for name in FINISHED])
    assert alloc.prefix.match(prompt_of("plain")).length == 24
    alloc.abort(rest, force=True)
    alloc.prefix.clear()
    assert_drained(alloc)
    return {"compared": compared}


def run(rank: int, rendezvous: str, results: Any) -> None:
    """One process; its findings, or its traceback, go into the pipe ``results``."""
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", f"file://{rendezvous}", timedelta(seconds=20), world_size=2, rank=rank
        )
        try:
            results.send((prefill, decode)[rank]())
            dist.barrier()
        finally:
            dist.destroy_process_group()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None
