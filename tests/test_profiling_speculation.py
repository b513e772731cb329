"""The benchmark of prepared steps: both sides do the same work, and the table shows it."""

from __future__ import annotations

from typing import Any

import pytest

from profiling import speculation
from profiling.layout import Found
from sgalloc.bench.harness import LOOP, SUBJECT, Effort, alternate
from sgalloc.bench.twins import Shape, Twins

KINDS = (speculation.RESERVES, speculation.EAGLE, speculation.DFLASH, speculation.LENGTHS)
ROUNDS = Effort(seconds=0.0, least=25, warm_up=1, block=3)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_end_in_the_same_state(kind: str, page_size: int) -> None:
    twins = Twins(Shape(7, page_size, history=100, row_width=384), seed=3)
    twins.fill()
    start = twins.alloc.committed(twins.handles)
    times = alternate(speculation.sides(twins, kind), ROUNDS)
    assert {(key.side, key.step) for key in times} == {(SUBJECT, kind), (LOOP, kind)}
    assert len({len(series) for series in times.values()}) == 1
    speculation.compare(twins)
    assert (twins.alloc.committed(twins.handles) > start).all()
    counted = twins.alloc.decode_index(twins.handles)
    assert (counted > 0).all() == (kind != speculation.RESERVES)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda twins: setattr(twins.requests[2], "decode_batch_idx", 1),
        lambda twins: setattr(twins.requests[1].kv, "kv_committed_len", 5),
    ],
)
def test_a_difference_is_found(spoil: Any) -> None:
    twins = Twins(Shape(4, 16, history=100, row_width=384))
    twins.fill()
    speculation.compare(twins)
    spoil(twins)
    with pytest.raises(RuntimeError, match="differ"):
        speculation.compare(twins)


def test_a_run_is_complete_and_its_tables_hold_every_number() -> None:
    bench = speculation.run((1, 5), (1, 16), Effort(seconds=0.0, least=2))
    assert bench.states_compared == 2 * 2 * len(KINDS)
    found = Found([record.to_json() for record in bench.records])
    assert len(found.records) == 2 * 2 * 2 * len(KINDS)
    for page in (1, 16):
        table = speculation.table(found, page)
        assert [row[0] for row in table.rows] == [f"`{kind}`" for kind in KINDS]
        assert all(len(row) == len(table.columns) == 5 for row in table.rows)
        assert "batch 5: " in table.verdict
