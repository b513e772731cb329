"""Speculative steps of the replay: paths of trees, overlapped steps, and what they cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from replay.engine_support import PAGE, Release, column, engine, proven, req, run

from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.options import Options
from sgalloc.replay.speculation import Speculation
from sgalloc.sizing import SpecConfig

CHAIN = {"spec": SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)}
BLOCK = {"spec": SpecConfig("dflash", draft_tokens=4)}


def tree(steps: int, topk: int, tokens: int, **acceptance: float) -> dict[str, object]:
    spec = SpecConfig("eagle", steps=steps, topk=topk, draft_tokens=tokens)
    return {"spec": spec, "acceptance": Acceptance(min(steps, tokens - 1), **acceptance)}


# Trees


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(3, 2, 7), (5, 8, 64), (4, 2, 5), (6, 3, 4)])
def test_a_path_is_the_root_and_one_node_of_each_level(steps, topk, tokens):
    options = Options(num_pages=10, **tree(steps, topk, tokens, p=0.5))
    depth = min(steps, tokens - 1)
    speculation = Speculation(options)
    rng = np.random.default_rng(3)
    kept = rng.integers(0, depth + 2, 4_000)
    committed = rng.integers(0, 1_000, kept.size)
    paths = speculation.paths(rng, committed, kept)
    assert [len(path) for path in paths] == kept.tolist()
    seen: list[set[int]] = [set() for _ in range(depth + 1)]
    for path, start in zip(paths, committed.tolist(), strict=True):
        assert path == sorted(set(path))
        for level, position in enumerate(path):
            seen[level].add(position - start)
    # The levels share out the tree: every token of it is reached, on one level alone.
    assert seen[0] == {0}
    assert sorted(position for level in seen for position in level) == list(range(tokens))
    assert all(max(low) < min(high) for low, high in pairwise(seen))


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_the_accepted_path_is_moved_and_the_branches_go_back(page_size):
    # 3 levels of two nodes each: the root is in place, a level's first node is not, but for the
    # first level's.
    watched = engine(
        req(8, output=200), page_size=page_size, num_pages=2_000, **tree(3, 2, 7, p=1.0)
    )
    moves: list[int] = []
    compact = watched.alloc.compact

    def noted(x, accepted, after=None):
        before = watched.alloc.committed(x).tolist()
        found = compact(x, accepted, after)
        places = [
            (position, start + at)
            for path, start in zip(accepted, before, strict=True)
            for at, position in enumerate(path)
        ]
        assert found[0].size == sum(position != home for position, home in places)
        moves.append(found[0].size)
        # Nothing is held past what was accepted, but for the rest of a page.
        held = watched.alloc.allocated(x) - watched.alloc.committed(x)
        assert (held < page_size).all()
        return found

    watched.alloc.compact = noted
    totals = proven(watched.run()).totals
    assert totals.decoded == 200 and totals.speculative_steps == len(moves) == 50
    assert totals.moves == sum(moves) > 50
    # What the reserve costs while the step runs: all of it, and the rest of a page.
    reserve = watched.recording.reserve
    assert reserve == watched._options.reserve
    assert reserve <= totals.reserved_tail / totals.speculative_steps < reserve + page_size


def test_a_chain_moves_nothing_and_never_compacts():
    recording = run(req(8, output=50), acceptance=Acceptance(3, mean=2.0), **CHAIN)
    assert recording.totals.moves == 0
    assert "compact" not in recording.verbs


# Overlap


@pytest.mark.parametrize("spec", [CHAIN, BLOCK], ids=["chain", "block"])
@pytest.mark.parametrize(("p", "steps"), [(1.0, [4, 4, 1]), (0.0, [1] * 9)])
def test_an_overlapped_engine_hears_a_step_late(spec, p, steps):
    watched = engine(req(8, output=10), acceptance=Acceptance(3, p=p), overlap=True, **spec)
    recording = proven(watched.run())
    totals = recording.totals
    assert (totals.decoded, totals.accepted, totals.finished) == (10, 9, 1)
    # One step more is run, and its outcome thrown away.
    assert totals.speculative_steps == len(steps) + 1 == totals.steps - 1
    assert totals.discarded_steps == 1
    committed = [8 + sum(steps[:done]) for done in range(len(steps))]
    assert column(recording, "committed") == [0, 8, *committed, 0]
    # Twice a step past the C of the step before is enough for what this one writes.
    wanted = [-(-(tokens + 8) // PAGE) * PAGE for tokens in (8, *committed)]
    assert column(recording, "allocated") == [0, 8, *wanted[:-1], 0]
    assert watched.releases == [Release(committed=17, allocated=20, known=18)]


def test_what_a_running_step_reads_waits_for_its_end():
    # The first ends a step before it is heard of; while the step that it takes part in for
    # nothing runs, its pages wait, and they come back with the next step.
    watched = engine(
        req(8, output=3),
        req(8, output=30),
        overlap=True,
        prefix_cache=False,
        acceptance=Acceptance(3, p=0.0),
        **CHAIN,
    )
    waiting: list[int] = []
    release = watched.alloc.release

    def noted(x, *, tokens=None, after=None):
        release(x, tokens=tokens, after=after)
        waiting.append(watched.alloc.stats().groups["full"].quarantined)
        assert after is not None and not after.query()

    watched.alloc.release = noted
    recording = proven(watched.run())
    # All that it held: 9 tokens, as the host knew when the step was prepared, and 8 reserved.
    assert waiting[0] == -(-(9 + 8) // PAGE)
    assert set(column(recording, "quarantined")) == {0}


def test_under_pressure_a_step_in_flight_lands_before_anyone_is_sent_back():
    rng = np.random.default_rng(5)
    pairs = [(int(p), int(o)) for p, o in rng.integers(1, 40, (60, 2))]
    for prefix_cache in (True, False):
        watched = engine(
            *(req(p, o) for p, o in pairs),
            num_pages=40,
            headroom=0,
            chunk=64,
            admit="chunk",
            overlap=True,
            prefix_cache=prefix_cache,
            acceptance=Acceptance(3, mean=2.2),
            **CHAIN,
        )
        flights: list[object] = []
        retract = watched._retract

        def noted(plan, watched=watched, flights=flights, retract=retract):
            flights.append(watched._flight)
            retract(plan)

        watched._retract = noted
        totals = proven(watched.run()).totals
        assert totals.retractions > 20
        assert flights and set(flights) == {None}
        assert totals.decoded == sum(o for _, o in pairs)
        assert 0 < totals.discarded_steps <= totals.speculative_steps


# Refusal


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"overlap": True}, ["overlap", "speculation"]),
        ({"overlap": True, **tree(3, 2, 7, p=0.5)}, ["overlap", "topk=2"]),
        (
            {
                "spec": SpecConfig("eagle", steps=5, topk=2, draft_tokens=4),
                "acceptance": Acceptance(4, p=0.5),
            },
            ["acceptance may keep 5", "has 4"],
        ),
    ],
)
def test_speculation_that_makes_no_sense_is_refused(given, fragments):
    with pytest.raises(ValueError) as caught:
        Options(num_pages=10, **given)
    assert all(fragment in str(caught.value) for fragment in fragments)
    assert "\n" not in str(caught.value)
