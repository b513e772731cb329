"""What the tests of the host allocator share: events, and two ways to look at all of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import sgalloc

PAGE_SIZES = (1, 2, 3, 16, 64, 128)
# Every page size, with C at a page edge, one past it and one before it.
EDGES = [(ps, edge) for ps in PAGE_SIZES for edge in sorted({0, 1 % ps, ps - 1})]
each_page_size = pytest.mark.parametrize("ps", PAGE_SIZES)
each_edge = pytest.mark.parametrize(("ps", "edge"), EDGES)


class Query:
    """An event as torch makes them: ``query()`` says whether it is over; polls are counted."""

    def __init__(self, over: bool = False) -> None:
        self.over = over
        self.polls = 0

    def query(self) -> bool:
        self.polls += 1
        return self.over


class DoneValue:
    """An event whose ``done`` is a value, as CuPy makes them."""

    def __init__(self, over: bool = False) -> None:
        self.over = over

    @property
    def done(self) -> bool:
        return self.over


class DoneMethod:
    """An event whose ``done`` is a method, as futures have it."""

    def __init__(self, over: bool = False) -> None:
        self.over = over

    def done(self) -> bool:
        return self.over


class OnDevice:
    """Looks like an array in device memory; reading it as host numbers would be a hidden copy."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape or (2,)
        self.ndim = len(shape or (2,))
        self.__cuda_array_interface__ = {"shape": self.shape, "typestr": "<i8", "version": 3}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int) -> OnDevice:
        if not 0 <= at < self.shape[0]:
            raise IndexError(at)
        element = OnDevice()
        element.shape, element.ndim = self.shape[1:], self.ndim - 1
        return element

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a device array was copied to the host")


def words_of(refusal: Exception) -> str:
    """The message of a refusal, without what debug mode tells of the calls before."""
    return str(refusal).partition(" (last calls")[0]


def make(
    num_pages: int,
    page_size: int,
    max_requests: int = 8,
    row_width: int | None = None,
    prefix_cache: bool = False,
    debug: bool | None = None,
) -> sgalloc.KVAllocator:
    """An allocator on the CPU; rows wide enough for the whole pool unless told otherwise.

    What is about its cost, or spoils its tables, makes it without debug mode.
    """
    width = num_pages * page_size if row_width is None else row_width
    return sgalloc.KVAllocator(
        num_pages,
        page_size,
        max_requests,
        width,
        device="cpu",
        prefix_cache=prefix_cache,
        debug=debug,
    )


def ceil_pages(tokens: int, page_size: int) -> int:
    return (tokens + page_size - 1) // page_size


def committed_at(ps: int, edge: int, pages: int = 2) -> int:
    """A length of about so many pages whose remainder is ``edge``."""
    return pages * ps + edge


def prompt(pages: int, page_size: int, seed: int = 0) -> np.ndarray:
    """Token ids of so many whole pages, others for every seed."""
    return np.arange(pages * page_size, dtype=np.int64) + 1_000_000 * seed


def open_handles(alloc: sgalloc.KVAllocator) -> list[int]:
    """The handles of all open requests."""
    named = alloc._ledger.handle[1:]
    return named[named != 0].tolist()


def places(alloc: sgalloc.KVAllocator) -> dict[str, list[int]]:
    """Where every page id is, gathered from the places themselves and not from their counts."""
    core = alloc._core
    found: dict[str, list[int]] = {
        "free": core.pool.free_ids().tolist(),
        "waiting": core.quarantine.page_ids().tolist(),
        "owned": [],
        "cached": [],
        "pinned": [p for pin in core.pins.aborted() for p in pin.pages.tolist()],
    }
    for handle in open_handles(alloc):
        (row,) = alloc.rows(handle)
        pages = alloc.pages(handle, 0, int(alloc.allocated(handle)[0])).tolist()
        place = "owned" if alloc.receiving(handle) is None else "pinned"
        found[place] += pages[int(alloc._ledger.shared[row]) :]
    if core.tree is not None:
        found["cached"] = [p for node in core.tree.nodes() for p in node.pages.tolist()]
    return found


def assert_partition(alloc: sgalloc.KVAllocator) -> None:
    """Each id 1..P stands in exactly one place."""
    count = Counter(page for ids in places(alloc).values() for page in ids)
    assert count == Counter(range(1, alloc.num_pages + 1))


def assert_row_law(alloc: sgalloc.KVAllocator, handles: Any) -> None:
    """``table[row, j] == pages[j // ps] * ps + j % ps`` for all j < A, and the rest of the law."""
    size = alloc.page_size
    for handle in np.atleast_1d(np.asarray(handles)).tolist():
        (row,), (c,), (a,) = alloc.rows(handle), alloc.committed(handle), alloc.allocated(handle)
        pages = alloc.pages(handle, 0, int(a)).astype(np.int64)
        assert a % size == 0 and pages.size == a // size
        assert 0 <= c <= a <= alloc.row_width
        j = np.arange(a)
        expected = pages[j // size] * size + j % size
        assert alloc.req_to_token[row, :a].tolist() == expected.tolist()
    assert not alloc.req_to_token[0].any()


def assert_laws(alloc: sgalloc.KVAllocator) -> None:
    """Both laws, worked out here and by the allocator's own check."""
    assert_row_law(alloc, open_handles(alloc))
    assert_partition(alloc)
    alloc.check(device=True)


def assert_drained(alloc: sgalloc.KVAllocator) -> None:
    """Nothing is held by anybody any more."""
    stats = alloc.stats()
    assert alloc.available() == alloc.num_pages
    assert (stats.rows.free, stats.rows.open, stats.rows.quarantined) == (alloc.max_requests, 0, 0)
    assert sorted(places(alloc)["free"]) == list(range(1, alloc.num_pages + 1))
    assert not alloc.owners()[1:].any()
    alloc.check(device=True)


def cache_pages(alloc: sgalloc.KVAllocator) -> dict[int, tuple[int, int, int, Any]]:
    """Each cached page: time of last use, insertion number, locks, namespace."""
    tree = alloc._core.tree
    found: dict[int, tuple[int, int, int, Any]] = {}
    for node in tree.nodes() if tree is not None else ():
        root = node
        while root.parent is not None:
            root = root.parent
        for at, page in enumerate(node.pages.tolist()):
            found[page] = (node.last_use, node.seq + at, node.locks, root.name)
    return found


def fingerprint(alloc: sgalloc.KVAllocator) -> tuple[Any, ...]:
    """All that a refused call must leave as it was (the count of refusals apart).

    Besides what anybody can ask for it holds the order in which pages and rows would go out
    and the order in which the cache would be evicted: ranks that mirror each other need both.
    """
    stats, core, ledger = alloc.stats(), alloc._core, alloc._ledger
    handles = open_handles(alloc)
    held = alloc.allocated(handles).tolist()
    return (
        (repr(stats.groups), stats.rows, stats.committed, stats.allocated, stats.staging),
        [alloc.available(group, counting) for group in stats.groups for counting in (False, True)],
        handles,
        alloc.rows(handles).tolist(),
        alloc.committed(handles).tolist(),
        held,
        alloc.decode_index(handles).tolist(),
        [alloc.pages(h, 0, a).tolist() for h, a in zip(handles, held, strict=True)],
        alloc.owners().tolist(),
        core.pool.free_ids().tolist(),
        ledger.free_row_ids().tolist(),
        ledger.shared.tolist(),
        dict(ledger.namespace),
        [
            (id(e.event), e.what.ids.tolist(), e.what.side_ids.tolist(), e.what.rows.tolist())
            for e in core.quarantine.entries
        ],
        [
            (pin.snapshot(), pin.row, pin.pages.tolist(), len(pin.nodes), id(pin.event))
            for pin in core.pins.by_handle.values()
        ],
        (ledger.receiving.tolist(), ledger.receiving_rows),
        cache_pages(alloc),
        alloc.req_to_token.tobytes(),
        side_state(alloc),
    )


def side_state(alloc: sgalloc.KVAllocator) -> tuple[Any, ...]:
    """The same of the second group, where there is one."""
    core = alloc._core
    if core.side is None:
        return ()
    held = core.side.held(alloc._ledger.live())
    tables = (core.device.side_table, core.device.side_map)
    return (
        core.side.pool.free_ids().tolist(),
        core.side.pool.holder.tolist(),
        [part.tolist() for part in held],
        [None if table is None else table.tobytes() for table in tables],
        [] if core.tree is None else [str(node.sides) for node in core.tree.nodes()],
    )


@contextmanager
def unchanged(alloc: sgalloc.KVAllocator) -> Iterator[None]:
    """Whatever happens inside leaves every part of the state alone."""
    before = fingerprint(alloc)
    yield
    assert fingerprint(alloc) == before


def waiting(alloc: sgalloc.KVAllocator) -> tuple[int, int]:
    """Pages and rows in quarantine."""
    stats = alloc.stats()
    return stats.groups["full"].quarantined, stats.rows.quarantined


def count_launches(alloc: sgalloc.KVAllocator, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from now on what would be launches on a GPU: calls that hand the device work."""
    calls: Counter[str] = Counter()
    device = alloc._core.device
    for name in ("write", "gather"):
        original = getattr(device, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            calls[_name] += any(given is not None for given in (*args, *kw.values()))
            inside = calls.copy()
            result = _original(*args, **kw)
            calls.clear()  # what the device does to do this is not a launch of its own
            calls.update(inside)
            return result

        monkeypatch.setattr(device, name, counted)
    return calls


def cached(
    alloc: sgalloc.KVAllocator, tokens: Sequence[int] | np.ndarray, namespace: Any = None
) -> np.ndarray:
    """Runs a request over ``tokens`` and leaves its whole pages in the cache; their ids."""
    (handle,) = alloc.open(1, namespace)
    alloc.extend(handle, len(tokens))
    alloc.release(handle, tokens=np.asarray(tokens))
    whole = len(tokens) // alloc.page_size
    known = alloc._core.tree.common(namespace, np.asarray(tokens, np.int64))
    assert known[1] >= whole
    return alloc._core.tree.pages_to(known[0])[:whole]
