"""The paged KV pool: torch tensors that the allocator's tables index, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from examples.engine.model import Attend, Config, Model

_NEVER = -1e30  # the bias of a masked key; -inf would make NaN of a query that sees nothing


class Tables:
    """The allocator's tables as torch tensors, obtained once: they share its memory."""

    def __init__(self, alloc: Any) -> None:
        # guide: step 2
        self.full = torch.from_dlpack(alloc.req_to_token)
        self.window = torch.from_dlpack(alloc.window_table)
        self.to_window = torch.from_dlpack(alloc.full_to_window)


class Part(NamedTuple):
    """What the layers of one group do in a forward.

    Attributes:
        write: the slots that the new tokens go to, ``(batch * queries,)``.
        read: the slots that queries look at, ``(batch, keys)``.
        bias: what is added to the scores, ``(batch, 1, group * queries, keys)``.
    """

    write: Tensor
    read: Tensor
    bias: Tensor


class Passage(NamedTuple):
    """Both groups of one forward: for layers that see all, and for those with a window."""

    full: Part
    window: Part


class Branches(NamedTuple):
    """Where the branches of a tree stand: tokens from ``start`` on are ``shift`` columns later.

    Attributes:
        start: C, ``(batch,)``.
        shift: columns, ``(batch,)``.
    """

    start: Tensor
    shift: Tensor


# guide: step 5
def passage(
    tables: Tables,
    config: Config,
    rows: Tensor,
    positions: Tensor,
    write: Tensor,
    keys: int,
    branches: Branches | None = None,
    dtype: Any = torch.float64,
) -> Passage:
    """Look a forward up in the tables, once for all layers.

    Args:
        tables: the allocator's.
        config: of the model.
        rows: int64 ``(batch,)``; 0 for padding.
        positions: of the queries in their texts, ascending, ``(batch, queries)``; -1 for padding.
        write: slots of the full group that the queries' own keys and values go to, of the same
            shape; 0 for padding.
        keys: columns that the longest request may look at.
        branches: where the queries are branches of trees.
        dtype: of the bias.
    """
    columns = torch.arange(keys, device=rows.device)[None]
    queries = positions[:, :, None]

    def part(table: Tensor, slots: Tensor, at: Tensor, seen: Tensor) -> Part:
        if branches is not None:
            at = at + (at >= branches.start[:, None]) * branches.shift[:, None]
        at = at.clamp(max=table.shape[1] - 1)
        # Masked keys are left out by selection: they read slot 0, whose contents are finite.
        read = torch.where(seen.any(1), table[rows[:, None], at].long(), 0)
        bias = torch.full(seen.shape, _NEVER, dtype=dtype, device=rows.device)
        bias = bias.masked_fill(seen, 0)[:, None].repeat(1, config.heads // config.kv_heads, 1, 1)
        return Part(slots.flatten(), read, bias.flatten(1, 2)[:, None])

    full = part(tables.full, write, columns, columns[:, None] <= queries)
    # Window layers look at the last keys of each request alone, in the window's own table.
    reach = min(-(-(config.window - 1 + positions.shape[1]) // 8) * 8, keys)
    at = (positions[:, :1] - config.window + 1).clamp(min=0) + columns[:, :reach]
    seen = (at[:, None] <= queries) & (at[:, None] > queries - config.window)
    return Passage(full, part(tables.window, tables.to_window[write].long(), at, seen))


class Cache:
    """Keys and values of one model, ``(slots, kv_heads, head_dim)`` a layer each."""

    def __init__(self, model: Model, full_slots: int, window_slots: int) -> None:
        self.config = config = model.config
        self.pools = []
        for layer in range(config.layers):
            slots = window_slots if config.windowed(layer) else full_slots
            shape = (slots, config.kv_heads, config.head_dim)
            self.pools.append(
                [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in "kv"]
            )

    def attend(self, where: Passage) -> Attend:
        """Attention that writes and reads these pools at the slots of ``where``."""
        config = self.config
        group = config.heads // config.kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            part = where.window if config.windowed(layer) else where.full
            keys, values = self.pools[layer]
            keys[part.write], values[part.write] = k.flatten(0, 1), v.flatten(0, 1)
            n, queries = q.shape[:2]
            # The queries that share a head's keys stand one behind the other.
            asked = q.unflatten(2, (config.kv_heads, group)).permute(0, 2, 3, 1, 4)
            asked = asked.reshape(n, config.kv_heads, group * queries, config.head_dim)
            found = functional.scaled_dot_product_attention(
                asked,
                _gathered(keys, part.read),
                _gathered(values, part.read),
                attn_mask=part.bias.expand(-1, config.kv_heads, -1, -1),
            )
            found = found.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
            return found.flatten(2, 3)

        return attend

    def move(self, full: Sequence[Tensor], window: Sequence[Tensor]) -> None:
        """Move tokens from slots to slots: all are read before one is written."""
        for layer, pools in enumerate(self.pools):
            source, target = window if self.config.windowed(layer) else full
            for pool in pools:
                pool[target] = pool[source]


def _gathered(pool: Tensor, slots: Tensor) -> Tensor:
    found = pool.flatten(1).index_select(0, slots.flatten())
    return found.view(*slots.shape, *pool.shape[1:]).transpose(1, 2)


class Canary:
    """Overwrites the KV of pages that nobody has with NaN, and of each page as it is granted.

    It runs on the forward's stream, so that whoever reads a page that is not his, or a slot
    before it was written, gets NaN for an answer. For tests: it costs a step its speed.
    """

    def __init__(self, alloc: Any, tables: Tables, caches: list[Cache]) -> None:
        self.alloc, self.tables, self.caches = alloc, tables, caches
        self.free = {group: np.zeros(0, bool) for group in alloc.stats().groups}

    def sweep(self) -> None:
        """Overwrite the pages that came free since the last call."""
        slots = {}
        for group in self.free:
            free = self.alloc.owners(group) == 0
            free[0] = False  # the padding page is read by whoever sees nothing
            before = self.free[group] if self.free[group].size else np.zeros_like(free)
            self.free[group] = free
            pages = torch.from_numpy((free & ~before).nonzero()[0])
            size = self.alloc.page_size
            slots[group] = (pages[:, None] * size + torch.arange(size)).flatten()
        self._overwrite(slots["full"], slots["window"])

    def granted(self, handles: Any, start: Any, stop: Any) -> None:
        """Overwrite the pages of positions ``[start, stop)``, which have just been granted."""
        self.sweep()
        size = int(np.sum(np.subtract(stop, start)))
        slots = torch.empty(size, dtype=torch.int64, device=self.tables.full.device)
        self.alloc.slots(handles, start, stop, out=slots)
        beside = self.tables.to_window[slots].long()
        self._overwrite(slots, beside[beside > 0])

    def _overwrite(self, full: Tensor, window: Tensor) -> None:
        for cache in self.caches:
            for layer, pools in enumerate(cache.pools):
                slots = window if cache.config.windowed(layer) else full
                for pool in pools:
                    pool[slots.to(pool.device)] = torch.nan
