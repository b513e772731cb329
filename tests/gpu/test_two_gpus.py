"""Two GPUs: KV that moves over NCCL by the page lists of both sides, and ranks that mirror."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks
from gpu.two_nodes import assert_moved, run_both
from trust import mirrors


@pytest.fixture
def two_gpus(torch: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"this test needs two GPUs, and there is {torch.cuda.device_count()}")


@pytest.mark.usefixtures("two_gpus")
def test_kv_arrives_on_the_other_gpu_where_its_table_says(tmp_path: Path) -> None:
    assert_moved(run_both("nccl", tmp_path), ["cuda:0", "cuda:1"])


@pytest.mark.usefixtures("two_gpus")
def test_mirrored_ranks_are_told_the_first_call_that_differs_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_ranks(mirrors.run_gpus, range(2), tmp_path, monkeypatch, 2 * mirrors.SECONDS)
    mirrors.assert_named(found)
