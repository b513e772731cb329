"""What a snapshot says, once everything that could mislead its reader was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgalloc.errors import SnapshotError
from sgalloc.inputs import Int64
from sgalloc.trust.config import Config, checked_config, fields, integer, shown
from sgalloc.trust.sections import (
    BYTES,
    FLOAT,
    INT,
    LONG_FLAG,
    SCRATCH_FLAG,
    SPARSE_FLAG,
    STR,
    Sections,
    decoded,
    layout,
)

_MOST = (1 << 62) - 1
_MAX_GENERATION = (1 << 31) - 1
_MOST_REFUSALS, _MOST_NAME = 64, 64


class Checked(NamedTuple):
    """A snapshot of which every number that is an index or a size is within bounds.

    Whether pages, rows and locks add up is for the laws to say, once they are in place.

    Attributes:
        config: what the allocator was made with.
        sections: arrays by name.
        values: namespaces and deadlines, by number.
        tree: ``clock``, ``seq``, ``evicted`` and ``side_evicted``; empty without a cache.
        high_water: of each group.
        refusals: counts by the name of the error.
    """

    config: Config
    sections: Sections
    values: list[Any]
    tree: Mapping[str, int]
    high_water: list[int]
    refusals: Mapping[str, int]

    @classmethod
    def of(
        cls,
        header: dict[str, Any],
        sections: list[tuple[str, str, NDArray[Any]]],
        max_table_bytes: int,
    ) -> Checked:
        """Check all of it.

        Args:
            header, sections: of `unpack`.
            max_table_bytes: most bytes of tables that its configuration may ask for.

        Raises:
            SnapshotError: what is wrong.
        """
        has_tree = "tree" in header
        names = ("release", "config", "high_water", "refusals") + ("tree",) * has_tree
        fields(header, "header", *names)
        config = checked_config(header["config"], max_table_bytes)
        if has_tree != config.prefix_cache:
            raise SnapshotError("it has a prefix cache, or says so, but not both")
        wanted = layout(has_tree, config.window is not None, config.sparse is not None)
        if [(name, kind) for name, kind, _ in sections] != list(wanted.items()):
            raise SnapshotError("its sections are not those of its configuration, in their order")
        found = {name: array for name, _, array in sections}
        tree = {}
        if has_tree:
            parts = ("clock", "seq", "evicted", "side_evicted")
            named = fields(header["tree"], "tree", *parts)
            tree = {name: integer(named[name], f"tree.{name}", 0, _MOST) for name in parts}
        _check_rows(config, found)
        values = _values(found)
        _check_values(found, values)
        if has_tree:
            _check_tree(config, found, tree)
        _check_pins(config, found)
        _check_side(config, found)
        return cls(
            config,
            found,
            values,
            tree,
            _high_water(config, found, header["high_water"]),
            _refusals(header["refusals"]),
        )


def require(good: Any, what: str) -> None:
    """Refuse where ``good``, one truth or an array of them, is not true throughout.

    Raises:
        SnapshotError: naming ``what``, and where it fails first.
    """
    if isinstance(good, np.ndarray):
        if good.all():
            return
        raise SnapshotError(f"{what} (entry {int((~good).argmax())})")
    if not good:
        raise SnapshotError(what)


def within(column: NDArray[Any], name: str, low: Any, high: Any) -> None:
    """Refuse entries outside of ``[low, high]``, each one bound or an array of them.

    Raises:
        SnapshotError: naming the first.
    """
    bad = (column < low) | (column > high)
    if bad.any():
        at = int(bad.argmax())
        raise SnapshotError(f"{name}[{at}] is {column[at]}, out of bounds")


def sized(sections: Sections, size: int, *names: str) -> None:
    """Refuse sections that have not as many entries.

    Raises:
        SnapshotError: naming the first.
    """
    for name in names:
        found = sections[name].size
        if found != size:
            raise SnapshotError(f"section {name} has {found} entries, where {size} belong")


def total(column: NDArray[Any], name: str, limit: int) -> int:
    """The sum of counts that are not negative, if it is at most ``limit``.

    Raises:
        SnapshotError: it is not.
    """
    within(column, name, 0, limit)
    # Each is at most the bytes of a file, and there are no more of them: no sum overflows.
    found = int(column.sum(dtype=np.int64))
    require(found <= limit, f"{name} adds up to {found}, and at most {limit} can be")
    return found


def _check_rows(config: Config, s: Sections) -> None:
    n, size = s["row.open"].size, config.page_size
    columns = ("committed", "allocated", "decode_steps", "shared", "receiving", "namespace")
    sized(s, n, *(f"row.{name}" for name in columns))
    sized(s, config.max_requests + 1, "row.generation")
    within(s["row.generation"], "row.generation", 1, _MAX_GENERATION)
    within(s["row.open"], "row.open", 1, config.max_requests)
    require(np.diff(s["row.open"]) > 0, "row.open does not ascend")
    within(s["row.free"], "row.free", 1, config.max_requests)
    aborted = int(np.count_nonzero(s["pin.aborted"]))
    require(
        n + s["row.free"].size + aborted == config.max_requests,
        f"{n} open, {s['row.free'].size} free and {aborted} aborted rows are not "
        f"{config.max_requests}",
    )
    allocated = s["row.allocated"]
    within(allocated, "row.allocated", 0, config.row_pages * size)
    require(allocated % size == 0, "row.allocated is not whole pages")
    within(s["row.committed"], "row.committed", 0, allocated)
    within(s["row.decode_steps"], "row.decode_steps", 0, _MOST)
    pages = allocated // size
    within(s["row.shared"], "row.shared", 0, pages if config.prefix_cache else 0)
    within(s["row.receiving"], "row.receiving", 0, 1)
    sized(s, int(pages.sum()), "row.pages")
    within(s["row.pages"], "row.pages", 1, config.main_pages)
    within(s["page.free"], "page.free", 1, config.main_pages)
    owned = s["row.pages"].size - int(s["row.shared"].sum())
    cached = s["tree.pages"].size if config.prefix_cache else 0
    held = s["page.free"].size + owned + cached + s["pin.pages"].size
    require(
        held == config.main_pages,
        f"it names {held} pages of the main group, which has {config.main_pages}",
    )


def _values(s: Sections) -> list[Any]:
    kinds, sizes, whole = s["value.kind"], s["value.size"], s["value.bytes"]
    sized(s, kinds.size, "value.size")
    sized(s, total(sizes, "value.size", whole.size), "value.bytes")
    found, at = [], 0
    for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True):
        try:
            found.append(decoded(kind, whole[at : at + size].tobytes()))
        except ValueError as error:
            raise SnapshotError(f"value {len(found)} cannot be read: {error}") from None
        at += size
    require(len({(type(v), v) for v in found}) == len(found), "a value stands twice")
    return found


def _check_values(s: Sections, values: list[Any]) -> None:
    """Numbers of values name some, and of a kind that can stand there."""
    kinds = s["value.kind"]
    for name, good in (
        ("row.namespace", (INT, STR, BYTES)),
        ("tree.namespace", (INT, STR, BYTES)),
        ("pin.deadline", (INT, FLOAT)),
    ):
        if name in s:
            within(s[name], name, -1, len(values) - 1)
            named = s[name][s[name] >= 0]
            require(np.isin(kinds.take(named), good), f"{name} names a value of another kind")


def _check_tree(config: Config, s: Sections, tree: Mapping[str, int]) -> None:
    n = s["tree.parent"].size
    sized(s, n, *(f"tree.{name}" for name in ("namespace", "count", "last_use", "seq")))
    order: Int64 = np.arange(n)
    within(s["tree.parent"], "tree.parent", -1, order - 1)
    require(
        (s["tree.parent"] < 0) | (s["tree.namespace"] < 0), "a node below another has a namespace"
    )
    within(s["tree.count"], "tree.count", 1, config.main_pages)
    pages = total(s["tree.count"], "tree.count", s["tree.pages"].size)
    sized(s, pages, "tree.pages")
    sized(s, pages * config.page_size, "tree.tokens")
    within(s["tree.pages"], "tree.pages", 1, config.main_pages)
    within(s["tree.last_use"], "tree.last_use", 0, tree["clock"])
    within(s["tree.seq"], "tree.seq", 0, tree["seq"] - s["tree.count"].astype(np.int64))
    if config.window is not None:
        sized(s, pages, "tree.sides")
        within(s["tree.sides"], "tree.sides", 0, config.side_pages)
    sized(s, s["row.open"].size, "row.hold")
    within(s["row.hold"], "row.hold", -1, n - 1)
    spaces: list[int] = []
    for parent, space in zip(s["tree.parent"].tolist(), s["tree.namespace"].tolist(), strict=True):
        spaces.append(space if parent < 0 else spaces[parent])
    held = s["row.hold"] >= 0
    require(
        np.array(spaces, np.int32).take(s["row.hold"][held]) == s["row.namespace"][held],
        "a row shares pages of another namespace than its own",
    )
    sized(s, s["pin.handle"].size, "pin.hold")
    within(s["pin.hold"], "pin.hold", -1, n - 1)


def _check_pins(config: Config, s: Sections) -> None:
    n, size = s["pin.handle"].size, config.page_size
    names = ("length", "prefix", "writers", "deadline", "aborted", "ack_count", "page_count")
    sized(s, n, *(f"pin.{name}" for name in names))
    handle, aborted = s["pin.handle"], s["pin.aborted"]
    within(aborted, "pin.aborted", 0, 1)
    if config.prefix_cache:
        require((s["pin.hold"] < 0) | (aborted == 1), "a live request holds a path twice")
    require(np.unique(handle).size == n, "two requests to be received have one handle")
    rows, generations = handle & 0xFFFFFFFF, handle >> 32
    within(rows, "the row of pin.handle", 1, config.max_requests)
    within(generations, "the generation of pin.handle", 1, _MAX_GENERATION)
    # An aborted request is closed, which has counted its row on, and nobody has it since.
    expected = np.where(aborted == 1, generations % _MAX_GENERATION + 1, generations)
    require(s["row.generation"].take(rows) == expected, "pin.handle has another generation")
    is_open = np.zeros(config.max_requests + 1, np.bool_)
    is_open[s["row.open"]] = True
    require(is_open.take(rows) == (aborted == 0), "a row is open though its request was aborted")
    within(s["pin.length"], "pin.length", 0, config.row_pages * size)
    within(s["pin.prefix"], "pin.prefix", 0, s["pin.length"])
    live = (aborted == 0).nonzero()[0]
    at = np.searchsorted(s["row.open"], rows[live])
    length, prefix = s["pin.length"][live], s["pin.prefix"][live]
    require(s["row.receiving"][at] == 1, "a live request with writers is not marked")
    require(-(-length // size) * size == s["row.allocated"][at], "pin.length does not fit A")
    require(prefix == s["row.committed"][at], "pin.prefix is not C")
    require(prefix == s["row.shared"][at] * size, "pin.prefix is not what is shared")
    within(s["pin.writers"], "pin.writers", 1, _MOST)
    sized(s, total(s["pin.ack_count"], "pin.ack_count", s["pin.acks"].size), "pin.acks")
    require(s["pin.ack_count"] < s["pin.writers"], "all writers of a pin have acknowledged")
    within(s["pin.acks"], "pin.acks", 0, s["pin.writers"].repeat(s["pin.ack_count"]) - 1)
    owner = np.arange(n).repeat(s["pin.ack_count"])
    require((np.diff(owner) > 0) | (np.diff(s["pin.acks"]) > 0), "pin.acks does not ascend")
    sized(s, total(s["pin.page_count"], "pin.page_count", s["pin.pages"].size), "pin.pages")
    require((s["pin.page_count"] == 0) | (aborted == 1), "a live request's pages stand twice")
    within(s["pin.pages"], "pin.pages", 1, config.main_pages)


def _check_side(config: Config, s: Sections) -> None:
    """What rows, aborted requests and the cache hold of the second group."""
    if not config.side_pages:
        return
    n, most = s["row.open"].size, config.side_pages
    within(s["side.free"], "side.free", 1, most)
    sized(s, s["pin.handle"].size, "pin.side_count")
    sized(s, total(s["pin.side_count"], "pin.side_count", s["pin.sides"].size), "pin.sides")
    require((s["pin.side_count"] == 0) | (s["pin.aborted"] == 1), "live side pages stand twice")
    within(s["pin.sides"], "pin.sides", 1, most)
    pages = s["row.allocated"] // config.page_size
    if config.sparse is None:
        first, stop = s["window.first"], s["window.stop"]
        sized(s, n, "window.first", "window.stop")
        within(stop, "window.stop", 0, pages)
        within(first, "window.first", 0, stop)
        sized(s, int((stop - first).sum()), "window.pages")
        within(s["window.pages"], "window.pages", 1, most)
        begin = np.minimum(np.maximum(first, s["row.shared"]), stop)
        own = int((stop - begin).sum())
        own += int(np.count_nonzero(s["tree.sides"])) if config.prefix_cache else 0
    else:
        own = _check_device_pages(config, s, pages)
    held = s["side.free"].size + s["pin.sides"].size + own
    require(held == most, f"it names {held} pages of the second group, which has {most}")


def _check_device_pages(config: Config, s: Sections, pages: Int64) -> int:
    """The pages that rows have on the device; how many these are."""
    assert config.sparse is not None
    n, most = s["row.open"].size, config.side_pages
    sized(s, n, "device.count", "device.first", "device.stop", "device.flags")
    within(s["device.count"], "device.count", 0, pages)
    within(s["device.stop"], "device.stop", 0, pages)
    within(s["device.first"], "device.first", 0, s["device.stop"])
    flags, scratch = s["device.flags"], -(-config.sparse.draft_scratch // config.page_size)
    every = SPARSE_FLAG | LONG_FLAG | (SCRATCH_FLAG if scratch else 0)
    within(flags, "device.flags", 0, every)
    sized(s, int(s["device.count"].sum()), "device.pages")
    within(s["device.pages"], "device.pages", 1, most)
    sized(s, int(np.count_nonzero(flags & SCRATCH_FLAG)) * scratch, "device.scratch")
    within(s["device.scratch"], "device.scratch", 1, most)
    return s["device.pages"].size + s["device.scratch"].size


def _high_water(config: Config, s: Sections, plain: Any) -> list[int]:
    groups = [(config.main_pages, s["page.free"].size)]
    if config.side_pages:
        groups.append((config.side_pages, s["side.free"].size))
    if not isinstance(plain, list) or len(plain) != len(groups):
        raise SnapshotError(f"its high_water is {shown(plain)}, not a number for each group")
    return [
        integer(mark, "high_water", pages - free, pages)
        for mark, (pages, free) in zip(plain, groups, strict=True)
    ]


def _refusals(plain: Any) -> dict[str, int]:
    if not isinstance(plain, dict) or len(plain) > _MOST_REFUSALS:
        raise SnapshotError(f"its refusals are {shown(plain)}, not counts by name")
    for name, count in plain.items():
        require(name.isidentifier() and len(name) <= _MOST_NAME, f"{shown(name)} is no error")
        integer(count, f"refusals.{name}", 0, _MOST)
    return plain
