"""The event of a device that has nothing to wait for."""

from __future__ import annotations

from typing import Any


class Done:
    """An event that is done: what it stands for is there already."""

    done = True

    def query(self) -> bool:
        """True."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


DONE = Done()
