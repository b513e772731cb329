"""The tables that results make, for README.md.

`python -m profiling.tables` prints the page with the tables of the results that it names, and
with `--write` puts them in their place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from profiling import index, question
from profiling.answers import build
from profiling.layout import Found, us
from sgalloc.bench import measured
from sgalloc.bench.aim import BLOCKS, FIRST, STEPWISE
from sgalloc.bench.course import GROWS
from sgalloc.bench.harness import SUBJECT

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

_SOURCE = re.compile(r"<!-- results: (\S+) -->")
_BLOCK = re.compile(r"(<!-- table: ([a-z_-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(data: Mapping[str, Any], name: str, folder: Path) -> str:
    """What stands between the markers of the README for ``name``.

    Args:
        data: the results of `bench_host`.
        name: of the block.
        folder: where those of the other questions lie.
    """
    if name == "questions":
        return index.table(data, folder)
    if name in question.QUESTIONS:
        return question.block(name, folder)
    if name == "machine":
        return question.machine_text(data)
    if name == "log":
        return log_text(data)
    if name not in data["benches"]:
        return question.NOT_YET
    return "\n\n".join(table.markdown() for table in build(data, name))


def fill(text: str, data: Mapping[str, Any]) -> str:
    """``text`` with all its marked blocks made anew, from ``data`` and the files beside it."""
    folder = source(text).parent
    return _BLOCK.sub(lambda m: f"{m[1]}{rendered(data, m[2], folder)}\n{m[3]}", text)


def source(text: str) -> Path:
    """The results that a README names.

    Raises:
        ValueError: it names none.
    """
    found = _SOURCE.search(text)
    if found is None:
        raise ValueError("README.md names no results: add <!-- results: results/NAME/host.json -->")
    return HERE / found[1]


def log_text(data: Mapping[str, Any]) -> str:
    """The log, with the numbers of the present results."""
    prices, aim = Found(data["benches"]["prices"]), Found(data["benches"]["aim"])
    few, many = prices.sizes("elements")

    def price(name: str, size: int = few) -> str:
        return us(prices.median(name, elements=size))

    def step(turns: str, label: str = GROWS) -> str:
        return us(aim.median("reserve", SUBJECT, label, page=64, turns=turns))

    rows = [
        (
            "An operand that is an array already needs no conversion.",
            "`page_size` and its like are kept as arrays of no dimensions.",
            f"{price('array + array of no dimensions')} µs instead of "
            f"{price('array + Python int')} ({few} elements)",
        ),
        (
            "NumPy converts an index that is not int64 first.",
            "Rows and places are int64; page ids are converted by hand before they index.",
            f"int64 {price('column[int64 index] = values')} µs, converted by hand "
            f"{price('column[int32 index.astype(int64)] = values')}, int32 "
            f"{price('column[int32 index] = values')} ({few} elements)",
        ),
        (
            "A reduction starts slowly, `argmax` does not.",
            "Extremes are taken at `argmax`; few numbers are added up as a list.",
            f"`argmax` {price('argmax')} µs, `max` {price('max')}; sum of {few}: list "
            f"{price('sum of tolist')}, array {price('sum')}; of {many}: list "
            f"{price('sum of tolist', many)}, array {price('sum', many)}",
        ),
        (
            "Taking turns call by call leaves the caches to the other side.",
            "Both ways of taking turns are reported, and the first step of a block.",
            f"a growing `reserve` at page 64: {step(BLOCKS)} µs in blocks, {step(STEPWISE)} step "
            f"by step, {step(BLOCKS, FIRST)} first after 100 steps of the loop",
        ),
    ]
    head = "| predicted | changed | measured |\n| --- | --- | --- |\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


@click.command()
@click.option("--write", is_flag=True, help="Put the tables into profiling/README.md.")
def main(write: bool) -> None:
    """Make the README's tables from the results that it names."""
    text = README.read_text(encoding="utf-8")
    filled = fill(text, measured.read(source(text)))
    if write:
        README.write_text(filled, encoding="utf-8")
    else:
        click.echo(filled)


if __name__ == "__main__":
    main()
