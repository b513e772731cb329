"""Processes: import, fork, use in the child; what a child cannot use, and what nobody can copy."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stand_in_cuda import stand_in
from trust.forge import held
from trust.journal_support import in_fresh_process
from trust.test_threads import ELSE, every_call
from trust.walk import CONFIGS, Walk, make

import sgalloc

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
HOST_ALONE = {"stats", "available", "receiving"}


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returned, or how it failed, in a child that was forked just now."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        # From 3.12 on Python warns where other threads live, as they do here on purpose.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            said = pickle.dumps(work())
        except BaseException as error:
            said = pickle.dumps(f"{type(error).__name__}: {error}")
        os.write(there, said)
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as end:
        said = end.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return pickle.loads(said)


@needs_fork
@pytest.mark.parametrize("name", CONFIGS)
def test_parent_and_child_go_on_with_a_copy_each(name: str) -> None:
    walk, twin = (Walk(make(name), 4, events=False) for _ in range(2))
    for _ in range(40):
        walk.step()
        twin.step()

    def go_on(walk: Walk = walk) -> tuple[list[str], str]:
        said = [walk.step() for _ in range(40)]
        walk.alloc.check(device=True)
        return said, walk.alloc.digest()

    before = walk.alloc.digest()
    there = in_child(go_on)
    assert walk.alloc.digest() == before, "the child has changed its own copy alone"
    assert there == go_on(twin) == go_on()


@needs_fork
def test_import_fork_use() -> None:
    code = """
import os, sgalloc
child = os.fork()
alloc = sgalloc.KVAllocator(10, 4, 2, 40, device="cpu", prefix_cache=True)
h = alloc.open(2)
alloc.extend(h, 5)
alloc.release(h, tokens=[range(5), range(5)])
alloc.check(device=True)
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(alloc.digest())
"""
    assert len(in_fresh_process(code).strip()) == 32


@needs_fork
def test_a_fork_by_another_thread_than_the_owner_is_refused_until_adopted() -> None:
    """The owner may have been in the middle of a call."""
    alloc = make("plain")
    ready, over = threading.Event(), threading.Event()

    def serve() -> None:
        alloc.extend(alloc.open(1), 5)
        ready.set()
        over.wait()

    thread = threading.Thread(target=serve, name="scheduler")
    thread.start()
    ready.wait()

    def use() -> str:
        alloc.stats()
        return str(alloc.open(1))

    def adopt() -> int:
        alloc.adopt()
        alloc.check()
        return int(alloc.open(1).size)

    try:
        said = in_child(use)
        assert said.startswith("WrongState: ") and "'scheduler'" in said and "adopt()" in said
        assert in_child(adopt) == 1
    finally:
        over.set()
        thread.join()


@needs_fork
def test_a_fork_in_the_middle_of_a_claim_leaves_no_lock_behind() -> None:
    from sgalloc import ownership

    with ownership._lock:
        assert in_child(lambda: int(make("plain").open(1).size)) == 1


@needs_fork
def test_the_gpu_allocator_of_a_parent_is_refused_before_any_call_of_cuda() -> None:
    with stand_in():
        runtime = sys.modules["cupy.cuda.runtime"]
        alloc = sgalloc.KVAllocator(40, 4, 4, 80, device="cuda", prefix_cache=True)
        alloc.warm(64)
        handles = alloc.open(2)
        alloc.extend(handles, 9)
        update = alloc.captured(8)
        calls = every_call(alloc)
        calls["update.launch"] = update.launch
        calls["update.stage"] = partial(update.stage, alloc.plan(decode=(handles, 9)))
        calls["adopt"] = alloc.adopt

        def use() -> dict[str, str]:
            def touched(*args: Any, **kwargs: Any) -> Any:
                raise AssertionError("CUDA was called")

            for name, value in vars(runtime).items():
                if callable(value) and not isinstance(value, type):
                    setattr(runtime, name, touched)
            said = {}
            for what, call in calls.items():
                if what in ELSE - {"adopt"}:
                    continue
                try:
                    call()
                    said[what] = ""
                except (sgalloc.WrongState, TypeError) as error:
                    said[what] = f"{type(error).__name__}: {error}"
            return said

        said = in_child(use)
        assert isinstance(said, dict), said
        for what, error in said.items():
            if what in HOST_ALONE:
                assert "Wrong" not in error, (what, error)
                continue
            assert error.startswith("WrongState: ") and "spawn" in error, (what, error)
        assert len(said) > 30
        # The parent goes on.
        alloc.decode(handles)
        alloc.check(device=True)


@needs_fork
@pytest.mark.parametrize("first", ["getDeviceCount", "getDevice", "deviceSynchronize"])
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_child_whose_parent_used_cuda_gets_no_cpu_for_it(device: str, first: str) -> None:
    """CUDA says that it is not initialized, at whichever call: that is no missing GPU."""
    with stand_in():
        runtime = sys.modules["cupy.cuda.runtime"]

        def broken(*_: Any) -> int:
            error = runtime.CUDARuntimeError("cudaErrorInitializationError")
            error.status = 3
            raise error

        def use() -> str:
            setattr(runtime, first, broken)
            return sgalloc.KVAllocator(40, 4, 4, 80, device=device, debug=False).device

        said = in_child(use)
        if (device, first) == ("cuda:0", "getDevice"):
            assert said == "cuda:0", "it is not asked"
            return
        assert said.startswith("ValueError: ") and "spawn" in said and "forked" in said


def spawned(end: Any) -> None:
    walk = Walk(make("window, map, prefix"), 4, events=False)
    for _ in range(30):
        walk.step()
    end.send(walk.alloc.digest())


def test_a_spawned_process_serves() -> None:
    context = multiprocessing.get_context("spawn")
    end, other = context.Pipe(duplex=False)
    process = context.Process(target=spawned, args=(other,), daemon=True)
    process.start()
    other.close()
    try:
        assert end.poll(120)
        there = end.recv()
        process.join(60)
    finally:
        process.kill()
    walk = Walk(make("window, map, prefix"), 4, events=False)
    for _ in range(30):
        walk.step()
    assert there == walk.alloc.digest()


def test_nothing_of_an_allocator_can_be_copied_or_pickled(tmp_path: Path) -> None:
    alloc = held("window, map, prefix")
    noted = sgalloc.KVAllocator(10, 4, 2, 40, device="cpu", journal=tmp_path / "j")
    (handle,) = noted.open()
    things = {
        "KVAllocator": alloc,
        "PrefixCache": alloc.prefix,
        "Batch": alloc.batch(alloc._ledger.handle[alloc._ledger.live()][:1]),
        "Plan": alloc.plan(),
        "Planned": noted.plan(decode=(handle, 1)),
        "Match": alloc.prefix.match([1, 2, 3]),
        "PageTables": alloc.page_tables(2, 2),
        "Probe": alloc.probe(),
    }
    for name, thing in things.items():
        assert type(thing).__name__ == name
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda x: pickle.dumps([x], 2)):
            with pytest.raises(TypeError, match=r"snapshot\(\)") as refused:
                copied(thing)
            assert name in str(refused.value) and "\n" not in str(refused.value)
    assert pickle.loads(pickle.dumps(alloc.stats().rows)) == alloc.stats().rows
    again = sgalloc.KVAllocator.restore(
        pickle.loads(pickle.dumps(alloc.snapshot(assume_done=True))), device="cpu"
    )
    alloc._core.quarantine.entries[0].event.over = True
    alloc.settle()
    assert again.digest() == alloc.digest()
