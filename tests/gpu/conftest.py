"""Runs where CuPy finds a GPU; elsewhere the whole folder is skipped, and says why."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Streams that share a hardware queue would wait for each other's latches. Read by CUDA once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def missing() -> str | None:
    """What keeps the tests of this folder from running; None where nothing does."""
    # What other packages warn of while they are imported is theirs to mend.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            return f"these tests need CuPy: pip install 'sgalloc[cuda13]' ({error})"
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            return f"CuPy finds no GPU ({error}): look at the driver with nvidia-smi"
        if not count:
            return "CuPy finds no GPU"
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    return None


MISSING = missing()


class SkippedFile(pytest.File):
    """A file of tests that is not even imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(str(MISSING), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    if MISSING is None:
        return None
    return SkippedFile.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> Iterator[None]:
    """What was imported is not looked through again at every collection below."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _settled_device() -> Iterator[None]:
    """An error on the GPU belongs to the test that caused it."""
    from cupy.cuda import runtime

    yield
    runtime.deviceSynchronize()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: freeing pinned memory waits for the GPU, and breaks a capture."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def latches(no_collection: None) -> Iterator[Any]:
    """Holds streams; whatever is still held is let go in the end."""
    from cupy.cuda import runtime
    from gpu.latch import Latches

    runtime.deviceSynchronize()
    found = Latches()
    yield found
    found.open_all()
    runtime.deviceSynchronize()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts what the package asks of CUDA."""
    from gpu.spy import Spy

    return Spy(monkeypatch)


@pytest.fixture
def torch() -> Any:
    """torch with CUDA."""
    module = pytest.importorskip("torch", reason="this test exchanges tensors with torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module
