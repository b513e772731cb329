"""preallocate and acknowledge, sentence by sentence: pinned until the last writer, then live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_support import (
    PAGE_SIZES,
    Query,
    assert_drained,
    assert_laws,
    cached,
    count_launches,
    make,
    places,
    prompt,
    unchanged,
)
from transfer.transfer_support import PS, World, pinned, private, world

import sgalloc
from sgalloc.pages import PINNED

# -- what is held while it is received -----------------------------------------------------------


@pytest.mark.parametrize("ps", PAGE_SIZES)
def test_pages_are_pinned_until_every_writer_has_acknowledged(ps: int) -> None:
    alloc = make(12, ps, max_requests=4)
    lengths = [2 * ps + 1, ps, 5 * ps]
    h = alloc.preallocate(lengths, writers=[1, 2, 3])
    assert h.dtype == np.int64 and h.shape == (3,)
    counts = [-(-n // ps) for n in lengths]
    assert pinned(alloc) == sum(counts) == 12 - alloc.available()
    assert alloc.stats().groups["full"].owned == 0
    assert (alloc.owners() == PINNED).sum() == sum(counts) and PINNED == -4
    assert alloc.committed(h).tolist() == [0, 0, 0]
    assert alloc.allocated(h).tolist() == [n * ps for n in counts]
    for handle, length, writers in zip(h.tolist(), lengths, (1, 2, 3), strict=True):
        assert alloc.pages(handle).size == 0, "stop defaults to C"
        pages = alloc.pages(handle, stop=length)
        assert (alloc.owners()[pages] == PINNED).all()
        slots = alloc.slots(handle, 0, length)
        where = np.arange(length)
        assert slots.tolist() == (pages[where // ps] * ps + where % ps).tolist()
        for writer in reversed(range(writers)):
            assert alloc.receiving(handle).acks == tuple(range(writer + 1, writers))
            assert alloc.committed(handle).tolist() == [0]
            assert_laws(alloc)
            assert alloc.acknowledge(handle, writer) is True
        assert alloc.receiving(handle) is None
        assert alloc.committed(handle).tolist() == [length]
        assert alloc.pages(handle).tolist() == pages.tolist(), "the pages that were sent into"
        assert (alloc.owners()[pages] == alloc.rows(handle)[0]).all()
        assert_laws(alloc)
    assert pinned(alloc) == 0 and alloc.stats().groups["full"].owned == sum(counts)
    alloc.decode(h)
    assert alloc.committed(h).tolist() == [n + 1 for n in lengths] if ps > 1 else True
    alloc.release(h)
    assert_drained(alloc)


GROWING: dict[str, Callable[[World, Any], Any]] = {
    "extend": lambda w, x: w.alloc.extend(x, 20),
    "extend by nothing": lambda w, x: w.alloc.extend(x, w.alloc.committed(x)),
    "decode": lambda w, x: w.alloc.decode(x),
    "decode nothing": lambda w, x: w.alloc.decode(x, 0),
    "reserve": lambda w, x: w.alloc.reserve(x, 1),
    "commit": lambda w, x: w.alloc.commit(x, 1),
    "commit nothing": lambda w, x: w.alloc.commit(x, 0),
    "trim": lambda w, x: w.alloc.trim(x, 4),
    "trim nothing": lambda w, x: w.alloc.trim(x, 100),
    "plan extend": lambda w, x: w.alloc.plan(extend=(x, 20)),
    "plan decode": lambda w, x: w.alloc.plan(decode=(x, 1)),
    "plan reserve": lambda w, x: w.alloc.plan(reserve=(x, 1)),
    "publish": lambda w, x: w.alloc.prefix.publish(x, [prompt(1, PS)] * np.size(x)),
}


@pytest.mark.parametrize("verb", GROWING)
@pytest.mark.parametrize("which", ["bare", "shared", "among live", "batch", "cached batch"])
def test_growing_what_is_received_is_refused(verb: str, which: str) -> None:
    w = world()
    row = int(w.alloc.rows(w.shared if which == "shared" else w.bare)[0])
    x: Any = {"bare": [w.bare], "shared": [w.shared]}.get(which, [w.live, w.bare])
    if "batch" in which:
        x = w.alloc.batch(x)
    if which == "cached batch":  # one that has seen this state of the ledger
        w.alloc.committed(x)
        with pytest.raises(sgalloc.WrongState):
            w.alloc.decode(x)
    call = GROWING[verb]
    if verb == "publish" and "batch" in which:
        call = lambda w, x: w.alloc.prefix.publish(x, [prompt(1, PS)] * 2)  # noqa: E731
    with unchanged(w.alloc), pytest.raises(sgalloc.WrongState) as refused:
        call(w, x)
    message = str(refused.value)
    assert message.startswith(f"row {row} ") and "acknowledged, or abort" in message
    assert "\n" not in message
    # The same call goes through once all is received.
    w.alloc.acknowledge(w.bare, 1)
    w.alloc.acknowledge(w.shared, 0)
    if verb == "publish" and "batch" in which:
        x = x.handles[:0]
        w.alloc.prefix.publish(x, [])
    elif verb != "trim":
        call(w, x)
    assert_laws(w.alloc)


def test_what_may_be_asked_while_it_is_received() -> None:
    w = world()
    x = [w.bare, w.shared]
    assert w.alloc.rows(x).size == 2
    assert w.alloc.committed(x).tolist() == [0, 2 * PS]
    assert w.alloc.allocated(x).tolist() == [12, 16]
    assert w.alloc.decode_index(x).tolist() == [0, 0]
    assert w.alloc.slots(x, [0, 8], [10, 15]).size == 17
    assert w.alloc.pages(w.shared).tolist() == w.alloc.prefix.match(prompt(2, PS)).pages.tolist()
    assert w.alloc.runs(x).pages.tolist() == [3, 4]
    assert w.alloc.batch(x).rows.tolist() == w.alloc.rows(x).tolist()
    stats = w.alloc.stats()
    assert stats.rows.open == 3 and stats.rows.quarantined == 2
    assert stats.rows.total == 8 == stats.rows.open + stats.rows.free + stats.rows.quarantined
    full = stats.groups["full"]
    assert (full.pinned, full.owned, full.quarantined) == (3 + 2 + 2, 3, 2)
    assert full.total == full.free + full.quarantined + full.cached + full.pinned + full.owned
    assert len(places(w.alloc)["pinned"]) == full.pinned
    seen = w.alloc.receiving(w.shared)
    assert (seen.length, seen.prefix, seen.writers, seen.acks) == (15, 8, 1, ())
    assert (seen.deadline, seen.aborted) == (50, False)
    assert seen.ready.query() is True
    assert w.alloc.receiving(w.aborted).aborted
    assert w.alloc.receiving(w.live) is w.alloc.receiving(w.gone) is None
    assert w.alloc.receiving(0) is w.alloc.receiving(-1) is None


@pytest.mark.parametrize("length", [0, 2 * PS])
def test_a_request_with_nothing_to_receive_waits_for_its_writers_all_the_same(length: int) -> None:
    alloc = make(10, PS, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    match = alloc.prefix.match(prompt(2, PS)) if length else None
    (h,) = alloc.preallocate(length, prefix=match, writers=2)
    assert pinned(alloc) == 0
    alloc.acknowledge(h, 0)
    with pytest.raises(sgalloc.WrongState):
        alloc.decode(h)
    alloc.acknowledge(h, 1)
    alloc.decode(h)
    assert alloc.committed(h).tolist() == [length + 1]
    alloc.release(h)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_late_double_and_unknown_acknowledgements_change_nothing() -> None:
    w = world()
    with unchanged(w.alloc):
        assert w.alloc.acknowledge(w.bare, 0) is False, "said before"
        for writer in (2, 7, -1, 1 << 62):
            assert w.alloc.acknowledge(w.bare, writer) is False
        for handle in (w.live, w.gone, 0, -1, 1, w.bare + (1 << 32), 1 << 62):
            assert w.alloc.acknowledge(handle, 0) is False
    plan = w.alloc.plan(decode=(w.live, 1))
    w.alloc.acknowledge(w.bare, 0)
    w.alloc.apply(plan)  # still as good as it was
    plan = w.alloc.plan(decode=(w.live, 1))
    assert w.alloc.acknowledge(w.bare, np.int32(1)) is True
    with pytest.raises(sgalloc.StalePlan):
        w.alloc.apply(plan)
    with unchanged(w.alloc):
        assert w.alloc.acknowledge(w.bare, 1) is False, "late"


def test_a_batch_goes_on_with_requests_that_became_live() -> None:
    alloc = make(20, PS)
    h = alloc.preallocate([5, 6])
    batch = alloc.batch(h)
    alloc.acknowledge(h[0], 0)
    with pytest.raises(sgalloc.WrongState):
        alloc.decode(batch)
    alloc.acknowledge(h[1], 0)
    alloc.decode(batch)
    alloc.decode(batch)
    assert alloc.committed(batch).tolist() == [7, 8]
    assert_laws(alloc)


def test_a_steady_step_never_asks_who_is_being_received(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = make(40, PS)
    alloc.preallocate(5)
    h = alloc.open(2)
    alloc.extend(h, 3)
    batch = alloc.batch(h)
    alloc.decode(batch)
    asked = []
    check = type(alloc._ledger).check_received
    monkeypatch.setattr(
        type(alloc._ledger), "check_received", lambda *a: (asked.append(a), check(*a))
    )
    for _ in range(9):
        alloc.decode(batch)
        alloc.reserve(batch, 5)
    assert not asked
    other = alloc.open()  # the ledger has changed: now the batch looks again
    alloc.decode(batch)
    assert len(asked) == 1
    alloc.release(other)


# -- prefixes ------------------------------------------------------------------------------------


def test_a_prefix_is_locked_and_shared_and_only_the_rest_is_pinned() -> None:
    alloc = make(20, PS, prefix_cache=True)
    pages = cached(alloc, prompt(3, PS), namespace="a")
    match = alloc.prefix.match(prompt(2, PS), "a")
    before = alloc.available(counting_cache=True)
    first, second, third = alloc.preallocate([8, 13, 4], prefix=[match, match, None])
    assert before - alloc.available(counting_cache=True) == 2 + 0 + 2 + 1
    assert alloc.pages(first).tolist() == alloc.pages(second).tolist() == pages[:2].tolist()
    assert alloc.committed([first, second, third]).tolist() == [8, 8, 0]
    assert pinned(alloc) == 2 + 1
    assert_laws(alloc)
    for handle in (first, second, third):
        alloc.acknowledge(handle, 0)
    ids = np.concatenate((prompt(2, PS), np.arange(5) + 7_000))
    alloc.release([second], tokens=[ids])
    assert alloc.prefix.match(ids, "a").length == 12, "in the namespace of its match"
    alloc.release([first, third])
    alloc.prefix.clear()
    assert_drained(alloc)


def test_one_match_stands_for_all_requests_and_none_for_none() -> None:
    alloc = make(20, PS, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    h = alloc.preallocate([9, 10], prefix=alloc.prefix.match(prompt(2, PS)))
    assert alloc.committed(h).tolist() == [8, 8] and pinned(alloc) == 2
    h = alloc.preallocate([9, 10], prefix=[None, None])
    assert alloc.committed(h).tolist() == [0, 0]
    assert alloc.preallocate([], prefix=[]).size == 0
    empty = alloc.prefix.match([], namespace="b")
    (h,) = alloc.preallocate(6, prefix=empty)
    alloc.acknowledge(h, 0)
    alloc.release(h, tokens=prompt(1, PS, seed=3))
    assert alloc.prefix.match(prompt(1, PS, seed=3), "b").length == 4
    assert_laws(alloc)


def test_no_cache_is_needed_without_a_prefix() -> None:
    alloc = make(10, PS)
    assert alloc.preallocate([4, 4], prefix=None).size == 2
    assert alloc.preallocate([4, 4], prefix=[None, None]).size == 2
    assert_laws(alloc)


def test_a_preallocation_evicts_as_a_growth_does_and_never_its_own_prefix() -> None:
    alloc = make(8, PS, row_width=64, prefix_cache=True)
    old = cached(alloc, prompt(3, PS))
    young = cached(alloc, prompt(3, PS, seed=1))
    match = alloc.prefix.match(prompt(3, PS))
    # 2 free and 3 that may go: the match is locked before anybody is counted.
    with unchanged(alloc), pytest.raises(sgalloc.OutOfPages) as refused:
        alloc.preallocate(12 + 6 * PS, prefix=match)
    assert (refused.value.need, refused.value.free, refused.value.cached) == (6, 2, 3)
    assert alloc.available(counting_cache=True) == 8
    (h,) = alloc.preallocate(12 + 4 * PS, prefix=match)
    assert alloc.pages(h).tolist() == old.tolist()
    assert set(private(alloc, h)) > set(young[1:]), "from the end of the leaf, no more than needed"
    assert alloc.stats().groups["full"].evicted == 2
    assert_laws(alloc)
    alloc.abort(h, force=True)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_a_prefix_that_is_locked_already_takes_nothing_away() -> None:
    alloc = make(8, PS, row_width=64, prefix_cache=True)
    cached(alloc, prompt(3, PS))
    match = alloc.prefix.match(prompt(3, PS))
    (holder,) = alloc.open_with_prefix(match)
    cached(alloc, prompt(2, PS, seed=1))
    h = alloc.preallocate([12 + 2 * PS, 12 + 3 * PS], prefix=match)
    assert alloc.available(counting_cache=True) == 0 and pinned(alloc) == 5
    assert_laws(alloc)
    alloc.release(holder)
    alloc.abort(h, force=True)
    alloc.prefix.clear()
    assert_drained(alloc)


def test_an_evicted_match_is_stale() -> None:
    alloc = make(8, PS, prefix_cache=True)
    cached(alloc, prompt(3, PS))
    match = alloc.prefix.match(prompt(3, PS))
    alloc.prefix.clear()
    with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
        alloc.preallocate([16, 16], prefix=[None, match])
    with unchanged(alloc), pytest.raises(sgalloc.StalePlan):
        alloc.preallocate([32, 32], prefix=[None, match])  # before anything is counted


# -- all or nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_match", [False, True])
def test_what_does_not_fit_is_refused_and_launches_nothing(
    with_match: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alloc = make(10, PS, max_requests=3, row_width=24, prefix_cache=True)
    cached(alloc, prompt(2, PS))
    match = alloc.prefix.match(prompt(2, PS)) if with_match else None
    launches = count_launches(alloc, monkeypatch)
    for lengths, error in (
        ([8, 8, 8, 8], sgalloc.OutOfRows),
        ([8, 25, 8], sgalloc.RowTooNarrow),
        ([24, 24, 12] if with_match else [16, 24, 8], sgalloc.OutOfPages),
    ):
        reasons = alloc.stats().refusals.get(error.__name__, 0)
        with unchanged(alloc), pytest.raises(error):
            alloc.preallocate(lengths, prefix=match)
        assert alloc.stats().refusals[error.__name__] == reasons + 1
    assert launches["write"] == 0
    alloc.preallocate([20, 24, 12] if with_match else [16, 16, 8], prefix=match)
    assert alloc.available(counting_cache=True) == 0
    assert_laws(alloc)


def test_a_narrow_row_is_told_before_pages_are_counted() -> None:
    alloc = make(4, PS, row_width=24)
    with pytest.raises(sgalloc.RowTooNarrow) as refused:
        alloc.preallocate([24, 25])
    assert (refused.value.need, refused.value.width) == (28, 24)


def test_fits_says_what_a_preallocation_does() -> None:
    random = np.random.default_rng(5)
    seen = {True: 0, False: 0}
    for _ in range(300):
        alloc = make(12, PS, max_requests=4, row_width=24, prefix_cache=True)
        if random.integers(2):
            cached(alloc, prompt(int(random.integers(1, 5)), PS))
        lengths = random.integers(0, 26, size=random.integers(0, 6))
        fits = alloc.fits(lengths)
        seen[fits] += 1
        if fits:
            assert alloc.preallocate(lengths).size == lengths.size
        else:
            with unchanged(alloc), pytest.raises(sgalloc.AllocError):
                alloc.preallocate(lengths)
    assert min(seen.values()) > 30


def test_a_device_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = make(10, PS, max_requests=3, prefix_cache=True)
    cached(alloc, prompt(8, PS))
    match = alloc.prefix.match(prompt(2, PS))
    device, calls = alloc._core.device, []
    write = device.write

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the device is lost")
        return write(*args)

    monkeypatch.setattr(device, "write", failing)
    with pytest.raises(RuntimeError, match="lost"):
        alloc.preallocate([12, 16], prefix=[match, None])
    assert pinned(alloc) == 0 and alloc.stats().rows.free == 3
    assert alloc.stats().groups["full"].locked == 0
    assert alloc.available(counting_cache=True) == 10 and alloc.available() == 2
    alloc.check()
    assert alloc.preallocate([12, 16], prefix=[match, None]).size == 2
    assert_laws(alloc)


def test_what_waits_behind_a_done_event_is_taken_in_first() -> None:
    alloc = make(4, PS, max_requests=1)
    event = Query()
    (h,) = alloc.open()
    alloc.extend(h, 16)
    alloc.release(h, after=event)
    with unchanged(alloc), pytest.raises(sgalloc.OutOfRows):
        alloc.preallocate(16)
    event.over = True
    (h,) = alloc.preallocate(16)
    event.over = False
    alloc.acknowledge(h, 0)
    assert alloc.committed(h).tolist() == [16]


@pytest.mark.parametrize("call", ["the last acknowledgement", "reclaim", "abort"])
def test_other_verbs_take_in_what_waits_as_well(call: str) -> None:
    alloc = make(10, PS)
    (waits,) = alloc.preallocate(8)
    (h,) = alloc.preallocate(8, writers=2, deadline=4)
    event = Query()
    alloc.abort(waits, force=True, after=event)
    event.over = True
    alloc.acknowledge(h, 1)
    alloc.acknowledge(h, 1)
    alloc.reclaim(3)
    assert alloc.stats().groups["full"].quarantined == 2, "these changed nothing"
    {
        "the last acknowledgement": lambda: alloc.acknowledge(h, 0),
        "reclaim": lambda: alloc.reclaim(4),
        "abort": lambda: alloc.abort(h),
    }[call]()
    assert alloc.stats().groups["full"].quarantined == 0
    assert_laws(alloc)


def test_a_caller_may_change_its_arrays_afterwards() -> None:
    alloc = make(20, PS)
    lengths, writers = np.array([5, 6]), np.array([1, 1])
    h = alloc.preallocate(lengths, writers=writers)
    lengths[:], writers[:] = 9, 3
    for handle in h:
        alloc.acknowledge(handle, 0)
    assert alloc.committed(h).tolist() == [5, 6]
