"""Tables of results, on the terminal and in Markdown, and the records that they are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click


class Found:
    """The records of one document, to be looked up by what they say."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.records: list[Mapping[str, Any]] = data["records"]
        self.notes: list[str] = data["notes"]

    def where(self, name: str, side: str | None = None, **at: Any) -> list[Mapping[str, Any]]:
        """All of that name and side whose sizes agree; ``label`` may be one of ``at``."""
        label = at.pop("label", None)
        return [
            record
            for record in self.records
            if record["name"] == name
            and side in (None, record["side"])
            and label in (None, record["label"])
            and all(record["at"].get(key) == value for key, value in at.items())
        ]

    def one(self, name: str, side: str | None = None, **at: Any) -> Mapping[str, Any] | None:
        """The one that matches, or None.

        Raises:
            LookupError: several do.
        """
        found = self.where(name, side, **at)
        if len(found) > 1:
            raise LookupError(f"{len(found)} records for {name} of {side} at {at}")
        return found[0] if found else None

    def median(self, name: str, side: str | None = None, **at: Any) -> float | None:
        """The median of the one that matches, in microseconds, or None."""
        record = self.one(name, side, **at)
        return None if record is None else float(record["median_us"])

    def values(self, name: str, key: str) -> list[Any]:
        """The values of one size among records of that name, ascending."""
        found = (record["at"] for record in self.records if record["name"] == name)
        return sorted({at[key] for at in found if key in at})


class Table(NamedTuple):
    """One question and its answer; the first column holds text, the others numbers."""

    title: str
    method: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str

    def markdown(self) -> str:
        """As Markdown."""
        bar = ["---"] + ["---:"] * (len(self.columns) - 1)
        table = "\n".join(f"| {' | '.join(line)} |" for line in (self.columns, bar, *self.rows))
        return f"**{self.title}.** {self.method}\n\n{table}\n\n*Verdict:* {self.verdict}"

    def text(self) -> str:
        """As plain text."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.columns))]
        body = "\n".join(
            "  ".join(
                cell.ljust(width) if n == 0 else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        return f"{self.title}\n{self.method}\n\n{body}\n\nVerdict: {self.verdict}\n"

    def show(self) -> None:
        """On the terminal, by rich where it is installed."""
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table as RichTable
            from rich.text import Text
        except ImportError:
            click.echo(self.text())
            return
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for n, column in enumerate(self.columns):
            table.add_column(Text(column), justify="right" if n else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        console = Console(width=160)
        console.print(Text(self.title, style="bold"), Text(self.method, style="dim"), sep="\n")
        console.print(table)
        console.print(Text(f"Verdict: {self.verdict}\n"))


def us(value: float | None) -> str:
    """A number of microseconds, with three digits or more; empty for None."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def spread(record: Mapping[str, Any] | None) -> str:
    """Median, and in brackets the 10th and 90th percentile; empty for None."""
    if record is None:
        return ""
    return f"{us(record['median_us'])} ({us(record['p10_us'])}–{us(record['p90_us'])})"


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, or None where one of the two is missing."""
    return above / below if above is not None and below else None


def times(value: float | None) -> str:
    """A ratio, such as ``3.41×``; empty for None."""
    if value is None:
        return ""
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def size(count: int) -> str:
    """Bytes in short: in powers of two where they are whole, else in powers of ten."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    for unit, name in ((10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def machine_text(data: Mapping[str, Any]) -> str:
    """The machine, in a sentence."""
    env = data["environment"]
    about = [f"{env['sms']} multiprocessors", f"L2 {env['l2_mib']} MiB"]
    if env.get("sm_clock_mhz"):
        about.append(f"clocks up to {env['sm_clock_mhz']} and {env['memory_clock_mhz']} MHz")
    if data["run"].get("sm_clock_mhz"):
        about.append(f"{data['run']['sm_clock_mhz']} MHz after the run")
    if env.get("power_limit_w"):
        about.append(f"{env['power_limit_w']} W")
    if env.get("pcie"):
        about.append(f"PCIe {env['pcie']}")
    return (
        f"{env['gpu']} ({', '.join(about)}), driver "
        f"{env['driver']}, CUDA {env['cuda_runtime']}, CuPy {env['cupy']}, torch {env['torch']}; "
        f"{env['cpu']}, {env['cores']} cores, {env['python']}, NumPy {env['numpy']}, sgalloc "
        f"{env['sgalloc']}. Measured {data['run']['date']}. Timing an empty call reads "
        f"{env['empty_call_us']:.2f} µs, which is not taken off."
    )
