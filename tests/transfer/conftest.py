"""What every test of disaggregated serving needs."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("transfer.walking", "transfer.transfer_support")
