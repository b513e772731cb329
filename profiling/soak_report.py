"""What soaks have shown, for README.md and docs/trust.md.

``python -m profiling.soak_report --write`` puts it there, from the results that the marked blocks
of these pages name; a test holds that they are current.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from profiling.layout import Table, us
from profiling.soak_verdict import LIMITS

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "README.md", HERE.parent / "docs" / "trust.md")
NOT_YET = "Not run yet."
TOO_SHORT = "It was too short to compare its beginning and its end."
# In a block: all tables, or a sentence.
_BLOCK = re.compile(r"(<!-- soak (tables|figures): (\S+) -->\n).*?(<!-- end of soak -->)", re.S)
_UNITS = {
    "blocks": (1, ""),
    "native": (2**10, " KiB"),
    "resident": (2**10, " KiB"),
    "device_taken": (2**20, " MiB"),
}


def fill(text: str) -> str:
    """``text`` with all its marked blocks made anew."""

    def block(found: re.Match[str]) -> str:
        path = HERE / "results" / found[3]
        body = NOT_YET
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            body = tables(data) if found[2] == "tables" else figures(data)
        return f"{found[1]}{body}\n{found[4]}"

    return _BLOCK.sub(block, text)


def tables(data: Mapping[str, Any]) -> str:
    """The machine, what was done, and the tables of memory and latencies, Markdown."""
    parts = [f"{_machine(data)} {_done(data)}"]
    if not data["drift"]:
        return f"{parts[0]} {_outcome(data)} {TOO_SHORT}"
    return "\n\n".join([*parts, memory_table(data).markdown(), latency_table(data).markdown()])


def figures(data: Mapping[str, Any]) -> str:
    """The result in a few sentences."""
    where = data["environment"].get("gpu") or f"{data['environment']['cpu']} (CPU)"
    done = f"{where}: {data['steps']:,} steps in one process and {_counted(data)}."
    if not data["drift"]:
        return f"{done} {_outcome(data)} {TOO_SHORT}"
    grown = ", ".join(_grown(name, found) for name, found in data["growth"].items())
    step = data["drift"]["step"]
    return (
        f"{done} {_outcome(data)} Growth in a million steps, from the first tenth to the last: "
        f"{grown}. The allocator's share of a step, median: {us(step['median_us'][0])} µs, then "
        f"{us(step['median_us'][1])} µs; processor time of a step, the engine in miniature "
        f"included: {us(data['cpu_us'][0])} µs, then {us(data['cpu_us'][1])} µs."
    )


def memory_table(data: Mapping[str, Any]) -> Table:
    """How much each kind of memory grew."""
    rows = []
    for name, found in data["growth"].items():
        unit, word = _UNITS.get(name, (1, " B"))
        cells = (found["first"] / unit, found["last"] / unit)
        limit = found["limit"] * 1e6 / found["steps"] / unit
        rows.append(
            [
                LIMITS[name].about,
                *(f"{cell:,.0f}{word}" for cell in cells),
                f"{found['per_million'] / unit:+,.1f}{word}",
                f"{limit:,.0f}{word}",
            ]
        )
    return Table(
        "What is held when nothing is held",
        "All requests gone and the cache empty; medians of a tenth of the records, the first "
        "tenth of the steps left out as warm-up.",
        ["", "first tenth", "last tenth", "growth in a million steps", "limit"],
        rows,
        "; ".join(data["verdict"]["causes"]) or "memory is flat, and nothing leaked.",
    )


def latency_table(data: Mapping[str, Any]) -> Table:
    """How long each verb took at the beginning and at the end."""
    rows = []
    for name, found in sorted(data["drift"].items(), key=lambda item: -item[1]["calls"]):
        medians, worst = found["median_us"], found["p99_us"]
        rows.append(
            [
                "allocator, a step" if name == "step" else f"`{name}`",
                f"{found['calls']:,}",
                f"{us(medians[0])} → {us(medians[1])}",
                f"{found['ratio']:.2f}×",
                f"{us(worst[0])} → {us(worst[1])}",
                f"{found['p99_ratio']:.2f}×",
            ]
        )
    ratios = sorted(found["ratio"] for found in data["drift"].values())
    return Table(
        "Time of a call, µs, first tenth → last tenth",
        "Medians of what each record says; a record covers whole rounds of all modes. Reported, "
        "not judged: other processes used the machine, too.",
        ["", "calls", "median", "", "99th percentile", ""],
        rows,
        f"the medians at the end are {ratios[0]:.2f} to {ratios[-1]:.2f} times those at the "
        "beginning. Processor time of a step, the engine in miniature included: "
        f"{us(data['cpu_us'][0])} → {us(data['cpu_us'][1])} µs.",
    )


def _machine(data: Mapping[str, Any]) -> str:
    env, run = data["environment"], data["run"]
    gpu = f"{env['gpu']}, CuPy {env['cupy']}; " if "gpu" in env else ""
    return (
        f"{gpu}{env['cpu']} (family/model {env['cpu_family_model']}), {env['cores']} cores; "
        f"{env['python']}, NumPy {env['numpy']}, sgalloc {env['sgalloc']}. Run {run['date']} in "
        f"{run['seconds'] / 60:,.0f} minutes; other processes used {run['other_cores']:.2f} cores "
        f"meanwhile. Peak memory {run['peak_memory_gib'] * 1024:,.0f} MiB."
    )


def _done(data: Mapping[str, Any]) -> str:
    settings, traffic = data["settings"], data["traffic"]
    kind = "Generated traffic" if traffic["generated"] else "Traces"
    rounds = " and ".join(
        f"{name} {share:,.1f} times"
        for name, share in zip(traffic["traces"], traffic["rounds"], strict=True)
    )
    shape = ""
    if settings["window"] is not None:
        shape += f", a window of {settings['window']:,} tokens"
    if settings["sparse"] is not None:
        shape += f", sparse at {settings['sparse']:g} logical pages a device page"
    if settings["disaggregated"]:
        shape += ", a prefill node of the same size before it"
    return (
        f"{data['steps']:,} steps of at most {settings['running']} requests on "
        f"{settings['num_pages']:,} pages of {settings['page_size']}{shape}; {data['runs']:,} runs "
        f"in turn: {', '.join(data['modes'])}. {kind}: {rounds}. In all {_counted(data)}."
    )


def _counted(data: Mapping[str, Any]) -> str:
    counts: Counter[str] = Counter()
    for one in data["records"]:
        counts.update(one["counts"])
    return (
        f"{counts['finished']:,} requests finished, {counts['aborted']:,} aborted, "
        f"{counts['retractions']:,} retractions, {counts['parked']:,} parked, "
        f"{counts['evicted']:,} pages evicted"
    )


def _outcome(data: Mapping[str, Any]) -> str:
    if data["problem"] is not None:
        return f"It ended with: {data['problem']}."
    return (
        f"After each of {data['runs']:,} runs both laws held, on the device too, and every page "
        "and row was back."
    )


def _grown(name: str, found: Mapping[str, Any]) -> str:
    unit, word = _UNITS.get(name, (1, ""))
    about = LIMITS[name].about.replace(" bytes", "").replace("bytes ", "")
    return f"{found['per_million'] / unit:+,.1f}{word} ({about})"


@click.command()
@click.option("--write", is_flag=True, help="Put the results into README.md and docs/trust.md.")
def main(write: bool) -> None:
    """Make anew what the pages say of soaks."""
    for page in PAGES:
        filled = fill(page.read_text(encoding="utf-8"))
        if write:
            page.write_text(filled, encoding="utf-8")
        else:
            click.echo(filled)


if __name__ == "__main__":
    main()
