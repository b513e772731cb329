"""What the GPU benchmark of groups refuses: a second launch, and a twin that did other work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stand_in_cuda import Cuda, stand_in

import sgalloc
from profiling.gpu import clock, groups
from sgalloc.bench.harness import Effort

pytestmark = pytest.mark.not_in_debug_mode("a benchmark is of an allocator as it is")

SHORT = Effort(seconds=0.0, least=4, warm_up=2, block=2)


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with stand_in() as state:
        yield state


@pytest.mark.parametrize("name", [groups.RESERVES, "eagle step", "reserve, window", "compact"])
def test_a_second_launch_is_found(cuda: Cuda, name: str) -> None:
    case = next(case for case in groups.CASES if case.name == name)

    def twice(world: groups.World) -> Any:
        before, call, after = case.script(world)

        def slots_too() -> Any:
            done = call()
            world.alloc.slots(world.batch, 0, 1)
            return done

        return before, slots_too, after

    spoilt, shape = case._replace(script=twice), groups.shape_for(3, 16)
    groups.measure_case(case, shape, clock.Gpu(), "cuda", SHORT, {})
    with pytest.raises(RuntimeError, match=f"{name} made [12] launches and 0 copies, and not [01]"):
        groups.measure_case(spoilt, shape, clock.Gpu(), "cuda", SHORT, {})


@pytest.mark.parametrize("what", ["table", "window", "map", "ledger"])
def test_a_twin_that_did_other_work_is_found(cuda: Cuda, what: str) -> None:
    mine, twin = (groups.World("mapped", groups.shape_for(3, 16), at) for at in ("cuda", "cpu"))
    groups.agree("a step", mine.alloc, twin.alloc)
    if what == "ledger":
        twin.alloc.trim(twin.batch, 900)
        with pytest.raises(RuntimeError, match="GPU and CPU differ after a step"):
            groups.agree("a step", mine.alloc, twin.alloc)
        return
    device = mine.alloc._core.device
    array = {"table": device.table, "window": device.side_table, "map": device.side_map}[what]
    array[array != 0] += 1
    with pytest.raises((RuntimeError, sgalloc.LawViolation)):
        groups.agree("a step", mine.alloc, twin.alloc)
