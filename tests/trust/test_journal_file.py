"""The file: what is in it and what is not, torn tails, damage, and what a crash leaves."""

from __future__ import annotations

import logging
import os
import signal
import stat
import struct
import subprocess
import sys
from binascii import crc_hqx
from pathlib import Path

import numpy as np
import pytest
from host_support import Query, fingerprint
from trust.journal_support import TESTS, busy, in_fresh_process, positions, state

import sgalloc
from sgalloc.trust.journal import FLUSH_BYTES
from sgalloc.trust.records import (
    CLOSED,
    CONFIG,
    Cursor,
    JournalError,
    Reader,
    Record,
    framed,
    ints,
    packed_bits,
    signed,
    unpacked_bits,
    varint,
)
from sgalloc.trust.rerun import Rerun, rerun
from sgalloc.trust.verbs import VERBS

# -- numbers ---------------------------------------------------------------------------------------

EDGES = (0, 1, 127, 128, 255, 256, 16383, 16384, 65535, 65536, 2**32 - 1, 2**32, 2**62)


def cursor(payload: bytes) -> Cursor:
    return Cursor(Record(7, 16, payload, 99))


@pytest.mark.parametrize("number", [*EDGES, *(-edge for edge in EDGES), 2**80])
def test_a_number_comes_back(number: int) -> None:
    assert cursor(signed(number)).signed() == number
    if number >= 0:
        assert cursor(varint(number)).varint() == number


@pytest.mark.parametrize("low", [*EDGES, -1, -(2**63)])
@pytest.mark.parametrize("span", [0, 1, 255, 256, 65536, 2**32, 2**63])
def test_an_array_comes_back(low: int, span: int) -> None:
    high = min(low + span, 2**63 - 1)
    for numbers in ([], [low], [high, low, low], [low, high] * 150):
        given = np.array(numbers, np.int64)
        at = cursor(ints(given))
        assert at.ints().tolist() == numbers
        at.end()


def test_small_numbers_take_a_byte_each() -> None:
    assert len(ints(np.arange(200, dtype=np.int64))) == 200 + 3
    handles = (np.int64(1) << 32) + np.arange(256)
    assert len(ints(handles)) == 256 + 2 + 1 + 5


@pytest.mark.parametrize("count", [0, 1, 8, 9, 300])
def test_bits_come_back(count: int) -> None:
    bits = [at % 3 == 0 for at in range(count)]
    assert unpacked_bits(cursor(packed_bits(bits))) == bits


def test_what_ends_early_names_its_record() -> None:
    for broken in (b"\x80", b"\x05\x00\x01", b"\xff\xff\xff\xff\x0f\x03"):
        with pytest.raises(JournalError, match="record 7 at byte 99 cannot be read"):
            cursor(broken).ints()


# -- what is in the file ---------------------------------------------------------------------------


def test_prompts_are_not_in_the_file(tmp_path: Path) -> None:
    """Neither as numbers of any width, nor as hashes that another journal would give, too."""
    drawn = np.random.default_rng(5).integers(1 << 24, 1 << 30, 40)
    files = []
    for name in ("one", "two"):
        path = tmp_path / name
        alloc = sgalloc.KVAllocator(40, 4, 4, 64, device="cpu", prefix_cache=True, journal=path)
        handles = alloc.open(2)
        alloc.extend(handles, [40, 17])
        alloc.prefix.publish(handles[:1], [drawn])
        alloc.release(handles, tokens=[drawn, drawn[:17]])
        assert alloc.prefix.match(drawn).length == 40
        alloc.close_journal()
        files.append(path.read_bytes())
    for token in drawn.tolist():
        # The three bytes that a token of 30 bits would show in any width and order.
        raw = struct.pack("<i", token)
        for seen in (raw, raw[:3], raw[::-1], raw[::-1][1:], varint(token), signed(token)):
            assert seen not in files[0]
        assert str(token).encode() not in files[0]
    assert len(files[0]) == len(files[1])
    # Each of the two has a key of its own, so that a hash tells nothing without it.
    hashes = []
    for name in ("one", "two"):
        assert rerun(tmp_path / name).digests == 1
        (match,) = [r for r in Reader(tmp_path / name) if r.kind == VERBS["match"].kind]
        at = cursor(match.payload)
        at.choice(8)
        hashes.append(at.words(at.varint()).tolist())
    assert len(hashes[0]) == 10 and not set(hashes[0]) & set(hashes[1])


def test_equal_pages_alone_have_equal_hashes() -> None:
    from sgalloc.trust.journal import PageHashes

    for size in (1, 2, 3, 16, 64):
        hashes = PageHashes(size)
        pages = np.random.default_rng(size).integers(0, 3, (400, size))
        alike = {row.tobytes(): int(h) for row, h in zip(pages, hashes(pages.ravel()), strict=True)}
        assert len(set(alike.values())) == len(alike)
        swapped = pages[:, ::-1].copy()
        told = hashes(swapped.ravel()).tolist()
        assert [alike.get(row.tobytes(), h) for row, h in zip(swapped, told, strict=True)] == told
        assert hashes(pages.ravel()[: size - 1]).size == 0


def test_a_batch_is_written_once(tmp_path: Path) -> None:
    """A step of 256 requests names them by one number, and its size is what the page states."""
    path = tmp_path / "steps"
    alloc = sgalloc.KVAllocator(4096, 64, 256, 4096, device="cpu", journal=path)
    batch = alloc.batch(alloc.open(256))
    alloc.reserve(batch, 1)
    log = alloc._journal.log  # type: ignore[union-attr]
    log.flush()
    before = path.stat().st_size
    for step in range(100):
        alloc.reserve(batch, 16)
        alloc.commit(batch, np.arange(256) % 5 + step % 2)
    log.flush()
    assert (path.stat().st_size - before) / 100 <= 256 + 45
    for _ in range(100):
        alloc.decode(batch)
    log.flush()
    assert path.stat().st_size - before <= 100 * (256 + 45) + 100 * 24
    kinds = [record.kind for record in Reader(path)]
    assert kinds.count(1) == 1


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"mine")
    with pytest.raises(JournalError, match=r"is there already.*name another file"):
        busy(path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(JournalError, match=r"cannot be made \(No such file or directory\)"):
        busy(tmp_path / "no" / "journal")
    with pytest.raises(TypeError):
        sgalloc.KVAllocator(4, 4, 4, 16, device="cpu", journal=7)  # type: ignore[arg-type]
    busy(tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


# -- torn and damaged ------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    busy(tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def test_a_last_record_may_be_torn_at_every_byte(whole: bytes, tmp_path: Path) -> None:
    """The digest, the close and a call, each cut short everywhere."""
    places = positions(whole)
    path = tmp_path / "torn"
    for number in (len(places) - 1, len(places) - 2, len(places) - 3, 4):
        begin, end = places[number]
        path.write_bytes(whole[:begin])
        clean = rerun(path)
        assert (clean.torn, clean.records, clean.closed) == (0, number, False)
        for cut in range(begin + 1, end):
            path.write_bytes(whole[:cut])
            run = rerun(path)
            assert (run.torn, run.records) == (cut - begin, number)
            assert state(run.alloc) == state(clean.alloc)


def test_a_file_that_ends_in_its_first_lines_says_so(whole: bytes, tmp_path: Path) -> None:
    path, (_, first) = tmp_path / "short", positions(whole)[0]
    for cut in range(first):
        path.write_bytes(whole[:cut])
        with pytest.raises(JournalError, match=r"is no journal|has no configuration"):
            rerun(path)
    path.write_bytes(whole[:16] + b"\x02" + whole[17:])
    with pytest.raises(JournalError, match="version 2, and this release reads version 1"):
        rerun(path)


def test_every_other_damage_names_the_record_and_the_byte(whole: bytes, tmp_path: Path) -> None:
    """Each byte of the file changed, with bits high and low: found, whatever it is."""
    path = tmp_path / "damaged"
    for number, (begin, end) in enumerate(positions(whole)):
        for at in range(begin, end):
            for bits in (0x01, 0x80, 0xFF):
                data = bytearray(whole)
                data[at] ^= bits
                path.write_bytes(data)
                with pytest.raises(JournalError) as raised:
                    list(Reader(path))
                message = str(raised.value)
                assert f"damaged in record {number}, which begins at byte {begin}" in message
                assert "\n" not in message


def test_a_record_lost_doubled_or_moved_is_found(whole: bytes, tmp_path: Path) -> None:
    places, path = positions(whole), tmp_path / "moved"
    records = [whole[begin:end] for begin, end in places]
    for at in range(1, len(records) - 1):
        lost = records[:at] + records[at + 1 :]
        doubled = records[: at + 1] + records[at:]
        moved = [*records[:at], records[at + 1], records[at], *records[at + 2 :]]
        for changed in (lost, doubled, moved):
            path.write_bytes(whole[:17] + b"".join(changed))
            with pytest.raises(JournalError, match="damaged in record"):
                list(Reader(path))
    path.write_bytes(whole + records[1])
    with pytest.raises(JournalError, match="damaged in record"):
        list(Reader(path))


def test_what_is_before_the_damage_can_be_run(whole: bytes, tmp_path: Path) -> None:
    places, path = positions(whole), tmp_path / "damaged"
    at = len(places) // 2
    data = bytearray(whole)
    data[places[at][1] - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=f"with --until {at}"):
        rerun(path)
    assert rerun(path, until=at).records == at


@pytest.mark.parametrize(
    "config",
    [b"[]", b"{", b"{}", b'{"num_pages": 0, "page_size": 4, "max_requests": 1, "row_width": 4}'],
)
def test_a_configuration_of_somebody_else_is_refused(config: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(b"SGALLOC journal\n\x01" + framed(CONFIG, config, 0)[0])
    with pytest.raises(JournalError, match="record 0 at byte 17 cannot be read"):
        Rerun(path)


def test_a_length_is_not_believed(whole: bytes, tmp_path: Path) -> None:
    """A hostile length with a right check of its own is a torn tail, and takes no memory."""
    path = tmp_path / "hostile"
    start = struct.pack("<IB", 2**32 - 1, CLOSED)
    path.write_bytes(whole[:17] + start + struct.pack("<H", crc_hqx(start, 0)) + b"x" * 40)
    with pytest.raises(JournalError, match="has no configuration"):
        rerun(path)


# -- the end of a process --------------------------------------------------------------------------

LEFT = """
import os, signal, sys
from pathlib import Path
from trust.journal_support import busy, state
alloc = busy(Path(sys.stdin.read()), close=False)
print(state(alloc), alloc._journal.log.number)
sys.stdout.flush()
"""


def test_the_end_of_the_interpreter_writes_what_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "left"
    expected, records = in_fresh_process(LEFT, str(path)).split()
    run = rerun(path)
    assert (state(run.alloc), str(run.records)) == (expected, records)
    assert not run.closed and not run.torn


def test_so_does_the_end_of_the_allocator(tmp_path: Path) -> None:
    import gc

    alloc = busy(tmp_path / "dropped", close=False)
    expected = state(alloc)
    del alloc
    gc.collect()
    assert state(rerun(tmp_path / "dropped").alloc) == expected


def test_a_kill_loses_64_kib_at_most(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    code = """
import os, signal, sys
import sgalloc
alloc = sgalloc.KVAllocator(1024, 4, 64, 64, device="cpu", journal=sys.argv[1])
handles = alloc.open(64)
while alloc._journal.log.number < 4000:
    alloc.extend(handles, 20)
    alloc.trim(handles, 0)
print(alloc._journal.log.number, len(alloc._journal.log._sink.pending), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    written, pending = map(int, ran.stdout.split())
    run = rerun(path, check_every=500)
    assert pending < FLUSH_BYTES and run.torn == 0
    assert 0 < written - run.records < 2100, "the digest of every 1,024 calls flushes, too"
    assert run.digests >= 2


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    alloc = busy(tmp_path / "parent", close=False)
    log = alloc._journal.log  # type: ignore[union-attr]
    size = (tmp_path / "parent").stat().st_size
    child = os.fork()
    if not child:
        alloc.open(1)
        alloc.close_journal()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "parent").stat().st_size == size
    expected = state(alloc)
    alloc.close_journal()
    run = rerun(tmp_path / "parent")
    assert (state(run.alloc), run.records, run.closed) == (expected, log.number, True)


# -- a disk that fails -----------------------------------------------------------------------------


def test_a_disk_that_is_full_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of what is flushed is written, and then nothing: the calls go through all the same."""
    noted = sgalloc.KVAllocator(64, 4, 8, 64, device="cpu", journal=tmp_path / "full")
    plain = sgalloc.KVAllocator(64, 4, 8, 64, device="cpu")
    real, calls = os.write, []

    def write(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(file, bytes(data)[: len(data) - 5])

    event = Query()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "sgalloc.journal"):
        patch.setattr("sgalloc.trust.journal.os.write", write)
        for alloc in (noted, plain):
            for step in range(1500):
                handles = alloc.open(2)
                alloc.extend(handles, step % 30)
                alloc.release(handles, after=event if step == 1499 else None)
    assert len(caplog.records) == 1, "said once"
    assert "ends before record" in caplog.text and "No space left" in caplog.text
    assert fingerprint(noted)[:13] == fingerprint(plain)[:13]
    noted.check(device=True)
    with pytest.raises(JournalError, match="ends early"):
        noted.close_journal()
    run = rerun(tmp_path / "full")
    assert run.torn > 0 and run.calls > 500
    assert len(calls) == 2, "nothing is tried again"


def test_what_cannot_be_written_ends_the_journal_and_not_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alloc = sgalloc.KVAllocator(64, 4, 8, 64, device="cpu", journal=tmp_path / "odd")
    (handle,) = alloc.open().tolist()

    def refuses(values: object) -> bytes:
        raise RuntimeError("a fault of the journal")

    monkeypatch.setattr("sgalloc.trust.journalled.ints", refuses)
    alloc.extend(handle, 9)
    assert alloc.committed(handle).tolist() == [9]
    assert "a fault of the journal" in caplog.text
    alloc.release(handle)
    assert alloc.available() == 64
    assert rerun(tmp_path / "odd").calls == 1


def test_closing_twice_and_calls_behind_it_are_quiet(tmp_path: Path) -> None:
    alloc = busy(tmp_path / "closed")
    size = (tmp_path / "closed").stat().st_size
    alloc.close_journal()
    alloc.open(1)
    alloc.prefix.match([1, 2, 3, 4])
    assert (tmp_path / "closed").stat().st_size == size
    sgalloc.KVAllocator(4, 4, 4, 16, device="cpu").close_journal()
