"""Schedules that are given row numbers, and fetch the micro-batches themselves.

A job's batch is whatever its ``collate`` makes of some rows, and need not come apart again by cutting
tensors. So what is cut is the list of rows, and each micro-batch is fetched as :mod:`plait.reference` fetches
it: by the first stage for its inputs, and by the last for the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait import losses
from plait.data import Batches
from plait.objective import Objective
from plait.pipeline.adaptive import AdaptiveSchedule
from plait.pipeline.batch import Batch
from plait.pipeline.schedule import ScheduleKFKB


class Feed:
    """The micro-batches of the step under way, by their rows; each is fetched once."""

    def __init__(self, batches: Batches, objective: Objective, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self.objective = objective
        self._fetched: dict[tuple[int, ...], Any] = {}

    def clear(self) -> None:
        """Forget the last step's."""
        self._fetched.clear()

    def batch(self, rows: torch.Tensor) -> Any:
        """The micro-batch of some rows."""
        key = tuple(rows.tolist())
        if key not in self._fetched:
            self._fetched[key] = self._batches.fetch(key, device=self._device)
        return self._fetched[key]

    def inputs(self, rows: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with for a micro-batch."""
        return self.objective.model_inputs(self.batch(rows))

    def weigh(self, rows: torch.Tensor) -> float:
        """What a micro-batch counts for."""
        return self.objective.weigh(self.batch(rows))

    def loss(self, output: Any, rows: torch.Tensor) -> torch.Tensor:
        """The mean of a micro-batch; zero, with gradients of zero, where nothing in it counts."""
        if self.weigh(rows) == 0:
            return losses.nothing(output)
        return self.objective.mean(output, self.batch(rows))


class FedSchedule(ScheduleKFKB):
    """Runs an order on micro-batches of a feed: ``step(rows)`` and ``step(target=rows)``."""

    feed: Feed
    before: Callable[[int], object] | None = None
    """Called with the number of each micro-batch before its forward pass."""

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        pieces, keywords = super()._cut(args, kwargs)
        if not self._stage.is_first:
            return pieces, keywords
        found = [self.feed.inputs(rows) for (rows,) in pieces]
        return [args for args, _ in found], [kwargs for _, kwargs in found]

    def _compute_forward(self, batch: Batch, number: int) -> None:
        if self.before is not None:
            self.before(number)
        with self.feed.objective.autocast(self._stage.device.type):
            super()._compute_forward(batch, number)


class FedAdaptiveSchedule(FedSchedule, AdaptiveSchedule):
    """The same, with the order that is best for the network as it is now."""
