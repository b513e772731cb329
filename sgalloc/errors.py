"""The errors that verbs raise. Each message carries the numbers and what to do about them."""

from __future__ import annotations


class AllocError(RuntimeError):
    """Base of every refusal. A refused call has changed nothing, on the host or on the device.

    Attributes:
        told: what a journal or debug mode knows of the calls before; it ends the message.
    """

    told: str = ""

    def __str__(self) -> str:
        return f"{self._words()}{self.told}"

    def _words(self) -> str:
        return super().__str__()


class OutOfPages(AllocError):
    """A group has too few pages.

    Attributes:
        group: name of the group, such as ``"full"``.
        need: pages the call needs, net of what it gives back first.
        free: pages that are free now.
        cached: pages of the prefix cache that could be evicted.
    """

    def __init__(self, group: str, need: int, free: int, cached: int = 0) -> None:
        super().__init__(group, need, free, cached)
        self.group = group
        self.need = need
        self.free = free
        self.cached = cached

    def _words(self) -> str:
        return (
            f"group '{self.group}' needs {self.need} pages, but {self.free} are free and "
            f"{self.cached} more could be evicted: release or retract requests, "
            "or make the pool larger"
        )


class OutOfRows(AllocError):
    """More requests than free rows.

    Attributes:
        need: rows asked for.
        free: rows that are free now.
    """

    def __init__(self, need: int, free: int) -> None:
        super().__init__(need, free)
        self.need = need
        self.free = free

    def _words(self) -> str:
        return (
            f"{self.need} rows are needed, but {self.free} are free: "
            "release requests first, or raise max_requests"
        )


class RowTooNarrow(AllocError):
    """A request would pass the end of its row.

    Attributes:
        row: the row (0 where the request is not open yet).
        need: tokens the row would have to hold.
        width: tokens it can hold.
    """

    def __init__(self, row: int, need: int, width: int) -> None:
        super().__init__(row, need, width)
        self.row = row
        self.need = need
        self.width = width

    def _words(self) -> str:
        return (
            f"row {self.row} would need {self.need} slots, but it is {self.width} wide: "
            "shorten the request, or size rows with sgalloc.sizing.row_width"
        )


class StaleHandle(AllocError):
    """A handle that names no open request: released before, or never handed out."""


class WrongState(AllocError):
    """The request is in a state in which the call makes no sense.

    Attributes:
        of_device: whether the device alone refused it, and what requests hold did not matter.
    """

    of_device = False


class InsideSharedPage(WrongState, ValueError):
    """A trim that would end inside a page shared with the prefix cache."""


class CommitPastExtent(AllocError):
    """A commit beyond the extent that the request holds."""


class StalePlan(AllocError):
    """A plan or a match made before something it depends on changed."""


class DeviceFailed(AllocError):
    """CUDA failed under a call, which has changed nothing on the host.

    Attributes:
        device: its name, such as ``"cuda:0"``.
        cause: CUDA's own words.
        step: what was being done, such as ``"writing 4 new pages of rows 1, 2"``.
        before: the last step that was launched before, ``""`` for none.
        version: of the plan that was being applied; None where it was no plan.
        lost: whether the device is lost for good. The ledger still answers, takes back and
            snapshots; whatever has to write a table raises this error again.
    """

    def __init__(
        self,
        device: str,
        cause: str,
        step: str,
        before: str = "",
        lost: bool = False,
        version: int | None = None,
    ) -> None:
        super().__init__(device, cause, step, before, lost, version)
        self.device = device
        self.cause = cause
        self.step = step
        self.before = before
        self.lost = lost
        self.version = version
        self.first = True

    def again(self) -> DeviceFailed:
        """The same failure, met by a later call."""
        args = (self.device, self.cause, self.step, self.before, self.lost, self.version)
        other = DeviceFailed(*args)
        other.first = False
        return other

    def of_plan(self, version: int) -> None:
        """Name the plan that was being applied, unless the failure is an earlier one's."""
        if self.first:
            self.version = version

    def __str__(self) -> str:
        plan = "" if self.version is None else f", plan version {self.version}"
        after = f", after {self.before}" if self.before else ""
        remedy = (
            "the device is lost, but not the ledger: snapshot(assume_done=True) and restore it in "
            "a new process"
            if self.lost
            else "nothing has changed: give the GPU room, and call again"
        )
        met = "" if self.first else "had "
        return f"{self.device} {met}failed while {self.step}{plan}{after} ({self.cause}); {remedy}"


class LawViolation(AllocError):
    """The row law or the partition law does not hold: a fault in the allocator or in memory."""


class NotHeld(LawViolation, ValueError):
    """A page given back by one who does not hold it, or twice."""


class SnapshotError(AllocError, ValueError):
    """Bytes that are no snapshot, or one that was cut, altered or made up."""

    def _words(self) -> str:
        return f"this snapshot cannot be restored: {super()._words()}"


class MirrorDiverged(AllocError):
    """Ranks that should mirror each other hold different things.

    Attributes:
        common: the digest that most ranks have.
        others: the digests of the ranks that differ, by rank.
        record: where all ranks have journals, the number of the first record that differs, in
            the journal of the lowest rank that goes so far; else None.
        calls: what each rank has there, in words, by rank; empty without a record.
    """

    def __init__(
        self,
        common: str,
        others: dict[int, str],
        record: int | None = None,
        calls: dict[int, str] | None = None,
        noted: bool = False,
    ) -> None:
        super().__init__(common, others, record, calls, noted)
        self.common = common
        self.others = others
        self.record = record
        self.calls = calls or {}
        self._noted = noted

    def _words(self) -> str:
        named = ", ".join(f"rank {rank} ({found[:8]})" for rank, found in self.others.items())
        verb = "differs" if len(self.others) == 1 else "differ"
        return f"{named} {verb} from the other ranks ({self.common[:8]}): {self._why()}"

    def _why(self) -> str:
        if self.record is not None:
            ranks: dict[str, list[int]] = {}
            for rank, call in self.calls.items():
                ranks.setdefault(call, []).append(rank)
            said = "; ".join(
                f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}: {call}"
                for call, some in ranks.items()
            )
            return f"their journals part at record {self.record}: {said}"
        if self._noted:
            return (
                "their journals tell of the same calls, or one cannot be read: run check() on each "
                "rank, and sgalloc replay --journal"
            )
        return (
            "they made other calls, or took in other events; call settle() on all together, and "
            "give every rank a journal=, which names the first call that differs"
        )
