"""Digests compared over torch.distributed: every rank hears which ranks differ."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gloo import run_ranks
from trust import mirrors
from trust.walk import make

import sgalloc
from sgalloc.distributed import apart, assert_mirrored


def test_ranks_that_differ_from_most_are_named() -> None:
    assert apart({0: "a"}) == apart({3: "a", 5: "a"}) == ("a", {})
    for digests, common, others in (
        ({0: "a", 1: "b"}, "a", {1: "b"}),
        ({7: "b", 2: "a"}, "a", {7: "b"}),
        ({0: "a", 1: "b", 2: "b"}, "b", {0: "a"}),
        ({0: "a", 1: "b", 2: "c", 3: "b"}, "b", {0: "a", 2: "c"}),
    ):
        assert apart(digests) == (common, others)
        error = sgalloc.MirrorDiverged(common, others)
        assert isinstance(error, sgalloc.AllocError)
        assert (error.others, error.record, error.calls) == (others, None, {})
        for rank, digest in others.items():
            assert f"rank {rank} ({digest})" in str(error)


def test_the_message_is_one_line_that_survives_a_pickle() -> None:
    calls = {0: "open of 3 requests", 1: "open of 3 requests", 2: "open of 4 requests"}
    named = sgalloc.MirrorDiverged("a" * 32, {2: "b" * 32}, 17, calls)
    assert str(named) == (
        "rank 2 (bbbbbbbb) differs from the other ranks (aaaaaaaa): their journals part at record "
        "17: ranks 0, 1: open of 3 requests; rank 2: open of 4 requests"
    )
    for error in (named, sgalloc.MirrorDiverged("a", {1: "b", 2: "c"}, noted=True)):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and "\n" not in str(error)
        assert again.calls == error.calls and again.others == error.others


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


@pytest.mark.parametrize(("ranks", "run"), [(2, mirrors.run_two), (3, mirrors.run_calls)])
def test_the_first_call_that_differs_is_named_on_every_rank(
    ranks: int, run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_ranks(run, range(ranks), tmp_path, monkeypatch, mirrors.SECONDS)
    mirrors.assert_named(found)
