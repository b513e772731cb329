"""replay_pages on the CPU: steps staged for a graph that is replayed without the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.emulator import Emulator, HostWrite, kernels
from cuda_on_cpu.launches import Replays
from cuda_on_cpu.tables import Growth, Table, expect_growth, some_launch


@pytest.fixture(scope="module")
def cpu() -> Iterator[Emulator]:
    with Emulator(kernels()) as emulator:
        yield emulator


def test_replays_apply_one_staged_step_each(cpu: Emulator) -> None:
    rng = np.random.default_rng(10)
    for size in (1, 4, 6):
        table = Table(4, 40 * size, size)
        replays = Replays(table, ring=3, stride=1024)
        applied, held = 0, [0] * 4
        waiting: list[tuple[list[Growth], Any]] = []
        for turn in range(14):
            while len(waiting) < 3 and rng.random() < 0.5:
                rows = rng.permutation(4)[: rng.integers(1, 4)].tolist()
                growths = [Growth(row, held[row], 1 + turn % 2) for row in rows]
                for growth in growths:
                    held[growth.row] += growth.new
                ids = replays.stage(growths, rng, runs=bool(rng.integers(2)))
                waiting.append((growths, ids))
            if waiting:
                growths, ids = waiting.pop(0)
                expect_growth(table, growths, ids)
                applied += 1
            replays.replay(cpu, tile=2, **some_launch(rng))
            replays.check(applied)


def test_replays_count_on_past_32_bits(cpu: Emulator) -> None:
    rng = np.random.default_rng(11)
    table = Table(1, 40, 4)
    replays = Replays(table, ring=4, stride=1024, before=2**32 - 2)
    for turn in range(4):
        growths = [Growth(0, turn, 1)]
        expect_growth(table, growths, replays.stage(growths, rng))
        replays.replay(cpu, grid=2, threads=32, tile=1)
        replays.check(2**32 - 1 + turn)


@pytest.mark.parametrize("together", [False, True], ids=["one-by-one", "together"])
def test_a_step_staged_during_a_replay_is_applied_as_a_whole_or_left_to_the_next(
    cpu: Emulator, together: bool
) -> None:
    """The host may stage at any moment: here at each that the threads of a replay tell apart."""
    rng = np.random.default_rng(12)
    growths = [Growth(0, 0, 4)]
    how: dict[str, Any] = {"grid": 2, "threads": 32, "tile": 1}
    if together:
        # The first block is held up between its first look and its verdict.
        how |= {"resident": 2, "stall": True, "seed": 2}
    steps, at = 1, 0
    while at < steps:
        table = Table(1, 40, 4)
        replays = Replays(table, ring=4, stride=1024)
        ids = replays.stage(growths, rng)
        offset, serial = replays.serial_of(1)
        replays.steps.data[offset : offset + 4] = 0
        write = HostWrite(at, replays.steps, offset, serial)
        steps = replays.replay(cpu, **how, host_write=write).steps
        applied = int(replays.applied.data[0])
        if applied:
            expect_growth(table, growths, ids)
        replays.check(applied)
        replays.steps.data[offset : offset + 4] = np.frombuffer(serial, np.uint8)
        replays.replay(cpu, **how)
        expect_growth(table, growths, ids)
        replays.check(1)
        at += 1
    assert at > 64
