"""One thread at a time: any other is refused before it looks at anything, or asks what is safe."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_support import assert_laws, unchanged
from trust.forge import held
from trust.journal_support import busy, positions, state
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc.cache_events import follow
from sgalloc.holdings import _group_stats
from sgalloc.speculative import dflash, eagle
from sgalloc.trust.rerun import rerun

FROM_ANYWHERE = {"stats", "available", "receiving"}
ELSE = {"adopt", "restore"}  # makes a thread the owner; makes another allocator
MISSING = object()


def threaded(call: Callable[[], Any], name: str = "second") -> Any:
    """What ``call`` returned or raised in a thread of its own, which has ended by then."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def given(method: Callable[..., Any]) -> list[Any]:
    """As many arguments as ``method`` insists on, none of which it gets to look at."""
    return [
        MISSING
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def calls_of(target: Any) -> dict[str, Callable[[], Any]]:
    """Every public method of ``target``, ready to be called."""
    found: dict[str, Callable[[], Any]] = {}
    for name in dir(type(target)):
        if name.startswith("_") or not callable(getattr(type(target), name)):
            continue
        method = getattr(target, name)
        found[name] = partial(method, *given(method))
    return found


def every_call(alloc: Any) -> dict[str, Callable[[], Any]]:
    """All that can be called with, or of, an allocator."""
    spec = sgalloc.sizing.SpecConfig
    found = calls_of(alloc)
    if alloc._core.prefix is not None:
        found |= {f"prefix.{name}": call for name, call in calls_of(alloc.prefix).items()}
        for name in ("prepare", "enter", "given", "entering", "open_with", "unopen", "drop",
                     "unlocked_by", "shorten", "check_trim", "twins"):  # fmt: skip
            del found[f"prefix.{name}"]  # the allocator's own, behind its verbs
        found["events.drain"] = follow(alloc).drain
    tables = alloc.page_tables(4, 4)
    batch = alloc.batch(alloc.open(1))
    probe = alloc.probe()
    return found | {
        "probe.result": probe.result,
        "probe.done": lambda: probe.done,
        "page_tables.update": lambda: tables.update(MISSING),
        "eagle": lambda: eagle.prepare_for_decode(alloc, batch, spec("eagle", 2, 1, 3)),
        "dflash": lambda: dflash.prepare_for_decode(alloc, batch, spec("dflash", draft_tokens=3)),
        "_apply_through": lambda: alloc._apply_through(MISSING, MISSING),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_call_of_a_second_thread_is_refused_or_safe(name: str) -> None:
    alloc = held(name)
    refused = set()
    calls = every_call(alloc)
    assert calls.keys() >= FROM_ANYWHERE | ELSE | {"extend", "check", "digest", "snapshot"}
    for what, call in calls.items():
        if what in ELSE:
            continue
        with unchanged(alloc):
            said = threaded(call)
        if what in FROM_ANYWHERE:
            assert not isinstance(said, sgalloc.AllocError), (what, said)
            continue
        assert type(said) is sgalloc.WrongState, (what, said)
        message = str(said)
        assert "'second'" in message and f"'{threading.current_thread().name}'" in message
        assert "adopt()" in message and "\n" not in message
        refused.add(what)
    assert len(refused) > 30
    assert repr(alloc) == threaded(lambda: repr(alloc))


def test_the_first_thread_that_calls_owns_it_until_it_ends() -> None:
    alloc = make("plain")
    alloc.stats(), alloc.available(), repr(alloc)
    ready, over = threading.Event(), threading.Event()
    opened: list[int] = []

    def serve() -> None:
        opened.extend(alloc.open(1).tolist())
        ready.set()
        over.wait()
        alloc.extend(opened, 5)

    thread = threading.Thread(target=serve, name="scheduler")
    thread.start()
    ready.wait()
    with pytest.raises(sgalloc.WrongState, match="'scheduler'"):
        alloc.rows(opened)
    over.set()
    thread.join()
    assert alloc.committed(opened).tolist() == [5]
    assert alloc.stats().refusals == {"WrongState": 1}


def test_adopting() -> None:
    alloc = make("plain")
    (handle,) = alloc.open()

    def take_over() -> None:
        alloc.adopt()
        alloc.extend(handle, 9)

    ready, over = threading.Event(), threading.Event()

    def stay() -> None:
        take_over()
        ready.set()
        over.wait()

    thread = threading.Thread(target=stay, name="heir")
    thread.start()
    ready.wait()
    with pytest.raises(sgalloc.WrongState, match="'heir'"):
        alloc.extend(handle, 10)
    alloc.adopt()
    alloc.extend(handle, 11)
    over.set()
    thread.join()
    assert alloc.committed(handle).tolist() == [11]


def test_threads_that_take_turns_under_a_lock() -> None:
    alloc, lock, turns = make("prefix cache", roomy=True), threading.Lock(), 40
    failed: list[BaseException] = []

    def serve(seed: int) -> None:
        try:
            for turn in range(turns):
                with lock:
                    alloc.adopt()
                    (handle,) = alloc.open()
                    alloc.extend(handle, 9)
                    alloc.release(handle, tokens=np.arange(9) + 100 * (turn % 3))
        except BaseException as error:
            failed.append(error)

    with switching_often():
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    alloc.adopt()
    assert_laws(alloc)


def test_of_many_that_begin_at_once_one_is_the_owner() -> None:
    with switching_often():
        for _ in range(60):
            alloc = make("plain")
            begin, end = threading.Barrier(6), threading.Barrier(6)
            won: list[str] = []

            def race(
                alloc: Any = alloc, begin: Any = begin, end: Any = end, won: Any = won
            ) -> None:
                begin.wait()
                try:
                    alloc.open(1)
                    won.append(threading.current_thread().name)
                except sgalloc.WrongState:
                    pass
                end.wait()  # no owner ends before all have tried

            threads = [threading.Thread(target=race, name=f"racer {n}") for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1 and alloc.stats().rows.open == 1


@pytest.mark.parametrize("name", ["window, map, prefix", "sparse"])
def test_two_threads_that_hammer_never_interleave(name: str) -> None:
    """One works, one gets nothing but refusals, and what is done is what one alone would do."""
    alloc, alone = make(name), make(name)
    walk, twin = Walk(alloc, 5), Walk(alone, 5)
    said: list[str] = []
    begun, done = threading.Event(), threading.Event()
    refusals, others = [0], []

    def intrude() -> None:
        mine = [call for what, call in calls_of(alloc).items() if what not in FROM_ANYWHERE | ELSE]
        begun.wait()
        while not done.is_set():
            for call in mine:
                try:
                    others.append(call())
                except sgalloc.WrongState:
                    refusals[0] += 1
                except BaseException as error:
                    others.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    with switching_often():
        alloc.open(0)
        begun.set()
        for _ in range(150):
            said.append(walk.step())
        while not refusals[0] and not others:
            done.wait(0.001)
        done.set()
        thread.join()
    assert not others and refusals[0] > 50
    assert said == [twin.step() for _ in range(150)]
    assert alloc.digest() == alone.digest()
    alloc.check(device=True)


def test_what_may_be_asked_from_anywhere_is_whole_while_another_thread_works() -> None:
    for name in ("window, map, prefix", "sparse", "plain"):
        alloc = make(name)
        walk = Walk(alloc, 3)
        done, failed, polls = threading.Event(), [], [0]

        def poll(alloc: Any = alloc, walk: Any = walk, done: Any = done, failed: Any = failed,
                 polls: Any = polls) -> None:  # fmt: skip
            try:
                while not done.is_set():
                    stats = alloc.stats()
                    for group, found in stats.groups.items():
                        parts = (found.free, found.quarantined, found.cached, found.pinned)
                        assert found.total == sum(parts) + found.owned
                        assert 0 <= found.free <= found.total
                        assert 0 <= alloc.available(group) <= found.total
                        alloc.available(group, counting_cache=True)
                    for handle in walk.pinned[-3:]:
                        transfer = alloc.receiving(handle)
                        assert transfer is None or transfer.writers > len(transfer.acks)
                    repr(alloc), alloc.device, alloc.req_to_token
                    polls[0] += 1
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=poll)
        with switching_often():
            thread.start()
            for _ in range(200):
                walk.step()
            while polls[0] < 20 and not failed:
                done.wait(0.001)
            done.set()
            thread.join()
        assert not failed, failed
        assert polls[0] >= 20


def test_stats_add_up_though_pages_move_between_two_looks() -> None:
    class Moving:
        """Each look finds other numbers."""

        def __init__(self) -> None:
            self.looks = 0

        def __getattr__(self, name: str) -> int:
            self.looks += 1
            return 100 * self.looks

    found = _group_stats(Moving(), 3, 2, 1)  # type: ignore[arg-type]
    parts = (found.free, found.quarantined, found.cached, found.pinned, found.owned)
    assert found.total == sum(parts)


def test_a_refused_thread_writes_nothing_into_the_journal(tmp_path: Path) -> None:
    alloc = busy(tmp_path / "one", close=False)
    log = alloc._journal.log  # type: ignore[union-attr]
    calls = {
        what: call for what, call in calls_of(alloc).items() if what not in FROM_ANYWHERE | ELSE
    }
    calls["clear"] = alloc.prefix.clear
    before, kept = log.number, state(alloc)
    for what, call in calls.items():
        assert type(threaded(call)) is sgalloc.WrongState, what
    assert log.number == before and state(alloc) == kept
    alloc.open(1)
    alloc.close_journal()
    run = rerun(tmp_path / "one")
    assert run.closed and state(run.alloc) == state(alloc)
    assert len(positions((tmp_path / "one").read_bytes())) == log.number


def test_tasks_of_one_event_loop_share_an_allocator() -> None:
    alloc = make("plain", roomy=True)

    async def serve(turns: int) -> int:
        (handle,) = alloc.open()
        for turn in range(turns):
            alloc.extend(handle, turn)
            await asyncio.sleep(0)
        alloc.release(handle)
        return turns

    async def main() -> list[int]:
        return await asyncio.gather(*(serve(turns) for turns in range(1, 8)))

    assert asyncio.run(main()) == list(range(1, 8))
    assert alloc.available() == alloc.num_pages
