"""What the GPU benchmarks share: the machine, the document, and the command.

`python -m profiling.gpu.common tables --write` makes the tables of README.md anew.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import click

from profiling.gpu import smi
from profiling.gpu.layout import Found, Table, machine_text
from sgalloc.bench import machine
from sgalloc.bench.measured import Record
from sgalloc.device import cuda_missing

SCHEMA = "sgalloc-gpu-benchmarks"
VERSION = 1
BENCHES = (
    *("steps", "peer_sglang", "kernels", "l2", "transport", "strategies", "crossover", "launch"),
    *("groups", "contiguity", "starting", "row_digest"),
)
HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
NOT_YET = "Not measured yet."

_SOURCE = re.compile(r"<!-- results: (\S+) -->")
_BLOCK = re.compile(r"(<!-- table: ([a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ENVIRONMENT = {
    "gpu": str,
    "sms": int,
    "l2_mib": float,
    "gpu_memory_gib": float,
    "driver": str,
    "cuda_driver": str,
    "cuda_runtime": str,
    "cupy": str,
    "torch": str,
    "cpu": str,
    "cpu_family_model": str,
    "cores": int,
    "memory_gib": float,
    "system": str,
    "huge_pages": str,
    "python": str,
    "numpy": str,
    "sgalloc": str,
    "empty_call_us": float,
}
# Read since a later version; results from before do not have them.
_LATER = {"sm_clock_mhz": int, "memory_clock_mhz": int, "pcie": str, "power_limit_w": int}
_RECORD = {"name", "label", "side", "at", "n", "median_us", "p10_us", "p90_us"}


class Outcome(NamedTuple):
    """What a benchmark found.

    Attributes:
        records: series of timings.
        notes: what was left out, and why, in a sentence each.
        states_compared: how often two sides' states, or a table and the row law, were compared.
    """

    records: list[Record]
    notes: list[str]
    states_compared: int = 0


# -- the document ----------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What the numbers depend on, in words that say nothing about whose machine it is."""
    from cupy.cuda import runtime

    found = runtime.getDeviceProperties(runtime.getDevice())
    name = found["name"]
    asked = smi.asked()
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "sms": int(found["multiProcessorCount"]),
        "l2_mib": round(found["l2CacheSize"] / 2**20, 1),
        "gpu_memory_gib": round(found["totalGlobalMem"] / 2**30, 1),
        "driver": asked.get("driver_version", "unknown"),
        "cuda_driver": _cuda_version(runtime.driverGetVersion()),
        "cuda_runtime": _cuda_version(runtime.runtimeGetVersion()),
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "torch": _version("torch"),
        "sm_clock_mhz": smi.number(asked, "clocks.max.sm"),
        "memory_clock_mhz": smi.number(asked, "clocks.max.memory"),
        "power_limit_w": smi.number(asked, "power.limit"),
        "pcie": smi.link(asked),
        **machine.environment(),
    }


def slug(environment: Mapping[str, Any]) -> str:
    """A folder name for the GPU, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", environment["gpu"].lower()).strip("-")


def document(
    bench: str, environment: Mapping[str, Any], run: Mapping[str, Any], outcome: Outcome
) -> dict[str, Any]:
    """The document, as it is written to a file."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "bench": bench,
        "environment": dict(environment),
        "run": dict(run),
        "notes": list(outcome.notes),
        "records": [record.to_json() for record in outcome.records],
    }


def validate(data: Any) -> None:
    """Prove that ``data`` is a document of this schema and version.

    Raises:
        ValueError: naming the first place that is wrong.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"this is no {SCHEMA} document: write one with --out")
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r} is not {VERSION}: measure again")
    if data.get("bench") not in BENCHES:
        raise ValueError(f"bench {data.get('bench')!r} is none of {', '.join(BENCHES)}")
    found = data.get("environment")
    kinds = _ENVIRONMENT | _LATER
    if not isinstance(found, dict) or not set(_ENVIRONMENT) <= set(found) <= set(kinds):
        raise ValueError(
            f"environment must have exactly {', '.join(_ENVIRONMENT)}, and may have "
            f"{', '.join(_LATER)}"
        )
    for name in found:
        kind = kinds[name]
        if not (type(found[name]) is kind or (kind is float and type(found[name]) is int)):
            raise ValueError(f"environment.{name} must be {kind.__name__}, got {found[name]!r}")
    if not isinstance(data.get("run"), dict) or "date" not in data["run"]:
        raise ValueError("run must be an object with a date")
    notes, records = data.get("notes"), data.get("records")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ValueError("notes must be a list of sentences")
    if not isinstance(records, list) or not records:
        raise ValueError("records must be a list of at least one record")
    seen = set()
    for number, record in enumerate(records):
        _check_record(record, f"records[{number}]")
        at = tuple(sorted(record["at"].items()))
        key = (record["name"], record["label"], record["side"], at)
        if key in seen:
            raise ValueError(f"records[{number}] repeats {key}")
        seen.add(key)


def write(data: dict[str, Any], path: Path) -> None:
    """Write a valid document, one record a line."""
    validate(data)
    head = json.dumps({k: v for k, v in data.items() if k != "records"}, indent=2)
    rows = ",\n".join(f"    {json.dumps(record)}" for record in data["records"])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = head.removesuffix("\n}") + f',\n  "records": [\n{rows}\n  ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: it is none.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is no JSON ({error}): measure again with --out") from None
    validate(data)
    return data


# -- commands --------------------------------------------------------------------------------


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every script has."""
    file = click.Path(dir_okay=False, path_type=Path)
    function = click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")(function)
    return click.option("--out", type=file, help="Write the results to this JSON file.")(function)


def run(
    bench: str,
    out: Path | None,
    quick: bool,
    measure: Callable[[], Outcome],
    tables: Callable[[Found], list[Table]],
) -> None:
    """Measure, print the tables, and write the document.

    Raises:
        click.ClickException: there is no GPU, or ``out`` cannot be written.
    """
    missing = cuda_missing()
    if missing is not None:
        raise click.ClickException(f"nothing to measure here: {missing}")
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=out.parent):
                pass
        except OSError as error:
            raise click.BadParameter(
                f"nothing can be written beside {out} ({error.strerror}): name another file",
                param_hint="--out",
            ) from None
    found = environment()
    watch = machine.Watch()
    outcome = measure()
    clock = smi.number(smi.asked(), "clocks.sm")  # before the GPU has slowed down again
    report = watch.report("quick" if quick else "full", outcome.states_compared)
    data = document(bench, found, {**report, "sm_clock_mhz": clock}, outcome)
    validate(data)
    for table in tables(Found(data)):
        table.show()
    for note in outcome.notes:
        click.echo(f"Note: {note}")
    click.echo(f"{machine_text(data)} The run took {report['seconds']:.0f} s.")
    if out is not None:
        write(data, out)
        click.echo(f"wrote {out}")


def fill(text: str) -> str:
    """A page with all its marked blocks made anew from the results that it names."""
    found = _SOURCE.search(text)
    if found is None:
        raise ValueError("README.md names no results: add <!-- results: ../results/NAME -->")
    folder = HERE / found[1]
    return _BLOCK.sub(lambda m: f"{m[1]}{_block(folder / f'{m[2]}.json')}\n{m[3]}", text)


def _block(path: Path) -> str:
    if not path.exists():
        return NOT_YET
    data = read(path)
    made = importlib.import_module(f"profiling.gpu.{data['bench']}").tables(Found(data))
    notes = [f"*Note:* {note}" for note in data["notes"]]
    return "\n\n".join([machine_text(data), *(table.markdown() for table in made), *notes])


@click.group()
def main() -> None:
    """What concerns all GPU benchmarks."""


@main.command()
@click.option("--write", "save", is_flag=True, help="Put the tables into profiling/gpu/README.md.")
def tables(save: bool) -> None:
    """Make README.md's tables from the results that it names."""
    filled = fill(README.read_text(encoding="utf-8"))
    if save:
        README.write_text(filled, encoding="utf-8")
    else:
        click.echo(filled)


def _check_record(record: Any, place: str) -> None:
    if not isinstance(record, dict) or set(record) != _RECORD:
        raise ValueError(f"{place} must have exactly {', '.join(sorted(_RECORD))}")
    if not record["name"] or not record["side"]:
        raise ValueError(f"{place} needs a name and a side")
    for name, value in record["at"].items():
        if type(value) not in (int, str):
            raise ValueError(f"{place}.at.{name} must be an int or a str, got {value!r}")
    low, middle, high = record["p10_us"], record["median_us"], record["p90_us"]
    if record["n"] < 1 or not (0 <= low <= middle <= high and math.isfinite(high)):
        raise ValueError(f"{place} must have n >= 1 and 0 <= p10 <= median <= p90")


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    main()
