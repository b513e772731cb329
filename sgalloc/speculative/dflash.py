"""DFLASH's step: blocks of drafts, and the lengths that its kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgalloc.allocator import KVAllocator
from sgalloc.device import Writer
from sgalloc.device.lengths import LengthArrays, Together, open_lengths
from sgalloc.errors import AllocError
from sgalloc.inputs import Int64, counts, shown, whole_number
from sgalloc.ledger import Batch
from sgalloc.plan import Plan
from sgalloc.sizing import SpecConfig
from sgalloc.speculative.step import asked, longest, prepared, tokens_between

_ALGORITHMS = ("dflash",)


class DflashStep(NamedTuple):
    """What was prepared. The arrays are the plan's, to be read alone.

    Attributes:
        cur: A before, tokens, int64 ``(n,)``.
        nxt: A now, tokens, int64 ``(n,)``.
        needed: ``sum(nxt - cur)``, tokens.
        max_seq_len: ``max(C + reserve)``, tokens; 0 for no requests.
        ready: the event behind which the table, and the `Lengths`, are written.
        plan: the applied plan.
        committed: C, tokens, int64 ``(n,)``.
        committed_sum: tokens.
        nxt_sum: tokens.
        max_top_k: the largest ``top_k``; None where none was given.
        uniform_top_k: the ``top_k`` that all requests have; None where they differ.
    """

    cur: Int64
    nxt: Int64
    needed: int
    max_seq_len: int
    ready: Any
    plan: Plan
    committed: Int64
    committed_sum: int
    nxt_sum: int
    max_top_k: int | None
    uniform_top_k: int | None


class Lengths:
    """The lengths of a step on the device, at fixed addresses: make one, and pass it each step.

    The host side is pinned memory that grows by doubling and is never overwritten while a copy
    that reads it is pending. On the CPU the arrays are NumPy's.

    Args:
        alloc: the allocator.
        max_requests: the most requests of one step; all that have rows if None.
    """

    def __init__(self, alloc: KVAllocator, max_requests: int | None = None) -> None:
        most = alloc.max_requests if max_requests is None else max_requests
        self.max_requests = whole_number(most, "max_requests", 1, alloc.max_requests)
        self._device = alloc._core.device
        self._arrays: LengthArrays = open_lengths(self._device, self.max_requests)

    @property
    def cur(self) -> Any:
        """A before, int32 ``(max_requests,)``; entries past the requests of the step are stale."""
        return self._arrays.cur

    @property
    def nxt(self) -> Any:
        """A afterwards, int32 ``(max_requests,)``."""
        return self._arrays.nxt

    @property
    def committed(self) -> Any:
        """C, int64 ``(max_requests,)``."""
        return self._arrays.seq_lens

    @property
    def staging(self) -> tuple[int, int, int]:
        """Pinned buffers, steps that waited for one, and times that memory was added."""
        return self._arrays.staging

    def __repr__(self) -> str:
        return f"Lengths({self.max_requests} requests, {self._device.name})"

    def _take(self, alloc: KVAllocator, n: int) -> None:
        """Have a buffer for ``n`` requests, or refuse."""
        if self._device is not alloc._core.device:
            raise ValueError("these lengths belong to another allocator: make them with this one")
        if n > self.max_requests:
            raise ValueError(
                f"a step of {n} requests does not fit lengths for {self.max_requests}: "
                "make them with a larger max_requests"
            )
        try:
            self._arrays.take(n)
        except AllocError as refusal:
            alloc._count(refusal)
            raise

    def _through(self, plan: Plan, device: Writer, after: Any) -> Writer:
        """Who writes the lengths of ``plan`` together with the table."""
        return Together(device, self._arrays, plan.cur, plan.nxt, plan.start, after)


def prepare_for_decode(
    alloc: KVAllocator,
    batch: Any,
    spec: SpecConfig,
    top_k: Any = None,
    *,
    reserve: Any = None,
    lengths: Lengths | None = None,
    out: Any = None,
    after: Any = None,
) -> DflashStep:
    """Make room for the next block of every request of ``batch``, and count the step.

    Args:
        alloc: the allocator.
        batch: a batch, handles or a handle.
        spec: of ``"dflash"``; the reserve is two of its blocks.
        top_k: the sampler's top-k, at least 1, an int or one per request, to be summed up.
        reserve: tokens past C in place of two blocks, an int or one per request.
        lengths: receives C and A on the device, behind ``ready``.
        out: int32 or int64 array on the device that receives the slots of ``[C, C + reserve)``.
        after: a CUDA event behind the last reader of the table and of ``lengths``.

    Returns:
        What was prepared.

    Raises:
        ValueError: an algorithm of another module, or lengths that are too short.
        WrongState: lengths while a stream is captured.
        RowTooNarrow, OutOfPages: it does not fit; nothing was evicted and no step counted.
    """
    tokens = asked(alloc, spec, _ALGORITHMS, reserve)
    alloc._owner.check()
    n = len(batch) if isinstance(batch, Batch) else alloc.rows(batch).size
    widest, uniform = _summary(top_k, n)
    if lengths is not None:
        if not isinstance(lengths, Lengths):
            raise TypeError(f"lengths must be Lengths, got {shown(lengths)}: make dflash.Lengths")
        lengths._take(alloc, n)
    through = None
    if lengths is not None:
        own = lengths
        through = lambda plan, device: own._through(plan, device, after)  # noqa: E731
    plan = prepared(alloc, batch, tokens, out, after, through)
    return DflashStep(
        plan.cur,
        plan.nxt,
        tokens_between(plan),
        longest(plan),
        plan.ready,
        plan,
        plan.start,
        int(plan.start.sum()),
        int(plan.nxt.sum()),
        widest,
        uniform,
    )


def _summary(top_k: Any, n: int) -> tuple[int | None, int | None]:
    """The largest top-k, and the one that all have; None for what there is not."""
    if top_k is None:
        return None, None
    given = counts(top_k, n, "top_k")
    if isinstance(given, int):
        least = most = given
    elif n:
        least, most = int(given.min()), int(given.max())
    else:
        return None, None
    if least < 1:
        raise ValueError(
            f"top_k must be at least 1, got {least}: pass the size of the vocabulary for no limit"
        )
    if not n:
        return None, None
    return most, most if most == least else None
