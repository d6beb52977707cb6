"""Which trials go on: successive halving, its asynchronous form, and Hyperband; pure.

All trials run for a few steps, the best 1/eta of them for eta times as many, and so on: most of the work goes
into what looks best, and little into the rest.

- Successive halving (K. Jamieson and A. Talwalkar, arXiv 1502.07943) waits on each *rung* until all have
  come.
- ASHA (L. Li et al., "A system for massively parallel hyperparameter tuning", arXiv 1810.05934) does not: a
  trial goes on as soon as it is among the best 1/eta of those that have come so far, so no device waits.
- Hyperband (L. Li et al., arXiv 1603.06560) runs several brackets, from many short trials to few long ones,
  for it is not known how soon a good trial shows.

| papers | here |
| --- | --- |
| R, r, eta | ``most_steps``, ``least_steps``, ``eta`` |
| rung k, its resource r eta^k | ``Rule.rungs[k]`` |
| n, the trials of a bracket | ``Rule.trials`` |
| top_k(rung, size / eta) | `Bracket.promote` |

Where we differ: when no more trials come and nothing runs, ASHA lets the best go on even if it is not among
the best 1/eta (of two trials, with eta 3, none would be), so that some trial always gets to the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One bracket: how many trials, and where they are compared."""

    rungs: tuple[int, ...]
    """Steps at which trials are compared, rising; the last is the end."""
    trials: int
    eta: int = 3
    waits: bool = True
    """Whether a rung must be complete before trials go on from it."""

    def __post_init__(self) -> None:
        if not self.rungs or any(a >= b for a, b in zip((0, *self.rungs), self.rungs, strict=False)):
            raise UsageError(f"rungs at steps {list(self.rungs)}", setting="rungs", works="(1, 3, 9)")
        if self.eta < 2:
            raise UsageError(f"1/{self.eta} of the trials would go on", setting="eta", works="3")
        if self.trials < 1:
            raise UsageError(f"a search of {self.trials} trials", setting="trials", works="9")


def halving(*, trials: int, least_steps: int, most_steps: int, eta: int = 3) -> tuple[Rule, ...]:
    """Successive halving: all trials for ``least_steps``, then ever fewer for ever longer."""
    return (Rule(rungs=rungs(least_steps, most_steps, eta), trials=trials, eta=eta),)


def asha(*, trials: int, least_steps: int, most_steps: int, eta: int = 3) -> tuple[Rule, ...]:
    """The same without waiting."""
    return (Rule(rungs=rungs(least_steps, most_steps, eta), trials=trials, eta=eta, waits=False),)


def hyperband(*, least_steps: int, most_steps: int, eta: int = 3) -> tuple[Rule, ...]:
    """Brackets of about equal work, from many trials to a few that all go to the end."""
    steps = rungs(least_steps, most_steps, eta)
    top = len(steps) - 1
    return tuple(
        Rule(rungs=steps[top - s :], trials=math.ceil((top + 1) * eta**s / (s + 1)), eta=eta)
        for s in range(top, -1, -1)
    )


def no_halving(*, trials: int, most_steps: int) -> tuple[Rule, ...]:
    """Every trial to its end."""
    return (Rule(rungs=(most_steps,), trials=trials, waits=False),)


def rungs(least_steps: int, most_steps: int, eta: int) -> tuple[int, ...]:
    """From the end down, each rung at 1/eta of the steps of the next."""
    if not 1 <= least_steps <= most_steps:
        raise UsageError(
            f"trials of {least_steps} to {most_steps} steps",
            setting="least_steps",
            works=f"1 to {most_steps}",
        )
    if eta < 2:
        raise UsageError(f"1/{eta} of the trials would go on", setting="eta", works="3")
    found = [most_steps]
    while found[0] // eta >= least_steps:
        found.insert(0, found[0] // eta)
    return tuple(found)


@dataclass(kw_only=True)
class Bracket:
    """Trials of one rule on their way; values are so that lower is better."""

    rule: Rule
    expected: int = 0
    """Trials that have begun."""
    closed: bool = False
    """No more trials begin."""
    values: list[dict[int, float]] = field(default_factory=list)
    """By rung: what the trials had when they came there."""
    promoted: list[set[int]] = field(default_factory=list)
    """By rung: the trials that went on from it."""

    def __post_init__(self) -> None:
        self.values = [{} for _ in self.rule.rungs]
        self.promoted = [set() for _ in self.rule.rungs]

    @property
    def has_room(self) -> bool:
        """Whether another trial may begin."""
        return not self.closed and self.expected < self.rule.trials

    def begin(self) -> None:
        """A new trial."""
        self.expected += 1

    def record(self, trial: int, rung: int, value: float) -> None:
        """A trial has come to a rung. One that is not a number, or has failed, is the worst."""
        self.values[rung][trial] = math.inf if math.isnan(value) else value

    def promote(self) -> tuple[int, int] | None:
        """The next trial to go on, and from which rung; of those that could, the furthest."""
        for rung in reversed(range(len(self.rule.rungs) - 1)):
            waiting = self._waiting(rung)
            if waiting:
                self.promoted[rung].add(waiting[0])
                return waiting[0], rung
        return None

    def goes_on(self, trial: int, rung: int) -> bool:
        """Whether a trial on a rung may go on from it now; it then does."""
        if trial not in self._waiting(rung):
            return False
        self.promoted[rung].add(trial)
        return True

    @property
    def rests(self) -> bool:
        """Whether nothing begins or goes on until something is recorded."""
        return not self.has_room and not any(self._waiting(rung) for rung in range(len(self.rule.rungs) - 1))

    def best(self, rung: int) -> list[int]:
        """The trials that have come to a rung, the best first; of equals, the older one."""
        return sorted(self.values[rung], key=lambda trial: (self.values[rung][trial], trial))

    def hopeless(self) -> set[int]:
        """Trials on a rung that will not go on from it, whatever comes."""
        lost: set[int] = set()
        for rung in range(len(self.rule.rungs) - 1):
            lost |= {trial for trial, value in self.values[rung].items() if value == math.inf}
            if self._is_settled(rung):
                lost |= set(self.best(rung)[self._quota(rung) :])
            lost -= self.promoted[rung]
        return lost

    def _waiting(self, rung: int) -> list[int]:
        """Those on a rung who may go on from it now."""
        best = self.best(rung)[: self._quota(rung)]
        return [t for t in best if t not in self.promoted[rung] and self.values[rung][t] < math.inf]

    def _quota(self, rung: int) -> int:
        """How many of those on a rung may go on."""
        share = len(self.values[rung]) // self.rule.eta
        if self._is_settled(rung):
            return max(1, share)
        return 0 if self.rule.waits else share

    def _is_settled(self, rung: int) -> bool:
        """Whether all that will ever come to a rung have come."""
        if rung == 0:
            return not self.has_room and len(self.values[0]) == self.expected
        came, sent = len(self.values[rung]), len(self.promoted[rung - 1])
        return came == sent and self._is_settled(rung - 1) and not self._waiting(rung - 1)
