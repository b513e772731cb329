"""The engine: one step after the other, each a few calls of the allocator and a forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sgalloc
from examples.engine.cache import Branches, Cache, Canary, Passage, Tables, passage
from examples.engine.graph import DecodeGraphs
from examples.engine.model import Model
from examples.engine.scheduler import Array, Limits, Request, Scheduler
from examples.engine.speculation import Speculation
from sgalloc import sizing


@dataclass(frozen=True)
class Settings:
    """How an engine is made.

    Attributes:
        pages, window_pages: of the two pools.
        page_size: tokens.
        running: requests in rows at once.
        context: tokens of a request at most.
        chunk: tokens that are prefilled in a step.
        spec: what a decode step drafts.
        overlap: whether the host prepares a step before it has heard of the one before.
        prefix_cache: whether requests share prefixes.
        stop: the token that ends a request.
        canary: overwrite free pages with NaN.
        record: keep the logits of every token put out, for who compares them.
        graphs: capture the plain decode step in CUDA graphs.
    """

    pages: int
    window_pages: int
    page_size: int
    running: int
    context: int
    chunk: int = 64
    spec: sizing.SpecConfig = field(default_factory=sizing.SpecConfig)
    overlap: bool = False
    prefix_cache: bool = True
    stop: int = -1
    canary: bool = False
    record: bool = False
    graphs: bool = False

    @property
    def reserve(self) -> int:
        """How far past C a step may write. A tree is never overlapped: one length will do."""
        if self.spec.algorithm == "none":
            return 1
        of = sizing.alloc_reserve_per_decode if self.spec.topk == 1 else sizing.alloc_len_per_decode
        return of(self.spec, self.page_size)

    # guide: step 1
    def allocator(self, model: Model, stream: Any = None) -> sgalloc.KVAllocator:
        """The allocator of such an engine."""
        gpu = model.device.type == "cuda"
        alloc = sgalloc.KVAllocator(
            self.pages,
            self.page_size,
            max_requests=2 * self.running,  # rows wait, too, for the step that still reads them
            row_width=sizing.row_width(self.context + 1, self.spec, self.page_size),
            device="cuda" if gpu else "cpu",
            window=sgalloc.SlidingWindow(model.config.window, self.window_pages, slot_map=True),
            prefix_cache=self.prefix_cache,
            stream="plan" if gpu else None,
            reader=stream,
        )
        alloc.warm(4096)
        return alloc


class Landed:
    """The event of a step on the CPU: done once the host has heard of the step."""

    done = False

    def synchronize(self) -> None:
        """Nothing runs behind the host's back here: the host has heard of it."""
        self.done = True


@dataclass
class Flight:
    """A step that was launched, and of which the host has not heard yet.

    Attributes:
        rows, handles: who took part, ``(n,)``.
        tokens, counts: what the model put out, on their way to the host, ``(n, most)``, ``(n,)``.
        commits: whether C moves when the host hears of it.
        places: of a tree: the row position of each accepted token, ``(n, most)``.
        done: the event behind it.
        logits: those behind ``tokens``, if they are recorded.
    """

    rows: Array
    handles: Array
    tokens: Tensor
    counts: Tensor
    commits: bool
    done: Any
    places: Tensor | None = None
    logits: Tensor | None = None


class Engine:
    """Continuous batching over one model, and a draft model where it speculates."""

    def __init__(self, model: Model, settings: Settings, alloc: Any = None) -> None:
        self.model, self.settings = model, settings
        self.gpu = model.device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.gpu else None
        self.alloc = settings.allocator(model, self.stream) if alloc is None else alloc
        self.tables = Tables(self.alloc)
        self.models = [model]
        if settings.spec.algorithm != "none":
            self.models.append(model.draft())
        size = settings.page_size
        slots = ((settings.pages + 1) * size, (settings.window_pages + 1) * size)
        self.caches = [Cache(one, *slots) for one in self.models]
        limits = Limits(settings.running, settings.chunk, settings.reserve, settings.stop)
        self.scheduler = Scheduler(self.alloc, limits, settings.prefix_cache)
        # By row, on the device: the last token, and how many tokens have their KV written.
        self.last, self.length = torch.zeros(
            (2, self.alloc.max_requests + 1), dtype=torch.int64, device=model.device
        )
        self.speculation = Speculation(self) if len(self.models) > 1 else None
        self.flights: deque[list[Flight]] = deque()
        self.nans = torch.zeros((), dtype=torch.int64, device=model.device)
        self.recorded: dict[int, list[Tensor]] = {}
        self.canary = Canary(self.alloc, self.tables, self.caches) if settings.canary else None
        self._rows: tuple[Any, Tensor] | None = None
        if self.gpu:
            torch.cuda.synchronize()  # weights and pools were made on other streams
        self.graphs = DecodeGraphs(self) if settings.graphs else None

    # -- what a caller does ----------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.submit(request)

    def abort(self, name: int) -> None:
        """End a request, in whatever state it is."""
        self.scheduler.abort(name, self.behind())

    def run(self) -> None:
        """Step until nothing is left."""
        while self.busy:
            self.step()
        self.drain()

    @property
    def busy(self) -> bool:
        """Whether any request is not done."""
        scheduler = self.scheduler
        return bool(scheduler.queue or scheduler.prefilling or scheduler.running.size)

    def step(self) -> None:
        """Admit, prefill a chunk, decode a step, and hear of what was put out."""
        with self._on_stream():
            self.alloc.settle()
            self.scheduler.admit()
            self.flights.append([])
            self._prefill()
            self._decode()
            while len(self.flights) > int(self.settings.overlap):
                self.land(self.flights.popleft())

    def drain(self) -> None:
        """Hear of all that was launched."""
        with self._on_stream():
            while self.flights:
                self.land(self.flights.popleft())
            self.flights.append([])  # what this step has yet to launch

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.no_grad(), torch.cuda.stream(self.stream) if self.gpu else nullcontext():
            yield

    # -- prefill ---------------------------------------------------------------------------

    def _prefill(self) -> None:
        scheduler = self.scheduler

        # guide: step 4
        def plan(handles: Array) -> Any:
            upto = scheduler.upto[self.alloc.rows(handles)]
            return self.alloc.plan(extend=(handles, upto), evict_window=True)

        rows = scheduler.chunks()
        rows, chunk = scheduler.fitted(rows, scheduler.handle[rows], plan, self.drain)
        if not rows.size:
            return
        start, stop = chunk.start, chunk.stop
        out = self.slots(int((stop - start).sum()))
        self.alloc.apply(chunk, out=out)
        chunk.ready.wait(self.stream)
        self.granted(scheduler.handle[rows], chunk)
        most = int((stop - start).max())
        positions = start[:, None] + np.arange(most)
        inside = positions < stop[:, None]
        at = np.where(inside, positions, 0)
        tokens = self.upload(np.where(inside, scheduler.tokens[rows[:, None], at], 0))
        slots = torch.zeros(tokens.shape, dtype=torch.int64, device=self.model.device)
        slots.view(-1)[self.upload(inside.ravel().nonzero()[0])] = out
        ids, places = self.upload(rows), self.upload(np.where(inside, positions, -1))
        where = self.look_up(ids, places, slots, int(stop.max()))
        for draft, cache in zip(self.models[1:], self.caches[1:], strict=True):
            draft.forward(tokens, places, cache.attend(where))
        hidden = self.model.forward(tokens, places, self.caches[0].attend(where))
        ends = self.upload(stop - start - 1)
        logits = self.model.logits(hidden[torch.arange(rows.size, device=ends.device), ends])
        complete = stop == scheduler.known[rows]
        if complete.any():
            some = self.upload(complete.nonzero()[0])
            found, ids = self.chosen(logits[some]), ids[some]
            self.last[ids], self.length[ids] = found, self.upload(stop[complete])
            self.launched(rows[complete], found[:, None], None, False, logits=logits[some, None])
        scheduler.prefilled(rows, self.behind())

    # -- decode ----------------------------------------------------------------------------

    def _decode(self) -> None:
        scheduler = self.scheduler
        if self.speculation is not None:
            self.speculation.step()
            return

        # guide: step 6
        def plan(handles: Any) -> Any:
            return self.alloc.plan(decode=(handles, 1), evict_window=True)

        rows, step = scheduler.fitted(scheduler.running, scheduler.batch, plan, self.drain)
        if not rows.size:
            return
        out = self.slots(rows.size) if self.graphs is None else self.graphs.out(rows)
        self.alloc.apply(step, out=out)
        step.ready.wait(self.stream)
        self.granted(scheduler.batch, step)
        longest = int(step.stop.max())
        if self.graphs is None:
            found, logits = self.decode_forward(self.rows(rows), out, longest)
        else:
            found, logits = self.graphs.replay(rows, longest)
        self.launched(rows, found[:, None], None, False, logits=logits)

    def decode_forward(self, rows: Tensor, slots: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """One token for each row; reads and moves nothing but device memory.

        Rows of 0 are padding: they read and write the padding page.
        """
        at = self.length[rows][:, None]
        where = self.look_up(rows, at, slots[:, None], keys)
        hidden = self.model.forward(self.last[rows][:, None], at, self.caches[0].attend(where))
        logits = self.model.logits(hidden)
        found = self.chosen(logits)[:, 0]
        live = (rows > 0).long()
        self.last[rows], self.length[rows] = found * live, (at[:, 0] + 1) * live
        return found, logits

    # -- what all forwards share -----------------------------------------------------------

    def look_up(
        self, rows: Tensor, at: Tensor, slots: Tensor, keys: int, branches: Branches | None = None
    ) -> Passage:
        """`passage` of this engine's tables."""
        keys = -(-keys // 64) * 64 if self.gpu else keys  # kernels like it even
        dtype, config = self.model.dtype, self.model.config
        return passage(self.tables, config, rows, at, slots, keys, branches, dtype)

    def chosen(self, logits: Tensor) -> Tensor:
        """The best token of each; NaN, which a stale read leaves behind, is counted."""
        if self.settings.canary:
            self.nans += logits.isnan().any(-1).sum()
        return logits.argmax(-1)

    def rows(self, rows: Array) -> Tensor:
        """The running rows on the device, uploaded when they change."""
        if self._rows is None or self._rows[0] is not rows:
            self._rows = (rows, self.upload(rows))
        return self._rows[1]

    def upload(self, values: Array) -> Tensor:
        """Host numbers on the device."""
        found = torch.tensor(values)
        return found.pin_memory().to(self.model.device, non_blocking=True) if self.gpu else found

    def slots(self, size: int) -> Tensor:
        """Where the allocator is to put ``size`` slots."""
        return torch.empty(size, dtype=torch.int64, device=self.model.device)

    def granted(self, handles: Any, plan: Any) -> None:
        if self.canary is not None:
            self.canary.granted(handles, plan.cur, plan.nxt)

    # -- hearing of it ---------------------------------------------------------------------

    def launched(
        self,
        rows: Array,
        tokens: Tensor,
        counts: Tensor | None,
        commits: bool,
        places: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Note a step that was launched, and start its results on their way to the host."""
        done: Any = Landed()
        if counts is None:
            counts = torch.ones(rows.size, dtype=torch.int64)
        tokens, counts = self.fetch(tokens), self.fetch(counts)
        kept = logits.clone() if self.settings.record and logits is not None else None
        if self.gpu:
            done = torch.cuda.Event()
            done.record(self.stream)
        self.flights[-1].append(
            Flight(rows, self.scheduler.handle[rows], tokens, counts, commits, done, places, kept)
        )

    def fetch(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def behind(self) -> Any:
        """The event behind all that was launched; None where the host has heard of all."""
        launched = [flight for step in self.flights for flight in step]
        return launched[-1].done if launched else None

    # guide: step 9
    def land(self, step: Sequence[Flight]) -> None:
        """Hear of a step: take its tokens in, move C, and let go who is done."""
        scheduler = self.scheduler
        for flight in step:
            flight.done.synchronize()
            # A request that has left meanwhile is in its row no more.
            live = scheduler.handle[flight.rows] == flight.handles
            rows = flight.rows[live]
            kept = scheduler.keep(rows, flight.tokens.numpy()[live], flight.counts.numpy()[live])
            if flight.commits and rows.size:
                if flight.places is not None:
                    assert self.speculation is not None
                    self.speculation.compact(rows, flight.places.numpy()[live], kept)
                else:
                    self.alloc.commit(scheduler.handle[rows], kept)
            if flight.logits is not None:
                self._record(rows, flight.logits[torch.from_numpy(live)], kept)
            scheduler.finish(rows, self.behind())

    def _record(self, rows: Array, logits: Tensor, kept: Array) -> None:
        for row, some, count in zip(rows.tolist(), logits, kept.tolist(), strict=True):
            request = self.scheduler.request[row]
            assert request is not None
            self.recorded.setdefault(request.name, []).append(some[:count])
