"""Every verb, as a call that is ready to be made: one allocator with requests in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from cupy.cuda import runtime
from gpu.currents import event_behind
from gpu.naive import NaiveTables, equal, exported, gathered
from gpu.twins import Out, host
from host_support import open_handles

import sgalloc

SIZE = 4
_ROWS, _WIDTH, _PAGES = 24, 4096 * SIZE, 12_000
LONG = 2000 * SIZE  # tokens of a step that is too large to be read in place
_PROMPT = np.arange(6 * SIZE)


class World:
    """An allocator on the GPU, warm, and what the verbs below need.

    Attributes:
        edge: four requests at C = A = 12: the next token needs a page.
        inside: four requests at C = 9, A = 12.
        spare: two more such, for what goes away.
        sharing: a request whose prompt is cached already.
        receiving: two requests that a remote writer fills.
        stream: the stream whose events the verbs that take ``after=`` wait for.
    """

    def __init__(self, **how: Any) -> None:
        self.alloc = sgalloc.KVAllocator(
            _PAGES, SIZE, _ROWS, _WIDTH, device="cuda", prefix_cache=True, page_table=True, **how
        )
        alloc = self.alloc
        alloc.warm(8192)
        self.stream = 0
        self.naive = NaiveTables(_ROWS, _WIDTH, SIZE)
        (done,) = alloc.open().tolist()
        alloc.extend(done, _PROMPT.size)
        self.keep()
        alloc.release(done, tokens=[_PROMPT])
        self.edge = alloc.open(4)
        alloc.extend(self.edge, 3 * SIZE)
        self.inside = alloc.open(4)
        alloc.extend(self.inside, 2 * SIZE + 1)
        self.spare = alloc.open(2)
        alloc.extend(self.spare, 2 * SIZE + 1)
        (self.sharing,) = alloc.open().tolist()
        alloc.extend(self.sharing, _PROMPT.size)
        self.receiving = alloc.preallocate([9, 13], deadline=5)
        self.batch = alloc.batch(self.edge)
        self.match = alloc.prefix.match(_PROMPT)
        self.tables = alloc.page_tables(8, 16)
        self.outs: dict[int, Out] = {n: Out(n, "cupy int64") for n in (0, 4, 12, 20, 28)}
        self.expected: dict[int, np.ndarray] = {}
        self.exported: tuple[Any, list[int]] | None = None
        alloc.slots(self.edge, 0, 3)  # so that CuPy's pool has what a later one takes
        self._events: list[Any] = []
        self.keep()
        self.verify()

    def keep(self) -> None:
        """Let the naive tables take in what is held now, before some of it goes away."""
        self.naive.write(self.alloc, open_handles(self.alloc))

    def out(self, size: int) -> Any:
        """An array on the GPU for so many slots."""
        return self.outs[size].gpu

    def event(self, kind: str = "cupy") -> Any:
        """An event behind all that is queued on `stream`."""
        event, owner = event_behind(self.stream, kind)
        self._events.append(owner)
        return event

    def asked(self, size: int, handles: Any, start: Any, stop: Any) -> None:
        """Note what ``out`` of ``size`` must hold: slots of a range that is allocated now."""
        self.expected[size] = gathered(self.alloc, np.atleast_1d(handles).tolist(), start, stop)

    def verify(self) -> None:
        """Tables, outs and exports against the naive writer."""
        self.keep()
        runtime.deviceSynchronize()
        assert equal(host(self.alloc.req_to_token), self.naive.table)
        assert equal(host(self.alloc.page_table), self.naive.page_table)
        for size, slots in self.expected.items():
            out = self.outs[size]
            out.cpu[:] = slots
            out.verify()
        if self.exported is not None:
            handles, lengths = self.exported
            expected = exported(self.alloc, handles, lengths, 16)
            for name, part in expected._asdict().items():
                found = host(getattr(self.tables, name))[: len(part)]
                assert np.array_equal(found, part), name
        self.alloc.check(device=True)


class Verb(NamedTuple):
    """One call.

    Attributes:
        call: makes it; returns what the verb returned.
        launches, copies: what it costs in a steady state.
    """

    call: Callable[[World], Any]
    launches: int = 0
    copies: int = 0


def _with_out(size: int, handles: str, start: int, stop: int, do: Callable[..., Any]) -> Any:
    def call(w: World) -> Any:
        result = do(w, w.out(size))
        w.asked(size, getattr(w, handles), start, stop)
        return result

    return call


def _device(w: World, each: bool) -> Any:
    tokens: Any = np.array([5, 9, 1, 17]) if each else 16
    return w.alloc.reserve(w.edge, tokens, rounding="device")


def _mixed(w: World) -> Any:
    a = w.alloc
    return a.apply(a.plan((w.spare, 30), (w.edge, 1), (w.inside, 16)))


def _exports(w: World) -> Any:
    w.exported = (w.edge.tolist(), [3 * SIZE] * 4)
    return w.tables.update(w.edge)


def _into_cache(w: World) -> Any:
    return w.alloc.release(w.spare, tokens=[np.arange(9) + 50, np.arange(9) + 90])


VERBS: dict[str, Verb] = {
    "open": Verb(lambda w: w.alloc.open(3)),
    "extend": Verb(lambda w: w.alloc.extend(w.edge, 16), 1),
    "extend with out": Verb(
        _with_out(28, "edge", 12, 19, lambda w, out: w.alloc.extend(w.edge, 19, out=out)), 1
    ),
    "extend after": Verb(lambda w: w.alloc.extend(w.edge, 16, after=w.event()), 1),
    "extend by many": Verb(lambda w: w.alloc.extend(w.spare[:1], LONG), 1, 1),
    "extend without need": Verb(lambda w: w.alloc.extend(w.inside, 12)),
    "decode": Verb(lambda w: w.alloc.decode(w.batch), 1),
    "decode with out": Verb(
        _with_out(4, "edge", 12, 13, lambda w, out: w.alloc.decode(w.batch, out=out)), 1
    ),
    "decode after": Verb(lambda w: w.alloc.decode(w.batch, after=w.event("raw")), 1),
    "decode without need": Verb(lambda w: w.alloc.decode(w.inside)),
    "decode with out without need": Verb(
        _with_out(4, "inside", 9, 10, lambda w, out: w.alloc.decode(w.inside, out=out)), 1
    ),
    "decode nothing": Verb(lambda w: w.alloc.decode([], out=w.out(0))),
    "reserve": Verb(lambda w: w.alloc.reserve(w.batch, 16), 1),
    "reserve each": Verb(lambda w: w.alloc.reserve(w.edge, [5, 0, 1, 17]), 1),
    "reserve with out": Verb(
        _with_out(20, "edge", 12, 17, lambda w, out: w.alloc.reserve(w.edge, 5, out=out)), 1
    ),
    "reserve after": Verb(lambda w: w.alloc.reserve(w.batch, 16, after=w.event()), 1),
    "reserve on device": Verb(lambda w: _device(w, False), 1, 1),
    "reserve each on device": Verb(lambda w: _device(w, True), 1, 1),
    "reserve without need": Verb(lambda w: w.alloc.reserve(w.inside, 3)),
    "commit": Verb(lambda w: w.alloc.commit(w.inside, [0, 1, 2, 3])),
    "trim": Verb(lambda w: w.alloc.trim(w.inside, 5)),
    "trim after": Verb(lambda w: w.alloc.trim(w.inside, 5, after=w.event())),
    "release": Verb(lambda w: w.alloc.release(w.spare)),
    "release after": Verb(lambda w: w.alloc.release(w.spare, after=w.event())),
    "release into the cache": Verb(_into_cache),
    "open with a prefix": Verb(lambda w: w.alloc.open_with_prefix([w.match]), 1),
    "publish what is cached": Verb(lambda w: w.alloc.prefix.publish(w.sharing, _PROMPT), 1),
    "publish what is new": Verb(lambda w: w.alloc.prefix.publish(w.sharing, _PROMPT + 77)),
    "preallocate": Verb(lambda w: w.alloc.preallocate([9, 9], writers=2), 1),
    "preallocate with a prefix": Verb(lambda w: w.alloc.preallocate([30, 25], prefix=w.match), 2),
    "acknowledge": Verb(lambda w: [w.alloc.acknowledge(h, 0) for h in w.receiving.tolist()]),
    "abort": Verb(lambda w: w.alloc.abort([*w.receiving, *w.spare])),
    "abort by force": Verb(lambda w: w.alloc.abort(w.receiving, force=True)),
    "abort after": Verb(lambda w: w.alloc.abort([*w.receiving, *w.spare], after=w.event())),
    "reclaim": Verb(lambda w: w.alloc.reclaim(5)),
    "match": Verb(lambda w: w.alloc.prefix.match(_PROMPT)),
    "clear the cache": Verb(lambda w: w.alloc.prefix.clear()),
    "plan": Verb(lambda w: w.alloc.plan((w.spare, 30), (w.edge, 1), (w.inside, 16))),
    "plan and apply": Verb(_mixed, 1),
    "slots": Verb(lambda w: w.alloc.slots(w.edge, 0, 3), 1),
    "slots with out": Verb(
        _with_out(12, "edge", 5, 8, lambda w, out: w.alloc.slots(w.edge, 5, 8, out=out)), 1
    ),
    "slots of nothing": Verb(lambda w: w.alloc.slots(w.edge, 3, 3)),
    "page tables": Verb(_exports, 1, 1),
    "pages": Verb(lambda w: w.alloc.pages(int(w.edge[0]))),
    "batch": Verb(lambda w: w.alloc.batch(w.inside)),
    "fits": Verb(lambda w: w.alloc.fits([100, 200], after_releasing=w.spare)),
    "available": Verb(lambda w: w.alloc.available(counting_cache=True)),
    "settle": Verb(lambda w: w.alloc.settle()),
    "stats": Verb(lambda w: w.alloc.stats()),
    "check": Verb(lambda w: w.alloc.check()),
    "what is held": Verb(
        lambda w: [f(w.edge) for f in (w.alloc.rows, w.alloc.committed, w.alloc.allocated)]
    ),
}

# Verbs that launch, or would if the step needed something.
LAUNCHING = [name for name, verb in VERBS.items() if verb.launches]
