"""Registers, shared memory and occupancy of every kernel, as CUDA itself says; for machines whose
counters `ncu` may not read.

`python -m profiling.gpu.resources --out profiling/results/nvidia-h200/resources.json`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from sgalloc.device import cuda_missing
from sgalloc.device.kernels import SOURCES, THREADS, read_kernels

SCHEMA = "sgalloc-resources"
_KERNEL = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(', re.MULTILINE
)


def kernels() -> list[str]:
    """The names of all kernels."""
    return sorted(_KERNEL.findall(read_kernels(SOURCES)))


def measure() -> dict[str, Any]:
    """What each kernel takes on the current GPU."""
    import cupy
    from cupy.cuda import driver, runtime

    from sgalloc.device import kernels as compiled

    found = runtime.getDeviceProperties(runtime.getDevice())
    most = int(found["maxThreadsPerMultiProcessor"])
    name = found["name"]
    rows = []
    for kernel in kernels():
        function = compiled._module().get_function(kernel)
        taken = function.attributes
        blocks = int(
            driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, THREADS, 0)
        )
        rows.append(
            {
                "kernel": kernel,
                "registers": int(taken["num_regs"]),
                "shared_bytes": int(taken["shared_size_bytes"]),
                "local_bytes": int(taken["local_size_bytes"]),
                "blocks": blocks,
                "occupancy": round(blocks * THREADS / most, 4),
            }
        )
    return {
        "schema": SCHEMA,
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "compute_capability": f"{found['major']}.{found['minor']}",
        "cupy": cupy.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "rows": rows,
    }


def markdown(data: Mapping[str, Any]) -> str:
    """The table for the docs."""
    lines = [
        f"{data['gpu']}, CuPy {data['cupy']}, {data['date']}, blocks of {THREADS} threads.",
        "",
        "| kernel | registers | shared, bytes | local, bytes | blocks on a multiprocessor "
        "| occupancy |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{row['kernel']}` | {row['registers']} | {row['shared_bytes']:,} | "
        f"{row['local_bytes']} | {row['blocks']} | {row['occupancy']:.0%} |"
        for row in data["rows"]
    ]
    return "\n".join(lines)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON there.")
def main(out: Path | None) -> None:
    """Say what every kernel takes on this GPU."""
    missing = cuda_missing()
    if missing is not None:
        raise click.ClickException(f"nothing to look at here: {missing}")
    data = measure()
    click.echo(markdown(data))
    if out is not None:
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
