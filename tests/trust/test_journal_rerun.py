"""Running a journal again: to a record, past events, against planted differences, and by hand."""

from __future__ import annotations

import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_support import Query, fingerprint, prompt
from replay.cli_support import sgalloc as command
from trust.journal_support import busy, positions, state

import sgalloc
from sgalloc.trust.journal import state_digest
from sgalloc.trust.records import CLOSED, DIGEST, SETTLED, JournalError, Reader, Record, framed
from sgalloc.trust.rerun import Diverged, Rerun, Watch, rerun
from sgalloc.trust.verbs import BY_KIND, VERBS


def open_journal(path: Path, **more: Any) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(40, 4, 6, 48, device="cpu", journal=path, **more)


def written(path: Path, records: list[tuple[int, bytes]]) -> None:
    """A journal whose checks are right, whatever it says."""
    data, check = b"SGALLOC journal\n\x01", 0
    for kind, payload in records:
        record, check = framed(kind, payload, check)
        data += record
    path.write_bytes(data)


# -- to a record -----------------------------------------------------------------------------------


def test_each_state_on_the_way_is_that_of_then(tmp_path: Path) -> None:
    """Before each record, the run again stands where the allocator stood when it was written."""
    path = tmp_path / "steps"
    alloc = open_journal(path, prefix_cache=True)
    log = alloc._journal.log  # type: ignore[union-attr]
    event, states = Query(), {}

    def noted() -> None:
        states[log.number] = state(alloc)

    handles = alloc.open(2)
    noted()
    alloc.extend(handles, [12, 7])
    noted()
    alloc.release(handles[:1], tokens=[prompt(3, 4)], after=event)
    noted()
    event.over = True
    alloc.settle()
    noted()
    (other,) = alloc.open_with_prefix(alloc.prefix.match(prompt(3, 4))).tolist()
    noted()
    alloc.decode([other, int(handles[1])], [1, 2])
    noted()
    alloc.close_journal()
    run = Rerun(path)
    for number, expected in states.items():
        run.run(until=number)
        assert (run.records, state(run.alloc)) == (number, expected)
        assert state(rerun(path, until=number).alloc) == expected
    run.run()
    assert run.closed and run.records == log.number


# -- events ----------------------------------------------------------------------------------------


def test_what_came_back_comes_back_at_the_same_point(tmp_path: Path) -> None:
    """Events that end out of order, one while a refused call polls, one that is done at once."""
    path = tmp_path / "events"
    alloc = open_journal(path)
    events = [Query() for _ in range(4)]
    handles = alloc.open(5)
    alloc.extend(handles, 32)
    for handle, event in zip(handles, events, strict=False):
        alloc.release(handle, after=event)
    alloc.trim(handles[4], 10, after=Query(True))
    events[2].over = True
    with pytest.raises(sgalloc.OutOfRows):
        alloc.open(6)
    events[0].over = True
    alloc.open(1)
    events[3].over = True
    alloc.settle()
    alloc.settle()
    expected = state(alloc)
    alloc.close_journal()
    kinds = [record.kind for record in Reader(path)]
    assert kinds.count(SETTLED) == 3
    first = kinds.index(SETTLED)
    assert kinds[first + 1] == VERBS["open"].kind, "before the call that took it in"
    run = rerun(path)
    assert (state(run.alloc), run.settled, run.refused) == (expected, 3, 1)


def test_an_event_that_ends_within_a_call(tmp_path: Path) -> None:
    """A call that polls an event twice hears two answers, and so does the run again."""

    class Flips:
        def __init__(self, polls: int) -> None:
            self.left = polls

        def query(self) -> bool:
            self.left -= 1
            return self.left < 0

    for polls in range(5):
        path = tmp_path / str(polls)
        alloc = open_journal(path)
        handles = alloc.open(3)
        alloc.extend(handles, 9)
        alloc.preallocate([8], writers=1)
        alloc.release(handles[:1], after=Flips(polls))
        alloc.reserve(handles[1:], 8)
        alloc.compact(handles[1:2], [[10]], after=Flips(polls))
        alloc.open(1)
        alloc.abort(alloc._ledger.handle[4:5], after=Flips(polls))
        alloc.abort(list(alloc._core.pins.by_handle), force=True, after=Flips(polls))
        expected = state(alloc)
        alloc.close_journal()
        assert state(rerun(path).alloc) == expected


# -- forms of arguments ----------------------------------------------------------------------------


def test_every_form_in_which_arguments_come(tmp_path: Path) -> None:
    path = tmp_path / "forms"
    alloc = open_journal(path, prefix_cache=True)
    for name in (None, 7, -3, "tenant", "\ud800", b"\x00salt"):
        (handle,) = alloc.open(namespace=name).tolist()
        alloc.extend(x=handle, lengths=np.int32(9))
        alloc.decode([handle], tokens=(1,), out=np.empty(1, np.int32))
        alloc.reserve(np.array([handle]), np.array([3], np.uint8), rounding="host")
        same = np.array([1])
        alloc.decode(handle, same, out=same)
        assert same.tolist() != [1], "what was given is overwritten by the call"
        alloc.commit(range(handle, handle + 1), accepted=[2])
        alloc.compact(handle, [])
        alloc.trim(handle, lengths=np.array(8))
        alloc.prefix.publish(handle, list(range(8)))
        alloc.release(handle, tokens=range(9))
    found = alloc.open_with_prefix(alloc.prefix.match(range(k)) for k in (4, 9, 3))
    assert alloc.committed(found).tolist() == [4, 8, 0]
    alloc.release(alloc.open_with_prefix(matches=iter([alloc.prefix.match(range(4))])))
    match = alloc.prefix.match(tokens=np.arange(8))
    more = alloc.preallocate(
        (9, 10), np.array([1, 2]), [match, None], [np.float32(1.5), np.int64(4)]
    )
    alloc.preallocate(8, prefix=match, deadline=float("inf"))
    assert alloc.reclaim(np.float64(2.0)).tolist() == more[:1].tolist()
    alloc.acknowledge(more[1], np.int16(0))
    alloc.acknowledge(-5, 2**40)
    alloc.abort(x=[0, -9, 2**62], force=True)
    empty = alloc.decode([])
    alloc.apply(empty)
    alloc.apply(alloc.plan(extend=(found[:1], [6]), decode=([found[1]], 2), reserve=((), 4)))
    assert alloc.prefix.clear() > 0
    expected = state(alloc)
    alloc.close_journal()
    run = rerun(path, check_every=1)
    assert (state(run.alloc), run.refused) == (expected, 0)


@pytest.mark.parametrize("ratio", [2, 1.5, Fraction(7, 3)])
def test_the_configuration_comes_back(tmp_path: Path, ratio: Any) -> None:
    path = tmp_path / "sparse"
    alloc = open_journal(path, sparse=sgalloc.Sparse(ratio, 6, 3))
    alloc.to_sparse(alloc.extend(alloc.open(1), 20) and alloc._ledger.handle[1:2])
    alloc.close_journal()
    there = rerun(path).alloc
    assert fingerprint(there)[:13] == fingerprint(alloc)[:13]
    path = tmp_path / "window"
    window = sgalloc.SlidingWindow(6, 30, slot_map=True, evict_every=8)
    alloc = open_journal(path, window=window, page_table=True)
    alloc.close_journal()
    run = rerun(path)
    assert run.config["window"] == {
        "tokens": 6, "num_pages": 30, "slot_map": True, "evict_every": 8
    }  # fmt: skip
    assert run.alloc.full_to_window.shape == alloc.full_to_window.shape


def test_refusals_that_the_ledger_does_not_decide_are_taken_on_trust(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    alloc = open_journal(path)
    handles = alloc.open(1)
    plan = alloc.plan(extend=(handles, 9))
    alloc.extend(handles, 5)
    refused: list[Any] = [
        lambda: alloc.extend(handles, 9, out=np.empty(3, np.int32)),
        lambda: alloc.extend(handles, "nine"),
        lambda: alloc.release(handles, after=object()),
        lambda: alloc.open(-1),
        lambda: alloc.apply(plan),
        lambda: alloc.apply(3),
        lambda: alloc.commit(sgalloc.KVAllocator(4, 4, 4, 16, device="cpu").batch([]), 1),
    ]
    kinds: Counter[str] = Counter()
    for call in refused:
        with pytest.raises((ValueError, TypeError, sgalloc.AllocError)) as raised:
            call()
        kinds[type(raised.value).__name__] += 1
    assert set(kinds) == {"ValueError", "TypeError", "StalePlan"}
    expected = state(alloc)
    alloc.close_journal()
    run = rerun(path)
    assert (run.refused, run.unheard, state(run.alloc)) == (7, 7, expected)


@pytest.mark.parametrize("verb", ["extend", "decode", "reserve", "apply"])
def test_a_write_that_could_not_wait_for_its_event_is_taken_on_trust(
    tmp_path: Path, verb: str
) -> None:
    """A run again knows no events of writes, so it could not refuse for one."""
    path = tmp_path / verb
    alloc = open_journal(path)
    handles = alloc.open(2)
    calls: dict[str, Any] = {
        "extend": lambda after: alloc.extend(handles, 9, after=after),
        "decode": lambda after: alloc.decode(handles, 2, after=after),
        "reserve": lambda after: alloc.reserve(handles, 6, after=after),
        "apply": lambda after: alloc.apply(alloc.plan(decode=(handles, 3)), after=after),
    }
    event = Query()
    with pytest.raises(sgalloc.WrongState, match="is not done"):
        calls[verb](event)
    event.over = True
    calls[verb](event)
    with pytest.raises(sgalloc.RowTooNarrow):
        alloc.extend(handles, 1000)
    expected = state(alloc)
    alloc.close_journal()
    run = rerun(path)
    assert (run.refused, run.unheard, state(run.alloc)) == (2, 1, expected)


# -- differences -----------------------------------------------------------------------------------


def changed(records: list[Record], at: int, payload: bytes) -> list[tuple[int, bytes]]:
    return [(record.kind, payload if record.number == at else record.payload) for record in records]


def test_each_altered_call_is_named(tmp_path: Path) -> None:
    """Any byte of any record changed, its checks made right again: the first that differs is
    named, and it is the altered one or one that stands behind it."""
    path, other = tmp_path / "whole", tmp_path / "altered"
    busy(path)
    records = list(Reader(path))
    named: Counter[str] = Counter()
    silent = []
    places = [(r, at) for r in records[1:] for at in range(len(r.payload))]
    for bits in (0x01, 0x80, 0xFF):
        for record, at in places:
            payload = bytearray(record.payload)
            payload[at] ^= bits
            written(other, changed(records, record.number, bytes(payload)))
            try:
                rerun(other)
            except Diverged as difference:
                assert difference.record >= record.number
                assert f"record {difference.record} (" in str(difference)
                named["here" if difference.record == record.number else "later"] += 1
            except JournalError:
                named["unreadable"] += 1
            else:
                silent.append((record.number, at))
    assert named["here"] > 60 and sum(named.values()) > 5 * len(silent)
    # What may differ in silence tells nothing of the ledger: that there was an event for a write,
    # hashes and names that nobody else has, deadlines that are still to come.
    for number, at in silent:
        verb = BY_KIND[records[number].kind].name
        assert verb in {
            "open", "extend", "decode", "reserve", "apply", "commit", "match", "publish",
            "release", "preallocate", "reclaim", "trim",
        }, (verb, number, at)  # fmt: skip


@pytest.mark.parametrize("fault", ["an id is lost", "ids change places"])
@pytest.mark.parametrize("verb", ["extend", "commit", "reserve", "open", "preallocate"])
def test_a_fault_of_the_allocator_is_named_by_its_first_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fault: str
) -> None:
    """Where the run again hands out other ids, the record is the one in which it begins."""
    path = tmp_path / "whole"
    busy(path)
    numbers = [r.number for r in Reader(path) if BY_KIND.get(r.kind) is VERBS[verb]]
    attribute = VERBS[verb].attribute
    real = getattr(sgalloc.KVAllocator, attribute)

    def faulty(alloc: sgalloc.KVAllocator, *args: Any, **kwargs: Any) -> Any:
        alloc._core.pool.free -= fault == "an id is lost"
        if fault == "ids change places":
            stack, free = alloc._core.pool._stack, alloc._core.pool.free
            stack[:free] = stack[:free][::-1].copy()
        return real(alloc, *args, **kwargs)

    monkeypatch.setattr(sgalloc.KVAllocator, attribute, faulty)
    with pytest.raises((Diverged, sgalloc.LawViolation)) as raised:
        rerun(path)
    if isinstance(raised.value, sgalloc.LawViolation):  # in debug mode the law is asked first
        assert fault == "an id is lost"
        assert str(raised.value).startswith(f"after record {numbers[0]}: page ")
        return
    assert raised.value.record == numbers[0]
    assert f"record {numbers[0]} ({verb}, at byte " in str(raised.value)


def test_ids_in_another_order_are_found_by_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    busy(path)
    number = [r.number for r in Reader(path) if r.kind == DIGEST][-1]
    run = Rerun(path)
    stack = run.alloc._core.pool._stack
    stack[[0, 1]] = stack[[1, 0]]
    with pytest.raises(Diverged, match="digest of the state differs") as raised:
        run.run()
    assert raised.value.record == number


def test_a_digest_sees_each_part_of_the_state(tmp_path: Path) -> None:
    """Whole: each page, length, counter and free id. Between the calls: those that move first."""
    alloc = busy(tmp_path / "whole")
    core, ledger = alloc._core, alloc._ledger
    live = ledger.live()
    row = int(live[-1])
    parts = {
        "C": lambda: ledger.__getattribute__("committed").__setitem__(row, 3),
        "A": lambda: ledger.__getattribute__("allocated").__setitem__(row, 0),
        "steps": lambda: ledger.decode_steps.__setitem__(row, 99),
        "shared": lambda: ledger.shared.__setitem__(row, 5),
        "free ids": lambda: core.pool._stack.__setitem__(core.pool.free - 1, 0),
        "waiting": lambda: setattr(core.pool, "waiting", 3),
        "pinned": lambda: setattr(core.pool, "pinned", 9),
        "cached": lambda: setattr(core.tree, "cached", 99),
    }
    seen = {state_digest(core, False)}
    wholes = {state_digest(core, True)}
    for part in parts.values():
        part()
        seen.add(state_digest(core, False))
        wholes.add(state_digest(core, True))
    assert len(seen) == len(wholes) == len(parts) + 1
    before = state_digest(core, True)
    core.pool._stack[0] += 1
    ledger._row_stack[0] += 1
    assert state_digest(core, True) != before


def test_a_law_that_does_not_hold_names_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "whole"
    busy(path)
    run = Rerun(path)
    run.run(until=8)
    run.alloc.req_to_token[1:, 0] = 77
    with pytest.raises(sgalloc.LawViolation, match=r"^after record 8: req_to_token\["):
        run.run(check_every=1)


def test_records_that_point_nowhere_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "whole", tmp_path / "altered"
    busy(path)
    records = list(Reader(path))
    (begun,) = [r for r in records if BY_KIND.get(r.kind) is VERBS["open_with_prefix"]]
    commit = next(r for r in records if BY_KIND.get(r.kind) is VERBS["commit"])
    for record, payload, problem in (
        (begun, b"\x02\x01\x01" + begun.payload[3:], "cannot be read|no match before it"),
        (commit, b"\x02\x00\x63" + commit.payload[3:], "record 99 is no batch before it"),
        (commit, b"\x09" + commit.payload[1:], "byte 0 of its payload is 9"),
        (commit, commit.payload + b"\x00", "1 bytes are left over"),
        (records[-1], b"\x07", "it counts 7 calls"),
    ):
        written(other, changed(records, record.number, payload))
        with pytest.raises(JournalError, match=problem):
            rerun(other)
    written(other, [(r.kind, r.payload) for r in records[:3]] + [(9, b"")])
    with pytest.raises(JournalError, match="there are no records of kind 9"):
        rerun(other)
    assert records[-1].kind == CLOSED


# -- the law, with a journal -----------------------------------------------------------------------


def test_a_law_violation_names_the_last_calls(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    alloc = open_journal(path)
    one, other, third = alloc.open(3).tolist()
    alloc.extend([one, other], [9, 5])
    alloc.extend(third, 4)
    alloc.decode(one)
    page = int(alloc.pages(one)[0])
    alloc._ledger.pages[2, 0] = page
    with pytest.raises(sgalloc.LawViolation) as raised:
        alloc.check()
    message = str(raised.value)
    assert message.startswith(f"page {page} of group 'full' is held by row 1 and by row 2")
    assert "(last calls on row 1, 2 in journal" in message
    assert re.search(r": 1 open, 2 extend, 4 decode(; on page \d+: 2 extend)?\)$", message)
    assert rerun(path).records == 5, "the journal was flushed"
    assert alloc.committed(one).tolist() == [10]


# -- by hand ---------------------------------------------------------------------------------------


def test_the_calls_of_a_page_and_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "watched"
    alloc = open_journal(path)
    one, other = alloc.open(2).tolist()
    alloc.extend(one, 8)
    page = int(alloc.pages(one)[1])
    alloc.extend(other, 8)
    event = Query()
    alloc.trim(one, 4, after=event)
    alloc.decode(other, 1)
    event.over = True
    alloc.settle()
    alloc.decode(other, 4)
    alloc.close_journal()
    run = rerun(path, watch=Watch(page=page))
    assert [(t.verb, t.holder) for t in run.touches] == [
        ("extend", 1), ("trim", -2), ("settle", 0), ("decode", 2),
    ]  # fmt: skip
    run = rerun(path, watch=Watch(row=2, most=3))
    assert [t.verb for t in run.touches] == ["extend", "decode", "decode"]


def test_the_command_runs_a_journal_again(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    alloc = busy(path)
    records = len(positions(path.read_bytes()))
    result = command("replay", "--journal", path, "--check-every", 1, "--row", 2)
    assert result.exit_code == 0, result.stderr
    assert "every call went as it did, and the journal was closed" in result.stdout
    assert re.search(rf"records +{records}\b", result.stdout)
    assert re.search(rf"tokens +{alloc.stats().committed} committed", result.stdout)
    assert "last calls that had to do with row 2:" in result.stdout
    result = command("replay", "--journal", path, "--until", 4, "--page", 1)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"records +4\b", result.stdout)
    assert "record 2: extend of rows 1, 2; the page is with row 1 afterwards" in result.stdout
    path.write_bytes(path.read_bytes()[:-3])
    result = command("replay", "--journal", path)
    assert result.exit_code == 0
    assert "the last record was not written to its end: 9 bytes are left out" in result.stdout


def test_the_command_names_what_differs_and_what_is_wrong(tmp_path: Path) -> None:
    path, other = tmp_path / "whole", tmp_path / "altered"
    busy(path)
    records = list(Reader(path))
    commit = next(r for r in records if BY_KIND.get(r.kind) is VERBS["commit"])
    payload = commit.payload[:-2] + b"\x04" + commit.payload[-1:]
    written(other, changed(records, commit.number, payload))
    result = command("replay", "--journal", other)
    assert result.exit_code == 1
    assert re.match(r"sgalloc replay: record \d+ \(", result.stderr.splitlines()[-1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    for args, problem in (
        (("--journal", other), f"damaged in record {len(records) - 1}"),
        (("--journal", tmp_path / "none"), "cannot be read (No such file or directory)"),
        (("--journal", path, "--running", 3), "--running is for traffic"),
        (("--journal", path, "--page", 41), "page 41 is not in group 'full'"),
        (("--journal", path, "--page", 4, "--group", "side"), "there is no group 'side'"),
        (("--journal", path, "--group", "full"), "--group does nothing alone: add --page"),
        (("--journal", path, "--check-every", -1), "--check-every is -1"),
        (("--until", 3), "--until does nothing alone: add --journal"),
    ):
        result = command("replay", *args)
        assert result.exit_code == 2, (args, result.stdout)
        assert problem in " ".join(result.stderr.split()), (args, result.stderr)
        assert "Traceback" not in result.stderr


# -- the price -------------------------------------------------------------------------------------


def work(call: Any) -> Counter[str]:
    """Python lines and functions, and C functions, that a call goes through."""
    seen: Counter[str] = Counter()

    def trace(frame: Any, event: str, arg: Any) -> None:
        seen[event] += 1
        if event == "c_call" and "numpy" in str(getattr(arg, "__objclass__", arg)):
            seen["numpy"] += 1

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_a_step_costs_the_same_few_calls_for_every_batch(tmp_path: Path) -> None:
    costs = []
    for count in (1, 256, 4096):
        path = tmp_path / str(count)
        how = {"device": "cpu", "debug": False}
        plain = sgalloc.KVAllocator(3 * count, 64, count, 192, **how)
        noted = sgalloc.KVAllocator(3 * count, 64, count, 192, journal=path, **how)
        found = []
        for alloc in (plain, noted):
            batch = alloc.batch(alloc.open(count))
            accepted = np.arange(count) % 3
            alloc.reserve(batch, 100)
            step = [
                lambda a=alloc, b=batch: a.reserve(b, 16),
                lambda a=alloc, b=batch, n=accepted: a.commit(b, n),
            ]
            for call in step:
                call()
            found.append([work(call) for call in step])
        for before, after in zip(*found, strict=True):
            more = after - before
            costs.append((more["call"], more["c_call"], more["numpy"]))
        assert "commit" not in vars(plain) and "commit" in vars(noted)
        assert plain._make_plan is sgalloc.allocator.Plan, "without a journal nothing is wrapped"
    reserves, commits = costs[::2], costs[1::2]
    assert len(set(reserves)) == 1, "whatever the batch"
    # Python functions, C functions, and methods of NumPy arrays among these, past the plain call.
    assert all(calls <= 15 and inside <= 24 and numpy <= 1 for calls, inside, numpy in reserves)
    assert all(calls <= 11 and inside <= 25 and numpy <= 7 for calls, inside, numpy in commits)
