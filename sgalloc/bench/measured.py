"""What a measurement leaves behind: records, and the document that they are kept in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgalloc.bench.harness import DONE, RETURN, Key, Summary, summarize

SCHEMA = "sgalloc-host-benchmarks"
VERSION = 1

_ENVIRONMENT = {
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
_RUN = {
    "date": str,
    "effort": str,
    "seconds": float,
    "load_before": float,
    "other_cores": float,
    "otherwise_idle": bool,
    "peak_memory_gib": float,
    "states_compared": int,
}
_RECORD = {
    "name": str,
    "label": str,
    "side": str,
    "at": dict,
    "n": int,
    "median_us": float,
    "p10_us": float,
    "p90_us": float,
}


class Record(NamedTuple):
    """One series of timings.

    Attributes:
        name: what was called.
        side: who was measured.
        at: the sizes, by name.
        summary: microseconds.
        label: which kind of call it was, where there are several.
    """

    name: str
    side: str
    at: Mapping[str, int | str]
    summary: Summary
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the document."""
        return {
            "name": self.name,
            "label": self.label,
            "side": self.side,
            "at": dict(self.at),
            "n": self.summary.n,
            "median_us": round(self.summary.median, 4),
            "p10_us": round(self.summary.p10, 4),
            "p90_us": round(self.summary.p90, 4),
        }


class Bench(NamedTuple):
    """All records of one benchmark, and how often the two sides' states were compared."""

    records: list[Record]
    states_compared: int = 0


def records_of(
    times: Mapping[Key, Sequence[int]], at: Mapping[str, int | str], per: int = 1
) -> list[Record]:
    """One record for each series of `harness.alternate`, and one for all labels together."""
    records = []
    together: dict[tuple[str, str], list[int]] = {}
    for key, series in times.items():
        records.append(Record(key.step, key.side, at, summarize(series, per), key.label))
        if key.label:
            together.setdefault((key.side, key.step), []).extend(series)
    for (side, step), series in together.items():
        records.append(Record(step, side, at, summarize(series, per), "all steps"))
    return records


def both_records(
    times: tuple[Mapping[Key, Sequence[int]], Mapping[Key, Sequence[int]]],
    at: Mapping[str, int | str],
    per: int = 1,
) -> list[Record]:
    """The records of `in_turns`: each series until the return, and until it is done."""
    host, total = times
    return [
        *records_of(host, {**at, "until": RETURN}, per),
        *records_of(total, {**at, "until": DONE}, per),
    ]


def document(
    environment: Mapping[str, Any], run: Mapping[str, Any], benches: Mapping[str, Bench]
) -> dict[str, Any]:
    """The document, as it is written to a file."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "environment": dict(environment),
        "run": dict(run),
        "benches": {
            name: [record.to_json() for record in bench.records] for name, bench in benches.items()
        },
    }


def validate(data: Any) -> None:
    """Prove that ``data`` is a document of this schema and version.

    Raises:
        ValueError: naming the first place that is wrong.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"this is no {SCHEMA} document: write one with profiling.bench_host --out")
    if data.get("version") != VERSION:
        raise ValueError(
            f"version {data.get('version')!r} of the schema is not {VERSION}: measure again"
        )
    _fields(data.get("environment"), _ENVIRONMENT, "environment")
    _fields(data.get("run"), _RUN, "run")
    benches = data.get("benches")
    if not isinstance(benches, dict) or not benches:
        raise ValueError("benches must be an object with at least one benchmark")
    for bench, records in benches.items():
        if not isinstance(records, list) or not records:
            raise ValueError(f"benches.{bench} must be a list of at least one record")
        seen = set()
        for number, record in enumerate(records):
            place = f"benches.{bench}[{number}]"
            _fields(record, _RECORD, place)
            _check_record(record, place)
            key = (record["name"], record["label"], record["side"], tuple(record["at"].items()))
            if key in seen:
                raise ValueError(f"{place} repeats {key}")
            seen.add(key)


def write(data: dict[str, Any], path: Path) -> None:
    """Write a valid document, one record a line."""
    validate(data)
    lines = []
    for bench, records in data["benches"].items():
        rows = ",\n".join(f"      {json.dumps(record)}" for record in records)
        lines.append(f"    {json.dumps(bench)}: [\n{rows}\n    ]")
    head = {key: value for key, value in data.items() if key != "benches"}
    start = json.dumps(head, indent=2).removesuffix("\n}")
    text = start + ',\n  "benches": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}): measure again with --out") from None
    validate(data)
    result: dict[str, Any] = data
    return result


def _fields(part: Any, fields: Mapping[str, type], place: str) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"{place} must be an object, got {part!r}")
    if set(part) != set(fields):
        odd = sorted(set(part) ^ set(fields))
        raise ValueError(f"{place} lacks or adds {', '.join(odd)}")
    for name, kind in fields.items():
        value = part[name]
        good = type(value) is kind or (kind is float and type(value) is int)
        if not good:
            raise ValueError(f"{place}.{name} must be {kind.__name__}, got {value!r}")


def _check_record(record: Mapping[str, Any], place: str) -> None:
    if not record["name"] or not record["side"]:
        raise ValueError(f"{place} needs a name and a side")
    for name, value in record["at"].items():
        if type(value) not in (int, str):
            raise ValueError(f"{place}.at.{name} must be an int or a str, got {value!r}")
    if record["n"] < 1:
        raise ValueError(f"{place}.n must be at least 1, got {record['n']}")
    low, middle, high = record["p10_us"], record["median_us"], record["p90_us"]
    if not (0 <= low <= middle <= high and math.isfinite(high)):
        found = f"{low}, {middle}, {high}"
        raise ValueError(f"{place} must have 0 <= p10 <= median <= p90, got {found}")
