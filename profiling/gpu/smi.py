"""What nvidia-smi says of the current GPU; nothing where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.max.memory",
    "power.limit",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)


def asked() -> dict[str, str]:
    """The values of `FIELDS`, without units; those that it does not know are left out."""
    # A version that does not know one of them answers nothing at all.
    return _asked(FIELDS) or _asked(FIELDS[:1])


def _asked(fields: Sequence[str]) -> dict[str, str]:
    from cupy.cuda import runtime

    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    where = getattr(runtime, "deviceGetPCIBusId", None)
    if where is not None:  # nvidia-smi counts the GPUs otherwise than CUDA does
        command.append(f"--id={where(runtime.getDevice())}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    line = done.stdout.split("\n")[0]
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(fields):
        return {}
    return {
        name: value
        for name, value in zip(fields, values, strict=True)
        if value and not value.startswith("[")
    }


def number(found: Mapping[str, str], name: str) -> int:
    """A value as a whole number; 0 where it is not known."""
    try:
        return round(float(found.get(name, "0")))
    except ValueError:
        return 0


def link(found: Mapping[str, str]) -> str:
    """The widest and fastest link to the host, such as ``gen 5 x16``; empty if not known."""
    generation, width = (number(found, f"pcie.link.{part}.max") for part in ("gen", "width"))
    return f"gen {generation} x{width}" if generation and width else ""
