"""Draws calls: mostly such as an engine makes, now and then too much, too late or of nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgalloc.fuzz.calls import BATCH_FORM, KINDS_OF_EVENT, NAMESPACES, Call, Prompt
from sgalloc.fuzz.config import Chooser
from sgalloc.fuzz.doing import Doing
from sgalloc.fuzz.reference import Request
from sgalloc.fuzz.world import CUDA_EVENT

_KEPT = 4


class Drawing:
    """Draws calls for a world, from what its reference holds.

    Attributes:
        texts: namespace and kinds of pages of each request that was ever drawn.
        prompts: namespace and prompt of each match.
        now: the time of deadlines.
        pending: calls that have to follow the last one.
    """

    def __init__(self, world: Doing, choose: Chooser) -> None:
        self.world, self.choose = world, choose
        self.texts: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self.prompts: dict[int, tuple[Any, Prompt]] = {}
        self.now = 0
        self.pending: list[Call] = []
        self._labels = 0

    def ran(self, call: Call) -> None:
        """What comes after a cut may be another text."""
        if call.verb != "trim":
            return
        for name in self.world.labels(call.who):
            if name in self.world.ref.requests:
                namespace, old = self.texts[name]
                cut = self.committed(name) // self.world.config.page_size
                self.texts[name] = (namespace, old[:cut] + self.kinds()[cut:])

    # -- parts of calls --------------------------------------------------------------------

    def label(self) -> int:
        """A new one."""
        self._labels += 1
        return self._labels

    def request(self, name: int) -> Request:
        """An open request."""
        return self.world.ref.requests[name]

    def open_names(self) -> list[int]:
        """Labels of open requests."""
        return list(self.world.ref.requests)

    def some(self, most: int = 4) -> list[int]:
        """A few open requests; now and then one that is gone."""
        names = self.open_names()
        if not self.choose.flag(8):
            names = [name for name in names if not self.request(name).missing]
        names = self.choose.some(names, most)
        if self.choose.flag(60):
            gone = [name for name in self.world.known if name not in self.world.ref.requests]
            names += [self.choose.pick(gone)] if gone else []
        return names

    def committed(self, name: int) -> int:
        """C, also of one that is gone."""
        request = self.world.ref.requests.get(name)
        return 0 if request is None else request.committed

    def extent(self, name: int) -> int:
        """A, also of one that is gone."""
        request = self.world.ref.requests.get(name)
        return 0 if request is None else len(request.pages) * self.world.config.page_size

    def kinds(self) -> tuple[int, ...]:
        """The pages of a prompt as long as a row: few kinds, so that prompts often begin alike."""
        pages = self.world.config.row_width // self.world.config.page_size + 1
        code = self.choose.number(0, 4**pages - 1)
        return tuple(code // 4**n % 4 for n in range(pages))

    def known(self, name: int) -> Prompt:
        """What the engine knows of a prompt: all of C, less, or more; rarely something else."""
        kinds = self.texts[name][1]
        length = self.committed(name)
        if self.choose.flag(3):
            length = self.choose.number(0, len(kinds) * self.world.config.page_size)
        if self.choose.flag(20):
            kinds = (2 - 2 * (kinds[0] == 2), *kinds[1:])
        return kinds, length

    def text_of(self, match: int) -> tuple[Any, tuple[int, ...]]:
        """The text of a request that begins with a match: goes on as it likes."""
        namespace, (kinds, length) = self.prompts[match]
        whole = length // self.world.config.page_size
        return namespace, kinds[:whole] + self.kinds()[whole:]

    def forms(self) -> dict[str, int]:
        """How handles and numbers are passed."""
        return {
            "form": self.choose.number(0, BATCH_FORM),
            "number_form": self.choose.number(0, 3),
        }

    def after(self) -> tuple[int, int] | None:
        """An event, new or known, or none."""
        if not self.choose.flag(3):
            return None
        known = [label for label, event in self.world.events.items() if event is not None]
        if known and self.choose.flag(2):
            return self.choose.pick(known[-4:]), 0
        kind = self.choose.number(0, len(KINDS_OF_EVENT) - 1)
        if self.world.device != "cpu" and self.choose.flag(3):
            kind = CUDA_EVENT
        return self.label(), kind

    def written(self) -> tuple[int, int] | None:
        """An event that a write may wait for: on a GPU alone."""
        if self.world.device == "cpu" or not self.choose.flag(4):
            return None
        return self.label(), CUDA_EVENT

    def out(self) -> str | None:
        """The type of an array for slots, or none."""
        return self.choose.pick(("int32", "int64")) if self.choose.flag(2) else None

    def ahead(self, name: int, verb: str) -> int:
        """How far a request shall grow: now and then too far, or below C."""
        size, width = self.world.config.page_size, self.world.config.row_width
        committed, kind = self.committed(name), self.choose.number(0, 40)
        more = self.choose.number(0, size + 1 if kind < 25 else 3 * size)
        if kind == 39:
            more = max(0, width - committed + self.choose.number(-size, size))
        if kind == 40 and verb == "extend":
            more = -self.choose.number(0, committed)
        return committed + more if verb == "extend" else more


Move = Callable[[Drawing], "Call | None"]


def draw_open(d: Drawing) -> Call:
    """New requests, none of them now and then."""
    namespace = d.choose.pick(NAMESPACES) if d.choose.flag(3) else None
    count, ref = d.choose.number(0, 3), d.world.ref
    free = ref.max_requests - len(ref.rows_out)
    if count > free and not d.choose.flag(4):
        count = free
    names = [d.label() for _ in range(count)]
    for name in names:
        d.texts[name] = (namespace, d.kinds())
    return Call(
        "open", tuple((name,) for name in names), {"namespace": namespace, "ask": d.choose.flag(2)}
    )


def draw_grow(d: Drawing) -> Call:
    """One growing verb."""
    verb = d.choose.pick(("extend", "extend", "decode", "reserve", "reserve"))
    how: dict[str, Any] = {"grows": verb, "out": d.out(), "after": d.written(), **d.forms()}
    how["ask"] = not d.choose.flag(4)
    if d.choose.flag(12):
        how["keep"] = d.label()
    if verb == "reserve":
        how["rounding"] = d.choose.pick((None, "device", "device", "host"))
    if verb == "extend" and d.world.config.sparse is not None:
        how["only"] = d.choose.flag(3)
    return Call("grow", tuple((name, d.ahead(name, verb)) for name in d.some()), how)


def draw_tail(d: Drawing) -> Call:
    """Extends with a tail: mostly one that is right, of a request that holds no window page."""
    size = d.world.config.page_size
    empty = [name for name, r in d.world.ref.requests.items() if not r.window]
    who = []
    for name in d.choose.some(d.open_names() if d.choose.flag(6) else empty, 2):
        length = d.committed(name) + d.choose.number(0, 3 * size)
        begin = d.choose.number(d.committed(name), length)
        if not d.choose.flag(6):
            begin += -begin % size
        who.append((name, length, max(0, length - begin) + d.choose.flag(20) * 4 * size))
    return Call("grow", tuple(who), {"grows": "extend", "tails": True, **d.forms()})


def draw_mixed(d: Drawing) -> Call:
    """A plan of several kinds."""
    left, who = d.some(6), []
    for verb in ("extend", "decode", "reserve"):
        mine = left if verb == "reserve" else d.choose.some(left)
        left = [name for name in left if name not in mine]
        who += [(name, verb, d.ahead(name, verb)) for name in mine]
    how: dict[str, Any] = {"out": d.out(), "after": d.written(), **d.forms()}
    how["counting"] = not d.choose.flag(3)
    how["evict"] = d.world.config.window is not None and d.choose.flag(2)
    how["only"] = d.world.config.sparse is not None and d.choose.flag(3)
    if d.choose.flag(6):
        how["keep"] = d.label()
    return Call("mixed", tuple(who), how)


def draw_apply_kept(d: Drawing) -> Call | None:
    """A plan of some calls ago."""
    kept = list(d.world.plans)[-_KEPT:]
    return Call("apply_kept", (), {"plan": d.choose.pick(kept)}) if kept else None


def draw_prepare(d: Drawing) -> Call:
    """A step of an engine that speculates."""
    how: dict[str, Any] = {"module": d.choose.pick(("eagle", "dflash")), "out": d.out()}
    return Call("prepare", tuple((n, d.ahead(n, "reserve")) for n in d.some()), how | d.forms())


def draw_batch(d: Drawing) -> Call:
    """A batch is made, or used again, also after some of its requests went away."""
    kept = list(d.world.batches)[-_KEPT:]
    if not kept or d.choose.flag(4):
        return Call("batch", tuple((name,) for name in d.some()), {"batch": d.label()})
    label = d.choose.pick(kept)
    names, tokens = d.world.batches[label], d.choose.number(0, d.world.config.page_size)
    how: dict[str, Any] = {"batch": label, "number_form": 1}
    who = tuple((name, tokens) for name in names)
    verb = d.choose.pick(("decode", "reserve", "commit"))
    if verb == "commit":
        return Call("commit", who, how)
    return Call("grow", who, {"grows": verb, "ask": d.choose.flag(3), "out": d.out(), **how})


def draw_commit(d: Drawing) -> Call:
    """C goes up, within A but for now and then."""
    who = []
    for name in d.some():
        room = d.extent(name) - d.committed(name)
        who.append((name, d.choose.number(0, room) + d.choose.flag(12)))
    return Call("commit", tuple(who), dict(d.forms()))


def draw_trim(d: Drawing) -> Call:
    """C goes down, to a page edge or inside of one."""
    who = []
    for name in d.some(3):
        length = d.choose.number(0, d.committed(name) + 2)
        if d.choose.flag(2):
            length -= length % d.world.config.page_size
        who.append((name, length))
    return Call("trim", tuple(who), {"after": d.after(), **d.forms()})


def draw_release(d: Drawing) -> Call:
    """Everything goes back; without a cache the tokens are ignored."""
    with_tokens = not d.choose.flag(4)
    who = tuple((n, d.known(n) if with_tokens else None) for n in d.some(3))
    return Call("release", who, {"tokens": with_tokens, "after": d.after(), **d.forms()})


def draw_evict(d: Drawing) -> Call:
    """Frontiers move, by the window or to a chosen place, now and then above C."""
    names, upto, all_of_it = d.some(), bool(d.choose.number(0, 2)), d.choose.flag(2)
    who = []
    for name in names:
        committed = d.committed(name)
        to = committed if all_of_it else d.choose.number(0, committed)
        who.append((name, to + d.choose.flag(20) * (committed + 1)))
    return Call("evict", tuple(who), {"upto": upto, "after": d.after(), **d.forms()})


def draw_compact(d: Drawing) -> Call:
    """A path of positions past C; rarely one below, past A or out of order."""
    who = []
    for name in d.some(3):
        low, high = d.committed(name), d.extent(name)
        count = d.choose.number(0, min(4, high - low))
        chosen = sorted({d.choose.number(low, high - 1) for _ in range(count)})
        if d.choose.flag(15):
            chosen += [d.choose.pick((low - 1, high, high + 1, chosen[0] if chosen else low))]
        who.append((name, tuple(at for at in chosen if at >= 0)))
    return Call("compact", tuple(who), {"after": d.after()})


def draw_to_sparse(d: Drawing) -> Call:
    """Mostly of those that are dense."""
    names = d.some(3)
    if not d.choose.flag(6):
        names = [n for n in names if n in d.world.ref.requests and not d.request(n).sparse]
    return Call("to_sparse", tuple((n,) for n in names), {"after": d.after(), **d.forms()})


def draw_read(d: Drawing) -> Call:
    """Slots and pages of ranges."""
    who = []
    for name in d.choose.some(d.open_names()):
        stop = d.choose.number(0, d.extent(name))
        who.append((name, d.choose.number(0, stop), stop))
    return Call("read", tuple(who), {"out": d.out(), **d.forms()})
