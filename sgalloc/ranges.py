"""NVTX ranges and counters, at no cost where no tool listens.

NVTX resolves a domain to a real or a dummy one at first use. With a dummy nothing is wrapped, so a
verb costs what it costs without ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import nvtx

DOMAIN = "sgalloc"
_STEP = np.dtype([("pages", np.int64), ("rows", np.int64), ("bytes", np.int64)])
_LEVELS = np.dtype([("free_pages", np.int64), ("ring_slots", np.int64), ("ring_waits", np.int64)])


def listening() -> bool:
    """Whether a tool listens to the domain ``sgalloc``."""
    return type(nvtx.get_domain(DOMAIN)).__name__ != "DummyDomain"


def instrument(
    target: Any,
    methods: Mapping[str, str],
    *,
    payload: Callable[..., Any] | None = None,
    after: Callable[[], None] | None = None,
) -> bool:
    """Put a range of the domain ``sgalloc`` around methods of ``target``, if a tool listens.

    Args:
        target: an object whose attributes can be set.
        methods: name of the range, by name of the method.
        payload: makes what the range carries from the arguments of the call.
        after: called after each call, to sample counters.

    Returns:
        Whether a tool listens.
    """
    if not listening():
        return False
    domain = nvtx.get_domain(DOMAIN)
    for method, name in methods.items():
        setattr(target, method, _ranged(domain, name, getattr(target, method), payload, after))
    return True


def step_payload(pages: Any, ids: Any, *_: Any) -> Any:
    """Pages, rows and bytes that a write puts into the table."""
    total, rows = (0, 0) if pages is None else (pages.total, pages.rows.size)
    return np.array((total, rows, 0 if ids is None else ids.nbytes + 8 * rows), _STEP)


def level_sampler(free_pages: Callable[[], int], ring: Callable[[], tuple[int, int, int]]) -> Any:
    """What samples the counters ``levels``: free pages, slots of the ring, waits for one."""
    counter = nvtx.get_domain(DOMAIN).get_counter("levels", _LEVELS)

    def sample() -> None:
        slots, waits, _ = ring()
        counter.sample(np.array((free_pages(), slots, waits), _LEVELS))

    return sample


def _ranged(
    domain: Any,
    name: str,
    method: Callable[..., Any],
    payload: Callable[..., Any] | None,
    after: Callable[[], None] | None,
) -> Callable[..., Any]:
    attributes = domain.get_event_attributes(message=name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if payload is not None:
            attributes.payload = payload(*args, **kwargs)
        domain.push_range(attributes)
        try:
            return method(*args, **kwargs)
        finally:
            domain.pop_range()
            if after is not None:
                after()

    return call
