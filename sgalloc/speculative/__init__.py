"""What an engine that speculates calls once a step: `eagle` and `dflash`."""

from __future__ import annotations

from sgalloc.speculative import dflash, eagle

__all__ = ["dflash", "eagle"]
