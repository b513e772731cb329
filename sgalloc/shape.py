"""What an allocator is made with, checked before anything is allocated."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgalloc.device import SideTables
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.inputs import shown, whole_number

MAX_SLOT = (1 << 31) - 1
_MAX_ENTRIES = 1 << 60


class Shape(NamedTuple):
    """The numbers of an allocator, and the tables beside its main one.

    Attributes:
        main_pages: pages of the group that the table names: the logical one of a sparse
            allocator, else the full one.
        side: the tables of a second group; None without one.
    """

    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    main_pages: int
    side: SideTables | None


def checked_shape(
    num_pages: Any,
    page_size: Any,
    max_requests: Any,
    row_width: Any,
    window: Any,
    sparse: Any,
    prefix_cache: Any,
    page_table: Any,
) -> Shape:
    """The arguments of `KVAllocator`, if they can be had together.

    Raises:
        TypeError: one is of another type.
        ValueError: one is out of range, or two do not go together.
    """
    num_pages = whole_number(num_pages, "num_pages", 1, MAX_SLOT)
    page_size = whole_number(page_size, "page_size", 1, MAX_SLOT)
    max_requests = whole_number(max_requests, "max_requests", 1, MAX_SLOT - 1)
    row_width = whole_number(row_width, "row_width", 1, MAX_SLOT)
    _check_slots(num_pages, page_size, "num_pages")
    if row_width < page_size:
        raise ValueError(
            f"row_width={row_width} holds no page of page_size={page_size}: "
            "make rows at least one page wide"
        )
    if (max_requests + 1) * row_width > _MAX_ENTRIES:
        raise ValueError(
            f"max_requests={max_requests} rows of row_width={row_width} cannot be addressed: "
            "lower one of them"
        )
    if not isinstance(prefix_cache, bool):
        raise TypeError(f"prefix_cache must be True or False, got {shown(prefix_cache)}")
    if not isinstance(page_table, bool):
        raise TypeError(f"page_table must be True or False, got {shown(page_table)}")
    if window is not None and not isinstance(window, SlidingWindow):
        raise TypeError(f"window must be a SlidingWindow or None, got {shown(window)}")
    main_pages, side = num_pages, None
    if sparse is not None:
        main_pages = _logical_pages(sparse, num_pages, page_size)
        if window is not None or prefix_cache:
            other = "window=" if window is not None else "prefix_cache=True"
            raise ValueError(
                f"{other} does not go with sparse=: its pages are read on the device, where a "
                "sparse request keeps none of them; leave one out"
            )
        side = SideTables(False, (main_pages + 1) * page_size)
    if window is not None:
        _check_slots(window.num_pages, page_size, "window.num_pages")
        side = SideTables(True, (num_pages + 1) * page_size if window.slot_map else 0)
    return Shape(num_pages, page_size, max_requests, row_width, main_pages, side)


def _check_slots(num_pages: int, page_size: int, name: str) -> None:
    if (num_pages + 1) * page_size - 1 > MAX_SLOT:
        raise ValueError(
            f"{name}={num_pages} of page_size={page_size} need slots past 2**31 - 1, the "
            f"last that int32 holds: use at most {(MAX_SLOT + 1) // page_size - 1} pages"
        )


def _logical_pages(sparse: Any, num_pages: int, page_size: int) -> int:
    """Pages of the logical group, if their slots can be addressed."""
    if not isinstance(sparse, Sparse):
        raise TypeError(f"sparse must be a Sparse or None, got {shown(sparse)}")
    logical = sparse.logical_pages(num_pages)
    _check_slots(logical, page_size, "sparse.ratio * num_pages")
    return logical
