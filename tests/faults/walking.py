"""A walk that meets a fault at each point of each of its calls, and goes on beside its twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from faults.injector import Injector, Make
from host_support import Query
from trust.walk import Walk, visible


def look(alloc: Any) -> dict[str, Any]:
    """All that a failed call has to leave alone: what anybody can see, and the staging slots."""
    found = visible(alloc)
    # DeviceFailed is a refusal, and counted.
    del found["refusals"]
    found["version"] = alloc._ledger.version
    found["staging"] = alloc.stats().staging.slots
    return found


class Polled(Query):
    """An event whose poll is one of the points."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self._injector = injector

    def query(self) -> bool:
        self._injector.hit("query")
        return super().query()


class FaultyWalk(Walk):
    """A walk whose calls are first made with faults.

    Attributes:
        seen: how often a call failed, by the name of the step and of the point.
    """

    def __init__(self, alloc: Any, seed: int, injector: Injector) -> None:
        super().__init__(alloc, seed)
        self.injector = injector
        self.seen: Counter[tuple[str, str]] = Counter()
        self._before: dict[str, Any] = {}
        if self.cache:
            real = alloc.prefix.match

            def match(*args: Any) -> Any:
                found = real(*args)
                self._before = look(alloc)  # a use, and a call of its own before what may fail
                return found

            alloc.prefix.match = match

    def event_after(self) -> Query | None:
        if super().event_after() is None:
            return None
        self.events[-1] = Polled(self.injector)
        return self.events[-1]

    def step_with_faults(self, kinds: Sequence[Make]) -> str:
        """One step, which failed at each point in each of these ways before it went through."""
        for k in count(1):
            for make in kinds:
                saved, self._before = self._save(), look(self.alloc)
                raised: BaseException | None = None
                said = ""
                with self.injector.at(k, make):
                    try:
                        said = self.step()
                    except (Exception, KeyboardInterrupt) as error:
                        raised = error
                if self.injector.fired is None:
                    assert raised is None
                    return said
                failed = said.partition(": ")[2]
                name = said.partition(": ")[0] or "raised"
                where = f"{self.injector.fired}, call {k} of {self.injector.names}"
                assert raised is not None or failed.startswith("DeviceFailed"), (said, where)
                assert "device is lost" not in said, where
                found = look(self.alloc)
                wrong = {key for key in found if found[key] != self._before.get(key)}
                assert found == self._before, f"{wrong} after {name} and {where}"
                self.alloc.check(device=True)
                # What is kept up on the way has heard of nothing that did not happen.
                assert self.alloc.digest(incremental=True) == found["digest"], where
                self._restore(saved)
                self.seen[name, self.injector.fired] += 1
        raise AssertionError

    def _save(self) -> tuple[Any, ...]:
        lists = (dict(self.text), list(self.ever), list(self.pinned), list(self.events), self.now)
        return self.random.getstate(), lists, [event.over for event in self.events]

    def _restore(self, saved: tuple[Any, ...]) -> None:
        state, lists, over = saved
        self.random.setstate(state)
        self.text, self.ever, self.pinned, self.events, self.now = lists
        for event, was in zip(self.events, over, strict=True):
            event.over = was
