"""check(device=True) and probe(): each wrong entry of each table is found, and named."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_support import PAGE_SIZES, Query, fingerprint
from trust.tables_support import DEVICES, WORLDS, World, entries_under_law, opened, plain, windowed

import sgalloc
from sgalloc.device.write_log import KEPT, LISTED
from sgalloc.trust.claims import claims_of

pytestmark = pytest.mark.not_in_debug_mode("it spoils tables, which the next call would find")

each_device = pytest.mark.parametrize("device", DEVICES)
each_world = pytest.mark.parametrize("kind", WORLDS)
LOOKS = {
    "check": lambda alloc: alloc.check(device=True),
    "probe": lambda alloc: alloc.probe().result(),
}
each_look = pytest.mark.parametrize("look", LOOKS)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A CPU, or the stand-in for CUDA."""
    with opened(request.param):
        yield request.param


def found(look: str, alloc: sgalloc.KVAllocator) -> str:
    """What a look finds wrong."""
    with pytest.raises(sgalloc.LawViolation) as caught:
        LOOKS[look](alloc)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -- what is wrong is found ----------------------------------------------------------------------


@each_world
@each_look
def test_sound_tables_pass(kind: str, look: str, device: str) -> None:
    world = WORLDS[kind](device)
    world.alloc.check()
    before = fingerprint(world.alloc) if device == "cpu" else None
    assert LOOKS[look](world.alloc).tolist() == []
    assert before is None or fingerprint(world.alloc) == before, "looking changes nothing"


@each_world
@pytest.mark.parametrize("ps", [1, 3, 4])
def test_every_entry_is_looked_at(kind: str, ps: int, device: str) -> None:
    """One after the other is made wrong, in each table: the message names it and both values."""
    world = WORLDS[kind](device, ps)
    places = list(entries_under_law(world))
    assert {name for name, _ in places} == set(world.tables)
    for turn, (name, place) in enumerate(places):
        table = world.tables[name]
        was = int(table[place])
        table[place] = wrong = was ^ (1 << turn % 31)
        line = found("probe" if turn % 2 else "check", world.alloc)
        where = ", ".join(map(str, place))
        told = f"{name}[{where}] is {wrong} on the device, but the ledger says {was}; "
        assert line.startswith(told), (line, told)
        table[place] = was
    world.alloc.check(device=True)


@each_look
@pytest.mark.parametrize("ps", PAGE_SIZES)
def test_what_lies_past_the_extent_is_outside_the_law(ps: int, look: str, device: str) -> None:
    world = plain(device, ps)
    alloc = world.alloc
    for row, held in zip(alloc.rows(world.handles), alloc.allocated(world.handles), strict=True):
        alloc.req_to_token[row, held:] = -1
        alloc.page_table[row, held // ps :] = -1
    closed = [row for row in range(1, 7) if not alloc._ledger.handle[row]]
    assert closed
    alloc.req_to_token[closed] = 5
    LOOKS[look](alloc)


@each_look
@pytest.mark.parametrize("ps", PAGE_SIZES)
def test_errors_that_cancel(ps: int, look: str, device: str) -> None:
    """Two pages exchanged, in a row and between rows; one more here and one less there."""
    world = plain(device, ps)
    alloc = world.alloc
    table, (a, _, b, _) = alloc.req_to_token, alloc.rows(world.handles).tolist()
    sound = np.array(table)

    def assert_seen(row: int, column: int) -> None:
        assert found(look, alloc).startswith(f"req_to_token[{row}, {column}] is ")
        table[...] = sound
        LOOKS[look](alloc)

    table[a, ps : 2 * ps], table[a, 3 * ps : 4 * ps] = (
        sound[a, 3 * ps : 4 * ps], sound[a, ps : 2 * ps],
    )  # fmt: skip
    assert_seen(a, ps)
    table[a, :ps], table[b, :ps] = sound[b, :ps], sound[a, :ps]
    assert_seen(min(a, b), 0)
    table[a, 0] += 1
    table[a, 3 * ps] -= 1
    assert_seen(a, 0)
    table[a, : 5 * ps] = np.roll(sound[a, : 5 * ps], 1)
    assert_seen(a, 0)
    table[a, 2 * ps - 1 : 2 * ps + 1] ^= 1 << 30
    assert_seen(a, 2 * ps - 1)


@each_look
def test_the_map_is_left_alone_where_pages_wait(look: str, device: str) -> None:
    """They keep their entries until they come back; what is beside them is looked at."""
    world = windowed(device)
    alloc, event = world.alloc, Query()
    first = world.handles[0]
    (row,) = alloc.rows(first).tolist()
    pages = alloc._ledger.page_list(row).tolist()
    alloc.release(first, after=event)
    LOOKS[look](alloc)
    for page in pages:
        alloc.full_to_window[4 * page : 4 * page + 4] = 77
    LOOKS[look](alloc)
    for page in (pages[0] - 1, pages[-1] + 1):
        was = int(alloc.full_to_window[4 * page])
        alloc.full_to_window[4 * page] = 3
        assert f"full_to_window[{4 * page}] is 3 " in found(look, alloc)
        alloc.full_to_window[4 * page] = was
    event.over = True
    alloc.settle()
    LOOKS[look](alloc)


@each_look
def test_what_aborted_writers_may_still_write_is_left_out_of_the_map(
    look: str, device: str
) -> None:
    """Rows that are being received are looked at as all others are."""
    world = windowed(device)
    alloc = world.alloc
    (pinned,) = alloc.preallocate([9]).tolist()
    (row,) = alloc.rows(pinned).tolist()
    LOOKS[look](alloc)
    at = 4 * int(alloc._ledger.pages[row, 0])
    alloc.window_table[row, 2] += 1
    assert f"window_table[{row}, 2] is " in found(look, alloc)
    alloc.window_table[row, 2] -= 1
    alloc.full_to_window[at] += 1
    assert f"full_to_window[{at}] is " in found(look, alloc)
    alloc.abort(pinned)
    LOOKS[look](alloc)


def test_a_map_of_many_pieces(device: str) -> None:
    """Longer than a range, and cut by pages that wait; the first and last entries of each."""
    alloc = sgalloc.KVAllocator(
        50_000, 4, 3, 40, device=device, window=sgalloc.SlidingWindow(8, 20, slot_map=True)
    )
    event = Query()
    h = alloc.open(2).tolist()
    alloc.extend(h, 33)
    alloc.release(h[0], after=event)
    waits = sorted(alloc._core.quarantine.page_ids().tolist())
    piece = 65_536 // 4
    for page in (
        0,
        waits[0] - 1,
        waits[-1] + 1,
        piece - 1,
        piece,
        3 * piece - 1,
        3 * piece,
        50_000,
    ):
        for at in (4 * page, 4 * page + 3):
            was = int(alloc.full_to_window[at])
            alloc.full_to_window[at] = 9_999
            assert f"full_to_window[{at}] is 9999 " in found("probe", alloc)
            alloc.full_to_window[at] = was
    alloc.check(device=True)


# -- who wrote it --------------------------------------------------------------------------------


def spoilt(alloc: sgalloc.KVAllocator, row: int, column: int, look: str = "check") -> str:
    """Who wrote this entry last, as a look says that finds it wrong."""
    was = int(alloc.req_to_token[row, column])
    alloc.req_to_token[row, column] = 1_000_000
    line = found(look, alloc)
    alloc.req_to_token[row, column] = was
    return line.partition("; ")[2]


@each_look
def test_the_last_plan_is_named(look: str, device: str) -> None:
    alloc = sgalloc.KVAllocator(300, 4, 8, 80, device=device)
    h = alloc.open(5)
    batch = alloc.batch(h)
    plans = [alloc.extend(h, [20, 9, 13, 4, 4]), alloc.reserve(batch, 7)]
    alloc.commit(batch, 3)
    plans.append(alloc.decode(batch, 5))
    (a, b, *_) = alloc.rows(h).tolist()
    told = [
        "(extend of 5 requests, 14 new pages), 2 writes ago",
        "(reserve of 5 requests, 8 new pages), 1 write ago",
        "(decode of 5 requests, 2 new pages), the last write so far",
    ]
    texts = [
        f"last written by plan {plan.version} {how}" for plan, how in zip(plans, told, strict=True)
    ]
    assert [plan.num_new_pages for plan in plans] == [14, 8, 2]
    assert spoilt(alloc, a, 19, look) == texts[0]
    assert spoilt(alloc, a, 20, look) == texts[1]
    assert spoilt(alloc, b, 12, look) == texts[1]
    assert spoilt(alloc, b, 16, look) == texts[2]


def test_a_mixed_plan_a_trim_and_a_page_of_another(device: str) -> None:
    """A page that came back belongs to the plan that took it last."""
    alloc = sgalloc.KVAllocator(6, 4, 3, 24, device=device)
    one, two, three = alloc.open(3).tolist()
    alloc.extend(one, 24)
    alloc.trim(one, 8)
    plan = alloc.apply(alloc.plan(extend=(two, 5), reserve=(three, 1)))
    rows = alloc.rows([one, two, three]).tolist()
    assert f"plan {plan.version} (mixed plan of 2 requests, 3 new pages)" in spoilt(
        alloc, rows[2], 0
    )
    assert f"plan {plan.version} (mixed" in spoilt(alloc, rows[1], 7)
    assert "extend of 1 request, 6 new pages), 1 write ago" in spoilt(alloc, rows[0], 0)


def test_calls_that_are_no_plans_are_named(device: str) -> None:
    alloc = sgalloc.KVAllocator(60, 4, 6, 64, device=device, prefix_cache=True)
    ids = np.arange(16)
    (first,) = alloc.open().tolist()
    alloc.extend(first, 16)
    alloc.prefix.publish(first, [ids])
    match = alloc.prefix.match(ids)
    shares, again = alloc.open_with_prefix([match, match]).tolist()
    rows = alloc.rows([first, shares]).tolist()
    assert "open_with_prefix of 2 requests at version " in spoilt(alloc, rows[1], 3)
    assert "extend of 1 request, 4 new pages" in spoilt(alloc, rows[0], 3)
    alloc.trim(again, 0)
    alloc.extend(again, 16)
    version = alloc._ledger.version
    alloc.prefix.publish(again, [ids])
    (row,) = alloc.rows(again).tolist()
    assert f"publish of 1 request at version {version} (4 pages), the last" in spoilt(alloc, row, 0)


@each_device
def test_the_second_group_and_the_map_say_who_too(device: str) -> None:
    with opened(device):
        world = windowed(device)
        alloc = world.alloc
        (row, _) = alloc.rows(world.handles).tolist()
        evicted = r"evict_window of 2 requests at version \d+ \(\d+ pages of the second group\)"
        texts = {"below the frontier": (1, evicted), "above it": (35, r"plan \d+ \(extend of 2 ")}
        for column, pattern in texts.values():
            was = int(alloc.window_table[row, column])
            alloc.window_table[row, column] = 5_000
            assert re.search(f"; last written by {pattern}", found("check", alloc))
            alloc.window_table[row, column] = was
        for number, pattern in ((0, evicted), (8, r"plan \d+ \(extend of 2 ")):
            at = 4 * int(alloc._ledger.pages[row, number])
            was = int(alloc.full_to_window[at])
            alloc.full_to_window[at] = 5_000
            assert re.search(f"; last written by {pattern}", found("check", alloc))
            alloc.full_to_window[at] = was
        alloc.full_to_window[2] = 5_000
        assert found("check", alloc).endswith("; written by no plan")


def test_what_is_older_than_the_log_is_said_to_be(device: str) -> None:
    alloc = sgalloc.KVAllocator(300, 1, 4, 100, device=device)
    h = alloc.open(2).tolist()
    alloc.extend(h[0], 1)
    (row, _) = alloc.rows(h).tolist()
    for ago in range(KEPT):
        told = f"extend of 1 request, 1 new pages), {ago} write" if ago else "the last write so far"
        assert told in spoilt(alloc, row, 0)
        alloc.decode(h[1])
    assert spoilt(alloc, row, 0) == f"written before the last {KEPT} plans"
    assert spoilt(alloc, 0, 99) == "no plan writes the padding row"


def test_a_write_too_large_to_list_may_have_been_it(device: str) -> None:
    alloc = sgalloc.KVAllocator(3 * LISTED, 1, 4, 2 * LISTED, device=device)
    h = alloc.open(2).tolist()
    before = alloc.extend(h[0], 3)
    large = alloc.extend(h[1], LISTED + 1)
    rows = alloc.rows(h).tolist()
    listed = f"by plan {before.version} (extend of 1 request, 3 new pages), 1 write ago"
    much = (
        f"by plan {large.version} (extend of 1 request, {LISTED + 1:,} new pages, too many to list)"
    )
    assert spoilt(alloc, rows[0], 0) == f"last written {much}, the last write so far, or {listed}"
    assert spoilt(alloc, rows[1], 0) == f"last written {much}, the last write so far, or by no plan"
    alloc.extend(h[0], 3 + LISTED)
    assert "new pages), the last write so far" in spoilt(alloc, rows[0], 3)


def test_a_step_of_both_groups_is_counted_in_both(device: str) -> None:
    """Whether its pages of the second group go along, leave with others, or are too many."""
    alloc = sgalloc.KVAllocator(
        2 * LISTED, 1, 4, 2 * LISTED, device, window=sgalloc.SlidingWindow(2, 2 * LISTED)
    )
    (h,) = alloc.open().tolist()
    (row,) = alloc.rows(h).tolist()

    def last(column: int) -> str:
        was = int(alloc.window_table[row, column])
        alloc.window_table[row, column] = 9_999
        line = found("check", alloc)
        alloc.window_table[row, column] = was
        return line.partition("; ")[2]

    alloc.extend(h, 6)
    assert "(extend of 1 request, 6 new pages and 6 of the second group), the last" in last(5)
    alloc.apply(alloc.plan(decode=(h, 2), evict_window=True))
    both = "(decode of 1 request, 2 new pages and 6 of the second group), the last"
    assert both in last(7) and both in last(0), "four pages were cleared"
    assert "extend of 1 request" in last(5)
    alloc.extend(h, LISTED + 20)
    assert "second group, too many to list), the last write so far, or by plan" in last(5)


def test_a_restored_allocator_names_the_restore(device: str) -> None:
    data = plain("cpu").alloc.snapshot()
    alloc = sgalloc.KVAllocator.restore(data, device=device)
    assert "last written by restore of 3 requests at version " in spoilt(alloc, 1, 0)


def test_a_journal_adds_the_calls(device: str, tmp_path: Path) -> None:
    for look in LOOKS:
        path = tmp_path / look
        alloc = sgalloc.KVAllocator(60, 4, 4, 40, device=device, journal=path)
        (h,) = alloc.open().tolist()
        alloc.extend(h, 9)
        LOOKS[look](alloc)
        alloc.req_to_token[1, 4] = 0
        line = found(look, alloc)
        assert "extend of 1 request, 3 new pages" in line and "last calls on row 1" in line


# -- steps that no replay has applied ------------------------------------------------------------


def test_staged_pages_are_left_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reads such rows back; a probe leaves them to the next one."""
    world = windowed(device)
    alloc = world.alloc
    rows = alloc.rows(world.handles).tolist()
    late = rows[0] * alloc._ledger.row_pages + 8
    monkeypatch.setattr(alloc._core.device, "unwritten", lambda: np.array([late]))
    alloc.req_to_token[rows[0], 32:36] = -1
    alloc.full_to_window[:] = -1
    assert alloc.check(device=True).tolist() == [rows[0]]
    probe = alloc.probe()
    assert probe.result().tolist() == probe.left_out.tolist() == [rows[0]]
    assert alloc.probe(world.handles[1]).left_out.size == 0
    alloc.req_to_token[rows[0], 31] += 1
    assert f"req_to_token[{rows[0]}, 31]" in found("check", alloc)
    alloc.probe().result()
    alloc.req_to_token[rows[1], 0] += 1
    for look in LOOKS:
        assert f"req_to_token[{rows[1]}, 0]" in found(look, alloc)


def test_staged_pages_past_the_extent_are_nobodys(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = plain(device)
    alloc = world.alloc
    (row, *_) = alloc.rows(world.handles).tolist()
    late = row * alloc._ledger.row_pages + 8
    monkeypatch.setattr(alloc._core.device, "unwritten", lambda: np.array([late]))
    assert alloc.check(device=True).size == alloc.probe().left_out.size == 0
    alloc.req_to_token[row, 0] += 1
    assert f"req_to_token[{row}, 0]" in found("probe", alloc)


# -- probes --------------------------------------------------------------------------------------


def damaged(world: World) -> tuple[int, Any]:
    """A probe of tables in which the first request's first entry is wrong, and its row."""
    alloc = world.alloc
    (row, *_) = alloc.rows(world.handles).tolist()
    alloc.req_to_token[row, 0] += 1
    return row, alloc.probe()


def raised(probe: Any) -> str:
    with pytest.raises(sgalloc.LawViolation) as caught:
        probe.result()
    return str(caught.value)


def test_a_probe_says_the_same_again(device: str) -> None:
    world = plain(device)
    sound = world.alloc.probe()
    assert sound.done and sound.result().size == sound.result().size == 0
    row, probe = damaged(world)
    assert raised(probe) == raised(probe)
    world.alloc.req_to_token[row, 0] -= 1
    assert f"req_to_token[{row}, 0] is" in raised(probe), "it was wrong when it was looked at"
    assert sound.result().size == 0


def test_a_probe_is_about_its_own_moment(device: str) -> None:
    """What changes afterwards, lawfully or not, is no matter of its."""
    world = plain(device)
    alloc = world.alloc
    probe = alloc.probe()
    alloc.release(world.handles[2])
    alloc.extend(world.handles[0], 30)
    alloc.extend(alloc.open(), 9)
    alloc.req_to_token[1, 0] += 1
    assert probe.result().size == 0
    assert found("probe", alloc)


def test_a_difference_that_is_gone_by_now_is_told(device: str) -> None:
    world = plain(device)
    alloc = world.alloc
    version = alloc._ledger.version
    row, probe = damaged(world)
    alloc.req_to_token[row, 0] -= 1
    alloc.decode(world.handles, 4)
    assert raised(probe) == (
        f"row {row} of req_to_token on {alloc.device} differed from the ledger when it was probed, "
        f"at version {version}, 1 writes ago; it reads right by now, so somebody wrote it meanwhile"
    )


def test_a_request_that_is_gone_by_now_is_told(device: str) -> None:
    world = plain(device)
    row, probe = damaged(world)
    world.alloc.release(world.handles[0])
    (again,) = world.alloc.open().tolist()
    assert world.alloc.rows(again).tolist() == [row], "the row is another's by now"
    world.alloc.extend(again, 9)
    assert raised(probe).endswith("; its request is gone by now")


def test_a_difference_that_is_still_there_is_named_whatever_came_between(device: str) -> None:
    world = plain(device)
    row, probe = damaged(world)
    world.alloc.decode(world.handles, 4)
    assert f"req_to_token[{row}, 0] is " in raised(probe)
    assert "extend of 3 requests" in raised(probe)


def test_a_probe_of_some_requests(device: str) -> None:
    world = windowed(device)
    alloc = world.alloc
    one, two = world.handles
    (row, _) = alloc.rows(world.handles).tolist()
    alloc.full_to_window[:] = -1
    alloc.window_table[row, 0] = 7
    assert alloc.probe(two).result().size == 0
    assert alloc.probe([]).result().size == 0
    for named in (one, [two, one], alloc.batch([one])):
        assert f"window_table[{row}, 0] is 7" in raised(alloc.probe(named))
    alloc.window_table[row, 0] = 0
    alloc.req_to_token[0, 3] = 1
    assert "req_to_token[0, 3] is 1" in raised(alloc.probe([]))
    with pytest.raises(sgalloc.StaleHandle):
        alloc.probe([one, 12345])


def test_an_allocator_with_no_request(device: str) -> None:
    alloc = sgalloc.KVAllocator(9, 4, 3, 10, device=device)
    for look in LOOKS:
        assert LOOKS[look](alloc).size == 0
        alloc.req_to_token[0, 9] = 1
        assert found(look, alloc).startswith("req_to_token[0, 9] is 1 ")
        alloc.req_to_token[0, 9] = 0


def test_the_host_makes_no_call_for_each_request() -> None:
    """As many calls for a thousand requests of one length as for ten."""
    counts = []
    for requests in (10, 1000):
        alloc = sgalloc.KVAllocator(5 * requests, 4, requests, 40, device="cpu", page_table=True)
        alloc.extend(alloc.open(requests), 17)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for trace in (None, count):  # once before, since weights are worked out only once
            sys.setprofile(trace)
            claims_of(alloc._core, alloc._ledger.live(), True)
            sys.setprofile(None)
        counts.append(calls)
    assert counts[0] == counts[1] > 10
