"""What the first call on a GPU costs, with the compiled kernels in CuPy's cache or not.

`python -m profiling.gpu.starting --help`
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from profiling.gpu import common
from profiling.gpu.layout import Found, Table, us
from profiling.processes import OF_PROCESSOR, PASSED, fresh
from profiling.started import BATCH, GPU, PAGE, PROMPT, RESERVE, STEPS
from sgalloc.bench.harness import summarize
from sgalloc.bench.measured import Record

EMPTY, FILLED = "empty", "filled"
SIDE = "sgalloc on the GPU"


def measure(rounds: int, how: str = GPU) -> common.Outcome:
    """Fresh processes with an empty cache of kernels, and with that of the one before."""
    series: dict[tuple[str, str, str], list[int]] = {}
    with TemporaryDirectory() as folder:
        prefix = Path(folder, "compiled")
        # Once, so that CuPy's own files are compiled.
        fresh(how, prefix, {"CUPY_CACHE_DIR": str(Path(folder, "first"))})
        for turn in range(rounds):
            kernels = Path(folder, f"kernels-{turn}")
            kernels.mkdir()
            for state in (EMPTY, FILLED):
                seen = fresh(how, prefix, {"CUPY_CACHE_DIR": str(kernels)})
                for name, both in seen.items():
                    for clock, took in zip((PASSED, OF_PROCESSOR), both, strict=True):
                        series.setdefault((name, state, clock), []).append(round(took * 1000))
    records = [
        Record(name, SIDE, {"kernels": state, "clock": clock}, summarize(took))
        for (name, state, clock), took in series.items()
    ]
    return common.Outcome(records, [])


def tables(found: Found) -> list[Table]:
    """What the results say."""
    names = list(dict.fromkeys(record["name"] for record in found.records))
    rows = []
    for name in names:
        row = [f"`{name}`" if name.startswith(("import", "warm")) else name]
        for state in (EMPTY, FILLED):
            for clock in (PASSED, OF_PROCESSOR):
                record = found.one(name, SIDE, kernels=state, clock=clock)
                row.append("" if record is None else ms(record))
        rows.append(row)

    def took(name: str, state: str) -> float | None:
        return found.median(name, SIDE, kernels=state, clock=PASSED)

    def thousandth(value: float | None) -> str:
        return us(None if value is None else value / 1000)

    count = found.where(names[0], kernels=EMPTY)[0]["n"]
    return [
        Table(
            "From the import to a steady step, ms",
            f"{count} fresh processes each, in turns: CuPy's cache of compiled kernels is empty, "
            "or as the process before left it; .pyc files are there. `import cupy` comes with "
            "sgalloc's own where that loads it. A constructor for "
            f"{BATCH} requests, `warm(4096)`, prompts of up to {PROMPT:,} tokens for all, then "
            f"steps that reserve {RESERVE} at page {PAGE}; each until the GPU is done. Time that "
            "passed, and of the processor; median (p10–p90).",
            ["call", "empty: passed", "processor", "filled: passed", "processor"],
            rows,
            f"`warm()` takes {thousandth(took('warm()', EMPTY))} ms where kernels are to be "
            f"compiled and {thousandth(took('warm()', FILLED))} ms where they are not; the first "
            f"step after it {us(took('step, first', FILLED))} µs, the {STEPS}th "
            f"{us(took(f'step, {STEPS}th', FILLED))}.",
        )
    ]


def ms(record: dict[str, float]) -> str:
    """Median and spread, in milliseconds."""
    keys = ("median_us", "p10_us", "p90_us")
    middle, low, high = (shown(record[key] / 1000) for key in keys)
    return f"{middle} ({low}–{high})"


def shown(value: float) -> str:
    """Milliseconds, from a thousandth on."""
    return f"{value:.3f}" if value < 1 else us(value)


@click.command()
@common.options
def main(out: Path | None, quick: bool) -> None:
    """Time first calls on a GPU in fresh processes: about 40 seconds."""
    common.run("starting", out, quick, lambda: measure(1 if quick else 3), tables)


if __name__ == "__main__":
    main()
