"""Model selection: which job to try next, and which to give up, while many of them take turns.

A `Selection` derives trials from one job, hands them out, and is told how they do:

    while not selection.done:
        job = selection.next()                  # a new trial, or one that may go on; None: nothing for now
        ...                                     # some steps later
        decision = selection.report(job.name, step, value)

``pause`` keeps a trial's state on disk until it goes on (`next` gives it out again) or is given up
(`given_up` names it); ``stop`` gives it up at once. It is pure: no clock, no files, and the same reports in
the same order lead to the same trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.errors import UsageError
from plait.job import Job
from plait.spill.rules import Bracket, Rule
from plait.spill.sampling import Chance, Sampler
from plait.spill.space import Space, check_space, derive

Decision = Literal["continue", "pause", "stop"]
State = Literal["running", "paused", "finished", "stopped"]


@dataclass(kw_only=True)
class Trial:
    """One job of a selection."""

    job: Job
    number: int
    values: dict[str, object]
    """What was searched over."""
    bracket: int
    rung: int = 0
    """The rung it is on its way to, or waits on."""
    state: State = "running"
    step: int = 0
    value: float | None = None
    """The last that was reported, as it was reported."""


class Selection:
    """A search over jobs; ``rules`` come from `halving`, `asha`, `hyperband` or `no_halving`."""

    def __init__(
        self,
        job: Job,
        space: Space,
        rules: Sequence[Rule],
        *,
        sampler: Sampler | None = None,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        check_space(job, space)
        if not rules:
            raise UsageError("a selection without rules", setting="rules", works="asha(trials=9, ...)")
        ends = {rule.rungs[-1] for rule in rules}
        if len(ends) > 1 or job.steps not in (None, *ends):
            raise UsageError(
                f"the rules end at step {sorted(ends)} and the job at {job.steps}",
                setting="most_steps",
                works=str(job.steps or max(ends)),
            )
        self.job = replace(job, steps=max(ends), epochs=None)
        self.space = dict(space)
        self.trials: dict[str, Trial] = {}
        self._sampler: Sampler = Chance(space, seed=seed) if sampler is None else sampler
        self._brackets = [Bracket(rule=rule) for rule in rules]
        self._sign = -1.0 if maximize else 1.0
        self._given_up: list[str] = []

    # Handing out.

    def next(self) -> Job | None:
        """A trial that may go on, else a new one; None where there is neither for now (see `done`)."""
        trial = self._promoted() or self._new() or self._promoted()
        self._settle()
        if trial is None:
            return None
        trial.state = "running"
        return trial.job

    def _promoted(self) -> Trial | None:
        for bracket in self._brackets:
            found = bracket.promote()
            if found is not None:
                number, rung = found
                trial = next(trial for trial in self.trials.values() if trial.number == number)
                trial.rung = rung + 1
                return trial
        return None

    def _new(self) -> Trial | None:
        place = next((i for i, bracket in enumerate(self._brackets) if bracket.has_room), None)
        if place is None:
            return None
        number = len(self.trials)
        values = self._sampler.ask(number)
        if values is None:
            for bracket in self._brackets:
                bracket.closed = True
            return None
        name = f"{self.job.name}-{number}"
        trial = Trial(job=derive(self.job, name, values), number=number, values=values, bracket=place)
        self.trials[name] = trial
        self._brackets[place].begin()
        return trial

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing will."""
        runs = any(trial.state == "running" for trial in self.trials.values())
        return not runs and all(bracket.rests for bracket in self._brackets)

    def given_up(self) -> list[str]:
        """Paused trials that will not go on, each named once: their state can be dropped."""
        names, self._given_up = self._given_up, []
        return names

    # Being told.

    def report(self, name: str, step: int, value: float) -> Decision:
        """What a trial has come to after so many steps, and what is to become of it."""
        trial = self._trial(name)
        if trial.state != "running":
            return "pause" if trial.state == "paused" else "stop"
        trial.step, trial.value = step, value
        bracket = self._brackets[trial.bracket]
        if step < bracket.rule.rungs[trial.rung]:
            return "continue"
        bracket.record(trial.number, trial.rung, self._sign * value)
        if trial.rung == len(bracket.rule.rungs) - 1:
            trial.state = "finished"
            self._sampler.tell(trial.number, step, self._sign * value, finished=True)
        elif bracket.goes_on(trial.number, trial.rung):
            trial.rung += 1
        else:
            trial.state = "stopped" if trial.number in bracket.hopeless() else "paused"
            self._sampler.tell(trial.number, step, self._sign * value, finished=False)
        self._settle()
        return DECISIONS[trial.state]

    def fail(self, name: str) -> None:
        """A trial cannot go on; the others do not wait for it."""
        trial = self._trial(name)
        if trial.state in ("finished", "stopped"):
            return
        self._brackets[trial.bracket].record(trial.number, trial.rung, math.inf)
        trial.state, trial.value = "stopped", None
        self._sampler.tell(trial.number, trial.step, None, finished=False)
        self._settle()

    def _settle(self) -> None:
        """Give up what waits in vain."""
        for i, bracket in enumerate(self._brackets):
            lost = bracket.hopeless()
            for name, trial in self.trials.items():
                if trial.bracket == i and trial.state == "paused" and trial.number in lost:
                    trial.state = "stopped"
                    self._given_up.append(name)

    def _trial(self, name: str) -> Trial:
        if name not in self.trials:
            raise UsageError(
                f"there is no trial {name!r}",
                setting="name",
                works=", ".join(self.trials) or "one from next()",
            )
        return self.trials[name]

    # What came of it.

    @property
    def best(self) -> Trial | None:
        """The best of the trials that were compared furthest on; None before any was."""
        ranked = [
            (-rung_steps, values[number], number)
            for bracket in self._brackets
            for rung_steps, values in zip(bracket.rule.rungs, bracket.values, strict=True)
            for number in values
            if values[number] < math.inf
        ]
        if not ranked:
            return None
        _, _, number = min(ranked)
        return next(trial for trial in self.trials.values() if trial.number == number)


DECISIONS: dict[State, Decision] = {
    "running": "continue", "finished": "continue", "paused": "pause", "stopped": "stop"
}  # fmt: skip
"""What a trial's state means for its job."""
