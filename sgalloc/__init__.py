"""sgalloc: which slots of the KV pool every request holds, decided on the host."""

from __future__ import annotations

from sgalloc import (
    admission,
    cache_events,
    extents,
    metrics,
    retraction,
    sizing,
    speculative,
    timeline,
)
from sgalloc._version import __version__
from sgalloc.allocator import KVAllocator
from sgalloc.contiguity import Runs
from sgalloc.errors import (
    AllocError,
    CommitPastExtent,
    DeviceFailed,
    InsideSharedPage,
    LawViolation,
    MirrorDiverged,
    OutOfPages,
    OutOfRows,
    RowTooNarrow,
    SnapshotError,
    StaleHandle,
    StalePlan,
    WrongState,
)
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.ledger import Batch
from sgalloc.pins import Transfer
from sgalloc.plan import Plan
from sgalloc.prefix import Match
from sgalloc.stats import Stats
from sgalloc.trust.records import JournalError

__all__ = [
    "AllocError",
    "Batch",
    "CommitPastExtent",
    "DeviceFailed",
    "InsideSharedPage",
    "JournalError",
    "KVAllocator",
    "LawViolation",
    "Match",
    "MirrorDiverged",
    "OutOfPages",
    "OutOfRows",
    "Plan",
    "RowTooNarrow",
    "Runs",
    "SlidingWindow",
    "SnapshotError",
    "Sparse",
    "StaleHandle",
    "StalePlan",
    "Stats",
    "Transfer",
    "WrongState",
    "__version__",
    "admission",
    "cache_events",
    "extents",
    "metrics",
    "retraction",
    "sizing",
    "speculative",
    "timeline",
]
