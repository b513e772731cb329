"""What moves KV between two GPUs, with two CPU pools and gloo in the place of NCCL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu.two_nodes import assert_moved, run_both

pytest.importorskip("torch", reason="torch moves the bytes")


def test_extents_are_sent_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    if os.path.isdir("/sys/class/net/lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    assert_moved(run_both("gloo", tmp_path), ["cpu", "cpu"])
