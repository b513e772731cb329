"""What every test of faults needs."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("faults.injector", "faults.walking", "trust.walk")


@pytest.fixture(autouse=True)
def not_in_debug_mode() -> None:
    """Faults are injected into what verbs ask of the device, and not into what debug mode asks."""
    if os.environ.get("SGALLOC_DEBUG") == "1":
        pytest.skip("not in debug mode: its own calls into the device would fail, too")
