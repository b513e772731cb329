"""Random calls on requests in all states at once, each compared with the book, then drained."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from states.steps import Verb, grow, verbs_of
from states.world import CONFIGS, World, ids_of

STEPS, SEEDS = 150, 12
# Small pools, where calls are refused for want of pages. With a cache nothing is ever evicted for
# a growth, since the book knows no order of use; `clear` empties it.
POOLS = {
    "plain": {"pages": 14},
    "prefix cache": {"pages": 400},
    "window": {"pages": 22, "window_pages": 9},
    "window, map, prefix": {"pages": 400, "window_pages": 400},
    "sparse": {"pages": 11, "ratio": 2},
}

SIZES = (1, 2, 3, 4, 5)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "plain": {"ps": SIZES},
    "prefix cache": {"ps": SIZES},
    "window": {"ps": SIZES, "window": (1, 3, 6, 9)},
    "window, map, prefix": {"ps": SIZES, "window": (1, 3, 6, 9)},
    "sparse": {"ps": SIZES, "buffer": (1, 5, 9), "scratch": (0, 2, 6)},
}


class Walk:
    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        shapes = {key: self.random.choice(few) for key, few in SHAPES[name].items()}
        config = replace(CONFIGS[name], **POOLS[name], **shapes)
        self.world = World(config)
        self.verbs: list[Verb] = list(verbs_of(config).values())
        self.ever = [0, -3]

    def step(self) -> None:
        w, draw = self.world, self.random
        config = w.config
        kind = draw.random()
        ids = ids_of(draw.randint(0, 2), draw.randint(0, 2), draw.choice((8, 10, 24)))
        cached = config.cache and draw.random() < 0.7
        if kind < 0.12 and w.book.rows()[1]:
            self.ever.append(w.open(ids, cached))
        elif kind < 0.25 and w.book.rows()[1]:
            length = draw.randint(0, 30)
            if cached:
                length += w.book.match(ids) * config.ps
            handle = w.preallocate(
                ids,
                length,
                writers=draw.randint(1, 2),
                deadline=draw.choice((None, 10, 20)),
                cached=cached,
                tail=config.window > 0 and draw.random() < 0.7,
                main_only=config.ratio > 0 and draw.random() < 0.5,
            )
            self.ever += [] if handle is None else [handle]
        else:
            known = list(w.book.requests) if draw.random() < 0.9 else self.ever
            handle = draw.choice(known or self.ever)
            r = w.book.requests.get(handle)
            if r is not None and r.c > 100:
                verbs_of(config)["release"](w, handle)
            else:
                draw.choice(self.verbs)(w, handle)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_walk(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        walk = Walk(name, seed)
        for number in range(STEPS):
            try:
                walk.step()
            except AssertionError as wrong:
                raise AssertionError(f"seed {seed}, step {number}") from wrong
        held = [r for r in walk.world.book.all() if r.missing]
        seen["receiving at the end"] += len(held)
        seen["waiting at the end"] += len(walk.world.book.waiting)
        walk.world.drain(force=seed % 2 == 0)
        seen += walk.world.seen
    rare = ["preallocate", "StaleHandle", "WrongState", "receiving at the end"]
    rare += ["waiting at the end"]
    rare += [] if CONFIGS[name].cache else ["OutOfPages"]
    assert min(seen[what] for what in rare) >= 3, seen


def test_a_book_that_is_wrong_is_noticed() -> None:
    """The comparison sees a page, a row or an extent too many."""
    for damage in ("pages", "c", "first", "aborted"):
        w = World(CONFIGS["window"])
        handle = w.open(ids_of(1))
        grow("extend", 9)(w, handle)
        r = w.book.requests[handle]
        setattr(r, damage, not r.aborted if damage == "aborted" else getattr(r, damage) + 1)
        with pytest.raises(AssertionError):
            w.compare()
