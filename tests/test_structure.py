"""The house rules, held over the syntax tree: who writes C and A, who may import whom."""

from __future__ import annotations

import sys

import pytest
from house_rules import (
    Module,
    climbing_imports,
    clocks_and_prints,
    device_imports,
    imports_of,
    modules,
    undocumented,
    within,
    writes_of_c_and_a,
)

# A room may import rooms on its own floor or below. The longest name that fits counts.
FLOORS = {
    "sgalloc._version": 0,
    "sgalloc.errors": 0,
    "sgalloc.ownership": 0,
    "sgalloc.events": 0,
    "sgalloc.inputs": 0,
    "sgalloc.sizing": 0,
    "sgalloc.ranges": 0,
    "sgalloc.stats": 0,
    "sgalloc.wrapping": 0,
    "sgalloc.cuda_source": 0,
    "sgalloc.pages": 1,
    "sgalloc.ledger": 1,
    "sgalloc.plan": 2,
    "sgalloc.contiguity": 2,
    "sgalloc.device": 2,
    "sgalloc.nodes": 2,
    "sgalloc.prefix": 3,
    "sgalloc.quarantine": 3,
    "sgalloc.caching": 3,
    "sgalloc.cache_events": 3,
    "sgalloc.core": 3,
    "sgalloc.compacting": 3,
    "sgalloc.growing": 3,
    "sgalloc.returning": 3,
    "sgalloc.thinning": 3,
    "sgalloc.laws": 3,
    "sgalloc.window_laws": 3,
    "sgalloc.sparse_laws": 3,
    "sgalloc.exports": 3,
    "sgalloc.holdings": 3,
    "sgalloc.transfer": 3,
    "sgalloc.groups": 2,
    "sgalloc.giving_back": 3,
    "sgalloc.receiving": 3,
    "sgalloc.proving": 3,
    "sgalloc.upkeep": 3,
    "sgalloc.shape": 3,
    "sgalloc.pins": 3,
    "sgalloc.extents": 2,
    "sgalloc.trust": 3,
    "sgalloc.trust.old_behaviour": 5,
    "sgalloc.trust.rerun": 5,
    "sgalloc.interop": 3,
    "sgalloc.distributed": 3,
    "sgalloc.metrics": 3,
    "sgalloc.allocator": 4,
    "sgalloc.bench": 5,
    "sgalloc.timeline": 5,
    "sgalloc.retraction": 5,
    "sgalloc.admission": 5,
    "sgalloc.replay": 5,
    "sgalloc.speculative": 5,
    "sgalloc.fuzz": 5,
    "sgalloc.commands": 6,
    "sgalloc.cli": 6,
}
REFERENCE = "sgalloc.fuzz.reference"
HOST_ROOMS = ("ledger", "pages", "plan", "sizing", "nodes", "prefix", "inputs", "errors")
# They do time and print.
OUTSIDE = ("sgalloc.replay", "sgalloc.commands", "sgalloc.cli", "sgalloc.timeline", "sgalloc.bench")

# -- the package ---------------------------------------------------------------------------------


def test_c_and_a_are_written_in_the_ledger_alone() -> None:
    # The naive allocator of the fuzz has a C of its own.
    judged = [module for module in modules() if not within(module.name, REFERENCE)]
    writers = [place for module in judged for place in writes_of_c_and_a(module)]
    assert [place for place in writers if not place.startswith("sgalloc.ledger:")] == []
    assert len(writers) >= 4, "the ledger writes them, so the check must see that"


def test_host_rooms_import_no_device() -> None:
    rooms = {f"sgalloc.{room}" for room in HOST_ROOMS}
    found = [m for m in modules() if m.name in rooms]
    assert {m.name for m in found} == rooms
    assert [line for m in found for line in device_imports(m)] == []


def test_what_host_rooms_import_imports_no_device_either() -> None:
    by_name = {module.name: module for module in modules()}
    todo, seen = [f"sgalloc.{room}" for room in HOST_ROOMS], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        assert device_imports(by_name[name]) == []
        todo.extend(imported for imported, _ in imports_of(by_name[name]))
    assert len(seen) >= len(HOST_ROOMS)


def test_the_reference_shares_no_code_with_what_it_judges() -> None:
    rooms = [m for m in modules() if within(m.name, REFERENCE)]
    assert len(rooms) > 5
    assert [line for module in rooms for line in shared_code(module)] == []


def shared_code(module: Module) -> list[str]:
    """Imports of anything but the reference itself and the standard library."""
    return [
        f"{module.name}:{line} imports {name}"
        for name, line in imports_of(module)
        if not within(name, REFERENCE) and name.partition(".")[0] not in sys.stdlib_module_names
    ]


def test_no_room_imports_a_room_above() -> None:
    rooms = [module for module in modules() if module.name != "sgalloc"]
    assert len(rooms) > 20
    assert [line for module in rooms for line in climbing_imports(module, FLOORS)] == []


def test_the_allocator_looks_at_no_clock_and_prints_nothing() -> None:
    rooms = [m for m in modules() if not any(within(m.name, out) for out in OUTSIDE)]
    assert [line for module in rooms for line in clocks_and_prints(module)] == []


def test_everything_public_is_documented() -> None:
    assert [name for module in modules() for name in undocumented(module)] == []


# -- the checks can fail -------------------------------------------------------------------------

WRITING = (
    "ledger.committed[rows] = 3",
    "self._core.ledger.allocated[1:] += 16",
    "ledger.committed += 1",
    "ledger.committed = other",
    "a, ledger.allocated[0] = 1, 2",
    "del ledger.committed[0]",
    "for ledger.committed[0] in range(3): pass",
    "c = ledger.committed\nc[rows] = 0",
    "if (c := ledger.allocated) is not None: c[0] = 1",
    "c = ledger.committed[1:]\nc += 1",
    "c = ledger.committed.reshape(-1)\nd = c\nd[0] = 1",
    "np.add(a, b, out=ledger.committed)",
    "np.add(a, b, out=(ledger.committed[:3],))",
    "np.put(ledger.allocated, rows, 0)",
    "np.copyto(ledger.allocated, x)",
    "np.add.at(ledger.committed, rows, 1)",
    "ledger.committed.fill(0)",
    "ledger.allocated[2:].sort()",
    "ledger.committed.__setitem__(0, 1)",
    "setattr(ledger, 'committed', x)",
    "object.__setattr__(ledger, 'allocated', x)",
)
READING = (
    "c = ledger.committed.take(rows)\nc += 1",
    "x = ledger.committed[rows] + 1",
    "self.allocated = allocated",
    "stats(committed=ledger.committed.sum())",
    "np.minimum(ledger.committed, 3, out=scratch)",
    "x[ledger.committed] = 1",
)


@pytest.mark.parametrize("source", WRITING)
def test_a_write_elsewhere_is_seen(source: str) -> None:
    assert writes_of_c_and_a(Module.of("sgalloc.growing", source)) != []


@pytest.mark.parametrize("source", READING)
def test_reading_is_no_write(source: str) -> None:
    assert writes_of_c_and_a(Module.of("sgalloc.growing", source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import cupy",
        "import cupy.cuda as cc",
        "from torch import Tensor",
        "def f():\n    import torch",
        "from sgalloc.device import Device",
        "from sgalloc import device",
        "from .device.cpu import CpuDevice",
        "from . import device",
        "import importlib\nimportlib.import_module('cupy')",
        "__import__('torch.cuda')",
        "if TYPE_CHECKING:\n    from sgalloc.device import Device",
    ],
)
def test_a_device_in_a_host_room_is_seen(source: str) -> None:
    assert device_imports(Module.of("sgalloc.ledger", source)) != []
    assert device_imports(Module.of("sgalloc.ledger", "import numpy, devices, cupyx_not")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import sgalloc",
        "from sgalloc.sizing import ceil_align",
        "from sgalloc import sizing",
        "import numpy as np",
        "from ..calls import Call",
        "def f():\n    from sgalloc.fuzz import config",
    ],
)
def test_code_that_the_reference_shares_is_seen(source: str) -> None:
    assert shared_code(Module.of(f"{REFERENCE}.naive", source)) != []
    fine = "from collections import deque\nfrom sgalloc.fuzz.reference.words import Node"
    assert shared_code(Module.of(f"{REFERENCE}.naive", fine)) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("sgalloc.errors", "from sgalloc.pages import PagePool"),
        ("sgalloc.ledger", "from sgalloc import plan"),
        ("sgalloc.plan", "from .prefix import RadixTree"),
        ("sgalloc.device.cpu", "from ..allocator import KVAllocator"),
        ("sgalloc.prefix", "def f():\n    from sgalloc.allocator import KVAllocator"),
        ("sgalloc.allocator", "from sgalloc.replay.engine import Engine"),
        ("sgalloc.replay.engine", "import sgalloc.commands.replay"),
        ("sgalloc.attic", "import numpy"),
    ],
)
def test_an_import_from_above_is_seen(room: str, source: str) -> None:
    assert climbing_imports(Module.of(room, source), FLOORS) != []


def test_an_import_from_below_or_beside_is_fine() -> None:
    source = "from sgalloc.ledger import Ledger\nfrom .quarantine import Quarantine\nimport numpy"
    assert climbing_imports(Module.of("sgalloc.prefix", source), FLOORS) == []


@pytest.mark.parametrize(
    "source", ["import time", "from time import perf_counter", "print(1)", "sys.stdout.write(x)"]
)
def test_a_clock_or_a_print_is_seen(source: str) -> None:
    assert clocks_and_prints(Module.of("sgalloc.plan", source)) != []
    assert clocks_and_prints(Module.of("sgalloc.plan", "x.print()\ntimes = timeit = 1")) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("x = 1", ["m"]),
        ('"""M."""\ndef f(): pass', ["m.f"]),
        ('"""M."""\nclass C:\n    x = 1', ["m.C"]),
        ('"""M."""\nclass C:\n    """C."""\n    def f(self): pass', ["m.C.f"]),
        ('"""M."""\nclass C:\n    """C."""\n    @property\n    def f(self): return 1', ["m.C.f"]),
        ('"""M."""\ndef _f(): pass\nclass _C:\n    def f(self): pass', []),
    ],
)
def test_a_missing_docstring_is_seen(source: str, missing: list[str]) -> None:
    assert undocumented(Module.of("m", source)) == missing
