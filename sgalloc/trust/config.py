"""The configuration of an allocator in a snapshot's header."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from sgalloc.core import Core
from sgalloc.errors import SnapshotError
from sgalloc.groups.sparse import DevicePages, Sparse
from sgalloc.groups.window import SlidingWindow, Window

_MOST = (1 << 31) - 1
MAX_TABLE_BYTES = 1 << 34


class Config(NamedTuple):
    """What an allocator is made with, but for where it lives and its streams."""

    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    prefix_cache: bool
    page_table: bool
    window: SlidingWindow | None
    sparse: Sparse | None

    @property
    def main_pages(self) -> int:
        """Pages of the group that the table names."""
        sparse = self.sparse
        return self.num_pages if sparse is None else sparse.logical_pages(self.num_pages)

    @property
    def side_pages(self) -> int:
        """Pages of the second group; 0 without one."""
        if self.sparse is not None:
            return self.num_pages
        return 0 if self.window is None else self.window.num_pages

    @property
    def row_pages(self) -> int:
        """Pages of a row."""
        return self.row_width // self.page_size

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables, page lists and maps, on host and device, int32 each."""
        lists = self.row_pages * (1 + self.page_table + (self.side_pages > 0))
        tables = self.row_width * (1 + (self.window is not None))
        mapped = self.sparse is not None or (self.window is not None and self.window.slot_map)
        entries = (self.max_requests + 1) * (lists + tables)
        return 4 * (entries + mapped * (self.main_pages + 1) * self.page_size)


def to_plain(core: Core) -> dict[str, Any]:
    """The configuration of ``core``, as JSON can hold it."""
    ledger, side = core.ledger, core.side
    plain: dict[str, Any] = {
        "num_pages": side.pool.num_pages if isinstance(side, DevicePages) else core.pool.num_pages,
        "page_size": ledger.page_size,
        "max_requests": ledger.max_requests,
        "row_width": ledger.row_width,
        "prefix_cache": core.tree is not None,
        "page_table": core.device.page_table is not None,
        "window": None,
        "sparse": None,
    }
    if isinstance(side, Window):
        window = side.settings
        plain["window"] = {
            "tokens": window.tokens,
            "num_pages": window.num_pages,
            "slot_map": window.slot_map,
            "evict_every": window.evict_every,
        }
    if isinstance(side, DevicePages):
        sparse = side.settings
        plain["sparse"] = {
            "ratio": _plain_ratio(sparse.ratio),
            "device_buffer": sparse.device_buffer,
            "draft_scratch": sparse.draft_scratch,
        }
    return plain


def from_plain(config: Config) -> dict[str, Any]:
    """The arguments for `KVAllocator`."""
    return config._asdict()


def checked_config(plain: Any, max_table_bytes: int) -> Config:
    """The configuration in a header, if an allocator can be made with it.

    Args:
        plain: as `to_plain` gave it.
        max_table_bytes: most bytes of tables that it may ask for.

    Raises:
        SnapshotError: naming the field.
    """
    found = fields(plain, "config", *Config._fields)
    number = {
        name: integer(found[name], name, 1, _MOST - (name == "max_requests"))
        for name in ("num_pages", "page_size", "max_requests", "row_width")
    }
    for name in ("prefix_cache", "page_table"):
        if not isinstance(found[name], bool):
            raise SnapshotError(f"its {name} is {shown(found[name])}, not true or false")
    window = sparse = None
    try:
        if found["window"] is not None:
            parts = ("tokens", "num_pages", "slot_map", "evict_every")
            window = SlidingWindow(**fields(found["window"], "window", *parts))
        if found["sparse"] is not None:
            inner = fields(found["sparse"], "sparse", "ratio", "device_buffer", "draft_scratch")
            sparse = Sparse(**{**inner, "ratio": _ratio(inner["ratio"])})
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"its configuration cannot be served: {error}") from None
    config = Config(
        **number,
        prefix_cache=found["prefix_cache"],
        page_table=found["page_table"],
        window=window,
        sparse=sparse,
    )
    size = config.page_size
    for name, pages in (("main group", config.main_pages), ("second group", config.side_pages)):
        if (pages + 1) * size - 1 > _MOST:
            raise SnapshotError(f"its {name} of {pages} pages of {size} slots passes int32")
    if config.row_width < size:
        raise SnapshotError(f"its rows of {config.row_width} slots hold no page of {size}")
    if sparse is not None and (window is not None or config.prefix_cache):
        raise SnapshotError("it is sparse, and has a window or a prefix cache besides")
    if config.table_bytes > max_table_bytes:
        raise SnapshotError(
            f"{config.max_requests} rows of {config.row_width} slots need tables of "
            f"{config.table_bytes} bytes: pass a larger max_table_bytes than {max_table_bytes} if "
            "that can be"
        )
    return config


def fields(value: Any, where: str, *names: str) -> Mapping[str, Any]:
    """``value``, if it is an object with exactly these fields.

    Raises:
        SnapshotError: it is not.
    """
    if not isinstance(value, dict) or set(value) != set(names):
        raise SnapshotError(f"its {where} is {shown(value)}, not an object of {', '.join(names)}")
    return value


def integer(value: Any, name: str, low: int, high: int) -> int:
    """``value``, if it is an integer within these bounds.

    Raises:
        SnapshotError: it is not.
    """
    if type(value) is not int or not low <= value <= high:
        raise SnapshotError(f"its {name} is {shown(value)}, not an integer from {low} to {high}")
    return value


def shown(value: Any) -> str:
    """A value of a header, in so many characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain_ratio(ratio: float | Fraction) -> list[str]:
    if isinstance(ratio, Fraction):
        return ["fraction", hex(ratio.numerator), hex(ratio.denominator)]
    return ["int", hex(ratio)] if isinstance(ratio, int) else ["float", ratio.hex()]


def _ratio(plain: Any) -> float | Fraction:
    if isinstance(plain, list) and all(isinstance(part, str) for part in plain):
        kind, *parts = plain or [""]
        if kind == "int" and len(parts) == 1:
            return int(parts[0], 16)
        if kind == "float" and len(parts) == 1:
            return float.fromhex(parts[0])
        if kind == "fraction" and len(parts) == 2:
            return Fraction(int(parts[0], 16), int(parts[1], 16))
    raise SnapshotError(f"its ratio is {shown(plain)}, no number")
