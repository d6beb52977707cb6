"""A job that a device works for: its chain, data and optimizer, and what waits between its units."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import Node

from plait.chain import Chain
from plait.data import Batches, share
from plait.determinism import generator_state, seed_micro_batch
from plait.evaluation import Evaluator
from plait.job import Job
from plait.objective import Objective
from plait.spill.describe import Traced
from plait.spill.description import Description
from plait.spill.homes import Homes, Plan, homes
from plait.spill.update import Updater
from plait.visit import Visit


@dataclass(frozen=True)
class Kept:
    """A forward that waits for its backward."""

    visit: Visit
    copies: dict[str, Node]
    """Of tied parameters, made by autocast."""


@dataclass(kw_only=True)
class Adopted:
    """One job on one device."""

    job: Job
    plan: Plan
    traced: Traced
    chain: Chain
    """A block for each shard."""
    homes: Homes
    objective: Objective
    batches: Batches
    updater: Updater
    weights: Path | None
    """Where the initial weights are read from, if they are."""
    device: torch.device
    """Where units compute."""
    graphs: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """By shard and micro-batch: what waits for its backward."""
    leaves: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    """By shard and micro-batch: the parameters that gradients are left in."""
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By shard: what waits for its update."""
    _begun: int = -1
    _step: tuple[int, list[tuple[Any, float]]] | None = None
    _seeded: dict[int, torch.Tensor] = field(default_factory=dict)
    _evaluation: tuple[Evaluator, Batches] | None = None

    @classmethod
    def of(
        cls,
        job: Job,
        plan: Plan,
        description: Description,
        traced: Traced,
        batches: Batches,
        weights: Path | None,
        device: torch.device,
    ) -> Adopted:
        """Cut the job's chain, and build what its units need."""
        chain = traced.chain.cut([shard.first for shard in plan.shards[1:]])
        return cls(
            job=job,
            plan=plan,
            traced=traced,
            chain=chain,
            homes=homes(description, plan),
            objective=job.build_objective(),
            batches=batches,
            updater=Updater(job, [(n, p) for n, p in chain.named_parameters() if p.requires_grad]),
            weights=weights,
            device=device,
        )

    @property
    def description(self) -> Description:
        """What the scheduler knows of it."""
        return self.homes.description

    def micro_batches(self, step: int) -> tuple[list[tuple[Any, float]], float]:
        """The micro-batches of a step, each with its weight, and the weight of all."""
        if self._step is None or self._step[0] != step:
            rows, parts = self.batches.indices(step), len(self.description.micro_batches)
            cuts = [[rows[i] for i in share(len(rows), part, parts)] for part in range(parts)]
            fetched = [self.batches.fetch(cut, device=self.device) for cut in cuts]
            self._step = step, [(batch, self.objective.weigh(batch)) for batch in fetched]
        found = self._step[1]
        return found, sum(weight for _, weight in found)

    def seeded(self, step: int, m: int) -> torch.Tensor:
        """The random generator's state at the start of a micro-batch."""
        if m not in self._seeded:
            seed_micro_batch(self.job.seed, step, m)
            self._seeded[m] = generator_state(self.device)
        return self._seeded[m]

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward and loss."""
        return self.objective.autocast(self.device.type)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """The values that a batch becomes."""
        args, kwargs = self.objective.model_inputs(batch)
        return self.chain.start(*args, **kwargs)

    def evaluation(self) -> tuple[Evaluator, Batches]:
        """The evaluation data and metrics, built when they are first needed."""
        if self._evaluation is None:
            self._evaluation = Evaluator(self.job), self.job.build_evaluation()
        return self._evaluation

    def begin(self, step: int) -> None:
        """Work for a step: what waits for another one, which was left out or given up, waits in vain."""
        if step != self._begun:
            self._begun, self._step = step, None
            self._seeded.clear()
            self.graphs.clear()
            self.leaves.clear()
            self.gradients.clear()

    def output_names(self) -> Sequence[str]:
        """The values that make up the output."""
        return self.chain.live(len(self.chain))
