"""The walks of ``sgalloc fuzz`` with the tables on the GPU."""

from __future__ import annotations

import pytest

from sgalloc.fuzz.running import Setting, run_worlds


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_worlds_on_a_gpu_agree(first: int) -> None:
    found = run_worlds(Setting(seed=3, device="cuda"), first, first + 4)
    assert not found.failures, found.failures[0].message
    assert found.tally.worlds == 4
