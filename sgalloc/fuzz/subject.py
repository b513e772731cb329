"""One real allocator, what its pages, rows and handles are called in the reference, and whether
both hold the same.

Ids are compared up to renaming. The reference never uses a number twice, so that each of its
numbers has one id for life, and an id may get a second number only when the first has gone back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.allocator import KVAllocator
from sgalloc.errors import AllocError, LawViolation
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.reference import Reference, Request
from sgalloc.ledger import Batch

_ROW_MASK = (1 << 32) - 1
_TABLE_EVERY = 8


class Disagreement(Exception):
    """The allocator and the reference differ, or one of them broke its own laws."""


def on_host(array: Any) -> NDArray[Any]:
    """An array of either device as NumPy's."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    return cupy.asnumpy(array)  # type: ignore[no-any-return]


class Subject:
    """A real allocator beside a reference.

    Attributes:
        alloc: the allocator.
        handles: handle of each label, kept when the request is gone.
        batches, plans, matches: what it gave out, by label.
    """

    def __init__(self, alloc: KVAllocator, config: Config, name: str = "the allocator") -> None:
        self.alloc = alloc
        self.config = config
        self.name = name
        self.handles: dict[int, int] = {}
        self.batches: dict[int, Batch] = {}
        self.plans: dict[int, Any] = {}
        self.matches: dict[int, Any] = {}
        self.refusals: Counter[str] = Counter()
        groups = alloc.stats().groups
        self._names: dict[str, dict[int, int]] = {group: {} for group in groups}
        self._back: dict[str, dict[int, int]] = {group: {} for group in groups}
        self._row_of: dict[int, int] = {}
        self.is_twin = False
        self._offsets = np.arange(config.page_size, dtype=np.int32)
        self._on_cpu = alloc.device == "cpu"
        self._looks = 0

    # -- telling a difference --------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Report a difference."""
        raise Disagreement(message)

    def same(self, what: str, real: Any, ref: Any) -> None:
        """Both answers are equal."""
        if real != ref:
            raise Disagreement(f"{what}: {self.name} says {real!r}, the reference {ref!r}")

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that a refused call must leave as it was."""
        alloc, stats = self.alloc, self.alloc.stats()
        tables = [alloc.req_to_token]
        if self.config.page_table:
            tables.append(alloc.page_table)
        if self.config.window is not None:
            tables.append(alloc.window_table)
            if self.config.window.slot_map:
                tables.append(alloc.full_to_window)
        if self.config.sparse is not None:
            tables.append(alloc.logical_to_device)
        return (
            alloc.digest(),
            list(stats.groups.values()),
            stats.rows,
            stats.committed,
            stats.allocated,
            stats.staging,
            [on_host(table).tobytes() for table in tables],
        )

    # -- names -----------------------------------------------------------------------------

    def opened(self, labels: Sequence[int], handles: Sequence[int]) -> None:
        """Note the handles of new requests."""
        self.same("number of handles", len(handles), len(labels))
        known = set(self.handles.values())
        for label, handle in zip(labels, handles, strict=True):
            if handle in known or handle >> 32 < 1:
                self.fail(f"handle {handle:#x} was used before, or has no generation")
            self.handles[label] = handle

    def page(self, group: str, number: int) -> int | None:
        """The id of a page of the reference, if it was ever seen."""
        return self._names[group].get(number)

    def _named(self, ref: Reference, group: str, mine: Sequence[int], ids: Sequence[int]) -> None:
        """These pages of the reference are these ids."""
        if len(mine) != len(ids):
            self.fail(f"pages of {group}: {self.name} has {ids}, the reference {len(mine)} pages")
        names, back, pool = self._names[group], self._back[group], ref.pools[group]
        for number, page in zip(mine, ids, strict=True):
            known = names.get(number)
            if known == page:
                continue
            if known is not None:
                self.fail(f"a page of {group} was {known}, and is {page} now")
            if not 1 <= page <= pool.total:
                self.fail(f"page {page} of {group} does not exist")
            if back.get(page) in pool.out:
                self.fail(f"page {page} of {group} was handed out a second time")
            names[number], back[page] = page, number

    def slots(self, ids: Any) -> NDArray[np.int32]:
        """The slots of these pages, in order."""
        pages = np.asarray(ids, np.int32)[:, None] * np.int32(self.config.page_size)
        return (pages + self._offsets).reshape(-1)

    # -- comparing -------------------------------------------------------------------------

    def compare_rooms(self, ref: Reference) -> None:
        """What is available in each group."""
        free, counting = ref.rooms(False), ref.rooms(True)
        for group in ref.pools:
            self.same(f"available({group})", self.alloc.available(group), free[group])
            self.same(
                f"available({group}, counting_cache=True)",
                self.alloc.available(group, counting_cache=True),
                counting[group],
            )

    def compare_requests(self, ref: Reference, labels: Sequence[int], tables: bool) -> None:
        """C, A, steps, pages of every group and, with ``tables``, rows of these requests."""
        labels = [label for label in labels if label in ref.requests]
        if not labels:
            return
        alloc, size = self.alloc, self.config.page_size
        handles = [self.handles[label] for label in labels]
        requests = [ref.requests[label] for label in labels]
        self.same("C", alloc.committed(handles).tolist(), [r.committed for r in requests])
        extents = [len(r.pages) * size for r in requests]
        self.same("A", alloc.allocated(handles).tolist(), extents)
        self.same("decode_index", alloc.decode_index(handles).tolist(), [r.steps for r in requests])
        if ref.window is not None:
            frontiers = [r.frontier * size for r in requests]
            self.same("frontier", alloc.frontier(handles).tolist(), frontiers)
        table = on_host(alloc.req_to_token) if tables else None
        beside = on_host(alloc.window_table) if tables and ref.window is not None else None
        numbers = on_host(alloc.page_table) if tables and self.config.page_table else None
        for label, handle, request, extent in zip(labels, handles, requests, extents, strict=True):
            row = handle & _ROW_MASK
            if self._row_of.get(row) != label:
                self._new_row(ref, row, label)
            pages = alloc.pages(handle, 0, extent)
            self._named(ref, ref.main, request.pages, pages.tolist())
            if table is not None and not np.array_equal(table[row, :extent], self.slots(pages)):
                self.fail(f"row {row} of the table is not that of pages {pages.tolist()}")
            if numbers is not None:
                shown = numbers[row, : pages.size].tolist()
                self.same(f"row {row} of the page table", shown, pages.tolist())
            if ref.window is not None:
                self._compare_window(ref, request, handle, row, beside)
            elif ref.sparse is not None:
                self._compare_device(ref, request, handle)

    def _new_row(self, ref: Reference, row: int, label: int) -> None:
        if not 1 <= row <= self.config.max_requests:
            self.fail(f"row {row} does not exist")
        if self._row_of.get(row) in ref.rows_out:
            self.fail(f"row {row} was handed out a second time")
        self.same("row of the handle", int(self.alloc.rows(self.handles[label])[0]), row)
        self._row_of[row] = label

    def _compare_window(
        self, ref: Reference, request: Request, handle: int, row: int, table: Any
    ) -> None:
        shown = self.alloc.window_pages(handle).tolist()
        numbers = sorted(request.window)
        self.same("window pages", [n for n, page in enumerate(shown) if page], numbers)
        self._named(
            ref, "window", [request.window[n] for n in numbers], [shown[n] for n in numbers]
        )
        if table is None:
            return
        if len(numbers) < len(request.pages) - request.frontier:
            # The entries of a page that a trim cut say nothing.
            shown = shown[: request.frontier]
        expected = self.slots(shown).reshape(-1, self.config.page_size)
        expected[[page == 0 for page in shown]] = 0
        if not np.array_equal(table[row, : expected.size], expected.reshape(-1)):
            self.fail(f"row {row} of the window table is not that of pages {shown}")

    def _compare_device(self, ref: Reference, request: Request, handle: int) -> None:
        alloc = self.alloc
        shown = alloc.device_pages(handle).tolist()
        numbers = sorted(request.shown)
        self.same("mapped pages", [n for n, page in enumerate(shown) if page], numbers)
        self._named(ref, "device", [request.shown[n] for n in numbers], [shown[n] for n in numbers])
        buffer: list[int] = []
        if request.sparse:
            buffer = request.device[:-1] if request.long else request.device
        self._named(ref, "device", buffer, alloc.buffer_pages(handle).tolist())
        self._named(ref, "device", request.scratch, alloc.scratch_pages(handle).tolist())

    # -- comparing all of it ---------------------------------------------------------------

    def compare_all(self, ref: Reference) -> None:
        """Both laws, and everything that can be seen."""
        self._looks += 1
        alloc = self.alloc
        try:
            alloc.check(device=self._on_cpu or self._looks % _TABLE_EVERY == 0)
        except LawViolation as violation:
            self.fail(f"check(): {violation}")
        self.compare_requests(ref, list(ref.requests), tables=True)
        stats = alloc.stats()
        for group, counts in ref.group_counts().items():
            held = stats.groups[group]
            for name, number in counts.items():
                if self.is_twin and name in ("high_water", "evicted"):
                    continue  # These count from the beginning.
                self.same(f"stats.{group}.{name}", getattr(held, name), number)
        for name, number in ref.row_counts().items():
            self.same(f"stats.rows.{name}", getattr(stats.rows, name), number)
        self.same("stats.refusals", dict(stats.refusals), dict(self.refusals))
        requests = list(ref.requests.values())
        self.same("stats.committed", stats.committed, sum(r.committed for r in requests))
        pages = sum(len(r.pages) for r in requests)
        self.same("stats.allocated", stats.allocated, pages * self.config.page_size)
        self._compare_receiving(ref)
        self._compare_owners(ref)
        self._compare_map(ref)
        tables = [alloc.req_to_token] + ([alloc.window_table] if ref.window is not None else [])
        if any(on_host(table[0]).any() for table in tables):
            self.fail("the padding row of a table was written")

    def _compare_receiving(self, ref: Reference) -> None:
        for label, request in ref.receiving.items():
            seen = self.alloc.receiving(self.handles[label])
            if seen is None:
                self.fail(f"request {label} is received no more")
                return
            self.same(
                f"receiving({label})",
                (seen.length, seen.prefix, seen.writers, seen.deadline, seen.aborted),
                (
                    request.length,
                    request.prefix,
                    request.writers,
                    request.deadline,
                    request.aborted,
                ),
            )
            acks = [n for n in range(request.writers) if n not in request.missing]
            self.same(f"receiving({label}).acks", list(seen.acks), acks)

    def _compare_owners(self, ref: Reference) -> None:
        owners = self.alloc.owners().tolist()
        rows = {id(r): self.handles[label] & _ROW_MASK for label, r in ref.requests.items()}
        names, expected = self._names[ref.main], [0] * len(owners)
        for number, who in ref.holders():
            page = names.get(number)
            if page is None:
                self.fail("a page that is out was never seen")
                return
            expected[page] = rows[id(who)] if isinstance(who, Request) else who
        self.same("owners()", owners, expected)

    def _compare_map(self, ref: Reference) -> None:
        if ref.sparse is not None:
            table = on_host(self.alloc.logical_to_device)
        elif ref.window is not None and ref.window.slot_map:
            table = on_host(self.alloc.full_to_window)
        else:
            return
        mains, seconds = self._names[ref.main], self._names[ref.second]
        expected = np.zeros_like(table).reshape(-1, self.config.page_size)
        for main, second in ref.map.items():
            expected[mains[main]] = self.slots([seconds[second]])
        wrong = (table.reshape(expected.shape) != expected).any(axis=1).nonzero()[0]
        if wrong.size:
            at = int(wrong[0])
            self.fail(
                f"the map shows {table.reshape(expected.shape)[at].tolist()[:3]} for page {at}, "
                f"the reference {expected[at].tolist()[:3]}"
            )

    def count(self, error: Exception) -> None:
        """Note a refusal, as `stats()` counts them."""
        if isinstance(error, AllocError):
            self.refusals[type(error).__name__] += 1
