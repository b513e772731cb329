"""Fixtures and settings that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Shared machines stall now and then; how long an example took is no verdict on the code.
settings.register_profile("sgalloc", deadline=None, print_blob=True)
settings.load_profile("sgalloc")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With SGALLOC_DEBUG=1 leave out what is about an allocator that is not debugged."""
    marker = item.get_closest_marker("not_in_debug_mode")
    if marker is not None and os.environ.get("SGALLOC_DEBUG") == "1":
        (reason,) = marker.args
        pytest.skip(f"not in debug mode: {reason}")


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of real request traces: $SGALLOC_TRACES, else ../shared/traces."""
    named = os.environ.get("SGALLOC_TRACES")
    folder = Path(named) if named else ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        if named:
            pytest.fail(f"SGALLOC_TRACES={named} is not a folder; correct or unset it")
        pytest.skip(f"no request traces in {folder}; set SGALLOC_TRACES to their folder")
    return folder
