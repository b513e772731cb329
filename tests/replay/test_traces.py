"""Reading traces: both formats, their compression, bad lines, bad files, the published rows."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from sgalloc.replay.requests import Workload, filled, prompt_ids
from sgalloc.replay.traces import MAX_LINE, TraceError, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
GOOD_AZURE = "2023-11-16 18:17:03.9799600,4808,10\r\n"


def mooncake(stamp=0, prompt=600, output=7, blocks=None, **more) -> str:
    if blocks is None:
        blocks = list(range(-(-prompt // 512)))
    fields = {
        "timestamp": stamp,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": blocks,
        **more,
    }
    return json.dumps(fields) + "\n"


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival for request in workload.requests]


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text


# The two formats


def test_mooncake_line_becomes_a_request(tmp_path):
    text = mooncake(prompt=1025, output=9, blocks=[4, 5, 8], user="ignored")
    workload = read_trace(write(tmp_path, text, "small.jsonl"))
    assert workload.name == "small.jsonl"
    assert (workload.skipped, workload.problems) == (0, [])
    (request,) = workload.requests
    assert (request.arrival, request.prompt_len, request.output_len) == (0.0, 1025, 9)
    assert request.block_tokens == 512
    assert request.blocks is not None and request.blocks.dtype == np.int64
    assert request.blocks.tolist() == [4, 5, 8]


def test_one_stamp_is_spread_over_the_time_to_the_next_three_seconds_at_most(tmp_path):
    stamps = [0, 0, 0, 0, 3000, 3000, 11_000, 11_000, 11_000]
    text = "".join(mooncake(stamp, output=1 + at) for at, stamp in enumerate(stamps))
    workload = read_trace(write(tmp_path, text))
    assert arrivals(workload) == pytest.approx([0, 0.75, 1.5, 2.25, 3, 4.5, 11, 12, 13])
    assert [request.output_len for request in workload.requests] == list(range(1, 10))


def test_stamps_that_are_not_quantised_stay_where_they_are(tmp_path):
    text = "".join(mooncake(stamp) for stamp in (100, 105, 105, 120.5))
    workload = read_trace(write(tmp_path, text))
    assert arrivals(workload) == pytest.approx([0, 0.005, 0.01275, 0.0205])


def test_lines_out_of_order_are_sorted_and_ties_keep_file_order(tmp_path):
    order = [(6000, 1), (0, 2), (6000, 3), (0, 4), (3000, 5)]
    text = "".join(mooncake(stamp, output=output) for stamp, output in order)
    workload = read_trace(write(tmp_path, text))
    assert [request.output_len for request in workload.requests] == [2, 4, 5, 1, 3]
    assert arrivals(workload) == pytest.approx([0, 1.5, 3, 6, 7.5])


def test_azure_keeps_seven_digits_and_counts_from_the_earliest_row(tmp_path):
    text = (
        HEADER
        + "2023-11-16 23:59:59.9999999,4808,10\r\n"
        + "2023-11-16 23:59:59.9999998,3180,8\r\n"
        + "2023-11-17 00:00:01.0000000,110,27"
    )
    workload = read_trace(write(tmp_path, text))
    assert [(r.prompt_len, r.output_len) for r in workload.requests] == [
        (3180, 8),
        (4808, 10),
        (110, 27),
    ]
    assert arrivals(workload) == [0.0, 1e-7, 1.0000002]
    assert all(request.blocks is None for request in workload.requests)


def test_azure_columns_go_by_name_and_zones_are_heeded(tmp_path):
    text = (
        "GeneratedTokens,Model,TIMESTAMP,ContextTokens\n"
        '5,"a, b",2024-05-10 02:00:00.5+02:00,40\n'
        "6,c,2024-05-10T00:00:02Z,50\n"
        "\n"
        "7,d,2024-05-10 00:00:03,60\n"
    )
    workload = read_trace(write(tmp_path, text))
    assert [(r.prompt_len, r.output_len) for r in workload.requests] == [(40, 5), (50, 6), (60, 7)]
    assert arrivals(workload) == [0.0, 1.5, 2.5]
    assert workload.skipped == 0


# Content, never the name, decides


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.xz", "t.jsonl.gz", "t"])
@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress])
@pytest.mark.parametrize("kind", ["mooncake", "azure"])
def test_format_and_compression_are_told_by_content(tmp_path, kind, pack, name):
    text = mooncake(prompt=4808, output=10) if kind == "mooncake" else HEADER + GOOD_AZURE
    workload = read_trace(write(tmp_path, pack(("\n \n" + text).encode()), name))
    (request,) = workload.requests
    assert (request.prompt_len, request.output_len) == (4808, 10)
    assert (request.blocks is not None) == (kind == "mooncake")
    assert workload.skipped == 0


def test_byte_order_mark_is_ignored(tmp_path):
    assert len(read_trace(write(tmp_path, "\ufeff" + HEADER + GOOD_AZURE)).requests) == 1
    assert len(read_trace(write(tmp_path, "\ufeff" + mooncake())).requests) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_will_do(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = gzip.compress((mooncake() * 3).encode())
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    try:
        assert len(read_trace(path).requests) == 3
    finally:
        writer.join()


# Bad lines


def without(name: str) -> str:
    fields = json.loads(mooncake())
    del fields[name]
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0,\n', "not JSON"),
        ("12\n", "not a JSON object"),
        ("[" * 100_000 + "\n", "not JSON"),
        (mooncake().replace("600", "9" * 5000), "not JSON"),
        (b"\xff\xfe{}\n", "not UTF-8"),
        (b'{"timestamp": \x000}\n', "not UTF-8"),
        (without("timestamp"), "timestamp is missing"),
        (without("input_length"), "input_length is missing"),
        (without("output_length"), "output_length is missing"),
        (without("hash_ids"), "hash_ids is missing"),
        (mooncake(stamp="0"), "timestamp is '0'"),
        (mooncake(stamp=True), "timestamp is True"),
        (mooncake(stamp=-1), "timestamp is -1"),
        (mooncake(stamp=float("nan")), "timestamp is nan"),
        (mooncake(stamp=float("inf")), "timestamp is inf"),
        (mooncake(stamp=None), "timestamp is None"),
        (mooncake(prompt=-3, blocks=[]), "input_length is -3"),
        (mooncake(prompt=0, blocks=[]), "input_length is 0"),
        (mooncake(blocks=[0], input_length=True), "input_length is True"),
        (mooncake(blocks=[0, 1], input_length=600.0), "input_length is 600.0"),
        (mooncake(blocks=[0, 1], input_length="600"), "input_length is '600'"),
        (mooncake(blocks=[0], input_length=float("nan")), "input_length is nan"),
        (mooncake(blocks=[0], input_length=2**31), "input_length is 2147483648"),
        (mooncake(blocks=[0], input_length=10**50), "input_length is a number of more than 40"),
        (mooncake(output=0), "output_length is 0"),
        (mooncake(output=-1), "output_length is -1"),
        (mooncake(output=False), "output_length is False"),
        (mooncake(output=None), "output_length is None"),
        (mooncake(hash_ids="01"), "hash_ids is '01'"),
        (mooncake(hash_ids=[0, 1.0]), "hash_ids is [0, 1.0]"),
        (mooncake(hash_ids=[0, True]), "hash_ids is [0, True]"),
        (mooncake(hash_ids=[0]), "hash_ids has 1 blocks"),
        (mooncake(hash_ids=[0, 1, 2]), "hash_ids has 3 blocks"),
        (mooncake(hash_ids=[]), "hash_ids has 0 blocks"),
        (mooncake(hash_ids=[0, -1]), "hash_ids leaves the range"),
        (mooncake(hash_ids=[0, 2**60]), "hash_ids leaves the range"),
    ],
)
def test_bad_mooncake_line_is_skipped_and_reported(tmp_path, line, said):
    bad = line if isinstance(line, bytes) else line.encode()
    good = mooncake(prompt=512, output=3).encode()
    workload = read_trace(write(tmp_path, good + b"\n" + bad + good))
    assert [request.output_len for request in workload.requests] == [3, 3]
    assert workload.skipped == 1
    (problem,) = workload.problems
    assert problem.startswith("line 3: ") and said in problem
    assert len(problem) < 200 and "\n" not in problem


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2023-11-16 18:17:03.9799600,4808", "2 fields where the header names 3"),
        ("2023-11-16 18:17:03.9799600,4808,10,1", "4 fields"),
        ('"2023-11-16 18:17:03.97,4808,10', "not a line of CSV"),
        ("2023-02-30 18:17:03.9799600,4808,10", "TIMESTAMP is '2023-02-30"),
        ("18:17:03,4808,10", "TIMESTAMP is '18:17:03'"),
        (",4808,10", "TIMESTAMP is ''"),
        ("2023-11-16 18:17:03.,4808,10", "TIMESTAMP"),
        ("2023-11-16 18:17:03.\u0664,4808,10", "TIMESTAMP"),
        ("2023-11-16 18:17:03,-1,10", "ContextTokens is -1"),
        ("2023-11-16 18:17:03,0,10", "ContextTokens is 0"),
        ("2023-11-16 18:17:03,4808.0,10", "ContextTokens is '4808.0'"),
        ("2023-11-16 18:17:03,,10", "ContextTokens is ''"),
        ("2023-11-16 18:17:03,4_8,10", "ContextTokens is '4_8'"),
        ("2023-11-16 18:17:03,\u0664,10", "ContextTokens is '\u0664'"),
        ("2023-11-16 18:17:03,2147483648,10", "ContextTokens is 2147483648"),
        ("2023-11-16 18:17:03,4808,0", "GeneratedTokens is 0, not within 1 to"),
        ("2023-11-16 18:17:03,4808,-7", "GeneratedTokens is -7"),
        ("2023-11-16 18:17:03,4808,nan", "GeneratedTokens is 'nan'"),
        ("2023-11-16 18:17:03,4808,True", "GeneratedTokens is 'True'"),
        (HEADER.strip(), "TIMESTAMP is 'TIMESTAMP'"),
    ],
)
def test_bad_azure_line_is_skipped_and_reported(tmp_path, line, said):
    workload = read_trace(write(tmp_path, HEADER + GOOD_AZURE + line + "\r\n" + GOOD_AZURE))
    assert len(workload.requests) == 2
    assert workload.skipped == 1
    (problem,) = workload.problems
    assert problem.startswith("line 3: ") and said in problem


def test_twenty_problems_are_kept_and_all_are_counted(tmp_path):
    text = mooncake() + "{}\n" * 25 + mooncake() + "{}\n"
    workload = read_trace(write(tmp_path, text))
    assert len(workload.requests) == 2
    assert workload.skipped == 26
    assert [problem.split(":")[0] for problem in workload.problems] == [
        f"line {number}" for number in range(2, 22)
    ]


def test_an_endless_line_is_skipped_without_losing_count(tmp_path):
    long = "x" * (2 * MAX_LINE + 5) + "\n"
    workload = read_trace(write(tmp_path, mooncake() + long + "{}\n" + mooncake()))
    assert len(workload.requests) == 2
    assert [problem.split(":")[0] for problem in workload.problems] == ["line 2", "line 3"]
    assert "longer than" in workload.problems[0]


# The limit


def test_limit_counts_usable_lines_and_reads_no_further(tmp_path):
    lines = ["{}\n", mooncake(output=1), "{}\n", mooncake(output=2), "{}\n", mooncake(output=3)]
    path = write(tmp_path, "".join(lines))
    workload = read_trace(path, limit=2)
    assert [request.output_len for request in workload.requests] == [1, 2]
    assert workload.skipped == 2
    assert len(read_trace(path, limit=99).requests) == 3


@pytest.mark.parametrize("limit", [0, -1, True, 1.0, "3", float("nan"), 2**31])
def test_bad_limit_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match="limit is") as caught:
        read_trace(write(tmp_path, mooncake()), limit=limit)
    assert repr(limit) in str(caught.value)


# Bad files


def test_missing_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.jsonl")


def test_directory(tmp_path):
    assert "directory" in refusal(tmp_path)


def test_path_that_no_file_can_have():
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace("a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path):
    path = write(tmp_path, mooncake())
    path.chmod(0)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize("data", [b"", b"\n \r\n\n", gzip.compress(b""), lzma.compress(b"\n")])
def test_empty_file(tmp_path, data):
    assert "is empty; give Mooncake" in refusal(write(tmp_path, data))


@pytest.mark.parametrize(
    "data",
    [
        b"hello\n",
        b"a,b,c\n1,2,3\n",
        b"TIMESTAMP,ContextTokens\n",
        b'[{"timestamp": 0}]\n',
        b"\n\n2023-11-16 18:17:03,4808,10\n",
        bytes(range(256)) * 9,
        b"\x00" * 4096,
        b"\xff" * (MAX_LINE + 9),
        gzip.compress(bytes(range(256))),
    ],
)
def test_unknown_format(tmp_path, data):
    text = refusal(write(tmp_path, data, "trace.jsonl"))
    assert "no known format" in text and "TIMESTAMP" in text and ".xz" in text
    assert len(text) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("start", "packer"),
    [(b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh91AY", "bzip2"), (b"PK\x03\x04", "zip")],
)
def test_other_compression_is_named(tmp_path, start, packer):
    assert f"packed with {packer}" in refusal(write(tmp_path, start + b"rest", "t.jsonl"))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("keep", [8, 0.5, -3])
def test_truncated_compressed_file(tmp_path, pack, keep):
    noise = np.random.default_rng(0).integers(0, 2**40, 400).tolist()
    data = pack("".join(mooncake(stamp) for stamp in noise).encode())
    end = int(len(data) * keep) if isinstance(keep, float) else keep
    assert "damaged or cut short" in refusal(write(tmp_path, data[:end]))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_damaged_compressed_file(tmp_path, pack):
    data = bytearray(pack("".join(mooncake(stamp) for stamp in range(400)).encode()))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(byte ^ 0x5A for byte in data[middle : middle + 40])
    assert "damaged or cut short" in refusal(write(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (mooncake(output=0) * 3, "3 skipped; line 1: output_length is 0"),
        ('{\n"timestamp": 0\n}\n', "3 skipped; line 1: not JSON"),
        (HEADER, "0 skipped"),
        (HEADER + "x,1,1\r\n", "1 skipped; line 2: TIMESTAMP is 'x'"),
    ],
)
def test_nothing_usable(tmp_path, text, first):
    assert f"no usable line ({first}" in refusal(write(tmp_path, text))


# The published traces


LEVELS = (5, 25, 50, 75, 90, 95, 99, 100)
PUBLISHED = {
    "mooncake_conversation.jsonl.xz": (
        12_031,
        (901, 2_307, 6_909, 15_366, 27_367, 39_549, 85_401, 126_195),
        (10, 157, 350, 472, 597, 698, 1_120, 2_000),
    ),
    "azure2023_code.csv": (
        8_819,
        (75, 578, 1_469, 2_745, 5_186, 7_302, 7_436, 7_437),
        (6, 9, 13, 24, 55, 90, 252, 1_899),
    ),
}


@pytest.fixture(scope="module")
def conversation(traces_dir) -> Workload:
    return read_trace(traces_dir / "mooncake_conversation.jsonl.xz")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_and_quantiles(traces_dir, name):
    rows, prompts, outputs = PUBLISHED[name]
    workload = read_trace(traces_dir / name)
    assert len(workload.requests) == rows
    assert (workload.skipped, workload.problems) == (0, [])
    for published, lengths in (
        (prompts, [request.prompt_len for request in workload.requests]),
        (outputs, [request.output_len for request in workload.requests]),
    ):
        assert np.percentile(lengths, LEVELS) == pytest.approx(published, rel=0.003, abs=1)
    assert arrivals(workload)[0] == 0.0
    assert np.all(np.diff(arrivals(workload)) >= 0)
    assert 3_400 < workload.requests[-1].arrival < 3_600


def test_published_conversation_is_no_longer_quantised(conversation):
    times = np.array(arrivals(conversation))
    assert np.diff(times).min() > 0.05
    assert np.bincount((times / 3 + 1e-3).astype(int)).max() <= 29


@pytest.mark.parametrize(("partial", "published"), [(True, 36.64), (False, 36.60)])
def test_published_block_hit_rate_without_bound(conversation, partial, published):
    seen: set[int] = set()
    hits = total = 0
    for request in conversation.requests:
        assert request.blocks is not None
        total += len(request.blocks)
        whole = len(request.blocks) if partial else request.prompt_len // 512
        shared = request.blocks[:whole].tolist()
        hits += next((at for at, block in enumerate(shared) if block not in seen), len(shared))
        seen.update(shared)
    assert 100 * hits / total == pytest.approx(published, abs=0.006)


@pytest.mark.parametrize("partial", [True, False])
def test_token_ids_hit_where_the_blocks_do(conversation, partial):
    blocks_seen: set[int] = set()
    pages_seen: set[bytes] = set()
    for index, request in enumerate(conversation.requests[:400]):
        assert request.blocks is not None
        whole = len(request.blocks) if partial else request.prompt_len // 512
        blocks = request.blocks[:whole].tolist()
        ids = prompt_ids(filled(request) if partial else request, index, share_partial=partial)
        pages = [ids[at : at + 512].tobytes() for at in range(0, len(ids) - 511, 512)]
        assert [page in pages_seen for page in pages] == [block in blocks_seen for block in blocks]
        blocks_seen.update(blocks)
        pages_seen.update(pages)
    assert len(pages_seen) == len(blocks_seen) > 5_000


def test_published_bursts(traces_dir):
    times = np.array(arrivals(read_trace(traces_dir / "azure2023_code.csv")))
    assert np.bincount((times // 10).astype(int)).max() == 327
    assert np.count_nonzero(np.bincount((times // 60).astype(int)) == 0) == 12


def test_limit_on_a_published_trace_is_its_head(traces_dir, conversation):
    head = read_trace(traces_dir / "mooncake_conversation.jsonl.xz", limit=100)
    assert len(head.requests) == 100
    for short, full in zip(head.requests, conversation.requests, strict=False):
        assert short.blocks is not None and full.blocks is not None
        assert short[1:3] == full[1:3]
        assert short.blocks.tolist() == full.blocks.tolist()
