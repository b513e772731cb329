"""What every test of the replay needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("replay.cli_support", "replay.engine_support")


@pytest.fixture(autouse=True)
def _restored_ctrl_c() -> Iterator[None]:
    """Whatever a command does to Ctrl-C, the rest of the tests can be interrupted."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
