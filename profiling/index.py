"""All questions, each with its script, its command, where its answer stands, and a verdict."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from profiling import question
from profiling.answers import build
from profiling.gpu import common
from profiling.gpu.layout import Found as GpuFound
from profiling.layout import Found

GPU_RESULTS = question.ROOT / "profiling" / "results" / "nvidia-h200"
HOST, ALONE, GPU = "host", "alone", "gpu"


class Entry(NamedTuple):
    """One question.

    Attributes:
        text: the question.
        kind: `HOST`, a benchmark of `bench_host`; `ALONE`, a script of its own; `GPU`, a script
            in `gpu/`.
        bench: its name.
        anchor: the section where method, tables and verdicts stand.
        table: which of its tables has the verdict that is shown, counted from 0.
    """

    text: str
    kind: str
    bench: str
    anchor: str
    table: int = 0

    @property
    def command(self) -> str:
        """Runs it, less ``--out``."""
        if self.kind == HOST:
            return f"python -m profiling.bench_host --only {self.bench}"
        return f"python -m profiling.{'gpu.' if self.kind == GPU else ''}{self.bench}"

    @property
    def link(self) -> str:
        """Where its answer stands, from `profiling/README.md`."""
        return f"{'gpu/README.md' if self.kind == GPU else ''}#{self.anchor}"


ENTRIES = (
    Entry(
        "A step by verb, batch and page size: host", HOST, "verbs", "what-does-each-verb-cost", 2
    ),
    Entry("Is a step within its limits?", HOST, "aim", "are-the-limits-kept"),
    Entry("A step by verb, batch and page size: GPU", GPU, "steps", "steps", 3),
    Entry(
        "Scaling with pages moved, pools, histories",
        HOST,
        "scaling",
        "does-growth-cost-what-it-moves-and-nothing-else",
        1,
    ),
    Entry("Scaling to a million requests", ALONE, "million", "up-to-a-million-requests"),
    Entry("Kernels against memset and fill bandwidth", GPU, "kernels", "kernels"),
    Entry("Kernels with cold and warm L2", GPU, "l2", "cold-and-warm-l2"),
    Entry("Fused rounding against host offsets", GPU, "crossover", "crossovers", 1),
    Entry("Five ways to update the table", GPU, "strategies", "five-ways-to-update-the-table", 1),
    Entry("Five ways to carry a step, and what a forward loses", GPU, "transport", "transports"),
    Entry("Mapped memory against copies by size", GPU, "crossover", "crossovers", 2),
    Entry("Launch paths: RawKernel, its Function, a graph", GPU, "launch", "calls"),
    Entry("The NumPy ledger against Python loops", HOST, "loop-parts", "where-does-the-time-go"),
    Entry("Where the time of a step goes", HOST, "breakdown", "where-does-the-time-go"),
    Entry("The prefix cache", HOST, "cache", "what-does-each-verb-cost"),
    Entry("SGLang beside it", GPU, "peer_sglang", "sglang"),
    Entry(
        "vLLM's `allocate_slots` beside it: decode",
        ALONE,
        "peer_vllm",
        "vllm-and-mini-sglang-beside-it",
    ),
    Entry(
        "vLLM beside it: requests that end",
        *(ALONE, "peer_vllm", "vllm-and-mini-sglang-beside-it", 3),
    ),
    Entry(
        "mini-sglang's `allocate_paged` beside it: decode",
        ALONE,
        "peer_minisgl",
        "vllm-and-mini-sglang-beside-it",
    ),
    Entry("Contiguity and transfer extents", ALONE, "contiguity", "how-contiguous-do-pages-stay"),
    Entry("Contiguity and gather bandwidth", GPU, "contiguity", "what-the-order-of-pages-costs"),
    Entry("Import and first call: host", ALONE, "starting", "what-do-the-first-calls-cost"),
    Entry("Import and first call: GPU", GPU, "starting", "the-first-call"),
    Entry(
        "Speculation, transfers, second groups: host",
        HOST,
        "groups",
        "what-do-speculation-transfers-and-second-groups-cost",
        1,
    ),
    Entry(
        "Speculation, transfers, second groups: GPU",
        GPU,
        "groups",
        "speculation-and-second-groups",
        1,
    ),
    Entry("A window", HOST, "window", "what-does-a-window-cost"),
    Entry("Proving the tables", GPU, "row_digest", "proving-the-tables"),
    Entry("Being watched", ALONE, "observers", "what-does-it-cost-to-be-watched"),
)


def table(data: Mapping[str, Any], folder: Path) -> str:
    """The table of all questions, Markdown.

    Args:
        data: the results of `bench_host`.
        folder: where the host's other results lie.
    """
    lines = ["| question | command | verdict |", "| --- | --- | --- |"]
    for entry in ENTRIES:
        said = verdict(entry, data, folder).replace("|", "\\|")
        lines.append(f"| [{entry.text}]({entry.link}) | `{entry.command}` | {said} |")
    return "\n".join(lines)


def verdict(entry: Entry, data: Mapping[str, Any], folder: Path) -> str:
    """What its results say, in a line."""
    if entry.kind == HOST:
        if entry.bench not in data["benches"]:
            return question.NOT_YET
        return build(data, entry.bench)[entry.table].verdict
    path = (GPU_RESULTS if entry.kind == GPU else folder) / f"{entry.bench}.json"
    if not path.exists():
        return question.NOT_YET
    made: Any
    if entry.kind == GPU:
        found = GpuFound(common.read(path))
        made = importlib.import_module(f"profiling.gpu.{entry.bench}").tables(found)
    else:
        records = question.read(path)["benches"][entry.bench]
        made = importlib.import_module(f"profiling.{entry.bench}").tables(Found(records))
    said: str = made[entry.table].verdict
    return said
