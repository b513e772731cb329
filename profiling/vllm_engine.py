"""vLLM's KV cache manager with a batch of requests, called as its scheduler does.

None of vLLM's code is here: it is imported from wherever the user has it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.absent import stand_in
from sgalloc.bench.course import RESERVE
from sgalloc.bench.twins import Shape

VARIABLE = "VLLM_SRC"
# Imported by its modules, and not called on the way measured here.
_ABSENT = ("fastapi", "partial_json_parser", "llguidance", "lark", "outlines_core", "diskcache")
# A speculative step: tokens to be computed, drafts among them, and slots ahead for the drafter.
DRAFTED = RESERVE // 2
LOOKAHEAD = RESERVE - DRAFTED


class Peer(NamedTuple):
    """What of vLLM is used: where the manager is made, and what its requests are made of."""

    version: str
    manager: Any
    interface: Any
    utils: Any
    request: Any
    sampling: Any
    hashing: Any
    torch: Any


def load(source: str | None) -> Peer | str:
    """vLLM from the folder ``source``, or the one installed, or what keeps it from being used."""
    if source:
        if not (Path(source) / "vllm").is_dir():
            return f"vLLM is not measured: {VARIABLE} names a folder without vllm in it"
        sys.path.insert(0, source)
    stand_in(_ABSENT)
    try:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils import hashing
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request
    except Exception as error:  # whatever its many modules may raise here
        said = f"importing it failed with {type(error).__name__}: {error}"
        return f"vLLM is not measured: {said}; set {VARIABLE} to the folder of its Python files"
    return Peer(
        _version(source),
        KVCacheManager,
        kv_cache_interface,
        kv_cache_utils,
        Request,
        SamplingParams,
        hashing,
        torch,
    )


def _version(source: str | None) -> str:
    from vllm.version import __version__

    if __version__ and __version__ != "dev":
        return str(__version__)
    # The files of an sdist do not know it; its folder does.
    found = re.search(r"vllm-(\d[\w.]*)", str(source))
    return found[1] if found else "of unknown version"


class Engine:
    """vLLM's manager and a batch of requests.

    Attributes:
        requests: of the present round.
        caching: whether its prefix cache is on.
    """

    def __init__(self, peer: Peer, shape: Shape, num_pages: int, caching: bool) -> None:
        self._peer, self._shape, self.caching = peer, shape, caching
        interface = peer.interface
        spec = interface.FullAttentionSpec(
            block_size=shape.page_size, num_kv_heads=8, head_size=128, dtype=peer.torch.bfloat16
        )
        config = interface.KVCacheConfig(
            num_blocks=num_pages + 1,  # its null block is one of them
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = peer.manager(
            config,
            max_model_len=shape.row_width,
            scheduler_block_size=shape.page_size,
            hash_block_size=shape.page_size,
            enable_caching=caching,
        )
        self._hasher = None
        if caching:
            sha256 = peer.hashing.sha256
            peer.utils.init_none_hash(sha256)
            self._hasher = peer.utils.get_request_block_hasher(shape.page_size, sha256)
        self._made = 0
        self.requests: list[Any] = []

    @property
    def free_pages(self) -> int:
        """Blocks that are free, those in its prefix cache that nobody uses among them."""
        return int(self.manager.block_pool.get_num_free_blocks())

    @property
    def held_pages(self) -> list[int]:
        """Blocks of each request."""
        ids = (self.manager.get_block_ids(r.request_id)[0] for r in self.requests)
        return [len(of_one) for of_one in ids]

    def make(self, prompts: Sequence[Sequence[int]]) -> None:
        """Requests with these prompts, which hold nothing yet."""
        sampling = self._peer.sampling(max_tokens=self._shape.row_width)
        made = []
        for prompt in prompts:
            self._made += 1
            made.append(
                self._peer.request(
                    str(self._made), list(prompt), sampling, None, block_hasher=self._hasher
                )
            )
        self.requests = made

    def admit(self, look: bool = True) -> None:
        """Pages for all prompts; with caching, a ``look`` into the cache first, as its scheduler.

        Raises:
            RuntimeError: a prompt is in the cache already, or the pool is too small.
        """
        manager = self.manager
        for request in self.requests:
            if self.caching and look:
                blocks, hits = manager.get_computed_blocks(request)[:2]
                if hits:
                    raise RuntimeError(f"{hits} tokens of a new prompt were found in the cache")
                got = manager.allocate_slots(request, request.num_tokens, 0, blocks)
            else:
                got = manager.allocate_slots(request, request.num_tokens)
            if got is None:
                raise RuntimeError("vLLM's pool is too small for the prompts")

    def begin(self) -> None:
        """The prompts are computed, and each request has its first token."""
        for request in self.requests:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)

    def decode(self) -> None:
        """A step of one token a request."""
        manager = self.manager
        for request in self.requests:
            manager.allocate_slots(request, 1)

    def speculate(self) -> None:
        """A step with drafts, and slots ahead for those of the next: `RESERVE` tokens together."""
        manager = self.manager
        for request in self.requests:
            manager.allocate_slots(request, DRAFTED, num_lookahead_tokens=LOOKAHEAD)

    def commit(self, accepted: Sequence[int]) -> None:
        """What was accepted is committed, and hashed where caching is on."""
        for request, count in zip(self.requests, accepted, strict=True):
            request.num_computed_tokens += count
            request.append_output_token_ids([7] * count)

    def free(self) -> None:
        """All requests are finished."""
        manager = self.manager
        for request in self.requests:
            manager.free(request)
