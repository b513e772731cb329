"""Two tenants on one allocator in debug mode: no page, row or entry of one is seen by the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from host_support import open_handles
from trust.poisoned import assert_poison
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc.trust.debugging import SWITCH
from sgalloc.trust.poison import Poison

TENANTS = (None, "blue")  # None is a namespace as any other
CACHED, LOCKED, PINNED = -1, -3, -4


class Tenants(Walk):
    """Calls of two tenants whose prompts are alike, and whose every page is known.

    Attributes:
        tenant: of each request that is open, or waits for its writers.
        of_page, of_side: whose each page is, from when a request held it until it is free.
    """

    def __init__(self, alloc: Any, seed: int) -> None:
        super().__init__(alloc, seed)
        self.names = TENANTS
        self.drawn: Any = None
        self.tenant: dict[int, Any] = {}
        self.of_page: dict[int, Any] = {}
        self.of_side: dict[int, Any] = {}
        self.seen: Counter[str] = Counter()
        if self.cache:
            self.real_match = alloc.prefix.match
            alloc.prefix.match = self.watched_match

    def watched_match(self, tokens: Any, namespace: Any = None) -> Any:
        match = self.real_match(tokens, namespace)
        for page in match.pages.tolist():
            assert self.of_page[page] == namespace, f"page {page} was matched by another tenant"
            self.seen["matched"] += 1
        return match

    def name(self, among: tuple[Any, ...]) -> Any:
        self.drawn = super().name(among)
        return self.drawn

    def enter(self, new: Any, ids: list[int]) -> Any:
        self.tenant.update(dict.fromkeys(new.tolist(), self.drawn))
        return super().enter(new, ids)

    def preallocate(self) -> Any:
        self.drawn = None  # the namespace where there is no match
        return super().preallocate()

    # -- looking ---------------------------------------------------------------------------

    def look(self) -> None:
        """Every row, every page in it, and every entry of every table."""
        alloc, ps = self.alloc, self.ps
        assert_poison(alloc)
        owners, side = alloc.owners(), alloc._core.side
        named: Counter[int] = Counter()
        beside: Counter[int] = Counter()
        table, pages = np.asarray(alloc.req_to_token), np.asarray(alloc.page_table)
        for handle in open_handles(alloc):
            row, a = int(alloc.rows(handle)[0]), int(alloc.allocated(handle)[0])
            own = alloc.pages(handle, 0, a).tolist()
            received = alloc.receiving(handle) is not None
            for page in own:
                self.owned(self.of_page, int(owners[page]), page, handle, row, received)
            named.update(page for page in own if owners[page] != LOCKED)
            assert table[row, :a].tolist() == [p * ps + at for p in own for at in range(ps)]
            assert pages[row, : a // ps].tolist() == own
            if side is None:
                continue
            for main, page in self.side_pages(handle, own):
                holder = int(side.pool.holder[page])
                holder = LOCKED if holder == CACHED and owners[main] == LOCKED else holder
                self.owned(self.of_side, holder, page, handle, row, received)
                beside[page] += holder != LOCKED
            if alloc.has_window:
                frontier = int(alloc.frontier(handle)[0])
                shown = np.asarray(alloc.window_table)[row]
                assert not shown[:frontier].any(), "below the frontier"
                for number, page in enumerate(alloc.window_pages(handle).tolist()):
                    part = shown[number * ps : (number + 1) * ps].tolist()
                    assert not page or part == [page * ps + at for at in range(ps)]
        for times in (named, beside):
            assert max(times.values(), default=0) <= 1, "two requests name one page of their own"
        self.forget(owners)

    def owned(
        self, whose: dict[int, Any], owner: int, page: int, handle: int, row: int, received: bool
    ) -> None:
        """A page that a row names is the row's own, or its tenant's in the prefix cache."""
        if owner == LOCKED:
            assert whose[page] == self.tenant[handle], f"row {row} shares another's page {page}"
            self.seen["shared"] += 1
            return
        assert owner == (PINNED if received else row), f"row {row} names page {page} of {owner}"
        whose[page] = self.tenant[handle]
        self.seen["pinned" if received else "owned"] += 1

    def side_pages(self, handle: int, own: list[int]) -> list[tuple[int, int]]:
        """Pages of the second group that a request holds, each with one of the main group."""
        if self.alloc.has_window:
            shown = self.alloc.window_pages(handle).tolist()
            return [(main, page) for main, page in zip(own, shown, strict=True) if page]
        asked = (self.alloc.device_pages, self.alloc.buffer_pages, self.alloc.scratch_pages)
        held = {page for ask in asked for page in ask(handle).tolist()}
        return [(0, page) for page in held - {0}]

    def forget(self, owners: Any) -> None:
        """Whose the pages were that are free now; the map shows nothing of them."""
        free = np.flatnonzero(owners[1:] == 0) + 1
        for page in free.tolist():
            self.of_page.pop(page, None)
        if self.alloc._core.device.side_map is not None:
            shown = np.asarray(self.alloc._core.device.side_map).reshape(-1, self.ps)
            assert not shown[free].any(), "a page that is free has an entry in the map"


def walk(name: str, seed: int, steps: int = 110) -> Tenants:
    tenants = Tenants(make(name, (1, 3, 4)[seed % 3]), seed)
    for _ in range(steps):
        said = tenants.step()
        try:
            tenants.look()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, behind {said}: {error}") from error
    return tenants


@pytest.fixture(autouse=True)
def _debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


@pytest.mark.parametrize("name", CONFIGS)
def test_tenants_never_share(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += walk(name, seed).seen
    wanted = ["owned", "pinned", *(["matched", "shared"] if "prefix" in name else [])]
    assert min(seen[what] for what in wanted) > 20, seen


def fails(name: str) -> str:
    """What is said of a fault, in some walk."""
    for seed in range(12):
        try:
            walk(name, seed)
        except (AssertionError, sgalloc.LawViolation) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", ["prefix cache", "window, map, prefix"])
def test_a_cache_that_forgets_whose_a_prefix_is_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("allocator", "caching"):
        monkeypatch.setattr(f"sgalloc.{place}.checked_namespace", lambda namespace: None)
    assert "by another tenant" in fails(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_keep_what_they_held_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Poison.spread

    def spread(self: Poison, *how: Any, **more: Any) -> None:
        if not self._core.pool.high_water:
            real(self, *how, **more)

    monkeypatch.setattr(Poison, "spread", spread)
    monkeypatch.setattr(Poison, "check", lambda self, rows=None: None)
    assert "behind " in fails(name)


@pytest.mark.parametrize("name", ["plain", "window", "sparse"])
def test_a_row_that_names_the_page_of_another_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law of debug mode is left out: the test has to see it on its own."""
    from sgalloc.ledger import Ledger

    real = Ledger.grow

    def grow(self: Ledger, rows: Any, where: Any, ids: Any, allocated: Any) -> None:
        real(self, rows, where, ids, allocated)
        others = [row for row in self.live() if row != rows[0] and self.allocated[row]]
        if others:
            self.pages[rows[0], 0] = self.pages[others[0], 0]

    monkeypatch.setattr(Ledger, "grow", grow)
    monkeypatch.setattr(sgalloc.KVAllocator, "check", lambda self, device=False: None)
    assert "names page" in fails(name)
