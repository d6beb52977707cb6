"""Where the values of trials come from: a grid, chance, or Optuna's samplers.

A sampler is asked for the values of a trial by its number, and told what came of it. The grid and chance
need nothing but a seed, so any trial can be made again; Optuna (the extra ``tune``) learns from what it is
told.
"""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any, Literal, Protocol

from plait.errors import UsageError
from plait.extras import install
from plait.spill.space import Choice, Domain, Real, Space


class Sampler(Protocol):
    """A source of trials."""

    def ask(self, number: int) -> dict[str, Any] | None:
        """The values of a trial; None where there are no more."""

    def tell(self, number: int, step: int, value: float | None, *, finished: bool) -> None:
        """What a trial came to, once: at its end, or where it was halted; None where it failed."""


class Grid:
    """Every combination of the values, the last name changing fastest."""

    def __init__(self, space: Space) -> None:
        self._names = tuple(space)
        self._rows = list(itertools.product(*(domain.grid() for domain in space.values())))

    def __len__(self) -> int:
        return len(self._rows)

    def ask(self, number: int) -> dict[str, Any] | None:
        """The combination of that number."""
        if number >= len(self._rows):
            return None
        return dict(zip(self._names, self._rows[number], strict=True))

    def tell(self, number: int, step: int, value: float | None, *, finished: bool) -> None:
        """Nothing is learned."""


class Chance:
    """Each trial drawn by itself, from the seed and its number."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self._space, self._seed = space, seed

    def ask(self, number: int) -> dict[str, Any]:
        """Drawn values."""
        source = random.Random(f"{self._seed}/{number}")
        return {name: domain.sample(source) for name, domain in self._space.items()}

    def tell(self, number: int, step: int, value: float | None, *, finished: bool) -> None:
        """Nothing is learned."""


class Optuna:
    """Optuna's samplers, asked and told; deterministic for a seed and an order of calls.

    A trial that is halted is told as pruned, at the step where it was; if it goes on later, Optuna does not
    hear of it again.
    """

    def __init__(
        self, space: Space, *, seed: int = 0, sampler: Literal["tpe", "random", "grid"] | Any = "tpe"
    ) -> None:
        try:
            optuna = importlib.import_module("optuna")
        except ImportError:
            raise UsageError(
                "Optuna is not installed",
                setting="sampler",
                works=f"{install('tune')}; or Chance(space)",
            ) from None
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        made = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed),
            "random": lambda: optuna.samplers.RandomSampler(seed=seed),
            "grid": lambda: optuna.samplers.RandomSampler(seed=seed),
        }
        if isinstance(sampler, str) and sampler not in made:
            raise UsageError(f"there is no sampler {sampler!r}", setting="sampler", works=", ".join(made))
        chosen = made[sampler]() if isinstance(sampler, str) else sampler
        self._study = optuna.create_study(sampler=chosen, direction="minimize")
        self._distributions = {name: self._distribution(domain) for name, domain in space.items()}
        self._trials: dict[int, Any] = {}
        # Optuna's own grid ends its loop, which there is none of here; so it is handed the rows of ours.
        self._grid = Grid(space) if sampler == "grid" else None

    def ask(self, number: int) -> dict[str, Any] | None:
        """Values that Optuna proposes."""
        if self._grid is not None:
            row = self._grid.ask(number)
            if row is None:
                return None
            self._study.enqueue_trial(row)
        self._trials[number] = self._study.ask(self._distributions)
        return dict(self._trials[number].params)

    def tell(self, number: int, step: int, value: float | None, *, finished: bool) -> None:
        """Pass it on."""
        trial, states = self._trials.pop(number, None), self._optuna.trial.TrialState
        if trial is None:
            return
        if value is None or value != value:  # not a number
            self._study.tell(trial, state=states.FAIL)
        elif finished:
            self._study.tell(trial, value)
        else:
            trial.report(value, step)
            self._study.tell(trial, state=states.PRUNED)

    def _distribution(self, domain: Domain) -> Any:
        kinds = self._optuna.distributions
        if isinstance(domain, Choice):
            return kinds.CategoricalDistribution(domain.values)
        kind = kinds.FloatDistribution if isinstance(domain, Real) else kinds.IntDistribution
        return kind(domain.low, domain.high, log=domain.log)
