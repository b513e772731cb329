"""Registers, shared memory and spills of every kernel, as nvcc compiles it; no GPU is needed.

`python -m profiling.compiled --write` keeps them in results/compiled.json.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from sgalloc.device.kernels import THREADS, read_kernels

RESULTS = Path(__file__).resolve().parent / "results" / "compiled.json"
SCHEMA = "sgalloc-compiled"
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


class Chip(NamedTuple):
    """What bounds the blocks of one multiprocessor.

    Attributes:
        name: of a card that has it.
        threads, blocks: most of them.
        shared_bytes: for all blocks.
    """

    name: str
    threads: int
    blocks: int
    shared_bytes: int


# From the table of compute capabilities in the CUDA programming guide.
CHIPS = {
    90: Chip("H100, H200", 2048, 32, 228 << 10),
    100: Chip("B200", 2048, 32, 228 << 10),
    120: Chip("RTX 5090", 1536, 24, 100 << 10),
}
_REGISTERS, _REGISTER_UNIT, _WARP = 65_536, 256, 32
_SHARED_UNIT, _SHARED_RESERVED = 128, 1024


def occupancy(chip: Chip, registers: int, shared_bytes: int, threads: int = THREADS) -> float:
    """The share of a multiprocessor's threads that blocks of such a kernel can fill."""
    warps = -(-threads // _WARP)
    per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    shared = -(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + _SHARED_RESERVED
    blocks = min(
        chip.blocks,
        chip.threads // (warps * _WARP),
        # Each quarter of the chip has a quarter of the registers, and warps to itself.
        4 * (_REGISTERS // 4 // per_warp) // warps,
        chip.shared_bytes // shared,
    )
    return blocks * warps * _WARP / chip.threads


def compile_all(nvcc: str = "nvcc") -> dict[str, Any]:
    """Compile all kernels in one text, as CuPy is given it, and say what they take.

    Raises:
        OSError, subprocess.CalledProcessError: there is no nvcc, or it refuses.
    """
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", said)
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in CHIPS]
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.cu"
        source.write_text(read_kernels(), encoding="utf-8")
        options = ["-std=c++17", "-fatbin", "-o", "/dev/null", "-Xptxas=-v"]
        done = subprocess.run(
            [nvcc, *options, *targets, str(source)], capture_output=True, text=True, check=True
        )
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for name, sm, _, stores, loads, registers, rest in _ENTRY.findall(done.stderr):
        shared = _SHARED.search(rest)
        kernels.setdefault(name, {})[sm] = {
            "registers": int(registers),
            "shared_bytes": int(shared[1]) if shared else 0,
            "spilled_bytes": int(stores) + int(loads),
        }
    return {
        "schema": SCHEMA,
        "nvcc": release[1] if release else "unknown",
        "kernels": {name: kernels[name] for name in sorted(kernels)},
    }


def markdown(data: Mapping[str, Any]) -> str:
    """The table for the docs."""
    head = [f"{chip.name} (sm_{sm})" for sm, chip in CHIPS.items()]
    lines = [
        f"nvcc {data['nvcc']}, blocks of {THREADS} threads: registers of a thread, bytes of shared "
        "memory of a block, and the share of a multiprocessor's threads that they leave room for. "
        + _spills(data),
        "",
        f"| kernel | {' | '.join(head)} |",
        f"| --- {'| --- ' * len(head)}|",
    ]
    for name, found in data["kernels"].items():
        cells = []
        for sm, chip in CHIPS.items():
            one = found[str(sm)]
            share = occupancy(chip, one["registers"], one["shared_bytes"])
            cells.append(f"{one['registers']}, {one['shared_bytes']:,} B, {share:.0%}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spills(data: Mapping[str, Any]) -> str:
    found = [
        f"`{name}` on sm_{sm}"
        for name, by_chip in data["kernels"].items()
        for sm, one in by_chip.items()
        if one["spilled_bytes"]
    ]
    return f"These spill: {', '.join(found)}." if found else "None of them spills."


def read(path: Path = RESULTS) -> dict[str, Any]:
    """What was kept."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


@click.command()
@click.option("--write", is_flag=True, help="Keep it in the results.")
def main(write: bool) -> None:
    """Compile all kernels with nvcc and say what they take."""
    try:
        data = compile_all()
    except FileNotFoundError:
        raise click.ClickException("there is no nvcc on PATH: install a CUDA toolkit") from None
    click.echo(markdown(data))
    if write:
        RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
