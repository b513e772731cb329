"""Every verb in every state, and every pair of verbs, with an end in between and after.

Each scene ends with abort-all: every group is full then, every row free, and the maps are zeros.
"""

from __future__ import annotations

from collections import Counter

import pytest
from states.steps import running, states_of, verbs_of
from states.world import CONFIGS, World, ids_of

EVERYWHERE = {"StaleHandle", "WrongState", "CommitPastExtent"}
REFUSALS = {
    name: EVERYWHERE | ({"InsideSharedPage"} if config.cache else set())
    for name, config in CONFIGS.items()
}


def neighbour(w: World) -> int:
    """Another request, which goes on with what the first one gives back."""
    handle = w.open(ids_of(2))
    verbs_of(w.config)["extend"](w, handle)
    verbs_of(w.config)["reserve"](w, handle)
    return handle


@pytest.mark.parametrize("name", CONFIGS)
def test_every_verb_in_every_state(name: str) -> None:
    config, seen = CONFIGS[name], Counter[str]()
    for state, build in states_of(config).items():
        for number, (verb, do) in enumerate(verbs_of(config).items()):
            try:
                w = World(config)
                w.quiet = number > 0
                handle = build(w)
                w.quiet = False
                do(w, handle)
                w.drain(force=number % 2 == 0)
            except AssertionError as wrong:
                raise AssertionError(f"{verb!r} while {state}") from wrong
            seen += w.seen
    assert not REFUSALS[name] - set(seen), "each of these refusals was met"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_pair_of_verbs(name: str) -> None:
    config, pairs = CONFIGS[name], 0
    verbs = verbs_of(config)
    for first, do in verbs.items():
        for number, (second, then) in enumerate(verbs.items()):
            for between in (False, True):
                try:
                    w = World(config)
                    w.quiet = True
                    handle = running(w, verbs["reserve"])
                    other = neighbour(w) if between else handle
                    w.quiet = False
                    do(w, handle)
                    if w.refused:
                        continue  # the same as the second alone
                    if between:
                        verbs["abort"](w, handle)
                    then(w, other)
                    w.drain(force=number % 2 == 0)
                except AssertionError as wrong:
                    how = "an abort and " * between
                    raise AssertionError(f"{first!r}, then {how}{second!r}") from wrong
                pairs += 1
    assert pairs > len(verbs) ** 2
