"""The emulation itself: what it computes, and that it tells of what a GPU would not forgive."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import (
    HERE,
    Buffer,
    BuildFailed,
    Emulator,
    HostWrite,
    LaunchFailed,
    build,
    require_compiler,
    require_tsan,
)
from numpy.typing import NDArray


@lru_cache(maxsize=1)
def samples() -> Path:
    require_compiler()
    return build().program("samples", [HERE / "samples.cu"])


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(samples()) as emulator:
        yield emulator


@pytest.fixture(scope="module")
def racing() -> Iterator[Emulator]:
    require_tsan()
    with Emulator(build(tsan=True).program("samples", [HERE / "samples.cu"])) as emulator:
        yield emulator


def ints(count: int, dtype: Any = np.int32) -> Buffer:
    return Buffer(np.zeros(count, dtype), writable=True)


def test_warp_operations_are_those_of_the_manual(cpu: Emulator) -> None:
    up, across, votes = ints(128 * 32), ints(128 * 32), ints(128 * 32, np.uint32)
    cpu.launch("warp_operations", 2, 64, [up, across, votes], seed=2, resident=2)
    at, step = np.indices((128, 32))
    lane = at % 32
    from_below = np.where(lane >= step, at - step, at)
    assert (up.data == (1000 * step + from_below).ravel()).all()
    assert (across.data == (1000 * step + (at & ~31) + (lane ^ step)).ravel()).all()
    bits = (np.arange(128)[:, None] >> np.arange(32) % 5 & 1).reshape(4, 32, 32)
    words = (bits << np.arange(32)[:, None]).sum(axis=1)
    assert (votes.data == words.repeat(32, axis=0).ravel()).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_counts_the_threads_of_its_block(cpu: Emulator, seed: int) -> None:
    asked = np.array([[0, 1, 2, 0, 7, -1, 2**31 - 1, 2] * 5, [0] * 40, [2] * 40], np.int32)
    counts = ints(120)
    arguments = [Buffer(asked), counts]
    cpu.launch("count_by_barrier", 3, 40, arguments, seed=seed, resident=2)
    wanted = 1000 * (asked != 0).sum(axis=1) + (asked == 2).sum(axis=1)
    assert counts.data.tolist() == wanted.repeat(40).tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("resident", [1, 3])
def test_each_block_has_its_own_shared_memory(cpu: Emulator, seed: int, resident: int) -> None:
    out = ints(5 * 100)
    cpu.launch("reverse_by_barrier", 5, 100, [out], seed=seed, resident=resident)
    assert (out.data.reshape(5, 100) == 10 * np.arange(500).reshape(5, 100)[:, ::-1]).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_barrier_shows_in_every_order_of_the_threads(cpu: Emulator, seed: int) -> None:
    out = ints(100)
    cpu.launch("reverse_without_barrier", 1, 100, [out], seed=seed)
    assert (out.data != 10 * np.arange(100)[::-1]).any()


def test_shared_memory_is_poisoned_before_each_block(cpu: Emulator) -> None:
    for _ in range(2):
        out = ints(64, np.uint32)
        cpu.launch("read_unwritten", 1, 64, [out])
        assert out.data[0] == 7
        assert (out.data[1:] == 0xA5A5A5A5).all()


@pytest.mark.parametrize(
    ("kernel", "threads", "arguments", "message"),
    [
        ("some_return_early", 30, [], "divergence: .*10 threads have returned, 20 threads wait"),
        ("barriers_in_branches", 32, [], "divergence: .*5 threads wait.*27 threads wait"),
        ("count_and_barrier", 32, [ints(1)], "divergence: .*5 threads wait at __syncthreads_count"),
        ("lanes_diverge", 32, [ints(32)], "divergence: .*16 threads wait at __shfl_up_sync"),
        ("mask_of_half", 32, [ints(32)], "mask 0xffff is not that of a whole warp"),
        ("mask_of_half", 33, [ints(33)], "(mask|last warp of 33 threads is not whole)"),
        ("wait_in_vain", 32, [Buffer(np.zeros(1, np.uint64))], "no thread gets on: .*32 threads"),
        ("write_at", 1, [ints(4), np.int64(4)], "heap-buffer-overflow"),
        ("write_at", 1, [ints(4), np.int64(-1)], "heap-buffer-overflow"),
        ("write_at", 1, [None, np.int64(0)], "null pointer"),
        ("write_at", 1, [Buffer(np.zeros(4, np.int32)), np.int64(3)], "only read, but byte 12"),
        (
            "write_at",
            1,
            [Buffer(np.zeros(4, np.int32), writable=True, lead=16), np.int64(-2)],
            "written in front of it",
        ),
        (
            "read_at",
            1,
            [Buffer(np.zeros(40, np.int32), holes=[(8, 64)]), np.int64(7), ints(1)],
            "use-after-poison",
        ),
        ("past_shared", 32, [np.int32(100)], "global-buffer-overflow"),
        ("four_at", 1, [ints(8), np.int64(1)], "(not 16-byte aligned|misaligned address)"),
        (
            "four_at",
            1,
            [Buffer(np.zeros(8, np.int32), writable=True, lead=8), np.int64(0)],
            "(not 16-byte aligned|misaligned address)",
        ),
        ("four_at", 1, [ints(8), np.int32(0)], "takes pq, not pi"),
        ("no_such_kernel", 1, [], "no such kernel"),
    ],
)
def test_what_a_gpu_would_not_forgive_fails_with_a_message(
    cpu: Emulator, kernel: str, threads: int, arguments: list[Any], message: str
) -> None:
    with pytest.raises(LaunchFailed, match=message):
        cpu.launch(kernel, 1, threads, arguments)
    # The next launch is none the worse for it.
    out = ints(8)
    cpu.launch("four_at", 1, 1, [out, np.int64(4)])
    assert out.data.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


def test_an_endless_loop_ends_in_a_failure() -> None:
    with (
        Emulator(samples(), timeout_s=0.5) as emulator,
        pytest.raises(LaunchFailed, match=r"did not end in 0\.5 s"),
    ):
        emulator.launch("loop_for_ever", 1, 1, [ints(1)])


def test_a_buffer_may_stand_for_the_end_of_a_large_array(cpu: Emulator) -> None:
    out = Buffer(np.zeros(4, np.int32), writable=True, bias=4 * 5_000_000_000)
    cpu.launch("write_at", 1, 1, [out, np.int64(5_000_000_002)])
    assert out.data.tolist() == [0, 0, 1, 0]


def test_blocks_that_wait_for_each_other_have_to_run_together(cpu: Emulator) -> None:
    words = ints(6, np.uint64)
    stats = cpu.launch("wait_for_the_next", 6, 32, [words], resident=6, seed=2)
    assert words.data.tolist() == [1] * 6
    assert stats.spins > 0
    words = ints(6, np.uint64)
    cpu.launch("wait_for_the_next", 6, 32, [words], order=range(5, -1, -1))
    for resident in (1, 5):
        with pytest.raises(LaunchFailed, match="no thread gets on"):
            cpu.launch("wait_for_the_next", 6, 32, [ints(6, np.uint64)], resident=resident)


@pytest.mark.parametrize("resident", [1, 4])
def test_blocks_start_in_the_order_asked_for(cpu: Emulator, resident: int) -> None:
    count, seen = ints(1, np.uint32), ints(4)
    order = [2, 0, 3, 1]
    cpu.launch("count_blocks", 4, 32, [count, seen], order=order, resident=resident, seed=2)
    assert count.data.tolist() == [4]
    assert sorted(seen.data.tolist()) == [0, 1, 2, 3]
    if resident == 1:
        assert np.argsort(seen.data).tolist() == order


def test_a_host_may_write_while_a_kernel_runs(cpu: Emulator) -> None:
    """Without the write this launch fails: no thread gets on."""
    word = Buffer(np.zeros(1, np.uint64))
    one = np.uint64(1).tobytes()
    cpu.launch("wait_in_vain", 1, 1, [word], host_write=HostWrite(20, word, 0, one))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("int unused; out[0] = 1;", "unused"),
        ("if (threadIdx.x < out[0]) out[0] = 1;", "signedness"),
        ("out[0] = min(out[0], 1LL);", "deleted"),
        ("out[0] = max(out[0], 1u);", "deleted"),
    ],
)
def test_a_source_that_a_gpu_may_take_otherwise_is_not_built(body: str, message: str) -> None:
    require_compiler()
    source = build().folder / "warned.cu"
    source.write_text(
        f'extern "C" __global__ void warned(int* out) {{\n    {body}\n}}\n', encoding="utf-8"
    )
    with pytest.raises(BuildFailed, match=message):
        build().program("warned", [source])


def test_tsan_knows_a_race_between_blocks_from_an_order(racing: Emulator) -> None:
    data, word, out = ints(1), ints(1, np.uint64), ints(1)
    racing.launch("hand_over", 2, 32, [data, word, out], resident=2, seed=2)
    assert out.data.tolist() == [5]
    racing.launch("both_write", 1, 32, [ints(1)])
    with pytest.raises(LaunchFailed, match="data race"):
        racing.launch("both_write", 2, 32, [ints(1)], resident=2, seed=2)


def test_a_16_byte_store_is_checked_without_ubsan_too(racing: Emulator) -> None:
    with pytest.raises(LaunchFailed, match="not 16-byte aligned"):
        racing.launch("four_at", 1, 1, [ints(8), np.int64(1)])


def test_tsan_knows_a_race_within_a_block_from_a_barrier(racing: Emulator) -> None:
    wanted: NDArray[Any] = 10 * np.arange(200).reshape(2, 100)[:, ::-1]
    asked, counts = Buffer(np.full(200, 2, np.int32)), ints(200)
    racing.launch("count_by_barrier", 2, 100, [asked, counts], resident=2, seed=2)
    assert (counts.data == 100_100).all()
    out = ints(200)
    racing.launch("reverse_by_barrier", 2, 100, [out], resident=2, seed=2)
    assert (out.data.reshape(2, 100) == wanted).all()
    with pytest.raises(LaunchFailed, match="data race"):
        racing.launch("reverse_without_barrier", 1, 100, [ints(100)])
