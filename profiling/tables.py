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

from profiling.answers import build
from profiling.layout import Found, us
from sgalloc.bench import measured
from sgalloc.bench.aim import BLOCKS, FIRST, STEPWISE
from sgalloc.bench.course import GROWS
from sgalloc.bench.harness import SUBJECT

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
NOT_YET = "Not measured yet."

_SOURCE = re.compile(r"<!-- results: (\S+) -->")
_BLOCK = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(data: Mapping[str, Any], name: str) -> str:
    """What stands between the markers of the README for ``name``."""
    if name == "machine":
        return machine_text(data)
    if name == "log":
        return log_text(data)
    if name not in data["benches"]:
        return NOT_YET
    return "\n\n".join(table.markdown() for table in build(data, name))


def fill(text: str, data: Mapping[str, Any]) -> str:
    """``text`` with all its marked blocks made anew from ``data``."""
    return _BLOCK.sub(lambda m: f"{m[1]}{rendered(data, m[2])}\n{m[3]}", text)


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
