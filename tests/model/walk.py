"""Seeded random walks over the moves, with everything given back at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from model.moves import (
    MOVES,
    WINDOW_MOVES,
    Chooser,
    any_config,
    move_event,
    move_open,
    move_open_with_prefix,
)
from model.pair import Config, Pair


def walk(
    seed: int,
    steps: int,
    config: Config | None = None,
    more: Sequence[Callable[[Pair, Chooser], None]] = (),
) -> Pair:
    """Makes `steps` random moves, aborts everything, and returns the pair for what it saw.

    The same seed makes the same calls. `more`: moves of the caller's own, to mix in.
    """
    choose = Chooser(random.Random(seed).randint)
    pair = Pair(any_config(choose) if config is None else config)
    left_out = () if pair.config.window is not None else WINDOW_MOVES
    moves = [move for move, n in MOVES.items() for _ in range(n) if move not in left_out]
    moves += more
    for _ in range(steps):
        move = choose.pick(moves)
        if not pair.handles and not choose.flag(4):
            # Most moves need a request, and its row may wait behind an event.
            move = choose.pick((move_open, move_open_with_prefix, move_event))
        move(pair, choose)
        if choose.flag(150):
            pair.finish()
    pair.finish()
    return pair
