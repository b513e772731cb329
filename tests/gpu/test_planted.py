"""Faults that only a GPU shows are found by the tests that are named for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.planted import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
ON_A_GPU = [fault for fault in FAULTS if fault.found_by != "fuzz"]


@pytest.mark.parametrize("fault", ON_A_GPU, ids=lambda fault: f"{fault.kind} {fault.name}")
def test_a_planted_fault_is_found(fault: Fault) -> None:
    """In a process of its own: what waits for a GPU for ever must not hold the others up."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p",
         "fuzz.planting", f"tests/{fault.found_by}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGALLOC_PLANTED": fault.name},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "1 failed" in ran.stdout
