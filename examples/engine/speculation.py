"""Speculative decoding: chains, trees and blocks of drafts, verified by one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from examples.engine.cache import Branches
from sgalloc.errors import OutOfPages
from sgalloc.speculative import dflash, eagle

if TYPE_CHECKING:
    from examples.engine.engine import Array, Engine


TARGET, DRAFT = 0, 1


class Round(NamedTuple):
    """One step: rows and positions of the last tokens, ``(n,)``, and where drafts are written.

    Attributes:
        slots: ``(n, drafts)``.
        keys: columns that the longest may look at.
        branches: where these are branches of trees.
    """

    rows: Tensor
    at: Tensor
    slots: Tensor
    keys: int
    branches: Branches | None = None


class Speculation:
    """The decode step of an engine that speculates. Greedy: a draft is right or it is not."""

    def __init__(self, engine: Engine) -> None:
        spec = engine.settings.spec
        self.engine, self.spec = engine, spec
        self.block = spec.algorithm == "dflash"
        self.tree = spec.topk > 1
        self.drafts = spec.steps if self.tree else spec.draft_tokens
        if self.tree and engine.settings.overlap:
            raise ValueError("a tree is not overlapped: compact needs the accepted tokens")
        self.lengths = dflash.Lengths(engine.alloc) if self.block else None
        if self.lengths is not None:  # once: they keep their addresses
            self.committed = torch.from_dlpack(self.lengths.committed)
        self.moved = 0

    # guide: step 9
    def step(self) -> None:
        """Make room for what a step may write, draft, verify, and let the host know later."""
        engine, scheduler = self.engine, self.engine.scheduler
        alloc, reserve = engine.alloc, engine.settings.reserve
        rows = scheduler.running
        if not rows.size:
            return
        step, out = self._prepared(scheduler.batch)
        if step is None:
            rows, _ = scheduler.fitted(
                rows,
                scheduler.batch,
                lambda some: alloc.plan(reserve=(some, reserve), evict_window=True),
                engine.drain,
            )
            if not rows.size:
                return
            step, out = self._prepared(scheduler.batch)
        step.ready.wait(engine.stream)
        engine.granted(scheduler.batch, step.plan)
        run = self._tree if self.tree else self._block if self.block else self._chain
        slots = out.view(rows.size, reserve)
        found = run(engine.rows(rows), slots, step.plan.start, step.max_seq_len)
        engine.launched(rows, *found)

    def _prepared(self, batch: Any) -> tuple[Any, Any]:
        """The step's reserve, and its slots; None where it does not fit."""
        engine, reserve = self.engine, self.engine.settings.reserve
        out = engine.slots(len(batch) * reserve)
        try:
            if self.block:
                step: Any = dflash.prepare_for_decode(
                    engine.alloc, batch, self.spec, lengths=self.lengths, out=out
                )
            else:
                step = eagle.prepare_for_decode(
                    engine.alloc, batch, self.spec, reserve=reserve, out=out
                )
        except OutOfPages:
            return None, None
        return step, out

    # -- what is drafted -------------------------------------------------------------------

    def _chain(self, rows: Tensor, slots: Tensor, start: Array, keys: int) -> tuple[Any, ...]:
        """One draft after the other, at the positions where the device really is."""
        engine = self.engine
        at = engine.length[rows]
        this = Round(rows, at, self._own(slots, at - engine.upload(start)), keys)
        drafts = [engine.last[rows][:, None]]
        for number in range(self.drafts):
            drafts.append(engine.chosen(self._logits(DRAFT, this, drafts[-1], number)))
        return self._verified(this, torch.cat(drafts[:-1], 1))

    def _block(self, rows: Tensor, slots: Tensor, start: Array, keys: int) -> tuple[Any, ...]:
        """All drafts of a block in one forward, from a block of guesses.

        The draft model's KV of the guesses is worth nothing: it is computed again for the drafts.
        """
        engine = self.engine
        at = engine.length[rows]
        this = Round(rows, at, self._own(slots, at - self.committed[: rows.shape[0]]), keys)
        guesses = engine.last[rows][:, None].expand(-1, self.drafts)
        best = engine.chosen(self._logits(DRAFT, this, guesses))
        drafts = torch.cat((guesses[:, :1], best[:, :-1]), 1)
        engine.chosen(self._logits(DRAFT, this, drafts))
        return self._verified(this, drafts)

    def _tree(self, rows: Tensor, slots: Tensor, start: Array, keys: int) -> tuple[Any, ...]:
        """The best ``topk`` first drafts, and a chain behind each, on pages of its own.

        Branch ``b`` stands ``b`` times a branch's whole pages further, and begins with the last
        token: a branch is the request itself whose tail stands elsewhere.
        """
        engine, size, topk = self.engine, self.engine.alloc.page_size, self.spec.topk
        whole = -(-(start % size + self.drafts) // size) * size
        shift = engine.upload(whole)[:, None] * torch.arange(topk, device=rows.device)
        places = torch.arange(self.drafts, device=rows.device)
        own = slots.gather(1, (shift[:, :, None] + places).flatten(1)).view(-1, self.drafts)
        at = engine.length[rows]
        # Each branch is a request of its own from here on.
        many, where = rows.repeat_interleave(topk), at.repeat_interleave(topk)
        this = Round(many, where, own, keys, Branches(where, shift.flatten()))
        drafts = [engine.last[many][:, None]]
        for number in range(self.drafts):
            logits = self._logits(DRAFT, this, drafts[-1], number)
            if number:
                drafts.append(engine.chosen(logits))
            else:
                drafts.append(logits[::topk, 0].topk(topk).indices.view(-1, 1))
        found, counts, logits = self._scored(this, torch.cat(drafts[:-1], 1))
        # The branch that the model agrees with furthest.
        counts, best = counts.view(-1, topk).max(1)
        which = torch.arange(rows.shape[0], device=rows.device) * topk + best
        stands = (at + shift.gather(1, best[:, None])[:, 0])[:, None] + places
        self._moved_on(rows, at, found[which], counts)
        return found[which], counts, True, engine.fetch(stands), logits[which]

    # -- what is kept ----------------------------------------------------------------------

    def _verified(self, this: Round, drafts: Tensor) -> tuple[Any, ...]:
        found, counts, logits = self._scored(this, drafts)
        self._moved_on(this.rows, this.at, found, counts)
        return found, counts, True, None, logits

    def _scored(self, this: Round, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the model says behind each draft, and how many of its tokens are kept."""
        logits = self._logits(TARGET, this, drafts)
        found = self.engine.chosen(logits)
        right = (drafts[:, 1:] == found[:, :-1]).long().cumprod(1)
        return found, 1 + right.sum(1), logits

    def _moved_on(self, rows: Tensor, at: Tensor, found: Tensor, counts: Tensor) -> None:
        self.engine.last[rows] = found.gather(1, counts[:, None] - 1)[:, 0]
        self.engine.length[rows] = at + counts

    # guide: step 9
    def compact(self, rows: Array, places: Array, kept: Array) -> None:
        """Bring the accepted branch of each request to where it goes on, in all pools."""
        engine = self.engine
        accepted = np.where(np.arange(places.shape[1]) < kept[:, None], places, -1)
        moves = engine.alloc.compact(engine.scheduler.handle[rows], accepted)
        self.moved += moves[0].size
        if moves[0].size:
            full, beside = (
                [engine.upload(each).long() for each in m] for m in (moves, moves.window)
            )
            for cache in engine.caches:
                cache.move(full, beside)

    # -- parts -----------------------------------------------------------------------------

    def _own(self, slots: Tensor, lag: Tensor) -> Tensor:
        """The slots of this step: the device may be further than the host knows."""
        return slots.gather(1, lag[:, None] + torch.arange(self.drafts, device=lag.device))

    def _logits(self, which: int, this: Round, tokens: Tensor, first: int = 0) -> Tensor:
        """Logits of one of the models behind ``tokens``, drafts ``first`` and on."""
        engine, model, width = self.engine, self.engine.models[which], tokens.shape[1]
        places = this.at[:, None] + first + torch.arange(width, device=tokens.device)
        write = this.slots[:, first : first + width]
        where = engine.look_up(this.rows, places, write, this.keys, this.branches)
        return model.logits(model.forward(tokens, places, engine.caches[which].attend(where)))
