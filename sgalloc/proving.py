"""What proves an allocator sound, or equal to another: nothing here changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sgalloc import laws, sparse_laws, window_laws
from sgalloc.groups.sparse import DevicePages
from sgalloc.groups.window import Window
from sgalloc.holdings import Holdings, counted
from sgalloc.inputs import flag
from sgalloc.pages import Int32
from sgalloc.trust.digest import Tally, digest
from sgalloc.trust.probe import Probe, check_tables
from sgalloc.trust.snapshot import snapshot

if TYPE_CHECKING:
    from sgalloc.trust.journalled import Journalled


class Proving(Holdings):
    """Laws, probes, digests and snapshots of `KVAllocator`."""

    _tally: Tally | None = None
    _journal: Journalled | None

    @counted
    def snapshot(self, assume_done: bool = False) -> bytes:
        """All that decides later behaviour, as bytes for `KVAllocator.restore`.

        What waits behind an event that is done is stored as come back, as the next verb finds it.

        Args:
            assume_done: store what waits behind undone events, or for a replay, as if they were
                done, such as after a GPU was lost.

        Raises:
            WrongState: an event is not done, or a step of `captured` waits for its replay.
        """
        return snapshot(self._core, self._refusals, assume_done)

    def digest(self, *, incremental: bool = False) -> str:
        """A hash of ids, lengths, rows and cache, 32 hexadecimal digits, computed when asked.

        Equal on allocators that were given the same calls, whatever device they are on, at equal
        event state; refused calls and counters leave it alone.

        Args:
            incremental: the same number, kept up: the first such call looks at everything, and
                later ones at what verbs have changed since, and at a few numbers of each row.
                From then on verbs note what they change. Without it everything is read anew, so
                that what a stray write has changed is seen, too.
        """
        self._owner.check()
        if not flag(incremental, "incremental"):
            return digest(self._core)
        if self._tally is None:
            self._tally = Tally(self._core, keeps=True)
        return self._tally.value()

    def check(self, device: bool = False) -> Int32:
        """Prove the row law and the partition law, in time linear in pages.

        Args:
            device: prove the device's tables equal to the ledger, too: the device hashes them
                behind all that was written, and this waits for it. Pages that a step of
                `captured` has staged, and that no replay has written yet, are left out.

        Returns:
            The rows of which pages were left out, int32 ``(n,)``; none without such a step.

        Raises:
            LawViolation: naming the page and both owners; or the entry of the table, both values,
                and the last plan that wrote it.
            WrongState: ``device`` while a stream is being captured.
        """
        self._owner.check()
        core, device = self._core, flag(device, "device")
        laws.check_rows(core.ledger)
        if core.tree is not None and core.prefix is not None:
            laws.check_locks(core.tree, core.prefix.holds, core.quarantine, core.pins)
            laws.check_shared(core.ledger, core.tree, core.prefix.holds)
        window = core.side if isinstance(core.side, Window) else None
        sparse = core.side if isinstance(core.side, DevicePages) else None
        if sparse is not None:
            sparse_laws.check_sparse(core.ledger, sparse)
        laws.check_pages(core.ledger, core.pool, core.tree, core.quarantine, core.pins, core.side)
        if window is not None:
            window_laws.check_window(core.ledger, window, core.tree)
        laws.check_row_ids(core.ledger, core.quarantine, core.pins)
        laws.check_pins(core.ledger, core.pins)
        if device:
            return check_tables(core)
        return np.empty(0, np.int32)

    @counted
    def probe(self, x: Any = None) -> Probe:
        """Have the device's tables compared with the ledger, without waiting for the device.

        One launch behind all that was written, which hashes the tables; the host works out in
        the meantime what they should be. ``probe.done`` polls, ``probe.result()`` compares.

        Args:
            x: a batch, handles or a handle: their rows alone; all rows, and the map, if None.

        Raises:
            WrongState: a stream is being captured, or too many probes were not looked at.
        """
        return Probe(self._core, None if x is None else self._ledger.rows_of(x))
