"""Every kind of call with arguments chosen from whole numbers, made on both sides of a pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from model.choices import NAMESPACES, Chooser, amounts, any_config, event, shape, text
from model.pair import Kept, Pair
from model.window_moves import move_evict, move_tail

import sgalloc


def part(pair: Pair, choose: Chooser, verb: str, handles: list[int]) -> tuple[list[int], list[int]]:
    """How far each of these requests shall grow: now and then too far, or below C."""
    size, width = pair.config.page_size, pair.config.row_width
    numbers = []
    for handle in handles:
        committed = pair.ref.requests[pair.handles[handle]].committed
        kind = choose.number(0, 40)
        ahead = choose.number(0, size + 1) if kind < 25 else choose.number(0, 3 * size)
        if kind == 39:
            ahead = max(0, width - committed + choose.number(-size, size))
        if kind == 40 and verb == "extend":
            ahead = -choose.number(0, committed)
        numbers.append(committed + ahead if verb == "extend" else ahead)
    return handles, numbers


def move_open(pair: Pair, choose: Chooser) -> None:
    count = choose.number(0, 3)
    namespace = choose.pick(NAMESPACES) if choose.flag(3) else None
    texts = [(namespace, text(pair, choose)) for _ in range(count)]
    fits = pair.real.fits([0] * count)
    pair.same("fits(rows)", fits, pair.ref.fits([0] * count))
    ripe = pair.ref.ripe()
    did = pair.both(
        f"open {count} {namespace!r}",
        lambda: pair.real.open(count, namespace=namespace),
        lambda: pair.ref.open(count, namespace),
    )
    if pair.opened(did, texts) != fits and not ripe:
        pair.fail("fits did not foretell open")


def move_grow(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles))
    parts = {}
    for verb in ("extend", "decode", "reserve"):
        mine = handles if verb == "reserve" else choose.some(handles)
        handles = [handle for handle in handles if handle not in mine]
        if mine or choose.flag(4):
            parts[verb] = part(pair, choose, verb, mine)
    shaping, counting = shape(pair, choose), amounts(choose)
    evict = pair.config.window is not None and choose.flag(2)
    pair.grow(parts, shaping, counting, by_plan=True, with_out=choose.flag(2), evict=evict)


def move_verb(pair: Pair, choose: Chooser) -> None:
    verb = choose.pick(("extend", "extend", "decode", "reserve"))
    parts = {verb: part(pair, choose, verb, choose.some(list(pair.handles)))}
    shaping, counting = shape(pair, choose), amounts(choose)
    pair.grow(parts, shaping, counting, choose.flag(3), with_out=choose.flag(2))


def move_batch(pair: Pair, choose: Chooser) -> None:
    """A batch that is kept, also after some of its requests went away."""
    if not pair.batches or choose.flag(4):
        handles = choose.some(list(pair.handles))
        pair.batches.append((pair.real.batch(handles), handles))
        del pair.batches[:-3]
    batch, handles = choose.pick(pair.batches)
    tokens = choose.number(0, pair.config.page_size)
    verb = choose.pick(("decode", "reserve", "commit"))
    if verb == "commit":
        did = pair.both(
            f"commit batch {handles} {tokens}",
            lambda: pair.real.commit(batch, tokens),
            lambda: pair.ref.commit(pair.names(handles), [tokens] * len(handles)),
        )
        if did is not None:
            pair.compare()
    else:
        pair.grow({verb: (handles, [tokens] * len(handles))}, lambda _: batch)


def move_commit(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles))
    accepted = []
    for handle in handles:
        room = pair.extent(handle) - pair.ref.requests[pair.handles[handle]].committed
        accepted.append(choose.number(0, room) + choose.flag(12))
    shaping, counting = shape(pair, choose), amounts(choose)
    did = pair.both(
        f"commit {handles} {accepted}",
        lambda: pair.real.commit(shaping(handles), counting(accepted)),
        lambda: pair.ref.commit(pair.names(handles), accepted),
    )
    if did is not None:
        pair.compare()


def move_trim(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles), 3)
    lengths = []
    for handle in handles:
        length = choose.number(0, pair.ref.requests[pair.handles[handle]].committed + 2)
        lengths.append(length - length % pair.config.page_size if choose.flag(2) else length)
    shaping, counting, after = shape(pair, choose), amounts(choose), event(pair, choose)
    did = pair.both(
        f"trim {handles} {lengths} {after}",
        lambda: pair.real.trim(shaping(handles), counting(lengths), after=after),
        lambda: pair.ref.trim(pair.names(handles), lengths, after),
    )
    if did is None:
        return
    pair.compare()
    for handle in handles:  # what comes after the cut may be another text
        namespace, old = pair.texts[handle]
        cut = pair.ref.requests[pair.handles[handle]].committed
        pair.texts[handle] = (namespace, old[:cut] + text(pair, choose)[cut:])


def move_release(pair: Pair, choose: Chooser) -> None:
    handles = choose.some(list(pair.handles), 3)
    tokens = None
    if not choose.flag(4):  # without a cache they are ignored
        tokens = [known_tokens(pair, choose, handle) for handle in handles]
    shaping, after = shape(pair, choose), event(pair, choose)
    did = pair.both(
        f"release {handles} {tokens} {after}",
        lambda: pair.real.release(shaping(handles), tokens=tokens, after=after),
        lambda: pair.ref.release(pair.names(handles), tokens, after),
    )
    if did is not None:
        pair.forget(handles)
        pair.compare()


def known_tokens(pair: Pair, choose: Chooser, handle: int) -> list[int]:
    """What the engine knows of a prompt: all of C, less, or more."""
    tokens = pair.texts[handle][1]
    committed = pair.ref.requests[pair.handles[handle]].committed
    known = tokens[: choose.number(0, len(tokens)) if choose.flag(3) else committed]
    if choose.flag(20) and known:
        known = [1 - known[0], *known[1:]]
    return known


def move_match(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    tokens, namespace = text(pair, choose), choose.pick(NAMESPACES)
    if pair.texts and choose.flag(2):
        namespace, tokens = choose.pick(list(pair.texts.values()))
    elif choose.flag(2):
        namespace = None
    tokens = tokens[: choose.number(0, len(tokens))]
    pair.match(tokens, namespace, np.array(tokens, dtype=np.int64) if choose.flag(2) else None)


def move_open_with_prefix(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    move_match(pair, choose)
    chosen = [choose.pick(pair.matches[-3:]) for _ in range(choose.number(0, 2))]
    texts = []
    for _, ref, tokens in chosen:
        length = len(ref.nodes) * pair.config.page_size
        texts.append((ref.namespace, tokens[:length] + text(pair, choose)[length:]))
    did = pair.both(
        f"open_with_prefix {[tokens for _, _, tokens in chosen]}",
        lambda: pair.real.open_with_prefix([real for real, _, _ in chosen]),
        lambda: pair.ref.open_with_prefix([ref for _, ref, _ in chosen]),
    )
    pair.opened(did, texts)


def move_publish(pair: Pair, choose: Chooser) -> None:
    if not pair.config.prefix_cache:
        return
    handles = choose.some(list(pair.handles), 3)
    tokens = [known_tokens(pair, choose, handle) for handle in handles]
    after = event(pair, choose)
    did = pair.both(
        f"publish {handles} {tokens} {after}",
        lambda: pair.real.prefix.publish(handles, tokens, after=after),
        lambda: pair.ref.publish(pair.names(handles), tokens, after),
    )
    if did is not None:
        pair.compare()


def move_keep_plan(pair: Pair, choose: Chooser) -> None:
    verb = choose.pick(("extend", "decode", "reserve"))
    handles, numbers = part(pair, choose, verb, choose.some(list(pair.handles)))
    evict = {"evict": True} if pair.config.window is not None and choose.flag(2) else {}
    made = pair.both(
        f"plan {verb} {handles} {numbers} {evict}",
        lambda: pair.real.plan(**{verb: (handles, numbers)}, evict_window=bool(evict)),
        lambda: pair.ref.plan(**{verb: (pair.names(handles), numbers)}, **evict),
    )
    if made is not None:
        pair.plans.append(Kept(*made))
        del pair.plans[:-3]


def move_apply_kept(pair: Pair, choose: Chooser) -> None:
    """Applies a plan made some calls ago: refused if anything changed, else as good as new."""
    if not pair.plans:
        return
    kept = choose.pick(pair.plans)
    if kept.ref.doubts != pair.ref.doubts:
        pair.plans.remove(kept)
        return
    pair.settle()
    if kept.ref.changes == pair.ref.changes:
        pair.same_plan(kept.real, kept.ref, fresh=False)
    else:
        try:
            fits = pair.real.fits(kept.real)
        except sgalloc.StalePlan:
            fits = False
        pair.same("fits of a stale plan", fits, False)
    did = pair.both(
        "apply kept plan", lambda: pair.real.apply(kept.real), lambda: pair.ref.apply(kept.ref)
    )
    if did is not None:
        pair.compare()


def move_what_if(pair: Pair, choose: Chooser) -> None:
    """Asks for the world without some requests, lets them go, and holds the answer against it."""
    pair.settle()
    gone = choose.some(list(pair.handles), 2)
    size = pair.config.page_size
    lengths = [choose.number(0, 3 * size) for _ in range(choose.number(0, 3))]
    shaped = lengths[0] if len(lengths) == 1 and choose.flag(2) else lengths
    answers = {}
    for counting in (False, True):
        answers[counting] = pair.real.fits(
            shaped, after_releasing=shape(pair, choose)(gone), counting_cache=counting
        )
        expected = pair.ref.fits(lengths, None, pair.names(gone), counting)
        pair.same(
            f"fits({lengths}, after_releasing={gone}, {counting})", answers[counting], expected
        )
    staying, numbers = part(pair, choose, "reserve", choose.some(list(pair.handles)))
    evict = {"evict": True} if pair.config.window is not None and choose.flag(2) else {}
    planned = pair.both(
        f"plan reserve {staying} {numbers} {evict}",
        lambda: pair.real.plan(reserve=(staying, numbers), evict_window=bool(evict)),
        lambda: pair.ref.plan(reserve=(pair.names(staying), numbers), **evict),
    )
    plan_fits = None
    if planned is not None:
        plan_fits = pair.real.fits(planned[0], after_releasing=gone)
        expected = pair.ref.fits((), planned[1], pair.names(gone))
        pair.same(f"fits(plan of {staying}, after_releasing={gone})", plan_fits, expected)
    if not choose.flag(3):
        return
    pair.both(
        f"release {gone}",
        lambda: pair.real.release(gone),
        lambda: pair.ref.release(pair.names(gone)),
    )
    pair.forget(gone)
    pair.compare()
    if plan_fits is not None and choose.flag(2):
        left = [(h, n) for h, n in zip(staying, numbers, strict=True) if h not in gone]
        parts = {"reserve": ([h for h, _ in left], [n for _, n in left])}
        went = pair.grow(parts, by_plan=bool(evict), evict=bool(evict))
        pair.same("fits(plan, after_releasing), against what happened", plan_fits, went)
        return
    texts = [(None, text(pair, choose)) for _ in lengths]
    did = pair.both(
        f"open {len(lengths)}",
        lambda: pair.real.open(len(lengths)),
        lambda: pair.ref.open(len(lengths)),
    )
    went = pair.opened(did, texts)
    if went:
        handles = [int(handle) for handle in did[0]]  # type: ignore[index]
        went = pair.grow({"extend": (handles, lengths)})
    pair.same("fits(lengths, after_releasing), against what happened", answers[True], went)


def move_read(pair: Pair, choose: Chooser) -> None:
    """Slots and pages of ranges: they read, and change nothing."""
    size = pair.config.page_size
    handles = choose.some(list(pair.handles))
    starts, stops, expected = [], [], []
    for handle in handles:
        stop = choose.number(0, pair.extent(handle))
        start = choose.number(0, stop)
        pages = pair.pages(handle, 0, pair.extent(handle))
        expected += pair.slots(pages)[start:stop]
        starts.append(start)
        stops.append(stop)
        edge = start - start % size
        some = pair.pages(handle, edge, stop)
        pair.same("pages of a range", some, pages[edge // size : -(-stop // size)])
        committed = pair.ref.requests[pair.handles[handle]].committed
        pair.same("pages up to C", pair.pages(handle), pages[: -(-committed // size)])
    shaping, counting = shape(pair, choose), amounts(choose)
    out = np.full(len(expected), -7, dtype=np.int64) if choose.flag(2) else None
    slots = pair.real.slots(shaping(handles), counting(starts), counting(stops), out=out)
    pair.same("slots", (slots if out is None else out).tolist(), expected)


def move_event(pair: Pair, choose: Chooser) -> None:
    undone = [event for event in pair.events if not event.over]
    if undone:
        choose.pick(undone).over = True
    if choose.flag(3):
        pair.settle()


def move_audit(pair: Pair, choose: Chooser) -> None:
    """Asks for every cached prompt: what was evicted, and whose page is where, must agree."""
    leaves = [node for node in pair.ref.nodes() if not node.children]
    roots = {id(root): space for (_, space), root in pair.ref.roots.items()}
    prompts = []
    for leaf in sorted(leaves, key=lambda node: node.number):
        tokens: list[int] = []
        node = leaf
        while node.parent is not None:
            tokens = [*node.key, *tokens]
            node = node.parent
        prompts.append((tokens, roots[id(node)]))
    for tokens, namespace in prompts:
        pair.match([*tokens, 0], namespace)


__all__ = ["MOVES", "NAMESPACES", "WINDOW_MOVES", "Chooser", "any_config"]

MOVES: dict[Callable[[Pair, Chooser], None], int] = {
    move_open: 3,
    move_verb: 8,
    move_grow: 5,
    move_batch: 2,
    move_commit: 4,
    move_trim: 2,
    move_release: 5,
    move_match: 1,
    move_open_with_prefix: 4,
    move_publish: 3,
    move_keep_plan: 2,
    move_apply_kept: 2,
    move_what_if: 3,
    move_read: 1,
    move_event: 2,
    move_audit: 1,
    move_evict: 3,
    move_tail: 2,
}
WINDOW_MOVES = (move_evict, move_tail)
