"""What the first import and the first calls cost: `python -m profiling.starting --help`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import click

from profiling import question
from profiling.layout import Found, Table, spread, times, us
from profiling.processes import OF_PROCESSOR, PASSED, ROOT, Times, fresh
from profiling.started import BATCH, CPU, CPU_WARM, IMPORT, PAGE, PROMPT, RESERVE, STEPS
from sgalloc.bench.harness import summarize
from sgalloc.bench.measured import Record

COMPILED, OURS, NOTHING, DROPPED = (
    "all compiled",
    "sgalloc not compiled",
    "nothing compiled",
    "all compiled, read from disk",
)
ALONE = "interpreter alone"
DROP = Path("/proc/sys/vm/drop_caches")


def compiled_without_ours(prefix: Path) -> None:
    """Compile all that sgalloc imports, and not sgalloc."""
    fresh(IMPORT, prefix)
    ours = (prefix / str(ROOT / "sgalloc").lstrip("/")).rglob("*.pyc")
    gone = [path.unlink() for path in ours]
    if not gone:
        raise click.ClickException(f"no compiled files of sgalloc were found in {prefix}")


def drop() -> str | None:
    """Write back and drop the page cache; None, or why not."""
    os.sync()
    try:
        DROP.write_text("3\n", encoding="ascii")
    except OSError as error:
        return f"the page cache cannot be dropped here ({error.strerror})"
    return None


def measure(rounds: int, dropping: bool) -> question.Answer:
    """All states of the caches in turns, ``rounds`` times."""
    series: dict[tuple[str, str, str, str], list[int]] = {}
    notes: list[str] = []

    def note(how: str, state: str, found: Times) -> None:
        for name, both in found.items():
            for clock, took in zip((PASSED, OF_PROCESSOR), both, strict=True):
                series.setdefault((name, how, state, clock), []).append(round(took * 1000))

    def alone() -> None:
        before, begin = os.times(), perf_counter_ns()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        passed, after = (perf_counter_ns() - begin) / 1000, os.times()
        used = after.children_user + after.children_system
        used -= before.children_user + before.children_system
        note(ALONE, COMPILED, {ALONE: (passed, used * 1e6)})

    with TemporaryDirectory() as folder:
        warm = Path(folder, "warm")
        fresh(IMPORT, warm)
        if dropping and (why := drop()) is not None:
            notes.append(f"{DROPPED}: not measured, {why}")
            dropping = False
        elif not dropping:
            notes.append(f"{DROPPED}: not asked for (`--drop-caches`, as root)")
        for turn in range(rounds):
            alone()
            note(IMPORT, COMPILED, fresh(IMPORT, warm))
            note(IMPORT, NOTHING, fresh(IMPORT, Path(folder, f"cold-{turn}")))
            part = Path(folder, f"part-{turn}")
            compiled_without_ours(part)
            note(IMPORT, OURS, fresh(IMPORT, part))
            if dropping:
                drop()
                note(IMPORT, DROPPED, fresh(IMPORT, warm))
            note(CPU, COMPILED, fresh(CPU, warm))
            note(CPU_WARM, COMPILED, fresh(CPU_WARM, warm))
    records = [
        Record(name, "sgalloc", {"how": how, "files": state, "clock": clock}, summarize(times))
        for (name, how, state, clock), times in series.items()
    ]
    return question.Answer(records, notes)


def tables(found: Found) -> list[Table]:
    """What the results say."""
    return [import_table(found), first_table(found)]


def import_table(found: Found) -> Table:
    """Imports, by what is compiled."""

    def both(name: str, **at: str) -> list[str]:
        records = (found.one(name, clock=clock, **at) for clock in (PASSED, OF_PROCESSOR))
        return [ms(record) for record in records]

    rows = [[ALONE, "", "", *both(ALONE, how=ALONE)]]
    for state in (COMPILED, OURS, NOTHING, DROPPED):
        if found.where("import sgalloc", how=IMPORT, files=state):
            at = {"how": IMPORT, "files": state}
            rows.append([state, *both("import numpy", **at), *both("import sgalloc", **at)])
    at = {"how": IMPORT, "clock": OF_PROCESSOR}
    warm = found.median("import sgalloc", files=COMPILED, **at)
    cold = found.median("import sgalloc", files=OURS, **at)
    numpy = found.median("import numpy", files=COMPILED, **at)
    count = found.one(ALONE, clock=PASSED)["n"]
    return Table(
        "Imports in a fresh process, ms",
        f"{count} processes each, in turns; median (p10–p90) of the time that passed, and of the "
        "processor's. `import sgalloc` after NumPy. Compiled: the .pyc files, in a folder of their "
        "own. The interpreter alone is a process that does nothing, from start to end.",
        [
            "files",
            *("`import numpy`", "processor"),
            *("`import sgalloc`", "processor"),
        ],
        rows,
        f"`import sgalloc` takes {us(warm / 1000)} ms of the processor ({times(warm / numpy)} "
        f"what NumPy takes), and {us(cold / 1000)} ms the first time, if nothing was compiled.",
    )


def first_table(found: Found) -> Table:
    """First calls on a CPU."""
    names = [
        name
        for name, _ in found.names()
        if found.where(name, how=CPU_WARM) and not name.startswith("import ")
    ]
    rows = []
    for name in names:
        row = [name.replace("warm()", "`warm()`")]
        for how in (CPU, CPU_WARM):
            for clock in (PASSED, OF_PROCESSOR):
                cell = found.where(name, how=how, clock=clock)
                row.append(spread(cell[0]) if cell else "")
        rows.append(row)

    def took(name: str, how: str) -> float:
        return found.median(name, how=how, clock=OF_PROCESSOR)

    first, second, late = (
        took(f"step, {turn}", CPU_WARM) for turn in ("first", "second", f"{STEPS}th")
    )
    return Table(
        "First calls on a CPU, µs",
        f"In the same way: a constructor for {BATCH} requests, prompts of up to {PROMPT:,} tokens "
        f"for all of them (twice), then steps that reserve {RESERVE} tokens at page {PAGE} and "
        "commit 3.",
        ["call", "as it is", "processor", "with `warm()` first", "processor"],
        rows,
        f"after `warm()` the first step takes {us(first)} µs of the processor, the second "
        f"{us(second)} and the {STEPS}th {us(late)}; `warm()` takes "
        f"{us(took('warm()', CPU_WARM))} and saves the first prompts "
        f"{us(took('prompts, first', CPU) - took('prompts, first', CPU_WARM))}.",
    )


def ms(record: Mapping[str, Any]) -> str:
    """Median and spread, in milliseconds."""
    keys = ("median_us", "p10_us", "p90_us")
    middle, low, high = (us(record[key] / 1000) for key in keys)
    return f"{middle} ({low}–{high})"


@click.command()
@question.options
@click.option(
    "--drop-caches", "dropping", is_flag=True, help="Drop the system's page cache, too: as root."
)
def main(out: Path | None, quick: bool, dropping: bool) -> None:
    """Time imports and first calls in fresh processes: about two minutes."""
    rounds = 2 if quick else 15
    question.run("starting", out, quick, lambda: measure(rounds, dropping), tables)


if __name__ == "__main__":
    main()
