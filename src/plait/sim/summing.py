"""Gradients of weights that several stages of a pipeline hold, summed at the end of a step.

As :mod:`plait.pipeline.tied` does it: the first of the stages waits for the gradients of the others, sends
them the sum, and goes on when it has gone. What several groups of stages share is summed one after another.

    stage0  .. B3 wait        |optimizer
    stage1  .. B3 |   wait    |optimizer
    wire          | own | sum |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from plait.pipeline.sharing import Sharing
from plait.sim.scene import Scene


class Summing:
    """The sums of one pipeline, step by step."""

    def __init__(self, scene: Scene, shared: Sequence[Sharing], then: Callable[[int], None]) -> None:
        """``then`` is called with a stage that has all of its sums."""
        self._scene, self._shared, self._then = scene, shared, then
        self._groups = [
            [number for number, each in enumerate(shared) if stage in each.stages]
            for stage in range(len(scene.devices))
        ]
        """By stage, what it takes part in."""
        self._through = [0] * len(scene.devices)
        """By stage, how many of these it has behind it in this step."""
        self._missing = [len(each.stages) for each in shared]
        """By group, stages whose gradients the first does not have yet."""
        self._waiting = [0] * len(shared)
        """By group, stages that the sum has not reached."""

    def ready(self, stage: int) -> None:
        """A stage has found its own gradients."""
        if self._through[stage] == len(self._groups[stage]):
            self._through[stage] = 0
            self._then(stage)
            return
        number = self._groups[stage][self._through[stage]]
        first = self._shared[number].stages[0]
        if stage == first:
            self._arrived(number)
        else:
            self._send(number, stage, first, partial(self._arrived, number))

    def _arrived(self, number: int) -> None:
        """The first stage has the gradients of one more."""
        self._missing[number] -= 1
        if self._missing[number]:
            return
        first, *others = self._shared[number].stages
        self._missing[number], self._waiting[number] = 1 + len(others), len(others)
        for other in others:
            self._send(number, first, other, partial(self._reached, number, other))

    def _reached(self, number: int, stage: int) -> None:
        """A stage has the sum."""
        self._go_on(stage)
        self._waiting[number] -= 1
        if not self._waiting[number]:
            self._go_on(self._shared[number].stages[0])

    def _go_on(self, stage: int) -> None:
        self._through[stage] += 1
        self.ready(stage)

    def _send(self, number: int, source: int, target: int, then: Callable[[], None]) -> None:
        names = self._scene.names
        self._scene.network.send(
            f"shared{number}",
            names[source],
            names[target],
            self._shared[number].size_bytes,
            then,
            channel=("shared", source, target),
            track=f"shared stage{source} to stage{target}",
        )
