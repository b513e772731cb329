"""D10: staging memory is never rewritten while a copy or a kernel that reads it is pending.

Steps are queued behind a latch, more of them than the ring has slots: then the ring grows, and
at its cap it waits; both are counted, and every row comes out right.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from gpu.currents import CURRENTS, MODES, STREAMS
from gpu.latch import Latches
from gpu.twins import verify_rows
from host_support import open_handles

import sgalloc


def queue(alloc: sgalloc.KVAllocator, rng: np.random.Generator, steps: int, pages: int) -> None:
    """So many applies with other contents each; the second half takes the rows once more."""
    rows = steps // 2
    for _ in range(2):
        handles = open_handles(alloc)
        alloc.release(handles[:rows])
        fresh = alloc.open(rows)
        for handle in rng.permutation(fresh).tolist():
            length = alloc.page_size * int(rng.integers(pages - pages // 4, pages + 1))
            alloc.apply(alloc.plan(extend=(handle, length)))


@pytest.mark.parametrize("mode", ["one stream, torch's side", "one stream, torch's default",
                                  "one stream, CuPy's side", "plan stream"])  # fmt: skip
@pytest.mark.parametrize("ps", [1, 16])
def test_d10_staging_memory_is_not_rewritten_while_it_is_read(
    ps: int, mode: str, latches: Latches
) -> None:
    """64 applies behind a held stream, twenty times: more than any ring has slots at first."""
    current, stream = MODES[mode]
    rng = np.random.default_rng(ps)
    with CURRENTS[current]() as held:
        alloc = sgalloc.KVAllocator(
            64 * 12, ps, 32, 12 * ps, device="cuda", stream=STREAMS[stream]([])
        )
        alloc.warm(1024)
        alloc.extend(alloc.open(32), ps)
        slots = alloc.stats().staging.slots
        grown = []
        for _ in range(20):
            latch = latches.hold(held)
            queue(alloc, rng, 64, 12)
            assert latch.held, "an apply waited for the GPU"
            latch.open()
            verify_rows(alloc)
            grown.append(alloc.stats().staging.grows)
    staging = alloc.stats().staging
    assert staging.waits == 0
    assert grown[0] > 0 and staging.slots == slots + grown[-1], "the ring grew"
    assert grown[-1] == grown[0], "and is then large enough"


@pytest.mark.parametrize("mode", ["one stream, torch's side", "plan stream"])
def test_d10_of_large_steps(mode: str, latches: Latches) -> None:
    """Steps that are copied: as many as the ring of large slots may hold."""
    current, stream = MODES[mode]
    rng = np.random.default_rng(1)
    with CURRENTS[current]() as held:
        alloc = sgalloc.KVAllocator(
            20_000, 2, 4, 2 * 2400, device="cuda", stream=STREAMS[stream]([])
        )
        alloc.warm(4096)
        alloc.extend(alloc.open(4), 2)
        large = alloc._core.device._large
        before = len(large)
        for _ in range(5):
            latch = latches.hold(held)
            queue(alloc, rng, 8, 2400)
            assert latch.held
            latch.open()
            verify_rows(alloc)
    assert alloc.stats().staging.waits == 0
    assert len(large) > before and alloc._core.device._large is large


@pytest.mark.parametrize("ring", ["_small", "_large"])
def test_at_its_cap_the_ring_waits_and_counts_it(ring: str, latches: Latches) -> None:
    """The wait ends when the slot's reader is done, and nothing was overwritten."""
    pages = 1 if ring == "_small" else 1500
    with CURRENTS["torch side"]() as held:
        alloc = sgalloc.KVAllocator(100_000, 2, 40, 4000, device="cuda")
        alloc.warm(2048)
        slots = getattr(alloc._core.device, ring)
        slots._cap = len(slots)
        h = alloc.open(len(slots) + 1).tolist()
        latch = latches.hold(held)
        for handle in h[:-1]:
            alloc.extend(handle, 2 * pages)
        assert latch.held and slots.waits == 0
        seen: list[bool] = []

        def let_go() -> None:
            guard = time.monotonic() + 20
            while not slots.waits and time.monotonic() < guard:
                time.sleep(0.001)
            seen.append(latch.held)
            latch.open()

        opener = threading.Thread(target=let_go)
        opener.start()
        alloc.extend(h[-1], 2 * pages)
        opener.join()
        assert seen == [True], "it waited while the stream was held"
        staging = alloc.stats().staging
        assert (staging.waits, staging.grows) == (1, 0)
        verify_rows(alloc)


def test_slots_of_other_streams_are_guarded_too(latches: Latches) -> None:
    """Steps go to a held stream and to a free one in turn; the free one's slots come round."""
    with CURRENTS["torch side"]() as held:
        alloc = sgalloc.KVAllocator(4000, 4, 100, 64, device="cuda")
        alloc.warm(256)
        h = alloc.open(100).tolist()
        latch = latches.hold(held)
        for handle in h[:50]:
            alloc.extend(handle, 9)
        with CURRENTS["cupy blocking side"]():
            for handle in h[50:]:
                alloc.extend(handle, 13)
        assert latch.held
        latch.open()
        verify_rows(alloc)


@pytest.mark.parametrize("setting", ["many", "-1", "1.5", ""])
def test_a_bound_that_is_no_number_of_bytes_is_refused(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", setting)
    with pytest.raises(ValueError, match=r"SGALLOC_MAPPED_BYTES.*give a number of bytes"):
        sgalloc.KVAllocator(4, 4, 2, 16, device="cuda")
