"""The verbs that give back: trim, compact, evict from the window, make sparse, release."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc import compacting, returning, thinning, transfer
from sgalloc.compacting import Moves
from sgalloc.holdings import counted
from sgalloc.inputs import Int64, counts, token_sequences
from sgalloc.ledger import names_one
from sgalloc.proving import Proving


class GivingBack(Proving):
    """What `KVAllocator` does to let pages, and rows, go."""

    @counted
    def trim(self, x: Any, lengths: Any, after: Any = None) -> None:
        """Park, or resume at a shorter prefix: C = min(C, lengths), pages past it go back.

        Below the window's frontier it lowers that to the page floor of the new C; the page that
        it cuts is taken afresh by the next growth.

        Args:
            x: a batch, handles or a handle.
            lengths: tokens to keep, an int or one per request.
            after: an event; pages wait in quarantine until it is done.

        Raises:
            InsideSharedPage: it would end inside a page shared with the prefix cache.
            WrongState: a step staged by `captured` has yet to write a page that would go back.
        """
        rows = self._ledger.rows_of(x)
        self._ledger.check_received(rows)
        returning.trim(self._core, rows, counts(lengths, rows.size, "lengths"), after)

    @counted
    def evict_window(self, x: Any, upto: Any = None, after: Any = None) -> Int64:
        """Give back the window pages that attention no longer reads.

        The frontier goes to the page floor of C - window; with a prefix cache to that of C - a
        whole-paged window, so that whoever shares the prefix still has one. It never falls here,
        and without ``upto`` it moves no sooner than the window's ``evict_every`` says.

        Args:
            x: a batch, handles or a handle.
            upto: tokens below which all goes, at most C, an int or one per request.
            after: an event; the pages wait in quarantine until it is done.

        Returns:
            The frontiers afterwards, tokens, int64 ``(n,)``.

        Raises:
            ValueError: ``upto`` above C, or an allocator without a window.
        """
        window = self._window()
        rows, committed, _ = self._ledger.holding(x)
        limit = None
        if upto is not None:
            limit = np.broadcast_to(counts(upto, rows.size, "upto"), rows.shape)
            past = (limit > committed).nonzero()[0]
            if past.size:
                at = past[0]
                raise ValueError(
                    f"upto[{at}]={limit[at]} is past the {committed[at]} committed tokens of row "
                    f"{rows[at]}: evict at most what is committed"
                )
        returning.evict_window(self._core, window, rows, committed, limit, after)
        return window.first.take(rows) * self.page_size

    @counted
    def compact(self, x: Any, accepted: Any, after: Any = None) -> Moves:
        """Commit the accepted path of a tree; pages wholly past the new C go back.

        Args:
            x: a batch, handles or a handle.
            accepted: row positions of each request's accepted tokens in order, within
                ``[C, A)``, ascending: one sequence per request, or an array ``(n, most)`` with -1
                at the ends of shorter rows.
            after: an event that is done when the moves are; pages wait until then.

        Returns:
            ``(src_slots, dst_slots)``, int32: what the engine has to move so that the tokens
            stand at C, C + 1, ...; those in place are left out. A token only ever moves to an
            earlier position, and may land where another is still to be read: gather all, then
            scatter, before a later step writes into the pages given back. With a window group,
            ``.window`` is the same pair in slots of that group.

        Raises:
            ValueError: positions below C, or not ascending; not one sequence per request.
            CommitPastExtent: a position at or past A.
        """
        rows = self._ledger.rows_of(x)
        self._ledger.check_received(rows)
        known = compacting.read_accepted(accepted, rows.size, names_one(x))
        return compacting.compact(self._core, rows, known, after)

    @counted
    def to_sparse(self, x: Any, after: Any = None) -> None:
        """After a prefill was copied out: keep a buffer on the device, and give back the rest.

        A request with more device pages than the buffer keeps so many, which leave the map, and
        one more, mapped, for its newest token; one with fewer keeps all, mapped. Each takes its
        scratch pages for drafts, and what it lacks of all that if it has only logical pages.

        Args:
            x: a batch, handles or a handle.
            after: an event; what goes back waits in quarantine until it is done.

        Raises:
            WrongState: one is sparse already.
            OutOfPages: the device group has too few pages; nothing was given back.
            ValueError: this allocator was made without ``sparse=``.
        """
        group = self._device_pages()
        rows = self._ledger.rows_of(x)
        self._ledger.check_received(rows)
        thinning.to_sparse(self._core, group, rows, after)

    @counted
    def release(self, x: Any, *, tokens: Any = None, after: Any = None) -> None:
        """Everything goes back: pages and row; one that is being received is aborted.

        Args:
            x: a batch, handles or a handle.
            tokens: the token ids of each request (one sequence per request): the whole pages
                they cover go to the prefix cache instead. Without a cache they are ignored.
            after: an event; pages, rows and locks wait in quarantine until it is done.

        Raises:
            StaleHandle: one was released before; none is released now.
            ValueError: one stands twice, or tokens differ from the shared prefix.
            WrongState: a step staged by `captured` has yet to write a page of one of them.
        """
        rows, prefix = self._ledger.rows_of(x), self._core.prefix
        prepared = []
        if tokens is not None:
            known = token_sequences(tokens, rows.size, names_one(x))
            prepared = prefix.prepare(rows, known) if prefix is not None else []
        transfer.release(self._core, rows, prepared, after)

    @counted
    def settle(self) -> None:
        """Take in what waits behind events that are done; waits for none."""
        self._core.settle()
