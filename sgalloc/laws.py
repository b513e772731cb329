"""The two laws, proven in time linear in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sgalloc.device.unwritten import unwritten_of
from sgalloc.errors import LawViolation
from sgalloc.groups import Side
from sgalloc.inputs import Int64
from sgalloc.ledger import Ledger
from sgalloc.nodes import Node
from sgalloc.pages import CACHED, FREE, PINNED, WAITING, Int32, PagePool, describe_holder
from sgalloc.pins import Pins
from sgalloc.prefix import RadixTree
from sgalloc.quarantine import Quarantine

if TYPE_CHECKING:
    from sgalloc.device import Device


def check_rows(ledger: Ledger) -> None:
    """The row law on the host: extents, and whose pages a row names.

    Raises:
        LawViolation: naming the row.
    """
    rows = ledger.live()
    size = ledger.page_size
    committed, allocated = ledger.committed.take(rows), ledger.allocated.take(rows)
    shared = ledger.shared.take(rows)
    for broken, law in (
        (committed < 0, "0 <= C"),
        (committed > allocated, "C <= A"),
        (allocated > ledger.row_pages * size, "A <= row_width"),
        (allocated % size != 0, "A is whole pages"),
        (shared * size > committed, "shared pages lie below C"),
    ):
        at = broken.nonzero()[0]
        if at.size:
            i = at[0]
            raise LawViolation(
                f"row {rows[i]} breaks '{law}': C={committed[i]}, A={allocated[i]}, "
                f"{shared[i]} shared pages of {size}, width {ledger.row_width}"
            )


def check_locks(
    tree: RadixTree, holds: dict[int, Node], quarantine: Quarantine, pins: Pins
) -> None:
    """Every node is locked as often as requests and events hold it or one below it.

    Raises:
        LawViolation: naming a page of the node.
    """
    held = [*holds.values(), *quarantine.nodes(), *pins.nodes()]
    locks: dict[Node, int] = {}
    for node in held:
        step: Node | None = node
        while step is not None and step.parent is not None:
            locks[step] = locks.get(step, 0) + 1
            step = step.parent
    for node in tree.nodes():
        if node.locks != locks.get(node, 0):
            raise LawViolation(
                f"cached page {node.pages[0]} is locked {node.locks} times, but "
                f"{locks.get(node, 0)} requests and events hold it"
            )


def check_shared(ledger: Ledger, tree: RadixTree, holds: dict[int, Node]) -> None:
    """The shared pages of each row are those of the path it holds in the prefix cache.

    Raises:
        LawViolation: naming the row and the page.
    """
    for row in ledger.live().tolist():
        shared = int(ledger.shared[row])
        path = tree.pages_to(holds.get(row))
        if path.size != shared:
            raise LawViolation(
                f"row {row} shares {shared} pages with the prefix cache, but holds a path of "
                f"{path.size}"
            )
        wrong = (path != ledger.pages[row, :shared]).nonzero()[0]
        if wrong.size:
            at = int(wrong[0])
            raise LawViolation(
                f"page {at} of row {row} is {ledger.pages[row, at]}, but the path that it shares "
                f"in the prefix cache has {path[at]} there"
            )


def check_pages(
    ledger: Ledger,
    pool: PagePool,
    tree: RadixTree | None,
    quarantine: Quarantine,
    pins: Pins,
    side: Side | None = None,
) -> None:
    """The partition law of every group.

    Raises:
        LawViolation: naming the page and both places, or the page that is nowhere.
    """
    nodes = tree.nodes() if tree is not None else []
    owners, owned = ledger.owned_pages(ledger.live())
    owners = np.where(ledger.receiving.take(owners), PINNED, owners)
    cached = [node.pages for node in nodes]
    _check_group(pool, owned, owners, quarantine.page_ids(), pins.page_ids(), cached)
    if side is not None:
        owners, owned = side.held(ledger.live())
        owners = np.where(ledger.receiving.take(owners), PINNED, owners)
        cached = [node.sides[node.sides != 0] for node in nodes if node.sides is not None]
        _check_group(side.pool, owned, owners, quarantine.side_ids(), pins.side_ids(), cached)
    if tree is not None:
        _check_counts(tree)


def _check_group(
    pool: PagePool,
    owned: Int32,
    owners: Int64,
    waiting: Int32,
    pinned: Int32,
    cached: list[Int32],
) -> None:
    """Each page is in exactly one place, ids compared as multisets."""
    parts: list[tuple[Int32, int | Int64]] = [
        (pool.free_ids(), FREE),
        (waiting, WAITING),
        (owned, owners),
        (pinned, PINNED),
        *((ids, CACHED) for ids in cached),
    ]
    ids = np.concatenate([part[0] for part in parts])
    places = np.concatenate([np.broadcast_to(p, ids_.shape) for ids_, p in parts])
    outside = ((ids < 1) | (ids > pool.num_pages)).nonzero()[0]
    if outside.size:
        at = int(outside[0])
        raise LawViolation(
            f"page {ids[at]} does not exist (1..{pool.num_pages}), but "
            f"{describe_holder(int(places[at]))} has it"
        )
    found = np.bincount(ids, minlength=pool.num_pages + 1)
    found[0] = 1
    # A page in two hands is told before one that is lost, which is often its other half.
    wrong = np.concatenate(((found > 1).nonzero()[0], (found < 1).nonzero()[0]))
    if wrong.size:
        page = int(wrong[0])
        have = [describe_holder(int(place)) for place in places[ids == page][:2]]
        raise LawViolation(
            f"page {page} of group '{pool.group}' is held by {have[0]} and by {have[1]}"
            if have
            else f"page {page} of group '{pool.group}' is lost: nobody has it"
        )
    holder = pool.holder.take(ids)
    wrong = (holder != places).nonzero()[0]
    if wrong.size:
        at = int(wrong[0])
        raise LawViolation(
            f"page {ids[at]} of group '{pool.group}' is with {describe_holder(int(places[at]))}, "
            f"but recorded with {describe_holder(int(holder[at]))}"
        )
    if pool.waiting != parts[1][0].size:
        raise LawViolation(
            f"group '{pool.group}' counts {pool.waiting} waiting pages, but {waiting.size} wait"
        )
    count = int(np.count_nonzero(pool.holder == PINNED))
    if pool.pinned != count:
        raise LawViolation(
            f"group '{pool.group}' counts {pool.pinned} pinned pages, but {count} are pinned"
        )


def check_row_ids(ledger: Ledger, quarantine: Quarantine, pins: Pins) -> None:
    """Each row is open, free or waiting, and in one of these alone.

    Raises:
        LawViolation: naming the row.
    """
    out = np.concatenate((quarantine.row_ids(), pins.row_ids()))
    rows = np.concatenate((ledger.live(), ledger.free_row_ids(), out))
    waiting = out.size
    if ledger.waiting_rows != waiting:
        raise LawViolation(f"{ledger.waiting_rows} rows are counted as waiting, but {waiting} wait")
    outside = ((rows < 1) | (rows > ledger.max_requests)).nonzero()[0]
    if outside.size:
        raise LawViolation(
            f"row {rows[outside[0]]} does not exist (1..{ledger.max_requests}), but stands among "
            "the free or waiting rows"
        )
    found = np.bincount(rows, minlength=ledger.max_requests + 1)
    found[0] = 1
    wrong = (found != 1).nonzero()[0]
    if wrong.size:
        raise LawViolation(
            f"row {wrong[0]} stands {found[wrong[0]]} times among the open, free and waiting rows"
        )


def check_pins(ledger: Ledger, pins: Pins) -> None:
    """Each row that is being received has its pins, and nobody else has.

    Raises:
        LawViolation: naming the row.
    """
    marked = ledger.receiving.nonzero()[0].tolist()
    known = {}
    for handle, pin in pins.by_handle.items():
        if pin.aborted:
            continue
        known[pin.row] = pin
        if ledger.handle[pin.row] != handle:
            raise LawViolation(
                f"row {pin.row} is pinned for handle {handle}, but open for handle "
                f"{ledger.handle[pin.row]}"
            )
        own = ledger.page_list(pin.row)[int(ledger.shared[pin.row]) :]
        if own.tolist() != pin.pages.tolist():
            raise LawViolation(
                f"row {pin.row} is received into pages {own.tolist()[:4]}.., but pages "
                f"{pin.pages.tolist()[:4]}.. are pinned for it"
            )
    odd = sorted(known.keys() ^ set(marked))
    if odd:
        raise LawViolation(
            f"row {odd[0]} is {'not ' if odd[0] in known else ''}marked as being received, but "
            f"{'has' if odd[0] in known else 'has no'} pins"
        )
    if ledger.receiving_rows != len(marked):
        raise LawViolation(
            f"{ledger.receiving_rows} rows are counted as being received, but {len(marked)} are "
            "marked"
        )


def check_table(ledger: Ledger, device: Device, rows: Int64, unwritten: Int64) -> None:
    """The row law on the device: every entry of ``rows`` below A names the slot it should.

    Reads them back, one after the other.

    Args:
        ledger: what they should say.
        device: which has them.
        rows: int64 ``(n,)``; row 0 is all zeros.
        unwritten: places that are left out, as `Device.unwritten` has them.

    Raises:
        LawViolation: naming row, column, both values, and who wrote there last.
    """
    size = ledger.page_size
    offsets = np.arange(size, dtype=np.int32)
    for row in rows.tolist():
        held = device.read_rows(np.array([row]))[0]
        if row == 0:
            expected = np.zeros_like(held)
        else:
            expected = (ledger.page_list(row)[:, None] * size + offsets).reshape(-1)
            if unwritten.size:
                late = unwritten_of(unwritten, row, ledger.row_pages)
                late = late[late < expected.size // size]
                by_page = expected.reshape(-1, size)
                by_page[late] = held[: expected.size].reshape(-1, size)[late]
        writer = padding if row == 0 else partial(device.log.of_entry, row, ledger.pages[row])
        compare_entries(f"req_to_token[{row}, ", held, expected, size, writer)


def check_page_ids(ledger: Ledger, device: Device, rows: Int64) -> None:
    """The page ids of ``rows`` on the device are those of the page lists.

    Raises:
        LawViolation: as `check_table`.
    """
    for row in rows.tolist():
        held = device.read_page_ids(np.array([row]))[0]
        expected = ledger.page_list(row) if row else np.zeros_like(held)
        writer = padding if row == 0 else partial(device.log.of_entry, row, ledger.pages[row])
        compare_entries(f"page_table[{row}, ", held, expected, 1, writer)


def check_map(name: str, size: int, beside: Int32, waiting: Int32, device: Device) -> None:
    """The map, as the device has it: 0 but for pages with one of the second group ``beside``.

    Args:
        name: what it is called.
        size: slots in a page.
        beside: the page of the second group beside each of the main group, int32; 0 for none.
        waiting: pages of the main group that are left out, int32.
        device: which has it.

    Raises:
        LawViolation: naming the entry, both values, and who wrote there last.
    """
    found = device.read_map()
    offsets = np.arange(size, dtype=np.int32)
    expected = np.where(beside[:, None] != 0, beside[:, None] * size + offsets, 0)
    expected[waiting] = found.reshape(-1, size)[waiting]
    compare_entries(f"{name}[", found, expected.reshape(-1), size, device.log.of_map)


def padding(number: int) -> str:
    """Who wrote a page of the padding row last, in words."""
    return "no plan writes the padding row"


def compare_entries(
    name: str, held: Int32, expected: Int32, size: int, writer: Callable[[int], str]
) -> None:
    """The first so many of ``held``, of what is called ``name``, are as ``expected``.

    Args:
        name: with the bracket that its index follows.
        held: int32.
        expected: int32, no more of them.
        size: entries of a page.
        writer: says who wrote a page last, by its number.

    Raises:
        LawViolation: naming the entry, both values, and who wrote it last.
    """
    wrong = (held[: expected.size] != expected).nonzero()[0]
    if wrong.size:
        at = int(wrong[0])
        raise LawViolation(
            f"{name}{at}] is {held[at]} on the device, but the ledger says {expected[at]}; "
            f"{writer(at // size)}"
        )


def _check_counts(tree: RadixTree) -> None:
    nodes = tree.nodes()
    counted = (tree.cached, tree.evictable, tree.side_cached, tree.side_evictable)
    found = (
        sum(node.pages.size for node in nodes),
        sum(node.pages.size for node in nodes if not node.locks),
        sum(_live(node) for node in nodes),
        sum(_live(node) for node in nodes if not node.locks),
    )
    if counted != found or any(node.live != _live(node) for node in nodes):
        raise LawViolation(
            "the prefix cache counts {} pages, {} evictable, and {} and {} in the second "
            "group, but holds {}, {}, {} and {}".format(*counted, *found)
        )


def _live(node: Node) -> int:
    return 0 if node.sides is None else int((node.sides != 0).sum())
