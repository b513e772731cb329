"""The table of the README, made from the committed results.

`python -m profiling.headline --write` puts it there; a test holds that it is current.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
HOST = ROOT / "profiling" / "results" / "amd-epyc-2-cores" / "host.json"
PEER = ROOT / "profiling" / "results" / "nvidia-h200" / "peer_sglang.json"
BEGIN, END = "<!-- measured: python -m profiling.headline --write -->", "<!-- end -->"

Records = Sequence[Mapping[str, Any]]


def median(records: Records, name: str, side: str, label: str = "", **at: Any) -> float:
    """The median of the one record that is called so, µs.

    Raises:
        ValueError: none is, or several are.
    """
    found = [
        record["median_us"]
        for record in records
        if record["name"] == name
        and record["side"] == side
        and record["label"] == label
        and all(record["at"].get(key) == value for key, value in at.items())
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} records of {name} by {side} at {at}: one was expected")
    return float(found[0])


def table() -> str:
    """The table, Markdown."""
    host = json.loads(HOST.read_text(encoding="utf-8"))["benches"]["aim"]
    peer = json.loads(PEER.read_text(encoding="utf-8"))["records"]
    rows: list[tuple[str, float, float, str]] = []
    here = {"page": 64, "turns": "in blocks of 100 steps"}
    for what, name, label, batch in (
        ("`reserve`, 256 requests, steps that grow", "reserve", "steps that grow", 256),
        ("`reserve`, 256 requests, no page needed", "reserve again", "", 256),
        ("`release` of 1,000 tokens, a request in batches of 64", "release", "", 64),
    ):
        mine, loop = (
            median(host, name, side, label, batch=batch, **here)
            for side in ("sgalloc", "python loop")
        )
        rows.append((f"CPU: {what}", mine, loop, "a Python loop over request objects"))
    there = {"page": 64, "until": "return"}
    for batch in (256, 4096, 65536):
        mine, theirs = (
            median(peer, "reserve", side, "all steps", batch=batch, **there)
            for side in ("sgalloc", "SGLang")
        )
        rows.append((f"H200: `reserve`, {batch:,} requests, host time", mine, theirs, "SGLang"))
    mine, theirs = (
        median(peer, "release", side, batch=256, **there) for side in ("sgalloc", "SGLang")
    )
    rows.append(("H200: `release` of 256 requests, host time", mine, theirs, "SGLang"))
    mine = median(peer, "kernels", "assign_pages", batch=65536, page=64)
    theirs = sum(
        median(peer, "kernels", side, batch=65536, page=64)
        for side in ("alloc_extend_kernel", "assign_req_to_token_pool")
    )
    rows.append(("H200: a page each for 65,536 requests, GPU time", mine, theirs, "SGLang"))
    lines = [
        "| page size 64, µs (medians) | sgalloc | beside it, in the same run | |",
        "|---|---:|---:|---:|",
    ]
    for what, ours, others, whose in rows:
        lines.append(
            f"| {what} | {_shown(ours)} | {_shown(others)}, {whose} | {_shown(others / ours)}× |"
        )
    return "\n".join(lines)


def filled(text: str) -> str:
    """``text`` with the table between its markers."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"


def _shown(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


@click.command()
@click.option("--write", is_flag=True, help="Put the table into README.md.")
def main(write: bool) -> None:
    """Print the table of the README, or put it there."""
    if not write:
        click.echo(table())
        return
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
