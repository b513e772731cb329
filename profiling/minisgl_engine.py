"""mini-sglang's cache manager with a batch of requests, called as its scheduler does.

None of mini-sglang's code is here: it is imported from wherever the user has it. What is here is
the request that `allocate_paged` takes.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling.absent import stand_in
from sgalloc.bench.twins import Shape

VARIABLE = "MINISGL_SRC"
# Imported by its scheduler/cache.py, and not called on the way measured here.
_ABSENT = ("minisgl.core", "minisgl.kvcache")


class Peer(NamedTuple):
    """What of mini-sglang is used."""

    version: str
    manager: Any
    torch: Any


def load(source: str | None) -> Peer | str:
    """mini-sglang from the folder ``source``, or what keeps it from being used."""
    if not source:
        return (
            f"mini-sglang is not measured: set {VARIABLE} to the folder `python` of its repository"
        )
    root = Path(source) / "minisgl"
    if not root.is_dir():
        return f"mini-sglang is not measured: {VARIABLE} names a folder without minisgl in it"
    # Its packages without what they import at once: an engine, a scheduler and a server.
    for name in ("minisgl", "minisgl.scheduler", "minisgl.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(source, *name.split(".")))]
        sys.modules[name] = package
    stand_in(_ABSENT)
    try:
        import torch

        utils = importlib.import_module("minisgl.utils.misc")
        vars(sys.modules["minisgl.utils"]).update(vars(utils))
        cache = importlib.import_module("minisgl.scheduler.cache")
        manager = cache.CacheManager
    except Exception as error:  # whatever its modules may raise here
        for name in [name for name in sys.modules if name.split(".")[0] == "minisgl"]:
            del sys.modules[name]
        said = f"importing it failed with {type(error).__name__}: {error}"
        return f"mini-sglang is not measured: {said}"
    # Its prefix cache is asked only when the pool is empty, which it never is here.
    cache.create_prefix_cache = lambda *_, **__: None
    if not torch.cuda.is_available():
        cache.torch = _unpinned(torch)
    torch.set_num_threads(1)  # as many as NumPy has beside it
    text = (root / "scheduler" / "cache.py").read_bytes()
    version = f"scheduler/cache.py with SHA-256 {hashlib.sha256(text).hexdigest()[:12]}"
    return Peer(version, manager, torch)


def _unpinned(torch: Any) -> Any:
    """What its module calls of torch, where nothing can be pinned."""

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        return torch.empty(*shape, **options)

    return types.SimpleNamespace(
        empty=empty,
        arange=torch.arange,
        cat=torch.cat,
        Tensor=torch.Tensor,
        int32=torch.int32,
        int64=torch.int64,
    )


class Request:
    """A request, as far as `allocate_paged` looks at it."""

    __slots__ = ("cached_len", "device_len", "table_idx")

    def __init__(self, row: int, length: int) -> None:
        self.table_idx = row
        self.cached_len = 0
        self.device_len = length


class Engine:
    """Its manager, its table on the CPU, and a batch of requests.

    Attributes:
        requests: of the present round.
    """

    def __init__(self, peer: Peer, shape: Shape, num_pages: int) -> None:
        self._peer, self._shape, self._pages = peer, shape, num_pages
        torch = peer.torch
        self.table = torch.zeros((shape.batch + 1, shape.row_width), dtype=torch.int32)
        self.requests: list[Request] = []
        self.reset([])

    @property
    def free_pages(self) -> int:
        """Pages that are free."""
        return len(self.manager.free_slots)

    def reset(self, lengths: Sequence[int]) -> None:
        """A pool with all pages, and requests with prompts of these lengths that have none."""
        self.manager = self._peer.manager(
            self._pages, self._shape.page_size, self.table, type="naive"
        )
        self.requests = [Request(row, length) for row, length in enumerate(lengths, start=1)]

    def allocate(self) -> None:
        """Pages for what each request has yet to compute."""
        self.manager.allocate_paged(self.requests)

    def advance(self) -> None:
        """What was to be computed is; the next token follows."""
        for request in self.requests:
            request.cached_len = request.device_len
            request.device_len += 1
