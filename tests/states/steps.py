"""The verbs, each on one request of a `World`, and the states that a request can be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from states.book import Config
from states.world import World, ids_of

from sgalloc import OutOfPages

Verb = Callable[[World, int], Any]
IDS = ids_of(1)


def c_of(w: World, handle: int) -> int:
    r = w.book.requests.get(handle)
    return 0 if r is None else r.c


def grow(verb: str, more: int, **how: Any) -> Verb:
    """extend, decode or reserve by so many tokens."""

    def do(w: World, handle: int) -> None:
        upto = c_of(w, handle) + more
        amount = upto if verb == "extend" else more
        tail = how.get("tail")
        real: dict[str, Any] = {}
        evict = bool(how.get("evict"))
        if tail is not None:
            tail = upto - max(upto - tail, 0) // w.config.ps * w.config.ps
            real["window_tail"] = tail
        if how.get("main_only"):
            real["logical_only"] = True
        if how.get("planned"):
            call: Callable[[], Any] = lambda: planned(w, handle, verb, amount, evict)  # noqa: E731
        else:
            call = lambda: getattr(w.alloc, verb)([handle], amount, **real) and None  # noqa: E731
        note = lambda: w.book.grow(  # noqa: E731
            handle, verb, upto, evict, tail, bool(how.get("main_only"))
        )
        w.call(f"{verb} {how}", call, note)

    return do


def planned(w: World, handle: int, verb: str, amount: int, evict: bool) -> None:
    """Plan, then apply; what the plan says is what happens, in each group."""
    what: dict[str, Any] = {verb: ([handle], amount)}
    plan = w.alloc.plan(**what, evict_window=evict)
    fits, before = plan.fits, rooms(w)
    assert w.alloc.fits(plan) == fits
    try:
        w.alloc.apply(plan)
    except OutOfPages:
        assert not fits
        raise
    assert fits
    after = rooms(w)
    net = {name: need - plan.gain.get(name, 0) for name, need in plan.need.items()}
    assert {name: before[name] - after[name] for name in net} == net


def rooms(w: World) -> dict[str, int]:
    groups = w.alloc.stats().groups
    return {name: w.alloc.available(name, counting_cache=True) for name in groups}


def commit(accepted: int) -> Verb:
    return lambda w, h: w.call(
        "commit", lambda: w.alloc.commit([h], accepted), lambda: w.book.commit(h, accepted)
    )


def compact(offsets: list[int], behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event = w.event() if behind else None
        positions = [c_of(w, handle) + at for at in offsets]
        w.call(
            "compact",
            lambda: w.alloc.compact([handle], [positions], event) and None,
            lambda: w.book.compact(handle, positions, event),
        )

    return do


def trim(length: Callable[[int, int], int], behind: bool = False) -> Verb:
    """``length`` is given C and the page size."""

    def do(w: World, handle: int) -> None:
        event, to = w.event() if behind else None, length(c_of(w, handle), w.config.ps)
        w.call(
            "trim",
            lambda: w.alloc.trim([handle], to, event),
            lambda: w.book.trim(handle, to, event),
        )

    return do


def evict(all_of_it: bool = False, behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event, upto = w.event() if behind else None, c_of(w, handle) if all_of_it else None
        w.call(
            "evict_window",
            lambda: w.alloc.evict_window([handle], upto, event) is None,
            lambda: w.book.evict(handle, upto, event),
        )

    return do


def to_sparse(behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event = w.event() if behind else None
        w.call(
            "to_sparse",
            lambda: w.alloc.to_sparse([handle], event),
            lambda: w.book.to_sparse(handle, event),
        )

    return do


def release(keep: bool = False, behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event, r = w.event() if behind else None, w.book.requests.get(handle)
        tokens = [r.ids] if keep and r is not None else None
        w.call(
            "release",
            lambda: w.alloc.release([handle], tokens=tokens, after=event),
            lambda: w.book.release(handle, keep, event),
        )

    return do


def publish(behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event, r = w.event() if behind else None, w.book.requests.get(handle)
        ids = IDS if r is None else r.ids
        w.call(
            "publish",
            lambda: w.alloc.prefix.publish([handle], [ids], event),
            lambda: w.book.publish(handle, event),
        )

    return do


def abort(force: bool = False, behind: bool = False) -> Verb:
    def do(w: World, handle: int) -> None:
        event = w.event() if behind else None
        w.call(
            "abort",
            lambda: w.alloc.abort(handle, force, event),
            lambda: w.book.abort(handle, force, event),
        )

    return do


def acknowledge(writer: int) -> Verb:
    return lambda w, h: w.call(
        "acknowledge",
        lambda: w.alloc.acknowledge(h, writer),
        lambda: w.book.acknowledge(h, writer),
    )


def reclaim(now: int) -> Verb:
    return lambda w, h: w.call(
        "reclaim", lambda: w.alloc.reclaim(now).tolist(), lambda: w.book.reclaim(now)
    )


def finish(w: World, handle: int) -> None:
    """The oldest event that is not over yet ends."""
    for event in w.events:
        if not event.over:
            w.finish(event)
            return


def clear(w: World, handle: int) -> None:
    w.call("clear", lambda: w.alloc.prefix.clear(), lambda: w.book.clear())


def open_again(w: World, handle: int) -> None:
    """A retracted one comes back, with its tokens, from the cache where it can."""
    r = w.book.requests.get(handle)
    if r is not None and not r.aborted and not r.missing:
        release(keep=True)(w, handle)
    if w.book.rows()[1]:
        again = w.open(IDS if r is None else r.ids, w.config.cache)
        grow("extend", 5)(w, again)


VERBS: dict[str, Verb] = {
    "extend": grow("extend", 7),
    "extend nothing": grow("extend", 0),
    "decode": grow("decode", 1),
    "reserve": grow("reserve", 6),
    "plan": grow("reserve", 5, planned=True),
    "commit": commit(2),
    "compact": compact([1, 4]),
    "compact behind": compact([0, 2], behind=True),
    "trim": trim(lambda c, ps: c - min(c, 3)),
    "trim to a page": trim(lambda c, ps: c // 2 // ps * ps, behind=True),
    "trim the tail": trim(lambda c, ps: c),
    "trim deep": trim(lambda c, ps: c // 3),
    "trim all": trim(lambda c, ps: 0),
    "release": release(),
    "release behind": release(behind=True),
    "abort": abort(),
    "abort behind": abort(behind=True),
    "force": abort(force=True),
    "ack 0": acknowledge(0),
    "ack 1": acknowledge(1),
    "reclaim": reclaim(10),
    "event": finish,
    "open again": open_again,
}
CACHE_VERBS: dict[str, Verb] = {
    "release with tokens": release(keep=True),
    "release with tokens behind": release(keep=True, behind=True),
    "publish": publish(),
    "publish behind": publish(behind=True),
    "clear": clear,
}
WINDOW_VERBS: dict[str, Verb] = {
    "evict": evict(),
    "evict all": evict(all_of_it=True),
    "evict behind": evict(behind=True),
    "evict and plan": grow("reserve", 6, planned=True, evict=True),
    "extend a tail": grow("extend", 9, tail=6),
}
SPARSE_VERBS: dict[str, Verb] = {
    "to sparse": to_sparse(),
    "to sparse behind": to_sparse(behind=True),
    "extend logical": grow("extend", 7, main_only=True),
}


def verbs_of(config: Config) -> dict[str, Verb]:
    found = dict(VERBS)
    if config.cache:
        found |= CACHE_VERBS
    if config.window:
        found |= WINDOW_VERBS
    if config.ratio:
        found |= SPARSE_VERBS
    return found


# -- states --------------------------------------------------------------------------------------


def running(w: World, *then: Verb, length: int = 11, cached: bool = False) -> int:
    handle = w.open(IDS, cached)
    grow("extend", length)(w, handle)
    for verb in then:
        verb(w, handle)
        assert not w.refused, "the states are reached by calls that go through"
    return handle


def received(w: World, *then: Verb, length: int = 13, **how: Any) -> int:
    handle = w.preallocate(IDS, length, deadline=10, **how)
    assert handle is not None
    for verb in then:
        verb(w, handle)
        assert not w.refused
    return handle


def seeded(w: World) -> World:
    """With 12 of the tokens in the cache."""
    handle = w.open(IDS)
    grow("extend", 12)(w, handle)
    release(keep=True)(w, handle)
    return w


V = {**VERBS, **CACHE_VERBS, **WINDOW_VERBS, **SPARSE_VERBS}
State = Callable[[World], int]
STATES: dict[str, State] = {
    "new": lambda w: w.open(IDS),
    "prefilling in chunks": lambda w: running(w, length=6),
    "running": lambda w: running(w, V["decode"]),
    "speculating": lambda w: running(w, V["reserve"], V["commit"], V["reserve"]),
    "a tree": lambda w: running(w, grow("reserve", 12)),
    "parked": lambda w: running(w, trim(lambda c, ps: 5)),
    "parked behind an event": lambda w: running(w, V["trim to a page"]),
    "retracted and opened again": lambda w: running(w, V["release"]) and running(w, length=5),
    "receiving": received,
    "half received": lambda w: received(w, V["ack 1"]),
    "received": lambda w: received(w, V["ack 1"], V["ack 0"]),
    "aborted, waiting": lambda w: received(w, V["ack 0"], V["abort"]),
    "aborted behind an event": lambda w: received(w, V["abort behind"]),
    "quarantined": lambda w: running(w, V["release behind"]),
}
CACHE_STATES: dict[str, State] = {
    "opened with a prefix": lambda w: running(seeded(w), length=5, cached=True),
    "a prefix alone": lambda w: seeded(w).open(IDS, True),
    "received behind a prefix": lambda w: received(seeded(w), length=21, cached=True),
    "published": lambda w: running(w, V["publish"], V["decode"]),
    "a duplicate": lambda w: running(seeded(w), length=14),
    "retracted into the cache": lambda w: running(w, V["release with tokens behind"]),
}
WINDOW_STATES: dict[str, State] = {
    "window evicted": lambda w: running(w, V["evict"], length=23),
    "nothing in the window": lambda w: running(w, V["evict all"], length=16),
    "trimmed below the frontier": lambda w: running(
        w, V["evict"], trim(lambda c, ps: 5), length=23
    ),
    "a tail alone": lambda w: running(w, length=0) and running(w, V["extend a tail"], length=0),
    "receiving a tail": lambda w: received(w, length=22, tail=True),
}
BOTH_STATES: dict[str, State] = {
    "a tail inside the prefix": lambda w: received(seeded(w), length=14, cached=True, tail=True),
    "evicted into the cache": lambda w: running(
        running(w, V["evict"], V["release with tokens"], length=23) and w, length=14
    ),
}
SPARSE_STATES: dict[str, State] = {
    "short and sparse": lambda w: running(w, V["to sparse"], length=5),
    "long and sparse": lambda w: running(w, V["to sparse"], V["decode"], length=19),
    "thinned with a reserve": lambda w: running(w, V["reserve"], V["to sparse"], length=5),
    "thinned behind an event": lambda w: running(w, V["to sparse behind"], length=19),
    "logical alone": lambda w: received(w, V["ack 0"], V["ack 1"], main_only=True),
    "receiving logical pages": lambda w: received(w, main_only=True),
    "dense with a logical end": lambda w: running(w, V["extend logical"]),
    "sparse and speculating": lambda w: running(w, V["to sparse"], V["reserve"], length=19),
}


def states_of(config: Config) -> dict[str, State]:
    found = dict(STATES)
    if config.cache:
        found |= CACHE_STATES
    if config.window:
        found |= WINDOW_STATES
    if config.cache and config.window:
        found |= BOTH_STATES
    if config.ratio:
        found |= SPARSE_STATES
    return found
