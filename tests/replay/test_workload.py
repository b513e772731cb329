"""Token ids of requests, and generated workloads: lengths, prefixes, arrivals, determinism."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgalloc.replay.workload as module
from sgalloc.replay.requests import (
    MAX_REQUESTS,
    MAX_TOKENS,
    TraceRequest,
    Workload,
    filled,
    max_block_id,
    output_ids,
    prompt_ids,
)
from sgalloc.replay.traces import read_trace
from sgalloc.replay.workload import PROFILES, generate

LEVELS = (0, 5, 25, 50, 75, 90, 95, 99, 100)


def request(prompt_len, blocks, block_tokens=512) -> TraceRequest:
    ids = None if blocks is None else np.array(blocks, dtype=np.int64)
    return TraceRequest(0.0, prompt_len, 1, ids, block_tokens)


# Token ids


def test_prompts_agree_exactly_as_far_as_their_blocks_do():
    first = prompt_ids(request(1400, [7, 8, 9]), 0)
    second = prompt_ids(request(2000, [7, 8, 20, 21]), 1)
    assert first.dtype == second.dtype == np.int64
    assert (len(first), len(second)) == (1400, 2000)
    assert np.array_equal(first[:1024], second[:1024])
    assert not np.isin(first[1024:], second).any()
    assert len(np.unique(first)) == 1400


def test_a_partial_block_is_shared_only_when_asked():
    one, two = request(700, [3, 4]), request(700, [3, 4])
    assert np.array_equal(prompt_ids(one, 0)[:512], prompt_ids(two, 1)[:512])
    assert not np.isin(prompt_ids(one, 0)[512:], prompt_ids(two, 1)).any()
    shared = prompt_ids(one, 0, share_partial=True)
    assert np.array_equal(shared, prompt_ids(two, 1, share_partial=True))
    # What the partial block shows of block 4 is the head of block 4.
    assert np.array_equal(shared, prompt_ids(request(1024, [3, 4]), 2)[:700])


def test_filling_the_last_block_makes_it_whole():
    longer = filled(request(700, [3, 4]))
    assert longer.prompt_len == 1024
    assert np.array_equal(
        prompt_ids(longer, 0, share_partial=True), prompt_ids(request(1024, [3, 4]), 9)
    )
    assert filled(request(700, None)).prompt_len == 700


labelled = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 6), max_size=4), st.booleans())


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 3, 16, 512]),
    drawn=st.lists(labelled, min_size=1, max_size=8),
    share_partial=st.booleans(),
)
def test_ids_are_equal_exactly_where_the_text_is(size, drawn, share_partial):
    by_label: dict[tuple[object, ...], int] = {}
    labels: list[tuple[object, ...]] = []
    ids: list[int] = []
    for index, (short, blocks, known) in enumerate(drawn):
        length = max(0, len(blocks) * size - short % size) if known else short
        made = prompt_ids(
            request(length, blocks if known else None, size), index, share_partial=share_partial
        )
        assert made.shape == (length,)
        for position, number in enumerate(made.tolist()):
            whole = known and (share_partial or (position // size + 1) * size <= length)
            labels.append(
                ("block", blocks[position // size], position % size)
                if whole
                else ("prompt", index, position)
            )
            ids.append(number)
        for step, number in enumerate(output_ids(index, 2, 5).tolist(), start=2):
            labels.append(("output", index, step))
            ids.append(number)
    for label, number in zip(labels, ids, strict=True):
        assert by_label.setdefault(label, number) == number
    assert len(set(by_label.values())) == len(by_label)


def test_ids_at_the_ends_of_the_layout_stay_apart():
    last = MAX_REQUESTS - 1
    top = prompt_ids(request(512, [max_block_id(512)]), 0)
    tails = [prompt_ids(request(4, None), index) for index in (0, 1, last)]
    ends = [output_ids(index, MAX_TOKENS - 4, MAX_TOKENS) for index in (0, last)]
    starts = [output_ids(index, 0, 4) for index in (0, 1, last)]
    everything = np.concatenate([top, *tails, *ends, *starts])
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    # A unique prompt of the greatest length ends below the next request's.
    assert tails[0][0] + MAX_TOKENS <= tails[1][0]
    assert tails[2][0] + MAX_TOKENS <= starts[0][0]


def test_ids_are_as_the_module_lays_them_out():
    made = prompt_ids(request(514, [7, 9]), 3)
    tail = 2**62 + 3 * 2**31
    assert made[[0, 1, 511, 512, 513]].tolist() == [3584, 3585, 4095, tail + 512, tail + 513]
    assert prompt_ids(request(2, None), 3).tolist() == [tail, tail + 1]
    assert output_ids(3, 5, 7).tolist() == [tail + 2**61 + 5, tail + 2**61 + 6]


def test_output_ids_continue_where_they_left_off():
    whole = output_ids(3, 0, 10)
    assert np.array_equal(np.concatenate([output_ids(3, 0, 4), output_ids(3, 4, 10)]), whole)
    assert output_ids(3, 4, 4).shape == (0,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: prompt_ids(request(4, None), -1), "index is -1"),
        (lambda: prompt_ids(request(4, None), MAX_REQUESTS), "index is 1073741824"),
        (lambda: prompt_ids(request(4, None), True), "index is True"),
        (lambda: prompt_ids(request(4, None), 1.0), "index is 1.0"),
        (lambda: prompt_ids(request(-4, None), 0), "prompt_len is -4"),
        (lambda: prompt_ids(request(600, [1]), 0), "blocks has 1 ids for 600 tokens"),
        (lambda: prompt_ids(request(512, [1, 2]), 0), "blocks has 2 ids for 512 tokens"),
        (lambda: prompt_ids(request(600, [1, -2]), 0), "block ids run from -2 to 1"),
        (lambda: prompt_ids(request(512, [2**53]), 0), "block ids run from 9007199254740992"),
        (lambda: prompt_ids(request(512, [1], 0), 0), "block_tokens is 0"),
        (lambda: prompt_ids(request(512, [1])._replace(blocks=[1]), 0), "blocks is [1]"),
        (lambda: output_ids(-1, 0, 1), "index is -1"),
        (lambda: output_ids(0, -1, 1), "start is -1"),
        (lambda: output_ids(0, 5, 4), "stop is 4"),
        (lambda: output_ids(0, 0, 2**31), "stop is 2147483648"),
    ],
)
def test_ids_outside_the_layout_are_refused(call, said):
    with pytest.raises(ValueError) as caught:
        call()
    assert said in str(caught.value)


# Generated lengths


def lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.array([request.prompt_len for request in workload.requests])
    outputs = np.array([request.output_len for request in workload.requests])
    return prompts, outputs


@pytest.mark.parametrize("seed", [0, 1, 77])
@pytest.mark.parametrize("profile", ["chat", "code"])
def test_quantiles_are_the_published_ones_within_one_percent(profile, seed):
    prompts, outputs = lengths(generate(profile, 12_000, seed=seed))
    published = PROFILES[profile]
    assert np.percentile(prompts, LEVELS) == pytest.approx(published.prompt, rel=0.01, abs=1)
    # The last hundredth of the code outputs rises eightfold, so its very end wants 3 %.
    assert np.percentile(outputs, LEVELS) == pytest.approx(published.output, rel=0.03, abs=1)
    assert np.percentile(outputs, LEVELS[:-1]) == pytest.approx(
        published.output[:-1], rel=0.01, abs=1
    )


def test_tables_are_the_published_ones():
    assert PROFILES["chat"].prompt[1:] == (901, 2307, 6909, 15366, 27367, 39549, 85401, 126195)
    assert PROFILES["chat"].output[1:] == (10, 157, 350, 472, 597, 698, 1120, 2000)
    assert PROFILES["code"].prompt[1:] == (75, 578, 1469, 2745, 5186, 7302, 7436, 7437)
    assert PROFILES["code"].output[1:] == (6, 9, 13, 24, 55, 90, 252, 1899)


def test_small_workloads_have_the_mix_too_and_seeds_shuffle_it():
    one, _ = lengths(generate("chat", 200, seed=1))
    two, _ = lengths(generate("chat", 200, seed=2))
    assert np.percentile(one, (25, 50, 75, 90)) == pytest.approx(
        (2307, 6909, 15366, 27367), rel=0.06
    )
    assert not np.array_equal(one, two)
    assert not np.array_equal(np.argsort(one), np.argsort(two))
    # Stratified: the k-th smallest of both seeds lie in the same 200th of the distribution.
    first, second = np.sort(one), np.sort(two)
    assert np.all(first[:-1] <= second[1:]) and np.all(second[:-1] <= first[1:])


def test_prompt_and_output_are_independent():
    prompts, outputs = lengths(generate("chat", 12_000, seed=4))
    assert abs(np.corrcoef(np.log(prompts), np.log(outputs))[0, 1]) < 0.05


@pytest.mark.parametrize("profile", ["chat", "code"])
def test_a_single_request(profile):
    (only,) = generate(profile, 1, seed=0).requests
    assert only.arrival == 0.0
    assert only.prompt_len >= 1 and only.output_len >= 1


# Prefixes of the chat profile


def shared_depth(workload: Workload) -> tuple[list[int], int]:
    """Leading blocks of each prompt seen before (partial ones included), and all blocks."""
    seen: set[int] = set()
    depths, total = [], 0
    for one in workload.requests:
        blocks = one.blocks.tolist()
        depths.append(
            next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        )
        seen.update(blocks)
        total += len(blocks)
    return depths, total


def hit_rate(workload: Workload) -> float:
    depths, total = shared_depth(workload)
    return 100 * sum(depths) / total


@pytest.fixture(scope="module")
def chat() -> Workload:
    return generate("chat", 12_000, seed=0)


@pytest.mark.parametrize("seed", range(5))
def test_chat_hits_like_the_trace_without_bound(seed):
    # The conversation trace: 36.6 %.
    assert 34.5 <= hit_rate(generate("chat", 12_000, seed=seed)) <= 38.5


def test_short_chats_hit_less_as_the_head_of_the_trace_does():
    # The trace's first 500: 16.1 %; its first 2,000: 28.9 %.
    assert 14 <= hit_rate(generate("chat", 500, seed=0)) <= 25
    assert 26 <= hit_rate(generate("chat", 2_000, seed=0)) <= 37


def test_share_turns_the_hits_up_and_down():
    rates = [hit_rate(generate("chat", 4_000, seed=0, share=share)) for share in (0, 0.25, 0.5, 1)]
    # Without conversations only the one-block system prompts are shared: 1 block in 24.
    assert rates[0] == pytest.approx(4.1, abs=0.4)
    assert rates[1] > rates[0] + 5 and rates[2] > rates[1] + 5 and rates[3] > rates[2] + 5
    assert hit_rate(generate("chat", 4_000, seed=0)) == rates[2]


def test_blocks_are_as_in_a_trace(chat):
    before: dict[int, int] = {}
    partial: set[int] = set()
    roots = set()
    for one in chat.requests:
        blocks = one.blocks.tolist()
        assert one.blocks.dtype == np.int64 and one.block_tokens == 512
        assert len(blocks) == -(-one.prompt_len // 512)
        roots.add(blocks[0])
        # Equal ids mean an equal prefix: a block always follows the same one.
        for left, right in zip([-1, *blocks], blocks, strict=False):
            assert before.setdefault(right, left) == left
        if one.prompt_len % 512:
            assert blocks[-1] not in partial
            partial.add(blocks[-1])
    assert len(roots) == 4
    assert partial.isdisjoint(before[block] for block in before)


def test_a_later_turn_holds_the_turn_before_and_its_output(chat):
    depths, _ = shared_depth(chat)
    by_last_block: dict[int, int] = {}
    pauses, parts = [], []
    for number, (one, depth) in enumerate(zip(chat.requests, depths, strict=True)):
        if depth > 1:
            earlier = by_last_block.pop(int(one.blocks[depth - 1]))
            past = chat.requests[earlier]
            assert past.prompt_len // 512 == depth
            assert one.prompt_len > past.prompt_len + past.output_len
            pauses.append(number - earlier)
            parts.append(depth / len(one.blocks))
        whole = one.prompt_len // 512
        if whole > 1:
            by_last_block[int(one.blocks[whole - 1])] = number
    # The trace: 38.7 % of the requests go on, at the distances below from the turn before.
    assert 0.36 <= len(pauses) / len(chat.requests) <= 0.46
    assert np.percentile(pauses, (5, 25, 50, 75, 95)) == pytest.approx(
        (100, 229, 422, 901, 2129), rel=0.2
    )
    assert 0.6 <= np.mean(parts) <= 0.8


def test_chat_survives_a_trip_through_a_trace_file(tmp_path, chat):
    path = tmp_path / "chat"
    with open(path, "w", encoding="utf-8") as file:
        for one in chat.requests[:300]:
            fields = {
                "timestamp": one.arrival * 1e3,
                "input_length": one.prompt_len,
                "output_length": one.output_len,
                "hash_ids": one.blocks.tolist(),
            }
            file.write(json.dumps(fields) + "\n")
    back = read_trace(path)
    assert (len(back.requests), back.skipped) == (300, 0)
    for one, again in zip(chat.requests, back.requests, strict=False):
        assert again.arrival == pytest.approx(one.arrival, abs=1e-9)
        assert again[1:3] == one[1:3]
        assert np.array_equal(again.blocks, one.blocks)


# Arrivals


def windows(workload: Workload, seconds: float) -> np.ndarray:
    times = np.array([request.arrival for request in workload.requests])
    assert times[0] == 0.0 and np.all(np.diff(times) >= 0)
    return np.bincount((times // seconds).astype(int))


def test_chat_arrives_as_a_poisson_stream(chat):
    counts = windows(chat, 3.0)[:-1]
    assert counts.mean() == pytest.approx(3 * 3.4, rel=0.04)
    assert 0.85 <= counts.var() / counts.mean() <= 1.15


@pytest.mark.parametrize("seed", range(4))
def test_code_arrives_in_bursts(seed):
    workload = generate("code", 8_819, seed=seed)
    assert all(one.blocks is None for one in workload.requests)
    counts = windows(workload, 10.0)
    # The trace: 327 in 10 s at most, 56 % of them silent, variance 71 times the mean.
    assert 180 <= counts.max() <= 600
    assert 0.4 <= np.mean(counts == 0) <= 0.7
    assert 45 <= counts.var() / counts.mean() <= 140


def test_code_has_the_rate_of_the_trace_in_the_long_run():
    count = 300_000
    assert count / generate("code", count, seed=0).requests[-1].arrival == pytest.approx(
        2.57, rel=0.06
    )


@pytest.mark.parametrize("profile", ["chat", "code"])
def test_rate_stretches_time_and_nothing_else(profile):
    usual = generate(profile, 500, seed=3)
    fast = generate(profile, 500, seed=3, rate=10 * PROFILES[profile].rate)
    for one, other in zip(usual.requests, fast.requests, strict=True):
        assert other.arrival == pytest.approx(one.arrival / 10)
        assert other[1:3] == one[1:3]
        assert np.array_equal(other.blocks, one.blocks)


# Determinism


def digest(workload: Workload) -> str:
    sha = hashlib.sha256(repr((workload.name, workload.skipped, workload.problems)).encode())
    for one in workload.requests:
        sha.update(repr((one.arrival, one.prompt_len, one.output_len, one.block_tokens)).encode())
        sha.update(b"-" if one.blocks is None else one.blocks.tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("profile", ["chat", "code"])
def test_same_arguments_same_workload_in_any_process(profile):
    here = digest(generate(profile, 3_000, seed=11))
    assert here == digest(generate(profile, 3_000, seed=np.int64(11)))
    assert here != digest(generate(profile, 3_000, seed=12))
    script = (
        "import runpy, sys\n"
        "tests = runpy.run_path(sys.argv[1])\n"
        "print(tests['digest'](tests['generate'](sys.argv[2], 3000, seed=11)))\n"
    )
    root = str(Path(module.__file__).parents[2])
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, __file__, profile],
            env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"profile": "maths"}, "profile 'maths' is unknown: give one of chat, code"),
        ({"profile": None}, "profile None is unknown"),
        ({"count": 0}, "count is 0"),
        ({"count": -5}, "count is -5"),
        ({"count": 10.0}, "count is 10.0"),
        ({"count": True}, "count is True"),
        ({"count": 2**40}, "count is 1099511627776"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"seed": None}, "seed is None"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": -2.0}, "rate is -2.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"rate": True}, "rate is True"),
        ({"rate": "3"}, "rate is '3'"),
        ({"share": -0.1}, "share is -0.1"),
        ({"share": 1.5}, "share is 1.5"),
        ({"share": float("nan")}, "share is nan"),
        ({"profile": "code", "share": 0.5}, "share is 0.5: the code profile shares nothing"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(ValueError) as caught:
        generate(**{"profile": "chat", "count": 10, "seed": 0, **arguments})
    assert said in str(caught.value)
