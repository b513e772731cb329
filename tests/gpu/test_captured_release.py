"""Requests with a step that is staged and not replayed: what may be done to them, and what not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, assert_table, make
from gpu.currents import event_behind
from gpu.latch import Latches
from gpu.twins import host
from host_support import Query

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")

REMEDY = "replay the graph and let it finish"


class Graph:
    """An update in a graph of CuPy's, replayed on a stream of its own."""

    def __init__(self, alloc: sgalloc.KVAllocator, max_pages: int = 64) -> None:
        self.alloc = alloc
        self.update = alloc.captured(max_pages)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        runtime.deviceSynchronize()
        self.stream.begin_capture(runtime.streamCaptureModeGlobal)
        self.update.launch(self.stream)
        self._graph = self.stream.end_capture()

    def launch(self) -> None:
        """Replay, and go on at once."""
        self._graph.launch(self.stream)

    def replay(self, times: int = 1) -> None:
        """Replay so often, and let it finish."""
        for _ in range(times):
            self.launch()
        runtime.deviceSynchronize()

    def extend(self, handles: Any, lengths: Any) -> None:
        """Stage a growth up to ``lengths``."""
        self.update.stage(self.alloc.plan(extend=(handles, lengths)))


def state(alloc: sgalloc.KVAllocator, handles: Any) -> tuple[Any, ...]:
    """All that a refusal must leave as it was."""
    device, stats = alloc._core.device, alloc.stats()
    return (
        alloc.committed(handles).tolist(),
        alloc.allocated(handles).tolist(),
        alloc.owners().tolist(),
        (stats.groups, stats.rows, stats.staging),
        (device.launches, device.copies),
        host(alloc.req_to_token).tobytes(),
    )


def refused(alloc: sgalloc.KVAllocator, handles: Any, row: int, call: Callable[[], Any]) -> str:
    """``call`` is refused for ``row`` and changes nothing; the message."""
    before = state(alloc, handles)
    with pytest.raises(sgalloc.WrongState, match=f"row {row} .*{REMEDY}") as caught:
        call()
    assert "\n" not in str(caught.value)
    assert state(alloc, handles) == before
    return str(caught.value)


RETURNS: dict[str, Callable[..., Any]] = {
    "release": lambda a, x, **how: a.release(x, **how),
    "trim": lambda a, x, **how: a.trim(x, 1, **how),
}


@pytest.mark.parametrize("call", RETURNS)
def test_pages_that_a_replay_would_write_do_not_go_back(call: str) -> None:
    """Not at once, alone or among others; after the replay they do."""
    alloc = make(prefix_cache=True)
    h = alloc.open(4).tolist()
    alloc.extend(h, 3)
    graph = Graph(alloc)
    graph.extend(h[2], 3 * PS)
    for x in (h[2], [h[0], h[2]], alloc.batch(h)):
        message = refused(alloc, h, 3, lambda x=x: RETURNS[call](alloc, x))
        assert "after= an event recorded behind the replay" in message
    RETURNS[call](alloc, h[1])  # another's
    graph.replay()
    assert_table(alloc)
    RETURNS[call](alloc, [h[0], h[2]])
    graph.replay(3)
    alloc.check(device=True)


def test_a_release_into_the_cache_is_refused_too() -> None:
    alloc = make(prefix_cache=True)
    (h,) = alloc.open().tolist()
    graph = Graph(alloc)
    graph.extend(h, 3 * PS)
    refused(alloc, h, 1, lambda: alloc.release(h, tokens=np.arange(3 * PS)))
    assert alloc.prefix.match(np.arange(3 * PS)).length == 0
    graph.replay()
    alloc.release(h, tokens=np.arange(3 * PS))
    assert alloc.prefix.match(np.arange(3 * PS)).length == 3 * PS
    alloc.check(device=True)


def test_a_trim_that_keeps_what_was_staged_is_taken() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    alloc.extend(h, PS)
    graph = Graph(alloc)
    graph.extend(h[0], 3 * PS)
    alloc.extend(h[0], 6 * PS)  # plain growth, of other pages
    alloc.trim(h[0], 5 * PS)
    alloc.trim(h[0], 3 * PS)
    alloc.trim(h[0], 2 * PS + 1)
    assert alloc.allocated(h[0]).tolist() == [3 * PS]
    refused(alloc, h, 1, lambda: alloc.trim(h[0], 2 * PS))
    refused(alloc, h, 1, lambda: alloc.trim(h[0], 0))
    alloc.reserve(h[0], 20)
    alloc.decode(h[0], 3)
    graph.replay()
    assert_table(alloc)
    alloc.trim(h[0], 0)
    alloc.check(device=True)


@pytest.mark.parametrize("call", RETURNS)
def test_the_word_that_counts_is_the_kernels(call: str, latches: Latches) -> None:
    """A replay that was launched and has not run says nothing yet."""
    alloc = make()
    h = alloc.open(2).tolist()
    graph = Graph(alloc)
    graph.extend(h, [9, 5])
    latch = latches.hold(int(graph.stream.ptr))
    graph.launch()
    with pytest.raises(sgalloc.WrongState, match=REMEDY):
        RETURNS[call](alloc, h[1])
    assert latch.held
    latch.open()
    runtime.deviceSynchronize()
    RETURNS[call](alloc, h[1])
    assert_table(alloc)
    alloc.check(device=True)


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
@pytest.mark.parametrize("call", RETURNS)
def test_behind_an_event_of_the_replay_they_wait(call: str, kind: str, latches: Latches) -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    graph = Graph(alloc)
    graph.extend(h[:2], [9, 5])
    latch = latches.hold(int(graph.stream.ptr))
    graph.launch()
    event, owner = event_behind(int(graph.stream.ptr), kind)
    RETURNS[call](alloc, h[0], after=event)
    waiting = 3 if call == "release" else 2
    assert alloc.stats().groups["full"].quarantined == waiting
    assert alloc.stats().rows.quarantined == (call == "release")
    assert latch.held
    latch.open()
    runtime.deviceSynchronize()
    alloc.settle()
    assert alloc.stats().groups["full"].quarantined == 0
    alloc.extend(h[2], 40)
    assert_table(alloc)
    assert alloc.check(device=True).tolist() == []
    del owner


@pytest.mark.parametrize("call", RETURNS)
def test_an_event_that_is_done_counts_as_none(call: str) -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    graph = Graph(alloc)
    graph.extend(h[0], 9)
    for event in (Query(over=True), event_behind(0, "cupy")[0]):
        runtime.deviceSynchronize()
        refused(alloc, h, 1, lambda event=event: RETURNS[call](alloc, h[0], after=event))
    graph.replay()
    RETURNS[call](alloc, h[0], after=Query(over=True))
    alloc.check(device=True)


def test_a_refusal_takes_nothing_in_that_waits() -> None:
    """Nor does it let pages out of quarantine whose event is done."""
    alloc = make(prefix_cache=True)
    h = alloc.open(3).tolist()
    alloc.extend(h, 5)
    graph = Graph(alloc)
    graph.extend(h[0], 9)
    event = Query()
    alloc.release(h[2], after=event)
    event.over = True
    for call in RETURNS.values():
        refused(alloc, h[:2], 1, lambda call=call: call(alloc, h[0]))
    assert alloc.stats().groups["full"].quarantined == 2
    alloc.settle()
    assert alloc.stats().groups["full"].quarantined == 0


def test_several_updates_are_asked() -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    graphs = [Graph(alloc), Graph(alloc)]
    graphs[0].extend(h[0], 9)
    graphs[1].extend(h[1], 9)
    graphs[1].extend(h[0], 15)
    refused(alloc, h, 1, lambda: alloc.release(h[0]))
    graphs[0].replay()
    refused(alloc, h, 1, lambda: alloc.release(h[0]))
    refused(alloc, h, 2, lambda: alloc.release(h[1]))
    graphs[1].replay()
    alloc.release(h[1])
    refused(alloc, h[:1], 1, lambda: alloc.trim(h[0], 10))
    alloc.trim(h[0], 13)
    graphs[1].replay()
    alloc.release(h[0])
    alloc.check(device=True)


def test_an_update_that_went_away_binds_nobody() -> None:
    """With its graph: nothing is left that could be replayed."""
    alloc = make()
    (h,) = alloc.open().tolist()
    graph = Graph(alloc)
    graph.extend(h, 9)
    assert len(alloc._core.device.updates) == 1
    del graph
    assert alloc._core.device.updates == []
    alloc.release(h)
    alloc.check()


def test_publishing_gives_up_no_page_that_a_replay_would_write() -> None:
    """Not even behind an event: the row has the tree's pages at once, and would lose them."""
    alloc = make(prefix_cache=True)
    ids = np.arange(5 * PS)
    first, second, third = alloc.open(3).tolist()
    alloc.extend(first, 3 * PS)
    alloc.prefix.publish(first, ids[: 3 * PS])
    alloc.extend(second, PS)
    graph = Graph(alloc)
    graph.extend(second, 5 * PS)
    h = [first, second, third]
    refused(alloc, h, 2, lambda: alloc.prefix.publish(second, ids))
    refused(alloc, h, 2, lambda: alloc.prefix.publish(second, ids, after=Query()))
    assert alloc.stats().refusals["WrongState"] == 2
    alloc.prefix.publish(second, ids[:PS])  # the page below was written plainly
    graph.extend(third, 5 * PS)
    alloc.prefix.publish(third, ids + 1000)  # nothing is given up
    graph.replay(2)
    alloc.prefix.publish(second, ids)
    assert_table(alloc)
    assert alloc.check(device=True).tolist() == []


def test_check_leaves_out_what_was_not_replayed_and_says_so() -> None:
    alloc = make()
    h = alloc.open(4).tolist()
    alloc.extend(h, PS)
    graph = Graph(alloc)
    assert alloc.check(device=True).tolist() == []
    graph.extend([h[1], h[3]], 3 * PS)
    alloc.extend(h[1], 5 * PS)
    found = alloc.check(device=True)
    assert found.dtype == np.int32 and found.tolist() == [2, 4]
    assert alloc.check().tolist() == []
    # What was written plainly is compared, in the same rows as well.
    for row, column in ((2, 0), (2, 3 * PS), (4, PS - 1), (1, 0), (0, 0)):
        old = int(host(alloc.req_to_token)[row, column])
        alloc.req_to_token[row, column] = 9999
        with pytest.raises(sgalloc.LawViolation, match=rf"req_to_token\[{row}, {column}\] is 9999"):
            alloc.check(device=True)
        alloc.req_to_token[row, column] = old
    graph.replay()
    assert alloc.check(device=True).tolist() == []
    alloc.req_to_token[2, PS] = 9999
    with pytest.raises(sgalloc.LawViolation, match=rf"req_to_token\[2, {PS}\]"):
        alloc.check(device=True)


def test_check_counts_a_replay_that_is_under_way(latches: Latches) -> None:
    """It waits for the GPU anyway, and asks which steps are left only then."""
    alloc = make()
    (h,) = alloc.open().tolist()
    graph = Graph(alloc)
    graph.extend(h, 9)
    latch = latches.hold(int(graph.stream.ptr))
    graph.launch()
    assert latch.held
    latch.open()
    assert alloc.check(device=True).tolist() == []


def test_past_the_largest_serial() -> None:
    """Steps are counted in 32 bits, which come round."""
    alloc = make()
    h = alloc.open(2).tolist()
    graph = Graph(alloc)
    update = graph.update
    start = (1 << 32) - 3
    update._staged = start
    update._applied[0] = start
    for step in range(8):
        graph.extend(h[step % 2], PS * (step + 1))
        refused(alloc, h, step % 2 + 1, lambda step=step: alloc.trim(h[step % 2], 0))
        if step % 2:
            update._applied[0] = (start + step) % (1 << 32)  # as the kernel would
            refused(alloc, h, 2, lambda: alloc.trim(h, 0))
            alloc.trim(h[0], 0)
            update._applied[0] = (start + step + 1) % (1 << 32)
            alloc.trim(h, 0)


class Walk:
    """Stages, replays, releases and plain growth in random order, against a twin on the CPU.

    The twin makes the calls that are to be taken, at once; which are to be refused follows from
    what was staged and not replayed, as this class keeps it.
    """

    def __init__(self, seed: int, ps: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ps = ps
        shared: dict[str, Any] = {
            "num_pages": 300, "page_size": ps, "max_requests": 10, "row_width": 40 * ps,
        }  # fmt: skip
        self.gpu = sgalloc.KVAllocator(**shared, device="cuda")
        self.cpu = sgalloc.KVAllocator(**shared, device="cpu")
        self.gpu.warm(512)
        self.graphs = [Graph(self.gpu, 128) for _ in range(2)]
        # For each graph the steps that wait, each a set of (row, number of a page).
        self.waiting: list[deque[set[tuple[int, int]]]] = [deque(), deque()]
        self.handles: list[int] = []
        self.quarantined: list[tuple[Query, set[tuple[int, int]]]] = []
        self.refused = self.taken = self.behind = 0

    @property
    def late(self) -> set[tuple[int, int]]:
        return {place for steps in self.waiting for step in steps for place in step}

    def both(self, call: Callable[[sgalloc.KVAllocator], Any]) -> Any:
        ours, theirs = call(self.gpu), call(self.cpu)
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else True
        return ours

    def some(self) -> list[int]:
        count = int(self.rng.integers(1, min(4, len(self.handles)) + 1))
        return list(self.rng.permutation(self.handles)[:count].tolist())

    def lengths(self, h: list[int]) -> np.ndarray:
        more = self.rng.integers(0, 4 * self.ps, len(h))
        return np.minimum(self.cpu.committed(h) + more, 40 * self.ps)

    def pages(self, h: int) -> int:
        return int(self.cpu.allocated(h)[0]) // self.ps

    def stage(self) -> None:
        at, h = int(self.rng.integers(2)), self.some()
        if len(self.waiting[at]) == 8:
            return
        lengths = self.lengths(h)
        before = [self.pages(x) for x in h]
        self.graphs[at].extend(h, lengths)
        self.cpu.extend(h, lengths)
        rows = self.cpu.rows(h).tolist()
        step = {
            (row, number)
            for x, row, first in zip(h, rows, before, strict=True)
            for number in range(first, self.pages(x))
        }
        if step:
            self.waiting[at].append(step)

    def replay(self) -> None:
        at = int(self.rng.integers(2))
        self.graphs[at].replay()
        if self.waiting[at]:
            self.waiting[at].popleft()
        for event, places in self.quarantined:
            event.over |= not places & self.late

    def grow(self) -> None:
        h = self.some()
        lengths = self.lengths(h)
        self.both(lambda a: a.extend(h, lengths) and None)

    def give_back(self, call: Callable[..., None], going: set[tuple[int, int]], late: bool) -> None:
        if late and going & self.late:
            event = Query()
            self.quarantined.append((event, going))
            self.both(lambda a: call(a, after=event))
            self.behind += 1
        elif going & self.late:
            before = (self.gpu.owners().tolist(), self.gpu.stats().rows)
            with pytest.raises(sgalloc.WrongState, match=REMEDY) as caught:
                call(self.gpu)
            row = int(str(caught.value).split()[1])
            assert row in {place[0] for place in going & self.late}
            assert (self.gpu.owners().tolist(), self.gpu.stats().rows) == before
            self.refused += 1
            return
        else:
            self.both(call)
            self.taken += 1

    def release(self) -> None:
        h = self.some()
        going = {(row, n) for row in self.cpu.rows(h).tolist() for n in range(40)}
        refusals = self.refused
        self.give_back(lambda a, **k: a.release(h, **k), going, bool(self.rng.integers(2)))
        if self.refused == refusals:
            self.handles = [x for x in self.handles if x not in h]

    def trim(self) -> None:
        h = self.some()
        lengths = np.array([int(self.rng.integers(0, c + 1)) for c in self.cpu.committed(h)])
        keep = -(-lengths // self.ps)
        going = {
            (row, number)
            for x, row, first in zip(h, self.cpu.rows(h).tolist(), keep.tolist(), strict=True)
            for number in range(first, self.pages(x))
        }
        self.give_back(lambda a, **k: a.trim(h, lengths, **k), going, False)

    def verify(self) -> None:
        gpu, cpu, late = self.gpu, self.cpu, self.late
        assert np.array_equal(gpu.owners(), cpu.owners())
        assert gpu.stats().rows == cpu.stats().rows
        assert gpu.stats().groups == cpu.stats().groups
        rows, table = cpu.rows(self.handles).tolist(), host(gpu.req_to_token)
        for row, h in zip(rows, self.handles, strict=True):
            written = [n for n in range(self.pages(h)) if (row, n) not in late]
            ours, theirs = (t[row].reshape(-1, self.ps)[written] for t in (table, cpu.req_to_token))
            assert np.array_equal(ours, theirs), f"row {row}"
        assert gpu.check(device=True).tolist() == sorted({p[0] for p in late} & set(rows))

    def run(self, steps: int) -> None:
        names = ("stage", "stage", "stage", "replay", "replay", "grow", "trim", "release")
        for _ in range(steps):
            while len(self.handles) < 3 and self.cpu.stats().rows.free:
                self.handles += self.both(lambda a: a.open()).tolist()
            if self.handles:
                getattr(self, str(self.rng.choice(names)))()
            else:
                self.replay()
            self.both(lambda a: a.settle())
            self.verify()
        while self.late:
            self.replay()
        self.both(lambda a: a.settle())
        self.verify()
        self.both(lambda a: a.release(self.handles))
        assert self.gpu.available() == 300


@pytest.mark.parametrize("ps", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_of_stages_replays_and_releases(seed: int, ps: int) -> None:
    walk = Walk(seed, ps)
    walk.run(150)
    assert walk.refused > 5 and walk.taken > 5 and walk.behind > 0
