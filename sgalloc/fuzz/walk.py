"""Worlds: a configuration and a walk of some hundred calls, all drawn from two numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sgalloc.fuzz import drawing as one
from sgalloc.fuzz import drawing_more as more
from sgalloc.fuzz.calls import Call
from sgalloc.fuzz.config import Chooser, Config, any_config
from sgalloc.fuzz.doing import Doing
from sgalloc.fuzz.drawing import Drawing, Move
from sgalloc.fuzz.subject import Disagreement

CALLS = 500
_WITH_TWIN = 60
_OPENING: Sequence[Move] = (
    one.draw_open,
    one.draw_open,
    more.draw_open_with_prefix,
    more.draw_preallocate,
    more.draw_event,
)
MOVES: dict[Move, int] = {
    one.draw_open: 12, one.draw_grow: 72, one.draw_mixed: 32, one.draw_batch: 16,
    one.draw_commit: 28, one.draw_trim: 12, one.draw_release: 24, one.draw_apply_kept: 8,
    one.draw_prepare: 20, one.draw_compact: 10, one.draw_read: 4, more.draw_preallocate: 8,
    more.draw_acknowledge: 16, more.draw_abort: 4, more.draw_reclaim: 4, more.draw_event: 12,
    more.draw_what_if: 6, more.draw_wrong: 8, more.draw_recycle: 1, more.draw_snapshot: 2,
}  # fmt: skip
CACHE_MOVES: dict[Move, int] = {
    more.draw_match: 4, more.draw_open_with_prefix: 36, more.draw_publish: 20, more.draw_audit: 3,
    more.draw_clear: 1,
}  # fmt: skip
WINDOW_MOVES: dict[Move, int] = {one.draw_evict: 28, one.draw_tail: 10}
SPARSE_MOVES: dict[Move, int] = {one.draw_to_sparse: 20}


def moves_of(config: Config) -> list[Move]:
    """The moves that make sense for a configuration, each as often as its weight."""
    moves = dict(MOVES)
    if config.prefix_cache:
        moves |= CACHE_MOVES
    if config.window is not None:
        moves |= WINDOW_MOVES
    if config.sparse is not None:
        moves |= SPARSE_MOVES
    return [move for move, weight in moves.items() for _ in range(weight)]


@dataclass
class Failure:
    """A walk that found a difference.

    Attributes:
        seed, world: what it was drawn from.
        config: the configuration.
        calls: all calls up to the one that failed.
        message: what differs.
    """

    seed: int
    world: int
    config: Config
    calls: list[Call]
    message: str


@dataclass
class Tally:
    """What was done: sums over worlds.

    Attributes:
        worlds: walks.
        calls: public calls, each compared.
        seen: calls that went through, by verb.
        refused: those that both refused, by verb and reason.
        evicted: pages that left the prefix cache.
    """

    worlds: int = 0
    calls: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    evicted: int = 0

    def add(self, other: Tally) -> None:
        """Add another one's."""
        self.worlds += other.worlds
        self.calls += other.calls
        self.seen += other.seen
        self.refused += other.refused
        self.evicted += other.evicted


def drawn_calls(world: Doing, choose: Chooser, calls: int) -> Iterator[Call]:
    """Calls for a world until it made so many; each is to be run before the next is drawn."""
    drawing, moves, part_at = Drawing(world, choose), moves_of(world.config), None
    while world.calls < calls:
        if part_at is not None and world.calls >= part_at:
            part_at = None
            yield Call("part")
        if drawing.pending:
            call: Call | None = drawing.pending.pop(0)
        else:
            move = choose.pick(moves)
            if not world.ref.requests and not choose.flag(4):
                # Most moves need a request, and its row may wait behind an event.
                move = choose.pick(_OPENING)
            call = move(drawing)
        if call is None:
            continue
        yield call
        drawing.ran(call)
        if call.verb == "recycle":
            part_at = world.calls + _WITH_TWIN
    yield Call("finish")


def run_world(
    seed: int,
    number: int,
    device: str = "cpu",
    laws_every: int = 16,
    calls: int = CALLS,
    config: Config | None = None,
) -> tuple[Tally, Failure | None]:
    """Make the walk of one world.

    Args:
        seed, number: what everything is drawn from.
        device: where the tables live.
        laws_every: calls from one look at everything to the next.
        calls: about how many to make.
        config: what to walk with, in place of a drawn one.
    """
    draw = random.Random(f"{seed}/{number}").random
    choose = Chooser(lambda low, high: low + int(draw() * (high - low + 1)))
    config = any_config(choose) if config is None else config
    world = Doing(config, device, laws_every)
    done: list[Call] = []
    failure = None
    try:
        for call in drawn_calls(world, choose, calls):
            done.append(call)
            world.run(call)
    except Disagreement as found:
        failure = Failure(seed, number, config, done, str(found))
    evicted = sum(pool.evicted for pool in world.ref.pools.values())
    return Tally(1, world.calls, world.seen, world.refused, evicted), failure


def run_calls(
    config: Config, calls: Sequence[Call], device: str = "cpu", journal: str | None = None
) -> tuple[str, int]:
    """Make these calls in a fresh world, with a look at everything after each.

    Returns:
        What differs, "" if nothing does; and how many calls were made until then.
    """
    world = Doing(config, device, 1, journal)
    made = 0
    try:
        for call in calls:
            made += 1
            world.run(call)
    except Disagreement as found:
        return str(found), made
    finally:
        world.close()
    return "", made
