"""A plugin for pytest: the tests run with the fault that SGALLOC_PLANTED names."""

from __future__ import annotations

import os

import pytest
from fuzz.planted import FAULTS, planted


def pytest_configure(config: pytest.Config) -> None:
    name = os.environ["SGALLOC_PLANTED"]
    [fault] = [fault for fault in FAULTS if fault.name == name]
    context = planted(fault)
    context.__enter__()
    config.add_cleanup(lambda: context.__exit__(None, None, None))
