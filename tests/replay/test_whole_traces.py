"""Both published traces, whole, under pressure: nothing is lost, nothing leaks, all ends well."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.disaggregated import Disaggregated
from sgalloc.replay.engine import Engine
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.requests import Workload
from sgalloc.replay.summary import summarise
from sgalloc.replay.traces import read_trace
from sgalloc.sizing import SpecConfig

pytestmark = pytest.mark.slow

AZURE = "azure2023_code.csv"
MOONCAKE = "mooncake_conversation.jsonl.xz"
ROWS = {AZURE: 8_819, MOONCAKE: 12_031}

# Arrivals are squeezed until the pool is what limits, and prefill is five times as fast as the
# default, since then decoding, where requests outgrow the pool, is the larger part of a step.
FAST = StepTime(per_prefill_token=1e-5)
COMMON = {
    "admit": "chunk",
    "headroom": 0,
    "running_limit": 512,
    "step_time": FAST,
    "device": "cpu",
}
EAGLE = {
    "spec": SpecConfig("eagle", steps=5, topk=8, draft_tokens=64),
    "acceptance": Acceptance(5, mean=3.03),
}
CHAIN = {
    "spec": SpecConfig("eagle", steps=3, topk=1, draft_tokens=4),
    "acceptance": Acceptance(3, mean=2.65),
    "overlap": True,
}
DFLASH = {
    "spec": SpecConfig("dflash", draft_tokens=16),
    "acceptance": Acceptance(15, mean=4.24),
}


class Setting(NamedTuple):
    """A trace, the page size, the tokens that the pool holds, and how the engine runs."""

    trace: str
    page_size: int
    pool: int
    options: dict[str, Any]


def azure(page_size: int, pool: int, chunk: int, **options: Any) -> Setting:
    pace = {"speed": 60.0, "chunk": chunk, "check_every": 50}
    return Setting(AZURE, page_size, pool, pace | options)


def mooncake(page_size: int, pool: int, chunk: int, **options: Any) -> Setting:
    pace = {"speed": 20.0, "chunk": chunk, "check_every": 250}
    return Setting(MOONCAKE, page_size, pool, pace | options)


# The reserve of this EAGLE tree is 128 tokens a request at page size 1, 512 at 16, 2,048 at 64.
# It is there in the step alone, and admission leaves it free.
RUNS = {
    "azure-plain-page1": azure(1, 110_000, 8_192),
    "azure-plain-page16": azure(16, 110_000, 8_192),
    "azure-plain-page64": azure(64, 110_000, 8_192),
    "azure-eagle-page1": azure(1, 120_000, 16_384, **EAGLE),
    "azure-eagle-page16": azure(16, 150_000, 16_384, **EAGLE),
    "azure-eagle-page64": azure(64, 250_000, 24_576, **EAGLE),
    "mooncake-plain-page1": mooncake(1, 1_400_000, 16_384),
    "mooncake-plain-page16": mooncake(16, 1_400_000, 16_384),
    "mooncake-plain-page64": mooncake(64, 1_400_000, 16_384),
    "mooncake-dflash-page1": mooncake(1, 1_000_000, 24_576, **DFLASH),
    "mooncake-dflash-page16": mooncake(16, 1_000_000, 24_576, **DFLASH),
    "mooncake-dflash-page64": mooncake(64, 1_000_000, 24_576, **DFLASH),
    "azure-chain-overlap-page16": azure(16, 90_000, 8_192, **CHAIN),
    "mooncake-chain-overlap-page64": mooncake(64, 1_400_000, 16_384, **CHAIN),
    "mooncake-eagle-page16": mooncake(16, 1_400_000, 16_384, **EAGLE),
    "azure-window-page1": azure(1, 110_000, 8_192, window=SlidingWindow(1_024, 60_000)),
    "mooncake-window-page64": mooncake(
        64, 1_400_000, 16_384, window=SlidingWindow(4_096, 350_000 // 64, evict_every=256)
    ),
}


def two_nodes(prefill: int, page_size: int, base: float, **options: Any) -> dict[str, Any]:
    """A prefill node of so many tokens, fast enough that decoding is what limits."""
    pace = StepTime(base=base, per_prefill_token=2e-6)
    nodes = Disaggregation(prefill // page_size)
    return {"disaggregated": nodes, "admit": "prompt", "step_time": pace} | options


NODES = {
    "azure-nodes-page1": azure(1, 80_000, 8_192, **two_nodes(100_000, 1, 40e-3)),
    "azure-nodes-chain-page16": azure(
        16, 80_000, 32_768, **two_nodes(200_000, 16, 120e-3, abort_rate=0.05, **CHAIN)
    ),
    "mooncake-nodes-window-dflash-page64": mooncake(
        64,
        1_300_000,
        65_536,
        **two_nodes(1_000_000, 64, 60e-3, window=SlidingWindow(4_096, 1_000_000 // 64), **DFLASH),
    ),
}


SPARSE = {
    "azure-sparse-chain-page16": azure(
        16, 30_000, 8_192, sparse=Sparse(4, 512, 16), prefix_cache=False, **CHAIN
    ),
    "mooncake-sparse-dflash-page64": mooncake(
        64, 300_000, 16_384, sparse=Sparse(4, 2_048, 16), prefix_cache=False, **DFLASH
    ),
}


class Watching(Engine):
    """An engine that keeps accounts of its own, beside the recording."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.checks = 0
        self.prefills = 0
        self.waited: list[bool] = []
        self.settled = 0
        """Tokens that were settled in requests when they finished or were sent back."""
        self.lengths: list[int] = []
        """Known tokens of each of these: prompt and all that was put out."""
        self._spy()

    def _spy(self) -> None:
        alloc = self.alloc
        check, release = alloc.check, alloc.release

        def counted(**options: Any) -> None:
            self.checks += 1
            check(**options)

        def noted(x: Any, *, tokens: Any = None, after: Any = None) -> None:
            # Without tokens a request was only looked at, and does not run yet.
            if tokens is not None:
                self.settled += int(alloc.committed(x).sum())
                self.lengths += [len(ids) for ids in tokens]
            release(x, tokens=tokens, after=after)

        alloc.check, alloc.release = counted, noted

    def _sample(self, waiting: bool) -> None:
        self.waited.append(waiting)
        super()._sample(waiting)

    def _publish(self, *args: Any) -> None:
        self.prefills += 1
        super()._publish(*args)


class WatchedNodes(Watching, Disaggregated):
    """The same on two nodes; it notes every length that is sent, too."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.sent: list[int] = []
        preallocate = self.alloc.preallocate

        def noted(lengths: list[int], *args: Any, **more: Any) -> Any:
            handles = preallocate(lengths, *args, **more)
            self.sent += lengths
            return handles

        self.alloc.preallocate = noted


class Outcome(NamedTuple):
    """A run of one of `RUNS`, or of `NODES`."""

    workload: Workload
    options: Options
    recording: Recording
    watched: Watching


@cache
def whole(path: Path) -> Workload:
    return read_trace(path)


def ran(setting: Setting, traces_dir: Path, engine: type[Watching]) -> Outcome:
    workload = whole(traces_dir / setting.trace)
    size = setting.page_size
    options = Options(num_pages=setting.pool // size, page_size=size, **(COMMON | setting.options))
    watched = engine(workload, options)
    return Outcome(workload, options, watched.run(), watched)


@pytest.fixture(scope="module", params=RUNS)
def outcome(request, traces_dir) -> Outcome:
    return ran(RUNS[request.param], traces_dir, Watching)


@pytest.fixture(scope="module", params=NODES)
def nodes(request, traces_dir) -> Outcome:
    return ran(NODES[request.param], traces_dir, WatchedNodes)


def test_every_request_finishes_and_everything_comes_back(outcome):
    recording, watched = outcome.recording, outcome.watched
    assert recording.violation is None
    assert (recording.leaked_pages, recording.leaked_rows) == (0, 0)
    assert recording.sound and not recording.interrupted
    totals = recording.totals
    assert totals.finished == totals.requests == ROWS[outcome.workload.name]
    assert (totals.aborted, totals.refused, outcome.workload.skipped) == (0, 0, 0)
    stats = watched.alloc.stats()
    assert stats.groups["full"].free == outcome.options.num_pages
    assert all(group.free == group.total for group in stats.groups.values())
    assert stats.rows.free == stats.rows.total == outcome.options.running_limit
    # Throughout, not at the end alone.
    assert watched.checks == totals.steps // outcome.options.check_every + 2
    assert watched.checks > 20


def test_the_pool_is_full_while_requests_wait(outcome):
    totals, samples = outcome.recording.totals, outcome.recording.samples
    assert totals.pressed_steps >= 100
    assert totals.waiting_pressure >= 0.9
    assert totals.retractions >= 100
    assert totals.evicted >= 1_000
    assert totals.peak_running >= 64
    # The same from the samples, one of which stands for each turn of the engine.
    pages = {name: np.array(values) for name, values in samples.items()}
    waited = np.array(outcome.watched.waited)
    filled = pages["owned"] + pages["locked"] + pages["evictable"]
    share = filled / outcome.options.num_pages
    for pool in outcome.recording.pools.values():
        window = {name: np.array(values) for name, values in pool.samples.items()}
        beside = window["owned"] + window["locked"] + window["evictable"]
        assert set(beside + window["free"]) == {pool.num_pages}
        share = np.maximum(share, beside / pool.num_pages)
    assert waited.sum() == totals.pressed_steps
    assert share[waited].min() == totals.waiting_pressure
    assert (pages["queued"][waited] > 0).all()
    assert set(filled + pages["free"] + pages["quarantined"]) == {outcome.options.num_pages}
    assert (pages["committed"] <= pages["allocated"]).all()
    # A step with a tree is sampled once it is prepared, when some may have been sent back.
    most = pages["running"].max()
    assert most == totals.peak_running or (outcome.options.tree and most < totals.peak_running)


def test_every_token_is_accounted_for(outcome):
    recording, watched = outcome.recording, outcome.watched
    totals, requests = recording.totals, outcome.workload.requests
    prompts = sum(request.prompt_len for request in requests)
    outputs = sum(request.output_len for request in requests)
    assert totals.prompt_tokens == prompts
    assert totals.decoded == outputs
    # Each request finished once, with all of its tokens; all other stays ended in a retraction.
    stays, known = watched.lengths, sum(watched.lengths)
    assert len(stays) == totals.finished + totals.retractions
    assert not Counter(r.prompt_len + r.output_len for r in requests) - Counter(stays)
    # A stay looks up its prompt and what was put out in stays before.
    sent_back = known - (prompts + outputs)
    assert totals.looked_up == prompts + sent_back
    # What is looked up is found or computed, unless the request is sent back before.
    prefills = watched.prefills
    assert len(recording.verbs["publish"]) <= prefills
    assert totals.unshared or len(recording.verbs["publish"]) == prefills
    assert totals.finished <= prefills <= len(stays)
    cut_off = known - watched.settled - prefills
    assert cut_off >= 0 and (cut_off > 0) is (prefills < len(stays))
    assert totals.hit + totals.prefilled == totals.looked_up - cut_off
    # What is settled was found, computed by prefill, or put out by a decode step.
    assert watched.settled == totals.hit + totals.prefilled + totals.decoded - prefills
    assert totals.hit > 0
    if outcome.options.acceptance is None:
        assert (totals.accepted, totals.speculative_steps) == (0, 0)
        return
    assert totals.accepted == totals.decoded - prefills
    # A request's last step is cut at its goal.
    mean = totals.accepted / totals.speculative_steps
    assert 1.0 < mean < outcome.options.acceptance.mean


# What each feature promises


def test_what_a_feature_costs_and_saves(outcome):
    options, totals = outcome.options, outcome.recording.totals
    found = summarise(outcome.recording)
    if options.speculates:
        tail = totals.reserved_tail / totals.speculative_steps
        slack = options.page_size
        # A request that was sent down by its goal holds what it held.
        assert options.reserve <= tail < options.reserve + slack + 16
    assert (totals.moves > totals.speculative_steps / 4) is options.tree
    assert (totals.discarded_steps > 0) is options.overlap
    if options.window is None:
        assert found["window"]["tokens"] is None
        return
    window = found["window"]
    assert window["held_peak_pages"] <= options.window.num_pages
    assert window["evicted_pages"] > 10_000
    assert window["saved_mean_pages"] > 0
    assert totals.window_retractions > 100


# Two nodes


def test_on_two_nodes_every_request_ends_and_everything_comes_back(nodes):
    recording, watched, options = nodes.recording, nodes.watched, nodes.options
    assert recording.violation is None and recording.sound and not recording.interrupted
    totals = recording.totals
    assert totals.finished + totals.aborted == totals.requests == ROWS[nodes.workload.name]
    assert (totals.aborted > 0) is (options.abort_rate > 0)
    assert totals.refused == 0
    for alloc in (watched.alloc, watched.entry):
        stats = alloc.stats()
        assert all(group.free == group.total for group in stats.groups.values())
        assert stats.rows.free == stats.rows.total
    assert watched.checks == totals.steps // options.check_every + 2
    assert watched.checks > 20


def test_on_two_nodes_the_decode_node_is_full_while_prompts_wait(nodes):
    recording, totals = nodes.recording, nodes.recording.totals
    assert totals.pressed_steps >= 100
    assert totals.waiting_pressure >= 0.9
    assert totals.retractions > 5 and totals.prefill_retractions == 0
    assert totals.evicted >= 1_000 and recording.pools["prefill"].evicted >= 1_000
    assert totals.peak_running >= 64
    pages = {name: np.array(values) for name, values in recording.samples.items()}
    parts = ("owned", "locked", "evictable", "quarantined", "pinned", "free")
    assert set(sum(pages[name] for name in parts)) == {nodes.options.num_pages}
    assert pages["pinned"].max() > 0
    for pool in recording.pools.values():
        assert set(sum(np.array(values) for values in pool.samples.values())) == {pool.num_pages}


def test_on_two_nodes_every_token_is_accounted_for(nodes):
    totals, watched, options = nodes.recording.totals, nodes.watched, nodes.options
    requests = nodes.workload.requests
    assert totals.matched_tokens + totals.sent_tokens == sum(watched.sent)
    assert totals.transfers == len(watched.sent)
    assert totals.sent_pages >= totals.extents > 0
    assert totals.sent_pages * options.page_size >= totals.sent_tokens
    assert totals.live <= totals.transfers - totals.transfer_aborts
    if options.abort_rate:
        assert totals.transfer_aborts > 0 and totals.reclaimed > 0
        return
    assert totals.live == totals.transfers
    assert totals.decoded == sum(request.output_len for request in requests)
    assert totals.prompt_tokens == sum(request.prompt_len for request in requests)
    assert totals.hit + totals.prefilled == totals.looked_up
    # Those sent back, and nobody else, are sent again.
    longer = sum(request.output_len > 1 for request in requests)
    assert totals.transfers >= longer
    assert watched.prefills == totals.requests + totals.retractions
    # What was settled on the decode node was received there, or put out.
    if options.acceptance is not None:
        mean = totals.accepted / totals.speculative_steps
        assert 1.0 < mean < options.acceptance.mean


# Sparse requests


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_requests_all_finish_under_pressure(name, traces_dir):
    _, options, recording, watched = ran(SPARSE[name], traces_dir, Watching)
    totals, requests = recording.totals, whole(traces_dir / SPARSE[name].trace).requests
    assert recording.sound and not recording.interrupted
    assert totals.finished == totals.requests == ROWS[SPARSE[name].trace]
    assert all(group.free == group.total for group in watched.alloc.stats().groups.values())
    assert watched.checks == totals.steps // options.check_every + 2
    assert watched.checks > 20
    assert totals.decoded == sum(request.output_len for request in requests)
    assert totals.retractions > 100
    # More pages are held than the device has, and most of them are not there.
    found = summarise(recording)["sparse"]
    assert found["held_peak_pages"] <= options.num_pages
    assert found["dense_mean_pages"] > options.num_pages
    assert found["saved_share"] > 0.4
    assert found["thinned_pages"] > 100_000
    assert totals.peak_running >= 64
