"""The digest: equal after the same calls anywhere, different once anything that decides differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from host_support import Query
from trust.forge import held, rich
from trust.walk import CONFIGS, NAMESPACES, Walk, make

import sgalloc
from sgalloc.ledger import Ledger
from sgalloc.nodes import Node
from sgalloc.pages import PagePool
from sgalloc.pins import Pin
from sgalloc.prefix import RadixTree
from sgalloc.quarantine import Returning

TESTS = Path(__file__).resolve().parents[1]
STEPS = 60

Plant = Callable[[], Any]


def walked() -> list[str]:
    """The digest after every tenth step of a walk of each configuration."""
    found = []
    for name in CONFIGS:
        walk = Walk(make(name, ps=2), 11)
        for number in range(STEPS):
            walk.step()
            found += [] if number % 10 else [walk.alloc.digest()]
    return found


def test_it_is_the_same_in_any_process() -> None:
    here = walked()
    assert all(re.fullmatch("[0-9a-f]{32}", found) for found in here)
    assert len(set(here)) > len(here) // 2
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    for seed in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", "from trust import test_digest as t; print(*t.walked())"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == here


@pytest.mark.parametrize("name", CONFIGS)
def test_a_refused_call_and_a_question_leave_it_alone(name: str) -> None:
    refused: Counter[str] = Counter()
    for seed in range(8):
        alloc = make(name, ps=3)
        walk = Walk(alloc, seed)
        for _ in range(80):
            before = alloc.digest()
            said = walk.step()
            verb, _, answer = said.partition(": ")
            error = re.match(r"([A-Z]\w+): ", answer)
            # A match is a use by itself, whatever becomes of it.
            if error and verb not in ("match", "preallocate"):
                assert alloc.digest() == before, said
                refused[error[1]] += 1
            before = alloc.digest()
            alloc.stats(), alloc.fits([3, 4]), alloc.owners(), alloc.check(), alloc.runs()
            alloc.snapshot(assume_done=True)
            assert alloc.digest() == before
            with pytest.raises(sgalloc.OutOfRows):
                alloc.open(100)
            with pytest.raises(sgalloc.AllocError):
                alloc.preallocate([1 << 30])
            assert alloc.digest() == before
    assert sum(refused.values()) >= 40 and len(refused) >= 3, refused


def test_counters_are_left_out() -> None:
    for name in CONFIGS:
        alloc = rich(name)
        before = alloc.digest()
        core = alloc._core
        alloc._refusals["OutOfPages"] += 1
        core.pool.high_water = core.pool.num_pages
        core.ledger.version += 1
        core.ledger.epoch += 1
        if core.side is not None:
            core.side.pool.high_water = core.side.pool.num_pages
        if core.tree is not None:
            core.tree.tick()
            core.tree.evicted += 1
            core.tree.side_evicted += 1
        assert alloc.digest() == before


def test_what_waits_is_told_from_what_is_free_and_events_are_not_seen() -> None:
    digests = []
    for event in (Query(), Query(), None):
        alloc = make("plain")
        x = alloc.open(2)
        alloc.extend(x, 9)
        alloc.release(x, after=event)
        digests.append(alloc.digest())
        if event is not None:
            event.over = True
            assert alloc.digest() == digests[-1], "asking takes nothing in"
            alloc.settle()
            assert alloc.digest() != digests[-1]
            # Pages are the same, and so is their order.
            digests.append(alloc.digest())
    assert digests[0] == digests[2] and digests[1] == digests[3] == digests[4]
    assert digests[0] != digests[1]


def test_configurations_differ() -> None:
    base: dict[str, Any] = {"num_pages": 8, "page_size": 2, "max_requests": 3, "row_width": 12}
    window, sparse = sgalloc.SlidingWindow, sgalloc.Sparse
    found = []
    for change in (
        {}, {"num_pages": 9}, {"page_size": 3}, {"max_requests": 4}, {"row_width": 14},
        {"prefix_cache": True}, {"window": window(4, 8)}, {"window": window(5, 8)},
        {"window": window(4, 9)}, {"window": window(4, 8, True)},
        {"window": window(4, 8, False, 3)}, {"window": window(4, 8), "prefix_cache": True},
        {"sparse": sparse(2, 4)}, {"sparse": sparse(3, 4)}, {"sparse": sparse(2, 6)},
        {"sparse": sparse(2, 4, 2)},
    ):  # fmt: skip
        found.append(sgalloc.KVAllocator(**(base | change), device="cpu").digest())
    assert len(set(found)) == len(found)
    # Where a page table is kept besides is no part of what is held.
    assert sgalloc.KVAllocator(**base, device="cpu", page_table=True).digest() == found[0]


# -- planted ---------------------------------------------------------------------------------------


@contextmanager
def entry(array: Any, at: Any, value: Any) -> Iterator[None]:
    before = array[at].copy()
    array[at] = value
    try:
        yield
    finally:
        array[at] = before


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def swapped(array: Any, one: int, other: int) -> Iterator[None]:
    array[[one, other]] = array[[other, one]]
    try:
        yield
    finally:
        array[[one, other]] = array[[other, one]]


@contextmanager
def key(of: dict[Any, Any], name: Any, value: Any) -> Iterator[None]:
    before = dict(of)
    of[name] = value
    try:
        yield
    finally:
        of.clear()
        of.update(before)


def bumped(array: Any, at: Any) -> Any:
    value = array[at]
    return entry(array, at, not value if array.dtype == bool else value + 1)


def of_ledger(ledger: Ledger) -> dict[str, Any]:
    rows = ledger.live()
    row = int(rows[ledger.allocated.take(rows).argmax()])
    return {
        "committed": lambda: bumped(ledger.committed, row),
        "allocated": lambda: entry(ledger.allocated, row, ledger.allocated[row] - ledger.page_size),
        "decode_steps": lambda: bumped(ledger.decode_steps, row),
        "shared": lambda: bumped(ledger.shared, row),
        "receiving": lambda: bumped(ledger.receiving, row),
        "receiving_rows": lambda: attribute(ledger, "receiving_rows", ledger.receiving_rows + 1),
        "handle": lambda: entry(ledger.handle, row, ledger.handle[row] + (1 << 32)),
        "pages": lambda: bumped(ledger.pages, (row, 0)),
        "namespace": lambda: key(ledger.namespace, row, "planted"),
        "_generation": lambda: bumped(ledger._generation, row),
        "_row_stack": lambda: swapped(ledger._row_stack, 0, ledger.free_rows - 1),
        "free_rows": lambda: attribute(ledger, "free_rows", ledger.free_rows - 1),
        "waiting_rows": lambda: attribute(ledger, "waiting_rows", ledger.waiting_rows + 1),
        "max_requests": None,
        "page_size": None,
        "row_width": None,
        "row_pages": None,
        "group": None,
    }


LEDGER_ELSE = {
    "_mark",
    "epoch",
    "version",
    "pages_flat",
    "per_page",
    "per_page_less_one",
    "per_row",
}


def of_pool(pool: PagePool) -> dict[str, Any]:
    return {
        "_stack": lambda: swapped(pool._stack, 0, pool.free - 1),
        "free": lambda: attribute(pool, "free", pool.free - 1),
        "waiting": lambda: attribute(pool, "waiting", pool.waiting + 1),
        "pinned": lambda: attribute(pool, "pinned", pool.pinned + 1),
        "holder": lambda: bumped(pool.holder, 1),
        "num_pages": lambda: attribute(pool, "num_pages", pool.num_pages + 1),
        "group": None,
    }


def of_window(window: Any, ledger: Ledger) -> dict[str, Any]:
    rows = ledger.live()
    row = int(rows[(window.stop - window.first).take(rows).argmax()])
    number = int(window.stop[row]) - 1
    other = set(rows.tolist()) - window.cut_rows
    return {
        "first": lambda: bumped(window.first, row),
        "stop": lambda: entry(window.stop, row, number),
        "due": lambda: bumped(window.due, row),
        "lag": lambda: attribute(window, "lag", window.lag + 1),
        "tokens": lambda: attribute(window, "tokens", window.tokens + 1),
        "mapped": lambda: attribute(window, "mapped", not window.mapped),
        "cut_rows": lambda: attribute(window, "cut_rows", window.cut_rows | {min(other)}),
        "pages": lambda: bumped(window.pages, (row, number)),
        "pool": None,
    }


WINDOW_ELSE = {"settings", "_ledger", "pages_flat", "_keep"}  # what lag and tokens say


def of_device(group: Any, ledger: Ledger) -> dict[str, Any]:
    rows = ledger.live()
    row = int(rows[group.count.take(rows).argmax()])
    scratched = group.has_scratch.nonzero()[0]
    found: dict[str, Any] = {
        "first": lambda: bumped(group.first, row),
        "sparse": lambda: bumped(group.sparse, row),
        "is_long": lambda: bumped(group.is_long, row),
        "count": lambda: entry(group.count, row, group.count[row] - 1),
        "stop": lambda: bumped(group.stop, row),
        "has_scratch": lambda: bumped(group.has_scratch, row),
        "pages": lambda: bumped(group.pages, (row, 0)),
        "buffer": lambda: attribute(group, "buffer", group.buffer + 1),
        "scratch": lambda: attribute(group, "scratch", group.scratch + 1),
        "pool": None,
        "scratch_pages": None,
    }
    if scratched.size and group.scratch:
        found["scratch_pages"] = lambda: bumped(group.scratch_pages, (scratched[0], 0))
    return found


DEVICE_ELSE = {"settings", "_ledger", "pages_flat"}


def of_node(tree: RadixTree) -> dict[str, Any]:
    nodes = tree.nodes()
    low, high = min(nodes, key=lambda n: n.last_use), max(nodes, key=lambda n: n.last_use)
    assert low.last_use < high.last_use
    twins = [
        (one, two)
        for one in nodes
        for two in nodes
        if one.last_use == two.last_use and one.seq < two.seq
    ]
    one, two = twins[0]
    root = next(iter(tree._roots.values()))

    @contextmanager
    def later() -> Iterator[None]:
        with attribute(low, "last_use", high.last_use + 1):
            yield

    @contextmanager
    def other_order() -> Iterator[None]:
        with attribute(one, "seq", two.seq + 1):
            yield

    @contextmanager
    def elsewhere() -> Iterator[None]:
        parent = high.parent
        assert parent is not None
        place = next(k for k, node in parent.children.items() if node is high)
        del parent.children[place]
        root_of_its_own = Node(None, high.tokens[:0], high.pages[:0], None, 0, 0)
        root_of_its_own.name = "planted"
        tree._roots["planted"] = root_of_its_own
        root_of_its_own.children[place] = high
        try:
            with attribute(high, "parent", root_of_its_own):
                yield
        finally:
            del tree._roots["planted"]
            parent.children[place] = high

    return {
        "tokens": lambda: bumped(high.tokens, 0),
        "pages": lambda: bumped(high.pages, 0),
        "sides": None if high.sides is None else lambda: bumped(high.sides, 0),
        "last_use": later,
        "seq": other_order,
        "locks": lambda: attribute(high, "locks", high.locks + 1),
        "parent": elsewhere,
        "children": elsewhere,
        "name": lambda: attribute(root, "name", "planted"),
    }


NODE_ELSE = {"end", "live", "queued"}  # these follow from pages, sides and children


def of_tree(tree: RadixTree) -> dict[str, Any]:
    counts = ("cached", "evictable", "side_cached", "side_evictable")
    return {
        name: (lambda name=name: attribute(tree, name, getattr(tree, name) + 1)) for name in counts
    }


TREE_ELSE = {
    "_page_size",
    "_roots",
    "_clock",
    "_seq",
    "_queue",
    "_order",
    "evicted",
    "side_evicted",
}


def of_pin(pin: Pin, nodes: list[Node]) -> dict[str, Any]:
    return {
        "handle": lambda: attribute(pin, "handle", pin.handle + (1 << 32)),
        "row": lambda: attribute(pin, "row", pin.row + 1),
        "length": lambda: attribute(pin, "length", pin.length + 1),
        "prefix": lambda: attribute(pin, "prefix", pin.prefix + 1),
        "writers": lambda: attribute(pin, "writers", pin.writers + 1),
        "deadline": lambda: attribute(pin, "deadline", 12345),
        "pages": (lambda: bumped(pin.pages, 0)) if pin.pages.size else None,
        "sides": (lambda: bumped(pin.sides, 0)) if pin.sides.size else None,
        "acked": lambda: attribute(pin, "acked", pin.acked | {9}),
        "aborted": lambda: attribute(pin, "aborted", not pin.aborted),
        "nodes": (lambda: attribute(pin, "nodes", [] if pin.nodes else nodes[:1]))
        if nodes
        else None,
    }


PIN_ELSE = {"ready", "event"}


def of_waiting(waiting: Any) -> dict[str, Any]:
    what = waiting.what

    @contextmanager
    def one_less() -> Iterator[None]:
        node = what.nodes.pop()
        try:
            yield
        finally:
            what.nodes.append(node)

    return {
        "ids": lambda: bumped(what.ids, 0),
        "rows": lambda: bumped(what.rows, 0),
        "side_ids": (lambda: bumped(what.side_ids, 0)) if what.side_ids.size else None,
        "unmapped": (lambda: bumped(what.unmapped, 0)) if what.unmapped.size else None,
        "nodes": one_less if what.nodes else None,
    }


WAITING_ELSE = {"owners", "side_owners"}  # whoever they were, these pages wait


def plants(alloc: Any) -> dict[str, Any]:
    core = alloc._core
    found: dict[str, Any] = {}

    def add(what: str, some: dict[str, Any]) -> None:
        found.update({f"{what}.{name}": plant for name, plant in some.items()})

    nodes = core.tree.nodes() if core.tree is not None else []
    add("ledger", of_ledger(core.ledger))
    add("pool", of_pool(core.pool))
    if core.side is not None:
        add("side pool", of_pool(core.side.pool))
        kind = of_window if alloc.has_window else of_device
        add("side", kind(core.side, core.ledger))
    if core.tree is not None:
        add("node", of_node(core.tree))
        add("tree", of_tree(core.tree))
    pins = list(core.pins.by_handle.values())
    add("pin", of_pin(pins[-1], nodes))
    assert pins[-1].aborted and not pins[0].aborted
    add("live pin", of_pin(pins[0], nodes))
    add("wait", of_waiting(core.quarantine.entries[-1]))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_planted_difference_is_seen(name: str) -> None:
    """In every field, one at a time; taken back, the digest is what it was."""
    alloc = held(name)
    before = alloc.digest()
    planted = set()
    for what, plant in plants(alloc).items():
        if plant is None:
            continue
        with plant():
            assert alloc.digest() != before, what
        assert alloc.digest() == before, what
        planted.add(what)
    every = {"ledger.namespace", "pin.acked", "wait.ids", "wait.rows", "pool.holder"}
    every |= {"node.seq", "node.locks", "pin.nodes", "wait.nodes"} if "prefix" in name else set()
    every |= {"side.cut_rows", "side.due", "pin.sides"} if "window" in name else set()
    every |= {"side.is_long", "wait.side_ids"} if "sparse" in name else set()
    every |= {"wait.unmapped"} if "map" in name or "sparse" in name else set()
    assert every <= planted


def test_no_field_is_forgotten() -> None:
    """A field that is new has to be planted above, or to be told apart as no state."""
    alloc, sparse = held("window, map, prefix"), held("sparse")._core
    core = alloc._core
    pin = next(iter(core.pins.by_handle.values()))
    for fields, planted, other in (
        (Ledger.__slots__, of_ledger(core.ledger), LEDGER_ELSE),
        (PagePool.__slots__, of_pool(core.pool), {"_mark", "high_water"}),
        (vars(core.side), of_window(core.side, core.ledger), WINDOW_ELSE),
        (vars(sparse.side), of_device(sparse.side, sparse.ledger), DEVICE_ELSE),
        (Node.__slots__, of_node(core.tree), NODE_ELSE),
        (vars(core.tree), of_tree(core.tree), TREE_ELSE),
        (Pin.__slots__, of_pin(pin, []), PIN_ELSE),
        (Returning._fields, of_waiting(core.quarantine.entries[-1]), WAITING_ELSE),
    ):
        assert set(fields) == set(planted) | other


def test_order_of_use_alone_of_the_clock_counts() -> None:
    """Two caches used in another order differ, whatever else was looked for in vain."""
    digests = []
    for calls in ((1, 2), (2, 1), (1, 7, 2, 7)):
        alloc = make("prefix cache", ps=2)
        x = alloc.open(2, NAMESPACES[0])
        alloc.extend(x, 4)
        alloc.release(x, tokens=[[1, 1, 1, 1], [2, 2, 2, 2]])
        for first in calls:
            alloc.prefix.match([first] * 4)
        digests.append(alloc.digest())
    assert digests[0] != digests[1] and digests[0] == digests[2]
