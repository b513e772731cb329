"""Prefill on one node and decode on another: two processes, and KV that travels page by page."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import sgalloc
from examples.engine.engine import Engine, Settings
from examples.engine.model import Model
from examples.engine.scheduler import Array, Limits, Request, Scheduler
from sgalloc import sizing
from sgalloc.extents import pair_extents

FULL, WINDOW = 0, 1  # what writes to a request: the layers that see all, those with a window


class Link:
    """The other of two nodes. Each step, both say what they have to say."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.said: list[tuple[Any, ...]] = []

    def say(self, *message: Any) -> None:
        """Have something told at the next exchange."""
        self.said.append(message)

    def exchange(self, busy: bool) -> tuple[bool, list[tuple[Any, ...]]]:
        """Whether either node is busy, and what the other one said."""
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (busy or bool(self.said), self.said))
        self.said = []
        return found[0][0] or found[1][0], found[1 - self.rank][1]


class Pieces(NamedTuple):
    """Runs of pages of one group, on this node: first pages and counts."""

    first: list[int]
    count: list[int]

    def slots_of(self, engine: Engine, windowed: bool) -> list[torch.Tensor]:
        """The runs in the pools of all layers of the group, in the order of the wire."""
        size = engine.alloc.page_size
        return [
            pool[first * size : (first + count) * size]
            for cache in engine.caches
            for layer, pools in enumerate(cache.pools)
            if cache.config.windowed(layer) == windowed
            for pool in pools
            for first, count in zip(self.first, self.count, strict=True)
        ]


class Sent:
    """The event that a sender's pages wait for: done when the last byte has left."""

    done = False

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        """Wait for the bytes to leave."""
        for work in self.works:
            work.wait()
        self.done = True


# -- the node that prefills ----------------------------------------------------------------------


class Sending(Scheduler):
    """Finishes a request by sending its KV to whoever asked for it."""

    def __init__(self, alloc: Any, limits: Limits, prefix_cache: bool, link: Link) -> None:
        super().__init__(alloc, limits, prefix_cache)
        self.link = link
        self.asked: dict[int, tuple[int, Array, Array]] = {}
        self.outgoing: list[tuple[Sent, Pieces, Pieces]] = []

    # guide: step 10
    def finish(self, rows: Array, after: Any) -> None:
        """A prompt is complete: its pages go out, and stay as they are until they are gone."""
        for row in rows.tolist():
            request = self.request[row]
            assert request is not None
            start, pages, window = self.asked.pop(request.name)
            handle, size, sent = int(self.handle[row]), request.prompt.size, Sent()
            own = self.alloc.window_pages(handle)[start // self.alloc.page_size :][: window.size]
            held = window != 0  # the other node asks for the tail of the window alone
            assert own[held].all(), "a page of the window that is asked for has been evicted"
            full = pair_extents(self.alloc.pages(handle, start=start, stop=size), pages)
            beside = pair_extents(own[held], window[held])
            here = [Pieces(at.tolist(), count.tolist()) for at, _, count in (full, beside)]
            there = [(to.tolist(), count.tolist()) for _, to, count in (full, beside)]
            self.outgoing.append((sent, *here))
            self.link.say("kv", request.name, int(self.tokens[row, size]), *there)
            super().finish(np.array([row]), sent)


class PrefillNode(Engine):
    """Computes prompts for another node, and their first tokens."""

    def __init__(self, model: Model, settings: Settings, link: Link) -> None:
        super().__init__(model, settings)
        self.link = link
        self.sender = Sending(self.alloc, self.scheduler.limits, settings.prefix_cache, link)
        self.scheduler = self.sender

    def serve(self) -> None:
        """Step until neither node has anything to do."""
        going, leaving = True, []
        while going:
            outgoing, self.sender.outgoing = self.sender.outgoing, []
            going, heard = self.link.exchange(self.busy or bool(outgoing))
            for sent in leaving:  # the other node has taken them in since
                sent.wait()
            leaving = [sent for sent, _, _ in outgoing]
            for sent, full, beside in outgoing:
                pieces = full.slots_of(self, False) + beside.slots_of(self, True)
                sent.works = [dist.isend(piece, 1 - self.link.rank) for piece in pieces]
            for kind, name, *rest in heard:
                if kind == "prefill":
                    tokens, namespace, *places = rest
                    self.sender.asked[name] = tuple(places)
                    self.submit(Request(name, tokens, 1, namespace))
                elif name in self.sender.asked:  # aborted before it was sent
                    del self.sender.asked[name]
                    self.abort(name)
                    self.link.say("gone", name)
            self.step()
        self.alloc.settle()

    def _decode(self) -> None:
        """The other node does."""


# -- the node that decodes -----------------------------------------------------------------------


class Receiving(Scheduler):
    """Admits a request by making room for its KV, and asking the other node for it."""

    def __init__(self, engine: Engine, link: Link) -> None:
        super().__init__(engine.alloc, engine.scheduler.limits, engine.settings.prefix_cache)
        self.engine, self.link = engine, link
        self.coming: dict[int, int] = {}

    # guide: step 10
    def admit(self) -> None:
        """Preallocate as many of the queue as fit, and ask for their KV."""
        alloc, ahead = self.alloc, self.limits.reserve
        while self.queue and self.running.size + len(self.coming) < self.limits.running:
            request = self.queue[0]
            size, active = request.tokens.size, self.running.size + len(self.coming)
            match = alloc.prefix.match(
                request.tokens[:-1] if request.shares else [], request.namespace
            )
            queue = [(size, match)]
            if not sgalloc.admission.admit(alloc, queue, active, ahead, step_tokens=ahead):
                if active or self.engine.behind() is not None:
                    return  # some will give pages back
                # Alone, and still too large: beside its own cached prefix, that is.
                assert request.shares, f"request {request.name} fits no node like this"
                request.shares = False
                continue
            self.queue.popleft()
            self.counts["matched"] += match.length
            tail = sizing.window_tail(size, self.engine.model.config.window, alloc.page_size, True)
            (handle,) = alloc.preallocate([size], 2, [match], window_tail=tail)
            self._enter(request, int(handle))
            self.coming[request.name] = int(handle)
            if self.engine.canary is not None:
                self.engine.canary.granted(handle, match.length, alloc.allocated(handle))
            # Page ids must not leave before the last reader of these pages is done.
            while not alloc.receiving(handle).ready.query():
                pass
            pages = alloc.pages(handle, start=match.length, stop=size)
            beside = alloc.window_pages(handle)[match.length // alloc.page_size :]
            what = request.name, request.tokens, request.namespace
            self.link.say("prefill", *what, match.length, pages, beside)

    def abort(self, name: int, after: Any) -> None:
        """End a request; one that is being received comes back when its writers are done."""
        if name in self.coming and self.alloc.receiving(self.coming[name]) is not None:
            self.link.say("abort", name)
        super().abort(name, after)


class DecodeNode(Engine):
    """Receives prompts that another node has computed, and goes on with them."""

    def __init__(self, model: Model, settings: Settings, link: Link) -> None:
        super().__init__(model, settings)
        self.link = link
        self.receiver = Receiving(self, link)
        self.scheduler = self.receiver

    @property
    def busy(self) -> bool:
        """Whether any request is not done, or still being written to."""
        return super().busy or bool(self.receiver.coming)

    def step(self) -> None:
        """A step, and before it what the other node sent."""
        _, heard = self.link.exchange(True)
        for kind, name, *rest in heard:
            handle = self.receiver.coming.pop(name)
            if kind == "kv":
                first, full, beside = rest
                self._receive(Pieces(*full), Pieces(*beside))
            for writer in (FULL, WINDOW):
                self.alloc.acknowledge(handle, writer)
            if kind == "kv":
                self._join(handle, first)
        super().step()

    def finish(self) -> None:
        """Let the other node go, too."""
        while self.link.exchange(False)[0]:
            pass

    def _receive(self, full: Pieces, beside: Pieces) -> None:
        """Into pages that are pinned for this very writer, also where it was aborted."""
        pieces = full.slots_of(self, False) + beside.slots_of(self, True)
        for work in [dist.irecv(piece, 1 - self.link.rank) for piece in pieces]:
            work.wait()

    def _join(self, handle: int, first: int) -> None:
        """All is there: the request decodes from now on, if nobody has aborted it."""
        scheduler = self.scheduler
        (rows,) = (scheduler.handle == handle).nonzero()
        if rows.size:
            self.last[rows[0]], self.length[rows[0]] = first, int(scheduler.known[rows[0]])
            scheduler.join(rows, self.behind())
            scheduler.keep(rows, np.array([[first]]), np.ones(1, np.int64))
            scheduler.finish(rows, self.behind())
