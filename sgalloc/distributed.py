"""Ranks that mirror each other: compare their digests over torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sgalloc.errors import MirrorDiverged
from sgalloc.trust.mirrored import parting

if TYPE_CHECKING:
    from sgalloc.proving import Proving

_DIGEST = 32


def assert_mirrored(alloc: Proving, group: Any = None, *, incremental: bool = False) -> str:
    """Compare the digest of ``alloc`` with those of all ranks of a process group.

    Every rank of the group has to call it, at equal event state: in stream order, or behind a
    `settle()` that all of them call. It costs one all-gather of 33 bytes a rank, on the CPU with
    gloo and on the current CUDA device with NCCL. Where digests differ and every rank has a
    journal, each reads its own, and some twenty small all-gathers find the first call that differs.

    Args:
        alloc: this rank's allocator.
        group: a torch.distributed group of ranks that mirror each other; None for all ranks.
        incremental: as of `KVAllocator.digest`; ranks may differ in it.

    Returns:
        The digest that all have.

    Raises:
        MirrorDiverged: on every rank alike, naming those that differ from most, and the first
            call that differs.
        RuntimeError: torch.distributed is not set up.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError("torch.distributed has no process group: call init_process_group first")
    own = alloc.digest(incremental=incremental)
    exchange = _Exchange(group)
    journal = alloc._journal
    noted = journal is not None and journal.log.open
    gathered = exchange(own.encode() + bytes((noted,)))
    digests = {
        rank: part[:_DIGEST].decode() for rank, part in zip(exchange.ranks, gathered, strict=True)
    }
    common, others = apart(digests)
    if not others:
        return own
    if not all(part[_DIGEST] for part in gathered):
        raise MirrorDiverged(common, others)
    found = parting(journal, exchange)
    if found is None:
        raise MirrorDiverged(common, others, noted=True)
    calls = dict(zip(exchange.ranks, found.words(), strict=True))
    raise MirrorDiverged(common, others, found.record, calls, noted=True)


def apart(digests: dict[int, str]) -> tuple[str, dict[int, str]]:
    """The digest that most ranks have, and by rank those of the others.

    Of equally many, those of the lowest rank count as most.

    Args:
        digests: by rank.
    """
    counts = Counter(digests[rank] for rank in sorted(digests))
    common, _ = counts.most_common(1)[0]
    return common, {rank: found for rank, found in sorted(digests.items()) if found != common}


class _Exchange:
    """All-gathers of bytes over one group.

    Attributes:
        ranks: of the group, as they are numbered among all, in the order of what is gathered.
    """

    def __init__(self, group: Any) -> None:
        import torch
        from torch import distributed

        self._group = group
        nccl = distributed.get_backend(group) == "nccl"
        self._where = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
        self.ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)

    def __call__(self, data: bytes) -> list[bytes]:
        """The bytes of every rank; all send as many."""
        import torch
        from torch import distributed

        sent = torch.tensor(list(data), dtype=torch.uint8, device=self._where)
        gathered = [torch.empty_like(sent) for _ in self.ranks]
        distributed.all_gather(gathered, sent, group=self._group)
        return [bytes(part.cpu().tolist()) for part in gathered]
