"""The judge is judged: known answers for the naive allocator, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from sgalloc.fuzz.calls import NAMESPACES, Event
from sgalloc.fuzz.reference import Reference, Refused, SparseSettings, WindowSettings

NAMES = count(1)


def opened(ref: Reference, namespace: Any = None) -> int:
    name = next(NAMES)
    ref.open([name], namespace)
    return name


def extended(
    ref: Reference, length: int, namespace: Any = None, tail: int | None = None, only: bool = False
) -> int:
    name = opened(ref, namespace)
    tails = None if tail is None else [tail]
    ref.grow(extend=([name], [length]), tails=tails, only=only)
    return name


def cached(ref: Reference, tokens: Sequence[int], namespace: Any = None) -> None:
    ref.release([extended(ref, len(tokens), namespace)], [tokens])


def with_prefix(ref: Reference, tokens: Sequence[int]) -> int:
    name = next(NAMES)
    ref.open_with_prefix([name], [ref.match(tokens)])
    return name


def free(ref: Reference, group: str = "full", counting: bool = False) -> int:
    return ref.rooms(counting)[group]


def extent(ref: Reference, name: int) -> int:
    return len(ref.requests[name].pages) * ref.page_size


def refused(call: Callable[[], Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def with_window(
    num_pages: int,
    page_size: int,
    tokens: int,
    pages: int,
    prefix_cache: bool = False,
    evict_every: int = 1,
) -> Reference:
    window = WindowSettings(tokens, pages, True, evict_every)
    return Reference(num_pages, page_size, 4, num_pages * page_size, prefix_cache, window)


def with_device(device: int, size: int, buffer: int, scratch: int = 0) -> Reference:
    sparse = SparseSettings(4 * device, buffer, scratch)
    return Reference(device, size, 4, 4 * device * size, sparse=sparse)


# -- one group -----------------------------------------------------------------------------------


def test_reserve_and_commit_strand_no_tail() -> None:
    ref = Reference(10, 16, 2, 256)
    name = extended(ref, 30)
    assert (extent(ref, name), free(ref)) == (32, 8)
    states = []
    for accepted in (1, 4, 2, 3, 1):
        ref.grow(reserve=([name], [8]))
        ref.commit([name], [accepted])
        states.append((ref.requests[name].committed, extent(ref, name), free(ref)))
    assert states == [(31, 48, 7), (35, 48, 7), (37, 48, 7), (40, 48, 7), (41, 48, 7)]
    ref.grow(reserve=([name], [8]))
    assert (extent(ref, name), free(ref)) == (64, 6)
    ref.release([name])
    assert free(ref) == 10
    ref.check()


def test_a_row_too_narrow_is_refused_exactly_at_its_width() -> None:
    ref = Reference(200, 1, 1, 85)
    name = extended(ref, 51)
    ref.grow(reserve=([name], [34]))
    assert free(ref) == 200 - 85
    ref.commit([name], [1])
    error = refused(lambda: ref.grow(reserve=([name], [34])))
    assert (error.kind, error.numbers) == ("narrow", {"need": 86, "width": 85})
    assert free(ref) == 200 - 85


def test_second_release_and_duplicates_are_refused_as_a_whole() -> None:
    ref = Reference(8, 16, 3, 128)
    first, second = extended(ref, 20), extended(ref, 20)
    ref.release([first])
    assert refused(lambda: ref.release([second, first])).kind == "stale"
    assert refused(lambda: ref.release([second, second])).kind == "value"
    assert free(ref) == 6


def test_admission_counts_pages_per_request() -> None:
    ref = Reference(1, 128, 4, 512)
    assert [ref.fits([2, 2]), ref.fits([2]), ref.fits([128]), ref.fits([129])] == [0, 1, 1, 0]
    assert not Reference(9, 16, 2, 64).fits([0, 0, 0])
    assert not Reference(9, 16, 2, 64).fits([65])


def test_a_refused_batch_changes_nothing_and_an_exact_fit_goes_through() -> None:
    ref = Reference(3, 16, 4, 64)
    first, second = extended(ref, 16), extended(ref, 16)
    third, fourth = opened(ref), opened(ref)
    error = refused(lambda: ref.grow(extend=([third, fourth], [10, 17])))
    assert (error.kind, error.numbers) == ("pages", {"need": 3, "free": 1, "cached": 0})
    assert extent(ref, third) == extent(ref, fourth) == 0
    ref.grow(decode=([first], [1]))
    assert refused(lambda: ref.grow(decode=([second], [1]))).kind == "pages"
    ref.grow(decode=([first], [15]))
    assert free(ref) == 0


def test_what_waits_comes_back_with_its_event_and_not_before() -> None:
    ref, event = Reference(4, 2, 1, 8), Event()
    name = extended(ref, 5)
    ref.trim([name], [2], event)
    ref.release([name], None, event)
    assert (free(ref), ref.row_counts()["quarantined"]) == (1, 1)
    assert refused(lambda: opened(ref)).kind == "rows"
    event.over = True
    assert free(ref) == 1 and ref.ripe()  # nobody has polled yet
    ref.settle()
    assert (free(ref), ref.row_counts()["free"]) == (4, 1)
    ref.check()


def test_a_tree_is_compacted_and_its_branches_go_back() -> None:
    ref = Reference(8, 4, 1, 32)
    name = extended(ref, 5)
    ref.grow(reserve=([name], [14]))
    pages = list(ref.requests[name].pages)
    moves = ref.compact([name], [[5, 9, 14]])
    assert [(a.page, a.offset, b.page, b.offset) for a, b in moves] == [
        (pages[2], 1, pages[1], 2),
        (pages[3], 2, pages[1], 3),
    ]
    assert (ref.requests[name].committed, extent(ref, name), free(ref)) == (8, 8, 6)
    assert refused(lambda: ref.compact([name], [[7]])).kind == "value"
    assert refused(lambda: ref.compact([name], [[8]])).kind == "extent"


# -- the prefix cache ----------------------------------------------------------------------------


def test_eviction_is_oldest_leaf_first_by_need_and_ties_go_by_insertion() -> None:
    ref = Reference(5, 1, 3, 8, prefix_cache=True)
    cached(ref, [1, 2])
    cached(ref, [3, 4])
    ref.match([1])  # uses [1] alone: [1, 2]'s leaf stays the oldest
    extended(ref, 2)
    assert ref.pools["full"].evicted == 1
    assert len(ref.match([1, 2]).nodes) == 1
    ref.check()
    ref.match([3, 4])
    ref.match([1])
    extended(ref, 1)  # of those used longest ago only [3, 4] is a leaf
    assert [len(ref.match(tokens).nodes) for tokens in ([3, 4], [1])] == [1, 1]


def test_eviction_breaks_ties_by_insertion() -> None:
    ref = Reference(2, 1, 3, 8, prefix_cache=True)
    ref.release([extended(ref, 1), extended(ref, 1)], [[5], [4]])
    extended(ref, 1)
    assert [len(ref.match(tokens).nodes) for tokens in ([5], [4])] == [0, 1]


def test_what_is_locked_or_unsettled_neither_goes_nor_counts() -> None:
    ref, gate = Reference(4, 2, 3, 8, prefix_cache=True), Event()
    name = extended(ref, 4)
    ref.release([name], [[1, 1, 1, 1]], gate)
    assert (free(ref), free(ref, counting=True)) == (2, 2)
    match = ref.match([1, 1, 1, 1])
    assert len(match.nodes) == 2 and ref.row_counts()["free"] == 2
    gate.over = True
    assert free(ref, counting=True) == 2  # nobody polled yet
    ref.settle()
    assert (free(ref, counting=True), ref.row_counts()["free"]) == (4, 3)
    name = with_prefix(ref, [1, 1, 1, 1])
    assert free(ref, counting=True) == 2
    assert ref.fits([8], after_releasing=[name])
    assert not ref.fits([8], after_releasing=[name], counting_cache=False)
    assert refused(lambda: extended(ref, 6)).numbers == {"need": 3, "free": 2, "cached": 0}


def test_an_ancestor_of_what_must_stay_does_not_count() -> None:
    ref, gate = Reference(4, 1, 3, 8, prefix_cache=True), Event()
    cached(ref, [1, 2, 3])
    name = with_prefix(ref, [1, 2, 3])
    ref.trim([name], [1], gate)
    ref.release([name])
    assert free(ref, counting=True) == 1
    gate.over = True
    ref.settle()
    assert free(ref, counting=True) == 4


def test_a_duplicate_is_freed_and_a_published_prompt_is_shared() -> None:
    ref = Reference(6, 2, 3, 8, prefix_cache=True)
    first, second = extended(ref, 4), extended(ref, 5)
    ref.publish([first], [[1, 1, 2, 2]])
    assert ref.group_counts()["full"]["locked"] == 2
    ref.publish([second], [[1, 1, 2, 2, 3]])
    assert ref.requests[first].pages == ref.requests[second].pages[:2]
    assert free(ref) == 3
    assert refused(lambda: ref.trim([second], [3])).numbers == {"edge": 2}
    ref.release([first])
    assert refused(lambda: ref.release([second], [[2, 2]])).kind == "value"
    ref.release([second])
    assert (free(ref), free(ref, counting=True)) == (4, 6)
    ref.check()
    assert ref.clear() == 2 and free(ref) == 6


def test_a_match_that_was_evicted_is_refused() -> None:
    ref = Reference(2, 1, 3, 8, prefix_cache=True)
    cached(ref, [1, 1])
    match = ref.match([1, 1])
    ref.release([extended(ref, 1)])
    assert refused(lambda: ref.open_with_prefix([99], [match])).kind == "plan"
    assert ref.row_counts()["free"] == 3


def test_namespaces_never_share() -> None:
    ref = Reference(6, 1, 3, 8, prefix_cache=True)
    for namespace in NAMESPACES:
        assert ref.match([1], namespace).nodes == []
        cached(ref, [1], namespace)
    assert ref.group_counts()["full"]["cached"] == len(NAMESPACES)


def test_a_plan_ages_with_every_change_and_with_nothing_else() -> None:
    ref, gate = Reference(4, 1, 3, 8, prefix_cache=True), Event()
    name = extended(ref, 1)
    ref.release([extended(ref, 1)], None, gate)
    plan = ref.plan(reserve=([name], [1]))
    ref.match([1])
    gate.over = True
    ref.settle()
    refused(lambda: ref.commit([name], [9]))
    ref.apply(plan)
    assert refused(lambda: ref.apply(plan)).kind == "plan"


# -- remote writers ------------------------------------------------------------------------------


def received(ref: Reference, length: int, writers: int = 2, deadline: float | None = None) -> int:
    name = next(NAMES)
    ref.preallocate([name], [length], [writers], [None], [deadline])
    return name


def test_a_request_is_live_when_all_writers_are_done() -> None:
    ref = Reference(6, 4, 2, 32)
    name = received(ref, 9)
    assert ref.group_counts()["full"]["pinned"] == 3
    assert refused(lambda: ref.grow(decode=([name], [1]))).kind == "state"
    assert [ref.acknowledge(name, n) for n in (1, 1, 7, 0, 0)] == [True, False, False, True, False]
    assert (ref.requests[name].committed, ref.group_counts()["full"]["pinned"]) == (9, 0)
    ref.grow(decode=([name], [3]))
    ref.check()


def test_what_was_aborted_waits_for_its_writers_its_deadline_or_force() -> None:
    ref = Reference(6, 4, 3, 32)
    names = [received(ref, 8, deadline=when) for when in (None, 5, None)]
    ref.abort(names)
    assert (free(ref), ref.row_counts()["free"], len(ref.requests)) == (0, 0, 0)
    assert ref.reclaim(4.5) == [] and ref.reclaim(5) == [names[1]] and free(ref) == 2
    assert ref.acknowledge(names[0], 0) and free(ref) == 2
    assert ref.acknowledge(names[0], 1) and free(ref) == 4
    ref.abort([names[2], names[0]])
    assert free(ref) == 4
    ref.abort([names[2]], force=True)
    assert (free(ref), ref.row_counts()["free"]) == (6, 3)
    ref.check()


def test_an_abort_behind_an_event_waits_for_both() -> None:
    ref, event = Reference(6, 4, 2, 32), Event()
    name = received(ref, 8, writers=1)
    ref.abort([name], event=event)
    assert ref.acknowledge(name, 0) and free(ref) == 4
    event.over = True
    ref.settle()
    assert free(ref) == 6


# -- the window ----------------------------------------------------------------------------------


def test_eviction_inside_a_page_gives_whole_pages_back() -> None:
    ref = with_window(8, 4, 4, 8)
    name = extended(ref, 13)
    seen = [free(ref, "window")]
    for upto in (6, 8, 6):
        ref.evict_window([name], [upto])
        seen.append(free(ref, "window"))
    assert seen == [4, 5, 6, 6]
    assert sorted(ref.requests[name].window) == [2, 3]
    ref.release([name])
    assert (free(ref), free(ref, "window"), ref.map) == (8, 8, {})


@pytest.mark.parametrize(("tail", "left"), [(4, 3), (0, 4)])
def test_a_tail_takes_window_pages_for_itself_alone(tail: int, left: int) -> None:
    ref = with_window(4, 4, 4, 4)
    ref.release([extended(ref, 8)])
    name = extended(ref, 16, tail=tail)
    assert (free(ref, "window"), ref.requests[name].frontier) == (left, (16 - tail) // 4)
    ref.release([name])
    assert free(ref, "window") == 4
    ref.check()


@pytest.mark.parametrize(
    ("page_size", "window", "committed", "plain", "with_cache"),
    [(2, 1, 5, 2, 1), (3, 4, 10, 2, 1), (16, 17, 49, 2, 1), (16, 64, 50, 0, 0), (1, 2, 5, 3, 3)],
)
def test_the_frontier_by_hand(
    page_size: int, window: int, committed: int, plain: int, with_cache: int
) -> None:
    for prefix_cache, expected in ((False, plain), (True, with_cache)):
        ref = with_window(10, page_size, window, 10, prefix_cache)
        assert ref.evict_window([extended(ref, committed)], None) == [expected * page_size]


def test_a_cut_page_is_taken_by_the_next_token_and_not_before() -> None:
    ref = with_window(8, 4, 1, 8)
    name = extended(ref, 24)
    ref.evict_window([name], [24])
    ref.trim([name], [6])
    assert (ref.requests[name].frontier, free(ref, "window")) == (1, 8)
    assert ref.needs(ref.plan(reserve=([name], [0]))) == {"full": 0, "window": 0}
    assert ref.needs(ref.plan(reserve=([name], [1]))) == {"full": 0, "window": 1}
    ref.check()


def test_a_cadence_waits_until_it_is_far_enough_behind() -> None:
    ref = with_window(20, 4, 4, 20, evict_every=9)
    name = opened(ref)
    moved = []
    for committed in range(1, 33):
        ref.grow(extend=([name], [committed]))
        moved.append(ref.evict_window([name], None)[0])
    assert sorted(set(moved)) == [0, 12, 24] and moved.index(12) == 15


def test_a_match_needs_a_whole_window_and_a_twin_takes_a_page_over() -> None:
    ref = with_window(12, 1, 2, 12, prefix_cache=True)
    name = extended(ref, 4)
    ref.evict_window([name], [3])
    ref.release([name], [[1, 2, 3, 4]])
    assert ref.match([1, 2, 3, 4]).nodes == []
    ref.release([extended(ref, 4)], [[1, 2, 3, 4]])
    assert len(ref.match([1, 2, 3, 4]).nodes) == 4
    assert (free(ref), free(ref, "window")) == (8, 8)
    ref.check()


def test_a_refusal_names_the_group_and_the_net_need() -> None:
    ref = with_window(20, 4, 4, 5)
    name = extended(ref, 16)
    error = refused(lambda: ref.apply(ref.plan(decode=([name], [32]), evict=True)))
    assert (error.group, error.numbers) == ("window", {"need": 5, "free": 1, "cached": 0})
    assert ref.requests[name].frontier == 0


def test_a_tail_to_be_received_may_begin_inside_the_prefix() -> None:
    ref = with_window(12, 2, 4, 12, prefix_cache=True)
    cached(ref, [1] * 8)
    name, match = next(NAMES), ref.match([1] * 8)
    for tail, kind in ((3, "value"), (14, "value")):
        call = lambda t=tail: ref.preallocate([name], [12], [1], [match], [None], [t])  # noqa: E731
        assert refused(call).kind == kind
    ref.preallocate([name], [12], [1], [match], [None], [6])
    request = ref.requests[name]
    assert (request.frontier, sorted(request.window)) == (3, [3, 4, 5])
    assert (free(ref), free(ref, "window")) == (6, 6)
    ref.check()


# -- the device group ----------------------------------------------------------------------------


def test_a_long_request_keeps_a_buffer_and_its_newest_page() -> None:
    ref = with_device(10, 4, buffer=8, scratch=1)
    name = extended(ref, 22)
    held = list(ref.requests[name].device)
    assert (free(ref, "logical"), free(ref, "device")) == (34, 4)
    ref.to_sparse([name])
    request = ref.requests[name]
    assert (request.device, request.shown) == ([*held[:2], held[5]], {5: held[5]})
    assert (len(request.scratch), free(ref, "device")) == (1, 6)
    ref.grow(decode=([name], [3]))
    assert (request.shown, free(ref, "device")) == ({6: held[5]}, 6)
    assert refused(lambda: ref.to_sparse([name])).kind == "state"
    ref.release([name])
    assert (free(ref, "device"), ref.map) == (10, {})
    ref.check()


def test_a_short_request_grows_its_buffer_and_becomes_long() -> None:
    ref = with_device(10, 4, buffer=8)
    name = extended(ref, 3)
    ref.to_sparse([name])
    request, held = ref.requests[name], []
    for _ in range(4):
        ref.grow(decode=([name], [3]))
        held.append((len(request.device), sorted(request.shown)))
    assert held == [(2, [0, 1]), (3, [2]), (3, [2]), (3, [3])]
    ref.trim([name], [7])
    assert (request.long, len(request.device), len(ref.map)) == (False, 2, 0)
    ref.grow(reserve=([name], [0]))
    assert sorted(request.shown) == [0, 1]
    ref.check()


def test_logical_pages_alone_cannot_decode_before_they_are_thinned() -> None:
    ref = with_device(3, 4, buffer=4)
    name = extended(ref, 20, only=True)
    assert free(ref, "device") == 3
    assert refused(lambda: ref.grow(decode=([name], [1]))).kind == "state"
    ref.to_sparse([name])
    assert (len(ref.requests[name].device), sorted(ref.requests[name].shown)) == (2, [4])
    other = extended(ref, 20, only=True)
    error = refused(lambda: ref.to_sparse([other]))
    assert (error.group, error.numbers) == ("device", {"need": 2, "free": 1, "cached": 0})


# -- its own laws --------------------------------------------------------------------------------


def test_the_reference_proves_its_own_laws() -> None:
    ref = Reference(3, 1, 2, 8)
    name = extended(ref, 2)
    ref.requests[name].pages[0] = ref.requests[name].pages[1]
    with pytest.raises(AssertionError, match="partition"):
        ref.check()
    ref = Reference(3, 1, 2, 8, prefix_cache=True)
    cached(ref, [1])
    ref.nodes()[0].locks = 1
    with pytest.raises(AssertionError, match="locks"):
        ref.check()
    ref = Reference(3, 1, 2, 8)
    extended(ref, 1)
    ref.rows_out.clear()
    with pytest.raises(AssertionError, match="rows"):
        ref.check()
    with pytest.raises(KeyError):
        ref.pools["full"].give([77])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda ref, name: ref.pools["window"].out.add(99), "window is broken"),
        (lambda ref, name: ref.requests[name].window.pop(0), "window is broken"),
        (lambda ref, name: setattr(ref.requests[name], "frontier", 1), "outside the extent"),
    ],
)
def test_the_reference_proves_the_laws_of_the_window(
    fault: Callable[..., Any], message: str
) -> None:
    ref = with_window(4, 4, 4, 4)
    name = extended(ref, 16)
    fault(ref, name)
    with pytest.raises(AssertionError, match=message):
        ref.check()
