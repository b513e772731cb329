"""Each old behaviour is found by its check, and the same calls pass without it."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay.cli_support import SMALL, SOUND, text
from replay.cli_support import sgalloc as command
from stand_in_cuda import Cuda, stand_in

import sgalloc
from sgalloc import sizing
from sgalloc.pages import PagePool
from sgalloc.plan import Plan
from sgalloc.sizing import SpecConfig
from sgalloc.trust import old_behaviour
from sgalloc.trust.old_behaviour import switched_on

pytestmark = pytest.mark.not_in_debug_mode(
    "its laws would find first what other checks are to find"
)

NAMES = (
    "unaligned-watermark",
    "row-without-headroom",
    "conservative-estimate",
    "unguarded-staging",
    "release-by-totals",
)
EAGLE = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
DFLASH = SpecConfig("dflash", draft_tokens=16)


def attributes() -> list[Any]:
    """All that any of them replaces, where there is no GPU."""
    default = sizing.new_tokens_required_next_decode.__defaults__
    return [Plan.__init__, PagePool.give, sizing.extra_context_len, default]


# -- what finds them -----------------------------------------------------------------------------


@pytest.mark.parametrize("ps", [2, 3, 16, 64])
def test_an_unaligned_watermark_breaks_the_row_law(ps: int) -> None:
    """D1: a reserve ends inside a page, and the next one begins there."""

    def steps() -> None:
        alloc = sgalloc.KVAllocator(40, ps, 2, 30 * ps, device="cpu")
        h = alloc.open()
        alloc.extend(h, 2 * ps)
        free = []
        for kept in (1, 4, 2, 3, 1):
            alloc.reserve(h, 2 * ps + 1 if ps < 8 else 8)
            alloc.commit(h, min(kept, ps))
            alloc.check(device=True)
            free.append(alloc.available())
        alloc.release(h)
        assert alloc.available() == 40

    steps()
    with (
        switched_on("unaligned-watermark"),
        pytest.raises(sgalloc.LawViolation, match="breaks 'A is whole pages'"),
    ):
        steps()
    steps()


def test_the_stranded_pages_of_an_unaligned_watermark_are_lost() -> None:
    """What that leads to, past the row law: a page that nobody has."""
    alloc = sgalloc.KVAllocator(40, 16, 2, 480, device="cpu")
    h = alloc.open()
    with switched_on("unaligned-watermark"):
        alloc.extend(h, 30)
        for _ in range(3):
            alloc.reserve(h, 8)
            alloc.commit(h, 5)
    alloc.release(h)
    assert alloc.available() < 40
    with pytest.raises(sgalloc.LawViolation):
        alloc.check()


@pytest.mark.parametrize("spec", [DFLASH, SpecConfig("eagle", steps=5, topk=4, draft_tokens=8)])
def test_a_row_without_headroom_is_refused_before_it_is_written(spec: SpecConfig) -> None:
    """D2: the last reserves of a request do not fit, and the neighbour's row stays as it was."""

    def last_step() -> Any:
        width = sizing.row_width(64, spec, 1)
        alloc = sgalloc.KVAllocator(500, 1, 2, width, device="cpu")
        h = alloc.open(2)
        alloc.extend(h, 64)
        before = alloc.req_to_token.copy(), alloc.digest()
        try:
            alloc.reserve(h[0], sizing.alloc_reserve_per_decode(spec, 1))
        except sgalloc.RowTooNarrow:
            assert (alloc.req_to_token == before[0]).all() and alloc.digest() == before[1]
            raise
        alloc.check(device=True)
        return width

    enough = last_step()
    others = sizing.row_width(64, spec, 16), sizing.extra_context_len(None, 1)
    with switched_on("row-without-headroom"):
        missing = enough - sizing.row_width(64, spec, 1)
        assert missing == {"dflash": 12, "eagle": 28}[spec.algorithm]
        with pytest.raises(sgalloc.RowTooNarrow, match="size rows with"):
            last_step()
        # Larger pages and plain decoding had their headroom.
        assert (sizing.row_width(64, spec, 16), sizing.extra_context_len(None, 1)) == others
    assert last_step() == enough


def test_a_conservative_estimate_is_not_the_plan() -> None:
    """D4: what is told and what is taken are one number, at every C and page size."""

    def differ(ps: int) -> int:
        alloc = sgalloc.KVAllocator(60, ps, 2, 30 * ps, device="cpu")
        h, wrong = alloc.open(), 0
        reserve = sizing.alloc_reserve_per_decode(EAGLE, ps)
        alloc.extend(h, 1)
        for _ in range(2 * ps + 4):
            told = sizing.new_tokens_required_next_decode(
                alloc.committed(h), alloc.allocated(h), ps, EAGLE
            )
            wrong += told != ps * alloc.plan(reserve=(h, reserve)).num_new_pages
            alloc.reserve(h, reserve)
            alloc.commit(h, 1)
        return wrong

    for ps in (1, 4, 16):
        assert differ(ps) == 0
        with switched_on("conservative-estimate"):
            assert differ(ps) > ps
        assert differ(ps) == 0


class Held(Cuda):
    """A stream that is held: what is queued runs when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], None]] = []
        self.pending: set[int] = set()
        self.held = False

    def put(self, stream: int, work: Callable[[], None]) -> None:
        if stream in self.capturing or not self.held:
            super().put(stream, work)
        else:
            self.queue.append(work)

    def launch(self, graph: list[Callable[[], None]], stream: int) -> None:
        if self.held:
            self.queue += graph
        else:
            super().launch(graph, stream)

    def record(self, event: int, stream: int) -> None:
        if self.held:
            self.pending.add(event)
            self.queue.append(lambda: self.pending.discard(event))
        super().record(event, stream)

    def query(self, event: int) -> int:
        return 600 if event in self.pending else 0

    def let_go(self) -> None:
        self.held = False
        for work in self.queue:
            work()
        self.queue.clear()


@pytest.mark.parametrize("mapped", ["16384", "0"], ids=["read in place", "copied"])
def test_unguarded_staging_is_found_in_the_table(
    mapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: more steps behind a held stream than the ring has slots; each row has its own pages."""
    monkeypatch.setenv("SGALLOC_MAPPED_BYTES", mapped)

    def steps() -> None:
        state.held = False
        alloc = sgalloc.KVAllocator(400, 4, 64, 16, device="cuda")
        alloc.warm(64)
        h = alloc.open(64)
        state.held = True
        for handle in h:
            alloc.extend(handle, 12)
        state.let_go()
        alloc.check(device=True)

    state = Held()
    with stand_in(state):
        from cupy.cuda import runtime

        runtime.eventQuery = state.query
        runtime.eventSynchronize = lambda _: state.let_go()
        steps()
        with (
            switched_on("unguarded-staging"),
            pytest.raises(sgalloc.LawViolation, match=r"req_to_token\[\d+, "),
        ):
            steps()
        steps()


def test_unguarded_staging_needs_a_gpu() -> None:
    with suppress(ImportError):
        import cupy  # noqa: F401

        pytest.skip("CuPy is here")
    refused = pytest.raises(ValueError, match="is a GPU's, and CuPy is not installed")
    with refused, switched_on("release-by-totals", "unguarded-staging"):
        pass
    assert old_behaviour.switched() == ()


@pytest.mark.parametrize("verb", ["release", "trim", "quarantine"])
def test_release_by_totals_balances_and_breaks_the_partition(verb: str) -> None:
    """D3: the sums are right, and a page has two owners."""

    class Event:
        over = False

        def query(self) -> bool:
            return self.over

    def calls() -> Any:
        alloc = sgalloc.KVAllocator(40, 4, 4, 64, device="cpu")
        h = alloc.open(2)
        for length in (4, 8, 12, 16):  # in turn, so that no request has a run of ids
            for handle in h:
                alloc.extend(handle, length)
        event = Event()
        if verb == "trim":
            alloc.trim(h[0], 4)
        else:
            alloc.release(h[0], after=None if verb == "release" else event)
        event.over = True
        alloc.settle()
        return alloc

    back = 3 if verb == "trim" else 4
    calls().check(device=True)
    with switched_on("release-by-totals"):
        alloc = calls()
        stats = alloc.stats().groups["full"]
        assert (stats.free, stats.owned) == (40 - 8 + back, 8 - back), "the totals balance"
        with pytest.raises(sgalloc.LawViolation, match=r"is held by .* and by|is lost"):
            alloc.check()
    calls().check(device=True)


# -- the switch ----------------------------------------------------------------------------------


def test_the_names() -> None:
    assert old_behaviour.names() == NAMES
    for old in old_behaviour.BEHAVIOURS.values():
        assert old.summary and old.known_from and old.caught_by


@pytest.mark.parametrize("name", set(NAMES) - {"unguarded-staging"})
def test_it_is_put_on_and_taken_off_again(name: str) -> None:
    before = attributes()
    with switched_on(name):
        assert old_behaviour.switched() == (name,)
        assert attributes() != before
        with pytest.raises(ValueError, match="is on already: name it once"), switched_on(name):
            pass
        assert old_behaviour.switched() == (name,)
    assert attributes() == before and old_behaviour.switched() == ()
    with pytest.raises(KeyError), switched_on(name):
        raise KeyError
    assert attributes() == before and old_behaviour.switched() == ()


def test_several_at_once_and_one_in_the_other() -> None:
    before = attributes()
    rest = [name for name in NAMES if name != "unguarded-staging"]
    with switched_on(*rest):
        assert old_behaviour.switched() == tuple(rest)
        assert all(now is not was for now, was in zip(attributes(), before, strict=True))
    with switched_on(rest[0]), switched_on(rest[1], rest[3]):
        assert old_behaviour.switched() == (rest[0], rest[1], rest[3])
    assert attributes() == before
    with switched_on():
        assert attributes() == before


@pytest.mark.parametrize("name", ["unaligned_watermark", "", "all", "Release-by-totals"])
def test_an_unknown_name_is_refused_with_the_names(name: str) -> None:
    known = pytest.raises(ValueError, match="is unknown: use one of " + ", ".join(NAMES))
    with known, switched_on("release-by-totals", name):
        pass
    assert old_behaviour.switched() == ()


def test_one_named_twice_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="on already"),
        switched_on("release-by-totals", "release-by-totals"),
    ):
        pass


def test_nothing_in_the_package_knows_of_it() -> None:
    """The patches come from outside: no room but the commands imports or asks for it."""
    root = Path(sgalloc.__file__).parent
    rooms = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    knowing = {name for name, path in rooms.items() if "old_behaviour" in path.read_text("utf-8")}
    assert "commands/replay.py" in knowing
    assert {name for name in knowing if not name.startswith(("commands/", "fuzz/"))} == set()


def test_the_example_of_the_room_runs() -> None:
    assert doctest.testmod(old_behaviour).attempted == 2
    assert doctest.testmod(old_behaviour).failed == 0


# -- the command ---------------------------------------------------------------------------------

REPLAY = ("replay", *SMALL, "--check", 1)
FOUND = {
    "unaligned-watermark": ((), "A is whole pages"),
    "conservative-estimate": ((), "is estimated to need"),
    "release-by-totals": ((), "is held by"),
    "row-without-headroom": (
        ("--page-size", 1, "--spec", "dflash", "--limit", 40, "--pages", 400_000),
        "shorten the request",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_replay_with_an_old_behaviour_ends_with_1(name: str) -> None:
    options, words = FOUND[name]
    how = (*REPLAY, *(options or ("--page-size", 4, "--spec", "eagle", "--pages", 20_000)))
    sound = command(*how)
    assert sound.exit_code == 0 and SOUND in text(sound.stdout)
    found = command(*how, "--old", name)
    assert found.exit_code == 1
    assert words in text(found.stdout + found.stderr)
    assert old_behaviour.switched() == ()


def test_a_journal_runs_again_with_an_old_behaviour(tmp_path: Path) -> None:
    """Bisecting: does this fault explain what the journal says?"""
    path = tmp_path / "one.journal"
    alloc = sgalloc.KVAllocator(60, 4, 4, 64, device="cpu", journal=path)
    h = alloc.open(2)
    for length in (4, 8, 12):
        for handle in h:
            alloc.extend(handle, length)
    alloc.release(h[0])
    alloc.extend(h[1], 40)
    alloc.close_journal()
    assert command("replay", "--journal", path, "--check-every", 1).exit_code == 0
    differs = command("replay", "--journal", path, "--old", "release-by-totals")
    assert differs.exit_code == 1 and "record" in differs.stderr


@pytest.mark.parametrize("name", ["nonsense", "release-by-totals,release-by-totals", ","])
def test_a_wrong_name_is_bad_usage(name: str) -> None:
    result = command(*REPLAY, "--old", name)
    assert result.exit_code == 2
    assert result.stderr.startswith("sgalloc replay: old behaviour")


def test_an_array_of_the_plan_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch of a plan leaves alone what the plan was made of."""
    alloc = sgalloc.KVAllocator(40, 16, 2, 480, device="cpu")
    h = alloc.open()
    alloc.extend(h, 20)
    with switched_on("unaligned-watermark"):
        plan = alloc.plan(reserve=(h, 14))
    assert plan.nxt.tolist() == [34] and plan.cur.tolist() == [32]
    assert np.shares_memory(plan.nxt, plan.cur) is False
