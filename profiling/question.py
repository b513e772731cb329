"""A question with a script, a results file and tables of its own, beside `bench_host`.

A results file is a document as `measured` writes it, with one benchmark, and notes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import click
from rich.console import Console

from profiling.layout import Found, Table
from sgalloc.bench import machine, measured
from sgalloc.bench.measured import Bench, Record

# The modules of this package that answer one; each has `tables`.
QUESTIONS = ("million", "peer_vllm", "peer_minisgl", "contiguity", "starting", "observers")
NOT_YET = "Not measured yet."
ROOT = Path(__file__).resolve().parents[1]


class Answer(NamedTuple):
    """What a script found.

    Attributes:
        records: series of timings; none where there was nothing to measure.
        notes: what was left out, and why, in a sentence each.
        states_compared: how often two sides' states were compared.
    """

    records: list[Record]
    notes: list[str]
    states_compared: int = 0


def document(
    name: str, environment: Mapping[str, Any], run: Mapping[str, Any], answer: Answer
) -> dict[str, Any]:
    """The document, as it is written to a file."""
    bench = Bench(answer.records, answer.states_compared)
    return {"notes": list(answer.notes), **measured.document(environment, run, {name: bench})}


def read(path: Path) -> dict[str, Any]:
    """Read a document of one question.

    Raises:
        ValueError: it is none.
    """
    data = measured.read(path)
    notes = data.get("notes")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ValueError(f"{path.name} needs notes, a list of sentences: measure again with --out")
    return data


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every script has."""
    folder = click.Path(file_okay=False, path_type=Path)
    function = click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")(function)
    return click.option(
        "--out", type=folder, help="Write MACHINE/NAME.json into it, such as profiling/results."
    )(function)


def prepare(folder: Path) -> None:
    """Make sure that results can be written, before minutes are spent on them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"nothing can be written to {folder} ({error.strerror}): name another folder",
            param_hint="--out",
        ) from None


def run(
    name: str,
    out: Path | None,
    quick: bool,
    measure: Callable[[], Answer],
    tables: Callable[[Found], list[Table]],
) -> None:
    """Measure, print the tables, and write the document.

    Raises:
        click.ClickException: there was nothing to measure, or ``out`` cannot be written.
    """
    if out is not None:
        prepare(out)
    environment = machine.environment()
    watch = machine.Watch()
    answer = measure()
    if not answer.records:
        raise click.ClickException("; ".join(answer.notes))
    report = watch.report("quick" if quick else "full", answer.states_compared)
    data = document(name, environment, report, answer)
    measured.validate(data)
    console = Console()
    for table in tables(Found(data["benches"][name])):
        console.print(table.rich())
    for note in answer.notes:
        click.echo(f"Note: {note}")
    click.echo(machine_text(data))
    if out is not None:
        path = out / machine.slug(environment) / f"{name}.json"
        measured.write(data, path)
        click.echo(f"wrote {path}")


def block(name: str, folder: Path) -> str:
    """What a page shows of one question, from the results in ``folder``."""
    path = folder / f"{name}.json"
    if not path.exists():
        return NOT_YET
    data = read(path)
    made = importlib.import_module(f"profiling.{name}").tables(Found(data["benches"][name]))
    notes = [f"*Note:* {note}" for note in data["notes"]]
    return "\n\n".join([machine_text(data), *(table.markdown() for table in made), *notes])


def machine_text(data: Mapping[str, Any]) -> str:
    """The machine and the run, in a sentence each."""
    env, run = data["environment"], data["run"]
    busy = "otherwise idle" if run["otherwise_idle"] else "busy with other work, too"
    count = run["states_compared"]
    equal = f" The two sides' states were compared {count} times and were equal." if count else ""
    return (
        f"{env['cpu']} (family/model {env['cpu_family_model']}), {env['cores']} cores, "
        f"{env['memory_gib']} GiB, {env['system']}, huge pages: {env['huge_pages']}; "
        f"{env['python']}, NumPy {env['numpy']}, "
        f"sgalloc {env['sgalloc']}. Measured {run['date']} in {run['seconds']:.0f} s "
        f"({run['effort']} run) on a machine that was {busy}: other processes used "
        f"{run['other_cores']:.2f} cores. Peak memory {run['peak_memory_gib']} GiB. Timing an "
        f"empty call reads {env['empty_call_us']:.2f} µs, which is not taken off.{equal}"
    )
