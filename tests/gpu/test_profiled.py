"""What is profiled runs, and CUDA says of the kernels what the rule for occupancy says."""

from __future__ import annotations

import nvtx
import pytest
from cupy.cuda import runtime
from gpu.spy import Spy

from profiling import compiled
from profiling.gpu import profiled, resources


def test_cuda_and_the_rule_agree_on_every_kernel() -> None:
    data = resources.measure()
    assert {row["kernel"] for row in data["rows"]} == set(resources.kernels())
    assert all(row["local_bytes"] == 0 for row in data["rows"]), "a kernel spills"
    major, minor = (int(part) for part in data["compute_capability"].split("."))
    chip = compiled.CHIPS.get(10 * major + minor)
    if chip is None:
        pytest.skip(f"no rule for compute capability {major}.{minor}")
    for row in data["rows"]:
        share = compiled.occupancy(chip, row["registers"], row["shared_bytes"])
        assert row["occupancy"] == pytest.approx(share, abs=1e-3), row["kernel"]


def test_each_profiled_step_launches_its_kernel_once(
    spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = profiled.steps("cuda")
    inside: list[int] = []

    class Domain:
        def get_event_attributes(self, message: str) -> str:
            return message

        def push_range(self, message: str) -> None:
            spy.calls.clear()

        def pop_range(self) -> None:
            inside.append(spy.launches)

    monkeypatch.setattr(profiled, "steps", lambda device: ready)
    monkeypatch.setattr(nvtx, "get_domain", lambda name: Domain())
    profiled.run(1, "cuda", runtime.deviceSynchronize)
    # What is staged for a graph is launched by `captured`, which the spy does not count.
    counted = [case for case in profiled.CASES if not case.kernel.startswith("replay_")]
    assert sum(inside) == len(counted) and max(inside) == 1
