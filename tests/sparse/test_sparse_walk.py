"""Random walks over every verb, held against a model in plain Python after each call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from host_support import Query
from sparse.naive import Naive, Refused, up
from sparse.support import assert_drained, assert_whole, make, mapped, untouched

import sgalloc

VERBS = (
    "open", "extend", "logical_only", "decode", "decode", "reserve", "commit", "trim", "to_sparse",
    "release", "mixed", "retract", "event", "batch",
)  # fmt: skip


class Walk:
    """Calls of all kinds in random order, on an allocator and on its model."""

    def __init__(self, size: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.size = size
        buffer = int(self.rng.integers(1, 3 * size + 1))
        scratch = int(self.rng.choice([0, 1, size + 1]))
        device = int(self.rng.integers(14, 30))
        self.alloc = make(size, device, buffer, scratch, ratio=2.5, rows=6)
        width = self.alloc.row_width
        self.model = Naive(size, int(2.5 * device), device, width, buffer, scratch)
        self.events: list[Query] = []
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    # -- drawing ---------------------------------------------------------------------------

    def some(self, most: int = 3) -> list[int]:
        handles = list(self.model.open)
        count = min(len(handles), int(self.rng.integers(1, most + 1)))
        return [handles[i] for i in self.rng.permutation(len(handles))[:count]]

    def tokens(self, pages: int) -> int:
        edges = [0, 1, self.size - 1, self.size, self.size + 1]
        if self.rng.random() < 0.4:
            return int(self.rng.choice(edges))
        return int(self.rng.integers(0, pages * self.size + 2))

    def event(self) -> Query | None:
        if self.rng.random() < 0.6:
            return None
        made = Query(over=bool(self.rng.random() < 0.2))
        self.events.append(made)
        return made

    # -- comparing -------------------------------------------------------------------------

    def both(self, name: str, on_model: Any, on_alloc: Any) -> bool:
        """One call on either; whether it was done."""
        self.alloc.settle()
        self.model.settle()
        try:
            expected = on_model()
        except Refused as refused:
            error = getattr(sgalloc, refused.why)
            with untouched(self.alloc), pytest.raises(error) as said:
                on_alloc()
            if refused.group is not None:
                assert (said.value.group, said.value.need) == (refused.group, refused.need)
                assert said.value.free == self.model.free[refused.group]
            self.refused[f"{name} {refused.why} {refused.group}"] += 1
            return False
        got = on_alloc()
        if isinstance(expected, dict):
            assert got.need == expected and got.gain == {"logical": 0, "device": 0}
            assert got.num_new_pages == sum(expected.values())
        self.done[name] += 1
        return True

    def compare(self) -> None:
        alloc, model = self.alloc, self.model
        assert {g: alloc.available(g) for g in model.free} == model.free
        handles = list(model.open)
        requests = list(model.open.values())
        assert alloc.committed(handles).tolist() == [r.c for r in requests]
        assert alloc.allocated(handles).tolist() == [r.n * self.size for r in requests]
        assert alloc.decode_index(handles).tolist() == [r.steps for r in requests]
        for handle, r in model.open.items():
            assert set(mapped(alloc, handle)) == r.mapped
            assert alloc.scratch_pages(handle).size == r.scratch
            buffer = min(r.dev, model.buffer) if r.sparse else 0
            assert alloc.buffer_pages(handle).size == buffer
        assert_whole(alloc)
        groups = alloc.stats().groups
        assert sum(w[1] for w in model.waiting) == groups["logical"].quarantined
        assert sum(w[2] for w in model.waiting) == groups["device"].quarantined
        self.ask_for_new()

    def ask_for_new(self) -> None:
        """`fits` of new requests says what opening and extending them would."""
        lengths = [self.tokens(4) for _ in range(int(self.rng.integers(0, 4)))]
        leaving = self.some(2) if self.model.open and self.rng.random() < 0.5 else []
        room = {
            "logical": self.model.free["logical"] + sum(self.model.open[h].n for h in leaving),
            "device": self.model.free["device"]
            + sum(self.model.open[h].dev + self.model.open[h].scratch for h in leaving),
        }
        pages = sum(up(length, self.size) for length in lengths)
        rows = self.alloc.stats().rows.free + len(leaving)
        expected = len(lengths) <= rows and pages <= min(room.values())
        assert self.alloc.fits(lengths, after_releasing=leaving) == expected

    # -- verbs -----------------------------------------------------------------------------

    def step(self, name: str) -> None:
        if not self.model.open and name not in ("open", "event"):
            name = "open"
        getattr(self, f"_{name}")()
        self.compare()

    def _open(self) -> None:
        if self.alloc.stats().rows.free:
            (handle,) = self.alloc.open().tolist()
            self.model.settle()
            self.model.open[handle] = _request()

    def grow(self, name: str, items: list[tuple[str, int, int]], only: bool = False) -> None:
        """Ask, then do, by a plan; the answer, the need and the outcome agree."""
        kinds = {
            kind: ([h for k, h, _ in items if k == kind], [n for k, _, n in items if k == kind])
            for kind in ("extend", "decode", "reserve")
        }
        free = self.alloc.available("logical"), self.alloc.available("device")

        def by_plan() -> Any:
            plan = self.alloc.plan(**kinds, logical_only=only)
            leaving = self.some(2)
            net = plan.need_without(self.alloc.rows(leaving).astype(np.int64))
            room = {
                "logical": free[0] + sum(self.model_before[h][0] for h in leaving),
                "device": free[1] + sum(self.model_before[h][1] for h in leaving),
            }
            fits = all(count <= room[group] for group, count in net.items())
            assert self.alloc.fits(plan, after_releasing=leaving) == fits
            before = plan.fits
            try:
                applied = self.alloc.apply(plan)
            except sgalloc.OutOfPages:
                assert not before
                raise
            assert before
            after = self.alloc.available("logical"), self.alloc.available("device")
            assert tuple(plan.need.values()) == tuple(
                a - b for a, b in zip(free, after, strict=True)
            )
            return applied

        self.model_before = {h: (r.n, r.dev + r.scratch) for h, r in self.model.open.items()}
        self.both(name, lambda: self.model.grow(items, only), by_plan)

    def _extend(self, only: bool = False) -> None:
        handles = self.some()
        lengths = [self.model.open[h].c + self.tokens(5) for h in handles]
        items = [("extend", h, n) for h, n in zip(handles, lengths, strict=True)]
        name = "logical_only" if only else "extend"
        if self.rng.random() < 0.5:
            self.grow(name, items, only)
            return
        self.both(
            name,
            lambda: self.model.grow(items, only),
            lambda: self.alloc.extend(handles, lengths, logical_only=only),
        )

    def _logical_only(self) -> None:
        self._extend(only=True)

    def _decode(self) -> None:
        handles, tokens = self.some(6), 1 if self.rng.random() < 0.7 else self.tokens(2)
        out = np.full(len(handles) * tokens, -1, np.int64)
        done = self.both(
            "decode",
            lambda: self.model.grow([("decode", h, tokens) for h in handles]),
            lambda: self.alloc.decode(handles, tokens, out=out),
        )
        if done:
            start = self.alloc.committed(handles) - tokens
            assert out.tolist() == self.alloc.slots(handles, start, start + tokens).tolist()

    def _batch(self) -> None:
        handles = self.some(6)
        batch = self.alloc.batch(handles)
        for _ in range(4):
            self.both(
                "batch",
                lambda: self.model.grow([("decode", h, 1) for h in handles]),
                lambda: self.alloc.decode(batch),
            )
            self.compare()

    def _reserve(self) -> None:
        handles, tokens = self.some(6), self.tokens(2)
        self.both(
            "reserve",
            lambda: self.model.grow([("reserve", h, tokens) for h in handles]),
            lambda: self.alloc.reserve(handles, tokens),
        )

    def _commit(self) -> None:
        (handle,) = self.some(1)
        r = self.model.open[handle]
        tokens = int(self.rng.integers(0, r.n * self.size - r.c + 2))
        self.both(
            "commit",
            lambda: self.model.commit(handle, tokens),
            lambda: self.alloc.commit(handle, tokens),
        )

    def _trim(self) -> None:
        handles, event = self.some(2), self.event()
        lengths = [int(self.rng.integers(0, self.model.open[h].c + 2)) for h in handles]
        self.both(
            "trim",
            lambda: self.model.trim(handles, lengths, event),
            lambda: self.alloc.trim(handles, lengths, after=event),
        )

    def _to_sparse(self) -> None:
        handles, event = self.some(2), self.event()
        if self.rng.random() < 0.8:
            handles = [h for h in handles if not self.model.open[h].sparse]
        before = {h: mapped(self.alloc, h) for h in handles}
        done = self.both(
            "to_sparse",
            lambda: self.model.to_sparse(handles, event),
            lambda: self.alloc.to_sparse(handles, after=event),
        )
        for handle in handles if done else []:
            now = mapped(self.alloc, handle)
            assert all(now[n] == page for n, page in before[handle].items() if n in now)

    def _release(self) -> None:
        handles, event = self.some(2), self.event()
        self.both(
            "release",
            lambda: self.model.release(handles, event),
            lambda: self.alloc.release(handles, after=event),
        )

    def _mixed(self) -> None:
        handles = self.some(6)
        kinds = self.rng.choice(["extend", "decode", "reserve"], len(handles)).tolist()
        items = []
        for kind, handle in zip(kinds, handles, strict=True):
            tokens = self.tokens(2)
            if kind == "extend":
                tokens += self.model.open[handle].c
            items.append((kind, handle, tokens))
        self.grow("mixed", items, only=bool(self.rng.random() < 0.3))

    def _retract(self) -> None:
        """As many requests leave as have to, and no more; then the step goes through."""
        handles = list(self.model.open)
        try:
            plan = self.alloc.plan(decode=(handles, self.size))
        except sgalloc.AllocError:
            return
        order = self.rng.permutation(len(handles))
        gone = sgalloc.retraction.choose_victims(self.alloc, handles, plan, order)
        victims = gone.victims.tolist()
        assert victims == [handles[i] for i in order[::-1][: len(victims)]]
        if victims and gone.fits:
            assert not self.alloc.fits(plan, after_releasing=victims[:-1])
        self.both(
            "retract",
            lambda: self.model.release(victims, None),
            lambda: self.alloc.release(victims),
        )
        rest = [h for h in handles if h not in victims]
        items = [("decode", h, self.size) for h in rest]
        done = self.both(
            "step", lambda: self.model.grow(items), lambda: self.alloc.decode(rest, self.size)
        )
        assert done == gone.fits

    def _event(self) -> None:
        if self.events:
            self.events.pop(int(self.rng.integers(len(self.events)))).over = True
        self.alloc.settle()
        self.model.settle()

    def end(self) -> None:
        self.alloc.release(list(self.model.open))
        for event in self.events:
            event.over = True
        self.alloc.settle()
        assert_drained(self.alloc)


def _request() -> Any:
    from sparse.naive import Request

    return Request()


@pytest.mark.parametrize("size", [1, 2, 3, 16, 64])
def test_whatever_is_called_the_model_says_the_same(size: int) -> None:
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for seed in range(12):
        walk = Walk(size, seed)
        for name in walk.rng.choice(VERBS, 120).tolist():
            walk.step(name)
        walk.end()
        done += walk.done
        refused += walk.refused
    for name in {*VERBS} - {"open", "event"}:
        assert done[name] > 10, (name, done)
    for name in ("extend OutOfPages device", "to_sparse WrongState None", "decode WrongState None"):
        assert refused[name] >= 1, (name, refused)
    assert sum(n for name, n in refused.items() if name.endswith("OutOfPages logical")) >= 1
