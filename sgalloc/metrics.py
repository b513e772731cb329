"""`KVAllocator.stats` for Prometheus; needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sgalloc import errors
from sgalloc._version import __version__
from sgalloc.inputs import shown
from sgalloc.stats import Stats

# The parts that the pages of a group are in, each page in exactly one.
_STATES = ("free", "quarantined", "cached", "pinned", "owned")
_REASONS = tuple(
    sorted(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
        and issubclass(kind, errors.AllocError)
        and kind is not errors.AllocError
    )
)


class Collector:
    """Metrics of one or more allocators, read from `stats` whenever Prometheus asks.

    A scrape reads a few counters and does no device work, so it may come from another thread. One
    that comes in the middle of a verb may see a part of that verb.

    Args:
        alloc: an allocator; `add` takes more.
        labels: names and values that its metrics carry, such as ``{"model": "a"}``.

    Example::

        prometheus_client.REGISTRY.register(sgalloc.metrics.Collector(alloc))
    """

    def __init__(self, alloc: Any, labels: Mapping[str, str] | None = None) -> None:
        try:
            from prometheus_client import core
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "metrics need prometheus_client: pip install 'sgalloc[metrics]'",
                name=missing.name,
            ) from None
        self._core: Any = core
        self._names: tuple[str, ...] = tuple(labels or ())
        self._sources: list[tuple[Any, tuple[str, ...]]] = []
        self.add(alloc, labels)

    def add(self, alloc: Any, labels: Mapping[str, str] | None = None) -> None:
        """Let another allocator be read too, under other values of the same labels.

        Raises:
            TypeError: no allocator.
            ValueError: other labels, or the values of one that is read already.
        """
        if not callable(getattr(alloc, "stats", None)):
            raise TypeError(f"a collector reads a KVAllocator, got {shown(alloc)}")
        given = dict(labels or {})
        if set(given) != set(self._names):
            raise ValueError(
                f"labels must be {list(self._names)} as of the first allocator, got {list(given)}"
            )
        values = tuple(str(given[name]) for name in self._names)
        if any(values == known for _, known in self._sources):
            raise ValueError(f"an allocator with labels {given} is read already: tell them apart")
        self._sources.append((alloc, values))

    def collect(self) -> Iterator[Any]:
        """The metric families, as ``prometheus_client`` asks for them."""
        read = [(alloc, values, alloc.stats()) for alloc, values in self._sources]
        families = self._families()
        for alloc, values, stats in read:
            families["info"].add_metric(
                (*values, __version__, alloc.device, str(alloc.page_size)), 1
            )
            self._fill(families, values, stats)
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        found: dict[str, Any] = {}
        for key, kind, says, own in (
            ("info", gauge, "Always 1; what the allocator is.", ("version", "device", "page_size")),
            ("pages", gauge, "Pages by group and by what holds them.", ("group", "state")),
            ("pool_pages", gauge, "All pages of a group.", ("group",)),
            ("locked_pages", gauge, "Cached pages that cannot be evicted now.", ("group",)),
            ("high_water_pages", gauge, "Most pages ever out at once.", ("group",)),
            ("evicted_pages", counter, "Pages evicted from the prefix cache.", ("group",)),
            ("rows", gauge, "Rows of the table by state.", ("state",)),
            ("committed_tokens", gauge, "Tokens whose K and V are settled, open requests.", ()),
            ("allocated_tokens", gauge, "Tokens that the pages of open requests cover.", ()),
            (
                "refusals",
                counter,
                "Refused calls, by the name of the error.",
                ("reason",),
            ),
            ("staging_slots", gauge, "Slots of pinned staging memory.", ()),
            ("staging_waits", counter, "Calls that waited for a staging slot.", ()),
            ("staging_grows", counter, "Staging slots added since all were busy.", ()),
        ):
            found[key] = kind(f"sgalloc_{key}", says, labels=(*self._names, *own))
        return found

    def _fill(self, families: dict[str, Any], values: tuple[str, ...], stats: Stats) -> None:
        def put(key: str, value: float, *own: str) -> None:
            families[key].add_metric((*values, *own), value)

        for group, pages in stats.groups.items():
            for state in _STATES:
                put("pages", getattr(pages, state), group, state)
            put("pool_pages", pages.total, group)
            put("locked_pages", pages.locked, group)
            put("high_water_pages", pages.high_water, group)
            put("evicted_pages", pages.evicted, group)
        for state in ("open", "free", "quarantined"):
            put("rows", getattr(stats.rows, state), state)
        put("committed_tokens", stats.committed)
        put("allocated_tokens", stats.allocated)
        # A reason that was never met stands at 0, so that its first time shows as a rise.
        for reason in sorted({*_REASONS, *stats.refusals}):
            put("refusals", stats.refusals.get(reason, 0), reason)
        put("staging_slots", stats.staging.slots)
        put("staging_waits", stats.staging.waits)
        put("staging_grows", stats.staging.grows)
