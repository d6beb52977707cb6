"""What a step of a job does around its model: it fetches rows before the first block, and ends with the loss.

A chain knows neither, so a profile of blocks alone makes steps of small models too short. A job's profile has
them in the blocks beside which they run: fetching in the first one's forward, the loss in the last one's
forward and backward, and what the loss keeps in what that block saves. Two strands fetch more than that:
a pipeline's last stage the same rows again, for the loss, and every rank of burst all rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from plait.block import Block
from plait.chain import Chain
from plait.data import Batches
from plait.objective import Objective
from plait.visit import Boundary, Visit

if TYPE_CHECKING:
    import torch

    from plait.job import Job


@dataclass(frozen=True, kw_only=True)
class Around:
    """A job's data and loss."""

    batches: Batches
    objective: Objective
    few: Batches
    """The rows that the chain was traced with, and no others."""
    sample: Any = None
    """A batch of them, as often as the chain's example has them; None where they do not make one."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """Those of a job."""
        batches = job.build_batches()
        known = [batches.dataset[row] for row in range(min(2, len(batches.dataset)))]
        few = replace(batches, dataset=known, batch=1)
        return cls(batches=batches, objective=job.build_objective(), few=few)

    def at(self, rows: int) -> Self:
        """With so many rows in the sample."""
        sample = None
        with suppress(Exception):  # data that makes no batch of so few, as training never asks for
            sample = self.few.fetch([row % len(self.few.dataset) for row in range(rows)])
        return replace(self, sample=sample)

    def fetch(self, rows: int, step: int) -> Any:
        """The first rows of a step, looked up as a step does; a small data set's more than once."""
        size = len(self.batches.dataset)
        found = replace(self.batches, batch=min(rows, size)).indices(step)
        return self.batches.fetch([found[row % len(found)] for row in range(rows)])

    def visit(
        self, chain: Chain, block: Block, values: Mapping[str, Any], *, shared: frozenset[str]
    ) -> Visit:
        """One of a block under the job's precision; the last block's goes on to the sample's loss."""
        device = next((parameter.device.type for parameter in block.parameters()), "cpu")
        with self.objective.autocast(device):
            if block is not chain[len(chain) - 1]:
                return Visit(block, values, shared=shared)
            return _ToLoss(block, values, shared=shared, chain=chain, around=self)


class _ToLoss(Visit):
    """A visit of the last block whose forward ends with the loss, and whose backward begins there.

    Where the loss cannot be taken, it is left out: one that wants two rows may never be asked for one, and
    what is wrong with one is for workers to tell, who know more of it.
    """

    def __init__(
        self,
        block: Block,
        values: Mapping[str, Any],
        *,
        shared: frozenset[str],
        chain: Chain,
        around: Around,
    ) -> None:
        super().__init__(block, values, shared=shared)
        self._end = Boundary()
        ends = {n: v for n, v in {**values, **self._written}.items() if n in chain.outputs}
        output = chain.finish({name: self._end.enter(name, value) for name, value in ends.items()})
        self._outputs, self._loss = chain.outputs, None
        if around.sample is None:
            return
        with suppress(Exception):
            weight = around.objective.weigh(around.sample)
            loss, _ = around.objective.share(output, around.sample, weight=weight, total=weight)
            self._loss = loss if loss.requires_grad else None

    def backward(self, gradients: dict[str, torch.Tensor], inside: Any = ()) -> None:
        if self._loss is not None:
            self._loss.backward()  # type: ignore[no-untyped-call]
            self._loss = None
            for name in self._outputs:  # of those that the loss does not use comes none
                gradients.pop(name or "", None)
            gradients.update(self._end.gradients)
        super().backward(gradients, inside)
