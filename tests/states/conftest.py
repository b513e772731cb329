"""What every test of the states of a request needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "states.world", "states.steps", "states.book", "transfer.group_support"
)
