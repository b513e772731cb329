"""Which device an allocator gets: clear lines where there is no GPU, and none touched unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sgalloc

ROOT = Path(__file__).resolve().parent.parent
REMEDIES = ("pip install 'sgalloc[cuda13]'", "nvidia-smi", "device='cpu'")


class FakeCudaError(RuntimeError):
    """What CuPy raises where the driver is missing, too old, or has no device."""


def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)


def cupy_that_counts(monkeypatch: pytest.MonkeyPatch, answer: int | str) -> None:
    """A CuPy whose runtime counts so many GPUs, or fails with this message."""
    runtime = ModuleType("cupy.cuda.runtime")

    def count() -> int:
        if isinstance(answer, str):
            raise FakeCudaError(answer)
        return answer

    runtime.getDeviceCount = count  # type: ignore[attr-defined]
    runtime.CUDARuntimeError = FakeCudaError  # type: ignore[attr-defined]
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda, cuda.runtime = cuda, runtime  # type: ignore[attr-defined]
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)


DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
# How a machine can be without a GPU: what is told, and the remedy.
WITHOUT: dict[str, tuple[Any, str, str]] = {
    "no CuPy": (no_cupy, "CuPy is not installed", "pip install 'sgalloc[cuda13]'"),
    "no driver": (lambda m: cupy_that_counts(m, DRIVER), "InsufficientDriver", "nvidia-smi"),
    "no device": (
        lambda m: cupy_that_counts(m, "cudaErrorNoDevice: no CUDA-capable device is detected"),
        "NoDevice",
        "nvidia-smi",
    ),
    "none counted": (lambda m: cupy_that_counts(m, 0), "no GPU", "device='cpu'"),
}


def make(device: Any, **how: Any) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(20, 4, 3, 40, device=device, **how)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
@pytest.mark.parametrize("lack", WITHOUT)
def test_a_gpu_that_is_not_there_is_one_line_with_a_remedy(
    lack: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away, told, remedy = WITHOUT[lack]
    take_away(monkeypatch)
    with pytest.raises(ValueError) as caught:
        make(device)
    line = str(caught.value)
    assert "\n" not in line
    assert f"'{device}'" in line and told in line and remedy in line
    assert line.endswith("or use device='cpu'")


@pytest.mark.parametrize("lack", WITHOUT)
def test_auto_falls_back_to_the_cpu(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WITHOUT[lack][0](monkeypatch)
    for alloc in (make("auto"), sgalloc.KVAllocator(20, 4, 3, 40)):
        assert alloc.device == "cpu"
        (h,) = alloc.open().tolist()
        alloc.extend(h, 9)
        alloc.check(device=True)


def test_the_cpu_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even whether there is a GPU: counting them would start the driver."""
    cupy_that_counts(monkeypatch, "asked for the count")
    monkeypatch.setattr(
        sys.modules["cupy.cuda.runtime"], "CUDARuntimeError", type("Other", (Exception,), {})
    )
    assert make("cpu").device == "cpu"
    with pytest.raises(FakeCudaError):
        make("auto")  # which does ask, so the count above would have been seen


@pytest.mark.parametrize(
    "name",
    [
        "cuda:x",
        "cuda:",
        "cpu:",
        "tpu",
        "cpu:1",
        "cuda:-1",
        "cuda:1.5",
        "auto:0",
        "CUDA",
        "gpu",
        "",
        " cpu",
    ],
)
def test_a_name_that_is_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cupy(monkeypatch)
    with pytest.raises(ValueError) as caught:
        make(name)
    line = str(caught.value)
    assert repr(name) in line and "'cpu', 'cuda', 'cuda:N' or 'auto'" in line
    assert "\n" not in line


@pytest.mark.parametrize("device", [None, 0, True, b"cuda", ["cuda"]], ids=repr)
def test_what_is_no_name_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match="device must be a string") as caught:
        make(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("given", ["stream", "reader"])
@pytest.mark.parametrize("value", ["plan", 0, object()], ids=["plan", "0", "object"])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_has_no_streams(
    device: str, value: Any, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_cupy(monkeypatch)
    with pytest.raises(ValueError, match="the CPU has no streams") as caught:
        make(device, **{given: value})
    assert "\n" not in str(caught.value)
    assert make(device, stream=None, reader=None).device == "cpu"


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match="CPU"):
        make("cpu").captured(8)


# -- in processes of their own -------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


TOUCHES_NOTHING = """
    import sys
    import sgalloc
    import sgalloc.sizing

    def loaded():
        with open("/proc/self/maps") as maps:
            libraries = maps.read()
        found = [name for name in ("libcuda", "libcudart", "libnvrtc") if name in libraries]
        return found + [name for name in ("cupy", "torch", "cuda") if name in sys.modules]

    assert loaded() == [], f"import loaded {loaded()}"
    alloc = sgalloc.KVAllocator(20, 4, 3, 40, device="cpu", prefix_cache=True, page_table=True)
    h = alloc.open(2)
    alloc.extend(h, 9)
    alloc.reserve(h, 5, rounding="device")
    alloc.release(h, tokens=[range(9), range(9)])
    alloc.check(device=True)
    assert loaded() == [], f"an allocator on the CPU loaded {loaded()}"
    print("passed")
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_neither_import_nor_the_cpu_touches_cuda() -> None:
    assert run_python(TOUCHES_NOTHING) == "passed"


FORK = """
    import os
    import sgalloc

    def work():
        alloc = sgalloc.KVAllocator(100, 16, 4, 320, device="auto")
        assert alloc.device == "cpu"
        h = alloc.open(3)
        alloc.extend(h, [5, 100, 33])
        alloc.check(device=True)
        alloc.release(h)
        assert alloc.available() == 100

    before = sgalloc.KVAllocator(10, 4, 2, 40, device="cpu")
    held = before.open(2)
    before.extend(held, 5)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            before.decode(held)  # a copy of its own
            before.check(device=True)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work()
    assert before.committed(held).tolist() == [5, 5]
    print("passed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_import() -> None:
    # With no device visible "auto" falls back also where there is a GPU.
    assert run_python(FORK, CUDA_VISIBLE_DEVICES="") == "passed"


def test_a_hidden_gpu_is_one_line_too() -> None:
    """Whatever CuPy there is here, or none: the line names what to do."""
    line = run_python(
        """
        import sgalloc
        try:
            sgalloc.KVAllocator(10, 4, 2, 40, device="cuda")
        except ValueError as error:
            print(error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert "\n" not in line and "'cuda'" in line
    assert any(remedy in line for remedy in REMEDIES)
