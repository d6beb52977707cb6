"""When bits are chosen anew during a run, what was chosen, and how to repeat it.

A `Tuner` is pure: it is handed observations (`plait.compress.observation.measure`) and step numbers and hands
back plans; it has no clock and no network in it. Ranks that hand it the same observations get the same
plans at the same steps. A decision takes effect after its step.

    step      0 . . . . . warmup . . . . . . . . . . . . warmup + every
    observe         o o o o                     o o o o
    decide                ^                           ^

Bits do not flap. A plan aims for an error a ``margin`` below what is allowed, and is then kept until its
error, as the gradients are by then, passes what is allowed, or until another plan would save a share
``gain`` of the cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.compress.allocation import Allocation, Cost, allocate, price
from plait.compress.given import NUMBER, WHOLE, entry, expect
from plait.compress.observation import WIDTHS, LayerError, average, check_same
from plait.document import checked, read_json
from plait.errors import UsageError
from plait.units import parse_whole

FORMAT = "plait.compress.bits/1"


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How bits are adapted."""

    alpha: float = 1.0
    """The squared error allowed, as a multiple of that of ``reference_bits`` everywhere."""
    error: Literal["total", "relative"] = "total"
    """What is added up over the layers: their squared errors, or these as shares of each layer's squared
    norm, times its elements. The first is what a step of SGD feels. Adam and its like scale every gradient to
    the same size, so that under them the second says what is lost."""
    reference_bits: int = 4
    least_bits: int = 3
    """No layer gets fewer. Adam and its like scale every layer's gradient to the same size, so a layer with a
    small gradient must not be rounded away, however small its error is."""
    warmup_steps: int = 100
    """The first decision is made after this step; until then there are ``reference_bits``."""
    every_steps: int = 500
    """Steps from one decision to the next."""
    observe_steps: int = 5
    """How many steps' gradients a decision is made from: its own and those just before it."""
    margin: float = 0.05
    """The share of the allowed error that a new plan leaves unused, so that it lasts."""
    gain: float = 0.02
    """The share of the cost that a new plan must save to replace one that keeps the budget."""
    cost: Literal["bytes", "exposed"] = "bytes"
    """What is minimised: all bytes, or the time that backward does not hide, as measured, so that another run
    may decide otherwise."""

    def __post_init__(self) -> None:
        for name, works in (("alpha", "1.0"), ("margin", "0.05"), ("gain", "0.02")):
            expect(getattr(self, name), NUMBER, setting=name, works=works)
        for name, works in (("reference_bits", "4"), ("least_bits", "3")):
            expect(getattr(self, name), WHOLE, setting=name, works=works)
        if not 0 < self.alpha < float("inf"):
            raise UsageError(f"alpha is {self.alpha}", setting="alpha", works="1.0")
        if not 1 <= self.reference_bits <= 8:
            raise UsageError(f"{self.reference_bits} bits", setting="reference_bits", works="4")
        if not 1 <= self.least_bits <= self.reference_bits:
            raise UsageError(
                f"at least {self.least_bits} bits, where the error allowed is that of {self.reference_bits}",
                setting="least_bits",
                works=f"1 to {self.reference_bits}",
            )
        parse_whole(self.warmup_steps, setting="warmup_steps", least=0)
        parse_whole(self.every_steps, setting="every_steps")
        parse_whole(self.observe_steps, setting="observe_steps")
        if self.observe_steps > self.every_steps:
            raise UsageError(
                f"{self.observe_steps} steps are observed for a decision every {self.every_steps}",
                setting="observe_steps",
                works=f"1 to {self.every_steps}",
            )
        if self.error not in ("total", "relative"):
            raise UsageError(f"an error that is {self.error!r}", setting="error", works="total, relative")
        if self.cost not in ("bytes", "exposed"):
            raise UsageError(f"a cost of {self.cost!r}", setting="cost", works="bytes, exposed")
        for field in ("margin", "gain"):
            if not 0 <= getattr(self, field) < 1:
                raise UsageError(f"{field} is {getattr(self, field)}", setting=field, works="0.02")

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths to choose from."""
        return tuple(range(self.least_bits, WIDTHS[-1] + 1))

    def decides(self, step: int) -> bool:
        """Whether a decision is made after this step."""
        return self._steps_to_decision(step) == 0

    def observes(self, step: int) -> bool:
        """Whether the next decision is made from this step's gradients too."""
        return self._steps_to_decision(step) < self.observe_steps

    def _steps_to_decision(self, step: int) -> int:
        parse_whole(step, setting="step", least=0)
        ahead = self.warmup_steps - step
        return ahead if ahead >= 0 else ahead % self.every_steps


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided after a step: the plan in force from then on, by the gradients of then."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    step: int
    changed: bool
    """Whether any layer's bits changed."""
    why: str
    plan: Allocation


@dataclass(frozen=True, kw_only=True)
class Log:
    """All decisions of a run, in order."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    decisions: tuple[Decision, ...] = ()

    def __post_init__(self) -> None:
        steps = [decision.step for decision in self.decisions]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise UsageError(
                f"decisions after the steps {steps}",
                setting="decisions.step",
                works="steps in ascending order",
            )

    def plan_at(self, step: int) -> Allocation | None:
        """The plan in force during a step; None before the first decision has taken effect."""
        before = [decision.plan for decision in self.decisions if decision.step < step]
        return before[-1] if before else None

    def to_json(self) -> dict[str, Any]:
        """The log as plain data."""
        rows = [{**asdict(decision), "plan": _plain(decision.plan)} for decision in self.decisions]
        return {"format": FORMAT, "decisions": rows}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "log") -> Log:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        return checked(cls, data, format=FORMAT, source=source)

    def save(self, path: str | Path) -> None:
        """Write the log as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Log:
        """Read a log; an error names the file and the field."""
        return cls.from_json(read_json(path), source=str(path))


def _plain(plan: Allocation) -> dict[str, Any]:
    return {key: value for key, value in plan.to_json().items() if key != "format"}


class Tuner:
    """Decides on bits as a run goes on."""

    def __init__(self, config: Adaptation | None = None) -> None:
        self.config = config or Adaptation()
        self.log = Log()
        self._seen: list[tuple[LayerError, ...]] = []

    @property
    def plan(self) -> Allocation | None:
        """The plan in force; None until the first decision."""
        return self.log.decisions[-1].plan if self.log.decisions else None

    def observes(self, step: int) -> bool:
        """Whether this step's gradients are to be measured and handed to ``observe``."""
        return self.config.observes(step)

    def observe(self, layers: Sequence[LayerError]) -> None:
        """Take in one step's gradients: the same layers in the same order every time."""
        if self._seen:
            check_same(self._seen[0], layers)
        self._seen.append(tuple(layers))

    def decide(self, step: int, *, cost: Cost = "bytes") -> Allocation | None:
        """The new plan where the bits change after this step, else None."""
        if not self.config.decides(step):
            return None
        if not self._seen:
            raise UsageError(
                f"no gradient was observed before the decision after step {step}",
                setting="observe_steps",
                works="observe(...) at every step for which observes(step) holds",
            )
        layers = average(self._seen)
        if self.config.error == "relative":
            layers = tuple(layer.relative for layer in layers)
        decision = self._decide(step, layers, cost)
        self._seen.clear()
        self.log = Log(decisions=(*self.log.decisions, decision))
        return decision.plan if decision.changed else None

    def _decide(self, step: int, layers: tuple[LayerError, ...], cost: Cost) -> Decision:
        alpha, reference_bits = self.config.alpha, self.config.reference_bits
        aim = allocate(layers, alpha * (1 - self.config.margin), reference_bits=reference_bits, cost=cost)
        fresh = price(layers, aim.bits, alpha, reference_bits=reference_bits, cost=cost)
        if self.plan is None:
            return Decision(step=step, changed=True, why="the first decision", plan=fresh)
        kept = price(layers, self.plan.bits, alpha, reference_bits=reference_bits, cost=cost)
        saving = 1 - fresh.cost / kept.cost if kept.cost else 0.0
        plan, why = fresh, f"saves {saving:.1%}"
        if not kept.holds:
            allowed = alpha * kept.reference_error
            why = f"the error of the plan before is {kept.squared_error:.3g}, of {allowed:.3g} allowed"
        elif saving <= 0 or saving < self.config.gain:
            plan, why = kept, f"kept, since another saves {max(0.0, saving):.1%}"
        return Decision(step=step, changed=plan.bits != self.plan.bits, why=why, plan=plan)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain data."""
        return {"log": self.log.to_json(), "seen": [[asdict(layer) for layer in seen] for seen in self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.log, self._seen = Tuner.read_state(state)

    @staticmethod
    def read_state(state: Mapping[str, Any]) -> tuple[Log, list[tuple[LayerError, ...]]]:
        """The decisions and the observations in a checkpoint, if it is whole."""
        log = Log.from_json(entry(state, "log", Mapping), source="state")
        seen = {"format": FORMAT, "observations": entry(state, "seen", list, tuple)}
        observations = checked(_Seen, seen, format=FORMAT, source="state").observations
        for other in observations[1:]:
            check_same(observations[0], other)
        return log, list(observations)


@dataclass(frozen=True)
class _Seen:
    """What a checkpoint has of the steps since the last decision."""

    observations: tuple[tuple[LayerError, ...], ...]


class Replay:
    """Repeats the decisions of a log; stands where a `Tuner` would."""

    def __init__(self, log: Log | str | Path) -> None:
        self.log = log if isinstance(log, Log) else Log.load(log)
        self._changes = {decision.step: decision.plan for decision in self.log.decisions if decision.changed}

    def observes(self, step: int) -> bool:
        """Never: there is nothing to decide."""
        return False

    def observe(self, layers: Sequence[LayerError]) -> None:
        """Gradients change nothing here."""

    def decide(self, step: int, *, cost: Cost = "bytes") -> Allocation | None:
        """The plan that the log has after this step, where bits changed, else None."""
        return self._changes.get(step)
