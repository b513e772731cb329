"""What an allocator remembers: nothing may grow with every call that it ever served."""

from __future__ import annotations

from collections import deque
from typing import Any

_COLLECTIONS = (list, tuple, set, frozenset, deque)
_LEFT_OUT = ("_refusals", "_journal", "_debugging")


def things_held(root: Any) -> int:
    """Entries of all lists, sets and dicts that can be reached through the package's objects."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    count = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            count += len(thing)
            todo += thing.values()
        elif isinstance(thing, _COLLECTIONS):
            count += len(thing)
            todo += thing
        elif type(thing).__module__.startswith("sgalloc.") and not _on_device(thing):
            todo += attributes(thing)
    return count


def _on_device(thing: Any) -> bool:
    """Whether it belongs to a device, whose staging slots stay for good."""
    return type(thing).__module__.startswith("sgalloc.device.")


def attributes(thing: Any) -> list[Any]:
    """The values of an object's attributes, slots among them."""
    found = [value for name, value in getattr(thing, "__dict__", {}).items()
             if name not in _LEFT_OUT]  # fmt: skip
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                found.append(getattr(thing, name))
    return found
