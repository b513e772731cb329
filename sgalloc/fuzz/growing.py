"""Opening and growing: each call made on both sides and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgalloc.fuzz.calls import BATCH_FORM, Call, shaped_handles, shaped_numbers
from sgalloc.fuzz.reference import Growth, Plan
from sgalloc.fuzz.subject import Disagreement, Subject, on_host
from sgalloc.fuzz.world import World
from sgalloc.sizing import SpecConfig
from sgalloc.speculative import dflash, eagle

_UNTOUCHED = -7


class Growing(World):
    """How requests are opened, and how they grow."""

    # -- opening and asking ----------------------------------------------------------------

    def do_open(self, call: Call) -> None:
        """Rows for new requests, and whether `fits` foretells it."""
        names, namespace = self.labels(call.who), call.how["namespace"]
        count, settled = len(names), not self.ref.ripe()
        fits = self.asked_new([0] * count, [], True) if call.how.get("ask") else None
        did = self.both(
            "open",
            lambda: self.ref.open(names, namespace),
            lambda s: s.alloc.open(count, namespace),
        )
        self.opened(names, did)
        if settled and fits is not None and fits != (did is not None):
            raise Disagreement(f"fits says {fits}, and open of {count} did otherwise")

    def opened(self, names: Sequence[int], did: tuple[Any, list[Any]] | None) -> None:
        """Note new requests, and compare them."""
        if did is not None:
            self.known.update(names)
            for subject, handles in zip(self.subjects, did[1], strict=True):
                subject.opened(names, handles.tolist())
        self.compare(names if did is not None else ())

    def asked_new(self, lengths: Sequence[int], gone: Sequence[int], counting: bool) -> bool:
        """`fits` of new requests, the same on both sides."""
        did = self.both(
            "fits",
            lambda: self.ref.fits(lengths, None, gone, counting),
            lambda s: s.alloc.fits(list(lengths), [s.handles[n] for n in gone], counting),
        )
        return did is not None and self.agreed("fits", did)

    def agreed(self, what: str, did: tuple[Any, list[Any]]) -> Any:
        """The answer that all gave."""
        for subject, answer in zip(self.subjects, did[1], strict=True):
            subject.same(what, answer, did[0])
        return did[0]

    # -- growing ---------------------------------------------------------------------------

    def do_grow(self, call: Call) -> None:
        """One growing verb, with its plan asked before."""
        how, names = call.how, self.labels(call.who)
        numbers = [one[1] for one in call.who]
        verb, tails = how["grows"], how.get("tails")
        mine: dict[str, Any] = {verb: (names, numbers)}
        only = bool(how.get("only"))
        more: dict[str, Any] = {}
        if tails is not None:
            tails = [one[2] for one in call.who]
            more["tails"] = tails
        if only:
            more["only"] = True
        settled, fits = not self.ref.ripe(), None
        if how.get("ask") and tails is None:
            planned = self.asked(mine, how, only=only)
            fits = planned is not None and self.asked_plan(planned, True)
            if how.get("keep") is not None and planned is not None:
                self.keep(how["keep"], planned)
        rooms = self.ref.rooms(True)
        outs = self.outs(mine, how, more)
        did = self.both(
            verb,
            lambda: self.ref.grow(**mine, **more),
            lambda s: self.really_grow(s, verb, names, numbers, how, tails, only, outs),
        )
        if settled and fits is not None and fits != (did is not None):
            raise Disagreement(f"fits says {fits}, and {verb} did otherwise")
        self.grown(did, rooms if settled else None, outs)

    def really_grow(
        self,
        s: Subject,
        verb: str,
        names: Sequence[int],
        numbers: Sequence[int],
        how: dict[str, Any],
        tails: Sequence[int] | None,
        only: bool,
        outs: dict[int, Any],
    ) -> Any:
        """The call on a real allocator, in the forms that were drawn."""
        x = self.handles(s, names, how)
        more: dict[str, Any] = {}
        if outs:
            more["out"] = outs[id(s)]
        if how.get("after") is not None:
            more["after"] = self.event(how["after"])
        if tails is not None:
            more["window_tail"] = shaped_numbers(tails, how.get("number_form", 0))
        if only:
            more["logical_only"] = True
        if how.get("rounding") is not None:
            more["rounding"] = how["rounding"]
        amounts = shaped_numbers(numbers, how.get("number_form", 0))
        return getattr(s.alloc, verb)(x, amounts, **more)

    def handles(self, s: Subject, names: Sequence[int], how: dict[str, Any]) -> Any:
        """Handles in the form that was drawn."""
        label = how.get("batch")
        if label is not None:
            return s.batches[label]
        found, form = [s.handles[name] for name in names], how.get("form", 0)
        if form == BATCH_FORM:
            # Made by the call itself, and refused by it where the handles are not good.
            return s.alloc.batch(found) if set(names) <= self.ref.requests.keys() else found
        return shaped_handles(found, form)

    def outs(
        self, parts: dict[str, Any], how: dict[str, Any], more: dict[str, Any]
    ) -> dict[int, Any]:
        """An array for the slots of each subject, if some are wanted."""
        if how.get("out") is None:
            return {}
        total = 0
        for verb, (names, numbers) in parts.items():
            for name, number in zip(names, numbers, strict=True):
                request = self.ref.requests.get(name)
                start = 0 if request is None else request.committed
                total += max(0, number - start if verb == "extend" else number)
        return {id(s): self.empty(total, how["out"]) for s in self.subjects}

    def empty(self, size: int, kind: str) -> Any:
        """An array on the device that nothing was written to."""
        untouched = np.full(size, _UNTOUCHED, dtype=kind)
        if self.device == "cpu":
            return untouched
        import cupy

        return cupy.asarray(untouched)

    def grown(
        self,
        did: tuple[Any, list[Any]] | None,
        rooms: dict[str, int] | None,
        outs: dict[int, Any],
    ) -> None:
        """Compare what a growth took, said and wrote."""
        if did is None:
            self.compare()
            return
        plan: Plan = did[0]
        need, gain = self.ref.needs(plan), self.ref.gains(plan)
        for subject, applied in zip(self.subjects, did[1], strict=True):
            subject.same("need of the applied plan", dict(applied.need), need)
            subject.same("gain of the applied plan", dict(applied.gain), gain)
            if rooms is not None:
                for group, before in rooms.items():
                    after = subject.alloc.available(group, counting_cache=True)
                    fall = need[group] - gain[group]
                    subject.same(f"fall of available({group})", before - after, fall)
        self.compare([growth.name for growth in plan.growths])
        for subject in self.subjects if outs else ():
            self.compare_slots(subject, plan.growths, outs[id(subject)])

    def compare_slots(self, subject: Subject, growths: Sequence[Growth], out: Any) -> None:
        """``out`` has the slots of the new tokens, in order."""
        expected: list[Any] = [np.empty(0, np.int64)]
        for growth in growths:
            pages = self.ids(subject, growth.name)
            expected.append(subject.slots(pages)[growth.start : growth.upto])
        if not np.array_equal(on_host(out), np.concatenate(expected)):
            subject.fail(f"out is {on_host(out).tolist()[:8]}, and not the slots of the new tokens")

    def ids(self, subject: Subject, name: int) -> list[int]:
        """The page ids of a request, as the reference has them."""
        found = []
        for number in self.ref.requests[name].pages:
            page = subject.page(self.ref.main, number)
            assert page is not None, "a page that was never seen"
            found.append(page)
        return found

    def asked(
        self, parts: dict[str, Any], how: dict[str, Any], evict: bool = False, only: bool = False
    ) -> tuple[Plan, list[Any]] | None:
        """`plan`, compared; None where it is refused."""

        def real(s: Subject) -> Any:
            theirs: dict[str, Any] = {}
            for verb, (names, numbers) in parts.items():
                x = self.handles(s, names, how)
                theirs[verb] = (x, shaped_numbers(numbers, how.get("number_form", 0)))
            if only:
                theirs["logical_only"] = True
            return s.alloc.plan(**theirs, evict_window=evict)

        ripe = self.ref.ripe()
        planned = self.both("plan", lambda: self.ref.plan(**parts, evict=evict, only=only), real)
        if planned is not None:
            # What is done was taken in since, so it may fit now.
            self.compare_plans(planned, fresh=not ripe)
        return planned

    def compare_plans(self, planned: tuple[Plan, list[Any]], fresh: bool) -> None:
        """Needs, gains, extents, and whether it fits."""
        plan, size = planned[0], self.config.page_size
        need = self.ref.needs(plan)
        fits = self.ref.fits(plan=plan) if fresh else None
        for subject, real in zip(self.subjects, planned[1], strict=True):
            subject.same("plan.need", dict(real.need), need)
            subject.same("plan.gain", dict(real.gain), self.ref.gains(plan))
            subject.same("plan.num_new_pages", real.num_new_pages, sum(need.values()))
            subject.same("plan.cur", real.cur.tolist(), [g.cur * size for g in plan.growths])
            subject.same("plan.nxt", real.nxt.tolist(), [g.nxt * size for g in plan.growths])
            if fits is not None:
                subject.same("plan.fits", bool(real.fits), fits)

    def asked_plan(
        self, planned: tuple[Plan, list[Any]], counting: bool, gone: Sequence[int] = ()
    ) -> bool:
        """`fits` of a plan, compared."""
        real = {id(s): plan for s, plan in zip(self.subjects, planned[1], strict=True)}
        did = self.both(
            "fits",
            lambda: self.ref.fits((), planned[0], gone, counting),
            lambda s: s.alloc.fits(real[id(s)], [s.handles[n] for n in gone], counting),
        )
        return did is not None and self.agreed("fits of a plan", did)

    def do_mixed(self, call: Call) -> None:
        """A plan of several kinds, asked and applied at once."""
        how = call.how
        parts: dict[str, Any] = {}
        for name, kind, number in call.who:
            names, numbers = parts.setdefault(kind, ([], []))
            names.append(name)
            numbers.append(number)
        ordered: dict[str, Any] = {
            kind: parts[kind] for kind in ("extend", "decode", "reserve") if kind in parts
        }
        evict, only = bool(how.get("evict")), bool(how.get("only"))
        planned = self.asked(ordered, how, evict, only)
        if planned is None:
            self.compare()
            return
        fits = self.asked_plan(planned, how.get("counting", True))
        if how.get("keep") is not None:
            self.keep(how["keep"], planned)
        settled, rooms = not self.ref.ripe(), self.ref.rooms(True)
        outs = self.outs(ordered, how, {})
        did = self.applied(planned, outs, how)
        if settled and how.get("counting", True) and fits != (did is not None):
            raise Disagreement(f"fits says {fits}, and apply did otherwise")
        self.grown(did, rooms if settled else None, outs)

    def applied(
        self, planned: tuple[Plan, list[Any]], outs: dict[int, Any], how: dict[str, Any]
    ) -> tuple[Any, list[Any]] | None:
        """`apply` on both sides."""
        real = {id(s): plan for s, plan in zip(self.subjects, planned[1], strict=True)}
        after = how.get("after")
        return self.both(
            "apply",
            lambda: self.ref.apply(planned[0]),
            lambda s: s.alloc.apply(real[id(s)], out=outs.get(id(s)), after=self.event(after)),
        )

    def keep(self, label: int, planned: tuple[Plan, list[Any]]) -> None:
        """Keep a plan for later."""
        self.plans[label] = planned[0]
        for subject, plan in zip(self.subjects, planned[1], strict=True):
            subject.plans[label] = plan

    def do_apply_kept(self, call: Call) -> None:
        """A plan made some calls ago: refused if anything changed, else as good as new."""
        plan = self.plans.get(call.how["plan"])
        if plan is None or plan.doubts != self.ref.doubts:
            return
        if any(g.name not in self.ref.requests for g in plan.growths):
            # It is stale for certain, and the reference could not ask for its requests.
            plan.changes = -1
        reals = [s.plans[call.how["plan"]] for s in self.subjects]
        settled, rooms = not self.ref.ripe(), self.ref.rooms(True)
        did = self.applied((plan, reals), {}, {})
        self.grown(did, rooms if settled else None, {})

    def do_prepare(self, call: Call) -> None:
        """The step of an engine that speculates."""
        how, names = call.how, self.labels(call.who)
        reserves = [one[1] for one in call.who]
        settled, rooms = not self.ref.ripe(), self.ref.rooms(True)
        outs = self.outs({"reserve": (names, reserves)}, how, {})
        block = how["module"] == "dflash"

        def real(s: Subject) -> Any:
            x, amounts = self.handles(s, names, how), shaped_numbers(reserves, how["number_form"])
            out = outs.get(id(s))
            if block:
                spec = SpecConfig("dflash", draft_tokens=4)
                return dflash.prepare_for_decode(s.alloc, x, spec, 5, reserve=amounts, out=out)
            spec = SpecConfig("eagle", steps=3, topk=1, draft_tokens=4)
            return eagle.prepare_for_decode(s.alloc, x, spec, reserve=amounts, out=out)

        evict = self.config.window is not None
        did = self.both(
            "prepare_for_decode",
            lambda: self.ref.grow(reserve=(names, reserves), evict=evict, steps=True),
            real,
        )
        if did is None:
            self.compare()
            return
        size, growths = self.config.page_size, did[0].growths
        needed = size * sum(g.nxt - g.cur for g in growths)
        for subject, step in zip(self.subjects, did[1], strict=True):
            subject.same("needed", step.needed, needed)
            longest = max((g.upto for g in growths), default=0)
            subject.same("max_seq_len", step.max_seq_len, longest)
            subject.same("cur", step.cur.tolist(), [g.cur * size for g in growths])
            subject.same("nxt", step.nxt.tolist(), [g.nxt * size for g in growths])
            if block:
                subject.same("committed_sum", step.committed_sum, sum(g.start for g in growths))
                subject.same("nxt_sum", step.nxt_sum, size * sum(g.nxt for g in growths))
                subject.same("max_top_k", step.max_top_k, 5 if growths else None)
        plans = [step.plan for step in did[1]]
        self.grown((did[0], plans), rooms if settled else None, outs)

    def do_batch(self, call: Call) -> None:
        """A batch that is kept."""
        names, label = self.labels(call.who), call.how["batch"]
        did = self.both(
            "batch",
            lambda: self.ref.find(names),
            lambda s: s.alloc.batch([s.handles[name] for name in names]),
        )
        if did is None:
            return
        self.batches[label] = names
        for subject, batch in zip(self.subjects, did[1], strict=True):
            subject.batches[label] = batch
