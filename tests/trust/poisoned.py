"""What debug mode leaves in the tables, worked out from what public calls answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from host_support import open_handles

from sgalloc.device.poisoning import POISON


def read_later(alloc: Any) -> set[int]:
    """Rows that wait behind an event or for remote writers, or whose pages do: others may still
    read what is past their extents."""
    core = alloc._core
    rows = {*core.quarantine.row_ids().tolist(), *core.pins.row_ids().tolist()}
    for entry in core.quarantine.entries:
        rows |= {*entry.what.owners.tolist(), *entry.what.side_owners.tolist()}
        if entry.what.nodes and not entry.what.rows.size:
            return set(range(1, alloc.max_requests + 1))  # of a trim inside a shared prefix
    return rows


def assert_poison(alloc: Any) -> int:
    """Whatever no request owns is poison, in every table, and row 0 is zeros; entries looked at."""
    size, seen = alloc.page_size, 0
    held = {int(alloc.rows(h)[0]): int(alloc.allocated(h)[0]) for h in open_handles(alloc)}
    tables = [(alloc.req_to_token, 1), (alloc._core.device.page_table, size)]
    tables += [(alloc.window_table, 1)] if alloc.has_window else []
    waiting = read_later(alloc)
    for table, tokens in tables:
        if table is None:
            continue
        table = np.asarray(table)
        assert not table[0].any(), "the padding row"
        for row in range(1, alloc.max_requests + 1):
            if row not in waiting:
                past = table[row, held.get(row, 0) // tokens :]
                assert (past == POISON).all(), (row, held.get(row), past.tolist())
                seen += past.size
    return seen
