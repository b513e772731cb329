"""Fresh processes that tell what they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PASSED, OF_PROCESSOR = "passed", "processor"
# By name, the time that passed and that of the processor, in microseconds.
Times = Mapping[str, tuple[float, float]]


def fresh(how: str, prefix: Path, variables: Mapping[str, str] | None = None) -> Times:
    """What a new process sees, with compiled files (.pyc) in ``prefix`` alone.

    Args:
        how: as `started.seen` takes it.
        prefix: folder of compiled files; what is missing is compiled and put there.
        variables: more of its environment.

    Raises:
        click.ClickException: it failed, with the last line that it said.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment |= {"PYTHONPYCACHEPREFIX": str(prefix), **(variables or {})}
    command = [sys.executable, "-m", "profiling.started", how]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise click.ClickException(f"a fresh process failed: {said}")
    found: Times = json.loads(done.stdout)
    return found
