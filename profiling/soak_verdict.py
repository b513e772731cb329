"""What the records of a soak say: growth of memory, drift of latencies, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

MIB = 2**20


class Limit(NamedTuple):
    """How much a kind of memory may grow between the first and the last tenth.

    Attributes:
        about: what it is.
        per_million: a million steps.
        least: in any case; what settles late, and what the records themselves take.
    """

    about: str
    per_million: float
    least: float


LIMITS = {
    "blocks": Limit("Python blocks", 250, 600),
    "native": Limit("bytes from malloc", MIB / 16, MIB / 2),
    "resident": Limit("resident bytes", MIB, 16 * MIB),
    "device": Limit("bytes from CuPy's pool", 0, 0),
    "device_taken": Limit("bytes taken of the GPU", 0, 16 * MIB),
}
# Of the steps, at least; the caches of Python and NumPy, and the high water, have settled then.
_WARM_UP = 0.1


def finish(data: Mapping[str, Any]) -> dict[str, Any]:
    """The document with growth, drift and verdict in it."""
    growth, drift = growths(data), drifts(data)
    causes = [] if data["problem"] is None else [data["problem"]]
    for name, found in growth.items():
        if found["grown"] > found["limit"]:
            causes.append(
                f"{LIMITS[name].about} grew by {found['grown']:,.0f} in "
                f"{found['steps']:,} steps, limit {found['limit']:,.0f}"
            )
    verdict = {"sound": not causes, "causes": causes}
    head = {key: value for key, value in data.items() if key != "records"}
    found = {"verdict": verdict, "growth": growth, "drift": drift, "cpu_us": processor(data)}
    return head | found | {"records": data["records"]}


def growths(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How much each kind of memory grew, from the first tenth after the warm-up to the last.

    Empty where the records are too few.
    """
    first, last = tenths(data["records"], data["steps"])
    found: dict[str, dict[str, Any]] = {}
    if not first:
        return found
    steps = round(_middle(last, "steps") - _middle(first, "steps"))
    for name, limit in LIMITS.items():
        if first[0]["memory"][name] is None:
            continue
        before, after = (median(one["memory"][name] for one in part) for part in (first, last))
        grown = after - before
        found[name] = {
            "first": before,
            "last": after,
            "grown": grown,
            "steps": steps,
            "per_million": round(grown / steps * 1e6, 1),
            "limit": max(limit.least, limit.per_million * steps / 1e6),
        }
    return found


def drifts(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Microseconds of each verb in the first tenth after the warm-up and in the last."""
    # The same modes in each: only then are latencies to be compared.
    records = [one for one in data["records"] if one["whole"]]
    first, last = tenths(records, data["steps"])
    if not first:
        return {}
    names = [name for name in first[0]["verbs"] if all(name in one["verbs"] for one in last)]
    found = {}
    for name in names:
        series = [
            [one["verbs"][name] for one in part if name in one["verbs"]] for part in (first, last)
        ]
        medians, worst = (
            [median(row[column] for row in part) / 1e3 for part in series] for column in (1, 2)
        )
        found[name] = {
            "calls": sum(one["verbs"].get(name, [0])[0] for one in records),
            "median_us": [round(value, 2) for value in medians],
            "p99_us": [round(value, 2) for value in worst],
            "ratio": round(medians[1] / medians[0], 3),
            "p99_ratio": round(worst[1] / worst[0], 3),
        }
    return found


def processor(data: Mapping[str, Any]) -> list[float]:
    """Processor time of a step, engine and all, in the first and the last tenth, microseconds.

    Less than latencies it depends on who else uses the machine. Empty where records are too few.
    """
    parts = tenths([one for one in data["records"] if one["whole"]], data["steps"])
    return [round(median(one["step_cpu_us"] for one in part), 1) for part in parts if part]


def tenths(
    records: Sequence[Mapping[str, Any]], steps: int
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The records of the first tenth after the warm-up, and those of the last.

    At least one each, and at least three in all after the warm-up; else none.
    """
    warm = [one for one in records if one["steps"] >= _WARM_UP * steps]
    if len(warm) < 3:
        return [], []
    size = max(1, len(warm) // 10)
    return warm[:size], warm[-size:]


def summary_lines(data: Mapping[str, Any]) -> list[str]:
    """What is printed at the end."""
    rounds = ", ".join(
        f"{name} {share:.2f} times"
        for name, share in zip(data["traffic"]["traces"], data["traffic"]["rounds"], strict=True)
    )
    lines = [f"{data['steps']:,} steps in {data['run']['seconds']:,.0f} s: {rounds}"]
    for name, found in data["growth"].items():
        lines.append(
            f"{LIMITS[name].about}: {found['first']:,.0f} -> {found['last']:,.0f}, "
            f"{found['per_million']:+,.0f} a million steps"
        )
    for name, found in data["drift"].items():
        before, after = found["median_us"]
        low, high = found["p99_us"]
        lines.append(
            f"{name}: {found['calls']:,} calls, median {before:.1f} -> {after:.1f} µs "
            f"({found['ratio']:.2f}x), p99 {low:.1f} -> {high:.1f} µs ({found['p99_ratio']:.2f}x)"
        )
    if not data["growth"]:
        lines.append("Too short to say whether memory grows.")
    lines.append("sound" if data["verdict"]["sound"] else "; ".join(data["verdict"]["causes"]))
    return lines


def _middle(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(median(one[name] for one in records))
