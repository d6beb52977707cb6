"""Evaluates a job through its stages, which hold the model together and none of them alone.

The evaluation data passes in rounds of a few micro-batches for each stage, so that all stages are busy and
the first need not fetch everything at once. The last stage finds the sums, and all learn what they come to.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from plait.evaluation import Evaluated, Evaluator
from plait.job import Job
from plait.pipeline.council import Council
from plait.pipeline.fed import FedSchedule, Feed

_IN_A_ROUND = 4
"""Micro-batches for each stage: a fifth of the time, at most, goes into filling and emptying the pipeline."""


def rounds(rows: int, batch: int, stages: int) -> list[tuple[range, int]]:
    """The rows of each round and the number of its micro-batches, of ``batch`` rows at most each.

    A pipeline takes as many micro-batches as it has stages, or more: a round may have more than it has rows.
    """
    most = _IN_A_ROUND * stages * batch
    found = [range(begin, min(begin + most, rows)) for begin in range(0, rows, most)]
    return [(some, max(stages, -(-len(some) // batch))) for some in found]


class Judge:
    """One rank's part in evaluating a job; all ranks make the same calls."""

    def __init__(self, job: Job, stage: Any, council: Council, *, timeout_s: float) -> None:
        batches = job.build_evaluation()
        self._stage, self._council = stage, council
        self._evaluator = Evaluator(job) if stage.is_last else None
        self._rounds = rounds(len(batches.dataset), batches.batch, stage.num_stages)
        self._schedule = FedSchedule(
            stage, stage.num_stages, self._tally, scale_grads=False, timeout_s=timeout_s
        )
        self._schedule.feed = Feed(batches, job.build_objective(), stage.device)
        self._sums: list[float] = []

    def evaluate(self, done: int) -> Evaluated:
        """The loss and the metrics over all of the evaluation data, after so many steps."""
        stage, found = self._stage, None
        self._sums = []
        stage.submod.eval()
        try:
            with torch.no_grad():
                for rows, count in self._rounds:
                    self._pass(rows, count)
        finally:
            stage.submod.train()
            self._schedule.feed.clear()
        if self._evaluator is not None:
            found = asdict(self._evaluator.result(done, self._sums))
        words = self._council.gather(found, "an evaluation")
        return Evaluated(**self._council.tell(words and words[-1], "an evaluation"))

    def _pass(self, rows: range, count: int) -> None:
        stage, schedule = self._stage, self._schedule
        spare = max(0, count - len(rows))  # then each micro-batch is of one row
        given = torch.tensor([*rows, *[rows[-1]] * spare])
        counted = torch.tensor([1] * len(rows) + [0] * spare)
        schedule.feed.clear()
        schedule.change(k=1, n_microbatches=count)
        schedule.eval(
            *([given] if stage.is_first else []),
            target=torch.stack([given, counted], 1) if stage.is_last else None,
            return_outputs=False,
        )

    def _tally(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """On the last rank, add a micro-batch's sums to those before."""
        assert self._evaluator is not None, "the last rank evaluates"
        if target[0, 1]:
            rows = range(int(target[0, 0]), int(target[-1, 0]) + 1)
            found = self._evaluator.tally(lambda *_, **__: output, rows, device=self._stage.device)
            self._sums = [a + b for a, b in zip(self._sums or [0.0] * len(found), found, strict=True)]
        return torch.zeros(())
