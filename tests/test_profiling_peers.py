"""Peers on the CPU: what our side of the bridge does, on stand-ins for vLLM and mini-sglang."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from profiling import minisgl_engine, peer_minisgl, peer_vllm, peers, vllm_engine
from profiling.layout import Found
from sgalloc.bench.harness import SUBJECT, Summary
from sgalloc.bench.measured import Record
from sgalloc.bench.twins import Shape

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")


@pytest.fixture(autouse=True)
def importing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a load puts in the way of imports goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "minisgl")]:
        del sys.modules[name]


class Request:
    """A request as vLLM's."""

    def __init__(
        self, name: str, prompt: list[int], sampling: Any, pooling: None, *, block_hasher: Any
    ) -> None:
        self.request_id, self.tokens = name, prompt
        self.num_computed_tokens = 0
        assert sampling.max_tokens >= len(prompt) and pooling is None
        self.hashed = block_hasher is not None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append_output_token_ids(self, ids: int | list[int]) -> None:
        self.tokens += [ids] if isinstance(ids, int) else ids


class Manager:
    """A manager that does what vLLM's does, as far as `Engine` calls it."""

    lost = 0
    short = 0

    def __init__(self, config: Any, **options: Any) -> None:
        self.size = options["scheduler_block_size"]
        assert self.size == options["hash_block_size"] == config.groups[0].spec.block_size
        self.caching, self.most = options["enable_caching"], options["max_model_len"]
        self.free_blocks = config.num_blocks - 1  # one of them is for nothing
        self.held: dict[str, int] = {}
        self.block_pool = types.SimpleNamespace(
            get_num_free_blocks=lambda: self.free_blocks - self.lost
        )

    def get_computed_blocks(self, request: Request) -> tuple[str, int, int]:
        assert self.caching and request.hashed
        return "none", 0, 0

    def get_block_ids(self, name: str) -> tuple[list[int]]:
        return ([0] * (self.held[name] - self.short),)

    def allocate_slots(
        self,
        request: Request,
        tokens: int,
        hits: int = 0,
        blocks: Any = None,
        num_lookahead_tokens: int = 0,
    ) -> Any:
        assert hits == 0 and (blocks is None or self.caching)
        upto = min(request.num_computed_tokens + tokens + num_lookahead_tokens, self.most)
        had = self.held.get(request.request_id, 0)
        wanted = max(had, -(-upto // self.size))
        if wanted - had > self.free_blocks:
            return None
        self.free_blocks -= wanted - had
        self.held[request.request_id] = wanted
        return wanted - had

    def free(self, request: Request) -> None:
        self.free_blocks += self.held.pop(request.request_id)


def vllm() -> vllm_engine.Peer:
    """A stand-in for all of vLLM."""
    interface = types.SimpleNamespace(
        FullAttentionSpec=lambda **k: types.SimpleNamespace(**k),
        KVCacheGroupSpec=lambda layers, spec: types.SimpleNamespace(layers=layers, spec=spec),
        KVCacheConfig=lambda num_blocks, kv_cache_tensors, kv_cache_groups: types.SimpleNamespace(
            num_blocks=num_blocks, groups=kv_cache_groups
        ),
    )
    utils = types.SimpleNamespace(
        init_none_hash=lambda f: None, get_request_block_hasher=lambda size, f: f
    )
    sampling = types.SimpleNamespace
    hashing = types.SimpleNamespace(sha256=abs)
    torch = types.SimpleNamespace(bfloat16="bfloat16")
    return vllm_engine.Peer("0", Manager, interface, utils, Request, sampling, hashing, torch)


@pytest.mark.parametrize("cache", ["off", "on"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("what", [peer_vllm.DECODE, peer_vllm.SPECULATE, peer_vllm.ADMIT])
def test_vllm_does_the_same_work(
    monkeypatch: pytest.MonkeyPatch, what: str, page: int, cache: str
) -> None:
    cell = peers.Cell(what, 3, page, cache)
    answer = peer_vllm.measure([cell], vllm(), seconds=0.0)
    assert answer.states_compared == 1 and answer.notes[0] == "vLLM 0"
    found = Found([record.to_json() for record in answer.records])
    names = {peer_vllm.ADMIT, peer_vllm.FREE} if what == peer_vllm.ADMIT else {what}
    assert {name for name, _ in found.names()} == names
    for name in names:
        counts = {found.one(name, s, batch=3, page=page)["n"] for s in (SUBJECT, peer_vllm.VLLM)}
        assert len(counts) == 1
    shown = peer_vllm.tables(found)
    assert len(shown) == len(names) and all("as long as sgalloc" in t.verdict for t in shown)
    monkeypatch.setattr(Manager, "lost", 1)
    with pytest.raises(RuntimeError, match=r"pages are free in sgalloc, .* in vLLM"):
        peer_vllm.measure_cell(cell, vllm(), seconds=0.0)
    monkeypatch.setattr(Manager, "lost", 0)
    monkeypatch.setattr(Manager, "short", 1)
    with pytest.raises(RuntimeError, match=r"request 0 has .* pages in sgalloc"):
        peer_vllm.measure_cell(cell, vllm(), seconds=0.0)


def test_a_start_again_leaves_both_sides_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Cell, "shape", property(lambda c: Shape(c.batch, c.page, 1000, 1024)))
    for what in (peer_vllm.DECODE, peer_vllm.SPECULATE):
        (record, *_) = peer_vllm.measure_cell(peers.Cell(what, 3, 16), vllm(), seconds=0.02)
        assert record.summary.n > 24  # more steps than the rows have room for


def test_a_prompt_that_is_cached_already_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manager, "get_computed_blocks", lambda *_: ("some", 16, 0))
    with pytest.raises(RuntimeError, match="16 tokens of a new prompt"):
        peer_vllm.measure_cell(peers.Cell(peer_vllm.ADMIT, 3, 16, "on"), vllm(), seconds=0.0)
    engine = vllm_engine.Engine(vllm(), Shape(2, 16, 1000, 1024), 3, caching=False)
    engine.make([[7] * 100] * 2)
    with pytest.raises(RuntimeError, match="pool is too small"):
        engine.admit()


class CacheManager:
    """A manager that does what mini-sglang's does, as far as `Engine` calls it."""

    lost = 0

    def __init__(self, pages: int, size: int, table: Any, type: str) -> None:
        assert type == "naive"
        self.size, self.table = size, table
        self.free_slots = np.arange(pages - self.lost) * size

    def allocate_paged(self, requests: Any) -> None:
        for request in requests:
            first = -(-request.cached_len // self.size)
            count = -(-request.device_len // self.size) - first
            ids, self.free_slots = self.free_slots[:count], self.free_slots[count:]
            slots = (ids[:, None] + np.arange(self.size)).reshape(-1)
            start = first * self.size
            self.table[request.table_idx, start : start + slots.size] = slots


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("what", [peer_minisgl.DECODE, peer_minisgl.ADMIT])
def test_minisgl_does_the_same_work(monkeypatch: pytest.MonkeyPatch, what: str, page: int) -> None:
    torch = types.SimpleNamespace(zeros=lambda shape, dtype: np.zeros(shape, dtype), int32=np.int32)
    peer = minisgl_engine.Peer("a file", CacheManager, torch)
    cell = peers.Cell(what, 3, page)
    answer = peer_minisgl.measure([cell], peer, seconds=0.0)
    assert answer.states_compared == 1 and answer.notes[0] == "mini-sglang: a file"
    found = Found([record.to_json() for record in answer.records])
    sides = (SUBJECT, peer_minisgl.MINISGL)
    assert len({found.one(what, side, batch=3)["n"] for side in sides}) == 1
    assert len(peer_minisgl.tables(found)) == 1
    monkeypatch.setattr(CacheManager, "lost", 1)
    with pytest.raises(RuntimeError, match=r"pages are free in sgalloc, .* in mini-sglang"):
        peer_minisgl.measure_cell(cell, peer, seconds=0.0)


def test_minisgl_is_run_from_two_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for folder in ("scheduler", "utils"):
        (tmp_path / "minisgl" / folder).mkdir(parents=True)
        # A package's own file is not run: it would import an engine.
        (tmp_path / "minisgl" / folder / "__init__.py").write_text("raise OSError", "utf-8")
    (tmp_path / "minisgl" / "__init__.py").write_text("raise OSError", "utf-8")
    said = minisgl_engine.load(str(tmp_path))
    assert "mini-sglang is not measured: importing it failed with ModuleNotFoundError" in str(said)
    assert not any(name.split(".")[0] == "minisgl" for name in sys.modules)
    (tmp_path / "minisgl" / "utils" / "misc.py").write_text("def div_ceil(a, b): ...", "utf-8")
    (tmp_path / "minisgl" / "scheduler" / "cache.py").write_text(
        "import torch\n"
        "from minisgl.core import Req\n"
        "from minisgl.kvcache import create_prefix_cache\n"
        "from minisgl.utils import div_ceil\n"
        "class CacheManager:\n"
        "    def __init__(self):\n"
        "        self.cache = create_prefix_cache(device=None, type='naive')\n"
        "        self.made = torch.empty(3, dtype=torch.int64, pin_memory=True)\n",
        "utf-8",
    )
    peer = minisgl_engine.load(str(tmp_path))
    assert not isinstance(peer, str), peer
    assert peer.version.startswith("scheduler/cache.py with SHA-256 ")
    made = peer.manager()
    assert made.cache is None and made.made.shape == (3,)


def test_without_a_peer_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "without vllm in it" in str(vllm_engine.load(str(tmp_path)))
    assert "set MINISGL_SRC" in str(minisgl_engine.load(None))
    assert "without minisgl in it" in str(minisgl_engine.load(str(tmp_path)))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('broken')", encoding="utf-8")
    said = str(vllm_engine.load(str(tmp_path)))
    assert "importing it failed with" in said and "set VLLM_SRC" in said
    for script, variable in ((peer_vllm, vllm_engine), (peer_minisgl, minisgl_engine)):
        result = CliRunner().invoke(
            script.main, ["--quick"], env={variable.VARIABLE: str(tmp_path / "none")}
        )
        assert result.exit_code == 1
        assert result.output.startswith("Error: ") and "is not measured" in result.output
        assert result.output.count("\n") == 1


def test_a_folder_tells_the_version_that_its_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, folder, version in (
        ("1.2.3", "vllm-0.9.0", "1.2.3"),
        ("dev", "vllm-0.9.0", "0.9.0"),
        ("dev", "files", "of unknown version"),
    ):
        module: Any = types.ModuleType("vllm.version")
        module.__version__ = said
        monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.version", module)
        assert vllm_engine._version(str(tmp_path.parent / folder)) == version


def test_a_ratio_is_of_medians() -> None:
    at = peers.Cell("decode", 4, 16).at
    records = [
        Record("decode", side, at, Summary(3, took, took, took))
        for side, took in ((SUBJECT, 2.0), (peer_vllm.VLLM, 5.0))
    ]
    found = Found([record.to_json() for record in records])
    shown = peers.table(found, "decode", "t", "m", peer_vllm.VLLM)
    assert shown.rows[0][-1] == "2.50×" and shown.verdict.startswith("vLLM takes 2.50× to 2.50×")
