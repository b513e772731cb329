"""What lets a user believe the allocator: snapshots, and digests to compare."""

from __future__ import annotations

from sgalloc.trust.digest import digest
from sgalloc.trust.snapshot import restore, snapshot

__all__ = ["digest", "restore", "snapshot"]
