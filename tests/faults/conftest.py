"""What every test of faults needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("faults.injector", "faults.walking", "trust.walk")
