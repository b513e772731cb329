"""Puts the numbers of a long fuzz run into docs/fuzzing.md.

`python -m profiling.fuzz_record results/MACHINE/fuzz.json` prints the table that the file makes,
and with `--write` puts it in its place. The file is written by `sgalloc fuzz --json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "fuzzing.md"
_BLOCK = re.compile(r"(<!-- record -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(data: Mapping[str, Any]) -> str:
    """The record as text and a table."""
    machine = data["machine"]
    failures = len(data["failures"])
    refused: dict[str, list[str]] = {}
    for name, count in data["refused"].items():
        verb, _, kind = name.partition(": ")
        refused.setdefault(verb, []).append(f"{kind or 'all'} {count:,}")
    lines = [
        f"{data['calls']:,} public calls in {data['worlds']:,} worlds of seed {data['seed']}, each "
        f"compared, both laws every {data['laws_every']} calls: "
        f"{failures or 'no'} failure{'s' if failures != 1 else ''}. "
        f"{data['seconds']:,.0f} s with {data['workers']} workers, "
        f"{data['calls_per_second']:,} calls a second; {data['evicted_pages']:,} pages evicted. "
        f"{machine['processor']}, {machine['cpus']} CPUs, Python {machine['python']}, NumPy "
        f"{machine['numpy']}, device {data['device']}.",
        "",
        "| verb | done | refused, by reason |",
        "|---|---|---|",
    ]
    for verb in sorted({*data["done"], *refused}):
        done = data["done"].get(verb, 0)
        lines.append(f"| {verb} | {done:,} | {', '.join(refused.get(verb, []))} |")
    return "\n".join(lines)


def fill(text: str, data: Mapping[str, Any]) -> str:
    """``text`` with the record in its place.

    Raises:
        ValueError: there is no place for it.
    """
    if not _BLOCK.search(text):
        raise ValueError("docs/fuzzing.md has no place for the record: add <!-- record -->")
    return _BLOCK.sub(lambda m: f"{m[1]}{rendered(data)}\n{m[2]}", text)


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Put it into docs/fuzzing.md.")
def main(results: Path, write: bool) -> None:
    """Show the record of RESULTS, a file below profiling/ or anywhere."""
    path = results if results.exists() else HERE / results
    data = json.loads(path.read_text(encoding="utf-8"))
    if write:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
    else:
        click.echo(rendered(data))


if __name__ == "__main__":
    main()
