"""Calls put around the methods of one object, from outside, so that nobody else pays for them."""

from __future__ import annotations

from typing import Any


class Wraps:
    """Calls put in the place of methods of objects, and taken away again."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def put(self, target: Any, method: str, call: Any) -> None:
        """Let ``call`` be what ``target.method`` is."""
        before = vars(target).get(method)
        setattr(target, method, call)
        self._put.append((target, method, call, before))

    def undo(self) -> None:
        """Take all away, but those that somebody else has wrapped in turn."""
        for target, method, call, before in reversed(self._put):
            if vars(target).get(method) is not call:
                continue
            if before is None:
                delattr(target, method)
            else:
                setattr(target, method, before)
        self._put.clear()
