"""What every test of snapshots and digests needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("trust.walk")
