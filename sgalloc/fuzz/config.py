"""Configurations to be fuzzed, and choices made from whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from sgalloc.allocator import KVAllocator
from sgalloc.fuzz.reference import Reference, SparseSettings, WindowSettings
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow

PAGE_SIZES = (1, 2, 3, 16, 64, 128)
_T = TypeVar("_T")


class Chooser:
    """Choices from whole numbers ``number(low, high)``: a seeded generator's, or Hypothesis's."""

    def __init__(self, number: Callable[[int, int], int]) -> None:
        self.number = number

    def pick(self, things: Sequence[_T]) -> _T:
        """One of them."""
        return things[self.number(0, len(things) - 1)]

    def flag(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.number(1, one_in) == one_in

    def some(self, things: Sequence[_T], most: int = 4) -> list[_T]:
        """A few of them, in any order; rarely none."""
        left = list(things)
        count = 0 if not left or self.flag(12) else self.number(1, min(most, len(left)))
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]


@dataclass(frozen=True)
class Config:
    """What an allocator and its reference are made with."""

    num_pages: int
    page_size: int
    max_requests: int
    row_width: int
    prefix_cache: bool = False
    window: WindowSettings | None = None
    sparse: tuple[Fraction, int, int] | None = None
    """Ratio, tokens of a buffer, tokens of scratch."""
    page_table: bool = False

    def reference(self) -> Reference:
        """A naive allocator."""
        sparse = None
        if self.sparse is not None:
            ratio, buffer, scratch = self.sparse
            sparse = SparseSettings(int(ratio * self.num_pages), buffer, scratch)
        return Reference(
            self.num_pages,
            self.page_size,
            self.max_requests,
            self.row_width,
            self.prefix_cache,
            self.window,
            sparse,
        )

    def allocator(self, device: str, **more: Any) -> KVAllocator:
        """The real one; ``more`` are further arguments of `KVAllocator`."""
        window = sparse = None
        if self.window is not None:
            w = self.window
            window = SlidingWindow(w.tokens, w.pages, w.slot_map, w.evict_every)
        if self.sparse is not None:
            sparse = Sparse(*self.sparse)
        return KVAllocator(
            self.num_pages,
            self.page_size,
            self.max_requests,
            self.row_width,
            device,
            window,
            sparse,
            prefix_cache=self.prefix_cache,
            page_table=self.page_table,
            **more,
        )


def any_config(choose: Chooser) -> Config:
    """Small pools, so that nearly every call meets pressure; every group has its turn."""
    size = choose.pick(PAGE_SIZES)
    width = choose.number(2, 8) * size + choose.number(0, size - 1)
    pages, rows = choose.number(3, 14), choose.number(1, 8)
    if choose.flag(8):
        pages, rows = choose.number(15, 40), choose.number(6, 12)
    page_table = choose.flag(3)
    if choose.flag(4):
        ratio = choose.pick((Fraction(1), Fraction(3, 2), Fraction(5, 2), Fraction(4)))
        buffer, scratch = choose.number(1, 3 * size), choose.pick((0, 0, 1, size + 1))
        sparse = (ratio, buffer, scratch)
        return Config(pages, size, rows, width, sparse=sparse, page_table=page_table)
    cache = choose.number(0, 3) > 0
    window = any_window(choose, size) if choose.flag(2) else None
    return Config(pages, size, rows, width, cache, window, page_table=page_table)


def any_window(choose: Chooser, page_size: int) -> WindowSettings:
    """Windows below, of and above a page; a pool that is now the tight one, now not."""
    tokens = (1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size)
    return WindowSettings(
        choose.pick(tokens),
        choose.number(2, 14),
        choose.number(0, 3) > 0,
        choose.pick((1, 1, 2 * page_size)),
    )
