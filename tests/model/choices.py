"""Choices from whole numbers: configurations, prompts, and the forms that arguments take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from model.pair import Config, Event, Flag, Future, Pair, Waits, WindowConfig

NAMESPACES = (None, 7, "7", b"7")


class Chooser:
    """Choices from whole numbers: a seeded generator in a walk, Hypothesis in the machine."""

    def __init__(self, number: Callable[[int, int], int]) -> None:
        self.number = number

    def pick(self, things: Sequence[Any]) -> Any:
        return things[self.number(0, len(things) - 1)]

    def flag(self, one_in: int) -> bool:
        return self.number(1, one_in) == one_in

    def some(self, things: Sequence[Any], most: int = 4) -> list[Any]:
        left = list(things)
        count = 0 if not left or self.flag(12) else self.number(1, min(most, len(left)))
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]


def any_config(choose: Chooser) -> Config:
    """Small pools, so that nearly every call meets pressure."""
    page_size = choose.pick((1, 2, 3, 16, 64))
    width = choose.number(2, 8) * page_size + choose.number(0, page_size - 1)
    return Config(
        num_pages=choose.number(3, 14),
        page_size=page_size,
        max_requests=choose.number(1, 6),
        row_width=width,
        prefix_cache=choose.number(0, 3) > 0,
        window=any_window(choose, page_size) if choose.flag(2) else None,
    )


def any_window(choose: Chooser, page_size: int) -> WindowConfig:
    """Windows below, of and above a page; a pool that is now the tight one, now not."""
    return WindowConfig(
        tokens=choose.pick((1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size)),
        pages=choose.number(2, 14),
        slot_map=choose.number(0, 3) > 0,
        evict_every=choose.pick((1, 1, 2 * page_size)),
    )


def text(pair: Pair, choose: Chooser) -> list[int]:
    """A prompt as long as a row, of few kinds of pages, so that prompts often begin alike."""
    size = pair.config.page_size
    pages = pair.config.row_width // size + 1
    code = choose.number(0, 4**pages - 1)
    kinds = ([0] * size, [0] * size, [1] * size, [0] * (size - 1) + [1])
    return [token for n in range(pages) for token in kinds[code // 4**n % 4]]


def shape(pair: Pair, choose: Chooser) -> Callable[[list[int]], Any]:
    kind = choose.number(0, 4)

    def shaped(handles: list[int]) -> Any:
        if kind == 1 and len(handles) == 1:
            return handles[0]
        if kind == 2:
            return np.array(handles, dtype=np.int64)
        if kind == 3:
            return pair.real.batch(handles)
        return tuple(handles) if kind == 4 else list(handles)

    return shaped


def amounts(choose: Chooser) -> Callable[[list[int]], Any]:
    kind = choose.number(0, 3)

    def shaped(numbers: list[int]) -> Any:
        if kind == 1 and len(set(numbers)) == 1:
            return numbers[0]
        if kind > 1:
            return np.array(numbers, dtype=np.int32 if kind == 2 else np.int64)
        return list(numbers)

    return shaped


def event(pair: Pair, choose: Chooser) -> Waits | None:
    if not choose.flag(3):
        return None
    if not pair.events or choose.flag(2):
        pair.events.append(choose.pick((Event, Event, Flag, Future))())
    return choose.pick(pair.events[-4:])
