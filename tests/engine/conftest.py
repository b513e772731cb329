"""The engine needs torch; without it the folder is skipped, and says why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = importlib.util.find_spec("torch") is None


class SkippedFile(pytest.File):
    """A file of tests that is not even imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("the example needs torch: install 'sgalloc[torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    return SkippedFile.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is so small that threads only get into each other's way."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
