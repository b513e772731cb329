"""The moves of the window group."""

from __future__ import annotations

from model.choices import Chooser, amounts, event, shape
from model.pair import Pair


def move_evict(pair: Pair, choose: Chooser) -> None:
    """Moves frontiers, by the window or to a chosen place, now and then above C."""
    if pair.config.window is None:
        return
    handles, uptos = choose.some(list(pair.handles)), None
    if choose.number(0, 2):
        uptos, all_of_it = [], choose.flag(2)
        for handle in handles:
            committed = pair.ref.requests[pair.handles[handle]].committed
            upto = committed if all_of_it else choose.number(0, committed)
            uptos.append(upto + choose.flag(20) * (committed + 1))
    shaping, counting, after = shape(pair, choose), amounts(choose), event(pair, choose)
    did = pair.both(
        f"evict_window {handles} {uptos} {after}",
        lambda: pair.real.evict_window(
            shaping(handles), upto=None if uptos is None else counting(uptos), after=after
        ),
        lambda: pair.ref.evict_window(pair.names(handles), uptos, after),
    )
    if did is not None:
        pair.same("frontiers", did[0].tolist(), did[1])
        pair.compare()


def move_tail(pair: Pair, choose: Chooser) -> None:
    """Extends with a tail: mostly one that is right, of a request that holds no window page."""
    if pair.config.window is None:
        return
    size = pair.config.page_size
    empty = [h for h, name in pair.handles.items() if not pair.ref.requests[name].window]
    handles = choose.some(list(pair.handles) if choose.flag(6) else empty, 2)
    lengths, tails = [], []
    for handle in handles:
        committed = pair.ref.requests[pair.handles[handle]].committed
        lengths.append(committed + choose.number(0, 3 * size))
        begin = choose.number(committed, lengths[-1])
        if not choose.flag(6):
            begin += -begin % size
        tails.append(max(0, lengths[-1] - begin) + choose.flag(20) * 4 * size)
    mine = {"extend": (pair.names(handles), lengths), "tails": tails}
    shaping, counting = shape(pair, choose), amounts(choose)
    rooms = [pair.real.available(group, counting_cache=True) for group in pair.groups]
    ripe = pair.ref.ripe()
    did = pair.both(
        f"extend {handles} {lengths} with tails {tails}",
        lambda: pair.real.extend(shaping(handles), lengths, window_tail=counting(tails)),
        lambda: pair.ref.grow(**mine),
    )
    if did is None:
        return
    need = pair.ref.needs(did[1])
    pair.same("need with a tail", dict(did[0].need), need)
    if not ripe:
        left = [pair.real.available(group, counting_cache=True) for group in pair.groups]
        pair.same("fall with a tail", [a - b for a, b in zip(rooms, left, strict=True)],
                  [need[group] for group in pair.groups])  # fmt: skip
    pair.compare()
