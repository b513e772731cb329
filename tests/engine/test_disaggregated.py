"""Prefill in one process and decode in another: the same tokens, and every page comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import nodes
from gloo import run_ranks

SECONDS = 60  # what a stalled machine is given before the test is called hung


def test_two_processes_put_out_what_the_model_alone_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = (nodes.PREFILL, nodes.DECODE)
    sent, received = run_ranks(nodes.run, ranks, tmp_path, monkeypatch, SECONDS)
    assert "error" not in received, received["error"]
    assert "error" not in sent, sent["error"]
    for mode in nodes.RUNS:
        states = received[mode]["states"]
        assert states.count("done") > nodes.COUNT / 2 and "aborted" in states
        assert set(states) == {"done", "aborted"}
        assert sent[mode]["finished"] >= states.count("done")
        assert received[mode]["matched"], "some pages need not be sent"
    assert received["forgets"] > 0, "pages that went back before they had left were not found"
