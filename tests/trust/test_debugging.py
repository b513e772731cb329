"""Debug mode on the host: the laws after every call, and errors that tell of the last calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_ranges
from host_support import Query, prompt, words_of
from trust.poisoned import assert_poison
from trust.walk import CONFIGS, Walk, make

import sgalloc
from profiling import debugging as benchmark
from sgalloc.caching import PrefixCache
from sgalloc.device.poisoning import POISON
from sgalloc.trust.debugging import DEVICE_EVERY, SWITCH
from sgalloc.trust.rerun import rerun
from sgalloc.trust.verbs import VERBS

PS = 4


def debugged(**how: Any) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(60, PS, 8, 50, device="cpu", page_table=True, debug=True, **how)


# -- the switch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_says_whether(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    if value is None:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, value)
    alloc = sgalloc.KVAllocator(4, PS, 2, 16, device="cpu")
    assert (alloc.req_to_token[1:] == (POISON if on else 0)).all()
    assert (alloc._debugging is not None) == on
    again = sgalloc.KVAllocator.restore(alloc.snapshot(), "cpu")
    assert (again._debugging is not None) == on
    other = sgalloc.KVAllocator(4, PS, 2, 16, device="cpu", debug=not on)
    assert (other._debugging is not None) != on, "what is asked for in Python counts first"


@pytest.mark.parametrize("value", ["2", "true", "on", " 1"])
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SWITCH, value)
    with pytest.raises(ValueError, match=f"SGALLOC_DEBUG is '{value}': set it to 1"):
        sgalloc.KVAllocator(4, PS, 2, 16, device="cpu")
    sgalloc.KVAllocator(4, PS, 2, 16, device="cpu", debug=False)
    with pytest.raises(TypeError, match="debug must be True or False, got 1"):
        sgalloc.KVAllocator(4, PS, 2, 16, device="cpu", debug=1)  # type: ignore[arg-type]


def test_how_often_the_device_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_EVERY, "3")
    alloc = debugged()
    alloc.req_to_token[7, 0] = 5
    alloc.open()
    alloc.open()
    with pytest.raises(sgalloc.LawViolation, match="found behind call 3, open"):
        alloc.open()
    monkeypatch.setenv(DEVICE_EVERY, "never")
    with pytest.raises(ValueError, match="SGALLOC_DEBUG_DEVICE_EVERY is 'never'"):
        debugged()


def test_nothing_is_wrapped_without_it() -> None:
    alloc = sgalloc.KVAllocator(
        60, PS, 8, 50, device="cpu", prefix_cache=True, page_table=True, debug=False
    )
    core = alloc._core
    for part in (alloc, core.prefix, core.quarantine, core.device):
        wrapped = [name for name, value in vars(part).items() if hasattr(value, "__wrapped__")]
        assert not wrapped
    assert not alloc.req_to_token.any()


# -- the laws after every call -------------------------------------------------------------------


def allocator_for(verb: str) -> sgalloc.KVAllocator:
    if verb == "to_sparse":
        return debugged(sparse=sgalloc.Sparse(2, 8))
    return debugged(window=sgalloc.SlidingWindow(6, 60), prefix_cache=True)


class World:
    """An allocator on which every verb has something to do."""

    def __init__(self, verb: str) -> None:
        self.alloc = alloc = allocator_for(verb)
        self.one, self.other = alloc.open(2).tolist()
        alloc.extend([self.one, self.other], [10, 19])
        alloc.reserve(self.one, 5)
        self.received = int(alloc.preallocate(6, deadline=3)[0])
        self.event = Query()
        if alloc._core.prefix is not None:
            (gone,) = alloc.open()
            alloc.extend(gone, 8)
            alloc.release(gone, tokens=prompt(2, PS))
            self.match = alloc.prefix.match(prompt(2, PS))
        (late,) = alloc.open()
        alloc.extend(late, 5)
        alloc.release(late, after=self.event)


CALLS: dict[str, Callable[[World], Any]] = {
    "open": lambda w: w.alloc.open(),
    "open_with_prefix": lambda w: w.alloc.open_with_prefix(w.match),
    "extend": lambda w: w.alloc.extend(w.one, 21),
    "decode": lambda w: w.alloc.decode(w.other, 3),
    "reserve": lambda w: w.alloc.reserve(w.other, 9),
    "apply": lambda w: w.alloc.apply(w.alloc.plan(decode=(w.other, 2))),
    "commit": lambda w: w.alloc.commit(w.one, 2),
    "trim": lambda w: w.alloc.trim(w.other, 3),
    "compact": lambda w: w.alloc.compact(w.one, [[12]]),
    "evict_window": lambda w: w.alloc.evict_window(w.other),
    "to_sparse": lambda w: w.alloc.to_sparse(w.other),
    "release": lambda w: w.alloc.release(w.one),
    "abort": lambda w: w.alloc.abort(w.received),
    "preallocate": lambda w: w.alloc.preallocate([3, 4]),
    "acknowledge": lambda w: w.alloc.acknowledge(w.received, 0),
    "reclaim": lambda w: w.alloc.reclaim(5),
    "match": lambda w: w.alloc.prefix.match(prompt(2, PS)),
    "publish": lambda w: w.alloc.prefix.publish(w.one, prompt(2, PS)),
    "clear": lambda w: w.alloc.prefix.clear(),
    "settle": lambda w: w.alloc.settle(),
}


def test_every_verb_is_called_here() -> None:
    assert set(CALLS) == {*VERBS, "settle"}


def plant(
    monkeypatch: pytest.MonkeyPatch, verb: str, fault: Callable[..., Any]
) -> Callable[[], None]:
    """Let ``fault(real, owner)`` do ``verb`` from when what is returned is called."""
    known = VERBS.get(verb)
    owner: Any = PrefixCache if known is not None and known.of_cache else sgalloc.KVAllocator
    attribute = verb if known is None else known.attribute
    real, armed = getattr(owner, attribute), [False]

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not armed[0]:
            return real(self, *args, **kwargs)
        return fault(lambda: real(self, *args, **kwargs), self)

    monkeypatch.setattr(owner, attribute, faulty)
    return lambda: armed.__setitem__(0, True)


@pytest.mark.parametrize("verb", CALLS)
def test_a_law_that_a_call_breaks_is_found_by_that_call(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def losing(real: Callable[[], Any], owner: Any) -> Any:
        result = real()
        pool = owner._pool if isinstance(owner, PrefixCache) else owner._core.pool
        pool.free -= 1
        return result

    arm = plant(monkeypatch, verb, losing)
    world = World(verb)
    CALLS[verb](world)
    world = World(verb)
    arm()
    with pytest.raises(sgalloc.LawViolation, match=rf"is lost.* \(found behind call \d+, {verb};"):
        CALLS[verb](world)


@pytest.mark.parametrize("verb", CALLS)
def test_an_entry_that_a_call_writes_wrong_is_found_by_that_call(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def writing(real: Callable[[], Any], owner: Any) -> Any:
        result = real()
        device = owner._device if isinstance(owner, PrefixCache) else owner._core.device
        device.table[0, 3] = 9
        return result

    arm = plant(monkeypatch, verb, writing)
    world = World(verb)
    arm()
    with pytest.raises(sgalloc.LawViolation, match=rf"req_to_token\[0, 3\] is 9.*, {verb}[;)]"):
        CALLS[verb](world)


@pytest.mark.parametrize("verb", CALLS)
def test_a_refused_call_that_changes_something_is_found(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def leaking(real: Callable[[], Any], owner: Any) -> Any:
        owner._ledger.open(1)
        raise sgalloc.OutOfPages("full", 5, 3)

    arm = plant(monkeypatch, verb, leaking)
    world = World(verb)
    arm()
    with pytest.raises(sgalloc.LawViolation) as raised:
        CALLS[verb](world)
    assert f"{verb} was refused (OutOfPages: group 'full' needs 5 pages" in str(raised.value)
    assert "but has changed the state" in str(raised.value)
    assert isinstance(raised.value.__cause__, sgalloc.OutOfPages)


@pytest.mark.parametrize("verb", [verb for verb in CALLS if verb not in ("match", "settle")])
def test_what_comes_back_behind_an_event_is_no_change_by_a_refused_call(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refusing(real: Callable[[], Any], owner: Any) -> Any:
        quarantine = owner._quarantine if isinstance(owner, PrefixCache) else owner._core.quarantine
        quarantine.settle()
        raise sgalloc.OutOfPages("full", 5, 3)

    arm = plant(monkeypatch, verb, refusing)
    world = World(verb)
    arm()
    world.event.over = True
    with pytest.raises(sgalloc.OutOfPages):
        CALLS[verb](world)
    assert world.alloc.stats().rows.quarantined == 0


def test_a_fault_that_is_no_refusal_is_handed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(real: Callable[[], Any], owner: Any) -> Any:
        raise RuntimeError("the GPU is gone (row 1)")

    arm = plant(monkeypatch, "extend", failing)
    world = World("extend")
    arm()
    with pytest.raises(RuntimeError, match=r"^the GPU is gone \(row 1\)$"):
        CALLS["extend"](world)


# -- the last calls ------------------------------------------------------------------------------


def test_a_refusal_tells_the_last_calls_on_its_row() -> None:
    alloc = debugged()
    one, other = alloc.open(2).tolist()
    alloc.extend([one, other], [9, 5])
    alloc.decode(one)
    row = int(alloc.rows(one)[0])
    with pytest.raises(sgalloc.RowTooNarrow) as narrow:
        alloc.extend(one, 51)
    assert str(narrow.value).endswith(f" (last calls on row {row}: 1 open, 2 extend, 3 decode)")
    assert (narrow.value.row, narrow.value.need, narrow.value.width) == (row, 52, 50)
    with pytest.raises(sgalloc.CommitPastExtent, match="3 decode, 4 refused extend"):
        alloc.commit(one, 40)
    with pytest.raises(ValueError, match=rf"last calls on row {row}: 1 open, .*5 refused commit"):
        alloc.extend(one, 3)
    alloc.release(one)
    with pytest.raises(sgalloc.StaleHandle, match=r"last calls on row \d+: .*, 7 release\)$"):
        alloc.pages(one)  # one that only asks
    with pytest.raises(sgalloc.OutOfPages, match=r"\(last calls: 1 open, .*, 8 open\)$") as out:
        alloc.extend(alloc.open(7), 40)
    assert (out.value.group, out.value.need, out.value.free) == ("full", 70, 58)
    assert alloc.stats().refusals == {
        "RowTooNarrow": 1, "CommitPastExtent": 1, "StaleHandle": 1, "OutOfPages": 1,
    }  # fmt: skip


def test_a_violation_tells_who_had_the_page() -> None:
    """Also those that are closed since, of whom no page list knows any more."""
    alloc = debugged()
    (first,) = alloc.open()
    alloc.extend(first, 4)
    (page,) = alloc.pages(first).tolist()
    alloc.release(first)
    handles = alloc.open(3)
    alloc.extend(handles, [9, 8, 2])
    holder = int(alloc.owners()[page])
    other = next(int(h) for h in handles if int(alloc.rows(h)[0]) != holder)
    alloc._ledger.pages[alloc.rows(other)[0], 0] = page
    with pytest.raises(sgalloc.LawViolation) as raised:
        alloc.check()
    text = str(raised.value)
    assert text.startswith(f"page {page} of group 'full' is held by row ")
    assert text.endswith(f"; on page {page}: 2 extend, 3 release, 5 extend)")
    with pytest.raises(sgalloc.LawViolation, match=r"found behind call 6, open; last calls on row"):
        alloc.open()


def test_pages_of_the_second_group_are_told_apart() -> None:
    alloc = debugged(window=sgalloc.SlidingWindow(6, 60))
    (one,) = alloc.open()
    alloc.extend(one, 4)
    (two,) = alloc.open()
    alloc.extend(two, 4)
    window = int(alloc.window_pages(two)[0])
    alloc._core.side.pool.holder[window] = 0  # type: ignore[union-attr]
    with pytest.raises(sgalloc.LawViolation) as raised:
        alloc.check()
    assert f"page {window} of group 'window'" in str(raised.value)
    assert str(raised.value).endswith(f"; on page {window}: 4 extend)")


def test_an_entry_of_the_map_names_its_page() -> None:
    alloc = debugged(window=sgalloc.SlidingWindow(6, 60, slot_map=True))
    (one,) = alloc.open()
    alloc.extend(one, 4)
    (page,) = alloc.pages(one).tolist()
    alloc.full_to_window[page * PS + 1] += 1
    with pytest.raises(sgalloc.LawViolation, match=rf"full_to_window.*on page {page}: 2 extend"):
        alloc.check(device=True)


def test_with_a_journal_numbers_are_those_of_its_records(tmp_path: Path) -> None:
    path = tmp_path / "it"
    alloc = debugged(journal=path)
    batch = alloc.batch(alloc.open(2))
    alloc.extend(batch, [9, 5])  # record 2 is the batch
    with pytest.raises(sgalloc.RowTooNarrow, match=r"on row 1 in journal .*: 1 open, 3 extend"):
        alloc.extend(batch, 60)
    alloc._ledger.pages[2, 0] = alloc._ledger.pages[1, 0]
    with pytest.raises(sgalloc.LawViolation) as raised:
        alloc.check()
    text = str(raised.value)
    assert text.count("last calls") == 1 and f" in journal {path}: 1 open, 3 extend" in text
    assert "; on page " in text
    alloc.close_journal()
    with pytest.raises(sgalloc.LawViolation, match="found behind call 5, open"):
        alloc.open()
    assert rerun(path, until=4).records == 4


def test_many_rows_are_told_in_one_line() -> None:
    alloc = sgalloc.KVAllocator(400, 1, 100, 8, device="cpu", prefix_cache=True, debug=True)
    (first,) = alloc.open()
    alloc.extend(first, 2)
    alloc.release(first, tokens=[7, 8])
    match = alloc.prefix.match([7, 8])
    for _ in range(30):
        alloc.open_with_prefix(match)
    alloc._core.tree.nodes()[0].locks += 1  # type: ignore[union-attr]
    with pytest.raises(sgalloc.LawViolation) as raised:
        alloc.check()
    text = str(raised.value)
    assert "\n" not in text and len(text) < 700
    assert re.search(r"on row (\d+, ){7}\d+ and 22 more: ", text)


def test_the_benchmark_measures_both() -> None:
    found = benchmark.measure(2, 0.01)
    assert set(found) == {"decode", "speculate"}
    assert all(side.n > 0 for both in found.values() for side in both)


# -- beside other things -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_it_changes_no_answer_and_no_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    plain = Walk(make(name, 3), 5)
    monkeypatch.setenv(SWITCH, "1")
    watched = Walk(make(name, 3), 5)
    for _ in range(150):
        assert plain.step() == watched.step()
        assert plain.alloc.digest() == watched.alloc.digest()
    assert plain.alloc.stats() == watched.alloc.stats()
    assert plain.alloc.snapshot(assume_done=True) == watched.alloc.snapshot(assume_done=True)


def test_a_journal_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    sizes = []
    for debug in (False, True):
        path = tmp_path / str(debug)
        alloc = sgalloc.KVAllocator(40, PS, 6, 48, device="cpu", journal=path, debug=debug)
        batch = alloc.batch(alloc.open(3))
        for tokens in (3, 9, 20, 60):
            try:
                alloc.extend(batch, tokens, after=Query(over=True))
            except sgalloc.RowTooNarrow as refusal:
                assert words_of(refusal).endswith("sgalloc.sizing.row_width")
        alloc.release(batch)
        alloc.close_journal()
        assert rerun(path).alloc.digest() == alloc.digest()
        sizes.append(path.read_bytes())
    assert sizes[0] == sizes[1]


def test_a_tool_sees_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for debug in (False, True):
        domain = test_ranges.Domain()
        monkeypatch.setattr("nvtx.get_domain", lambda name, d=domain: d)
        alloc = sgalloc.KVAllocator(40, PS, 4, 64, device="cpu", prefix_cache=True, debug=debug)
        handles = alloc.open(2)
        alloc.extend(handles, [5, 9])
        alloc.release(handles, tokens=[prompt(1, PS), prompt(2, PS, 1)])
        seen.append((domain.seen, domain.counters["levels"].samples))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_restored_is_poisoned(name: str) -> None:
    walk = Walk(make(name, 3), 11)
    for _ in range(80):
        walk.step()
    walk.finish()
    walk.alloc.settle()
    again = sgalloc.KVAllocator.restore(walk.alloc.snapshot(), "cpu", debug=True)
    again.check(device=True)
    assert assert_poison(again) > 100
    twin = walk.twin(again)
    for _ in range(40):
        assert walk.step() == twin.step()
