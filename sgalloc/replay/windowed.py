"""Sliding window attention in the replay: what requests may need, and what the window saved."""

from __future__ import annotations

from sgalloc.allocator import KVAllocator
from sgalloc.groups.window import SlidingWindow
from sgalloc.plan import Plan
from sgalloc.replay.options import Options

GROUP = "window"


class WindowNeeds:
    """Bounds on the window pages of a request, for admission.

    Attributes:
        prefill: pages that a request holds at most while it is prefilled in chunks.
        alone: pages that it holds at most from its first chunk to its end, those of its own
            prompt included that it shares with the prefix cache.
    """

    def __init__(self, settings: SlidingWindow, options: Options) -> None:
        self._size = size = options.page_size
        self._settings = settings
        kept = settings.tokens
        if options.prefix_cache:
            kept = -(-max(kept, size) // size) * size
        # Both ends may lie inside a page, and the frontier may lag by the cadence.
        slack = 1 + (settings.evict_every - 1) // size
        self.prefill = -(-(kept + options.chunk) // size) + slack
        step = max(options.chunk, options.reserve, 1)
        self.alone = -(-(kept + step) // size) + slack
        if options.prefix_cache:
            self.alone += kept // size + slack

    def check(self, longest: int) -> None:
        """Refuse a group that cannot hold one step of a request of ``longest`` tokens.

        Raises:
            ValueError: it is too small.
        """
        need = self.of(longest)
        if need > self._settings.num_pages:
            raise ValueError(
                f"window_pages is {self._settings.num_pages}: a request of {longest} tokens may "
                f"need {need} window pages at once, so give at least {need}, a smaller window or "
                "smaller chunks"
            )

    def of(self, tokens: int) -> int:
        """Pages that a request of so many tokens may need at most, all alone."""
        return min(-(-tokens // self._size), self.alone)

    def reach(self, tokens: int) -> int:
        """Pages that the prefill of the first ``tokens`` may hold at most."""
        return min(-(-tokens // self._size), self.prefill)


def default_pages(num_pages: int, page_size: int, tokens: int, chunk: int) -> int:
    """Window pages where none are given: a quarter of the pool, but room for two chunks."""
    least = 2 * (-(-(tokens + chunk) // page_size) + 2)
    return max(1, min(num_pages, max(num_pages // 4, least)))


def short_of_side_alone(alloc: KVAllocator, plan: Plan) -> bool:
    """Whether it is the second group, and not the main one, that lacks pages for ``plan``."""
    lacks = [
        need - plan.gain[group] > alloc.available(group, counting_cache=True)
        for group, need in plan.need.items()
    ]
    return lacks[1:] == [True] and not lacks[0]


def evict(alloc: KVAllocator, handle: int) -> int:
    """Let what left the window of a request go; how many pages came back."""
    before = alloc.available(GROUP)
    alloc.evict_window(handle)
    return alloc.available(GROUP) - before
