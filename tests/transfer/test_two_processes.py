"""Two processes move the bytes of their pools by the page lists, and every token is compared."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    torch_distributed = pytest.importorskip("torch.distributed")
    if not torch_distributed.is_available() or not torch_distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    if os.path.isdir("/sys/class/net/lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for rank in (nodes.PREFILL, nodes.DECODE):
        end, other = context.Pipe(duplex=False)
        process = context.Process(
            target=nodes.run, args=(rank, str(tmp_path / "store"), other), daemon=True
        )
        process.start()
        other.close()
        processes.append(process)
        ends.append(end)
    try:
        found = [outcome(end) for end in ends]
        for process in processes:
            process.join(SECONDS)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    sent, received = found
    lengths = [nodes.REQUESTS[name][0] for name in nodes.FINISHED]
    assert received["compared"] == nodes.WRITERS * sum(lengths)
    # ceil(27 / 4) = 7, (30 - 12) / 4 up = 5, (21 - 12) / 4 up = 3, and nothing for the last.
    assert sent["pages"] == nodes.WRITERS * (7 + 5 + 3 + 0)
    assert nodes.WRITERS * 3 < sent["pieces"] < sent["pages"], (
        "runs were merged, and there are some"
    )


def outcome(end: Any) -> dict[str, Any]:
    if not end.poll(SECONDS):
        pytest.fail(f"a node said nothing for {SECONDS} s")
    found = end.recv()
    assert isinstance(found, dict), found
    return found
