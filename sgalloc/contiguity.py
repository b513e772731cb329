"""How contiguous page ids are: transfer engines and attention like long runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgalloc.inputs import Int64
from sgalloc.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive ascending page ids, within each request.

    Attributes:
        per_request: runs of each request, int64 ``(n,)``.
        pages: pages of each request, int64 ``(n,)``.
        mean: pages a run, over all requests; 0.0 without pages.
        lengths: the run lengths that occur, pages, int64, ascending.
        counts: how often each of ``lengths`` occurs, int64.
    """

    per_request: Int64
    pages: Int64
    mean: float
    lengths: Int64
    counts: Int64


def page_runs(ledger: Ledger, rows: Int64) -> Runs:
    """The runs in the page lists of ``rows``, int64 ``(n,)``."""
    pages = ledger.page_counts(rows)
    owners, ids = ledger.page_range(rows, np.zeros_like(rows), pages)
    if not ids.size:
        none = np.empty(0, np.int64)
        return Runs(np.zeros_like(rows), pages, 0.0, none, none)
    breaks = (np.diff(ids) != 1) | (np.diff(owners) != 0)
    starts = np.concatenate(([0], breaks.nonzero()[0] + 1))
    length = np.diff(np.append(starts, ids.size))
    runs_of_row = np.bincount(owners[starts], minlength=ledger.max_requests + 1)
    lengths, counts = np.unique(length, return_counts=True)
    return Runs(runs_of_row[rows], pages, ids.size / starts.size, lengths, counts)
