"""The GPU does what the CPU does, byte for byte, and both do what the row law says.

Every call of every walk is made on an allocator on the CPU and on one on the GPU. After each,
both tables (and page tables) are compared whole, with each other and with a naive writer that
shares no code with the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.currents import CURRENTS, STREAMS
from gpu.naive import exported, gathered
from gpu.spy import Spy
from gpu.twins import OUT_KINDS, Both, Out, Twins, host
from gpu.walks import OPERATIONS, WITH_CACHE, Walk
from host_support import PAGE_SIZES

import sgalloc

CUPY_KINDS = OUT_KINDS[:2]
# Rows of whole pages, and rows that end in a piece of one: where 16-byte stores are aligned
# (4 more), and where they are not.
WIDTHS = [(ps, more) for ps in PAGE_SIZES for more in (0, 4, 1) if more < ps]


def out_kinds() -> tuple[str, ...]:
    """What ``out`` may be here: torch's arrays only where there is torch."""
    try:
        import torch
    except ImportError:
        return CUPY_KINDS
    return OUT_KINDS if torch.cuda.is_available() else CUPY_KINDS


def make(ps: int, more: int = 0, cache: bool = False, **on_gpu: Any) -> Twins:
    return Twins(150, ps, 12, 24 * ps + more, prefix_cache=cache, **on_gpu)


# -- random walks --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True], ids=["plain", "cache"])
@pytest.mark.parametrize(("ps", "more"), WIDTHS)
def test_a_walk(ps: int, more: int, cache: bool) -> None:
    twins = make(ps, more, cache)
    walk = Walk(twins, 1000 * ps + 10 * more + cache, cache, out_kinds())
    walk.run(rounds=4)
    expected = {*OPERATIONS, *(WITH_CACHE if cache else ())}
    assert set(walk.done) == expected, f"never done: {sorted(expected - set(walk.done))}"
    assert twins.counts.refused["OutOfRows"] and twins.counts.refused["RowTooNarrow"]
    twins.call(lambda a, out: a.release(twins.handles))
    assert twins.gpu.available(counting_cache=True) == twins.gpu.num_pages


@pytest.mark.parametrize("ps", [1, 16, 48])
def test_a_walk_without_mapped_memory(ps: int, monkeypatch: pytest.MonkeyPatch, spy: Spy) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", "0")
    twins = make(ps)
    Walk(twins, ps, False, out_kinds()).run(rounds=2)
    assert spy.calls["graphLaunch"] == 0, "a graph reads mapped memory"
    assert twins.counts.copies == twins.counts.launches > 0


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("ps", [1, 16])
def test_a_walk_on_any_stream(ps: int, stream: str) -> None:
    keep: list[Any] = []
    twins = make(ps, cache=True, stream=STREAMS[stream](keep))
    Walk(twins, ps, True, out_kinds()).run(rounds=1)
    twins.check()


@pytest.mark.parametrize("stream", ["current", "plan", "raw", "cupy blocking"])
@pytest.mark.parametrize("current", CURRENTS)
def test_a_walk_under_any_current_stream(current: str, stream: str) -> None:
    with CURRENTS[current]():
        keep: list[Any] = []
        twins = make(16, cache=True, stream=STREAMS[stream](keep))
        kinds = out_kinds() if "torch" in current else CUPY_KINDS
        Walk(twins, 5, True, kinds).run(rounds=1)
        twins.check()


@pytest.mark.parametrize("stream", ["current", "plan"])
def test_a_walk_with_a_named_reader(stream: str) -> None:
    keep: list[Any] = []
    twins = make(16, stream=STREAMS[stream](keep), reader=STREAMS["cupy"](keep))
    Walk(twins, 6, False, out_kinds()).run(rounds=1)
    twins.check()


# -- every way to launch -------------------------------------------------------------------------


def test_every_way_to_launch_is_taken(spy: Spy) -> None:
    twins = Twins(60_000, 4, 8, 160_000, warm=2000)
    (h,) = twins.open()
    device = twins.gpu._core.device

    def extend(pages: int) -> tuple[int, int, int]:
        before = spy.calls["graphLaunch"], spy.calls["kernel assign_pages"], spy.copies
        counted = device.launches, device.copies
        held = int(twins.cpu.allocated(h)[0])
        twins.call(lambda a, out: a.extend(h, held + 4 * pages))
        after = spy.calls["graphLaunch"], spy.calls["kernel assign_pages"], spy.copies
        graphs, plain, copies = (b - a for a, b in zip(before, after, strict=True))
        assert device.launches - counted[0] == graphs + plain, "the device's own count is true"
        assert device.copies - counted[1] == copies
        return graphs, plain, copies

    grows = twins.gpu.stats().staging.grows
    assert extend(3) == (1, 0, 0), "a small step is one graph, read in place"
    assert extend(1900) == (0, 1, 1), "a large one is one copy and one launch"
    assert twins.gpu.stats().staging.grows == grows
    assert extend(20_000) == (0, 1, 1), "one larger than was provided for, too"
    assert twins.gpu.stats().staging.grows > grows, "for which the staging memory grew"
    assert extend(1900) == (0, 1, 1) and extend(1) == (1, 0, 0)
    twins.check()


@pytest.mark.parametrize("ps", [1, 3, 16])
def test_one_request_around_the_bound_of_small_steps(ps: int) -> None:
    """1,024 pages and 16 kB are where another way to launch begins."""
    twins = Twins(40_000, ps, 3, 30_000 * ps, warm=1500)
    (h,) = twins.open()
    for at, pages in enumerate((1, 31, 32, 33, 1023, 1024, 1025, 1365, 1366, 1367, 20_000)):
        c = int(twins.cpu.committed(h)[0])
        held = int(twins.cpu.allocated(h)[0])
        stop = held + (pages - 1) * ps + 1  # the last page with one token alone
        kind = out_kinds()[at % len(out_kinds())]
        twins.call(lambda a, out, n=stop: a.extend(h, n, out=out), stop - c, kind)
        twins.call(lambda a, out: a.reserve(h, ps, rounding="device"))
    twins.check()


@pytest.mark.parametrize("ps", [1, 16, 24])
def test_batches_of_one_to_five_thousand(ps: int) -> None:
    most = 5000
    twins = Twins(4 * most * 4, ps, most, 16 * ps + 4 % ps, warm=4 * most)
    rng = np.random.default_rng(ps)
    before = twins.counts.launches, twins.counts.copies
    kinds = out_kinds()
    for at, n in enumerate((1, 2, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2049, 5000)):
        h = twins.open(n)
        lengths = rng.integers(1, 4 * ps + 1, n)
        kind = kinds[at % len(kinds)]
        twins.call(lambda a, out, h=h, x=lengths: a.extend(h, x, out=out), int(lengths.sum()), kind)
        twins.call(lambda a, out, h=h: a.decode(h, out=out), n, kinds[-1 - at % len(kinds)])
        twins.call(lambda a, out, h=h: a.reserve(h, ps + 3))
        each = rng.integers(0, 2 * ps + 2, n)
        twins.call(lambda a, out, h=h, x=each: a.reserve(h, x, rounding="device"))
        stop = twins.cpu.allocated(h)
        start = stop - rng.integers(0, np.minimum(stop, 2 * ps) + 1)
        twins.call(
            lambda a, out, h=h, x=start, y=stop: a.slots(h, x, y, out=out) is out,
            int((stop - start).sum()), kind,
        )  # fmt: skip
        odd = h[::2]
        twins.call(lambda a, out, h=odd: a.trim(h, 1))
        twins.call(lambda a, out, h=h: a.release(h))
        twins.closed(h)
    launches, copies = twins.counts.launches - before[0], twins.counts.copies - before[1]
    assert 0 < copies < launches, "small batches are read in place, large ones copied"


# -- rounding on the device ----------------------------------------------------------------------


@pytest.mark.parametrize("each", [False, True], ids=["equal", "each"])
@pytest.mark.parametrize("ps", PAGE_SIZES)
def test_rounding_on_the_device(ps: int, each: bool, spy: Spy) -> None:
    """Against rounding on the host of a GPU and of a CPU; tiles of 1,024 requests and less."""
    most, rng = 3000, np.random.default_rng(ps)
    twins = Twins(40 * most, ps, most, 32 * ps + 8, warm=40 * most)
    rounded = sgalloc.KVAllocator(40 * most, ps, most, 32 * ps + 8, device="cuda", page_table=True)
    rounded.warm(40 * most)
    h = twins.open(most)
    assert rounded.open(most).tolist() == h
    lengths = rng.integers(0, 3 * ps + 1, most)
    twins.call(lambda a, out: a.extend(h, lengths))
    rounded.extend(h, lengths)
    for n in (1, 2, 5, 1023, 1024, 1025, 2047, 2048, 2049, most):
        some = rng.permutation(h)[:n].tolist()
        tokens: Any = rng.integers(0, 2 * ps + 2, n) if each else int(rng.integers(1, 2 * ps + 2))
        before = spy.calls["kernel page_watermarks"]
        theirs = rounded.reserve(some, tokens, rounding="device")
        if theirs.num_new_pages:
            assert spy.calls["kernel page_watermarks"] == before + 1, "the device rounded"
        ours = twins.call(lambda a, out, h=some, x=tokens: a.reserve(h, x, rounding="host"))
        assert ours.gpu.nxt.tolist() == theirs.nxt.tolist()
        accepted = rng.integers(0, np.broadcast_to(tokens, n) + 1)
        twins.call(lambda a, out, h=some, x=accepted: a.commit(h, x))
        rounded.commit(some, accepted)
        assert np.array_equal(host(rounded.req_to_token), twins.naive.table)
        assert np.array_equal(host(rounded.page_table), twins.naive.page_table)
    assert np.array_equal(rounded.owners(), twins.cpu.owners())


def test_rounding_on_the_device_of_long_reserves(spy: Spy) -> None:
    """One request takes more pages than a block stages at once, others of its tile none."""
    twins = Twins(40_000, 2, 40, 20_000, warm=40_000)
    h = twins.open(40)
    twins.call(lambda a, out: a.extend(h, np.arange(40) % 3))
    tokens = np.zeros(40, np.int64)
    tokens[[3, 17, 39]] = 9000, 1, 2049
    before = spy.calls["kernel page_watermarks"]
    twins.call(lambda a, out: a.reserve(h[:4], [0, 3, 0, 9000], rounding="device"))
    twins.call(lambda a, out: a.reserve(h[30:], 800, rounding="device"))
    assert spy.calls["kernel page_watermarks"] == before + 2
    # No bound proves beforehand that these fit, so the host counts first.
    twins.call(lambda a, out: a.reserve(h, tokens, rounding="device"))
    twins.check()


def test_rounding_on_the_device_down_to_the_last_page() -> None:
    """A bound that does not prove the fit sends the step to the host: it fits to the page."""
    ps, rows = 16, 8
    twins = Twins(rows * 3, ps, rows, 8 * ps)
    h = twins.open(rows)
    twins.call(lambda a, out: a.extend(h, ps))
    assert not twins.call(lambda a, out: a.reserve(h, ps, rounding="device")).refused
    assert not twins.call(lambda a, out: a.reserve(h, 2 * ps, rounding="device")).refused
    assert twins.gpu.available() == 0
    assert twins.call(lambda a, out: a.reserve(h, 2 * ps + 1, rounding="device")).refused
    assert twins.counts.refused == {"OutOfPages": 1}
    twins.check()


def test_rounding_many_times_over() -> None:
    """The words of the scan are never cleared: what an earlier launch left must not be read."""
    ps, most, rng = 1, 2100, np.random.default_rng(0)
    twins = Twins(80 * most, ps, most, 64, warm=80 * most)
    h = twins.open(most)
    for _ in range(40):
        n = int(rng.choice([1, 600, 1024, 1025, most]))
        some, tokens = rng.permutation(h)[:n].tolist(), int(rng.integers(1, 3))
        twins.call(lambda a, out, h=some, x=tokens: a.reserve(h, x, rounding="device"))
        accepted = np.minimum(twins.cpu.allocated(some) - twins.cpu.committed(some), 1)
        twins.call(lambda a, out, h=some, x=accepted: a.commit(h, x))


# -- exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ps", PAGE_SIZES)
def test_page_tables(ps: int) -> None:
    most, width, left = 300, 20, -5
    twins = Twins(most * 24, ps, 400, 24 * ps + 4 % ps)
    rng = np.random.default_rng(ps)
    h = twins.open(400)
    twins.call(lambda a, out: a.extend(h, rng_lengths(ps)))
    tables = Both(*(a.page_tables(most, width) for a in (twins.cpu, twins.gpu)))
    names = ("page_table", "indptr", "indices", "last_page_len")
    addresses = [getattr(tables.gpu, name).data.ptr for name in names]
    for n in (0, 1, 2, 31, 255, 256, 257, most):
        some = rng.permutation(h)[:n].tolist()
        c = twins.cpu.committed(some)
        lengths = None if n % 2 else rng.integers(0, c + 1)
        for one in (tables.cpu, tables.gpu):
            for name in names:
                getattr(one, name).fill(left)
        ready = tables.gpu.update(some, lengths)
        tables.cpu.update(some, lengths)
        asked = (c if lengths is None else lengths).tolist()
        expected = exported(twins.gpu, some, asked, width)
        ready.synchronize()
        for name, part in expected._asdict().items():
            ours, theirs = host(getattr(tables.cpu, name)), host(getattr(tables.gpu, name))
            assert np.array_equal(ours, theirs), name
            assert np.array_equal(theirs[: len(part)], part), name
            assert (theirs[len(part) :] == left).all(), f"{name} was written past its end"
    assert [getattr(tables.gpu, name).data.ptr for name in names] == addresses
    twins.compare()


def rng_lengths(ps: int) -> np.ndarray:
    lengths = np.random.default_rng(ps + 1).integers(0, 19 * ps + 1, 400)
    lengths[:4] = 0, 1, ps, 20 * ps
    return lengths


def test_page_tables_refuse_what_does_not_fit() -> None:
    twins = Twins(100, 4, 6, 80)
    h = twins.open(3)
    twins.call(lambda a, out: a.extend(h, [4, 9, 40]))
    tables = Both(*(a.page_tables(2, 3) for a in (twins.cpu, twins.gpu)))
    device = twins.gpu._core.device
    twins.call(lambda a, out: tables.of(a).update(h[:2]) is None)
    before, found = device.launches, host(tables.gpu.page_table)
    for x, lengths in ((h, None), (h[2], None), (h[0], 5), (h[0], -1), (h[:2], [1])):
        both = twins.call(lambda a, out, x=x, n=lengths: tables.of(a).update(x, n))
        assert both.refused
    assert device.launches == before
    assert np.array_equal(host(tables.gpu.page_table), found)


# -- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OUT_KINDS)
@pytest.mark.parametrize("ps", [1, 3, 64])
def test_out_is_the_slots_of_the_new_tokens(ps: int, kind: str) -> None:
    """Against the naive writer; partly of pages that the same launch writes, partly of older."""
    if kind not in out_kinds():
        pytest.skip("needs torch with CUDA")
    alloc = sgalloc.KVAllocator(4000, ps, 20, 160 * ps, device="cuda")
    alloc.warm(4096)
    rng = np.random.default_rng(ps)
    h = alloc.open(20)
    for wanted in (
        rng.integers(0, 2 * ps + 1, 20), np.full(20, ps), np.full(20, 1), rng.integers(0, 3, 20),
        np.zeros(20, int), np.eye(1, 20, 7, int)[0] * 40 * ps,
    ):  # fmt: skip
        for step in ("extend", "decode", "reserve"):
            start, out = alloc.committed(h), Out(int(wanted.sum()), kind)
            if step == "extend":
                alloc.extend(h, start + wanted, out=out.gpu)
            elif step == "decode":
                alloc.decode(h, wanted, out=out.gpu)
            else:
                alloc.reserve(h, wanted, out=out.gpu)
            out.cpu[:] = gathered(alloc, h.tolist(), start, start + wanted)
            out.verify()
    alloc.check(device=True)


def test_without_need_only_out_launches() -> None:
    twins = make(16)
    (h,) = twins.open()
    twins.call(lambda a, out: a.extend(h, 5))
    before = twins.counts.launches
    twins.call(lambda a, out: a.decode(h))
    assert twins.counts.launches == before
    twins.call(lambda a, out: a.decode(h, out=out), 1)
    assert twins.counts.launches == before + 1
