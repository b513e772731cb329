"""Events of whoever: polled, never waited for."""

from __future__ import annotations

from typing import Any

from sgalloc.inputs import shown


def is_done(event: Any) -> bool:
    """Whether ``event`` is done, by its ``query()`` or its ``done``.

    Raises:
        TypeError: it has neither.
    """
    query = getattr(event, "query", None)
    if callable(query):
        return bool(query())
    done = getattr(event, "done", None)
    if done is None:
        raise _not_pollable(event)
    return bool(done() if callable(done) else done)


def pollable(event: Any) -> Any:
    """``event``, if `is_done` could ask it; it is not asked.

    Raises:
        TypeError: it has neither ``query()`` nor ``done``.
    """
    own = getattr(event, "__dict__", {})
    if callable(getattr(event, "query", None)) or "done" in own or hasattr(type(event), "done"):
        return event
    raise _not_pollable(event)


def _not_pollable(event: Any) -> TypeError:
    return TypeError(
        f"after= needs an event with query() or done, got {shown(event)}: "
        "pass the event that follows the last reader"
    )
