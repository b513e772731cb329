"""What every test of trust needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("trust.walk", "trust.journal_support")
