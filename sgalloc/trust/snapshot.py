"""Snapshots: all that decides what an allocator will do, as bytes, and an allocator from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sgalloc._version import __version__
from sgalloc.core import Core
from sgalloc.errors import LawViolation, SnapshotError, WrongState
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.inputs import whole_number
from sgalloc.trust.checked import Checked
from sgalloc.trust.config import MAX_TABLE_BYTES, from_plain, to_plain
from sgalloc.trust.format import pack, unpack
from sgalloc.trust.rebuild import fill, write_tables
from sgalloc.trust.sections import gather, layout

if TYPE_CHECKING:
    from sgalloc.proving import Proving

_Allocator = TypeVar("_Allocator", bound="Proving")


def snapshot(core: Core, refusals: Counter[str], assume_done: bool) -> bytes:
    """The bytes of a snapshot; nothing changes. See `KVAllocator.snapshot`.

    Raises:
        WrongState: something waits behind an event that is not done, or for a replay.
    """
    if not assume_done:
        _refuse_waiting(core)
    side, tree = core.side, core.tree
    window, sparse = isinstance(side, Window), isinstance(side, DevicePages)
    pools = [core.pool] + ([side.pool] if side is not None else [])
    header = {
        "release": __version__,
        "config": to_plain(core),
        "high_water": [pool.high_water for pool in pools],
        "refusals": dict(sorted(refusals.items())),
    }
    if tree is not None:
        header["tree"] = {
            "clock": tree._clock,
            "seq": tree._seq,
            "evicted": tree.evicted,
            "side_evicted": tree.side_evicted,
        }
    kinds = layout(tree is not None, window, sparse)
    return pack(header, gather(core, settled=True), kinds)


def restore(
    data: Any, max_table_bytes: Any, make: Callable[[dict[str, Any]], _Allocator]
) -> _Allocator:
    """The allocator that a snapshot describes; its tables are written anew.

    Args:
        data: of `snapshot`.
        max_table_bytes: most bytes of tables to allocate; `MAX_TABLE_BYTES` if None.
        make: makes a fresh allocator from the arguments of its configuration.

    Raises:
        TypeError: not bytes.
        SnapshotError: what is wrong with them. Sizes are held against the bytes that are there
            before anything is allocated; the laws, once an allocator of that size is filled.
    """
    most = MAX_TABLE_BYTES
    if max_table_bytes is not None:
        most = whole_number(max_table_bytes, "max_table_bytes", 1, meaning="a number of bytes")
    header, sections = unpack(data)
    checked = Checked.of(header, sections, most)
    try:
        alloc = make(from_plain(checked.config))
    except MemoryError:
        raise SnapshotError(
            f"its tables of {checked.config.table_bytes} bytes were not to be had"
        ) from None
    core = alloc._core
    fill(core, checked)
    alloc._refusals.update(checked.refusals)
    try:
        alloc.check()
    except LawViolation as violation:
        raise SnapshotError(f"it breaks a law: {violation}") from violation
    ready = write_tables(core)
    for pin in core.pins.by_handle.values():
        pin.ready = ready
    return alloc


def _refuse_waiting(core: Core) -> None:
    remedy = "call settle() once it is done, or pass assume_done=True to take all events for done"
    for entry in core.quarantine.entries:
        if core.quarantine.pending(entry.event) is not None:
            what = entry.what
            raise WrongState(
                f"{what.ids.size + what.side_ids.size} pages and {what.rows.size} rows wait behind "
                f"an event that is not done, and an event cannot be stored: {remedy}"
            )
    for pin in core.pins.aborted():
        if core.quarantine.pending(pin.event) is not None:
            raise WrongState(
                f"aborted request {pin.handle} waits behind an event that is not done, and an "
                f"event cannot be stored: {remedy}"
            )
    if core.device.updates and core.device.unwritten().size:
        raise WrongState(
            "a step of captured() is staged that no replay has applied, and its graph cannot be "
            "stored: replay it and let it finish, or pass assume_done=True to take it for written"
        )
