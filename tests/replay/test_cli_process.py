"""``sgalloc replay`` as a process of its own: pipes, encodings, missing extras, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from replay.cli_support import SMALL, SOUND, replayed, text

ROOT = Path(__file__).resolve().parents[2]

START = """
from sgalloc.cli import main
main()
"""


def environment(**more: str) -> dict[str, str]:
    """This one's, without what changes the look of the output."""
    unwanted = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PYTHONIOENCODING")
    return {key: value for key, value in os.environ.items() if key not in unwanted} | more


def process(
    *args: object, code: str | None = None, **more: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command (or ``code``, which starts it) to its end, its output in pipes."""
    start = ["-m", "sgalloc.cli"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *map(str, args)],
        cwd=ROOT,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_output_to_a_pipe_is_plain_text():
    done = process("replay", *SMALL, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    lines = done.stdout.decode("utf-8").splitlines()
    assert lines[0].startswith("chat x 12") and lines[-1] == SOUND
    assert max(map(len, lines)) <= 80
    for stream in (done.stdout, done.stderr):
        assert b"\x1b" not in stream and b"\r" not in stream
    # No bar that is drawn over and over.
    assert done.stderr.decode("utf-8").count("12/12") == 1
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_output_in_a_narrow_encoding_is_still_an_outcome(encoding):
    done = process("replay", *SMALL, PYTHONIOENCODING=encoding)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0
    assert SOUND in done.stdout.decode(encoding)


def test_bad_usage_and_broken_laws_reach_the_shell():
    bad = process("replay", "--page-size", "0")
    assert (bad.returncode, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"sgalloc replay: --page-size") and bad.stderr.count(b"\n") == 1
    leak = """
import sys
import numpy as np
from sgalloc.pages import PagePool
give = PagePool.give
def forget(self, ids, holder):
    if np.ndim(holder) and np.size(ids) > 1:
        ids, holder = ids[:-1], np.asarray(holder)[:-1]
    give(self, ids, holder)
PagePool.give = forget
"""
    broken = process("replay", *SMALL, "--no-prefix-cache", code=leak + START)
    assert broken.returncode == 1
    assert b"broken: page" in broken.stdout and b"Traceback" not in broken.stderr


HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] == {missing!r}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("click", "cli"), ("rich", "cli"), ("matplotlib", "report"), ("jinja2", "report")],
)
def test_a_missing_extra_is_one_line_with_its_remedy(tmp_path, missing, extra):
    code = HIDE.format(missing=missing) + START
    done = process("replay", *SMALL, "--report", tmp_path / "out", code=code)
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 1, errors
    assert f"{missing} is not installed" in errors[0]
    assert f"pip install 'sgalloc[{extra}]'" in errors[0]
    # No law was broken: that is what 1 would say.
    assert done.returncode == 2
    assert done.stdout == b"" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_a_report_its_extra_is_not_needed(missing):
    done = process("replay", *SMALL, code=HIDE.format(missing=missing) + START)
    assert done.returncode == 0 and SOUND.encode() in done.stdout


# Ctrl-C

# A process that was started in the background may have been told to ignore Ctrl-C.
HEED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

# Says "running" once a run is on its way.
LOUD = f"""
{HEED}
import importlib, sys
module = importlib.import_module("sgalloc.commands.replay")
class Loud(module.Engine):
    def run(self, progress=None):
        def shown(totals):
            if totals.steps == 50:
                print("running", file=sys.stderr, flush=True)
            progress(totals)
        return super().run(shown)
module.Engine = Loud
alone = module.replay_prefixes
def loud(*args, progress, **options):
    def shown(index):
        if index == 50:
            print("running", file=sys.stderr, flush=True)
        progress(index)
    return alone(*args, progress=shown, **options)
module.replay_prefixes = loud
"""


class Interrupted(NamedTuple):
    """How a process ended that was sent Ctrl-C."""

    status: int
    stdout: str
    stderr: str


def interrupted(*args: object) -> Interrupted:
    """Start a replay, send Ctrl-C once it runs, and wait for its end."""
    running = subprocess.Popen(
        [sys.executable, "-c", LOUD + START, "replay", *map(str, args)],
        cwd=ROOT,
        env=environment(PYTHONIOENCODING="utf-8"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if "running" in line:
                break
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    return Interrupted(running.returncode, stdout, stderr)


LONG = ("--limit", 8_000, "--pages", 4_000, "--device", "cpu")


def test_ctrl_c_ends_with_the_table_and_the_report_so_far(tmp_path):
    ended = interrupted(*LONG, "--report", tmp_path)
    assert ended.status == 0
    assert "Traceback" not in ended.stderr and "Aborted" not in ended.stderr
    assert ended.stdout.startswith("chat x 8000")
    assert f"{SOUND} (interrupted before the end of the workload)" in text(ended.stdout)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"]["interrupted"] is True
    assert report["verdict"]["leaked_pages"] == report["verdict"]["leaked_rows"] == 0
    assert report["time"]["steps"] >= 50
    assert 0 < report["requests"]["unfinished"] <= 8_000
    assert (tmp_path / "report.html").is_file()


@pytest.mark.not_in_debug_mode("the run gives back ten thousand requests, each with its proof")
def test_ctrl_c_ends_the_prefix_cache_alone_with_the_rate_so_far():
    ended = interrupted(*LONG, "--cache-only")
    assert "Traceback" not in ended.stderr
    assert ended.status == 0
    assert re.search(r"[\d,]+ of [\d,]+ blocks of 512 tokens found", text(ended.stdout))


def test_ctrl_c_before_the_run_is_no_broken_law(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = subprocess.Popen(
        [sys.executable, "-c", HEED + START, "replay", "--trace", str(pipe)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        # Opening the pipe for writing succeeds as soon as the trace is being read.
        with pipe.open("wb") as feed:
            feed.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
            feed.flush()
            time.sleep(0.3)
            running.send_signal(signal.SIGINT)
            stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    assert b"Traceback" not in stderr and stdout == b""
    assert running.returncode not in (0, 1)


def test_ctrl_c_means_what_it_did_before_once_the_run_is_over():
    before = signal.getsignal(signal.SIGINT)
    replayed(*SMALL)
    assert signal.getsignal(signal.SIGINT) is before
