"""SGLang beside sgalloc: what its side does, on a stand-in for CUDA and for SGLang's functions."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_cuda import Cuda, stand_in

from profiling.gpu import clock, layout, peer_sglang, sglang_engine
from sgalloc.bench import harness
from sgalloc.bench.harness import Effort, Summary
from sgalloc.bench.measured import Record
from sgalloc.bench.twins import Shape

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


def found_of(*records: Record) -> layout.Found:
    return layout.Found({"records": [record.to_json() for record in records], "notes": []})


def flat(value: float) -> Summary:
    return Summary(3, value, value, value)


@pytest.mark.parametrize(("theirs", "word"), [(300.0, "met"), (299.0, "missed")])
def test_the_peer_is_held_against_the_aim(theirs: float, word: str) -> None:
    at = {"batch": 256, "page": 64, "until": harness.RETURN}
    found = found_of(
        Record("reserve", peer_sglang.MINE, at, flat(20.0), "all steps"),
        Record("reserve", peer_sglang.SGLANG, at, flat(theirs), "all steps"),
    )
    table = peer_sglang.step_table(found, "reserve", "EAGLE step")
    assert "256: 15×" in table.verdict and table.verdict.endswith(f"{word}.")


def test_without_sglang_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert "set SGL_SRC" in str(sglang_engine.load(None))
    assert "without sglang in it" in str(sglang_engine.load(str(tmp_path)))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise OSError('broken')", encoding="utf-8")
    said = sglang_engine.load(str(tmp_path))
    assert said == "SGLang is not measured: importing it failed with OSError: broken"
    sys.modules.pop("sglang", None)


class Pool:
    """A pool that does what SGLang's does, as far as `Engine` calls it."""

    lost = 0

    def __init__(self, slots: int, size: int, *_: Any) -> None:
        self.pages, self.size = slots // size, size
        self.clear()

    def clear(self) -> None:
        self.free, self.group = list(range(1, self.pages + 1)), None

    def available_size(self) -> int:
        return len(self.free) * self.size

    def alloc(self, slots: int) -> Any:
        ids = np.array([self.free.pop() for _ in range(slots // self.size)])
        import torch

        return torch.tensor(np.add.outer(ids * self.size, np.arange(self.size)).reshape(-1))

    def free_group_begin(self) -> None:
        self.group = []

    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        assert start_pos == 0 and self.group is not None
        self.group += (slots[:: self.size] // self.size).tolist()

    def free_group_end(self) -> None:
        assert self.group is not None and len(set(self.group)) == len(self.group)
        self.free += self.group[self.lost :]


def stand_in_peer(torch: Any) -> sglang_engine.Peer:
    def watermarks(requests: Any, *, reserve: int, page_size: int) -> Any:
        cur = [r.kv.kv_allocated_len for r in requests]
        marks = [-(-(r.kv.kv_committed_len + reserve) // page_size) * page_size for r in requests]
        nxt = [max(a, b) for a, b in zip(cur, marks, strict=True)]
        return cur, nxt, sum(nxt) - sum(cur)

    def alloc_for_spec_decode(tree: Any, rows: Any, **k: Any) -> None:
        pool = tree.token_to_kv_pool_allocator
        assert k["cur_kv_lens"].tolist() == k["cur_kv_lens_cpu"].tolist()
        for request, nxt in zip(k["reqs"], k["nxt_kv_lens_cpu"].tolist(), strict=True):
            pool.alloc(nxt - request.kv.kv_allocated_len)
            request.kv.kv_allocated_len = nxt
        assert k["num_needed_tokens"] >= 0 and rows.req_to_token.shape[0] == len(k["reqs"]) + 1

    def alloc_for_decode_default(batch: Any, tokens: int) -> None:
        size = batch.tree_cache.page_size
        opened = int((batch.seq_lens_cpu % size == 0).sum())
        batch.tree_cache.token_to_kv_pool_allocator.alloc(opened * size)
        batch.req_to_token_pool.write((batch.req_pool_indices, batch.seq_lens), 7)
        batch.req_to_token_pool.alloc_aux_to_lengths()
        batch.maybe_evict_swa()

    allocation = types.SimpleNamespace(
        alloc_for_spec_decode=alloc_for_spec_decode,
        alloc_for_decode_default=alloc_for_decode_default,
    )

    def single(slots: int, *_: Any) -> Pool:
        return Pool(slots, 1)

    return sglang_engine.Peer("0", allocation, watermarks, Pool, single, None, torch)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("what", ["reserve", "decode", "release"])
def test_both_sides_do_the_same_work(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, what: str, page: int
) -> None:
    peer = stand_in_peer(pytest.importorskip("torch"))
    engine = sglang_engine.Engine

    def on_cpu(peer: Any, shape: Shape, pages: int, base: Any) -> sglang_engine.Engine:
        return engine(peer, shape, pages, base, "cpu")

    monkeypatch.setattr(peer_sglang, "Engine", on_cpu)
    monkeypatch.setattr(peer_sglang, "EFFORT", Effort(0.0, least=40, warm_up=2, block=2))
    cell = peer_sglang.Cell(what, 3, page)
    records, compared = peer_sglang.measure_cell(clock.Gpu(), cell, peer, "cuda")
    assert compared == 1
    found = found_of(*records)
    label = "" if what == "release" else "all steps"
    counts = {
        side: {r["at"]["until"]: r["n"] for r in found.where(what, side, label=label)}
        for side in (peer_sglang.MINE, peer_sglang.SGLANG)
    }
    assert counts[peer_sglang.MINE] == counts[peer_sglang.SGLANG]
    assert set(counts[peer_sglang.MINE]) == {harness.RETURN, harness.DONE}
    if what == "release":
        monkeypatch.setattr(Pool, "lost", 1)
        with pytest.raises(RuntimeError, match="pages are free in sgalloc"):
            peer_sglang.measure_cell(clock.Gpu(), cell, peer, "cuda")
