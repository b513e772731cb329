"""The window group on a GPU: byte-equal to the CPU, one launch a step, behind every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import captured_by_cupy
from gpu.currents import CURRENTS, STREAMS, event_behind
from gpu.latch import Latches, copy_entries
from gpu.naive import NaiveTables
from gpu.spy import Spy
from gpu.test_steady import spending
from gpu.twins import Both, Counts, Twins, host
from gpu.walks import OPERATIONS, WITH_CACHE, Walk
from host_support import Query

import sgalloc

WINDOW_OPERATIONS = ("evict", "evict_upto", "evict_by_plan", "tail", "release_behind", "settle")


class WindowTwins(Twins):
    """Twins with a window group, whose table and map are compared, too."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        row_width: int,
        window: sgalloc.SlidingWindow,
        prefix_cache: bool = False,
        **on_gpu: Any,
    ) -> None:
        def make(device: str, **more: Any) -> sgalloc.KVAllocator:
            return sgalloc.KVAllocator(
                num_pages, page_size, max_requests, row_width, device, window,
                prefix_cache=prefix_cache, page_table=True, **more,
            )  # fmt: skip

        self.cpu = make("cpu")
        self.gpu = make("cuda", **on_gpu)
        self.gpu.warm(256)
        self.mapped = window.slot_map
        self.naive = NaiveTables(max_requests, row_width, page_size)
        self.handles: list[int] = []
        self.counts = Counts()

    def compare(self) -> None:
        """The two tables of the window, the map and the frontiers, byte for byte."""
        super().compare()
        cpu, gpu = self.cpu, self.gpu
        assert np.array_equal(host(gpu.window_table), cpu.window_table)
        if self.mapped:
            assert np.array_equal(host(gpu.full_to_window), cpu.full_to_window)


class WindowWalk(Walk):
    """The walk over all verbs, with those of the window among them."""

    def run(self, rounds: int) -> None:
        """Every operation once a round, in random order."""
        names = [*OPERATIONS, *WINDOW_OPERATIONS, *WINDOW_OPERATIONS]
        names += WITH_CACHE if self.cache else ()
        self.events: list[Query] = []
        for _ in range(rounds):
            for name in self.rng.permutation(names).tolist():
                if len(self.twins.handles) < 3 and name != "open":
                    self.step("open")
                if self.twins.handles or name in ("open", "settle"):
                    self.step(name)
            self.twins.check()
        for event in self.events:
            event.over = True
        self.step("settle")

    def _evict(self) -> Both:
        h = self.some(12)
        return self.twins.call(lambda a, out: a.evict_window(h))

    def _evict_upto(self) -> Both:
        h = self.some(12)
        upto = self.rng.integers(0, self.committed(h) + 1 + (self.rng.random() < 0.1))
        return self.twins.call(lambda a, out: a.evict_window(h, upto=upto))

    def _evict_by_plan(self) -> Both:
        h = self.some(12)
        tokens = self.tokens(len(h), 2)
        plans = self.twins.call(lambda a, out: a.plan(decode=(h, tokens), evict_window=True))
        if plans.refused:
            return plans
        size = int(tokens.sum())
        return self.twins.call(lambda a, out: a.apply(plans.of(a), out=out), size, self.kind())

    def _tail(self) -> Both:
        h = self.some(2)
        start = self.committed(h)
        stop = start + self.tokens(len(h), 6)
        begin = np.minimum(-(-start // self.size) * self.size, stop)
        return self.twins.call(lambda a, out: a.extend(h, stop, window_tail=stop - begin))

    def _release_behind(self) -> Both:
        h = self.some(2)
        self.events.append(Query())
        event = self.events[-1]
        both = self.twins.call(lambda a, out: a.release(h, after=event))
        self.twins.closed(h)
        self.gone += h
        return both

    def _settle(self) -> Both:
        for event in self.events:
            event.over = event.over or bool(self.rng.integers(2))
        return self.twins.call(lambda a, out: a.settle())


WALKS = [
    # page size, window, a map, a prefix cache, the cadence
    (1, 1, True, False, 1),
    (1, 5, True, True, 1),
    (2, 3, False, True, 1),
    (3, 3, True, True, 7),
    (4, 9, True, False, 1),
    (16, 20, True, True, 1),
    (16, 3, False, False, 32),
    (64, 100, True, True, 1),
]


@pytest.mark.parametrize("stream", [None, "plan"], ids=["one stream", "plan stream"])
@pytest.mark.parametrize(("ps", "tokens", "mapped", "cache", "every"), WALKS)
def test_a_walk_is_byte_equal_on_both(
    ps: int, tokens: int, mapped: bool, cache: bool, every: int, stream: str | None
) -> None:
    window = sgalloc.SlidingWindow(tokens, 60, mapped, every)
    twins = WindowTwins(90, ps, 8, 14 * ps + ps // 2, window, prefix_cache=cache, stream=stream)
    walk = WindowWalk(twins, ps + tokens, cache)
    walk.run(5)
    wanted = {"extend", "decode", "release", "evict", "evict_upto", "evict_by_plan"}
    assert wanted <= set(walk.done)
    twins.call(lambda a, out: a.release(twins.handles))
    if cache:
        twins.call(lambda a, out: a.prefix.clear())
    assert twins.gpu.available("window") == 60
    if mapped:
        assert not host(twins.gpu.full_to_window).any()


def test_steps_too_large_for_the_small_slots() -> None:
    """Thousands of window pages in one step, and gathers of unequal lengths beside them."""
    window = sgalloc.SlidingWindow(8, 12_000, True)
    twins = WindowTwins(12_000, 4, 1500, 64, window)
    h = twins.open(1500)
    lengths = 5 + np.arange(1500) % 9
    twins.call(lambda a, out: a.extend(h, lengths, out=out), int(lengths.sum()))
    twins.call(lambda a, out: a.extend(h, 33))
    twins.call(lambda a, out: a.apply(a.plan(decode=(h, 7), evict_window=True)))
    twins.call(lambda a, out: a.evict_window(h, upto=32))
    twins.call(lambda a, out: a.trim(h, 18))
    twins.call(lambda a, out: a.decode(h, 1, out=out), 1500)
    twins.check()


# -- what a step costs ---------------------------------------------------------------------------


def steady(ps: int = 4, rows: int = 64, mapped: bool = True, **how: Any) -> Any:
    window = sgalloc.SlidingWindow(2 * ps, 40 * rows, mapped)
    alloc = sgalloc.KVAllocator(90 * rows, ps, rows, 88 * ps, "cuda", window, **how)
    alloc.warm(40 * rows)
    batch = alloc.batch(alloc.open(rows))
    alloc.extend(batch, ps * (1 + np.arange(rows) % 5))
    return alloc, batch


@pytest.mark.parametrize("stream", [None, "plan"], ids=["one stream", "plan stream"])
@pytest.mark.parametrize("mapped", [False, True], ids=["no map", "map"])
@pytest.mark.parametrize("with_out", [False, True], ids=["plain", "with out"])
def test_a_step_with_growth_and_evictions_is_one_launch(
    with_out: bool, mapped: bool, stream: str | None, spy: Spy, torch: Any
) -> None:
    alloc, batch = steady(mapped=mapped, stream=stream)
    out = cupy.empty(64, cupy.int32) if with_out else None
    moved = 0
    for _ in range(20):
        with spending(alloc, spy, torch) as budget:
            plan = alloc.plan(decode=(batch, 1), evict_window=True)
            alloc.apply(plan, out=out)
        busy = plan.need["window"] or plan.gain["window"] or with_out
        assert (budget.launches, budget.copies) == (1 if busy else 0, 0)
        moved += plan.gain["window"]
    assert moved > 64
    alloc.check(device=True)


def test_where_nobody_grows_or_leaves_nothing_is_launched(spy: Spy, torch: Any) -> None:
    alloc, batch = steady()
    alloc.reserve(batch, 9)
    alloc.evict_window(batch)
    with spending(alloc, spy, torch) as budget:
        alloc.reserve(batch, 5)
        alloc.evict_window(batch)
        alloc.apply(alloc.plan(reserve=(batch, 3), evict_window=True))
        alloc.commit(batch, 1)
    assert (budget.launches, budget.copies) == (0, 0)


def test_what_the_verbs_of_the_window_cost(spy: Spy, torch: Any) -> None:
    """One launch at most each: an eviction, a release, a trim, and what comes from quarantine."""
    event = Query()
    calls: list[tuple[Callable[[Any, Any], Any], int, int]] = [
        (lambda a, b: a.evict_window(b), 1, 1),
        (lambda a, b: a.evict_window(b, upto=4, after=event), 1, 1),
        (lambda a, b: a.trim(b, 9), 1, 0),
        (lambda a, b: a.release(b.handles[:32], after=event), 0, 0),
        (lambda a, b: a.release(b.handles[32:]), 1, 0),
        (lambda a, b: setattr(event, "over", True), 0, 0),
        (lambda a, b: a.settle(), 1, 0),
    ]
    for mapped in (True, False):
        event.over = False
        alloc, batch = steady(mapped=mapped)
        for call, with_map, without in calls:
            with spending(alloc, spy, torch) as budget:
                call(alloc, batch)
            assert (budget.launches, budget.copies) == (with_map if mapped else without, 0)
        alloc.check(device=True)


# -- order ---------------------------------------------------------------------------------------


class Reading:
    """A forward that reads one request's row of the window's table, and the map."""

    def __init__(self, **how: Any) -> None:
        window = sgalloc.SlidingWindow(4, 40, True)
        self.alloc = sgalloc.KVAllocator(40, 4, 2, 80, "cuda", window, **how)
        self.alloc.warm(256)
        self.h = self.alloc.open(2).tolist()
        self.alloc.extend(self.h, 40)
        runtime.deviceSynchronize()
        self.row = int(self.alloc.rows(self.h[0])[0])
        self.old = host(self.alloc.window_table)[self.row], host(self.alloc.full_to_window)
        self.seen = cupy.full(80, -1, cupy.int32), cupy.full(41 * 4, -1, cupy.int32)
        runtime.deviceSynchronize()

    def read_on(self, stream: int) -> None:
        table = self.alloc.window_table.data.ptr + 4 * self.row * 80
        copy_entries(table, self.seen[0].data.ptr, 80, stream)
        copy_entries(self.alloc.full_to_window.data.ptr, self.seen[1].data.ptr, 41 * 4, stream)

    def verify(self) -> None:
        runtime.deviceSynchronize()
        for seen, old in zip(self.seen, self.old, strict=True):
            assert np.array_equal(host(seen), old), "the forward saw an entry that changed"
        self.alloc.check(device=True)


def evict_and_grow(r: Reading, after: Any) -> None:
    """Window pages of the first request go to the second at once."""
    given = r.alloc.evict_window(r.h[0], after=None)
    assert given.tolist() == [36]
    r.alloc.extend(r.h[1], 76, after=after)


def evict_by_plan(r: Reading, after: Any) -> None:
    r.alloc.apply(r.alloc.plan(decode=(r.h, [8, 12]), evict_window=True), after=after)


def release_and_open(r: Reading, after: Any) -> None:
    """Row and pages of both groups go to another request."""
    r.alloc.release(r.h[0])
    (other,) = r.alloc.open()
    assert int(r.alloc.rows(other)[0]) == r.row
    r.alloc.extend(other, 60, window_tail=20, after=after)


RECYCLES: dict[str, Callable[[Reading, Any], None]] = {
    "evict and grow": evict_and_grow,
    "evict by plan": evict_by_plan,
    "release and open": release_and_open,
}


@pytest.mark.parametrize("recycle", RECYCLES)
@pytest.mark.parametrize("stream", ["current", "plan"])
@pytest.mark.parametrize("current", ["torch side", "cupy side"])
def test_recycled_window_pages_are_written_behind_their_last_reader(
    current: str, stream: str, recycle: str, latches: Latches
) -> None:
    keep: list[Any] = []
    with CURRENTS[current]() as held:
        reading = Reading(stream=STREAMS[stream](keep))
        latch = latches.hold(held)
        reading.read_on(held)
        RECYCLES[recycle](reading, None)
        assert latch.held, "the host waited for the forward"
        latches.let_the_rest_run()
        latch.open()
        reading.verify()


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
@pytest.mark.parametrize("stream", ["current", "plan"])
def test_an_eviction_behind_an_event_clears_and_frees_behind_it(
    stream: str, kind: str, latches: Latches
) -> None:
    """The reader's stream is named by its event alone; the host polls, and never waits."""
    keep: list[Any] = []
    with CURRENTS["torch side"]() as held:
        reading = Reading(stream=STREAMS[stream](keep))
        alloc = reading.alloc
        latch = latches.hold(held)
        reading.read_on(held)
        event, owner = event_behind(held, kind)
        keep.append(owner)
        with CURRENTS["torch default"]():
            alloc.evict_window(reading.h[0], after=event)
            window = alloc.stats().groups["window"]
            assert (window.free, window.quarantined) == (20, 9)
            latches.let_the_rest_run()
            assert latch.held
            latch.open()
            runtime.deviceSynchronize()
            alloc.settle()
        assert alloc.available("window") == 29
        reading.verify()
        assert not host(alloc.window_table)[reading.row, :36].any()


# -- graphs --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("verb", ["extend", "evict", "plan", "tail", "trim", "release"])
def test_a_verb_of_the_window_while_a_stream_is_captured(verb: str) -> None:
    window = sgalloc.SlidingWindow(4, 60, True)
    alloc = sgalloc.KVAllocator(60, 4, 4, 80, "cuda", window)
    alloc.warm(256)
    h = alloc.open(3).tolist()
    alloc.extend(h[:2], [20, 33])
    runtime.deviceSynchronize()
    calls: dict[str, Callable[[], Any]] = {
        "extend": lambda: alloc.extend(h[:2], 40),
        "evict": lambda: alloc.evict_window(h[:2]),
        "plan": lambda: alloc.apply(alloc.plan(decode=(h[:2], 5), evict_window=True)),
        "tail": lambda: alloc.extend(h[2], 24, window_tail=8),
        "trim": lambda: alloc.trim(h[:2], [7, 30]),
        "release": lambda: alloc.release(h[0]),
    }
    replay: list[Callable[[], None]] = []
    with captured_by_cupy(0, replay):
        calls[verb]()
    for _ in range(2):
        replay[0]()
        runtime.deviceSynchronize()
        alloc.check(device=True)


class Replayed:
    """`captured()` in a graph of the caller's."""

    def __init__(self, max_pages: int, prefix_cache: bool = False) -> None:
        window = sgalloc.SlidingWindow(4, 100, True)
        self.alloc = sgalloc.KVAllocator(100, 4, 4, 160, "cuda", window, prefix_cache=prefix_cache)
        self.alloc.warm(256)
        self.update = self.alloc.captured(max_pages)
        side = cupy.cuda.Stream(non_blocking=True)
        side.begin_capture(runtime.streamCaptureModeGlobal)
        self.update.launch(stream=side)
        graph = side.end_capture()
        self.replay: Callable[[], None] = lambda: graph.launch(side)

    def check(self) -> None:
        runtime.deviceSynchronize()
        self.alloc.check(device=True)


@pytest.mark.usefixtures("no_collection")
def test_a_captured_update_writes_both_groups() -> None:
    replayed = Replayed(32)
    alloc = replayed.alloc
    h = alloc.open(3).tolist()
    alloc.extend(h, [5, 12, 20])
    for _ in range(25):
        replayed.update.stage(alloc.plan(decode=(h, [1, 2, 3]), evict_window=True))
        replayed.replay()
        replayed.check()
    assert alloc.stats().groups["window"].owned < 3 * 4
    # Several steps may wait, each with its own window pages.
    for _ in range(3):
        replayed.update.stage(alloc.plan(reserve=(h, 8), evict_window=True))
        alloc.commit(h, 8)
    for _ in range(4):
        replayed.replay()
    replayed.check()


@pytest.mark.usefixtures("no_collection")
def test_a_full_ring_refuses_a_step_that_only_moves_frontiers() -> None:
    """Over shared pages a frontier gives nothing back, but its entries are cleared all the same."""
    replayed = Replayed(32, prefix_cache=True)
    alloc = replayed.alloc
    (h,) = alloc.open().tolist()
    alloc.extend(h, 40)
    alloc.prefix.publish(h, list(range(40)))
    (other,) = alloc.open().tolist()
    staged = 0
    with pytest.raises(sgalloc.WrongState, match="staged steps wait"):
        for staged in range(100):  # noqa: B007
            replayed.update.stage(alloc.plan(decode=(other, 4)))
    moving = alloc.plan(reserve=(h, 0), evict_window=True)
    assert (moving.gain["window"], moving.num_new_pages) == (0, 0)
    before = alloc.stats().groups, alloc.frontier(h).tolist()
    with pytest.raises(sgalloc.WrongState, match="staged steps wait"):
        replayed.update.stage(moving)
    assert (alloc.stats().groups, alloc.frontier(h).tolist()) == before
    assert alloc.fits(moving), "a refused step ages no plan"
    for _ in range(staged):
        replayed.replay()
    runtime.deviceSynchronize()
    replayed.update.stage(moving)
    replayed.replay()
    replayed.check()
    assert alloc.frontier(h).tolist() == [36]


@pytest.mark.usefixtures("no_collection")
def test_a_captured_update_refuses_more_window_pages_than_it_was_made_for() -> None:
    replayed = Replayed(2)
    alloc = replayed.alloc
    (h,) = alloc.open().tolist()
    alloc.extend(h, 100)
    plan = alloc.plan(decode=(h, 4), evict_window=True)
    before = alloc.frontier(h).tolist(), alloc.available("window")
    with pytest.raises(ValueError, match="second group"):
        replayed.update.stage(plan)
    assert (alloc.frontier(h).tolist(), alloc.available("window")) == before
    alloc.evict_window(h)
    replayed.update.stage(alloc.plan(decode=(h, 4), evict_window=True))
    replayed.replay()
    replayed.check()
