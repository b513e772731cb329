"""The walks with the allocator's other device, as far as it goes without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

from stand_in_cuda import stand_in

from sgalloc.fuzz.config import Chooser, any_config
from sgalloc.fuzz.walk import Tally, run_world


def test_worlds_on_a_stand_in_agree() -> None:
    """Events, arrays for slots, tables and maps are the device's."""
    tally = Tally()
    with stand_in() as cuda:
        for number in range(12):
            # The stand-in writes no page tables.
            config = replace(any_config(Chooser(random.Random(number).randint)), page_table=False)
            made, failure = run_world(6, number, "cuda", config=config, calls=250)
            assert failure is None, failure.message
            tally.add(made)
        assert "assign_both" in cuda.launches and "page_watermarks" in cuda.launches
    assert tally.calls >= 12 * 250 and tally.seen["restore"] > 3
