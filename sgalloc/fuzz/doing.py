"""The prefix cache, remote writers, events, snapshots, twins: made on both sides and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgalloc.allocator import KVAllocator
from sgalloc.fuzz.calls import Call, tokens_of
from sgalloc.fuzz.giving import Giving
from sgalloc.fuzz.history import things_held
from sgalloc.fuzz.reference import Match, Node
from sgalloc.fuzz.subject import Disagreement, Subject
from sgalloc.fuzz.world import REFUSING
from sgalloc.fuzz.wrong import refused_call


class Doing(Giving):
    """How the other calls are done, and which of them."""

    def run(self, call: Call) -> None:
        """Make a call on both sides; what it names and nobody knows is left out.

        Raises:
            Disagreement: the sides differ, or one of them fell over.
        """
        if call.verb not in _OTHER_LABELS:
            who = tuple(one for one in call.who if one[0] in self.known)
            if call.who and not who:
                return
            call = Call(call.verb, who, call.how)
        try:
            if call.how.get("batch") is not None and call.verb != "batch":
                if call.how["batch"] not in self.batches:
                    return
                labels = self.batches[call.how["batch"]]
                if self.labels(call.who) != labels:
                    return
            getattr(self, f"do_{call.verb}")(call)
        except Disagreement:
            raise
        except Exception as error:
            raise Disagreement(f"{call.verb} fell over: {type(error).__name__}: {error}") from error

    # -- the prefix cache ------------------------------------------------------------------

    def matched(
        self, label: int | None, tokens: Sequence[int], namespace: Any, as_array: bool
    ) -> None:
        """`prefix.match`, compared and kept."""
        given: Any = np.array(tokens, dtype=np.int64) if as_array else tokens
        did = self.both(
            "match",
            lambda: self.ref.match(tokens, namespace),
            lambda s: s.alloc.prefix.match(given, namespace),
        )
        assert did is not None
        if label is not None:
            self.matches[label] = did[0]
        for subject, match in zip(self.subjects, did[1], strict=True):
            if label is not None:
                subject.matches[label] = match
            subject.same("match.length", match.length, len(did[0].nodes) * self.config.page_size)
            pages = [subject.page("full", node.page) for node in did[0].nodes]
            subject.same("match.pages", match.pages.tolist(), pages)

    def do_match(self, call: Call) -> None:
        """The longest cached prefix."""
        tokens = tokens_of(call.how["prompt"], self.config.page_size)
        how = call.how
        self.matched(how["match"], tokens, how["namespace"], bool(how.get("array")))
        self.compare()

    def do_open_with_prefix(self, call: Call) -> None:
        """Rows that begin with matches: `who` has their labels, and those of the requests."""
        who = [one for one in call.who if one[0] in self.matches]
        if len(who) < len(call.who):
            return
        names = [one[1] for one in who]
        did = self.both(
            "open_with_prefix",
            lambda: self.ref.open_with_prefix(names, [self.matches[one[0]] for one in who]),
            lambda s: s.alloc.open_with_prefix([s.matches[one[0]] for one in who]),
        )
        self.opened(names, did)

    def do_publish(self, call: Call) -> None:
        """Running requests share what they have."""
        names, after = self.labels(call.who), self.event(call.how.get("after"))
        tokens = [tokens_of(one[1], self.config.page_size) for one in call.who]
        self.both(
            "publish",
            lambda: self.ref.publish(names, tokens, after),
            lambda s: s.alloc.prefix.publish(self.handles(s, names, call.how), tokens, after=after),
        )
        self.compare(names)

    def do_clear(self, call: Call) -> None:
        """Whatever nobody holds leaves the cache."""
        did = self.both("clear", self.ref.clear, lambda s: s.alloc.prefix.clear())
        assert did is not None
        self.agreed("clear", did)
        self.compare()

    def do_audit(self, call: Call) -> None:
        """Asks for every cached prompt: what was evicted, and whose page is where, must agree."""
        leaves = [node for node in self.ref.nodes() if not node.children]
        roots = {id(root): space for (_, space), root in self.ref.roots.items()}
        prompts = []
        for leaf in sorted(leaves, key=lambda node: node.number):
            tokens: list[int] = []
            node: Node = leaf
            while node.parent is not None:
                tokens = [*node.key, *tokens]
                node = node.parent
            prompts.append(([*tokens, 0], roots[id(node)]))
        for tokens, namespace in prompts:
            self.matched(None, tokens, namespace, False)
        self.compare()

    # -- remote writers --------------------------------------------------------------------

    def do_preallocate(self, call: Call) -> None:
        """Requests to be received: label, length, writers, match, deadline, tail of each."""
        how, who = call.how, call.who
        if any(one[3] is not None and one[3] not in self.matches for one in who):
            return
        names, lengths = self.labels(who), [one[1] for one in who]
        writers, deadlines = [one[2] for one in who], [one[4] for one in who]
        tails = [one[5] for one in who] if how.get("tails") else None
        only = bool(how.get("only"))
        matches: list[Match | None] = [
            None if one[3] is None else self.matches[one[3]] for one in who
        ]
        plain = tails is None and not only and not any(matches) and not self.ref.ripe()
        fits = self.asked_new(lengths, [], True) if plain else None

        def real(s: Subject) -> Any:
            prefix = [None if one[3] is None else s.matches[one[3]] for one in who]
            more: dict[str, Any] = {}
            if tails is not None:
                more["window_tail"] = tails
            if only:
                more["logical_only"] = True
            given = prefix if any(m is not None for m in prefix) else None
            return s.alloc.preallocate(lengths, writers or 1, given, deadlines, **more)

        did = self.both(
            "preallocate",
            lambda: self.ref.preallocate(names, lengths, writers, matches, deadlines, tails, only),
            real,
        )
        if fits is not None and fits != (did is not None):
            raise Disagreement(f"fits says {fits}, and preallocate did otherwise")
        self.opened(names, did)

    def do_acknowledge(self, call: Call) -> None:
        """A writer is done."""
        for name, writer in call.who:
            self.acknowledged(name, writer)

    def acknowledged(self, name: int, writer: int) -> None:
        """One writer of one request."""
        did = self.both(
            "acknowledge",
            lambda: self.ref.acknowledge(name, writer),
            lambda s: s.alloc.acknowledge(s.handles[name], writer),
        )
        assert did is not None
        self.agreed("acknowledge", did)
        self.compare([name])

    def do_abort(self, call: Call) -> None:
        """Requests end, in whatever state they are."""
        names, force = self.labels(call.who), bool(call.how["force"])
        after = self.event(call.how.get("after"))
        self.both(
            "abort",
            lambda: self.ref.abort(names, force, after),
            lambda s: s.alloc.abort([s.handles[name] for name in names], force, after),
        )
        self.compare()

    def do_reclaim(self, call: Call) -> None:
        """What was not written in time comes back."""
        now = call.how["now"]
        did = self.both(
            "reclaim", lambda: self.ref.reclaim(now), lambda s: s.alloc.reclaim(now).tolist()
        )
        assert did is not None
        for subject, handles in zip(self.subjects, did[1], strict=True):
            subject.same("reclaim", handles, [subject.handles[name] for name in did[0]])
        self.compare()

    # -- events, and worlds that might be --------------------------------------------------

    def do_over(self, call: Call) -> None:
        """An event is over; the next verb, or `settle`, takes in what waited for it."""
        event = self.events.get(call.how["event"])
        if event is not None:
            event.over = True

    def do_settle(self, call: Call) -> None:
        """Take in what is done."""
        self.both("settle", self.ref.settle, lambda s: s.alloc.settle())
        self.compare()

    def do_what_if(self, call: Call) -> None:
        """The world without some requests, asked for; now and then they go, and it has to be so."""
        how, gone = call.how, [n for n in self.labels(call.who) if n in self.ref.requests]
        self.settle_all()
        lengths = list(how["lengths"])
        answers = [self.asked_new(lengths, gone, counting) for counting in (False, True)]
        stay = [one for one in how["stay"] if one[0] in self.ref.requests]
        names, numbers = [one[0] for one in stay], [one[1] for one in stay]
        planned = self.asked({"reserve": (names, numbers)}, {}, bool(how.get("evict")))
        fits = None if planned is None else self.asked_plan(planned, True, gone)
        if not how["go"]:
            return
        receiving = any(self.ref.requests[name].missing for name in gone)
        self.do_release(Call("release", tuple((name, None) for name in gone)))
        if receiving:
            return
        if fits is not None and how["then_grow"]:
            left = [one for one in stay if one[0] not in gone]
            part = {"reserve": ([one[0] for one in left], [one[1] for one in left])}
            again = self.asked(part, {}, bool(how.get("evict")))
            went = again is not None and self.asked_plan(again, True)
            if went != fits:
                raise Disagreement(f"fits after a release said {fits}, and then {went}")
            return
        new = how["new"][: len(lengths)]
        self.do_open(Call("open", tuple((name,) for name in new), {"namespace": None}))
        went = all(name in self.ref.requests for name in new)
        if went and lengths:
            before = {name: len(self.ref.requests[name].pages) for name in new}
            grow = {"grows": "extend", "ask": False}
            self.do_grow(Call("grow", tuple(zip(new, lengths, strict=True)), grow))
            went = all(
                len(self.ref.requests[n].pages) - before[n] >= self.ref.pages_for(length)
                for n, length in zip(new, lengths, strict=True)
            )
        if went != answers[1]:
            raise Disagreement(f"fits of {lengths} after a release said {answers[1]}, not {went}")

    def do_wrong(self, call: Call) -> None:
        """Calls of which every one must be refused and change nothing."""
        self.settle_all()
        for subject in self.subjects:
            name, refused = refused_call(subject, self.ref, call.how["label"], call.how["seed"])
            before, problem = subject.fingerprint(), None
            try:
                refused()
            except Exception as error:
                problem = error
            if problem is None:
                subject.fail(f"{name} went through")
            if not isinstance(problem, REFUSING):
                raise Disagreement(f"{name} fell over: {problem!r}") from problem
            subject.count(problem)
            if not str(problem) or "\n" in str(problem):
                subject.fail(f"{name}: {problem!r} is not one line")
            if subject.fingerprint() != before:
                subject.fail(f"{name} was refused and changed something")
        self.calls += 1
        self.refused["wrong"] += 1
        self.compare()

    # -- snapshots and twins ---------------------------------------------------------------

    def do_snapshot(self, call: Call) -> None:
        """Store, restore, and go on with what was restored."""
        if call.how.get("assume_done"):
            for event in self.events.values():
                if event is not None and not getattr(event, "ptr", 0):
                    event.over = True
        assume = bool(call.how.get("assume_done"))
        did = self.both(
            "snapshot", self.ref.check_storable, lambda s: s.alloc.snapshot(assume_done=assume)
        )
        if did is None:
            self.compare()
            return
        self.settle_all()
        self.ref.restored()
        for subject, data in zip(self.subjects, did[1], strict=True):
            restored = KVAllocator.restore(data, device=self.device)
            subject.same("digest of what was restored", restored.digest(), subject.alloc.digest())
            subject.alloc = restored
            subject.batches, subject.plans, subject.matches = {}, {}, {}
        self.batches, self.plans, self.matches = {}, {}, {}
        self.seen["restore"] += 1
        self.compare_all()

    def do_recycle(self, call: Call) -> None:
        """Everything goes back; a new allocator then has to show what the old one shows."""
        self.drain()
        ref = self.config.reference()
        first = self.subjects[0]
        fresh = Subject(first.alloc, self.config, "the recycled allocator")
        fresh.handles, fresh.refusals = first.handles, first.refusals
        self.forget()
        for name, pool in self.ref.pools.items():
            ref.pools[name].high_water, ref.pools[name].evicted = pool.high_water, pool.evicted
        self.ref = ref
        self.subjects = [fresh]
        if call.how.get("twin"):
            alloc = self.config.allocator(self.device)
            self.subjects.append(Subject(alloc, self.config, "its new twin"))
            # What only counts, and what no request can see, begins anew.
            self.subjects[1].is_twin = True
            self.subjects[1].handles = {}
        self.known = set()
        self.compare_all()

    def do_part(self, call: Call) -> None:
        """The twin has shown what it had to."""
        if len(self.subjects) > 1:
            self.compare_all()
            del self.subjects[1]

    def do_finish(self, call: Call) -> None:
        """Everything has to come back."""
        self.drain()

    def close(self) -> None:
        """Write journals to their ends."""
        for subject in self.subjects:
            subject.alloc.close_journal()

    def forget(self) -> None:
        """What belongs to the requests that are gone."""
        self.batches, self.plans, self.matches, self.events = {}, {}, {}, {}

    def drain(self) -> None:
        """Abort everything, let every event be over: all pages and rows come back."""
        names = [*self.ref.requests]
        self.do_abort(Call("abort", tuple((name,) for name in names), {"force": False}))
        for name, request in list(self.ref.receiving.items()):
            if name % 2:
                for writer in sorted(request.missing):
                    self.acknowledged(name, writer)
        left = tuple((name,) for name in self.ref.receiving)
        self.do_abort(Call("abort", left, {"force": True}))
        for event in self.events.values():
            if event is not None and not getattr(event, "ptr", 0):
                event.over = True
        self.do_settle(Call("settle"))
        if self.config.prefix_cache:
            self.do_clear(Call("clear"))
        self.compare_all()
        for group, whole in self.ref.pools.items():
            for subject in self.subjects:
                subject.same(
                    f"pages of {group} that came back", subject.alloc.available(group), whole.total
                )
        at_first = things_held(self.config.allocator("cpu"))
        for subject in self.subjects:
            held = things_held(subject.alloc)
            if held > at_first:
                subject.fail(
                    f"drained, {subject.name} holds {held} things, and a new one {at_first}"
                )
            subject.same(
                "rows that came back", subject.alloc.stats().rows.free, self.config.max_requests
            )


_OTHER_LABELS = ("open", "open_with_prefix", "preallocate")
