"""Seeded random walks over every verb that writes a table or refuses to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gpu.naive import exported, gathered
from gpu.twins import OUT_KINDS, Both, Twins, host

OPERATIONS = (
    "open", "extend", "extend_with_out", "decode", "decode_with_out", "reserve", "reserve_each",
    "reserve_with_out", "reserve_on_device", "commit", "trim", "release", "mixed", "mixed_with_out",
    "slots", "slots_with_out", "exports", "empty", "refused", "batch",
)  # fmt: skip
WITH_CACHE = ("release_with_tokens", "open_with_prefix", "publish")
_FAMILIES = 3  # prompts of one family share a prefix
_EXPORT_ROWS = 6


class Walk:
    """Calls of all kinds in random order, on twins.

    Args:
        twins: on whom.
        seed: of everything that is drawn.
        out_kinds: what ``out`` may be.
    """

    def __init__(
        self, twins: Twins, seed: int, prefix_cache: bool, out_kinds: tuple[str, ...] = OUT_KINDS
    ) -> None:
        self.twins = twins
        self.rng = np.random.default_rng(seed)
        self.cache = prefix_cache
        self.kinds = out_kinds
        self.done: Counter[str] = Counter()
        self.prompts: dict[int, np.ndarray] = {}
        self.gone: list[int] = []
        width = twins.cpu.row_width // twins.cpu.page_size
        self.tables = Both(*(a.page_tables(_EXPORT_ROWS, width) for a in (twins.cpu, twins.gpu)))

    def run(self, rounds: int) -> None:
        """Every operation once a round, in random order, and opens in between."""
        names = [*OPERATIONS, *(WITH_CACHE if self.cache else ())]
        for _ in range(rounds):
            for name in self.rng.permutation(names).tolist():
                if len(self.twins.handles) < 3 and name != "open":
                    self.step("open")
                self.step(name)
            self.twins.check()

    def step(self, name: str) -> None:
        """One operation; counted where it was not refused."""
        both = getattr(self, f"_{name}")()
        if both is not None and not both.refused:
            self.done[name] += 1

    # -- drawing ---------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.twins.cpu.page_size

    def some(self, most: int = 5) -> list[int]:
        """A few open requests, in any order."""
        handles = self.twins.handles
        count = int(self.rng.integers(1, min(most, len(handles)) + 1))
        return list(self.rng.permutation(handles)[:count].tolist())

    def tokens(self, count: int, most_pages: int = 3) -> np.ndarray:
        """A few tokens for each of so many requests, page edges among them."""
        size = self.size
        edges = np.array([0, 1, size - 1, size, size + 1, 2 * size])
        drawn = self.rng.integers(0, most_pages * size + 2, count)
        return np.where(self.rng.random(count) < 0.3, self.rng.choice(edges, count), drawn)

    def kind(self) -> str:
        return str(self.rng.choice(self.kinds))

    def committed(self, handles: list[int]) -> np.ndarray:
        return self.twins.cpu.committed(handles)

    def prompt(self) -> np.ndarray:
        """Ids that agree with those of the same family up to somewhere."""
        width, size = self.twins.cpu.row_width, self.size
        ids = np.arange(width) + 1_000_000 * int(self.rng.integers(_FAMILIES))
        cut = int(self.rng.integers(0, 6)) * size
        ids[cut:] += 100_000_000 * int(self.rng.integers(1, 1000))
        return ids

    # -- operations ------------------------------------------------------------------------

    def _open(self) -> Both:
        count = int(self.rng.integers(1, 4))
        both = self.twins.call(lambda a, out: a.open(count), opens=True)
        for handle in [] if both.refused else both.cpu.tolist():
            self.prompts[handle] = self.prompt()
        return both

    def _extend(self, with_out: bool = False) -> Both:
        h = self.some()
        start = self.committed(h)
        lengths = start + self.tokens(len(h), 6)
        size = int((lengths - start).sum()) if with_out else None
        return self.twins.call(lambda a, out: a.extend(h, lengths, out=out), size, self.kind())

    def _extend_with_out(self) -> Both:
        return self._extend(with_out=True)

    def _decode(self, with_out: bool = False) -> Both:
        h = self.some(12)
        tokens: Any = 1 if self.rng.random() < 0.5 else self.tokens(len(h), 2)
        size = int(np.broadcast_to(tokens, len(h)).sum()) if with_out else None
        return self.twins.call(lambda a, out: a.decode(h, tokens, out=out), size, self.kind())

    def _decode_with_out(self) -> Both:
        return self._decode(with_out=True)

    def _reserve(self) -> Both:
        h, tokens = self.some(12), int(self.tokens(1)[0])
        return self.twins.call(lambda a, out: a.reserve(h, tokens))

    def _reserve_each(self) -> Both:
        h = self.some(12)
        tokens = self.tokens(len(h))
        return self.twins.call(lambda a, out: a.reserve(h, tokens, rounding="host"))

    def _reserve_with_out(self) -> Both:
        h = self.some(12)
        tokens = self.tokens(len(h))
        return self.twins.call(
            lambda a, out: a.reserve(h, tokens, out=out), int(tokens.sum()), self.kind()
        )

    def _reserve_on_device(self) -> Both:
        h = self.some(12)
        tokens: Any = self.tokens(len(h)) if self.rng.random() < 0.5 else int(self.tokens(1)[0])
        return self.twins.call(lambda a, out: a.reserve(h, tokens, rounding="device"))

    def _commit(self) -> Both:
        h = self.some(12)
        room = self.twins.cpu.allocated(h) - self.committed(h)
        accepted = self.rng.integers(0, room + 1)
        return self.twins.call(lambda a, out: a.commit(h, accepted))

    def _trim(self) -> Both:
        h = self.some(3)
        lengths = self.rng.integers(0, self.committed(h) + self.size)
        return self.twins.call(lambda a, out: a.trim(h, lengths))

    def _release(self) -> Both:
        return self._give_back(with_tokens=False)

    def _release_with_tokens(self) -> Both:
        return self._give_back(with_tokens=True)

    def _give_back(self, with_tokens: bool) -> Both:
        h = self.some(2)
        known = [self.prompts[handle] for handle in h] if with_tokens else None
        both = self.twins.call(lambda a, out: a.release(h, tokens=known))
        assert not both.refused, "whatever is open can be released"
        self.twins.closed(h)
        self.gone += h
        return both

    def _open_with_prefix(self) -> Both:
        prompt = self.prompt()
        match = self.twins.call(lambda a, out: a.prefix.match(prompt))
        both = self.twins.call(lambda a, out: a.open_with_prefix(match.of(a)), opens=True)
        for handle in [] if both.refused else both.cpu.tolist():
            self.prompts[handle] = prompt
        return both

    def _publish(self) -> Both:
        h = self.some(3)
        known = [self.prompts[handle] for handle in h]
        return self.twins.call(lambda a, out: a.prefix.publish(h, known))

    def _mixed(self, with_out: bool = False) -> Both | None:
        h = self.some(9)
        parts = np.array_split(np.array(h), 3)
        lengths = self.committed(parts[0]) + self.tokens(parts[0].size)
        decoded, reserved = self.tokens(parts[1].size, 1), self.tokens(parts[2].size)
        plans = self.twins.call(
            lambda a, out: a.plan((parts[0], lengths), (parts[1], decoded), (parts[2], reserved))
        )
        if plans.refused:
            return plans
        asked = int((plans.cpu.stop - plans.cpu.start).sum()) if with_out else None
        both = self.twins.call(lambda a, out: a.apply(plans.of(a), out=out), asked, self.kind())
        changed = not both.refused and (plans.cpu.num_new_pages or parts[0].size + parts[1].size)
        if changed:
            again = self.twins.call(lambda a, out: a.apply(plans.of(a)))
            assert again.refused, "a plan that was applied is stale"
        return both

    def _mixed_with_out(self) -> Both | None:
        return self._mixed(with_out=True)

    def _slots(self, with_out: bool = False) -> Both:
        h = self.some()
        held = self.twins.cpu.allocated(h)
        start = self.rng.integers(0, held + 1)
        stop = start + self.rng.integers(0, held - start + 1)
        if with_out:
            size = int((stop - start).sum())
            return self.twins.call(
                lambda a, out: a.slots(h, start, stop, out=out) is out, size, self.kind()
            )
        both = self.twins.call(lambda a, out: a.slots(h, start, stop))
        assert np.array_equal(both.cpu, gathered(self.twins.gpu, h, start, stop))
        return both

    def _slots_with_out(self) -> Both:
        return self._slots(with_out=True)

    def _exports(self) -> Both:
        h = self.some(_EXPORT_ROWS)
        lengths = self.rng.integers(0, self.twins.cpu.allocated(h) + 1)
        both = self.twins.call(lambda a, out: self.tables.of(a).update(h, lengths) is None)
        width = self.twins.cpu.row_width // self.size
        expected = exported(self.twins.gpu, h, lengths.tolist(), width)
        for tables in (self.tables.cpu, self.tables.gpu):
            for name, part in expected._asdict().items():
                assert np.array_equal(host(getattr(tables, name))[: len(part)], part), name
        return both

    def _empty(self) -> Both:
        h, device = self.some(), self.twins.gpu._core.device
        before = device.launches
        for do in (
            lambda a, out: a.extend([], []),
            lambda a, out: a.decode([]),
            lambda a, out: a.decode(h, 0),
            lambda a, out: a.reserve([], 5, rounding="device"),
            lambda a, out: a.reserve(h, 0),
            lambda a, out: a.commit([], []),
            lambda a, out: a.trim([], []),
            lambda a, out: a.release([]),
            lambda a, out: a.slots([], [], []),
        ):
            both = self.twins.call(do)
            assert not both.refused
        self.twins.call(lambda a, out: a.decode([], out=out), 0, self.kind())
        assert device.launches == before
        return both

    def _batch(self) -> Both:
        """A decode loop over a batch that is kept, C and A found side by side in it."""
        h = self.some(8)
        pair = self.twins.call(lambda a, out: a.batch(h).rows.tolist())
        kept = Both(self.twins.cpu.batch(h), self.twins.gpu.batch(h))
        for _ in range(3):
            tokens = self.tokens(len(h), 1)
            self.twins.call(lambda a, out, n=tokens: a.reserve(kept.of(a), n, rounding="device"))
            self.twins.call(lambda a, out, n=tokens: a.commit(kept.of(a), n // 2))
            self.twins.call(lambda a, out: a.decode(kept.of(a), out=out), len(h), self.kind())
        return pair

    def _refused(self) -> Both:
        twins = self.twins
        h = self.some(2)
        far = twins.cpu.row_width + 1
        pages = twins.cpu.num_pages * self.size + 1
        free = twins.cpu.stats().rows.free
        calls: list[tuple[Any, int | None]] = [
            (lambda a, out: a.extend(h, far), None),
            (lambda a, out: a.reserve(h, far, rounding="device"), None),
            (lambda a, out: a.reserve(h[:1], pages, rounding="device"), None),
            (lambda a, out: a.decode([h[0], h[0]]), None),
            (lambda a, out: a.decode(h, -1), None),
            (lambda a, out: a.commit(h, far), None),
            (lambda a, out: a.open(free + 1), None),
            (lambda a, out: a.slots(h, 0, far), None),
            (lambda a, out: a.release([h[0], h[0]]), None),
            (lambda a, out: a.decode(h, out=out), len(h) + 1),
            (lambda a, out: a.decode(h, out=out), 0),
        ]
        if self.gone:
            calls.append((lambda a, out: a.decode([*h, self.gone[0]]), None))
        for do, size in calls:
            assert twins.call(do, size, self.kind()).refused
        return twins.call(lambda a, out: a.settle())
