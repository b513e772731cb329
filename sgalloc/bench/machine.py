"""The machine that measures, in words that say nothing about whose it is. Linux only."""

from __future__ import annotations

import os
import platform
import re
import resource
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import sgalloc
from sgalloc.bench.harness import empty_call

# More than this share of a core taken by others, and the run counts as disturbed.
IDLE_BELOW = 0.1

_TICKS = os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, Any]:
    """What the numbers depend on: processor, memory, versions, and what the timing costs."""
    info = _cpu_info()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "huge_pages": _huge_pages(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "sgalloc": sgalloc.__version__,
        "empty_call_us": round(empty_call().median, 4),
    }


def slug(environment: dict[str, Any]) -> str:
    """A folder name for the machine, such as ``amd-epyc-2-cores``."""
    name = re.sub(r"\((r|tm)\)", "", environment["cpu"].lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"{name}-{environment['cores']}-cores"


class Watch:
    """Who used the processor while something ran: this process, or others."""

    def __init__(self) -> None:
        self.load_before = round(os.getloadavg()[0], 2)
        self._begin = perf_counter()
        self._busy = _busy_seconds()
        self._own = _own_seconds()

    def report(self, effort: str, states_compared: int) -> dict[str, Any]:
        """The run in numbers, ``other_cores`` being the cores kept busy by other processes."""
        seconds = perf_counter() - self._begin
        busy, own = _busy_seconds() - self._busy, _own_seconds() - self._own
        others = max(0.0, busy - own) / seconds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "effort": effort,
            "seconds": round(seconds, 1),
            "load_before": self.load_before,
            "other_cores": round(others, 3),
            "otherwise_idle": others < IDLE_BELOW,
            "peak_memory_gib": round(peak / 2**20, 2),  # Linux counts in KiB
            "states_compared": states_compared,
        }


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float:
    """Processor time used by all, guests and what the hypervisor took included."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _huge_pages() -> str:
    """When the kernel backs memory by huge pages: NumPy asks for them for large arrays."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return "none"
    chosen = re.search(r"\[(\w+)\]", setting.read_text(encoding="ascii"))
    return chosen[1] if chosen else "none"


def _cpu_info() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
