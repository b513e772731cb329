"""Lengths, and what goes back: each call made on both sides and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgalloc.fuzz.calls import Call, shaped_numbers, tokens_of
from sgalloc.fuzz.growing import Growing
from sgalloc.fuzz.subject import Subject, on_host


class Giving(Growing):
    """How C moves, and how requests let go."""

    def each(
        self,
        verb: str,
        call: Call,
        mine: Callable[[list[int], list[Any], Any], Any],
        real: Callable[[Subject, Any, Any, Any], Any],
    ) -> tuple[Any, list[Any]] | None:
        """A verb of requests, numbers and an event."""
        names, numbers = self.labels(call.who), [one[1] for one in call.who]
        after, form = self.event(call.how.get("after")), call.how.get("number_form", 0)
        did = self.both(
            verb,
            lambda: mine(names, numbers, after),
            lambda s: real(
                s, self.handles(s, names, call.how), shaped_numbers(numbers, form), after
            ),
        )
        self.compare(names)
        return did

    def do_commit(self, call: Call) -> None:
        """C goes up."""
        self.each(
            "commit",
            call,
            lambda names, numbers, _: self.ref.commit(names, numbers),
            lambda s, x, numbers, _: s.alloc.commit(x, numbers),
        )

    def do_trim(self, call: Call) -> None:
        """C goes down."""
        self.each(
            "trim",
            call,
            self.ref.trim,
            lambda s, x, numbers, after: s.alloc.trim(x, numbers, after),
        )

    def do_evict(self, call: Call) -> None:
        """Frontiers go up, by the window or to where they are told."""
        names = self.labels(call.who)
        uptos = [one[1] for one in call.who] if call.how["upto"] else None
        after, form = self.event(call.how.get("after")), call.how.get("number_form", 0)

        def real(s: Subject) -> list[int]:
            upto = None if uptos is None else shaped_numbers(uptos, form)
            x = self.handles(s, names, call.how)
            return list(s.alloc.evict_window(x, upto, after).tolist())

        did = self.both("evict_window", lambda: self.ref.evict_window(names, uptos, after), real)
        if did is not None:
            self.agreed("frontiers", did)
        self.compare(names)

    def do_compact(self, call: Call) -> None:
        """The accepted path of a tree comes together."""
        names, accepted = self.labels(call.who), [one[1] for one in call.who]
        after = self.event(call.how.get("after"))
        did = self.both(
            "compact",
            lambda: self.ref.compact(names, accepted, after),
            lambda s: s.alloc.compact(
                [s.handles[name] for name in names], [list(some) for some in accepted], after
            ),
        )
        size = self.config.page_size
        for subject, moves in zip(self.subjects, did[1] if did is not None else (), strict=False):
            assert did is not None
            for side in (0, 1):
                ends = [pair[side] for pair in did[0]]
                slots = [
                    (subject.page(self.ref.main, place.page) or 0) * size + place.offset
                    for place in ends
                ]
                subject.same("moves", moves[side].tolist(), slots)
                if moves.window is None or not all(place.side for pair in did[0] for place in pair):
                    continue
                slots = [
                    (subject.page("window", place.side) or 0) * size + place.offset
                    for place in ends
                ]
                subject.same("moves in the window", moves.window[side].tolist(), slots)
        self.compare(names)

    def do_to_sparse(self, call: Call) -> None:
        """A buffer stays."""
        names, after = self.labels(call.who), self.event(call.how.get("after"))
        self.both(
            "to_sparse",
            lambda: self.ref.to_sparse(names, after),
            lambda s: s.alloc.to_sparse(self.handles(s, names, call.how), after),
        )
        self.compare(names)

    def do_release(self, call: Call) -> None:
        """Everything goes back."""
        names, after = self.labels(call.who), self.event(call.how.get("after"))
        size, tokens = self.config.page_size, None
        if call.how.get("tokens"):
            tokens = [None if p is None else tokens_of(p, size) for _, p in call.who]
        self.both(
            "release",
            lambda: self.ref.release(names, tokens, after),
            lambda s: s.alloc.release(self.handles(s, names, call.how), tokens=tokens, after=after),
        )
        self.compare(names)

    def do_read(self, call: Call) -> None:
        """Slots and pages of ranges: they read, and change nothing."""
        size, names = self.config.page_size, self.labels(call.who)
        starts, stops = [one[1] for one in call.who], [one[2] for one in call.who]
        requests = [self.ref.requests[name] for name in names if name in self.ref.requests]
        if len(requests) < len(names) or any(
            not 0 <= a <= b <= len(r.pages) * size
            for r, a, b in zip(requests, starts, stops, strict=True)
        ):
            return
        form = call.how.get("number_form", 0)
        total = sum(stops) - sum(starts)
        for subject in self.subjects:
            expected: list[Any] = [np.empty(0, np.int64)]
            for name, start, stop in zip(names, starts, stops, strict=True):
                ids, edge = self.ids(subject, name), start - start % size
                expected.append(subject.slots(ids)[start:stop])
                some = subject.alloc.pages(subject.handles[name], edge, stop).tolist()
                subject.same("pages of a range", some, ids[edge // size : -(-stop // size)])
                committed = self.ref.requests[name].committed
                some = subject.alloc.pages(subject.handles[name]).tolist()
                subject.same("pages up to C", some, ids[: self.ref.pages_for(committed)])
            out = self.empty(total, call.how["out"]) if call.how.get("out") else None
            x = self.handles(subject, names, call.how)
            slots = subject.alloc.slots(
                x, shaped_numbers(starts, form), shaped_numbers(stops, form), out=out
            )
            if not np.array_equal(on_host(slots if out is None else out), np.concatenate(expected)):
                subject.fail("slots are not those of the pages")
        self.seen["slots"] += 1
        self.seen["pages"] += 2 * len(names)
        self.calls += 1 + 2 * len(names)
