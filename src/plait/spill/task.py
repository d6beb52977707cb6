"""A job under way: what it is, how far it has come, and how the store and the outcome see it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from plait.cluster.disk import DiskSpeed
from plait.errors import PlaitError
from plait.job import Job
from plait.spill.description import Description
from plait.spill.homes import homes
from plait.spill.makespan import Load
from plait.spill.outcome import End
from plait.spill.plan import SpillPlan
from plait.spill.progress import Row
from plait.spill.segment import Request
from plait.spill.units import Head, Phase, Unit, next_unit, requests, scratch_for, step_order, upcoming

_NEAR = 4
"""Units of which all is told in advance."""
Result = TypeVar("Result")
State = Literal["waiting", "requested", "running", "held", "committing", "ended"]


@dataclass(kw_only=True)
class Task:
    """One job of a run; only the alternator's thread changes it."""

    job: Job
    description: Description
    plan: SpillPlan
    head: Head
    unit_seconds: dict[tuple[str, int], float]
    """By phase and shard: what a unit should take, later what it took."""
    load: Load | None = None
    """What was planned of it, to be played."""
    disk: DiskSpeed | None = None
    """As it was measured before the run: the next may find no room for that."""
    weights: str | Path | None = None
    """A file or folder that it starts from, in place of its seed."""
    shared: str | None = None
    """The group of what it has in common with other jobs."""
    state: State = "waiting"
    end: End | None = None
    error: str | None = None
    leaving: End | None = None
    """How it is to end, once what it has under way is done."""
    paused: bool = False
    """Not to begin another step for now."""
    holds: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done with it between two steps, while it waits."""
    returns: bool = False
    """To go back to its last commit, once what it has under way is done."""
    committed_step: int = 0
    committed_at: float = 0.0
    """Seconds of the loop's clock, when its last commit began."""
    commits: bool = False
    """Whether a commit is under way."""
    last_device: int | None = None
    _made_for: Head | None = None
    _made: dict[str, object] = field(default_factory=dict)
    deaths: int = 0
    """Devices that died while they computed for it, since its last commit."""
    busy_seconds: float = 0.0
    _lefts: list[float] | None = None
    _longest: float = 0.0

    @property
    def name(self) -> str:
        """The job's name, and the group of its segments."""
        return self.job.name

    @property
    def unit(self) -> Unit | None:
        """The unit to do next; None at the end of the job."""
        return next_unit(self.description, self.plan, self.head)

    def requests(self) -> tuple[Request, ...]:
        """The segments that its next unit needs."""
        return self._for_head("requests", self._requests)

    def _requests(self) -> tuple[Request, ...]:
        unit = self.unit
        assert unit is not None, f"{self.name} has a unit to do"
        return requests(self.description, self.plan, unit, self.head)

    def upcoming(self) -> list[tuple[Request, ...]]:
        """What its units need, this step and the next one; of units far off, what every step needs."""
        return self._for_head("upcoming", self._upcoming)

    def _upcoming(self) -> list[tuple[Request, ...]]:
        head = self.head
        near = upcoming(self.description, self.plan, head, _NEAR)
        if head.stage != "step" or head.step == 0:
            return near
        far = self._cycle + (self._cycle if head.step + 1 < self.description.steps else [])
        return near + far[head.position + len(near) :]

    @cached_property
    def _cycle(self) -> list[tuple[Request, ...]]:
        """What the units of a step need, as far as it is the same in every one, and what they make.

        The optimizer's state is there after the first step; what a backward needs of what its forward left is
        taken to be all of it.
        """
        home, found = homes(self.description, self.plan), []
        head, counts = Head(job=self.name, stage="step"), range(len(self.description.micro_batches))
        for phase, shard in self._order:
            if phase == "update":
                keys = [key for pair in home.update_keys(shard) for key in pair if key is not None]
                keys += [f"{self.name}/grads/{shard}"] if self.description.clips else []
                found.append(tuple(Request(key, "change") for key in keys))
                continue
            keys = [*home.parameter_keys(shard), *home.buffer_keys(shard)]
            keys += [f"{self.name}/value/{p.name}/{m}" for p in home.reads[shard] for m in counts]
            if phase == "backward":
                keys += [f"{self.name}/{kind}/{shard}/{m}" for kind in ("saved", "before") for m in counts]
            made = scratch_for(self.description, self.plan, Unit(self.name, 0, phase, shard), head)
            read = (Request(key, "read") for key in keys)
            found.append((*read, *(Request(segment.key, "write", segment.nbytes) for segment in made)))
        return found

    def _for_head(self, name: str, make: Callable[[], Result]) -> Result:
        """What follows from the head, made once for each: the loop asks for it whenever anything happens."""
        if self._made_for is not self.head:
            self._made_for, self._made = self.head, {}
        if name not in self._made:
            self._made[name] = make()
        return cast(Result, self._made[name])

    @property
    def rests(self) -> bool:
        """Between two steps: it can be committed."""
        return self.head.rests and self.head.stage in ("step", "done")

    @property
    def stays(self) -> bool:
        """Not to be chosen for now: it is paused, and holds nothing on a device that others may wait for."""
        return self.paused and self.rests

    @property
    def updates_next(self) -> bool:
        """Whether an update follows the unit at hand: gradients wait for it in the device's memory."""
        if self.head.stage != "step" or self.description.clips:
            return False
        return [phase for phase, _ in self._order[self.head.position + 1 :]][:1] == ["update"]

    @property
    def tied(self) -> int | None:
        """The device that holds activations or gradients which the rest of the step needs."""
        if self.head.stage != "step":
            return None
        held: tuple[Phase, ...] = ("backward",) if self.description.clips else ("backward", "update")
        for phase, shard in self._order[self.head.position :]:
            if phase in held and shard in self.head.devices:
                return self.head.devices[shard]
        return None

    @cached_property
    def _order(self) -> tuple[tuple[Phase, int], ...]:
        return step_order(self.description, self.plan)

    @property
    def note(self) -> dict[str, Any]:
        """What a commit must say of it, so that it can be taken up again."""
        note = {"job": self.job.to_json(), "plan": self.plan.to_json(), "head": self.head.to_json()}
        return note if self.disk is None else {**note, "disk": asdict(self.disk)}

    def fail(self, error: BaseException) -> None:
        """Note why it cannot go on."""
        notes = getattr(error, "__notes__", [])
        if isinstance(error, PlaitError) or not notes:
            self.error = str(error) or type(error).__name__
        else:
            self.error = "\n".join([traceback.format_exception_only(error)[0].strip(), *notes])

    def row(self, where: str | None = None) -> Row:
        """As progress shows it."""
        losses = self.head.losses
        return Row(
            name=self.name,
            state=self.end or where or self.state,
            step=len(losses),
            steps=self.description.steps,
            loss=losses[-1] if losses else None,
            seconds_left=self.remaining_seconds,
        )

    def took(self, unit: Unit, seconds: float) -> None:
        """A unit's time was measured; each counts half of all that came before it."""
        place = (unit.phase, unit.shard)
        known = self.unit_seconds.get(place, seconds)
        self.unit_seconds[place] = (known + seconds) / 2
        self._lefts = None

    def _left(self) -> list[float]:
        """Computing that is left of a step, from each of its units on, and at its end."""
        if self._lefts is None:
            taken = [self.unit_seconds.get(place, 0.0) for place in reversed(self._order)]
            self._lefts = [*reversed(list(accumulate(taken))), 0.0]
            self._longest = max(taken, default=0.0)
        return self._lefts

    @property
    def step_seconds(self) -> float:
        """Computing of a whole step."""
        return self._left()[0]

    @property
    def longest_seconds(self) -> float:
        """Of its units."""
        self._left()
        return self._longest

    @property
    def next_seconds(self) -> float:
        """Of the next unit, or the one under way."""
        if self.head.stage != "step":
            return 0.0
        left, position = self._left(), self.head.position
        return left[position] - left[position + 1]

    @property
    def remaining_seconds(self) -> float:
        """Computing that is left, of the present step and of those to come."""
        steps = self.description.steps - self.head.step
        if self.head.stage != "step":
            return steps * self.step_seconds
        return (steps - 1) * self.step_seconds + self._left()[self.head.position]
