"""Requests with a step that is staged and not replayed: what may be done to them, and what not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cupy.cuda import runtime
from gpu.capturing import PS, REMEDY, Graph, assert_table, make
from gpu.currents import event_behind
from gpu.latch import Latches
from gpu.twins import host
from host_support import Query

import sgalloc

pytestmark = pytest.mark.usefixtures("no_collection")


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
