"""The two laws, proven in time linear in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sgalloc.errors import LawViolation
from sgalloc.groups import Side
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import Int64
from sgalloc.ledger import Ledger
from sgalloc.pages import CACHED, FREE, PINNED, WAITING, Int32, PagePool, describe_holder
from sgalloc.pins import Pins
from sgalloc.prefix import Node, RadixTree
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


def check_table(ledger: Ledger, device: Device) -> None:
    """The row law on the device: every entry below A names the slot it should.

    Raises:
        LawViolation: naming row, column and both values.
    """
    size = ledger.page_size
    offsets = np.arange(size, dtype=np.int32)
    for row in [0, *ledger.live().tolist()]:
        held = device.read_rows(np.array([row]))[0]
        if row == 0:
            expected = np.zeros_like(held)
        else:
            expected = (ledger.page_list(row)[:, None] * size + offsets).reshape(-1)
        _compare(f"req_to_token[{row}, ", held, expected)


def check_window(ledger: Ledger, window: Window, tree: RadixTree | None) -> None:
    """What each row holds of the window group lies within its extent, and is shared as it says.

    Raises:
        LawViolation: naming the row.
    """
    rows = ledger.live()
    first, stop = window.first.take(rows), window.stop.take(rows)
    pages, committed = ledger.page_counts(rows), ledger.committed.take(rows)
    for broken, law in (
        ((first < 0) | (first > stop), "0 <= frontier <= end of the window pages"),
        (stop > pages, "window pages lie below A"),
        (first * ledger.page_size > ledger.allocated.take(rows), "frontier <= A"),
        # A page that a trim cut below the frontier is taken afresh by the next growth.
        (stop < pages - 1, "window pages reach to A"),
    ):
        at = broken.nonzero()[0]
        if at.size:
            i = at[0]
            raise LawViolation(
                f"row {rows[i]} breaks '{law}': window pages [{first[i]}, {stop[i]}) of "
                f"{pages[i]} pages, C={committed[i]}"
            )
    if tree is None:
        return
    beside: dict[int, int] = {}
    for node in tree.nodes():
        if node.sides is not None:
            beside.update(zip(node.pages.tolist(), node.sides.tolist(), strict=True))
    for row, low, high in zip(rows.tolist(), first.tolist(), stop.tolist(), strict=True):
        for number in range(low, min(high, int(ledger.shared[row]))):
            page = int(ledger.pages[row, number])
            if beside.get(page) != int(window.pages[row, number]):
                raise LawViolation(
                    f"row {row} reads window page {window.pages[row, number]} there, but the "
                    f"prefix cache has {beside.get(page)} beside page {page}"
                )


def check_window_table(
    ledger: Ledger,
    window: Window,
    tree: RadixTree | None,
    quarantine: Quarantine,
    device: Device,
) -> None:
    """The window's table, 0 below each frontier, and the map, as the device has them.

    Pages in quarantine keep their place in the map until their event is done.

    Raises:
        LawViolation: naming the entry and both values.
    """
    size = ledger.page_size
    offsets = np.arange(size, dtype=np.int32)
    for row in [0, *ledger.live().tolist()]:
        held = device.read_side_rows(np.array([row]))[0]
        if row == 0:
            expected = np.zeros_like(held)
        else:
            first, stop = int(window.first[row]), int(window.stop[row])
            ids = window.pages[row, first:stop]
            slots = (ids[:, None] * size + offsets).reshape(-1)
            expected = np.concatenate((np.zeros(first * size, np.int32), slots))
        _compare(f"window_table[{row}, ", held, expected)
    if not window.mapped:
        return
    found = device.read_map()
    beside = np.zeros(found.size // size, np.int32)
    for row in ledger.live().tolist():
        own = max(int(ledger.shared[row]), int(window.first[row]))
        stop = int(window.stop[row])
        if stop > own:
            beside[ledger.pages[row, own:stop]] = window.pages[row, own:stop]
    for node in tree.nodes() if tree is not None else []:
        if node.sides is not None:
            beside[node.pages] = node.sides
    expected = np.where(beside[:, None] != 0, beside[:, None] * size + offsets, 0)
    waiting = quarantine.page_ids()
    expected[waiting] = found.reshape(-1, size)[waiting]
    _compare("full_to_window[", found, expected.reshape(-1))


def check_sparse(ledger: Ledger, group: DevicePages) -> None:
    """What each row holds of the device group, and which of it is mapped, agrees with its state.

    Raises:
        LawViolation: naming the row.
    """
    rows = ledger.live()
    held, sparse, long = group.count.take(rows), group.sparse.take(rows), group.is_long.take(rows)
    first, stop = group.first.take(rows), group.stop.take(rows)
    pages, covered = ledger.page_counts(rows), -(-ledger.committed.take(rows) // ledger.page_size)
    for broken, law in (
        ((held < 0) | (held > pages), "device pages lie below A"),
        (sparse & (held > group.buffer + 1), "a sparse row has a buffer and one page at most"),
        (long != (sparse & (held > group.buffer)), "a long row is sparse and has a buffer and one"),
        ((first < 0) | (first > stop), "0 <= first <= end of what is mapped"),
        (~sparse & ((first != 0) | (stop != held)), "a dense row's device pages are all mapped"),
        (~long & (stop > held), "what is mapped is held"),
        # commit and trim leave the map behind; the next growing verb moves it on.
        (long & (stop > np.minimum(covered, first + 1)), "one page is mapped, of committed tokens"),
        (
            sparse & ~group.has_scratch.take(rows) & (group.scratch > 0),
            "a sparse row has its scratch pages",
        ),
    ):
        at = broken.nonzero()[0]
        if at.size:
            i = at[0]
            raise LawViolation(
                f"row {rows[i]} breaks '{law}': {held[i]} device pages, [{first[i]}, {stop[i]}) "
                f"of {pages[i]} pages mapped, buffer of {group.buffer}, C={covered[i]} pages, "
                f"{'sparse' if sparse[i] else 'dense'}"
            )


def check_sparse_map(
    ledger: Ledger, group: DevicePages, quarantine: Quarantine, device: Device
) -> None:
    """The map, as the device has it: 0 but for what the ledger says is resident.

    Logical pages in quarantine keep their place until their event is done.

    Raises:
        LawViolation: naming the entry and both values.
    """
    size = ledger.page_size
    found = device.read_map()
    beside = np.zeros(found.size // size, np.int32)
    for row in ledger.live().tolist():
        beside[ledger.page_list(row)] = group.mapped_pages(row)
    offsets = np.arange(size, dtype=np.int32)
    expected = np.where(beside[:, None] != 0, beside[:, None] * size + offsets, 0)
    waiting = quarantine.page_ids()
    expected[waiting] = found.reshape(-1, size)[waiting]
    _compare("logical_to_device[", found, expected.reshape(-1))


def _compare(name: str, held: Int32, expected: Int32) -> None:
    wrong = (held[: expected.size] != expected).nonzero()[0]
    if wrong.size:
        at = int(wrong[0])
        raise LawViolation(
            f"{name}{at}] is {held[at]} on the device, but the ledger says {expected[at]}"
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
