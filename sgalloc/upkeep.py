"""What an engine does with an allocator besides steps: graphs, warming up, journal, threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgalloc import growing
from sgalloc.device import Writer
from sgalloc.inputs import whole_number
from sgalloc.plan import Plan
from sgalloc.receiving import Receiving
from sgalloc.shape import MAX_SLOT

if TYPE_CHECKING:
    from sgalloc.device.captured import CapturedUpdate


class Upkeep(Receiving):
    """Graphs, warming up, the end of a journal, and whose thread `KVAllocator` belongs to."""

    def captured(self, max_pages: int) -> CapturedUpdate:
        """An update to put into a CUDA graph of one's own.

        ``update.launch(stream)`` puts its kernel on a capturing stream; ``update.stage(plan)``
        applies a plan on the host, and the next replay of the graph writes it.

        Args:
            max_pages: most new pages of one staged plan.

        Raises:
            ValueError: the table is not on a GPU.
        """
        self._owner.check()
        most = whole_number(max_pages, "max_pages", 1, MAX_SLOT)
        return self._core.device.captured(self._apply_through, most)  # type: ignore[no-any-return]

    def warm(self, max_pages: int | None = None) -> None:
        """Compile, allocate and touch all that a steady step uses, so that no later one pays.

        Args:
            max_pages: the most new pages of one step; on a GPU 2**21 if None, on a CPU there is
                no bound.
        """
        self._owner.check()
        if max_pages is not None:
            whole_number(max_pages, "max_pages", 1)
        self._ledger.warm()
        self._core.device.warm(max_pages)

    def close_journal(self) -> None:
        """Write the journal to its end, and close it; the allocator goes on without one.

        Raises:
            JournalError: the journal had ended early.
        """
        self._owner.check()
        if self._journal is not None:
            self._journal.close()

    def adopt(self) -> None:
        """Let the calling thread use this allocator from now on, in place of the one that did.

        The first thread that calls a verb owns the allocator; any other is refused, until the
        owner has ended, or another adopts it. Adopt while the owner makes no call, and under a
        lock of your own where threads take turns.

        Raises:
            WrongState: the allocator is on a GPU, and was made before this process was forked.
        """
        self._owner.adopt()

    def _apply_through(self, plan: Plan, writer: Writer) -> None:
        """`apply`, with the table written by ``writer``."""
        self._owner.check()
        self._check_plan(plan)
        self._core.settle()
        growing.apply(self._core, plan, None, None, writer)
