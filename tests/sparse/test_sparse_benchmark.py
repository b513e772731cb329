"""The benchmark of sparse requests measures what it says."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from profiling import sparse_verbs
from profiling.sparse_verbs import BUFFER, HISTORY, PLAIN, SCRATCH, SPARSE
from sgalloc.bench.harness import Effort, Key, alternate


@pytest.mark.parametrize("page", [1, 16])
def test_both_sides_do_the_same_and_the_sparse_one_holds_a_buffer(page: int) -> None:
    plain, sparse = (sparse_verbs.make(3, page, kind) for kind in (False, True))
    sides = [sparse_verbs.decode_side(alloc, 3) for alloc in (plain, sparse)]
    held = 3 * (BUFFER // page + 1 + -(-SCRATCH // page))
    room = sparse.stats().groups["device"].total - held
    assert sparse.available("device") == room
    times = alternate(sides, Effort(0.0, least=70, warm_up=1))
    assert sparse.available("device") == room
    handles = sparse._ledger.handle[1:]
    assert sparse.committed(handles).tolist() == plain.committed(handles).tolist()
    assert sum(sparse.committed(handles) > HISTORY)
    grows = {side: len(times[Key(side, "decode", "steps that grow")]) for side in (PLAIN, SPARSE)}
    assert grows[PLAIN] == grows[SPARSE] > 0
    sparse.check(device=True)


def test_the_command_shows_every_verb() -> None:
    result = CliRunner().invoke(
        sparse_verbs.main, ["--batch", "2", "--page", "16", "--seconds", "0"]
    )
    assert result.exit_code == 0, result.output
    for verb in ("decode steps that grow", "extend", "to_sparse", "release"):
        assert verb in result.output
