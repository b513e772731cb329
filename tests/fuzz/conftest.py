"""What every test of the fuzz needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("fuzz.planted", "replay.cli_support")
