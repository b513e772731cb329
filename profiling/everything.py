"""Every benchmark, one after the other: those of the host anywhere, those of a GPU where one is.

`python -m profiling.everything --help`, or `make bench`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import click

from profiling import question
from profiling.gpu import common
from sgalloc.device import cuda_missing

HOST = ("bench_host", *question.QUESTIONS)
GPU = tuple(f"gpu.{name}" for name in common.BENCHES)
# What a script says where it has nothing to measure: a peer, or a GPU, is not here.
_ABSENT = ("is not measured", "nothing to measure")


class Ended(NamedTuple):
    """How a script ended.

    Attributes:
        name: the module below `profiling`.
        how: "measured", "left out" or "failed".
        why: what it said; empty for one that measured.
        seconds: how long it took.
    """

    name: str
    how: str
    why: str
    seconds: float


def run(name: str, quick: bool, out: Path | None, gpu: str) -> Ended:
    """Run one script; what it prints is shown.

    Args:
        name: the module below `profiling`.
        quick: fewer sizes and rounds.
        out: folder for results, or None.
        gpu: folder of the GPU's results in it.
    """
    command = [sys.executable, "-m", f"profiling.{name}"]
    if quick:
        command.append("--quick")
    if out is not None:
        one = out / gpu / f"{name.removeprefix('gpu.')}.json"
        command += ["--out", str(one if name.startswith("gpu.") else out)]
    begin = perf_counter()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    took = perf_counter() - begin
    if not done.returncode:
        return Ended(name, "measured", "", took)
    said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    absent = said.startswith("Error: ") and any(words in said for words in _ABSENT)
    return Ended(name, "left out" if absent else "failed", said.removeprefix("Error: "), took)


def chosen(only: Sequence[str], missing: str | None) -> list[str]:
    """The scripts to run: those of the host, and of the GPU unless one is ``missing``."""
    names = list(only) or [*HOST, *GPU]
    return [name for name in names if not (missing and name.startswith("gpu."))]


@click.command()
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds of each.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice((*HOST, *GPU)),
    help="Run this script alone; may be given more than once.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write results into this folder, such as profiling/results.",
)
def main(quick: bool, only: tuple[str, ...], out: Path | None) -> None:
    """Run all benchmarks: about eight minutes on a CPU, and as long again on a GPU."""
    if out is not None:
        question.prepare(out)
    missing = cuda_missing()
    gpu = "" if missing else common.slug(common.environment())
    if missing:
        click.echo(f"The GPU's are left out: {missing}")
    ended = []
    for name in chosen(only, missing):
        click.echo(f"\n== {name}")
        ended.append(run(name, quick, out, gpu))
        if ended[-1].why:
            click.echo(ended[-1].why)
    click.echo("")
    for one in ended:
        why = f": {one.why}" if one.why else ""
        click.echo(f"{one.name}: {one.how} in {one.seconds:.0f} s{why}")
    failed = [one.name for one in ended if one.how == "failed"]
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed: what each said is above")


if __name__ == "__main__":
    main()
