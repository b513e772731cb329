"""The digest of entries, written from what `cuda/row_digest.cu` promises and from nothing else."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_WORD = (1 << 64) - 1


@lru_cache(maxsize=1 << 20)
def weight(place: int) -> int:
    """The weight of an entry by its place in the range."""
    word = (place + 1) * 0x9E3779B97F4A7C15 & _WORD
    word ^= word >> 32
    word = word * 0xD6E8FEB86659FD93 & _WORD
    return word ^ word >> 32 | 1


def entries_digest(entries: Any) -> int:
    """The sum of entry times weight modulo 2**64, an entry taken as 32 bits without sign."""
    held = np.asarray(entries).reshape(-1)
    there = held.nonzero()[0].tolist()
    return sum((int(held[at]) & 0xFFFFFFFF) * weight(at) for at in there) & _WORD
