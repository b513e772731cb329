"""A forked child and the GPU of its parent: refused in one line; a spawned one has its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

AFTER_CUDA = """
import os, pickle
import sgalloc
from trust.test_processes import HOST_ALONE, in_child
from trust.test_threads import ELSE, every_call

alloc = sgalloc.KVAllocator(100, 16, 8, 320, device="cuda", prefix_cache=True)
alloc.warm(64)
handles = alloc.open(3)
alloc.extend(handles, [5, 100, 33])
update = alloc.captured(8)
calls = every_call(alloc)
calls |= {"update.launch": update.launch, "adopt": alloc.adopt}
before = alloc.digest()

def use():
    said = {}
    for what, call in calls.items():
        if what in ELSE - {"adopt"}:
            continue
        try:
            call()
            said[what] = ""
        except (sgalloc.WrongState, TypeError) as error:
            said[what] = f"{type(error).__name__}: {error}"
    repr(alloc), alloc.req_to_token
    for device in ("auto", "cuda", "cuda:0"):
        try:
            said[device] = sgalloc.KVAllocator(100, 16, 8, 320, device=device).device
        except ValueError as error:
            said[device] = f"WrongState: {error}"
    plain = sgalloc.KVAllocator(100, 16, 8, 320, device="cpu")
    plain.extend(plain.open(3), [5, 100, 33])
    plain.check(device=True)
    return said

said = in_child(use)
assert isinstance(said, dict) and len(said) > 30, said
for what, error in said.items():
    if what in HOST_ALONE:
        assert "Wrong" not in error, (what, error)
    else:
        assert error.startswith("WrongState: ") and "spawn" in error, (what, error)
assert alloc.digest() == before
alloc.decode(handles)
alloc.check(device=True)
print("passed")
"""

SPAWNING = """
import multiprocessing

def work():
    import sgalloc
    alloc = sgalloc.KVAllocator(100, 16, 4, 320, device="cuda")
    handles = alloc.open(3)
    alloc.extend(handles, [5, 100, 33])
    alloc.check(device=True)
    return alloc

if __name__ == "__main__":
    held = work()
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join(100)
    assert process.exitcode == 0, process.exitcode
    held.check(device=True)
    print("passed")
"""


def assert_passes(code: str, folder: Path) -> None:
    script = folder / "script.py"  # a file, so that a spawned process can import it
    script.write_text(code, encoding="utf-8")
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr[-3000:]


def test_a_forked_child_is_refused_what_its_parent_has_on_a_gpu(tmp_path: Path) -> None:
    """Import, fork and use of CUDA in the child alone is in `test_steady`."""
    assert_passes(AFTER_CUDA, tmp_path)


def test_a_spawned_process_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    assert_passes(SPAWNING, tmp_path)
