"""SGLang's allocator with a batch of requests, called as its scheduler does.

None of SGLang's code is here: it is imported from wherever the user has it. What is here are the
few objects that its functions take.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.absent import stand_in
from sgalloc.bench.course import RESERVE
from sgalloc.bench.twins import Shape

VARIABLE = "SGL_SRC"
# Imported by its modules, and not called on the way measured here.
_ABSENT = ("sgl_kernel", "flashinfer", "deep_gemm", "vllm")


class Peer(NamedTuple):
    """The functions of SGLang that are timed."""

    version: str
    allocation: Any
    watermarks: Callable[..., Any]
    paged: Callable[..., Any]
    tokens: Callable[..., Any]
    alloc_extend: Any
    torch: Any


def load(source: str | None) -> Peer | str:
    """SGLang's functions from the folder ``source``, or what keeps them from being used."""
    if not source:
        return f"SGLang is not measured: set {VARIABLE} to the folder of its Python files"
    if not (Path(source) / "sglang").is_dir():
        return f"SGLang is not measured: {VARIABLE} names a folder without sglang in it"
    sys.path.insert(0, source)
    stand_in(_ABSENT)
    try:
        import sglang.srt.mem_cache.allocation as allocation
        import torch
        from sglang.kernels.ops.memory.allocator import alloc_extend_kernel
        from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.version import __version__
    except Exception as error:  # whatever its many modules may raise here
        return f"SGLang is not measured: importing it failed with {type(error).__name__}: {error}"
    # Both read the server's configuration, which there is none of here.
    allocation.attention_backends = lambda: ("flashinfer", "flashinfer")
    allocation.get_parallel = lambda: types.SimpleNamespace(dcp_enabled=False)
    return Peer(
        str(__version__),
        allocation,
        page_aligned_decode_alloc_lens,
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
        alloc_extend_kernel,
        torch,
    )


class Lengths:
    """What SGLang knows of a request's KV."""

    __slots__ = ("kv_allocated_len", "kv_committed_len")

    def __init__(self, committed: int, allocated: int) -> None:
        self.kv_committed_len = committed
        self.kv_allocated_len = allocated


class Request:
    """A request, as far as its functions look at it."""

    __slots__ = ("decode_batch_idx", "kv")

    def __init__(self, committed: int, allocated: int = 0) -> None:
        self.kv = Lengths(committed, allocated)
        self.decode_batch_idx = 0


class Rows:
    """The pool of rows."""

    def __init__(self, table: Any, page_size: int) -> None:
        self.req_to_token = table
        self.page_size = page_size

    def write(self, where: Any, values: Any) -> None:
        """As SGLang's pool writes."""
        self.req_to_token[where] = values

    def alloc_aux_to_lengths(self, **_: Any) -> None:
        """There is nothing auxiliary."""


class NoCache:
    """A prefix cache that shares nothing."""

    def __init__(self, allocator: Any, page_size: int) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.page_size = page_size

    def supports_prefix_sharing(self) -> bool:
        """No."""
        return False


class Scheduled:
    """A batch, as far as its functions look at it."""

    hisparse_coordinator = None
    device = "cuda"
    model_config = types.SimpleNamespace(is_encoder_decoder=False)
    reqs: list[Request]
    tree_cache: Any
    req_to_token_pool: Any
    req_pool_indices: Any
    req_pool_indices_cpu: Any
    seq_lens: Any
    seq_lens_cpu: Any

    def maybe_evict_swa(self) -> None:
        """There is no window."""


class Engine:
    """SGLang's pool and a batch of requests, whose prompts have their pages."""

    def __init__(
        self,
        peer: Peer,
        shape: Shape,
        num_pages: int,
        base: Sequence[int],
        device: str = "cuda",
    ) -> None:
        self._peer, self._shape, self._base = peer, shape, list(base)
        self._device = device
        torch, size = peer.torch, shape.page_size
        slots = num_pages * size
        if size == 1:
            self.pool = peer.tokens(slots, torch.int64, device, None, False)
        else:
            self.pool = peer.paged(slots, size, torch.int64, device, None, False)
        table = torch.zeros((shape.batch + 1, shape.row_width), dtype=torch.int32, device=device)
        self._rows = Rows(table, size)
        self._tree = NoCache(self.pool, size)
        self._indices = torch.arange(1, shape.batch + 1, device=device)
        batch = self._batch = Scheduled()
        batch.device = device
        batch.tree_cache, batch.req_to_token_pool = self._tree, self._rows
        batch.req_pool_indices = self._indices
        batch.req_pool_indices_cpu = self._indices.cpu()
        self.requests: list[Request] = []
        self._before = 0

    @property
    def free_pages(self) -> int:
        """Pages that are free."""
        return int(self.pool.available_size()) // self._shape.page_size

    def reset(self) -> None:
        """All requests as at first: their prompts in whole pages, nothing else."""
        self.pool.clear()
        torch, batch = self._peer.torch, self._batch
        batch.reqs = self.requests = [Request(length) for length in self._base]
        batch.seq_lens_cpu = torch.tensor(self._base, dtype=torch.int64)
        batch.seq_lens = batch.seq_lens_cpu.to(self._device)
        self.reserve(0)

    def reserve(self, reserve: int = RESERVE) -> int:
        """An EAGLE step's allocation: watermarks, copies, pages, table; the tokens it added."""
        torch, requests = self._peer.torch, self.requests
        cur, nxt, needed = self._peer.watermarks(
            requests, reserve=reserve, page_size=self._shape.page_size
        )
        for request in requests:
            request.decode_batch_idx += 1
        cur_cpu = torch.tensor(cur, dtype=torch.int32, device="cpu")
        nxt_cpu = torch.tensor(nxt, dtype=torch.int32, device="cpu")
        self._peer.allocation.alloc_for_spec_decode(
            self._tree,
            self._rows,
            reqs=requests,
            req_pool_indices=self._indices,
            cur_kv_lens=cur_cpu.to(device=self._device, non_blocking=True),
            cur_kv_lens_cpu=cur_cpu,
            nxt_kv_lens=nxt_cpu.to(device=self._device, non_blocking=True),
            nxt_kv_lens_cpu=nxt_cpu,
            num_needed_tokens=needed,
            batch=self._batch,
        )
        return int(needed)

    def commit(self, accepted: Sequence[int]) -> None:
        """What was accepted is committed."""
        for request, count in zip(self.requests, accepted, strict=True):
            request.kv.kv_committed_len += count

    def before_decode(self) -> None:
        """Note how many pages are free, so that `took` can say what was taken since."""
        self._before = self.free_pages

    def decode(self) -> None:
        """A plain decode step's allocation."""
        self._peer.allocation.alloc_for_decode_default(self._batch, 1)

    def took(self) -> int:
        """Pages taken since `before_decode`."""
        return self._before - self.free_pages

    def after_decode(self) -> None:
        """The batch moves on by a token."""
        batch = self._batch
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1

    def fill(self, tokens: int) -> None:
        """Rows of so many tokens each, in whole pages, for `release`."""
        n, size = self._shape.batch, self._shape.page_size
        whole = -(-tokens // size) * size
        slots = self.pool.alloc(n * whole)
        table = self._rows.req_to_token
        table[1 : n + 1, :whole] = slots.view(n, whole).to(self._peer.torch.int32)

    def release(self, tokens: int) -> None:
        """Free the requests of `fill`, in one group."""
        table = self._rows.req_to_token
        self.pool.free_group_begin()
        for row in range(1, self._shape.batch + 1):
            self.pool.free_segment(table[row, :tokens], start_pos=0)
        self.pool.free_group_end()
