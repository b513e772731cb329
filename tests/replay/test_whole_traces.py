"""Both published traces, whole, under pressure: nothing is lost, nothing leaks, all ends well."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.engine import Engine, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.requests import Workload
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


# The reserve of this EAGLE tree is 128 tokens a request at page size 1, 896 at 16, 2,048 at 64;
# headroom keeps a part of it free, lest each admission sends another request back.
RUNS = {
    "azure-plain-page1": azure(1, 110_000, 8_192),
    "azure-plain-page16": azure(16, 110_000, 8_192),
    "azure-plain-page64": azure(64, 110_000, 8_192),
    "azure-eagle-page1": azure(1, 120_000, 16_384, headroom=64, **EAGLE),
    "azure-eagle-page16": azure(16, 160_000, 16_384, headroom=96, **EAGLE),
    "azure-eagle-page64": azure(64, 300_000, 24_576, headroom=256, **EAGLE),
    "mooncake-plain-page1": mooncake(1, 1_400_000, 16_384),
    "mooncake-plain-page16": mooncake(16, 1_400_000, 16_384),
    "mooncake-plain-page64": mooncake(64, 1_400_000, 16_384),
    "mooncake-dflash-page1": mooncake(1, 1_000_000, 24_576, **DFLASH),
    "mooncake-dflash-page16": mooncake(16, 1_000_000, 24_576, **DFLASH),
    "mooncake-dflash-page64": mooncake(64, 1_000_000, 24_576, **DFLASH),
}


class Watched(Engine):
    """An engine that keeps accounts of its own, beside the recording."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.checks = 0
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


class Outcome(NamedTuple):
    """A run of one of `RUNS`."""

    workload: Workload
    options: Options
    recording: Recording
    watched: Watched


@cache
def whole(path: Path) -> Workload:
    return read_trace(path)


@pytest.fixture(scope="module", params=RUNS)
def outcome(request, traces_dir) -> Outcome:
    trace, page_size, pool, more = RUNS[request.param]
    workload = whole(traces_dir / trace)
    options = Options(num_pages=pool // page_size, page_size=page_size, **(COMMON | more))
    watched = Watched(workload, options)
    return Outcome(workload, options, watched.run(), watched)


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
    assert waited.sum() == totals.pressed_steps
    assert filled[waited].min() / outcome.options.num_pages == totals.waiting_pressure
    assert (pages["queued"][waited] > 0).all()
    assert set(filled + pages["free"] + pages["quarantined"]) == {outcome.options.num_pages}
    assert (pages["committed"] <= pages["allocated"]).all()
    assert pages["running"].max() == totals.peak_running


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
    prefills = len(recording.verbs["publish"])
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
