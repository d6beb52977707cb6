"""Who gets memory, and when: requests first, then reading ahead and writing behind in the order to come.

A request is *waiting* until a place is found for all of it at once, then *admitted*: nobody takes its places
any more, and it needs nothing but transfers to end, so no two requests can wait for each other. It is granted
when the last of them has. Requests are admitted first come first served; one that cannot fit beside what is
leased is overtaken by others, except by those that want the same segments, and not for ever: leases end by
themselves, so after a few of them nobody else is given a place until it has one.

Everything here is called with the store's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Literal

from plait.errors import PlaitError, UsageError
from plait.spill.claim import Claim, Lease
from plait.spill.foresight import NEVER, Foresight, Use, kept
from plait.spill.holding import Holding
from plait.spill.movement import AHEAD, BEHIND, COMMIT, DEMAND, Movement
from plait.spill.placement import Occupant, Plan, place
from plait.spill.segment import Request

_AHEAD_LEAST, _AHEAD_MOST, _AHEAD_BYTES = 2, 16, 64 << 20
"""So many segments are read ahead at once: the least that keeps a disk busy, more where they are small."""
_BEHIND_MOST = 2
_PATIENCE = 4
"""So many others may be given places before a request that needs more room than there is."""

Outcome = Literal["over", "moving", "crowded", "blocked"]
"""Admitted or failed; will fit once what moves has arrived; does not fit beside what is leased; wants what
somebody else has."""


class Admission:
    """Claims on memory, and what is done while nobody claims."""

    def __init__(
        self,
        movement: Movement,
        holdings: Mapping[str, Holding],
        answer: Callable[[Future[Lease], Lease | None, BaseException | None], None],
    ) -> None:
        self._movement = movement
        self._holdings = holdings
        self._answer = answer
        self._waiting: list[Claim] = []
        self._admitted: list[Claim] = []
        self.granted: set[Claim] = set()
        self.foresight = Foresight()
        self.requests = self.waits = self._releases = 0
        self.waited_s = 0.0

    @property
    def claims(self) -> list[Claim]:
        """All that are not yet released."""
        return [*self._waiting, *self._admitted, *self.granted]

    def add(self, claim: Claim) -> None:
        """A new request."""
        self.requests += 1
        self.foresight.begin(claim.modes)
        self._waiting.append(claim)

    def expect(self, upcoming: Iterable[Iterable[Request]]) -> None:
        """What will be requested."""
        self.foresight = Foresight(tuple(unit) for unit in upcoming)

    def changing(self, group: str) -> list[str]:
        """The keys of what commits of a group hold and somebody changes, or has asked to."""
        return [
            holding.segment.key
            for claim in self.claims
            for holding, mode in claim.wants.items()
            if mode != "read" and holding.segment.persistent and holding.segment.group == group
        ]

    def release(self, claim: Claim) -> None:
        """The holder of a lease is done."""
        if claim in self.granted:
            self.granted.remove(claim)
            self._let_go(claim)

    def withdraw(self, claim: Claim) -> None:
        """Nobody wants it any more, granted or not."""
        if claim in self._waiting:
            self._waiting.remove(claim)
        elif claim in self._admitted:
            self._admitted.remove(claim)
            self._let_go(claim)
        else:
            self.release(claim)

    def fail(self, claims: Iterable[Claim], error: BaseException) -> None:
        """End claims that were not granted yet."""
        for claim in list(claims):
            if claim in self._waiting:
                self._waiting.remove(claim)
            elif claim in self._admitted:
                self._admitted.remove(claim)
                self._let_go(claim)
            else:
                continue
            if not claim.future.done() and claim.future.set_running_or_notify_cancel():
                self._answer(claim.future, None, error)

    def failed(self, holding: Holding, error: BaseException) -> None:
        """A segment cannot be brought into memory: who needs it is told."""
        self.fail([claim for claim in self._admitted if holding in claim.wants], error)

    def _let_go(self, claim: Claim) -> None:
        self._releases += 1
        for holding, mode in claim.wants.items():
            holding.holders -= 1
            holding.used_at = self._releases
            if mode != "read":
                holding.writer = False
            if holding.state == "blank" or (holding.state == "reserved" and not holding.wants_content):
                self._movement.give_up(holding)

    def settle(self) -> None:
        """Do all that can be done now; called after every change."""
        moving = self._admit()
        while self._grant():  # what a cancelled one leaves may be what others wait for
            moving = self._admit()
        for claim in (*self._waiting, *self._admitted):
            claim.waited = True
        uses = self._uses()
        keep = self._kept(uses)
        if not moving:
            self._read_ahead(uses, keep)
        self._write_behind(uses, keep)

    def _admit(self) -> bool:
        """Admit whom there is room for; whether somebody will fit once what moves has arrived."""
        barred: dict[Holding, bool] = {}
        crowded: list[Claim] = []
        moving = False
        for claim in list(self._waiting):
            if claim.future.cancelled():
                self._waiting.remove(claim)
                continue
            wants = claim.wants.items()
            overtakes = any(
                holding in barred and (barred[holding] or mode != "read") for holding, mode in wants
            )
            needs_place = any(holding.state == "absent" for holding, _ in wants)
            outcome = "blocked" if overtakes else self._try(claim, may_place=not moving)
            if outcome != "over":
                for holding, mode in wants:
                    barred[holding] = barred.get(holding, False) or mode != "read"
            elif needs_place:
                for other in crowded:
                    other.overtaken += 1
            if outcome == "crowded":
                crowded.append(claim)
            moving = moving or outcome == "moving" or (outcome == "crowded" and claim.overtaken >= _PATIENCE)
        return moving

    def _try(self, claim: Claim, *, may_place: bool) -> Outcome:
        wants = claim.wants
        if any(h.writer or (mode != "read" and (h.holders or h.streams)) for h, mode in wants.items()):
            return "blocked"
        empty = [h for h, mode in wants.items() if mode != "write" and not h.filled]
        if empty:
            self.fail([claim], no_content(empty))
            return "over"
        for holding, mode in wants.items():
            if mode != "read" and holding.saving and holding.state == "present" and not holding.due:
                assert holding.transfer is not None
                self._movement.writers.cancel(holding.transfer)  # what it writes would be out of date
        if any(h.state == "leaving" or (mode != "read" and (h.saving or h.due)) for h, mode in wants.items()):
            return "blocked"
        missing = [holding for holding in wants if holding.state == "absent"]
        if missing:
            if not may_place:
                return "blocked"
            plan = self._plan(missing, claim)
            if plan is None:
                return self._make_way(claim)
            self._movement.bring(plan, blank={h: wants[h] == "write" for h in missing}, priority=DEMAND)
        self._waiting.remove(claim)
        self._admitted.append(claim)
        for holding, mode in wants.items():
            holding.holders += 1
            holding.writer = mode != "read"
            holding.ahead = False
            self._movement.hurry(holding, DEMAND)
        return "over"

    def _plan(self, missing: Iterable[Holding], claim: Claim) -> Plan[Holding] | None:
        uses = self._uses(claim)
        may_leave = [h for h in self._idle() if h not in claim.wants]
        sizes = {h: h.segment.nbytes for h in missing}
        return place(self._movement.arena.space, sizes, [_occupant(h, uses) for h in may_leave])

    def _make_way(self, claim: Claim) -> Outcome:
        """It does not fit now; find out whether it will, or would if its own segments were elsewhere."""
        held = {h for h in self._holdings.values() if h.holders}
        if sum(h.segment.nbytes for h in held.union(claim.wants)) > self._movement.arena.space.nbytes:
            return "crowded"
        if any(
            h.state in ("leaving", "reserved", "loading") and h not in held for h in self._holdings.values()
        ):
            return "moving"
        own = [h for h in claim.wants if h.state == "present" and not h.holders]
        if not own:
            return "crowded"
        sizes = {h: h.segment.nbytes for h in claim.wants if h.state == "absent" or h in own}
        uses = self._uses(claim)
        if place(self._movement.arena.space, sizes, [_occupant(h, uses) for h in self._idle()]) is None:
            return "crowded"
        claim.moved_own = True
        for holding in own:
            self._movement.evict(holding, DEMAND)
        return "moving" if any(h.state == "leaving" for h in own) else self._try(claim, may_place=True)

    def _idle(self) -> list[Holding]:
        """What is in memory and nobody's."""
        return [h for h in self._holdings.values() if h.state == "present" and not h.holders]

    def _uses(self, besides: Claim | None = None) -> Mapping[str, Use]:
        """The next use of each segment, in their order."""
        waiting = (claim for claim in self._waiting if claim is not besides and not claim.moved_own)
        return self.foresight.uses(claim.modes for claim in waiting)

    def _grant(self) -> bool:
        """Give leases to whom all has arrived for; whether somebody no longer wanted one."""
        unwanted = False
        for claim in list(self._admitted):
            if all(h.state in ("present", "blank") for h in claim.wants):
                self._admitted.remove(claim)
                if not claim.future.set_running_or_notify_cancel():
                    self._let_go(claim)
                    unwanted = True
                    continue
                for holding, mode in claim.wants.items():
                    holding.state = "present"
                    if mode != "read":
                        holding.filled, holding.dirty, holding.current = True, True, None
                claim.places = {h.segment.key: h.place for h in claim.wants}
                self.granted.add(claim)
                self.waits += claim.waited
                self.waited_s += time.monotonic() - claim.made_at_s
                self._answer(claim.future, Lease(claim), None)
        return unwanted

    def _kept(self, uses: Mapping[str, Use]) -> set[str]:
        """Beside what is held, the next ones in order that memory has room for, those to be made too."""
        held = {h.segment.key: h for h in self._holdings.values() if h.holders}
        room = self._movement.arena.space.nbytes - sum(h.segment.nbytes for h in held.values())
        return kept(((key, self._size(key, use)) for key, use in uses.items() if key not in held), room)

    def _size(self, key: str, use: Use) -> int:
        return self._holdings[key].segment.nbytes if key in self._holdings else use.nbytes

    def _read_ahead(self, uses: Mapping[str, Use], keep: set[str]) -> None:
        """Bring in what comes next, in its order; nothing leaves that is needed sooner, or came ahead."""
        space = self._movement.arena.space
        moving = [h for h in self._holdings.values() if h.state in ("reserved", "loading") and not h.holders]
        count, nbytes = len(moving), sum(h.segment.nbytes for h in moving)
        for key, use in uses.items():
            if count >= _AHEAD_MOST or (count >= _AHEAD_LEAST and nbytes >= _AHEAD_BYTES):
                return
            holding = self._holdings.get(key) if key in keep else None
            if holding is None or holding.state != "absent" or holding.trouble is not None:
                continue
            if use.mode == "write" or not holding.filled:
                continue
            size = {holding: holding.segment.nbytes}
            plan = place(space, size, ()) or place(space, size, self._needed_after(use, uses))
            if plan is None:
                return
            self._movement.bring(plan, blank={holding: False}, priority=AHEAD)
            holding.ahead = True
            count, nbytes = count + 1, nbytes + holding.segment.nbytes

    def _needed_after(self, use: Use, uses: Mapping[str, Use]) -> list[Occupant[Holding]]:
        later = (h for h in self._idle() if _position(uses.get(h.segment.key)) > use.position)
        # Jobs take their units at their own pace, so what seems to be needed first changes from unit to unit:
        # what was read for one job would leave for another's, and be read again, for ever.
        idle = (h for h in later if not (h.ahead and h.segment.key in uses))
        return [_occupant(h, uses) for h in idle if h.trouble is None]

    def _write_behind(self, uses: Mapping[str, Use], keep: set[str]) -> None:
        """Write what is due or leaving; and what will have to leave soon, so that it can then go at once."""
        dirty = [h for h in self._holdings.values() if h.dirty and not h.writer and h.transfer is None]
        for holding in dirty:
            if holding.state == "leaving" or holding.due:
                self._movement.save(holding, DEMAND if holding.state == "leaving" else COMMIT)
        everything = sum(h.segment.nbytes for h in self._holdings.values())
        if everything <= self._movement.arena.space.nbytes:
            return
        under_way = sum(h.saving for h in self._holdings.values())
        idle = (h for h in dirty if h.state == "present" and h.transfer is None and h.trouble is None)
        # Scratch in use may be dropped right after.
        might = (h for h in idle if h.segment.persistent or not h.holders)
        later = [(_position(uses.get(h.segment.key)), h) for h in might if h.segment.key not in keep]
        for position, holding in sorted(later, key=lambda item: -item[0]):
            if under_way >= _BEHIND_MOST or position < 0:  # somebody waits for it, perhaps to change it
                return
            self._movement.save(holding, BEHIND)
            under_way += 1


def _position(use: Use | None) -> float:
    return NEVER if use is None else use.position


def _occupant(holding: Holding, uses: Mapping[str, Use]) -> Occupant[Holding]:
    return Occupant(
        key=holding,
        place=holding.range,
        # First what could not be written the last time, then Belady's rule, clean before dirty, and where
        # nothing is known the order of use.
        loss=(
            holding.trouble is not None,
            -_position(uses.get(holding.segment.key)),
            holding.dirty,
            holding.used_at,
        ),
    )


def no_content(holdings: list[Holding]) -> PlaitError:
    """The error of reading what was never written."""
    keys = ", ".join(holding.segment.key for holding in holdings[:3])
    return UsageError(
        f"{keys} cannot be read: nothing has been written to it yet", setting="mode", works="write"
    )
