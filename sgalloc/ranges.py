"""Which calls have a range, and NVTX ranges and counters, at no cost where no tool listens.

NVTX resolves a domain to a real or a dummy one at first use. With a dummy nothing is wrapped, so a
verb costs what it costs without ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import nvtx

DOMAIN = "sgalloc"
_STEP = np.dtype([("pages", np.int64), ("rows", np.int64), ("bytes", np.int64)])
_LEVELS = np.dtype([("free_pages", np.int64), ("ring_slots", np.int64), ("ring_waits", np.int64)])

# What changes the ledger or the cache, by name of the method.
_VERBS = (
    "open",
    "open_with_prefix",
    "extend",
    "decode",
    "apply",
    "commit",
    "trim",
    "evict_window",
    "to_sparse",
    "release",
    "slots",
    "preallocate",
    "acknowledge",
    "abort",
    "reclaim",
)
_CACHE_VERBS = ("match", "publish", "clear")


class Place(NamedTuple):
    """A method that has a range.

    Attributes:
        target: whose method it is.
        method: its name.
        name: of the range.
        verb: whether the levels are sampled behind it.
        step: whether its first two arguments tell of a write, as `step_payload` takes them.
    """

    target: Any
    method: str
    name: str
    verb: bool = False
    step: bool = False


def places(alloc: Any, core: Any) -> list[Place]:
    """Every method of an allocator that has a range."""
    found = [Place(alloc, verb, verb, verb=True) for verb in _VERBS]
    found.append(Place(alloc, "_reserve", "reserve", verb=True))
    if core.prefix is not None:
        found += [Place(core.prefix, verb, verb, verb=True) for verb in _CACHE_VERBS]
    found.append(Place(alloc, "_make_plan", "plan"))
    found.append(Place(core.device, "write", "write", step=True))
    found += [Place(core.device, method, name) for method, name in core.device.ranged.items()]
    return found


def listen(alloc: Any, core: Any) -> None:
    """Let an attached tool see verbs, plans, staging and launches, and sample the counters."""
    if not listening():
        return
    sample = level_sampler(lambda: core.pool.free, lambda: core.device.staging)
    for place in places(alloc, core):
        instrument(
            place.target,
            {place.method: place.name},
            payload=step_payload if place.step else None,
            after=sample if place.verb else None,
        )


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
