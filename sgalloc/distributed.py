"""Ranks that mirror each other: compare their digests over torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sgalloc.errors import MirrorDiverged

if TYPE_CHECKING:
    from sgalloc.holdings import Holdings


def assert_mirrored(alloc: Holdings, group: Any = None) -> str:
    """Compare the digest of ``alloc`` with those of all ranks of a process group.

    Every rank of the group has to call it, at equal event state: in stream order, or behind a
    `settle()` that all of them call. It costs one all-gather of 32 bytes a rank, on the CPU with
    gloo and on the current CUDA device with NCCL.

    Args:
        alloc: this rank's allocator.
        group: a torch.distributed group of ranks that mirror each other; None for all ranks.

    Returns:
        The digest that all have.

    Raises:
        MirrorDiverged: on every rank alike, naming those that differ from most.
        RuntimeError: torch.distributed is not set up.
    """
    import torch
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError("torch.distributed has no process group: call init_process_group first")
    own = alloc.digest()
    nccl = distributed.get_backend(group) == "nccl"
    where = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    sent = torch.tensor(list(own.encode()), dtype=torch.uint8, device=where)
    size = distributed.get_world_size(group)
    gathered = [torch.empty_like(sent) for _ in range(size)]
    distributed.all_gather(gathered, sent, group=group)
    digests = [bytes(part.cpu().tolist()).decode() for part in gathered]
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    compare(dict(zip(ranks, digests, strict=True)))
    return own


def compare(digests: dict[int, str]) -> None:
    """Refuse digests that are not all equal.

    Args:
        digests: by rank.

    Raises:
        MirrorDiverged: naming the ranks that differ from most, or from the lowest rank among
            equally many.
    """
    counts = Counter(digests[rank] for rank in sorted(digests))
    common, _ = counts.most_common(1)[0]
    others = {rank: found for rank, found in sorted(digests.items()) if found != common}
    if others:
        raise MirrorDiverged(common, others)
