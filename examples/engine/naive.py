"""What to compare with: a per-request allocator in Python, behind the calls the engine makes.

A list of free pages, a list of pages for each request, and a small tensor for each write: as
engines begin. It has no prefix cache, no plans that can be refused, and frees at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from examples.engine.engine import Settings
from examples.engine.model import Model
from examples.engine.scheduler import Array, Scheduler


class Ready:
    """Writes go to the current stream, in order: there is nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to do."""


class NaivePlan:
    """What one call will do."""

    ready, fits = Ready(), True

    def __init__(self, handles: Array, start: Array, stop: Array, evict: bool) -> None:
        self.handles, self.start, self.stop, self.evict = handles, start, stop, evict


class NaiveAllocator:
    """Pages from lists, request by request."""

    def __init__(self, settings: Settings, model: Model) -> None:
        self.page_size, self.window = settings.page_size, model.config.window
        self.max_requests = 2 * settings.running
        self.row_width = -(-(settings.context + 5) // self.page_size) * self.page_size
        self.device = model.device
        shape = (self.max_requests + 1, self.row_width)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.window_table = torch.zeros_like(self.req_to_token)
        slots = (settings.pages + 1) * self.page_size
        self.full_to_window = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.free = list(range(settings.pages, 0, -1))
        self.window_free = list(range(settings.window_pages, 0, -1))
        self.free_rows = list(range(self.max_requests, 0, -1))
        self.pages: dict[int, list[int]] = {}
        self.window_pages: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.opened = 0

    # -- the calls of the engine -----------------------------------------------------------

    def open(self, count: int = 1, namespace: Any = None) -> list[int]:
        """Take rows."""
        found = []
        for _ in range(count):
            self.opened += 1
            handle = self.opened << 32 | self.free_rows.pop()
            self.pages[handle], self.window_pages[handle], self.length[handle] = [], [], 0
            found.append(handle)
        return found

    def batch(self, x: Any) -> Array:
        """The handles themselves."""
        return np.array(x, np.int64)

    def rows(self, x: Any) -> Array:
        """Rows of the table."""
        return np.array([int(handle) & 0xFFFFFFFF for handle in np.atleast_1d(x)], np.int64)

    def committed(self, x: Any) -> Array:
        """Tokens of each."""
        return np.array([self.length[int(handle)] for handle in np.atleast_1d(x)], np.int64)

    def plan(self, extend: Any = None, decode: Any = None, evict_window: bool = False) -> NaivePlan:
        """Nothing is counted ahead."""
        handles, amount = extend if decode is None else decode
        start = self.committed(handles)
        stop = np.asarray(amount) if decode is None else start + amount
        return NaivePlan(handles, start, stop, evict_window)

    def apply(self, plan: NaivePlan, out: Any) -> None:
        """Request by request."""
        slots: list[int] = []
        for handle, start, stop in zip(
            np.asarray(plan.handles).tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True
        ):
            if plan.evict:
                self._evict(handle, start)
            while len(self.pages[handle]) * self.page_size < stop:
                self._grow(handle)
            self.length[handle] = stop
            pages = self.pages[handle]
            for position in range(start, stop):
                page = pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
        out.copy_(torch.tensor(slots, dtype=torch.int64), non_blocking=True)

    def release(self, x: Any, tokens: Any = None, after: Any = None) -> None:
        """Pages and rows go back; the stream keeps the order."""
        for handle in np.atleast_1d(x).tolist():
            self.free.extend(reversed(self.pages.pop(handle)))
            self.window_free.extend(page for page in self.window_pages.pop(handle) if page)
            self.free_rows.append(handle & 0xFFFFFFFF)
            del self.length[handle]

    def settle(self) -> None:
        """Nothing waits."""

    # -- inside ----------------------------------------------------------------------------

    def _grow(self, handle: int) -> None:
        page, beside, size = self.free.pop(), self.window_free.pop(), self.page_size
        row, first = handle & 0xFFFFFFFF, len(self.pages[handle]) * size
        slots = torch.arange(page * size, (page + 1) * size, dtype=torch.int32, device=self.device)
        window = slots + (beside - page) * size
        self.req_to_token[row, first : first + size] = slots
        self.window_table[row, first : first + size] = window
        self.full_to_window[page * size : (page + 1) * size] = window
        self.pages[handle].append(page)
        self.window_pages[handle].append(beside)

    def _evict(self, handle: int, length: int) -> None:
        pages = self.window_pages[handle]
        for number in range((length - self.window) // self.page_size - 1, -1, -1):
            if not pages[number]:
                break
            self.window_free.append(pages[number])
            pages[number] = 0


class NaiveScheduler(Scheduler):
    """Admits by counting free pages."""

    def _has_room(self, first: int, match: Any) -> bool:
        needed = -(-first // self.alloc.page_size) + self.running.size
        return min(len(self.alloc.free), len(self.alloc.window_free)) >= needed
