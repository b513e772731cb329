"""The reader of snapshots against what is cut, altered, foreign or made up."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from trust.forge import HEAD, Parts, dumps, held, places, put, rich, sign, with_header
from trust.walk import CONFIGS, Walk, make

import sgalloc
from sgalloc import SnapshotError
from sgalloc.trust import format as form

EXTREMES = (-(1 << 63), -(1 << 31), -1, 0, 1, 2, 1 << 20, (1 << 31) - 1, 1 << 40, (1 << 63) - 1)


def restore(data: Any) -> Any:
    return sgalloc.KVAllocator.restore(data, "cpu", max_table_bytes=1 << 24)


def outcome(data: bytes) -> str:
    """Refused with the one error, or an allocator that keeps the laws whatever it does."""
    try:
        alloc = restore(data)
    except SnapshotError as error:
        text = str(error)
        assert text.startswith("this snapshot cannot be restored: ") and "\n" not in text
        assert len(text) < 700
        return "refused"
    alloc.check(device=True)
    walk = Walk(alloc, 5, events=False)
    ledger = alloc._ledger
    for handle in ledger.handle.take(ledger.live()).tolist():
        walk.text[handle] = walk.ids()
        walk.ever.append(handle)
    walk.pinned = list(alloc._core.pins.by_handle)
    for _ in range(12):
        walk.step()
        alloc.check()
    alloc.abort(list(walk.text), force=True)
    alloc.abort(list(alloc._core.pins.by_handle), force=True)
    if walk.cache:
        alloc.prefix.clear()
    alloc.check(device=True)
    for group in alloc.stats().groups.values():
        assert group.free == group.total, "everything comes back"
    return "restored"


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    return {name: rich(name).snapshot() for name in CONFIGS}


def test_the_samples_hold_everything(samples: dict[str, bytes]) -> None:
    """No section of any snapshot is empty everywhere, or the tests below change nothing."""
    filled: Counter[str] = Counter()
    names: set[str] = set()
    for data in samples.values():
        parts = Parts(data)
        assert parts.joined() == data, "taken apart and put together it is the same"
        for name, array in parts.sections.items():
            names.add(name)
            filled[name] += array.size > 0
    assert sorted(name for name in names if not filled[name]) == []


def test_every_truncation_and_every_addition_is_refused(samples: dict[str, bytes]) -> None:
    for data in samples.values():
        cuts = {*range(0, 120), *range(0, len(data), 37), len(data) - 1}
        for size in sorted(cuts):
            with pytest.raises(SnapshotError):
                restore(data[:size])
            if size >= form.HEAD_BYTES:
                # One that says it was whole.
                assert outcome(sign(data[:size])) == "refused"
        for more in (b"\0", b"\0" * 8, data):
            with pytest.raises(SnapshotError, match="bytes"):
                restore(data + more)
            assert outcome(sign(data + more)) == "refused"


def test_every_flipped_byte_is_refused(samples: dict[str, bytes]) -> None:
    draw = random.Random(1)
    for data in samples.values():
        for at in [*range(form.HEAD_BYTES), *(draw.randrange(len(data)) for _ in range(150))]:
            wrong = bytearray(data)
            wrong[at] ^= 1 << draw.randrange(8)
            with pytest.raises(SnapshotError):
                restore(wrong)


def test_no_flipped_byte_that_is_signed_again_breaks_a_law(samples: dict[str, bytes]) -> None:
    draw, seen = random.Random(2), Counter[str]()
    for data in samples.values():
        for _ in range(600):
            wrong = bytearray(data)
            for _ in range(draw.choice((1, 1, 1, 3))):
                at = draw.randrange(HEAD.size, len(data))
                wrong[at] = draw.choice((wrong[at] ^ 1 << draw.randrange(8), draw.randrange(256)))
            seen[outcome(sign(bytes(wrong)))] += 1
    # Some bytes say what nothing depends on: tokens, counters, generations.
    assert seen["refused"] > 400 and seen["restored"] > 100, seen


def test_no_entry_of_any_section_can_mislead(samples: dict[str, bytes]) -> None:
    """Extremes and neighbours in every section, in range and out of it."""
    draw, seen = random.Random(3), Counter[str]()
    for data in samples.values():
        for name, array in Parts(data).sections.items():
            limits = np.iinfo(array.dtype)
            for _ in range(14 if array.size else 0):
                parts = Parts(data)
                column, at = parts.sections[name], draw.randrange(array.size)
                other = int(column[draw.randrange(array.size)])
                near = int(column[at]) + draw.choice((-1, 1))
                value = draw.choice((draw.choice(EXTREMES), other, near))
                column[at] = min(max(value, limits.min), limits.max)
                seen[outcome(parts.joined())] += 1
    assert seen["refused"] > 500 and seen["restored"] > 100, seen


def test_no_length_of_any_section_can_mislead(samples: dict[str, bytes]) -> None:
    for data in samples.values():
        for name in Parts(data).sections:
            for change in (
                lambda a: a[:-1],
                lambda a: np.concatenate((a, a[-1:])),
                lambda a: a[:0],
            ):
                parts = Parts(data)
                before = parts.sections[name].size
                parts.sections[name] = change(parts.sections[name])
                if parts.sections[name].size != before:
                    assert outcome(parts.joined()) == "refused", name


def test_no_value_of_the_header_can_mislead(samples: dict[str, bytes]) -> None:
    odd: list[Any] = [None, True, "x", "", [], {}, 1.5, -1, 0, 1 << 31, 1 << 63, 10**40, [[]] * 9]
    seen: Counter[str] = Counter()
    for data in samples.values():
        size = HEAD.unpack(data[: HEAD.size])[2]
        body = data[form.HEAD_BYTES + size :]
        header = json.loads(data[form.HEAD_BYTES : form.HEAD_BYTES + size])
        for path in places(header):
            for value in odd:
                wrong = copy.deepcopy(header)
                put(wrong, path, value)
                if wrong != header:
                    kind = outcome(with_header(dumps(wrong), body))
                    seen[kind] += 1
                    assert kind == "refused" or path[0] in (
                        "release", "high_water", "refusals", "tree", "config",
                    ), (path, value)  # fmt: skip
            if isinstance(path[-1], str):
                wrong = copy.deepcopy(header)
                inner = wrong
                for key in path[:-1]:
                    inner = inner[key]
                del inner[path[-1]]
                assert outcome(with_header(dumps(wrong), body)) == "refused" or (
                    path[0] == "refusals" and len(path) == 2
                ), path
    assert seen["refused"] > 3000 and seen["restored"] > 20, seen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 60_000, "deep|read"),
        (b'{"a":' * 9_000, "deep|read"),
        (b"nothing", "read"),
        (b"\xff\xfe", "read"),
        (b"[]", "not an object"),
        (b"7", "not an object"),
        (b'{"config":1,"config":2}', "twice"),
        (b'{"config":NaN,"sections":[]}', "NaN"),
        (b'{"config":' + b"9" * 5000 + b',"sections":[]}', "read"),
        (b'{"sections":[["row.open","<i4",-1]]}', "-1 entries"),
        (b'{"sections":[["row.open","<i4",4611686018427387904]]}', "4611686018427387904 entries"),
        (b'{"sections":[["row.open","O",1]]}', "unknown type"),
        (b'{"sections":[["row.open","<i4"]]}', "entry"),
        (b'{"sections":{"a":1}}', "no table"),
        (b"{}", "no table"),
    ],
)
def test_a_header_that_is_none(text: bytes, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        restore(with_header(text, b""))


def test_foreign_bytes_and_other_versions_are_named(samples: dict[str, bytes]) -> None:
    data = samples["plain"]
    later = HEAD.pack(form.MAGIC, 2, *HEAD.unpack(data[: HEAD.size])[2:]) + data[HEAD.size :]
    for wrong, message in (
        (b"", "0 bytes"),
        (b"SGALLOC\0", "8 bytes"),
        (b"\x80\x05" + b"K" * 90, "no snapshot"),
        (b"PK\3\4" + data[4:], "no snapshot"),
        (sign(later), "version 2, and this release reads 1"),
        (data[:-8], "cut"),
        (data[:-1] + bytes([data[-1] ^ 1]), "altered"),
    ):
        with pytest.raises(SnapshotError, match=message):
            restore(wrong)
    for odd in (None, "text", 7, [1], np.zeros(9, np.uint8)):
        with pytest.raises(TypeError, match="bytes of snapshot"):
            restore(odd)
    for same in (bytearray(data), memoryview(data)):
        assert restore(same).snapshot() == data
    with pytest.raises(SnapshotError, match="contiguous"):
        restore(memoryview(data)[::2])


def test_the_error_is_a_refusal_and_a_value_error() -> None:
    assert issubclass(SnapshotError, sgalloc.AllocError) and issubclass(SnapshotError, ValueError)


@pytest.mark.parametrize(
    "change",
    [
        {"num_pages": (1 << 31) // 3 - 2},
        {"max_requests": 1 << 30},
        {"row_width": (1 << 31) - 1},
        {"page_size": 1 << 20, "row_width": 1 << 30},
        {"num_pages": 1 << 29, "max_requests": 1 << 29},
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(change: dict[str, int]) -> None:
    parts = Parts(make("plain").snapshot())
    parts.header["config"].update(change)
    data = parts.joined()
    assert len(data) < 5000
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError):
            sgalloc.KVAllocator.restore(data, "cpu")
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_may_have_so_many_bytes(name: str) -> None:
    """The bound is on what is allocated, exactly: tables, page lists, maps."""
    alloc = make(name)
    data, core = alloc.snapshot(), alloc._core
    arrays = [core.device.table, core.device.page_table, core.device.side_table]
    arrays += [core.device.side_map, core.ledger.pages]
    arrays += [core.side.pages] if core.side is not None else []
    size = sum(array.nbytes for array in arrays if array is not None)
    sgalloc.KVAllocator.restore(data, "cpu", max_table_bytes=size)
    with pytest.raises(SnapshotError, match=f"{size} bytes: pass a larger max_table_bytes"):
        sgalloc.KVAllocator.restore(data, "cpu", max_table_bytes=size - 1)
    for odd in (0, -1, 1.5, "1"):
        with pytest.raises((ValueError, TypeError), match="max_table_bytes"):
            sgalloc.KVAllocator.restore(data, "cpu", max_table_bytes=odd)


def test_tables_that_are_not_to_be_had_are_named(
    samples: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("sgalloc.allocator.open_device", none)
    with pytest.raises(SnapshotError, match=r"tables of \d+ bytes"):
        restore(samples["plain"])


def test_a_device_that_is_not_here_is_no_fault_of_the_bytes(samples: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        sgalloc.KVAllocator.restore(samples["plain"], "tpu")
    assert not isinstance(caught.value, SnapshotError)


def test_pages_of_another_namespace_cannot_be_slipped_in() -> None:
    alloc = make("prefix cache")
    (handle,) = alloc.open(1, "one")
    alloc.extend(handle, 12)
    alloc.prefix.publish(handle, list(range(12)))
    parts = Parts(alloc.snapshot())
    parts.sections["value.bytes"] = np.frombuffer(b"onetwo", np.uint8)
    parts.sections["value.kind"] = np.array([2, 2], np.uint8)
    parts.sections["value.size"] = np.array([3, 3])
    assert restore(parts.joined()).digest()
    parts.sections["row.namespace"] = np.array([1], np.int32)
    with pytest.raises(SnapshotError, match="another namespace"):
        restore(parts.joined())
    parts.sections["value.bytes"] = np.frombuffer(b"oneone", np.uint8)
    with pytest.raises(SnapshotError, match="stands twice"):
        restore(parts.joined())


def column(name: str, at: int, value: int) -> Any:
    """A lie: entry ``at`` of section ``name`` is ``value``."""

    def lie(parts: Parts) -> None:
        parts.sections[name][at] = value

    return lie


def alike(parts: Parts) -> None:
    """The second node of the cache begins as the first does."""
    size = parts.header["config"]["page_size"]
    starts = parts.sections["tree.count"].cumsum() - parts.sections["tree.count"]
    tokens, parent = parts.sections["tree.tokens"], parts.sections["tree.parent"]
    name = parts.sections["tree.namespace"]
    one, two = next(
        (i, j)
        for i in range(parent.size)
        for j in range(i)
        if parent[i] == parent[j] and name[i] == name[j]
    )
    first, second = (int(starts[at]) * size for at in (one, two))
    tokens[first : first + size] = tokens[second : second + size]


def empty_node(parts: Parts) -> None:
    """The cache has a node without pages; nothing else is amiss."""
    for name in ("parent", "namespace", "count", "last_use", "seq"):
        key = f"tree.{name}"
        value = {"parent": -1, "namespace": -1}.get(name, 0)
        parts.sections[key] = np.append(parts.sections[key], value)


def another_kind(name: str, kind: int) -> Any:
    """What the first entry of ``name`` that is a value names is of this kind."""

    def lie(parts: Parts) -> None:
        parts.sections["value.kind"][parts.sections[name].max()] = kind

    return lie


def header(*path: Any, value: Any) -> Any:
    def lie(parts: Parts) -> None:
        put(parts.header, path, value)

    return lie


def moved(name: str) -> Any:
    """What belongs to the aborted request is the live one's."""

    def lie(parts: Parts) -> None:
        parts.sections[name] = parts.sections[name][::-1].copy()

    return lie


def given(one: str, other: str) -> Any:
    """An id is moved from a section to another, so that the totals are right."""

    def lie(parts: Parts) -> None:
        ids = parts.sections[one]
        parts.sections[one] = ids[:-1]
        parts.sections[other] = np.append(parts.sections[other], ids[-1])

    return lie


def twice_received(parts: Parts) -> None:
    """The live request to be received stands there twice."""
    for name in list(parts.sections):
        column = parts.sections[name]
        if name.startswith("pin.") and column.size == 2:
            parts.sections[name] = np.append(column, column[0])
    acks = parts.sections["pin.acks"]
    parts.sections["pin.acks"] = np.append(acks, acks[: parts.sections["pin.ack_count"][0]])


def partly_committed(parts: Parts) -> None:
    """The live request to be received has tokens of its own."""
    row = int(parts.sections["row.receiving"].argmax())
    parts.sections["row.committed"][row] = 3
    parts.sections["pin.prefix"][0] = 3


def acks_of(*acks: int) -> Any:
    """Who has acknowledged the two requests, each of three writers."""

    def lie(parts: Parts) -> None:
        parts.sections["pin.acks"] = np.array(acks)
        parts.sections["pin.ack_count"] = np.array([len(acks) - 1, 1])

    return lie


# Of two requests to be received the first is live and the second was aborted.
LIES: list[tuple[str, Any, str]] = [
    ("plain", acks_of(0, 1, 2, 0), "all writers of a pin"),
    ("plain", acks_of(3, 0), "pin.acks.*out of bounds"),
    ("plain", acks_of(-1, 0), "pin.acks.*out of bounds"),
    ("plain", acks_of(1, 1, 0), "does not ascend"),
    ("plain", acks_of(1, 0, 0), "does not ascend"),
    ("plain", column("pin.aborted", 1, 2), "pin.aborted"),
    ("plain", column("pin.aborted", 0, 1), "open.*aborted rows are not 16"),
    ("plain", column("pin.length", 0, 18), "pin.length does not fit A"),
    ("plain", column("pin.prefix", 0, 3), "pin.prefix is not C"),
    ("plain", column("pin.length", 1, -1), "pin.length"),
    ("plain", column("pin.writers", 1, 0), "pin.writers"),
    ("plain", column("pin.handle", 1, (2 << 32) | 5), "another generation"),
    ("plain", column("pin.handle", 1, 5), "generation of pin.handle"),
    ("plain", column("pin.handle", 1, (1 << 32) | 99), "row of pin.handle"),
    ("plain", another_kind("pin.deadline", 3), "pin.deadline names a value of another kind"),
    ("plain", another_kind("row.namespace", 4), "cannot be read"),
    ("plain", column("row.namespace", 0, 99), "row.namespace"),
    ("plain", column("row.receiving", 0, 1), "breaks a law.*received"),
    ("plain", column("row.receiving", 3, 0), "not marked"),
    ("plain", column("row.generation", 0, 0), "row.generation"),
    ("plain", column("row.decode_steps", 0, -1), "row.decode_steps"),
    ("plain", column("row.shared", 0, 1), "row.shared"),
    ("plain", header("high_water", 0, value=3), "high_water"),
    ("plain", header("high_water", 0, value=1000), "high_water"),
    ("plain", given("page.free", "row.pages"), "section row.pages"),
    ("plain", given("page.free", "pin.pages"), "section pin.pages"),
    ("prefix cache", given("page.free", "tree.pages"), "section tree.pages"),
    ("window, map, prefix", given("side.free", "tree.sides"), "section tree.sides"),
    ("window", given("side.free", "window.pages"), "section window.pages"),
    ("window", given("side.free", "pin.sides"), "section pin.sides"),
    ("sparse", given("side.free", "device.pages"), "section device.pages"),
    ("sparse", given("side.free", "device.scratch"), "section device.scratch"),
    ("plain", twice_received, "have one handle"),
    ("plain", partly_committed, "pin.prefix is not what is shared"),
    ("plain", column("row.open", 0, 0), "row.open"),
    ("plain", column("row.open", 1, 1), "does not ascend|row.open"),
    ("plain", column("row.free", 0, 0), "row.free"),
    ("plain", column("row.free", 0, 17), "row.free"),
    ("plain", column("row.allocated", 0, 63), "row.allocated"),
    ("plain", column("row.allocated", 0, 20), "whole pages"),
    ("plain", column("row.committed", 0, 61), "row.committed"),
    ("plain", column("row.receiving", 0, 2), "row.receiving"),
    ("plain", column("row.pages", 0, 0), "row.pages"),
    ("plain", column("page.free", 0, 151), "page.free"),
    ("plain", column("pin.prefix", 1, -1), "pin.prefix"),
    ("plain", column("pin.pages", 0, 0), "pin.pages"),
    ("plain", column("pin.page_count", 0, 7), "stand twice|pin.page_count|pin.pages"),
    ("plain", moved("pin.page_count"), "a live request's pages stand twice"),
    ("plain", header("refusals", value={"not a name": 1}), "is no error"),
    ("plain", header("refusals", value={"A" * 65: 1}), "is no error"),
    ("window", moved("pin.side_count"), "live side pages stand twice"),
    ("window", column("pin.sides", 0, 0), "pin.sides"),
    ("window", column("side.free", 0, 0), "side.free"),
    ("prefix cache", column("tree.pages", 0, 0), "tree.pages"),
    ("prefix cache", alike, "begins as one beside it does"),
    ("prefix cache", empty_node, "tree.count"),
    ("prefix cache", header("tree", "clock", value=1), "tree.last_use"),
    ("prefix cache", header("tree", "seq", value=1), "tree.seq"),
    ("prefix cache", column("tree.last_use", 0, -1), "tree.last_use"),
    ("prefix cache", column("tree.parent", 0, 0), "tree.parent"),
    ("prefix cache", column("tree.parent", 0, -2), "tree.parent"),
    ("prefix cache", column("row.hold", 0, 0), "another namespace|law"),
    ("prefix cache", column("row.hold", 0, 999), "row.hold"),
    ("prefix cache", column("pin.hold", 0, 0), "holds a path twice"),
    ("prefix cache", column("pin.hold", 1, 999), "pin.hold"),
    ("window, map", column("window.first", 0, -1), "window.first"),
    ("window, map", column("window.stop", 0, 99), "window.stop"),
    ("window, map", column("window.pages", 0, 0), "window.pages"),
    ("window, map, prefix", column("tree.sides", 0, -1), "tree.sides"),
    ("sparse", column("device.count", 0, 99), "device.count"),
    ("sparse", column("device.first", 0, -1), "device.first"),
    ("sparse", column("device.stop", 0, 99), "device.stop"),
    ("sparse", column("device.flags", 0, 8), "device.flags"),
    ("sparse", column("device.pages", 0, 0), "device.pages"),
    ("sparse", column("device.scratch", 0, 0), "device.scratch"),
    ("sparse, no scratch", column("device.flags", 0, 4), "device.flags"),
]


@pytest.mark.parametrize(("name", "lie", "message"), LIES, ids=range(len(LIES)))
def test_a_lie_is_named(name: str, lie: Any, message: str) -> None:
    """One number that is wrong by itself, with all the rest as it should be."""
    data = held(name).snapshot(assume_done=True)
    parts = Parts(data)
    restore(parts.joined())
    lie(parts)
    assert parts.joined() != data
    with pytest.raises(SnapshotError, match=message):
        restore(parts.joined())


@pytest.mark.parametrize(
    ("name", "group", "field", "value"),
    [
        ("window", "window", "num_pages", 1 << 28),
        ("sparse", "sparse", "ratio", ["int", hex(1 << 23)]),
    ],
)
def test_a_second_group_cannot_ask_for_much_memory(
    name: str, group: str, field: str, value: Any
) -> None:
    parts = Parts(make(name).snapshot())
    parts.header["config"][group][field] = value
    data = parts.joined()
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match=r"names \d+ pages"):
            sgalloc.KVAllocator.restore(data, "cpu")
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
