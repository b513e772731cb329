"""A naive allocator with the same promises: dicts, lists and loops, no arrays, no speed.

It imports nothing of the package and shares no code with it. Every cached page is a tree node of
its own, every question is answered by walking over everything, and a page that is taken gets a
number that was never used before.
"""

from __future__ import annotations

from sgalloc.fuzz.reference.naive import Reference
from sgalloc.fuzz.reference.words import (
    Growth,
    Match,
    Node,
    Plan,
    Refused,
    Request,
    SparseSettings,
    Waiting,
    WindowSettings,
)

__all__ = [
    "Growth",
    "Match",
    "Node",
    "Plan",
    "Reference",
    "Refused",
    "Request",
    "SparseSettings",
    "Waiting",
    "WindowSettings",
]
