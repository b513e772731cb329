"""What an allocator on a GPU did, run again on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.test_captured_walk import Walk
from trust.journal_support import Journals

import sgalloc
from sgalloc.trust.journal import state_digest
from sgalloc.trust.records import REFUSED, Reader
from sgalloc.trust.rerun import rerun
from sgalloc.trust.verbs import BY_KIND

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_of_stages_and_replays_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Steps staged for a graph, refusals that the device alone knows of, and events of it."""
    journals = Journals(tmp_path, monkeypatch)
    walk = Walk(seed, 4)
    walk.run(120)
    ends = []
    for alloc, path in journals.made:
        alloc.close_journal()
        run = rerun(path, check_every=20)
        assert run.closed and run.digests == 1, "the digest of the whole state was compared"
        ends.append(state_digest(run.alloc._core, True))
        assert ends[-1] == state_digest(alloc._core, True)
        names = [BY_KIND[r.kind].name for r in Reader(path) if r.kind in BY_KIND]
        assert {"apply", "extend", "trim", "release"} <= set(names) or alloc is walk.cpu
    assert ends[0] == ends[1], "GPU and CPU end alike"
    assert walk.refused > 3
    gpu = journals.made[0][1]
    refused = [r for r in Reader(gpu) if r.kind in BY_KIND and r.payload[0] & REFUSED]
    assert len(refused) == walk.refused == rerun(gpu).unheard


def test_a_reserve_that_the_device_rounds(tmp_path: Path) -> None:
    """Fused or counted on the host, the journal says the same, and so does the run again."""
    files = []
    for rounding in ("host", "device"):
        path = tmp_path / rounding
        alloc = sgalloc.KVAllocator(64, 4, 8, 64, device="cuda", journal=path)
        batch = alloc.batch(alloc.open(8))
        for step in range(6):
            alloc.reserve(batch, np.arange(8) % 3 + 5, rounding=rounding)
            alloc.commit(batch, step % 2 + 1)
        alloc.check(device=True)
        alloc.close_journal()
        files.append([(r.kind, r.payload) for r in Reader(path)])
        assert rerun(path).alloc.committed(batch.handles).tolist() == [9] * 8
    assert files[0] == files[1]
