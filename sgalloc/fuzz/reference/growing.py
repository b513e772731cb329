"""How the naive allocator grows: plans, whether they fit, and what they take."""

from __future__ import annotations

from collections.abc import Sequence

from sgalloc.fuzz.reference.device import Device
from sgalloc.fuzz.reference.window import Window
from sgalloc.fuzz.reference.words import NOTHING, Growth, Part, Plan, Refused


class Growing(Window, Device):
    """Extend, decode and reserve, by plans."""

    def plan(
        self,
        extend: Part = NOTHING,
        decode: Part = NOTHING,
        reserve: Part = NOTHING,
        evict: bool = False,
        tails: Sequence[int] | None = None,
        only: bool = False,
        steps: bool = False,
    ) -> Plan:
        """What these requests take; `steps` counts a decode step for what is reserved."""
        growths = []
        for kind, part in (("extend", extend), ("decode", decode), ("reserve", reserve)):
            requests = self.find(part[0], live=True)
            for name, request, number in zip(part[0], requests, part[1], strict=True):
                upto = number if kind == "extend" else request.committed + number
                if upto < request.committed:
                    raise Refused("value")
                cur = len(request.pages)
                growths.append(
                    Growth(
                        name,
                        kind,
                        request.committed,
                        upto,
                        request.committed if kind == "reserve" else upto,
                        cur,
                        max(cur, self.pages_for(upto)),
                        int(kind == "decode" or (steps and kind == "reserve")),
                        only=only and kind == "extend",
                    )
                )
        if len({growth.name for growth in growths}) < len(growths):
            raise Refused("value")
        for growth in growths:
            if growth.nxt * self.page_size > self.row_width:
                need = growth.nxt * self.page_size
                raise Refused("narrow", need=need, width=self.row_width)
        if self.window is not None:
            self.plan_window(growths, evict, tails)
        elif self.sparse is not None:
            self.plan_device(growths)
        return Plan(growths, self.changes, self.doubts)

    def needs(self, plan: Plan) -> dict[str, int]:
        """Pages that a plan takes, by group."""
        found = {self.main: sum(growth.nxt - growth.cur for growth in plan.growths)}
        if self.second:
            found[self.second] = sum(growth.need for growth in plan.growths)
        return found

    def gains(self, plan: Plan) -> dict[str, int]:
        """Pages that it gives back first."""
        found = {self.main: 0}
        if self.second:
            found[self.second] = sum(len(growth.leaving) for growth in plan.growths)
        return found

    def net(self, plan: Plan) -> dict[str, int]:
        """What of each group is missing afterwards."""
        gains = self.gains(plan)
        return {name: need - gains[name] for name, need in self.needs(plan).items()}

    def apply(self, plan: Plan) -> Plan:
        """Do what a plan says, if nothing changed since it was made."""
        self.settle()
        if plan.changes != self.changes:
            raise Refused("plan")
        self.make_room(self.net(plan))
        for growth in plan.growths:
            request = self.requests[growth.name]
            while len(request.pages) < growth.nxt:
                request.pages.append(self.pools[self.main].take())
            before = (growth.cur, request.committed, 0)
            moved = before != (growth.nxt, growth.settled, growth.step)
            self.changes += moved
            self.doubts += not moved
            request.committed = growth.settled
            request.steps += growth.step
        if self.window is not None:
            self.apply_window(plan.growths)
        elif self.sparse is not None:
            self.apply_device(plan.growths)
        return plan

    def grow(
        self,
        extend: Part = NOTHING,
        decode: Part = NOTHING,
        reserve: Part = NOTHING,
        evict: bool = False,
        tails: Sequence[int] | None = None,
        only: bool = False,
        steps: bool = False,
    ) -> Plan:
        """Plan and apply."""
        self.settle()
        return self.apply(self.plan(extend, decode, reserve, evict, tails, only, steps))

    def fits(
        self,
        new: Sequence[int] = (),
        plan: Plan | None = None,
        after_releasing: Sequence[int] = (),
        counting_cache: bool = True,
    ) -> bool:
        """Whether a plan, or new requests of these lengths, would go through."""
        gone = [r for r in self.find(after_releasing) if not r.missing]
        rooms = self.rooms(counting_cache, [node for r in gone for node in r.shared])
        for request in gone:
            rooms[self.main] += len(request.pages) - len(request.shared)
            if self.second:
                rooms[self.second] += len(self.beside(request))
        if plan is not None:
            left = [g for g in plan.growths if self.requests[g.name] not in gone]
            net = self.net(Plan(left, 0, 0))
            return all(net[name] <= rooms[name] for name in net)
        if len(new) > self.max_requests - len(self.rows_out) + len(gone):
            return False
        pages = [self.pages_for(length) for length in new]
        if any(count * self.page_size > self.row_width for count in pages):
            return False
        return all(sum(pages) <= room for room in rooms.values())
