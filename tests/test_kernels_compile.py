"""The kernels compile without a warning for every architecture, with NVRTC and with nvcc.

No GPU and no driver are needed. NVRTC comes with the extra `kernels`; nvcc with a CUDA toolkit.
"""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_on_cpu.emulator import missing

from profiling.gpu import contiguity, strategies
from profiling.gpu.strided import FILL
from sgalloc.cuda_source import cuda_dir, read_text
from sgalloc.device.kernels import DEBUGGING, SOURCES, read_kernels

# A100, RTX 3090, RTX 4090 and L40, H100 and H200, B200, RTX 5090.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
WARNED = 'extern "C" __global__ void warned(int* out) { int unused; out[0] = 1; }\n'
each_architecture = pytest.mark.parametrize("sm", ARCHITECTURES)
each_source = pytest.mark.parametrize("name", [*SOURCES, *DEBUGGING])
_INCLUDE = re.compile(r'#include "([^"]+)"')
_KERNEL = re.compile(r'^extern "C" __global__ void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(', re.M)


def inlined(*names: str) -> list[str]:
    """The lines of the sources but blank ones, each header put in once, where it is first met."""
    seen: set[str] = set()
    lines: list[str] = []

    def take(name: str) -> None:
        for line in read_text(name).splitlines():
            header = _INCLUDE.match(line)
            if header is None:
                if line and line != "#pragma once":
                    lines.append(line)
            elif header[1] not in seen:
                seen.add(header[1])
                take(header[1])

    for name in names:
        take(name)
    return lines


def kernels_of(*names: str) -> set[str]:
    return {kernel for name in names for kernel in _KERNEL.findall(read_text(name))}


def nvrtc(text: str, sm: int) -> tuple[bytes, str]:
    """The cubin and the log of a compilation as CuPy asks for it."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        missing("no cuda.core to compile with NVRTC: install the extra 'kernels'")
    from cuda.core import Program, ProgramOptions

    from cuda import pathfinder

    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:
        missing("no NVRTC to compile with: install the extra 'kernels'")
    options = ProgramOptions(
        arch=f"sm_{sm}", std="c++17", device_as_default_execution_space=True, name="kernels.cu"
    )
    log = io.StringIO()
    program = Program(text, "c++", options)
    try:
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
    finally:
        program.close()


def nvcc(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run nvcc; a warning is an error."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH to compile the kernels with")
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True)
    unknown = {f"sm_{sm}" for sm in ARCHITECTURES} - set(known.stdout.split())
    if unknown:
        pytest.skip(f"this nvcc is too old for {', '.join(sorted(unknown))}")
    command = ["nvcc", "-std=c++17", "-Werror=all-warnings", *options, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def path_of(name: str) -> Path:
    return Path(str(cuda_dir() / name))


def test_every_source_is_known_to_the_host() -> None:
    there = {entry.name for entry in cuda_dir().iterdir() if entry.name.endswith(".cu")}
    assert there == {*SOURCES, *DEBUGGING}
    assert len(there) == len(SOURCES) + len(DEBUGGING)
    assert kernels_of(*DEBUGGING) == {"poison_rows"}
    assert kernels_of(*SOURCES) == {
        "assign_pages",
        "assign_mapped",
        "assign_both",
        "assign_both_mapped",
        "replay_pages",
        "replay_both",
        "page_watermarks",
        "export_pages",
        "row_digest",
    }


def test_the_host_compiles_the_sources_with_each_header_once() -> None:
    text = read_kernels()
    assert "#include" not in text
    assert [line for line in text.splitlines() if line] == inlined(*SOURCES)


@each_architecture
def test_nvrtc_compiles_what_the_host_gives_it(sm: int) -> None:
    cubin, log = nvrtc(read_kernels(), sm)
    assert log.strip("\0\n") == ""
    assert cubin.startswith(b"\x7fELF")
    for kernel in kernels_of(*SOURCES):
        assert kernel.encode() in cubin


@each_source
def test_nvrtc_compiles_each_source_alone(name: str) -> None:
    """What one source does not use of the headers is no fault."""
    _, log = nvrtc("\n".join(inlined(name)), 90)
    declared_but_never_referenced = "177"
    assert set(re.findall(r"warning #(\d+)-D", log)) <= {declared_but_never_referenced}


def test_nvrtc_would_tell_of_a_warning() -> None:
    _, log = nvrtc(WARNED, 90)
    assert "unused" in log


@each_source
def test_nvcc_compiles_for_every_architecture_without_a_spill(name: str) -> None:
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    done = nvcc(path_of(name), "-fatbin", "-o", "/dev/null", "-Xptxas=-v", *targets)
    assert done.returncode == 0, done.stderr
    report = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        done.stderr,
        re.DOTALL,
    )
    wanted = {(kernel, str(sm)) for kernel in kernels_of(name) for sm in ARCHITECTURES}
    assert {(kernel, sm) for kernel, sm, *_ in report} == wanted
    for kernel, sm, stack, stores, loads, _ in report:
        assert (stack, stores, loads) == ("0", "0", "0"), f"{kernel} spills on sm_{sm}"


def test_nvcc_compiles_the_fill_of_the_benchmarks(tmp_path: Path) -> None:
    source = tmp_path / "strided.cu"
    source.write_text(FILL, encoding="utf-8")
    done = nvcc(source, "-ptx", "-o", "/dev/stdout", "-arch=compute_80")
    assert done.returncode == 0, done.stderr
    assert re.search(r"st\.global\.v4\.[bu]32", done.stdout)
    assert not re.search(r"\bld\.global", done.stdout), "a fill reads nothing"


def test_nvcc_compiles_the_other_kernels_of_the_benchmarks(tmp_path: Path) -> None:
    source = tmp_path / "questions.cu"
    source.write_text(strategies._SCATTER + contiguity._GATHER, encoding="utf-8")
    done = nvcc(source, "-ptx", "-o", "/dev/stdout", "-arch=compute_80")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bld\.global\.nc\.v4\.[bu]32", done.stdout)
    assert re.search(r"\bst\.global\.v4\.[bu]32", done.stdout)


def test_nvcc_would_refuse_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "warned.cu"
    source.write_text(WARNED, encoding="utf-8")
    done = nvcc(source, "-cubin", "-o", "/dev/null", "-arch=sm_90")
    assert done.returncode != 0
    assert "unused" in done.stderr


def ptx_of(name: str) -> str:
    done = nvcc(path_of(name), "-ptx", "-o", "/dev/stdout", "-arch=compute_80")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_words_of_the_scan_are_read_and_written_in_order_on_a_gpu() -> None:
    """The CPU compiles the other branch of load_word and store_word."""
    ptx = ptx_of("page_watermarks.cu")
    assert "ld.relaxed.gpu.global.u64" in ptx
    assert "st.relaxed.gpu.global.u64" in ptx


@pytest.mark.parametrize("name", ["assign_pages.cu", "page_watermarks.cu"])
def test_aligned_pages_are_written_16_bytes_at_a_time(name: str) -> None:
    assert re.search(r"st\.global\.v4\.[bu]32", ptx_of(name))
