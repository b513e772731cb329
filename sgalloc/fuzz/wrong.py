"""Calls that no allocator may accept: wrong types, numbers, handles, sizes and forms."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from sgalloc.fuzz.calls import Event
from sgalloc.fuzz.config import Chooser
from sgalloc.fuzz.reference import Reference
from sgalloc.fuzz.subject import Subject

BAD_NUMBERS: tuple[Any, ...] = (
    -1, 1.5, float("nan"), float("inf"), True, "3", None, 2**63, -(2**70), [1, 2], [[1]],
    np.array([1.0]), np.array([True]), np.array(["1"]), np.array([2**64 - 1], dtype=np.uint64),
)  # fmt: skip
BAD_HANDLES: tuple[Any, ...] = (
    0, 1, -1, 1 << 32, 1.5, float("nan"), True, "x", None, 2**63, 2**80, [[1]], np.array([1.5]),
)  # fmt: skip
Named = tuple[str, Callable[[], Any]]


def refused_call(subject: Subject, ref: Reference, label: int | None, seed: int) -> Named:
    """A call that has to be refused, and what it is.

    Args:
        subject: the allocator.
        ref: what it holds.
        label: an open request that is live, or None.
        seed: which call; the same for the same seed.
    """
    choose = Chooser(random.Random(seed).randint)
    gone = [handle for name, handle in subject.handles.items() if name not in ref.requests]
    nobody = choose.pick(gone) if gone and choose.flag(2) else choose.pick(BAD_HANDLES)
    calls = anybody(subject, choose, nobody)
    if label is not None and label in ref.requests and not ref.requests[label].missing:
        calls += of_one(subject, ref, choose, label, nobody)
        calls += beside_one(subject, ref, choose, label, nobody)
    return choose.pick(calls)


def anybody(subject: Subject, choose: Chooser, nobody: Any) -> list[Named]:
    """Those that name no open request."""
    real, number = subject.alloc, choose.pick(BAD_NUMBERS)
    names = choose.pick((1.5, [1], ()))
    return [
        (f"open({number!r})", lambda: real.open(-2 if number is None else number)),
        ("open in no namespace", lambda: real.open(1, namespace=names)),
        (f"fits([{number!r}])", lambda: real.fits([number])),
        (f"fits after {nobody!r}", lambda: real.fits([1], after_releasing=[nobody])),
        ("available of no group", lambda: real.available("nobody")),
        (f"release {nobody!r}", lambda: real.release(nobody)),
        (f"commit {nobody!r}", lambda: real.commit(nobody, 1)),
        (f"extend {nobody!r}", lambda: real.extend(nobody, 1)),
        (f"decode {nobody!r}", lambda: real.decode(nobody)),
        (f"reserve {nobody!r}", lambda: real.reserve(nobody, 1)),
        (f"trim {nobody!r}", lambda: real.trim(nobody, 0)),
        (f"compact {nobody!r}", lambda: real.compact([nobody], [[]])),
        (f"pages of {nobody!r}", lambda: real.pages(nobody)),
        (f"slots of {nobody!r}", lambda: real.slots(nobody, 0, 0)),
        (f"committed of {nobody!r}", lambda: real.committed(nobody)),
        (f"batch of {nobody!r}", lambda: real.batch([nobody])),
        ("apply nothing", lambda: real.apply(choose_plan(choose))),
        ("release tokens of nobody", lambda: real.release([], tokens=[[1]])),
        ("preallocate for no writer", lambda: real.preallocate([1], 0)),
        (
            f"preallocate {number!r}",
            lambda: real.preallocate([-1 if isinstance(number, list) else number]),
        ),
        ("preallocate until nan", lambda: real.preallocate([1], deadline=float("nan"))),
        ("preallocate until some day", lambda: real.preallocate([1], deadline="late")),
        ("preallocate behind no match", lambda: real.preallocate([1], prefix=[1])),
        ("acknowledge nobody", lambda: real.acknowledge("x", 0)),
        ("abort with a force", lambda: real.abort([], force=1)),  # type: ignore[arg-type]
        ("reclaim at nan", lambda: real.reclaim(float("nan"))),
    ]


def choose_plan(choose: Chooser) -> Any:
    """What is no plan."""
    return (None, 1, "plan")[choose.number(0, 2)]


def of_one(
    subject: Subject, ref: Reference, choose: Chooser, label: int, nobody: Any
) -> list[Named]:
    """Those about an open request, in every allocator."""
    real, handle, request = subject.alloc, subject.handles[label], ref.requests[label]
    size, committed = ref.page_size, request.committed
    extent = len(request.pages) * size
    number = choose.pick(BAD_NUMBERS)
    twice: Any = choose.pick(([handle, handle], np.array([handle, handle])))
    wrong: Any = choose.pick(
        (np.zeros(committed + 1, np.int32), np.zeros(committed, np.float32), "out")
    )
    waits = Event()
    verb = choose.pick(("extend", "decode", "reserve", "commit", "trim"))
    grows = choose.pick(("extend", "decode", "reserve"))
    change, grow = getattr(real, verb), getattr(real, grows)
    planning: dict[str, Any] = {grows: ([handle], number)}
    calls: list[Named] = [
        (f"{verb} {handle} {number!r}", lambda: change([handle], number)),
        (f"{verb} twice", lambda: change(twice, [committed, committed])),
        (f"{verb} and nobody", lambda: change([handle, nobody], [committed, committed])),
        (f"{verb} of two lengths", lambda: change([handle], [committed, committed])),
        (f"{verb} of no length", lambda: change([handle], [])),
        (f"{grows} too far", lambda: grow([handle], ref.row_width + 1)),
        (f"{grows} wrong out", lambda: grow(handle, committed, out=wrong)),
        (f"plan {grows} {number!r}", lambda: real.plan(**planning)),
        ("commit past A", lambda: real.commit(handle, extent - committed + 1)),
        ("extend below C", lambda: real.extend(handle, committed - 1)),
        ("plan twice", lambda: real.plan(decode=(handle, 1), reserve=(handle, 1))),
        ("release twice", lambda: real.release(twice)),
        ("release and nobody", lambda: real.release([handle, nobody])),
        ("release after nothing", lambda: real.release(handle, after="later")),
        ("batch twice", lambda: real.batch(twice)),
        ("compact below C", lambda: real.compact([handle], [[committed - 1]])),
        ("compact past A", lambda: real.compact([handle], [[extent]])),
        ("compact of two", lambda: real.compact([handle], [[], []])),
        ("pages past A", lambda: real.pages(handle, 0, extent + 1)),
        ("pages below 0", lambda: real.pages(handle, -size)),
        (f"pages from {number!r}", lambda: real.pages(handle, -1 if number is None else number)),
        ("slots past A", lambda: real.slots(handle, 0, extent + 1)),
        ("slots below 0", lambda: real.slots(handle, -1, 0)),
        ("slots backwards", lambda: real.slots(handle, 1, 0)),
        (f"slots to {number!r}", lambda: real.slots([handle], 0, number)),
        ("fits after twice", lambda: real.fits([1], after_releasing=twice)),
        ("release, tokens of two", lambda: real.release([handle], tokens=[[1], [1]])),
    ]
    if real.device == "cpu":
        # A stream of a GPU would wait for it, or say that it cannot.
        calls.append((f"{grows} after", lambda: grow(handle, extent + 1, after=waits)))
    if size > 1:
        calls.append(("pages inside a page", lambda: real.pages(handle, 1, max(extent, 1))))
    return calls


def beside_one(
    subject: Subject, ref: Reference, choose: Chooser, label: int, nobody: Any
) -> list[Named]:
    """Those about the second group and the prefix cache, or about having none."""
    real, handle, request = subject.alloc, subject.handles[label], ref.requests[label]
    committed, size = request.committed, ref.page_size
    number, twice = choose.pick(BAD_NUMBERS), [handle, handle]
    calls: list[Named] = []
    if ref.window is None:
        calls += [
            ("evict without a window", lambda: real.evict_window(handle)),
            ("plan an eviction without", lambda: real.plan(decode=(handle, 1), evict_window=True)),
            ("a tail without a window", lambda: real.extend(handle, committed, window_tail=0)),
            ("frontier without a window", lambda: real.frontier(handle)),
        ]
    else:
        calls += [
            ("evict above C", lambda: real.evict_window(handle, upto=committed + 1)),
            (f"evict {nobody!r}", lambda: real.evict_window([handle, nobody])),
            (f"evict to {number!r}", lambda: real.evict_window([handle], upto=[number])),
            ("evict twice", lambda: real.evict_window(twice)),
            ("evict of two lengths", lambda: real.evict_window([handle], upto=[0, 0])),
            ("evict after nothing", lambda: real.evict_window(handle, after="later")),
            ("a tail too long", lambda: real.extend(handle, committed, window_tail=1)),
            (
                f"a tail of {number!r}",
                lambda: real.extend([handle], committed, window_tail=[number]),
            ),
            (f"frontier of {nobody!r}", lambda: real.frontier(nobody)),
        ]
    if ref.sparse is None:
        calls += [
            ("sparse without a group", lambda: real.to_sparse(handle)),
            ("logical only without", lambda: real.extend(handle, committed, logical_only=True)),
        ]
    else:
        calls += [
            ("sparse twice", lambda: real.to_sparse(twice)),
            (f"sparse {nobody!r}", lambda: real.to_sparse([handle, nobody])),
            ("sparse after nothing", lambda: real.to_sparse(handle, after="later")),
        ]
    if not ref.prefix_cache:
        calls.append(("a cache without one", lambda: real.prefix))
        return calls
    tokens: Any = choose.pick(([1.5] * size, [True] * size, "tokens", [None] * size, [[0] * size]))
    calls += [
        ("release strange tokens", lambda: real.release([handle], tokens=[tokens])),
        ("match strange tokens", lambda: real.prefix.match(tokens)),
        ("publish strange tokens", lambda: real.prefix.publish([handle], [tokens])),
        ("publish tokens of two", lambda: real.prefix.publish([handle], [[1], [1]])),
        ("publish twice", lambda: real.prefix.publish(twice, [[1], [1]])),
        (f"publish {nobody!r}", lambda: real.prefix.publish([nobody], [[1]])),
        ("match in no namespace", lambda: real.prefix.match([1], namespace=1.5)),
        ("open with no match", lambda: real.open_with_prefix([None])),  # type: ignore[list-item]
    ]
    return calls
