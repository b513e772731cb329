"""Two processes move the bytes of their pools by the page lists, and every token is compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gloo import run_ranks
from transfer import nodes

pytest.importorskip("torch", reason="torch moves the bytes")
SECONDS = 60  # what a stalled machine is given before the test is called hung


def test_content_tells_every_token_apart() -> None:
    values = np.concatenate(
        [
            nodes.content(nodes.prompt_of(name), writer)[(12 if cached and at else 0) :].ravel()
            for writer in range(nodes.WRITERS)
            for at, (name, (_, cached)) in enumerate(reversed(nodes.REQUESTS.items()))
        ]
    )
    assert np.unique(values).size == values.size


def test_bytes_arrive_where_the_tables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = (nodes.PREFILL, nodes.DECODE)
    sent, received = run_ranks(nodes.run, ranks, tmp_path, monkeypatch, SECONDS)
    lengths = [nodes.REQUESTS[name][0] for name in nodes.FINISHED]
    assert received["compared"] == nodes.WRITERS * sum(lengths)
    # ceil(27 / 4) = 7, (30 - 12) / 4 up = 5, (21 - 12) / 4 up = 3, and nothing for the last.
    assert sent["pages"] == nodes.WRITERS * (7 + 5 + 3 + 0)
    assert nodes.WRITERS * 3 < sent["pieces"] < sent["pages"], (
        "runs were merged, and there are some"
    )
