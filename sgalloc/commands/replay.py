"""``sgalloc replay``: traffic through the allocator, and the proof that nothing leaked."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sgalloc.commands.replay_journal import replayed_journal
from sgalloc.commands.replay_options import options_of, pages_of, prefix_cache_of, refuse_idle
from sgalloc.errors import AllocError
from sgalloc.replay.acceptance import PRESETS
from sgalloc.replay.disaggregated import Disaggregated
from sgalloc.replay.engine import Engine
from sgalloc.replay.page import prepare_directory, write_report
from sgalloc.replay.prefix_only import replay_prefixes
from sgalloc.replay.recording import Recording, Totals
from sgalloc.replay.requests import Workload
from sgalloc.replay.summary import summarise, to_table
from sgalloc.replay.traces import read_trace
from sgalloc.replay.workload import generate
from sgalloc.trust import old_behaviour

_REDRAW_SECONDS = 0.1
# What a refusal of the library calls a number, and what the command line does.
_OPTION_OF = {
    "num_pages": "--pages",
    "page_size": "--page-size",
    "running_limit": "--running",
    "max_requests": "--running",
    "chunk": "--chunk",
    "headroom": "--headroom",
    "abort_rate": "--abort-rate",
    "speed": "--speed",
    "seed": "--seed",
    "draft_tokens": "--draft-tokens",
    "steps": "--steps",
    "topk": "--topk",
    "device": "--device",
    "check_every": "--check",
    "overlap": "--overlap",
    "admit": "--admit",
    "window.tokens": "--window",
    "window.num_pages": "--window-pages",
    "window_pages": "--window-pages",
    "window.evict_every": "--window-every",
    "sparse.ratio": "--sparse",
    "sparse.device_buffer": "--device-buffer",
    "sparse.draft_scratch": "--draft-scratch",
    "prefix_cache": "--prefix-cache",
    "window": "--window",
    "disaggregated": "--disaggregated",
    "prefill_pages": "--prefill-pages",
    "writers": "--writers",
}


@click.command()
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Mooncake JSON lines or Azure CSV, plain, .xz or .gz; told apart by content.",
)
@click.option(
    "--profile",
    type=click.Choice(["chat", "code"]),
    default="chat",
    show_default=True,
    help="Generated workload, where no trace is given.",
)
@click.option("--limit", type=click.IntRange(1), help="Requests to take.  [default: 1000, or all]")
@click.option("--speed", type=float, default=1.0, show_default=True, help="Scale arrivals.")
@click.option("--page-size", type=int, default=64, show_default=True, help="Slots in a page.")
@click.option("--pages", type=int, help="Pages in the pool; else by --pool-gib.")
@click.option("--pool-gib", type=float, default=60.0, show_default=True, help="Memory for KV.")
@click.option(
    "--bytes-per-token",
    type=click.IntRange(1),
    default=131072,
    show_default=True,
    help="KV of one token; the default is that of an 8B model with grouped-query attention.",
)
@click.option("--running", type=int, default=256, show_default=True, help="Most requests at once.")
@click.option("--chunk", type=int, default=8192, show_default=True, help="Prefilled tokens a step.")
@click.option(
    "--admit",
    type=click.Choice(["prompt", "chunk"]),
    default="prompt",
    show_default=True,
    help="Open a request when its prompt fits, or when its first chunk does.",
)
@click.option(
    "--headroom",
    type=int,
    default=32,
    show_default=True,
    help="Tokens a running request that admission leaves free.",
)
@click.option(
    "--spec",
    type=click.Choice(["none", "eagle", "dflash", "ngram", "uno"]),
    default="none",
    show_default=True,
    help="Speculative decoding.",
)
@click.option("--steps", type=int, help="Draft steps.  [default: 3 for eagle and ngram]")
@click.option("--topk", type=int, help="Branches of a draft tree.  [default: 1]")
@click.option(
    "--draft-tokens",
    type=int,
    help="Drafted tokens, the known one counted.  "
    "[default: steps + 1, of a tree steps * topk + 1, dflash 16]",
)
@click.option(
    "--accept",
    help=f"Mean tokens kept a step, or one of {', '.join(PRESETS)}.  [default: 2.65, dflash 4.24]",
)
@click.option(
    "--overlap",
    is_flag=True,
    default=None,
    help="With --spec: the engine hears of accepted tokens a step late.",
)
@click.option("--window", type=int, help="Tokens of a sliding window, with pages of its own.")
@click.option(
    "--window-pages", type=int, help="Pages for it.  [default: a quarter of --pages, or two chunks]"
)
@click.option("--window-every", type=int, help="Tokens between evictions from it.  [default: 1]")
@click.option(
    "--disaggregated",
    is_flag=True,
    help="Prefill on a node of its own, and send the KV to the one that decodes.",
)
@click.option("--prefill-pages", type=int, help="Pages of the prefill node.  [default: --pages]")
@click.option("--writers", type=int, help="Most writers of a request's KV.  [default: 2]")
@click.option(
    "--sparse", type=float, help="Logical pages for each of --pages, which are the device's."
)
@click.option("--device-buffer", type=int, help="Tokens kept on the device.  [default: 4096]")
@click.option(
    "--draft-scratch", type=int, help="Device tokens for drafts.  [default: what a step writes]"
)
@click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="[default: with, but for --sparse]"
)
@click.option("--abort-rate", type=float, default=0.0, show_default=True, help="Share aborted.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="Where the table lives.")
@click.option(
    "--check",
    "--check-every",
    "check_every",
    type=int,
    default=0,
    help="Check both laws every N steps; of a journal, every N calls.",
)
@click.option(
    "--cache-only",
    is_flag=True,
    help="Feed only the prefix cache, in file order, one page a block; reports the hit rate.",
)
@click.option("--share-partial", is_flag=True, help="With --cache-only: cache partial blocks, too.")
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    help="Run this journal of an allocator again, in place of traffic.",
)
@click.option("--until", type=click.IntRange(1), help="With --journal: stop before this record.")
@click.option("--page", type=click.IntRange(1), help="With --journal: last calls of this page.")
@click.option("--row", type=click.IntRange(1), help="With --journal: last calls of this row.")
@click.option("--group", help="With --page: the group of the page.  [default: the main one]")
@click.option(
    "--old",
    help="Old behaviours to switch on, apart by commas, to see the checks find them: "
    f"{', '.join(old_behaviour.names())}.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Folder for report.json and a page with plots.",
)
def replay(**given: Any) -> None:
    """Drive the allocator with real or generated traffic.

    Requests arrive on a virtual clock, share prefixes, are prefilled in chunks, decode, are
    retracted under pressure and resume; at the end every page and row must be back. Ctrl-C ends
    the run with the report so far. The exit status is 1 where a law was broken, 2 for bad usage,
    130 where it was interrupted before the run.

    With --journal FILE the calls of a journal are run again on the CPU, and the exit status is 1
    where one of them differs.

    With --old NAME the allocator has a fault that other engines had, and the exit status is 1 where
    a check finds it.
    """
    wanted = given["old"]
    which = () if wanted is None else tuple(name.strip() for name in wanted.split(","))
    try:
        with old_behaviour.switched_on(*which):
            _replay(given)
    except AllocError as found:
        # Raised by a verb, and no more a part of what an engine expects.
        if not which:
            raise
        click.echo(f"sgalloc replay: with --old {wanted}: {_one_line(found)}", err=True)
        sys.exit(1)
    except ValueError as error:
        if not which:
            raise
        _refuse(error)


def _replay(given: dict[str, Any]) -> None:
    try:
        if replayed_journal(click.get_current_context(), given):
            return
        refuse_idle(given)
        given["prefix_cache"] = prefix_cache_of(given)
        workload = _workload(given)
        if given["cache_only"]:
            _cache_only(workload, given)
            return
        options = options_of(given)
        run = Engine if options.disaggregated is None else Disaggregated
        engine = run(workload, options, config=_plain(given))
        if given["report"] is not None:
            prepare_directory(given["report"])
    except KeyboardInterrupt:
        click.echo("sgalloc replay: interrupted before the run", err=True)
        sys.exit(130)
    except (ValueError, TypeError, OSError, AllocError, ImportError, MemoryError) as error:
        _refuse(error)
    with _on_interrupt(engine.stop):
        recording = _run(engine, len(workload.requests))
    Console().print(to_table(summarise(recording)))
    try:
        written = write_report(recording, given["report"]) if given["report"] is not None else []
    except (OSError, ValueError) as error:
        click.echo(f"sgalloc replay: {_one_line(error)}", err=True)
        sys.exit(2 if recording.sound else 1)
    for path in written:
        click.echo(f"wrote {path}")
    if not recording.sound:
        sys.exit(1)


def _run(engine: Engine, requests: int) -> Recording:
    """Run the engine behind a progress bar."""
    with _progress() as bars:
        task = bars.add_task("", total=requests, note="")
        last = 0.0

        def show(totals: Totals) -> None:
            nonlocal last
            if monotonic() - last >= _REDRAW_SECONDS:
                last = monotonic()
                note = f"{totals.steps:,} steps, {totals.retractions:,} retractions"
                bars.update(task, completed=_ended(totals), note=note)

        recording = engine.run(show)
        totals = recording.totals
        bars.update(task, completed=_ended(totals), note=f"{totals.steps:,} steps")
    return recording


def _ended(totals: Totals) -> int:
    return totals.finished + totals.aborted + totals.refused


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call ``stop``, and put back what it did before."""
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _workload(given: dict[str, Any]) -> Workload:
    if given["trace"] is None:
        return generate(given["profile"], given["limit"] or 1000, seed=given["seed"])
    workload = read_trace(given["trace"], limit=given["limit"])
    for problem in workload.problems:
        click.echo(f"skipped: {problem}", err=True)
    if workload.skipped:
        lines = "line" if workload.skipped == 1 else "lines"
        click.echo(f"skipped {workload.skipped} {lines} of {given['trace']}", err=True)
    return workload


def _cache_only(workload: Workload, given: dict[str, Any]) -> None:
    blocks = next((r.block_tokens for r in workload.requests if r.blocks is not None), None)
    if blocks is None:
        raise ValueError("--cache-only needs a workload with block ids, and this one has none")
    bars, running = _progress(), [True]
    task = bars.add_task("", total=len(workload.requests), note="")

    def show(index: int) -> bool:
        if not bars.live.is_started:
            bars.start()
        bars.update(task, completed=index + 1)
        return running[0]

    try:
        with _on_interrupt(lambda: running.__setitem__(0, False)):
            found = replay_prefixes(
                workload,
                pages_of(given, blocks),
                share_partial=given["share_partial"],
                device=given["device"],
                progress=show,
            )
    finally:
        if bars.live.is_started:
            bars.stop()
    pages = "page" if found.evicted == 1 else "pages"
    click.echo(
        f"{found.hits:,} of {found.blocks:,} blocks of {blocks} tokens found in a cache of "
        f"{pages_of(given, blocks):,} pages: {100 * found.rate:.2f} % "
        f"({found.evicted:,} {pages} evicted){'' if running[0] else ', interrupted'}"
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )


def _plain(given: dict[str, Any]) -> dict[str, object]:
    """The options as plain values; of files, the names alone."""
    return {
        key: value.name if isinstance(value, Path) else value
        for key, value in given.items()
        if key != "report"
    }


def _refuse(error: BaseException) -> NoReturn:
    line = _one_line(error)
    if isinstance(error, MemoryError):
        line = f"{line}: lower --running, or leave out the longest requests"
    for field, option in _OPTION_OF.items():
        if line.startswith(f"{field} ") or line.startswith(f"{field}="):
            line = option + line[len(field) :]
    click.echo(f"sgalloc replay: {line}", err=True)
    sys.exit(2)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
