"""The cheapest choice of one option a layer within an error budget: exact, by frontiers of partial choices.

This is the multiple-choice knapsack problem, solved by dynamic programming over the layers with lists of
undominated states (Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", 1969),
cut down by a Lagrangian bound (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979). L-GreCo
(Alimohammadi et al., 2022) chooses compression parameters with a dynamic program over a grid of error
values; here a state keeps its own error, so nothing is lost to the grid unless it has to be thinned.

1. A state after some layers is (error so far, time at which the wire falls idle). Sending the next layer
   takes it to (error + e, max(idle, ready) + c). With every layer ready at 0 the time is a plain sum, so
   the same code minimises bytes.
2. A state is dropped when another has no more of both, when its error passes the budget, or when even
   the relaxed rest would cost more than a choice that is already known. The relaxation prices error at
   ``rate`` instead of limiting it, so its value is a sum of minima, one a layer.
3. Where more than ``states`` remain, their range of errors is cut into as many cells, and each keeps its
   cheapest state. What that may have lost is measured, not guessed: another sweep gives each cell the least
   error and the least cost in it, which no real choice can beat; the two results enclose the optimum.

All errors and costs are whole numbers, and floating point enters the bound alone, in a fixed order of
additions: every machine finds the same choice. Of equally cheap choices the one with the least error wins,
then the one whose options come first.

Complexity: layers x states x options, and the sorting of that; states are a few hundred in practice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Real = NDArray[np.float64]

LARGEST = 2**60
"""Budget, costs of a whole choice and ready times stay at or below this, so that no sum overflows."""

_SCOUTS = 128
"""States of the first, rough sweep, whose result lets the second one drop far more."""

_ZOOMS = 10
"""Scans for the best rate; each is eight times finer than the one before."""

_SLACK = 1e-9
"""Bounds are floating point: what they put a hair above a known choice may be as good as that."""


class Options(NamedTuple):
    """What one layer can be given, and when it can be sent; errors are at most the budget."""

    errors: Whole
    costs: Whole
    ready: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cheapest choice found."""

    options: tuple[int, ...]
    """By layer, the place of the option."""
    cost: int
    """When the wire falls idle after the last layer."""
    least: int
    """No choice within the budget costs less; equal to ``cost`` where this one is optimal."""


def cheapest(layers: Sequence[Options], budget: int, *, known: Sequence[int], states: int) -> Choice:
    """The cheapest choice within ``budget``; ``known`` is one that is taken for granted, and may be it."""
    found = [_Found(_end(layers, known), _error(layers, known), tuple(known))]
    table = _Table.of(layers)
    rate, rough = _best_rate(table, budget)
    relaxed = table.relaxed(rate, budget)
    order = list(range(len(layers)))
    if len({layer.ready for layer in layers}) == 1:
        # The order is free: layers with one clear option first, since they add no states.
        clear = np.sort(relaxed.least, axis=1)[:, min(1, relaxed.least.shape[1] - 1)]
        order = np.argsort(-clear, kind="stable").tolist()
        relaxed = _Table.of([layers[place] for place in order]).relaxed(rate, budget)
    sent = [layers[place] for place in order]
    limit = min(found[0].cost, rough * (1 + _SLACK))
    for room in sorted({min(_SCOUTS, states), states}):
        sweep = _sweep(sent, relaxed, limit, room, _cheapest_of_cell)
        if sweep.steps:
            placed = dict(zip(order, _trace(sweep.steps), strict=True))
            found.append(_Found(sweep.cost, sweep.error, tuple(placed[place] for place in sorted(order))))
            limit = min(limit, sweep.cost)
        if not sweep.thinned:
            break
    best = min(found)
    least = best.cost
    if sweep.thinned:
        ideal = _sweep(sent, relaxed, limit, states, _best_of_cell)
        bound = math.ceil(relaxed.value() * (1 - _SLACK))
        least = min(best.cost, max(ideal.cost, bound) if ideal.steps else best.cost)
    return Choice(options=best.options, cost=best.cost, least=least)


class _Found(NamedTuple):
    """A choice; they compare as they are preferred."""

    cost: int
    error: int
    options: tuple[int, ...]


def _end(layers: Sequence[Options], options: Sequence[int]) -> int:
    """When the wire falls idle."""
    idle = 0
    for layer, option in zip(layers, options, strict=True):
        idle = max(idle, layer.ready) + int(layer.costs[option])
    return idle


def _error(layers: Sequence[Options], options: Sequence[int]) -> int:
    return sum(int(layer.errors[option]) for layer, option in zip(layers, options, strict=True))


# --- the relaxation -----------------------------------------------------------------------------------


class _Relaxed(NamedTuple):
    """The layers where error is not limited but costs ``rate`` each."""

    rate: float
    budget: int
    rest: Real
    """By number of layers done: the relaxed cost of the others, sent back to back."""
    floor: Real
    """By number of layers done: the relaxed end even of an idle wire, because layers get ready late."""
    least: Real
    """By layer and option: what a whole choice with that option costs at least."""

    def value(self) -> float:
        """What any choice within the budget costs at least."""
        return float(self.floor[0]) - self.rate * self.budget

    def bound(self, done: int, error: Whole, cost: Whole) -> Real:
        """What a whole choice costs at least, from each of these states after ``done`` layers."""
        end = np.maximum(cost + self.rest[done], self.floor[done])
        return np.asarray(end - self.rate * (self.budget - error), dtype=np.float64)


class _Table(NamedTuple):
    """The options of all layers, in rows padded with options that are never taken."""

    errors: Real
    costs: Real
    ready: Real

    @classmethod
    def of(cls, layers: Sequence[Options]) -> _Table:
        shape = len(layers), max(len(layer.errors) for layer in layers)
        errors, costs = np.zeros(shape), np.full(shape, np.inf)
        for row, layer in enumerate(layers):
            errors[row, : len(layer.errors)], costs[row, : len(layer.costs)] = layer.errors, layer.costs
        return cls(errors, costs, np.array([layer.ready for layer in layers], dtype=np.float64))

    def relaxed(self, rate: float, budget: int) -> _Relaxed:
        value = self.costs + rate * self.errors
        best = value.min(axis=1)
        rest = _from_each(best)
        late = self.ready + rest
        # Sent back to back from the worst layer so far, each layer adds its own to the end.
        worst = np.maximum.accumulate(late) - rate * budget
        least = worst[:, None] + (value - best[:, None])
        floor = np.append(np.maximum.accumulate(late[::-1])[::-1], 0.0)
        return _Relaxed(rate, budget, np.append(rest, 0.0), floor, least)

    def scan(self, rates: Real, budget: int) -> tuple[Real, Real]:
        """By rate: the bound, and the cost of the relaxation's own choice (infinite beyond the budget)."""
        value = self.costs + rates[:, None, None] * self.errors
        option = value.argmin(axis=2)[:, :, None]
        best, error, cost = (
            np.take_along_axis(np.broadcast_to(numbers, value.shape), option, axis=2)[:, :, 0]
            for numbers in (value, self.errors, self.costs)
        )
        bound = (self.ready + _from_each(best)).max(axis=1) - rates * budget
        end = (self.ready + _from_each(cost)).max(axis=1)
        return bound, np.where(_from_each(error)[:, 0] <= budget * (1 - _SLACK), end, np.inf)


def _from_each(values: Real) -> Real:
    """The sum of each value in a row and all after it."""
    # A running sum adds in the same order on every machine; numpy's sum does not.
    return np.asarray(np.cumsum(values[..., ::-1], axis=-1)[..., ::-1])


def _best_rate(table: _Table, budget: int) -> tuple[float, float]:
    """The rate with the highest bound, and the cost of the cheapest relaxed choice that keeps the budget.

    Any rate is valid. Powers of two, and then ever finer steps around the best, are enough: the bound is
    piecewise linear in the rate, and concave where all layers are ready at once.
    """
    rates = np.ldexp(1.0, np.arange(-64, 64))
    rough = math.inf
    for _ in range(_ZOOMS):
        bound, end = table.scan(rates, budget)
        best = int(bound.argmax())
        rough = min(rough, float(end.min()))
        low, high = rates[max(best - 1, 0)], rates[min(best + 1, len(rates) - 1)]
        found, rates = float(rates[best]), low + (high - low) / 16 * np.arange(17)
    return found, rough


# --- the dynamic program ------------------------------------------------------------------------------

Thin = Callable[[Whole, Whole, Whole], tuple[Whole, Whole, Whole]]
"""From cells, errors and costs of a frontier: places that stay, and their errors and costs."""


class _Sweep(NamedTuple):
    cost: int
    error: int
    """Of the cheapest state."""
    steps: list[tuple[Whole, Whole]]
    """By layer: each state's predecessor and option; the last state of all is the cheapest.
    Empty where every state was dropped."""
    thinned: bool


def _sweep(layers: Sequence[Options], relaxed: _Relaxed, known: float, states: int, thin: Thin) -> _Sweep:
    error, cost = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    steps: list[tuple[Whole, Whole]] = []
    thinned = False
    limit = known + _SLACK * (known + relaxed.rate * relaxed.budget)
    for done, layer in enumerate(layers, start=1):
        options = np.flatnonzero(relaxed.least[done - 1, : len(layer.errors)] <= limit)
        before = len(error)
        # One row an option: each is in order of error, and a few ordered rows are quickly merged.
        error = np.add.outer(layer.errors[options], error).ravel()
        cost = np.add.outer(layer.costs[options], np.maximum(cost, layer.ready)).ravel()
        place = np.flatnonzero((error <= relaxed.budget) & (relaxed.bound(done, error, cost) <= limit))
        place = place[np.argsort(error[place], kind="stable")]
        place = place[_falls(cost[place])]
        error, cost = error[place], cost[place]
        if len(place) > states:
            thinned = True
            above = error - error[0]
            stay, error, cost = thin(above // (above[-1] // states + 1), error, cost)
            place = place[stay]
        if not len(place):
            return _Sweep(0, 0, [], thinned)
        steps.append((place % before, options[place // before]))
    return _Sweep(int(cost[-1]), int(error[-1]), steps, thinned)


def _falls(cost: Whole) -> NDArray[np.bool_]:
    """Which of states in order of error cost less than all before them; the others are dominated."""
    less = np.ones(len(cost), dtype=np.bool_)
    less[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    return less


def _cheapest_of_cell(cell: Whole, error: Whole, cost: Whole) -> tuple[Whole, Whole, Whole]:
    stay = np.flatnonzero(np.append(cell[1:] != cell[:-1], True))
    return stay, error[stay], cost[stay]


def _best_of_cell(cell: Whole, error: Whole, cost: Whole) -> tuple[Whole, Whole, Whole]:
    stay, _, cost = _cheapest_of_cell(cell, error, cost)
    return stay, error[np.append(0, stay[:-1] + 1)], cost


def _trace(steps: Sequence[tuple[Whole, Whole]]) -> tuple[int, ...]:
    """The options that led to the last state."""
    options: list[int] = []
    state = -1
    for before, option in reversed(steps):
        options.append(int(option[state]))
        state = int(before[state])
    return tuple(reversed(options))
