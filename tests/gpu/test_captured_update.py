"""`captured()`: an update in a graph of the caller's, fed by `stage()`, applied by replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, assert_table, captured_by_torch, make
from gpu.currents import cuda_torch
from gpu.latch import Latches, copy_entries
from gpu.naive import NaiveTables
from gpu.twins import host

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")


class Replayed:
    """An update in a graph of torch's or CuPy's, and what the graph sees of the table after it."""

    def __init__(self, library: str, alloc: sgalloc.KVAllocator, max_pages: int) -> None:
        self.alloc = alloc
        self.update = alloc.captured(max_pages)
        table = alloc.req_to_token
        self._seen = cupy.full(table.shape, -1, cupy.int32)
        target, size = self._seen.data.ptr, table.size
        copy_entries(table.data.ptr, target, size, 0)
        runtime.deviceSynchronize()
        self._replay: Callable[[], None]
        if library == "torch":
            torch = cuda_torch()
            with captured_by_torch() as graph:
                self.update.launch()
                handle = int(torch.cuda.current_stream().cuda_stream)
                copy_entries(table.data.ptr, target, size, handle)
            self._replay = graph.replay
        else:
            side = cupy.cuda.Stream(non_blocking=True)
            side.begin_capture(runtime.streamCaptureModeGlobal)
            self.update.launch(stream=side if library == "cupy" else int(side.ptr))
            copy_entries(table.data.ptr, target, size, int(side.ptr))
            graph = side.end_capture()
            self._replay = lambda: graph.launch(side)

    def replay(self, times: int = 1) -> np.ndarray:
        """Replay so often; what the last replay saw."""
        for _ in range(times):
            self._replay()
        return host(self._seen)

    def extend(self, handle: int, tokens: int) -> None:
        """Stage a growth of one request."""
        length = int(self.alloc.committed(handle)[0]) + tokens
        self.update.stage(self.alloc.plan(extend=([handle], [length])))

    def fill(self, handle: int) -> int:
        """Stage one page after the other until no more is taken; how many were."""
        for count in range(1000):
            try:
                self.extend(handle, self.alloc.page_size)
            except sgalloc.WrongState:
                return count
        raise AssertionError("the ring of staged steps has no end")


LIBRARIES = ["torch", "cupy", "raw"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("ps", [1, 4, 16])
def test_a_replay_applies_what_was_staged(ps: int, library: str) -> None:
    alloc = make(ps, page_table=True)
    h = alloc.open(6).tolist()
    replayed = Replayed(library, alloc, 64)
    for step in range(40):
        parts = (h[:2], h[2:4], h[4:])
        plan = alloc.plan(
            (parts[0], alloc.committed(parts[0]) + step % 3), (parts[1], 2), (parts[2], ps + 1)
        )
        replayed.update.stage(plan)
        assert alloc.committed(parts[1]).tolist() == [2 * (step + 1)] * 2, "the host is ahead"
        seen = replayed.replay()
        assert_table(alloc, seen)
        alloc.commit(parts[2], 1)
    alloc.check(device=True)
    naive = NaiveTables(alloc.max_requests, alloc.row_width, ps)
    naive.write(alloc, h)
    assert np.array_equal(host(alloc.page_table), naive.page_table)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_replay_with_nothing_staged_changes_nothing(library: str) -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    alloc.extend(h, 9)
    replayed = Replayed(library, alloc, 16)
    before = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(3), before)
    replayed.extend(h[0], 20)
    once = replayed.replay()
    assert_table(alloc, once)
    alloc.trim(h[0], 1)
    alloc.extend(h[1], 40)
    after = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(5), after), "a step was applied a second time"


@pytest.mark.parametrize("library", LIBRARIES)
def test_staged_steps_wait_in_order(library: str) -> None:
    """Each replay applies the oldest; the host may be several steps ahead."""
    alloc = make()
    (h,) = alloc.open().tolist()
    replayed = Replayed(library, alloc, 16)
    for _ in range(4):
        held = []
        for _ in range(2):
            replayed.extend(h, PS + 1)
            held.append(int(alloc.allocated(h)[0]))
        naive = NaiveTables(alloc.max_requests, alloc.row_width, PS)
        naive.write(alloc, [h])
        old = host(alloc.req_to_token)[1]
        for extent in held:
            seen = replayed.replay()[1]
            assert np.array_equal(seen[:extent], naive.table[1, :extent])
            assert np.array_equal(seen[extent:], old[extent:]), "a later step came too early"
    alloc.check(device=True)


def test_staged_steps_are_safe_behind_a_held_stream(latches: Latches) -> None:
    """Replays are queued behind a latch, each after its stage; nothing is overwritten."""
    torch = cuda_torch()
    alloc = make()
    h = alloc.open(4).tolist()
    replayed = Replayed("torch", alloc, 16)
    stream = torch.cuda.Stream()
    for round_ in range(10):
        with torch.cuda.stream(stream):
            latch = latches.hold(int(stream.cuda_stream))
            try:
                for at in range(40):
                    replayed.extend(h[at % 4], 1)
                    replayed._replay()
                raise AssertionError("the ring of staged steps has no end")
            except sgalloc.WrongState:
                assert at >= 2, "several steps may be staged"
            assert latch.held, "stage() waited for the GPU"
            latch.open()
        runtime.deviceSynchronize()
        assert_table(alloc)
        if round_ % 3 == 2:
            alloc.trim(h, 0)
    alloc.check(device=True)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_full_ring_is_refused_and_named(library: str) -> None:
    alloc = make()
    h = alloc.open(3).tolist()
    alloc.extend(h[1], 9)
    replayed = Replayed(library, alloc, 16)
    count = replayed.fill(h[0])
    assert count >= 2, "several steps may be staged"
    plan = alloc.plan(extend=([h[0]], [int(alloc.committed(h[0])[0]) + 1]))
    state = (alloc.committed(h).tolist(), alloc.allocated(h).tolist(), alloc.owners().tolist())
    with pytest.raises(sgalloc.WrongState, match="replay") as caught:
        replayed.update.stage(plan)
    assert "\n" not in str(caught.value)
    assert state == (
        alloc.committed(h).tolist(),
        alloc.allocated(h).tolist(),
        alloc.owners().tolist(),
    )
    replayed.replay()
    replayed.update.stage(plan)  # which the refusal has not made stale
    assert_table(alloc, replayed.replay(count))
    alloc.check(device=True)
    # All round once more, past the end of the ring.
    again = replayed.fill(h[2])
    assert again == count
    assert_table(alloc, replayed.replay(count))


def test_a_plan_that_is_too_large_is_refused() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    replayed = Replayed("cupy", alloc, 5)
    with pytest.raises(ValueError, match="max_pages") as caught:
        replayed.extend(h[0], 5 * PS + 1)
    assert "6" in str(caught.value) and "\n" not in str(caught.value)
    assert alloc.allocated(h).tolist() == [0, 0] and alloc.available() == 4000
    replayed.extend(h[1], 5 * PS)
    assert_table(alloc, replayed.replay())
    alloc.check(device=True)


@pytest.mark.parametrize("bad", [0, -1])
def test_an_update_of_no_pages_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="max_pages"):
        make().captured(bad)


def test_a_stale_plan_is_not_staged() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    replayed = Replayed("cupy", alloc, 8)
    plan = alloc.plan(extend=([h[0]], [9]))
    alloc.extend(h[1], 3)
    with pytest.raises(sgalloc.StalePlan):
        replayed.update.stage(plan)
    before = host(alloc.req_to_token)
    assert np.array_equal(replayed.replay(), before)
    replayed.extend(h[0], 9)
    assert_table(alloc, replayed.replay())


def test_a_step_without_need_needs_no_room_in_the_ring() -> None:
    alloc = make()
    h = alloc.open(2).tolist()
    alloc.extend(h[1], 1)
    replayed = Replayed("cupy", alloc, 8)
    count = replayed.fill(h[0])
    replayed.update.stage(alloc.plan(decode=([h[1]], 2)))
    assert alloc.committed(h[1]).tolist() == [3]
    assert_table(alloc, replayed.replay(count))


def test_staged_and_plain_steps_together() -> None:
    """Of different requests, in any order; both are there once both were replayed or done."""
    alloc = make()
    h = alloc.open(4).tolist()
    replayed = Replayed("torch", alloc, 16)
    for step in range(12):
        replayed.extend(h[step % 2], 5)
        alloc.extend(h[2 + step % 2], 5 * (step // 2 + 1))
        assert_table(alloc, replayed.replay())
    alloc.check(device=True)


def test_many_pages_in_a_captured_update() -> None:
    """More than one block's worth, against the same plan made on the CPU."""
    pages = 5000
    shared: dict[str, Any] = {
        "num_pages": 3 * pages, "page_size": 3, "max_requests": 50, "row_width": 900 * 3 + 1,
    }  # fmt: skip
    alloc = sgalloc.KVAllocator(**shared, device="cuda")
    alloc.warm(pages)
    twin = sgalloc.KVAllocator(**shared, device="cpu")
    h = alloc.open(50)
    assert twin.open(50).tolist() == h.tolist()
    replayed = Replayed("torch", alloc, pages)
    rng = np.random.default_rng(0)
    for _ in range(4):
        lengths = alloc.committed(h) + rng.integers(0, 280, 50)
        replayed.update.stage(alloc.plan(extend=(h, lengths)))
        twin.extend(h, lengths)
        assert np.array_equal(replayed.replay(), twin.req_to_token)
    alloc.check(device=True)


def test_staging_beside_a_replay_is_all_or_nothing() -> None:
    """A step that is staged while a replay runs goes into it whole, or waits for the next."""
    torch = cuda_torch()
    rows, ps = 64, 4
    alloc = sgalloc.KVAllocator(200_000, ps, rows, 400 * ps, device="cuda")
    alloc.warm(16_384)
    h = alloc.open(rows)
    replayed = Replayed("torch", alloc, 16_384)
    for at in range(60):
        for _ in range(20):
            replayed._replay()
        for _ in range(2):
            lengths = alloc.committed(h) + ps * (1 + at % 3)
            replayed.update.stage(alloc.plan(extend=(h, lengths)))
        for _ in range(2):
            replayed._replay()
        torch.cuda.synchronize()
        assert_table(alloc)
        if at % 40 == 39:
            alloc.trim(h, 0)
    alloc.check(device=True)
