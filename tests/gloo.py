"""Processes that talk over gloo, started afresh and ended whatever happens."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def run_ranks(
    run: Callable[[int, str, Any], None],
    ranks: Sequence[int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
) -> list[dict[str, Any]]:
    """What ``run(rank, store, end)`` sent through its ``end``, in the order of ``ranks``.

    Args:
        seconds: what a stalled machine is given before a rank is called hung.
    """
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    if os.path.isdir("/sys/class/net/lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for rank in ranks:
        end, other = context.Pipe(duplex=False)
        process = context.Process(
            target=run, args=(rank, str(folder / "store"), other), daemon=True
        )
        process.start()
        other.close()
        processes.append(process)
        ends.append(end)
    try:
        found = [_outcome(end, seconds) for end in ends]
        for process in processes:
            process.join(seconds)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return found


def _outcome(end: Any, seconds: int) -> dict[str, Any]:
    if not end.poll(seconds):
        pytest.fail(f"a rank said nothing for {seconds} s")
    found = end.recv()
    assert isinstance(found, dict), found
    return found
