"""A table of results, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text


class Table(NamedTuple):
    """One question and its answer.

    Attributes:
        title: what was measured.
        method: how, in one line.
        columns: headings; the first column holds text, the others numbers.
        rows: cells, one for each column.
        verdict: the answer, computed from the numbers.
    """

    title: str
    method: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str

    def markdown(self) -> str:
        """As Markdown."""
        bar = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [self.columns, bar, *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{self.title}.** {self.method}\n\n{table}\n\n*Verdict:* {self.verdict}"

    def rich(self) -> Group:
        """For a terminal."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(self.columns[0])
        for column in self.columns[1:]:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(Text(_plain(cell)) for cell in row))
        return Group(
            Text(_plain(self.title), style="bold"),
            Text(_plain(self.method), style="dim"),
            table,
            Text(f"Verdict: {_plain(self.verdict)}"),
            Text(),
        )


class Found:
    """The records of one benchmark, to be looked up by what they say."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records = records

    def where(
        self, name: str | None = None, side: str | None = None, label: str = "", **at: Any
    ) -> list[Mapping[str, Any]]:
        """All that match."""
        return [
            record
            for record in self.records
            if name in (None, record["name"])
            and side in (None, record["side"])
            and label == record["label"]
            and all(record["at"].get(key.replace("_", " ")) == value for key, value in at.items())
        ]

    def one(
        self, name: str, side: str | None = None, label: str = "", **at: Any
    ) -> Mapping[str, Any]:
        """The one that matches.

        Raises:
            LookupError: none does, or several do.
        """
        found = self.where(name, side, label, **at)
        if len(found) != 1:
            raise LookupError(
                f"{len(found)} records for {name} {label} of {side} at {at}: "
                "run the whole benchmark again"
            )
        return found[0]

    def median(self, name: str, side: str | None = None, label: str = "", **at: Any) -> float:
        """The median of the one that matches, in microseconds."""
        value: float = self.one(name, side, label, **at)["median_us"]
        return value

    def sizes(self, key: str) -> list[int]:
        """The values of one size, ascending."""
        return sorted({record["at"][key] for record in self.records if key in record["at"]})

    def names(self) -> list[tuple[str, str]]:
        """Names and labels, in the order in which they were measured."""
        return list(dict.fromkeys((record["name"], record["label"]) for record in self.records))


def us(value: float) -> str:
    """A number of microseconds, with three digits or more."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def spread(record: Mapping[str, Any]) -> str:
    """Median, and in brackets the 10th and 90th percentile."""
    return f"{us(record['median_us'])} ({us(record['p10_us'])}–{us(record['p90_us'])})"


def times(ratio: float) -> str:
    """A ratio, such as ``3.4×``."""
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def _plain(text: str) -> str:
    """Without Markdown's marks."""
    return text.replace("`", "").replace("**", "")
