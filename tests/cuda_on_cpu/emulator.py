"""Builds kernels for the CPU, and launches them there: see README.md beside it."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
CUDA = HERE.parent.parent / "cuda"
COMMON = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{HERE}"]
ASAN = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fsanitize-sections=shared_memory",
]
TSAN = ["-fsanitize=thread"]
# A failed launch ends its process, so nothing after the first report matters.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=5:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=6:report_thread_leaks=0",
}
TIMEOUT_S = 30.0
_NO_ARRAY = 2**64 - 1
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(')


class LaunchFailed(AssertionError):
    """A launch ended in a report of a sanitizer or of the emulation, or did not end."""


class BuildFailed(AssertionError):
    """g++ refused a source, with its message."""


class Stats(NamedTuple):
    """What a launch met.

    Attributes:
        spins: loads of a word that the same thread had loaded just before.
        empty_ballots: ballots that nobody voted for.
        steps: how often a thread was let go on.
    """

    spins: int
    empty_ballots: int
    steps: int


@dataclass(eq=False)
class Buffer:
    """An array for a kernel, in an allocation of its own of exactly its size.

    Attributes:
        data: what it holds; a writable one takes what the kernel left there.
        writable: whether the kernel may change it; if not, a change fails the launch.
        lead: bytes by which it starts past an address divisible by 64.
        bias: bytes by which the pointer that the kernel gets lies before `data`, so that large
            offsets can be tried without the memory in between.
        holes: byte ranges that nobody may touch.
        links: byte offsets at which the address of another buffer is to be put.
    """

    data: np.ndarray[Any, Any]
    writable: bool = False
    lead: int = 0
    bias: int = 0
    holes: Sequence[tuple[int, int]] = ()
    links: dict[int, Buffer] = field(default_factory=dict)


class HostWrite(NamedTuple):
    """A host's write of `value` at a byte offset, when threads have gone on `at` times."""

    at: int
    buffer: Buffer
    offset: int
    value: bytes


def missing(what: str) -> NoReturn:
    """Skip the test for want of a tool; where SGALLOC_REQUIRE_KERNELS is set it fails."""
    if os.environ.get("SGALLOC_REQUIRE_KERNELS"):
        pytest.fail(f"{what}, and SGALLOC_REQUIRE_KERNELS asks for it")
    pytest.skip(what)


def require_compiler() -> None:
    """Skip the test where there is no g++."""
    if shutil.which("g++") is None:
        missing("no g++ on PATH to run the kernels on the CPU with")


def require_tsan() -> None:
    """Skip the test where ThreadSanitizer does not start, as on kernels with much ASLR."""
    require_compiler()
    done = subprocess.run([str(_empty_program())], capture_output=True, text=True, check=False)
    if done.returncode:
        report = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        pytest.skip(f"ThreadSanitizer does not start here: {report}")


@lru_cache(maxsize=1)
def _empty_program() -> Path:
    program = build(tsan=True).folder / "empty"
    program.with_suffix(".cpp").write_text("int main() {}\n", encoding="utf-8")
    _compile([["g++", *TSAN, str(program.with_suffix(".cpp")), "-o", str(program)]])
    return program


@lru_cache(maxsize=1)
def kernels() -> Path:
    """The program that serves every kernel of the sources, and the probes; made once a test run."""
    require_compiler()
    return build().program("kernels", [*sorted(CUDA.glob("*.cu")), HERE / "probes.cu"])


@lru_cache(maxsize=2)
def build(tsan: bool = False) -> Build:
    """The emulation's own objects, made once a test run."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Build(folder, tsan)


def _compile(commands: Sequence[Sequence[str]]) -> None:
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise BuildFailed(output)


class Build:
    """The emulation's own objects for one sanitizer, to be linked with kernels."""

    def __init__(self, folder: Path, tsan: bool = False) -> None:
        self.folder = folder
        self.tsan = tsan
        # Under TSan only kernels are instrumented, so that no race is the emulation's own.
        flags = ["-DUNDER_TSAN"] if tsan else ASAN
        self._objects = [str(folder / "launch.o"), str(folder / "blocks.o")]
        _compile(
            [
                ["g++", *COMMON, *flags, "-c", str(HERE / f"{name}.cpp"), "-o", target]
                for name, target in zip(["launch", "blocks"], self._objects, strict=True)
            ]
        )

    def program(self, name: str, sources: Iterable[Path], cuda: Path = CUDA) -> Path:
        """A program that serves launches of every kernel in `sources`; `cuda` has the headers."""
        flags = [f"-I{cuda}", *(TSAN if self.tsan else ASAN)]
        if cuda != CUDA:  # a planted fault: built in haste, and may leave a parameter without use
            flags += ["-O0", "-Wno-unused"]
        commands, objects = [], list(self._objects)
        for source in sources:
            kernels = _KERNEL.findall(source.read_text(encoding="utf-8"))
            assert kernels, f"no kernel found in {source}"
            stub = self.folder / f"{name}-{source.stem}.cpp"
            stub.write_text(
                f'#include "cuda_on_cpu.h"\n#include "{source}"\n'
                + "".join(f"REGISTER_KERNEL({kernel})\n" for kernel in kernels),
                encoding="utf-8",
            )
            objects.append(str(stub.with_suffix(".o")))
            commands.append(["g++", *COMMON, *flags, "-c", str(stub), "-o", objects[-1]])
        _compile(commands)
        program = self.folder / name
        _compile([["g++", *flags, *objects, "-o", str(program)]])
        return program


def _word(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def _text(value: bytes) -> bytes:
    return _word(len(value)) + value


class Emulator:
    """One program that serves launches; it is started again after a launch that failed."""

    def __init__(self, program: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._program = program
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            assert self._process.stdin and self._process.stdout and self._errors
            self._process.kill()
            # What the program had not read yet cannot be written any more.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # Closed with the program: it has to outlive this call.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [str(self._program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | ENVIRONMENT,
            )
        return self._process

    def launch(
        self,
        kernel: str,
        grid: int,
        threads: int,
        arguments: Sequence[Buffer | np.integer[Any] | None],
        *,
        order: Sequence[int] | None = None,
        resident: int = 1,
        seed: int = 0,
        stall: bool = False,
        host_write: HostWrite | None = None,
    ) -> Stats:
        """Run a kernel; its writable buffers then hold what it wrote.

        Args:
            kernel: its name.
            grid: blocks.
            threads: threads of a block.
            arguments: in the kernel's order: buffers, None for a null pointer, sized integers.
            order: the blocks, in the order in which they start; ascending if None.
            resident: how many blocks run at a time.
            seed: of the draw of the thread that goes on; 0 and 1 modulo 4 take them in order,
                upwards and downwards.
            stall: whether the block that comes first to an atomic goes on only when nobody
                else can.
            host_write: a write from outside while the kernel runs.

        Raises:
            LaunchFailed: with the report.
        """
        buffers: list[Buffer] = []

        def number(buffer: Buffer) -> int:
            if buffer not in buffers:
                buffers.append(buffer)
                for other in buffer.links.values():
                    number(other)
            return buffers.index(buffer)

        packed = []
        for argument in arguments:
            if argument is None:
                packed.append(_word(ord("p")) + _word(_NO_ARRAY))
            elif isinstance(argument, Buffer):
                packed.append(_word(ord("p")) + _word(number(argument)))
            else:
                kind = {4: "i", 8: "q"}[argument.dtype.itemsize]
                packed.append(_word(ord(kind)) + _word(int(argument)))
        order = range(grid) if order is None else order
        assert sorted(order) == list(range(grid)), "order is no permutation of the blocks"
        parts = [_text(kernel.encode()), *map(_word, (grid, threads, resident, seed, stall))]
        parts += [_word(grid), *map(_word, order), _word(len(buffers))]
        parts += [
            _word(b.lead) + _word(b.bias) + _word(b.writable) + _text(b.data.tobytes())
            for b in buffers
        ]
        for b in buffers:
            parts.append(_word(len(b.links)))
            parts += [_word(at) + _word(number(other)) for at, other in b.links.items()]
            parts.append(_word(len(b.holes)))
            parts += [_word(start) + _word(stop) for start, stop in b.holes]
        parts += [_word(len(packed)), *packed]
        if host_write is None:
            parts.append(_word(_NO_ARRAY))
        else:
            parts += [_word(host_write.at), _word(number(host_write.buffer))]
            parts += [_word(host_write.offset), _text(host_write.value)]
        answer = self._exchange(b"".join(parts))
        stats = Stats(*struct.unpack_from("<QQQ", answer))
        at = 24
        for b in buffers:
            if b.writable:
                shape, dtype, size = b.data.shape, b.data.dtype, b.data.nbytes
                b.data[...] = np.frombuffer(answer[at : at + size], dtype).reshape(shape)
                at += size
        assert at == len(answer)
        return stats

    def _exchange(self, request: bytes) -> bytes:
        process = self._start()
        assert process.stdin and process.stdout and self._errors
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        answer, size = b"", -1
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(_word(len(request)) + request)
            process.stdin.flush()
            head = process.stdout.read(8)
            if len(head) == 8:
                (size,) = struct.unpack("<Q", head)
                answer = process.stdout.read(size)
        timer.cancel()
        if len(answer) == size:
            return answer
        process.wait()
        self._errors.seek(0)
        report = self._errors.read().decode(errors="replace")
        self.close()
        if late.is_set():
            report = f"the launch did not end in {self._timeout_s} s"
        raise LaunchFailed(report or f"the program ended with {process.returncode}")


def mutated(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the CUDA sources in which the only `old` of one file is `new`."""
    shutil.copytree(CUDA, folder)
    text = (CUDA / file).read_text(encoding="utf-8")
    there = text.count(old)
    assert there == 1, f"{file} holds {old!r} {there} times: plant this fault where it is now"
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return folder
