"""The resource table of every kernel, from the CSV of `profiling/ncu.sh table`.

    python -m profiling.ncu_table kernels.csv --gpu "NVIDIA H200" \\
        --out profiling/results/nvidia-h200/ncu.json
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click

from profiling.gpu.profiled import CASES, Case

SCHEMA = "sgalloc-ncu"
# What the table has, and the metric that says it; in base units (bytes, ns, %).
METRICS = {
    "ns": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "static_shared_bytes": "launch__shared_mem_per_block_static",
    "dynamic_shared_bytes": "launch__shared_mem_per_block_dynamic",
    "block": "launch__block_size",
    "grid": "launch__grid_size",
    "theoretical_occupancy": "sm__maximum_warps_per_active_cycle_pct",
    "achieved_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_written_bytes": "dram__bytes_write.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
}


def launches(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Name and metrics of each launch in the CSV, in order.

    Raises:
        ValueError: no such CSV, or one without a metric that the table needs.
    """
    lines = text.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise ValueError("there is no table of ncu in it: make it with profiling/ncu.sh table")
    rows = list(csv.DictReader(lines[heads[0] :]))
    missing = [name for name in METRICS.values() if rows and name not in rows[0]]
    if missing:
        raise ValueError(f"the table lacks {', '.join(missing)}: make it with this ncu.sh")
    # The row under the headings holds the units, and has no number.
    units, *found = rows
    wanted = {"ns": ("ns", "nsecond", "nanosecond")}
    for key, kinds in wanted.items():
        unit = units[METRICS[key]]
        if unit not in kinds:
            raise ValueError(f"{METRICS[key]} is in {unit!r}: pass --print-units base to ncu")
    for row in found:
        values = {key: _number(row[name]) for key, name in METRICS.items()}
        yield row["Kernel Name"].split("(")[0], values


def table(text: str, cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """One row a case: the median of its launches.

    Raises:
        ValueError: other launches than those of `profiling.gpu.profiled`, in order.
    """
    found = list(launches(text))
    repeat, rest = divmod(len(found), len(cases))
    wanted = [case.kernel for case in cases for _ in range(repeat)]
    if rest or not repeat or [name for name, _ in found] != wanted:
        raise ValueError(
            f"{len(found)} launches are not those of {len(cases)} steps in order: profile "
            "python -m profiling.gpu.profiled, all kernels"
        )
    rows = []
    for number, case in enumerate(cases):
        mine = [values for _, values in found[number * repeat : (number + 1) * repeat]]
        middle = {key: median(one[key] for one in mine) for key in METRICS}
        rows.append({**case._asdict(), "launches": repeat, **middle})
    return rows


def markdown(data: Mapping[str, Any]) -> str:
    """The table for the docs."""
    lines = [
        "| kernel | step | requests | registers | shared, bytes | grid | occupancy, % | of which "
        "achieved | GPU µs | written | TB/s | DRAM, % | L2, % |",
        "| --- | --- " + "| ---: " * 11 + "|",
    ]
    for row in data["rows"]:
        shared = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
        lines.append(
            f"| `{row['kernel']}` | {row['step']} | {row['requests']:,} | {row['registers']:.0f} "
            f"| {shared:,.0f} | {row['grid']:,.0f} | {row['theoretical_occupancy']:.0f} "
            f"| {row['achieved_occupancy']:.0f} | {row['ns'] / 1000:.2f} "
            f"| {_size(row['written'])} | {row['written'] / row['ns'] / 1000:.2f} "
            f"| {row['dram_percent']:.0f} | {row['l2_percent']:.0f} |"
        )
    return f"{data['gpu']}, {data['date']}, blocks of 256 threads, cold caches.\n\n" + "\n".join(
        lines
    )


def read(path: Path) -> dict[str, Any]:
    """The table of a file.

    Raises:
        ValueError: it is none.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} is no {SCHEMA} file: write one with this script")
    return data


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpu", required=True, help="What the GPU is called.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON there.")
def main(source: Path, gpu: str, out: Path | None) -> None:
    """Make the resource table from SOURCE, the CSV of profiling/ncu.sh."""
    try:
        rows = table(source.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    date = datetime.now(UTC).date().isoformat()
    data = {"schema": SCHEMA, "gpu": gpu, "date": date, "rows": rows}
    click.echo(markdown(data))
    if out is not None:
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
