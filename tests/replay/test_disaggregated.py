"""The replay on two nodes: what is sent, when it is live, and what comes back on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from replay.engine_support import MOST_STEPS, PAGE, SECOND, column, plain, proven, req

from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime, TransferTime
from sgalloc.replay.disaggregated import Disaggregated
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.requests import Workload
from sgalloc.replay.summary import summarise
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig

# Two seconds and a half at least, so that a transfer is seen at the start of three steps.
SLOW = TransferTime(base=2.5, per_token=0.0, per_extent=0.0)


class Watched(Disaggregated):
    """Two nodes that fail where they make no progress, and note what is sent where."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.turns = 0
        self.writers: list[int] = []
        self.lengths: list[int] = []
        preallocate = self.alloc.preallocate

        def noted(lengths, writers=1, **more):
            handles = preallocate(lengths, writers, **more)
            self.lengths += lengths
            self.writers.append(writers)
            # Until all have acknowledged, nobody may grow it.
            assert self.alloc.receiving(int(handles[0])).writers == writers
            return handles

        self.alloc.preallocate = noted

    def _step(self) -> bool:
        self.turns += 1
        if self.turns > MOST_STEPS:
            pytest.fail(f"no end after {MOST_STEPS:,} turns: {self.recording.totals}")
        return super()._step()


def nodes(*requests, prefill_pages=50, writers=1, transfer_time=SLOW, **options) -> Watched:
    both = Disaggregation(prefill_pages, writers, transfer_time)
    usual = {"num_pages": 50, "page_size": PAGE, "device": "cpu", "disaggregated": both}
    chosen = usual | {"step_time": SECOND, "check_every": 1} | options
    return Watched(Workload("small", list(requests), 0, []), Options(**chosen))


def run(*requests, **options) -> Recording:
    return proven(nodes(*requests, **options).run())


def generated(workload: Workload, **options) -> Watched:
    usual = {
        "page_size": 16,
        "device": "cpu",
        "speed": 40.0,
        "check_every": 25,
        "chunk": 4_096,
        "headroom": 0,
        "step_time": StepTime(base=30e-3, per_prefill_token=2e-6),
    }
    return Watched(workload, Options(**(usual | options)))


def prefill_column(recording: Recording, name: str) -> list[float]:
    return list(recording.pools["prefill"].samples[name])


# One request


def test_one_request_step_by_step():
    watched = nodes(req(10, output=4))
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.prefill_steps, totals.steps, totals.prefilled) == (1, 3, 10)
    assert (totals.transfers, totals.live, totals.finished) == (1, 1, 1)
    assert (totals.sent_tokens, totals.sent_pages, totals.extents) == (10, 3, 1)
    # The first token came of the prefill, the others of the decode node.
    assert totals.decoded == 4
    # It is live after 2.5 to 5 seconds, and not before.
    assert 2.5 <= totals.live_seconds <= 5.0
    assert totals.virtual_seconds == 1.0 + totals.live_seconds + 3.0
    # While it is under way the decode node has pinned its pages, and the prefill node keeps
    # its own: two whole ones in the cache, locked, and one in quarantine.
    pinned, now = column(recording, "pinned"), column(recording, "time")
    sent = [at for at, pages in enumerate(pinned) if pages]
    assert sent and {pinned[at] for at in sent} == {3}
    assert {prefill_column(recording, "quarantined")[at] for at in sent} == {1}
    assert {prefill_column(recording, "locked")[at] for at in sent} == {2}
    assert all(1.0 <= now[at] < 1.0 + totals.live_seconds for at in sent)
    found = summarise(recording)["disaggregation"]
    assert (found["mean_run_pages"], found["pinned_peak_pages"]) == (3.0, 3.0)
    assert found["live_mean_seconds"] == found["live_most_seconds"] == totals.live_seconds
    assert prefill_column(recording, "evictable")[-1] == 2


def test_a_request_for_one_token_is_never_sent():
    totals = run(req(9, output=1)).totals
    assert (totals.finished, totals.transfers, totals.steps, totals.decoded) == (1, 0, 0, 1)


def test_a_prompt_is_prefilled_in_chunks_while_others_decode():
    # A chunk takes 5 seconds and more; the steps of the decode node keep to one.
    model = StepTime(base=1.0, per_prefill_token=1.0, per_request=0.0)
    quick = TransferTime(base=0.1, per_token=0.0, per_extent=0.0)
    watched = nodes(
        req(4, output=60), req(24, output=3, arrival=7.0), chunk=8, step_time=model,
        transfer_time=quick,
    )  # fmt: skip
    recording = proven(watched.run())
    assert recording.totals.prefill_steps == 1 + 3
    assert watched.lengths == [4, 24]
    took = np.diff(column(recording, "time"))
    decoding = np.array(column(recording, "committed")[:-1]) > 0
    assert decoding.sum() > 50
    assert took[decoding].max() == pytest.approx(1.0)


# Prefixes


def test_what_the_decode_node_has_is_not_sent_again():
    recording = run(
        req(12, output=5, blocks=[1, 2, 3]), req(14, output=5, arrival=30.0, blocks=[1, 2, 3, 4])
    )
    totals = recording.totals
    # The prefill node finds three blocks, too: all but the last two tokens.
    assert (totals.hit, totals.prefilled) == (12, 12 + 2)
    assert (totals.matched_tokens, totals.sent_tokens) == (12, 12 + 2)
    assert totals.sent_pages == 3 + 1


def test_without_a_prefix_cache_all_is_sent():
    totals = run(
        req(12, output=5, blocks=[1, 2, 3]),
        req(14, output=5, arrival=30.0, blocks=[1, 2, 3, 4]),
        prefix_cache=False,
    ).totals
    assert (totals.hit, totals.matched_tokens, totals.sent_tokens) == (0, 0, 26)


# Writers, aborts, deadlines


def test_it_is_live_when_the_last_writer_has_acknowledged():
    requests = [req(8, output=2, arrival=100.0 * at) for at in range(40)]
    watched = nodes(*requests, writers=4)
    totals = proven(watched.run()).totals
    assert set(watched.writers) == {1, 2, 3, 4}
    assert len(watched.recording.verbs["acknowledge"]) == sum(watched.writers)
    # The last of several is later than the one of one.
    alone = run(*requests, writers=1).totals
    assert totals.live_seconds > alone.live_seconds
    assert totals.live == alone.live == 40


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_those_that_end_under_way_give_everything_back(prefix_cache):
    watched = generated(
        generate("code", 300, seed=5),
        num_pages=4_000,
        abort_rate=0.6,
        prefix_cache=prefix_cache,
        disaggregated=Disaggregation(4_000, 3),
    )
    fates = np.bincount(watched._fate, minlength=4).tolist()
    totals = proven(watched.run()).totals
    assert min(fates) > 10
    # Those that lose nothing but a writer are prefilled again, and finish.
    assert totals.finished == 300 - totals.aborted
    assert totals.finished >= fates[3]
    assert 0 < totals.transfer_aborts <= fates[1] + fates[2]
    assert fates[3] <= totals.reclaimed <= fates[2] + fates[3]
    assert totals.transfers == totals.live + totals.transfer_aborts + fates[3]
    # Each of them was looked up again.
    stats = watched.alloc.stats()
    assert stats.groups["full"].pinned == 0
    assert watched.alloc.receiving(1) is None


def test_a_lost_writer_holds_its_pages_to_the_deadline_and_the_request_starts_again():
    watched = nodes(req(10, output=4))
    watched._fate[0] = 3
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.transfers, totals.live, totals.reclaimed, totals.finished) == (2, 1, 1, 1)
    # The token of the first prefill was put out already; the second adds one to it.
    assert watched.lengths == [10, 11]
    assert (totals.decoded, totals.steps) == (4, 2)
    # 8 times what it should take, and half a second.
    pinned = [at for at, pages in enumerate(column(recording, "pinned")) if pages]
    first = [column(recording, "time")[at] for at in pinned]
    assert first[0] == 1.0
    assert totals.virtual_seconds - totals.live_seconds >= 1.0 + 8 * 2.5 + 0.5


@pytest.mark.parametrize(("fate", "late"), [(1, False), (2, True)])
def test_an_aborted_transfer_comes_back_with_its_writers_or_its_deadline(fate, late):
    watched = nodes(req(10, output=4))
    watched._fate[0] = fate
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.aborted, totals.transfer_aborts, totals.live) == (1, 1, 0)
    assert totals.reclaimed == late
    assert (totals.virtual_seconds >= 1 + 8 * 2.5) is late


# Pressure


def test_one_sent_back_is_prefilled_and_sent_again():
    # Both grow from 2 pages to 4 of 6 on the decode node: one has to go, and comes again.
    watched = nodes(req(7, output=9), req(7, output=9), num_pages=6, headroom=0, prefix_cache=False)
    totals = proven(watched.run()).totals
    assert (totals.retractions, totals.prefill_retractions) == (1, 0)
    assert (totals.transfers, totals.live, totals.finished) == (3, 3, 2)
    assert totals.decoded == 18
    # When one needs its 4th page it has put out 6, and the other, which goes, no more.
    assert watched.lengths[:2] == [7, 7] and 7 + 1 < watched.lengths[2] <= 7 + 6
    assert totals.prefilled == 7 + 7 + watched.lengths[2]


def test_a_prompt_waits_for_pages_of_the_decode_node_and_holds_its_own():
    # 6 pages each, of which 4 and more are taken: the second waits until the first is done.
    recording = run(req(13, output=8), req(13, output=8), num_pages=6, prefix_cache=False)
    totals = recording.totals
    assert totals.pressed_steps > 0 and totals.retractions == 0
    assert totals.live_seconds_most > 5.0 + 7.0
    assert totals.finished == 2
    assert max(column(recording, "pinned")) == 4


def test_headroom_is_kept_free_for_each_that_is_received():
    requests = [req(8, output=2) for _ in range(4)]
    close = run(*requests, num_pages=9, headroom=0, prefix_cache=False)
    loose = run(*requests, num_pages=9, headroom=8, prefix_cache=False)
    assert max(column(close, "pinned")) == 8
    # Two pages each on top of their own two, and as much for the one that comes.
    assert max(column(loose, "pinned")) == 4


def test_a_small_prefill_node_lets_prompts_wait_and_none_is_lost():
    requests = [req(20, output=6) for _ in range(12)]
    small = run(*requests, prefill_pages=7, chunk=16)
    large = run(*requests, prefill_pages=70, num_pages=70, chunk=16)
    assert small.totals.finished == large.totals.finished == 12
    assert small.totals.virtual_seconds > large.totals.virtual_seconds
    assert small.totals.prefill_retractions == 0


SPECS = {
    "plain": {},
    "chain": {
        "spec": SpecConfig("eagle", 3, 1, 4),
        "acceptance": Acceptance(3, mean=2.2),
        "overlap": True,
    },
    "tree": {"spec": SpecConfig("eagle", 3, 2, 7), "acceptance": Acceptance(3, mean=2.2)},
    "block": {"spec": SpecConfig("dflash", draft_tokens=8), "acceptance": Acceptance(7, mean=4)},
}


@pytest.mark.parametrize("window", [None, SlidingWindow(256, 420, evict_every=32)])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_under_pressure_every_request_finishes(spec, prefix_cache, window):
    workload = generate("code", 150, seed=8)
    watched = generated(
        workload,
        num_pages=900,
        window=window,
        prefix_cache=prefix_cache,
        disaggregated=Disaggregation(1_500),
        **SPECS[spec],
    )
    recording = proven(watched.run())
    totals = recording.totals
    assert totals.finished == 150
    assert totals.decoded == sum(request.output_len for request in workload.requests)
    assert totals.pressed_steps > 20
    assert (
        totals.live == totals.transfers >= 150 - sum(r.output_len == 1 for r in workload.requests)
    )
    # Each transfer of a length begins where the decode node's match ends.
    assert totals.matched_tokens + totals.sent_tokens == sum(watched.lengths)
    pools = {"prefill": 1_500}
    if window is not None:
        pools |= {"window": 420, "prefill window": 420}
        assert totals.window_evicted > 0
    assert recording.pools.keys() == pools.keys()
    for name, pages in pools.items():
        parts = [np.array(values) for values in recording.pools[name].samples.values()]
        assert set(sum(parts)) == {pages}
    parts = ("owned", "locked", "evictable", "quarantined", "pinned", "free")
    assert set(sum(np.array(column(recording, name)) for name in parts)) == {900}
    assert max(column(recording, "pinned")) > 0


def test_the_tail_alone_has_window_pages_on_the_decode_node():
    recording = run(req(39, output=2), window=SlidingWindow(8, 30), prefix_cache=False, chunk=8)
    window = recording.pools["window"].samples
    assert max(column(recording, "pinned")) == 10
    # The page floor of 39 - 8 is 28, so three pages of the ten.
    assert max(window["pinned"]) == 3
    assert recording.totals.finished == 1


# The whole run


def seeded(seed: int) -> dict[str, object]:
    watched = generated(
        generate("chat", 30, seed=1),
        num_pages=12_000,
        abort_rate=0.3,
        seed=seed,
        window=SlidingWindow(512, 900),
        disaggregated=Disaggregation(12_000),
        **SPECS["chain"],
    )
    return plain(proven(watched.run()))


def test_the_same_seed_gives_the_same_recording():
    first = seeded(4)
    assert first == seeded(4)
    assert first["totals"] != seeded(5)["totals"]


@pytest.mark.parametrize("after", [1, 3, 6, 10, 15])
def test_stop_gives_everything_back_on_both_nodes(after):
    watched = nodes(*(req(20, output=20, arrival=2.0 * at) for at in range(9)), writers=2, chunk=12)
    watched._fate[1:3] = (2, 3)
    turn = watched._step

    def stopping() -> bool:
        if watched.turns == after:
            watched.stop()
        return turn()

    watched._step = stopping
    recording = watched.run()
    assert recording.interrupted and recording.violation is None
    assert (recording.leaked_pages, recording.leaked_rows) == (0, 0)
    assert recording.totals.finished < 9


@pytest.mark.parametrize("node", ["alloc", "entry"])
def test_a_leak_on_either_node_is_counted(node):
    watched = nodes(*(req(16, output=4) for _ in range(3)), prefix_cache=False)
    alloc = getattr(watched, node)
    release, kept = alloc.release, []

    def keep_the_first(x, *, tokens=None, after=None):
        handles = np.atleast_1d(x).tolist()
        kept.extend(handles[:1] if not kept else [])
        release([handle for handle in handles if handle not in kept], after=after)

    alloc.release = keep_the_first
    recording = watched.run()
    assert recording.violation is None and not recording.sound
    # 16 tokens of a prompt, and 3 more on the node that decodes.
    assert (recording.leaked_rows, recording.leaked_pages) == (1, 4 if node == "entry" else 5)


# Refusal


def test_a_request_too_large_for_either_node_is_refused():
    requests = [req(10, output=2), req(33, output=1), req(1, output=40), req(11)]
    for sizes in ({"prefill_pages": 8}, {"num_pages": 8}):
        totals = run(*requests, **sizes).totals
        assert (totals.refused, totals.finished) == (2, 2)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="admit is 'chunk'"):
        Options(num_pages=9, admit="chunk", disaggregated=Disaggregation(9))
    for name, value in (("prefill_pages", 0), ("writers", 0), ("writers", 1.5)):
        with pytest.raises(ValueError, match=f"^{name} is "):
            Disaggregation(**({"prefill_pages": 9} | {name: value}))
    for name in ("base", "per_token", "per_extent"):
        with pytest.raises(ValueError, match=f"^{name} is -1"):
            TransferTime(**{name: -1})
