"""Whether an order comes to an end, and what a stage holds on the way, whatever the network does.

Wires are first in, first out, and a sender never blocks. So an order that can go on at all goes on whatever
the timing, and playing it once without any timing decides whether it ends.

What a stage holds is counted for the worst timing: a neighbour that is as far ahead, or as far behind, as the
order lets it be while this stage has done so many forwards and backwards. With the lists of kFkB these are
exact; a capped stage may be in any state its cap allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plait.errors import UsageError
from plait.pipeline.orders import Kind, Order


class Held(NamedTuple):
    """How many tensors a stage holds, by what they are for."""

    in_flight: int
    """Micro-batches gone forward and not backward: their activations, among them input and output."""
    inputs: int
    """Receives posted for inputs, or inputs that wait for their forward."""
    gradients: int
    """Receives posted for gradients, or gradients that wait for their backward."""
    outputs_sent: int
    """Outputs that the next stage may not have received yet: some of those that ``in_flight`` counts."""
    gradients_sent: int
    """Gradients that the stage before may not have received yet."""


def check(order: Order) -> None:
    """Refuse an order whose stages would wait for each other for ever."""
    done = [(0, 0)] * order.stages
    moved = True
    while moved:
        moved = False
        for stage in range(order.stages):
            while (action := order.next(stage, *done[stage], ready_kinds(order, stage, done))) is not None:
                forwards, backwards = done[stage]
                done[stage] = (forwards + 1, backwards) if action.kind == "F" else (forwards, backwards + 1)
                moved = True
    stuck = [stage for stage in range(order.stages) if done[stage] != (order.micro_batches,) * 2]
    if stuck:
        waits = [f"stage {stage} for the input of {_wanted(order, stage, *done[stage])}" for stage in stuck]
        what = f"the stages wait for each other: {'; '.join(waits)}"
        raise UsageError(what, setting="order", works="plait.pipeline.orders.kfkb(stages, micro_batches, k)")


def ready_kinds(order: Order, stage: int, done: list[tuple[int, int]]) -> set[Kind]:
    """The kinds whose next input a stage has, where ``done`` are forwards and backwards by stage."""
    forwards, backwards = done[stage]
    ready: set[Kind] = set()
    if stage == 0 or done[stage - 1][0] > forwards:
        ready.add("F")
    if (stage == order.stages - 1 and forwards > backwards) or (
        stage < order.stages - 1 and done[stage + 1][1] > backwards
    ):
        ready.add("B")
    return ready


def states(order: Order, stage: int) -> Iterator[tuple[int, int]]:
    """Every (forwards, backwards) that a stage can have done."""
    if order.steps is not None:
        forwards = backwards = 0
        yield forwards, backwards
        for kind in order.steps[stage]:
            forwards, backwards = (forwards + 1, backwards) if kind == "F" else (forwards, backwards + 1)
            yield forwards, backwards
    else:
        for forwards in range(order.micro_batches + 1):
            for backwards in range(max(0, forwards - order.in_flight(stage)), forwards + 1):
                yield forwards, backwards


def held(order: Order, stage: int, forwards: int, backwards: int) -> Held:
    """What a stage holds, at most, in a state."""
    inputs = gradients = outputs_sent = gradients_sent = 0
    if stage > 0:
        inputs = order.inputs_ahead(stage, backwards) - forwards
        gradients_sent = backwards - order.least_backwards(stage - 1, forwards)
    if stage < order.stages - 1:
        gradients = order.gradients_ahead(stage, forwards) - backwards
        outputs_sent = forwards - order.least_forwards(stage + 1, backwards)
    return Held(forwards - backwards, inputs, gradients, outputs_sent, gradients_sent)


def peaks(order: Order, stage: int) -> Held:
    """The most of each that a stage ever holds; not all at the same time."""
    return Held(
        *(max(counts) for counts in zip(*(held(order, stage, *s) for s in states(order, stage)), strict=True))
    )


def _wanted(order: Order, stage: int, forwards: int, backwards: int) -> str:
    return " or ".join(
        f"{kind}{forwards if kind == 'F' else backwards}"
        for kind in order.choices(stage, forwards, backwards)
    )
