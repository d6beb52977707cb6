"""Small figures that all ranks must know: the loss, norms, BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from plait.burst.crew import Crew
from plait.collective import ring_bytes


class Figures:
    """Adds up and gathers what is a few bytes long."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        crew.open("control", crew.world)
        self._lane = crew.lane("control")

    def start(self, values: list[float]) -> Callable[[], list[float]]:
        """Start adding values up over all ranks, in float64; what is returned waits for the sums."""
        figures = torch.tensor(values, dtype=torch.float64, device=self._crew.device)
        if self._crew.world == 1:
            return figures.tolist
        group = self._crew.group("control", self._crew.world)
        errand = self._lane.do(lambda: dist.all_reduce(figures, group=group), "adding up the loss")
        self._crew.count(ring_bytes(figures.nbytes, self._crew.world))

        def sums() -> list[float]:
            self._crew.finish([errand], "the loss of all ranks")
            return figures.tolist()

        return sums

    def total(self, values: list[float]) -> list[float]:
        """Values added up over all ranks."""
        return self.start(values)()

    def gather(self, tensor: torch.Tensor, width: int) -> list[torch.Tensor]:
        """A tensor of each of the first ranks, for BatchNorm."""
        group = self._crew.group("norm", width)
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(width)]
        errand = self._lane.do(
            lambda: dist.all_gather(parts, mine, group=group), "joining BatchNorm's statistics"
        )
        self._crew.count((width - 1) * mine.nbytes)
        self._crew.finish([errand], "BatchNorm's statistics")
        return parts
