"""Two journals of allocators that should mirror each other, and what the benchmark measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from host_support import Query
from trust.journal_support import busy

import sgalloc
from profiling import journal as benchmark
from sgalloc.trust.differing import first_difference
from sgalloc.trust.records import Reader


def serve(path: Path, change: str = "") -> None:
    alloc = sgalloc.KVAllocator(60, 4, 6, 80, device="cpu", prefix_cache=True, journal=path)
    event = Query()
    for turn in range(4):
        prompt = np.arange(40) + 1000 * (turn % 2)
        if change == f"a page of turn {turn}":
            prompt[7] += 1
        (handle,) = alloc.open_with_prefix(alloc.prefix.match(prompt)).tolist()
        alloc.extend(handle, 40)
        if change == f"a step in turn {turn}":
            alloc.decode(handle)
        alloc.prefix.publish(handle, prompt)
        if change == f"an event in turn {turn}":
            event.over = True
        alloc.release(handle, tokens=prompt, after=event)
    alloc.close_journal()


def test_the_same_calls_are_the_same_though_their_hashes_differ(tmp_path: Path) -> None:
    for name, make in (("busy", busy), ("serve", serve)):
        one, other = tmp_path / f"{name} 1", tmp_path / f"{name} 2"
        make(one)
        make(other)
        assert one.read_bytes() != other.read_bytes()
        assert first_difference(one, other) is None


@pytest.mark.parametrize(
    ("change", "record", "what"),
    [
        # A turn is five records: match, open, extend, publish, release.
        ("a page of turn 2", 11, ("match", "match")),
        ("a step in turn 1", 9, ("publish", "decode")),
        ("an event in turn 3", 20, ("release", "a return behind events")),
    ],
)
def test_the_first_call_that_differs_is_named(
    tmp_path: Path, change: str, record: int, what: tuple[str, str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    serve(one)
    serve(other, change)
    found = first_difference(one, other)
    assert found is not None
    assert (found.record, found.one, found.other) == (record, *what)


def test_a_journal_that_ends_earlier_differs_there(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    serve(one)
    last = list(Reader(one))[-1]
    other.write_bytes(one.read_bytes()[: last.offset])
    assert first_difference(one, other) == (last.number, "the close", "nothing")
    assert first_difference(other, one) == (last.number, "nothing", "the close")


def test_the_benchmark_measures_both_and_states_the_size(tmp_path: Path) -> None:
    speculate, decode = benchmark.measure(64, 0.01, tmp_path)
    assert (speculate.name, decode.name) == ("speculate", "decode")
    assert speculate.plain.n == speculate.noted.n >= 200
    assert 64 < speculate.size < 64 + 60, "a byte for each number accepted"
    assert 15 < decode.size < 30
