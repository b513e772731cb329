"""Draws calls about the prefix cache, remote writers, events, snapshots and twins."""

from __future__ import annotations

from typing import Any

from sgalloc.fuzz.calls import NAMESPACES, Call, tokens_of
from sgalloc.fuzz.drawing import Drawing, draw_open

_KEPT = 3
_HORIZON = 40


def draw_match(d: Drawing) -> Call:
    """A prompt that is known, or another."""
    kinds, namespace = d.kinds(), d.choose.pick(NAMESPACES)
    if d.texts and d.choose.flag(2):
        namespace, kinds = d.choose.pick(list(d.texts.values())[-8:])
    elif d.choose.flag(2):
        namespace = None
    length = len(kinds) * d.world.config.page_size
    if d.choose.flag(2):
        length = d.choose.number(0, length)
    label = d.label()
    d.prompts[label] = (namespace, (kinds, length))
    how = {"prompt": (kinds, length), "namespace": namespace, "match": label}
    return Call("match", (), {**how, "array": d.choose.flag(2)})


def draw_open_with_prefix(d: Drawing) -> Call:
    """A match, mostly, and then rows that begin with it and others."""
    if not d.world.config.prefix_cache:
        return draw_open(d)
    first = draw_match(d)
    known = [*list(d.world.matches)[-_KEPT:], first.how["match"]]
    who = []
    for _ in range(d.choose.number(0, 2)):
        label, name = d.choose.pick(known), d.label()
        who.append((label, name))
        d.texts[name] = d.text_of(label)
    d.pending.append(Call("open_with_prefix", tuple(who)))
    return first


def draw_publish(d: Drawing) -> Call:
    """Running requests share what they have."""
    who = tuple((name, d.known(name)) for name in d.some(3))
    return Call("publish", who, {"after": d.after(), **d.forms()})


def draw_audit(d: Drawing) -> Call:
    """Every cached prompt is asked for."""
    return Call("audit")


def draw_clear(d: Drawing) -> Call:
    """The cache is emptied."""
    return Call("clear")


def draw_preallocate(d: Drawing) -> Call:
    """Requests to be received, behind a prefix where there is a cache."""
    size, config = d.world.config.page_size, d.world.config
    first = draw_match(d) if config.prefix_cache and d.choose.flag(2) else None
    tails = config.window is not None and d.choose.flag(2)
    who = []
    for _ in range(d.choose.number(0, 3) if d.choose.flag(2) else 1):
        name, label, matched = d.label(), None, 0
        d.texts[name] = (None, d.kinds())
        if first is not None and not d.choose.flag(4):
            label = first.how["match"]
            d.texts[name] = d.text_of(label)
            tokens = tokens_of(first.how["prompt"], size)
            found = d.world.ref.walk(tokens, first.how["namespace"])
            matched = d.world.ref.usable(found) * size
        length = matched + d.choose.number(0, 3 * size)
        if d.choose.flag(20):
            length = d.choose.number(0, config.row_width + size)
        begin = d.choose.number(0, length)
        if not d.choose.flag(6):
            begin -= begin % size
        deadline = d.now + d.choose.number(0, _HORIZON) if d.choose.flag(2) else None
        writers = d.choose.number(1, 3)
        who.append((name, length, writers, label, deadline, length - begin))
    only = config.sparse is not None and d.choose.flag(2)
    call = Call("preallocate", tuple(who), {"tails": tails, "only": only})
    if first is None:
        return call
    d.pending.append(call)
    return first


def draw_acknowledge(d: Drawing) -> Call | None:
    """Mostly of a writer that is waited for; also late, double and unknown ones."""
    waiting = list(d.world.ref.receiving)
    if not waiting and not d.choose.flag(4):
        return None
    names = waiting if waiting and not d.choose.flag(8) else sorted(d.world.known)
    if not names:
        return None
    who = []
    for _ in range(d.choose.number(1, 2)):
        name = d.choose.pick(names)
        request = d.world.ref.receiving.get(name)
        writer = d.choose.number(-1, 3)
        if request is not None and not d.choose.flag(4):
            writer = d.choose.pick(sorted(request.missing))
        who.append((name, writer))
    return Call("acknowledge", tuple(who))


def draw_abort(d: Drawing) -> Call | None:
    """Of anything that ever was."""
    names = list(d.world.ref.receiving) if d.choose.flag(2) else []
    names = names or sorted(d.world.known)[-8:]
    if not names:
        return None
    who = tuple((d.choose.pick(names),) for _ in range(d.choose.number(0, 2)))
    return Call("abort", who, {"force": d.choose.flag(3), "after": d.after()})


def draw_reclaim(d: Drawing) -> Call:
    """Time goes on."""
    d.now += d.choose.number(0, 12)
    return Call("reclaim", (), {"now": float(d.now) if d.choose.flag(2) else d.now})


def draw_event(d: Drawing) -> Call:
    """An event is over, and now and then what waited is taken in at once."""
    undone = [label for label, e in d.world.events.items() if e is not None and not e.over]
    if d.choose.flag(3) or not undone:
        return Call("settle")
    return Call("over", (), {"event": d.choose.pick(undone)})


def draw_what_if(d: Drawing) -> Call:
    """A world without some requests."""
    size = d.world.config.page_size
    gone = d.choose.some(d.open_names(), 2)
    lengths = tuple(d.choose.number(0, 3 * size) for _ in range(d.choose.number(0, 3)))
    live = [name for name, r in d.world.ref.requests.items() if not r.missing]
    stay = tuple((name, d.ahead(name, "reserve")) for name in d.choose.some(live))
    new = [d.label() for _ in lengths]
    for name in new:
        d.texts[name] = (None, d.kinds())
    how: dict[str, Any] = {"lengths": lengths, "stay": stay, "new": tuple(new)}
    how |= {"go": d.choose.flag(3), "then_grow": d.choose.flag(2)}
    how["evict"] = d.world.config.window is not None and d.choose.flag(2)
    return Call("what_if", tuple((name,) for name in gone), how)


def draw_wrong(d: Drawing) -> Call:
    """A call that is wrong in itself."""
    names = d.open_names()
    label = d.choose.pick(names) if names else None
    return Call("wrong", (), {"label": label, "seed": d.choose.number(0, 1 << 30)})


def draw_snapshot(d: Drawing) -> Call:
    """Stored and restored; now and then as after a lost GPU."""
    return Call("snapshot", (), {"assume_done": d.choose.flag(3)})


def draw_recycle(d: Drawing) -> Call:
    """Everything goes back, and a new twin goes along for a while."""
    return Call("recycle", (), {"twin": True})
