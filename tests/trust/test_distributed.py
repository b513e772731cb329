"""Digests compared over torch.distributed: every rank hears which ranks differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gloo import run_ranks
from trust import mirrors
from trust.walk import make

import sgalloc
from sgalloc.distributed import assert_mirrored, compare


def test_ranks_that_differ_from_most_are_named() -> None:
    compare({0: "a"})
    compare({3: "a", 5: "a"})
    for digests, others in (
        ({0: "a", 1: "b"}, {1: "b"}),
        ({7: "b", 2: "a"}, {7: "b"}),
        ({0: "a", 1: "b", 2: "b"}, {0: "a"}),
        ({0: "a", 1: "b", 2: "c", 3: "b"}, {0: "a", 2: "c"}),
    ):
        with pytest.raises(sgalloc.MirrorDiverged) as caught:
            compare(digests)
        assert caught.value.others == others
        assert isinstance(caught.value, sgalloc.AllocError)
        for rank, digest in others.items():
            assert f"rank {rank} ({digest})" in str(caught.value)


def test_nothing_imports_torch_before_it_is_asked_for() -> None:
    import subprocess

    code = "import sys, sgalloc.distributed; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_process_group_the_remedy_is_named() -> None:
    pytest.importorskip("torch.distributed")
    with pytest.raises(RuntimeError, match="init_process_group"):
        assert_mirrored(make("plain"))


def test_three_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_ranks(mirrors.run, range(mirrors.RANKS), tmp_path, monkeypatch, mirrors.SECONDS)
    equal = found[0]["walked"]
    assert equal[0] == "mirrored" and len(equal[1]) == 32
    assert "refused" in found[1]
    for rank in range(mirrors.RANKS):
        assert found[rank]["walked"] == found[rank]["after a refusal"] == equal
        message, others = found[rank]["diverged"]
        assert others == [2] and "rank 2" in message and "rank 1" not in message
    assert [found[rank]["the others"] for rank in (0, 1)] == [equal] * 2
    # Of two that differ the lower is taken for right, by its number among all ranks.
    assert [found[rank]["with it"][1] for rank in (1, 2)] == [[2]] * 2
